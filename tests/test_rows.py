"""Tests of stratified drawing with whole groups."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnknn.data.rows import SplitError, draw_rows, duplicate_groups


def test_classes_keep_their_shares_by_hand():
    # 10, 20 and 70 rows; 10 drawn: 1, 2 and 7
    labels = np.repeat([0, 1, 2], [10, 20, 70])
    ids = draw_rows(labels, 10, seed=(1,))
    assert np.bincount(labels[ids]).tolist() == [1, 2, 7]
    assert (np.diff(ids) > 0).all()


def test_largest_remainder_gets_the_odd_row():
    # 5 of 3 + 7 rows: 1.5 and 3.5; of 4 + 7 rows: 1.82 and 3.18
    labels = np.repeat([0, 1], [4, 7])
    assert np.bincount(labels[draw_rows(labels, 5, seed=(1,))]).tolist() == [2, 3]


def test_small_classes_are_neither_missed_nor_used_up():
    labels = np.repeat([0, 1], [2, 100])
    assert np.bincount(labels[draw_rows(labels, 5, seed=(0,))]).tolist() == [1, 4]
    assert np.bincount(labels[draw_rows(labels, 97, seed=(0,))]).tolist() == [1, 96]


def test_seed_decides():
    labels = np.arange(101) % 3
    first = draw_rows(labels, 20, seed=(7, 1))
    assert np.array_equal(first, draw_rows(labels, 20, seed=(7, 1)))
    assert not np.array_equal(first, draw_rows(labels, 20, seed=(7, 2)))


def test_groups_stay_whole():
    labels = np.zeros(12, dtype=np.int64)
    labels[6:] = 1
    groups = np.array([0, 0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 7])
    for seed in range(20):
        drawn = set(draw_rows(labels, 4, seed=(seed,), groups=groups).tolist())
        for group in range(8):
            rows = set(np.flatnonzero(groups == group).tolist())
            assert rows <= drawn or not rows & drawn


@settings(max_examples=50, deadline=None)
@given(data=st.data(), n=st.integers(20, 80), n_classes=st.integers(2, 4), seed=st.integers(0, 99))
def test_draw_is_exact_without_groups(data, n, n_classes, seed):
    labels = np.arange(n) % n_classes
    n_rows = data.draw(st.integers(n_classes, n - n_classes))
    counts = np.bincount(labels[draw_rows(labels, n_rows, seed=(seed,))], minlength=n_classes)
    assert counts.sum() == n_rows
    assert np.abs(counts - n_rows * np.bincount(labels) / n).max() < 1 + 1e-9


def test_identical_rows_share_a_group():
    images = np.zeros((4, 1, 3, 3), dtype=np.uint8)
    images[1, 0, 2, 2] = 1
    groups = duplicate_groups(images)
    assert groups[0] == groups[2] == groups[3] != groups[1]
    table = pd.DataFrame({"x": [1.0, 2.0, 1.0], "c": ["a", "a", "a"]})
    groups = duplicate_groups(table)
    assert groups[0] == groups[2] != groups[1]


def test_transposed_memory_order_does_not_change_groups():
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    assert np.array_equal(duplicate_groups(rows), duplicate_groups(np.asfortranarray(rows)))


@pytest.mark.parametrize(
    ("labels", "n_rows", "message"),
    [
        ([0, 0, 1], 1, "every class must have 2 rows to be split, got 1 of 1"),
        ([0, 0, 1, 1], 1, "got 1 of 4"),
        ([0, 0, 1, 1], 3, "got 3 of 4"),
    ],
)
def test_too_few_rows(labels, n_rows, message):
    with pytest.raises(SplitError, match=message):
        draw_rows(np.array(labels), n_rows, seed=(0,))


def test_a_class_of_copies_cannot_be_split():
    labels = np.array([0, 0, 0, 1, 1, 1])
    groups = np.array([0, 0, 0, 1, 2, 3])
    with pytest.raises(SplitError, match="class 0 must hold different rows"):
        draw_rows(labels, 2, seed=(0,), groups=groups)


def test_a_class_of_large_groups_still_gets_a_row():
    labels = np.repeat([0, 1], [10, 90])
    groups = np.concatenate([np.repeat([0, 1], 5), np.arange(2, 92)])
    drawn = draw_rows(labels, 10, seed=(0,), groups=groups)  # one row of class 0 is its share
    assert np.bincount(labels[drawn]).tolist() == [5, 9]


def test_thinning_may_use_a_class_up():
    labels = np.repeat([0, 1], [1, 8])
    assert np.bincount(labels[draw_rows(labels, 8, seed=(0,), leave=0)]).tolist() == [1, 7]


def test_zero_has_one_sign():
    rows = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, -1.0]])
    first, second, third = duplicate_groups(rows)
    assert first == second != third
