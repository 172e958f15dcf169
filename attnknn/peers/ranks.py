"""Ranks: measures of several methods on several data sets to mean ranks and what they are worth."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from attnknn.measure import HIGHER_IS_BETTER


def rank_table(tidy: pd.DataFrame) -> pd.DataFrame:
    """Return the mean rank of every method over data sets, 1 = best, with its 95 % interval.

    Methods are ranked on each data set by their mean over seeds; data sets are the sample.

    Args:
        tidy: Columns ``dataset``, ``seed``, ``method``, ``metric``, ``value``.

    Returns:
        Columns ``method``, ``metric``, ``mean``, ``low``, ``high`` and ``n`` (data sets).
    """
    means = tidy.groupby(["dataset", "metric", "method"], sort=False)["value"].mean().reset_index()
    sign = np.where(means["metric"].isin(HIGHER_IS_BETTER), -1, 1)
    means["signed"] = sign * means["value"]
    means["rank"] = means.groupby(["dataset", "metric"])["signed"].rank()
    ranks = means.groupby(["method", "metric"], sort=False)["rank"]
    table = ranks.agg(["mean", "sem", "size"]).reset_index().rename(columns={"size": "n"})
    half = stats.t.ppf(0.975, table["n"] - 1) * table.pop("sem")
    return table.assign(low=table["mean"] - half, high=table["mean"] + half)


def critical_difference(n_methods: int, n_datasets: int, *, level: float = 0.95) -> float:
    """Return by how much two mean ranks must differ to be told apart (Nemenyi)."""
    quantile = stats.studentized_range.ppf(level, n_methods, np.inf) / np.sqrt(2)
    return float(quantile * np.sqrt(n_methods * (n_methods + 1) / (6 * n_datasets)))


@dataclass(frozen=True)
class Standing:
    """Where a method stands among others by its mean rank in one measure.

    Attributes:
        method: The method.
        rank: Its mean rank.
        rival: The best of the others.
        rival_rank: Its mean rank.
        difference: By how much two of them must differ to be told apart.
        n_methods: How many are ranked.
        n_datasets: On how many data sets.
    """

    method: str
    rank: float
    rival: str
    rival_rank: float
    difference: float
    n_methods: int
    n_datasets: int

    @property
    def is_first(self) -> bool:
        """Whether nobody else has so low a mean rank."""
        return self.rank < self.rival_rank

    def sentence(self) -> str:
        """Return the standing in words: who is first, and whether the data can tell."""
        places = [(self.method, self.rank), (self.rival, self.rival_rank)]
        (first, low), (second, high) = sorted(places, key=lambda place: place[1])
        gap = high - low
        told = f"{gap:.2f} apart, {'at least' if gap >= self.difference else 'less than'} the "
        told += f"critical difference of {self.difference:.2f}"
        if not gap:
            return f"{self.method} ({low:.2f}) shares the first place with {self.rival}"
        verb = "is first" if first == self.method else "is ahead"
        return f"{first} ({low:.2f}) {verb}, before {second} ({high:.2f}): {told}"


def standing(
    tidy: pd.DataFrame, metric: str, *, method: str, among: Collection[str]
) -> Standing | None:
    """Return where a method stands, ranked among ``among`` alone; None without anybody else.

    Args:
        tidy: As of ``rank_table``.
        metric: The measure.
        method: Whose standing is asked for.
        among: Methods that are ranked; those without measures are left out.
    """
    here = tidy[(tidy["metric"] == metric) & tidy["method"].isin(among)]
    present = set(here["method"])
    if method not in present or len(present) < 2:
        return None
    ranks = rank_table(here).set_index("method")["mean"]
    others, n_datasets = ranks.drop(method), int(here["dataset"].nunique())
    return Standing(
        method=method,
        rank=float(ranks[method]),
        rival=str(others.idxmin()),
        rival_rank=float(others.min()),
        difference=critical_difference(len(ranks), n_datasets),
        n_methods=len(ranks),
        n_datasets=n_datasets,
    )
