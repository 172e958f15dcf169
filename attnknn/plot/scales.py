"""Value axes: what a measure can be at all, and scales on which no single value hides the rest."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnknn.measure import METRIC_NAMES
from attnknn.plot.style import PERCENT_METRICS, metric_scale

SWEEP_LOG_ABOVE = 5.0  # largest over smallest mean from which a sweep has a logarithmic axis
SHARE_BELOW = 5.0  # panels whose ranges differ more have vertical axes of their own
_ROOM = 0.03  # of the range, beyond what is possible, so that markers stay whole
_BELOW_LEAST = 0.5  # of the least mean: where bands end on a logarithmic axis, which has no zero


def metric_range(metric: str) -> tuple[float, float]:
    """Return the least and the largest value that a measure can have, as it is drawn."""
    if metric in PERCENT_METRICS or metric.endswith("(%)"):
        return 0.0, 100.0
    if metric in ("ece", "ace", "cwce", "aurc"):
        return 0.0, 1.0
    return (0.0, np.inf) if metric in METRIC_NAMES else (-np.inf, np.inf)


def keep_possible(ax: Axes, metric: str, *, axis: str = "y") -> None:
    """Take from an axis what lies beyond the possible; call again when more was drawn."""
    least, largest = metric_range(metric)
    low, high = getattr(ax, f"get_{axis}lim")()
    room = _ROOM * (high - low)
    # auto=None: axes that share this one still grow with what is drawn into them later.
    getattr(ax, f"set_{axis}lim")(max(low, least - room), min(high, largest + room), auto=None)


def wants_log(table: pd.DataFrame, metric: str) -> bool:
    """Tell whether the means of a measure span so much that small ones need a logarithmic axis."""
    values = table.loc[table["metric"] == metric, "mean"].to_numpy()
    values = values[np.isfinite(values)]
    if metric in PERCENT_METRICS or metric not in METRIC_NAMES or not len(values):
        return False
    return bool(values.min() > 0 and values.max() > SWEEP_LOG_ABOVE * values.min())


def band_limits(
    line: pd.DataFrame, metric: str, *, least_mean: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of a band as they are drawn, inside of what is possible.

    Args:
        line: Columns ``low`` and ``high``.
        metric: The measure.
        least_mean: Of all lines on a logarithmic axis; None for a linear one.
    """
    least, largest = metric_range(metric)
    least = least if least_mean is None else max(least, _BELOW_LEAST * least_mean)
    scale = metric_scale(metric)
    low, high = (np.clip(scale * line[name].to_numpy(), least, largest) for name in ("low", "high"))
    return low, high


def can_share(panels: Sequence[pd.DataFrame], metric: str, *, log: bool) -> bool:
    """Tell whether panels of a measure can have one axis without one of them being flattened."""
    spans = []
    for table in panels:
        values = table.loc[table["metric"] == metric, "mean"].to_numpy()
        values = values[np.isfinite(values)]
        if len(values):
            spans.append(np.ptp(np.log(values) if log else values))
    return not spans or bool(max(spans) <= SHARE_BELOW * min(spans))


def set_plain_log(axis: Axis, values: np.ndarray) -> None:
    """Give a logarithmic axis a few ticks that are written as plain numbers."""
    span = values.max() / values.min() if len(values) else 1.0
    subs = (1, 2, 5) if span < 20 else (1, 3)
    axis.set_major_locator(LogLocator(subs=subs, numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
