"""Errata study: every fault shows, with the sign it must have, on data made for it."""

from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

from tests.conftest import make_blobs

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from attnknn.config import RunConfig
from attnknn.core.attention import NeighbourAttention
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.measure import accuracy, negative_log_likelihood
from attnknn.figures.forest import cost_forest
from attnknn.figures.style import use_style
from attnknn.studies import errata
from attnknn.studies.errata import PLAIN_ATTENTION, Case, Pair

N_CLASSES = 5


def made_run(seed=0, *, spread=0.6, n_blobs=N_CLASSES, seen_spread=None):
    """Return what the study reads of a run, over blobs; seen rows may lie tighter than others."""
    blobs = make_blobs(3, n_rows=211, n_queries=240, spread=spread, n_blobs=n_blobs)
    rows, labels = blobs.rows, blobs.labels
    if seen_spread is not None:
        tight = make_blobs(3, n_rows=211, n_queries=2, spread=seen_spread, n_blobs=n_blobs)
        rows, labels = tight.rows, tight.labels
    parts = {
        "train": (rows, labels),
        "val": (blobs.queries[:120], blobs.query_labels[:120]),
        "test": (blobs.queries[120:], blobs.query_labels[120:]),
    }
    config = RunConfig.from_flat({"seed": seed, "fit_batch_size": 40, "trust_neighbours": 7})
    run = TrainedRun(Path("made by a test"), config, {"class_names": list("abcde")})
    # What would be read from the folder.
    tensors = {}
    for part, (own, its_labels) in parts.items():
        tensors[f"{part}_rows"] = torch.from_numpy(own)
        tensors[f"{part}_labels"] = torch.from_numpy(its_labels)
    run.__dict__["_tensors"] = tensors
    return run


@pytest.fixture(scope="module")
def case():
    return Case(made_run(), k_eval=11, k_baseline=7, epochs=4, max_queries=100)


def gain(pair: Pair, measure) -> float:
    """Return faulty minus corrected."""
    return measure(pair.faulty, pair.labels) - measure(pair.corrected, pair.labels)


def test_self_retrieval_flatters(case):
    pair = errata.self_retrieval(case)
    assert gain(pair, accuracy) > 0 and gain(pair, negative_log_likelihood) < 0
    assert "At k = 1 accuracy is 100.0 %" in pair.detail


def test_self_retrieval_leaves_the_runs_memory_alone(case):
    errata.self_retrieval(case)
    assert len(case.run.bank) == 211


def test_an_attention_fitted_on_self_retrieval_believes_its_nearest(case):
    pair = errata.self_retrieval_in_fit(case)
    # It learned that the nearest row is always right: over-confident where that is not so.
    assert gain(pair, negative_log_likelihood) > 0
    assert pair.faulty.max(axis=1).mean() > pair.corrected.max(axis=1).mean()


def test_an_attention_fitted_on_tidy_seen_rows_is_overconfident():
    tidy = made_run(spread=0.8, seen_spread=0.15)
    pair = errata.seen_queries(Case(tidy, k_eval=11, k_baseline=7, epochs=6, max_queries=100))
    assert gain(pair, negative_log_likelihood) > 0
    assert pair.faulty.max(axis=1).mean() > pair.corrected.max(axis=1).mean()


def test_the_faulty_and_the_corrected_fit_get_equally_many_queries(case, monkeypatch):
    sizes = []
    fit = Case.fit

    def counted(self, config, found, labels):
        sizes.append(len(labels))
        return fit(self, config, found, labels)

    monkeypatch.setattr(Case, "fit", counted)
    fresh = replace(case)
    errata.seen_queries(fresh)
    assert sizes == [100, 100]


def test_the_published_label_bias_is_a_no_op(case):
    torch.manual_seed(0)
    near = case.found.test.nearest(7)
    effects = {}
    for form in ("neighbourhood", "neighbour"):
        config = replace(PLAIN_ATTENTION, label_bias=form)
        module = NeighbourAttention(config, dim=case.run.bank.dim, n_classes=N_CLASSES).eval()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        effects[form] = errata.bias_effect(module, near)
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])  # what was learned is put back
    assert effects["neighbourhood"] < 1e-6 < 0.01 < effects["neighbour"]


