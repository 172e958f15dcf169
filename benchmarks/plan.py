"""The plan past one machine: measured figures -> what more rows need; ``page`` writes it down.

memory(N)   = N * (row bytes + index bytes a row + label bytes a row)
speed(N)    = measured speed * (measured rows / N) ** exponent
shards      = memory(N) / memory that a machine has for it
trust(N)    = N / speed(N), once
"""

import math
from dataclasses import dataclass
from inspect import signature
from typing import Any

from attnknn.core.bank import MemoryBank

ROWS = (10**6, 10**7, 10**8)
CLASSES = 100  # assumed: the label shares around every row are a table of rows x classes
TRUST_NEIGHBOURS = signature(MemoryBank).parameters["trust_neighbours"].default
USABLE = 0.7  # of a machine's memory: the rest is for the system, queries and builds
# How the build grows beyond the rows themselves: a graph's paths by log N, and N rows compared
# with 4 sqrt(N) list centres by sqrt(N).
BUILD_EXPONENTS = {"exact": 1.0, "hnsw": 1.0, "ivfpq": 1.5, "disk": 1.5}


@dataclass(frozen=True)
class Machine:
    """What one machine has; speed is taken to grow with the cores, as queries are independent."""

    memory_gb: float
    cores: int


@dataclass(frozen=True)
class Need:
    """What a number of rows needs on one kind of machine.

    Attributes:
        n_rows: Rows.
        index: Index.
        memory_gb: Memory of rows, index and labels on all machines together.
        disk_gb: Of which on disk, where the index keeps them there.
        machines: Shards, each with its part of the rows; a query goes to all of them.
        queries_per_second: Of all shards together; twice the machines make it twice as much.
        build_hours: Each machine builds its own part.
        trust_hours: The leave-one-out search of all rows, once.
    """

    n_rows: int
    index: str
    memory_gb: float
    disk_gb: float
    machines: int
    queries_per_second: float
    build_hours: float
    trust_hours: float


def label_bytes(n_classes: int) -> int:
    """Return what a bank keeps for the label of one row, in bytes, beside the row and its index.

    Its label, its own neighbours, the shares of the labels among them (one number a class), its
    trust and its weight in the prototype.
    """
    return 8 + 8 * TRUST_NEIGHBOURS + 4 * n_classes + 4 + 4


def need(
    n_rows: int,
    index: str,
    figures: dict[str, Any],
    slopes: dict[str, float],
    machine: Machine,
    *,
    n_classes: int = CLASSES,
) -> Need:
    """Return what ``n_rows`` rows need.

    Args:
        n_rows: Rows to plan for.
        index: Index to plan with.
        figures: What ``million`` measured of this index, and ``threads``.
        slopes: Fitted exponents of the search time in n.
        machine: The machines that there are.
        n_classes: Number of classes.
    """
    row_bytes = 4 * figures["dim"]
    on_disk = row_bytes + figures["disk_bytes"] / figures["n_rows"] if index == "disk" else 0
    in_memory = max(0, figures["index_bytes"]) / figures["n_rows"]
    in_memory += label_bytes(n_classes) + (0 if index == "disk" else row_bytes)
    memory_gb = n_rows * in_memory / 1e9
    machines = max(1, math.ceil(memory_gb / (USABLE * machine.memory_gb)))
    part, cores = n_rows / machines, machine.cores / figures["threads"]
    # More rows never make a search faster, whatever the noise of a fit says.
    slope = max(0.0, slopes.get("ivfpq" if index == "disk" else index, 1.0))
    speed = figures["queries_per_second"] * cores * (figures["n_rows"] / part) ** slope
    growth = (part / figures["n_rows"]) ** BUILD_EXPONENTS[index]
    if index == "hnsw":
        growth *= math.log(part) / math.log(figures["n_rows"])
    return Need(
        n_rows=n_rows,
        index=index,
        memory_gb=memory_gb,
        disk_gb=n_rows * on_disk / 1e9,
        machines=machines,
        queries_per_second=speed,
        build_hours=figures["build_seconds"] / cores * growth / 3600,
        trust_hours=n_rows / speed / 3600,
    )


def queries_to_pay(build_seconds: float, speed: float, exact_speed: float) -> float:
    """Return after how many queries a build has paid for itself; infinite when never."""
    saved = 1 / exact_speed - 1 / speed  # seconds a query
    return build_seconds / saved if saved > 0 else math.inf


def foretold(figures: dict[str, Any], slope: float, n_rows: int) -> float:
    """Return the queries a second at ``n_rows``, by the formula, from those of fewer rows."""
    return figures["queries_per_second"] * (figures["n_rows"] / n_rows) ** max(0.0, slope)
