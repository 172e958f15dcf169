"""Generated bad inputs: each gets a right answer or a named error, never a crash or a NaN."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attnknn import AttnKNNClassifier
from attnknn.config import FittingConfig
from attnknn.estimator import fitting

# What may come back: errors with words in them. Anything else is a fault of ours.
NAMED = (ValueError, TypeError)
CALM = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """Errors do not depend on how long the attention is fitted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "FittingConfig", partial(FittingConfig, fit_epochs=1))
        yield


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(40, 3)), np.arange(40) % 2
    return AttnKNNClassifier(random_state=0).fit(rows + labels[:, None], labels)


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


@pytest.fixture(scope="module")
def table_model():
    rng = np.random.default_rng(1)
    colour = np.where(np.arange(40) % 3, "red", "blue")
    table = pd.DataFrame({"a": rng.normal(size=40), "b": colour, "c": rng.integers(3, size=40)})
    return AttnKNNClassifier(random_state=0).fit(table, np.arange(40) % 2)


def check_probs(probs, n_rows):
    assert probs.shape[0] == n_rows and np.isfinite(probs).all() and (probs >= 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=160, **CALM)
@given(rows=bad_rows)
def test_predicting_for_anything(model, rows):
    try:
        probs = model.predict_proba(rows)
    except NAMED as error:
        assert str(error)
        return
    check_probs(probs, len(rows))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, **CALM)
@given(rows=st.one_of(frames, bad_rows))
def test_predicting_for_any_table(table_model, rows):
    try:
        probs = table_model.predict_proba(rows)
    except NAMED as error:
        assert str(error)
        return
    check_probs(probs, len(rows))


labels = st.one_of(
    st.lists(things, min_size=12, max_size=12),
    st.lists(st.sampled_from(["a", "b"]), min_size=12, max_size=12),
    st.lists(st.sampled_from([0, 1, 2]), min_size=11, max_size=13),
    st.lists(st.sampled_from([0, 1, 7]), min_size=12, max_size=12).map(np.array),
    st.lists(st.sampled_from([0.5, 1.0, np.nan]), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    arrays,
)
good_rows = hnp.arrays(np.float64, (12, 2), elements=st.floats(-5, 5))
wild_rows = hnp.arrays(np.float64, (12, 2), elements=numbers)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, **CALM)
@given(rows=st.one_of(good_rows, good_rows, wild_rows, bad_rows), given_labels=labels)
def test_fitting_on_anything(rows, given_labels):
    try:
        model = AttnKNNClassifier(random_state=0, metric="standardised").fit(rows, given_labels)
    except NAMED as error:
        assert str(error)
        return
    check_probs(model.predict_proba(rows), len(rows))
    assert set(model.predict(rows)) <= set(np.asarray(given_labels).tolist())


weights = st.one_of(
    st.lists(numbers, min_size=12, max_size=12),
    st.lists(st.floats(0, 1e6), min_size=11, max_size=12),
    things,
)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, **CALM)
@given(sample_weight=weights)
def test_weighing_with_anything(sample_weight):
    rows, given_labels = np.arange(24.0).reshape(12, 2), np.arange(12) % 3
    model = AttnKNNClassifier(random_state=0, metric="standardised")
    try:
        model.fit(rows, given_labels, sample_weight=sample_weight)
    except NAMED as error:
        assert str(error)
        return
    check_probs(model.predict_proba(rows), 12)
