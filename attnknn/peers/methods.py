"""Methods: the classifier and what people use instead of it, each fitted on the same rows.

A method gets the training rows and labels of a problem and nothing else; it holds out for itself
what it needs.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import make_scorer, roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier, NeighborhoodComponentsAnalysis
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from attnknn.calibrate import smooth
from attnknn.estimator import AttnKNNClassifier
from attnknn.measure import negative_log_likelihood, summarise
from attnknn.peers.problems import Problem

FLOOR = 1e-3  # shared by all classes, the same for every method: no zero decides a log-likelihood
TUNING_ROWS = 5000  # rows that a search over settings sees; the chosen setting is fitted on all
NCA_ROWS, NCA_WIDTH, NCA_ITERATIONS = 2000, 32, 50  # its cost grows with the square of the rows
KS = (1, 3, 5, 10, 20, 50, 100)


def floored_nll(labels: np.ndarray, probs: np.ndarray) -> float:
    """Return the negative log-likelihood with the floor that every peer is given."""
    if probs.ndim == 1:  # scikit-learn's scorers hand over the second of two classes alone
        probs = np.stack([1 - probs, probs], axis=1)
    return negative_log_likelihood(smooth(probs, FLOOR), np.asarray(labels))


SCORER = make_scorer(floored_nll, response_method="predict_proba", greater_is_better=False)


def _searched(model: BaseEstimator, grid: dict, problem: Problem, seed: int) -> BaseEstimator:
    """Return the model at the setting with the best cross-validated log-likelihood, fitted."""
    rows = np.random.default_rng(seed).permutation(len(problem.labels))[:TUNING_ROWS]
    n_folds = int(np.clip(np.bincount(problem.labels[rows]).min(), 2, 5))
    folds = StratifiedKFold(n_folds, shuffle=True, random_state=seed)
    search = GridSearchCV(model, grid, scoring=SCORER, cv=folds, refit=False, error_score="raise")
    search.fit(problem.features[rows], problem.labels[rows])
    return model.set_params(**search.best_params_).fit(problem.features, problem.labels)


def _tuned_knn(weights: str) -> Callable:
    def fit(problem: Problem, seed: int) -> BaseEstimator:
        steps = [("scale", StandardScaler()), ("knn", KNeighborsClassifier(weights=weights))]
        smallest = min(len(problem.labels), TUNING_ROWS) // 2
        ks = [k for k in KS if k <= smallest]
        grid = {"scale": [StandardScaler(), "passthrough"], "knn__n_neighbors": ks}
        return _searched(Pipeline(steps), grid, problem, seed)

    return fit


def _nca_knn(problem: Problem, seed: int) -> BaseEstimator:
    """Learn the metric on at most 2 000 rows, then tune k on all rows of the search."""
    rows = np.random.default_rng(seed).permutation(len(problem.labels))[:NCA_ROWS]
    nca = NeighborhoodComponentsAnalysis(
        n_components=min(NCA_WIDTH, problem.features.shape[1]),
        max_iter=NCA_ITERATIONS,
        random_state=seed,
    )
    metric = Pipeline([("scale", StandardScaler()), ("nca", nca)])
    metric.fit(problem.features[rows], problem.labels[rows])
    shown = replace(problem, features=metric.transform(problem.features))
    ks = [k for k in KS if k <= min(len(problem.labels), TUNING_ROWS) // 2]
    knn = _searched(KNeighborsClassifier(), {"n_neighbors": ks}, shown, seed)
    return Pipeline([("metric", metric), ("knn", knn)])


def _logistic(problem: Problem, seed: int) -> BaseEstimator:
    model = Pipeline([("scale", StandardScaler()), ("lr", LogisticRegression(max_iter=1000))])
    return _searched(model, {"lr__C": [0.01, 0.1, 1.0, 10.0]}, problem, seed)


def _boosting(problem: Problem, seed: int) -> BaseEstimator:
    model = HistGradientBoostingClassifier(random_state=seed)
    return model.fit(problem.features, problem.labels)


def _default_knn(problem: Problem, seed: int) -> BaseEstimator:
    model = Pipeline([("scale", StandardScaler()), ("knn", KNeighborsClassifier())])
    return model.fit(problem.features, problem.labels)


ATTENTION = "attention kNN"
# Method to what fits it; the kNN family first.
PEERS: dict[str, Callable[[Problem, int], BaseEstimator]] = {
    "kNN, default": _default_knn,
    "kNN uniform, tuned": _tuned_knn("uniform"),
    "kNN distance, tuned": _tuned_knn("distance"),
    "NCA + kNN": _nca_knn,
    "logistic regression": _logistic,
    "gradient boosting": _boosting,
}
METHODS = (ATTENTION, *PEERS)
KNN_FAMILY = METHODS[:5]


def measure_method(method: str, problem: Problem, *, seed: int) -> dict[str, Any]:
    """Return a method's measures on a problem, and the seconds it took.

    The attention kNN also says which of the training labels it holds for wrong.
    """
    start = time.perf_counter()
    if method == ATTENTION:
        model = AttnKNNClassifier(random_state=seed).fit(problem.inputs, problem.labels)
    else:
        model = PEERS[method](problem, seed)
    fitted = time.perf_counter()
    shown = problem.test_inputs if method == ATTENTION else problem.test_features
    probs = np.zeros((len(problem.test_labels), problem.n_classes))
    probs[:, model.classes_] = model.predict_proba(shown)
    seconds = {"fit": fitted - start, "predict": time.perf_counter() - fitted}
    facts: dict[str, Any] = {}
    if method == ATTENTION:
        facts = {"embedder": model.embedder_, "label_noise": model.label_noise_}
        if problem.flipped.any():
            issues = model.label_issues(all_rows=True).set_index("id")["quality"]
            quality = issues.reindex(np.arange(len(problem.labels))).to_numpy()
            facts["issue_auroc"] = float(roc_auc_score(problem.flipped, -quality))
    metrics = summarise(smooth(probs, FLOOR), problem.test_labels)
    return {"metrics": metrics, "seconds": seconds, **facts}


CLEANLAB = {
    "cleanlab, logistic regression": lambda seed: Pipeline(
        [("scale", StandardScaler()), ("lr", LogisticRegression(max_iter=1000))]
    ),
    "cleanlab, gradient boosting": lambda seed: HistGradientBoostingClassifier(random_state=seed),
    "cleanlab, kNN": lambda seed: Pipeline(
        [("scale", StandardScaler()), ("knn", KNeighborsClassifier(20))]
    ),
}


def measure_cleanlab(name: str, problem: Problem, *, seed: int) -> dict[str, Any]:
    """Return how well cleanlab tells flipped labels from others (AUROC), and its seconds."""
    from cleanlab.rank import get_label_quality_scores

    start = time.perf_counter()
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    probs = cross_val_predict(
        CLEANLAB[name](seed), problem.features, problem.labels, cv=folds, method="predict_proba"
    )
    quality = get_label_quality_scores(problem.labels, probs)
    auroc = float(roc_auc_score(problem.flipped, -quality))
    return {"issue_auroc": auroc, "seconds": {"all": time.perf_counter() - start}}
