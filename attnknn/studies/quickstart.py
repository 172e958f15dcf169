"""The quickstart's tables and words: what the classifier made of one problem."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from sklearn.decomposition import PCA

from attnknn.checks import check_one_of, nearest_name
from attnknn.data.change import flip_labels
from attnknn.data.known import READERS
from attnknn.data.own import read_own
from attnknn.data.splits import TEST, RawData, draw_rows, duplicate_groups
from attnknn.data.tables import fit_table_encoder, is_number
from attnknn.embed.run import load_run
from attnknn.estimator.fitting import MISSING
from attnknn.evaluate.abstain import describe_sets
from attnknn.evaluate.compare import compare_methods, verdict_sentence
from attnknn.evaluate.measure import METRIC_NAMES, summarise
from attnknn.studies.common import drawable

# ---- Problems: a data set, split by a seed, with a share of all training labels flipped.
#
# Axes: N training rows, T test rows, F features.

PCA_WIDTH = 64
FEWER = 77  # keeps the drawing of fewer rows apart from the drawing of test rows
FEWER_TESTS = 78


@dataclass(frozen=True)
class Problem:
    """Rows to fit on and rows to be judged on.

    Attributes:
        inputs: Training rows as a user would hand them over: a data frame or an array.
        features: The same as numbers, one-hot and not scaled, for methods that need numbers.
        labels: Training labels, some of them wrong where noise was asked for.
        flipped: Which of them are wrong.
        test_inputs: Rows to be judged on.
        test_features: The same as numbers.
        test_labels: Their true labels.
        class_names: Name of each class.
        all_rows: Training rows that there are; more than were drawn, where fewer were asked for.
        all_test_rows: The same of the test rows.
        pictures: Training rows as images (N, height, width), where they are images.
        test_pictures: The same of the test rows.
    """

    inputs: Any
    features: Float[np.ndarray, "N F"]
    labels: Int[np.ndarray, " N"]
    flipped: np.ndarray
    test_inputs: Any
    test_features: Float[np.ndarray, "T F"]
    test_labels: Int[np.ndarray, " T"]
    class_names: tuple[str, ...]
    all_rows: int
    all_test_rows: int
    pictures: np.ndarray | None = None
    test_pictures: np.ndarray | None = None

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


@dataclass(frozen=True)
class Parts:
    """A data set in two parts, nothing flipped and nothing fitted."""

    train: Any
    labels: Int[np.ndarray, " N"]
    test: Any
    test_labels: Int[np.ndarray, " T"]
    class_names: tuple[str, ...]


def load_problem(
    name: str,
    *,
    seed: int,
    noise: float = 0.0,
    cifar_run: Path | None = None,
    label_column: str = "label",
    missing: str = "error",
) -> Problem:
    """Return a data set with a share of wrong training labels.

    Args:
        name: One of ``PROBLEMS``, or the path of your own files.
        seed: Draws the test rows, where the data set fixes none, and the wrong labels.
        noise: Share of training labels that is flipped to any other class.
        cifar_run: A trained run; its held-out and test rows are the CIFAR-10 embeddings. (Rows its
            embedder was trained on are tidier than rows to come.)
        label_column: Own tables: the column that holds the label.
        missing: Own tables: "error" refuses missing numbers; "impute" keeps them in ``inputs`` and
            puts the medians of the training rows in their place in ``features``.
    """
    parts = load_parts(
        name, seed=seed, cifar_run=cifar_run, label_column=label_column, missing=missing
    )
    return make_problem(parts, seed=seed, noise=noise)


def load_parts(
    name: str,
    *,
    seed: int,
    cifar_run: Path | None = None,
    label_column: str = "label",
    missing: str = "error",
) -> Parts:
    """Return the training and test rows of a data set; arguments as of ``load_problem``."""
    impute = check_one_of("missing", missing, MISSING) == "impute"
    if name in PROBLEMS:
        return PROBLEMS[name](seed, cifar_run)
    if Path(name).exists():
        rows = read_own(Path(name), label_column=label_column, allow_missing=impute)
        return _split(rows, seed)
    raise ValueError(
        f"name must be one of {', '.join(PROBLEMS)}, or an existing path, "
        f"got {name=}{nearest_name(name, PROBLEMS)}"
    )


def make_problem(
    parts: Parts,
    *,
    seed: int,
    noise: float = 0.0,
    max_rows: int | None = None,
    max_test_rows: int | None = None,
) -> Problem:
    """Return rows as methods need them, a share of the training labels flipped.

    Args:
        parts: Training and test rows.
        seed: Draws the wrong labels, and fewer rows.
        noise: Share of training labels that is flipped to any other class.
        max_rows: Training rows at most; the seed draws which, class by class.
        max_test_rows: The same of the test rows.
    """
    all_rows, all_test_rows = len(parts.labels), len(parts.test_labels)
    train, labels = _fewer(parts.train, parts.labels, max_rows, (seed, FEWER))
    test, test_labels = _fewer(parts.test, parts.test_labels, max_test_rows, (seed, FEWER_TESTS))
    parts = replace(parts, train=train, labels=labels, test=test, test_labels=test_labels)
    n_classes = len(parts.class_names)
    noisy = flip_labels(parts.labels, noise, n_classes=n_classes, seed=seed)
    train, test, pictures = _flattened(parts.train), _flattened(parts.test), [None, None]
    if np.ndim(parts.train) == 4:
        pictures = [drawable(part) for part in (parts.train, parts.test)]
    features, test_features = _as_numbers(train, test)
    return Problem(
        inputs=train,
        features=features,
        labels=noisy,
        flipped=noisy != parts.labels,
        test_inputs=test,
        test_features=test_features,
        test_labels=parts.test_labels,
        class_names=parts.class_names,
        all_rows=all_rows,
        all_test_rows=all_test_rows,
        pictures=pictures[0],
        test_pictures=pictures[1],
    )


def _fewer(
    rows: Any, labels: Int[np.ndarray, " N"], at_most: int | None, seed: tuple[int, int]
) -> tuple[Any, Int[np.ndarray, " M"]]:
    """Return rows and labels, at most so many of them."""
    if at_most is None or len(labels) <= at_most:
        return rows, labels
    drawn = draw_rows(labels, at_most, seed=seed)
    is_table = isinstance(rows, pd.DataFrame)
    return rows.iloc[drawn].reset_index(drop=True) if is_table else rows[drawn], labels[drawn]


def _flattened(rows: Any) -> Any:
    """Return images as rows of pixels in [0, 1]; everything else as it is."""
    if np.ndim(rows) != 4:
        return rows
    return rows.reshape(len(rows), -1).astype(np.float32) / 255


def _as_numbers(train: Any, test: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(train, pd.DataFrame):
        return np.asarray(train, dtype=np.float32), np.asarray(test, dtype=np.float32)
    # NOTE: leakage guard. Medians and scales are those of the training rows alone.
    numbers = [name for name in train if is_number(train[name])]
    medians = train[numbers].astype(np.float64).median().fillna(0.0)
    filled = [
        part.assign(**part[numbers].astype(np.float64).fillna(medians)) for part in (train, test)
    ]
    encoder = fit_table_encoder(filled[0])
    return encoder.encode(filled[0]), encoder.encode(filled[1])


def _split(rows: RawData, seed: int) -> Parts:
    """Return the data set's own split, or one in which no copy of a test row is learned from."""
    if rows.part is not None and (rows.part == TEST).any():
        is_test = rows.part == TEST
    else:
        n_test = max(len(rows.class_names), round(rows.test_share * len(rows.labels)))
        groups = duplicate_groups(rows.inputs)
        drawn = draw_rows(rows.labels, n_test, seed=(seed, TEST), groups=groups)
        is_test = np.isin(np.arange(len(rows.labels)), drawn)
    train, test = rows.inputs[~is_test], rows.inputs[is_test]
    if isinstance(train, pd.DataFrame):
        train, test = train.reset_index(drop=True), test.reset_index(drop=True)
    labels, test_labels = rows.labels[~is_test], rows.labels[is_test]
    return Parts(train, labels, test, test_labels, rows.class_names)


