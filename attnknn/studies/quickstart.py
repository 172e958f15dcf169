"""The quickstart: a data set with some wrong labels, and what the classifier made of it in words.

Axes: N training rows, T test rows, F features, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from sklearn import datasets
from sklearn.decomposition import PCA

from attnknn.checks import check_one_of, nearest_name
from attnknn.data.change import flip_labels
from attnknn.data.known import READERS
from attnknn.data.own import read_own
from attnknn.data.splits import TEST, RawData, draw_rows, duplicate_groups
from attnknn.data.tables import fit_table_encoder, is_number
from attnknn.estimator.fitting import MISSING
from attnknn.evaluate.abstain import describe_sets
from attnknn.evaluate.compare import compare_methods, verdict_sentence
from attnknn.evaluate.measure import METRIC_NAMES, summarise
from attnknn.studies.common import drawable

PCA_WIDTH = 64
SHOWN = ("accuracy", "nll", "brier", "ece")


@dataclass(frozen=True)
class Problem:
    """Rows to fit on and rows to be judged on.

    Attributes:
        inputs: Training and test rows as a user would hand them over: data frames or arrays.
        features: The same as numbers, one-hot, for methods that need numbers.
        labels: Training labels, some of them wrong where noise was asked for.
        flipped: Which of them are wrong.
        test_labels: True labels of the test rows.
        class_names: Name of each class.
        pictures: Training and test rows as images, where they are images.
    """

    inputs: tuple[Any, Any]
    features: tuple[Float[np.ndarray, "N F"], Float[np.ndarray, "T F"]]
    labels: Int[np.ndarray, " N"]
    flipped: Bool[np.ndarray, " N"]
    test_labels: Int[np.ndarray, " T"]
    class_names: tuple[str, ...]
    pictures: tuple[np.ndarray, np.ndarray] | None = None


def load_problem(
    name: str,
    *,
    seed: int,
    noise: float = 0.0,
    label_column: str = "label",
    missing: str = "error",
) -> Problem:
    """Return a data set with a share of wrong training labels.

    Args:
        name: One of ``PROBLEMS``, or the path of your own files.
        seed: Draws the test rows, where the data set fixes none, and the wrong labels.
        noise: Share of training labels that is flipped to any other class.
        label_column: Own tables: the column that holds the label.
        missing: Own tables: "error" refuses missing numbers; "impute" keeps them in ``inputs`` and
            puts the medians of the training rows in their place in ``features``.
    """
    impute = check_one_of("missing", missing, MISSING) == "impute"
    if name not in PROBLEMS and not Path(name).exists():
        raise ValueError(
            f"name must be one of {', '.join(PROBLEMS)}, or an existing path, "
            f"got {name=}{nearest_name(name, PROBLEMS)}"
        )
    own = partial(read_own, Path(name), label_column=label_column, allow_missing=impute)
    rows = PROBLEMS.get(name, own)()
    is_test = _test_rows(rows, seed)
    inputs, pictures = (rows.inputs[~is_test], rows.inputs[is_test]), None
    if isinstance(rows.inputs, pd.DataFrame):
        inputs = tuple(part.reset_index(drop=True) for part in inputs)
    elif rows.inputs.ndim == 4:
        pictures = tuple(map(drawable, inputs))
        inputs = tuple(part.reshape(len(part), -1).astype(np.float32) / 255 for part in inputs)
        if name.endswith("64 axes"):  # what can be had of large images without an embedder
            axes, pictures = PCA(PCA_WIDTH, random_state=seed).fit(inputs[0]), None
            inputs = tuple(map(axes.transform, inputs))
    true = rows.labels[~is_test]
    labels = flip_labels(true, noise, n_classes=len(rows.class_names), seed=seed)
    return Problem(
        inputs=inputs,
        features=_as_numbers(*inputs),
        labels=labels,
        flipped=labels != true,
        test_labels=rows.labels[is_test],
        class_names=rows.class_names,
        pictures=pictures,
    )


def _test_rows(rows: RawData, seed: int) -> Bool[np.ndarray, " M"]:
    """Return the data set's own test rows, or some of which no copy is learned from."""
    if rows.part is not None and (rows.part == TEST).any():
        return rows.part == TEST
    n_test = max(len(rows.class_names), round(rows.test_share * len(rows.labels)))
    groups = duplicate_groups(rows.inputs)
    drawn = draw_rows(rows.labels, n_test, seed=(seed, TEST), groups=groups)
    return np.isin(np.arange(len(rows.labels)), drawn)


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


