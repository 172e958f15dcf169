"""Methods and wrappers: by hand, limits, scikit-learn, one search, one floor."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from attnknn.config import AttentionConfig
from attnknn.core.attention import SUPPORT_FLOOR, NeighbourAttention
from attnknn.core.calibrate import Calibration
from attnknn.core.vote import (
    AdaptiveK,
    Attention,
    Distance,
    KEnsemble,
    Method,
    Prototypes,
    Uniform,
    at_k,
    predict,
    predict_views,
)
from attnknn.evaluate.measure import negative_log_likelihood

K = 11


@pytest.fixture
def learned() -> Attention:
    """An attention that has not been fitted, at k = 11."""
    torch.manual_seed(0)
    return Attention(K, NeighbourAttention(AttentionConfig(), dim=6, n_classes=5))


@pytest.fixture
def methods(learned) -> dict[str, Method]:
    """One of each kind, at k = 11."""
    return {
        "uniform": Uniform(K),
        "distance": Distance(K, 0.2),
        "attention": learned,
        "prototypes": Prototypes(5.0, k=K),
        "k-ensemble": KEnsemble(Distance(K, 0.2), (3, 7, K)),
        "adaptive k": AdaptiveK(Distance(K, 0.2), 0.4),
        "k-ensemble of adaptive k": KEnsemble(AdaptiveK(learned, 0.4), (3, 7, K)),
        "k-ensemble of prototypes": KEnsemble(Prototypes(5.0), (3, 7, K)),
    }


METHODS = [
    "uniform",
    "distance",
    "attention",
    "prototypes",
    "k-ensemble",
    "adaptive k",
    "k-ensemble of adaptive k",
    "k-ensemble of prototypes",
]


def sklearn_votes(blobs, k: int) -> np.ndarray:
    """Return the votes of scikit-learn's uniform classifier, with the floor all methods have."""
    model = KNeighborsClassifier(k, metric="cosine").fit(blobs.rows, blobs.labels)
    return (1 - SUPPORT_FLOOR) * model.predict_proba(blobs.queries) + SUPPORT_FLOOR / 5


@pytest.mark.parametrize("k", [1, 3, 11, 101])
def test_uniform_is_scikit_learns_uniform_vote(bank, blobs, k):
    probs = predict(Uniform(k), bank.search(blobs.queries, k))
    np.testing.assert_allclose(probs, sklearn_votes(blobs, k), atol=1e-6)


def test_distance_with_a_large_temperature_is_the_uniform_vote(neighbours, blobs):
    probs = predict(Distance(K, 1e6), neighbours)
    np.testing.assert_allclose(probs, sklearn_votes(blobs, K), atol=1e-5)


def test_distance_with_a_small_temperature_is_the_nearest_neighbour(neighbours, blobs):
    probs = predict(Distance(K, 1e-5), neighbours)
    np.testing.assert_allclose(probs, sklearn_votes(blobs, 1), atol=1e-5)


def test_fault_6_squared_and_unsquared_distances_by_hand(circle, east):
    # Distances 0, 1, root 2 and 2; squared 0, 1, 2 and 4. Class 3 is in no row.
    found = circle.search(east, 4)
    plain = np.exp(-np.array([0, 1, np.sqrt(2), 2]))
    squared = np.exp(-np.array([0.0, 1, 2, 4]))
    for method, raw in ((Distance(4), plain), (Distance(4, squared=True), squared)):
        np.testing.assert_allclose(method.weights(found)[0], raw / raw.sum(), atol=1e-5)
        w = raw / raw.sum()
        np.testing.assert_allclose(method.votes(found)[0], [w[0], w[1] + w[2], w[3], 0], atol=1e-5)


def test_fault_6_squared_distances_at_temperature_one_hardly_tell_neighbours_apart(make_blobs):
    blobs = make_blobs(spread=0.1)  # neighbours as close as in a trained embedding
    neighbours = blobs.bank().search(blobs.queries, K)
    squared = Distance(K, 1.0, squared=True).weights(neighbours)
    fitted = Distance(K, 0.1).weights(neighbours)
    assert (squared - 1 / K).abs().max() < 0.02
    assert (fitted - 1 / K).abs().max() > 0.1


def test_distance_defaults_to_what_its_name_says():
    assert Distance(3).squared is False


@pytest.mark.parametrize("name", METHODS)
def test_rows_sum_to_one_with_full_support(neighbours, methods, name):
    probs = predict(methods[name], neighbours)
    assert probs.dtype == np.float64 and probs.shape == (29, 5)
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-12)
    assert probs.min() > 0
    weights = methods[name].weights(neighbours)
    assert weights.shape == (29, methods[name].k)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(29))


