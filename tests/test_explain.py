"""Explanations list every neighbour with its weight."""

import numpy as np
import pytest

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
