"""Corruption on purpose: labels become noisy, balanced rows become long-tailed.

Axes: N rows, C classes.
"""

import numpy as np
from jaxtyping import Float, Int
from scipy.special import softmax

from attnknn.checks import check_count, check_finite, check_one_of, check_range

NOISE_KINDS = ("symmetric", "asymmetric")


def flip_labels(
    labels: Int[np.ndarray, "N"],
    rate: float | int,
    *,
    n_classes: int,
    kind: str = "symmetric",
    seed: int,
) -> Int[np.ndarray, "N"]:
    """Return a copy of the labels with exactly ``round(rate * N)`` wrong ones.

    The flipped rows of a lower rate are among those of a higher one at the same seed, so a sweep
    over rates compares growing noise and not different draws.

    Args:
        labels: True class ids.
        rate: Share of rows to flip, in [0, 1].
        n_classes: Number of classes, at least 2.
        kind: "symmetric" draws uniformly among the other classes; "asymmetric" turns class c
            into c + 1, the last into the first.
        seed: Decides the rows and their new labels.
    """
    check_range("rate", rate, low=0.0, high=1.0)
    check_one_of("kind", kind, NOISE_KINDS)
    _check_labels(labels, n_classes)
    rng = np.random.default_rng(check_count("seed", seed, low=0))
    rows = rng.permutation(len(labels))[: round(rate * len(labels))]
    # A shift of 1 .. C - 1 reaches every other class once and never the class itself.
    shift = rng.integers(1, n_classes, size=len(labels)) if kind == "symmetric" else 1
    noisy = labels.copy()
    noisy[rows] = ((labels + shift) % n_classes)[rows]
    return noisy


def flip_ambiguous_labels(
    labels: Int[np.ndarray, "N"],
    rate: float | int,
    *,
    embeddings: Float[np.ndarray, "N D"],
    n_classes: int,
    seed: int,
) -> Int[np.ndarray, "N"]:
    """Return a copy of the labels with ``round(rate * N)`` wrong ones where people would err.

    Instance-dependent noise. With cosine similarities s to the mean of each class and the
    posterior p = softmax(s / 0.1), a row is flipped with a chance proportional to 1 - p of its
    own class, and becomes the most similar other class. As in ``flip_labels``, the flips of a
    lower rate are among those of a higher one.

    Args:
        labels: True class ids; every class must occur.
        rate: Share of rows to flip, in [0, 1].
        embeddings: What makes rows similar; any length but zero.
        n_classes: Number of classes, at least 2.
        seed: Decides the rows.
    """
    check_range("rate", rate, low=0.0, high=1.0)
    _check_labels(labels, n_classes)
    rng = np.random.default_rng(check_count("seed", seed, low=0))
    if len(np.unique(labels)) < n_classes:
        raise ValueError(f"labels must hold all {n_classes} classes, got {np.unique(labels)}")
    rows = _unit(check_finite("embeddings", embeddings))
    means = _unit(np.stack([rows[labels == c].mean(axis=0) for c in range(n_classes)]))
    similarity = rows @ means.T  # (N, C)
    own = np.arange(len(labels)), labels
    doubt = 1 - softmax(similarity / 0.1, axis=1)[own]
    # The smallest Exp(1) / weight are a weighted draw without replacement.
    order = np.argsort(rng.exponential(size=len(labels)) / np.maximum(doubt, 1e-12))
    flipped = order[: round(rate * len(labels))]
    similarity[own] = -np.inf
    noisy = labels.copy()
    noisy[flipped] = similarity.argmax(axis=1)[flipped]
    return noisy


def _unit(rows: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N D"]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.maximum(lengths, np.finfo(rows.dtype).tiny)


def long_tail_rows(
    labels: Int[np.ndarray, "N"], ratio: float | int, *, n_classes: int, seed: int
) -> Int[np.ndarray, "M"]:
    """Return the ids of rows to keep so that class sizes fall geometrically.

    Class c keeps ``n_max * ratio ** (c / (C - 1))`` rows, rounded, at least one and at most what
    it has, where ``n_max`` is the size of the largest class: class 0 keeps all, the last class
    the share ``ratio``.

    Args:
        labels: Class ids.
        ratio: Size of the last class over the first, in (0, 1]; 1 keeps all rows of balanced data.
        n_classes: Number of classes, at least 2.
        seed: Decides the rows. Those of a smaller ratio are among those of a larger one.

    Returns:
        Kept row ids, ascending.
    """
    check_range("ratio", ratio, low=0.0, high=1.0, low_open=True)
    _check_labels(labels, n_classes)
    rng = np.random.default_rng(check_count("seed", seed, low=0))
    n_max = np.bincount(labels, minlength=n_classes).max()
    kept = []
    for label in range(n_classes):
        rows = rng.permutation(np.flatnonzero(labels == label))
        n_rows = max(1, round(n_max * ratio ** (label / (n_classes - 1))))
        kept.append(rows[:n_rows])
    return np.sort(np.concatenate(kept)).astype(np.int64)


def _check_labels(labels: Int[np.ndarray, "N"], n_classes: int) -> None:
    check_count("n_classes", n_classes, low=2)
    if len(labels) == 0:
        raise ValueError("labels must not be empty, got 0 rows")
    if labels.min() < 0 or labels.max() >= n_classes:
        raise ValueError(
            f"labels must lie in [0, {n_classes - 1}], got {labels.min()} to {labels.max()}"
        )
