"""Efficiency: what building, searching, weighing and voting cost, on the rows of a real run.

All times are wall times measured in turns; medians are compared. Rows beyond those of the run are
embedded augmented views of its training images, where it has images; else the sizes end with the
run's rows, and the study says so.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from attnknn.index.load import faiss
from attnknn.provenance import hardware
from attnknn.studies.contenders import FLAT, ROOF, of_kind
from attnknn.studies.judges_cost import PUBLISHED_ATTENTION_MS
from attnknn.studies.scaling import index_scaling, many_rows, scaling_exponents
from attnknn.studies.stages import overheads, stage_table, stage_times
from attnknn.trained import TrainedRun


@dataclass(frozen=True)
class Efficiency:
    """What was measured.

    Attributes:
        scaling: One row per index, number of rows and measure (build_seconds, search_ms a query,
            memory_mb, recall): ``value`` with ``low``, ``high`` and ``n`` repeats.
        exponents: One row per index and timed measure: how it grows with the rows.
        stages: One row per batch ("all at once", "one by one"), method and stage, ms a query.
        overhead: One row per batch and scope: attention over uniform.
        facts: Conditions of the measurement, one a row.
        n_real: Rows of the run itself; larger sizes hold augmented views.
        loads: Processes that wanted a core, before and after.
        cores: Cores there are.
    """

    scaling: pd.DataFrame
    exponents: pd.DataFrame
    stages: pd.DataFrame
    overhead: pd.DataFrame
    facts: pd.DataFrame
    n_real: int
    loads: tuple[float, float]
    cores: int


def efficiency(
    run: TrainedRun,
    *,
    sizes: Sequence[int] = (1_000, 3_000, 10_000, 30_000, 100_000),
    k: int = 10,
    k_eval: int = 50,
    n_queries: int = 1_000,
    repeats: int = 7,
    progress: bool = True,
) -> Efficiency:
    """Return what search, attention and vote cost.

    Args:
        run: A trained run.
        sizes: Memory rows; those that cannot be had are left out for the largest that can.
        k: Neighbours searched when indexes are compared.
        k_eval: Neighbours the attention weighs.
        n_queries: Test rows that are asked, at most all.
        repeats: Rounds of every measurement.
        progress: Show progress bars.
    """
    load = _load()
    rows = many_rows(run, max(sizes), progress=progress)
    possible = sorted({min(size, len(rows)) for size in sizes})
    queries = run.rows("test")[:n_queries]
    scaling = index_scaling(rows, queries, possible, k=k, repeats=repeats, progress=progress)
    times = stage_times(run, k_eval, n_queries=n_queries, repeats=repeats, progress=progress)
    loads = (load, _load())
    return Efficiency(
        scaling=scaling,
        exponents=scaling_exponents(scaling),
        stages=stage_table(times),
        overhead=overheads(times),
        facts=conditions(run, len(queries), max(sizes), len(rows), loads),
        n_real=len(run.rows("train")),
        loads=loads,
        cores=hardware()["cores"],
    )


def _load() -> float:
    """Return how many processes want a core; NaN where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def conditions(
    run: TrainedRun, n_queries: int, asked: int, had: int, loads: tuple[float, float]
) -> pd.DataFrame:
    """Return what the measurement was made with, one fact a row."""
    machine, own = hardware(), len(run.rows("train"))
    views = f"{had - own:,} embedded augmented views" if had > own else "no views"
    rows = f"{min(own, had):,} of the run, {views}"
    if had < asked:
        rows += f"; {asked:,} were asked for, more cannot be had from this data"
    facts = {
        "machine": f"{machine['cpu']}, {machine['cores']} cores",
        "threads": f"{torch.get_num_threads()} (torch), {faiss.omp_get_max_threads()} (faiss)",
        "load before and after": "{:.1f}, {:.1f}".format(*loads),
        "rows": rows,
        "width": str(run.bank.dim),
        "queries": f"{n_queries:,} test rows",
        "memory of the stages": f"{len(run.bank):,} rows, index {run.bank.index_name}",
    }
    return pd.DataFrame({"fact": facts.keys(), "value": facts.values()})


def drawn(study: Efficiency) -> pd.DataFrame:
    """Return the rows worth drawing: build time and recall only of indexes that build and miss."""
    table = study.scaling
    is_trivial = table["metric"].isin(["build_seconds", "recall"])
    return table[~is_trivial | table["index"].isin(of_kind("approximate"))]


