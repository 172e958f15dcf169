"""Judges: hand-made tables for every verdict that each of them can return."""

import numpy as np
import pandas as pd
import pytest

from attnknn.studies import claims as judges
from attnknn.studies import claims as judges_cost
from attnknn.studies import claims as judges_stress
from attnknn.studies import claims as judging
from attnknn.studies.claims import (
    CONFIRMED,
    NOT_DECIDED,
    PARTLY,
    REFUTED,
    MissingTableError,
    Tables,
)

NO_DIFFERENCE = "no difference at this size"
RIVALS = ("uniform", "distance", "uniform (tuned)", "distance (tuned)")


def save(folder, notebook, name, rows):
    path = folder / notebook / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)


def pair(method, metric, verdict, low, high, **more):
    """Return one row of a paired comparison with the attention."""
    limits = {"difference": (low + high) / 2, "low": low, "high": high}
    size = {"n_rows": 10, "n_seeds": 1}
    return {"method": method, "metric": metric, **limits, "verdict": verdict, **size, **more}


def own_measures(folder, **values):
    """Save the attention's own measures."""
    rows = [{"method": "attention", "metric": key, "value": each} for key, each in values.items()]
    save(folder, "02_main_results", "measures", rows)


@pytest.mark.parametrize(
    ("judge", "metric"), [(judges.judge_calibration, "ece"), (judges.judge_likelihood, "nll")]
)
@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["worse"] * 4, CONFIRMED),
        (["worse", "worse", "worse", NO_DIFFERENCE], PARTLY),
        (["worse", "worse", "worse", "better"], PARTLY),  # wins and losses
        ([NO_DIFFERENCE] * 3 + ["better"], REFUTED),
        ([NO_DIFFERENCE] * 4, NOT_DECIDED),
        ([NO_DIFFERENCE] * 3 + ["undefined"], NOT_DECIDED),
    ],
)
def test_attention_must_beat_every_rival(tmp_path, judge, metric, verdicts, expected):
    rows = [pair(*each, -0.01, 0.03) for each in zip(RIVALS, [metric] * 4, verdicts, strict=True)]
    save(tmp_path, "02_main_results", "comparison", rows)
    found = judge(Tables(tmp_path))
    assert found.verdict == expected and found.basis == judging.PAIRED
    assert "distance (tuned) +0.0100 [-0.0100, +0.0300]" in found.evidence
    assert "10 rows" in found.evidence


@pytest.mark.parametrize(
    ("judge", "metric"), [(judges.judge_calibration, "ece"), (judges.judge_likelihood, "nll")]
)
def test_published_and_tuned_rivals_are_named_apart(tmp_path, judge, metric):
    verdicts = ("worse", "worse", NO_DIFFERENCE, "better")
    rows = [
        pair(name, metric, each, -0.01, 0.03) for name, each in zip(RIVALS, verdicts, strict=True)
    ]
    save(tmp_path, "02_main_results", "comparison", rows)
    found = judge(Tables(tmp_path))
    assert found.verdict == PARTLY
    assert "published rivals (confirmed): uniform +0.0100" in found.evidence
    assert "; tuned rivals (refuted): uniform (tuned) +0.0100" in found.evidence
    save(tmp_path, "02_main_results", "comparison", rows[:2])
    found = judge(Tables(tmp_path))
    assert found.verdict == CONFIRMED and "tuned" not in found.evidence


def test_what_the_published_setting_confirms_must_hold_in_the_others():
    assert judging.tempered(CONFIRMED, []) == CONFIRMED
    assert judging.tempered(CONFIRMED, [CONFIRMED, CONFIRMED]) == CONFIRMED
    for other in (REFUTED, PARTLY, NOT_DECIDED):
        assert judging.tempered(CONFIRMED, [CONFIRMED, other]) == PARTLY
    for own in (REFUTED, PARTLY, NOT_DECIDED):
        assert judging.tempered(own, [CONFIRMED]) == own


