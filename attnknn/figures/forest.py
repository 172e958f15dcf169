"""Paired differences as a forest: one row a method, one panel a measure, centred on zero."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attnknn.evaluate.measure import HIGHER_IS_BETTER
from attnknn.figures.style import (
    ALARM,
    FAINT,
    FULL_WIDTH,
    INK,
    method_style,
    metric_label,
    metric_scale,
    quiet_grid,
)
from attnknn.figures.sweeps import draw_interval, name_rows

INNER_SHARE = 0.8  # of the rows set the range where others lie far beyond
CUT_ABOVE = 3.0  # how far beyond the inner rows the furthest one must lie to be cut off
_ROOM, _ROOM_WHEN_CUT = 1.15, 1.5
_EDGE = 0.96  # where the arrow of a value beyond the range is drawn


def forest(table: pd.DataFrame) -> Figure:
    """Draw paired differences to the baseline, one panel a measure.

    Filled dots differ after Holm's correction, hollow ones do not; the better side is shaded. A
    value far beyond the others is an arrow at the edge, with the value beside it.

    Args:
        table: From ``compare.compare_methods``.
    """
    metrics, methods = list(dict.fromkeys(table["metric"])), list(dict.fromkeys(table["method"]))
    height = 0.75 + 0.2 * len(methods)
    figure, axes = plt.subplots(
        1, len(metrics), figsize=(FULL_WIDTH, height), sharey=True, squeeze=False
    )
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows = table[table["metric"] == metric].to_dict("records")
        looks = (method_style(row["method"]).points for row in rows)
        levels = (methods.index(row["method"]) for row in rows)
        draw_differences(ax, metric, zip(rows, levels, looks, strict=True), markersize=4.5)
    name_rows(axes[0, 0], methods)
    baseline = method_style(table["baseline"].iloc[0]).label
    figure.supxlabel(
        f"difference to {baseline} (shaded: better; filled: holds after Holm's correction)",
        fontsize=8.5,
    )
    return figure


def draw_differences(
    ax: Axes,
    metric: str,
    rows: Iterable[tuple[Mapping, int, dict]],
    *,
    markersize: float,
) -> None:
    """Draw one panel: every difference at its height, and the axis that suits most of them.

    Args:
        ax: Where to draw.
        metric: The measure of the panel.
        rows: Each with a row of differences, its height and the look of its marker.
        markersize: Of the dots, in points.
    """
    rows, scale = list(rows), metric_scale(metric)
    names = ("difference", "low", "high")
    values = [[scale * row[name] for name in names] for row, _, _ in rows]
    limit = forest_limit(np.array(values, dtype=float).reshape(-1, len(names)))
    ax.axvline(0, color=INK, linewidth=0.6)
    for row, level, look in rows:
        face = look["color"] if row["verdict"] in ("better", "worse") else "white"
        points = {**look, "markerfacecolor": face, "marker": "o", "markersize": markersize}
        if abs(scale * row["difference"]) > limit and np.isfinite(row["difference"]):
            _draw_beyond(ax, scale * row["difference"], level, points, limit)
        else:
            draw_interval(ax, pd.Series({**row, "mean": row["difference"]}), level, points, scale)
    _finish(ax, metric, limit)


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
    """Draw an arrow at the edge, and write the value beside it, towards zero."""
    is_right = value > 0
    place = _EDGE * limit if is_right else -_EDGE * limit
    ax.plot([place], [level], linestyle="none", **{**points, "marker": ">" if is_right else "<"})
    ax.annotate(
        f"{value:+#.2g}".replace("-", "\N{MINUS SIGN}"),
        xy=(place, level),
        xytext=(-4 if is_right else 4, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center_baseline",
        fontsize=7,
        parse_math=False,
    )


def _finish(ax: Axes, metric: str, limit: float) -> None:
    """Title a panel of differences, shade its better side and centre it on zero."""
    ax.set_title(metric_label(metric, arrow=True).replace("(%)", "(points)"))
    better_end = limit if metric in HIGHER_IS_BETTER else -limit
    ax.axvspan(0, better_end, color="#eef4f8", linewidth=0, zorder=0)
    ax.set_xlim(-limit, limit)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True, steps=[1, 2, 5, 10]))
    quiet_grid(ax, "x")
    ax.tick_params(axis="x", labelsize=7)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


# ---- Ablations as a forest: one row a part, grouped by how it was tried, one panel a measure.

GROUP_TITLES = {
    "off": "taken from the whole",
    "on": "added to similarity alone",
    "extra": "published part, added to the whole",
}


def ablation_forest(table: pd.DataFrame, *, metrics: Sequence[str]) -> Figure:
    """Draw what every part changes; filled dots hold after Holm's correction.

    A value far beyond the others is an arrow at the edge, with the value beside it.

    Args:
        table: Columns ``group`` ("off", "on", "extra"), ``part``, ``metric``, ``difference``,
            ``low``, ``high`` and ``verdict``.
        metrics: Measures, left to right.
    """
    levels, titles, height = _levels(table)
    figure, axes = plt.subplots(
        1, len(metrics), figsize=(FULL_WIDTH, 0.8 + 0.145 * height), sharey=True, squeeze=False
    )
    colour = method_style("attention").colour
    look = {"color": colour, "markeredgecolor": colour}
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows = table[table["metric"] == metric].to_dict("records")
        placed = [(row, levels[row["group"], row["part"]], look) for row in rows]
        draw_differences(ax, metric, placed, markersize=3.6)
        for start in titles.values():
            ax.axhline(start - 0.75, color=FAINT, linewidth=0.4)
    _name_levels(axes[0, 0], levels, titles, height)
    figure.supxlabel(
        "difference to the reference form (shaded: better; filled: holds after Holm's correction)",
        fontsize=8.5,
    )
    return figure


def _levels(table: pd.DataFrame) -> tuple[dict[tuple[str, str], int], dict[str, int], int]:
    """Return the height of every part and of every group's title, and the number of rows."""
    levels, titles, place = {}, {}, 0
    for group in (name for name in GROUP_TITLES if (table["group"] == name).any()):
        titles[group] = place
        parts = dict.fromkeys(table.loc[table["group"] == group, "part"])
        levels |= {(group, part): place + 1 + i for i, part in enumerate(parts)}
        place += 1 + len(parts)
    return levels, titles, place


