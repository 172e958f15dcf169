"""The suite: all ratios, in one JSON file and one figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnknn.files import provenance, write_json
from benchmarks import (
    afmp_cost,
    approximate_search,
    end_to_end,
    exact_search,
    notebook_overhead,
    training,
)
from benchmarks.environment import set_aside
from benchmarks.sizes import FULL, Sizes
from benchmarks.timing import Missing, Ratio

Group = Callable[[Sizes], list[Ratio | Missing]]
FILE = "bench.json"


def groups(curves: dict[str, Any]) -> dict[str, Group]:
    """Return what is measured, by name."""
    return {
        "exact": exact_search.measure,
        "approximate": lambda sizes: approximate_search.measure(sizes, curves),
        "rows": end_to_end.measure_rows,
        "estimator": end_to_end.measure_estimator,
        "images": end_to_end.measure_images,
        "stage1": training.measure_stage1,
        "stage2": training.measure_stage2,
        "notebooks": notebook_overhead.measure,
        "afmp": afmp_cost.measure,
    }


def run_suite(folder: Path, *, sizes: Sizes = FULL, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Measure, write ``bench.json`` and the figure into ``folder``, and return the result.

    Args:
        folder: Where the files go.
        sizes: How much is measured.
        only: Names of groups; all when empty.
    """
    curves: dict[str, Any] = {}
    rows: list[Ratio | Missing] = []
    chosen = {name: group for name, group in groups(curves).items() if not only or name in only}
    for name, group in (bar := tqdm(chosen.items(), desc="benchmarks")):
        bar.set_postfix_str(name)
        rows += group(sizes)
    result = {
        "ratios": [row.as_row() for row in rows if isinstance(row, Ratio)],
        "missing": [row.as_row() for row in rows if isinstance(row, Missing)],
        "curves": curves,
        "sizes": vars(sizes),
        "threads": _threads(),
        "set_aside": dict(set_aside),
        **provenance(),
    }
    write_json(folder / FILE, result)
    from benchmarks.figure import save_bench_figure

    save_bench_figure(result, folder)
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result as lines of text."""
    lines = []
    for row in result["ratios"]:
        target = "" if row["target"] is None else f"  target {row['target']:g}"
        spread = f"{row['median']:8.3f}  [{row['low']:.3f}, {row['high']:.3f}]"
        lines.append(f"{row['name']:<40} {spread}  {row['better']} is better{target}")
    lines += [f"{row['name']:<40}  missing: {row['reason']}" for row in result["missing"]]
    return "\n".join(lines)


def _threads() -> int:
    import torch

    return torch.get_num_threads()
