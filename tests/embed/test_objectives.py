"""Objectives, worked out on paper: what a batch costs under every term, and what MixUp blends.

Four rows stand on two axes of the plane, the first two on one, the last two on the other. With
temperature 1 a row's similarities to the others are 1, 0 and 0.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from attnknn.config import RunConfig
from attnknn.core.attention import attention_entropy
from attnknn.embed.networks import build_embedder
from attnknn.embed.objectives import (
    Batch,
    HeadObjective,
    JointObjective,
    SelfMemory,
    contrastive_loss,
    hard_row_weights,
    hardness,
    soft_targets,
    vote_loss,
)
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


def test_the_vote_moves_the_embedding_and_the_attention_by_its_slope():
    """Of softmax(W x) against a smoothed target t, the slope at the logits is p - t."""

    class Reading(Attention):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))

        def forward(self, neighbours, *, query):
            log_probs = (query @ self.weight.T).log_softmax(dim=1)
            return SimpleNamespace(log_probs=log_probs, entropy=lambda: ENTROPY)

    objective = joint(**ONLY_KNN | {"knn_weight": 0.5, "label_smoothing": 0.2})
    objective.network = Reading()
    features = ROWS.clone().requires_grad_()  # of unit length
    batch = Batch(IDS, LABELS)
    objective.loss(features, batch)[0].sum().backward()
    weight = objective.network.weight.detach()
    slope = 0.5 * ((ROWS @ weight.T).softmax(dim=1) - batch.targets(2, 0.2))  # (B, C)
    torch.testing.assert_close(objective.network.weight.grad, slope.T @ ROWS)
    # Only what is across a row moves it: its length is taken out.
    across = slope @ weight
    across = across - (across * ROWS).sum(dim=1, keepdim=True) * ROWS
    torch.testing.assert_close(features.grad, across)
    assert across.abs().max() > 0.05


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


# ---- Losses: a slow loop, limits, gradients that a margin must have, weights of hard rows.


B, D = 13, 7


@pytest.fixture
def batch():
    """Unit rows and labels; class 3 has a single row."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(B, D, generator=generator), dim=1)
    labels = torch.tensor([0, 1, 2] * 4 + [3])
    return rows, labels


def slow_contrastive(rows, labels, temperature, margin):
    """Return the loss of each row, written as two loops over the batch."""
    losses = []
    for i in range(B):

        def logit(j, i=i):
            held_back = margin if labels[i] == labels[j] else 0.0
            return (float(rows[i] @ rows[j]) - held_back) / temperature

        others = [j for j in range(B) if j != i]
        total = math.log(sum(math.exp(logit(j)) for j in others))
        positives = [j for j in others if labels[i] == labels[j]]
        mean = sum(total - logit(j) for j in positives) / len(positives) if positives else 0.0
        losses.append(mean)
    return torch.tensor(losses)


@pytest.mark.parametrize(("temperature", "margin"), [(0.07, 0.0), (0.5, 0.0), (0.5, 0.3)])
def test_contrastive_equals_a_slow_loop(batch, temperature, margin):
    rows, labels = batch
    fast = contrastive_loss(rows, labels, temperature=temperature, margin=margin)
    torch.testing.assert_close(
        fast, slow_contrastive(rows, labels, temperature, margin), rtol=1e-4, atol=1e-4
    )
    assert fast[-1] == 0  # the only row of its class


def test_contrastive_by_hand():
    # Two equal rows of one class and an opposite one of another, temperature 1.
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    losses = contrastive_loss(rows, torch.tensor([0, 0, 1]), temperature=1.0)
    expected = math.log(math.e + 1 / math.e) - 1
    assert losses.tolist() == pytest.approx([expected, expected, 0], abs=1e-6)


