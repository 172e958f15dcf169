"""Measures of a classifier: (probabilities, labels) to numbers and tidy tables.

Axes: N rows, C classes. Every function takes ``probs`` whose rows sum to 1 and integer ``labels``
in [0, C). The prediction is the most probable class (the lowest index where several tie), the
confidence is its probability. No function clips, smooths or renormalises: what a method says is
what is measured.
"""

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from attnknn.checks import check_count, check_probs

# A vote of 6/10 in float32 is 0.60000002: it still belongs to the bin that ends at 0.6.
EDGE_TOLERANCE = 1e-6

METRIC_NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "ace": "ECE (equal-mass)",
    "cwce": "class-wise ECE",
    "aurc": "AURC",
}
HIGHER_IS_BETTER = frozenset({"accuracy", "balanced_accuracy", "macro_f1"})


def correct_predictions(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]
) -> Bool[np.ndarray, "N"]:
    """Return, row by row, whether the most probable class is the label."""
    return check_probs(probs, labels).argmax(axis=1) == labels


def accuracy(probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the share of rows whose most probable class is the label, in [0, 1]."""
    return float(correct_predictions(probs, labels).mean())


def confusion_matrix(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "C C"]:
    """Return row counts by (label, prediction)."""
    probs = check_probs(probs, labels)
    n_classes = probs.shape[1]
    cells = labels.astype(np.int64) * n_classes + probs.argmax(axis=1)  # (N,)
    return np.bincount(cells, minlength=n_classes**2).reshape(n_classes, n_classes)  # (C, C)


def balanced_accuracy(probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the mean recall over the classes that occur among ``labels``, in [0, 1]."""
    counts = confusion_matrix(probs, labels)
    rows = counts.sum(axis=1)
    return float((counts.diagonal()[rows > 0] / rows[rows > 0]).mean())


def macro_f1(probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the unweighted mean F1 over classes, in [0, 1].

    As in scikit-learn: a class among neither labels nor predictions has no F1 and is left out; a
    class that is never predicted, or predicted without ever being right, counts as 0.
    """
    counts = confusion_matrix(probs, labels)
    sizes = counts.sum(axis=0) + counts.sum(axis=1)  # predicted + actual
    return float((2 * counts.diagonal()[sizes > 0] / sizes[sizes > 0]).mean())


def per_sample(probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> pd.DataFrame:
    """Return each row's ``nll``, ``brier`` and ``correct`` (0 or 1), for paired tests.

    The means of the columns are the negative log-likelihood, the Brier score and the accuracy.
    """
    probs = check_probs(probs, labels)
    of_label = probs[np.arange(len(probs)), labels]  # (N,)
    with np.errstate(divide="ignore"):
        nll = -np.log(of_label)
    brier = (probs**2).sum(axis=1) - 2 * of_label + 1
    correct = (probs.argmax(axis=1) == labels).astype(np.float64)
    return pd.DataFrame({"nll": nll, "brier": brier, "correct": correct})


def negative_log_likelihood(probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the mean of -log(probability of the label), in nats; 0 is best.

    Infinite when a label has probability 0: a hidden floor would decide the figure instead of the
    method. Give every method the same support first (``with_floor``).
    """
    return float(per_sample(probs, labels)["nll"].mean())


def brier(probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the mean squared distance to the one-hot label, summed over classes, in [0, 2]."""
    return float(per_sample(probs, labels)["brier"].mean())


def bin_index(values: Float[np.ndarray, "*S"], n_bins: int) -> Int[np.ndarray, "*S"]:
    """Return the equal-width bin (low, high] of each value in [0, 1]; 0 is in the first bin."""
    check_count("n_bins", n_bins)
    index = np.ceil(np.asarray(values, dtype=np.float64) * n_bins - EDGE_TOLERANCE * n_bins) - 1
    return index.astype(np.int64).clip(0, n_bins - 1)


def reliability_table(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], *, n_bins: int = 15
) -> pd.DataFrame:
    """Return confidence and accuracy per equal-width confidence bin (low, high].

    Returns:
        One row per bin: ``bin``, ``low``, ``high``, ``count``, ``confidence`` and ``accuracy``
        (means over the bin's rows, NaN where it is empty).
    """
    probs = check_probs(probs, labels)
    confidence, correct = probs.max(axis=1), probs.argmax(axis=1) == labels
    index = bin_index(confidence, n_bins)
    count = np.bincount(index, minlength=n_bins)
    filled = np.where(count > 0, count, np.nan)
    edges = np.arange(n_bins + 1) / n_bins
    return pd.DataFrame(
        {
            "bin": np.arange(n_bins),
            "low": edges[:-1],
            "high": edges[1:],
            "count": count,
            "confidence": np.bincount(index, weights=confidence, minlength=n_bins) / filled,
            "accuracy": np.bincount(index, weights=correct, minlength=n_bins) / filled,
        }
    )


def expected_calibration_error(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], *, n_bins: int = 15
) -> float:
    """Return the mean gap between confidence and accuracy over equal-width bins, in [0, 1]."""
    table = reliability_table(probs, labels, n_bins=n_bins)
    gap = (table["confidence"] - table["accuracy"]).abs()
    return float((gap * table["count"]).sum() / len(labels))


def adaptive_calibration_error(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], *, n_bins: int = 15
) -> float:
    """Return the mean gap between confidence and accuracy over bins of equal size, in [0, 1].

    Rows of equal confidence enter with their mean accuracy, so their order does not matter.
    """
    check_count("n_bins", n_bins)
    probs = check_probs(probs, labels)
    confidence, correct = _by_confidence(probs, labels)
    gaps = np.array_split(confidence - correct, n_bins)
    return float(sum(abs(gap.sum()) for gap in gaps) / len(labels))


def classwise_calibration_error(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], *, n_bins: int = 15
) -> float:
    """Return the calibration error of each class's own probability, averaged over C, in [0, 1].

    Unlike the other two this looks at all probabilities, not only the largest.
    """
    probs = check_probs(probs, labels)
    n_rows, n_classes = probs.shape
    cells = bin_index(probs, n_bins) + n_bins * np.arange(n_classes)  # (N, C)
    surplus = probs - (labels[:, None] == np.arange(n_classes))  # (N, C)
    sums = np.bincount(cells.ravel(), weights=surplus.ravel(), minlength=n_bins * n_classes)
    return float(np.abs(sums).sum() / (n_rows * n_classes))


def risk_coverage(probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> pd.DataFrame:
    """Return the error share among the most confident rows, for every number of rows kept.

    Returns:
        N rows: ``coverage`` (share kept), ``risk`` (errors among the kept) and ``confidence`` (of
        the last row kept). Among rows of equal confidence the risk is that of a random order.
    """
    confidence, correct = _by_confidence(check_probs(probs, labels), labels)
    kept = np.arange(1, len(labels) + 1)
    risk = np.cumsum(1 - correct[::-1]) / kept
    return pd.DataFrame(
        {"coverage": kept / len(labels), "risk": risk, "confidence": confidence[::-1]}
    )


def area_under_risk_coverage(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]
) -> float:
    """Return the mean risk over all coverages (AURC), in [0, 1]; 0 is best."""
    return float(risk_coverage(probs, labels)["risk"].mean())


def summarise(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"], *, n_bins: int = 15
) -> dict[str, float]:
    """Return every measure of ``METRIC_NAMES`` by its key; shares are in [0, 1], not per cent."""
    return {
        "accuracy": accuracy(probs, labels),
        "balanced_accuracy": balanced_accuracy(probs, labels),
        "macro_f1": macro_f1(probs, labels),
        "nll": negative_log_likelihood(probs, labels),
        "brier": brier(probs, labels),
        "ece": expected_calibration_error(probs, labels, n_bins=n_bins),
        "ace": adaptive_calibration_error(probs, labels, n_bins=n_bins),
        "cwce": classwise_calibration_error(probs, labels, n_bins=n_bins),
        "aurc": area_under_risk_coverage(probs, labels),
    }


def _by_confidence(
    probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]
) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
    """Return confidences in rising order and the share correct among rows of that confidence.

    kNN votes tie often (k + 1 values at most for two classes). Averaging within a tie makes the
    result independent of the order in which the rows came.
    """
    correct = (probs.argmax(axis=1) == labels).astype(np.float64)
    values, group, count = np.unique(probs.max(axis=1), return_inverse=True, return_counts=True)
    share = np.bincount(group, weights=correct) / count
    return np.repeat(values, count), np.repeat(share, count)
