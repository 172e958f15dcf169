"""Figures of what things cost: search against memory size, and the stages of a prediction."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnknn.plot.labels import label_line_ends
from attnknn.plot.style import FAINT, FULL_WIDTH, INK, quiet_grid


@dataclass(frozen=True)
class IndexStyle:
    """How an index is drawn in every figure."""

    colour: str
    marker: str
    linestyle: str | tuple = "-"


# Okabe and Ito's colours; exact searches of the memory solid, peers dashed, the roof dotted.
INDEX_STYLES = {
    "Flat L2": IndexStyle("#56B4E9", "s"),
    "Flat IP": IndexStyle("#0072B2", "o"),
    "HNSW": IndexStyle("#D55E00", "^"),
    "IVF-PQ": IndexStyle("#009E73", "v"),
    "scikit-learn": IndexStyle("#E69F00", "D", (0, (4, 1.5))),
    "torch": IndexStyle("#B0548C", "P", (0, (4, 1.5))),
    "GEMM roof": IndexStyle("#222222", "", (0, (1, 1))),
}
STAGE_COLOURS = {
    "embedding": "#bdbdbd",
    "search": "#56B4E9",
    "vote": "#009E73",
    "attention": "#0072B2",
}
FEW_DECADES = 100.0  # largest over smallest value below which ticks stand between powers of ten
SCALING_LABELS = {
    "build_seconds": "build (s)",
    "memory_mb": "memory (MB)",
    "search_ms": "search (ms a query)",
    "recall": "recall",
}


def scaling_panels(
    table: pd.DataFrame, *, metrics: Sequence[str], real_rows: int | None = None
) -> Figure:
    """Draw measures against the rows of the memory, two panels a line, names at the right.

    Args:
        table: Columns ``index``, ``rows``, ``metric``, ``value``, ``low`` and ``high``.
        metrics: One panel each. Panels at the right name their lines; those at the left share the
            colours.
        real_rows: Where rows of the data end and augmented views begin; a thin line marks it.
    """
    n_lines = -(-len(metrics) // 2)
    size = (FULL_WIDTH, 0.15 + 1.95 * n_lines)
    figure, axes = plt.subplots(n_lines, 2, figsize=size, squeeze=False)
    for place, (ax, metric) in enumerate(zip(axes.flat, metrics, strict=False)):
        rows = table[table["metric"] == metric]
        _scaling_panel(ax, rows, metric, real_rows)
        if place % 2:
            label_line_ends(ax, _line_ends(rows))
    for ax in axes.flat[len(metrics) :]:
        ax.set_axis_off()
    return figure


def _scaling_panel(ax: Axes, rows: pd.DataFrame, metric: str, real_rows: int | None) -> None:
    for name, line in rows.groupby("index", sort=False):
        style, line = INDEX_STYLES[name], line.sort_values("rows")
        at, value = line["rows"].to_numpy(), line["value"].to_numpy()
        how = {"linestyle": style.linestyle, "marker": style.marker, "markersize": 3.5}
        ax.plot(at, value, color=style.colour, **how)
        if line[["low", "high"]].notna().all(axis=None):
            limits = line["low"].to_numpy(), line["high"].to_numpy()
            ax.fill_between(at, *limits, color=style.colour, alpha=0.1, linewidth=0)
    ax.set_xscale("log")
    _log_ticks(ax.xaxis, rows["rows"])
    if metric != "recall":
        ax.set_yscale("log")
        _log_ticks(ax.yaxis, rows[["value", "low", "high"]].stack())
    if real_rows is not None and real_rows < rows["rows"].max():
        ax.axvline(real_rows, color=FAINT, linewidth=0.6, linestyle=(0, (2, 2)))
    ax.set(xlabel="memory rows", ylabel=SCALING_LABELS[metric])
    quiet_grid(ax)


def _log_ticks(axis: Axis, values: pd.Series) -> None:
    """Set ticks at powers of ten, or also between them where the values span few of those."""
    is_wide = values.max() > FEW_DECADES * values.min()
    axis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5), numticks=9))
    axis.set_major_formatter(FuncFormatter(_short_number))
    axis.set_minor_locator(NullLocator())


def _line_ends(rows: pd.DataFrame) -> list[tuple]:
    last = rows.sort_values("rows").groupby("index", sort=False).tail(1)
    return [
        (row["rows"], row["value"], row["index"], INDEX_STYLES[row["index"]].colour)
        for row in last.to_dict("records")
    ]


def _short_number(value: float, _: int | None = None) -> str:
    """Return 1 000 as "1k", for ticks."""
    for size, sign in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"


def stage_bars(table: pd.DataFrame) -> Figure:
    """Draw what each stage of a prediction takes per query, stacked, one panel a batch.

    Args:
        table: Columns ``batch``, ``method``, ``stage`` and ``value`` in ms.
    """
    batches = list(dict.fromkeys(table["batch"]))
    figure, axes = plt.subplots(1, len(batches), figsize=(FULL_WIDTH, 1.55), squeeze=False)
    for ax, batch in zip(axes[0], batches, strict=True):
        _stage_panel(ax, table[table["batch"] == batch])
        ax.set_title(f"queries {batch}")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in STAGE_COLOURS.values()]
    figure.legend(handles, STAGE_COLOURS, loc="outside lower center", ncols=len(handles))
    return figure


def _stage_panel(ax: Axes, rows: pd.DataFrame) -> None:
    methods = list(dict.fromkeys(rows["method"]))
    for level, method in enumerate(methods):
        left = 0.0
        for stage, value in rows.loc[rows["method"] == method, ["stage", "value"]].to_numpy():
            width = max(float(value), 0.0)  # a difference of two noisy times may fall below 0
            ax.barh(level, width, left=left, height=0.62, color=STAGE_COLOURS[stage])
            left += width
        ax.annotate(
            f"{left:.3g} ms", (left, level), (3, 0), textcoords="offset points", va="center", size=8
        )
    ax.set_yticks(range(len(methods)), methods)
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ax.set_xlim(0, 1.25 * ax.dataLim.x1)
    ax.set_xlabel("ms a query")
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines["left"].set_visible(False)
    quiet_grid(ax, "x")