def _table(name: str) -> Callable:
    return lambda seed, _: _split(READERS[name](), seed)


def _bundled(name: str) -> Callable:
    """Return a loader of a table that comes with scikit-learn."""

    def load(seed: int, _: Path | None) -> Parts:
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")()
        names = tuple(map(str, bunch.target_names))
        labels = bunch.target.astype(np.int64)
        return _split(RawData("table", bunch.data, labels, names, "scikit-learn"), seed)

    return load


def _axes(name: str) -> Callable:
    """Return a loader of images as their principal axes: what can be had without an embedder."""

    def load(seed: int, _: Path | None) -> Parts:
        parts = _split(READERS[name](), seed)
        axes = PCA(PCA_WIDTH, random_state=seed).fit(_flattened(parts.train))
        train, test = (axes.transform(_flattened(part)) for part in (parts.train, parts.test))
        return replace(parts, train=train, test=test)

    return load


def _cifar10(seed: int, run: Path | None) -> Parts:
    if run is None:
        raise ValueError("cifar_run must be the folder of a trained run, got cifar_run=None")
    trained = load_run(run)
    pairs = [(trained.rows(name), trained.labels(name)) for name in ("val", "test")]
    return Parts(*pairs[0], *pairs[1], tuple(trained.class_names))


CIFAR_EMBEDDINGS, CIFAR_AXES = "CIFAR-10 embeddings", "CIFAR-10 pixels, 64 axes"
PROBLEMS: dict[str, Callable] = {
    "iris": _table("iris"),
    "wine": _bundled("wine"),
    "breast cancer": _bundled("breast_cancer"),
    "wine quality red": _table("wine_red"),
    "digits": _table("digits"),
    "wine quality white": _table("wine_white"),
    CIFAR_EMBEDDINGS: _cifar10,
    "adult": _table("adult"),
    "MNIST, 64 axes": _axes("mnist"),
    CIFAR_AXES: _axes("cifar10"),
}


