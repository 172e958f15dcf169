"""Names written beside the lines they belong to, moved apart where they would touch."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

_POINTS_PER_INCH = 72


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Return positions at least ``gap`` apart, in the same order, moved as little as needed.

    Touching labels form a block that is centred on the mean of its members (pool adjacent
    violators), so equal values fan out evenly around their value.
    """
    order = np.argsort(positions, kind="stable")
    blocks: list[list[float]] = []  # each: wanted positions of its first member
    for rank, place in enumerate(order):
        blocks.append([positions[place] - rank * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    starts = np.concatenate([np.full(len(block), np.mean(block)) for block in blocks])
    moved = np.empty(len(order))
    moved[order] = starts + gap * np.arange(len(order))
    return moved.tolist()


def label_line_ends(ax: Axes, ends: Sequence[tuple], *, size: float = 8) -> None:
    """Write names to the right of the axes, level with the ends of their lines.

    Call after the limits of the axes are final. A thin leader joins a name to its line where the
    two are apart.

    Args:
        ax: Axes with the lines.
        ends: One (x, y, name, colour) a line, in data units.
        size: Font size in points.
    """
    if not ends:
        return
    ax.figure.draw_without_rendering()  # settles the layout, and with it the height of the axes
    height = ax.get_window_extent().height / ax.figure.dpi  # inches
    to_axes = ax.transData + ax.transAxes.inverted()
    points = to_axes.transform([(x, y) for x, y, _, _ in ends])
    gap = 1.12 * size / _POINTS_PER_INCH / height
    levels = np.array(spread(points[:, 1].tolist(), gap))
    # The block as a whole stays inside the axes where it fits.
    levels -= max(levels.max() - 1, 0)
    levels += max(-levels.min(), 0)
    for (_, _, name, colour), (x, y), level in zip(ends, points, levels, strict=True):
        ax.annotate(
            name,
            xy=(x, y),
            xytext=(1.05, level),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=size,
            va="center",
            ha="left",
            annotation_clip=False,
            parse_math=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 1,
                "relpos": (0, 0.5),
            },
        )
