"""Fitted baselines: held-out queries choose k, distance temperature, floor and temperature.

A learned method is only worth something against plain methods that were given the same held-out
rows to tune on. Everything here chooses by negative log-likelihood.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from attnknn.checks import check_one_of
from attnknn.core.calibrate import (
    Calibration,
    LabelError,
    apply_calibration,
    fit_floor_and_temperature,
    observed_nll,
)
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import (
    AdaptiveK,
    Distance,
    Method,
    PriorCorrected,
    Prototypes,
    Uniform,
    normalised,
    predict,
)
from attnknn.evaluate.measure import negative_log_likelihood

KS = (1, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
DISTANCE_TEMPERATURES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SQUARED_TEMPERATURES = (0.003, 0.01, 0.05, 0.2)
PROTOTYPE_SCALES = (5.0, 10.0, 20.0, 40.0)
PRIOR_STRENGTHS = (0.0, 0.5, 1.0)
ADAPTIVE_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# Before the final calibration the NLL of a setting may be off a little, and one start will do.
ROUGHLY = {"tolerance": 1e-5, "floor_starts": (1e-2,)}
BASELINES = ("uniform", "distance", "prototypes")
# Of use only where the classes of the memory differ in size.
IMBALANCE_BASELINES = ("prior-corrected",)
# A grid is judged on some of many queries; the best few settings are then judged on all. On MNIST
# pixels 1 000 of 5 000 queries ranked the best distance weights 13th, 2 000 ranked them first.
JUDGED_QUERIES = 2000
FINALISTS = 5


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
    check_one_of("name", name, BASELINES + IMBALANCE_BASELINES)
    ks = [k for k in KS if k <= k_max] or [k_max]
    if name == "uniform":
        return [Uniform(k) for k in ks]
    if name == "distance":
        plain = [Distance(k, tau) for k in ks for tau in DISTANCE_TEMPERATURES]
        squared = [Distance(k, tau, squared=True) for k in ks for tau in SQUARED_TEMPERATURES]
        return plain + squared
    if name == "prior-corrected":
        settings = itertools.product(ks, DISTANCE_TEMPERATURES, PRIOR_STRENGTHS)
        return [PriorCorrected(*each) for each in settings]
    return [Prototypes(scale) for scale in PROTOTYPE_SCALES]


def fit_baseline(
    name: str,
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    label_error: LabelError = 0.0,
    weights: Float[np.ndarray, " B"] | None = None,
) -> FittedMethod:
    """Return the best setting of a baseline on held-out queries.

    Args:
        name: One of ``BASELINES`` or ``IMBALANCE_BASELINES``.
        neighbours: The held-out queries' neighbours; settings are tried up to its k.
        labels: Labels of the held-out queries.
        label_error: Share of these labels that is wrong, or how classes turn into labels (see
            ``attnknn.core.calibrate``); corrected for, as for the attention.
        weights: How much each query counts; None counts all alike.
    """
    options = {"label_error": label_error, "weights": weights}
    return fit_method(candidates(name, neighbours.k), neighbours, labels, **options)


def fit_method(
    methods: Sequence[Method],
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    label_error: LabelError = 0.0,
    weights: Float[np.ndarray, " B"] | None = None,
) -> FittedMethod:
    """Return the method with the smallest held-out NLL, each with its own calibration.

    All are calibrated roughly, on at most ``JUDGED_QUERIES`` evenly spaced queries, and the best
    few to the end on all: the last digits take most of the time, and decide nothing between
    settings that are far apart.
    """
    options = {"label_error": label_error, "weights": weights}
    if len(methods) > FINALISTS:
        n_judges = min(len(labels), JUDGED_QUERIES)
        some = np.linspace(0, len(labels) - 1, n_judges).round().astype(np.int64)
        few = options | {"weights": None if weights is None else weights[some]}
        part = neighbours.of_queries(torch.from_numpy(some))
        rough = [calibrate(m, part, labels[some], **ROUGHLY, **few) for m in methods]
        methods = [each.method for each in sorted(rough, key=lambda each: each.nll)[:FINALISTS]]
    fitted = (calibrate(each, neighbours, labels, **options) for each in methods)
    return min(fitted, key=lambda each: each.nll)


def calibrate(
    method: Method,
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    label_error: LabelError = 0.0,
    weights: Float[np.ndarray, " B"] | None = None,
    **search: Any,
) -> FittedMethod:
    """Return ``method`` with the floor and temperature that suit the held-out queries best.

    ``search`` says how carefully to look for them; see ``fit_floor_and_temperature``.
    """
    votes = normalised(method.votes(neighbours))
    options = {"label_error": label_error, "weights": weights}
    calibration = fit_floor_and_temperature(votes, labels, **options, **search)
    nll = observed_nll(apply_calibration(votes, calibration), labels, **options)
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
