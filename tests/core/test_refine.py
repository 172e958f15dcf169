"""Refinement: fitted outside of the fold that judges, no step where none helps, tied, seeded."""

import numpy as np
import pytest
import torch

from attnknn.core import refine
from attnknn.core.prior import PriorNetwork, evidence_of, shipped_prior, spoken
from attnknn.core.refine import committee, learn, refine_prior

B = 199
SHORT = (0, 1, 2, 4)


@pytest.fixture(scope="module")
def case():
    """What 199 queries see in a clean memory, and their right labels."""
    from tests.conftest import make_blobs

    blobs = make_blobs(seed=1, n_rows=211, n_queries=B, spread=0.3, n_blobs=13)
    found = blobs.bank().search(blobs.queries, 11)
    return found, evidence_of(found), torch.from_numpy(blobs.query_labels)


def half_wrong(labels, seed=2):
    """Return labels of which half were drawn anew: the prior is too sure of all of them."""
    rng = np.random.default_rng(seed)
    drawn = torch.from_numpy(rng.integers(5, size=len(labels)))
    return torch.where(torch.from_numpy(rng.random(len(labels)) < 0.5), drawn, labels)


def numbers(network):
    return torch.cat([value.detach().flatten() for value in network.parameters()])


def moved(refined, prior):
    return (numbers(refined.network) - numbers(committee(prior, refine.MEMBERS))).abs().mean()


def test_refinement_helps_where_the_prior_is_too_sure(case):
    _, seen, right = case
    prior, given = shipped_prior(), half_wrong(right)
    refined = refine_prior(prior, seen, given, lengths=SHORT)
    assert refined.n_epochs > 0 and list(refined.losses)[:2] == [0, 1]
    assert refined.losses[refined.n_epochs] < 0.9 * refined.losses[0]
    # On other draws of the labels too.
    new = half_wrong(right, seed=3)[:, None]
    before, after = (-float(logs.gather(1, new).mean())
                     for logs in (spoken(prior, seen), refined.log_probs))  # fmt: skip
    assert after < 0.9 * before


def test_no_step_is_made_where_none_helps(case):
    _, seen, right = case
    prior = shipped_prior()
    # Labels drawn from just what the prior says: nothing it might learn is true.
    cumulated = spoken(prior, seen).exp().cumsum(dim=1).numpy()
    drawn = [
        torch.from_numpy((cumulated < np.random.default_rng(s).random((B, 1))).sum(axis=1))
        for s in range(4)
    ]
    for labels in drawn[:3]:
        refined = refine_prior(prior, seen, labels.clamp(max=4), lengths=SHORT)
        assert 0 in refined.losses and len(refined.losses) > 1
        assert refined.n_epochs == 0 and refined.network is prior
    few = refine_prior(prior, seen.of_queries(slice(0, 23)), half_wrong(right)[:23])
    none = refine_prior(prior, seen, half_wrong(right), lengths=(0,))
    for refined in (few, none):
        assert refined.network is prior and list(refined.losses) == [0]
    torch.testing.assert_close(none.log_probs, spoken(prior, seen))


def test_members_are_fitted_outside_of_the_fold_that_judges_them(case, monkeypatch):
    _, seen, right = case
    given = half_wrong(right)
    place = {row.numpy().tobytes(): i for i, row in enumerate(seen.context)}
    assert len(place) == B
    fitted, forward = [set() for _ in range(refine.MEMBERS)], PriorNetwork.forward

    def spy(self, part):
        if torch.is_grad_enabled():
            for member, rows in enumerate(part.context):
                fitted[member] |= {place[row.numpy().tobytes()] for row in rows}
        return forward(self, part)

    start = spoken(shipped_prior(), seen)
    monkeypatch.setattr(PriorNetwork, "forward", spy)
    refined = refine_prior(shipped_prior(), seen, given, lengths=SHORT, start=start)
    monkeypatch.undo()
    left_out = [set(range(B)) - rows for rows in fitted]
    assert sorted(i for rows in left_out for i in rows) == list(range(B))  # each by one member
    for member, rows in enumerate(left_out):
        rows = torch.tensor(sorted(rows))
        counts = given[rows].bincount(minlength=5)
        assert (counts - given.bincount(minlength=5) / 4).abs().max() < 2  # every class in each
        said = refined.network.member(member)(seen.of_queries(rows)).log_probs[0]
        torch.testing.assert_close(refined.log_probs[rows], said, atol=1e-5, rtol=1e-4)


def test_the_tie_holds(case, monkeypatch):
    _, seen, right = case
    given, distances = half_wrong(right), []
    monkeypatch.setattr(refine, "GIVE_UP", np.inf)
    monkeypatch.setattr(refine, "WORTH", -np.inf)
    for tie in (0.0, 1e6):
        monkeypatch.setattr(refine, "TIE", tie)
        refined = refine_prior(shipped_prior(), seen, given, lengths=(0, 8))
        assert refined.n_epochs == 8
        distances.append(float(moved(refined, shipped_prior())))
    # A step of Adam has the length of its rate however strong the tie: not nothing.
    assert distances[1] < 0.5 * distances[0]
    assert distances[1] < 2 * refine.RATE


