"""Prediction sets and abstentions: by hand, coverage guarantees, bad input."""

import numpy as np
import pytest
from scipy.special import softmax

from attnknn.evaluate import abstain


def synthetic(seed: int, n_rows: int):
    """Return logits of 7 classes and labels drawn from their softmax."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n_rows, 7))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.uniform(size=(n_rows, 1))).sum(axis=1)
    return logits, labels


def test_conformal_threshold_by_hand():
    # LAC scores 1 - p of the label: .1, .2, .3, .4; rank ceil(5 · .6) = 3.
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.4, 0.6]])
    labels = np.array([0, 1, 0, 1])
    assert abstain.fit_conformal(probs, labels, 0.6, score="lac") == pytest.approx(0.3)
    assert abstain.fit_conformal(probs, labels, 0.61, score="lac") == pytest.approx(0.4)
    assert abstain.fit_conformal(probs, labels, 0.81, score="lac") == np.inf
    threshold = abstain.fit_conformal(probs, labels, 0.6, score="lac")
    sets = abstain.predict_sets(probs, threshold, score="lac", never_empty=False)
    assert sets.tolist() == [[True, False], [False, True], [True, False], [False, False]]
    filled = abstain.predict_sets(probs, threshold, score="lac")
    assert filled[3].tolist() == [False, True]


def test_aps_scores_by_hand():
    probs = np.array([[0.2, 0.5, 0.3]])
    sets = abstain.predict_sets(probs, 0.8, score="aps")
    assert sets.tolist() == [[False, True, True]]  # cumulative .5, .8, 1
    assert abstain.fit_conformal(probs, np.array([2]), 0.4) == pytest.approx(0.8)
    # A set is empty where even the best class exceeds the threshold, unless that is forbidden.
    assert not abstain.predict_sets(probs, 0.4, never_empty=False).any()
    assert abstain.predict_sets(probs, 0.4).tolist() == [[False, True, False]]
    assert abstain.predict_sets(probs, np.inf).all()


@pytest.mark.parametrize("score", ["lac", "aps", "aps-random"])
@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_coverage_guarantee_holds_on_average(score, coverage):
    n_held_out, n_new, n_repeats = 53, 97, 300
    covered = []
    rng = np.random.default_rng(8) if score == "aps-random" else None
    kind = score.removesuffix("-random")
    for seed in range(n_repeats):
        logits, labels = synthetic(seed, n_held_out + n_new)
        probs = softmax(3 * logits, axis=1)  # badly over-confident: the guarantee does not care
        held, new = slice(0, n_held_out), slice(n_held_out, None)
        threshold = abstain.fit_conformal(probs[held], labels[held], coverage, score=kind, rng=rng)
        sets = abstain.predict_sets(probs[new], threshold, score=kind, never_empty=False, rng=rng)
        covered.append(abstain.describe_sets(sets, labels[new])["coverage"])
    error = np.std(covered) / np.sqrt(n_repeats)
    assert np.mean(covered) > coverage - 3 * error
    if score != "aps":  # a continuous score is tight: at most 1 / (N + 1) above
        assert np.mean(covered) < coverage + 1 / (n_held_out + 1) + 3 * error


# Class c is often called the next one, class 0 most often.
MISNAMED = np.eye(7) + np.outer([-0.4, -0.3, -0.2, -0.2, -0.3, -0.1, -0.35], np.ones(7)) * (
    np.eye(7) - np.roll(np.eye(7), 1, axis=1)
)


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_sets_hold_right_labels_though_wrong_ones_judge_them(score):
    n_held_out, covered = 1499, {"corrected": [], "plain": []}
    for seed in range(7):
        logits, labels = synthetic(seed, n_held_out + 997)
        probs, rng = softmax(1.5 * logits, axis=1), np.random.default_rng([1, seed])
        held, new = slice(0, n_held_out), slice(n_held_out, None)
        chances = MISNAMED[labels[held]].cumsum(axis=1)
        given = (chances < rng.uniform(size=(n_held_out, 1))).sum(axis=1)
        for name, transition in (("corrected", MISNAMED), ("plain", None)):
            threshold = abstain.fit_conformal(
                probs[held], given, 0.9, score=score, rng=rng, transition=transition
            )
            sets = abstain.predict_sets(probs[new], threshold, score=score, rng=rng)
            covered[name].append(abstain.describe_sets(sets, labels[new])["coverage"])
    assert np.mean(covered["corrected"]) == pytest.approx(0.9, abs=0.02)
    assert np.mean(covered["plain"]) > 0.95


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_where_no_label_is_wrong_the_threshold_is_the_plain_one(score):
    logits, labels = synthetic(3, 89)
    probs = softmax(logits, axis=1)
    for coverage in (0.5, 0.8, 0.9, 0.95, 0.995):
        options = {"score": score}
        plain = abstain.fit_conformal(probs, labels, coverage, **options)
        same = abstain.fit_conformal(probs, labels, coverage, transition=np.eye(7), **options)
        assert same == plain


def test_describe_sets_by_hand():
    sets = np.array([[True, False], [True, True], [False, False], [False, True]])
    described = abstain.describe_sets(sets, np.array([0, 0, 1, 0]))
    assert described == {
        "coverage": 0.5,
        "mean_size": 1.0,
        "single_share": 0.5,
        "empty_share": 0.25,
    }


REJECTION_PROBS = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.7, 0.3], [0.4, 0.6]])
REJECTION_LABELS = np.array([0, 1, 0, 0, 1])


def test_rejection_by_coverage():
    def threshold(share):
        return abstain.rejection_threshold(REJECTION_PROBS, REJECTION_LABELS, coverage=share)

    assert [threshold(share) for share in (0.2, 0.4, 0.6, 0.8, 1.0)] == [0.9, 0.8, 0.7, 0.7, 0.6]
    assert (REJECTION_PROBS.max(axis=1) >= threshold(0.6)).tolist() == [True] * 4 + [False]


def test_rejection_by_risk():
    def threshold(risk):
        return abstain.rejection_threshold(REJECTION_PROBS, REJECTION_LABELS, target_risk=risk)

    # Risks by confidence: .9 → 0, .8 → 1/2, .7 (two rows) → 1/4, .6 → 1/5.
    assert [threshold(risk) for risk in (0.0, 0.2, 0.24, 0.5)] == [0.9, 0.6, 0.6, 0.6]
    always_wrong = abstain.rejection_threshold(
        REJECTION_PROBS, 1 - REJECTION_PROBS.argmax(axis=1), target_risk=0.5
    )
    assert always_wrong == np.inf


def test_bad_input_is_refused():
    probs, labels = np.array([[0.5, 0.5]]), np.array([0])
    with pytest.raises(ValueError, match="coverage must be"):
        abstain.fit_conformal(probs, labels, 1.0)
    with pytest.raises(ValueError, match="score must be one of 'aps', 'lac'"):
        abstain.fit_conformal(probs, labels, 0.9, score="apx")
    with pytest.raises(ValueError, match="coverage or target_risk must be given, and not both"):
        abstain.rejection_threshold(probs, labels)
