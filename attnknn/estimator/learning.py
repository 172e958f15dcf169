"""Learning inside ``fit``: attentions, the share of wrong labels, and a last calibration.

All of it comes from queries whose own label took no part in what their neighbours say: memory rows
that were left out of their own search, or rows that were held out from the memory altogether.

Axes: B queries, M of them held out, K neighbours of each, C classes.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from attnknn.attention import Contributions, NeighbourAttention
from attnknn.calibrate import Calibration, apply_calibration, fit_floor_and_temperature
from attnknn.classify import Attention, normalised
from attnknn.config import AttentionConfig, FittingConfig
from attnknn.explain import contributions
from attnknn.fit import PREPARED_CELLS, fit_on_neighbours
from attnknn.holdout import query_folds
from attnknn.memory import MemoryBank
from attnknn.neighbours import Neighbours

# Nothing in here is made for a number of classes, so that classes can be added later.
ATTENTION = AttentionConfig(label_bias="none")
FOLDS, FOLDS_OF_FEW = 5, 4
TOO_FEW_QUERIES = 9  # nothing can be held out from so few: they are all there is
FEW_QUERIES = 1500  # up to here every query is held out once, and each fold has its attention
# The most confident rows, of which clean labels would hardly ever differ.
CONFIDENT_SHARE, CONFIDENT_ROWS = 0.05, 30
AMBIGUOUS = 0.05  # an estimate below this may as well be ambiguity: nothing is corrected
# The attention sets a temperature of its own; few or wrong labels must not undo it.
LAST_TEMPERATURES = (1 / 3, 3.0)


@dataclass(frozen=True)
class Committee:
    """The mean of several attentions' votes.

    Attributes:
        k: Neighbours that vote.
        members: Attentions that were fitted on different parts of the queries.
    """

    full_support: ClassVar[bool] = True
    k: int
    members: tuple[NeighbourAttention, ...]

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the mean weight of each of the k neighbours."""
        each = [Attention(self.k, member).weights(neighbours) for member in self.members]
        return torch.stack(each).mean(dim=0)

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return mean class probabilities."""
        each = [Attention(self.k, member).votes(neighbours) for member in self.members]
        return torch.stack(each).mean(dim=0)


@contributions.register
def _(method: Committee, neighbours: Neighbours, classes: Tensor) -> Contributions:
    members = (Attention(method.k, member) for member in method.members)
    each = [contributions(member, neighbours, classes) for member in members]
    votes, prototypes = (torch.stack(part).mean(dim=0) for part in zip(*each, strict=True))
    return Contributions(votes, prototypes)


@dataclass(frozen=True)
class Queries:
    """What is learned from.

    Attributes:
        neighbours: The search of each query, without the query itself.
        labels: Its label.
        weights: How much it counts; None counts all alike.
    """

    neighbours: Neighbours
    labels: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, " B"] | None = None

    def part(self, rows: Int[np.ndarray, " M"]) -> "Queries":
        """Return some of the queries."""
        weights = None if self.weights is None else self.weights[rows]
        return Queries(
            self.neighbours.of_queries(torch.from_numpy(rows)), self.labels[rows], weights
        )


@dataclass(frozen=True)
class Learned:
    """What was learned.

    Attributes:
        method: How neighbours are weighed.
        calibration: Floor and temperature on top.
        label_error: Share of labels that was taken to be wrong.
        held_out: Which queries were predicted by an attention that had not been fitted on them.
        probs: Their calibrated probabilities.
    """

    method: Committee
    calibration: Calibration
    label_error: float
    held_out: Int[np.ndarray, " M"]
    probs: Float[np.ndarray, "M C"]


def blank_attention(bank: MemoryBank) -> NeighbourAttention:
    """Return an attention that has learned nothing yet: similarity, histograms, prototypes."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        attention = NeighbourAttention(ATTENTION, dim=bank.dim, n_classes=bank.n_classes)
    return attention.eval()