@pytest.mark.parametrize(
    ("verdict", "low", "high", "expected"),
    [
        ("worse", -0.003, -0.001, CONFIRMED),
        ("better", 0.001, 0.003, REFUTED),
        (NO_DIFFERENCE, -0.0017, 0.0026, NOT_DECIDED),  # holds the claimed 0.01 points
        (NO_DIFFERENCE, 0.0001, 0.0026, REFUTED),  # no test says so, but no gain is left
        (NO_DIFFERENCE, -0.00005, 0.0026, REFUTED),  # the most it may gain is half of the claim
        (NO_DIFFERENCE, 0.0, 0.0, NOT_DECIDED),  # equal on every row: no width, no evidence
    ],
)
def test_a_gain_in_accuracy_is_refuted_only_where_it_is_excluded(
    tmp_path, verdict, low, high, expected
):
    rows = [pair(name, "accuracy", verdict, low, high) for name in RIVALS]
    save(tmp_path, "02_main_results", "comparison", rows)
    assert judges.judge_accuracy(Tables(tmp_path)).verdict == expected


@pytest.mark.parametrize(
    ("nll", "ece", "expected"),
    [
        # Own values are 2 and 0.1; half of the published change is -26 % and -39 %.
        (("better", -1.0, -0.8), ("better", -0.06, -0.04), CONFIRMED),
        (("better", -0.3, -0.1), ("better", -0.06, -0.04), PARTLY),
        (("better", -1.0, -0.8), (NO_DIFFERENCE, -0.06, 0.01), PARTLY),
        ((NO_DIFFERENCE, -0.9, 0.1), (NO_DIFFERENCE, -0.06, 0.01), NOT_DECIDED),
        ((NO_DIFFERENCE, -0.3, 0.1), (NO_DIFFERENCE, -0.02, 0.01), REFUTED),
        (("worse", 0.1, 0.3), (NO_DIFFERENCE, -0.06, 0.01), REFUTED),
    ],
)
def test_views_must_help_about_as_much_as_published(tmp_path, nll, ece, expected):
    own_measures(tmp_path, nll=2.0, ece=0.1)
    named = {"nll": nll, "ece": ece, "accuracy": ("better", 0.01, 0.03)}
    rows = [pair("attention + TTA", metric, *each) for metric, each in named.items()]
    save(tmp_path, "02_main_results", "comparison", rows)
    found = judges.judge_tta(Tables(tmp_path))
    assert found.verdict == expected and "accuracy +2.00 points" in found.evidence
    assert f"NLL {100 * (nll[1] + nll[2]) / 4:+.0f} %" in found.evidence


def test_no_measure_falls_by_more_than_all_of_it(tmp_path):
    # -0.062 of 0.1, with an interval that reaches to -104 %: a pivotal interval may.
    own_measures(tmp_path, nll=2.0, ece=0.1)
    rows = [
        pair("attention + TTA", "nll", "better", -1.0, -0.8),
        pair("attention + TTA", "ece", "better", -0.104, -0.02),
        pair("attention + TTA", "accuracy", "better", 0.01, 0.03),
    ]
    save(tmp_path, "02_main_results", "comparison", rows)
    evidence = judges.judge_tta(Tables(tmp_path)).evidence
    assert "ECE -62 % [-100, -20] (better)" in evidence and "-104" not in evidence


