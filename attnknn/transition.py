"""Wrong labels as a transition matrix: T[i, j] = P(observed label j | true class i).

Probabilities p of the true classes become probabilities p @ T of the labels that are observed, so
a method can be fitted to wrong labels and still predict the true classes: the forward correction
(Patrini et al. 2017). A single number e stands for the symmetric matrix: 1 - e on the diagonal and
e / (C - 1) everywhere else.

Axes: N rows, C classes.
"""

import numpy as np
from jaxtyping import Float, Int

from attnknn.checks import check_range
from attnknn.measure import check_probs

# A share of wrong labels, each in favour of any other class alike, or the whole matrix.
LabelError = float | Float[np.ndarray, "C C"]


def transition_matrix(label_error: LabelError, n_classes: int) -> Float[np.ndarray, "C C"]:
    """Return the checked matrix; of a number, the symmetric one.

    At a number of 1 - 1/C the labels say nothing, and beyond they would be read as their opposite.
    The same holds for a matrix in which a label is at least as likely under another class as under
    its own.
    """
    if isinstance(label_error, np.ndarray):
        return _checked(label_error.astype(np.float64), n_classes)
    check_range("label_error", label_error, low=0, high=1 - 1 / n_classes, high_open=True)
    other = label_error / (n_classes - 1)
    return np.full((n_classes, n_classes), other) + (1 - label_error - other) * np.eye(n_classes)


def _checked(matrix: np.ndarray, n_classes: int) -> Float[np.ndarray, "C C"]:
    if matrix.shape != (n_classes, n_classes):
        raise ValueError(f"label_error must be ({n_classes}, {n_classes}), got {matrix.shape=}")
    if not (matrix >= 0).all() or np.abs(matrix.sum(axis=1) - 1).max() > 1e-6:
        raise ValueError(f"label_error must have rows that are distributions, got {matrix}")
    if not is_readable(matrix):
        raise ValueError(f"label_error must have its largest entries on the diagonal, got {matrix}")
    return matrix


def is_readable(matrix: Float[np.ndarray, "C C"]) -> bool:
    """Return whether every label is likelier under its own class than under any other."""
    others = np.where(np.eye(len(matrix), dtype=bool), -np.inf, matrix)
    return bool((matrix.diagonal() > others.max(axis=0)).all())


def is_identity(matrix: Float[np.ndarray, "C C"]) -> bool:
    """Return whether every label is right."""
    return bool((matrix.diagonal() == 1).all())


def label_chances(
    label_error: LabelError, labels: Int[np.ndarray, "N"], n_classes: int
) -> Float[np.ndarray, "N C"] | None:
    """Return the chance of each row's label under every true class; None for right labels."""
    matrix = transition_matrix(label_error, n_classes)
    return None if is_identity(matrix) else matrix.T[labels]


def wrong_share(label_error: LabelError) -> float:
    """Return the share of wrong labels, every class counted alike."""
    if isinstance(label_error, np.ndarray):
        return float(1 - label_error.diagonal().mean())
    return float(label_error)


def observed_nll(
    probs: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    label_error: LabelError,
    weights: Float[np.ndarray, "N"] | None = None,
) -> float:
    """Return the (weighted) mean NLL of labels that are wrong with known chances."""
    probs = check_probs(probs, labels)
    chances = label_chances(label_error, labels, probs.shape[1])
    own = probs[np.arange(len(labels)), labels]
    observed = own if chances is None else (probs * chances).sum(axis=1)
    return float(np.average(-np.log(observed), weights=weights))
