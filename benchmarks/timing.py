"""Timing: actions measured in turns, the ratios between them, and rows of a given size.

Absolute times on a shared machine say little. What runs in the same second meets the same load, so
every figure is a ratio of two times of one round, and the rounds show how far it can be trusted.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

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


# ---- How much is measured, and rows of a given size.


@dataclass(frozen=True)
class Sizes:
    """How large the measured cases are.

    Attributes:
        rows: Memory rows.
        dim: Width of a row.
        queries: Queries searched.
        k: Neighbours that vote.
        few: Neighbours of a shorter vote, where k makes a difference.
        images: Images embedded.
        batch: Images in a training step.
        estimator_rows: Rows the scikit-learn style classifiers are fitted on.
        fit_queries: Held-out queries of a stage-2 fit.
        fit_epochs: Its epochs.
        side: Side of AFMP's images.
        rounds: Rounds of each measurement.
    """

    rows: int = 50_000
    dim: int = 256
    queries: int = 10_000
    k: int = 50
    few: int = 16
    images: int = 2_000
    batch: int = 500
    estimator_rows: int = 10_000
    fit_queries: int = 5_000
    fit_epochs: int = 40
    side: int = 96
    rounds: int = 3


FULL = Sizes()
QUICK = Sizes(
    rows=3_000,
    dim=32,
    queries=400,
    k=10,
    few=3,
    images=64,
    batch=32,
    estimator_rows=400,
    fit_queries=200,
    fit_epochs=2,
    side=64,
    rounds=2,
)


def unit(rows: np.ndarray) -> np.ndarray:
    """Return float32 rows of length 1."""
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def random_rows(n_rows: int, dim: int, seed: int) -> np.ndarray:
    """Return unit rows in all directions: an exact search takes as long wherever they lie."""
    return unit(np.random.default_rng(seed).standard_normal((n_rows, dim), dtype=np.float32))


def clusters_of(n_rows: int) -> int:
    """Return the number of clusters that so many rows are drawn from."""
    return max(10, n_rows // 1000)


def clustered_rows(n_rows: int, dim: int, seed: int, *, n_clusters: int = 1000) -> np.ndarray:
    """Return unit rows as embeddings lie: clusters, few directions of change, some noise.

    An approximate search lives on such structure; in all directions at once nothing is near. The
    clusters are the same for every seed, so that queries come from where the rows are.
    """
    shape = np.random.default_rng(12345)
    n_directions = min(32, dim)
    centres = unit(shape.standard_normal((n_clusters, dim), dtype=np.float32))
    directions = unit(shape.standard_normal((n_directions, dim), dtype=np.float32))
    rng = np.random.default_rng(seed)
    rows = np.empty((n_rows, dim), dtype=np.float32)
    for start in range(0, n_rows, 100_000):
        part = rows[start : start + 100_000]
        change = rng.standard_normal((len(part), n_directions), dtype=np.float32)
        noise = rng.standard_normal(part.shape, dtype=np.float32)
        part[:] = centres[rng.integers(n_clusters, size=len(part))]
        part += 0.6 * change @ directions / np.sqrt(n_directions) + 0.4 * noise / np.sqrt(dim)
        part[:] = unit(part)
    return rows
