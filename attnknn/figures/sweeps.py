"""Figures of results: training curves, methods side by side, sweeps.

Everything is drawn from tables; nothing is averaged or tested here. ``compare.interval_table``
makes the tables with ``mean``, ``low`` and ``high``. Bands and axes end where a measure does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    ScalarFormatter,
)

from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.figures.style import (
    FAINT,
    FULL_WIDTH,
    INK,
    PERCENT_METRICS,
    label_line_ends,
    method_style,
    metric_label,
    metric_scale,
    quiet_grid,
)

# ---- Value axes: what a measure can be at all, and scales on which no single value hides the rest.

SWEEP_LOG_ABOVE = 5.0  # largest over smallest mean from which a sweep has a logarithmic axis
SHARE_BELOW = 5.0  # panels whose ranges differ more have vertical axes of their own
_ROOM = 0.03  # of the range, beyond what is possible, so that markers stay whole
_BELOW_LEAST = 0.5  # of the least mean: where bands end on a logarithmic axis, which has no zero


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


def wants_log(table: pd.DataFrame, metric: str) -> bool:
    """Tell whether the means of a measure span so much that small ones need a logarithmic axis."""
    values = table.loc[table["metric"] == metric, "mean"].to_numpy()
    values = values[np.isfinite(values)]
    if metric in PERCENT_METRICS or metric not in METRIC_NAMES or not len(values):
        return False
    return bool(values.min() > 0 and values.max() > SWEEP_LOG_ABOVE * values.min())


def band_limits(
    line: pd.DataFrame, metric: str, *, least_mean: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of a band as they are drawn, inside of what is possible.

    Args:
        line: Columns ``low`` and ``high``.
        metric: The measure.
        least_mean: Of all lines on a logarithmic axis; None for a linear one.
    """
    least, largest = metric_range(metric)
    least = least if least_mean is None else max(least, _BELOW_LEAST * least_mean)
    scale = metric_scale(metric)
    low, high = (np.clip(scale * line[name].to_numpy(), least, largest) for name in ("low", "high"))
    return low, high


def can_share(panels: Sequence[pd.DataFrame], metric: str, *, log: bool) -> bool:
    """Tell whether panels of a measure can have one axis without one of them being flattened."""
    spans = []
    for table in panels:
        values = table.loc[table["metric"] == metric, "mean"].to_numpy()
        values = values[np.isfinite(values)]
        if len(values):
            spans.append(np.ptp(np.log(values) if log else values))
    return not spans or bool(max(spans) <= SHARE_BELOW * min(spans))


def set_plain_log(axis: Axis, values: np.ndarray) -> None:
    """Give a logarithmic axis a few ticks that are written as plain numbers."""
    span = values.max() / values.min() if len(values) else 1.0
    subs = (1, 2, 5) if span < 20 else (1, 3)
    axis.set_major_locator(LogLocator(subs=subs, numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


_SERIES_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#B0548C", "#7f7f7f", "#56B4E9", "#D55E00")
BAND = {"alpha": 0.09, "linewidth": 0.4}  # so light that five bands on one another stay apart
LOG_ABOVE = 8.0  # largest over smallest value from which dots are drawn on a logarithmic axis


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
    figure, axes = plt.subplots(1, len(panels), figsize=(FULL_WIDTH, 2.2), squeeze=False)
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
        ends.append((known["epoch"].iloc[-1], scale * known[column].iloc[-1], column, colour))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if history["epoch"].nunique() > 1:
        ax.set_xlim(history["epoch"].min(), history["epoch"].max())
    quiet_grid(ax)
    label_line_ends(ax, [(x, y, name.replace("_", " "), c) for x, y, name, c in ends])


def method_dots(table: pd.DataFrame, metrics: Sequence[str]) -> Figure:
    """Draw each method's mean and interval, one panel a measure, methods from top to bottom.

    Dots rather than bars: measures such as accuracy have no meaningful zero in range, and a
    cut bar misleads.

    Args:
        table: Columns ``method``, ``metric``, ``mean``, ``low``, ``high`` (NaN: no interval).
        metrics: Measures to show, left to right.
    """
    methods = list(dict.fromkeys(table["method"]))
    height = 0.55 + 0.19 * len(methods)
    figure, axes = plt.subplots(
        1, len(metrics), figsize=(FULL_WIDTH, height), sharey=True, squeeze=False
    )
    for ax, metric in zip(axes[0], metrics, strict=True):
        least, largest = (limit / metric_scale(metric) for limit in metric_range(metric))
        rows = table[table["metric"] == metric].set_index("method")
        rows = rows.assign(**{name: rows[name].clip(least, largest) for name in ("low", "high")})
        for level, method in enumerate(methods):
            if method in rows.index:
                draw_interval(
                    ax, rows.loc[method], level, method_style(method).points, metric_scale(metric)
                )
        ax.set_xlabel(metric_label(metric, arrow=True))
        _set_value_axis(ax, rows["mean"].to_numpy())
        ax.margins(x=0.12)
        keep_possible(ax, metric, axis="x")
        quiet_grid(ax, "both")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    name_rows(axes[0, 0], methods)
    return figure


def _set_value_axis(ax: Axes, values: np.ndarray) -> None:
    """Use a linear axis, or a logarithmic one where a single outlier would hide all the rest."""
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > LOG_ABOVE * values.min():
        ax.set_xscale("log")
        set_plain_log(ax.xaxis, values)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))


