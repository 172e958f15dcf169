"""Figures of what probabilities are worth: reliability, risk against coverage, confusions."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from attnknn.figures.style import (
    ALARM,
    COLUMN_WIDTH,
    FAINT,
    FULL_WIDTH,
    INK,
    label_line_ends,
    method_style,
    quiet_grid,
)

_BLUES = LinearSegmentedColormap.from_list("attnknn", ["#ffffff", "#9ecae1", "#0072B2", "#08306b"])
FEW_ROWS = 10  # the accuracy of so few rows is hardly known


def reliability_diagram(
    tables: Mapping[str, pd.DataFrame], *, notes: Mapping[str, str] | None = None
) -> Figure:
    """Draw accuracy against confidence, and below it how often each confidence occurs.

    Bars are the accuracy of a bin, outlined gaps its distance to the mean confidence. One column
    of panels a method; bins of fewer than 10 rows are pale.

    Args:
        tables: Method name to ``measure.reliability_table`` (10 bins read best).
        notes: Method name to a line written in its panel, for instance its ECE.
    """
    figure, axes = plt.subplots(
        2,
        len(tables),
        figsize=(min(1.75 * len(tables) + 0.4, FULL_WIDTH), 2.6),
        sharex=True,
        sharey="row",
        squeeze=False,
        gridspec_kw={"height_ratios": [3, 1]},
    )
    for (upper, lower), (method, table) in zip(axes.T, tables.items(), strict=True):
        style = method_style(method)
        _draw_reliability(upper, table[table["count"] > 0], style.colour)
        _draw_histogram(lower, table, style.colour)
        title = [style.label, (notes or {}).get(method)]
        upper.set_title("\n".join(line for line in title if line), parse_math=False)
        lower.set_xlabel("confidence")
    axes[0, 0].set_ylabel("accuracy")
    axes[1, 0].set_ylabel("rows")
    return figure


def _draw_reliability(ax: Axes, table: pd.DataFrame, colour: str) -> None:
    width = table["high"] - table["low"]
    centre, accuracy = table["low"] + width / 2, table["accuracy"]
    bars = ax.bar(centre, accuracy, width, color=colour, edgecolor="white", linewidth=0.5)
    for bar, count in zip(bars, table["count"], strict=True):
        bar.set_alpha(0.9 if count >= FEW_ROWS else 0.3)
    gap = {"facecolor": "none", "edgecolor": ALARM, "linewidth": 0.6, "hatch": "//////"}
    ax.bar(centre, table["confidence"] - accuracy, 0.8 * width, bottom=accuracy, **gap)
    ax.plot([0, 1], [0, 1], color=INK, linewidth=0.7, linestyle=(0, (4, 2)))
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xticks((0, 0.5, 1), ("0", "0.5", "1"))
    ax.set_yticks((0, 0.5, 1), ("0", "0.5", "1"))


def _draw_histogram(ax: Axes, table: pd.DataFrame, colour: str) -> None:
    width = table["high"] - table["low"]
    looks = {"color": colour, "edgecolor": "white", "linewidth": 0.5}
    ax.bar(table["low"] + width / 2, table["count"], width, **looks)
    # Logarithmic, because nearly all rows of a good classifier share the last bin.
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(numticks=3))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(bottom=0.7)


def risk_coverage_curves(
    curves: Mapping[str, pd.DataFrame], *, ax: Axes | None = None, max_points: int = 400
) -> Axes:
    """Draw the error among the rows a method answers against the share it answers.

    Args:
        curves: Method name to ``measure.risk_coverage``.
        ax: Where to draw; a new one-column figure by default.
        max_points: Points drawn of each curve, so that vector graphics stay small.
    """
    ax = ax if ax is not None else plt.subplots()[1]
    ends = []
    for method, curve in curves.items():
        style = method_style(method)
        kept = np.unique(np.linspace(0, len(curve) - 1, max_points).round().astype(int))
        at, errors = curve["coverage"].iloc[kept], 100 * curve["risk"].iloc[kept]
        look = {"color": style.colour, "linestyle": style.linestyle, "label": style.label}
        ax.plot(at, errors, **look)
        ends.append((1.0, errors.iloc[-1], style.label, style.text_colour))
    ax.set(xlim=(0, 1), xlabel="share of rows answered", ylabel="errors among them (%)")
    ax.set_ylim(bottom=0)
    quiet_grid(ax)
    label_line_ends(ax, ends)
    return ax


def confusion(
    counts: Int[np.ndarray, "C C"],
    class_names: Sequence[str] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw a confusion matrix: colour is the share of a label's rows, numbers are rows.

    Args:
        counts: From ``measure.confusion_matrix``: rows are labels, columns predictions.
        class_names: Names of the classes; their numbers by default.
        ax: Where to draw; a new one-column figure by default.
    """
    n_classes = len(counts)
    ax = ax if ax is not None else plt.subplots(figsize=(COLUMN_WIDTH, COLUMN_WIDTH))[1]
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # The root shows confusions of one per cent beside a diagonal of ninety.
    ax.imshow(np.sqrt(share), cmap=_BLUES, vmin=0, vmax=1)
    if n_classes <= 12:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if share[row, column] > 0.3 else INK
                ax.text(column, row, str(count), ha="center", va="center", color=colour, size=7)
    names = [str(name) for name in (class_names or range(n_classes))]
    ticks = range(n_classes) if n_classes <= 20 else range(0, n_classes, max(n_classes // 10, 1))
    shown = [names[tick] for tick in ticks]
    ax.set_xticks(ticks, shown, rotation=45 if class_names else 0, parse_math=False)
    if class_names:
        plt.setp(ax.get_xticklabels(), ha="right", rotation_mode="anchor")
    ax.set_yticks(ticks, shown, parse_math=False)
    ax.set(xlabel="predicted", ylabel="label")
    ax.tick_params(length=0)
    ax.spines[:].set(visible=True, color=FAINT, linewidth=0.5)
    return ax
