"""Losses: a slow loop, limits, gradients that a margin must have, weights of hard rows."""

import math

import pytest
import torch

from attnknn.core.attention import attention_entropy
from attnknn.embed.objectives import (
    contrastive_loss,
    hard_row_weights,
    hardness,
    soft_targets,
    vote_loss,
)

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
