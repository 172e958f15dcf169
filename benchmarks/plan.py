"""The plan past one machine: measured figures -> what more rows need -> docs/scaling.md.

memory(N)   = N * (row bytes + index bytes a row + label bytes a row)
speed(N)    = measured speed * (measured rows / N) ** exponent
shards      = memory(N) / memory that a machine has for it
trust(N)    = N / speed(N), once
"""

import math
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from attnknn.core import index as choose
from attnknn.core.bank import MemoryBank
from attnknn.files import read_json, write_text
from benchmarks import growth

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
    grown = (part / figures["n_rows"]) ** BUILD_EXPONENTS[index]
    if index == "hnsw":
        grown *= math.log(part) / math.log(figures["n_rows"])
    return Need(
        n_rows=n_rows,
        index=index,
        memory_gb=memory_gb,
        disk_gb=n_rows * on_disk / 1e9,
        machines=machines,
        queries_per_second=speed,
        build_hours=figures["build_seconds"] / cores * grown / 3600,
        trust_hours=n_rows / speed / 3600,
    )


def queries_to_pay(build_seconds: float, speed: float, exact_speed: float) -> float:
    """Return after how many queries a build has paid for itself; infinite when never."""
    saved = 1 / exact_speed - 1 / speed  # seconds a query
    return build_seconds / saved if saved > 0 else math.inf


def foretold(figures: dict[str, Any], slope: float, n_rows: int) -> float:
    """Return the queries a second at ``n_rows``, by the formula, from those of fewer rows."""
    return figures["queries_per_second"] * (figures["n_rows"] / n_rows) ** max(0.0, slope)


# ---- The page. Every number on it is read or computed from the saved figures.

BASELINE = "baseline.json"
COMMANDS = {
    BASELINE: "suite",
    growth.MILLION_FILE: "million",
    growth.EXPONENTS_FILE: "exponents",
}
LARGER = Machine(256.0, 32)
Figures = dict[str, Any]


def write_page(folder: Path, page: Path) -> Path:
    """Write the page from the figures in ``folder``."""
    ratios, measured, fitted = (_read(folder, name) for name in COMMANDS)
    here = Machine(measured["hardware"]["memory_gb"] or 16.0, measured["hardware"]["cores"])
    parts = [
        _head(measured),
        _ratio_table(ratios),
        _million_table(measured),
        _exponent_table(fitted),
        _choice_table(fitted, measured),
        _foretold_table(fitted, measured),
        _formulae(),
        _plan_table(measured, fitted, here, "Machines like this one"),
        _plan_table(measured, fitted, LARGER, "Larger machines"),
        _advice(measured, fitted),
    ]
    return write_text(page, "\n".join(parts))


def _read(folder: Path, name: str) -> Figures:
    if not (folder / name).exists():
        raise FileNotFoundError(
            f"{folder / name} must exist: run `python -m benchmarks {COMMANDS[name]} --save` first"
        )
    return read_json(folder / name)


def _table(*rows: list[str]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body]) + "\n"


def _head(measured: Figures) -> str:
    hardware = measured["hardware"]
    return (
        "# Speed, here and past this machine\n\n"
        "How fast each part is, how that grows with the rows, and what more rows need. This\n"
        "page is written by `python -m benchmarks plan` from what `python -m benchmarks suite`,\n"
        "`million` and `exponents` have saved (`--save`): change the figures, not the page.\n\n"
        f"Measured on {hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']} GB, "
        f"{measured['threads']} threads,\non rows drawn from a seed.\n"
    )


def _ratio_table(ratios: Figures) -> str:
    rows = [
        [
            row["title"],
            f"{row['median']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            row["better"],
            "-" if row["target"] is None else f"{row['target']:g}",
            row["note"] or "-",
        ]
        for row in ratios["ratios"]
    ]
    missing = [[row["title"], "-", "-", "-", "-", row["reason"]] for row in ratios["missing"]]
    head = ["ratio", "median", "rounds", "better", "target", "note"]
    return (
        "## Ratios\n\n"
        "Both times of a ratio come from the same round of the same run. `make bench` measures\n"
        "them, `make bench-check` fails where one has become worse by more than a quarter.\n\n"
        f"{_table(head, *rows, *missing)}\n"
        "![Every ratio with its spread and target, and recall against speed](bench.svg)\n"
    )


