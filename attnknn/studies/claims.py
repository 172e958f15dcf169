"""Claims: each published claim, our verdict on it in one run, and the evidence.

The claims stand in ``published.yaml``. Here are the rules that judge them by the tables which the
studies save; a claim whose study has not been run says so.

    python -m attnknn.studies.claims results/cifar10 ...    # judges anew; runs no study

A claim is confirmed or refuted only by what was shown. A difference that a test does not find is no
equality: "as good as" needs an interval inside a margin, and what is neither shown nor excluded is
not decided at this size.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from attnknn.evaluate.compare import in_families
from attnknn.figures.tables import to_markdown
from attnknn.files import write_text
from attnknn.studies.published import published

# ---- Verdicts, and what they rest on.

CONFIRMED, PARTLY, REFUTED = "confirmed", "partly", "refuted"
NOT_DECIDED = "not decided at this size"
NOT_MEASURED = "not measured in this run"
PAIRED, INTERVAL, MEANS, TIMES = "paired test", "interval", "means", "times"
THEORY, NOTHING = "theory", "nothing"
# What other studies share with the claims: margins of "the same", and what attention may cost.
SAME_NLL_SHARE, SAME_ACCURACY, PUBLISHED_ATTENTION_MS = 0.01, 0.005, 0.5


class Judgement(NamedTuple):
    """A verdict, the figures behind it, and what kind of evidence they are."""

    verdict: str
    evidence: str
    basis: str


class MissingTableError(LookupError):
    """A study has not been run, or did not save what a claim needs."""


class Tables:
    """The saved tables of a run, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def rows(self, table: str, **where: object) -> pd.DataFrame:
        """Return the rows of a saved table that have these values (one or a list each)."""
        path = self.folder / f"{table}.csv"
        if not path.is_file():
            raise MissingTableError(f"{table}.csv")
        found = pd.read_csv(path)
        if "p_value" in found and path.stem == "comparison":
            found = in_families(found)  # a table may be older than the families
        allowed = {key: each if isinstance(each, list) else [each] for key, each in where.items()}
        for column, values in allowed.items():
            found = found[found[column].isin(values)]
        if found.empty:
            wanted = (f"{column} {' or '.join(map(str, each))}" for column, each in allowed.items())
            raise MissingTableError(f"{', '.join(wanted)} in {table}.csv")
        return found

    def own(self, metric: str) -> float:
        """Return the attention's own measure in the main results."""
        rows = self.rows("02_main_results/measures", method="attention", metric=metric)
        return float(rows["value"].mean())


def decide(supports: Iterable[bool], opposes: Iterable[bool]) -> str:
    """Judge a claim that must hold against every rival: where it was shown, where its opposite.

    Shown against some rivals and not against others, it holds in part, even where its opposite was
    shown against those others.
    """
    supports = list(supports)
    if all(supports):
        return CONFIRMED
    if any(supports):
        return PARTLY
    return REFUTED if any(opposes) else NOT_DECIDED


def in_settings(
    rows: pd.DataFrame, first: str, judge: Callable[[pd.DataFrame], tuple[str, str]]
) -> tuple[str, str]:
    """Judge by what the methods were fitted on: as published, tempered by the other settings.

    What the published setting (``first``) confirms must hold in the others, too; a claim that fails
    where it was published is not saved by settings that were not.
    """
    verdicts, said = {}, []
    for name in dict.fromkeys([first, *rows["held_out"]]):
        try:
            verdicts[name], words = judge(rows[rows["held_out"] == name])
        except MissingTableError as missing:
            if name == first:
                raise MissingTableError(f"held-out {first}: {missing}") from None
            continue
        said.append(f"held-out {name} ({verdicts[name]}): {words}")
    verdict = verdicts.pop(first)
    if verdict == CONFIRMED and any(each != CONFIRMED for each in verdicts.values()):
        verdict = PARTLY
    return verdict, "; ".join(said)


def difference(row: Mapping[str, Any]) -> str:
    """Return a paired difference in words: whose, at which noise, and its interval."""
    level = f" at {100 * row['rate']:g} % {row['kind']}" if "rate" in row else ""
    value, low, high = (f"{row[name]:+.4f}" for name in ("difference", "low", "high"))
    return f"{row['method']}{level} {value} [{low}, {high}]"


