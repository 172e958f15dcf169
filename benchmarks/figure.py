"""The figure: every ratio with its spread, and its target."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnknn import plot
from attnknn.plot.style import ALARM, FAINT, INK
from attnknn.report import save_figure


def save_bench_figure(result: dict[str, Any], folder: Path) -> Figure:
    """Draw the ratios of a result into ``bench.svg`` and ``bench.png``."""
    plot.use_style()
    rows = result["ratios"][::-1]
    missing = [row["title"] for row in result["missing"]]
    figure = Figure(figsize=(plot.FULL_WIDTH, 0.6 + 0.3 * max(1, len(rows)) + 0.15 * len(missing)))
    figure.set_layout_engine("constrained")
    draw_ratios(figure.subplots(), rows)
    if missing:
        figure.supxlabel("not measured here: " + "; ".join(missing), fontsize=6, color=FAINT)
    save_figure(figure, folder, "bench")
    return figure


def draw_ratios(ax: Axes, rows: list[dict[str, Any]]) -> Axes:
    """Draw one line a ratio on a logarithmic axis: median, spread of the rounds, target."""
    for place, row in enumerate(rows):
        ax.plot([row["low"], row["high"]], [place, place], color=INK, linewidth=1.2)
        ax.plot(row["median"], place, "o", color=INK, markersize=4)
        if row["target"] is not None:
            ax.plot(row["target"], place, "|", color=ALARM, markersize=11, markeredgewidth=1.6)
    ax.axvline(1, color=FAINT, linewidth=0.8)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    arrows = {"higher": "\N{RIGHTWARDS ARROW}", "lower": "\N{LEFTWARDS ARROW}"}
    labels = [f"{row['title']} {arrows[row['better']]}" for row in rows]
    ax.set_yticks(range(len(rows)), labels, fontsize=6)
    ax.set_xlabel("ratio; the arrow shows which way is better, the bar is the target")
    return ax
