"""Label noise: every level is measured, and wrong labels reach all that is made from labels."""

import itertools

import numpy as np
import pytest

from attnknn.core.vote import predict
from attnknn.evaluate.compare import interval_table
from attnknn.figures import tables as report
from attnknn.figures.sweeps import sweep_grid
from attnknn.studies import label_noise
from attnknn.studies.common import comparisons, search_run


def test_noise_study_covers_every_level(runs):
    study = label_noise.memory_noise(
        runs[:1], rates=(0.0, 0.3), k_eval=7, k_baseline=5, progress=False
    )
    measured = study.table[~study.table["method"].isin(label_noise.DETECTORS)]
    levels = set(measured[["kind", "rate", "held_out"]].itertuples(index=False, name=None))
    kinds, rates = ("symmetric", "asymmetric"), (0.0, 0.3)
    assert levels == set(itertools.product(kinds, rates, ("clean", "noisy")))
    assert {"attention", *label_noise.ONCE, "distance (tuned)"} <= set(measured["method"])
    auroc = study.table.query("method == 'trust' and metric == 'auroc'")["value"]
    assert set(study.table.query("metric == 'auroc'")["method"]) == {"trust", "cleanlab"}
    assert len(auroc) == 2 and auroc.between(0.5, 1).all()  # once per memory
    assert set(measured[measured["method"].isin(label_noise.ONCE)]["held_out"]) == {"clean"}
    text = label_noise.verdict(comparisons(study))
    assert "30 % symmetric, held-out labels noisy" in text and "**NLL**" in text
    assert text.count("\n- ") == 4
    panels = list(dict.fromkeys(label_noise.curves(study.table)["panel"]))
    assert panels == [
        f"{kind},\nheld-out {state}" for kind in kinds for state in ("clean", "noisy")
    ]
    beside = label_noise.beside_published(study).set_index(["method", "source"])["rate = 0.3"]
    own = measured.query(
        "kind == 'symmetric' and rate == 0.3 and held_out == 'clean'"
        " and method == 'attention' and metric == 'accuracy'"
    )["value"].item()
    assert beside["attention", "this run"] == own
    assert beside["attention", "published exp4"] == 0.8918
    assert beside["attention", "published exp7"] == 0.9050
    # One seed: every finite measure has its interval, over test rows or, to detect, memory rows.
    finite = study.table[np.isfinite(study.table["value"])]
    assert finite[["low", "high"]].notna().all(axis=None)
    shown = report.pivot_mean_interval(
        label_noise.noise_table(finite), index=["kind", "held-out labels", "noise", "method"]
    ).text["accuracy (%)"]
    assert shown.str.contains("±").all()


def test_one_kind_of_noise_is_enough_to_draw(runs):
    options = {"k_eval": 7, "k_baseline": 5, "progress": False}
    study = label_noise.memory_noise(
        runs[:1], rates=(0.3,), kinds=("asymmetric",), held_out=("noisy",), **options
    )
    means = interval_table(label_noise.curves(study.table), ["panel", "method", "rate", "metric"])
    figure = sweep_grid(means, x="rate", metrics=["accuracy", "nll"])
    assert len(figure.axes) == 2
    assert figure.axes[0].get_ylabel() == "asymmetric,\nheld-out noisy"


def test_precision_at_the_noise_rate_by_hand():
    wrong = np.array([True, True, False, False, False])
    assert label_noise.precision_at_rate(np.array([0.1, 0.2, 0.3, 0.4, 0.5]), wrong) == 1.0
    assert label_noise.precision_at_rate(np.array([0.5, 0.4, 0.3, 0.2, 0.1]), wrong) == 0.0
    # One of four equal rows joins the lowest: a quarter of a chance for the second wrong one.
    assert label_noise.precision_at_rate(np.array([0.1, 0.5, 0.5, 0.5, 0.5]), wrong) == 0.625


def test_detection_from_tallies_is_the_detection_of_the_drawn_rows():
    rng = np.random.default_rng(5)
    quality, wrong = rng.integers(7, size=53) / 7, rng.random(53) < 0.3
    halves = label_noise.half_widths({"a": quality}, wrong, n_resamples=11, seed=3)
    # The same draws, replayed row by row.
    rng = np.random.default_rng(3)
    rows = [rng.integers(53, size=53) for _ in range(11)]
    for name, measure in label_noise.DETECTION.items():
        slow = [measure(quality[each], wrong[each]) for each in rows]
        assert halves["a", name] == pytest.approx(1.959964 * np.std(slow, ddof=1))


def test_cleanlab_sees_the_same_probabilities_as_trust(runs):
    from cleanlab.rank import get_label_quality_scores

    bank = runs[0].bank
    own = get_label_quality_scores(
        bank.labels.numpy(), bank.view.histograms.double().numpy(), method="self_confidence"
    )
    np.testing.assert_allclose(own, bank.view.trust.numpy(), atol=1e-6)


def test_noise_reaches_trust_histograms_and_prototypes(runs):
    run = runs[0]
    bank = label_noise.noisy_bank(run, label_noise.Level("symmetric", 0.4, "clean"))
    assert bank.view.mean_trust < run.bank.view.mean_trust
    assert not np.allclose(bank.view.prototypes, run.bank.view.prototypes)
    assert (bank.labels.numpy() != run.labels("train")).mean() == pytest.approx(0.4)


def test_the_frozen_attention_is_the_run_s_own_over_the_noisy_memory(runs):
    """The published protocol: only the labels of the memory change."""
    run, level = runs[0], label_noise.Level("asymmetric", 0.3, "clean")
    found, bank = search_run(run, 7), label_noise.noisy_bank(run, level)
    once = label_noise.fitted_once(run, found, 7)
    assert once["attention, frozen"].module is run.attention
    assert once["attention, transfer"].module is not run.attention
    options = {"k_eval": 7, "k_baseline": 5, "once": once}
    probs = label_noise.noise_predictions(run, bank, found, level, **options)
    expected = predict(run.method(7), found.test.with_view(bank.view))
    np.testing.assert_array_equal(probs["attention, frozen"], expected)
    assert not np.allclose(probs["attention"], expected)
