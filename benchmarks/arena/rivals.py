"""Rivals: what people use instead, each fitted on the training rows of a problem alone.

A rival gets rows, labels and a seed, and holds out for itself what it needs. Axes: N rows, C
classes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
from sklearn.base import ClassifierMixin
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, NeighborhoodComponentsAnalysis
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, QuantileTransformer, StandardScaler

from benchmarks.arena import knn
from benchmarks.arena.problems import measures, per_class

N_FOLDS = 3  # of the refits that a temperature and label issues are made from
MISSING = "missing"  # a category of its own
CS = (0.01, 0.1, 1.0, 10.0)  # of logistic regression
NCA_ROWS, NCA_WIDTH, NCA_ITERATIONS = 500, 32, 50  # its cost grows with the square of the rows
TREES = 300
STOP_SHARE, STOP_ROUNDS, MOST_ROUNDS = 0.15, 50, 1000  # early stopping of boosting
LEARNING_RATE = 0.05  # CatBoost finds its own
ONE_HOT = 10  # categories up to which CatBoost splits on single ones; its pairs take minutes

Predict = Callable[[pd.DataFrame], np.ndarray]


@dataclass(frozen=True)
class Rows:
    """What a rival is fitted on: features, labels from 0 on, C and a seed."""

    features: pd.DataFrame
    labels: np.ndarray
    n_classes: int
    seed: int

    def part(self, chosen: np.ndarray) -> "Rows":
        """Return some of the rows, by mask or places."""
        features = self.features.iloc[np.arange(len(self.labels))[chosen]]
        return replace(self, features=features.reset_index(drop=True), labels=self.labels[chosen])


@dataclass(frozen=True)
class Fitted:
    """A fitted rival.

    Attributes:
        predict: Features to probabilities, (N, C).
        held_out: Probabilities of the training rows by models that have not seen them, where the
            choice of settings has made them anyway.
        settings: What was chosen.
    """

    predict: Predict
    held_out: np.ndarray | None = None
    settings: dict | None = None


def fit_rival(method: str, rows: Rows) -> Fitted:
    """Return a rival fitted on rows."""
    if method in TUNED:
        return TUNED[method](rows)
    return Fitted(_fit(FITS[method], rows))


def held_out_probs(method: str, fitted: Fitted, rows: Rows) -> np.ndarray:
    """Return probabilities of the training rows, each by a model that has not seen it, (N, C)."""
    if fitted.held_out is not None:
        return fitted.held_out
    return out_of_fold(FITS[method], rows)


def folds_of(labels: np.ndarray, n_folds: int, seed: int) -> np.ndarray:
    """Return the fold of each row; the rows of a class are spread evenly over the folds."""
    rng = np.random.default_rng([seed, n_folds])
    order = np.lexsort((rng.random(len(labels)), labels))
    folds = np.empty(len(labels), np.int64)
    folds[order] = np.arange(len(labels)) % n_folds
    return folds


def out_of_fold(fit: Callable[[Rows], Predict], rows: Rows) -> np.ndarray:
    """Return each row's probabilities by a model fitted without its fold, (N, C)."""
    folds = folds_of(rows.labels, N_FOLDS, rows.seed)
    probs = np.zeros((len(rows.labels), rows.n_classes))
    for fold in range(N_FOLDS):
        inside = folds == fold
        probs[inside] = _fit(fit, rows.part(~inside))(rows.part(inside).features)
    return probs


def _fit(fit: Callable[[Rows], Predict], rows: Rows) -> Predict:
    """Fit a model on labels without gaps, whichever classes are there; predict all of them."""
    present, codes = np.unique(rows.labels, return_inverse=True)
    if len(present) == 1:
        certain = np.eye(rows.n_classes)[present]
        return lambda features: np.repeat(certain, len(features), axis=0)
    inner = fit(replace(rows, labels=codes, n_classes=len(present)))

    def predict(features: pd.DataFrame) -> np.ndarray:
        probs = np.zeros((len(features), rows.n_classes))
        probs[:, present] = inner(features)
        return probs

    return predict


