"""Ranks: measures of several methods on several tables to mean ranks, wins and ratings.

Tables are the sample: a method's measure on a table is its mean over splits.
"""

from collections.abc import Collection

import numpy as np
import pandas as pd
from scipy import stats

HIGHER_IS_BETTER = ("accuracy",)
RESAMPLES = 400
LEVEL = 0.05
TIE = 1e-9  # means that differ by less are the same


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
        half = stats.t.ppf(0.975, len(ranks) - 1) * ranks.sem()
    return pd.DataFrame({"rank": rank, "low": rank - half, "high": rank + half})


def critical_difference(n_methods: int, n_tables: int, *, level: float = 0.95) -> float:
    """Return by how much two mean ranks must differ to be told apart (Nemenyi)."""
    quantile = stats.studentized_range.ppf(level, n_methods, np.inf) / np.sqrt(2)
    return float(quantile * np.sqrt(n_methods * (n_methods + 1) / (6 * n_tables)))


def paired_counts(values: pd.DataFrame, ours: str, rival: str, metric: str) -> dict[str, int]:
    """Return on how many tables one method beats another, by a paired test over splits.

    The test is the t-test for resampled splits, whose training parts overlap (Nadeau and Bengio):
    the variance of the mean difference is (1/n + test/train) of that of a difference.

    Args:
        values: Index ``table`` and ``split``, a column per method.
        ours: Whose wins are counted.
        rival: Against whom.
        metric: Whose values they are.

    Returns:
        ``better`` and ``worse`` by the mean alone; ``wins``, ``ties`` and ``losses`` by the test at
        5 %, two-sided. With fewer than three splits nothing can be told: a tie.
    """
    both = losses(values[[ours, rival]].dropna(), metric)
    gaps = both[ours] - both[rival]
    found = dict.fromkeys(("better", "worse", "wins", "ties", "losses"), 0)
    for _, gap in gaps.groupby(level="table"):
        mean = float(gap.mean())
        found["better"] += mean < -TIE
        found["worse"] += mean > TIE
        p = resampled_p(gap.to_numpy())
        told = "ties" if p >= LEVEL else "wins" if mean < 0 else "losses"
        found[told] += 1
    return found


def resampled_p(gaps: np.ndarray, *, test_share: float = 0.3) -> float:
    """Return the two-sided p-value of a mean difference over random splits; 1 where it is open."""
    n = len(gaps)
    if n < 3 or np.ptp(gaps) == 0:
        return 1.0
    scale = np.sqrt((1 / n + test_share / (1 - test_share)) * gaps.var(ddof=1))
    return float(2 * stats.t.sf(abs(gaps.mean()) / scale, n - 1))


def ratings(means: pd.DataFrame, metric: str, *, anchor: str, seed: int = 0) -> pd.DataFrame:
    """Return Elo-like ratings: 400 points are odds of ten to one of being better on a table.

    Args:
        means: A row per table and noise, a column per method; index level ``table``.
        metric: Whose values they are.
        anchor: The method that has 1 000.
        seed: Of the bootstrap over tables.

    Returns:
        Index: the methods. Columns ``rating``, ``low``, ``high`` (95 %).
    """
    values = losses(means, metric).to_numpy()
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
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
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
        sums = strength[:, None] + strength[None, :]
        new = won.sum(axis=1) / np.divide(played, sums).sum(axis=1)
        new /= np.exp(np.log(new).mean())
        if np.abs(np.log(new / strength)).max() < 1e-6:
            break
        strength = new
    rating = 400 * np.log10(strength)
    return 1000 + rating - rating[anchor]


def grouped_ranks(
    means: pd.DataFrame, groups: pd.Series, metric: str, *, at_least: int = 3
) -> pd.DataFrame:
    """Return the mean rank of every method on each group of tables.

    Args:
        means: As of ``mean_ranks``; index ``table``.
        groups: Table to group.
        metric: Whose values they are.
        at_least: Tables that a group must have.
    """
    ranks = losses(means, metric).round(9).rank(axis=1)
    sizes = groups.reindex(ranks.index)
    found = ranks.groupby(sizes, observed=True).mean()
    counts = sizes.value_counts()
    kept: Collection[str] = [name for name in found.index if counts[name] >= at_least]
    found = found.loc[list(kept)]
    return found.rename(index=lambda name: f"{name} ({counts[name]} tables)")