def test_zero_support_by_hand():
    votes = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    probs = errata.published_floor(votes, 1e-9)
    nll = negative_log_likelihood(probs, np.array([1, 0]))
    assert nll == pytest.approx((-np.log(1e-9) - np.log(0.5)) / 2, rel=1e-6)


def test_zero_support_ruins_the_nll_and_keeps_the_accuracy(case):
    pair = errata.zero_support(case)
    assert gain(pair, negative_log_likelihood) > 0.1
    assert gain(pair, accuracy) == 0
    assert "infinite" in pair.detail


def test_the_detail_of_zero_support_by_hand():
    # One row of two has no vote: -log 1e-9 = 20.72 of 20.72 + 0.69; a floor ten times larger
    # saves log(10) on it, 1.151 on average.
    faulty = {
        name: np.array([[1 - floor, floor], [0.5, 0.5]])
        for name, floor in errata.PUBLISHED_FLOORS.items()
    }
    text = errata.support_detail(faulty, np.array([1, 0]))
    assert "50.00 %" in text and "97 % of the NLL" in text and "1.151 better" in text
    none = errata.support_detail(faulty, np.array([0, 0]))
    assert "every label got a vote" in none


def test_temperature_one_on_squares_is_nearly_uniform():
    # Small tight blobs of alternating classes: far neighbours are of another class.
    run = made_run(spread=0.3, n_blobs=60)
    case = Case(run, k_eval=11, k_baseline=11, epochs=1, max_queries=50)
    pair = errata.unit_temperature_on_squares(case)
    assert gain(pair, negative_log_likelihood) > 0
    assert case.distance.temperature < 0.5


def test_inverted_weights_prefer_the_farthest():
    weights = errata.inverted_weights(torch.tensor([[0.9, 0.5, 0.1]]), 1.0)[0]
    assert weights[0] < weights[1] < weights[2]
    assert (weights[2] / weights[0]).item() == pytest.approx(np.exp(0.8))


def test_inverted_similarities_cost(case):
    run = made_run(spread=0.3, n_blobs=60)
    pair = errata.inverted_similarity(Case(run, k_eval=11, k_baseline=11))
    assert gain(pair, accuracy) < 0 < gain(pair, negative_log_likelihood)


def test_entropy_alone_ends_at_uniform_weights(case):
    pair = errata.entropy_only(case)
    text = pair.detail.split("at ")[1]
    assert float(text.split(" %")[0]) > 99.5


def test_adaptive_k_at_one_half_cannot_reach_its_largest(case):
    detail = errata.adaptive_threshold(case).detail
    assert detail.startswith("0.0 % of the test queries reach k = 11")


def test_fault_5_settings_chosen_on_the_reported_rows_look_better(case):
    for criterion, measure, sign in (
        ("accuracy", accuracy, 1),
        ("nll", negative_log_likelihood, -1),
    ):
        pair = errata.selected(case, criterion)
        assert sign * gain(pair, measure) >= 0
        np.testing.assert_array_equal(pair.labels, case.labels)


def test_the_best_of_candidates_by_hand():
    sure = np.array([[0.9, 0.1], [0.6, 0.4]])  # one right, NLL 0.51
    soft = np.array([[0.51, 0.49], [0.49, 0.51]])  # both right, NLL 0.67
    assert errata.best_of([sure, soft], np.array([0, 1]), "accuracy") == 1
    assert errata.best_of([sure, soft], np.array([0, 1]), "nll") == 0


def test_the_honest_choice_is_made_on_held_out_rows(case, monkeypatch):
    """Held-out labels turned round: another setting is chosen there, and the reported one stays."""
    chosen = errata.selected(case, "accuracy")
    held_out = replace(case.found, held_out_labels=(case.found.held_out_labels + 1) % N_CLASSES)
    turned = replace(case)
    turned.__dict__["found"] = held_out
    again = errata.selected(turned, "accuracy")
    np.testing.assert_array_equal(again.faulty, chosen.faulty)
    assert not np.array_equal(again.corrected, chosen.corrected)