def with_width(rows: pd.DataFrame) -> pd.DataFrame:
    """Return paired differences with unknown limits (NaN) where the interval has no width.

    Such an interval comes from predictions that agree on every row; resampling those says nothing
    about rows on which they would not, so it excludes no claimed size.
    """
    limits = rows[["low", "high"]].where(rows["low"] < rows["high"])
    return rows.assign(low=limits["low"], high=limits["high"])


# ---- Rules: tables, and the fields of a claim in ``published.yaml``, to a judgement.


def beats(
    tables: Tables,
    *,
    table: str,
    metric: str,
    rivals: Mapping[str, list[str]],
    where: Mapping[str, Any] | None = None,
    winner: str = "attention",
    claimed: float | None = None,
    at_highest: str = "",
    first: str = "",
) -> Judgement:
    """Judge "attention is better than every rival" (or a rival than attention) by paired tests."""
    names = [name for group in rivals.values() for name in group]
    rows = tables.rows(table, metric=metric, method=names, **(where or {}))
    if at_highest:
        highest = rows[at_highest].max()
        if not highest > 0:
            raise MissingTableError(f"a {at_highest} above 0 in {table}.csv")
        rows = rows[rows[at_highest] == highest]

    def judge(own: pd.DataFrame) -> tuple[str, str]:
        if own.empty:
            raise MissingTableError(f"rows in {table}.csv")
        limits, ours = with_width(own), winner == "attention"
        won, lost = (own["verdict"] == word for word in ("worse", "better")[:: 1 if ours else -1])
        if claimed is not None:
            lost |= (-limits["low"] if ours else limits["high"]) < claimed
        parts = []
        for title, group in rivals.items():
            is_in = own["method"].isin(group)
            if is_in.any():
                shown = "; ".join(difference(row) for row in own[is_in].to_dict("records"))
                found = decide(won[is_in], lost[is_in])
                parts.append(f"{title} rivals ({found}): {shown}")
        return decide(won, lost), "; ".join(parts)

    verdict, shown = in_settings(rows, first, judge) if first else judge(rows)
    size = f"{rows['n_rows'].iloc[0]} rows, {rows['n_seeds'].iloc[0]} seed(s)"
    gain = "" if claimed is None else f" (claimed gain: {claimed:g})"
    return Judgement(verdict, f"{metric} of rival minus attention{gain}, {shown} ({size})", PAIRED)


def changes(
    tables: Tables, *, table: str, method: str, claimed: Mapping[str, float], enough: float
) -> Judgement:
    """Judge "it changes each measure about as much as published", as shares of attention's own."""
    rows = tables.rows(table, method=method, metric=list(claimed))
    # Neither measure is ever negative, so none falls by more than all of it: a pivotal interval
    # does not know that.
    own = [tables.own(metric) for metric in rows["metric"]]
    shares = rows[["difference", "low", "high"]].div(own, axis=0).clip(lower=-1.0)
    wanted = rows["metric"].map(claimed) * enough
    better = rows["verdict"] == "better"
    if (better & (shares["difference"] <= wanted)).all():
        verdict = CONFIRMED
    elif better.any():
        verdict = PARTLY
    else:
        is_excluded = (shares["low"] > wanted).all()
        verdict = REFUTED if is_excluded or (rows["verdict"] == "worse").any() else NOT_DECIDED
    shown = ", ".join(
        f"{metric.upper()} {100 * share.difference:+.0f} % [{100 * share.low:+.0f}, "
        f"{100 * share.high:+.0f}] ({found})"
        for metric, found, share in zip(
            rows["metric"], rows["verdict"], shares.itertuples(), strict=True
        )
    )
    said = f"{method} {shown}; {100 * enough:g} % of the published change counts as the same"
    return Judgement(verdict, said, PAIRED)


Margins = Mapping[str, float | Mapping[str, float]]


