"""Refusals: an error names what is wrong, and a classifier that refused is as it was."""

import numpy as np
import pandas as pd
import pytest

from attnknn import AttnKNNClassifier
from attnknn.core import refine
from attnknn.estimator import fitting

LABELS = np.array(["a", "b"])[np.arange(12) % 2]
ROWS = np.arange(24.0).reshape(12, 2) + 50 * (LABELS == "b")[:, None]


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """What is refused does not depend on how long the attention is fitted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(refine.REFINE, "auto", (0, 2))
        yield


def classifier(**params) -> AttnKNNClassifier:
    return AttnKNNClassifier(**{"random_state": 0, "metric": "euclidean"} | params)


class Interrupted(BaseException):
    """What a user's Ctrl-C raises, in the middle of a fit."""


class TestRefits:
    """A fit that fails leaves what was fitted before."""

    @pytest.mark.parametrize(
        ("X", "y", "sample_weight", "message"),
        [
            (ROWS, np.arange(12) % 3, np.arange(12) % 3 == 0, "y must hold at least 2 classes"),
            (ROWS[:, :1], LABELS[:5], None, "y must have one label a row"),
            (ROWS, LABELS, np.zeros(12), "Sample weights must contain"),
            (pd.DataFrame({"x": list("ab") * 6}), LABELS, -np.ones(12), "Negative values"),
        ],
    )
    def test_a_refused_refit_changes_nothing(self, X, y, sample_weight, message):
        model = classifier().fit(ROWS, LABELS)
        before, kept = model.predict_proba(ROWS), dict(vars(model))
        with pytest.raises(ValueError, match=message):
            model.fit(X, y, sample_weight=sample_weight)
        assert vars(model) == kept
        np.testing.assert_array_equal(model.predict_proba(ROWS), before)
        assert model.label_issues(all_rows=True)["label"].isin(["a", "b"]).all()

    def test_a_refit_that_is_broken_off_changes_nothing(self, monkeypatch):
        model = classifier().fit(ROWS, LABELS)
        before = model.predict_proba(ROWS)

        def broken_off(*_, **__):
            raise Interrupted

        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(fitting, "learn", broken_off)
            model.fit(ROWS[:, ::-1], np.arange(12) % 3)
        np.testing.assert_array_equal(model.predict_proba(ROWS), before)

    def test_a_first_fit_that_is_refused_is_no_fit(self):
        model = classifier()
        with pytest.raises(ValueError, match="y must hold at least 2 classes"):
            model.fit(ROWS, np.zeros(12, int))
        assert not model.__sklearn_is_fitted__() and not hasattr(model, "classes_")


class TestOwnEmbedders:
    """A function of the user's own may return anything."""

    @pytest.mark.parametrize("metric", ["cosine", "euclidean"])
    def test_rows_of_another_width_are_refused_and_change_nothing(self, metric):
        rows = np.random.default_rng(0).normal(size=(12, 2))
        model = classifier(metric=metric, embedder=np.asarray, new_classes="add")
        model.fit(rows, LABELS)
        before = model.predict_proba(rows)
        message = "embedder must return rows of width 2, as in fit, got 3"
        with pytest.raises(ValueError, match=message):
            model.partial_fit(np.ones((1, 3)), ["z"])
        with pytest.raises(ValueError, match=message):
            model.predict(np.ones((1, 3)))
        assert model.classes_.tolist() == ["a", "b"]
        np.testing.assert_array_equal(model.predict_proba(rows), before)

    def test_nothing_at_all_is_refused(self):
        with pytest.raises(ValueError, match="embedder must return one row of numbers for each"):
            classifier(embedder=lambda rows: np.zeros((len(rows), 0))).fit(ROWS, LABELS)
        model = classifier(embedder=np.asarray).fit(ROWS, LABELS)
        with pytest.raises(ValueError, match="X must have at least one row, got none"):
            model.partial_fit(ROWS[:0], LABELS[:0])
        with pytest.raises(ValueError, match="X must have at least one row, got none"):
            model.predict(ROWS[:0])
        with pytest.raises(TypeError, match="X must be rows, got"):
            model.predict(None)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n_jobs": "a"}, "n_jobs must be None or an integer other than 0, got n_jobs='a'"),
        ({"n_jobs": 1.5}, "n_jobs must be None or an integer other than 0, got n_jobs=1.5"),
        ({"n_jobs": 0}, "n_jobs must be None or an integer other than 0, got n_jobs=0"),
        ({"index": 3}, "index must be the name of an index, got index=3"),
        ({"class_weight": {"a": "x", "b": 1}}, "class_weight must hold a number for each class"),
        ({"random_state": "a"}, "random_state must be None, .* got random_state='a'"),
        ({"random_state": -1}, "random_state must be None, .* got random_state=-1"),
        ({"training": {"epoch": 3}}, r"epoch must be a known setting.*did you mean 'epochs'"),
    ],
)
def test_parameters_are_refused_by_name(params, message):
    with pytest.raises(ValueError, match=message):
        classifier(**params).fit(ROWS, LABELS)


def test_parameters_that_are_set_after_fit_are_refused_by_name():
    model = classifier().fit(ROWS, LABELS)
    with pytest.raises(ValueError, match="n_jobs must be None or an integer"):
        model.set_params(n_jobs=0).predict(ROWS)
    model.set_params(n_jobs=None, missing="impute")
    with pytest.raises(ValueError, match=r"X must have no missing number.*missing='impute' in fit"):
        model.predict(np.full((1, 2), np.nan))
    table = pd.DataFrame({"x": ROWS[:, 0], "c": LABELS})
    model = classifier(metric="standardised").fit(table, LABELS).set_params(missing="impute")
    with pytest.raises(ValueError, match="column 'x' must have no missing number"):
        model.predict(table.assign(x=np.nan))


def test_what_comes_in_pairs_is_refused_alone():
    model = classifier().fit(ROWS, LABELS)
    for held_out in (5, ROWS, (ROWS,), "ab"):
        with pytest.raises(ValueError, match="held_out must be rows and their labels, got held_o"):
            model.predict_set(ROWS, held_out=held_out)
    with pytest.raises(ValueError, match="X must be given where y is, got X=None"):
        model.coverage_curve(y=LABELS)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ([0, 1], [True, False]),
        ([0, 1], [1.0, 0.0]),
        ([0, 1], [1.0, 7.0]),
        ([0, 1], ["0", "1"]),
        ([True, False], [0, 1]),
        ([0.0, 1.0], [0, 1]),
    ],
)
def test_labels_of_another_kind_are_refused(first, later):
    model = classifier(new_classes="add").fit(ROWS, np.array(first)[np.arange(12) % 2])
    classes = model.classes_
    with pytest.raises(ValueError, match="y must hold labels of the kind seen in fit"):
        model.partial_fit(ROWS[:2], later)
    assert model.classes_ is classes


def test_labels_of_the_same_kind_may_have_another_width():
    model = classifier(new_classes="add").fit(ROWS, np.arange(12, dtype=np.int8) % 2)
    model.partial_fit(ROWS[:2], np.array([1, 300]))
    assert model.classes_.tolist() == [0, 1, 300]