SHOWN = ("accuracy", "nll", "brier", "ece")


def measures(probs: Mapping[str, Float[np.ndarray, "N C"]], problem: Problem) -> pd.DataFrame:
    """Return accuracy and calibration of each method on the test rows."""
    found = {name: summarise(each, problem.test_labels) for name, each in probs.items()}
    rows = [{"method": name} | {m: of[m] for m in SHOWN} for name, of in found.items()]
    return pd.DataFrame(rows).rename(columns=METRIC_NAMES)


def found_labels(issues: pd.DataFrame, problem: Problem) -> dict[str, int]:
    """Return how many of the flipped labels the label issues hold, and how many others."""
    flipped = problem.flipped[issues["id"].to_numpy(dtype=np.int64)]
    return {
        "flipped": int(problem.flipped.sum()),
        "found": int(flipped.sum()),
        "others": int((~flipped).sum()),
    }


def verdict(
    probs: Mapping[str, Float[np.ndarray, "N C"]],
    problem: Problem,
    *,
    issues: pd.DataFrame,
    sets: Bool[np.ndarray, "N C"],
    coverage: float,
    answers: np.ndarray,
    max_risk: float,
) -> str:
    """Return the answer in words.

    Args:
        probs: Method to probabilities of the test rows; the first is compared with the others.
        problem: Rows and labels.
        issues: Label issues of the training rows.
        sets: Prediction sets of the test rows.
        coverage: What the sets were asked to cover.
        answers: Class names predicted for the test rows; None where the classifier abstained.
        max_risk: Share of errors that answers were allowed to have.
    """
    first, *others = probs
    paired = compare_methods(dict(probs), problem.test_labels, others[0], metrics=SHOWN[:2])
    lines = [verdict_sentence(row) for _, row in paired[paired["method"] == first].iterrows()]
    lines.append(_issue_words(found_labels(issues, problem)))
    described = describe_sets(sets, problem.test_labels)
    lines.append(
        f"Sets that shall cover {100 * coverage:.0f} % cover {100 * described['coverage']:.1f} % "
        f"of the test rows with {described['mean_size']:.2f} classes on average."
    )
    lines.append(answer_words(answers, problem, max_risk=max_risk))
    return _bulleted(lines)


def answer_words(answers: np.ndarray, problem: Problem, *, max_risk: float) -> str:
    """Return how many test rows were answered, and how many of the answers are wrong."""
    answered = np.array([answer is not None for answer in answers])
    words = f"Asked for at most {100 * max_risk:g} % errors, it answers"
    if not answered.any():
        return f"{words} no test row."
    truth = np.array(problem.class_names)[problem.test_labels]
    wrong = np.mean(answers[answered] != truth[answered])
    return f"{words} {100 * answered.mean():.0f} % of the test rows, {100 * wrong:.1f} % wrongly."


def _issue_words(found: Mapping[str, int]) -> str:
    if not found["flipped"]:
        return f"No label was flipped; {found['others']} labels are contradicted all the same."
    share = 100 * found["found"] / found["flipped"]
    return (
        f"Of {found['flipped']} flipped labels {found['found']} ({share:.0f} %) are found, "
        f"together with {found['others']} that were not flipped."
    )


def _bulleted(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
