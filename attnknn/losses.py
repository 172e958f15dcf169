"""Training losses of the joint stage: the vote, the contrast, the entropy, the hard rows.

Axes: B queries, K neighbours of each, D embedding width, C classes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from attnknn.checks import check_count, check_one_of, check_range


def soft_targets(
    labels: Int[Tensor, " B"],
    *,
    n_classes: int,
    smoothing: float = 0.0,
    partners: Int[Tensor, " B"] | None = None,
    share: float = 1.0,
) -> Float[Tensor, "B C"]:
    """Return target distributions after MixUp and label smoothing.

    Args:
        labels: Label of each row.
        n_classes: Number of classes.
        smoothing: Mass spread evenly over all classes.
        partners: Labels of the rows mixed in.
        share: Share of the row itself in the mix.
    """
    targets = functional.one_hot(labels, n_classes).float()
    if partners is not None:
        targets = share * targets + (1 - share) * functional.one_hot(partners, n_classes)
    return (1 - smoothing) * targets + smoothing / n_classes


def vote_loss(
    log_probs: Float[Tensor, "B C"], targets: Float[Tensor, "B C"]
) -> Float[Tensor, " B"]:
    """Return the cross-entropy of each row between the neighbours' vote and its target."""
    return -(targets * log_probs).sum(dim=1)


def contrastive_loss(
    rows: Float[Tensor, "B D"],
    labels: Int[Tensor, " B"],
    *,
    temperature: float = 0.07,
    margin: float = 0.0,
) -> Float[Tensor, " B"]:
    """Return the supervised contrastive loss of each row; 0 for rows without a partner.

    The margin is subtracted from the similarity of positive pairs, in the numerator and in the
    denominator: a pair must be closer by that much. (Adding it to the loss as a constant, as
    published, leaves every gradient as it was.)

    Args:
        rows: Unit-length embeddings of a batch.
        labels: Their labels.
        temperature: Divides the similarities.
        margin: Cosine by which positives are held back.
    """
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    positive = (labels[:, None] == labels[None, :]) & ~own  # (B, B)
    similarity = rows @ rows.T - margin * positive  # (B, B)
    logits = (similarity / temperature).masked_fill(own, float("-inf"))
    log_shares = (logits - logits.logsumexp(dim=1, keepdim=True)).masked_fill(own, 0.0)
    n_positive = positive.sum(dim=1)
    return -(log_shares * positive).sum(dim=1) / n_positive.clamp(min=1)


def hardness(
    neighbour_labels: Int[Tensor, "B K"], labels: Int[Tensor, " B"], *, n_neighbours: int = 10
) -> Float[Tensor, " B"]:
    """Return the share of each row's nearest neighbours that carry another label."""
    near = neighbour_labels[:, : check_count("n_neighbours", n_neighbours)]
    return (near != labels[:, None]).float().mean(dim=1)


def hard_row_weights(
    hard: Float[Tensor, " B"], *, mode: str, share: float, weight: float
) -> Float[Tensor, " B"]:
    """Return a weight of each row with mean 1 that favours the hardest ones.

    Args:
        hard: Hardness of each row.
        mode: ``none`` (all 1), ``keep`` (only the hardest ``share``) or ``weight`` (the hardest
            ``share`` count ``weight`` times as much).
        share: Share of rows that are called hard.
        weight: What a hard row counts in ``weight`` mode.
    """
    check_one_of("mode", mode, ("none", "keep", "weight"))
    check_range("share", share, low=0, high=1, low_open=True)
    if mode == "none":
        return torch.ones_like(hard)
    n_hard = max(1, round(share * len(hard)))
    chosen = torch.zeros_like(hard)
    chosen[hard.topk(n_hard).indices] = 1.0
    raw = chosen if mode == "keep" else 1 + (weight - 1) * chosen
    return raw / raw.mean()
