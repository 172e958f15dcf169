"""Figures of results: training curves, methods side by side, sweeps.

Everything is drawn from tables; nothing is averaged or tested here. ``compare.interval_table``
makes the tables with ``mean``, ``low`` and ``high``. Bands and axes end where a measure does.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

from attnknn.plot.labels import label_line_ends
from attnknn.plot.scales import (
    band_limits,
    can_share,
    keep_possible,
    metric_range,
    set_plain_log,
    wants_log,
)
from attnknn.plot.style import FULL_WIDTH, method_style, metric_label, metric_scale, quiet_grid

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
