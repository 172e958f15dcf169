"""Timing: actions measured in turns, and the ratios between them.

Absolute times on a shared machine say little. What runs in the same second meets the same load, so
every figure is a ratio of two times of one round, and the rounds show how far it can be trusted.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

Action = Callable[[], Any]


@dataclass(frozen=True)
class Ratio:
    """One row of the bench table.

    Attributes:
        name: Short name, the key in the baseline.
        title: What is divided by what, in words.
        values: The ratio of each round.
        better: Whether a larger ("higher") or a smaller ("lower") ratio is better.
        target: What it should reach, where there is a target.
        note: What a reader must know beside it.
    """

    name: str
    title: str
    values: tuple[float, ...]
    better: Literal["higher", "lower"]
    target: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """The middle of all rounds."""
        return median(self.values)

    def as_row(self) -> dict[str, Any]:
        """Return the row as it is stored."""
        stored = asdict(self) | {"values": [round(value, 5) for value in self.values]}
        spread = {"median": self.median, "low": min(self.values), "high": max(self.values)}
        return stored | {name: round(value, 5) for name, value in spread.items()}


@dataclass(frozen=True)
class Missing:
    """A row that could not be measured here, and why."""

    name: str
    title: str
    reason: str

    def as_row(self) -> dict[str, Any]:
        """Return the row as it is stored."""
        return asdict(self)


def seconds(action: Action) -> float:
    """Return the wall time of one call; an action that returns a float has timed itself."""
    start = time.perf_counter()
    result = action()
    taken = time.perf_counter() - start
    return result if isinstance(result, float) else taken


def interleaved(actions: Mapping[str, Action], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each action in each round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            taken = seconds(action)
            if number:
                times[name].append(taken)
    return times


def divided(top: list[float], bottom: list[float]) -> tuple[float, ...]:
    """Return the ratio of every round."""
    return tuple(a / b for a, b in zip(top, bottom, strict=True))
