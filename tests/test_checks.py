"""Argument checks: the value comes back, or the message names argument, rule and value."""

import numpy as np
import pytest

from attnknn.checks import (
    check_count,
    check_finite,
    check_labels,
    check_one_of,
    check_range,
    nearest_name,
)


def test_good_values_come_back_unchanged():
    assert check_one_of("mode", "keep", ("none", "keep")) == "keep"
    assert check_range("rate", 0.25, low=0, high=1) == 0.25
    assert check_count("k", np.int32(3)) == 3
    array = np.array([1.0, -2.0])
    assert check_finite("rows", array) is array


def test_nearest_name_hints_or_stays_silent():
    assert nearest_name("unifrom", ["uniform", "distance"]) == " (did you mean 'uniform'?)"
    assert nearest_name("zzz", ["uniform", "distance"]) == ""


def test_one_of_lists_the_choices_and_the_closest():
    message = r"mode must be one of 'none', 'keep', got mode='kep' \(did you mean 'keep'\?\)"
    with pytest.raises(ValueError, match=message):
        check_one_of("mode", "kep", ("none", "keep"))


@pytest.mark.parametrize(
    ("value", "limits", "rule"),
    [
        (-1, {"low": 0}, "at least 0, got rate=-1"),
        (0, {"low": 0, "low_open": True}, "above 0, got rate=0"),
        (2, {"high": 1}, "at most 1, got rate=2"),
        (1, {"low": 0, "high": 1, "high_open": True}, "at least 0 and below 1, got rate=1"),
        (float("nan"), {}, "finite, got rate=nan"),
        (float("inf"), {"low": 0}, "finite and at least 0, got rate=inf"),
    ],
)
def test_range_says_which_limit_was_crossed(value, limits, rule):
    with pytest.raises(ValueError, match=f"^rate must be {rule}$"):
        check_range("rate", value, **limits)


@pytest.mark.parametrize("value", [1, 0.5])
def test_closed_limits_are_inside_and_open_ones_are_not(value):
    assert check_range("rate", value, low=0.5, high=1) == value
    with pytest.raises(ValueError, match="rate must"):
        check_range("rate", value, low=0.5, high=1, low_open=True, high_open=True)


@pytest.mark.parametrize("value", [0, True, 2.0, "3"])
def test_count_refuses_what_is_not_a_positive_integer(value):
    with pytest.raises(ValueError, match=f"k must be an integer of at least 1, got k={value!r}"):
        check_count("k", value)


def test_finite_counts_the_bad_values_and_names_the_first():
    array = np.array([[1.0, 2.0], [np.nan, np.inf]])
    with pytest.raises(ValueError, match=r"rows must be finite, got 2 .* first at \(1, 0\)"):
        check_finite("rows", array)


def test_labels_come_back_as_a_64_bit_copy():
    labels = np.array([2, 0, 1], dtype=np.uint8)
    checked = check_labels("labels", labels, n_rows=3, n_classes=3)
    assert checked.dtype == np.int64
    checked[0] = 0
    assert labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 1]), r"labels must have shape \(3,\), got shape \(2,\)"),
        (np.array([0, 1, 3]), r"labels must lie in 0..2, got 0..3"),
        (np.array([0, 1, -1]), r"labels must lie in 0..2, got -1..1"),
        (np.array([0.0, 1.7, 2.0]), "labels must be integers, got values of type float64"),
        (np.array([True, False, True]), "labels must be integers, got values of type bool"),
    ],
)
def test_labels_are_refused_rather_than_cast(labels, message):
    with pytest.raises(ValueError, match=message):
        check_labels("labels", labels, n_rows=3, n_classes=3)
