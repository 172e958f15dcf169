"""Wrong labels while fitting: which there are, a loss that allows for them, and drawing some.

Axes: B queries, C classes, N memory rows.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import is_readable, transition_matrix
from attnknn.core.neighbours import LabelView, Neighbours

# The clearest queries, whose labels would hardly ever differ from the guess if they were right.
CLEAR_SHARE, CLEAR_ROWS = 0.2, 30
AMBIGUOUS = 0.05  # fewer wrong labels than this may as well be ambiguity: nothing is corrected
PRIOR_ROWS = 10  # labels that the symmetric matrix counts for, class by class
AREA_BLOCK = 2048  # queries whose (block, K, C) histograms are held at once
# A query meets one draw of wrong labels an epoch, so more draws than epochs would hardly be met.
POOL, SMALLEST_POOL, POOL_CELLS = 48, 8, 50_000_000


def label_transition(
    neighbours: Neighbours, labels: Int[np.ndarray, " B"]
) -> Float[np.ndarray, "C C"]:
    """Return the estimated chances T[i, j] that class i is labelled j; identity where unclear.

    The true class of a query is guessed by its whole area: the mean of its neighbours' label
    histograms, hundreds of votes, so the guess survives memory labels that are as wrong as the
    queries'. A label that differs from the guess is wrong, or the guess is: classes mix there. So
    only the clearest queries of each guessed class count, as many as keep the share of differing
    labels smallest within its uncertainty. Their labels are the rows of T; a few of the
    symmetric matrix with the same share are added, for classes with few queries.

    Args:
        neighbours: What the queries found.
        labels: Their labels, which took no part in the guess.
    """
    n_classes = neighbours.n_classes
    shares = area_shares(neighbours)
    guesses, order = shares.argmax(axis=1), clearest_first(shares)
    rate, n_clear = _clear_rate((guesses != labels)[order])
    if rate < AMBIGUOUS:
        return np.eye(n_classes)
    counts = np.zeros((n_classes, n_classes))
    np.add.at(counts, (guesses[order[:n_clear]], labels[order[:n_clear]]), 1)
    symmetric = transition_matrix(min(rate, 0.95 * (1 - 1 / n_classes)), n_classes)
    counts += PRIOR_ROWS * symmetric
    return _readable(counts / counts.sum(axis=1, keepdims=True))


def area_shares(neighbours: Neighbours) -> Float[np.ndarray, "B C"]:
    """Return the label shares of each query's area: the mean histogram of its neighbours."""
    starts = range(0, len(neighbours.ids), AREA_BLOCK)
    blocks = (neighbours.of_queries(slice(start, start + AREA_BLOCK)) for start in starts)
    return torch.cat([block.histograms.mean(dim=1) for block in blocks]).double().numpy()


def clearest_first(shares: Float[np.ndarray, "B C"]) -> Int[np.ndarray, " B"]:
    """Return the rows by their rank within their largest class, so that all classes keep pace."""
    largest, clarity = shares.argmax(axis=1), shares.max(axis=1)
    by_class = np.lexsort((-clarity, largest))
    sizes = np.bincount(largest, minlength=shares.shape[1])
    starts = sizes.cumsum() - sizes
    ranks = np.arange(len(shares)) - starts[largest[by_class]]
    return by_class[np.argsort((ranks + 0.5) / sizes[largest[by_class]], kind="stable")]


def _clear_rate(differs: np.ndarray) -> tuple[float, int]:
    """Return the share of differing labels where it is smallest, and among how many rows.

    The plain minimum over nested sets is mostly luck and comes early: the largest set that is as
    good within one standard error counts.
    """
    taken = np.arange(1, len(differs) + 1)
    rates = (differs.cumsum() + 0.5) / (taken + 1)
    bounds = rates + np.sqrt(rates * (1 - rates) / taken)
    first = min(max(CLEAR_ROWS, int(CLEAR_SHARE * len(taken))), len(taken)) - 1
    last = first + int(np.flatnonzero(rates[first:] <= bounds[first:].min()).max())
    return float(rates[last]), last + 1