def within(
    tables: Tables,
    *,
    table: str,
    where: Mapping[str, Any],
    margins: Mapping[str, float | Mapping[str, float]],
    two_sided: bool,
) -> Judgement:
    """Judge "no measure is better (two-sided: other) by more than its margin" by intervals.

    Of measures of which less is better; every one must hold.
    """
    rows = tables.rows(table, **({"metric": list(margins)} | dict(where)))
    verdicts, said = [], []
    for row in rows.to_dict("records"):
        margin = margins[row["metric"]]
        if isinstance(margin, dict):
            margin = margin["share of own"] * tables.own(row["metric"])
        holds = row["low"] >= -margin and (row["high"] <= margin or not two_sided)
        fails = row["high"] < -margin or (two_sided and row["low"] > margin)
        verdicts.append(CONFIRMED if holds else REFUTED if fails else NOT_DECIDED)
        said.append(f"{row['metric']} of {difference(row)} (counts from {margin:.4f} on)")
    holds = all(verdict == CONFIRMED for verdict in verdicts)
    verdict = REFUTED if REFUTED in verdicts else CONFIRMED if holds else NOT_DECIDED
    return Judgement(verdict, f"difference to attention: {', '.join(said)}", INTERVAL)


def at_least(tables: Tables, *, table: str, where: Mapping[str, Any], bound: float) -> Judgement:
    """Judge "the difference is so large or larger" by its interval."""
    row = with_width(tables.rows(table, **where)).iloc[0].to_dict()
    is_below = row["high"] < bound
    verdict = CONFIRMED if row["low"] >= bound else REFUTED if is_below else NOT_DECIDED
    said = f"{row['metric']} of {difference(row)} (claimed: {bound:g} or more)"
    return Judgement(verdict, f"difference to attention: {said}", INTERVAL)


def spread(tables: Tables, *, table: str, smallest: int, margin: float) -> Judgement:
    """Judge "k hardly matters": each method's accuracies over k lie within the margin."""
    means = _accuracy_by_k(tables, table, smallest)
    widths = means.max(axis=1) - means.min(axis=1)
    small = widths < margin
    verdict = CONFIRMED if small.all() else PARTLY if small.any() else REFUTED
    said = f"{_best_ks(means, widths)}; less than {100 * margin:g} counts as hardly any"
    return Judgement(verdict, f"spread of accuracy over k ≥ {smallest} in points: {said}", MEANS)


def lead(
    tables: Tables,
    *,
    table: str,
    methods: list[str],
    smallest: int,
    inside: Sequence[int],
    margin: float,
) -> Judgement:
    """Judge "the best k lies in this range": its best accuracy leads by the margin or more."""
    means = _accuracy_by_k(tables, table, smallest, method=methods)
    is_inside = (means.columns >= inside[0]) & (means.columns <= inside[1])
    if is_inside.all() or not is_inside.any():
        raise MissingTableError(f"k inside and outside {inside} in {table}.csv")
    leads = means.loc[:, is_inside].max(axis=1) - means.loc[:, ~is_inside].max(axis=1)
    said = f"accuracy of the best k in {inside[0]} to {inside[1]} minus that of the best other k"
    said = f"{said} in points: {_best_ks(means, leads)}; a lead counts from {100 * margin:g} on"
    return Judgement(decide(leads >= margin, leads <= -margin), said, MEANS)


def _accuracy_by_k(tables: Tables, table: str, smallest: int, **where: object) -> pd.DataFrame:
    """Return mean accuracy over seeds, a row a method and a column a k."""
    rows = tables.rows(table, metric="accuracy", **where)
    rows = rows[rows["k"] >= smallest]
    return rows.groupby(["method", "k"])["value"].mean().unstack()


def _best_ks(means: pd.DataFrame, points: pd.Series) -> str:
    return ", ".join(
        f"{name} {100 * each:+.2f} (best k = {means.loc[name].idxmax()})"
        for name, each in points.items()
    )


