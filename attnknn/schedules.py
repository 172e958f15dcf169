"""Schedules: the step of a training run becomes a factor on the learning rate.

Every schedule is a pure function, so a resumed run continues where it stopped, to the last digit.
"""

import math
from collections.abc import Callable

from attnknn.checks import check_count, check_one_of

TRIANGLE_START, TRIANGLE_PEAK, TRIANGLE_END = 0.2, 0.23, 0.07


def lr_factor(
    step: int,
    *,
    schedule: str,
    epochs: int,
    steps_per_epoch: int,
    warmup_epochs: int = 0,
    restart_epochs: int = 5,
    restart_factor: int = 2,
) -> float:
    """Return the factor on the peak learning rate at ``step``.

    A linear warm-up comes first; the schedule fills the steps after it.

    Args:
        step: Optimiser step, from 0.
        schedule: "triangle" (0.2 up to 1 at 23 %, down to 0.07), "linear" (1 to 0), "cosine"
            (1 to 0) or "warm_restarts" (cosines that start again).
        epochs: Length of the whole run.
        steps_per_epoch: Optimiser steps of one epoch.
        warmup_epochs: Length of the warm-up.
        restart_epochs: Warm restarts: length of the first cosine.
        restart_factor: Warm restarts: each cosine is this many times as long as the last.
    """
    check_one_of("schedule", schedule, SCHEDULES)
    check_count("steps_per_epoch", steps_per_epoch)
    warmup = warmup_epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    total = max(epochs * steps_per_epoch - warmup, 1)
    first = restart_epochs * steps_per_epoch
    return SCHEDULES[schedule](step - warmup, total, first, restart_factor)


def _triangle(step: int, total: int, first: int, growth: int) -> float:
    peak = TRIANGLE_PEAK * total
    if step < peak:
        return TRIANGLE_START + (1 - TRIANGLE_START) * step / peak
    return 1 + (TRIANGLE_END - 1) * (step - peak) / (total - peak)


def _linear(step: int, total: int, first: int, growth: int) -> float:
    return 1 - step / total


def _cosine(step: int, total: int, first: int, growth: int) -> float:
    return (1 + math.cos(math.pi * step / total)) / 2


def _warm_restarts(step: int, total: int, first: int, growth: int) -> float:
    start, length = _cycle_at(step, total, first, growth)
    return _cosine(step - start, length, first, growth)


def _cycle_at(step: int, total: int, first: int, growth: int) -> tuple[int, int]:
    """Return the first step and the length of the cycle that ``step`` falls into.

    The last cycle always ends with the run: one that the run would cut near its peak is shortened,
    and a rest shorter than the first cycle lengthens the cycle before it.
    """
    start, length = 0, first
    while True:
        if total - start - length < first:  # no room for another cycle
            return start, total - start
        if step < start + length:
            return start, length
        start, length = start + length, length * growth


SCHEDULES: dict[str, Callable[[int, int, int, int], float]] = {
    "triangle": _triangle,
    "linear": _linear,
    "cosine": _cosine,
    "warm_restarts": _warm_restarts,
}
