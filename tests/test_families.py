"""Families: the same comparison gets the same verdict, whatever else a study compares."""

import numpy as np
import pandas as pd
import pytest

from attnknn.evaluate import compare as families
from attnknn.evaluate.compare import SINGLE_VIEW, compare_in_families, in_families, standing
from attnknn.evaluate.tune import BASELINES
from attnknn.studies.common import plain_methods

RIVALS = [name for name in SINGLE_VIEW if name != "attention"]


def compared(p_values, **columns):
    """Return rows of a comparison in NLL: method -> p-value, all 0.1 worse than the attention."""
    table = pd.DataFrame({"method": p_values.keys(), "p_value": p_values.values()})
    return table.assign(metric="nll", difference=0.1, level=0.95, **columns)


def test_others_do_not_count_against_the_rivals():
    # Five rivals: the smallest p-value, 0.009, is multiplied by 5, not by 5 + 4.
    rivals = {"uniform": 0.009} | dict.fromkeys(RIVALS[1:], 0.5)
    others = dict.fromkeys(("attention + TTA", "uniform + TTA", "cnn", "attention, transfer"), 0.02)
    for more in ({}, others):
        row = in_families(compared(rivals | more)).set_index("method").loc["uniform"]
        assert row["p_holm"] == pytest.approx(0.045) and row["verdict"] == "worse"
    judged = in_families(compared(rivals | others)).set_index("method")
    assert judged.loc["cnn", "p_holm"] == pytest.approx(0.08)  # four others


def test_rivals_count_together_in_one_measure_and_level():
    one, two = (compared(dict.fromkeys(RIVALS, 0.009), rate=rate, kind="a") for rate in (0.1, 0.2))
    judged = in_families(pd.concat([one, two], ignore_index=True))
    assert judged["p_holm"].to_numpy() == pytest.approx(0.045)
    assert list(judged.columns) == [*one.columns, "p_holm", "verdict"]


def test_the_rivals_are_the_votes_of_one_view_that_every_study_has():
    names = {*plain_methods(3), *(f"{name} (tuned)" for name in BASELINES), "attention"}
    assert set(SINGLE_VIEW) == names


def test_a_saved_verdict_is_replaced():
    saved = compared({"uniform": 0.03}).assign(p_holm=0.3, verdict="no difference at this size")
    judged = in_families(saved)
    assert judged["p_holm"].tolist() == [0.03] and judged["verdict"].tolist() == ["worse"]


def test_fresh_comparisons_are_corrected_over_families():
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=97)
    first = rng.uniform(0.05, 0.95, (7, 97))
    names = ["attention", "uniform", "distance", "cnn", "a + TTA", "b + TTA", "c + TTA"]
    probs = {
        name: np.stack([each, 1 - each], axis=1) for name, each in zip(names, first, strict=True)
    }
    table = compare_in_families(probs, labels, "attention", metrics=("nll",))
    few = {name: probs[name] for name in names[:3]}
    alone = compare_in_families(few, labels, "attention", metrics=("nll",))
    assert table["p_holm"].tolist()[:2] == alone["p_holm"].tolist()
    assert families.LEVELS and len(table) == 6


def test_standing_is_told_from_the_side_of_the_attention():
    table = pd.DataFrame(
        {"method": ["a", "b", "c"], "verdict": ["worse", "better", "no difference at this size"]}
    )
    assert standing(table) == "better than a; worse than b; no difference at this size from c"
