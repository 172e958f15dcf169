"""Calibration: recovered parameters, limits, bad input."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from attnknn.core import calibrate
from attnknn.evaluate import measure

N, C = 4001, 7


def synthetic(seed: int, n_rows: int = N, scale: float = 2.0):
    """Return logits and labels drawn from their softmax: the true temperature is 1."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(n_rows, C))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.uniform(size=(n_rows, 1))).sum(axis=1)
    return logits, labels


def loss(logits, labels, temperature=1.0):
    return -log_softmax(logits / temperature, axis=1)[np.arange(len(labels)), labels].mean()


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0, 17.0])
def test_temperature_is_recovered(temperature):
    logits, labels = synthetic(0, n_rows=40_009)
    fitted = calibrate.fit_temperature(temperature * logits, labels)
    assert fitted == pytest.approx(temperature, rel=0.03)


def test_temperature_is_the_minimum_of_another_solver():
    logits, labels = synthetic(1)
    reference = minimize_scalar(
        lambda u: loss(5 * logits, labels, np.exp(u)), bounds=(-4, 4), options={"xatol": 1e-9}
    )
    fitted = calibrate.fit_temperature(5 * logits, labels)
    assert fitted == pytest.approx(np.exp(reference.x), rel=1e-5)


def test_log_probabilities_and_logits_agree_and_row_offsets_do_not_matter():
    logits, labels = synthetic(2)
    offsets = np.random.default_rng(0).normal(size=(N, 1)) * 50
    fitted = calibrate.fit_temperature(logits, labels)
    assert calibrate.fit_temperature(log_softmax(logits, axis=1), labels) == pytest.approx(fitted)
    assert calibrate.fit_temperature(logits + offsets, labels) == pytest.approx(fitted)
    assert calibrate.fit_temperature(logits.astype(np.float32), labels) == pytest.approx(
        fitted, rel=1e-5
    )


def test_temperature_limits():
    labels = np.array([0, 1, 2])
    assert calibrate.fit_temperature(np.eye(3), labels) == 0.1  # always right: sharpen for ever
    assert calibrate.fit_temperature(-np.eye(3), labels) == 100.0  # always wrong: flatten for ever
    assert calibrate.fit_temperature(np.zeros((3, 3)), labels) == 100.0  # nothing to scale


def test_zero_probabilities_off_the_label_are_allowed_and_at_the_label_refused():
    logits, labels = synthetic(3)
    hidden = (labels + 1) % C
    masked = logits.copy()
    masked[np.arange(N), hidden] = -np.inf
    pushed_away = np.where(np.isinf(masked), -1e6, masked)
    assert calibrate.fit_temperature(masked, labels) == pytest.approx(
        calibrate.fit_temperature(pushed_away, labels)
    )
    with pytest.raises(ValueError, match="logits must be finite at the labels"):
        calibrate.fit_temperature(masked, hidden)


def test_apply_temperature_by_hand_and_limits():
    probs = np.array([[0.64, 0.36], [1.0, 0.0]])
    np.testing.assert_allclose(
        calibrate.apply_temperature(probs, 2.0), [[0.8 / 1.4, 0.6 / 1.4], [1, 0]]
    )
    np.testing.assert_allclose(calibrate.apply_temperature(probs, 1.0), probs)
    np.testing.assert_allclose(calibrate.apply_temperature(probs, 1e-4), [[1, 0], [1, 0]])
    np.testing.assert_allclose(calibrate.apply_temperature(probs, 1e6)[0], [0.5, 0.5], atol=1e-6)


def test_floor_by_hand():
    probs = np.array([[1.0, 0.0], [0.5, 0.5]])
    np.testing.assert_allclose(calibrate.with_floor(probs, 0.1), [[0.95, 0.05], [0.5, 0.5]])
    np.testing.assert_allclose(calibrate.with_floor(probs, 0.0), probs)
    np.testing.assert_allclose(calibrate.with_floor(probs, 1.0), 0.5)


