"""Parameters: what was asked for becomes a plan, or is refused by name."""

import math
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state

from attnknn.checks import check_count, check_one_of, check_range
from attnknn.choices import BACKBONE_NAMES
from attnknn.config import check_field_names
from attnknn.estimator.embedding import METRICS, UNSCALED
from attnknn.estimator.fitting import Plan

MISSING = ("error", "impute")
NEW_CLASSES = ("error", "add")


def plan_for(model: BaseEstimator) -> Plan:
    """Return what a classifier's parameters ask for, or refuse it."""
    if model.n_neighbors != "auto":
        check_count("n_neighbors", model.n_neighbors)
    if not callable(model.embedder) and not str(model.embedder).startswith("timm:"):
        check_one_of("embedder", model.embedder, ("auto", *BACKBONE_NAMES))
    check_one_of("metric", model.metric, ("auto", *METRICS))
    if callable(model.embedder) and model.metric not in ("auto", *UNSCALED):
        raise ValueError(
            f"metric must be 'auto' or one of {UNSCALED} for an embedder of your own, whose "
            f"numbers are not scaled, got metric={model.metric!r}"
        )
    check_one_of("missing", model.missing, MISSING)
    check_one_of("new_classes", model.new_classes, NEW_CLASSES)
    if model.label_noise != "auto":
        check_number("label_noise", model.label_noise)
    check_reject(model.reject_below)
    if model.training is not None and not isinstance(model.training, Mapping):
        raise ValueError(f"training must be settings by name, got training={model.training!r}")
    check_field_names(model.training or {})
    check_number("verbose", model.verbose)
    check_jobs(model.n_jobs)
    if not isinstance(model.index, str):
        raise ValueError(f"index must be the name of an index, got index={model.index!r}")
    return Plan(
        embedder=model.embedder,
        metric=model.metric,
        n_neighbours=None if model.n_neighbors == "auto" else int(model.n_neighbors),
        label_noise=None if model.label_noise == "auto" else float(model.label_noise),
        impute=model.missing == "impute",
        training=model.training or {},
        trust_neighbours=check_count("trust_neighbours", model.trust_neighbours),
        index=model.index,
        seed=_seed(model.random_state),
        progress=model.verbose > 0,
    )


def check_reject(reject_below: Any) -> None:
    """Refuse what is no threshold; infinity, never to answer, is one."""
    if reject_below is None:
        return
    check_number("reject_below", reject_below)
    if reject_below != math.inf:
        check_range("reject_below", reject_below, low=0, high=1)


def check_jobs(n_jobs: Any) -> int | None:
    """Return a number of threads as joblib counts them, from the end where it is negative."""
    if n_jobs is None:
        return None
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, Integral) or n_jobs == 0:
        raise ValueError(f"n_jobs must be None or an integer other than 0, got {n_jobs=}")
    return int(n_jobs)


def _seed(random_state: Any) -> int:
    """Return a seed; a generator gives another one every time."""
    try:
        return int(check_random_state(random_state).randint(2**31 - 1))
    except ValueError:
        rule = "be None, a RandomState or an integer from 0 to 2**32 - 1"
        raise ValueError(f"random_state must {rule}, got {random_state=}") from None


def check_noise(label_noise: Any, n_classes: int) -> None:
    """Refuse a share of wrong labels from which nothing can be learned: that of chance."""
    if label_noise != "auto":
        check_range("label_noise", label_noise, low=0, high=1 - 1 / n_classes, high_open=True)


def check_number(name: str, value: Any) -> float:
    """Return a number as a float, or refuse it."""
    if isinstance(value, Real):
        with suppress(OverflowError):  # an integer beyond all floats
            return float(value)
    raise ValueError(f"{name} must be a number, got {name}={value!r}")
