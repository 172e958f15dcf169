"""The contest: what is fitted on what, and intervals that go with their measures."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from attnknn.config import AttentionConfig
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.vote import predict
from attnknn.evaluate.compare import interval_table
from attnknn.evaluate.measure import negative_log_likelihood
from attnknn.evaluate.tune import fit_method
from attnknn.figures.style import use_style
from attnknn.figures.tables import pivot_mean_interval
from attnknn.studies import ablation, common, k_sweep, label_noise, long_tail, main
from attnknn.studies.common import Study, comparisons, group_limits, level_limits, with_limits

# ---- What is fitted, and on what


class Fit(NamedTuple):
    """One call of a fit: the rows and labels that reached it, and how long it looked for."""

    queries: np.ndarray
    labels: np.ndarray
    depth: int
    options: dict
    fitted: object


@pytest.fixture
def fits(monkeypatch):
    """Every fit that the contest makes, by what is fitted: "attention" and "votes"."""
    made = {"attention": [], "votes": []}

    def attention(bank, neighbours, labels, **options):
        fitted = fit_on_neighbours(bank, neighbours, labels, **options)
        queries = neighbours.queries.numpy()
        made["attention"].append(Fit(queries, labels, neighbours.k, options, fitted))
        return fitted

    def votes(methods, neighbours, labels, **options):
        fitted = fit_method(methods, neighbours, labels, **options)
        made["votes"].append(Fit(neighbours.queries.numpy(), labels, neighbours.k, options, fitted))
        return fitted

    monkeypatch.setattr(common, "fit_on_neighbours", attention)
    monkeypatch.setattr(common, "fit_method", votes)
    return made


KS = {"k_eval": 7, "k_baseline": 5}  # the attention of these runs was fitted for 7


def noise_levels(runs):
    label_noise.memory_noise(runs[:1], rates=(0.0, 0.4), progress=False, **KS)


def tails(runs):
    long_tail.memory_tail(runs[:1], ratios=(1.0, 0.25), progress=False, **KS)


def retrained_on_noise(runs):
    found = common.search_run(runs[0], 20)
    for held_out in ("clean", "noisy"):
        level = label_noise.Level("symmetric", 0.4, held_out)
        own = common.attention_at(runs[0], found, 7)
        label_noise.noise_predictions(runs[0], runs[0].bank, found, level, own=own, **KS)


def retrained_on_tails(runs):
    found = common.search_run(runs[0], 20)
    for held_out in ("long-tailed", "reweighted"):
        level = long_tail.TailLevel(0.25, held_out)
        long_tail.tail_predictions(runs[0], runs[0].bank, found, level, **KS)


def other_ks(runs):
    k_sweep.k_sweep(runs[:1], ks=(3, 5, 7), progress=False)


def other_parts(runs):
    ablation.ablate(runs[:1], k_eval=7, epochs=2, repeats=1, progress=False)


def ensembles(runs):
    options = {"k_eval": 11, "k_baseline": 5, "k_ensemble": (3, 5), "tta_views": 1}
    main.main_results(runs[:1], **options)


@pytest.mark.parametrize(
    ("study", "n_fits"),
    [
        (noise_levels, 1 + 3 * 2),  # one for all levels; the clean level and two kinds, twice
        (tails, 3),  # whole and tailed memory: the run's own, then one a kind of held-out rows
        (retrained_on_noise, 1),  # with clean labels the run's own
        (retrained_on_tails, 2),
        (other_ks, 2),  # at k = 7 the run's own
        (ensembles, 3),
        (other_parts, len(ablation.forms(AttentionConfig()))),
    ],
)
def test_every_study_fits_on_held_out_rows_and_finds_lengths_and_temperatures_anew(
    runs, fits, study, n_fits
):
    """What suits one memory, k or form of the attention would hold another one's fit back."""
    study(runs)
    assert len(fits["attention"]) == n_fits
    for fit in fits["attention"]:
        assert fit.options.get("n_epochs") is None and fit.options.get("temperature") is None
        assert len(fit.fitted.history) > 0  # a trial of its own has found the length
    held_out, test = ({row.tobytes() for row in runs[0].rows(part)} for part in ("val", "test"))
    assert not held_out & test
    for fit in (*fits["attention"], *fits["votes"]):
        assert {row.tobytes() for row in fit.queries} <= held_out