@pytest.fixture(scope="module")
def found():
    options = {"k_eval": 11, "k_baseline": 7, "errata_epochs": 2, "errata_queries": 60}
    runs = [made_run(seed) for seed in (0, 1)]
    return errata.fault_costs(runs, **options)


def test_the_table_has_every_fault_in_every_measure(found):
    assert set(found.table["fault"]) == {fault.name for fault in errata.FAULTS}
    assert len(errata.FAULTS) == 11
    assert (
        found.table.groupby("fault")["metric"]
        .agg(set)
        .map(lambda m: m == set(errata.METRICS))
        .all()
    )
    assert set(found.table["n_seeds"]) == {2}
    known = {
        "better",
        "worse",
        *errata.MISLEADING.values(),
        errata.UNCLEAR,
        errata.INFINITE,
        errata.UNDEFINED,
    }
    assert set(found.table["effect"]) <= known


def test_the_printed_table_has_one_row_a_fault(found):
    table = errata.cost_table(found)
    assert len(table) == found.table["fault"].nunique()
    assert list(table.columns) == ["fault", "measured on", "accuracy (points)", "NLL", "ECE"]


def test_the_verdict_has_one_sentence_a_fault_and_says_how_noisy_an_accuracy_is(found):
    text = errata.verdict(found)
    for fault in errata.FAULTS:
        assert f"**{fault.name}**: {fault.wrong}" in text
    assert f"±{100 * found.accuracy_noise:.2f} points" in text


def test_sentences_follow_from_the_rows():
    rows = pd.DataFrame(
        {
            "metric": ["accuracy", "nll"],
            "difference": [0.012, 0.5],
            "low": [0.01, 0.4],
            "high": [0.014, 0.6],
            "effect": ["looks better than it is", errata.UNCLEAR],
        }
    )
    assert errata.effect_sentence(rows) == (
        "It makes accuracy look better than it is (+1.20 [+1.00, +1.40])."
    )
    assert errata.effect_sentence(rows.iloc[1:]) == "It makes no difference at this size."


def test_effects_are_named_for_what_they_are():
    sure, unsure = np.tile([0.99, 0.01], (60, 1)), np.tile([0.6, 0.4], (60, 1))
    labels = np.zeros(60, dtype=np.int64)
    for misleads, word in ((True, "looks worse than it is"), (False, "worse")):
        fault = errata.FAULTS[0]._replace(misleads=misleads)
        table = errata.paired_cost(fault, [Pair(unsure, sure, labels)])
        assert table.set_index("metric").loc["nll", "effect"] == word


def test_an_infinite_loss_is_no_small_difference():
    # The faulty form gives the first row's class no probability; then both do; then the other.
    never, sure = np.tile([0.9, 0.1], (60, 1)), np.tile([0.8, 0.2], (60, 1))
    never[0] = [0.0, 1.0]
    labels = np.zeros(60, dtype=np.int64)
    expected = {
        "infinite": (never, sure, "infinite", "It makes NLL infinite."),
        "undefined": (never, never, "undefined", "It makes NLL undefined."),
        "less": (sure, never, "minus infinite", "It makes NLL undefined (minus infinite)."),
    }
    for faulty, corrected, cell, sentence in expected.values():
        table = errata.paired_cost(errata.FAULTS[0], [Pair(faulty, corrected, labels)])
        rows = table[table["metric"] == "nll"]
        assert errata.effect_sentence(rows) == sentence
        printed = errata.cost_table(errata.Costs(table, {}, 0.0))
        assert printed["NLL"].tolist() == [cell]
        assert "nan" not in errata.verdict(errata.Costs(table, {}, 0.0))


def test_the_forest_is_drawn(found):
    use_style()
    figure = cost_forest(found.table)
    assert len(figure.axes) == 3
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == list(dict.fromkeys(found.table["fault"]))
    plt.close("all")


def test_the_plain_attention_has_similarity_alone():
    assert list(NeighbourAttention(PLAIN_ATTENTION, dim=3, n_classes=2).parts) == ["similarity"]