@pytest.mark.parametrize(
    ("nll", "ece", "expected"),
    [
        # A gain counts from 0.01 (NLL, 1 % of 1) and 0.005 (ECE) on.
        ((-0.009, 0.002), (-0.004, 0.001), CONFIRMED),
        ((0.02, 0.03), (0.01, 0.02), CONFIRMED),  # worse is no help
        ((-0.012, 0.002), (-0.004, 0.001), NOT_DECIDED),  # no test finds it, none excludes it
        ((-0.009, 0.002), (-0.006, 0.001), NOT_DECIDED),
        ((-0.03, -0.02), (-0.004, 0.001), REFUTED),
        ((np.nan, np.nan), (-0.004, 0.001), NOT_DECIDED),
    ],
)
def test_a_k_ensemble_that_might_help_is_not_shown_to_be_useless(tmp_path, nll, ece, expected):
    own_measures(tmp_path, nll=1.0)
    rows = [
        pair("attention + k-ensemble", metric, NO_DIFFERENCE, *each)
        for metric, each in (("nll", nll), ("ece", ece))
    ]
    save(tmp_path, "02_main_results", "comparison", rows)
    found = judges.judge_k_ensemble(Tables(tmp_path))
    assert found.verdict == expected and found.basis == judging.INTERVAL


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.008, 0.009, CONFIRMED),
        (0.001, 0.009, CONFIRMED),  # a difference, but too small to matter
        (-0.03, 0.04, NOT_DECIDED),
        (0.005, 0.02, NOT_DECIDED),
        (0.02, 0.03, REFUTED),
        (-0.03, -0.02, REFUTED),
    ],
)
def test_heads_are_equal_only_inside_the_margin(tmp_path, low, high, expected):
    own_measures(tmp_path, nll=1.0)
    row = pair("without more than one head", "nll", "any", low, high, part="more than one head")
    save(tmp_path, "02_main_results", "ablation", [row])
    found = judges.judge_heads(Tables(tmp_path))
    assert found.verdict == expected and "up to 0.0100 counts as the same" in found.evidence


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.052, 0.07, CONFIRMED),
        (-0.002, 0.003, REFUTED),
        (0.03, 0.06, NOT_DECIDED),
        (0.0, 0.0, NOT_DECIDED),
    ],
)
def test_the_gap_to_the_cnn_is_judged_by_its_interval(tmp_path, low, high, expected):
    save(tmp_path, "02_main_results", "comparison", [pair("cnn", "accuracy", "any", low, high)])
    found = judges.judge_gap_to_cnn(Tables(tmp_path))
    assert found.verdict == expected and f"{50 * (low + high):+.2f} [" in found.evidence


def save_sweep(folder, accuracies):
    """Save a k-sweep: method -> k -> accuracy, on two seeds."""
    rows = [
        {"method": name, "k": k, "metric": "accuracy", "value": value + shift, "seed": seed}
        for name, each in accuracies.items()
        for k, value in each.items()
        for seed, shift in enumerate((-0.01, 0.01))
    ]
    save(folder, "03_k_sweep", "measures", rows)


FLAT, STEEP = {1: 0.1, 3: 0.9, 10: 0.901, 50: 0.902}, {1: 0.1, 3: 0.9, 10: 0.8, 50: 0.7}


@pytest.mark.parametrize(
    ("attention", "uniform", "expected"),
    [(FLAT, FLAT, CONFIRMED), (FLAT, STEEP, PARTLY), (STEEP, STEEP, REFUTED)],
)
def test_k_hardly_matters_where_accuracy_is_level(tmp_path, attention, uniform, expected):
    save_sweep(tmp_path, {"attention": attention, "uniform": uniform})
    found = judges.judge_k_hardly_matters(Tables(tmp_path))
    assert found.verdict == expected and found.basis == judging.MEANS


PEAK = {3: 0.8, 10: 0.9, 50: 0.85}


@pytest.mark.parametrize(
    ("attention", "uniform", "expected"),
    [
        (PEAK, PEAK, CONFIRMED),
        (PEAK, FLAT, PARTLY),
        (PEAK, STEEP, PARTLY),  # one method has its best k there, the other has not
        (FLAT, STEEP, REFUTED),
        (FLAT, FLAT, NOT_DECIDED),  # its best k is 50, by a tenth of a point
    ],
)
def test_a_best_k_must_lead(tmp_path, attention, uniform, expected):
    save_sweep(tmp_path, {"attention": attention, "uniform": uniform, "distance (tuned)": STEEP})
    found = judges.judge_best_k(Tables(tmp_path))
    assert found.verdict == expected and "tuned" not in found.evidence


def test_a_best_k_needs_rivals(tmp_path):
    save_sweep(tmp_path, {"attention": {3: 0.9, 50: 0.8}})
    with pytest.raises(MissingTableError, match="k inside and outside"):
        judges.judge_best_k(Tables(tmp_path))


