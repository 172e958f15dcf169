"""Calibration: what bends probabilities outside the attention, fitted on held-out rows.

    p = (1 - floor) p + floor / C, then p ** (1 / temperature), renormalised, then the least share

Fitted on rows that neither trained the model nor test it, exactly: no learning rate, no random
start. Their labels may be wrong with known chances T[i, j] = P(observed label j | true class i):
probabilities p of the true classes are then probabilities p @ T of the labels that are observed, so
a method is fitted to wrong labels and still predicts the true classes (the forward correction of
Patrini et al. 2017). A number e stands for the symmetric matrix: 1 - e on the diagonal and
e / (C - 1) everywhere else.

Axes: N rows, C classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq, minimize
from scipy.special import expit, logit, softmax

from attnknn.checks import check_probs, check_range

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


# Held-out rows that are all right would ask for a temperature of 0, and one wrong test row would
# then cost everything; 0.1 keeps every probability above zero.
TEMPERATURE_LIMITS = (0.1, 100.0)
FLOOR_LIMITS = (1e-6, 0.9)
FLOOR_STARTS = (1e-4, 1e-2, 0.2)
# What all classes share in the end, the same for every fitted method: a floor and a temperature
# near 0 would together leave nothing, and wrong labels may ask for both.
LEAST_SHARE = 1e-6


Probs = TypeVar("Probs")


class Calibration(NamedTuple):
    """A floor, then a temperature, then the least share; see ``apply_calibration``."""

    floor: float
    temperature: float


def with_floor(probs: Probs, floor: Any) -> Probs:
    """Return (1 - floor) · probs + floor / C: every class keeps at least floor / C.

    Args:
        probs: Probabilities, (N, C), an array or a tensor.
        floor: A number from 0 to 1, or one a row, (N, 1).
    """
    return (1 - floor) * probs + floor / probs.shape[1]


def apply_temperature(
    probs: Float[np.ndarray, "N C"], temperature: float
) -> Float[np.ndarray, "N C"]:
    """Return softmax(log probs / temperature): above 1 flatter, below 1 sharper.

    The order of the classes is kept, so accuracy does not change; a zero stays a zero.
    """
    check_range("temperature", temperature, low=0.0, low_open=True)
    probs = check_probs(probs)
    with np.errstate(divide="ignore"):
        return softmax(np.log(probs) / temperature, axis=1)


def apply_calibration(
    probs: Float[np.ndarray, "N C"], calibration: Calibration
) -> Float[np.ndarray, "N C"]:
    """Return ``probs`` with the floor, then tempered; no class keeps less than its share."""
    floored = with_floor(check_probs(probs), calibration.floor)
    return with_floor(apply_temperature(floored, calibration.temperature), LEAST_SHARE)


def fit_temperature(logits: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the temperature in [0.1, 100] with the smallest negative log-likelihood.

    The likelihood is convex in 1 / temperature, so the root of its slope is the one optimum. Where
    there is none (every row right, or no information at all), the nearest limit comes back.

    Args:
        logits: Logits, or log-probabilities of any method. Minus infinity (probability 0) is
            allowed except at the label, where no temperature helps: ``with_floor`` first.
        labels: The true classes.
    """
    logits = _check_logits(logits, labels)
    of_label = logits[np.arange(len(labels)), labels]  # (N,)
    finite_logits = np.where(np.isfinite(logits), logits, 0.0)

    def slope(log_sharpness: float) -> float:
        weights = softmax(logits * np.exp(log_sharpness), axis=1)
        return float(((weights * finite_logits).sum(axis=1) - of_label).mean())

    flattest, sharpest = -np.log(TEMPERATURE_LIMITS[1]), -np.log(TEMPERATURE_LIMITS[0])
    if slope(flattest) >= 0:
        return TEMPERATURE_LIMITS[1]
    if slope(sharpest) <= 0:
        return TEMPERATURE_LIMITS[0]
    return float(np.exp(-brentq(slope, flattest, sharpest, xtol=1e-10)))


