"""The classifier inside other people's tools, with the real libraries."""

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from imblearn.over_sampling import SMOTE
from imblearn.pipeline import make_pipeline as make_balanced_pipeline
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_iris, make_blobs
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from attnknn import AttnKNNClassifier
from attnknn.core import refine


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """What is tested is that the parts fit together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(refine.REFINE, "auto", (0, 2))
        yield


@pytest.fixture(scope="module")
def flowers():
    rows, labels = load_iris(return_X_y=True)
    return rows[::2], labels[::2], rows[1::2], labels[1::2]


def classifier(**params) -> AttnKNNClassifier:
    return AttnKNNClassifier(random_state=0, metric="standardised", **params)


def test_calibrated_classifier_cv(flowers):
    model = CalibratedClassifierCV(classifier(), cv=3, method="sigmoid").fit(*flowers[:2])
    assert model.score(*flowers[2:]) > 0.9


def test_mapie_prediction_sets(flowers):
    from mapie.classification import SplitConformalClassifier

    model = SplitConformalClassifier(classifier().fit(*flowers[:2]), confidence_level=0.9)
    model.conformalize(flowers[2][::2], flowers[3][::2])
    _, sets = model.predict_set(flowers[2][1::2])
    covered = sets[np.arange(len(sets)), flowers[3][1::2], 0]
    assert covered.mean() > 0.8


def test_cleanlab_finds_wrong_labels():
    from cleanlab.classification import CleanLearning

    rows, labels = make_blobs(150, 4, centers=3, random_state=0)
    wrong = np.random.default_rng(0).random(150) < 0.15
    noisy = np.where(wrong, (labels + 1) % 3, labels)
    cleaner = CleanLearning(classifier(), cv_n_folds=3, seed=0)
    found = cleaner.find_label_issues(rows, noisy)["is_label_issue"].to_numpy()
    assert (found & wrong).sum() > 0.8 * wrong.sum() and (found & ~wrong).sum() < 10


def test_imbalanced_learn_pipeline():
    rows, labels = make_blobs([70, 12], 4, random_state=0)
    model = make_balanced_pipeline(SMOTE(k_neighbors=3, random_state=0), classifier())
    model.fit(rows, labels)
    assert len(model[-1].memory_) == 140 and model.score(rows, labels) > 0.9


def test_joblib_copies_and_processes(flowers, tmp_path):
    model = classifier().fit(*flowers[:2])
    expected = model.predict_proba(flowers[2])
    joblib.dump(model, tmp_path / "model.joblib")
    np.testing.assert_array_equal(
        joblib.load(tmp_path / "model.joblib").predict_proba(flowers[2]), expected
    )
    parts = joblib.Parallel(n_jobs=2, backend="threading")(
        joblib.delayed(model.predict_proba)(part) for part in np.array_split(flowers[2], 3)
    )
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5)


@pytest.mark.slow
def test_joblib_worker_processes(flowers):
    model = classifier().fit(*flowers[:2])
    parts = joblib.Parallel(n_jobs=2)(
        joblib.delayed(model.predict_proba)(part) for part in np.array_split(flowers[2], 2)
    )
    np.testing.assert_allclose(np.concatenate(parts), model.predict_proba(flowers[2]), rtol=1e-5)


def test_grid_search_and_clone(flowers):
    grid = {"attn__n_neighbors": [5, 10], "attn__label_noise": [0.0, "auto"]}
    pipeline = make_pipeline(StandardScaler(), classifier())
    pipeline.steps[-1] = ("attn", pipeline.steps[-1][1])
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(*flowers[:2])
    assert search.best_params_["attn__n_neighbors"] in (5, 10)
    copy = clone(search.best_estimator_)
    assert not hasattr(copy[-1], "memory_") and copy[-1].n_neighbors in (5, 10)


def test_cross_val_predict(flowers):
    probs = cross_val_predict(classifier(), *flowers[:2], cv=3, method="predict_proba")
    assert (probs.argmax(axis=1) == flowers[1]).mean() > 0.85


def test_voting(flowers):
    members = [("attention", classifier()), ("linear", LogisticRegression(max_iter=500))]
    assert VotingClassifier(members, voting="soft").fit(*flowers[:2]).score(*flowers[2:]) > 0.9


@pytest.mark.parametrize("container", ["pandas", "polars"])
def test_pipelines_that_hand_over_data_frames(flowers, container):
    model = make_pipeline(StandardScaler(), classifier()).set_output(transform=container)
    columns = list("abcd")
    frame = pd.DataFrame(flowers[0], columns=columns)
    frame = frame if container == "pandas" else pl.from_pandas(frame)
    model.fit(frame, flowers[1])
    assert model[-1].feature_names_in_.tolist() == columns
    assert model.score(frame, flowers[1]) > 0.9


def test_a_column_transformer_in_front(flowers):
    table = pd.DataFrame({"n": flowers[0][:, 2], "c": np.where(flowers[0][:, 3] > 1, "x", "y")})
    encoder = make_column_transformer(
        (StandardScaler(), ["n"]), (OneHotEncoder(sparse_output=False), ["c"])
    )
    model = make_pipeline(encoder, classifier()).fit(table, flowers[1])
    assert model.score(table, flowers[1]) > 0.85