def save_noise(folder, accuracies, *, noisy=None):
    """Save accuracies of the attention by kind and rate, beside rows that must not count."""
    settings = {"clean": accuracies} | ({"noisy": noisy} if noisy else {})
    rows = [
        {"kind": kind, "rate": rate, "held_out": held_out, "method": method, "metric": "accuracy",
         "value": value if method == "attention" else 0.01}
        for held_out, kinds in settings.items()
        for kind, each in kinds.items()
        for rate, value in each.items()
        for method in ("uniform", "attention")
    ]  # fmt: skip
    save(folder, "04_label_noise", "measures", rows)


KEPT = {0.0: 0.9, 0.1: 0.9, 0.2: 0.89, 0.3: 0.88, 0.4: 0.1}
LOST = {0.0: 0.9, 0.1: 0.8, 0.2: 0.7, 0.3: 0.6}


@pytest.mark.parametrize(
    ("symmetric", "asymmetric", "expected"),
    [
        (KEPT, KEPT, CONFIRMED),
        (KEPT, {**KEPT, 0.3: 0.87}, PARTLY),  # 96.7 % kept of the claimed 97.5
        (KEPT, {**KEPT, 0.1: 0.89}, PARTLY),  # 98.9 % kept of the claimed 99.5
        (KEPT, LOST, PARTLY),
        (KEPT, {}, PARTLY),
        ({0.0: 0.9, 0.2: 0.9}, {0.0: 0.9, 0.2: 0.9}, PARTLY),
        (LOST, LOST, REFUTED),
        ({0.0: 0.9, 0.3: 0.6}, {}, REFUTED),
    ],
)
def test_retention_is_claimed_for_three_rates_and_two_kinds(
    tmp_path, symmetric, asymmetric, expected
):
    save_noise(tmp_path, {"symmetric": symmetric, "asymmetric": asymmetric})
    found = judges_stress.judge_noise(Tables(tmp_path))
    assert found.verdict == expected and "40 %" not in found.evidence
    is_whole = {0.1, 0.2, 0.3} <= symmetric.keys() & asymmetric.keys()
    assert ("not measured" in found.evidence) == (not is_whole)


@pytest.mark.parametrize(
    ("clean", "noisy", "expected"),
    [(KEPT, KEPT, CONFIRMED), (KEPT, LOST, PARTLY), (LOST, KEPT, REFUTED)],
)
def test_retention_is_also_measured_with_noisy_held_out_labels(tmp_path, clean, noisy, expected):
    kinds = ("symmetric", "asymmetric")
    save_noise(tmp_path, dict.fromkeys(kinds, clean), noisy=dict.fromkeys(kinds, noisy))
    found = judges_stress.judge_noise(Tables(tmp_path))
    assert found.verdict == expected
    assert found.evidence.startswith("held-out labels clean: accuracy kept: ")
    shown = 97.8 if noisy is KEPT else 66.7  # 0.88 and 0.6 of 0.9
    words = found.evidence.split("held-out labels noisy: ")[1]
    assert f"{shown} % at 30 % symmetric (claimed: 97.5 or more)" in words


def test_retention_needs_the_clean_level(tmp_path):
    save_noise(tmp_path, {"symmetric": {0.2: 0.9, 0.3: 0.8}})
    with pytest.raises(MissingTableError, match="10, 20 or 30 %"):
        judges_stress.judge_noise(Tables(tmp_path))


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["worse"] * 4, CONFIRMED),
        (["worse", NO_DIFFERENCE, "worse", "worse"], PARTLY),
        ([NO_DIFFERENCE] * 4, NOT_DECIDED),
        (["worse", "worse", "worse", "better"], PARTLY),  # wins and losses
        ([NO_DIFFERENCE] * 3 + ["better"], REFUTED),
    ],
)
def test_under_noise_attention_must_beat_every_rival(tmp_path, verdicts, expected):
    level = {"kind": "symmetric", "held_out": "clean"}
    named = zip(RIVALS, verdicts, strict=True)
    rows = [pair(name, "nll", each, -1.0, 1.0, rate=0.4, **level) for name, each in named]
    rows += [pair(name, "nll", "better", -1.0, 1.0, rate=0.2, **level) for name in RIVALS]
    rows += [pair("uniform", "accuracy", "better", -1.0, 1.0, rate=0.4, **level)]
    save(tmp_path, "04_label_noise", "comparison", rows)
    found = judges_stress.judge_noise_against(Tables(tmp_path))
    assert found.verdict == expected and "at 40 %" in found.evidence
    assert "noisy" not in found.evidence


