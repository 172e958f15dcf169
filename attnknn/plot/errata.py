"""Figure of the errata: what every published fault does to every measure."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnknn.measure import HIGHER_IS_BETTER
from attnknn.plot.style import (
    ALARM,
    FULL_WIDTH,
    INK,
    metric_label,
    metric_scale,
    quiet_grid,
)

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
        _finish(ax, metric, rows)
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


def _finish(ax: Axes, metric: str, rows: pd.DataFrame) -> None:
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
