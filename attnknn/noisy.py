"""Wrong labels while fitting: how many there are, a loss that allows for them, and drawing some.

Axes: B queries, C classes, N memory rows.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.checks import check_range
from attnknn.neighbours import Neighbours

ERROR_VOTERS = 20  # neighbours whose majority label tells a held-out label that looks wrong


def label_error_rate(neighbours: Neighbours, labels: Int[Tensor, " B"]) -> float:
    """Return the share of queries whose label differs from their neighbours' majority label.

    It is held just below chance: labels as wrong as that say nothing, and cannot be corrected for.
    """
    voters = neighbours.nearest(min(ERROR_VOTERS, neighbours.k)).labels
    rate = float((voters.mode(dim=1).values != labels).float().mean())
    return min(rate, 0.95 * (1 - 1 / neighbours.n_classes))


def corrected_nll(
    log_probs: Float[Tensor, "B C"],
    labels: Int[Tensor, " B"],
    label_error: float,
    weights: Float[Tensor, " B"] | None = None,
    *,
    reduce: bool = True,
) -> Float[Tensor, ""] | Float[Tensor, " B"]:
    """Return the (weighted) NLL of labels that are wrong at a known rate: the forward correction.

    A wrong label is taken to be any other class with equal chance, so the observed label has
    probability (1 - e) p + e (1 - p) / (C - 1). At e = 0 this is the plain NLL; at e = 1 - 1/C the
    labels say nothing, and beyond they would be read as their opposite, so e must be smaller.
    """
    chance = 1 - 1 / log_probs.shape[1]
    check_range("label_error", label_error, low=0, high=chance, high_open=True)
    losses = -log_probs.gather(1, labels[:, None]).squeeze(1)
    if label_error > 0:
        probs = (-losses).exp()
        others = (1 - probs) / (log_probs.shape[1] - 1)
        losses = -((1 - label_error) * probs + label_error * others).log()
    if weights is not None:
        losses = losses * weights / weights.mean()
    return losses.mean() if reduce else losses


def noisy_labels(
    labels: Int[Tensor, " N"], rate: float, n_classes: int, generator: torch.Generator
) -> Int[Tensor, " N"]:
    """Return labels of which each is replaced, with chance ``rate``, by any other class."""
    flipped = torch.rand(len(labels), generator=generator) < rate
    shift = torch.randint(1, n_classes, labels.shape, generator=generator)
    return torch.where(flipped, (labels + shift) % n_classes, labels)
