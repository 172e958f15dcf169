"""Figures of the theory study: how errors fall, what sampling costs, where the best k lies."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from attnknn.plot.labels import label_line_ends
from attnknn.plot.style import (
    FAINT,
    FULL_WIDTH,
    INK,
    method_style,
    metric_label,
    metric_scale,
    quiet_grid,
)

_SMALLEST_DRAWN = 1e-6  # masses below are drawn at the edge: nothing depends on them


def _ramp(n_lines: int) -> list[tuple]:
    """Colours for ordered lines, dark to light, told apart without colour vision by lightness."""
    return [colormaps["viridis"](place) for place in np.linspace(0.0, 0.85, n_lines)]


def truncation_figure(masses: pd.DataFrame, synthetic: pd.DataFrame) -> Figure:
    """Draw discarded mass and vote error against k, and the same for made-up weights.

    Args:
        masses: Columns ``temperature``, ``k``, ``discarded mass`` and ``vote error``; seeds are
            averaged.
        synthetic: Columns ``weights``, ``k`` and ``discarded mass``.
    """
    figure, axes = plt.subplots(1, 3, figsize=(FULL_WIDTH, 2.3), sharey=True)
    temperatures = list(dict.fromkeys(masses["temperature"]))
    means = masses.groupby(["temperature", "k"])[["discarded mass", "vote error"]].mean()
    for ax, column in zip(axes[:2], ("discarded mass", "vote error"), strict=True):
        lines = [(f"τ = {t:g}", means.loc[t, column]) for t in temperatures]
        _mass_lines(ax, lines, _ramp(len(lines)))
        ax.set_title(f"{column}, softmax over the memory")
    by_name = synthetic.groupby("weights", sort=False)
    lines = [(name, rows.set_index("k")["discarded mass"]) for name, rows in by_name]
    _mass_lines(axes[2], lines, _ramp(len(lines)))
    axes[2].set_title("discarded mass, made-up weights")
    axes[0].set_ylim(_SMALLEST_DRAWN, 2)
    axes[0].set_ylabel("total variation")
    for ax in axes:
        ax.legend(loc="lower left", fontsize=7, handlelength=1.2, labelspacing=0.25)
    return figure


def _mass_lines(ax: Axes, lines: Sequence[tuple[str, pd.Series]], colours: list[tuple]) -> None:
    for (name, values), colour in zip(lines, colours, strict=True):
        drawn = values[values > _SMALLEST_DRAWN]
        ax.plot(drawn.index, drawn, color=colour, marker="o", markersize=3, label=name)
    ks = np.asarray(lines[0][1].index, dtype=float)
    ax.plot(ks, 1 / ks, color=INK, linestyle=(0, (1, 1.5)), linewidth=1, label="1/k")
    _log_axes(ax)
    ax.set_xlabel("rows kept, k")


def gumbel_figure(table: pd.DataFrame) -> Figure:
    """Draw the extra rows of lazy Gumbel sampling against k, and how well its draws fit.

    Args:
        table: From ``studies.gumbel.gumbel_study``, all seeds and queries.
    """
    figure, (cost, fit) = plt.subplots(1, 2, figsize=(FULL_WIDTH, 2.3))
    temperatures = sorted(set(table["temperature"]), reverse=True)
    for t, colour in zip(temperatures, _ramp(len(temperatures)), strict=True):
        rows = table[table["temperature"] == t]
        means = rows.groupby("k")["extra"].mean().clip(lower=1e-3)
        cost.plot(means.index, means, color=colour, marker="o", markersize=3, label=f"τ = {t:g}")
        fit.plot(
            rows["by_chance"], rows["distance"], "o", color=colour, markersize=3, label=f"τ = {t:g}"
        )
    bound = table.groupby("k")["bound"].mean()
    cost.plot(bound.index, bound, color=INK, linestyle=(0, (1, 1.5)), linewidth=1, label="bound")
    _log_axes(cost)
    cost.xaxis.set_major_locator(FixedLocator(bound.index.tolist()))
    cost.xaxis.set_minor_locator(NullLocator())
    cost.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    cost.set(xlabel="rows searched, k", ylabel="extra rows a draw")
    cost.legend(loc="lower left", fontsize=7, handlelength=1.2, labelspacing=0.25)
    _diagonal(fit, table)
    fit.set(xlabel="exact sampler, 95 % of samples below", ylabel="distance to the softmax")
    return figure


def _diagonal(ax: Axes, table: pd.DataFrame) -> None:
    top = 1.15 * table[["by_chance", "distance"]].to_numpy().max()
    ax.plot([0, top], [0, top], color=FAINT, linewidth=0.8, zorder=0)
    ax.fill_between([0, top], [0, top], color="#eef4f8", linewidth=0, zorder=0)
    ax.set(xlim=(0, top), ylim=(0, top))
    ax.text(0.97 * top, 0.05 * top, "as close as an exact sampler", fontsize=7, ha="right")
    quiet_grid(ax, "both")


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


def entropy_figure(table: pd.DataFrame) -> Figure:
    """Draw how evenly each method weighs: the share of queries below each entropy.

    Args:
        table: Columns ``method``, ``entropy`` (of log k) and ``correct``, one row a query.
    """
    figure, ax = plt.subplots()
    for method, rows in table.groupby("method", sort=False):
        style = method_style(method)
        for is_right, line in ((True, "-"), (False, (0, (2, 1.2)))):
            values = np.sort(rows.loc[rows["correct"] == is_right, "entropy"])
            shares = 100 * np.arange(1, len(values) + 1) / max(len(values), 1)
            name = f"{style.label}, {'right' if is_right else 'wrong'}"
            ax.step(values, shares, color=style.colour, linestyle=line, label=name, where="post")
    ax.set(xlabel="entropy of the weights / log k", ylabel="queries below (%)", ylim=(0, 100))
    quiet_grid(ax, "both")
    ax.legend(loc="upper left", fontsize=7, handlelength=1.8)
    return figure


def _log_axes(ax: Axes) -> None:
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    quiet_grid(ax, "both")
