"""Measures: hand-worked values, scikit-learn, slow references, properties, bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from attnknn.evaluate import measure

N, C = 211, 7
BY_HAND_PROBS = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.0, 0.2, 0.8]])
BY_HAND_LABELS = np.array([0, 2, 0, 2])


def random_case(seed: int, n_rows: int = N, n_classes: int = C):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(n_classes, 0.4), size=n_rows)
    return probs, rng.integers(n_classes, size=n_rows)


def vote_case(seed: int, k: int = 10, n_rows: int = N, n_classes: int = C):
    """Uniform kNN votes: many ties, zeros and confidences exactly on bin edges."""
    rng = np.random.default_rng(seed)
    votes = rng.multinomial(k, rng.dirichlet(np.full(n_classes, 0.3), size=n_rows))
    return votes / k, rng.integers(n_classes, size=n_rows)


def slow_ece(probs, labels, n_bins):
    """One row at a time, with integers of 1e-9 so that edges are exact."""
    bins = {}
    for row, label in zip(probs.tolist(), labels.tolist(), strict=True):
        confidence = max(row)
        units = round(confidence * 10**9)
        for b in range(n_bins):
            low, high = b * 10**9, (b + 1) * 10**9
            if low < units * n_bins <= high or (b == 0 and units == 0):
                bins.setdefault(b, []).append((confidence, row.index(confidence) == label))
    gap = 0.0
    for members in bins.values():
        mean_confidence = sum(c for c, _ in members) / len(members)
        mean_correct = sum(r for _, r in members) / len(members)
        gap += len(members) / len(labels) * abs(mean_confidence - mean_correct)
    return gap


def test_values_worked_by_hand():
    # Predictions 0, 1, 0, 2 for labels 0, 2, 0, 2: one error.
    assert measure.accuracy(BY_HAND_PROBS, BY_HAND_LABELS) == 0.75
    # Recall: class 0 2/2, class 2 1/2; class 1 has no rows.
    assert measure.balanced_accuracy(BY_HAND_PROBS, BY_HAND_LABELS) == 0.75
    # F1: class 0 1, class 1 0 (predicted, never right), class 2 2·1/(1 + 2).
    assert measure.macro_f1(BY_HAND_PROBS, BY_HAND_LABELS) == pytest.approx((1 + 0 + 2 / 3) / 3)
    nll = -np.log([0.7, 0.3, 0.5, 0.8]).mean()
    assert measure.negative_log_likelihood(BY_HAND_PROBS, BY_HAND_LABELS) == pytest.approx(nll)
    rows = [0.09 + 0.04 + 0.01, 0.01 + 0.36 + 0.49, 0.25 + 0.0625 + 0.0625, 0 + 0.04 + 0.04]
    assert measure.brier(BY_HAND_PROBS, BY_HAND_LABELS) == pytest.approx(np.mean(rows))
    expected = [[2, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert measure.confusion_matrix(BY_HAND_PROBS, BY_HAND_LABELS).tolist() == expected


def test_ece_worked_by_hand():
    # Two bins: (0, .5] holds row 3 (.5, right); (.5, 1] holds .7 right, .6 wrong, .8 right.
    ece = measure.expected_calibration_error(BY_HAND_PROBS, BY_HAND_LABELS, n_bins=2)
    assert ece == pytest.approx(0.25 * abs(0.5 - 1) + 0.75 * abs(0.7 - 2 / 3))


def test_ace_worked_by_hand():
    # Sorted confidences .5 right, .6 wrong | .7 right, .8 right.
    ace = measure.adaptive_calibration_error(BY_HAND_PROBS, BY_HAND_LABELS, n_bins=2)
    assert ace == pytest.approx(0.5 * abs(0.55 - 0.5) + 0.5 * abs(0.75 - 1))


def test_cwce_worked_by_hand():
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    labels = np.array([0, 1, 1])
    # Class 0: (.5, 1] has .85 against 1/2, twice; (0, .5] has .3 against 0. Class 1 mirrors it.
    expected = (2 * abs(0.85 - 0.5) + 0.3) / 3
    assert measure.classwise_calibration_error(probs, labels, n_bins=2) == pytest.approx(expected)


def test_risk_coverage_worked_by_hand():
    curve = measure.risk_coverage(BY_HAND_PROBS, BY_HAND_LABELS)
    assert curve["confidence"].tolist() == [0.8, 0.7, 0.6, 0.5]
    assert curve["coverage"].tolist() == [0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(curve["risk"], [0, 0, 1 / 3, 1 / 4])
    aurc = measure.area_under_risk_coverage(BY_HAND_PROBS, BY_HAND_LABELS)
    assert aurc == pytest.approx((1 / 3 + 1 / 4) / 4)


def test_risk_coverage_of_ties_is_that_of_a_random_order():
    probs, labels = np.full((4, 2), 0.5), np.array([0, 1, 0, 1])
    np.testing.assert_allclose(measure.risk_coverage(probs, labels)["risk"], 0.5)


@pytest.mark.parametrize("n_bins", [1, 2, 3, 7, 10, 15, 20, 49])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_on_an_edge_belongs_to_the_bin_below(n_bins, dtype):
    edges = (np.arange(n_bins + 1) / n_bins).astype(dtype)
    expected = np.maximum(np.arange(n_bins + 1) - 1, 0)
    assert measure.bin_index(edges, n_bins).tolist() == expected.tolist()
    inside = edges[:-1] + dtype(0.5 / n_bins)
    assert measure.bin_index(inside, n_bins).tolist() == list(range(n_bins))


@pytest.mark.parametrize("k", [3, 5, 10, 15, 30])
def test_summed_votes_land_in_the_bin_of_their_fraction(k):
    for dtype in (np.float32, np.float64):
        share = dtype(1) / dtype(k)
        votes = np.cumsum(np.full(k, share, dtype=dtype))  # 1/k, 2/k, ... with rounding errors
        expected = [-(-15 * i // k) - 1 for i in range(1, k + 1)]
        assert measure.bin_index(votes, 15).tolist() == expected


def test_confidence_exactly_one_shares_the_last_bin():
    probs = np.array([[1.0, 0.0], [0.96, 0.04], [1.0, 0.0]])
    table = measure.reliability_table(probs, np.array([0, 0, 1]))
    assert table["count"].tolist() == [0] * 14 + [3]
    assert table["confidence"].iloc[-1] == pytest.approx(2.96 / 3)
    assert table["accuracy"].iloc[-1] == pytest.approx(2 / 3)
    assert table["accuracy"].iloc[:-1].isna().all()


@pytest.mark.parametrize("n_bins", [1, 10, 15, 37])
@pytest.mark.parametrize("make", [random_case, vote_case])
def test_ece_equals_a_slow_reference(make, n_bins):
    for seed in range(3):
        probs, labels = make(seed)
        fast = measure.expected_calibration_error(probs, labels, n_bins=n_bins)
        assert fast == pytest.approx(slow_ece(probs, labels, n_bins), abs=1e-12)


def test_agrees_with_scikit_learn():
    for seed in range(5):
        probs, labels = random_case(seed)
        predicted = probs.argmax(axis=1)
        summary = measure.summarise(probs, labels)
        columns = list(range(C))
        assert summary["nll"] == pytest.approx(metrics.log_loss(labels, probs, labels=columns))
        assert summary["brier"] == pytest.approx(
            metrics.brier_score_loss(labels, probs, labels=columns, scale_by_half=False)
        )
        f1 = metrics.f1_score(labels, predicted, average="macro", zero_division=0)
        assert summary["macro_f1"] == pytest.approx(f1)
        assert summary["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
        assert summary["balanced_accuracy"] == pytest.approx(
            metrics.balanced_accuracy_score(labels, predicted)
        )
        counts = metrics.confusion_matrix(labels, predicted, labels=columns)
        assert (measure.confusion_matrix(probs, labels) == counts).all()


def test_absent_classes_count_as_in_scikit_learn():
    rng = np.random.default_rng(3)
    probs = np.zeros((31, 5))
    probs[:, :3] = rng.dirichlet(np.ones(3), size=31)  # classes 3 and 4 are never predicted
    labels = rng.choice([0, 1, 3], size=31)  # class 2 only predicted, 3 only true, 4 neither
    f1 = metrics.f1_score(labels, probs.argmax(axis=1), average="macro", zero_division=0)
    assert measure.macro_f1(probs, labels) == pytest.approx(f1)


def test_zero_support_is_infinite_and_is_not_clipped():
    probs = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert measure.negative_log_likelihood(probs, np.array([1, 0])) == np.inf
    assert measure.negative_log_likelihood(probs, np.array([0, 0])) == pytest.approx(np.log(2) / 2)


def test_perfect_and_constant_classifiers():
    labels = np.arange(C).repeat(3)
    perfect = measure.summarise(np.eye(C)[labels], labels)
    assert [perfect.pop(name) for name in sorted(measure.HIGHER_IS_BETTER)] == [1, 1, 1]
    assert set(perfect.values()) == {0}
    flat = measure.summarise(np.full((len(labels), C), 1 / C), labels)
    assert flat["nll"] == pytest.approx(np.log(C))
    assert flat["brier"] == pytest.approx(1 - 1 / C)
    # Balanced labels: confidence 1/C, accuracy 1/C.
    assert [flat[name] for name in ("ece", "ace", "cwce")] == pytest.approx([0, 0, 0], abs=1e-12)
    assert flat["aurc"] == pytest.approx(1 - 1 / C)


def test_per_sample_means_are_the_measures():
    probs, labels = random_case(2)
    losses = measure.per_sample(probs, labels)
    assert len(losses) == N
    summary = measure.summarise(probs, labels)
    means = losses.mean().tolist()
    assert means == [summary["nll"], summary["brier"], summary["accuracy"]]


def test_one_bin_makes_ece_the_overall_gap_and_equals_ace():
    probs, labels = random_case(4)
    gap = abs(probs.max(axis=1).mean() - measure.accuracy(probs, labels))
    assert measure.expected_calibration_error(probs, labels, n_bins=1) == pytest.approx(gap)
    assert measure.adaptive_calibration_error(probs, labels, n_bins=1) == pytest.approx(gap)


def test_more_bins_than_rows():
    probs, labels = BY_HAND_PROBS, BY_HAND_LABELS
    gap = np.abs(probs.max(axis=1) - np.array([1, 0, 1, 1])).mean()
    assert measure.adaptive_calibration_error(probs, labels, n_bins=97) == pytest.approx(gap)
    assert measure.expected_calibration_error(probs, labels, n_bins=97) == pytest.approx(gap)


def test_a_single_row_and_a_single_class():
    assert measure.summarise(np.array([[0.25, 0.75]]), np.array([1]))["ece"] == pytest.approx(0.25)
    only = measure.summarise(np.ones((3, 1)), np.zeros(3, dtype=int))
    assert only["accuracy"] == 1 and only["nll"] == 0 and only["ece"] == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n_rows=st.integers(1, 40), votes=st.booleans())
def test_row_order_and_class_names_do_not_matter(seed, n_rows, votes):
    probs, labels = (vote_case if votes else random_case)(seed, n_rows=n_rows)
    rng = np.random.default_rng(seed)
    rows, classes = rng.permutation(n_rows), rng.permutation(C)
    before = measure.summarise(probs, labels)
    after = measure.summarise(probs[rows], labels[rows])
    assert after == pytest.approx(before, abs=1e-12)
    if not votes:  # a renamed class changes which of two tied classes is predicted
        renamed = measure.summarise(probs[:, classes], np.argsort(classes)[labels])
        assert renamed == pytest.approx(before, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n_rows=st.integers(1, 40), n_bins=st.integers(1, 30))
def test_ranges(seed, n_rows, n_bins):
    probs, labels = vote_case(seed, n_rows=n_rows)
    summary = measure.summarise(probs, labels, n_bins=n_bins)
    assert list(summary) == list(measure.METRIC_NAMES)
    assert summary.pop("nll") >= 0
    assert 0 <= summary.pop("brier") <= 2
    assert all(0 <= value <= 1 for value in summary.values())
    # One bin only averages gaps that several bins add up.
    one_bin = measure.expected_calibration_error(probs, labels, n_bins=1)
    assert one_bin <= summary["ece"] + 1e-12


def test_float32_probabilities_are_accepted():
    probs, labels = random_case(6, n_classes=101)
    narrow = measure.summarise(probs.astype(np.float32), labels)
    assert narrow == pytest.approx(measure.summarise(probs, labels), rel=1e-4)


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (np.array([[0.5, 0.6]]), np.array([0]), "rows that sum to 1"),
        (np.array([[1.5, -0.5]]), np.array([0]), "must not be negative"),
        (np.array([[np.nan, 1.0]]), np.array([0]), "probs must be finite"),
        (np.array([[0.5, 0.5]]), np.array([2]), r"labels must lie in 0..1"),
        (np.array([[0.5, 0.5]]), np.array([-1]), r"labels must lie in 0..1"),
        (np.zeros((0, 3)), np.zeros(0, dtype=int), "non-empty"),
    ],
)
def test_bad_input_is_refused(probs, labels, message):
    with pytest.raises(ValueError, match=message):
        measure.summarise(probs, labels)


def test_bad_bins_are_refused():
    with pytest.raises(ValueError, match="n_bins must be an integer of at least 1"):
        measure.expected_calibration_error(BY_HAND_PROBS, BY_HAND_LABELS, n_bins=0)
