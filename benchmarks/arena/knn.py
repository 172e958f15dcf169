"""The tuned kNN: TabArena's grid of settings, from one sorted list of neighbours each.

For each power p, scaling and fold the nearest rows are sorted once; every k and both weights are
read off the same list. Axes: N rows, M memory rows, L neighbours in a list, C classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import euclidean_distances

# The k, weights, p and scalings of the search space that TabArena gives to k-nearest neighbours.
KS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 20, 30, 40, 50, 100, 200, 300, 400, 500)
WEIGHTS = ("uniform", "distance")
POWERS = (1.0, 1.5, 2.0)
SCALINGS = ("standard", "quantile")
TUNING_ROWS = 5000  # rows that the search over settings sees; the chosen setting is used on all
WIDE = 300  # from so many columns on p = 1.5 is left out: its distances take minutes
BLOCK_BYTES = 2**27


@dataclass(frozen=True)
class Setting:
    """One point of the grid."""

    k: int
    weights: str
    power: float
    scaling: str


@dataclass(frozen=True)
class Grid:
    """What is tried.

    Attributes:
        powers: Of the distance.
        scalings: Of the columns of numbers.
        ks: Numbers of neighbours; those beyond the memory's rows drop out.
    """

    powers: tuple[float, ...] = POWERS
    scalings: tuple[str, ...] = SCALINGS
    ks: tuple[int, ...] = field(default=KS)

    def for_width(self, width: int) -> "Grid":
        """Return the grid without what would take too long on wide rows."""
        if width < WIDE:
            return self
        return replace(self, powers=tuple(power for power in self.powers if power != 1.5))


def distances(queries: np.ndarray, memory: np.ndarray, power: float) -> np.ndarray:
    """Return Minkowski distances, (N, M)."""
    if power == 2:
        return euclidean_distances(queries, memory)
    if power == 1:
        return cdist(queries, memory, "cityblock")
    # |x|^1.5 = |x| sqrt|x|, row by row: a dozen times as fast as scipy, which calls pow.
    found = np.empty((len(queries), len(memory)), np.float32)
    queries, memory = queries.astype(np.float32), memory.astype(np.float32)
    gaps = np.empty_like(memory)
    roots = np.empty_like(memory)
    for row, query in enumerate(queries):
        np.abs(np.subtract(memory, query, out=gaps), out=gaps)
        np.multiply(gaps, np.sqrt(gaps, out=roots), out=roots)
        found[row] = roots.sum(axis=1)
    return found ** (1 / power)


def nearest(
    queries: np.ndarray, memory: np.ndarray, power: float, most: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Give, block by block, the rows meant and their nearest memory rows and distances, sorted."""
    most = min(most, len(memory))
    block = max(1, BLOCK_BYTES // (8 * len(memory)))
    for start in range(0, len(queries), block):
        rows = slice(start, start + block)
        found = distances(queries[rows], memory, power)
        ids = np.argpartition(found, most - 1, axis=1)[:, :most] if most < len(memory) else None
        if ids is None:
            ids = np.argsort(found, axis=1, kind="stable")
        else:
            inner = np.argsort(np.take_along_axis(found, ids, axis=1), axis=1, kind="stable")
            ids = np.take_along_axis(ids, inner, axis=1)
        yield rows, ids, np.take_along_axis(found, ids, axis=1)


def shares(
    ids: np.ndarray, distance: np.ndarray, labels: np.ndarray, n_classes: int, ks: tuple[int, ...]
) -> dict[tuple[int, str], np.ndarray]:
    """Return the class shares of every k and weighting from one sorted list.

    Args:
        ids: Nearest memory rows, (N, L).
        distance: Their distances, (N, L).
        labels: Labels of the memory, (M,).
        n_classes: C.
        ks: At most L.
    """
    found = {}
    for weights in WEIGHTS:
        weight = np.ones_like(distance)
        if weights == "distance":
            with np.errstate(divide="ignore"):
                weight = 1 / distance
            # As scikit-learn: where some rows are copies of the query, they alone vote.
            copies = distance == 0
            weight = np.where(copies.any(axis=1, keepdims=True), copies, weight)
        votes, taken = np.zeros((len(ids), n_classes)), 0
        rows = np.arange(len(ids))
        for k in ks:
            for place in range(taken, k):
                votes[rows, labels[ids[:, place]]] += weight[:, place]
            taken = k
            found[k, weights] = votes / votes.sum(axis=1, keepdims=True)
    return found


# Learns from known rows, their labels and a scaling ("standard" or "quantile": normal scores) how
# to put tables into the space whose distances count.
Encode = Callable[[pd.DataFrame], np.ndarray]
Place = Callable[[pd.DataFrame, np.ndarray, str], Encode]


def search(
    features: pd.DataFrame,
    labels: np.ndarray,
    n_classes: int,
    folds: np.ndarray,
    grid: Grid,
    place: Place,
) -> Iterator[tuple[Setting, np.ndarray]]:
    """Give every setting with the out-of-fold probabilities of all rows, (N, C)."""
    smallest = len(labels) - np.bincount(folds).max()
    ks = tuple(k for k in grid.ks if k <= smallest)
    for scaling in grid.scalings:
        parts = []
        for fold in np.unique(folds):
            inside = folds == fold
            known = labels[~inside]
            # NOTE: scales, categories and metrics come from the other folds alone.
            encode = place(features[~inside], known, scaling)
            memory, queries = encode(features[~inside]), encode(features[inside])
            parts.append((np.flatnonzero(inside), queries, memory, known))
        for power in grid.powers:
            probs = {
                (k, weights): np.zeros((len(labels), n_classes)) for k in ks for weights in WEIGHTS
            }
            for inside, queries, memory, known in parts:
                for rows, ids, distance in nearest(queries, memory, power, ks[-1]):
                    for key, each in shares(ids, distance, known, n_classes, ks).items():
                        probs[key][inside[rows]] = each
            for (k, weights), each in probs.items():
                yield Setting(k, weights, power, scaling), each


def predict_with(
    setting: Setting, memory: np.ndarray, labels: np.ndarray, queries: np.ndarray, n_classes: int
) -> np.ndarray:
    """Return the class shares of queries under one setting, (N, C)."""
    k = min(setting.k, len(labels))
    probs = np.empty((len(queries), n_classes))
    for rows, ids, distance in nearest(queries, memory, setting.power, k):
        probs[rows] = shares(ids, distance, labels, n_classes, (k,))[k, setting.weights]
    return probs