def _check_logits(logits: np.ndarray, labels: np.ndarray) -> Float[np.ndarray, "N C"]:
    logits = np.asarray(logits, dtype=np.float64)
    if np.isnan(logits).any() or (logits == np.inf).any():
        raise ValueError("logits must not hold NaN or plus infinity")
    if logits.ndim != 2 or (logits.max(axis=1) == -np.inf).any():
        raise ValueError(
            f"logits must be (N, C) with a finite entry in each row, got {logits.shape=}"
        )
    check_probs(softmax(logits, axis=1), labels)
    impossible = int((logits[np.arange(len(labels)), labels] == -np.inf).sum())
    if impossible:
        raise ValueError(
            "logits must be finite at the labels (give the probabilities a floor first), "
            f"got {impossible} labels of probability 0"
        )
    return logits


def fit_floor_and_temperature(
    probs: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    *,
    label_error: LabelError = 0.0,
    weights: Float[np.ndarray, "N"] | None = None,
    temperatures: tuple[float, float] = TEMPERATURE_LIMITS,
    floor_starts: Sequence[float] = FLOOR_STARTS,
    tolerance: float = 1e-13,
) -> Calibration:
    """Return the floor and temperature that together minimise the negative log-likelihood.

    Searched in logit floor and log temperature from several floors: a vote full of zeros and one
    without any have different optima.

    Args:
        probs: Probabilities of held-out rows.
        labels: Their labels.
        label_error: Share of these labels that is wrong, or the whole matrix of how classes turn
            into labels; see the head of this file.
        weights: How much each row counts; None counts all alike.
        temperatures: Smallest and largest temperature.
        floor_starts: Floors to search from.
        tolerance: Gain below which a step is the last.
    """
    probs = check_probs(probs, labels)
    chances = label_chances(label_error, labels, probs.shape[1])
    bounds = [tuple(logit(FLOOR_LIMITS)), tuple(np.log(temperatures))]
    settings = {"args": (probs, labels, chances, weights), "jac": True, "bounds": bounds}
    settings |= {"method": "L-BFGS-B", "options": {"ftol": tolerance, "gtol": 1e-9}}
    starts = [(logit(floor), 0.0) for floor in floor_starts]
    fits = [minimize(_floor_temperature_loss, start, **settings) for start in starts]
    best = min(fits, key=lambda fit: fit.fun)
    return Calibration(floor=float(expit(best.x[0])), temperature=float(np.exp(best.x[1])))


def _floor_temperature_loss(
    point: np.ndarray,
    probs: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    chances: Float[np.ndarray, "N C"] | None = None,
    weights: Float[np.ndarray, "N"] | None = None,
) -> tuple[float, np.ndarray]:
    """Return the mean negative log-likelihood and its slope in (logit floor, log temperature).

    With scores s, probabilities p = softmax(s), chances t of the observed label under each true
    class (of a right label, 1 at it) and least share e, loss = -log((1 - e) sum(p t) + e mean(t)),
    and d loss / d s = (1 - e) (p sum(p t) - p t) / exp(-loss).
    """
    floor, sharpness = expit(point[0]), np.exp(-point[1])
    n_rows, n_classes = probs.shape
    rows = np.arange(n_rows)
    smoothed = (1 - floor) * probs + floor / n_classes  # (N, C)
    log_smoothed = np.log(smoothed)
    scores = sharpness * log_smoothed
    scores -= scores.max(axis=1, keepdims=True)
    tempered = np.exp(scores)
    tempered /= tempered.sum(axis=1, keepdims=True)  # (N, C)

    if chances is None:
        of_label, mean_chance = tempered[rows, labels], 1 / n_classes
    else:
        of_label, mean_chance = (tempered * chances).sum(axis=1), chances.mean(axis=1)
    observed = (1 - LEAST_SHARE) * of_label + LEAST_SHARE * mean_chance
    gaps = tempered * of_label[:, None]
    if chances is None:
        gaps[rows, labels] -= of_label
    else:
        gaps -= tempered * chances
    gaps *= ((1 - LEAST_SHARE) / observed)[:, None]
    by_floor = (1 / n_classes - probs) / smoothed  # d log_smoothed / d floor
    floor_slope = sharpness * (gaps * by_floor).sum(axis=1) * floor * (1 - floor)
    sharp_slope = -sharpness * (gaps * log_smoothed).sum(axis=1)
    values = [-np.log(observed), floor_slope, sharp_slope]
    loss, *slope = np.average(values, axis=1, weights=weights)
    return float(loss), np.array(slope)
