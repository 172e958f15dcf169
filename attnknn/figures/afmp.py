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
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

from attnknn.figures.style import FAINT, FULL_WIDTH, method_style, quiet_grid

# Column of the history, its label, and what it is multiplied by.
PANELS = (
    ("val_accuracy", "validation accuracy (%)", 100.0),
    ("loss", "training loss", 1.0),
    ("sparsity_loss", "sparsity loss", 1.0),
    ("cpu_seconds", "CPU seconds per epoch", 1.0),
)
HISTOGRAM_BINS = 50
_MAP, _MAP_RANGE = "cividis", (0.0, 0.88)  # told apart in grey and with any colour vision
_MARKERS, _ASIDE = "osD^vPX*", 0.12
_LINES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))


def afmp_panels(history: pd.DataFrame, names: Sequence[str] | Mapping[str, str]) -> Figure:
    """Draw validation accuracy, training loss, sparsity loss and time per epoch of settings.

    Lines are means over seeds, bands run from the lowest to the highest seed.

    Args:
        history: Columns ``setting``, ``seed``, ``epoch`` and those of ``PANELS``.
        names: Settings to draw, in this order; or each with what it is called in this figure.
    """
    labels = names if isinstance(names, Mapping) else dict(zip(names, names, strict=True))
    figure, axes = plt.subplots(2, 2, figsize=(FULL_WIDTH, 4.0), sharex=True)
    shades = colormaps[_MAP](np.linspace(*_MAP_RANGE, len(labels)))
    for ax, (column, label, scale) in zip(axes.flat, PANELS, strict=True):
        for place, (name, shade) in enumerate(zip(labels, shades, strict=True)):
            rows = scale * history[history["setting"] == name].pivot(
                index="epoch", columns="seed", values=column
            )
            style = {"color": shade, "linestyle": _LINES[place % len(_LINES)]}
            ax.plot(rows.index, rows.mean(axis=1), label=labels[name], **style)
            ax.fill_between(
                rows.index, rows.min(axis=1), rows.max(axis=1), color=shade, alpha=0.12, linewidth=0
            )
        ax.set_ylabel(label)
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
            lines = _gate_lines(ends[values > 0], values[values > 0], span, 4 / max(4, n_rows))
            ax.add_collection(lines)
            ax.plot(*places.T, ".", color="white", markersize=2.2, markeredgecolor="none")
            ax.set(xticks=[], yticks=[])
    bar = figure.colorbar(lines, ax=axes, location="right", shrink=0.8, aspect=18 * min(n_rows, 3))
    bar.set_label("mean gate")
    return figure


def _gate_lines(
    ends: Float[np.ndarray, "n_kept 2 2"],
    values: Float[np.ndarray, " n_kept"],
    span: Float[np.ndarray, "2"],
    scale: float,
) -> LineCollection:
    low, high = span
    widths = scale * (0.6 + 2.2 * ((values - low) / max(high - low, 1e-9)).clip(0, 1))
    lines = LineCollection(ends, cmap="plasma", linewidths=widths)
    lines.set_array(values)
    lines.set_clim(low, high)
    return lines


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
    figure, axes = plt.subplots(1, 2, figsize=(FULL_WIDTH, 2.3), sharex=True)
    shades = colormaps[_MAP](np.linspace(*_MAP_RANGE, len(names)))
    aside = np.linspace(-_ASIDE, _ASIDE, len(names))  # equal values stay visible side by side
    titles = {"kept": "edges kept (%)", "closed": "gates below ½ (%)"}
    for ax, (column, title) in zip(axes, titles.items(), strict=True):
        for place, (name, shade) in enumerate(zip(names, shades, strict=True)):
            rows = means[means["setting"] == name]
            style = {"linestyle": _LINES[place % len(_LINES)], "linewidth": 0.8, "color": shade}
            marker = {"marker": _MARKERS[place % len(_MARKERS)], "markersize": 3.5}
            layers = rows["layer"] + aside[place]
            ax.plot(layers, 100 * rows[column], label=name, **style, **marker)
        ax.set(xlabel="layer", ylabel=title, ylim=(-3, 106))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        quiet_grid(ax)
    _legend_above(figure, axes[0])
    return figure


def gate_histogram(gates: pd.DataFrame) -> Axes:
    """Draw how the gates of kept edges are spread, layer by layer, on a logarithmic axis.

    Args:
        gates: Columns ``layer`` and ``gate``, one row a gate.
    """
    ax = plt.subplots()[1]
    layers = sorted(gates["layer"].unique())
    shades = colormaps[_MAP](np.linspace(*_MAP_RANGE, len(layers)))
    for place, (layer, shade) in enumerate(zip(layers, shades, strict=True)):
        values = gates.loc[gates["layer"] == layer, "gate"]
        ax.hist(
            values,
            bins=np.linspace(0, 1, HISTOGRAM_BINS + 1),
            histtype="step",
            color=shade,
            linestyle=_LINES[place % len(_LINES)],
            label=f"layer {layer}",
        )
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
    figure, axes = plt.subplots(1, len(columns), figsize=(FULL_WIDTH, 2.7))
    styles = _scaling_styles(list(dict.fromkeys(table["model"])))
    for ax, (column, label) in zip(axes, columns.items(), strict=True):
        _draw_scaling(ax, table, column, styles)
        ax.set(xlabel="patches", ylabel=label, xscale="log")
        if column == "ratio":
            ax.set_ylim(bottom=0)
        else:
            ax.set_yscale("log")
        sizes = np.unique(table["n_patches"]).tolist()
        ax.xaxis.set_major_locator(FixedLocator(sizes[::-2]))  # every second one has room
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.xaxis.set_minor_locator(NullLocator())
        quiet_grid(ax, "both")
    _legend_above(figure, axes[0], most=3)
    return figure


def _draw_scaling(ax: Axes, table: pd.DataFrame, column: str, styles: dict[str, dict]) -> None:
    for model, rows in table.groupby("model", sort=False):
        good, bad = rows[rows["outcome"] == "ok"], rows[rows["outcome"] != "ok"]
        line, *_ = ax.plot(good["n_patches"], good[column], label=model, **styles[model])
        if len(bad) and len(good):
            top = np.full(len(bad), good[column].max())
            ax.plot(bad["n_patches"], top, "x", color=line.get_color(), markersize=7)


def _scaling_styles(models: list[str]) -> dict[str, dict]:
    """Return how to draw each model: AFMP's variants in shades, others in their own colour."""
    styles = {model: method_style(model).line | {"markersize": 3.5} for model in models}
    variants = [model for model in models if model.lower().startswith("afmp")]
    shades = colormaps[_MAP](np.linspace(*_MAP_RANGE, max(len(variants), 1)))
    for place, (model, shade) in enumerate(zip(variants, shades, strict=False)):
        shaded = dict.fromkeys(("color", "markerfacecolor", "markeredgecolor"), shade)
        styles[model] |= shaded | {"linestyle": _LINES[place % len(_LINES)]}
    for place, model in enumerate(model for model in models if model not in variants):
        if place:  # a second one of the same kind: broken lines and empty markers
            styles[model] |= {"linestyle": _LINES[place % len(_LINES)], "markerfacecolor": "none"}
    return styles
