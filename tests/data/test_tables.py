"""Tests of the table encoder."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from attnknn.data.tables import check_table, fit_table_encoder, normal_scores, with_numbers

TRAIN = pd.DataFrame(
    {
        "height": [1.0, 2.0, 3.0, 6.0],  # mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
        "colour": ["red", "blue", None, "red"],
        "old": [True, False, True, True],
        "flat": [5, 5, 5, 5],
    }
)


def test_encoding_by_hand():
    encoder = fit_table_encoder(TRAIN)
    assert encoder.feature_names == (
        "height",
        "flat",
        "colour=blue",
        "colour=missing",
        "colour=red",
        "old=False",
        "old=True",
    )
    features = encoder.encode(TRAIN)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features[:, 0], [-2, -1, 0, 3] / np.sqrt(3.5), rtol=1e-6)
    assert features[:, 1].tolist() == [0, 0, 0, 0]
    assert features[:, 2:].tolist() == [
        [0, 0, 1, 0, 1],
        [1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1],
        [0, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize("numeric", ["standard", "quantile"])
def test_other_rows_do_not_change_the_encoding(numeric):
    encoder = fit_table_encoder(TRAIN, numeric=numeric)
    alone = encoder.encode(TRAIN)
    extreme = pd.DataFrame({"height": [1e9], "colour": ["green"], "old": [False], "flat": [7]})
    together = encoder.encode(pd.concat([TRAIN, extreme], ignore_index=True))
    np.testing.assert_array_equal(together[:4], alone)
    assert np.isfinite(together).all()


def test_unseen_category_is_all_zeros_and_flat_column_survives():
    encoder = fit_table_encoder(TRAIN)
    row = pd.DataFrame({"height": [3.0], "colour": ["green"], "old": [False], "flat": [7]})
    assert encoder.encode(row).tolist() == [[0, 2, 0, 0, 0, 1, 0]]


def test_normal_scores_by_hand():
    # ranks of 10, 20, 20, 30 in themselves: 0.5, 2, 2, 3.5 of 4
    values = np.array([10.0, 20.0, 20.0, 30.0])
    expected = norm.ppf([0.125, 0.5, 0.5, 0.875])
    np.testing.assert_allclose(normal_scores(values, values), expected)
    # below all: clipped to half a rank; between 10 and 20: one of four below
    np.testing.assert_allclose(
        normal_scores(np.array([-9.0, 15.0, 99.0]), values), norm.ppf([0.125, 0.25, 0.875])
    )


def test_tied_smallest_values_are_not_thrown_to_the_end():
    gains = np.array([0.0] * 92 + [float(x) for x in range(1, 9)])
    scores = normal_scores(gains, np.sort(gains))
    assert scores[0] == pytest.approx(norm.ppf(0.46))
    assert scores[-1] == pytest.approx(norm.ppf(0.995))


def test_quantile_scale_ignores_monotone_transforms_and_is_standardised():
    table = pd.DataFrame({"x": np.random.default_rng(0).normal(size=101)})
    first = fit_table_encoder(table, numeric="quantile").encode(table)
    second = fit_table_encoder(np.exp(table), numeric="quantile").encode(np.exp(table))
    np.testing.assert_array_equal(first, second)
    assert first.mean() == pytest.approx(0, abs=1e-6)
    assert first.std() == pytest.approx(1, abs=1e-6)


def test_table_of_categories_alone():
    table = pd.DataFrame({"c": ["a", "b", "a"]})
    assert fit_table_encoder(table).encode(table).tolist() == [[1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"x": [1.0, np.nan]}, "column 'x' must be finite numbers, got 1 .* first in row 1"),
        ({"x": [np.inf, 1.0]}, "column 'x' must be finite numbers"),
        ({"x": pd.array([1, None], dtype="Int64")}, "column 'x' must be finite numbers"),
        ({"id": [f"row {i}" for i in range(1001)]}, "column 'id' must hold at most 1000 values"),
        ({}, "at least one feature column"),
        (
            {"when": pd.to_datetime(["2020-01-01", "2020-01-02"])},
            r"column 'when' must hold numbers or categories, got datetime64\[",
        ),
        ({"d": pd.to_timedelta([1, 2], "s")}, r"column 'd' must hold .*, got timedelta64\["),
        ({"d": pd.to_datetime(["2020-01-01"]).date}, r"column 'd' must hold .*, got object \(date"),
        ({"d": pd.period_range("2020", periods=2)}, "column 'd' must hold numbers or categories"),
        ({"l": [[1], [2]]}, "column 'l' must hold numbers or categories, got list"),
        ({"x": [10**400, 1]}, "column 'x' must be finite numbers"),
        ({"x": pd.Series([1.5, None], dtype=object)}, "column 'x' must be finite numbers, got 1"),
    ],
)
def test_bad_tables(table, message):
    with pytest.raises(ValueError, match=message):
        check_table(pd.DataFrame(table))


@pytest.mark.parametrize(
    "values",
    [
        pd.Series([1.5, 2, 4.0, None], dtype=object),
        pd.Series([1.5, 2, 4, pd.NA], dtype=object),
        [Decimal("1.5"), Decimal("2"), Decimal("4"), None],
    ],
)
def test_objects_that_are_numbers_are_numbers(values):
    table = check_table(pd.DataFrame({"x": values}), allow_missing=True)
    assert table["x"].dtype == np.float64
    np.testing.assert_array_equal(table["x"], [1.5, 2, 4, np.nan])


def test_truth_values_names_and_mixtures_stay_categories():
    table = pd.DataFrame(
        {
            "flag": pd.Series([True, None, False], dtype=object),
            "name": ["1.5", "2", None],
            "both": pd.Series([1, "a", 2.5], dtype=object),
            "group": pd.Categorical([1, 2, 1]),
        }
    )
    assert list(with_numbers(table).dtypes) == list(table.dtypes)
    assert fit_table_encoder(check_table(table)).mean == {}


def test_integers_that_come_back_as_floats_are_the_same_categories():
    encoder = fit_table_encoder(pd.DataFrame({"c": pd.Categorical([3, 1, 2])}))
    assert encoder.categories == {"c": ["1", "2", "3"]}
    for kind in (np.float64, np.float32, object):
        later = pd.DataFrame({"c": np.array([2.0, 3.0, 1.5], dtype=kind)})
        assert encoder.encode(later).tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_a_category_called_missing_is_not_missing():
    table = pd.DataFrame({"c": ["missing", None, "a"]})
    encoder = fit_table_encoder(table)
    assert encoder.categories == {"c": ["a", "missing", None]}
    assert encoder.encode(table).tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_unknown_scale():
    with pytest.raises(ValueError, match="numeric must be one of 'standard', 'quantile'"):
        fit_table_encoder(TRAIN, numeric="minmax")
