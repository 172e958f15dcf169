"""Explanations list every neighbour with its weight, and can be drawn."""

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from attnknn import plot
from attnknn.classify import Distance, Uniform
from attnknn.explain import explain
from attnknn.memory import MemoryBank


@pytest.fixture
def found():
    angles = np.array([0.0, 0.1, 0.2, 1.5, 1.6])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    bank = MemoryBank(rows, np.array([0, 0, 1, 1, 1]), n_classes=2, trust_neighbours=2)
    return bank.search(rows[[0, 3]], 3)


def test_neighbours_come_nearest_first_with_names(found):
    table = explain(Uniform(3), found, class_names=["cat", "dog"])
    assert table.columns.tolist() == [
        "query",
        "rank",
        "id",
        "label",
        "similarity",
        "trust",
        "weight",
    ]
    first = table[table["query"] == 0]
    assert first["id"].tolist() == [0, 1, 2]
    assert first["label"].tolist() == ["cat", "cat", "dog"]
    assert first["rank"].tolist() == [1, 2, 3]
    assert first["similarity"].is_monotonic_decreasing


def test_weights_of_a_query_sum_to_one(found):
    table = explain(Distance(3, temperature=0.3), found)
    np.testing.assert_allclose(table.groupby("query")["weight"].sum(), 1.0, rtol=1e-6)
    assert table["weight"].iloc[0] > table["weight"].iloc[2]


def test_trust_is_that_of_the_memory_row(found):
    table = explain(Uniform(3), found)
    expected = found.view.trust[table["id"].tolist()]
    np.testing.assert_allclose(table["trust"], expected)


def bars_of(figure):
    (ax,) = figure.axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    return (
        names,
        [bar.get_width() for bar in ax.patches],
        [bar.get_facecolor() for bar in ax.patches],
    )


def test_the_figure_shows_the_table(found):
    table = explain(Distance(3, temperature=0.3), found, class_names=["cat", "dog"])
    names, widths, colours = bars_of(plot.explanation(table, query=1, predicted="dog"))
    rows = table[table["query"] == 1].sort_values("weight", ascending=False)
    assert names == [f"row {i}: {n}" for i, n in zip(rows["id"], rows["label"], strict=True)]
    np.testing.assert_allclose(widths, rows["weight"])
    shades = {name: colour[:3] for name, colour in zip(rows["label"], colours, strict=True)}
    assert len(set(shades.values())) == rows["label"].nunique()  # other labels stand out
    plt.close("all")


def test_a_prediction_that_no_neighbour_carries_agrees_with_none(found):
    table = explain(Uniform(2), found)
    _, _, colours = bars_of(plot.explanation(table, predicted=7))
    _, _, plain = bars_of(plot.explanation(table))
    assert not {colour[:3] for colour in colours} & {colour[:3] for colour in plain}
    plt.close("all")


def test_the_figure_shows_the_pictures_of_the_rows(found):
    pictures = np.arange(5)[:, None, None] * np.full((5, 4, 4), 0.2)  # row i is grey i / 5
    table = explain(Distance(3, temperature=0.3), found)
    figure = plot.explanation(table, image=np.ones((4, 4)), images=pictures, query_note="what?")
    shown = [ax.images[0].get_array().max() for ax in figure.axes if ax.images]
    heaviest = table[table["query"] == 0].sort_values("weight", ascending=False)["id"]
    np.testing.assert_allclose(shown, [1.0, *(0.2 * heaviest)])
    assert figure.axes[0].get_title() == "what?"
    plt.close("all")


def test_bad_figures_are_refused(found):
    table, pictures = explain(Uniform(3), found), np.zeros((5, 4, 4))
    with pytest.raises(ValueError, match="query must be in the table, got query=2"):
        plot.explanation(table, query=2)
    with pytest.raises(ValueError, match="image and images must be given together"):
        plot.explanation(table, images=pictures)
    with pytest.raises(ValueError, match="images must hold a picture of every training row"):
        plot.explanation(table, image=pictures[0], images=pictures[:1])
