"""Judges of what timings and the theory study decide: one published claim each."""

from collections.abc import Callable

import pandas as pd

from attnknn.studies.judging import (
    CONFIRMED,
    NOT_DECIDED,
    PARTLY,
    REFUTED,
    THEORY,
    TIMES,
    Judgement,
    MissingTableError,
    Tables,
    below,
)

EFFICIENCY = "06_efficiency"
PUBLISHED_ATTENTION_MS = 0.5  # a query
PUBLISHED_WHOLE_MS = 1.0  # a query, all that comes after the embedding
PUBLISHED_HNSW_ROWS = 100_000
HNSW_MANY_QUERIES = 100_000  # a graph that pays only after more than these is not needed
GOOD_RECALL = 0.99  # an index that misses more is no replacement for exact search
# Verdicts of the theory study (`theory_claims`) in the words of the claims.
THEORY_VERDICTS = {
    "holds": CONFIRMED,
    "does not hold": REFUTED,
    "holds in part": PARTLY,
    "not decided": NOT_DECIDED,
}


def judge_overhead(tables: Tables) -> Judgement:
    """Decide whether attention costs less than published, asked one by one and in a batch."""
    return _below(tables, ("attention",), PUBLISHED_ATTENTION_MS, "attention adds")


def judge_whole_overhead(tables: Tables) -> Judgement:
    """Decide whether search, attention and vote cost less than published, asked either way."""
    stages = ("search", "attention", "vote")
    return _below(tables, stages, PUBLISHED_WHOLE_MS, "search, attention and vote take")


def _below(tables: Tables, stages: tuple[str, ...], limit: float, said: str) -> Judgement:
    """Judge a time by the intervals of its stages' medians; their ends add up.

    Single queries decide; where those and a batch are on different sides of the limit, the claim
    holds in part.
    """
    where = {"method": "attention", "stage": stages}
    single, batched = (
        tables.rows(EFFICIENCY, "stages", batch=batch, **where)[["value", "low", "high"]].sum(
            skipna=False
        )
        for batch in ("one by one", "all at once")
    )
    verdict, other = (below(each["low"], each["high"], limit) for each in (single, batched))
    return Judgement(
        PARTLY if {verdict, other} == {CONFIRMED, REFUTED} else verdict,
        f"{said} {single['value']:.3f} ms [{single['low']:.3f}, {single['high']:.3f}] for a single "
        f"query, {batched['value']:.4f} ms a query in a batch (published: under {limit:g} ms)",
        TIMES,
    )


def judge_hnsw(tables: Tables) -> Judgement:
    """Decide whether exact search is fast enough up to the published number of rows."""
    rows = tables.rows(EFFICIENCY, "measures", index=("HNSW", "Flat IP"))
    wide = rows.pivot(index=["rows", "index"], columns="metric", values="value")
    graph, flat = (wide.xs(name, level="index") for name in ("HNSW", "Flat IP"))
    if graph.index.max() < PUBLISHED_HNSW_ROWS or "recall" not in wide:
        raise MissingTableError(
            f"{PUBLISHED_HNSW_ROWS} rows and recall in {EFFICIENCY}/measures.csv"
        )
    gained = (flat["search_ms"] - graph["search_ms"]) / 1000
    queries = (graph["build_seconds"] - flat["build_seconds"]) / gained.where(gained > 0)
    shown = ", ".join(
        f"{n:,} rows: "
        + ("never" if pd.isna(each) else f"after {each:,.0f} queries")
        + f" (recall {graph['recall'][n]:.3f})"
        for n, each in queries.items()
    )
    pays = (queries < HNSW_MANY_QUERIES) & (queries.index < PUBLISHED_HNSW_ROWS)
    is_good = graph["recall"] >= GOOD_RECALL
    if (pays & is_good).any():
        verdict = REFUTED
    else:  # a graph that is fast because it misses rows says nothing about one that does not
        verdict = NOT_DECIDED if pays.any() else CONFIRMED
    limits = f"counted: up to {HNSW_MANY_QUERIES:,} queries at a recall of {GOOD_RECALL:g} or more"
    return Judgement(verdict, f"building HNSW pays off at {shown}; {limits}", TIMES)


def taken_from_theory(words: str) -> Callable[[Tables], Judgement]:
    """Take over a line of the theory study's own table."""

    def judge(tables: Tables) -> Judgement:
        row = tables.rows("07_theory", "claims", claim=words).iloc[0]
        return Judgement(
            THEORY_VERDICTS[row["verdict"]], f"{row['measured']} (bound: {row['bound']})", THEORY
        )

    return judge
