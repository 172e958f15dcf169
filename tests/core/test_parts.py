"""Score parts: each by hand, gradients to the query, distances near the limit of float32."""

import math

import numpy as np
import pytest
import torch

from attnknn.config import SITUATION_FEATURES, AttentionConfig
from attnknn.core.parts import (
    SHIFT_PENALTY,
    SITUATION_COLUMNS,
    DistanceBias,
    Evidence,
    LabelBias,
    LowRankQueryKey,
    PrototypePosterior,
    PrototypeScore,
    QueryKey,
    SelfAttention,
    Similarity,
    Situation,
    ValuePath,
    euclidean_distances,
    score_parts,
)

SIZES = {"dim": 6, "n_classes": 5}


def plain_posterior(scale=10.0):
    """Return a prototype posterior of a given sharpness."""
    posterior = PrototypePosterior(shifted=False, dim=2, n_classes=4)
    posterior.log_scale.data.fill_(math.log(scale))
    return posterior


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_distances_of_unit_vectors_by_hand():
    cosines = torch.tensor([0.5, 0.0, -1.0])
    torch.testing.assert_close(euclidean_distances(cosines), torch.tensor([1, math.sqrt(2), 2]))


def test_a_cosine_rounded_above_one_gives_no_nan_and_no_infinite_gradient():
    cosines = torch.tensor([1.0000002, 1.0, 0.9999999], requires_grad=True)
    distances = euclidean_distances(cosines)
    assert distances.max() < 1e-3 and distances.min() >= 0
    distances.sum().backward()
    assert torch.isfinite(cosines.grad).all()


def test_the_evidence_by_hand(circle, east):
    evidence = Evidence(circle.search(east, 3), posterior=plain_posterior(2.0))
    assert evidence.label_shares.tolist() == [[pytest.approx(1 / 3), pytest.approx(2 / 3), 0, 0]]
    torch.testing.assert_close(
        evidence.of_own_label(evidence.label_shares), torch.tensor([[1 / 3, 2 / 3, 2 / 3]])
    )
    prototypes = circle.view.prototypes.numpy()
    raw = np.exp(2 * prototypes @ east[0]) * [1, 1, 1, 0]  # the bank has no row of class 3
    expected = raw / raw.sum()
    posterior = evidence.prototype_posterior[0].detach()
    np.testing.assert_allclose(posterior, expected, rtol=1e-6)
    torch.testing.assert_close(
        evidence.histogram_shares[0], circle.view.histograms[[0, 1, 2]].mean(dim=0)
    )


def test_situation_columns_by_hand(circle, east):
    evidence = Evidence(circle.search(east, 3), posterior=plain_posterior())
    columns = {name: SITUATION_COLUMNS[name](evidence).expand(1, 3) for name in SITUATION_FEATURES}

    def row(name):
        return columns[name][0].tolist()

    assert row("gap") == pytest.approx([0, -0.5, -1], abs=1e-6)
    assert row("nearest") == pytest.approx([1, 1, 1])
    assert row("rank") == pytest.approx([0, 1 / 3, 2 / 3])
    assert row("trust") == circle.view.trust[:3].tolist()
    assert row("label_share") == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert row("noise") == pytest.approx([circle.view.mean_trust] * 3)
    posterior = evidence.prototype_posterior[0].tolist()
    assert row("prototype") == pytest.approx([posterior[0], posterior[1], posterior[1]])
    shares = evidence.histogram_shares[0].tolist()
    assert row("histogram_share") == pytest.approx([shares[0], shares[1], shares[1]])


def test_there_is_a_column_for_every_feature_that_can_be_asked_for():
    assert set(SITUATION_COLUMNS) == set(SITUATION_FEATURES)


def test_similarity_heads_start_from_broad_to_sharp(circle, east):
    part = Similarity(AttentionConfig(heads=4), **SIZES)
    scores = part(Evidence(circle.search(east, 2)))
    expected = torch.tensor([[[5.0, 10, 20, 40], [2.5, 5, 10, 20]]])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=0)