def test_noisy_held_out_labels_reach_every_fit(runs, fits):
    noise_levels(runs)
    right = runs[0].labels("val")
    wrong = [(fit.labels != right).mean() for fit in fits["attention"]]
    # Transfer; then clean and noisy labels at rates 0 and 0.4, and at 0.4 of the other kind.
    assert wrong == pytest.approx([0, 0, 0, 0, 0, 0.4, 0.4])
    votes = [(fit.labels != right).mean() for fit in fits["votes"]]
    assert votes == pytest.approx(np.repeat(wrong[1:], 3))
    # Votes may ask all rows that this memory has.
    assert {fit.depth for fit in fits["votes"]} == {60}
    assert {fit.depth for fit in fits["attention"]} == {7}
    symmetric, asymmetric = fits["attention"][-2:]
    assert not np.array_equal(symmetric.labels, asymmetric.labels)
    assert set((asymmetric.labels - right) % 3) == {0, 1}
    for fit in (symmetric, fits["votes"][-4]):  # what is corrected is estimated, and the same
        assert fit.options["label_error"] is not None
    np.testing.assert_array_equal(
        symmetric.options["label_error"], fits["votes"][-4].options["label_error"]
    )


def test_noisy_held_out_labels_of_retrained_runs_reach_every_fit(runs, fits):
    retrained_on_noise(runs)
    wrong = [(fit.labels != runs[0].labels("val")).mean() for fit in fits["votes"]]
    assert wrong == pytest.approx([0, 0, 0, 0.4, 0.4, 0.4])
    (fit,) = fits["attention"]
    np.testing.assert_array_equal(fit.labels, fits["votes"][-1].labels)


def test_reweighted_queries_count_alike_for_whatever_is_fitted(runs, fits):
    retrained_on_tails(runs)
    plain, reweighted = fits["attention"]
    assert plain.options["weights"] is None and np.bincount(plain.labels).tolist() == [10, 5, 2]
    expected = long_tail.balancing_weights(reweighted.labels)
    for fit in (reweighted, *fits["votes"][-4:]):
        np.testing.assert_array_equal(fit.options["weights"], expected)


def test_neighbours_are_drawn(runs):
    use_style()
    found = common.search_run(runs[0], 7).test
    figure = common.neighbours_figure(runs[0], found, 3, method=runs[0].method(7))
    assert len(figure.axes) > 2


def test_kept_neighbourhoods_let_a_deeper_search_go(runs):
    deep = common.search_run(runs[0], 20)
    kept = deep.kept(5)
    np.testing.assert_array_equal(kept.test.ids, deep.test.ids[:, :5])
    for neighbours in (kept.held_out, kept.test):
        for tensor in (neighbours.ids, neighbours.scores):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_k_eval_is_what_the_attention_weighs(runs):
    found = common.search_run(runs[0], 11)
    own, other = common.attention_at(runs[0], found, 7), common.attention_at(runs[0], found, 5)
    assert own.module is runs[0].attention and own.k == 7  # fit_k of these runs
    assert other.module is not runs[0].attention and other.k == 5


def test_the_nll_that_judges_an_attention_comes_from_queries_it_has_not_seen(runs):
    found = common.search_run(runs[0], 11)
    _, own = common.judged_attention_at(runs[0], found, 7)
    history = runs[0].fit_history
    assert own == history["stop_nll"][history["kept"].sum() - 1]
    attention, other = common.judged_attention_at(runs[0], found, 5)
    here = found.nearest(5)
    seen = negative_log_likelihood(predict(attention, here.held_out), here.held_out_labels)
    assert other != pytest.approx(seen, rel=1e-3)


# ---- Intervals and comparisons


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


def test_a_difference_by_chance_is_none():
    rng = np.random.default_rng(3)
    labels = rng.integers(2, size=211)
    right = np.where(labels == 1, 0.9, 0.1)
    first = {
        "attention": right,
        "uniform": np.clip(right + rng.normal(0, 0.05, 211), 0.02, 0.98),
        "distance": np.full(211, 0.5),
    }
    probs = {name: [np.stack([1 - each, each], axis=1)] for name, each in first.items()}
    study = Study(pd.DataFrame(), {Rate(0.5): probs}, labels, {Rate(0.5): [0]})
    found = comparisons(study, metrics=("nll",)).set_index("method")
    assert (found["rate"] == 0.5).all() and "classes" not in found
    assert found.loc["uniform", "difference"] != 0 and found.loc["uniform", "p_holm"] > 0.05
    assert found["verdict"].to_dict() == {
        "uniform": "no difference at this size",
        "distance": "worse",
    }
