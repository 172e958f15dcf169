"""Intervals over test rows that go with their measures: by hand, for one run and for several."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from attnknn.evaluate.compare import interval_table
from attnknn.figures.tables import pivot_mean_interval
from attnknn.studies.common import group_limits, level_limits, with_limits


class Rate(NamedTuple):
    rate: float


LABELS = np.array([0, 0, 0, 1, 1, 1, 1, 1])
# Six of eight rows are right: one of three of class 0, and all five of class 1.
PROBS = np.array([[0.9, 0.1]] + [[0.2, 0.8]] * 7)
ONE = {Rate(0.0): {"a": [PROBS]}, Rate(0.5): {"a": [PROBS], "b": [PROBS, PROBS]}}


def test_accuracy_has_its_binomial_interval_at_every_level_with_one_run():
    found = level_limits(ONE, LABELS, metrics=("accuracy",))
    assert found[["method", "rate"]].to_numpy().tolist() == [["a", 0.0], ["a", 0.5]]
    half = 1.96 * np.sqrt(0.75 * 0.25 / 8)
    assert found["high"].to_numpy() == pytest.approx(0.75 + half, rel=0.03)
    assert found["low"].to_numpy() == pytest.approx(0.75 - half, rel=0.08)


def test_several_runs_have_no_limits():
    several = {Rate(0.5): {"a": [PROBS, PROBS]}}
    assert level_limits(several, LABELS, metrics=("accuracy",)).empty
    tidy = pd.DataFrame({"rate": [0.5], "method": ["a"], "metric": ["nll"], "value": [1.0]})
    table = with_limits(tidy, level_limits(several, LABELS, metrics=("accuracy",)))
    assert list(table) == [*tidy, "low", "high"] and table[["low", "high"]].isna().all(axis=None)


def test_a_group_draws_from_its_own_rows():
    groups = {"many": np.array([1]), "few": np.array([0]), "none": np.array([2])}
    found = group_limits({Rate(0.0): {"a": [PROBS]}}, LABELS, groups, metrics=("accuracy", "nll"))
    found = found.set_index(["classes", "metric"])
    assert set(found.index) == {
        ("all", "accuracy"), ("all", "nll"), ("many", "accuracy"), ("few", "accuracy"),
    }  # fmt: skip
    assert found.loc[("many", "accuracy"), ["low", "high"]].tolist() == [1.0, 1.0]  # all are right
    half = 1.96 * np.sqrt(1 / 3 * 2 / 3 / 3)
    assert found.loc[("few", "accuracy"), "high"] == pytest.approx(1 / 3 + half, rel=0.04)


def test_limits_go_with_their_rows_into_tables():
    tidy = pd.DataFrame(
        {
            "rate": [0.0, 0.5, 0.5, 0.5],
            "method": ["a", "a", "b", "b"],
            "metric": "accuracy",
            "value": [0.75, 0.75, 0.6, 0.8],
        }
    )
    limits = level_limits(ONE, LABELS, metrics=("accuracy",))
    table = with_limits(tidy, limits)
    means = interval_table(table[::-1], ["rate", "method", "metric"]).set_index(["rate", "method"])
    assert means.loc[(0.0, "a"), "high"] == limits["high"][0]
    assert means.loc[(0.5, "b"), "high"] == pytest.approx(0.7 + 12.706 * 0.1, rel=1e-3)  # t of two
    text = pivot_mean_interval(table, index=["rate", "method"]).text["accuracy (%)"]
    assert text.str.contains("±").all()


def test_limits_that_are_there_stay():
    trust = {"rate": 0.5, "method": "trust", "metric": "auroc", "value": 0.9}
    table = pd.DataFrame([trust | {"low": 0.8, "high": 1.0}, trust | {"method": "a"}])
    table.loc[1, "metric"] = "accuracy"
    found = with_limits(table, level_limits(ONE, LABELS, metrics=("accuracy",)))
    assert found.loc[0, ["low", "high"]].tolist() == [0.8, 1.0]
    assert found.loc[1, ["low", "high"]].notna().all()