def kept(
    tables: Tables,
    *,
    table: str,
    over: str,
    base: float,
    bounds: Mapping[float, float],
    first: str,
    kinds: list[str] | None = None,
    where: Mapping[str, Any] | None = None,
    loss: bool = False,
) -> Judgement:
    """Judge "the attention keeps so much of its accuracy", by means and case by case."""
    chosen = dict(where or {}) | ({"kind": kinds} if kinds else {})
    rows = tables.rows(table, metric="accuracy", method="attention", **chosen)
    cases = list(itertools.product(kinds or [""], bounds))

    def judge(own: pd.DataFrame) -> tuple[str, str]:
        kind = own["kind"] if kinds else pd.Series("", own.index)
        means = own["value"].groupby([kind, own[over]]).mean()
        found = {
            (kind, level): means[kind, base] - means[kind, level]
            if loss
            else means[kind, level] / means[kind, base]
            for kind, level in cases
            if (kind, level) in means and (kind, base) in means
        }
        if not found:
            levels = " or ".join(f"{level:g}" for level in bounds)
            raise MissingTableError(f"{over} {levels} and {base:g} in {table}.csv")
        holds = [
            each <= bounds[level] if loss else each >= bounds[level]
            for (_, level), each in found.items()
        ]
        whole = all(holds) and len(found) == len(cases)
        shown = ", ".join(
            f"{100 * each:.2f} at {over} {level:g}{kind and ' '}{kind} "
            f"(claimed: {100 * bounds[level]:g})"
            for (kind, level), each in found.items()
        )
        missing = [
            f"{level:g} {kind}".strip() for kind, level in cases if (kind, level) not in found
        ]
        shown += f"; not measured: {', '.join(missing)}" if missing else ""
        return CONFIRMED if whole else PARTLY if any(holds) else REFUTED, shown

    verdict, shown = in_settings(rows, first, judge)
    what = "points of accuracy lost" if loss else "% of the accuracy kept"
    return Judgement(verdict, f"{what}: {shown}", MEANS)


def theory(tables: Tables, *, line: str) -> Judgement:
    """Take over a line of the theory study's own table."""
    row = tables.rows("07_theory/claims", claim=line).iloc[0]
    words = {"holds": CONFIRMED, "does not hold": REFUTED, "holds in part": PARTLY}
    verdict = words.get(row["verdict"], NOT_DECIDED)
    return Judgement(verdict, f"{row['measured']} (bound: {row['bound']})", THEORY)


def faster(tables: Tables, *, stages: list[str], bound: float) -> Judgement:
    """Judge a time by the intervals of its stages' medians; their ends add up.

    Single queries decide; where those and a batch are on different sides of the bound, the claim
    holds in part.
    """
    times = [
        tables.rows("06_efficiency/stages", batch=batch, method="attention", stage=stages)[
            ["value", "low", "high"]
        ].sum(skipna=False)
        for batch in ("one by one", "all at once")
    ]
    verdict, other = (
        CONFIRMED if each["high"] < bound else REFUTED if each["low"] >= bound else NOT_DECIDED
        for each in times
    )
    single, batched = times
    return Judgement(
        PARTLY if {verdict, other} == {CONFIRMED, REFUTED} else verdict,
        f"{', '.join(stages)}: {single['value']:.3f} ms [{single['low']:.3f}, "
        f"{single['high']:.3f}] for a single query, {batched['value']:.4f} ms a query in a batch "
        f"(published: under {bound:g} ms)",
        TIMES,
    )


def pays_only_past(tables: Tables, *, rows: int, queries: int, recall: float) -> Judgement:
    """Judge "exact search is fast enough up to so many rows"."""
    table = "06_efficiency/measures"
    measured = tables.rows(table, index=["HNSW", "Flat IP"])
    wide = measured.pivot(index=["rows", "index"], columns="metric", values="value")
    graph, flat = (wide.xs(name, level="index") for name in ("HNSW", "Flat IP"))
    if graph.index.max() < rows or "recall" not in wide:
        raise MissingTableError(f"{rows} rows and recall in {table}.csv")
    gained = (flat["search_ms"] - graph["search_ms"]) / 1000
    after = (graph["build_seconds"] - flat["build_seconds"]) / gained.where(gained > 0)
    shown = ", ".join(
        f"{n:,} rows: "
        + ("never" if pd.isna(each) else f"after {each:,.0f} queries")
        + f" (recall {graph['recall'][n]:.3f})"
        for n, each in after.items()
    )
    pays, is_good = (after < queries) & (after.index < rows), graph["recall"] >= recall
    # A graph that is fast because it misses rows says nothing about one that does not.
    verdict = REFUTED if (pays & is_good).any() else NOT_DECIDED if pays.any() else CONFIRMED
    limits = f"counted: up to {queries:,} queries at a recall of {recall:g} or more"
    return Judgement(verdict, f"building HNSW pays off at {shown}; {limits}", TIMES)


