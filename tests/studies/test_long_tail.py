"""Long-tail study: groups worked out by hand, exact searches, a table that has its schema."""

import numpy as np
import pytest
import torch

from attnknn.core.vote import predict
from attnknn.data.change import long_tail_rows
from attnknn.evaluate.measure import accuracy
from attnknn.studies import long_tail
from attnknn.studies.common import comparisons, group_measures, search_run

RATIOS = (1.0, 0.25)


@pytest.fixture(scope="module")
def study(runs):
    options = {"k_eval": 7, "k_baseline": 5, "progress": False}
    return long_tail.memory_tail(runs, ratios=RATIOS, **options)


def test_groups_are_thirds_by_memory_rows():
    groups = long_tail.shot_groups(np.array([5, 90, 40, 3, 60, 40, 1]))
    assert {name: ids.tolist() for name, ids in groups.items()} == {
        "many": [1, 4, 2],  # of the two classes of 40 rows the lower comes first
        "medium": [5, 0],
        "few": [3, 6],
    }


def test_two_classes_have_no_medium():
    groups = long_tail.shot_groups(np.array([3, 8]))
    assert {name: ids.tolist() for name, ids in groups.items()} == {"many": [1], "few": [0]}


def test_accuracy_of_groups_by_hand():
    labels = np.array([0, 0, 1, 1, 2])
    predicted = np.array([0, 1, 1, 1, 0])
    probs = np.full((5, 3), 0.1)
    probs[np.arange(5), predicted] = 0.8
    groups = {"many": np.array([0]), "medium": np.array([1]), "few": np.array([2])}
    rows = group_measures({"m": probs}, labels, groups, metrics=long_tail.MEASURES, ratio=0.5)
    found = {(row["classes"], row["metric"]): row["value"] for row in rows}
    assert all(row["ratio"] == 0.5 and row["method"] == "m" for row in rows)
    assert found["many", "accuracy"] == 0.5
    assert found["medium", "accuracy"] == 1.0
    assert found["few", "accuracy"] == 0.0
    assert found["all", "accuracy"] == pytest.approx(3 / 5)
    assert found["all", "balanced_accuracy"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert found["all", "nll"] == pytest.approx(-(3 * np.log(0.8) + 2 * np.log(0.1)) / 5)


def test_a_group_without_test_rows_has_no_accuracy():
    probs = np.full((2, 3), 1 / 3)
    groups = {"many": np.array([0]), "few": np.array([2])}
    rows = group_measures({"m": probs}, np.array([0, 0]), groups)
    assert {row["classes"] for row in rows} == {"all", "many"}


def test_memory_sizes_follow_the_definition(runs):
    # 20 rows a class, 3 classes, ratio 0.25: 20 * 0.25 ** (c / 2)
    sizes = long_tail.memory_sizes(runs[0], RATIOS)
    assert sizes.to_numpy().tolist() == [[20, 20, 20], [20, 10, 5]]
    assert sizes.index.tolist() == list(RATIOS)


def test_the_search_of_what_is_left_is_exact(runs):
    run = runs[0]
    bank = long_tail.tailed_bank(run, 0.25)
    found = search_run(run, 7, bank=bank)
    kept = long_tail.tail_rows(run, 0.25)
    cosines = run.rows("test") @ run.rows("train")[kept].T
    expected = -np.sort(-cosines, axis=1)[:, :7]
    np.testing.assert_allclose(found.test.scores.numpy(), expected, atol=1e-5)
    assert np.array_equal(bank.labels.numpy(), run.labels("train")[kept])
    assert found.test.ids.max() < len(kept) == 35


def test_trust_and_prototypes_come_from_what_is_left(runs):
    full, tailed = runs[0].bank.view, long_tail.tailed_bank(runs[0], 0.25).view
    assert len(tailed.trust) == 35 < len(full.trust)
    assert not torch.allclose(tailed.prototypes[2], full.prototypes[2])


def test_held_out_queries_are_thinned_like_the_memory_by_another_draw(runs):
    run = runs[0]
    whole = search_run(run, 7)
    here = long_tail.thinned(whole, 0.25, run)
    # 10 held-out rows a class
    assert np.bincount(here.held_out_labels).tolist() == [10, 5, 2]
    assert len(here.held_out.ids) == 17 and here.test is whole.test
    same_draw = long_tail_rows(run.labels("val"), 0.25, n_classes=3, seed=run.config.seed)
    assert not torch.equal(here.held_out.queries, whole.held_out.queries[same_draw])


def test_balancing_weights_by_hand():
    weights = long_tail.balancing_weights(np.array([0, 0, 0, 2]))
    np.testing.assert_allclose(weights, [2 / 3, 2 / 3, 2 / 3, 2])
    assert weights.mean() == 1


def test_the_table_has_every_level_method_and_measure(study):
    assert set(study.table.columns) == {
        *("dataset", "seed", "corrupted", "ratio", "held_out", "method", "classes", "metric"),
        *("value", "low", "high"),
    }
    assert set(study.table["corrupted"]) == {"memory only"}
    assert set(study.table["seed"]) == {0, 1}
    levels = set(study.table[["ratio", "held_out"]].itertuples(index=False, name=None))
    assert levels == {(r, h) for r in RATIOS for h in long_tail.HELD_OUT_ROWS}
    measured = study.table.groupby(["seed", "ratio", "held_out", "method"]).size()
    assert measured.eq(len(long_tail.MEASURES) + 3).all()
    assert set(study.table["method"]) == {"uniform", "distance", *long_tail.CURVES}
    transfer = study.table[study.table["method"] == "attention, transfer"]
    assert set(transfer["held_out"]) == {"balanced"}


def test_a_full_memory_is_the_run_itself(runs, study):
    level = long_tail.TailLevel(1.0, "balanced")
    found = search_run(runs[0], 7)
    own = predict(runs[0].method(7), found.test)
    np.testing.assert_allclose(study.probs[level]["attention"][0], own, atol=1e-6)
    for name in ("long-tailed", "reweighted"):
        again = study.probs[long_tail.TailLevel(1.0, name)]["attention"][0]
        np.testing.assert_array_equal(again, study.probs[level]["attention"][0])


def test_every_method_gives_full_support(study):
    for level, methods in study.probs.items():
        for name, seeds in methods.items():
            assert min(probs.min() for probs in seeds) > 0, (level, name)


def test_a_run_trained_on_a_long_tail_has_no_milder_one(runs, monkeypatch):
    data = runs[0].config.data
    monkeypatch.setitem(data.__dict__, "train_tail", 0.25)
    made = long_tail.memory_tail(
        runs[:1], ratios=(1.0, 0.1), held_out=["balanced"], k_eval=7, k_baseline=5, progress=False
    )
    assert set(made.table["ratio"]) == {0.25, 0.1}
    # One seed: intervals over test rows, of the groups too, in per cent where they are drawn so.
    finite = made.table[np.isfinite(made.table["value"])]
    assert finite[["low", "high"]].notna().all(axis=None)
    drawn = long_tail.curves(made, held_out="balanced", groups=True)
    few = finite[(finite["classes"] == "few") & (finite["method"] == "attention")].iloc[0]
    at = drawn[(drawn["classes"] == "few") & (drawn["method"] == "attention")].iloc[0]
    assert at["high"] == pytest.approx(100 * few["high"])


def test_curves_and_tables_are_ready_to_draw(runs, study):
    curves = long_tail.curves(study, held_out="balanced")
    assert set(curves["imbalance"]) == {1.0, 4.0} and set(curves["classes"]) == {"all"}
    groups = long_tail.curves(study, held_out="balanced", groups=True)
    assert study.table[["low", "high"]].isna().all(axis=None)  # two seeds
    assert set(groups["metric"]) == set(long_tail.group_titles(study).values())
    assert groups["value"].max() > 1  # per cent
    shown = long_tail.tail_table(study.table)
    assert list(dict.fromkeys(shown["held-out rows"])) == list(long_tail.HELD_OUT_ROWS)
    assert list(dict.fromkeys(shown["ratio"])) == ["1", "0.25"]
    listed = long_tail.group_table(study, runs[0])
    assert listed["classes"].tolist() == ["a", "b", "c"]
    assert listed["rows a class, ratio 0.25"].tolist() == ["20", "10", "5"]


def test_comparisons_and_verdict_cover_the_longest_tail(study):
    compared = comparisons(study, metrics=("accuracy",))
    assert set(compared["classes"]) == {"all", "many", "medium", "few"}
    few = compared[(compared["classes"] == "few") & (compared["ratio"] == 0.25)]
    assert few["n_rows"].eq(8).all()  # test rows of one class of three
    text = long_tail.verdict(study, compared)
    for words in ("ratio 0.25", "**accuracy of few-shot classes**", "held-out rows reweighted"):
        assert words in text
    assert "attention: " in text.split("What the tail costs")[1]


def test_the_cost_of_the_tail_is_a_paired_difference(study):
    full, tail = (long_tail.TailLevel(ratio, "balanced") for ratio in RATIOS)
    before, after = (
        np.mean([accuracy(probs, study.labels) for probs in study.probs[level]["attention"]])
        for level in (full, tail)
    )
    lost = 100 * (after - before)
    assert f"- attention: {lost:+.2f} points" in long_tail.cost_of_tail(study)
