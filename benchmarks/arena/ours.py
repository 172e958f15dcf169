"""Ours: the classifier through its public door alone, whichever version of it is imported."""

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.arena.problems import Problem, Stopwatch

COVERAGE = 0.9  # of the prediction sets

# Method to what it is made with. "auto" is written out: as it comes.
OURS: dict[str, dict[str, Any]] = {
    "attnknn": {},
    "attnknn-as-given": {"label_noise": 0},
    "attnknn-no-fit": {"refine": "none"},
}


@dataclass(frozen=True)
class Answer:
    """What a method says of a problem.

    Attributes:
        probs: Of the test rows, (N, C).
        issues: How good each training label is held to be.
        facts: Whatever else is kept.
    """

    probs: np.ndarray
    issues: np.ndarray
    facts: dict[str, Any]


def answer(method: str, problem: Problem, watch: Stopwatch) -> Answer:
    """Fit the classifier and ask it for all that it offers.

    Missing numbers are imputed (by the classifier, with medians, as rivals that cannot take them).
    """
    from attnknn import AttnKNNClassifier

    options = dict(OURS[method], random_state=problem.seed)
    if any(
        rows.select_dtypes("number").isna().to_numpy().any()
        for rows in (problem.features, problem.test_features)
    ):
        options["missing"] = "impute"
    with watch.stage("fit"):
        model = AttnKNNClassifier(**options).fit(problem.features, problem.labels)
    probs = np.zeros((len(problem.test_labels), problem.n_classes))
    with watch.stage("predict"):
        probs[:, model.classes_] = model.predict_proba(problem.test_features)
    with watch.stage("issues"):
        issues = label_quality(model.label_issues(all_rows=True), len(problem.labels))
    sets = np.zeros(probs.shape, bool)
    sets[:, model.classes_] = model.predict_set(problem.test_features, COVERAGE)
    holds = sets[np.arange(len(sets)), problem.test_labels]
    facts = {
        "label_noise": float(model.label_noise_),
        "embedder": str(model.embedder_),
        "n_neighbors": int(model.n_neighbors_),
        "set_coverage": float(holds.mean()),
        "set_size": float(sets.sum(axis=1).mean()),
        "code": code(),
    }
    return Answer(probs, issues, facts)


def label_quality(table: pd.DataFrame, n_rows: int) -> np.ndarray:
    """Return the quality of each training label, in the order of the rows."""
    return table.set_index("id")["quality"].reindex(np.arange(n_rows)).to_numpy(np.float64)


def use_package(folder: Path | None) -> None:
    """Take ``attnknn`` from another checkout, whatever stands beside this program."""
    if folder is None:
        return
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import attnknn

    if Path(attnknn.__file__).parents[1] != folder:
        raise ValueError(
            f"package must be imported from there alone, got attnknn of {attnknn.__file__}"
        )


@cache
def code() -> str:
    """Return the commit of the package that is imported, with ``-dirty`` after local changes.

    Asked of git, not of the package: any version of it is judged in the same way.
    """
    import attnknn

    folder = Path(attnknn.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    found = _git(folder, "rev-parse", "HEAD")
    return f"{found}-dirty" if _git(folder, "status", "--porcelain", "--", ".") else str(found)


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
