"""Judges of what the main results and the k-sweep decide: one published claim each.

A judge reads tables and returns a verdict with the figures behind it; a table that is not there
raises `MissingTableError`. The claims themselves are listed in `claims`.
"""

from collections.abc import Callable

import pandas as pd

from attnknn.studies import published
from attnknn.studies.judging import (
    CONFIRMED,
    INTERVAL,
    MEANS,
    NOT_DECIDED,
    NOT_MEASURED,
    NOTHING,
    PAIRED,
    PARTLY,
    REFUTED,
    SAME_ACCURACY,
    SAME_ECE,
    SAME_NLL_SHARE,
    Judgement,
    MissingTableError,
    Tables,
    at_least,
    decide,
    joined,
    the_same,
    with_width,
)

MAIN, SWEEP = "02_main_results", "03_k_sweep"
PLAIN = ("uniform", "distance")
TUNED = ("uniform (tuned)", "distance (tuned)")
CLAIMED_ACCURACY = 0.0001  # the smallest published gain: 0.01 points
CLAIMED_CNN_GAP = 0.05  # the smallest published gap: 5 points
CLAIMED_KS = (10, 20)  # "the optimal range"
SMALLEST_K = 3  # one neighbour is no vote
TTA_SHARE = 0.5  # of the published change counts as the same


def judge_calibration(tables: Tables) -> Judgement:
    """Decide whether attention has the smaller calibration error."""
    return _improvement(tables, "ece")


def judge_likelihood(tables: Tables) -> Judgement:
    """Decide whether attention has the better likelihood."""
    return _improvement(tables, "nll")


def judge_accuracy(tables: Tables) -> Judgement:
    """Decide whether attention is more accurate, by as much as was claimed or more."""
    return _improvement(tables, "accuracy")


def _improvement(tables: Tables, metric: str) -> Judgement:
    """Judge "attention is better than every rival" from the paired comparison."""
    rows = tables.rows(MAIN, "comparison", metric=metric, method=(*PLAIN, *TUNED))
    # Rows are rival minus attention: a rival that is worse has lost against the attention.
    won, lost = rows["verdict"] == "worse", rows["verdict"] == "better"
    if metric == "accuracy":
        # The low end of rival minus attention is the largest gain: below what was claimed?
        lost |= -with_width(rows)["low"] < CLAIMED_ACCURACY
    parts = []
    for title, names in (("published", PLAIN), ("tuned", TUNED)):
        own = rows["method"].isin(names)
        if own.any():
            each = rows[own].to_dict("records")
            shown = "; ".join(f"{row['method']} {difference(row)}" for row in each)
            parts.append(f"{title} rivals ({decide(won[own], lost[own])}): {shown}")
    said = f"rival minus attention in {metric}, {'; '.join(parts)} ({_size(rows)})"
    return Judgement(decide(won, lost), said, PAIRED)


def difference(row: dict | pd.Series, digits: int = 4) -> str:
    """Return a paired difference with its interval in words."""
    value, low, high = (f"{row[name]:+.{digits}f}" for name in ("difference", "low", "high"))
    return f"{value} [{low}, {high}]"


def _size(rows: pd.DataFrame) -> str:
    return f"{rows['n_rows'].iloc[0]} rows, {rows['n_seeds'].iloc[0]} seed(s)"


def judge_tta(tables: Tables) -> Judgement:
    """Decide whether test-time views improve likelihood and calibration about as published."""
    rows = tables.rows(MAIN, "comparison", method="attention + TTA", metric=("nll", "ece"))
    own = [tables.mean(MAIN, method="attention", metric=metric) for metric in rows["metric"]]
    # Neither measure is ever negative, so none falls by more than all of it: a pivotal interval
    # does not know that.
    changes = rows[["difference", "low", "high"]].div(own, axis=0).clip(lower=-1.0)
    claimed = rows["metric"].map(published.tta_change()) * TTA_SHARE
    better, as_much = rows["verdict"] == "better", changes["difference"] <= claimed
    shown = ", ".join(
        f"{row['metric'].upper()} {100 * change.difference:+.0f} % [{100 * change.low:+.0f}, "
        f"{100 * change.high:+.0f}] ({row['verdict']})"
        for row, change in zip(rows.to_dict("records"), changes.itertuples(), strict=True)
    )
    if (better & as_much).all():
        verdict = CONFIRMED
    elif better.any():
        verdict = PARTLY
    else:
        is_excluded = (changes["low"] > claimed).all()
        verdict = REFUTED if is_excluded or (rows["verdict"] == "worse").any() else NOT_DECIDED
    right = tables.rows(MAIN, "comparison", method="attention + TTA", metric="accuracy").iloc[0]
    shown += f", accuracy {100 * right['difference']:+.2f} points ({right['verdict']})"
    enough = f"{100 * TTA_SHARE:g} % of the published change counts as the same"
    return Judgement(verdict, f"with TTA {shown}; {enough} ({_size(rows)})", PAIRED)


