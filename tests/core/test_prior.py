"""The prior: its equation by another implementation, invariances, committees, its file."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import expit, log_softmax, softmax

from attnknn.core import prior
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import LEAST_SHARE
from attnknn.core.prior import (
    PriorAttention,
    PriorNetwork,
    evidence_in_blocks,
    evidence_of,
    joined,
    read_prior,
    save_prior,
    shipped_prior,
    spoken,
)
from attnknn.core.refine import committee

FLOOR, TRUST = 3, 6  # places among the settings


def lively(members: int = 1, width: int = 7, *, seed: int = 0) -> PriorNetwork:
    """Return members of which every number counts and no two are alike."""
    network, generator = PriorNetwork(members, width), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return network.requires_grad_(False)


@pytest.fixture
def unequal(make_blobs):
    """89 rows of unequal classes, a fifth with wrong labels; 29 queries."""
    return make_blobs(seed=5, n_rows=89, spread=0.5).with_noise(0.2, seed=6)


def test_the_equation_by_another_implementation(unequal):
    found = unequal.bank().search(unequal.queries, 11)
    seen, network = evidence_of(found), lively()
    said = network(seen)
    value = {name: each[0].numpy() for name, each in network.named_parameters()}
    relu = lambda x: np.maximum(x, 0)  # noqa: E731
    for query in (0, 17):
        x, g = seen.neighbour[query].numpy(), seen.context[query].numpy()
        hidden = relu(x @ value["neighbour_in"] + g @ value["context_in"] + value["bias_in"])
        hidden = relu(hidden @ value["hidden"] + value["bias_hidden"])
        scores = hidden @ value["scores"] + x @ value["slope"]  # (K, H)
        weights = softmax(scores, axis=0).mean(axis=1)
        hidden = relu(g @ value["settings_in"] + value["settings_bias"])
        hidden = relu(hidden @ value["settings_hidden"] + value["settings_hidden_bias"])
        raw = (hidden @ value["settings_out"] + value["settings_start"])[0]
        mix, gate, sharpness = expit(raw[0]), expit(raw[1]), np.exp(raw[2])
        floor, share = expit(raw[3]) / 2 + 1e-5, expit(raw[4]) / 2
        labels = np.eye(5)[found.labels[query]]
        vote = weights @ ((1 - mix) * labels + mix * found.histograms[query].numpy())
        told = softmax(sharpness * seen.prototypes[query].numpy())
        p = (1 - gate) * vote + gate * told
        p = (1 - floor - share) * p + floor / 5 + share * seen.shares.numpy()
        logs = np.exp(raw[5]) * np.log(p) + np.log1p(np.exp(raw[6])) * seen.expert[query].numpy()
        expected = log_softmax(logs)
        np.testing.assert_allclose(said.weights[0, query], weights, atol=1e-5)
        np.testing.assert_allclose(said.log_probs[0, query], expected, atol=2e-4)


def test_weights_and_probabilities_sum_to_one(neighbours):
    said = PriorAttention(lively(3))(neighbours)
    assert said.weights.min() > 0
    torch.testing.assert_close(said.weights.sum(dim=1), torch.ones(29))
    torch.testing.assert_close(said.log_probs.exp().sum(dim=1), torch.ones(29))


def test_every_class_keeps_some_probability(make_blobs):
    blobs = make_blobs(spread=0.05)
    network = lively()
    network.settings_start[..., TRUST] = 300.0  # an expert that is believed without a limit
    found = blobs.bank().search(blobs.queries, 11)
    logs = PriorAttention(network)(found).log_probs
    least = np.log(LEAST_SHARE / 5)
    assert logs.min() == pytest.approx(least, abs=0.01)
    torch.testing.assert_close(logs.exp().sum(dim=1), torch.ones(29))


def test_renaming_the_classes_renames_the_probabilities(unequal):
    order = torch.tensor([3, 0, 4, 1, 2])  # class c becomes order[c]
    attention, bank = PriorAttention(lively(2)), unequal.bank()
    renamed = bank.relabelled(order.numpy()[unequal.labels])
    one, two = (attention(each.search(unequal.queries, 11)) for each in (bank, renamed))
    # Classes of one size may tie in a hit rate, where the first by number is the guess.
    torch.testing.assert_close(two.log_probs[:, order], one.log_probs, atol=3e-3, rtol=0)
    torch.testing.assert_close(two.weights, one.weights, atol=1e-3, rtol=0)


def test_a_query_is_answered_alone(unequal):
    found, attention = unequal.bank().search(unequal.queries, 11), PriorAttention(lively(2))
    whole = attention(found).log_probs
    turned = torch.arange(28, -1, -1)
    torch.testing.assert_close(attention(found.of_queries(turned)).log_probs, whole[turned])
    parts = [attention(found.of_queries(slice(s, s + 5))).log_probs for s in range(0, 29, 5)]
    torch.testing.assert_close(torch.cat(parts), whole)
    seen = evidence_in_blocks(found)
    torch.testing.assert_close(spoken(lively(), seen, block=7), spoken(lively(), seen))
    again = joined([seen.of_queries(slice(0, 3)), seen.of_queries(slice(3, 29))])
    assert torch.equal(again.neighbour, seen.neighbour) and torch.equal(again.shares, seen.shares)


def test_equal_members_are_one_and_different_ones_their_mean(neighbours):
    one, several = lively(), lively(3)
    said = PriorAttention(one)(neighbours)
    same = PriorAttention(committee(one, 4).requires_grad_(False))(neighbours)
    torch.testing.assert_close(same.log_probs, said.log_probs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(same.weights, said.weights)
    each = [PriorAttention(several.member(m))(neighbours).log_probs.exp() for m in range(3)]
    together = PriorAttention(several)(neighbours).log_probs.exp()
    torch.testing.assert_close(together, sum(each) / 3)
    assert (each[0] - each[2]).abs().max() > 0.01


def test_a_member_shares_its_numbers_with_the_committee(neighbours):
    several, seen = lively(3), evidence_of(neighbours)
    member = several.member(2)
    torch.testing.assert_close(member(seen).log_probs[0], several(seen).log_probs[2])
    several.settings_start.add_(0.5)
    assert torch.equal(member.settings_start[0], several.settings_start[2])


def test_a_temperature_flattens_what_the_committee_says(neighbours):
    attention = PriorAttention(lively(2))
    plain = attention(neighbours).log_probs
    attention.last_temperature.fill_(2.0)
    expected = (plain / 2).log_softmax(dim=1)
    torch.testing.assert_close(attention(neighbours).log_probs, expected)


def test_contributions_sum_to_the_probability_before_floor_and_expert(neighbours):
    network = lively(3)
    network.settings_out[..., FLOOR:] = 0
    # No floor, no share, power 1, no expert: what is left is the vote and the prototypes.
    network.settings_start[:, :, FLOOR:] = torch.tensor([-40.0, -40.0, 0.0, -40.0])
    attention = PriorAttention(network)
    probs = attention(neighbours).log_probs.exp()
    for name in range(5):
        parts = attention.contributions(neighbours, torch.full((29,), name))
        total = parts.votes.sum(dim=1) + parts.prototypes
        torch.testing.assert_close(total, probs[:, name], atol=3e-5, rtol=0)


def test_a_neighbour_of_weight_two_votes_like_two(neighbours):
    seen, network = evidence_of(neighbours), lively(2)
    double = torch.zeros(29, 11)
    double[:, 4] = np.log(2)
    one = network(replace(seen, log_weights=double))
    twice = [*range(11), 4]
    two = network(
        replace(
            seen,
            neighbour=seen.neighbour[:, twice],
            labels=seen.labels[:, twice],
            histograms=seen.histograms[:, twice],
        )
    )
    torch.testing.assert_close(one.log_probs, two.log_probs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(one.weights[:, :, 4], 2 * two.weights[:, :, 4])


def test_row_weights_reach_the_prior(unequal):
    weights = np.resize([1.0, 4.0, 2.0], 89).astype(np.float32)
    seen = []
    for each in (None, weights):
        bank = MemoryBank(unequal.rows, unequal.labels, n_classes=5, weights=each)
        seen.append(evidence_of(bank.search(unequal.queries, 11)))
    assert seen[0].log_weights is None
    ids = bank.search(unequal.queries, 11).ids.numpy()
    np.testing.assert_allclose(seen[1].log_weights, np.log(weights[ids]), atol=1e-6)
    logs = [spoken(lively(), each) for each in (seen[0], seen[1])]
    assert (logs[0] - logs[1]).abs().max() > 0.05


def test_left_out_rows_of_random_labels_are_not_predicted(make_blobs):
    blobs, n_rows = make_blobs(3, n_rows=499), 499
    labels = np.random.default_rng(4).integers(5, size=n_rows)
    bank = MemoryBank(blobs.rows, labels, n_classes=5)
    found = bank.search(blobs.rows, 11, exclude_ids=np.arange(n_rows))
    guesses = spoken(shipped_prior(), evidence_in_blocks(found)).argmax(dim=1)
    accuracy = (guesses == bank.labels).float().mean()
    assert accuracy < 0.2 + 3 * (0.2 * 0.8 / n_rows) ** 0.5


def test_evidence_of_several_own_rows_is_refused(bank, blobs):
    pairs = torch.arange(58).view(29, 2)
    found = replace(bank.search(blobs.queries, 11), own_ids=pairs)
    with pytest.raises(ValueError, match="own_ids must name one memory row a query, got 2"):
        evidence_of(found)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_shipped_prior_knows_more_than_each_thing_it_looks_at(make_blobs, share):
    right = make_blobs(seed=9, n_rows=397, n_queries=199, spread=0.3, n_blobs=13)
    bank = right.with_noise(share, seed=10).bank()
    seen = evidence_of(bank.search(right.queries, 23))
    targets = torch.from_numpy(right.query_labels)[:, None]
    votes = torch.nn.functional.one_hot(seen.labels, 5).float().sum(dim=1)
    rivals = {
        "votes": ((votes + 0.2) / 24).log(),
        "prototypes": seen.prototypes,
        "expert": seen.expert,
    }
    nll = lambda logs: -float(logs.gather(1, targets).mean())  # noqa: E731
    ours = nll(spoken(shipped_prior(), seen))
    assert all(ours < nll(logs.log_softmax(dim=1)) for logs in rivals.values())


def test_a_prior_is_read_as_it_was_written(tmp_path, neighbours):
    network = lively(3)
    again = read_prior(save_prior(network, tmp_path / "prior.safetensors", {"tables": "5"}))
    seen = evidence_of(neighbours)
    assert torch.equal(again(seen).log_probs, network(seen).log_probs)
    assert not any(value.requires_grad for value in again.parameters())


def test_a_damaged_or_foreign_prior_is_refused(tmp_path, monkeypatch):
    path = save_prior(lively(), tmp_path / "prior.safetensors", {})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="path must hold the numbers it was written with"):
        read_prior(path)
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="path must be a whole prior file"):
        read_prior(path)
    save_file({"bias_in": torch.zeros(1, 1, 7)}, path)
    with pytest.raises(ValueError, match=r"path must hold a prior of version \d+, got None"):
        read_prior(path)
    path.write_bytes(whole)
    monkeypatch.setattr(prior, "PRIOR_VERSION", prior.PRIOR_VERSION + 1)
    with pytest.raises(ValueError, match=r"path must hold a prior of version \d+, got \d+"):
        read_prior(path)