def test_situation_starts_by_saying_nothing(neighbours):
    scores = Situation(AttentionConfig(), **SIZES)(
        Evidence(neighbours, posterior=plain_posterior())
    )
    assert scores.shape == (29, 11, 4) and scores.abs().max() == 0


def test_query_key_equals_a_slow_loop(neighbours):
    part = QueryKey(AttentionConfig(heads=3, temperature_start=0.5), **SIZES)
    scores = part(Evidence(neighbours))
    b, k, h = 7, 4, 2
    query = part.query(neighbours.queries[b])[2 * h : 2 * h + 2]
    key = part.key(neighbours.keys[b, k])[2 * h : 2 * h + 2]
    expected = (query @ key) / math.sqrt(2) / 0.5
    torch.testing.assert_close(scores[b, k, h], expected)


def test_temperatures_stay_inside_their_bounds():
    part = QueryKey(AttentionConfig(heads=3, temperature_low=0.1, temperature_high=2.0), **SIZES)
    part.log_temperature.data = torch.tensor([-9.0, 0.0, 9.0])
    torch.testing.assert_close(part.temperatures(), torch.tensor([0.1, 1.0, 2.0]))


def test_low_rank_equals_its_definition_and_starts_at_zero(neighbours):
    part = LowRankQueryKey(AttentionConfig(qk_rank=2), **SIZES)
    evidence = Evidence(neighbours)
    assert part(evidence).abs().max() == 0
    torch.nn.init.normal_(part.key.weight)
    expected = part.query(neighbours.queries)[7] @ part.key(neighbours.keys[7, 4])
    torch.testing.assert_close(part(evidence)[7, 4, 0], expected)


@pytest.mark.parametrize("form", ["deep", "shallow"])
def test_distance_bias_reads_unsquared_distances(neighbours, form):
    part = DistanceBias(AttentionConfig(heads=3, distance_bias=form), **SIZES)
    distance = torch.linalg.norm(neighbours.queries[7] - neighbours.keys[7, 4])
    torch.testing.assert_close(
        part(Evidence(neighbours))[7, 4], part.mlp(distance[None]), rtol=1e-4, atol=1e-5
    )


def test_fault_2_the_published_label_bias_changes_no_weight(neighbours):
    part = LabelBias(AttentionConfig(label_bias="neighbourhood"), **SIZES)
    scores = part(Evidence(neighbours))
    assert scores.abs().max() > 0
    weights = scores.softmax(dim=1)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 11))


def test_fault_2_the_label_bias_of_each_neighbour_does(neighbours):
    part = LabelBias(AttentionConfig(label_bias="neighbour"), **SIZES)
    weights = part(Evidence(neighbours)).softmax(dim=1)
    mixed = (neighbours.labels != neighbours.labels[:, :1]).any(dim=1)
    assert mixed.any()
    assert (weights[mixed].std(dim=1) > 1e-4).all()
    # Neighbours with the same label are told apart by nothing here.
    same = neighbours.labels[:, 0] == neighbours.labels[:, 1]
    torch.testing.assert_close(weights[same, 0], weights[same, 1])


@pytest.mark.parametrize("k", [3, 11])  # fewer and more neighbours than classes
def test_the_label_bias_is_an_mlp_of_the_weighted_one_hot_label(neighbours, k):
    part, found = LabelBias(AttentionConfig(label_bias="neighbour"), **SIZES), neighbours.nearest(k)
    scores = part(Evidence(found))
    shares = torch.stack([(found.labels == c).float().mean(dim=1) for c in range(5)], dim=1)
    for query, place in ((0, 0), (7, 1), (11, k - 1)):
        label = found.labels[query, place]
        given = torch.zeros(5)
        given[label] = shares[query, label]
        torch.testing.assert_close(scores[query, place], part.mlp(given))


