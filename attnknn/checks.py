"""Argument checks: a value comes back unchanged, or a clear error is raised.

Every message has one form: ``<name> must <rule>, got <name>=<value>``.
"""

import difflib
import math
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Int

Number = TypeVar("Number", int, float)
# float32 rows of a thousand classes sum to 1 within about 1e-5.
ROW_SUM_TOLERANCE = 1e-4


def nearest_name(word: Any, known: Iterable[str]) -> str:
    """Return a hint naming the known word closest to ``word``, or an empty string."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_one_of(name: str, value: Any, allowed: Collection[str]) -> str:
    """Return ``value`` if it is one of ``allowed``."""
    if value not in allowed:
        listed = ", ".join(repr(option) for option in allowed)
        hint = nearest_name(value, allowed)
        raise ValueError(f"{name} must be one of {listed}, got {name}={value!r}{hint}")
    return value


def check_range(
    name: str,
    value: Number,
    *,
    low: int | float = -math.inf,
    high: int | float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
) -> Number:
    """Return ``value`` if it is a finite number between ``low`` and ``high``."""
    inside_low = value > low if low_open else value >= low
    inside_high = value < high if high_open else value <= high
    if math.isfinite(value) and inside_low and inside_high:
        return value
    at_least = f"{'above' if low_open else 'at least'} {low:g}"
    at_most = f"{'below' if high_open else 'at most'} {high:g}"
    limits = [at_least] * (low > -math.inf) + [at_most] * (high < math.inf)
    rules = limits if math.isfinite(value) else ["finite", *limits]
    raise ValueError(f"{name} must be {' and '.join(rules)}, got {name}={value!r}")


def check_count(name: str, value: Any, *, low: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {name}={value!r}")
    return int(value)


def check_labels(
    name: str, labels: np.ndarray, *, n_rows: int, n_classes: int
) -> Int[np.ndarray, " N"]:
    """Return a 64-bit copy of ``labels`` if there is one per row, each in 0 .. n_classes - 1."""
    if labels.shape != (n_rows,):
        raise ValueError(f"{name} must have shape ({n_rows},), got shape {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        # A cast would turn a class 1.7 into 1, and a missing one (NaN) into anything.
        raise ValueError(f"{name} must be integers, got values of type {labels.dtype}")
    if n_rows and (labels.min() < 0 or labels.max() >= n_classes):
        raise ValueError(
            f"{name} must lie in 0..{n_classes - 1}, got {labels.min()}..{labels.max()}"
        )
    return np.array(labels, dtype=np.int64)


def check_finite(name: str, array: np.ndarray) -> np.ndarray:
    """Return ``array`` if it holds neither NaN nor infinity."""
    if not np.isfinite(array).all():
        bad = np.argwhere(~np.isfinite(array))
        where = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"{name} must be finite, got {len(bad)} NaN or infinite values, first at {where}"
        )
    return array


def check_probs(probs: np.ndarray, labels: np.ndarray | None = None) -> Float[np.ndarray, "N C"]:
    """Return ``probs`` in float64 if its rows are distributions and ``labels`` fit them."""
    probs = np.asarray(probs, dtype=np.float64)
    if probs.ndim != 2 or 0 in probs.shape:
        raise ValueError(f"probs must be a non-empty (N, C) table, got {probs.shape=}")
    check_finite("probs", probs)
    if probs.min() < 0:
        raise ValueError(f"probs must not be negative, got {probs.min()=}")
    worst = np.abs(probs.sum(axis=1) - 1).max()
    if worst > ROW_SUM_TOLERANCE:
        raise ValueError(
            f"probs must have rows that sum to 1, got a row that is off by {worst:.3g}"
        )
    if labels is not None:
        check_labels("labels", labels, n_rows=len(probs), n_classes=probs.shape[1])
    return probs
