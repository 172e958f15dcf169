"""The plan past one machine: measured figures -> what more rows need, as a page of Markdown.

memory(N)   = N * (row bytes + index bytes a row)
speed(N)    = measured speed * (measured rows / N) ** exponent
shards      = memory(N) / memory that a machine has for it
trust(N)    = N / speed(N), once
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnknn.files import read_json, write_text
from benchmarks import exponents, million

ROWS = (10**6, 10**7, 10**8)
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
        memory_gb: Memory of rows and index on all machines together.
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


def need(
    n_rows: int, index: str, figures: dict[str, Any], slopes: dict[str, float], machine: Machine
) -> Need:
    """Return what ``n_rows`` rows need.

    Args:
        n_rows: Rows to plan for.
        index: Index to plan with.
        figures: What ``million`` measured of this index, and ``threads``.
        slopes: Fitted exponents of the search time in n.
        machine: The machines that there are.
    """
    row_bytes = 4 * figures["dim"]
    on_disk = row_bytes if index == "disk" else 0
    in_memory = max(0, figures["index_bytes"]) / figures["n_rows"] + row_bytes - on_disk
    memory_gb = n_rows * in_memory / 1e9
    machines = max(1, math.ceil(memory_gb / (USABLE * machine.memory_gb)))
    part, cores = n_rows / machines, machine.cores / figures["threads"]
    slope = slopes.get("ivfpq" if index == "disk" else index, 1.0)
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


def write_plan(folder: Path, page: Path) -> Path:
    """Write the page from ``million.json`` and ``exponents.json`` in ``folder``."""
    measured, fitted = (_read(folder, name) for name in (million.FILE, exponents.FILE))
    here = Machine(measured["hardware"]["memory_gb"] or 16.0, measured["hardware"]["cores"])
    larger = Machine(256.0, 32)
    parts = [
        _head(measured),
        "## Measured\n",
        _measured_table(measured),
        _exponent_table(fitted),
        _formulae(),
        *(
            _plan_table(measured, fitted, machine, title)
            for machine, title in (
                (here, "On machines like this one"),
                (larger, "On larger machines"),
            )
        ),
        _advice(measured, fitted, larger),
    ]
    return write_text(page, "\n".join(parts))


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        command = Path(name).stem
        raise FileNotFoundError(
            f"{folder / name} must exist: run `python -m benchmarks {command} --save` first"
        )
    return read_json(folder / name)


def _head(measured: dict[str, Any]) -> str:
    hardware = measured["hardware"]
    return (
        "# Past this machine\n\n"
        "What more memory rows need: memory, index, machines, queries a second. This page is\n"
        "computed by `python -m benchmarks plan` from the figures that `python -m benchmarks\n"
        "million --save` and `python -m benchmarks exponents --save` have measured; change the\n"
        "figures, not the page.\n\n"
        f"Measured on {hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']} GB, "
        f"{measured['threads']} threads, commit {measured['commit'][:12]}, "
        "on clustered rows drawn from a seed.\n"
    )


def _measured_table(measured: dict[str, Any]) -> str:
    lines = [
        "| index | rows | build, s | bytes a row beside the rows | recall | queries/s | settings |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in measured["indexes"].items():
        settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items()) or "none"
        beside = max(0, row["index_bytes"]) / row["n_rows"]
        lines.append(
            f"| {name} | {row['n_rows']:,} x {row['dim']} | {row['build_seconds']:.0f} | "
            f"{beside:.0f} | {row['recall']:.4f} | {row['queries_per_second']:,.0f} | {settings} |"
        )
    return "\n".join(lines) + "\n"


def _exponent_table(fitted: dict[str, Any]) -> str:
    rows = f"{min(fitted['rows']):,} to {max(fitted['rows']):,}"
    lines = [
        f"Time in the number of rows n, fitted as c · n^e over {rows} rows:\n",
        "| what | e | in theory |",
        "|---|---|---|",
    ]
    for name, value in fitted["exponents"].items():
        lines.append(f"| {name} | {value:.2f} | {fitted['expected'][name]:g} |")
    return "\n".join(lines) + "\n"


def _formulae() -> str:
    return (
        "## Formulae\n\n"
        "- memory = N · (4 · D + index bytes a row); for `disk` the rows are a file and only the\n"
        "  index counts\n"
        f"- machines = memory / ({USABLE:g} · memory of one); each holds N / machines rows, a\n"
        "  query goes to all of them, and the best k of their answers are kept\n"
        "- queries/s = measured · (measured rows / rows of a machine)^e\n"
        "  · cores / threads measured\n"
        "- build = measured · (rows of a machine / measured rows)^b, with b = 1 (· log n) for\n"
        "  `hnsw` and 1.5 for inverted lists, whose number grows with the root of n\n"
        "- trust = N / (queries/s), once a bank; stage 2 does not depend on N\n"
    )


def _plan_table(
    measured: dict[str, Any], fitted: dict[str, Any], machine: Machine, title: str
) -> str:
    lines = [
        f"## {title}: {machine.cores} cores, {machine.memory_gb:g} GB each\n",
        "| rows | index | memory, GB | on disk, GB | machines | queries/s | build, h | trust, h |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for n_rows in ROWS:
        for name, figures in measured["indexes"].items():
            each = need(
                n_rows,
                name,
                figures | {"threads": measured["threads"]},
                fitted["exponents"],
                machine,
            )
            lines.append(
                f"| {n_rows:,} | {name} | {each.memory_gb:,.1f} | {each.disk_gb:,.0f} | "
                f"{each.machines} | {each.queries_per_second:,.0f} | {each.build_hours:,.1f} | "
                f"{each.trust_hours:,.1f} |"
            )
    return "\n".join(lines) + "\n"


def _advice(measured: dict[str, Any], fitted: dict[str, Any], machine: Machine) -> str:
    n_rows = max(ROWS)
    needs = [
        need(n_rows, name, row | {"threads": measured["threads"]}, fitted["exponents"], machine)
        for name, row in measured["indexes"].items()
        if name != "exact"
    ]
    if not needs:
        return ""
    fewest = min(needs, key=lambda each: (each.machines, -each.queries_per_second))
    return (
        f"## {n_rows:,} rows\n\n"
        f"The fewest machines: `{fewest.index}` on {fewest.machines} of {machine.cores} cores and "
        f"{machine.memory_gb:g} GB, {fewest.memory_gb:,.0f} GB in memory"
        + (f" and {fewest.disk_gb:,.0f} GB on disk" if fewest.disk_gb else "")
        + f", about {fewest.queries_per_second:,.0f} queries a second. Where several machines\n"
        "share the rows, a Milvus cluster does the sharding and the merging "
        '(`MemoryBank(..., index="milvus", uri=...)`);\nreplicas multiply the queries a second. '
        "The speeds assume that queries scale with the cores; on disk they also\nassume rows that "
        "the page cache holds, and a cold disk is slower.\n"
    )