def _readable(matrix: Float[np.ndarray, "C C"]) -> Float[np.ndarray, "C C"]:
    """Return the matrix, moved as far towards the identity as it takes to be readable."""
    while not is_readable(matrix):
        matrix = 0.95 * matrix + 0.05 * np.eye(len(matrix))
    return matrix


def corrected_nll(
    log_probs: Float[Tensor, "B C"],
    labels: Int[Tensor, " B"],
    label_error: float | Float[Tensor, "C C"],
    weights: Float[Tensor, " B"] | None = None,
    *,
    reduce: bool = True,
) -> Float[Tensor, ""] | Float[Tensor, " B"]:
    """Return the (weighted) NLL of labels that are wrong with known chances.

    The observed label y has probability sum over true classes c of p[c] T[c, y]: the forward
    correction.

    Args:
        log_probs: Log-probabilities of the true classes.
        labels: Observed labels.
        label_error: Share of wrong labels, each in favour of any other class alike; or T, from
            ``attnknn.core.calibrate.transition_matrix``.
        weights: How much each query counts.
        reduce: Return the mean rather than the loss of each query.
    """
    if not isinstance(label_error, Tensor) and label_error != 0:
        matrix = transition_matrix(label_error, log_probs.shape[1])
        label_error = torch.from_numpy(matrix).to(log_probs)
    if isinstance(label_error, Tensor):
        chances = label_error.T[labels]  # (B, C)
        losses = -(log_probs + chances.log()).logsumexp(dim=1)
    else:
        losses = -log_probs.gather(1, labels[:, None]).squeeze(1)
    if weights is not None:
        losses = losses * weights / weights.mean()
    return losses.mean() if reduce else losses


def noisy_labels(
    labels: Int[Tensor, " N"],
    rate: float,
    n_classes: int,
    generator: torch.Generator,
    *,
    by_class: bool = False,
) -> Int[Tensor, " N"]:
    """Return labels of which each is replaced, with chance ``rate``, by another class.

    Args:
        labels: The labels.
        rate: Chance of each to be replaced.
        n_classes: Number of classes.
        generator: Source of chance.
        by_class: All wrong labels of a class name the same other class, instead of any.
    """
    flipped = torch.rand(len(labels), generator=generator) < rate
    if by_class:
        shift = torch.randint(1, n_classes, (n_classes,), generator=generator)[labels]
    else:
        shift = torch.randint(1, n_classes, labels.shape, generator=generator)
    return torch.where(flipped, (labels + shift) % n_classes, labels)


def noisy_views(
    bank: MemoryBank, rates: Float[Tensor, " V"], generator: torch.Generator
) -> list[LabelView]:
    """Return what the memory's labels would say at each share of wrong ones.

    Every second draw is by class: people confuse what looks alike, and who has met nothing but
    wrong labels in all directions is fooled by many that agree.
    """
    draws = (
        noisy_labels(bank.labels, rate, bank.n_classes, generator, by_class=number % 2 == 1)
        for number, rate in enumerate(rates.tolist())
    )
    return [bank.view_of(labels) for labels in draws]


def view_pool(bank: MemoryBank, noise_max: float, generator: torch.Generator) -> list[LabelView]:
    """Return views for batches to choose from, at shares of wrong labels up to ``noise_max``.

    Trust, histograms and prototypes of all memory rows are made once a view instead of once a
    batch. A memory that is too large for many has fewer; the shares lie evenly in any case.
    """
    n_views = int(np.clip(POOL_CELLS // (len(bank) * bank.n_classes), SMALLEST_POOL, POOL))
    places = torch.arange(n_views) + torch.rand(n_views, generator=generator)
    return noisy_views(bank, noise_max * places / n_views, generator)
