"""Objectives, worked out on paper: what a batch costs under every term, and what MixUp blends.

Four rows stand on two axes of the plane, the first two on one, the last two on the other. With
temperature 1 a row's similarities to the others are 1, 0 and 0.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attnknn.embed.networks import build_embedder
from attnknn.embed.objectives import Batch, HeadObjective, JointObjective, SelfMemory
from tests.tiny import JOINT, SMALL, config, tiny_splits

ROWS = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
IDS = torch.tensor([3, 0, 4, 1])
LABELS = torch.tensor([0, 0, 1, 1])
PARTNERS = torch.tensor([0, 2, 1, 3])  # labels 0, 1, 0, 1: a stranger for every row
PROBS = torch.tensor([[0.8, 0.2], [0.5, 0.5], [0.4, 0.6], [0.1, 0.9]])
ENTROPY = torch.tensor([0.1, 0.2, 0.3, 0.4])
PLAIN = {"contrastive_temperature": 1.0, "label_smoothing": 0.0}
LOG_SUM = math.log(math.e + 2)


class Attention(nn.Module):
    """An attention that has made up its mind."""

    def forward(self, neighbours, *, query):
        return SimpleNamespace(log_probs=PROBS.log(), entropy=lambda: ENTROPY)

    def penalty(self):
        return 0.0


class Memory:
    """A memory that remembers what it was asked; rows 3 and 4 stand among other labels."""

    hard = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.8])

    def neighbours_of(self, rows, ids, partners):
        self.asked = (rows, ids, partners)


def joint(**settings) -> JointObjective:
    embedder = build_embedder(config(SMALL).embedder, tiny_splits().spec)
    objective = JointObjective(config(JOINT, **PLAIN | settings), embedder, 2)
    objective.network, objective.memory = Attention(), Memory()
    return objective


def loss_of(objective, batch=None) -> torch.Tensor:
    return objective.loss(3 * ROWS, batch or Batch(IDS, LABELS))[0]


ONLY_KNN = {"knn_weight": 1.0, "contrastive_weight": 0.0, "entropy_weight": 0.0}


# ---- targets


def test_targets_of_plain_rows_are_smoothed():
    targets = Batch(IDS[:2], torch.tensor([0, 2])).targets(4, 0.1)
    expected = [[0.925, 0.025, 0.025, 0.025], [0.025, 0.025, 0.925, 0.025]]
    torch.testing.assert_close(targets, torch.tensor(expected))


def test_fault_16_targets_of_mixed_rows_hold_both_labels():
    batch = Batch(IDS[:2], torch.tensor([0, 2]), partners=torch.tensor([1, 0]), share=0.75)
    # 0.9 * 0.75 + 0.025 and 0.9 * 0.25 + 0.025
    expected = [[0.7, 0.025, 0.25, 0.025], [0.25, 0.025, 0.7, 0.025]]
    torch.testing.assert_close(batch.targets(4, 0.1), torch.tensor(expected))


# ---- the head


def test_the_head_s_loss_by_hand():
    embedder = build_embedder(config(SMALL).embedder, tiny_splits().spec)
    objective = HeadObjective(config(SMALL, label_smoothing=0.2), embedder, 2)
    objective.network = nn.Identity()  # features are logits
    loss, recorded = objective.loss(PROBS.log(), Batch(IDS, LABELS))
    of_label, of_other = torch.tensor([0.8, 0.5, 0.6, 0.9]), torch.tensor([0.2, 0.5, 0.4, 0.1])
    torch.testing.assert_close(loss, -0.9 * of_label.log() - 0.1 * of_other.log())
    assert recorded["train_accuracy"] == 1.0


def test_fault_16_the_head_is_held_to_both_labels_of_a_mixed_row():
    embedder = build_embedder(config(SMALL).embedder, tiny_splits().spec)
    objective = HeadObjective(config(SMALL, label_smoothing=0.0), embedder, 2)
    objective.network = nn.Identity()
    loss, _ = objective.loss(PROBS.log(), Batch(IDS, LABELS, PARTNERS, 0.75))
    by_hand = [(0.8, 0.8), (0.5, 0.5), (0.6, 0.4), (0.9, 0.9)]  # probability of either label
    expected = [-0.75 * math.log(own) - 0.25 * math.log(other) for own, other in by_hand]
    torch.testing.assert_close(loss, torch.tensor(expected))


# ---- the vote, the contrast, the entropy


def test_the_terms_add_up_with_their_weights():
    objective = joint(knn_weight=2.0, contrastive_weight=0.5, entropy_weight=0.1)
    knn = -torch.tensor([0.8, 0.5, 0.6, 0.9]).log()
    torch.testing.assert_close(loss_of(objective), 2 * knn + 0.5 * (LOG_SUM - 1) - 0.1 * ENTROPY)
    recorded = objective.loss(ROWS, Batch(IDS, LABELS))[1]
    assert recorded["knn"] == pytest.approx(float(knn.mean()))
    assert recorded["contrastive"] == pytest.approx(LOG_SUM - 1)
    assert recorded["entropy"] == pytest.approx(0.25)
    assert recorded["train_accuracy"] == 1.0


@pytest.mark.parametrize("hard_negatives", ["none", "keep"])
def test_the_mean_loss_has_the_attention_s_penalty_once(hard_negatives):
    objective = joint(**ONLY_KNN, hard_negatives=hard_negatives, hard_share=0.5)
    without = loss_of(objective)
    objective.network.penalty = lambda: 0.25
    torch.testing.assert_close(loss_of(objective), without + 0.25)  # hard rows count twice, or not


def test_joint_training_holds_the_shift_of_the_prototypes_down():
    embedder = build_embedder(config(SMALL).embedder, tiny_splits().spec)
    settings = config(JOINT, **ONLY_KNN, prototype_shift=True)
    objective = JointObjective(settings, embedder, 3)
    splits, shift = tiny_splits(), objective.network.posterior.shift
    rows = nn.functional.normalize(torch.randn(60, 8, generator=torch.Generator().manual_seed(0)))
    objective.memory = SelfMemory(rows.numpy(), splits.train.labels, settings, n_classes=3)
    batch = Batch(torch.arange(5), torch.from_numpy(splits.train.labels[:5]))

    def slope() -> torch.Tensor:
        shift.weight.grad = None
        objective.loss(rows[:5], batch)[0].mean().backward()
        return shift.weight.grad

    nn.init.constant_(shift.weight, 2.0)
    held = slope()
    objective.network.penalty = lambda: 0.0
    # The penalty is 1e-4 times the sum of squares: its slope at 2 is 4e-4.
    torch.testing.assert_close(held - slope(), torch.full((3, 8), 4e-4), rtol=1e-3, atol=1e-7)


def test_fault_16_mixed_rows_ask_for_neighbours_of_their_own():
    objective = joint()
    loss_of(objective, Batch(IDS, LABELS, PARTNERS, 0.75))
    rows, ids, partners = objective.memory.asked
    torch.testing.assert_close(rows, ROWS)  # of unit length
    assert torch.equal(ids, IDS) and torch.equal(partners, PARTNERS)


def test_fault_16_the_vote_is_held_to_both_labels_of_a_mixed_row():
    loss = loss_of(joint(**ONLY_KNN), Batch(IDS, LABELS, PARTNERS, 0.75))
    by_hand = [(0.8, 0.8), (0.5, 0.5), (0.6, 0.4), (0.9, 0.9)]  # probability of either label
    expected = [-0.75 * math.log(own) - 0.25 * math.log(other) for own, other in by_hand]
    torch.testing.assert_close(loss, torch.tensor(expected))


def test_fault_16_a_mixed_row_is_contrasted_under_both_labels():
    # Under its own label the positive of a row has similarity 1, under its partner's 0.
    contrast = joint()._contrast(ROWS, Batch(IDS, LABELS, PARTNERS, 0.75))
    torch.testing.assert_close(contrast, torch.full((4,), LOG_SUM - 0.75))


@pytest.mark.parametrize(("form", "positive"), [("margin", 0.5), ("temperature", 1.0)])
def test_fault_16_the_margin_form_has_a_gradient_of_its_own(form, positive):
    objective = joint(contrastive_form=form, contrastive_margin=0.5)
    rows = ROWS.clone().requires_grad_()
    contrast = objective._contrast(rows, Batch(IDS, LABELS))
    torch.testing.assert_close(
        contrast.detach(), torch.full((4,), math.log(math.exp(positive) + 2) - positive)
    )
    contrast.sum().backward()
    # Softmax share of a stranger is q, of the positive 1 - 2q. A row is pulled to its positive by
    # 2q and pushed from both strangers by q; the same again from their side.
    q = 1 / (math.exp(positive) + 2)
    torch.testing.assert_close(rows.grad[0], torch.tensor([-4 * q, 4 * q]))


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"hard_negatives": "none"}, [1.0, 1.0, 1.0, 1.0]),
        ({"hard_negatives": "keep"}, [2.0, 0.0, 2.0, 0.0]),
        ({"hard_negatives": "weight", "hard_weight": 3.0}, [1.5, 0.5, 1.5, 0.5]),
    ],
)
def test_hard_rows_are_found_by_their_ids(settings, weights):
    # Rows 3, 0, 4, 1 of the memory: the first and the third of the batch are hard.
    loss = loss_of(joint(**ONLY_KNN, **settings, hard_share=0.5))
    knn = -torch.tensor([0.8, 0.5, 0.6, 0.9]).log()
    torch.testing.assert_close(loss, torch.tensor(weights) * knn)
