"""Standings: cells of an arena to mean ranks, wins, ratings, and tables of who is good where.

A contestant is a rival, or one of ours with the label of its version ("attnknn@now"); with a
temperature it is another answer of the same contestant. Tables are the sample: a contestant's
measure on a table is its mean over splits.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.arena.cells import read_all
from benchmarks.arena.ours import OURS
from benchmarks.arena.problems import NOISE, TRAIN_SHARE
from benchmarks.arena.rivals import RIVALS

METRICS = ("nll", "brier", "ece", "accuracy")
HIGHER_IS_BETTER = ("accuracy",)
LEVEL = 0.05
TIE = 1e-9  # means that differ by less are the same
RESAMPLES = 400
COVER = 0.8  # of the problems in question; who has fewer is named, not ranked
WORSE, WORSE_ROWS = 0.03, 200  # NLL that a new version may lose on tables of so many rows
NAMES = {
    "attnknn": "Attn-KNN",
    "attnknn-as-given": "Attn-KNN, label_noise=0",
    "attnknn-no-fit": "Attn-KNN, no fit",
    "knn": "kNN, k = 5",
    "knn-tuned": "kNN, tuned",
    "nca": "NCA + kNN",
    "logistic": "logistic regression",
    "forest": "random forest",
    "histgb": "histogram boosting",
    "lightgbm": "LightGBM",
    "catboost": "CatBoost",
    "realmlp": "RealMLP",
    "tabm": "TabM",
    "tabr": "TabR",
}
KEYS = ("table", "noise", "split", "method")
FACTS = ("rows", "classes", "true_noise", "label_noise", "embedder", "temperature", "issue_auroc")
FACTS += ("issue_ap", "set_coverage", "set_size", "data", "code", "version", "error")


def is_ours(contestant: str) -> bool:
    """Return whether a contestant is a version of the classifier."""
    return contestant.partition("@")[0] in OURS


def name_of(contestant: str, contestants: Collection[str] = ()) -> str:
    """Return what a contestant is called; its label too where there are several versions."""
    method, _, label = contestant.partition("@")
    labels = {each.partition("@")[2] for each in contestants if is_ours(each)}
    return f"{NAMES[method]} [{label}]" if label and len(labels) > 1 else NAMES[method]


def ordered(contestants: Collection[str]) -> list[str]:
    """Return contestants, ours first, in the order of their definition."""
    order = [*OURS, *RIVALS]
    return sorted(contestants, key=lambda each: (order.index(each.partition("@")[0]), each))


# ---- Cells as one table.


def frame_of(cells: list[dict[str, Any]]) -> pd.DataFrame:
    """Return one row a cell: keys, measures as it comes and with a temperature, seconds."""
    rows = []
    for cell in cells:
        label = f"@{cell['label']}" if cell.get("label") else ""
        row = {key: cell[key] for key in KEYS} | {"method": cell["method"] + label}
        row |= {fact: cell[fact] for fact in FACTS if fact in cell}
        row |= cell.get("metrics", {})
        row |= {f"tempered_{name}": value for name, value in cell.get("tempered", {}).items()}
        row |= {f"{stage}_seconds": taken for stage, taken in cell["seconds"].items()}
        row |= {f"{stage}_cpu": taken for stage, taken in cell.get("cpu", {}).items()}
        rows.append(row)
    columns = [*KEYS, *METRICS, "error"]
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=[*columns, *(each for each in frame if each not in columns)])


def read_frame(folder: Path, labels: Collection[str] | None = None) -> pd.DataFrame:
    """Return all cells of an arena, or of a saved report of one.

    Args:
        folder: With ``cells`` (an arena) or ``cells.csv`` (a report).
        labels: Versions of ours that count; all by default.
    """
    saved = folder / "cells.csv"
    frame = pd.read_csv(saved) if saved.is_file() else frame_of(read_all(folder))
    if frame.empty:
        raise ValueError(f"folder must hold cells of an arena, got {folder=}")
    check_same_data(frame)
    if labels is None:
        return frame
    label = frame["method"].str.partition("@")[2]
    return frame[(label == "") | label.isin(labels)].reset_index(drop=True)


def check_same_data(frame: pd.DataFrame) -> None:
    """Refuse cells of one table that were measured on other data, or by other rules."""
    for name in ("data", "version"):
        if name in frame:
            found = frame.dropna(subset=[name]).groupby("table")[name].nunique()
            if (found > 1).any():
                table = found.idxmax()
                raise ValueError(f"cells must share their {name}, got {table=} with {found.max()}")


@dataclass(frozen=True)
class Standing:
    """Contestants of one kind of noise, on the problems that all of them have answered.

    Attributes:
        noise: A key of ``NOISE``.
        values: Metric to a table: index (table, split), a column a contestant.
        left_out: Contestants with too few answers, and how many they have.
        n_problems: Problems that the headline contestant has answered.
    """

    noise: str
    values: dict[str, pd.DataFrame]
    left_out: dict[str, int]
    n_problems: int

    @property
    def contestants(self) -> list[str]:
        """Who is ranked."""
        return list(self.values["nll"].columns)

    def means(self, metric: str) -> pd.DataFrame:
        """Return the mean over splits: a row a table, a column a contestant."""
        return self.values[metric].groupby(level="table").mean()


def standing(
    frame: pd.DataFrame, noise: str, headline: str, *, tempered: bool = False
) -> Standing | None:
    """Return who is ranked on one kind of noise, and their values; None without the headline.

    Args:
        frame: All cells.
        noise: A key of ``NOISE``.
        headline: The contestant whose problems are in question.
        tempered: Take rivals with their temperature; ours have none.
    """
    here = frame[frame["noise"] == noise].copy()
    if headline not in here["method"].unique():
        return None
    if tempered:
        for metric in METRICS:
            if f"tempered_{metric}" in here:
                here[metric] = here[f"tempered_{metric}"].fillna(here[metric])
    wide = here.pivot(index=["table", "split"], columns="method", values=list(METRICS))
    wide = wide[wide["nll"][headline].notna()]
    answered = wide["nll"].notna().sum()
    kept = ordered([name for name in answered.index if answered[name] >= COVER * len(wide)])
    whole = wide["nll"][kept].notna().all(axis=1)
    if not whole.any():
        return None
    return Standing(
        noise=noise,
        values={metric: wide.loc[whole, metric][kept] for metric in METRICS},
        left_out={name: int(answered[name]) for name in ordered(set(answered.index) - set(kept))},
        n_problems=len(wide),
    )


def standings(frame: pd.DataFrame, headline: str, *, tempered: bool = False) -> dict[str, Standing]:
    """Return the standing of every kind of noise that there are cells of, in their order."""
    found = {noise: standing(frame, noise, headline, tempered=tempered) for noise in NOISE}
    return {noise: each for noise, each in found.items() if each is not None}


# ---- Ranks, wins and ratings.


def losses(means: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return measures turned so that less is better."""
    return -means if metric in HIGHER_IS_BETTER else means


