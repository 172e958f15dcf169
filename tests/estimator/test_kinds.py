"""Rows of a few kinds: their labels' shares are all there is to say; copies stay one case."""

import numpy as np
import pandas as pd
import pytest

from attnknn import AttnKNNClassifier
from attnknn.estimator.inputs import GONE, Ledger, are_kinds

N, C = 1500, 3


@pytest.fixture(scope="module")
def dozen():
    """A table of a dozen kinds of rows, and the class probabilities of each row."""
    rng = np.random.default_rng(1)
    codes = [rng.choice(n, size=N) for n in (3, 2, 2)]
    kind = codes[0] * 4 + codes[1] * 2 + codes[2]
    probs = rng.dirichlet(np.full(C, 1.5), size=12)[kind]
    table = pd.DataFrame(
        {f"x{i}": pd.Series(c).map("abc".__getitem__) for i, c in enumerate(codes)}
    )
    labels = (probs.cumsum(axis=1) < rng.random((N, 1))).sum(axis=1)
    return table, labels, kind, probs


def test_kinds_are_answered_by_the_shares_of_their_labels(dozen):
    table, labels, kind, right = dozen
    clf = AttnKNNClassifier(random_state=0).fit(table, labels)
    probs = clf.predict_proba(table)
    counts = np.zeros((12, C))
    np.add.at(counts, (kind, labels), 1)
    shares = (counts / counts.sum(axis=1, keepdims=True))[kind]
    nll = [-(right * np.log(each)).sum(axis=1).mean() for each in (probs, shares)]
    assert nll[0] < nll[1] + 0.02
    flat = np.bincount(labels) / N
    assert nll[0] < -(right * np.log(flat)).sum(axis=1).mean() - 0.1  # and there was much to say
    first = np.unique(kind, return_index=True)[1]
    np.testing.assert_allclose(probs, probs[first][kind], atol=1e-6)
    assert clf._ledger.kinds and clf.memory_.weights.sum() == N


def test_wrong_labels_are_not_looked_for_within_a_few_kinds(dozen):
    table, labels, _, _ = dozen
    wrong = np.where(np.arange(N) % 4 == 0, (labels + 1) % C, labels)
    assert AttnKNNClassifier(random_state=0).fit(table, wrong).label_noise_ == 0
    asked = AttnKNNClassifier(random_state=0, label_noise=0.2).fit(table, wrong)
    assert asked.label_noise_ == 0.2


def test_equal_rows_are_kinds_only_where_their_labels_differ():
    rows = np.arange(101.0)[:, None]
    twice, ones = np.repeat(np.arange(101), 2), np.ones(202)
    assert not are_kinds(rows, twice, ones)  # each comes twice, and always with one label
    two_labels = np.concatenate([rows, rows[:2]])
    # Two rows of 101 come with another label too: less than what is taken for a slip.
    assert not are_kinds(two_labels, np.concatenate([twice, [101, 102]]), np.ones(204))
    three_labels = np.concatenate([rows, rows[:3]])
    entries = np.concatenate([twice, [101, 102, 103]])
    assert are_kinds(three_labels, entries, np.ones(205))
    forgotten = np.where(np.arange(205) < 202, entries, GONE)
    assert not are_kinds(rows, forgotten, np.ones(205))


def test_copies_of_one_case_go_together_and_cases_of_a_kind_one_by_one():
    entries = np.repeat(np.arange(5), 2)
    assert Ledger(entries, np.ones(10)).row_weights() is None
    assert Ledger(entries, np.ones(10), kinds=True).row_weights().tolist() == [2] * 5
    uneven = np.append(entries, 0)
    shares = Ledger(uneven, np.ones(11)).row_weights()
    np.testing.assert_allclose(shares, [1, *[2 / 3] * 4])
    assert Ledger(uneven, np.ones(11), kinds=True).row_weights().tolist() == [3, 2, 2, 2, 2]


def test_a_table_that_comes_twice_says_the_same():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(97, 3))
    labels = (rows[:, 0] + 0.5 * rng.normal(size=97) > 0).astype(int)
    new = rng.normal(size=(13, 3))
    options = {"metric": "standardised", "embedder": "identity", "refine": "none"}
    one, two = (
        AttnKNNClassifier(**options, random_state=0)
        .fit(np.repeat(rows, times, axis=0), np.repeat(labels, times))
        .predict_proba(new)
        for times in (1, 2)
    )
    np.testing.assert_allclose(one, two, atol=1e-6)
