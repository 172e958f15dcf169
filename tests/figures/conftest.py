"""What the tests of figures share: the style, rows to draw, and when a figure can be read."""

from itertools import combinations

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.text import Annotation, Text

mpl.use("Agg")

METHODS = ("uniform", "distance*", "attention", "attention + TTA", "cnn")


@pytest.fixture(autouse=True)
def style_and_cleanup():
    from attnknn.figures import use_style

    with mpl.rc_context():
        use_style()
        yield
    plt.close("all")


def interval_rows(ks=(None,)):
    """Return means of two measures, .07 apart by method and .001 k above that, ± .02."""
    rows = []
    for place, method in enumerate(METHODS):
        for metric in ("accuracy", "nll"):
            for k in ks:
                mean = 0.5 + 0.07 * place + 0.001 * (k or 0)
                row = {"method": method, "metric": metric, "mean": mean, "k": k, "n": 3}
                rows.append(row | {"low": mean - 0.02, "high": mean + 0.02})
    return pd.DataFrame(rows)


def assert_readable(figure):
    """No text below 7 points, none outside the page, no two annotations on each other."""
    figure.draw_without_rendering()
    page, hidden = figure.bbox.padded(2), set()
    for ax in figure.axes:  # matplotlib keeps labels of ticks outside the limits, undrawn
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            for tick in axis.get_major_ticks():
                if not min(limits) <= tick.get_loc() <= max(limits):
                    hidden |= {tick.label1, tick.label2}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    for text in texts:
        if text not in hidden:
            box = text.get_window_extent()
            assert text.get_fontsize() >= 7, text
            assert page.x0 <= box.x0 and box.x1 <= page.x1, text
            assert page.y0 <= box.y0 and box.y1 <= page.y1, text
    named = [Text.get_window_extent(text) for text in texts if isinstance(text, Annotation)]
    for one, other in combinations(named, 2):
        assert not one.padded(-1).overlaps(other.padded(-1))