def test_floor_and_temperature_are_recovered():
    rng = np.random.default_rng(4)
    probs = rng.dirichlet(np.full(C, 0.15), size=60_013)
    truth = calibrate.Calibration(floor=0.05, temperature=1.6)
    drawn = calibrate.apply_calibration(probs, truth)
    labels = (drawn.cumsum(axis=1) < rng.uniform(size=(len(probs), 1))).sum(axis=1)
    fitted = calibrate.fit_floor_and_temperature(probs, labels.clip(max=C - 1))
    assert fitted.floor == pytest.approx(truth.floor, rel=0.1)
    assert fitted.temperature == pytest.approx(truth.temperature, rel=0.03)


def test_joint_fit_is_no_worse_than_a_fine_grid():
    rng = np.random.default_rng(5)
    probs = rng.multinomial(10, rng.dirichlet(np.full(C, 0.3), size=997)) / 10  # zeros everywhere
    labels = np.where(rng.uniform(size=997) < 0.8, probs.argmax(axis=1), rng.integers(C, size=997))
    fitted = calibrate.fit_floor_and_temperature(probs, labels)
    found = measure.negative_log_likelihood(calibrate.apply_calibration(probs, fitted), labels)
    grid = [
        measure.negative_log_likelihood(
            calibrate.apply_calibration(probs, calibrate.Calibration(floor, temperature)), labels
        )
        for floor in np.geomspace(1e-5, 0.9, 30)
        for temperature in np.geomspace(0.1, 10, 30)
    ]
    assert found <= min(grid) + 1e-9


def test_joint_fit_slope_equals_finite_differences():
    rng = np.random.default_rng(6)
    probs, labels = rng.dirichlet(np.full(C, 0.3), size=13), rng.integers(C, size=13)
    point, step = np.array([-2.0, 0.3]), 1e-6
    _, slope = calibrate._floor_temperature_loss(point, probs, labels)
    for axis, shift in enumerate(np.eye(2) * step):
        above, _ = calibrate._floor_temperature_loss(point + shift, probs, labels)
        below, _ = calibrate._floor_temperature_loss(point - shift, probs, labels)
        assert slope[axis] == pytest.approx((above - below) / (2 * step), abs=1e-7)


def test_joint_fit_of_perfect_and_useless_probabilities_stays_inside_its_limits():
    labels = np.arange(C).repeat(5)
    perfect = calibrate.fit_floor_and_temperature(np.eye(C)[labels], labels)
    tempered = calibrate.apply_calibration(np.eye(C)[labels], perfect)
    assert measure.negative_log_likelihood(tempered, labels) < 1e-4
    wrong = np.eye(C)[(labels + 1) % C]
    useless = calibrate.fit_floor_and_temperature(wrong, labels)
    flat = calibrate.apply_calibration(wrong, useless)
    assert measure.negative_log_likelihood(flat, labels) == pytest.approx(np.log(C), rel=0.01)


def test_bad_input_is_refused():
    probs, labels = np.array([[0.5, 0.5]]), np.array([0])
    with pytest.raises(ValueError, match="temperature must be"):
        calibrate.apply_temperature(probs, 0.0)
    with pytest.raises(ValueError, match="logits must not hold NaN"):
        calibrate.fit_temperature(np.array([[np.nan, 0.0]]), labels)
    with pytest.raises(ValueError, match="finite entry in each row"):
        calibrate.fit_temperature(np.full((1, 2), -np.inf), labels)


def test_wrong_held_out_labels_are_allowed_for():
    """Forward correction recovers the calibration that clean labels would have given."""
    rng = np.random.default_rng(5)
    logits = 3 * rng.normal(size=(4001, 5))
    probs = softmax(logits, axis=1)
    labels = np.array([rng.choice(5, p=row) for row in softmax(logits / 2, axis=1)])
    wrong = rng.random(len(labels)) < 0.3
    noisy = np.where(wrong, (labels + rng.integers(1, 5, len(labels))) % 5, labels)
    clean = calibrate.fit_floor_and_temperature(probs, labels)
    corrected = calibrate.fit_floor_and_temperature(probs, noisy, label_error=0.3)
    plain = calibrate.fit_floor_and_temperature(probs, noisy)
    losses = [
        calibrate.observed_nll(calibrate.apply_calibration(probs, each), labels, 0.0)
        for each in (clean, corrected, plain)
    ]
    assert losses[1] - losses[0] < 0.01
    assert losses[2] - losses[0] > 0.05


TURNED = np.array([[0.6, 0.4, 0, 0], [0, 0.7, 0.2, 0.1], [0, 0, 0.9, 0.1], [0.3, 0, 0, 0.7]])


