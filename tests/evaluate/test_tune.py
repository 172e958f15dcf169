"""Fitted baselines: the best of their candidates, on held-out rows, each with its calibration."""

import numpy as np
import pytest
import torch

from attnknn.core.vote import (
    AdaptiveK,
    Distance,
    PriorCorrected,
    Prototypes,
    Uniform,
    predict,
)
from attnknn.evaluate import tune as baselines
from attnknn.evaluate.measure import negative_log_likelihood
from attnknn.evaluate.tune import (
    ADAPTIVE_THRESHOLDS,
    BASELINES,
    DISTANCE_TEMPERATURES,
    KS,
    SQUARED_TEMPERATURES,
    calibrate,
    candidates,
    fit_adaptive_k,
    fit_baseline,
    fit_method,
)


@pytest.fixture
def held_out(make_blobs):
    """Neighbours and labels of 211 queries against 307 rows, at k = 50."""
    blobs = make_blobs(seed=4, n_rows=307, n_queries=211)
    return blobs.bank().search(blobs.queries, 50), blobs.query_labels


def test_candidates_are_cut_to_what_was_searched():
    assert candidates("uniform", 23) == [Uniform(k) for k in (1, 3, 5, 10, 20)]
    assert candidates("uniform", 3) == [Uniform(1), Uniform(3)]
    assert max(each.k for each in candidates("uniform", 5000)) == 1000
    assert len(candidates("distance", 1000)) == len(KS) * (
        len(DISTANCE_TEMPERATURES) + len(SQUARED_TEMPERATURES)
    )
    assert all(isinstance(each, Prototypes) for each in candidates("prototypes", 50))
    with pytest.raises(ValueError, match=r"name must be one of .*did you mean 'distance'"):
        candidates("distances", 50)


@pytest.mark.parametrize("name", BASELINES)
def test_the_chosen_setting_is_the_best_of_all(held_out, name):
    neighbours, labels = held_out
    best = fit_baseline(name, neighbours, labels)
    losses = [calibrate(each, neighbours, labels).nll for each in candidates(name, 50)]
    assert best.nll == min(losses)
    assert best.nll == pytest.approx(negative_log_likelihood(best.predict(neighbours), labels))


def test_only_the_best_few_settings_are_calibrated_to_the_end(held_out, monkeypatch):
    neighbours, labels = held_out
    given, whole = [], baselines.fit_floor_and_temperature
    monkeypatch.setattr(
        baselines,
        "fit_floor_and_temperature",
        lambda *args, **options: (
            given.append({name: options[name] for name in baselines.ROUGHLY if name in options})
            or whole(*args, **options)
        ),
    )
    fit_baseline("distance", neighbours, labels)
    n_settings = len(candidates("distance", 50))
    assert given == [baselines.ROUGHLY] * n_settings + [{}] * baselines.FINALISTS


@pytest.mark.parametrize("method", [Uniform(10), Distance(20, 0.1), Prototypes(20.0)])
def test_calibration_never_does_worse_than_the_common_floor(held_out, method):
    neighbours, labels = held_out
    plain = negative_log_likelihood(predict(method, neighbours), labels)
    assert calibrate(method, neighbours, labels).nll < plain


def test_fault_6_the_distance_temperature_is_fitted(make_blobs):
    # Small blobs of other classes all around: of 50 neighbours only the nearest few are right.
    blobs = make_blobs(seed=4, n_rows=307, n_queries=211, spread=0.15, n_blobs=47)
    neighbours, labels = blobs.bank().search(blobs.queries, 50), blobs.query_labels
    methods = [Distance(50, tau) for tau in DISTANCE_TEMPERATURES]
    best = fit_method(methods, neighbours, labels)
    assert DISTANCE_TEMPERATURES[0] < best.method.temperature < DISTANCE_TEMPERATURES[-1]
    published = calibrate(Distance(50, 1.0, squared=True), neighbours, labels)
    assert best.nll < 0.8 * published.nll


def test_fitted_baselines_repeat_on_new_rows(make_blobs, held_out):
    fitted = fit_baseline("distance", *held_out)
    fresh = make_blobs(seed=4, n_rows=307, n_queries=421)  # the same rows, other queries
    neighbours = fresh.bank().search(fresh.queries, 50)
    tuned = negative_log_likelihood(fitted.predict(neighbours), fresh.query_labels)
    plain = negative_log_likelihood(predict(Distance(50), neighbours), fresh.query_labels)
    assert tuned < plain