# ---- Rows as numbers.


def texts_of(features: pd.DataFrame) -> list[str]:
    """Return the columns that are categories."""
    numbers = features.select_dtypes("number").columns
    return [column for column in features if column not in numbers]


def encoder(features: pd.DataFrame) -> ColumnTransformer:
    """Return what makes numbers of a table: medians for missing numbers, one-hot categories."""
    texts = texts_of(features)
    numbers = [column for column in features if column not in texts]
    fill = SimpleImputer(strategy="median", keep_empty_features=True)
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    parts = [("numbers", make_pipeline(fill, StandardScaler()), numbers), ("texts", one_hot, texts)]
    return ColumnTransformer([part for part in parts if part[2]])


def _encoded(make: Callable[[Rows], ClassifierMixin]) -> Callable[[Rows], Predict]:
    """Return the fit of a scikit-learn model on encoded rows."""

    def fit(rows: Rows) -> Predict:
        model = Pipeline([("encode", encoder(rows.features)), ("model", make(rows))])
        return model.fit(rows.features, rows.labels).predict_proba

    return fit


# ---- Settings chosen by cross-validated log-likelihood; what was held out serves again.


def _logistic(rows: Rows) -> Fitted:
    fits = {c: _encoded(lambda _, c=c: LogisticRegression(C=c, max_iter=500)) for c in CS}
    tried = {c: out_of_fold(fit, rows) for c, fit in fits.items()}
    best = min(tried, key=lambda c: measures(tried[c], rows.labels)["nll"])
    return Fitted(_fit(fits[best], rows), tried[best], {"C": best})


def _forest(rows: Rows) -> Fitted:
    """Return a forest; the trees that have not seen a row predict it."""
    present, codes = np.unique(rows.labels, return_inverse=True)
    known = encoder(rows.features).fit(rows.features)
    model = RandomForestClassifier(TREES, oob_score=True, random_state=rows.seed, n_jobs=1)
    model.fit(known.transform(rows.features), codes)
    held_out = np.zeros((len(codes), rows.n_classes))
    held_out[:, present] = np.nan_to_num(model.oob_decision_function_.reshape(len(codes), -1))
    held_out[held_out.sum(axis=1) == 0] = 1 / rows.n_classes  # a row in every tree's sample

    def predict(features: pd.DataFrame) -> np.ndarray:
        probs = np.zeros((len(features), rows.n_classes))
        probs[:, present] = model.predict_proba(known.transform(features))
        return probs

    return Fitted(predict, held_out)


def _as_they_are(known: pd.DataFrame, labels: np.ndarray, scaling: str) -> knn.Encode:
    """Return what encodes tables for the tuned kNN; see ``knn.Place``."""
    model = encoder(known).fit(known)
    n_numbers = known.shape[1] - len(texts_of(known))
    encode = lambda table: np.asarray(model.transform(table), np.float64)  # noqa: E731
    if scaling == "standard" or not n_numbers:
        return encode
    ranks = QuantileTransformer(
        n_quantiles=min(1000, len(known)), output_distribution="normal", subsample=None
    ).fit(encode(known)[:, :n_numbers])

    def encode_by_rank(table: pd.DataFrame) -> np.ndarray:
        rows = encode(table)
        rows[:, :n_numbers] = ranks.transform(rows[:, :n_numbers])
        return rows

    return encode_by_rank