def judge_k_ensemble(tables: Tables) -> Judgement:
    """Decide whether averaging over k is of no use: no gain beyond the margins."""
    rows = tables.rows(MAIN, "comparison", method="attention + k-ensemble", metric=("nll", "ece"))
    margins = {"nll": nll_margin(tables), "ece": SAME_ECE}
    verdicts = [
        at_least(row["low"], row["high"], -margins[row["metric"]])
        for row in rows.to_dict("records")
    ]
    shown = ", ".join(
        f"{row['metric']} {difference(row)} (a gain counts from {margins[row['metric']]:.4f} on)"
        for row in rows.to_dict("records")
    )
    return Judgement(joined(verdicts), f"k-ensemble minus attention: {shown}", INTERVAL)


def judge_heads(tables: Tables) -> Judgement:
    """Decide whether one head is as good as several: the difference lies inside the margin."""
    row = tables.rows(MAIN, "ablation", part="more than one head", metric="nll").iloc[0]
    margin = nll_margin(tables)
    return Judgement(
        the_same(row["low"], row["high"], margin),
        f"one head minus four, NLL {difference(row)}; up to {margin:.4f} counts as the same",
        INTERVAL,
    )


def nll_margin(tables: Tables) -> float:
    """Return the difference in NLL up to which two methods count as the same."""
    return SAME_NLL_SHARE * tables.mean(MAIN, method="attention", metric="nll")


def judge_gap_to_cnn(tables: Tables) -> Judgement:
    """Decide whether the classifier head is ahead as published."""
    rows = tables.rows(MAIN, "comparison", method="cnn", metric="accuracy")
    low, high = with_width(rows)[["low", "high"]].iloc[0]
    points = 100 * rows[["difference", "low", "high"]].iloc[0]
    return Judgement(
        at_least(low, high, CLAIMED_CNN_GAP),
        f"CNN head minus attention on the same embedder: {difference(points, 2)} points "
        f"(claimed: {100 * CLAIMED_CNN_GAP:g} or more)",
        INTERVAL,
    )


def judge_k_hardly_matters(tables: Tables) -> Judgement:
    """Decide whether accuracy is the same at every k."""
    means = _accuracy_by_k(tables)
    spread = means.max(axis=1) - means.min(axis=1)
    shown = ", ".join(
        f"{name} {100 * each:.2f} (best k = {means.loc[name].idxmax()})"
        for name, each in spread.items()
    )
    small = spread < SAME_ACCURACY
    return Judgement(
        CONFIRMED if small.all() else PARTLY if small.any() else REFUTED,
        f"spread of accuracy over k ≥ {SMALLEST_K} in points: {shown}; less than "
        f"{100 * SAME_ACCURACY:g} counts as hardly any",
        MEANS,
    )


def judge_best_k(tables: Tables) -> Judgement:
    """Decide whether the best k lies in the published range, where k matters at all."""
    means = _accuracy_by_k(tables, method=(*PLAIN, "attention"))
    is_inside = (means.columns >= CLAIMED_KS[0]) & (means.columns <= CLAIMED_KS[1])
    if is_inside.all() or not is_inside.any():
        raise MissingTableError(f"k inside and outside {CLAIMED_KS} in {SWEEP}/measures.csv")
    lead = means.loc[:, is_inside].max(axis=1) - means.loc[:, ~is_inside].max(axis=1)
    shown = ", ".join(
        f"{name} {100 * each:+.2f} (best k = {means.loc[name].idxmax()})"
        for name, each in lead.items()
    )
    return Judgement(
        decide(lead >= SAME_ACCURACY, lead <= -SAME_ACCURACY),
        f"accuracy of the best k in {CLAIMED_KS[0]} to {CLAIMED_KS[1]} minus that of the best "
        f"other k in points: {shown}; a lead counts from {100 * SAME_ACCURACY:g} on",
        MEANS,
    )


def _accuracy_by_k(tables: Tables, **where: object) -> pd.DataFrame:
    """Return mean accuracy over seeds, a row a method and a column a k."""
    rows = tables.rows(SWEEP, "measures", metric="accuracy", **where)
    rows = rows[rows["k"] >= SMALLEST_K]
    return rows.groupby(["method", "k"])["value"].mean().unstack()


def cannot_be_measured(reason: str) -> Callable[[Tables], Judgement]:
    """Return a judge that says why no run here can decide the claim."""
    return lambda _: Judgement(NOT_MEASURED, reason, NOTHING)