@pytest.mark.parametrize("name", METHODS)
def test_queries_do_not_see_each_other(neighbours, methods, name):
    order = torch.randperm(29, generator=torch.Generator().manual_seed(2))
    whole = predict(methods[name], neighbours)
    mixed = predict(methods[name], neighbours.of_queries(order))
    np.testing.assert_allclose(mixed, whole[order], atol=1e-6)
    assert predict(methods[name], neighbours.of_queries(slice(0, 0))).shape == (0, 5)


@pytest.mark.parametrize("name", METHODS)
def test_renaming_the_labels_renames_the_probabilities(bank, blobs, methods, name):
    order = np.array([3, 0, 4, 1, 2])
    renamed = bank.relabelled(order[blobs.labels]).search(blobs.queries, K)
    plain = predict(methods[name], bank.search(blobs.queries, K))
    np.testing.assert_allclose(predict(methods[name], renamed)[:, order], plain, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_deeper_search_does_not_change_a_method(bank, blobs, methods, name):
    deep = predict(methods[name], bank.search(blobs.queries, 53))
    np.testing.assert_allclose(deep, predict(methods[name], bank.search(blobs.queries, K)))


def test_fault_3_one_floor_for_all_methods(circle, east):
    # A query among classes 0 and 1 whose true class is 3, which nobody votes for.
    found = circle.search(east, 2)
    plain = (Uniform(2), Distance(2), KEnsemble(Uniform(2), (1, 2)), AdaptiveK(Distance(2)))
    losses = [negative_log_likelihood(predict(each, found), np.array([3])) for each in plain]
    assert losses == pytest.approx([-np.log(SUPPORT_FLOOR / 4)] * 4)
    config = AttentionConfig(
        situation=(), denoise=False, prototype_gate=False, floor=False, query_temperature=False
    )
    learned = Attention(2, NeighbourAttention(config, dim=2, n_classes=4))
    loss = negative_log_likelihood(predict(learned, found), np.array([3]))
    assert loss == pytest.approx(losses[0], rel=1e-5)


def test_fault_3_a_calibrated_floor_takes_the_place_of_the_common_one(circle, east):
    probs = predict(Uniform(2), circle.search(east, 2), calibration=Calibration(0.2, 1.0))
    np.testing.assert_allclose(probs, [[0.45, 0.45, 0.05, 0.05]], atol=1e-6)


def test_fault_10_one_search_serves_every_k_and_wrapper(bank, blobs, methods, monkeypatch):
    _ = bank.own_neighbours  # the bank's own neighbours are searched once for all queries to come
    calls, search = [], bank.index.search

    def counted(queries, k):
        calls.append((len(queries), k))
        return search(queries, k)

    monkeypatch.setattr(bank.index, "search", counted)
    found = bank.search(blobs.queries, 53)
    for method in methods.values():
        predict(method, found)
    for k in (1, 3, 5, 11, 23, 53):
        for kind in ("uniform", "distance", "attention", "adaptive k"):
            predict(at_k(methods[kind], k), found)
    assert calls == [(29, 53)]


@pytest.mark.parametrize("kind", ["uniform", "distance", "attention"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_fault_10_a_cut_search_equals_a_search_at_that_k(bank, blobs, methods, kind, k):
    cut = predict(at_k(methods[kind], k), bank.search(blobs.queries, 53))
    fresh = predict(at_k(methods[kind], k), bank.search(blobs.queries, k))
    np.testing.assert_allclose(cut, fresh, atol=1e-6)


def test_fault_11_votes_are_never_divided_by_neighbours_that_are_not_there(neighbours):
    with pytest.raises(ValueError, match="k must be at most the 11 neighbours searched, got k=20"):
        predict(Uniform(20), neighbours)
    with pytest.raises(ValueError, match="k must be at most the 11 neighbours searched, got k=20"):
        predict(KEnsemble(Uniform(5)), neighbours)


def test_a_k_ensemble_is_the_mean_of_its_votes(neighbours, methods):
    for kind in ("uniform", "distance", "attention"):
        method = methods[kind]
        each = [at_k(method, k).votes(neighbours) for k in (3, 7, K)]
        together = KEnsemble(method, (3, 7, K))
        torch.testing.assert_close(together.votes(neighbours), sum(each) / 3)
        assert (together.k, together.full_support) == (K, method.full_support)


def test_k_ensemble_weights_by_hand(circle, east):
    weights = KEnsemble(Uniform(4), (1, 4)).weights(circle.search(east, 4))
    assert weights.tolist() == [[0.625, 0.125, 0.125, 0.125]]


def test_k_ensemble_weights_make_its_votes(neighbours):
    method = KEnsemble(Distance(K, 0.2), (3, 7, K))
    weights = method.weights(neighbours)
    counted = torch.zeros(29, 5).scatter_add(1, neighbours.labels, weights)
    torch.testing.assert_close(counted, method.votes(neighbours))


def test_fault_17_at_half_the_third_branch_is_out_of_reach(bank, blobs):
    # Temperatures from nearly one neighbour to nearly all of them, at the published k of 50.
    found = bank.search(blobs.queries, 50)
    chosen = {tau: AdaptiveK(Distance(50, tau)).chosen_k(found) for tau in (0.01, 0.1, 1.0, 5.0)}
    assert set(torch.cat(list(chosen.values())).tolist()) == {15, 30}
    assert set(AdaptiveK(Distance(50, 1.0), 0.4).chosen_k(found).tolist()) == {50}


@pytest.mark.parametrize("k", [2, 3, 5, 10, 16, 20, 50])
def test_fault_17_equal_weights_have_the_largest_entropy_and_ask_everybody(bank, blobs, k):
    # Rounding must not decide on which side of the limit an entropy of exactly 1 falls.
    chosen = AdaptiveK(Uniform(k)).chosen_k(bank.search(blobs.queries, k))
    assert chosen.tolist() == [k] * 29


def test_fault_17_adaptive_k_follows_the_entropy_of_the_weights(bank, blobs):
    found, inner = bank.search(blobs.queries, 50), Distance(50, 0.15)
    method = AdaptiveK(inner, 0.4)
    weights = inner.weights(found)
    entropy = -(weights * weights.log()).sum(dim=1) / np.log(50)
    expected = [15 if e < 0.4 else 30 if e < 0.8 else 50 for e in entropy.tolist()]
    chosen = method.chosen_k(found)
    assert chosen.tolist() == expected and len(set(expected)) == 3
    weights, votes = method.weights(found), method.votes(found)
    for row in range(29):
        k, alone = expected[row], found.of_queries(slice(row, row + 1))
        torch.testing.assert_close(weights[row, :k], at_k(inner, k).weights(alone)[0])
        assert weights[row, k:].abs().sum() == 0
        torch.testing.assert_close(votes[row], at_k(inner, k).votes(alone)[0])


def test_prototypes_by_hand(circle, east):
    votes = Prototypes(2.0).votes(circle.search(east, 1))[0].numpy()
    raw = np.exp(2 * circle.view.prototypes.numpy() @ east[0]) * [1, 1, 1, 0]  # no row of class 3
    np.testing.assert_allclose(votes, raw / raw.sum(), rtol=1e-6)


def test_views_are_averaged_as_probabilities(bank, blobs):
    views = [bank.search(blobs.queries, K), bank.search(blobs.queries[::-1].copy(), K)]
    each = [predict(Distance(K, 0.2), view) for view in views]
    np.testing.assert_allclose(predict_views(Distance(K, 0.2), views), (each[0] + each[1]) / 2)
    with pytest.raises(ValueError, match="views must hold at least one view, got none"):
        predict_views(Uniform(K), [])


def test_another_k_changes_the_k_alone(learned):
    assert at_k(Distance(K, 0.3, squared=True), 3) == Distance(3, 0.3, squared=True)
    assert at_k(learned, 3).module is learned.module
    assert at_k(AdaptiveK(Uniform(K), 0.3), 5) == AdaptiveK(Uniform(5), 0.3)
    with pytest.raises(ValueError, match=r"method must have one k of its own, .* \(3, 5\)"):
        at_k(KEnsemble(Uniform(K), (3, 5)), 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Distance(3, 0.0), "temperature must be above 0, got temperature=0.0"),
        (lambda: AdaptiveK(Uniform(3), 0.0), "threshold must be above 0 and at most 1"),
        (lambda: KEnsemble(Uniform(3), ()), r"ks must hold at least one k, got ks=\(\)"),
        (
            lambda: KEnsemble(Uniform(3), (3, 5), (Uniform(3), Uniform(4))),
            r"fitted must hold one method for each of ks=\(3, 5\), got \[3, 4\]",
        ),
        (lambda: replace(Distance(3), temperature=-1.0), "temperature must be above 0, got .*-1"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_k_ensemble_may_hold_a_method_fitted_for_each_k(circle, east):
    found = circle.search(east, 4)
    members = (Distance(1, 0.5), Distance(4, 0.1))
    together = KEnsemble(members[0], (1, 4), members)
    expected = (members[0].votes(found) + members[1].votes(found)) / 2
    torch.testing.assert_close(together.votes(found), expected)
    assert not torch.allclose(expected, KEnsemble(members[0], (1, 4)).votes(found))
    torch.testing.assert_close(together.weights(found).sum(dim=1), torch.ones(len(found.ids)))