def _by_learned_metric(known: pd.DataFrame, labels: np.ndarray, scaling: str) -> knn.Encode:
    """Return what encodes tables by the metric that NCA learns on at most ``NCA_ROWS`` rows."""
    encode = _as_they_are(known, labels, scaling)
    some = np.random.default_rng(0).permutation(len(known))[:NCA_ROWS]
    rows, steps = encode(known)[some], []
    if rows.shape[1] > 2 * NCA_WIDTH:
        steps = [PCA(min(2 * NCA_WIDTH, len(some) - 1), random_state=0)]
    width = min(NCA_WIDTH, rows.shape[1], len(some) - 1)
    nca = NeighborhoodComponentsAnalysis(width, init="pca", max_iter=NCA_ITERATIONS, random_state=0)
    metric = make_pipeline(*steps, nca).fit(rows, labels[some])
    return lambda table: np.asarray(metric.transform(encode(table)), np.float64)


def _tuned(grid: knn.Grid, place: knn.Place) -> Callable[[Rows], Fitted]:
    """Return the fit of a kNN whose settings have the best cross-validated log-likelihood."""

    def fit(rows: Rows) -> Fitted:
        width = encoder(rows.features).fit(rows.features).transform(rows.features[:1]).shape[1]
        chosen = np.random.default_rng(rows.seed).permutation(len(rows.labels))[: knn.TUNING_ROWS]
        few = rows.part(np.sort(chosen))
        best, probs, lowest = None, None, np.inf
        for setting, each in _searched(few, grid.for_width(width), place):
            if (nll := measures(each, few.labels)["nll"]) < lowest:
                best, probs, lowest = setting, each, nll
        if best is None:
            raise ValueError(f"rows must be enough for neighbours, got rows={len(rows.labels)}")
        if len(few.labels) < len(rows.labels):
            alone = knn.Grid((best.power,), (best.scaling,), (best.k,))
            tried = _searched(rows, alone, place)
            probs = next(each for setting, each in tried if setting.weights == best.weights)

        encode = place(rows.features, rows.labels, best.scaling)
        memory = encode(rows.features)

        def predict(features: pd.DataFrame) -> np.ndarray:
            return knn.predict_with(best, memory, rows.labels, encode(features), rows.n_classes)

        return Fitted(predict, probs, asdict(best))

    return fit


def _searched(rows: Rows, grid: knn.Grid, place: knn.Place):
    folds = folds_of(rows.labels, N_FOLDS, rows.seed)
    return knn.search(rows.features, rows.labels, rows.n_classes, folds, grid, place)


# ---- Boosting: stopped early on rows of the training part, which it does not see.


def hold_out(rows: Rows) -> tuple[Rows, Rows]:
    """Return rows to fit on, with every class, and rows to stop by."""
    rng = np.random.default_rng(rows.seed)
    stop = np.zeros(len(rows.labels), bool)
    stop[per_class(rows.labels, rng, lambda n: round(STOP_SHARE * n) if n > 1 else 0)] = True
    if not stop.any():
        stop[rng.choice(np.flatnonzero(np.bincount(rows.labels)[rows.labels] > 1))] = True
    return rows.part(~stop), rows.part(stop)


