"""Comparisons: hand-worked statistics, references from scipy, error rates, verdicts, bad input."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import softmax

from attnknn.evaluate import compare, measure
from attnknn.evaluate.compare import (
    RESAMPLED_METRICS,
    SINGLE_VIEW,
    compare_in_families,
    in_families,
    resample_metrics,
    standing,
)
from attnknn.evaluate.tune import BASELINES
from attnknn.studies.common import plain_methods

N, C = 307, 5


def method_probs(seed: int, labels: np.ndarray, *, skill: float = 2.0, sharpness: float = 1.0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(labels), C))
    logits[np.arange(len(labels)), labels] += skill
    return softmax(sharpness * logits, axis=1)


def some_labels(seed: int = 0, n_rows: int = N):
    return np.random.default_rng(seed).integers(C, size=n_rows)


def test_mean_interval_by_hand():
    # Values 1, 2, 3: standard error 1/√3, t(.975, 2) = 4.302653.
    interval = compare.mean_interval([1.0, 2.0, 3.0])
    half = 4.302653 / np.sqrt(3)
    assert interval == pytest.approx((2.0, 2 - half, 2 + half, 3), rel=1e-6)


def test_mean_interval_of_one_run_has_no_limits():
    interval = compare.mean_interval([0.9])
    assert interval.mean == 0.9 and interval.n == 1
    assert np.isnan(interval.low) and np.isnan(interval.high)


def test_mcnemar_exact_by_hand():
    # Discordant rows 1 and 5: p = 2 · (C(6,0) + C(6,1)) / 2^6 = 14/64.
    a = np.array([True] * 1 + [False] * 5 + [True] * 7 + [False] * 2)
    b = np.array([False] * 1 + [True] * 5 + [True] * 7 + [False] * 2)
    assert compare.mcnemar(a, b) == pytest.approx(14 / 64)
    assert compare.mcnemar(b, a) == compare.mcnemar(a, b)
    assert compare.mcnemar(a, a) == 1.0


def test_mcnemar_with_many_discordant_rows():
    # 150 against 100: (|150 - 100| - 1)² / 250 = 9.604, p = .00194.
    a = np.array([True] * 150 + [False] * 100 + [True] * 20)
    b = np.array([False] * 150 + [True] * 100 + [True] * 20)
    assert compare.mcnemar(a, b) == pytest.approx(stats.chi2.sf(9.604, 1))
    assert compare.mcnemar(a, b) == pytest.approx(stats.binomtest(150, 250).pvalue, rel=0.05)


def test_holm_by_hand():
    # Sorted .005·4 = .02, .01·3 = .03, .03·2 = .06, .04·1 → kept at .06.
    corrected = compare.holm([0.01, 0.04, 0.03, 0.005])
    np.testing.assert_allclose(corrected, [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(compare.holm([0.6, 0.7]), [1, 1])
    np.testing.assert_allclose(compare.holm([0.02]), [0.02])
    np.testing.assert_allclose(compare.holm([np.nan, 0.02, 0.01]), [np.nan, 0.02, 0.02])
    assert compare.holm([]).shape == (0,)


@pytest.mark.parametrize("metric", RESAMPLED_METRICS)
def test_resampling_equals_measuring_the_drawn_rows(metric):
    labels = some_labels(1)
    results = {"a": [method_probs(s, labels) for s in (1, 2)], "b": [method_probs(3, labels)] * 2}
    fast = resample_metrics(results, labels, [metric], 7, 11)
    # The same draws, replayed row by row.
    rng = np.random.default_rng(11)
    rows = rng.integers(N, size=(7, N))
    shares = rng.multinomial(2, [0.5, 0.5], size=7) / 2
    for name, seeds in results.items():
        observed = np.mean([measure.summarise(probs, labels)[metric] for probs in seeds])
        assert fast[name, metric][0] == pytest.approx(observed)
        for draw in range(7):
            picked = rows[draw]
            slow = [measure.summarise(p[picked], labels[picked])[metric] for p in seeds]
            assert fast[name, metric][draw + 1] == pytest.approx(shares[draw] @ slow)


def paired_bootstrap(metric, a, b, labels, *, n_resamples=2000, seed=0):
    """Return the paired difference of one measure between two methods."""
    drawn = resample_metrics({"a": a, "b": b}, labels, [metric], n_resamples, seed)
    return compare._difference(drawn["a", metric], drawn["b", metric], 0.95)


def test_bootstrap_agrees_with_scipy():
    labels = some_labels(2)
    a, b = method_probs(1, labels), method_probs(2, labels, sharpness=1.3)
    ours = paired_bootstrap("nll", a, b, labels, n_resamples=6000)
    gaps = measure.per_sample(a, labels)["nll"] - measure.per_sample(b, labels)["nll"]
    reference = stats.bootstrap(
        (gaps.to_numpy(),), np.mean, n_resamples=6000, method="basic", rng=np.random.default_rng(5)
    ).confidence_interval
    width = reference.high - reference.low
    assert ours.mean == pytest.approx(gaps.mean())
    assert [ours.low, ours.high] == pytest.approx(list(reference), abs=0.04 * width)


def test_the_interval_is_pivotal():
    labels = some_labels(3)
    results = {"a": method_probs(4, labels), "b": method_probs(5, labels, sharpness=2.0)}
    drawn = resample_metrics(results, labels, ["ece"], 499, 3)
    gaps = drawn["a", "ece"] - drawn["b", "ece"]
    found = paired_bootstrap("ece", *results.values(), labels, n_resamples=499, seed=3)
    low, high = np.quantile(gaps[1:], [0.025, 0.975])
    assert list(found[:3]) == pytest.approx([gaps[0], 2 * gaps[0] - high, 2 * gaps[0] - low])


def test_difference_changes_sign_with_the_order():
    labels = some_labels(4)
    a, b = method_probs(1, labels), method_probs(2, labels)
    forth = paired_bootstrap("brier", a, b, labels)
    back = paired_bootstrap("brier", b, a, labels)
    assert [-back.mean, -back.high, -back.low] == pytest.approx(list(forth[:3]))
    assert back.p_value == forth.p_value


def test_a_method_does_not_differ_from_itself():
    labels = some_labels(5)
    probs = method_probs(1, labels)
    table = compare.compare_methods({"a": probs, "b": probs}, labels, "a")
    assert (table["difference"] == 0).all() and (table["p_value"] == 1).all()
    assert set(table["verdict"]) == {"no difference at this size"}


def test_fault_12_false_alarms_are_as_rare_as_promised():
    alarms, n_repeats = 0, 120
    for repeat in range(n_repeats):
        labels = some_labels(repeat, n_rows=101)
        pair = [method_probs(1000 + 2 * repeat + i, labels) for i in range(2)]
        found = paired_bootstrap("nll", *pair, labels, n_resamples=300, seed=repeat)
        alarms += found.p_value < 0.05
        # The p-value and the interval tell the same story.
        assert (found.p_value < 0.05) == (not found.low <= 0 <= found.high) or (
            abs(found.p_value - 0.05) < 0.012
        )
    assert alarms / n_repeats < 0.05 + 3 * np.sqrt(0.05 * 0.95 / n_repeats)


def test_fault_12_several_seeds_widen_the_interval_when_runs_disagree():
    labels = some_labels(6)
    steady = method_probs(1, labels)
    # Every second training run of the other method fails.
    runs = [method_probs(s, labels, skill=3.0 if s % 2 else 1.0) for s in range(10, 16)]
    many = paired_bootstrap("nll", runs, [steady] * 6, labels)
    one = paired_bootstrap("nll", runs[1], steady, labels)
    assert one.p_value < 0.05
    assert many.high - many.low > 1.5 * (one.high - one.low)
    assert many.p_value > 0.05


def test_compare_methods_table_and_verdicts():
    labels = some_labels(7, n_rows=997)
    results = {
        "distance": method_probs(1, labels),
        "attention": method_probs(2, labels, skill=4.0),
        "uniform": method_probs(3, labels, skill=0.5),
        "twin": method_probs(4, labels),
    }
    table = compare.compare_methods(results, labels, "distance")
    assert list(table["method"]) == ["attention", "uniform", "twin"] * 4
    assert set(table.loc[table["metric"] == "accuracy", "test"]) == {"McNemar"}
    assert set(table.loc[table["metric"] != "accuracy", "test"]) == {"paired bootstrap"}
    verdicts = table.set_index(["method", "metric"])["verdict"]
    for metric in ("accuracy", "nll", "brier"):
        assert verdicts["attention", metric] == "better"
        assert verdicts["uniform", metric] == "worse"
    nll = table.set_index(["method", "metric"]).loc[("attention", "nll")]
    summaries = {name: measure.summarise(probs, labels) for name, probs in results.items()}
    assert nll["difference"] == pytest.approx(
        summaries["attention"]["nll"] - summaries["distance"]["nll"]
    )
    assert nll["low"] < nll["difference"] < nll["high"] < 0
    for _, group in table.groupby("metric"):
        np.testing.assert_allclose(group["p_holm"], compare.holm(group["p_value"].to_numpy()))


def test_lists_of_seeds_use_the_bootstrap_for_accuracy():
    labels = some_labels(8)
    results = {
        name: [method_probs(10 * i + s, labels) for s in range(3)] for i, name in enumerate("ab")
    }
    table = compare.compare_methods(results, labels, "a", metrics=["accuracy", "macro_f1"])
    assert set(table["test"]) == {"paired bootstrap"}
    assert set(table["n_seeds"]) == {3} and set(table["n_rows"]) == {N}


def test_infinite_nll_is_undefined_and_leaves_other_measures_alone():
    labels = some_labels(9)
    hard = np.eye(C)[(labels + (np.arange(N) % 3 == 0)) % C]
    results = {"a": method_probs(1, labels), "b": hard}
    table = compare.compare_methods(results, labels, "a", metrics=["nll", "brier"])
    verdicts = dict(zip(table["metric"], table["verdict"], strict=True))
    assert verdicts["nll"] == "undefined" and verdicts["brier"] != "undefined"
    assert "cannot be compared in NLL" in compare.verdict_sentence(table.iloc[0])
    both = compare.compare_methods({"a": hard, "b": hard}, labels, "a", metrics=["nll"])
    assert both["verdict"].tolist() == ["undefined"]


def test_sentences():
    row = {
        "method": "attention",
        "baseline": "distance",
        "metric": "nll",
        "difference": -0.0429,
        "low": -0.0482,
        "high": -0.0377,
        "p_holm": 0.0005,
        "verdict": "better",
        "n_rows": 10_000,
        "n_seeds": 3,
        "level": 0.95,
    }
    assert compare.verdict_sentence(row) == (
        "attention is better than distance in NLL (-0.0429, 95 % interval -0.0482 to -0.0377, "
        "Holm-corrected p < 0.001, 10 000 rows, 3 seeds)."
    )
    row |= {"verdict": "no difference at this size", "p_holm": 0.25, "n_seeds": 1}
    sentence = compare.verdict_sentence(row)
    assert sentence.startswith("attention and distance: no difference at this size in NLL (")
    assert sentence.endswith("p = 0.250, 10 000 rows, 1 seed).")


def test_same_seed_same_numbers():
    labels = some_labels(10)
    results = {"a": method_probs(1, labels), "b": method_probs(2, labels)}
    first, again = (compare.compare_methods(results, labels, "a", seed=4) for _ in range(2))
    assert first.equals(again)
    other = compare.compare_methods(results, labels, "a", seed=5)
    assert not first["low"].equals(other["low"])


def test_bad_input_is_refused():
    labels = some_labels(12)
    probs = method_probs(1, labels)
    with pytest.raises(ValueError, match="baseline must be one of 'a', 'b'"):
        compare.compare_methods({"a": probs, "b": probs}, labels, "c")
    with pytest.raises(ValueError, match="results must hold a method besides"):
        compare.compare_methods({"a": probs}, labels, "a")
    with pytest.raises(ValueError, match="results must hold the same seeds"):
        compare.compare_methods({"a": [probs, probs], "b": probs}, labels, "a")
    with pytest.raises(ValueError, match="metric must be one of"):
        paired_bootstrap("ace", probs, probs, labels)
    with pytest.raises(ValueError, match="labels must have shape"):
        paired_bootstrap("nll", probs, probs, labels[:-1])
    with pytest.raises(ValueError, match="n_resamples must be an integer"):
        paired_bootstrap("nll", probs, probs, labels, n_resamples=0)
    with pytest.raises(ValueError, match="p_values must lie in"):
        compare.holm([0.5, 1.5])
    with pytest.raises(ValueError, match="values must be a non-empty list"):
        compare.mean_interval([])


def test_interval_table_averages_over_everything_not_named():
    tidy = pd.DataFrame(
        {
            "method": ["b", "b", "a", "a", "b"],
            "metric": ["nll", "nll", "nll", "nll", "ece"],
            "seed": [0, 1, 0, 1, 0],
            "value": [1.0, 3.0, 5.0, 5.0, 0.5],
        }
    )
    table = compare.interval_table(tidy, ["method", "metric"])
    assert table["method"].tolist() == ["b", "a", "b"]  # as they first appear
    assert table["mean"].tolist() == [2.0, 5.0, 0.5]
    assert table["n"].tolist() == [2, 2, 1]
    # Two seeds: half width t(.975, 1) · (√2 / √2) = 12.7062.
    assert table["high"].iloc[0] == pytest.approx(2 + 12.7062, rel=1e-5)
    assert table["low"].iloc[1] == 5.0
    assert np.isnan(table["low"].iloc[2])


def test_rounding_is_no_difference():
    labels = some_labels(21)
    probs = method_probs(1, labels)
    # What a part that the softmax cancels leaves behind: the same tiny gap in every row.
    nudged = probs * (1 + 1e-9 * (labels[:, None] == np.arange(probs.shape[1])))
    table = compare.compare_methods(
        {"a": probs, "b": nudged}, labels, "a", metrics=("nll", "brier", "ece")
    )
    assert (table["difference"].abs() > 0).any()
    assert set(table["verdict"]) == {"no difference at this size"}
    assert (table["p_value"] == 1).all()
    # A thousand times the tolerance is a difference again.
    shifted = probs + 3e-3 * ((labels[:, None] == np.arange(probs.shape[1])) - probs)
    table = compare.compare_methods({"a": probs, "b": shifted}, labels, "a", metrics=("nll",))
    assert table["verdict"].tolist() == ["better"]


def test_fits_of_one_training_are_averaged_and_are_no_seeds():
    labels = some_labels(22)
    fits = {"a": (1, 2), "b": (3, 4)}
    pair = {name: [method_probs(s, labels) for s in seeds] for name, seeds in fits.items()}
    table = compare.compare_methods(pair, labels, "a", n_fits=2, metrics=("accuracy", "nll"))
    assert set(table["n_seeds"]) == {1} and set(table["test"]) == {"paired bootstrap"}
    drawn = resample_metrics(pair, labels, ["nll"], 5, 3, n_fits=2)["b", "nll"]
    singles = [resample_metrics({"b": one}, labels, ["nll"], 5, 3)["b", "nll"] for one in pair["b"]]
    np.testing.assert_allclose(drawn, np.mean(singles, axis=0))
    with pytest.raises(ValueError, match="n_fits must divide the 2 tables of a method, got n_fits"):
        compare.compare_methods(pair, labels, "a", n_fits=3)


def test_intervals_over_rows_are_those_of_the_mean():
    labels = some_labels(23)
    probs = method_probs(5, labels)
    found = compare.row_intervals({"a": probs}, labels, n_resamples=4000).set_index("metric")
    assert set(found.index) == set(RESAMPLED_METRICS)
    losses = measure.per_sample(probs, labels)["nll"]
    half = 1.96 * losses.std(ddof=0) / np.sqrt(N)
    assert found.loc["nll", "mean"] == pytest.approx(losses.mean())
    assert found.loc["nll", "high"] - losses.mean() == pytest.approx(half, rel=0.05)
    assert ((found["low"] < found["mean"]) & (found["mean"] < found["high"])).all()


def test_one_run_is_given_its_interval_over_rows_and_several_are_not():
    tidy = pd.DataFrame(
        {
            "method": ["one", "two", "two"],
            "metric": "nll",
            "value": [0.5, 0.4, 0.6],
        }
    )
    rows = pd.DataFrame(
        {"method": ["one", "two"], "metric": "nll", "mean": 0.5, "low": 0.45, "high": 0.55}
    )
    table = compare.interval_table(tidy, ["method", "metric"], over_rows=rows)
    assert table.loc[0, ["low", "high"]].tolist() == [0.45, 0.55]
    assert table.loc[1, "high"] > 1  # Student's t of two seeds
    assert compare.interval_table(tidy, ["method", "metric"]).loc[0, ["low", "high"]].isna().all()
    assert "test rows" in compare.covered_by(1) and "3 seeds" in compare.covered_by(3)


# ---- Families: the same comparison gets the same verdict, whatever else a study compares.

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
    assert compare.LEVELS and len(table) == 6


def test_standing_is_told_from_the_side_of_the_attention():
    table = pd.DataFrame(
        {"method": ["a", "b", "c"], "verdict": ["worse", "better", "no difference at this size"]}
    )
    assert standing(table) == "better than a; worse than b; no difference at this size from c"