def test_losses_are_weighted_and_forward_corrected_by_hand(case):
    prior, two = shipped_prior(), case[1].of_queries(slice(0, 2))
    start = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).log()
    labels = torch.tensor([0, 1])

    def first_loss(**options):
        return refine_prior(prior, two, labels, start=start, lengths=(0,), **options).losses[0]

    assert first_loss() == pytest.approx(-np.log([0.5, 0.6]).mean())
    weights = torch.tensor([1.0, 3.0])
    assert first_loss(weights=weights) == pytest.approx(-np.log([0.5, 0.6]) @ [0.25, 0.75])
    chances = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.7, 0.3], [0.2, 0.0, 0.8]])
    expected = -np.log([0.5 * 0.6 + 0.2 * 0.2, 0.1 * 0.4 + 0.6 * 0.7])
    assert first_loss(transition=chances) == pytest.approx(expected.mean(), abs=1e-6)


def confidence(network, seen):
    with torch.no_grad():
        return float(network(seen).log_probs.exp().amax(dim=-1).mean())


def test_weights_say_which_queries_teach(case, monkeypatch):
    _, seen, right = case
    monkeypatch.setattr(refine, "WORTH", -np.inf)
    given, is_first = half_wrong(right), torch.arange(B) < B // 2
    given = torch.where(is_first, right, given)
    sure, unsure = (
        refine_prior(shipped_prior(), seen, given, lengths=(0, 4), weights=weights).network
        for weights in (is_first + 1e-6, ~is_first + 1e-6)
    )
    assert confidence(sure, seen) > confidence(unsure, seen) + 0.1
    scaled = refine_prior(
        shipped_prior(), seen, given, lengths=(0, 4), weights=8 * (is_first + 1e-6)
    )
    torch.testing.assert_close(numbers(scaled.network), numbers(sure), atol=1e-4, rtol=0)


def test_a_transition_keeps_wrong_labels_from_teaching_doubt(case, monkeypatch):
    _, seen, right = case
    monkeypatch.setattr(refine, "WORTH", -np.inf)
    half = 0.5 * torch.eye(5) + 0.1  # half of the labels drawn anew, their own class too
    plain, corrected = (
        refine_prior(shipped_prior(), seen, half_wrong(right), lengths=(0, 4), transition=each)
        for each in (None, half)
    )
    assert confidence(corrected.network, seen) > confidence(plain.network, seen) + 0.1


def test_a_tick_ends_it(case):
    _, seen, right = case
    ticks = []

    def tick():
        ticks.append(1)
        return len(ticks) < 2

    refined = refine_prior(shipped_prior(), seen, half_wrong(right), tick=tick)
    assert len(ticks) == 2 and list(refined.losses) == [0, 1, 2]


def test_seeds_repeat_and_the_global_generators_are_left_alone(case):
    _, seen, right = case
    given, prior = half_wrong(right), shipped_prior()
    before = numbers(prior).clone()
    torch.manual_seed(11)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one = refine_prior(prior, seen, given, lengths=(0, 1, 2), seed=5)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    torch.manual_seed(12)
    two, other = (refine_prior(prior, seen, given, lengths=(0, 1, 2), seed=s) for s in (5, 6))
    assert one.n_epochs > 0 and one.losses == two.losses != other.losses
    assert torch.equal(numbers(one.network), numbers(two.network))
    assert torch.equal(numbers(prior), before)  # what is shipped is never changed


def test_learning_gives_out_of_fold_probabilities_and_a_last_temperature(case):
    found, seen, right = case
    given = half_wrong(right).numpy()
    as_it_is = learn(found, given, label_noise=0.0, refine="none")
    assert as_it_is.n_epochs == 0 and as_it_is.wrong.transition is None
    assert as_it_is.attention.last_temperature == 1
    torch.testing.assert_close(
        torch.from_numpy(as_it_is.probs).float(), spoken(shipped_prior(), seen).exp()
    )
    learned = learn(found, given, label_noise=0.0)
    np.testing.assert_allclose(learned.probs.sum(axis=1), 1)
    own = learned.probs[np.arange(B), given]
    assert -np.log(own).mean() <= min(learned.losses.values()) + 1e-4
    assert learned.at_k(7).method.k == 7


def test_known_and_found_wrong_labels_shape_the_fit(case):
    found, _, right = case
    rng, right = np.random.default_rng(4), right.numpy()
    given = np.where(rng.random(B) < 0.3, (right + rng.integers(1, 5, B)) % 5, right)
    unasked, known, none = (
        learn(found, given, label_noise=share, refine="none").wrong for share in (None, 0.2, 0.0)
    )
    assert unasked.share == pytest.approx(0.3, abs=0.1)
    assert known.share == 0.2 and known.transition[0].tolist() == pytest.approx([0.8] + [0.05] * 4)
    assert none.share == 0 and none.transition is None