def test_fault_16_the_margin_changes_the_gradient(batch):
    rows, labels = batch
    gradients = []
    for margin in (0.0, 0.5):
        leaf = rows.clone().requires_grad_()
        contrastive_loss(leaf, labels, temperature=0.5, margin=margin).sum().backward()
        gradients.append(leaf.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 0.05


def test_fault_16_a_margin_asks_more_of_close_pairs():
    # A pair that is nearly perfect: without a margin there is little left to gain.
    angle = 0.1
    pulls = []
    for margin in (0.0, 0.5):
        leaf = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)], [-1.0, 0.0]])
        leaf.requires_grad_()
        contrastive_loss(leaf, torch.tensor([0, 0, 1]), temperature=0.3, margin=margin)[
            0
        ].backward()
        pulls.append(leaf.grad[1].norm())
    assert pulls[1] > 2 * pulls[0]


@pytest.mark.parametrize("labels", [[0, 1], [0, 0], [0]])
def test_small_batches_have_finite_losses_and_gradients(labels):
    rows = torch.nn.functional.normalize(torch.ones(len(labels), D), dim=1).requires_grad_()
    losses = contrastive_loss(rows, torch.tensor(labels))
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(rows.grad).all()


def test_contrastive_does_not_depend_on_label_names_or_order(batch):
    rows, labels = batch
    losses = contrastive_loss(rows, labels)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    mixed = contrastive_loss(rows[order], torch.tensor([2, 3, 0, 1])[labels[order]])
    torch.testing.assert_close(mixed, losses[order])


def test_soft_targets_by_hand():
    labels, partners = torch.tensor([0, 1]), torch.tensor([2, 1])
    plain = soft_targets(labels, n_classes=4)
    assert plain.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    smooth = soft_targets(labels, n_classes=4, smoothing=0.2)
    assert smooth[0].tolist() == pytest.approx([0.85, 0.05, 0.05, 0.05])
    mixed = soft_targets(labels, n_classes=4, partners=partners, share=0.75)
    assert mixed.tolist() == [[0.75, 0, 0.25, 0], [0, 1, 0, 0]]
    both = soft_targets(labels, n_classes=4, smoothing=0.2, partners=partners, share=0.75)
    torch.testing.assert_close(both.sum(dim=1), torch.ones(2))


def test_vote_loss_is_torchs_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, 5, generator=generator)
    labels = torch.arange(B) % 5
    losses = vote_loss(logits.log_softmax(dim=1), soft_targets(labels, n_classes=5, smoothing=0.1))
    expected = torch.nn.functional.cross_entropy(
        logits, labels, label_smoothing=0.1, reduction="none"
    )
    torch.testing.assert_close(losses, expected)


def test_entropy_lies_between_one_neighbour_and_all_of_them():
    weights = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]])
    expected = torch.tensor([0.0, math.log(3), math.log(2)])
    torch.testing.assert_close(attention_entropy(weights), expected)


def test_hardness_counts_other_labels_among_the_nearest():
    neighbour_labels = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]])
    labels = torch.tensor([0, 1])
    assert hardness(neighbour_labels, labels, n_neighbours=2).tolist() == [0.5, 0]
    assert hardness(neighbour_labels, labels).tolist() == [0.5, 0.25]


def test_hard_rows_are_kept_or_weighted_with_mean_one():
    hard = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.0])
    assert hard_row_weights(hard, mode="none", share=0.4, weight=2.0).tolist() == [1] * 5
    kept = hard_row_weights(hard, mode="keep", share=0.4, weight=2.0)
    assert kept.tolist() == [0, 2.5, 0, 2.5, 0]
    weighted = hard_row_weights(hard, mode="weight", share=0.4, weight=2.0)
    torch.testing.assert_close(weighted, torch.tensor([5.0, 10, 5, 10, 5]) / 7)
    assert hard_row_weights(hard, mode="keep", share=0.01, weight=2.0).tolist() == [0, 5, 0, 0, 0]


def test_unknown_modes_and_shares_are_refused():
    with pytest.raises(ValueError, match=r"mode must be one of .*, got mode='kept'"):
        hard_row_weights(torch.rand(3), mode="kept", share=0.3, weight=2.0)
    with pytest.raises(ValueError, match=r"share must be above 0 and at most 1, got share=1\.5"):
        hard_row_weights(torch.rand(3), mode="keep", share=1.5, weight=2.0)


