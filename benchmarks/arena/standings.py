"""Standings: cells of an arena to tables of who is how good, how fast, and where.

A contestant is a rival, or one of ours with the label of its version ("attnknn@now"); with a
temperature it is another answer of the same contestant. Axes of a table of values: problems (table,
split), contestants.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.arena.cells import read_all
from benchmarks.arena.ours import OURS
from benchmarks.arena.problems import NOISE
from benchmarks.arena.ranks import grouped_ranks, losses, mean_ranks, paired_counts
from benchmarks.arena.rivals import RIVALS

METRICS = ("nll", "brier", "ece", "accuracy")
COVER = 0.8  # of the problems in question; who has fewer is named, not ranked
NAMES = {
    "attnknn": "Attn-KNN",
    "attnknn-as-given": "Attn-KNN, label_noise=0",
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
FACTS = ("rows", "test_rows", "classes", "true_noise", "label_noise", "embedder", "temperature")
FACTS += ("issue_auroc", "issue_ap", "set_coverage", "set_size", "data", "code", "version", "error")


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


def frame_of(cells: list[dict[str, Any]]) -> pd.DataFrame:
    """Return one row a cell: keys, measures as it comes, measures with a temperature, seconds."""
    rows = []
    for cell in cells:
        label = f"@{cell['label']}" if cell.get("label") else ""
        row = {key: cell[key] for key in KEYS} | {"method": cell["method"] + label}
        row |= {fact: cell[fact] for fact in FACTS if fact in cell}
        row |= cell.get("metrics", {})
        row |= {f"tempered_{name}": value for name, value in cell.get("tempered", {}).items()}
        row |= {f"{stage}_seconds": taken for stage, taken in cell["seconds"].items()}
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
    if tempered:
        for metric in METRICS:
            if f"tempered_{metric}" in here:
                here[metric] = here[f"tempered_{metric}"].fillna(here[metric])
    wide = here.pivot(index=["table", "split"], columns="method", values=list(METRICS))
    if headline not in here["method"].unique():
        return None
    asked = wide["nll"][headline].notna()
    wide = wide[asked]
    answered = wide["nll"].notna().sum()
    kept = ordered([name for name in answered.index if answered[name] >= COVER * len(wide)])
    whole = wide["nll"][kept].notna().all(axis=1)
    if not whole.any():
        return None
    return Standing(
        noise=noise,
        values={metric: wide.loc[whole, metric][kept] for metric in METRICS},
        left_out={name: int(answered[name]) for name in ordered(set(answered.index) - set(kept))},
        n_problems=int(asked.sum()),
    )


def noises_in(frame: pd.DataFrame) -> list[str]:
    """Return the kinds of noise that there are cells of, in their order."""
    return [name for name in NOISE if (frame["noise"] == name).any()]


def standing_table(frame: pd.DataFrame, found: Standing) -> pd.DataFrame:
    """Return a row a contestant, the best mean rank in NLL first."""
    columns: dict[str, pd.Series] = {}
    for metric in METRICS:
        columns[f"rank_{metric}"] = mean_ranks(found.means(metric), metric)["rank"]
    for metric in METRICS:
        columns[f"mean_{metric}"] = found.means(metric).mean()
    columns["median_nll"] = found.means("nll").median()
    here = frame[frame["noise"] == found.noise]
    for stage in ("fit", "predict"):
        columns[f"{stage}_seconds"] = here.groupby("method")[f"{stage}_seconds"].median()
    table = pd.DataFrame(columns).loc[found.contestants]
    return table.sort_values("rank_nll").rename_axis("method")


def duels(found: Standing, headline: str) -> pd.DataFrame:
    """Return how often the headline contestant beats each other one in NLL, table by table."""
    rivals = [name for name in found.contestants if name != headline]
    counts = [paired_counts(found.values["nll"], headline, rival, "nll") for rival in rivals]
    return pd.DataFrame(counts, index=pd.Index(rivals, name="method"))


def worst_tables(found: Standing, headline: str, n_shown: int = 6) -> pd.DataFrame:
    """Return the tables where rivals' best NLL is furthest below the headline contestant's."""
    means = losses(found.means("nll"), "nll")
    rivals = means[[name for name in means if not is_ours(name)]]
    table = pd.DataFrame(
        {
            "nll": means[headline],
            "best": rivals.idxmin(axis=1),
            "best_nll": rivals.min(axis=1),
            "rank": means.rank(axis=1)[headline],
        }
    )
    table["behind"] = table["nll"] - table["best_nll"]
    return table.sort_values("behind", ascending=False).head(n_shown)


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
    names = []
    for low, high in pairwise(edges):
        if high == float("inf"):
            names.append(f"more than {low:g}")
        else:
            names.append(f"up to {high:g}" if not low else f"{low + 1:g} to {high:g}")
    return names


def group_table(frame: pd.DataFrame, facts: pd.DataFrame, found: Standing) -> pd.DataFrame:
    """Return mean ranks in NLL: a row a group of tables, a column a contestant."""
    parts = {
        f"{what}": grouped_ranks(found.means("nll"), groups, "nll")
        for what, groups in groups_of(frame, facts).items()
    }
    return pd.concat(parts, names=["by", "group"])


def issue_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return how well wrong labels are found: mean AUROC and average precision, by noise.

    Ours by ``label_issues``, others by cleanlab on probabilities of rows that were held out; on the
    problems that all have answered.
    """
    found = frame.dropna(subset=["issue_auroc"]) if "issue_auroc" in frame else frame.head(0)
    parts = []
    for noise, here in found.groupby("noise", sort=False):
        wide = here.pivot(
            index=["table", "split"], columns="method", values=["issue_auroc", "issue_ap"]
        )
        counts = wide["issue_auroc"].notna().sum()
        kept = [name for name in counts.index if counts[name] >= COVER * counts.max()]
        whole = wide[wide["issue_auroc"][kept].notna().all(axis=1)]
        means = whole.groupby(level="table").mean().mean().unstack(0).loc[kept]
        parts.append(means.assign(noise=noise, tables=whole.index.unique("table").size))
    if not parts:
        return pd.DataFrame(columns=["noise", "issue_auroc", "issue_ap", "tables"])
    return pd.concat(parts).rename_axis("method").reset_index()


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
    keys = ["noise", "method", "table"]
    means = ours.groupby(keys, sort=False)[list(named.values())].mean()
    means["above"] = means["label_noise"] > means["true_noise"] + 0.05
    grouped = means.groupby(level=["noise", "method"], sort=False)
    table = grouped[list(named.values())].mean().set_axis(list(named), axis=1)
    table["above"] = grouped["above"].sum()
    table["tables"] = grouped.size()
    return table.reset_index()


def seconds_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the median seconds of each stage and of a cell, and the hours of all, by method."""
    stages = [name for name in frame if name.endswith("_seconds")]
    total = frame[stages].sum(axis=1)
    by_method = frame["method"]
    table = frame.groupby("method")[stages].median()
    table["cell_seconds"] = total.groupby(by_method).median()
    table["hours"] = total.groupby(by_method).sum() / 3600
    table["cells"] = by_method.value_counts()
    table["holes"] = frame["error"].notna().groupby(by_method).sum()
    return table.loc[ordered(table.index)]
