"""Calibration on held-out rows: probabilities to better probabilities.

Axes: N rows, C classes. Everything is fitted on rows that neither trained the model nor test it,
and is exact and deterministic: no learning rate, no random start.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import brentq, minimize
from scipy.special import expit, logit, softmax

from attnknn.checks import check_one_of, check_range
from attnknn.evaluate.measure import check_probs

# ---- Wrong labels as a transition matrix: T[i, j] = P(observed label j | true class i).
#
# Probabilities p of the true classes become probabilities p @ T of the labels that are observed, so
# a method can be fitted to wrong labels and still predict the true classes: the forward correction
# (Patrini et al. 2017). A single number e stands for the symmetric matrix: 1 - e on the diagonal
# and
# e / (C - 1) everywhere else.
#
# Axes: N rows, C classes.

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


class Calibration(NamedTuple):
    """A floor, then a temperature, then the least share; see ``apply_calibration``."""

    floor: float
    temperature: float


def smooth(probs: Float[np.ndarray, "N C"], floor: float) -> Float[np.ndarray, "N C"]:
    """Return (1 - floor) · probs + floor / C: every class keeps at least floor / C."""
    check_range("floor", floor, low=0.0, high=1.0)
    probs = check_probs(probs)
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
    """Return ``probs`` smoothed by the floor, then tempered; no class keeps less than its share."""
    tempered = apply_temperature(smooth(probs, calibration.floor), calibration.temperature)
    return smooth(tempered, LEAST_SHARE)


def fit_temperature(logits: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> float:
    """Return the temperature in [0.1, 100] with the smallest negative log-likelihood.

    The likelihood is convex in 1 / temperature, so the root of its slope is the one optimum. Where
    there is none (every row right, or no information at all), the nearest limit comes back.

    Args:
        logits: Logits, or log-probabilities of any method. Minus infinity (probability 0) is
            allowed except at the label, where no temperature helps: ``smooth`` first.
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
            "logits must be finite at the labels (smooth the probabilities first), "
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
            into labels; see ``attnknn.evaluate.calibrate``.
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


# ---- Answers of several classes or of none: probabilities to prediction sets and abstentions.
#
# Axes: N rows, C classes. Thresholds come from rows that neither trained the model nor test it.

CONFORMAL_SCORES = ("aps", "lac")


def fit_conformal(
    probs: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    coverage: float,
    *,
    score: str = "aps",
    rng: np.random.Generator | None = None,
) -> float:
    """Return the split-conformal threshold for sets that hold the label with ``coverage``.

    The guarantee (exchangeable rows, averaged over them) is at least ``coverage`` in finite
    samples: the threshold is the ceil((N + 1) · coverage)-th smallest score, and infinite, so that
    every class enters, where N is too small for that rank.

    Args:
        probs: Probabilities of held-out rows.
        labels: Their true classes.
        coverage: Wanted share of sets that hold the label, in (0, 1).
        score: ``"lac"`` (1 - probability of the class; smallest sets) or ``"aps"`` (mass of the
            classes at least as probable; adapts to hard rows).
        rng: Randomises APS by a uniform share of the class's own mass, which makes its coverage
            tight. Without it APS is deterministic and covers more than asked.
    """
    check_range("coverage", coverage, low=0.0, high=1.0, low_open=True, high_open=True)
    scores = _class_scores(check_probs(probs, labels), score, rng)
    of_label = np.sort(scores[np.arange(len(labels)), labels])
    # The small term keeps an exact product such as 10 · 0.9 from being rounded up to the next rank.
    rank = int(np.ceil((len(labels) + 1) * coverage - 1e-9))
    return float(of_label[rank - 1]) if rank <= len(labels) else float("inf")


def predict_sets(
    probs: Float[np.ndarray, "N C"],
    threshold: float,
    *,
    score: str = "aps",
    never_empty: bool = True,
    rng: np.random.Generator | None = None,
) -> Bool[np.ndarray, "N C"]:
    """Return which classes are in the prediction set of each row.

    Args:
        probs: Probabilities of new rows.
        threshold: From ``fit_conformal`` with the same ``score``.
        score: ``"aps"`` or ``"lac"``.
        never_empty: Put the most probable class in every set. This can only raise the coverage;
            without it an empty set says "unlike anything held out".
        rng: Randomises APS; pass one exactly when the threshold was fitted with one.
    """
    probs = check_probs(probs)
    sets = _class_scores(probs, score, rng) <= threshold  # (N, C)
    if never_empty:
        sets[np.arange(len(probs)), probs.argmax(axis=1)] = True
    return sets


def _class_scores(
    probs: Float[np.ndarray, "N C"], score: str, rng: np.random.Generator | None
) -> Float[np.ndarray, "N C"]:
    """Return the nonconformity of every class of every row; smaller fits better."""
    check_one_of("score", score, CONFORMAL_SCORES)
    if score == "lac":
        return 1 - probs
    order = np.argsort(-probs, axis=1, kind="stable")
    sorted_probs = np.take_along_axis(probs, order, axis=1)
    share = 1.0 if rng is None else rng.uniform(size=(len(probs), 1))
    mass = np.cumsum(sorted_probs, axis=1) - (1 - share) * sorted_probs
    scores = np.empty_like(mass)
    np.put_along_axis(scores, order, mass, axis=1)
    return scores


def describe_sets(sets: Bool[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> dict[str, float]:
    """Return the sets' coverage, mean size, and shares of single-class and empty sets."""
    sizes = sets.sum(axis=1)
    return {
        "coverage": float(sets[np.arange(len(labels)), labels].mean()),
        "mean_size": float(sizes.mean()),
        "single_share": float((sizes == 1).mean()),
        "empty_share": float((sizes == 0).mean()),
    }


def rejection_threshold(
    probs: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    *,
    coverage: float | None = None,
    target_risk: float | None = None,
    label_error: float = 0.0,
) -> float:
    """Return the confidence below which to abstain; rows at the threshold are answered.

    Args:
        probs: Probabilities of held-out rows.
        labels: Their classes.
        coverage: Answer at least this share of rows, as few more as ties allow.
        target_risk: Answer as many rows as possible with at most this share of errors on the
            held-out rows (no finite-sample guarantee). Infinite, so that nothing is answered,
            where even the most confident rows err more.
        label_error: e, the share of ``labels`` that is wrong whatever the row, each in favour of
            any other class alike. Answers of risk r then differ from a label with probability
            e + r (1 - e C / (C - 1)), which is solved for r, within [0, 1].
    """
    if (coverage is None) == (target_risk is None):
        raise ValueError(
            f"coverage or target_risk must be given, and not both, got {coverage=}, {target_risk=}"
        )
    probs = check_probs(probs, labels)
    confidence = np.sort(probs.max(axis=1))[::-1]
    if coverage is not None:
        check_range("coverage", coverage, low=0.0, high=1.0, low_open=True)
        return float(confidence[int(np.ceil(coverage * len(probs) - 1e-9)) - 1])
    check_range("target_risk", target_risk, low=0.0, high=1.0)
    values, group = np.unique(-probs.max(axis=1), return_inverse=True)  # most confident first
    errors = np.bincount(group, weights=probs.argmax(axis=1) != labels)
    chance = 1 - 1 / probs.shape[1]
    check_range("label_error", label_error, low=0, high=chance, high_open=True)
    differs = np.cumsum(errors) / np.cumsum(np.bincount(group))
    risk = np.clip((differs - label_error) / (1 - label_error / chance), 0, 1)
    allowed = np.flatnonzero(risk <= target_risk)
    return float(-values[allowed[-1]]) if len(allowed) else float("inf")