def mean_ranks(means: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the mean rank of every method, 1 = best, with its 95 % interval over tables.

    Args:
        means: A row per table, a column per method, nothing missing.
        metric: Whose values they are.

    Returns:
        Index: the methods. Columns ``rank``, ``low``, ``high``.
    """
    ranks = losses(means, metric).round(9).rank(axis=1)
    rank = ranks.mean()
    half = pd.Series(0.0, index=rank.index)
    if len(ranks) > 1:
        half = stats.t.ppf(1 - LEVEL / 2, len(ranks) - 1) * ranks.sem()
    return pd.DataFrame({"rank": rank, "low": rank - half, "high": rank + half})


def critical_difference(n_methods: int, n_tables: int) -> float:
    """Return by how much two mean ranks must differ to be told apart (Nemenyi)."""
    quantile = stats.studentized_range.ppf(1 - LEVEL, n_methods, np.inf) / np.sqrt(2)
    return float(quantile * np.sqrt(n_methods * (n_methods + 1) / (6 * n_tables)))


def duels(found: Standing, headline: str) -> pd.DataFrame:
    """Return how often the headline contestant beats each other one in NLL, table by table."""
    rivals = [name for name in found.contestants if name != headline]
    counts = [paired_counts(found.values["nll"], headline, rival) for rival in rivals]
    return pd.DataFrame(counts, index=pd.Index(rivals, name="method"))


def paired_counts(values: pd.DataFrame, ours: str, rival: str) -> dict[str, int]:
    """Return on how many tables one method beats another, by a paired test over splits.

    Args:
        values: Index ``table`` and ``split``, a column per method; less is better.
        ours: Whose wins are counted.
        rival: Against whom.

    Returns:
        ``better`` and ``worse`` by the mean alone; ``wins``, ``ties`` and ``losses`` by the test at
        5 %, two-sided. With fewer than three splits nothing can be told: a tie.
    """
    gaps = (values[ours] - values[rival]).dropna()
    found = dict.fromkeys(("better", "worse", "wins", "ties", "losses"), 0)
    for _, gap in gaps.groupby(level="table"):
        mean = float(gap.mean())
        found["better"] += mean < -TIE
        found["worse"] += mean > TIE
        told = "ties" if resampled_p(gap.to_numpy()) >= LEVEL else "wins" if mean < 0 else "losses"
        found[told] += 1
    return found


def resampled_p(gaps: np.ndarray) -> float:
    """Return the two-sided p-value of a mean difference over random splits; 1 where it is open.

    The t-test of Nadeau and Bengio, for training parts that overlap: the variance of the mean is
    (1/n + test/train) of that of a difference.
    """
    n, spread = len(gaps), gaps.std(ddof=1) if len(gaps) > 1 else 0.0
    if n < 3 or spread <= TIE:
        return 1.0
    scale = spread * np.sqrt(1 / n + (1 - TRAIN_SHARE) / TRAIN_SHARE)
    return float(2 * stats.t.sf(abs(gaps.mean()) / scale, n - 1))


def ratings(means: pd.DataFrame, *, anchor: str, seed: int = 0) -> pd.DataFrame:
    """Return Elo-like ratings: 400 points are odds of ten to one of being better on a table.

    Args:
        means: A row per table and noise, a column per method, less is better; index level
            ``table``.
        anchor: The method that has 1 000.
        seed: Of the bootstrap over tables.

    Returns:
        Index: the methods. Columns ``rating``, ``low``, ``high`` (95 %).
    """
    values = means.to_numpy()
    gaps = values[:, :, None] - values[:, None, :]
    won = np.where(gaps < -TIE, 1.0, np.where(gaps > TIE, 0.0, 0.5))  # (rows, M, M)
    tables = means.index.get_level_values("table")
    names = tables.unique()
    per_table = np.stack([won[tables == name].sum(axis=0) for name in names])
    place = list(means.columns).index(anchor)
    rng = np.random.default_rng(seed)
    drawn = [
        _strengths(per_table[rng.integers(0, len(names), len(names))].sum(axis=0), place)
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2], axis=0)
    rating = _strengths(per_table.sum(axis=0), place)
    return pd.DataFrame({"rating": rating, "low": low, "high": high}, index=means.columns)


def _strengths(won: np.ndarray, anchor: int) -> np.ndarray:
    """Return Bradley-Terry strengths as ratings (Hunter's MM steps).

    Half a win against everybody on either side keeps whoever always wins finite.
    """
    won = won + 0.5
    np.fill_diagonal(won, 0.0)
    played = won + won.T
    strength = np.ones(len(won))
    for _ in range(500):
        new = won.sum(axis=1) / np.divide(played, strength[:, None] + strength).sum(axis=1)
        new /= np.exp(np.log(new).mean())
        if np.abs(np.log(new / strength)).max() < 1e-6:
            break
        strength = new
    rating = 400 * np.log10(strength)
    return 1000 + rating - rating[anchor]


# ---- Tables of a report.


def standing_table(frame: pd.DataFrame, found: Standing) -> pd.DataFrame:
    """Return a row a contestant, the best mean rank in NLL first."""
    columns = {f"rank_{m}": mean_ranks(found.means(m), m)["rank"] for m in METRICS}
    columns |= {f"mean_{m}": found.means(m).mean() for m in METRICS}
    columns |= {f"median_{m}": found.means(m).median() for m in METRICS}
    here = frame[frame["noise"] == found.noise].groupby("method")
    columns |= {f"{stage}_cpu": here[f"{stage}_cpu"].median() for stage in ("fit", "predict")}
    table = pd.DataFrame(columns).loc[found.contestants]
    return table.sort_values("rank_nll").rename_axis("method")


def gap_table(found: Standing, headline: str) -> pd.DataFrame:
    """Return by how much the headline contestant's NLL is above the best rival's: worst first."""
    means = found.means("nll")
    rivals = means[[name for name in means if not is_ours(name)]]
    columns = {
        "nll": means[headline],
        "best": rivals.idxmin(axis=1),
        "best_nll": rivals.min(axis=1),
    }
    table = pd.DataFrame(columns).assign(rank=means.rank(axis=1)[headline])
    table["behind"] = table["nll"] - table["best_nll"]
    return table.sort_values("behind", ascending=False)


def against_before(frame: pd.DataFrame, now: str, before: str) -> pd.DataFrame:
    """Return two versions of ours table by table, on the problems that both have answered.

    Returns:
        A row a noise and table, most worsened first: ``rows``, ``splits``, the change of NLL, ECE
        and accuracy, and whether it is ``worse`` than it may be.
    """
    both = frame[frame["method"].isin([now, before])]
    wide = both.pivot(index=["noise", "table", "split"], columns="method", values=list(METRICS))
    wide = wide.dropna()
    change = pd.DataFrame({m: wide[m][now] - wide[m][before] for m in METRICS})
    grouped = change.groupby(level=["noise", "table"])
    table = grouped.mean().assign(splits=grouped.size()).reset_index()
    table["rows"] = table["table"].map(frame.groupby("table")["rows"].median()).astype(int)
    table["worse"] = (table["nll"] > WORSE) & (table["rows"] >= WORSE_ROWS)
    return table.sort_values("nll", ascending=False, ignore_index=True)


def group_table(frame: pd.DataFrame, facts: pd.DataFrame, found: Standing) -> pd.DataFrame:
    """Return mean ranks in NLL: a row a group of three tables or more, a column a contestant."""
    ranks = found.means("nll").round(9).rank(axis=1)
    parts = {}
    for what, groups in groups_of(frame, facts).items():
        groups = groups.reindex(ranks.index)
        sizes = groups.value_counts()
        part = ranks.groupby(groups, observed=True).mean()
        part = part[[sizes[name] >= 3 for name in part.index]]
        parts[what] = part.rename(index=lambda name, sizes=sizes: f"{name} ({sizes[name]} tables)")
    return pd.concat(parts, names=["by", "group"])


def groups_of(frame: pd.DataFrame, facts: pd.DataFrame) -> dict[str, pd.Series]:
    """Return ways to divide the tables: table to group, by rows, classes and kind of columns.

    Args:
        frame: All cells; their training rows count, after any cap.
        facts: Index: tables; columns ``numbers`` and ``categories``.
    """
    sizes = frame.groupby("table")[["rows", "classes"]].median()
    numbers, categories = facts["numbers"] > 0, facts["categories"] > 0
    kind = pd.Series("both", index=facts.index)
    kind[numbers & ~categories] = "numbers alone"
    kind[~numbers & categories] = "categories alone"
    rows, classes = [0, 200, 600, 2000, float("inf")], [0, 2, 5, float("inf")]
    return {
        "training rows": pd.cut(sizes["rows"], rows, labels=_spans(rows)),
        "classes": pd.cut(sizes["classes"], classes, labels=_spans(classes)),
        "columns": kind,
    }


def _spans(edges: list[float]) -> list[str]:
    """Return the names of spans that end with each edge."""
    names = [f"{low + 1:g} to {high:g}" for low, high in pairwise(edges)]
    return [f"up to {edges[1]:g}", *names[1:-1], f"more than {edges[-2]:g}"]


def issue_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return how well wrong labels are found: mean AUROC and average precision, by noise.

    Ours by ``label_issues``, others by cleanlab on probabilities of rows that were held out; on the
    problems that all have answered.
    """
    found = frame.dropna(subset=["issue_auroc"]) if "issue_auroc" in frame else frame.head(0)
    parts = [pd.DataFrame(columns=["noise", "issue_auroc", "issue_ap", "tables"])]
    for noise, here in found.groupby("noise", sort=False):
        wide = here.pivot(
            index=["table", "split"], columns="method", values=["issue_auroc", "issue_ap"]
        )
        counts = wide["issue_auroc"].notna().sum()
        kept = [name for name in counts.index if counts[name] >= COVER * counts.max()]
        whole = wide[wide["issue_auroc"][kept].notna().all(axis=1)]
        means = whole.groupby(level="table").mean().mean().unstack(0).loc[kept]
        parts.append(means.assign(noise=noise, tables=whole.index.unique("table").size))
    return pd.concat(parts[1:] or parts).rename_axis("method").reset_index()


def noise_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what ours says of wrong labels and sets: a row a noise and version.

    ``estimate`` and ``true`` are shares of wrong labels, means over tables; ``above`` is how many
    tables have an estimate of more than 5 points above the truth. ``coverage`` and ``size`` are
    of the sets that shall hold 90 %.
    """
    if "label_noise" not in frame:
        return pd.DataFrame()
    ours = frame[frame["method"].map(is_ours) & frame["label_noise"].notna()]
    named = {
        "true": "true_noise",
        "estimate": "label_noise",
        "coverage": "set_coverage",
        "size": "set_size",
        "classes": "classes",
    }
    means = ours.groupby(["noise", "method", "table"], sort=False)[list(named.values())].mean()
    means["above"] = means["label_noise"] > means["true_noise"] + 0.05
    grouped = means.groupby(level=["noise", "method"], sort=False)
    table = grouped[list(named.values())].mean().set_axis(list(named), axis=1)
    return table.assign(above=grouped["above"].sum(), tables=grouped.size()).reset_index()


def seconds_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the median seconds of the processor by stage and of a cell, and the hours of all."""
    stages = [name for name in frame if name.endswith("_cpu")]
    method = frame["method"]
    total = frame[stages].sum(axis=1)
    clock = frame[[name for name in frame if name.endswith("_seconds")]].sum(axis=1)
    table = frame.groupby("method")[stages].median()
    table["cell_cpu"] = total.groupby(method).median()
    table["cpu_hours"] = total.groupby(method).sum() / 3600
    table["clock_hours"] = clock.groupby(method).sum() / 3600
    table["cells"] = method.value_counts()
    table["holes"] = frame["error"].notna().groupby(method).sum()
    return table.loc[ordered(table.index)]