def _million_table(measured: Figures) -> str:
    head = ["index", "build, s", "bytes a row beside the rows", "recall", "queries/s", "settings"]
    rows = [
        [
            name,
            f"{row['build_seconds']:.1f}",
            f"{max(0, row['index_bytes']) / row['n_rows']:.0f}",
            f"{row['recall']:.4f}",
            f"{row['queries_per_second']:,.0f}",
            ", ".join(f"{key} {value}" for key, value in row["settings"].items()) or "-",
        ]
        for name, row in measured["indexes"].items()
    ]
    first = next(iter(measured["indexes"].values()))
    return (
        f"## {first['n_rows']:,} rows of width {first['dim']}, k = {first['k']}\n\n"
        "Tuned by `MemoryBank.autotune(recall=0.99)`; the recall is that of other queries.\n\n"
        + _table(head, *rows)
    )


def _exponent_table(fitted: Figures) -> str:
    rows = f"{min(fitted['rows']):,} to {max(fitted['rows']):,}"
    body = [
        [
            name,
            f"{value:.2f}",
            "{:.2f} to {:.2f}".format(*fitted["ranges"][name]),
            f"{fitted['expected'][name]:g}",
        ]
        for name, value in fitted["exponents"].items()
    ]
    return (
        "## Growth with the rows\n\n"
        f"Time as c · n^e, fitted over {rows} rows. Searches keep the same recall at every n,\n"
        "`trust` is the leave-one-out search of all rows, `fit` is stage 2 on a fixed number of\n"
        "queries.\n\n" + _table(["what", "e", "single rounds", "in theory"], *body)
    )


def _at_sizes(fitted: Figures, measured: Figures, index: str) -> list[Figures]:
    more = measured["indexes"].get(index)
    return [*fitted["indexes"][index], *([more] if more else [])]


def _choice_table(fitted: Figures, measured: Figures) -> str:
    names = [name for name in fitted["indexes"] if name != "exact"]
    head = ["rows", "exact, queries/s"]
    for name in names:
        head += [f"{name}, build s", "queries/s", "pays after"]
    rows = []
    exact = _at_sizes(fitted, measured, "exact")
    others = [_at_sizes(fitted, measured, name) for name in names]
    for base, *each in zip(exact, *others, strict=False):
        speed = base["queries_per_second"]
        row = [f"{base['n_rows']:,}", f"{speed:,.0f}"]
        for found in each:
            pays = queries_to_pay(found["build_seconds"], found["queries_per_second"], speed)
            told = f"{pays:,.0f}" if math.isfinite(pays) else "never"
            row += [f"{found['build_seconds']:.1f}", f"{found['queries_per_second']:,.0f}", told]
        rows.append(row)
    return (
        "## Which index\n\n"
        "`pays after` is the number of queries after which the time of the build is won back.\n\n"
        + _table(head, *rows)
        + f"\n`auto` is exact up to {choose.AUTO_EXACT_ROWS:,} rows: it is never wrong, needs no "
        "build and no tuning,\nand below that size only many queries to an unchanged bank would "
        f"pay for a graph. Up to {choose.AUTO_HNSW_ROWS:,}\nrows it is `hnsw`, above `ivfpq`, "
        "whose build and whose memory are the smaller ones (see the table of a\nmillion rows); and "
        "`disk` where rows are a mapped file that would take more than "
        f"{choose.AUTO_MEMORY_SHARE:.0%} of the\nfree memory.\n"
    )


def _foretold_table(fitted: Figures, measured: Figures) -> str:
    rows = []
    for name, sizes in fitted["indexes"].items():
        if name not in measured["indexes"]:
            continue
        found = measured["indexes"][name]
        told = foretold(sizes[-1], fitted["exponents"][name], found["n_rows"])
        true = found["queries_per_second"]
        rows.append([name, f"{told:,.0f}", f"{true:,.0f}", f"{told / true:.2f}"])
    last = max(fitted["rows"])
    return (
        f"How far the formula can be trusted: queries/s at {measured['n_rows']:,} rows, foretold "
        f"from {last:,}\nrows and the exponent, against those measured.\n\n"
        + _table(["index", "foretold", "measured", "foretold / measured"], *rows)
    )


