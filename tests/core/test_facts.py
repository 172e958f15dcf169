"""Facts of a memory: the expert against other implementations, nothing with a unit, no leak."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from attnknn.core import facts
from attnknn.core.bank import MemoryBank
from attnknn.core.facts import axes_of, fit_expert
from tests.conftest import unit

N, D, C = 47, 7, 3
COPIES = np.resize([1.0, 3.0, 2.0, 1.0, 5.0], N).astype(np.float32)
SHARES = np.resize([1.0, 0.25, 0.5], N).astype(np.float32)


@pytest.fixture
def memory():
    """Rows off the origin, whose labels depend on them; classes of unequal size."""
    rng = np.random.default_rng(3)
    rows = unit(rng.normal(size=(N, D)) + 0.7)
    scores = 3 * rows @ rng.normal(size=(D, C)) + rng.gumbel(size=(N, C)) + [0.8, 0, -0.5]
    return torch.from_numpy(rows), torch.from_numpy(scores.argmax(axis=1))


def expert_of(rows, labels, weights=None):
    weights = None if weights is None else torch.from_numpy(weights)
    return fit_expert(axes_of(rows, weights), rows, labels, C, weights)


def ridge(expert, rows, labels, weights=None):
    """Return scikit-learn's regression on one-hot labels with the expert's own strength."""
    strength = float((1 / expert.shrunk - expert.axes.energies).median())
    fitted = Ridge(alpha=strength).fit(rows.double(), np.eye(C)[labels], sample_weight=weights)
    return lambda new: (
        torch.from_numpy(expert.sharpness * fitted.predict(new.double())).log_softmax(1).float()
    )


@pytest.mark.parametrize("weights", [None, COPIES, SHARES], ids=["alike", "copies", "shares"])
def test_the_expert_is_the_ridge_regression_of_scikit_learn(memory, weights):
    rows, labels = memory
    new = torch.from_numpy(unit(np.random.default_rng(4).normal(size=(11, D))))
    expert = expert_of(rows, labels, weights)
    assert expert.sharpness > 1  # a flat expert would agree with anything
    expected = ridge(expert, rows, labels, weights)(new)
    torch.testing.assert_close(expert.log_probs(new), expected, atol=1e-3, rtol=1e-3)


def test_a_row_of_weight_three_is_three_rows(memory):
    rows, labels = memory
    times = torch.from_numpy(COPIES).long()
    one = expert_of(rows, labels, COPIES)
    many = expert_of(rows.repeat_interleave(times, 0), labels.repeat_interleave(times))
    assert one.sharpness == many.sharpness
    assert one.nll == pytest.approx(many.nll, abs=1e-4)
    assert one.hit_rate == pytest.approx(many.hit_rate, abs=1e-6)
    torch.testing.assert_close(one.log_probs(rows), many.log_probs(rows), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("weights", [None, COPIES, SHARES], ids=["alike", "copies", "shares"])
def test_leave_one_out_is_what_refitting_without_the_row_gives(memory, weights):
    rows, labels = memory
    expert = expert_of(rows, labels, weights)
    given = np.ones(N, np.float32) if weights is None else weights
    found = expert.left_out(rows, labels, torch.from_numpy(given))
    for row in range(N):
        left = given.copy()
        left[row] -= min(left[row], 1)  # of copies one goes, of a lighter row all
        expected = ridge(expert, rows, labels, left)(rows[row : row + 1])
        torch.testing.assert_close(found[row], expected[0], atol=2e-3, rtol=2e-3)


def test_leave_one_out_chooses_strength_and_sharpness(memory):
    rows, labels = memory
    expert, ones = expert_of(rows, labels), torch.ones(N)
    logs = expert.left_out(rows, labels, ones)
    own = logs.gather(1, labels[:, None])
    assert expert.nll == pytest.approx(-float(own.mean()), abs=1e-5)
    assert expert.hit_rate == pytest.approx(float((logs.argmax(1) == labels).float().mean()))
    # Judged by rows that are seen, labels that mean nothing would look learnable.
    wide = torch.from_numpy(unit(np.random.default_rng(5).normal(size=(N, 41))))
    drawn = torch.from_numpy(np.random.default_rng(6).integers(C, size=N))
    shares = drawn.bincount() / N
    assert expert_of(wide, drawn).nll > 0.95 * float(torch.special.entr(shares).sum())


def test_a_rows_own_label_does_not_reach_its_left_out_scores(memory, monkeypatch):
    # One strength and sharpness, which all rows choose together and one label might tip.
    monkeypatch.setattr(facts, "STRENGTHS", (0.3,))
    monkeypatch.setattr(facts, "SHARPNESSES", (4.0,))
    rows, labels = memory
    for row in (0, 13, 29):
        other = labels.clone()
        other[row] = (labels[row] + 1) % C
        experts = [expert_of(rows, each) for each in (labels, other)]
        one, two = (
            expert.left_out(rows[[row]], each[[row]], torch.ones(1))
            for expert, each in zip(experts, (labels, other), strict=True)
        )
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
        seen = [expert.log_probs(rows[[row]]) for expert in experts]
        assert (seen[0] - seen[1]).abs().max() > 0.05  # what would come back without the guard


def facts_under(rows, labels):
    return MemoryBank(rows, labels, n_classes=5).view.facts


@pytest.fixture
def ambiguous(make_blobs):
    """211 rows, a fifth of them with wrong labels."""
    return make_blobs(seed=7, n_rows=211, spread=0.4).with_noise(0.2, seed=8)


def test_facts_have_no_unit_and_no_width(ambiguous):
    turn = np.linalg.qr(np.random.default_rng(9).normal(size=(13, 6)))[0].T  # into 13 axes
    one = facts_under(ambiguous.rows, ambiguous.labels)
    two = facts_under(unit(ambiguous.rows @ turn), ambiguous.labels)
    torch.testing.assert_close(one.columns, two.columns, atol=2e-3, rtol=0)
    assert one.prototype_scale == two.prototype_scale
    assert one.distance == pytest.approx(two.distance, rel=1e-3)


def test_renaming_the_classes_renames_nothing_but_the_shares(ambiguous):
    order = np.array([3, 0, 4, 1, 2])  # class c becomes order[c]
    one = facts_under(ambiguous.rows, ambiguous.labels)
    two = facts_under(ambiguous.rows, order[ambiguous.labels])
    assert one.shares.unique().numel() > 3
    torch.testing.assert_close(one.columns, two.columns, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.shares, two.shares[order])


def test_wrong_labels_show_in_the_facts(make_blobs):
    clean = make_blobs(seed=7, n_rows=211, spread=0.2)
    noisy = clean.with_noise(0.4, seed=8)
    one, two = (facts_under(each.rows, each.labels).columns for each in (clean, noisy))
    assert (two[:3] > 1.5 * one[:3]).all()  # left-out NLL of votes, prototypes and expert
    assert (two[3:6] < one[3:6] - 0.2).all()  # their hit rates
