"""Explanations list every neighbour with its weight, and can be drawn."""

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from attnknn import figures as plot
from attnknn.config import AttentionConfig
from attnknn.core.attention import GATE_START, MIX_START, NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.vote import (
    AdaptiveK,
    Attention,
    Distance,
    KEnsemble,
    Prototypes,
    Uniform,
    explain,
)


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
        "vote",
        "prototypes",
        "predicted",
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


def test_a_plain_vote_by_hand(found):
    table = explain(Uniform(3), found, class_names=["cat", "dog"])
    first = table[table["query"] == 0]  # cat, cat, dog
    assert first["predicted"].tolist() == ["cat"] * 3
    np.testing.assert_allclose(first["vote"], [1 / 3, 1 / 3, 0])
    assert table["prototypes"].eq(0).all()


def test_what_an_attention_says_by_hand(found):
    """weight * ((1 - mix) [same label] + mix * histogram) * (1 - gate), and gate * posterior."""
    module = NeighbourAttention(AttentionConfig(heads=1), dim=2, n_classes=2).eval()
    table = explain(Attention(3, module), found)
    predicted = found.of_queries(slice(1, 2)).labels[0, 0].item()
    weights = table.loc[table["query"] == 1, "weight"].to_numpy()
    same = (found.labels[1] == predicted).numpy()
    around = found.view.histograms[found.ids[1], predicted].numpy()
    second = table[table["query"] == 1]
    expected = (1 - GATE_START) * weights * ((1 - MIX_START) * same + MIX_START * around)
    np.testing.assert_allclose(second["vote"], expected, rtol=1e-5)
    cosines = found.view.prototypes.numpy() @ found.queries[1].numpy()
    posterior = np.exp(10 * cosines) / np.exp(10 * cosines).sum()
    np.testing.assert_allclose(second["prototypes"], GATE_START * posterior[predicted], rtol=1e-4)


def without_last_steps(module):
    """Switch floor and temperature off: what is left is what an explanation adds up to."""
    last = module.vote_settings.mlp[-1]
    for place, bias in ((1, -40.0), (3, 0.0)):
        last.weight.data[place], last.bias.data[place] = 0.0, bias
    return module


@pytest.mark.parametrize(
    "method",
    [
        Uniform(3),
        Distance(3, temperature=0.3),
        Prototypes(),
        "attention",
        "ensemble",
        "adaptive",
        "labels alone",
    ],
)
def test_the_parts_sum_to_the_predicted_probability(found, method):
    torch.manual_seed(0)
    off = {"denoise": False, "prototype_gate": False} if method == "labels alone" else {}
    module = NeighbourAttention(AttentionConfig(**off), dim=2, n_classes=2).eval()
    for parameter in module.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape)
    attention = Attention(3, without_last_steps(module))
    wrapped = {
        "ensemble": KEnsemble(attention, ks=(1, 3)),
        "adaptive": AdaptiveK(attention, threshold=0.3),
    }
    method = wrapped.get(method, attention) if isinstance(method, str) else method
    table = explain(method, found)
    by_query = table.groupby("query")
    total = by_query["vote"].sum() + by_query["prototypes"].first()
    # An attention leaves a millionth to all classes, whatever its floor.
    np.testing.assert_allclose(total, method.votes(found).amax(dim=1), rtol=3e-6)


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
    (ax,) = plot.explanation(table, query=1).axes
    said = f"for dog: neighbours {rows['vote'].sum():.2f}, class prototypes 0.00"
    assert ax.get_xlabel() == f"weight\n{said}"
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
    assert figure.get_supxlabel().startswith("for 0: neighbours ")
    plt.close("all")


def test_bad_figures_are_refused(found):
    table, pictures = explain(Uniform(3), found), np.zeros((5, 4, 4))
    with pytest.raises(ValueError, match="query must be in the table, got query=2"):
        plot.explanation(table, query=2)
    with pytest.raises(ValueError, match="image and images must be given together"):
        plot.explanation(table, images=pictures)
    with pytest.raises(ValueError, match="images must hold a picture of every training row"):
        plot.explanation(table, image=pictures[0], images=pictures[:1])
