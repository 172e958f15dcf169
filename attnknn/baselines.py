"""Fitted baselines: held-out queries choose k, distance temperature, floor and temperature.

A learned method is only worth something against plain methods that were given the same held-out
rows to tune on. Everything here chooses by negative log-likelihood.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from attnknn.calibrate import Calibration, fit_floor_and_temperature
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


def fit_baseline(name: str, neighbours: Neighbours, labels: Int[np.ndarray, " B"]) -> FittedMethod:
    """Return the best setting of a baseline on held-out queries."""
    return fit_method(candidates(name, neighbours.k), neighbours, labels)


def fit_method(
    methods: Sequence[Method], neighbours: Neighbours, labels: Int[np.ndarray, " B"]
) -> FittedMethod:
    """Return the method with the smallest held-out NLL, each with its own calibration."""
    return min((calibrate(method, neighbours, labels) for method in methods), key=lambda f: f.nll)


def calibrate(
    method: Method, neighbours: Neighbours, labels: Int[np.ndarray, " B"]
) -> FittedMethod:
    """Return ``method`` with the floor and temperature that suit the held-out queries best."""
    calibration = fit_floor_and_temperature(normalised(method.votes(neighbours)), labels)
    nll = negative_log_likelihood(predict(method, neighbours, calibration=calibration), labels)
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
