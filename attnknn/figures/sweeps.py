"""Lines against something: epochs, a swept setting, the rows of a memory, the neighbours kept.

Everything is drawn from tables; nothing is averaged over test rows or tested here.
``compare.interval_table`` makes the tables with ``mean``, ``low`` and ``high``. Bands and axes end
where a measure does.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.figures.style import (
    FAINT,
    INK,
    PERCENT_METRICS,
    MethodStyle,
    label_line_ends,
    method_style,
    metric_label,
    metric_scale,
    page_axes,
    plain_ticks,
    quiet_grid,
    ramp,
)

# ---- Value axes: what a measure can be at all, and scales on which no single value hides the rest.

LOG_ABOVE = 5.0  # largest over smallest mean from which a sweep has a logarithmic axis
SHARE_BELOW = 5.0  # panels whose ranges differ more have vertical axes of their own
_ROOM = 0.03  # of the range, beyond what is possible, so that markers stay whole
_BELOW_LEAST = 0.5  # of the least mean: where bands end on a logarithmic axis, which has no zero
BAND = {"alpha": 0.09, "linewidth": 0.4}  # so light that five bands on one another stay apart


def metric_range(metric: str) -> tuple[float, float]:
    """Return the least and the largest value that a measure can have, as it is drawn."""
    if metric in PERCENT_METRICS or metric.endswith("(%)"):
        return 0.0, 100.0
    if metric in ("ece", "ace", "cwce", "aurc"):
        return 0.0, 1.0
    return (0.0, np.inf) if metric in METRIC_NAMES else (-np.inf, np.inf)


def keep_possible(ax: Axes, metric: str, *, axis: str = "y") -> None:
    """Take from an axis what lies beyond the possible; call again when more was drawn."""
    least, largest = metric_range(metric)
    low, high = getattr(ax, f"get_{axis}lim")()
    room = _ROOM * (high - low)
    # auto=None: axes that share this one still grow with what is drawn into them later.
    getattr(ax, f"set_{axis}lim")(max(low, least - room), min(high, largest + room), auto=None)


def _finite_means(table: pd.DataFrame, metric: str) -> np.ndarray:
    values = table.loc[table["metric"] == metric, "mean"].to_numpy()
    return values[np.isfinite(values)]


def _wants_log(table: pd.DataFrame, metric: str) -> bool:
    """Tell whether the means of a measure span so much that small ones need a logarithmic axis."""
    values = _finite_means(table, metric)
    if metric in PERCENT_METRICS or metric not in METRIC_NAMES or not len(values):
        return False
    return bool(values.min() > 0 and values.max() > LOG_ABOVE * values.min())


def _can_share(rows: Sequence[pd.DataFrame], metric: str, *, log: bool) -> bool:
    """Tell whether panels of a measure can have one axis without one of them being flattened."""
    found = [_finite_means(table, metric) for table in rows]
    spans = [np.ptp(np.log(values) if log else values) for values in found if len(values)]
    return not spans or bool(max(spans) <= SHARE_BELOW * min(spans))


def set_plain_log(axis: Axis, values: np.ndarray) -> None:
    """Give a logarithmic axis a few ticks that are written as plain numbers."""
    span = values.max() / values.min() if len(values) else 1.0
    plain_ticks(axis, LogLocator(subs=(1, 2, 5) if span < 20 else (1, 3), numticks=5))


# ---- Training: what happened epoch by epoch.

_SERIES_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#B0548C", "#7f7f7f", "#56B4E9", "#D55E00")


def training_curves(
    history: pd.DataFrame, *, panels: Mapping[str, Sequence[str]] | None = None
) -> Figure:
    """Draw what happened epoch by epoch, one panel a group of columns.

    Args:
        history: Column ``epoch``, columns of numbers, and ``seed`` where there are several runs
            (each is drawn as its own line).
        panels: Title of each panel to its columns. By default losses and accuracies (shares) get
            a panel each; other columns are left out.
    """
    if panels is None:
        numbers = history.select_dtypes("number").dropna(axis=1, how="all").columns
        panels = {
            "loss": [name for name in numbers if "loss" in name or name.endswith("nll")],
            "accuracy (%)": [name for name in numbers if name.endswith("accuracy")],
        }
    panels = {title: list(columns) for title, columns in panels.items() if columns}
    if not panels:
        raise ValueError(f"history must hold losses or accuracies, got {list(history.columns)}")
    figure, axes = page_axes(1, len(panels), 2.2)
    for ax, (title, columns) in zip(axes[0], panels.items(), strict=True):
        _draw_history(ax, history, columns, scale=100.0 if title.endswith("(%)") else 1.0)
        ax.set(xlabel="epoch", ylabel=title)
    return figure


def _draw_history(ax: Axes, history: pd.DataFrame, columns: list[str], *, scale: float) -> None:
    runs = [run for _, run in history.groupby("seed")] if "seed" in history else [history]
    ends = []
    for column, colour in zip(columns, _SERIES_COLOURS * len(columns), strict=False):
        for run in runs:
            known = run[["epoch", column]].dropna()
            ax.plot(known["epoch"], scale * known[column], color=colour, alpha=0.85)
        last = known.iloc[-1]
        ends.append((last["epoch"], scale * last[column], column.replace("_", " "), colour))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if history["epoch"].nunique() > 1:
        ax.set_xlim(history["epoch"].min(), history["epoch"].max())
    quiet_grid(ax)
    label_line_ends(ax, ends)


# ---- Sweeps: measures of methods against a setting such as k or the share of wrong labels.


def sweep_lines(
    table: pd.DataFrame,
    *,
    x: str,
    metric: str,
    ax: Axes | None = None,
    x_label: str | None = None,
    log_x: bool = False,
    log_y: bool | None = None,
    direct_labels: bool = True,
) -> Axes:
    """Draw one measure against a swept setting, one line a method, its interval as a band.

    Args:
        table: Columns ``method``, ``metric``, ``x``, ``mean``, ``low``, ``high``.
        x: Column that is swept, for instance ``k`` or ``noise``.
        metric: Measure to draw.
        ax: Where to draw; a new one-column figure by default.
        x_label: Label of the horizontal axis; the name of the column by default.
        log_x: Logarithmic horizontal axis, ticks at the values themselves.
        log_y: Logarithmic vertical axis; None takes one for a loss or an error whose means span
            more than ``LOG_ABOVE``.
        direct_labels: Write the methods' names at the ends of their lines.
    """
    ax = ax if ax is not None else plt.subplots()[1]
    rows, scale, ends = table[table["metric"] == metric], metric_scale(metric), []
    log_y = _wants_log(rows, metric) if log_y is None else log_y
    least, largest = metric_range(metric)
    least = max(least, _BELOW_LEAST * scale * rows["mean"].min()) if log_y else least
    for method, line in rows.groupby("method", sort=False):
        style, line = method_style(method), line.sort_values(x)
        at, mean = line[x].to_numpy(), scale * line["mean"].to_numpy()
        ax.plot(at, mean, label=style.label, **style.line)
        if line[["low", "high"]].notna().all(axis=None):
            band = np.clip(scale * line[["low", "high"]].to_numpy().T, least, largest)
            ax.fill_between(at, *band, color=style.colour, **BAND)
        ends.append((at[-1], mean[-1], style.label, style.text_colour))
    _set_sweep_axis(ax, np.unique(rows[x]), log_x)
    ax.set(xlabel=x_label or x.replace("_", " "), ylabel=metric_label(metric))
    if log_y:
        ax.set_yscale("log")
        set_plain_log(ax.yaxis, rows["mean"].to_numpy())
    keep_possible(ax, metric)
    quiet_grid(ax)
    if direct_labels:
        label_line_ends(ax, ends)
    return ax


def _set_sweep_axis(ax: Axes, values: np.ndarray, log_x: bool) -> None:
    if log_x:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
    if log_x or len(values) <= 6:
        ax.xaxis.set_major_locator(FixedLocator(values.tolist()))


def sweep_panels(
    table: pd.DataFrame,
    *,
    x: str,
    metrics: Sequence[str],
    x_label: str | None = None,
    log_x: bool = False,
    share_y: bool = False,
) -> Figure:
    """Draw several measures of one sweep side by side, with one set of names at the right.

    Args:
        table: As for ``sweep_lines``.
        x: Column that is swept.
        metrics: Measures, left to right.
        x_label: Label of the horizontal axes.
        log_x: Logarithmic horizontal axes.
        share_y: One vertical axis for all panels, where the measures have the same unit.
    """
    figure, axes = page_axes(1, len(metrics), 2.1, sharey=share_y)
    options = {"x": x, "x_label": x_label, "log_x": log_x}
    for ax, metric in zip(axes[0], metrics, strict=True):
        sweep_lines(table, metric=metric, ax=ax, direct_labels=ax is axes[0, -1], **options)
    return figure


def sweep_grid(
    table: pd.DataFrame, *, x: str, metrics: Sequence[str], x_label: str | None = None
) -> Figure:
    """Draw several measures of several sweeps: a row of panels a sweep, one legend below.

    A measure has one vertical axis for all sweeps, so that rows can be compared, unless their
    ranges differ so much that one row would be flat.

    Args:
        table: As for ``sweep_lines``, with the name of each row's sweep in ``panel``.
        x: Column that is swept.
        metrics: Measures, left to right.
        x_label: Label of the horizontal axes.
    """
    sweeps = dict(list(table.groupby("panel", sort=False)))
    figure, axes = page_axes(len(sweeps), len(metrics), 0.9 + 1.25 * len(sweeps), sharex=True)
    for metric, column in zip(metrics, axes.T, strict=True):
        log_y = _wants_log(table, metric)
        if _can_share(list(sweeps.values()), metric, log=log_y):
            for ax in column[1:]:
                ax.sharey(column[0])
        for ax, rows in zip(column, sweeps.values(), strict=True):
            options = {"x_label": x_label, "log_y": log_y, "direct_labels": False}
            sweep_lines(rows, x=x, metric=metric, ax=ax, **options)
            ax.set(ylabel="", title=metric_label(metric) if ax is column[0] else "")
            ax.set_xlabel(ax.get_xlabel() if ax is column[-1] else "")
    _set_sweep_axis(axes[0, 0], np.unique(table[x]), False)  # a sweep may lack some of the values
    entries = {}
    for name, ax in zip(sweeps, axes[:, 0], strict=True):
        ax.set_ylabel(name)
        entries |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=3)
    return figure


# ---- What things cost: search against memory size, and the stages of a prediction.

# Exact searches of the memory solid, peers dashed, the roof dotted.
INDEX_STYLES = {
    style.label: style
    for style in (
        MethodStyle("Flat L2", "#56B4E9", "s"),
        MethodStyle("Flat IP", "#0072B2", "o"),
        MethodStyle("HNSW", "#D55E00", "^"),
        MethodStyle("IVF-PQ", "#009E73", "v"),
        MethodStyle("scikit-learn", "#E69F00", "D", (0, (4, 1.5))),
        MethodStyle("torch", "#B0548C", "P", (0, (4, 1.5))),
        MethodStyle("GEMM roof", INK, "", (0, (1, 1))),
    )
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
    figure, axes = page_axes(n_lines, 2, 0.15 + 1.95 * n_lines)
    for place, (ax, metric) in enumerate(zip(axes.flat, metrics, strict=False)):
        rows = table[table["metric"] == metric]
        ends = [_scaling_line(ax, line) for _, line in rows.groupby("index", sort=False)]
        ax.set(xscale="log", xlabel="memory rows", ylabel=SCALING_LABELS[metric])
        _log_ticks(ax.xaxis, rows["rows"])
        if metric != "recall":
            ax.set_yscale("log")
            _log_ticks(ax.yaxis, rows[["value", "low", "high"]].stack())
        if real_rows is not None and real_rows < rows["rows"].max():
            ax.axvline(real_rows, color=FAINT, linewidth=0.6, linestyle=(0, (2, 2)))
        quiet_grid(ax)
        if place % 2:
            label_line_ends(ax, ends)
    for ax in axes.flat[len(metrics) :]:
        ax.set_axis_off()
    return figure


def _scaling_line(ax: Axes, line: pd.DataFrame) -> tuple:
    """Draw one index, and return where its name goes."""
    name, line = line["index"].iloc[0], line.sort_values("rows")
    style = INDEX_STYLES[name]
    at, value = line["rows"].to_numpy(), line["value"].to_numpy()
    ax.plot(at, value, **style.line)
    if line[["low", "high"]].notna().all(axis=None):
        ax.fill_between(at, *line[["low", "high"]].to_numpy().T, color=style.colour, **BAND)
    return at[-1], value[-1], name, style.text_colour


def _log_ticks(axis: Axis, values: pd.Series) -> None:
    """Set ticks at powers of ten, or also between them where the values span few of those."""
    is_wide = values.max() > FEW_DECADES * values.min()
    plain_ticks(axis, LogLocator(subs=(1,) if is_wide else (1, 2, 5), numticks=9))
    axis.set_major_formatter(FuncFormatter(_short_number))


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
    figure, axes = page_axes(1, len(batches), 1.55)
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
        place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
        ax.annotate(f"{left:.3g} ms", (left, level), size=8, **place)
    ax.set_yticks(range(len(methods)), methods)
    ax.set(ylim=(len(methods) - 0.5, -0.5), xlim=(0, 1.25 * ax.dataLim.x1), xlabel="ms a query")
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.spines["left"].set_visible(False)
    quiet_grid(ax, "x")


# ---- Theory: what a truncated softmax loses, and where the best k lies.

_SMALLEST_DRAWN = 1e-6  # masses below are drawn at the edge: nothing depends on them


def truncation_figure(masses: pd.DataFrame) -> Figure:
    """Draw discarded mass and vote error against k, one line a temperature.

    Args:
        masses: Columns ``temperature``, ``k``, ``discarded mass`` and ``vote error``; seeds are
            averaged.
    """
    figure, axes = page_axes(1, 2, 2.3, sharey=True)
    columns = ["discarded mass", "vote error"]
    means = masses.groupby(["temperature", "k"], sort=False)[columns].mean()
    temperatures = list(dict.fromkeys(masses["temperature"]))
    for ax, column in zip(axes[0], columns, strict=True):
        for temperature, colour in zip(temperatures, ramp(len(temperatures)), strict=True):
            values = means.loc[temperature, column]
            drawn = values[values > _SMALLEST_DRAWN]
            label = f"τ = {temperature:g}"
            ax.plot(drawn.index, drawn, color=colour, marker="o", markersize=3, label=label)
        ks = np.unique(masses["k"]).astype(float)
        ax.plot(ks, 1 / ks, color=INK, linestyle=(0, (1, 1.5)), linewidth=1, label="1/k")
        ax.set(xscale="log", yscale="log", xlabel="rows kept, k")
        ax.set_title(f"{column}, softmax over the memory")
        ax.minorticks_off()
        quiet_grid(ax, "both")
        ax.legend(loc="lower left", fontsize=7, handlelength=1.2, labelspacing=0.25)
    axes[0, 0].set(ylim=(_SMALLEST_DRAWN, 2), ylabel="total variation")
    return figure


def root_n_figure(table: pd.DataFrame, choice: pd.DataFrame, *, metrics: Sequence[str]) -> Figure:
    """Draw test measures against k, one line a memory size, with √n and the chosen k marked.

    Args:
        table: Columns ``queries``, ``n``, ``k``, ``metric`` and ``value``; seeds are averaged.
        choice: Columns ``n``, ``criterion``, ``root`` and ``chosen``.
        metrics: Measures, left to right; each is also the criterion of its marked choice.
    """
    figure, axes = page_axes(1, len(metrics), 2.4)
    test = table[table["queries"] == "test"]
    sizes = sorted(set(test["n"]))
    marks = {"linestyle": "none", "markersize": 4.5, "zorder": 3}
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows, ends = test[test["metric"] == metric], []
        for n, colour in zip(sizes, ramp(len(sizes)), strict=True):
            means = metric_scale(metric) * rows[rows["n"] == n].groupby("k")["value"].mean()
            ax.plot(means.index, means, color=colour, linewidth=1.1)
            mine = choice[(choice["n"] == n) & (choice["criterion"] == metric)]
            root, chosen = mine["root"].iloc[:1], mine["chosen"].unique()
            ax.plot(root, means.loc[root], "D", color=colour, markerfacecolor="white", **marks)
            ax.plot(chosen, means.loc[chosen], "o", color=colour, **marks)
            ends.append((means.index[-1], means.iloc[-1], f"n = {n}", colour))
        ax.set(xscale="log", xlabel="neighbours k", ylabel=metric_label(metric, arrow=True))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        quiet_grid(ax)
        if ax is axes[0, -1]:
            label_line_ends(ax, ends)
    handles = [
        Line2D([], [], color=INK, marker="D", markerfacecolor="white", label="k = √n", **marks),
        Line2D([], [], color=INK, marker="o", label="chosen k", **marks),
    ]
    axes[0, 0].legend(handles=handles, loc="upper left", fontsize=7, handletextpad=0.2)
    return figure