def test_prototype_score_is_a_cosine_times_the_scale(neighbours):
    part = PrototypeScore(AttentionConfig(), **SIZES)
    part.scale.data = torch.tensor(3.0)
    own = part.prototypes[neighbours.labels[7, 4]]
    cosine = torch.cosine_similarity(own, neighbours.keys[7, 4], dim=0)
    torch.testing.assert_close(part(Evidence(neighbours))[7, 4, 0], 3 * cosine)


def test_self_attention_keeps_shape_and_follows_the_order(neighbours):
    part = SelfAttention(AttentionConfig(heads=3), dim=6).eval()
    keys = neighbours.keys
    out = part(keys)
    assert out.shape == keys.shape
    flipped = part(keys.flip(1)).flip(1)
    torch.testing.assert_close(out, flipped, rtol=1e-4, atol=1e-5)


def test_self_attention_is_that_of_torch(neighbours):
    part = SelfAttention(AttentionConfig(heads=3), dim=6)
    keys = neighbours.keys
    mixed = part.attention(keys, keys, keys, need_weights=False)[0]
    torch.testing.assert_close(part(keys), part.norm(keys + mixed), rtol=1e-4, atol=1e-5)


def test_value_path_with_all_weight_on_one_neighbour(neighbours):
    part = ValuePath(AttentionConfig(heads=3), dim=6)
    weights = torch.zeros(29, 11, 3)
    weights[:, 4] = 1
    expected = part.out(part.value(neighbours.keys[:, 4]))
    torch.testing.assert_close(part(weights, neighbours.keys), expected)


def test_joint_queries_get_a_gradient_through_similarity_and_posterior(neighbours):
    query = neighbours.queries.clone().requires_grad_()
    evidence = Evidence(neighbours, query=query, posterior=plain_posterior())
    torch.testing.assert_close(evidence.similarity, neighbours.scores, rtol=0, atol=1e-6)
    for piece in (evidence.similarity[:, 3], evidence.prototype_posterior[:, 2]):
        (gradient,) = torch.autograd.grad(piece.sum(), query, retain_graph=True)
        assert (gradient.abs().sum(dim=1) > 0).all()


def test_joint_queries_are_what_the_similarity_is_measured_from(neighbours):
    # The embedder has moved on since the search: old scores must play no part.
    moved = neighbours.queries.flip(0)
    evidence = Evidence(neighbours, query=moved)
    expected = torch.einsum("bd,bkd->bk", moved, neighbours.keys)
    torch.testing.assert_close(evidence.similarity, expected)


def test_only_parts_that_are_on_are_built():
    off = AttentionConfig(similarity=False, situation=())
    assert len(score_parts(off, **SIZES)) == 0
    assert list(score_parts(AttentionConfig(), **SIZES)) == ["similarity", "situation"]
    full = AttentionConfig(heads=3, qk="full", distance_bias="deep", label_bias="neighbour")
    assert list(score_parts(full, **SIZES))[2:] == ["query_key", "distance_bias", "label_bias"]


def test_a_shift_starts_at_nothing_and_then_moves_the_posterior(circle, east):
    found, query = circle.search(east, 3), torch.from_numpy(east)
    shifted = PrototypePosterior(shifted=True, dim=2, n_classes=4)
    with torch.no_grad():
        start = shifted(found, query)
        torch.testing.assert_close(start, plain_posterior()(found, query))
        shifted.shift.weight[1, 0] = 0.5  # the query is (1, 0)
        shifted.shift.bias[1] = 0.25
        moved = shifted(found, query)
    odds = moved[0, 1] / moved[0, 0] / (start[0, 1] / start[0, 0])
    assert odds.item() == pytest.approx(math.exp(0.75), rel=1e-5)
    assert moved[0, 3] == 0  # a class without rows stays impossible
    assert shifted.penalty().item() == pytest.approx(SHIFT_PENALTY * 0.25)
    assert plain_posterior().penalty() == 0


def test_evidence_without_a_posterior_says_so(neighbours):
    with pytest.raises(RuntimeError, match="without a prototype posterior"):
        _ = Evidence(neighbours).prototype_posterior