def save_settings(folder, method, metric, clean, noisy, *, rate, low=-1.0, high=1.0):
    """Save one paired row with clean, and one with noisy held-out labels."""
    rows = [
        pair(method, metric, each, low, high, rate=rate, kind="symmetric", held_out=held_out)
        for held_out, each in (("clean", clean), ("noisy", noisy))
    ]
    save(folder, "04_label_noise", "comparison", rows)


@pytest.mark.parametrize(
    ("clean", "noisy", "expected"),
    [
        ("worse", "worse", CONFIRMED),
        ("worse", NO_DIFFERENCE, PARTLY),
        ("worse", "better", PARTLY),
        ("better", "worse", REFUTED),
    ],
)
def test_under_noise_both_kinds_of_held_out_labels_count(tmp_path, clean, noisy, expected):
    save_settings(tmp_path, "uniform", "nll", clean, noisy, rate=0.4)
    found = judges_stress.judge_noise_against(Tables(tmp_path))
    assert found.verdict == expected
    assert "held-out labels noisy (" in found.evidence


def test_noise_needs_a_rate_above_zero(tmp_path):
    save_settings(tmp_path, "uniform", "nll", "worse", "worse", rate=0.0)
    with pytest.raises(MissingTableError, match="a rate above 0"):
        judges_stress.judge_noise_against(Tables(tmp_path))


def test_noisy_held_out_labels_alone_are_not_the_published_setting(tmp_path):
    level = {"kind": "symmetric", "held_out": "noisy", "rate": 0.3}
    rows = [pair("uniform", metric, "worse", -0.2, -0.1, **level) for metric in ("nll", "accuracy")]
    save(tmp_path, "04_label_noise", "comparison", rows)
    for judge in (judges_stress.judge_noise_against, judges_stress.judge_noise_accuracy):
        with pytest.raises(MissingTableError, match="held-out labels clean"):
            judge(Tables(tmp_path))


@pytest.mark.parametrize(
    ("verdicts", "limits", "expected"),
    [
        (["better", "better"], (0.001, 0.02), CONFIRMED),
        (["better", NO_DIFFERENCE], (-0.001, 0.02), PARTLY),
        ([NO_DIFFERENCE] * 2, (-0.02, 0.02), NOT_DECIDED),
        ([NO_DIFFERENCE] * 2, (-0.002, 0.005), REFUTED),  # the published 0.99 points are excluded
        ([NO_DIFFERENCE] * 2, (0.0, 0.0), NOT_DECIDED),
        (["better", "worse"], (-0.02, 0.02), PARTLY),  # one kind of noise each
        ([NO_DIFFERENCE, "worse"], (-0.02, 0.02), REFUTED),
    ],
)
def test_experiment_7_is_about_accuracy_at_30_per_cent(tmp_path, verdicts, limits, expected):
    level = {"method": "uniform", "metric": "accuracy", "held_out": "clean"}
    rows = [
        pair(low=limits[0], high=limits[1], verdict=each, rate=0.3, kind=kind, **level)
        for kind, each in zip(("symmetric", "asymmetric"), verdicts, strict=True)
    ]
    others = {"rate": 0.4}, {"metric": "nll"}, {"method": "distance"}
    rows += [rows[0] | {"verdict": "worse"} | other for other in others]
    save(tmp_path, "04_label_noise", "comparison", rows)
    found = judges_stress.judge_noise_accuracy(Tables(tmp_path))
    assert found.verdict == expected and "not measured" not in found.evidence
    assert "claimed: +0.0099" in found.evidence