# ---- Training rows as each other's neighbours: never their own, whatever the route.


def unit_rows(n_rows: int, dim: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((n_rows, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make(n_rows: int = 31, **settings) -> tuple[SelfMemory, torch.Tensor]:
    rows = unit_rows(n_rows, 7)
    labels = np.arange(n_rows) % 3
    config = RunConfig.from_flat({"k_train": 5, "trust_neighbours": 3} | settings)
    return SelfMemory(rows, labels, config, n_classes=3), torch.from_numpy(rows)


@pytest.mark.parametrize("route", ["faiss", "matmul"])
def test_fault_1_a_training_row_never_finds_itself(route):
    memory, rows = make(neighbour_search=route)
    ids = torch.arange(13)
    found = memory.neighbours_of(rows[ids], ids)
    assert not (found.ids == ids[:, None]).any()
    assert found.ids.shape == (13, 5)


@pytest.mark.parametrize("route", ["faiss", "matmul"])
def test_published_self_retrieval_is_a_switch(route):
    memory, rows = make(neighbour_search=route, exclude_self=False)
    ids = torch.arange(13)
    assert (memory.neighbours_of(rows[ids], ids).ids[:, 0] == ids).all()


def test_both_search_routes_agree():
    by_list, rows = make(neighbour_search="faiss")
    live, _ = make(neighbour_search="matmul")
    ids = torch.arange(31)
    assert (by_list.neighbours_of(rows, ids).ids == live.neighbours_of(rows, ids).ids).all()


@pytest.mark.parametrize("route", ["faiss", "matmul"])
def test_fault_16_a_mixed_row_gets_neighbours_of_its_own(route):
    memory, rows = make(neighbour_search=route)
    ids = torch.tensor([20, 3, 17, 8, 29, 11, 5])  # no row stands at its own place in the batch
    partners = torch.tensor([6, 5, 4, 0, 2, 1, 3])  # places in the batch, not rows
    mixed = torch.nn.functional.normalize(0.5 * rows[ids] + 0.5 * rows[partners], dim=1)
    found = memory.neighbours_of(mixed, ids, partners)
    # Neither of the two rows it was made of votes for it.
    assert not (found.ids == ids[:, None]).any()
    assert not (found.ids == ids[partners][:, None]).any()
    similarity = mixed @ rows.T
    similarity.scatter_(1, torch.stack([ids, ids[partners]], dim=1), -2.0)
    assert (found.ids == similarity.topk(5).indices).all()
    # And neither shapes the prototypes that it is held against.
    assert torch.equal(found.own_ids, torch.stack([ids, ids[partners]], dim=1))


def test_fault_1_a_plain_row_is_its_only_own_row_and_none_where_it_may_find_itself():
    ids = torch.tensor([20, 3, 17])
    memory, rows = make()
    assert torch.equal(memory.neighbours_of(rows[ids], ids).own_ids, ids[:, None])
    memory, rows = make(exclude_self=False)
    assert memory.neighbours_of(rows[ids], ids).own_ids is None


def test_hardness_is_the_share_of_other_labels():
    rows = np.repeat(np.eye(2, dtype=np.float32), 7, axis=0)
    labels = np.array([0] * 7 + [1] * 6 + [0])
    config = RunConfig.from_flat({"k_train": 5, "trust_neighbours": 3})
    memory = SelfMemory(rows, labels, config, n_classes=2)
    # The odd row sits among six rows of the other class; four of its ten lie elsewhere.
    assert memory.hard[13] == pytest.approx(0.6)


def test_k_is_lowered_to_what_is_there():
    memory, rows = make(n_rows=5, k_train=50)
    ids, partners = torch.arange(3), torch.tensor([1, 2, 0])
    found = memory.neighbours_of(rows[ids], ids, partners)
    assert found.k == 3
    assert not ((found.ids == ids[:, None]) | (found.ids == partners[:, None])).any()
