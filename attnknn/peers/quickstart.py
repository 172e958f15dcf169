"""The quickstart's tables and words: what the classifier made of one problem."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from attnknn.abstain import describe_sets
from attnknn.compare import compare_methods, verdict_sentence
from attnknn.measure import METRIC_NAMES, summarise
from attnknn.peers.problems import Problem

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
