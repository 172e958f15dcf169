"""Paired differences as a forest: one row a method, one panel a measure, centred on zero."""

from collections.abc import Iterable, Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnknn.measure import HIGHER_IS_BETTER
from attnknn.plot.results import draw_interval, name_rows
from attnknn.plot.style import FULL_WIDTH, INK, method_style, metric_label, metric_scale, quiet_grid

INNER_SHARE = 0.8  # of the rows set the range where others lie far beyond
CUT_ABOVE = 3.0  # how far beyond the inner rows the furthest one must lie to be cut off
_ROOM, _ROOM_WHEN_CUT = 1.15, 1.5
_EDGE = 0.96  # where the arrow of a value beyond the range is drawn


def forest(table: pd.DataFrame) -> Figure:
    """Draw paired differences to the baseline, one panel a measure.

    Filled dots differ after Holm's correction, hollow ones do not; the better side is shaded. A
    value far beyond the others is an arrow at the edge, with the value beside it.

    Args:
        table: From ``compare.compare_methods``.
    """
    metrics, methods = list(dict.fromkeys(table["metric"])), list(dict.fromkeys(table["method"]))
    height = 0.75 + 0.2 * len(methods)
    figure, axes = plt.subplots(
        1, len(metrics), figsize=(FULL_WIDTH, height), sharey=True, squeeze=False
    )
    for ax, metric in zip(axes[0], metrics, strict=True):
        rows = table[table["metric"] == metric].to_dict("records")
        looks = (method_style(row["method"]).points for row in rows)
        levels = (methods.index(row["method"]) for row in rows)
        draw_differences(ax, metric, zip(rows, levels, looks, strict=True), markersize=4.5)
    name_rows(axes[0, 0], methods)
    baseline = method_style(table["baseline"].iloc[0]).label
    figure.supxlabel(
        f"difference to {baseline} (shaded: better; filled: holds after Holm's correction)",
        fontsize=8.5,
    )
    return figure


def draw_differences(
    ax: Axes,
    metric: str,
    rows: Iterable[tuple[Mapping, int, dict]],
    *,
    markersize: float,
) -> None:
    """Draw one panel: every difference at its height, and the axis that suits most of them.

    Args:
        ax: Where to draw.
        metric: The measure of the panel.
        rows: Each with a row of differences, its height and the look of its marker.
        markersize: Of the dots, in points.
    """
    rows, scale = list(rows), metric_scale(metric)
    names = ("difference", "low", "high")
    values = [[scale * row[name] for name in names] for row, _, _ in rows]
    limit = forest_limit(np.array(values, dtype=float).reshape(-1, len(names)))
    ax.axvline(0, color=INK, linewidth=0.6)
    for row, level, look in rows:
        face = look["color"] if row["verdict"] in ("better", "worse") else "white"
        points = {**look, "markerfacecolor": face, "marker": "o", "markersize": markersize}
        if abs(scale * row["difference"]) > limit and np.isfinite(row["difference"]):
            _draw_beyond(ax, scale * row["difference"], level, points, limit)
        else:
            draw_interval(ax, pd.Series({**row, "mean": row["difference"]}), level, points, scale)
    _finish(ax, metric, limit)


def forest_limit(values: Float[np.ndarray, "rows 3"]) -> float:
    """Return where a panel of differences ends, left and right of zero.

    All rows fit, unless some lie so far out that the others would all seem to sit on zero: then
    the inner ones set the range.

    Args:
        values: Difference, lower and upper limit of every row, as they are drawn.
    """
    reach = np.abs(np.where(np.isfinite(values), values, 0.0)).max(axis=1, initial=0.0)
    if not reach.any():
        return 1.0
    inner = np.quantile(reach, INNER_SHARE, method="lower")
    if not inner or reach.max() <= CUT_ABOVE * inner:
        return float(_ROOM * reach.max())
    limit = _ROOM_WHEN_CUT * inner
    shown = reach[np.abs(values[:, 0]) <= limit]  # their intervals are seen whole where that fits
    return float(np.clip(1.05 * shown.max(), limit, _ROOM_WHEN_CUT * limit))


def _draw_beyond(ax: Axes, value: float, level: int, points: dict, limit: float) -> None:
    """Draw an arrow at the edge, and write the value beside it, towards zero."""
    is_right = value > 0
    place = _EDGE * limit if is_right else -_EDGE * limit
    ax.plot([place], [level], linestyle="none", **{**points, "marker": ">" if is_right else "<"})
    ax.annotate(
        f"{value:+#.2g}".replace("-", "\N{MINUS SIGN}"),
        xy=(place, level),
        xytext=(-4 if is_right else 4, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center_baseline",
        fontsize=7,
        parse_math=False,
    )


def _finish(ax: Axes, metric: str, limit: float) -> None:
    """Title a panel of differences, shade its better side and centre it on zero."""
    ax.set_title(metric_label(metric, arrow=True).replace("(%)", "(points)"))
    better_end = limit if metric in HIGHER_IS_BETTER else -limit
    ax.axvspan(0, better_end, color="#eef4f8", linewidth=0, zorder=0)
    ax.set_xlim(-limit, limit)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True, steps=[1, 2, 5, 10]))
    quiet_grid(ax, "x")
    ax.tick_params(axis="x", labelsize=7)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
