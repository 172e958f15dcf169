"""Words: what the comparison of the classifier with its peers has shown, computed from it."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attnknn import plot
from attnknn.peers import ATTENTION, CLEANLAB, KNN_FAMILY, METHODS, standing

GOALS = ("nll", "ece")  # where the classifier should be first
SLOWEST = 3  # methods that a note names

NOTES = {
    "kNN": "tuned on at most 5 000 training rows, fitted on all",
    "NCA + kNN": "metric learned on at most 2 000 training rows",
    "floor": "every method's probabilities get the same floor of 0.001 / C",
}


def verdict(whole: Mapping[float, pd.DataFrame], issues: pd.DataFrame) -> list[str]:
    """Return a sentence for each goal: the kNN family, all methods under noise, label issues.

    Args:
        whole: Noise to the problems that every method has been measured on, tidy.
        issues: AUROC of finding flipped labels, a row per data set, a column per method.
    """
    lines = []
    for noise, tidy in whole.items():
        lines += rank_sentences(tidy, noise, KNN_FAMILY, "the kNN family")
        if noise:
            lines += rank_sentences(tidy, noise, METHODS, "all methods")
    return lines + issue_sentences(issues)


def rank_sentences(
    tidy: pd.DataFrame, noise: float, among: tuple[str, ...], called: str
) -> list[str]:
    """Return where the classifier stands in each measure that is a goal."""
    wrong = f"{round(100 * noise)} % wrong labels" if noise else "clean labels"
    lines = []
    for metric in GOALS:
        found = standing(tidy, metric, method=ATTENTION, among=among)
        if found is not None:
            reached = "reached" if found.is_first else "missed"
            lines.append(
                f"Mean rank in {plot.metric_label(metric)} among {called} ({found.n_methods} "
                f"methods, {found.n_datasets} data sets, {wrong}): {found.sentence()}; goal of the "
                f"best mean rank {reached}."
            )
    return lines


def issue_sentences(issues: pd.DataFrame) -> list[str]:
    """Return how ``label_issues`` compares with each way of using cleanlab."""
    peers = [name for name in CLEANLAB if name in issues]
    if issues.empty or ATTENTION not in issues:
        return []
    means = issues.mean()
    lines = []
    for name in peers:
        won = int((issues[ATTENTION] >= issues[name]).sum())
        reached = "reached" if means[ATTENTION] >= means[name] else "missed"
        lines.append(
            f"AUROC of label_issues {means[ATTENTION]:.3f}, of {name} {means[name]:.3f}: mean of "
            f"{len(issues)} data sets, at least as high on {won} of them; goal of a mean at least "
            f"as high {reached}."
        )
    return lines


def notes(found: list[dict[str, Any]], seconds: pd.DataFrame) -> dict[str, str]:
    """Return what a reader must know: who saw fewer rows, and why.

    Args:
        found: All cells.
        seconds: Mean seconds of one cell, a row per method, a column per data set.
    """
    fewer = {
        "rows": drawn_words(found, "rows", "training"),
        "test rows": drawn_words(found, "test_rows", "test"),
    }
    if fewer["rows"]:
        fewer["rows"] += f"; with all of them peers take too long here: {slow_words(seconds)}"
    return NOTES | {name: words for name, words in fewer.items() if words}


def drawn_words(found: list[dict[str, Any]], key: str, called: str) -> str:
    """Return of which data sets fewer rows were drawn; nothing where all were taken."""
    sizes = {cell["dataset"]: (cell[key], cell[f"all_{key}"]) for cell in found}
    drawn = [f"{name} {some:,} of {all_:,}" for name, (some, all_) in sizes.items() if some < all_]
    if not drawn:
        return ""
    return f"each seed drew {called} rows, the same for all methods: {', '.join(drawn)}"


def slow_words(seconds: pd.DataFrame) -> str:
    """Return which methods take longest, and where."""
    slowest = seconds.max(axis=1).nlargest(SLOWEST).index
    each = [
        f"{method} takes {seconds.loc[method].max():.0f} s on {seconds.loc[method].idxmax()}"
        for method in slowest
    ]
    return f"with those drawn, one fit on one seed by {', '.join(each)}"


def code_words(found: list[dict[str, Any]]) -> list[str]:
    """Return which commits the cells are from."""
    counts = pd.Series([cell.get("commit") or "unknown" for cell in found]).value_counts()
    each = ", ".join(f"{n} from commit {commit}" for commit, n in counts.items())
    return [f"Cells: {each}."]
