"""Tests of label noise and long tails."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnknn.data.change import flip_ambiguous_labels, flip_labels, long_tail_rows


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(("rate", "wrong"), [(0.0, 0), (0.1, 10), (0.3, 30), (1.0, 101)])
def test_exactly_the_asked_share_is_wrong(kind, rate, wrong):
    labels = np.arange(101) % 7
    noisy = flip_labels(labels, rate, n_classes=7, kind=kind, seed=3)
    assert (noisy != labels).sum() == wrong
    assert noisy.min() >= 0
    assert noisy.max() < 7


def test_asymmetric_noise_is_the_next_class():
    labels = np.array([0, 1, 2, 2])
    noisy = flip_labels(labels, 1.0, n_classes=3, kind="asymmetric", seed=0)
    assert noisy.tolist() == [1, 2, 0, 0]


def test_two_classes_leave_no_choice():
    labels = np.array([0, 1, 1])
    assert flip_labels(labels, 1.0, n_classes=2, seed=0).tolist() == [1, 0, 0]


def test_symmetric_noise_is_uniform_over_the_other_classes():
    noisy = flip_labels(np.full(9000, 2), 1.0, n_classes=4, seed=5)
    counts = np.bincount(noisy, minlength=4)
    assert counts[2] == 0
    # 3000 expected of each, standard deviation 45
    assert np.abs(counts[[0, 1, 3]] - 3000).max() < 4 * 45


def test_input_is_left_alone_and_seeds_decide():
    labels = np.arange(50) % 5
    before = labels.copy()
    first = flip_labels(labels, 0.4, n_classes=5, seed=1)
    assert np.array_equal(labels, before)
    assert np.array_equal(first, flip_labels(labels, 0.4, n_classes=5, seed=1))
    assert not np.array_equal(first, flip_labels(labels, 0.4, n_classes=5, seed=2))


def test_noise_grows_along_a_sweep():
    labels = np.arange(211) % 5
    low = flip_labels(labels, 0.1, n_classes=5, seed=1)
    high = flip_labels(labels, 0.3, n_classes=5, seed=1)
    flipped = low != labels
    assert np.array_equal(high[flipped], low[flipped])


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 60),
    n_classes=st.integers(2, 9),
    rate=st.floats(0, 1),
    kind=st.sampled_from(["symmetric", "asymmetric"]),
    seed=st.integers(0, 2**31),
)
def test_flip_count_holds_everywhere(n, n_classes, rate, kind, seed):
    labels = np.arange(n) % n_classes
    noisy = flip_labels(labels, rate, n_classes=n_classes, kind=kind, seed=seed)
    assert (noisy != labels).sum() == round(rate * n)
    assert ((noisy >= 0) & (noisy < n_classes)).all()


def clouds(n=600):
    """Three directions; the first and second are 20 degrees apart, the third is far away."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    angles = np.radians(np.array([0.0, 20.0, 120.0])[labels] + rng.normal(size=n) * 6)
    return labels, np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_ambiguous_noise_hits_similar_classes():
    labels, embeddings = clouds(6000)
    noisy = flip_ambiguous_labels(labels, 0.2, embeddings=embeddings, n_classes=3, seed=1)
    wrong = noisy != labels
    assert wrong.sum() == 1200
    assert (labels[wrong] != 2).all()  # far from everything: p is 1 within 1e-6
    assert np.array_equal(noisy[wrong], 1 - labels[wrong])
    # rows towards the other class are flipped more often than rows away from it
    angle = np.degrees(np.arctan2(embeddings[:, 1], embeddings[:, 0]))
    first = labels == 0
    inner, outer = wrong[first & (angle > 3)].mean(), wrong[first & (angle < -3)].mean()
    assert inner > 1.3 * outer


def test_ambiguous_noise_is_nested_exact_and_seeded():
    labels, embeddings = clouds()
    flips = {}
    for rate in (0.0, 0.1, 1.0):
        noisy = flip_ambiguous_labels(labels, rate, embeddings=embeddings, n_classes=3, seed=1)
        flips[rate] = set(np.flatnonzero(noisy != labels).tolist())
    assert [len(rows) for rows in flips.values()] == [0, 60, 600]
    other = flip_ambiguous_labels(labels, 0.1, embeddings=embeddings, n_classes=3, seed=2)
    assert set(np.flatnonzero(other != labels).tolist()) != flips[0.1]


def test_ambiguous_noise_needs_every_class_and_finite_rows():
    labels, embeddings = clouds()
    with pytest.raises(ValueError, match="labels must hold all 4 classes"):
        flip_ambiguous_labels(labels, 0.1, embeddings=embeddings, n_classes=4, seed=0)
    embeddings[3, 1] = np.nan
    with pytest.raises(ValueError, match="embeddings must be finite"):
        flip_ambiguous_labels(labels, 0.1, embeddings=embeddings, n_classes=3, seed=0)


def test_long_tail_by_hand():
    # three classes of 100: 100 * 0.01 ** (c / 2) = 100, 10, 1
    labels = np.repeat([0, 1, 2], 100)
    kept = long_tail_rows(labels, 0.01, n_classes=3, seed=0)
    assert np.bincount(labels[kept]).tolist() == [100, 10, 1]
    assert (np.diff(kept) > 0).all()


def test_ratio_one_keeps_balanced_rows():
    labels = np.arange(35) % 5
    assert long_tail_rows(labels, 1.0, n_classes=5, seed=0).tolist() == list(range(35))


def test_every_class_keeps_a_row_and_no_more_than_it_has():
    labels = np.array([0] * 11 + [1] * 2 + [2] * 7)
    kept = long_tail_rows(labels, 0.001, n_classes=3, seed=0)
    # 11, 11 * 0.0316 = 0.35 -> 1, 0.011 -> 1
    assert np.bincount(labels[kept]).tolist() == [11, 1, 1]
    kept = long_tail_rows(labels, 1.0, n_classes=3, seed=0)
    assert np.bincount(labels[kept]).tolist() == [11, 2, 7]


def test_shorter_tails_are_nested_and_seeded():
    labels = np.arange(300) % 3
    long = set(long_tail_rows(labels, 0.1, n_classes=3, seed=4).tolist())
    longer = set(long_tail_rows(labels, 0.01, n_classes=3, seed=4).tolist())
    assert longer < long
    assert long != set(long_tail_rows(labels, 0.1, n_classes=3, seed=5).tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: flip_labels(y, 1.1, n_classes=3, seed=0), "rate must be at least 0"),
        (lambda y: flip_labels(y, float("nan"), n_classes=3, seed=0), "got rate=nan"),
        (lambda y: flip_labels(y, 0.1, n_classes=3, kind="odd", seed=0), "kind must be one of"),
        (lambda y: flip_labels(y, 0.1, n_classes=2, seed=0), r"labels must lie in \[0, 1\]"),
        (lambda y: flip_labels(y, 0.1, n_classes=1, seed=0), "n_classes must be an integer"),
        (lambda y: flip_labels(y[:0], 0.1, n_classes=3, seed=0), "labels must not be empty"),
        (lambda y: long_tail_rows(y, 0.0, n_classes=3, seed=0), "ratio must be above 0"),
        (lambda y: long_tail_rows(y, 0.5, n_classes=3, seed=-1), "seed must be an integer"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.array([0, 1, 2]))