def test_fault_17_the_fitted_threshold_is_the_best_and_can_reach_every_branch(held_out):
    neighbours, labels = held_out
    inner = Distance(50, 0.1)
    fitted = fit_adaptive_k(inner, neighbours, labels)

    def loss(threshold):
        return negative_log_likelihood(predict(AdaptiveK(inner, threshold), neighbours), labels)

    losses = {threshold: loss(threshold) for threshold in ADAPTIVE_THRESHOLDS}
    assert fitted.threshold == min(losses, key=losses.get)
    reached = {
        threshold: set(AdaptiveK(inner, threshold).chosen_k(neighbours).tolist())
        for threshold in ADAPTIVE_THRESHOLDS
    }
    assert 50 not in reached[0.5]
    assert any(50 in ks for ks in reached.values())
    assert len(set(losses.values())) > 1


def test_the_better_of_two_methods_is_taken(held_out):
    neighbours, labels = held_out
    fits = [calibrate(each, neighbours, labels) for each in (Uniform(50), Uniform(10))]
    best = fit_method([Uniform(50), Uniform(10)], neighbours, labels)
    assert best.method == min(fits, key=lambda fit: fit.nll).method


def test_many_queries_judge_the_grid_by_some_and_the_best_few_by_all(held_out, monkeypatch):
    neighbours, labels = held_out
    whole = fit_baseline("distance", neighbours, labels)
    judged = []

    def counted(method, found, *rest, **options):
        judged.append(len(found.ids))
        return calibrate(method, found, *rest, **options)

    monkeypatch.setattr(baselines, "JUDGED_QUERIES", 101)
    monkeypatch.setattr(baselines, "calibrate", counted)
    weights = np.linspace(1, 2, len(labels))
    fitted = fit_baseline("distance", neighbours, labels, weights=weights)
    n_tried = len(candidates("distance", 50))
    assert judged == [101] * n_tried + [211] * baselines.FINALISTS
    # What is reported is the loss on all queries, near that of the whole grid.
    assert fitted.nll == calibrate(fitted.method, neighbours, labels, weights=weights).nll
    again = calibrate(fitted.method, neighbours, labels)
    assert whole.nll <= again.nll < 1.02 * whole.nll


def test_calibrated_rows_are_probabilities(held_out):
    neighbours, labels = held_out
    probs = fit_baseline("uniform", neighbours, labels).predict(neighbours)
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-9)
    assert probs.min() > 0


class TestPriorCorrected:
    """The vote divided by the class shares of the memory."""

    def test_by_hand(self, circle, east):
        # Neighbours at distances 0, 1 and root 2 with labels 0, 1, 1; shares 1/4, 2/4, 1/4.
        found = circle.search(east, 3)
        raw = np.exp(-np.array([0, 1, np.sqrt(2)])) / np.array([0.25, 0.5, 0.5])
        weights = PriorCorrected(3).weights(found)[0].numpy()
        np.testing.assert_allclose(weights, raw / raw.sum(), rtol=1e-5)
        votes = PriorCorrected(3).votes(found)[0].numpy()
        np.testing.assert_allclose(votes[:2], [weights[0], weights[1] + weights[2]], rtol=1e-5)

    def test_it_is_the_vote_divided_by_the_shares(self, neighbours):
        view = neighbours.view
        shares = view.labels.bincount(minlength=view.n_classes) / len(view.labels)
        divided = Distance(11, 0.2).votes(neighbours) / shares
        expected = divided / divided.sum(dim=1, keepdim=True)
        torch.testing.assert_close(PriorCorrected(11, 0.2).votes(neighbours), expected)

    def test_without_strength_it_is_the_distance_vote(self, neighbours):
        plain = Distance(11, 0.3).votes(neighbours)
        torch.testing.assert_close(PriorCorrected(11, 0.3, 0.0).votes(neighbours), plain)

    def test_it_is_tuned_like_the_others(self, neighbours, blobs):
        tried = candidates("prior-corrected", 11)
        assert all(isinstance(each, PriorCorrected) for each in tried)
        assert {each.strength for each in tried} == {0.0, 0.5, 1.0}
        best = fit_baseline("prior-corrected", neighbours, blobs.query_labels)
        losses = [calibrate(each, neighbours, blobs.query_labels).nll for each in tried]
        assert best.nll == min(losses)

    @pytest.mark.parametrize(
        ("setting", "value"), [("temperature", 0.0), ("strength", 1.5), ("strength", -0.1)]
    )
    def test_impossible_settings_are_refused(self, setting, value):
        with pytest.raises(ValueError, match=f"{setting} must"):
            PriorCorrected(**({"k": 3} | {setting: value}))


def test_weights_count_queries_as_often(neighbours, blobs):
    """A query of weight 2 is a query that comes twice."""
    weights = np.ones(29)
    weights[:7] = 2
    twice = torch.cat([torch.arange(29), torch.arange(7)])
    weighted = fit_baseline("uniform", neighbours, blobs.query_labels, weights=weights)
    repeated = fit_baseline("uniform", neighbours.of_queries(twice), blobs.query_labels[twice])
    assert weighted.method == repeated.method
    assert weighted.nll == pytest.approx(repeated.nll)
    np.testing.assert_allclose(weighted.calibration, repeated.calibration, rtol=1e-3)