def name_rows(ax: Axes, methods: list[str]) -> None:
    """Write the methods' names beside their heights, the first one on top."""
    labels = [method_style(name).label for name in methods]
    # Names are text: a dollar sign does not start a formula.
    ax.set_yticks(range(len(methods)), labels, parse_math=False)
    ax.set_ylim(len(methods) - 0.4, -0.6)


def draw_interval(ax: Axes, row: pd.Series, level: int, points: dict, scale: float) -> None:
    """Draw a mean as a point and its interval as a line, at one height."""
    mean, low, high = scale * row["mean"], scale * row["low"], scale * row["high"]
    if np.isfinite([low, high]).all():
        ax.plot([low, high], [level, level], color=points["color"], linewidth=1.1)
    if np.isfinite(mean):
        ax.plot([mean], [level], linestyle="none", **points)


def sweep_lines(
    table: pd.DataFrame,
    *,
    x: str,
    metric: str,
    ax: Axes | None = None,
    x_label: str | None = None,
    log_x: bool = False,
    log_y: bool | None = None,
    band: bool = True,
    direct_labels: bool = True,
) -> Axes:
    """Draw one measure against a swept setting, one line a method.

    Args:
        table: Columns ``method``, ``metric``, ``x``, ``mean``, ``low``, ``high``.
        x: Column that is swept, for instance ``k`` or ``noise``.
        metric: Measure to draw.
        ax: Where to draw; a new one-column figure by default.
        x_label: Label of the horizontal axis; the name of the column by default.
        log_x: Logarithmic horizontal axis, ticks at the values themselves.
        log_y: Logarithmic vertical axis; None takes one for a loss or an error whose means span
            more than ``scales.SWEEP_LOG_ABOVE``.
        band: Shade the intervals.
        direct_labels: Write the methods' names at the ends of their lines.
    """
    ax = ax if ax is not None else plt.subplots()[1]
    rows, scale, ends = table[table["metric"] == metric], metric_scale(metric), []
    log_y = wants_log(rows, metric) if log_y is None else log_y
    least = scale * rows["mean"].min() if log_y else None
    for method, line in rows.groupby("method", sort=False):
        style, line = method_style(method), line.sort_values(x)
        at, mean = line[x].to_numpy(), scale * line["mean"].to_numpy()
        ax.plot(at, mean, label=style.label, **style.line)
        if band and line[["low", "high"]].notna().all(axis=None):
            limits = band_limits(line, metric, least_mean=least)
            ax.fill_between(at, *limits, color=style.colour, **BAND)
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
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.xaxis.set_minor_locator(NullLocator())
    if log_x or len(values) <= 6:
        ax.xaxis.set_major_locator(FixedLocator(values.tolist()))


def sweep_panels(
    table: pd.DataFrame,
    *,
    x: str,
    metrics: Sequence[str],
    x_label: str | None = None,
    log_x: bool = False,
    band: bool = True,
    share_y: bool = False,
) -> Figure:
    """Draw several measures of one sweep side by side, with one set of names at the right.

    Args:
        table: As for ``sweep_lines``.
        x: Column that is swept.
        metrics: Measures, left to right.
        x_label: Label of the horizontal axes.
        log_x: Logarithmic horizontal axes.
        band: Shade the intervals.
        share_y: One vertical axis for all panels, where the measures have the same unit.
    """
    figure, axes = plt.subplots(
        1, len(metrics), figsize=(FULL_WIDTH, 2.1), squeeze=False, sharey=share_y
    )
    options = {"x": x, "x_label": x_label, "log_x": log_x, "band": band}
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
    panels = list(dict.fromkeys(table["panel"]))
    size = (FULL_WIDTH, 0.9 + 1.25 * len(panels))
    figure, axes = plt.subplots(len(panels), len(metrics), figsize=size, squeeze=False, sharex=True)
    log_y = _share_columns(axes, table, metrics)
    for panel, row in zip(panels, axes, strict=True):
        lines = table[table["panel"] == panel]
        for metric, ax in zip(metrics, row, strict=True):
            options = {"x_label": x_label, "log_y": log_y[metric], "direct_labels": False}
            sweep_lines(lines, x=x, metric=metric, ax=ax, **options)
            ax.set(ylabel="", title=metric_label(metric) if panel == panels[0] else "")
            ax.set_xlabel(ax.get_xlabel() if panel == panels[-1] else "")
        row[0].set_ylabel(panel)
    _set_sweep_axis(axes[0, 0], np.unique(table[x]), False)  # a sweep may lack some of the values
    entries = {}
    for ax in axes[:, 0]:
        entries |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=3)
    return figure