def _formulae() -> str:
    return (
        "## Formulae\n\n"
        "- memory = N · (4 · D + index bytes a row + label bytes a row); for `disk` rows and\n"
        "  lists are files, and only the centres of the lists and the labels count\n"
        f"- label bytes a row = {label_bytes(0)} + 4 · classes: its label and own neighbours, the\n"
        f"  shares of the labels among them, its trust; {label_bytes(CLASSES)} with the {CLASSES} "
        "classes assumed below\n"
        f"- machines = memory / ({USABLE:g} · memory of one); each holds N / machines rows, a\n"
        "  query goes to all of them, and the best k of their answers are kept\n"
        "- queries/s = measured · (measured rows / rows of a machine)^e\n"
        "  · cores / threads measured\n"
        "- build = measured · (rows of a machine / measured rows)^b, with b = 1 (· log n) for\n"
        "  `hnsw` and 1.5 for inverted lists, whose number grows with the root of n\n"
        "- trust = N / (queries/s), once a bank; stage 2 does not depend on N\n"
    )


def _needs(n_rows: int, measured: Figures, fitted: Figures, machine: Machine) -> list[Need]:
    threads = {"threads": measured["threads"]}
    return [
        need(n_rows, name, row | threads, fitted["exponents"], machine)
        for name, row in measured["indexes"].items()
    ]


def _plan_table(measured: Figures, fitted: Figures, machine: Machine, title: str) -> str:
    head = [
        *("rows", "index", "memory, GB", "on disk, GB", "machines"),
        *("queries/s", "build, h", "trust, h"),
    ]
    rows = [
        [
            f"{n_rows:,}",
            each.index,
            f"{each.memory_gb:,.1f}",
            f"{each.disk_gb:,.0f}",
            f"{each.machines}",
            f"{each.queries_per_second:,.0f}",
            f"{each.build_hours:,.2f}",
            f"{each.trust_hours:,.1f}",
        ]
        for n_rows in ROWS
        for each in _needs(n_rows, measured, fitted, machine)
    ]
    size = f"{machine.cores} cores, {machine.memory_gb:g} GB each, {CLASSES} classes"
    return f"## {title}: {size}\n\n{_table(head, *rows)}"


def _advice(measured: Figures, fitted: Figures) -> str:
    n_rows = max(ROWS)
    needs = [each for each in _needs(n_rows, measured, fitted, LARGER) if each.index != "exact"]
    if not needs:
        return ""
    fewest = min(needs, key=lambda each: (each.machines, -each.queries_per_second))
    fastest = max(needs, key=lambda each: each.queries_per_second / each.machines)
    return (
        f"## {n_rows:,} rows\n\n"
        f"On machines of {LARGER.cores} cores and {LARGER.memory_gb:g} GB.\n\n"
        f"- The fewest machines: {_told(fewest)}.\n"
        + ("" if fastest is fewest else f"- The most queries a machine: {_told(fastest)}.\n")
        + "\n"
        "Where several machines share the rows, a Milvus cluster does the sharding and merging\n"
        '(`MemoryBank(..., index="milvus", uri=...)`); replicas multiply the queries a second.\n'
        "The speeds take queries to scale with the cores, and files to be in the page cache: a "
        "cold disk is slower.\nThe leave-one-out search of trust is done once, and splits over any "
        "number of replicas.\n"
    )


def _told(each: Need) -> str:
    disk = f" and {each.disk_gb:,.0f} GB on disk" if each.disk_gb else ""
    return (
        f"`{each.index}` on {each.machines}, {each.memory_gb:,.0f} GB in memory{disk}, about "
        f"{each.queries_per_second:,.0f} queries a second,\n  {each.build_hours:,.1f} hours to "
        f"build and {each.trust_hours:,.1f} hours for trust"
    )
