"""Generated bad inputs: each gets a right answer or a named error, never a crash or a NaN."""

import re
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attnknn import AttnKNNClassifier
from attnknn.core import refine
from attnknn.estimator import fitting

# Words that an error must hold: the argument it is about. What numpy says of itself has none.
OURS = (
    r"^(X|y|sample_weight|column .*|ids|coverage|score|target_risk|embedder|embedder\(X\)|training|"
    "n_neighbors|metric|missing|new_classes|label_noise|class_weight|reject_below|n_jobs|index|"
    "random_state|verbose|trust_neighbours)"
    r"( \(.*\)| or target_risk)? must |^\w+ must be a known setting, got "
)
SCIKIT = (
    "X has .* features, but|Input X contains|Found array with|Expected 2D array|Complex data|"
    "feature names|y should be|Unknown label type|y must|target y is None|"
    "sample_weight.* expected|Sample weights must|contains NaN|contains infinity|"
    "Negative values in data passed to `sample_weight`"
)
NAMED = re.compile(f"{OURS}|{SCIKIT}")
CALM = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def refusing():
    """Let errors pass that name what is wrong; anything else is a fault of ours."""
    try:
        yield
    except (ValueError, TypeError) as error:
        assert NAMED.search(str(error)), f"nobody can tell what is wrong from: {error!r}"


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """Errors do not depend on how long the attention is fitted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(refine.REFINE, "auto", (0, 2))
        yield


ROWS = np.random.default_rng(0).normal(size=(40, 3)) + (np.arange(40) % 2)[:, None]


@pytest.fixture(scope="module")
def model():
    return AttnKNNClassifier(random_state=0).fit(ROWS, np.arange(40) % 2)


@pytest.fixture(scope="module")
def table_model():
    rng = np.random.default_rng(1)
    colour = np.where(np.arange(40) % 3, "red", "blue")
    table = pd.DataFrame({"a": rng.normal(size=40), "b": colour, "c": rng.integers(3, size=40)})
    return AttnKNNClassifier(random_state=0).fit(table, np.arange(40) % 2)


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.sampled_from([0.0, -0.0, 1e-320, 1e15, 1e16, 1e308, np.nan, np.inf, -np.inf]),
    st.floats(-10, 10),
)
arrays = hnp.arrays(
    st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_, np.complex128]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
number_tables = st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=4)
ragged = st.lists(st.lists(numbers, max_size=4), max_size=4)
things = st.one_of(st.none(), st.text(max_size=3), st.integers(), st.booleans(), numbers)
mixed = st.lists(st.lists(things, min_size=3, max_size=3), min_size=1, max_size=3)
frames = st.lists(
    st.fixed_dictionaries({"a": numbers, "b": things, "c": things}), min_size=0, max_size=4
).map(pd.DataFrame)
bad_rows = st.one_of(arrays, number_tables, ragged, mixed, frames, things)


def check_answers(model, rows):
    """Check that a classifier answers with whole probabilities and with classes it knows."""
    probs = model.predict_proba(rows)
    assert len(probs) == len(rows) and np.isfinite(probs).all() and (probs >= 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    assert set(model.predict(rows).tolist()) <= set(model.classes_.tolist())


@settings(max_examples=120, **CALM)
@given(rows=bad_rows)
def test_predicting_for_anything(model, rows):
    with refusing():
        check_answers(model, rows)


@settings(max_examples=60, **CALM)
@given(rows=st.one_of(frames, bad_rows))
def test_predicting_for_any_table(table_model, rows):
    with refusing():
        check_answers(table_model, rows)


labels = st.one_of(
    st.lists(things, min_size=12, max_size=12),
    st.lists(st.sampled_from(["a", "b"]), min_size=12, max_size=12),
    st.lists(st.sampled_from([0, 1, 2]), min_size=11, max_size=13),
    st.lists(st.sampled_from([0, 1, 7]), min_size=12, max_size=12).map(np.array),
    st.lists(st.sampled_from([0.5, 1.0, np.nan]), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    ragged,
    arrays,
)
good_rows = hnp.arrays(np.float64, (12, 2), elements=st.floats(-5, 5))
wild_rows = hnp.arrays(np.float64, (12, 2), elements=numbers)


@settings(max_examples=60, **CALM)
@given(
    rows=st.one_of(good_rows, good_rows, wild_rows, bad_rows),
    given_labels=labels,
    metric=st.sampled_from(["auto", *fitting.METRICS]),
)
def test_fitting_on_anything(rows, given_labels, metric):
    with refusing():
        model = AttnKNNClassifier(random_state=0, metric=metric).fit(rows, given_labels)
        check_answers(model, rows)
        assert set(model.classes_.tolist()) <= set(np.ravel(given_labels).tolist())


@settings(max_examples=25, **CALM)
@given(
    rows=hnp.arrays(np.float64, (12, 2), elements=st.floats(-1e15, 1e15)),
    given_labels=st.permutations([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 5]),
    metric=st.sampled_from(["auto", *fitting.METRICS]),
)
def test_rows_of_any_size_are_fitted_and_answered(rows, given_labels, metric):
    model = AttnKNNClassifier(random_state=0, metric=metric).fit(rows, given_labels)
    check_answers(model, rows)
    assert model.classes_.tolist() == [0, 1, 2, 5]


weights = st.one_of(
    st.lists(numbers, min_size=12, max_size=12),
    st.lists(st.floats(0, 1e6), min_size=11, max_size=12),
    st.lists(st.sampled_from([0.0, 1e-20, 1.0, 1e12]), min_size=12, max_size=12),
    ragged,
    things,
)


@settings(max_examples=40, **CALM)
@given(sample_weight=weights)
def test_weighing_with_anything(sample_weight):
    rows, given_labels = np.arange(24.0).reshape(12, 2), np.arange(12) % 3
    model = AttnKNNClassifier(random_state=0, metric="standardised")
    with refusing():
        model.fit(rows, given_labels, sample_weight=sample_weight)
        check_answers(model, rows)


more_labels = st.one_of(
    st.lists(st.sampled_from([0, 1]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0, 1, 5]), min_size=3, max_size=4),
    st.lists(things, min_size=4, max_size=4),
    ragged,
    things,
)


@settings(max_examples=40, **CALM)
@given(
    rows=st.one_of(hnp.arrays(np.float64, (4, 3), elements=numbers), bad_rows),
    given_labels=more_labels,
    sample_weight=st.one_of(st.none(), st.lists(numbers, min_size=4, max_size=4)),
)
def test_adding_anything(model, rows, given_labels, sample_weight):
    grown, added = deepcopy(model), False
    with refusing():
        grown.partial_fit(rows, given_labels, sample_weight=sample_weight)
        added = True
    check_answers(grown, ROWS)
    if not added:  # what was refused has changed nothing
        np.testing.assert_array_equal(grown.predict_proba(ROWS), model.predict_proba(ROWS))


ids = st.one_of(
    st.integers(-2, 45),
    st.lists(st.integers(0, 39), max_size=50),
    st.lists(st.one_of(st.integers(), things), max_size=4),
    ragged,
    arrays,
    things,
)


@settings(max_examples=40, **CALM)
@given(ids=ids)
def test_forgetting_anything(model, ids):
    left, forgotten = deepcopy(model), False
    with refusing():
        left.forget(ids)
        forgotten = True
    check_answers(left, ROWS)
    gone = len(set(np.ravel(ids).tolist())) if forgotten else 0
    assert len(left.memory_) == 40 - gone


@settings(max_examples=50, **CALM)
@given(
    coverage=st.one_of(st.floats(0.01, 0.99), things),
    score=st.one_of(st.sampled_from(["aps", "lac"]), things),
)
def test_sets_of_any_coverage(model, coverage, score):
    with refusing():
        sets = model.predict_set(ROWS[:7], coverage, score=score)
        assert sets.shape == (7, 2) and sets.dtype == bool and sets.any(axis=1).all()
    with refusing():
        threshold = model.reject_threshold(target_risk=coverage)
        assert threshold == np.inf or 0 < threshold <= 1


@settings(max_examples=50, **CALM)
@given(
    rows=st.one_of(st.just(ROWS[:4]), bad_rows),
    given_labels=more_labels,
)
def test_a_curve_of_anything(model, rows, given_labels):
    with refusing():
        curve = model.coverage_curve(rows, given_labels)
        if rows is not None:
            assert len(curve) == len(rows)
        assert np.isfinite(curve.to_numpy(float)).all() and curve["risk"].between(0, 1).all()


times = st.sampled_from(
    [pd.Timestamp("2020-01-01"), pd.Timedelta(3, "h"), pd.Timestamp("2020-01-01").date(), pd.NaT]
)
cells = st.one_of(
    st.floats(-5, 5),
    st.integers(-3, 3),
    st.decimals(-5, 5, places=2),
    st.sampled_from(["red", "blue", "missing", None, pd.NA, True]),
)
columns = st.one_of(
    *(st.lists(each, min_size=12, max_size=12) for each in (st.floats(-5, 5), st.decimals(-5, 5))),
    st.lists(st.integers(0, 3), min_size=12, max_size=12).map(pd.Categorical),
    st.lists(st.one_of(st.integers(-9, 9), st.floats(-9, 9)), min_size=12, max_size=12),
    st.lists(cells, min_size=12, max_size=12),
    st.lists(times, min_size=12, max_size=12),
    st.lists(st.lists(st.integers(), max_size=2), min_size=12, max_size=12),
).map(lambda values: pd.Series(values, dtype=getattr(values, "dtype", object)))
whole_frames = st.dictionaries(st.sampled_from(["a", "b", "c"]), columns, max_size=3).map(
    lambda made: pd.DataFrame(made, index=range(12))
)


@settings(max_examples=40, **CALM)
@given(table=whole_frames, missing=st.sampled_from(["error", "impute"]))
def test_fitting_on_any_table(table, missing):
    with refusing():
        model = AttnKNNClassifier(random_state=0, metric="standardised", missing=missing)
        model.fit(table, np.arange(12) % 2)
        check_answers(model, table)
        kinds = {pd.api.types.infer_dtype(table[name]) for name in table}
        assert not {"datetime", "date", "timedelta"} & kinds
        encoder = model._fitted.embedding.features.encoder
        for name in table:  # numbers are never opened up as categories
            if pd.api.types.infer_dtype(table[name]) in ("floating", "decimal", "integer"):
                assert name in encoder.mean or "0" in encoder.mean


parameters = st.one_of(
    st.fixed_dictionaries({"n_neighbors": things}),
    st.fixed_dictionaries({"embedder": st.one_of(things, st.just(np.asarray))}),
    st.fixed_dictionaries({"metric": things}),
    st.fixed_dictionaries({"label_noise": things}),
    st.fixed_dictionaries({"class_weight": st.one_of(st.just({0: "x", 1: None}), st.just("some"))}),
    st.fixed_dictionaries({"missing": things}),
    st.fixed_dictionaries({"new_classes": things}),
    st.fixed_dictionaries({"reject_below": things}),
    st.fixed_dictionaries({"training": st.one_of(things, st.just({"epoch": 3}))}),
    st.fixed_dictionaries({"trust_neighbours": things}),
    st.fixed_dictionaries({"index": things}),
    st.fixed_dictionaries({"n_jobs": st.sampled_from(["a", 1.5, 0, True, 1, -1])}),
    st.fixed_dictionaries({"random_state": things}),
    st.fixed_dictionaries({"verbose": st.one_of(st.none(), st.text(max_size=3))}),
)
FEW_ROWS, FEW_LABELS = ROWS[:12], np.arange(12) % 2


def learned(model):
    return {name: value for name, value in vars(model).items() if name.endswith("_")}


@settings(max_examples=60, **CALM)
@given(params=parameters)
def test_refitting_with_any_parameter(model, params):
    other, refitted = deepcopy(model), False
    kept = learned(other)
    with refusing():
        other.set_params(**params).fit(FEW_ROWS, FEW_LABELS)
        refitted = True
    if not refitted:  # what was refused has changed nothing
        now = learned(other)
        assert now.keys() == kept.keys() and all(now[name] is kept[name] for name in kept)


@settings(max_examples=40, **CALM)
@given(first=st.one_of(good_rows, arrays, things), later=st.one_of(arrays, number_tables, things))
def test_embedding_by_any_function(first, later):
    answers = [later, first]
    other = AttnKNNClassifier(
        random_state=0, metric="euclidean", embedder=lambda rows: answers.pop()
    )
    with refusing():
        other.fit(FEW_ROWS, FEW_LABELS)
        other.partial_fit(FEW_ROWS, FEW_LABELS)
