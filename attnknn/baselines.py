"""Fitted baselines: held-out queries choose k, distance temperature, floor and temperature.

A learned method is only worth something against plain methods that were given the same held-out
rows to tune on. Everything here chooses by negative log-likelihood.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from attnknn.calibrate import (
    Calibration,
    apply_calibration,
    fit_floor_and_temperature,
    observed_nll,
)
from attnknn.checks import check_one_of
from attnknn.classify import AdaptiveK, Distance, Method, Prototypes, Uniform, normalised, predict
from attnknn.measure import negative_log_likelihood
from attnknn.neighbours import Neighbours

KS = (5, 10, 20, 30, 50)
DISTANCE_TEMPERATURES = (0.02, 0.05, 0.1, 0.2, 0.5)
PROTOTYPE_SCALES = (5.0, 10.0, 20.0, 40.0)
ADAPTIVE_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
BASELINES = ("uniform", "distance", "prototypes")


@dataclass(frozen=True)
class FittedMethod:
    """A method with the calibration that goes with it.

    Attributes:
        method: How neighbours are weighed.
        calibration: Floor and temperature.
        nll: Negative log-likelihood on the queries it was chosen on.
    """

    method: Method
    calibration: Calibration
    nll: float

    def predict(self, neighbours: Neighbours) -> Float[np.ndarray, "B C"]:
        """Return class probabilities."""
        return predict(self.method, neighbours, calibration=self.calibration)


def candidates(name: str, k_max: int) -> list[Method]:
    """Return the settings of a baseline that are tried."""
    check_one_of("name", name, BASELINES)
    ks = [k for k in KS if k <= k_max] or [k_max]
    if name == "uniform":
        return [Uniform(k) for k in ks]
    if name == "distance":
        return [Distance(k, tau) for k in ks for tau in DISTANCE_TEMPERATURES]
    return [Prototypes(scale) for scale in PROTOTYPE_SCALES]


def fit_baseline(
    name: str, neighbours: Neighbours, labels: Int[np.ndarray, " B"], *, label_error: float = 0.0
) -> FittedMethod:
    """Return the best setting of a baseline on held-out queries.

    Args:
        name: One of ``BASELINES``.
        neighbours: The held-out queries' neighbours; settings are tried up to its k.
        labels: Labels of the held-out queries.
        label_error: Share of these labels that is wrong; corrected for, as for the attention.
    """
    return fit_method(candidates(name, neighbours.k), neighbours, labels, label_error=label_error)


def fit_method(
    methods: Sequence[Method],
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    label_error: float = 0.0,
) -> FittedMethod:
    """Return the method with the smallest held-out NLL, each with its own calibration."""
    fitted = (calibrate(each, neighbours, labels, label_error=label_error) for each in methods)
    return min(fitted, key=lambda each: each.nll)


def calibrate(
    method: Method,
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    label_error: float = 0.0,
) -> FittedMethod:
    """Return ``method`` with the floor and temperature that suit the held-out queries best."""
    votes = normalised(method.votes(neighbours))
    calibration = fit_floor_and_temperature(votes, labels, label_error=label_error)
    nll = observed_nll(apply_calibration(votes, calibration), labels, label_error)
    return FittedMethod(method, calibration, nll)


def fit_adaptive_k(
    method: Method,
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    thresholds: Iterable[float] = ADAPTIVE_THRESHOLDS,
) -> AdaptiveK:
    """Return adaptive k at the entropy threshold with the smallest held-out NLL."""
    tried = [AdaptiveK(method, threshold) for threshold in thresholds]
    return min(tried, key=lambda each: negative_log_likelihood(predict(each, neighbours), labels))