@pytest.mark.parametrize("label_error", [0.0, 0.2, TURNED], ids=["right", "symmetric", "matrix"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_corrected_slope_is_the_derivative(label_error, weighted):
    rng = np.random.default_rng(6)
    probs = rng.dirichlet(np.ones(4), size=31)
    labels = rng.integers(4, size=31)
    weights = rng.uniform(0.1, 3, size=31) if weighted else None
    chances = calibrate.label_chances(label_error, labels, 4)
    point, step = np.array([-2.0, 0.3]), 1e-6
    _, slope = calibrate._floor_temperature_loss(point, probs, labels, chances, weights)
    for axis in range(2):
        ahead, behind = point.copy(), point.copy()
        ahead[axis] += step
        behind[axis] -= step
        ends = [
            calibrate._floor_temperature_loss(end, probs, labels, chances, weights)[0]
            for end in (ahead, behind)
        ]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope[axis], rel=1e-4)


def test_a_turned_class_is_allowed_for_only_by_its_matrix():
    """Class c is labelled c + 1 in 40 % of the rows, and votes over such a memory say so too."""
    rng = np.random.default_rng(7)
    truth = softmax(6 * rng.normal(size=(4001, 5)), axis=1)
    labels = np.array([rng.choice(5, p=row) for row in truth])
    noisy = np.where(rng.random(len(labels)) < 0.4, (labels + 1) % 5, labels)
    matrix = 0.6 * np.eye(5) + 0.4 * np.roll(np.eye(5), 1, axis=1)
    votes = truth @ matrix
    clean, turned, symmetric = (
        calibrate.fit_floor_and_temperature(votes, given, label_error=error)
        for given, error in ((labels, 0.0), (noisy, matrix), (noisy, 0.4))
    )
    losses = [
        calibrate.observed_nll(calibrate.apply_calibration(votes, each), labels, 0.0)
        for each in (clean, turned, symmetric)
    ]
    assert losses[1] - losses[0] < 0.02
    assert losses[2] - losses[0] > 0.1


@pytest.mark.parametrize(
    ("matrix", "rule"),
    [
        (np.eye(3), r"label_error must be \(4, 4\)"),
        (0.9 * np.eye(4), "label_error must have rows that are distributions"),
        (np.full((4, 4), 0.25), "label_error must have its largest entries on the diagonal"),
        (np.roll(np.eye(4), 1, axis=1), "label_error must have its largest entries"),
    ],
)
def test_a_matrix_that_cannot_be_read_is_refused(matrix, rule):
    with pytest.raises(ValueError, match=rule):
        calibrate.transition_matrix(matrix, 4)


def test_observed_nll_by_hand():
    probs = np.array([[0.7, 0.2, 0.1]])
    assert calibrate.observed_nll(probs, np.array([0]), 0.0) == pytest.approx(-np.log(0.7))
    assert calibrate.observed_nll(probs, np.array([0]), 0.2) == pytest.approx(
        -np.log(0.8 * 0.7 + 0.1 * 0.3)
    )
    turned = np.array([[0.6, 0.4, 0.0], [0.0, 1.0, 0.0], [0.3, 0.0, 0.7]])
    assert calibrate.observed_nll(probs, np.array([0]), turned) == pytest.approx(
        -np.log(0.7 * 0.6 + 0.1 * 0.3)
    )
    assert calibrate.wrong_share(turned) == pytest.approx(0.7 / 3)


def test_held_out_rows_that_are_all_right_leave_no_class_impossible():
    probs, labels = np.array([[0.9, 0.1, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), np.arange(3)
    fitted = calibrate.fit_floor_and_temperature(probs, labels)
    calibrated = calibrate.apply_calibration(probs, fitted)
    assert measure.negative_log_likelihood(calibrated, labels[::-1]) < 1000


def test_no_class_keeps_less_than_the_least_share():
    probs = np.array([[1.0, 0.0, 0.0, 0.0]])
    sharp = calibrate.apply_calibration(probs, calibrate.Calibration(1e-6, 0.1))
    np.testing.assert_allclose(sharp, [[1 - 0.75e-6, 0.25e-6, 0.25e-6, 0.25e-6]], rtol=1e-6)
