"""Tables of any dtype: what holds numbers is read as numbers, and what holds times is refused."""

from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest

from attnknn import AttnKNNClassifier
from attnknn.core import refine
from attnknn.estimator import fitting

LABELS = np.arange(40) % 2
# Eighths: decimals of three places hold them exactly.
NUMBERS = np.round(8 * np.random.default_rng(0).normal(size=(40, 2))) / 8 + LABELS[:, None]
COLOURS = np.where(np.arange(40) % 3, "red", "blue")


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """How columns are read does not depend on how long the attention is fitted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(refine.REFINE, "auto", (0, 2))
        yield


def fitted_on(table, **params) -> AttnKNNClassifier:
    return AttnKNNClassifier(random_state=0, metric="standardised", **params).fit(table, LABELS)


def plain(*, mixed: bool) -> pd.DataFrame:
    table = pd.DataFrame(NUMBERS, columns=["a", "b"])
    return table.assign(colour=COLOURS) if mixed else table


def as_objects(table):
    return table.astype(object)


def as_decimals(table):
    return table.assign(**{name: table[name].map(lambda x: Decimal(str(x))) for name in "ab"})


def as_polars_decimals(table):
    return pl.from_pandas(table).with_columns(pl.col("a", "b").cast(pl.Decimal(10, 3)))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("retyped", [as_objects, as_decimals, as_polars_decimals])
def test_numbers_of_any_dtype_are_numbers_in_fit_and_after(retyped, mixed):
    table = plain(mixed=mixed)
    model, other = fitted_on(table), fitted_on(retyped(table))
    expected = model.predict_proba(table)
    for each in (model, other):
        for given in (table, retyped(table)):
            np.testing.assert_allclose(each.predict_proba(given), expected, rtol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_number_column_without_a_number_is_missing_and_not_a_category(mixed):
    table = plain(mixed=mixed)
    model = fitted_on(table, missing="impute")
    expected = model.predict_proba(table.assign(a=np.nan))
    for nothing in (None, pd.NA):
        empty = table.assign(a=pd.Series([nothing] * 40, dtype=object))
        np.testing.assert_array_equal(model.predict_proba(empty), expected)


@pytest.mark.parametrize(
    ("when", "dtype"),
    [
        (pd.date_range("2020-01-01", periods=40), "datetime64"),
        (pd.to_timedelta(np.arange(40), "s"), "timedelta64"),
    ],
)
def test_times_are_refused_in_fit_and_after(when, dtype):
    table = plain(mixed=True)
    message = rf"column 'when' must hold numbers or categories, got {dtype}\["
    for given in (table.assign(when=when), pl.from_pandas(table.assign(when=when))):
        with pytest.raises(ValueError, match=message):
            fitted_on(given)
    with pytest.raises(ValueError, match=message):
        fitted_on(table.assign(when=1.5)).predict(table.assign(when=when))


def test_columns_of_lists_and_tables_without_columns_are_refused():
    table = plain(mixed=False).assign(l=[[1], [2]] * 20)
    with pytest.raises(ValueError, match="column 'l' must hold numbers or categories, got list"):
        fitted_on(table)
    with pytest.raises(ValueError, match="X must have at least one column, got none"):
        fitted_on(pd.DataFrame(index=range(40)))


def test_columns_are_known_by_names_that_are_numbers_too():
    table = plain(mixed=True).set_axis(range(3), axis=1)
    model = fitted_on(table)
    expected = model.predict_proba(table)
    np.testing.assert_array_equal(model.predict_proba(table[[2, 0, 1]]), expected)
    with pytest.raises(ValueError, match="X must have the columns of fit, got none named 0, 1"):
        model.predict(table.set_axis([5, 6, 2], axis=1))


def test_categories_survive_as_floats_and_may_be_called_missing():
    group = pd.Categorical(LABELS * 2)
    table = pd.DataFrame({"group": group, "x": NUMBERS[:, 0], "c": ["missing", None] * 20})
    model = fitted_on(table)
    expected = model.predict_proba(table)
    as_floats = table.assign(group=LABELS * 2.0)
    np.testing.assert_array_equal(model.predict_proba(as_floats), expected)
    swapped = table.assign(c=[None, "missing"] * 20)
    assert (model.predict_proba(swapped) != expected).any()


def test_a_file_still_knows_what_is_missing(tmp_path):
    table = plain(mixed=True).assign(colour=np.where(np.arange(40) % 3, "red", None))
    model = fitted_on(table)
    path = model.save(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(
        AttnKNNClassifier.load(path).predict_proba(table), model.predict_proba(table)
    )


@pytest.mark.parametrize(("column", "n_trials"), [("category", 4), ("number", 6)])
def test_a_network_is_tried_only_where_a_column_holds_numbers(monkeypatch, column, n_trials):
    """Its periodic features read numbers; a large table of categories alone has none."""
    monkeypatch.setattr(fitting, "NETWORK_ROWS", 40)
    trials, judged = [], fitting._judged

    def watched(trial, *rest):
        trials.append(trial.name)
        return judged(trial, *rest)

    monkeypatch.setattr(fitting, "_judged", watched)
    names = np.arange(40) if column == "number" else [f"row {place}" for place in range(40)]
    table = pd.DataFrame({"colour": COLOURS, "name": names})
    model = AttnKNNClassifier(random_state=0, training={"epochs": 1}).fit(table, LABELS)
    assert len(trials) == n_trials and (fitting.NETWORK in trials) == (column == "number")
    assert model.predict_proba(table).shape == (40, 2)
