"""Wrong labels while fitting: which there are, a loss that allows for them, and drawing some.

Axes: B queries, C classes, N memory rows.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import is_readable, transition_matrix
from attnknn.core.neighbours import LabelView, Neighbours

TEMPERATURES = (1.0,)  # the prior's confidence is taken at its word
MOST_WRONG, N_SHARES = 0.9, 73  # of chance; shares that are tried
SURE = 1.0  # standard errors by which wrong labels must explain better than ambiguity
BY_CLASS = 1.0  # standard errors by which rates of each class must explain better than one rate
PSEUDO_ROWS, ROUNDS = 10, 25  # rows that the symmetric matrix counts for, class by class
HALF_WIDTH = 1.92  # of the 95 % interval, in units of the log-likelihood
# A query meets one draw of wrong labels an epoch, so more draws than epochs would hardly be met.
POOL, SMALLEST_POOL, POOL_CELLS = 48, 8, 50_000_000


@dataclass(frozen=True)
class WrongLabels:
    """How many labels are wrong, and which become which.

    Attributes:
        share: Of all labels; 0 where wrong ones are not shown.
        interval: Shares whose likelihood is within reach of the best.
        transition: T[i, j], the chance that class i is labelled j; None where no label is wrong.
    """

    share: float
    interval: tuple[float, float]
    transition: Float[np.ndarray, "C C"] | None

    def renamed(self, codes: Int[np.ndarray, " C"], n_classes: int) -> "WrongLabels":
        """Return the same where class c is ``codes[c]`` out of more, whose labels are right."""
        if self.transition is None:
            return self
        matrix = np.eye(n_classes)
        matrix[np.ix_(codes, codes)] = self.transition
        return replace(self, transition=matrix)


NO_WRONG_LABELS = WrongLabels(0.0, (0.0, 0.0), None)


def known_wrong_labels(share: float, n_classes: int) -> WrongLabels:
    """Return a share of wrong labels that is known, each in favour of any other class alike."""
    if share == 0:
        return NO_WRONG_LABELS
    return WrongLabels(share, (share, share), transition_matrix(share, n_classes))


def find_wrong_labels(
    log_probs: Float[np.ndarray, "B C"],
    labels: Int[np.ndarray, " B"],
    weights: Float[np.ndarray, " B"] | None = None,
) -> WrongLabels:
    """Return how many labels are wrong, by the likelihood of the labels under the prior.

    The prior predicts right labels, whatever labels the memory has. So the labels as given have
    the probability

        P(y) = sum over classes c of p[c] T[c, y],   T = 1 - e on the diagonal, else e / (C - 1)

    and the share e of wrong ones is where the product is largest. It is used only where it explains
    the labels better than e = 0 by more than a standard error; and rates of each class, found by
    expectation maximisation, only where they explain them better than one rate does.

    Args:
        log_probs: What the prior says of rows whose own label took no part in it.
        labels: Their labels as given.
        weights: How much each row counts; None counts all alike.
    """
    n_rows, n_classes = log_probs.shape
    counted = np.ones(n_rows) if weights is None else weights / weights.mean()
    own = np.exp(log_probs[np.arange(n_rows), labels])
    shares = np.linspace(0, MOST_WRONG * (1 - 1 / n_classes), N_SHARES)
    wrong = shares[:, None] / (n_classes - 1)
    logs = np.log(own * (1 - shares[:, None]) + (1 - own) * wrong)  # (S, B)
    totals = logs @ counted
    best = int(totals.argmax())
    within = shares[totals > totals[best] - HALF_WIDTH]
    interval = (float(within.min()), float(within.max()))
    if best == 0 or _errors((logs[best] - logs[0]) * counted) < SURE:
        return WrongLabels(0.0, (0.0, interval[1]), None)
    matrix, share = transition_matrix(float(shares[best]), n_classes), float(shares[best])
    probs = np.exp(log_probs)
    by_class = _by_class(probs, labels, counted, matrix)
    gain = (np.log((probs * by_class.T[labels]).sum(axis=1)) - logs[best]) * counted
    # Each of C (C - 1) rates is free where one was: what chance alone would gain is taken off.
    shown = gain.sum() > n_classes * (n_classes - 1) / 2 and _errors(gain) > BY_CLASS
    if n_classes > 1 and shown and is_readable(by_class):
        matrix = by_class
        classes = counted @ probs
        share = float(classes @ (1 - matrix.diagonal()) / classes.sum())
    return WrongLabels(share, interval, matrix)


def _errors(gains: Float[np.ndarray, " B"]) -> float:
    """Return the mean of gains in standard errors."""
    return float(gains.mean() / max(gains.std() / len(gains) ** 0.5, 1e-12))


def _by_class(probs, labels, counted, start) -> Float[np.ndarray, "C C"]:
    """Return the most likely transition matrix near to a symmetric one."""
    matrix = start
    for _ in range(ROUNDS):
        told = probs * matrix.T[labels]
        told *= (counted / told.sum(axis=1))[:, None]
        counts = PSEUDO_ROWS * start
        np.add.at(counts.T, labels, told)
        matrix = counts / counts.sum(axis=1, keepdims=True)
    return matrix


# ---- Wrong labels of held-out queries, for attentions that are fitted from nothing.

# The clearest queries, whose labels would hardly ever differ from the guess if they were right.
CLEAR_SHARE, CLEAR_ROWS = 0.2, 30
AMBIGUOUS = 0.05  # fewer wrong labels than this may as well be ambiguity: nothing is corrected
PRIOR_ROWS = 10  # labels that the symmetric matrix counts for, class by class
AREA_BLOCK = 2048  # queries whose (block, K, C) histograms are held at once


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