def learn(
    bank: MemoryBank,
    queries: Queries,
    *,
    fitting: FittingConfig,
    label_noise: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Learned:
    """Return attentions and a calibration for a memory.

    Args:
        bank: The memory that votes.
        queries: What is learned from; at least two.
        fitting: Epochs and rates.
        label_noise: Share of wrong labels. None estimates it, and corrects for it where it is too
            large to be ambiguity.
        seed: Decides folds, initial weights and the order of batches.
        progress: Show progress bars.
    """
    if queries.neighbours.ids.numel() * bank.n_classes <= PREPARED_CELLS:
        _ = queries.neighbours.histograms, queries.neighbours.prototype_cosines  # for all folds
    options = {"fitting": fitting, "seed": seed, "progress": progress}
    if label_noise is not None:
        return _learn_at(bank, queries, label_noise, **options)
    plain = _learn_at(bank, queries, 0.0, **options)
    rate = label_noise_rate(plain.probs, queries.labels[plain.held_out])
    return plain if rate < AMBIGUOUS else _learn_at(bank, queries, rate, **options)


def _learn_at(
    bank: MemoryBank,
    queries: Queries,
    label_error: float,
    *,
    fitting: FittingConfig,
    seed: int,
    progress: bool,
) -> Learned:
    """Learn under a given share of wrong labels."""
    parts = _fold_parts(queries.labels, seed)
    members, held_out, votes = [], [], []
    bar = tqdm(parts, desc="attention", disable=not progress, leave=False)
    for fold, (inside, outside) in enumerate(bar):
        used, left = queries.part(inside), queries.part(outside)
        fitted = fit_on_neighbours(
            bank,
            used.neighbours,
            used.labels,
            attention=ATTENTION,
            fitting=fitting,
            seed=seed + fold,
            label_error=label_error,
            weights=used.weights,
            progress=progress and len(parts) == 1,
        )
        members.append(fitted.attention)
        held_out.append(outside)
        votes.append(Attention(fitted.k, fitted.attention).votes(left.neighbours))
    rows, probs = np.concatenate(held_out), normalised(torch.cat(votes))
    judges = queries.part(rows)
    calibration = fit_floor_and_temperature(
        probs,
        judges.labels,
        label_error=label_error,
        weights=judges.weights,
        temperatures=LAST_TEMPERATURES,
    )
    return Learned(
        method=Committee(queries.neighbours.k, tuple(members)),
        calibration=calibration,
        label_error=label_error,
        held_out=rows,
        probs=apply_calibration(probs, calibration),
    )


def _fold_parts(
    labels: Int[np.ndarray, " B"], seed: int
) -> list[tuple[Int[np.ndarray, " I"], Int[np.ndarray, " O"]]]:
    """Return the queries inside and outside of each fit."""
    n_queries = len(labels)
    if n_queries < TOO_FEW_QUERIES:
        return [(np.arange(n_queries), np.arange(n_queries))]
    few = n_queries <= FEW_QUERIES
    folds = query_folds(labels, FOLDS_OF_FEW if few else FOLDS, seed=seed)
    n_fits = FOLDS_OF_FEW if few else 1
    return [
        (np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)) for fold in range(n_fits)
    ]


def label_noise_rate(probs: Float[np.ndarray, "B C"], labels: Int[np.ndarray, " B"]) -> float:
    """Return a cautious estimate of the share of labels that are wrong.

    Wrong labels are taken to fall on any other class alike. Two shares can then not be smaller
    than theirs, and the smaller of the two is taken:

    - Labels that differ from the prediction among the most confident rows. The rows are taken in
      the order of confidence, and the share is read where it is smallest, counting its own
      uncertainty; farther down the true classes begin to mix.
    - Labels on the half of the classes that is least probable, row by row, for three classes or
      more: rows that merely look alike are confused with few classes, and not with all.

    What is left may still be ambiguity, the more so the nearer it comes to chance, and too strong
    a correction costs far more than too weak a one: so it is shrunk towards 0 there.

    Args:
        probs: Held-out probabilities, fitted to the labels as they are.
        labels: The labels.
    """
    if len(labels) < 2 * CONFIDENT_ROWS:  # too few to tell anything
        return 0.0
    rate = _confident_difference(probs, labels)
    n_classes = probs.shape[1]
    if n_classes > 2:
        rate = min(rate, _unlikely_share(probs, labels))
    chance = 1 - 1 / n_classes
    return float(rate * max(0.0, 1 - (rate / chance) ** 4))


def _confident_difference(probs: np.ndarray, labels: np.ndarray) -> float:
    """Return how often labels differ from the prediction where it is most confident."""
    order = np.argsort(-probs.max(axis=1), kind="stable")
    differs = (probs.argmax(axis=1) != labels)[order]
    taken = np.arange(1, len(differs) + 1)
    rates = (differs.cumsum() + 0.5) / (taken + 1)
    bounds = rates + np.sqrt(rates * (1 - rates) / taken)
    first = max(CONFIDENT_ROWS, int(CONFIDENT_SHARE * len(taken)))
    return float(rates[first + bounds[first:].argmin()])


def _unlikely_share(probs: np.ndarray, labels: np.ndarray) -> float:
    """Return the noise rate at which so many labels fall on the least probable classes."""
    n_rows, n_classes = probs.shape
    half = n_classes // 2
    unlikely = np.argsort(probs, axis=1, kind="stable")[:, :half]
    share = ((unlikely == labels[:, None]).sum() + 0.5) / (n_rows + 1)
    return float(share / half * (n_classes - 1))