def _categories(features: pd.DataFrame) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return what gives text columns the type of a category, with the values known here."""
    known = {column: sorted(features[column].dropna().unique()) for column in texts_of(features)}

    def typed(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(
            **{column: pd.Categorical(table[column], values) for column, values in known.items()}
        )

    return typed


def _histogram(rows: Rows) -> Predict:
    """Stop at the best round: unlike the other two, scikit-learn keeps those after it."""
    typed, (fitted_on, stop) = _categories(rows.features), hold_out(rows)
    model = HistGradientBoostingClassifier(
        max_iter=MOST_ROUNDS,
        learning_rate=LEARNING_RATE,
        early_stopping=True,
        n_iter_no_change=STOP_ROUNDS,
        categorical_features="from_dtype",
        random_state=rows.seed,
    )
    shown, judged = typed(fitted_on.features), typed(stop.features)
    model.fit(shown, fitted_on.labels, X_val=judged, y_val=stop.labels)
    losses = [measures(probs, stop.labels)["nll"] for probs in model.staged_predict_proba(judged)]
    model.set_params(max_iter=int(np.argmin(losses)) + 1, early_stopping=False)
    model.fit(shown, fitted_on.labels)
    return lambda features: model.predict_proba(typed(features))


def _lightgbm(rows: Rows) -> Predict:
    import lightgbm

    typed, (fitted_on, stop) = _categories(rows.features), hold_out(rows)
    safe = [f"x{i}" for i in range(rows.features.shape[1])]  # it refuses some signs in names
    shown = lambda table: typed(table).set_axis(safe, axis=1)  # noqa: E731
    model = lightgbm.LGBMClassifier(
        n_estimators=MOST_ROUNDS,
        learning_rate=LEARNING_RATE,
        random_state=rows.seed,
        n_jobs=1,
        verbose=-1,
    )
    model.fit(
        shown(fitted_on.features),
        fitted_on.labels,
        eval_X=shown(stop.features),
        eval_y=stop.labels,
        callbacks=[lightgbm.early_stopping(STOP_ROUNDS, verbose=False)],
    )
    return lambda features: model.predict_proba(shown(features))


def _catboost(rows: Rows) -> Predict:
    import catboost

    texts, (fitted_on, stop) = texts_of(rows.features), hold_out(rows)
    shown = lambda table: table.assign(**{c: table[c].fillna(MISSING) for c in texts})  # noqa: E731
    model = catboost.CatBoostClassifier(
        iterations=MOST_ROUNDS,
        loss_function="MultiClass" if rows.n_classes > 2 else "Logloss",
        one_hot_max_size=ONE_HOT,
        od_type="Iter",
        od_wait=STOP_ROUNDS,
        random_seed=rows.seed,
        thread_count=1,
        allow_writing_files=False,
        verbose=False,
    )
    model.fit(
        shown(fitted_on.features),
        fitted_on.labels,
        cat_features=texts,
        eval_set=(shown(stop.features), stop.labels),
        use_best_model=True,
    )
    return lambda features: model.predict_proba(shown(features))


# ---- Networks of pytabkit, with its tuned defaults.


def _network(name: str) -> Callable[[Rows], Predict]:
    def fit(rows: Rows) -> Predict:
        import pytabkit

        texts, wide = texts_of(rows.features), _filled(rows.features)
        model = getattr(pytabkit, name)(
            device="cpu", random_state=rows.seed, n_threads=1, verbosity=0
        )
        model.fit(wide(rows.features), rows.labels, cat_col_names=texts or None)
        return lambda features: model.predict_proba(wide(features))

    return fit


def _filled(features: pd.DataFrame) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return what puts medians for missing numbers and a category for missing text."""
    texts = texts_of(features)
    medians = features.drop(columns=texts).median().fillna(0.0)
    return lambda table: table.fillna(medians).assign(
        **{column: table[column].fillna(MISSING) for column in texts}
    )


# Rival to what chooses its settings, or to what fits it.
TUNED: dict[str, Callable[[Rows], Fitted]] = {
    "knn-tuned": _tuned(knn.Grid(), _as_they_are),
    "nca": _tuned(knn.Grid((2.0,), ("standard",)), _by_learned_metric),
    "logistic": _logistic,
    "forest": _forest,
}
FITS: dict[str, Callable[[Rows], Predict]] = {
    "knn": _encoded(lambda rows: KNeighborsClassifier(min(5, len(rows.labels)))),
    "histgb": _histogram,
    "lightgbm": _lightgbm,
    "catboost": _catboost,
    "realmlp": _network("RealMLP_TD_Classifier"),
    "tabm": _network("TabM_D_Classifier"),
    "tabr": _network("TabR_S_D_Classifier"),
}
DEEP = ("realmlp", "tabm", "tabr")
RIVALS = ("knn", "knn-tuned", "nca", "logistic", "forest", "histgb", "lightgbm", "catboost", *DEEP)