def unmeasured(tables: Tables, *, why: str) -> Judgement:
    """Say why no run here can decide the claim."""
    return Judgement(NOT_MEASURED, why, NOTHING)


RULES = {
    rule.__name__: rule
    for rule in (
        beats, changes, within, at_least, spread, lead, kept, theory, faster,
        pays_only_past, unmeasured,
    )
}  # fmt: skip

# ---- All claims of a run, and what they amount to.

# Three summaries, of which the original study published two.
VALIDATED, PARTIALLY, UNSUPPORTED = "validated", "partially validated", "not supported"
# A hypothesis is the sum of its claims: all of them but a few must be decided to judge it.
MAY_BE_OPEN = 2


def judge(claim: Mapping[str, Any], tables: Tables) -> Judgement:
    """Return what a run's tables say of a claim, an entry of ``published.yaml``."""
    needs = {
        name: value
        for name, value in claim.items()
        if name not in ("text", "core", "rule", "notebook")
    }
    try:
        return RULES[claim["rule"]](tables, **needs)
    except MissingTableError as missing:
        return Judgement(NOT_MEASURED, f"needs {missing}", NOTHING)


def judge_claims(folder: Path) -> pd.DataFrame:
    """Return a row per claim: ``claim``, ``verdict``, ``rests on``, ``evidence``, ``notebook``."""
    tables, rows = Tables(folder), []
    for claim in published()["claims"]:
        found = judge(claim, tables)
        rows.append((claim["text"], found.verdict, found.basis, found.evidence, claim["notebook"]))
    return pd.DataFrame(rows, columns=["claim", "verdict", "rests on", "evidence", "notebook"])


def summary(table: pd.DataFrame) -> str:
    """Return which of the published summaries the core claims' verdicts bear out, in one line."""
    core = [claim["text"] for claim in published()["claims"] if claim.get("core")]
    verdicts = list(table.loc[table["claim"].isin(core), "verdict"])
    order = (CONFIRMED, PARTLY, REFUTED, NOT_DECIDED, NOT_MEASURED)
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in order if name in verdicts)
    decided = [name for name in verdicts if name in (CONFIRMED, PARTLY, REFUTED)]
    start = f"**Summary.** Of the {len(verdicts)} claims that make up the hypothesis: {counts}."
    if not decided:
        return f"{start} Nothing is decided, nor are the published summaries."
    needed = len(verdicts) - MAY_BE_OPEN
    if len(decided) < needed:
        return (
            f"{start} Too few are measured and decided to judge the hypothesis or the published "
            f"summaries of it ({len(decided)}, at least {needed} are needed)."
        )
    found = {frozenset([CONFIRMED]): VALIDATED, frozenset([REFUTED]): UNSUPPORTED}
    ours = found.get(frozenset(decided), PARTIALLY)
    said = "; ".join(
        f'"{words}" ({who}) is {CONFIRMED if words == ours else REFUTED}'
        for words, who in ((PARTIALLY, "the narrative"), (UNSUPPORTED, "experiment 7"))
    )
    return f"{start} By those that are decided the hypothesis is {ours}: {said}."


def write_claims(folder: Path) -> Path:
    """Write ``claims.md`` into a run's folder and return its path."""
    table = judge_claims(folder)
    intro = [
        f"# Published claims, judged by the run `{Path(folder).name}`\n",
        "Computed from the tables in this folder. One run judges one data set and one embedder; "
        "intervals cover the test rows, and the seeds where there are several. What is neither "
        f"shown nor excluded is *{NOT_DECIDED}*. A verdict rests on one of these:\n",
        bases(),
    ]
    text = "\n".join([*intro, "", to_markdown(table), summary(table), ""])
    return write_text(Path(folder) / "claims.md", text)


def bases() -> str:
    """Return, in Markdown, what verdicts rest on."""
    return "\n".join(f"- *{name}*: {words}." for name, words in published()["bases"].items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``claims.md`` anew into the folders of runs, from the tables that are saved there."""
    parser = argparse.ArgumentParser(description="Judge the published claims by saved tables.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, as results/cifar10")
    folders = parser.parse_args(arguments).folders
    for folder in folders:
        if not any(folder.glob("*/*.csv")):
            parser.error(f"folders must hold the tables of studies, got {folder}")
    for folder in folders:
        write_claims(folder)


if __name__ == "__main__":
    main()
