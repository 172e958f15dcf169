"""Rows of dots with their intervals: the methods themselves, and what differs from a baseline."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from attnknn.evaluate.measure import HIGHER_IS_BETTER
from attnknn.figures.style import (
    ALARM,
    BETTER,
    FAINT,
    INK,
    METHOD_STYLES,
    method_style,
    metric_label,
    metric_scale,
    page_axes,
    quiet_grid,
)
from attnknn.figures.sweeps import keep_possible, metric_range, set_plain_log

LOG_ABOVE = 8.0  # largest over smallest value from which dots are drawn on a logarithmic axis


def method_dots(table: pd.DataFrame, metrics: Sequence[str]) -> Figure:
    """Draw each method's mean and interval, one panel a measure, methods from top to bottom.

    Dots rather than bars: measures such as accuracy have no meaningful zero in range, and a
    cut bar misleads.

    Args:
        table: Columns ``method``, ``metric``, ``mean``, ``low``, ``high`` (NaN: no interval).
        metrics: Measures to show, left to right.
    """
    methods = list(dict.fromkeys(table["method"]))
    figure, axes = page_axes(1, len(metrics), 0.55 + 0.19 * len(methods), sharey=True)
    for ax, metric in zip(axes[0], metrics, strict=True):
        scale, possible = metric_scale(metric), metric_range(metric)
        rows = table[table["metric"] == metric]
        for row in rows.to_dict("records"):
            mean = scale * row["mean"]
            limits = np.clip([scale * row["low"], scale * row["high"]], *possible)
            points = method_style(row["method"]).points
            _draw_interval(ax, mean, limits, methods.index(row["method"]), points)
        ax.set_xlabel(metric_label(metric, arrow=True))
        _set_value_axis(ax, rows["mean"].to_numpy())
        ax.margins(x=0.12)
        keep_possible(ax, metric, axis="x")
        quiet_grid(ax, "both")
        _bare_left(ax)
    _name_rows(axes[0, 0], [method_style(name).label for name in methods])
    return figure


def _set_value_axis(ax: Axes, values: np.ndarray) -> None:
    """Use a linear axis, or a logarithmic one where a single outlier would hide all the rest."""
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > LOG_ABOVE * values.min():
        ax.set_xscale("log")
        set_plain_log(ax.xaxis, values)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))


def _draw_interval(ax: Axes, mean: float, limits: Any, level: int, points: dict) -> None:
    """Draw a mean as a point and its interval as a line, at one height; what is not finite, not."""
    if np.isfinite(limits).all():
        ax.plot(limits, [level, level], color=points["color"], linewidth=1.1)
    if np.isfinite(mean):
        ax.plot([mean], [level], linestyle="none", **points)


def _name_rows(ax: Axes, names: Sequence[str], **options: Any) -> None:
    """Write names beside their heights, the first one on top."""
    # Names are text: a dollar sign does not start a formula.
    ax.set_yticks(range(len(names)), names, parse_math=False, **options)
    ax.set_ylim(len(names) - 0.4, -0.6)


def _bare_left(ax: Axes) -> None:
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


# ---- Differences to a baseline: one panel a measure, centred on zero, the better side shaded.

INNER_SHARE = 0.8  # of the rows set the range where others lie far beyond
CUT_ABOVE = 3.0  # how far beyond the inner rows the furthest one must lie to be cut off
_ROOM, _ROOM_WHEN_CUT = 1.15, 1.5
_EDGE = 0.96  # where the arrow of a value beyond the range is drawn
_CLEAR = ("better", "worse")  # verdicts that hold after correction


def forest(table: pd.DataFrame) -> Figure:
    """Draw paired differences to the baseline, one panel a measure.

    Filled dots differ after Holm's correction, hollow ones do not; the better side is shaded. A
    value far beyond the others is an arrow at the edge, with the value beside it.

    Args:
        table: From ``compare.compare_methods``.
    """
    metrics, methods = list(dict.fromkeys(table["metric"])), list(dict.fromkeys(table["method"]))
    figure, axes = page_axes(1, len(metrics), 0.75 + 0.2 * len(methods), sharey=True)
    for ax, metric in zip(axes[0], metrics, strict=True):
        _draw_differences(
            ax,
            metric,
            (
                (row, methods.index(row["method"]), method_style(row["method"]).colour)
                for row in table[table["metric"] == metric].to_dict("records")
            ),
        )
    _name_rows(axes[0, 0], [method_style(name).label for name in methods])
    _say_what(figure, method_style(table["baseline"].iloc[0]).label)
    return figure


GROUP_TITLES = {
    "off": "taken from the whole",
    "on": "added to similarity alone",
    "extra": "published part, added to the whole",
}


def ablation_forest(table: pd.DataFrame, *, metrics: Sequence[str]) -> Figure:
    """Draw what every part changes, in groups; marks as in ``forest``.

    Args:
        table: Columns ``group`` ("off", "on", "extra"), ``part``, ``metric``, ``difference``,
            ``low``, ``high`` and ``verdict``.
        metrics: Measures, left to right.
    """
    names: list[tuple[str, str | None]] = []  # from top to bottom; a group's title has no part
    for group in (name for name in GROUP_TITLES if (table["group"] == name).any()):
        parts = dict.fromkeys(table.loc[table["group"] == group, "part"])
        names += [(group, None), *((group, part) for part in parts)]
    figure, axes = page_axes(1, len(metrics), 0.8 + 0.145 * len(names), sharey=True)
    colour = METHOD_STYLES["attention"].colour
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows = table[table["metric"] == metric].to_dict("records")
        placed = [(row, names.index((row["group"], row["part"])), colour) for row in rows]
        _draw_differences(ax, metric, placed, markersize=3.6)
        for level in (level for level, (_, part) in enumerate(names) if part is None):
            ax.axhline(level - 0.75, color=FAINT, linewidth=0.4)
    _name_rows(axes[0, 0], [part or GROUP_TITLES[group] for group, part in names], fontsize=7)
    for (_, part), label in zip(names, axes[0, 0].get_yticklabels(), strict=True):
        label.set_fontweight("bold" if part is None else "normal")
    _say_what(figure, "the reference form")
    return figure


def cost_forest(table: pd.DataFrame) -> Figure:
    """Draw faulty minus corrected, one row a fault, one panel a measure; marks as in ``forest``.

    A dot on the shaded side flatters, or helps.

    Args:
        table: Columns ``fault``, ``metric``, ``difference``, ``low``, ``high``, ``effect`` and
            ``misleads``.
    """
    metrics, faults = list(dict.fromkeys(table["metric"])), list(dict.fromkeys(table["fault"]))
    figure, axes = page_axes(1, len(metrics), 0.8 + 0.22 * len(faults), sharey=True)
    table = table.assign(
        verdict=np.where(table["effect"] == "no difference at this size", "", "worse")
    )
    kinds = {"changes the classifier": ALARM, "misleads its reader": "#0072B2"}
    harm, mislead = kinds.values()
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows = table[table["metric"] == metric].to_dict("records")
        colours = (mislead if row["misleads"] else harm for row in rows)
        levels = (faults.index(row["fault"]) for row in rows)
        _draw_differences(ax, metric, zip(rows, levels, colours, strict=True))
    _name_rows(axes[0, 0], faults)
    handles = [Line2D([], [], color=each, marker="o", label=kind) for kind, each in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _say_what(figure: Figure, baseline: str) -> None:
    words = f"difference to {baseline} (shaded: better; filled: holds after Holm's correction)"
    figure.supxlabel(words, fontsize=8.5, parse_math=False)


def _draw_differences(
    ax: Axes, metric: str, rows: Iterable[tuple[Mapping, int, str]], *, markersize: float = 4.5
) -> None:
    """Draw one panel: each row of differences at its height, on the axis that suits most of them.

    Args:
        ax: Where to draw.
        metric: The measure of the panel.
        rows: Each with a row of differences, its height and its colour.
        markersize: Of the dots, in points.
    """
    rows, scale = list(rows), metric_scale(metric)
    names = ("difference", "low", "high")
    values = scale * np.array([[row[name] for name in names] for row, _, _ in rows], dtype=float)
    limit = forest_limit(values.reshape(-1, len(names)))
    ax.axvline(0, color=INK, linewidth=0.6)
    for (row, level, colour), (value, low, high) in zip(rows, values, strict=True):
        points = {"color": colour, "markeredgecolor": colour, "markeredgewidth": 0.9}
        points |= {"marker": "o", "markersize": markersize}
        points["markerfacecolor"] = colour if row["verdict"] in _CLEAR else "white"
        if abs(value) <= limit:
            _draw_interval(ax, value, (low, high), level, points)
        else:
            _draw_beyond(ax, value, level, points, limit)
    ax.set_title(metric_label(metric, arrow=True).replace("(%)", "(points)"))
    better_end = limit if metric in HIGHER_IS_BETTER else -limit
    ax.axvspan(0, better_end, color=BETTER, linewidth=0, zorder=0)
    ax.set_xlim(-limit, limit)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True, steps=[1, 2, 5, 10]))
    ax.tick_params(axis="x", labelsize=7)
    quiet_grid(ax, "x")
    _bare_left(ax)


def forest_limit(values: Float[np.ndarray, "rows 3"]) -> float:
    """Return where a panel of differences ends, left and right of zero.

    All rows fit, unless some lie so far out that the others would all seem to sit on zero: then
    the inner ones set the range.

    Args:
        values: Difference, lower and upper limit of every row, as they are drawn.
    """
    reach = np.abs(np.where(np.isfinite(values), values, 0.0)).max(axis=1, initial=0.0)
    if not reach.any():
        return 1.0
    inner = np.quantile(reach, INNER_SHARE, method="lower")
    if not inner or reach.max() <= CUT_ABOVE * inner:
        return float(_ROOM * reach.max())
    limit = _ROOM_WHEN_CUT * inner
    shown = reach[np.abs(values[:, 0]) <= limit]  # their intervals are seen whole where that fits
    return float(np.clip(1.05 * shown.max(), limit, _ROOM_WHEN_CUT * limit))


def _draw_beyond(ax: Axes, value: float, level: int, points: dict, limit: float) -> None:
    """Draw an arrow at the edge with the value beside it; a cross where there is no value."""
    if np.isnan(value):
        place, marker, words, towards = 0.0, "x", "undefined", 1
    else:
        place, marker, towards = (_EDGE * limit, ">", -1) if value > 0 else (-_EDGE * limit, "<", 1)
        words = f"{value:+#.2g}".replace("-", "\N{MINUS SIGN}").replace("inf", "∞")
    ax.plot([place], [level], linestyle="none", **{**points, "marker": marker})
    ax.annotate(
        words,
        xy=(place, level),
        xytext=(4 * towards, 0),
        textcoords="offset points",
        ha="left" if towards > 0 else "right",
        va="center_baseline",
        fontsize=7,
        parse_math=False,
    )
