"""The neighbours of one prediction: heaviest first, other labels in another colour."""

import numpy as np
import pandas as pd
import pytest

from attnknn import figures as plot
from attnknn.figures.style import ALARM, INK
from tests.figures.conftest import assert_readable


def table():
    """Return four neighbours of query 1, after one of query 0."""
    rows = pd.DataFrame({"query": [0, 1, 1, 1, 1], "id": [9, 4, 0, 2, 3], "predicted": "dog"})
    rows = rows.assign(label=["cat", "cat", "dog", "cat", "dog"], prototypes=0.125, vote=0.1)
    return rows.assign(weight=[1, 0.1, 0.6, 0.05, 0.25], trust=[1, 0.9, 0.2, 1.0, 0.5])


def test_bars_are_sorted_named_and_coloured_by_agreement():
    (ax,) = plot.explanation(table(), query=1, predicted="dog", n_shown=3).axes
    assert [bar.get_width() for bar in ax.patches] == [0.6, 0.25, 0.1]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["row 0: dog", "row 3: dog", "row 4: cat"]
    one, two, three = (bar.get_facecolor()[:3] for bar in ax.patches)
    assert one == two != three
    assert [bar.get_alpha() for bar in ax.patches] == pytest.approx([0.4, 0.625, 0.925])
    assert ax.yaxis_inverted() and ax.get_xlabel().startswith("weight\n")
    assert "neighbours 0.40, class prototypes 0.12" in ax.get_xlabel()
    assert_readable(ax.figure)


def test_pictures_stand_beside_the_query_in_the_order_of_their_weight():
    pictures = np.arange(10)[:, None, None] * np.ones((10, 4, 4))
    figure = plot.explanation(
        table(), query=1, image=np.full((4, 4), 77.0), images=pictures, predicted="dog", n_shown=3
    )
    upper, lower = figure.axes[:4], figure.axes[4:]
    assert [ax.get_title() for ax in upper] == ["query", "dog", "dog", "cat"]
    assert [ax.images[0].get_array()[0, 0] for ax in upper] == [77, 0, 3, 4]
    assert [ax.title.get_color() for ax in upper] == [INK, INK, INK, ALARM]
    assert [[text.get_text() for text in ax.texts] for ax in lower] == [
        ["weight", "trust"], ["0.60", "0.20"], ["0.25", "0.50"], ["0.10", "0.90"]
    ]  # fmt: skip
    widths = [[bar.get_width() for bar in ax.patches] for ax in lower[1:]]
    np.testing.assert_allclose(widths, 0.55 * np.array([[1, 0.2], [0.25 / 0.6, 0.5], [1 / 6, 0.9]]))
    assert_readable(figure)


def test_colour_pictures_in_bytes():
    pictures = np.random.default_rng(0).integers(256, size=(10, 8, 8, 3)).astype(np.uint8)
    figure = plot.explanation(table(), query=1, image=pictures[0], images=pictures)
    assert figure.axes[0].images[0].get_array().shape == (8, 8, 3)
