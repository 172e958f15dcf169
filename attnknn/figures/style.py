"""One look for all figures: fonts, sizes, and one colour and marker per method.

Colours are those of Okabe and Ito, told apart with every common form of colour blindness; a
method's variants share its hue and differ by marker and line. Text is drawn as outlines of fonts
that come with matplotlib, so a figure looks the same on every machine and in every PDF.
"""

import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, NullLocator

from attnknn.config import METHOD_NAMES
from attnknn.evaluate.measure import HIGHER_IS_BETTER, METRIC_NAMES

COLUMN_WIDTH = 3.3  # inches: one column of a two-column page
FULL_WIDTH = 6.8  # inches: the text width of a one-column page

INK = "#222222"
FAINT = "#8c8c8c"
GRID = "#dddddd"
ALARM = "#D55E00"
BETTER = "#eef4f8"  # behind the better side of zero


@dataclass(frozen=True)
class MethodStyle:
    """How a method is drawn and called in every figure."""

    label: str
    colour: str
    marker: str = "o"
    linestyle: str | tuple = "-"
    filled: bool = True

    @property
    def text_colour(self) -> str:
        """The colour, dark enough for small type."""
        return to_hex([0.78 * part for part in to_rgb(self.colour)])

    @property
    def line(self) -> dict:
        """Keyword arguments for ``Axes.plot``."""
        return {"color": self.colour, "linestyle": self.linestyle, **self.points}

    @property
    def points(self) -> dict:
        """Keyword arguments for markers alone."""
        face = self.colour if self.filled else "white"
        edge = {"markeredgecolor": self.colour, "markeredgewidth": 0.9}
        # Stars and crosses look smaller than discs of the same size.
        size = 6.5 if self.marker == "*" else 5 if self.marker in "PXphd" else 4
        return {
            "color": self.colour,
            "marker": self.marker,
            "markersize": size,
            "markerfacecolor": face,
            **edge,
        }


METHOD_STYLES = {
    "uniform": MethodStyle("uniform", "#666666", "s"),
    "distance": MethodStyle("distance", "#E69F00", "D"),
    "attention": MethodStyle("attention", "#0072B2", "o"),
    "prototypes": MethodStyle("prototypes", "#009E73", "^"),
    "cnn": MethodStyle("CNN", "#B0548C", "P"),
    "linear": MethodStyle("linear probe", "#000000", "v"),
    "afmp": MethodStyle("AFMP", "#0072B2", "o"),
    "deit": MethodStyle("DeiT", "#D55E00", "s"),
}
# Word in a method's name to what it adds: label, marker, line, filled marker.
VARIANT_STYLES = {
    "*": ("*", None, (0, (4, 1.5)), False),
    "tuned": (" (tuned)", None, (0, (4, 1.5)), False),
    "temperature": (" + temperature", None, (0, (4, 1.5)), False),
    "published": (" (published)", "x", (0, (1, 1)), True),
    "joint": (" (joint)", "h", (0, (5, 1, 1, 1)), False),
    "frozen": (", frozen", "8", (0, (3, 1, 1, 1)), False),
    "transfer": (", transfer", "X", (0, (5, 1, 1, 1)), True),
    "tta": (" + TTA", "*", (0, (3, 1)), True),
    "k-ensemble": (" + k-ensemble", "p", (0, (1, 1)), True),
    "adaptive": (" + adaptive k", "d", (0, (2, 1)), False),
}
_FALLBACKS = ("#56B4E9", "#D55E00", "#8c6d31", "#332288", "#117733", "#882255", "#44AA99")
_FALLBACK_MARKERS = ("v", "<", ">", "h", "8")

PERCENT_METRICS = HIGHER_IS_BETTER  # shares in tables, drawn in per cent


def method_style(name: str) -> MethodStyle:
    """Return the one style of a method, by its name in tables.

    A name is a known method, with known variants in any order ("attention + TTA",
    "distance*", "attention_transfer"); other names get a colour that depends on nothing but the
    name.
    """
    words = re.sub(r"[_\s+,()]+", " ", name.lower().replace("k ensemble", "k-ensemble"))
    base = next((known for known in METHOD_STYLES if words.startswith(known)), None)
    if base is None:
        number = zlib.crc32(name.encode())
        return MethodStyle(
            name,
            _FALLBACKS[number % len(_FALLBACKS)],
            _FALLBACK_MARKERS[number // len(_FALLBACKS) % len(_FALLBACK_MARKERS)],
        )
    style = METHOD_STYLES[base]
    rest = words.removeprefix(base)
    for word, (suffix, marker, linestyle, filled) in VARIANT_STYLES.items():
        if word in rest:
            rest = rest.replace(word, " ")
            style = replace(
                style,
                label=style.label + suffix,
                marker=marker or style.marker,
                linestyle=linestyle,
                filled=filled,
            )
    unknown = set(rest.split()) - {"k"}
    if name in METHOD_NAMES:
        return replace(style, label=METHOD_NAMES[name])
    return replace(style, label=name) if unknown else style


def metric_label(metric: str, *, arrow: bool = False) -> str:
    """Return the label of a measure: name, unit and, if asked, an arrow to the better side."""
    if metric not in METRIC_NAMES:
        return metric.replace("_", " ")
    unit = " (%)" if metric in PERCENT_METRICS else ""
    better = "↑" if metric in HIGHER_IS_BETTER else "↓"
    return f"{METRIC_NAMES[metric]}{unit}" + (f" {better}" if arrow else "")


def metric_scale(metric: str) -> float:
    """Return what a tidy value is multiplied by before it is drawn."""
    return 100.0 if metric in PERCENT_METRICS else 1.0


RC_PARAMS = {
    "figure.figsize": (COLUMN_WIDTH, 2.3),
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.wspace": 0.04,
    "savefig.dpi": 300,
    "svg.fonttype": "path",
    "svg.hashsalt": "attnknn",
    "font.family": "serif",
    "font.serif": ["STIXGeneral", "DejaVu Serif"],
    "mathtext.fontset": "stix",
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#555555",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.visible": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "image.interpolation": "nearest",
}


def use_style() -> None:
    """Set the look of all later figures; in a notebook also show them as vector graphics."""
    mpl.rcParams.update(RC_PARAMS)
    # Only where a notebook is already running: importing IPython for a script would be waste.
    ipython = sys.modules.get("IPython")
    if ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg")


def page_axes(
    n_rows: int, n_columns: int, height: float, **options: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure as wide as a page, and its axes as a table."""
    size = (FULL_WIDTH, height)
    return plt.subplots(n_rows, n_columns, figsize=size, squeeze=False, **options)


def ramp(n: int) -> list[tuple]:
    """Return colours for ordered lines, dark to light: told apart in grey and by any eye."""
    return [colormaps["viridis"](place) for place in np.linspace(0.0, 0.85, n)]


def plain_ticks(axis: Axis, locator: Locator | None = None) -> None:
    """Write the ticks of a logarithmic axis as plain numbers, and none between them."""
    if locator is not None:
        axis.set_major_locator(locator)
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def quiet_grid(ax: Axes, axis: str = "y") -> None:
    """Draw the thin grid behind the data along one axis."""
    ax.grid(visible=True, axis=axis)


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
    gap = 1.12 * size / 72 / height
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