def scaling_table(study: Efficiency) -> pd.DataFrame:
    """Return one row per index and size, with medians of all measures, for a printed table."""
    index = ["rows", "index", "settings"]
    order = pd.MultiIndex.from_frame(study.scaling[index].drop_duplicates())
    wide = study.scaling.pivot(index=index, columns="metric", values="value").reindex(order)
    titles = {
        "build_seconds": "build (s)",
        "search_ms": "search (ms a query)",
        "memory_mb": "memory (MB)",
        "recall": "recall",
    }
    wide = wide.reindex(columns=list(titles)).rename(columns=titles)
    return wide.reset_index().rename_axis(columns=None)


def verdict(
    study: Efficiency, *, limit_ms: float = PUBLISHED_ATTENTION_MS, good_recall: float = 0.95
) -> str:
    """Return, in Markdown, what was found, with the published claims decided by the figures.

    Args:
        study: What was measured.
        limit_ms: Published bound of the attention's overhead per query.
        good_recall: Recall from which an approximate index counts as usable.
    """
    lines = [*_overhead_lines(study, limit_ms), *_search_lines(study, good_recall)]
    lines += [_growth_line(study)]
    note = "Medians of interleaved rounds on the machine named above; compare ratios, not times."
    if max(study.loads) > study.cores:
        note += f" It was busy (load {max(study.loads):.1f} on {study.cores} cores)."
    return "\n".join([*(f"- {line}" for line in lines), "", note])


def _overhead_lines(study: Efficiency, limit_ms: float) -> list[str]:
    lines = []
    for batch, group in study.overhead.groupby("batch", sort=False):
        extra = group["extra_ms"].iloc[0]
        held = "under" if extra < limit_ms else "not under"
        ratios = "; ".join(
            f"{scope} take {ratio:.2f} times as long as with a uniform vote{_limits(low, high)}"
            for scope, ratio, low, high in group[["scope", "ratio", "low", "high"]].to_numpy()
        )
        lines.append(
            f"Queries {batch}: attention adds {extra:.3f} ms a query ({held} the published "
            f"{limit_ms:g} ms); {ratios}."
        )
    return lines


def _limits(low: float, high: float) -> str:
    return f" ({low:.2f} to {high:.2f})" if np.isfinite(low) else ""


def _search_lines(study: Efficiency, good_recall: float) -> list[str]:
    at = study.scaling.pivot(index=["rows", "index"], columns="metric", values="value")
    n = int(at.index.get_level_values("rows").max())
    times = at.loc[n, "search_ms"]
    best = times[of_kind("exact")].idxmin()
    peers = [f"{times[name] / times[best]:.1f} times as long" for name in of_kind("peer")]
    taken = ", ".join(f"{name} {each}" for name, each in zip(of_kind("peer"), peers, strict=True))
    line = (
        f"Exact search of {n:,} rows: {best} takes {times[best]:.3f} ms a query, "
        f"{times[best] / times[ROOF]:.1f} times the bare matrix product; {taken}."
    )
    return [line, *(_approximate_line(at, name, good_recall) for name in of_kind("approximate"))]


def _approximate_line(at: pd.DataFrame, name: str, good_recall: float) -> str:
    """Say from how many rows on an approximate index pays, and after how many queries."""
    own, flat = at.xs(name, level="index"), at.xs(FLAT, level="index")
    is_good = (own["search_ms"] < flat["search_ms"]) & (own["recall"] >= good_recall)
    sizes = own.index[is_good[::-1].cummin()[::-1]]  # from here on every size is good
    since = (
        f"faster than {FLAT} at a recall of {good_recall:g} from {sizes.min():,} rows on"
        if len(sizes)
        else f"not both faster than {FLAT} and at a recall of {good_recall:g} at the largest size"
    )
    here, there = own.iloc[-1], flat.iloc[-1]
    gain = (there["search_ms"] - here["search_ms"]) / 1000
    extra = here["build_seconds"] - there["build_seconds"]
    pays = f"pays after {extra / gain:,.0f} queries" if gain > 0 else "never pays"
    return (
        f"{name}: {since}. At {own.index[-1]:,} rows it takes "
        f"{here['search_ms'] / there['search_ms']:.2f} of the time at a recall of "
        f"{here['recall']:.3f}, and its build {pays}."
    )


def _growth_line(study: Efficiency) -> str:
    searched = study.exponents[study.exponents["metric"] == "search_ms"]
    if searched.empty:
        return "Only one size was measured: nothing can be said about growth."
    each = ", ".join(
        f"{row['index']} {row['exponent']:.2f}{_limits(row['low'], row['high'])}"
        for row in searched.to_dict("records")
    )
    return f"Search time grows with the rows to the power of: {each} (95 % intervals of the fit)."