def _name_levels(ax, levels: dict, titles: dict[str, int], height: int) -> None:
    names = {place: part for (_, part), place in levels.items()}
    names |= {place: GROUP_TITLES[group] for group, place in titles.items()}
    places = sorted(names)
    ax.set_yticks(places, [names[place] for place in places], parse_math=False, fontsize=6.8)
    for place, label in zip(places, ax.get_yticklabels(), strict=True):
        if place in titles.values():
            label.set_fontweight("bold")
    ax.set_ylim(height - 0.4, -0.7)


# ---- Figure of the errata: what every published fault does to every measure.

_HARM, _MISLEAD = ALARM, "#0072B2"
# Linear up to here, logarithmic beyond: costs of 0.01 and of 1 have to be seen side by side.
_LINEAR_TO = {"accuracy": 1.0, "nll": 0.1, "ece": 0.01}


def cost_forest(table: pd.DataFrame) -> Figure:
    """Draw faulty minus corrected, one row a fault, one panel a measure.

    Filled dots hold after the correction for many looks, hollow ones do not; the shaded side is
    the better one, so a dot in it flatters, or helps. An arrow at the edge is an infinite
    difference, a cross one that is not defined.

    Args:
        table: Columns ``fault``, ``metric``, ``difference``, ``low``, ``high``, ``effect`` and
            ``misleads``.
    """
    metrics, faults = list(dict.fromkeys(table["metric"])), list(dict.fromkeys(table["fault"]))
    height = 0.95 + 0.22 * len(faults)
    figure, axes = plt.subplots(
        1, len(metrics), figsize=(FULL_WIDTH, height), sharey=True, squeeze=False
    )
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows = table[table["metric"] == metric]
        for row in rows.to_dict("records"):
            _draw(ax, row, faults.index(row["fault"]), metric_scale(metric))
        _finish_errata(ax, metric, rows)
    axes[0, 0].set_yticks(range(len(faults)), faults, parse_math=False)
    axes[0, 0].set_ylim(len(faults) - 0.4, -0.6)
    handles = [
        Line2D([], [], color=colour, marker="o", markersize=4.5, linewidth=1.1, label=label)
        for colour, label in ((_HARM, "changes the classifier"), (_MISLEAD, "misleads its reader"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _draw(ax: Axes, row: dict, level: int, scale: float) -> None:
    colour = _MISLEAD if row["misleads"] else _HARM
    is_clear = row["effect"] != "no difference at this size"
    if not np.isfinite(row["difference"]):
        return _draw_not_finite(ax, row["difference"], level, colour)
    limits = scale * row["low"], scale * row["high"]
    if np.isfinite(limits).all():
        ax.plot(limits, [level, level], color=colour, linewidth=1.1)
    ax.plot(
        [scale * row["difference"]],
        [level],
        "o",
        markersize=4.5,
        markeredgecolor=colour,
        markerfacecolor=colour if is_clear else "white",
        markeredgewidth=0.9,
    )


def _draw_not_finite(ax: Axes, difference: float, level: int, colour: str) -> None:
    """Mark an infinite difference by an arrow at the edge, an undefined one by a cross, in words.

    Places are shares of the axis: no finite one is right.
    """
    place, marker, word, side = {
        np.inf: (0.97, ">", "infinite", "right"),
        -np.inf: (0.03, "<", "infinite", "left"),
    }.get(difference, (0.53, "x", "undefined", "left"))
    where = ax.get_yaxis_transform()
    ax.plot([place], [level], marker, color=colour, markersize=5, transform=where, clip_on=False)
    shift = -0.05 if side == "right" else 0.05
    ax.text(place + shift, level, word, ha=side, va="center", fontsize=6.5, transform=where)


def _steps(linear: float, limit: float) -> list[float]:
    """Return the ticks of one side: 1, 2 and 5 times the powers of ten, up to the limit."""
    steps = [linear * 10**power * factor for power in range(6) for factor in (1, 2, 5)]
    return [step for step in steps if step <= limit]


def _labelled(steps: list[float]) -> list[float]:
    """Return the ticks of one side that have room for a number: the last, and far powers of ten."""
    return [*(step for step in steps[::3] if 4.9 * step <= steps[-1]), steps[-1]]


def _finish_errata(ax: Axes, metric: str, rows: pd.DataFrame) -> None:
    linear = _LINEAR_TO.get(metric, 0.1)
    scale = metric_scale(metric)
    values = scale * rows[["difference", "low", "high"]].to_numpy()
    limit = 1.6 * max([linear, *np.abs(values[np.isfinite(values)])])
    ax.set_xscale("symlog", linthresh=linear, linscale=0.8)
    ax.set_xlim(-limit, limit)
    steps = _steps(linear, limit)
    ax.xaxis.set_major_locator(FixedLocator([*(-step for step in steps[::-1]), 0, *steps]))
    ax.xaxis.set_minor_locator(NullLocator())
    shown = {0.0, *_labelled(steps)}
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if abs(value) in shown else "")
    )
    ax.axvline(0, color=INK, linewidth=0.6)
    ax.axvspan(0, limit if metric in HIGHER_IS_BETTER else -limit, color="#eef4f8", zorder=0, lw=0)
    ax.set_title(metric_label(metric, arrow=True).replace("(%)", "(points)"))
    ax.set_xlabel(f"logarithmic beyond ±{linear:g}", fontsize=7)
    quiet_grid(ax, "x")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
