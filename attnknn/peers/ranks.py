"""Ranks: measures of several methods on several data sets to mean ranks and what they are worth."""

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
