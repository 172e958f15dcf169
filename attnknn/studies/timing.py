"""Timing: actions measured in turns become medians with intervals, and sizes become exponents.

On a shared machine a slow minute hits whoever runs in it. Actions that are to be compared are
therefore measured in turns, round after round, and compared by medians.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import stats
from tqdm import tqdm

from attnknn.checks import check_count

Key = TypeVar("Key", bound=Hashable)


class Median(NamedTuple):
    """A median of ``n`` values with its interval; NaN limits where n is below 6."""

    median: float
    low: float
    high: float
    n: int


class Exponent(NamedTuple):
    """The slope of log time against log size with its interval; NaN limits below 3 sizes."""

    exponent: float
    low: float
    high: float
    n: int


def time_in_turns(
    actions: Mapping[Key, Callable[[], object]],
    *,
    repeats: int,
    budget: float = float("inf"),
    desc: str = "timing",
    progress: bool = True,
) -> dict[Key, list[float]]:
    """Return the wall seconds of every action, measured in turns.

    Args:
        actions: What to time, by any name.
        repeats: Rounds. Every action runs once in the first.
        budget: Seconds after which an action is not repeated any more.
        desc: Title of the progress bar.
        progress: Show a progress bar.
    """
    check_count("repeats", repeats)
    times: dict[Key, list[float]] = {name: [] for name in actions}
    with tqdm(total=repeats * len(actions), desc=desc, disable=not progress, leave=False) as bar:
        for _ in range(repeats):
            for name, action in actions.items():
                if sum(times[name]) < budget:
                    times[name].append(_seconds(action))
                bar.update()
    return times


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def median_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95) -> Median:
    """Return the median and its exact interval between order statistics.

    Of n values the j-th smallest and the j-th largest enclose the true median unless fewer than j
    lie on one side of it, which is a matter of coin tosses: no shape of the noise is assumed.
    """
    ordered, n = np.sort(values), len(values)
    ranks = [j for j in range(1, n // 2 + 1) if 2 * stats.binom.cdf(j - 1, n, 0.5) <= 1 - level]
    low, high = (ordered[ranks[-1] - 1], ordered[-ranks[-1]]) if ranks else (np.nan, np.nan)
    return Median(float(np.median(ordered)), float(low), float(high), n)


def fit_exponent(
    sizes: Sequence[int], seconds: Sequence[float], *, level: float = 0.95
) -> Exponent:
    """Return b of seconds = a * size ** b, by least squares on logarithms, with its t-interval.

    Args:
        sizes: Two or more different sizes.
        seconds: Time at each size.
        level: Confidence of the interval.
    """
    n = len(set(sizes))
    if n < 2:
        raise ValueError(f"sizes must hold at least 2 different values, got sizes={list(sizes)}")
    if min(seconds) <= 0:
        raise ValueError(f"seconds must be above 0, got seconds={list(seconds)}")
    fit = stats.linregress(np.log(sizes), np.log(seconds))
    degrees = len(sizes) - 2
    half = stats.t.ppf((1 + level) / 2, degrees) * fit.stderr if degrees > 0 else float("nan")
    return Exponent(float(fit.slope), float(fit.slope - half), float(fit.slope + half), n)
