"""Judges of what wrong labels and long tails in the memory decide: one published claim each."""

import pandas as pd

from attnknn.studies import published
from attnknn.studies.judges import PLAIN, TUNED, difference
from attnknn.studies.judging import (
    CONFIRMED,
    MEANS,
    PAIRED,
    PARTLY,
    REFUTED,
    Judgement,
    MissingTableError,
    Tables,
    decide,
    with_width,
)

NOISE, TAIL = "04_label_noise", "05_long_tail"
KINDS = ("symmetric", "asymmetric")
PUBLISHED_RETENTION = {0.1: 0.995, 0.2: 0.985, 0.3: 0.975}  # 100, 99 and 98 %, as rounded there
NOISE_RATE = 0.3  # of experiment 7
TAIL_RATIO = 0.01


def judge_noise(tables: Tables) -> Judgement:
    """Decide whether accuracy is kept under wrong memory labels, by kind and rate."""
    where = {"metric": "accuracy", "held_out": "clean", "method": "attention"}
    rows = tables.rows(NOISE, "measures", kind=KINDS, **where)
    means = rows.groupby(["kind", "rate"])["value"].mean()
    cases = [(kind, rate) for kind in KINDS for rate in PUBLISHED_RETENTION]
    kept = {
        (kind, rate): means[kind, rate] / means[kind, 0.0]
        for kind, rate in cases
        if (kind, rate) in means and (kind, 0.0) in means
    }
    if not kept:
        raise MissingTableError(f"a rate of 10, 20 or 30 % and 0 in {NOISE}/measures.csv")
    holds = [share >= PUBLISHED_RETENTION[rate] for (_, rate), share in kept.items()]
    if not any(holds):
        verdict = REFUTED
    else:
        verdict = CONFIRMED if all(holds) and len(kept) == len(cases) else PARTLY
    return Judgement(verdict, _kept_words(kept, cases), MEANS)


def _kept_words(kept: dict[tuple[str, float], float], cases: list[tuple[str, float]]) -> str:
    """Say what was kept where, what was claimed, and which of the claimed cases are missing."""
    shown = ", ".join(
        f"{100 * share:.1f} % at {100 * rate:g} % {kind} (claimed: "
        f"{100 * PUBLISHED_RETENTION[rate]:g} or more)"
        for (kind, rate), share in kept.items()
    )
    missing = [f"{100 * rate:g} % {kind}" for kind, rate in cases if (kind, rate) not in kept]
    return f"accuracy kept: {shown}" + (f"; not measured: {', '.join(missing)}" if missing else "")


def judge_noise_against(tables: Tables) -> Judgement:
    """Decide whether attention beats the rivals in likelihood under the most label noise."""
    where = {"metric": "nll", "held_out": "clean", "method": (*PLAIN, *TUNED)}
    rows = tables.rows(NOISE, "comparison", **where)
    rows = rows[rows["rate"] == rows["rate"].max()]
    verdict = decide(rows["verdict"] == "worse", rows["verdict"] == "better")
    shown = "; ".join(
        f"{row['kind']} {row['method']} {difference(row, 3)}" for row in rows.to_dict("records")
    )
    rate = 100 * rows["rate"].iloc[0]
    return Judgement(verdict, f"NLL of rival minus attention at {rate:g} %: {shown}", PAIRED)


def judge_noise_accuracy(tables: Tables) -> Judgement:
    """Decide whether attention is less accurate than the uniform vote at 30 % wrong labels."""
    where = {"metric": "accuracy", "held_out": "clean", "method": "uniform"}
    rows = tables.rows(NOISE, "comparison", **where)
    rates = _nearest_rates(rows["rate"])
    rows = rows[rows["rate"].isin(rates)]
    claimed = published.noise_loss()
    # Rows are uniform minus attention: a better uniform vote is what was claimed.
    is_excluded = with_width(rows)["high"] < claimed
    verdict = decide(rows["verdict"] == "better", (rows["verdict"] == "worse") | is_excluded)
    shown = "; ".join(
        f"{row['kind']} {100 * row['rate']:g} % {difference(row)}"
        for row in rows.to_dict("records")
    )
    note = "" if rates == [NOISE_RATE] else f"; {100 * NOISE_RATE:g} % was not measured"
    return Judgement(
        verdict,
        f"accuracy of uniform minus attention: {shown} (claimed: {claimed:+.4f}){note}",
        PAIRED,
    )


def _nearest_rates(rates: pd.Series) -> list[float]:
    """Return the claimed rate where it was measured, else the nearest on either side of it."""
    found = sorted({rate for rate in rates if rate > 0})
    if not found:
        raise MissingTableError(f"a rate above 0 in {NOISE}/comparison.csv")
    if NOISE_RATE in found:
        return [NOISE_RATE]
    under, over = (
        [rate for rate in found if rate < NOISE_RATE],
        [rate for rate in found if rate > NOISE_RATE],
    )
    return [*under[-1:], *over[:1]]


def judge_long_tail(tables: Tables) -> Judgement:
    """Decide whether a long-tailed memory costs as little as published."""
    where = {"metric": "accuracy", "classes": "all", "method": "attention"}
    where |= {"held_out": "balanced", "corrupted": "memory only"}
    balanced, tailed = (tables.mean(TAIL, ratio=ratio, **where) for ratio in (1.0, TAIL_RATIO))
    lost, claimed = balanced - tailed, published.tail_loss()
    return Judgement(
        CONFIRMED if lost <= claimed else REFUTED,
        f"attention loses {100 * lost:.2f} points at ratio {TAIL_RATIO:g} "
        f"(published: {100 * claimed:.2f})",
        MEANS,
    )
