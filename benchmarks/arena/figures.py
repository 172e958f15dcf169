"""Figures of the arena, in the package's style: one colour and marker a method in all of them."""

from collections.abc import Collection, Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnknn.figures.style import (
    FAINT,
    FULL_WIDTH,
    INK,
    MethodStyle,
    label_line_ends,
    quiet_grid,
    spread,
)
from benchmarks.arena.problems import NOISE, NOISE_NAMES
from benchmarks.arena.standings import is_ours, name_of, ordered

# Ours has the blue of the attention; the others keep clear of it.
STYLES = {
    "attnknn": MethodStyle("", "#0072B2", "o"),
    "attnknn-as-given": MethodStyle("", "#0072B2", "d", filled=False),
    "attnknn-no-fit": MethodStyle("", "#0072B2", "s", filled=False),
    "knn": MethodStyle("", "#7f7f7f", "s", filled=False),
    "knn-tuned": MethodStyle("", "#7f7f7f", "s"),
    "nca": MethodStyle("", "#8c6d31", "D"),
    "logistic": MethodStyle("", "#000000", "v"),
    "forest": MethodStyle("", "#117733", "^"),
    "histgb": MethodStyle("", "#56B4E9", "<"),
    "lightgbm": MethodStyle("", "#E69F00", ">"),
    "catboost": MethodStyle("", "#D55E00", "P"),
    "realmlp": MethodStyle("", "#332288", "X"),
    "tabm": MethodStyle("", "#882255", "h"),
    "tabr": MethodStyle("", "#44AA99", "p"),
}
# Further versions of ours differ by their blue, the first one has the house's.
BLUES = ("#0072B2", "#7FB8D8", "#003D66", "#5B7F99")


def style_of(contestant: str, contestants: Collection[str]) -> MethodStyle:
    """Return how a contestant is drawn; the last version of ours has the full colour."""
    style = STYLES[contestant.partition("@")[0]]
    if is_ours(contestant):
        labels = sorted({each.partition("@")[2] for each in contestants if is_ours(each)})
        place = labels[::-1].index(contestant.partition("@")[2])
        style = MethodStyle(
            "", BLUES[place % len(BLUES)], style.marker, style.linestyle, style.filled
        )
    return style


def rank_dots(
    ranks: Mapping[str, pd.DataFrame], differences: Mapping[str, float], *, measure: str = "NLL"
) -> Figure:
    """Draw mean ranks with their intervals, a panel a noise, in one order for all panels.

    Args:
        ranks: Noise to ``rank``, ``low``, ``high`` by contestant.
        differences: Noise to the critical difference, drawn as a bar from the best one.
        measure: What is ranked.
    """
    together = pd.concat([each["rank"] for each in ranks.values()], axis=1)
    order = together.mean(axis=1).sort_values(kind="stable").index.tolist()
    figure, axes = plt.subplots(
        1, len(ranks), figsize=(FULL_WIDTH, 0.8 + 0.19 * len(order)), squeeze=False, sharey=True
    )
    for ax, (noise, table) in zip(axes[0], ranks.items(), strict=True):
        for name, row in table.iterrows():
            style, level = style_of(name, order), order.index(name)
            ax.plot([row["low"], row["high"]], [level, level], color=style.colour, linewidth=0.9)
            ax.plot([row["rank"]], [level], linestyle="none", **style.points)
        best = table["rank"].min()
        ax.plot([best, best + differences[noise]], [-0.9, -0.9], color=INK, linewidth=1.4)
        ax.set_title(NOISE_NAMES[noise])
        ax.set_xlabel(f"mean rank in {measure}")
        quiet_grid(ax, "both")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    names = [name_of(name, order) for name in order]
    axes[0, 0].set_yticks(range(len(order)), names, fontsize=7, parse_math=False)
    for label, name in zip(axes[0, 0].get_yticklabels(), order, strict=True):
        label.set_fontweight("bold" if is_ours(name) else "normal")
    axes[0, 0].set_ylim(len(order) - 0.4, -1.5)
    return figure


