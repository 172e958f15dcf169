"""The suite: all ratios in one JSON file and one figure, and the check against the baseline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from tqdm import tqdm

from attnknn import figures as plot
from attnknn.figures.style import ALARM, FAINT, GRID, INK
from attnknn.figures.tables import save_figure
from attnknn.files import provenance, write_json
from benchmarks import search, set_aside, stages
from benchmarks.timing import FULL, Missing, Ratio, Sizes

Group = Callable[[Sizes], list[Ratio | Missing]]
FILE = "bench.json"


def groups(curves: dict[str, Any]) -> dict[str, Group]:
    """Return what is measured, by name."""
    return {
        "exact": search.measure_exact,
        "approximate": lambda sizes: search.measure_approximate(sizes, curves),
        "rows": stages.measure_rows,
        "estimator": stages.measure_estimator,
        "images": stages.measure_images,
        "stage1": stages.measure_stage1,
        "stage2": stages.measure_stage2,
        "notebooks": stages.measure_notebooks,
        "afmp": stages.measure_afmp,
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


# ---- The check: a result against the committed baseline.

TOLERANCE = 0.25  # a ratio may be this much worse before the check fails


def regressions(
    result: dict[str, Any], baseline: dict[str, Any], *, tolerance: float = TOLERANCE
) -> list[str]:
    """Return one line for every ratio that is worse than in the baseline, or gone.

    Args:
        result: What was measured now.
        baseline: What was measured when all was well.
        tolerance: By how much a ratio may be worse.
    """
    now = {row["name"]: row for row in result["ratios"]}
    found = []
    for row in baseline["ratios"]:
        name, before = row["name"], row["median"]
        if name not in now:
            found.append(f"{name}: {before:.3f} in the baseline, not measured now")
            continue
        after = now[name]["median"]
        worse = before / after if row["better"] == "higher" else after / before
        if worse > 1 + tolerance:
            share = f"{100 * (worse - 1):.0f} % worse"
            found.append(f"{name}: {before:.3f} -> {after:.3f}, {share} ({row['title']})")
    return found


def other_machine(result: dict[str, Any], baseline: dict[str, Any]) -> str | None:
    """Return what differs between the machines of two results, or None."""
    keys = ("cpu", "cores")
    here, there = ({key: each["hardware"][key] for key in keys} for each in (result, baseline))
    return None if here == there else f"the baseline was measured on {there}, this is {here}"


# ---- The figure: every ratio with its spread and target, and recall against speed.

GOOD = "#0072B2"
CURVES = {"hnsw": ("#0072B2", "o"), "ivfpq": ("#E69F00", "D")}
BLOCKS = {
    "share": "Share of a ceiling",
    "higher": "Speed, as a multiple (longer is better)",
    "lower": "Cost, as a multiple (shorter is better)",
}
SURE = 1e-4  # share of missed neighbours that stands for none, on an axis without a zero
ROW_HEIGHT, CURVE_HEIGHT = 0.2, 1.9  # inches


def save_bench_figure(result: dict[str, Any], folder: Path) -> Figure:
    """Draw a result into ``bench.svg``."""
    plot.use_style()
    blocks = {way: [r for r in result["ratios"] if _block(r) == way] for way in BLOCKS}
    blocks = {way: rows for way, rows in blocks.items() if rows}
    curves = {name: result["curves"].get(name) for name in ("exact", *CURVES)}
    heights = [0.5 + ROW_HEIGHT * len(rows) for rows in blocks.values()]
    heights += [CURVE_HEIGHT] if all(curves.values()) else []
    figure = Figure(figsize=(plot.FULL_WIDTH, sum(heights) + 0.3))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, (way, rows) in zip(axes, blocks.items(), strict=False):
        draw_ratios(ax, rows[::-1], start=0 if way == "share" else 1)
        ax.set_title(f"{BLOCKS[way]}; upright bar: the target", loc="left", fontsize=8)
    if all(curves.values()):
        draw_curves(axes[-1], curves)
    if missing := [row["title"] for row in result["missing"]]:
        figure.supxlabel("not measured here: " + "; ".join(missing), fontsize=6, color=FAINT)
    save_figure(figure, folder, "bench")
    return figure


def draw_ratios(ax: Axes, rows: list[dict[str, Any]], *, start: float) -> Axes:
    """Draw one bar a ratio, from ``start`` on: median, spread of the rounds, target.

    A share begins at 0; a multiple at 1, on a logarithmic axis.
    """
    for place, row in enumerate(rows):
        colour = ALARM if _misses(row) else GOOD
        ax.barh(place, row["median"] - start, left=start, height=0.5, color=colour, alpha=0.35)
        ax.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=1.2)
        ax.plot(row["median"], place, "o", color=colour, markersize=3.5)
        if row["target"] is not None:
            ax.plot(row["target"], place, "|", color=INK, markersize=9, markeredgewidth=1.4)
        ax.annotate(
            f"{row['median']:.2f}",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=6.5,
            color=colour,
        )
    if start:
        ax.axvline(1, color=INK, linewidth=0.8)
        _log_axis(ax, "x")
    else:
        ax.set_xlim(0, max(1, *(row["high"] for row in rows)))
    ax.set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=6.5)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=GRID, linewidth=0.5)
    ax.grid(axis="y", visible=False)
    return ax


def draw_curves(ax: Axes, curves: dict[str, list[dict[str, Any]]]) -> Axes:
    """Draw recall against the speed over an exact search; the setting that was chosen is filled."""
    exact = curves["exact"][0]["queries_per_second"]
    for name, (colour, marker) in CURVES.items():
        for row in (row for row in curves[name] if row["recall"] > 0):
            ax.plot(
                max(SURE, 1 - row["recall"]),
                row["queries_per_second"] / exact,
                marker,
                color=colour,
                markersize=5 if row["chosen"] else 3.5,
                markerfacecolor=colour if row["chosen"] else "white",
                label=name if row["chosen"] else None,
            )
    ax.axvline(0.01, color=FAINT, linewidth=0.8, linestyle=":")
    _log_axis(ax, "y")
    _log_axis(ax, "x", steps=(1, 2, 5))
    ax.invert_xaxis()
    ax.set_title("Recall against speed", loc="left", fontsize=8)
    ax.set_xlabel("share of true neighbours missed (dotted: the most allowed; filled: chosen)")
    ax.set_ylabel("times exact's speed")
    ax.legend(loc="lower left", frameon=False)
    return ax


def _log_axis(ax: Axes, name: str, *, steps: tuple[float, ...] = (1, 1.5, 2, 3, 5)) -> None:
    """Make an axis logarithmic, with plain numbers also where it spans less than a decade."""
    ax.set(**{f"{name}scale": "log"})
    axis = getattr(ax, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _block(row: dict[str, Any]) -> str:
    return "share" if "_share_of_" in row["name"] else row["better"]


def _misses(row: dict[str, Any]) -> bool:
    if row["target"] is None:
        return False
    above = row["median"] >= row["target"]
    return above != (row["better"] == "higher")
