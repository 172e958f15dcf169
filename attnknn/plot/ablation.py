"""Ablations as a forest: one row a part, grouped by how it was tried, one panel a measure."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from attnknn.plot.forest import draw_differences
from attnknn.plot.style import FAINT, FULL_WIDTH, method_style

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