def noise_lines(ranks: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw how the mean rank moves with the share of wrong labels, a panel a kind of noise."""
    kinds = {
        "labels into any class": [
            noise for noise in ranks if NOISE[noise][0] in ("none", "symmetric")
        ],
        "each class into one other": [
            noise for noise in ranks if NOISE[noise][0] in ("none", "class")
        ],
    }
    kinds = {title: noises for title, noises in kinds.items() if len(noises) > 1}
    figure, axes = plt.subplots(
        1, max(1, len(kinds)), figsize=(FULL_WIDTH, 3.0), squeeze=False, sharey=True
    )
    for ax, (title, noises) in zip(axes[0], kinds.items(), strict=False):
        shares = [100 * NOISE[noise][1] for noise in noises]
        everyone = set.intersection(*(set(ranks[noise].index) for noise in noises))
        ends = []
        for name in ordered(everyone):
            style = style_of(name, everyone)
            values = [ranks[noise].loc[name, "rank"] for noise in noises]
            ax.plot(shares, values, linewidth=2.0 if is_ours(name) else 1.0, **_line(style))
            ends.append((shares[-1], values[-1], name_of(name, everyone), style.text_colour))
        ax.invert_yaxis()
        ax.set_xticks(shares)
        ax.set_title(title)
        ax.set_xlabel("wrong training labels (%)")
        quiet_grid(ax)
        label_line_ends(ax, ends, size=7.0)
    axes[0, 0].set_ylabel("mean rank in NLL (1 is best)")
    return figure


def _line(style: MethodStyle) -> dict:
    line = style.line
    line.pop("linewidth", None)
    return line


def speed_dots(table: pd.DataFrame, *, noise: str) -> Figure:
    """Draw the mean rank against the median seconds of a fit: low and left is good.

    Args:
        table: Index: contestants; ``fit_cpu`` and ``rank_nll``.
        noise: Which noise it is.
    """
    figure, ax = plt.subplots(figsize=(0.72 * FULL_WIDTH, 2.7))
    table = table.sort_values("rank_nll")
    heights = spread(table["rank_nll"].tolist(), 0.055 * np.ptp(table["rank_nll"]))
    for height, (name, row) in zip(heights, table.iterrows(), strict=True):
        style = style_of(name, table.index)
        ax.plot([row["fit_cpu"]], [row["rank_nll"]], linestyle="none", **style.points)
        ax.annotate(
            name_of(name, table.index),
            (row["fit_cpu"] * 1.15, height),
            va="center",
            fontsize=7,
            color=style.text_colour,
            parse_math=False,
        )
    ax.set_xscale("log")
    ax.invert_yaxis()
    ax.margins(x=0.25, y=0.12)
    ax.set_xlabel("median seconds of a fit, one core")
    ax.set_ylabel("mean rank in NLL")
    ax.set_title(NOISE_NAMES[noise])
    quiet_grid(ax, "both")
    return figure


def gap_dots(gaps: Mapping[str, pd.DataFrame], headline: str) -> Figure:
    """Draw by how much each table's NLL is above (right) or below that of the best rival.

    Args:
        gaps: Noise to a column ``behind`` by table.
        headline: Whose NLL it is.
    """
    n_tables = max(len(each) for each in gaps.values())
    figure, axes = plt.subplots(
        1, len(gaps), figsize=(FULL_WIDTH, 0.8 + 0.135 * n_tables), squeeze=False, sharey=True
    )
    style = style_of(headline, [headline])
    order = next(iter(gaps.values()))["behind"].sort_values().index.tolist()
    order += sorted({name for each in gaps.values() for name in each.index} - set(order))
    for ax, (noise, table) in zip(axes[0], gaps.items(), strict=True):
        places = [order.index(name) for name in table.index]
        ax.plot(table["behind"], places, linestyle="none", **style.points)
        ax.axvline(0, color=FAINT, linewidth=0.8)
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set_xticks([-0.5, -0.1, 0, 0.1, 0.5], ["-.5", "-.1", "0", ".1", ".5"])
        ax.set_title(NOISE_NAMES[noise])
        quiet_grid(ax, "both")
    axes[0, 0].set_yticks(range(len(order)), order, fontsize=6, parse_math=False)
    axes[0, 0].set_ylim(-0.7, len(order) - 0.3)
    figure.supxlabel("NLL of ours minus that of the best rival on the table (left: ours is first)")
    return figure