@pytest.mark.parametrize(
    ("clean", "noisy", "expected"),
    [("better", "better", CONFIRMED), ("better", "worse", PARTLY), ("worse", "better", REFUTED)],
)
def test_experiment_7_with_both_kinds_of_held_out_labels(tmp_path, clean, noisy, expected):
    save_settings(tmp_path, "uniform", "accuracy", clean, noisy, rate=0.3)
    found = judges_stress.judge_noise_accuracy(Tables(tmp_path))
    assert found.verdict == expected and "held-out labels noisy (" in found.evidence


@pytest.mark.parametrize("rates", [(0.0, 0.1, 0.2, 0.4, 0.5), (0.1, 0.2), (0.0, 0.4), (0.0,)])
@pytest.mark.parametrize("verdict", ["better", "worse"])
def test_other_rates_say_nothing_about_30_per_cent(tmp_path, rates, verdict):
    level = {"kind": "symmetric", "held_out": "clean"}
    rows = [pair("uniform", "accuracy", verdict, 0.01, 0.02, rate=rate, **level) for rate in rates]
    save(tmp_path, "04_label_noise", "comparison", rows)
    with pytest.raises(MissingTableError, match=r"rate 0\.3 in 04_label_noise/comparison"):
        judges_stress.judge_noise_accuracy(Tables(tmp_path))


def save_tail(folder, accuracies, **others):
    """Save ratio -> accuracy with balanced held-out rows, and with others where they are named."""
    level = {"classes": "all", "method": "attention", "corrupted": "memory only"}
    rows = [
        level | {"metric": "accuracy", "held_out": held_out, "ratio": ratio, "value": value}
        for held_out, each in ({"balanced": accuracies} | others).items()
        for ratio, value in each.items()
    ]
    rows += [rows[-1] | {"value": 0.0} | other for other in ({"classes": "few"}, {"method": "cnn"})]
    save(folder, "05_long_tail", "measures", rows)


@pytest.mark.parametrize(
    ("tailed", "expected"), [(0.91, CONFIRMED), (0.893, CONFIRMED), (0.88, REFUTED)]
)
def test_a_long_tail_may_cost_what_was_published(tmp_path, tailed, expected):
    save_tail(tmp_path, {1.0: 0.9, 0.1: 0.5, 0.01: tailed})
    found = judges_stress.judge_long_tail(Tables(tmp_path))
    assert found.verdict == expected and "published: 0.90" in found.evidence
    assert "reweighted" not in found.evidence


@pytest.mark.parametrize(
    ("balanced", "reweighted", "expected"),
    [(0.895, 0.892, CONFIRMED), (0.895, 0.875, PARTLY), (0.88, 0.895, REFUTED)],
)
def test_a_long_tail_must_cost_little_whatever_is_fitted_on(
    tmp_path, balanced, reweighted, expected
):
    save_tail(tmp_path, {1.0: 0.9, 0.01: balanced}, reweighted={1.0: 0.9, 0.01: reweighted})
    found = judges_stress.judge_long_tail(Tables(tmp_path))
    assert found.verdict == expected
    assert f"{90 - 100 * reweighted:.2f} with held-out rows reweighted" in found.evidence


def test_a_short_tail_says_nothing_about_a_long_one(tmp_path):
    save_tail(tmp_path, {1.0: 0.9, 0.1: 0.9})
    with pytest.raises(MissingTableError, match=r"ratio 0\.01"):
        judges_stress.judge_long_tail(Tables(tmp_path))


