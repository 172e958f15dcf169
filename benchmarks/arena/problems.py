"""Problems: a table, split and with wrong training labels; and the measures of an answer to it.

Nothing of the package is used here, so that any version of it gets the same problems. Axes: N rows,
C classes.
"""

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar
from scipy.special import softmax

from benchmarks.arena.tables import Table

TRAIN_SHARE = 0.7
FLOOR = 1e-3  # shared by all classes, the same for every method: no zero decides a log-likelihood
N_BINS = 15
RARE_ROWS = 4  # training rows of a class that a cap of rows leaves it at least, where it has them

# Noise to its kind and the share of all training labels that are wrong.
NOISE: dict[str, tuple[str, float]] = {
    "clean": ("none", 0.0),
    "sym20": ("symmetric", 0.2),
    "sym40": ("symmetric", 0.4),
    "class20": ("class", 0.2),
    "class30": ("class", 0.3),
}
NOISE_NAMES = {
    "clean": "clean labels",
    "sym20": "20 % wrong labels",
    "sym40": "40 % wrong labels",
    "class20": "20 % wrong, each class into one other",
    "class30": "30 % wrong, each class into one other",
}


@dataclass(frozen=True)
class Problem:
    """What a method is given, and what it is judged by.

    Attributes:
        features: Training rows; numbers and text, with missing values as the table has them.
        labels: Their labels as given, some wrong, from 0 to C - 1.
        flipped: Which of them are wrong. No method sees this.
        test_features: Rows to predict.
        test_labels: Their labels, all right.
        n_classes: C.
        seed: What everything random is drawn from.
    """

    features: pd.DataFrame
    labels: np.ndarray
    flipped: np.ndarray
    test_features: pd.DataFrame
    test_labels: np.ndarray
    n_classes: int
    seed: int


def make_problem(
    table: Table, *, split: int, noise: str, max_rows: int | None = None, max_test_rows: int
) -> Problem:
    """Return one problem; the same arguments give the same problem on every machine.

    Args:
        table: The table.
        split: Seed of the stratified 70/30 split.
        noise: A key of ``NOISE``; the rows are the same for all of them.
        max_rows: Training rows at most, drawn within classes.
        max_test_rows: Test rows at most.
    """
    name = zlib.crc32(table.facts.name.encode())
    rng = np.random.default_rng([name, split])
    n_classes = len(table.facts.classes)
    train = per_class(table.labels, rng, lambda n: np.clip(round(TRAIN_SHARE * n), 1, n - 1))
    is_train = np.zeros(len(table.labels), bool)
    is_train[train] = True
    train = _capped(rng.permutation(train), table.labels, rng, max_rows)
    test = rng.permutation(np.flatnonzero(~is_train))[:max_test_rows]
    right = table.labels[train]
    kind, share = NOISE[noise]
    # NOTE: labels of test rows stay as they are, whatever the noise.
    labels = with_wrong_labels(
        right,
        kind,
        share,
        n_classes,
        np.random.default_rng([name, split, list(NOISE).index(noise)]),
    )
    return Problem(
        features=table.features.iloc[train].reset_index(drop=True),
        labels=labels,
        flipped=labels != right,
        test_features=table.features.iloc[test].reset_index(drop=True),
        test_labels=table.labels[test],
        n_classes=n_classes,
        seed=split,
    )


def per_class(labels: np.ndarray, rng: np.random.Generator, count) -> np.ndarray:
    """Return random rows of every class, ``count(n)`` of its n rows, sorted."""
    rows = []
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        rows.append(rng.permutation(own)[: int(count(len(own)))])
    return np.sort(np.concatenate(rows))


def _capped(
    rows: np.ndarray, labels: np.ndarray, rng: np.random.Generator, most: int | None
) -> np.ndarray:
    """Return at most about ``most`` rows, shares of classes kept, of rare ones a few at least."""
    if most is None or len(rows) <= most:
        return rows
    share = most / len(rows)
    kept = per_class(labels[rows], rng, lambda n: max(round(share * n), min(n, RARE_ROWS)))
    return rng.permutation(rows[kept])


def with_wrong_labels(
    labels: np.ndarray, kind: str, share: float, n_classes: int, rng: np.random.Generator
) -> np.ndarray:
    """Return labels of which the given share, drawn at random, is wrong.

    Args:
        labels: Right labels.
        kind: "symmetric" (into any other class), "class" (each class into one other) or "none".
        share: Of all labels.
        n_classes: C.
        rng: What is drawn from.
    """
    labels = labels.copy()
    if kind == "none":
        return labels
    rows = rng.permutation(len(labels))[: round(share * len(labels))]
    if kind == "symmetric":
        shift = rng.integers(1, n_classes, len(rows))
        labels[rows] = (labels[rows] + shift) % n_classes
        return labels
    ring = rng.permutation(n_classes)  # each class becomes the next one in a random ring
    other = np.empty(n_classes, np.int64)
    other[ring] = np.roll(ring, -1)
    labels[rows] = other[labels[rows]]
    return labels


# ---- Measures.


@dataclass(frozen=True)
class Stopwatch:
    """Seconds by stage: of the clock, and of the processor, which other programs do not lengthen.

    Attributes:
        wall: Stage to seconds of the clock.
        cpu: Stage to seconds of this process on all cores.
    """

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall[name] = round(time.perf_counter() - wall, 4)
        self.cpu[name] = round(time.process_time() - cpu, 4)


def floored(probs: np.ndarray) -> np.ndarray:
    """Return probabilities of which every class has at least ``FLOOR`` / C."""
    probs = np.clip(probs, 0, None)
    probs = probs / probs.sum(axis=1, keepdims=True)
    return (1 - FLOOR) * probs + FLOOR / probs.shape[1]


def measures(probs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return accuracy, NLL, Brier (summed over classes) and ECE of 15 bins, after the floor."""
    if not np.isfinite(probs).all():
        raise ValueError("probs must be finite, got NaN or infinity")  # a hole, not a measure
    probs = floored(probs)
    of_label = probs[np.arange(len(labels)), labels]
    confidence, hit = probs.max(axis=1), probs.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * N_BINS - 1e-6 * N_BINS) - 1, 0, N_BINS - 1).astype(int)
    gaps = np.bincount(bins, weights=confidence - hit, minlength=N_BINS)
    return {
        "accuracy": float(hit.mean()),
        "nll": float(-np.log(of_label).mean()),
        "brier": float(((probs**2).sum(axis=1) - 2 * of_label + 1).mean()),
        "ece": float(np.abs(gaps).sum() / len(labels)),
    }


def best_temperature(probs: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature in [0.1, 10] with the best log-likelihood.

    Args:
        probs: Probabilities of training rows by models that have not seen them.
        labels: Their labels as given.
    """
    logs, rows = np.log(floored(probs)), np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return -np.log(softmax(logs / np.exp(log_temperature), axis=1)[rows, labels]).mean()

    return float(np.exp(minimize_scalar(loss, bounds=(-2.303, 2.303), method="bounded").x))


def tempered(probs: np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities flattened (above 1) or sharpened (below 1)."""
    return softmax(np.log(floored(probs)) / temperature, axis=1)