def _bundled(name: str) -> RawData:
    """Return a table that comes with scikit-learn."""
    bunch = getattr(datasets, f"load_{name}")()
    names = tuple(map(str, bunch.target_names))
    return RawData("table", bunch.data, bunch.target.astype(np.int64), names, "scikit-learn")


PROBLEMS = {
    "iris": READERS["iris"],
    "wine": partial(_bundled, "wine"),
    "breast cancer": partial(_bundled, "breast_cancer"),
    "wine quality red": READERS["wine_red"],
    "digits": READERS["digits"],
    "wine quality white": READERS["wine_white"],
    "adult": READERS["adult"],
    "MNIST, 64 axes": READERS["mnist"],
    "CIFAR-10 pixels, 64 axes": READERS["cifar10"],
}


def measures(
    probs: Mapping[str, Float[np.ndarray, "T C"]], labels: Int[np.ndarray, " T"]
) -> pd.DataFrame:
    """Return accuracy and calibration of each method on the test rows."""
    found = {name: summarise(each, labels) for name, each in probs.items()}
    rows = [{"method": name} | {m: of[m] for m in SHOWN} for name, of in found.items()]
    return pd.DataFrame(rows).rename(columns=METRIC_NAMES)


def verdict(
    probs: Mapping[str, Float[np.ndarray, "T C"]],
    problem: Problem,
    *,
    issues: pd.DataFrame,
    sets: Bool[np.ndarray, "T C"],
    coverage: float,
    answers: np.ndarray,
    max_risk: float,
) -> str:
    """Return the answer in words.

    Args:
        probs: Method to probabilities of the test rows; the first is compared with the second.
        problem: Rows and labels.
        issues: Label issues of the training rows.
        sets: Prediction sets of the test rows.
        coverage: What the sets were asked to cover.
        answers: Class names predicted for the test rows; None where the classifier abstained.
        max_risk: Share of errors that answers were allowed to have.
    """
    first, second = list(probs)[:2]
    paired = compare_methods(dict(probs), problem.test_labels, second, metrics=SHOWN[:2])
    lines = [verdict_sentence(row) for _, row in paired[paired["method"] == first].iterrows()]
    is_found = problem.flipped[issues["id"].to_numpy(dtype=np.int64)]
    described = describe_sets(sets, problem.test_labels)
    lines += [
        f"Of {problem.flipped.sum()} flipped labels {is_found.sum()} are found, together with "
        f"{(~is_found).sum()} that were not flipped.",
        f"Sets that shall cover {100 * coverage:.0f} % cover {100 * described['coverage']:.1f} % "
        f"of the test rows with {described['mean_size']:.2f} classes on average.",
        answer_words(answers, problem, max_risk=max_risk),
    ]
    return "\n".join(f"- {line}" for line in lines)


def answer_words(answers: np.ndarray, problem: Problem, *, max_risk: float) -> str:
    """Return how many test rows were answered, and how many of the answers are wrong."""
    answered = np.array([answer is not None for answer in answers])
    words = f"Asked for at most {100 * max_risk:g} % errors, it answers"
    if not answered.any():
        return f"{words} no test row."
    truth = np.array(problem.class_names)[problem.test_labels]
    wrong = np.mean(answers[answered] != truth[answered])
    return f"{words} {100 * answered.mean():.0f} % of the test rows, {100 * wrong:.1f} % wrongly."