def save_stages(folder, *, batched=0.01, **single):
    """Save stage -> (value, low, high) of single queries; in a batch each takes the same."""
    rows = [
        {"batch": batch, "method": "attention", "stage": stage}
        | dict(zip(("value", "low", "high"), each, strict=True))
        for batch, stages in (
            ("one by one", single),
            ("all at once", dict.fromkeys(single, (batched,) * 3)),
        )
        for stage, each in stages.items()
    ]
    save(folder, "06_efficiency", "stages", rows)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ((0.3, 0.2, 0.4), CONFIRMED),
        ((0.45, 0.4, 0.6), NOT_DECIDED),
        ((0.7, 0.6, 0.8), PARTLY),  # too slow one by one, fast enough in a batch
        ((0.3, np.nan, np.nan), NOT_DECIDED),  # too few rounds for an interval
    ],
)
def test_overhead_is_judged_on_single_queries(tmp_path, attention, expected):
    save_stages(tmp_path, embedding=(5.0, 4.0, 6.0), attention=attention)
    found = judges_cost.judge_overhead(Tables(tmp_path))
    assert found.verdict == expected and f"{attention[0]:.3f} ms [" in found.evidence


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ((0.3, 0.2, 0.4), CONFIRMED),
        ((0.45, 0.4, 0.7), NOT_DECIDED),
        ((2.0, 1.9, 2.1), PARTLY),  # too slow one by one, fast enough in a batch
    ],
)
def test_the_whole_prediction_is_search_attention_and_vote(tmp_path, search, expected):
    rest = {"embedding": (5.0, 4.0, 6.0), "attention": (0.4, 0.3, 0.45), "vote": (0.1, 0.05, 0.1)}
    save_stages(tmp_path, search=search, **rest)
    found = judges_cost.judge_whole_overhead(Tables(tmp_path))
    assert found.verdict == expected and f"{search[0] + 0.5:.3f} ms [" in found.evidence


@pytest.mark.parametrize(
    ("single", "batched", "expected"),
    [(0.1, 0.1, CONFIRMED), (0.1, 0.9, PARTLY), (0.9, 0.1, PARTLY), (0.9, 0.9, REFUTED)],
)
def test_a_time_must_hold_one_by_one_and_in_a_batch(tmp_path, single, batched, expected):
    save_stages(tmp_path, batched=batched, attention=(single,) * 3)
    assert judges_cost.judge_overhead(Tables(tmp_path)).verdict == expected


@pytest.mark.parametrize(
    ("build_seconds", "recall", "expected"),
    [
        (1000.0, 1.0, CONFIRMED),  # 10 000 rows: pays after a million queries
        (1.0, 0.995, REFUTED),  # after a thousand
        (1.0, 0.95, NOT_DECIDED),  # fast, but it misses rows
    ],
)
def test_hnsw_is_needed_where_its_build_pays(tmp_path, build_seconds, recall, expected):
    save_indexes(tmp_path, (10_000, 100_000), build_seconds, recall)
    found = judges_cost.judge_hnsw(Tables(tmp_path))
    assert found.verdict == expected and f"(recall {recall:.3f})" in found.evidence


def save_indexes(folder, sizes, build_seconds, recall):
    measured = {"HNSW": (1.0, build_seconds, recall), "Flat IP": (2.0, 0.0, 1.0)}
    rows = [
        {"rows": n, "index": name, "metric": metric, "value": value}
        for n in sizes
        for name, values in measured.items()
        for metric, value in zip(("search_ms", "build_seconds", "recall"), values, strict=True)
    ]
    save(folder, "06_efficiency", "measures", rows)


def test_small_memories_say_nothing_about_hnsw(tmp_path):
    save_indexes(tmp_path, (10_000, 50_000), 1.0, 1.0)
    with pytest.raises(MissingTableError, match="100000 rows"):
        judges_cost.judge_hnsw(Tables(tmp_path))


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("holds", CONFIRMED),
        ("holds in part", PARTLY),
        ("does not hold", REFUTED),
        ("not decided", NOT_DECIDED),
    ],
)
def test_the_theory_study_has_judged_already(tmp_path, verdict, expected):
    rows = [
        {"claim": name, "bound": "b ≤ 1", "measured": "0.5", "verdict": each}
        for name, each in (("other", "holds"), ("this", verdict))
    ]
    save(tmp_path, "07_theory", "claims", rows)
    found = judges_cost.taken_from_theory("this")(Tables(tmp_path))
    assert found == (expected, "0.5 (bound: b ≤ 1)", judging.THEORY)
    with pytest.raises(MissingTableError, match="claim that in 07_theory"):
        judges_cost.taken_from_theory("that")(Tables(tmp_path))
