"""Figures of AFMP: ablation panels, gates over images, sparsity by layer, scaling."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jaxtyping import Float, Int, UInt8
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

from attnknn.figures.style import (
    FAINT,
    FULL_WIDTH,
    method_style,
    page_axes,
    plain_ticks,
    quiet_grid,
)

# Column of the history, its label, and what it is multiplied by.
PANELS = (
    ("val_accuracy", "validation accuracy (%)", 100.0),
    ("loss", "training loss", 1.0),
    ("sparsity_loss", "sparsity loss", 1.0),
    ("cpu_seconds", "CPU seconds per epoch", 1.0),
)
HISTOGRAM_BINS = 50
_MARKERS, _ASIDE = "osD^vPX*", 0.12
_LINES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))


def _looks(n: int) -> list[dict]:
    """Return one look a line, from dark to light, told apart in grey and with any colour vision."""
    shades = colormaps["cividis"](np.linspace(0.0, 0.88, max(n, 1)))
    return [
        {"color": shades[place], "linestyle": _LINES[place % len(_LINES)]} for place in range(n)
    ]


def afmp_panels(history: pd.DataFrame, names: Sequence[str] | Mapping[str, str]) -> Figure:
    """Draw validation accuracy, training loss, sparsity loss and time per epoch of settings.

    Lines are means over seeds, bands run from the lowest to the highest seed.

    Args:
        history: Columns ``setting``, ``seed``, ``epoch`` and those of ``PANELS``.
        names: Settings to draw, in this order; or each with what it is called in this figure.
    """
    labels = names if isinstance(names, Mapping) else dict(zip(names, names, strict=True))
    figure, axes = page_axes(2, 2, 4.0, sharex=True)
    for ax, (column, title, scale) in zip(axes.flat, PANELS, strict=True):
        for (name, label), look in zip(labels.items(), _looks(len(labels)), strict=True):
            rows = history[history["setting"] == name]
            rows = scale * rows.pivot(index="epoch", columns="seed", values=column)
            ax.plot(rows.index, rows.mean(axis=1), label=label, **look)
            band = {"color": look["color"], "alpha": 0.12, "linewidth": 0}
            ax.fill_between(rows.index, rows.min(axis=1), rows.max(axis=1), **band)
        ax.set_ylabel(title)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        quiet_grid(ax)
    axes[1, 0].ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=True)
    for ax in axes[1]:
        ax.set_xlabel("epoch")
    figure.align_ylabels(axes)
    _legend_above(figure, axes[0, 0])
    return figure


def _legend_above(figure: Figure, ax: Axes, *, most: int = 6) -> None:
    """Put a legend above all axes, in rows of equal length."""
    handles, labels = ax.get_legend_handles_labels()
    rows = -(-len(labels) // most)
    figure.legend(handles, labels, loc="outside upper center", ncols=-(-len(labels) // rows))


def gate_maps(
    images: UInt8[np.ndarray, "n_images channels height width"],
    points: Float[np.ndarray, "P 2"],
    pairs: Int[np.ndarray, "2 E"],
    gates: dict[int, Float[np.ndarray, "n_images E"]],
    patch: int,
) -> Figure:
    """Draw the gates of images as graphs over them: the wider a line, the more open its edge.

    A row an epoch, a column an image.

    The two directions of a pair lie side by side: messages keep to the left. The colours span the
    gates at hand: a mean over channels stays near one half.

    Args:
        images: Pixels.
        points: (x, y) centres of the patches, in units of one patch.
        pairs: Sender and receiver of each edge.
        gates: Epoch to the mean gate of every edge; 0 where it is pruned, then it is not drawn.
        patch: Side of a patch, in pixels.
    """
    n_rows, n_columns = len(gates), len(images)
    cell = FULL_WIDTH / max(n_rows, n_columns)
    size = (cell * n_columns, 0.93 * cell * n_rows)
    figure, axes = plt.subplots(n_rows, n_columns, figsize=size, squeeze=False)
    places = patch * points - 0.5
    ends = _to_the_left(places[pairs.T], 0.07 * patch)  # (E, 2, 2)
    everything = np.stack(list(gates.values()))  # one scale for all
    span = np.quantile(everything[everything > 0], [0.02, 0.98])
    for row, (epoch, tables) in zip(axes, gates.items(), strict=True):
        row[0].set_ylabel(f"epoch {epoch}")
        for ax, image, values in zip(row, images, tables, strict=True):
            ax.imshow(image.mean(axis=0), cmap="gray", vmin=-80, vmax=255 + 80)
            open_, scale = values > 0, 4 / max(4, n_rows)
            shares = ((values[open_] - span[0]) / max(np.ptp(span), 1e-9)).clip(0, 1)
            lines = LineCollection(
                ends[open_], cmap="plasma", linewidths=scale * (0.6 + 2.2 * shares)
            )
            lines.set_array(values[open_])
            lines.set_clim(*span)
            ax.add_collection(lines)
            ax.plot(*places.T, ".", color="white", markersize=2.2, markeredgecolor="none")
            ax.set(xticks=[], yticks=[])
    bar = figure.colorbar(lines, ax=axes, location="right", shrink=0.8, aspect=18 * min(n_rows, 3))
    bar.set_label("mean gate")
    return figure


def _to_the_left(ends: Float[np.ndarray, "E 2 2"], distance: float) -> Float[np.ndarray, "E 2 2"]:
    """Return the lines moved to the left of their direction, as seen on the picture."""
    along = ends[:, 1] - ends[:, 0]  # (E, 2)
    left = np.stack([along[:, 1], -along[:, 0]], axis=1)  # y runs downwards
    return ends + (distance * left / np.linalg.norm(along, axis=1, keepdims=True))[:, None]


def gate_layers(gates: pd.DataFrame, names: Sequence[str]) -> Figure:
    """Draw, layer by layer, the share of kept edges and of gates below one half.

    A pruned edge counts as closed in all channels.

    Args:
        gates: Columns ``setting``, ``seed``, ``epoch``, ``layer``, ``kept`` and ``closed``; the
            last recorded epoch is drawn.
        names: Settings to draw.
    """
    last = gates[gates["epoch"] == gates["epoch"].max()]
    means = last.groupby(["setting", "layer"], as_index=False)[["kept", "closed"]].mean()
    figure, axes = page_axes(1, 2, 2.3, sharex=True)
    aside = np.linspace(-_ASIDE, _ASIDE, len(names))  # equal values stay visible side by side
    titles = {"kept": "edges kept (%)", "closed": "gates below ½ (%)"}
    for ax, (column, title) in zip(axes[0], titles.items(), strict=True):
        for place, (name, look) in enumerate(zip(names, _looks(len(names)), strict=True)):
            rows = means[means["setting"] == name]
            marker = {"marker": _MARKERS[place % len(_MARKERS)], "markersize": 3.5}
            layers, shares = rows["layer"] + aside[place], 100 * rows[column]
            ax.plot(layers, shares, label=name, linewidth=0.8, **look, **marker)
        ax.set(xlabel="layer", ylabel=title, ylim=(-3, 106))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        quiet_grid(ax)
    _legend_above(figure, axes[0, 0])
    return figure


def gate_histogram(gates: pd.DataFrame) -> Axes:
    """Draw how the gates of kept edges are spread, layer by layer, on a logarithmic axis.

    Args:
        gates: Columns ``layer`` and ``gate``, one row a gate.
    """
    ax = plt.subplots()[1]
    layers = sorted(gates["layer"].unique())
    bins = np.linspace(0, 1, HISTOGRAM_BINS + 1)
    for layer, look in zip(layers, _looks(len(layers)), strict=True):
        values = gates.loc[gates["layer"] == layer, "gate"]
        ax.hist(values, bins=bins, histtype="step", label=f"layer {layer}", **look)
    ax.set(xlabel="gate", ylabel="gates", yscale="log", xlim=(0, 1))
    ax.axvline(0.5, color=FAINT, linewidth=0.6)
    quiet_grid(ax)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return ax


def scaling_panels(
    table: pd.DataFrame, *, clock: str = "seconds", rival: str = "DeiT-Tiny"
) -> Figure:
    """Draw time and peak memory against the number of patches, and time over that of a rival.

    Args:
        table: Columns ``model``, ``n_patches``, ``peak_mb``, ``outcome`` and that of the clock; a
            row whose outcome is not "ok" is marked with a cross above the last measured point.
        clock: "seconds" (on the wall) or "cpu_seconds" (of all threads, for a busy machine).
        rival: The model that times are divided by; the panel stays out if it was not measured.
    """
    unit = {"seconds": "seconds", "cpu_seconds": "CPU seconds"}[clock]
    columns = {clock: f"{unit}, forward + backward", "peak_mb": "peak memory (MB)"}
    own = table[table["model"] == rival].set_index("n_patches")[clock]
    if len(own):
        table = table.assign(ratio=table[clock] / table["n_patches"].map(own))
        columns["ratio"] = f"time / time of {rival}"
    figure, axes = page_axes(1, len(columns), 2.7)
    styles = _scaling_styles(list(dict.fromkeys(table["model"])))
    sizes = np.unique(table["n_patches"]).tolist()
    for ax, (column, label) in zip(axes[0], columns.items(), strict=True):
        for model, rows in table.groupby("model", sort=False):
            good, bad = rows[rows["outcome"] == "ok"], rows[rows["outcome"] != "ok"]
            ax.plot(good["n_patches"], good[column], label=model, **styles[model])
            if len(bad) and len(good):
                top = np.full(len(bad), good[column].max())
                ax.plot(bad["n_patches"], top, "x", color=styles[model]["color"], markersize=7)
        is_ratio = column == "ratio"
        ax.set(xlabel="patches", ylabel=label, xscale="log", yscale="linear" if is_ratio else "log")
        if is_ratio:
            ax.set_ylim(bottom=0)
        plain_ticks(ax.xaxis, FixedLocator(sizes[::-2]))  # every second one has room
        quiet_grid(ax, "both")
    _legend_above(figure, axes[0, 0], most=3)
    return figure


def _scaling_styles(models: list[str]) -> dict[str, dict]:
    """Return how to draw each model: AFMP's variants in shades, others in their own colour."""
    styles = {model: method_style(model).line | {"markersize": 3.5} for model in models}
    variants = [model for model in models if model.lower().startswith("afmp")]
    for model, look in zip(variants, _looks(len(variants)), strict=True):
        faces = dict.fromkeys(("markerfacecolor", "markeredgecolor"), look["color"])
        styles[model] |= look | faces
    for place, model in enumerate(model for model in models if model not in variants):
        if place:  # a second one of the same kind: broken lines and empty markers
            styles[model] |= {"linestyle": _LINES[place % len(_LINES)], "markerfacecolor": "none"}
    return styles