def _share_columns(
    axes: np.ndarray, table: pd.DataFrame, metrics: Sequence[str]
) -> dict[str, bool]:
    """Join the vertical axes of each measure where that suits; return which are logarithmic."""
    panels = [rows for _, rows in table.groupby("panel", sort=False)]
    log_y = {metric: wants_log(table, metric) for metric in metrics}
    for metric, column in zip(metrics, axes.T, strict=True):
        if can_share(panels, metric, log=log_y[metric]):
            for ax in column[1:]:
                ax.sharey(column[0])
    return log_y


# ---- Figures of what things cost: search against memory size, and the stages of a prediction.


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


# ---- Figures of the theory study: how errors fall, and where the best k lies.

_SMALLEST_DRAWN = 1e-6  # masses below are drawn at the edge: nothing depends on them


def _ramp(n_lines: int) -> list[tuple]:
    """Colours for ordered lines, dark to light, told apart without colour vision by lightness."""
    return [colormaps["viridis"](place) for place in np.linspace(0.0, 0.85, n_lines)]


def truncation_figure(masses: pd.DataFrame) -> Figure:
    """Draw discarded mass and vote error against k.

    Args:
        masses: Columns ``temperature``, ``k``, ``discarded mass`` and ``vote error``; seeds are
            averaged.
    """
    figure, axes = plt.subplots(1, 2, figsize=(FULL_WIDTH, 2.3), sharey=True)
    by_level = masses.groupby(["temperature", "k"], sort=False)
    means = by_level[["discarded mass", "vote error"]].mean()
    temperatures = list(dict.fromkeys(masses["temperature"]))
    for ax, column in zip(axes, means, strict=True):
        lines = [(f"τ = {t:g}", means.loc[t, column]) for t in temperatures]
        _mass_lines(ax, lines, _ramp(len(lines)))
        ax.set_title(f"{column}, softmax over the memory")
        ax.legend(loc="lower left", fontsize=7, handlelength=1.2, labelspacing=0.25)
    axes[0].set_ylim(_SMALLEST_DRAWN, 2)
    axes[0].set_ylabel("total variation")
    return figure


def _mass_lines(ax: Axes, lines: Sequence[tuple[str, pd.Series]], colours: list[tuple]) -> None:
    for (name, values), colour in zip(lines, colours, strict=True):
        drawn = values[values > _SMALLEST_DRAWN]
        ax.plot(drawn.index, drawn, color=colour, marker="o", markersize=3, label=name)
    ks = np.asarray(lines[0][1].index, dtype=float)
    ax.plot(ks, 1 / ks, color=INK, linestyle=(0, (1, 1.5)), linewidth=1, label="1/k")
    _log_axes(ax)
    ax.set_xlabel("rows kept, k")


def root_n_figure(table: pd.DataFrame, choice: pd.DataFrame, *, metrics: Sequence[str]) -> Figure:
    """Draw test measures against k, one line a memory size, with √n and the chosen k marked.

    Args:
        table: Columns ``queries``, ``n``, ``k``, ``metric`` and ``value``; seeds are averaged.
        choice: Columns ``n``, ``criterion``, ``root`` and ``chosen``.
        metrics: Measures, left to right; each is also the criterion of its marked choice.
    """
    figure, axes = plt.subplots(1, len(metrics), figsize=(FULL_WIDTH, 2.4), squeeze=False)
    test = table[table["queries"] == "test"]
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows, ends = test[test["metric"] == metric], []
        sizes = sorted(set(rows["n"]))
        for n, colour in zip(sizes, _ramp(len(sizes)), strict=True):
            means = metric_scale(metric) * rows[rows["n"] == n].groupby("k")["value"].mean()
            ax.plot(means.index, means, color=colour, linewidth=1.1)
            mine = choice[(choice["n"] == n) & (choice["criterion"] == metric)]
            _mark(ax, means, int(mine["root"].iloc[0]), colour, marker="D", face="white")
            for k in mine["chosen"].unique():
                _mark(ax, means, int(k), colour, marker="o", face=colour)
            ends.append((means.index[-1], means.iloc[-1], f"n = {n}", colour))
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set(xlabel="neighbours k", ylabel=metric_label(metric, arrow=True))
        quiet_grid(ax)
        if ax is axes[0, -1]:
            label_line_ends(ax, ends)
    handles = [
        Line2D([], [], color=INK, linestyle="none", **_marker("D", "white"), label="k = √n"),
        Line2D([], [], color=INK, linestyle="none", **_marker("o", INK), label="chosen k"),
    ]
    axes[0, 0].legend(handles=handles, loc="upper left", fontsize=7, handletextpad=0.2)
    return figure


def _mark(ax: Axes, means: pd.Series, k: int, colour: tuple, *, marker: str, face: object) -> None:
    edge = {"markeredgecolor": colour, "linestyle": "none", "zorder": 3}
    ax.plot([k], [means.loc[k]], **_marker(marker, face), **edge)


def _marker(marker: str, face: object) -> dict:
    size = 5 if marker == "D" else 4.5
    return {"marker": marker, "markersize": size, "markerfacecolor": face}


def _log_axes(ax: Axes) -> None:
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    quiet_grid(ax, "both")
