"""Comparisons of methods: probabilities of several seeds to differences, intervals and verdicts.

Methods share the embedder and the test rows, so every difference is paired: a resample draws the
same rows (and the same seeds) for both methods. What an interval covers depends on the seeds:

- one seed: the choice of test rows. It says nothing about another training run;
- several seeds: test rows and training runs. Seeds are drawn with replacement, then rows are
  drawn once for all of them. Few seeds understate the training part, so n is always shown.

Axes: N rows, C classes.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy import stats

from attnknn.checks import check_one_of, check_range
from attnknn.measure import HIGHER_IS_BETTER, METRIC_NAMES, correct_predictions
from attnknn.resample import RESAMPLED_METRICS, SeedProbs, as_seeds, resample_metrics
from attnknn.significance import holm, mcnemar

VERDICTS = ("better", "worse", "no difference at this size", "undefined")
# Measures of two methods that differ by less do so by rounding: float32 votes are good to 1e-7.
ROUNDING = 1e-6
_BOOT = "paired bootstrap"
# What the intervals of a table cover whose rows need not have the same number of seeds.
COVERED = "intervals: 95 %, over seeds or (n = 1) the test rows of one training"


class Interval(NamedTuple):
    """A mean over ``n`` runs with its confidence interval; NaN limits where n is 1."""

    mean: float
    low: float
    high: float
    n: int


class Difference(NamedTuple):
    """A paired difference (first minus second) with its interval and two-sided p-value."""

    mean: float
    low: float
    high: float
    p_value: float


def mean_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95) -> Interval:
    """Return the mean over runs (seeds) and its Student-t interval.

    Args:
        values: One number a run.
        level: Confidence of the interval.
    """
    check_range("level", level, low=0.0, high=1.0, low_open=True, high_open=True)
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values must be a non-empty list of numbers, got {values.shape=}")
    n, mean = len(values), float(values.mean())
    if n == 1 or not np.isfinite(values).all():
        return Interval(mean, float("nan"), float("nan"), n)
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def interval_table(
    tidy: pd.DataFrame,
    by: Sequence[str],
    *,
    value: str = "value",
    level: float = 0.95,
    over_rows: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Return mean and interval over the runs of each group, in order of first appearance.

    Args:
        tidy: One row per run (seed) and group, for instance per method and metric. Columns
            ``low`` and ``high``, where it has them, are intervals over test rows.
        by: Columns that name a group; everything else, such as the seed, is averaged over.
        value: Column of numbers.
        level: Confidence of the intervals.
        over_rows: Intervals over test rows (``row_intervals``, and the columns ``by``), for groups
            of a single run: no interval over runs can be given for those. By default the ones
            that ``tidy`` carries.

    Returns:
        The columns ``by``, then ``mean``, ``low``, ``high`` and ``n``.
    """
    rows = [
        {
            **dict(zip(by, key, strict=True)),
            **mean_interval(group.to_numpy(), level=level)._asdict(),
        }
        for key, group in tidy.groupby(list(by), sort=False, dropna=False)[value]
    ]
    table = pd.DataFrame(rows, columns=[*by, *Interval._fields])
    if over_rows is None and {"low", "high"} <= set(tidy):
        over_rows = tidy.drop_duplicates(list(by))
    if over_rows is None:
        return table
    known = over_rows.set_index(list(by))[["low", "high"]]
    limits = known.reindex(pd.MultiIndex.from_frame(table[list(by)])).to_numpy()
    table.loc[table["n"] == 1, ["low", "high"]] = limits[table["n"] == 1]
    return table


def row_intervals(
    results: Mapping[str, SeedProbs],
    labels: Int[np.ndarray, "N"],
    *,
    metrics: Sequence[str] = RESAMPLED_METRICS,
    n_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Return each method's measures with intervals over the choice of test rows.

    The interval is the measure ± z times its spread over resamples. The spread is what rows tell;
    the middle of the resamples is not used, because ECE of a resample exceeds ECE of the sample.

    Args:
        results: Method name to probabilities, (N, C), of a single run.
        labels: The true classes of the rows.
        metrics: Measures, out of ``resample.RESAMPLED_METRICS``.
        n_resamples: Bootstrap draws.
        level: Confidence of the intervals.
        seed: Seed of the draws.

    Returns:
        One row per method and measure: ``method``, ``metric``, ``mean``, ``low`` and ``high``.
    """
    check_range("level", level, low=0.0, high=1.0, low_open=True, high_open=True)
    measured = resample_metrics(results, labels, metrics, n_resamples, seed)
    rows = []
    for (name, metric), (observed, *drawn) in measured.items():
        with np.errstate(invalid="ignore"):  # an infinite NLL has no spread
            half = float(stats.norm.ppf((1 + level) / 2) * np.std(drawn, ddof=1))
        rows.append((name, metric, observed, observed - half, observed + half))
    return pd.DataFrame(rows, columns=["method", "metric", "mean", "low", "high"])


def covered_by(n_seeds: int) -> str:
    """Say what the 95 % intervals of a table over so many seeds cover."""
    if n_seeds == 1:
        return "intervals: 95 %, over the test rows of one training (another training not covered)"
    return f"intervals: 95 %, over {n_seeds} seeds"


def paired_bootstrap(
    metric: str,
    probs_a: SeedProbs,
    probs_b: SeedProbs,
    labels: Int[np.ndarray, "N"],
    *,
    n_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Return the difference of a measure between two methods on the same rows.

    The interval is the basic (pivotal) one: ECE of a resample exceeds ECE of the sample, most of
    all for a well calibrated method, and percentiles would count that bias twice. Of two equally
    calibrated methods it held 0 in 92 to 95 % of simulations (1 000 and 10 000 rows); where the
    true ECEs differ, the plain estimate and with it the interval tend to understate by how much.

    Args:
        metric: One of ``resample.RESAMPLED_METRICS``.
        probs_a: Probabilities of the first method, (N, C), or a list of them, one a seed.
        probs_b: The same of the second method; entries at one position belong to one seed.
        labels: The true classes of the rows, the same for all seeds.
        n_resamples: Draws; no p-value is below 2 / (n_resamples + 1).
        level: Confidence of the interval.
        seed: Seed of the draws.
    """
    measured = resample_metrics({"a": probs_a, "b": probs_b}, labels, [metric], n_resamples, seed)
    return _difference(measured["a", metric], measured["b", metric], level)


def compare_methods(
    results: Mapping[str, SeedProbs],
    labels: Int[np.ndarray, "N"],
    baseline: str,
    *,
    metrics: Sequence[str] = ("accuracy", "nll", "brier", "ece"),
    n_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    n_fits: int = 1,
) -> pd.DataFrame:
    """Return every other method's paired difference to ``baseline``, with verdicts.

    Accuracy of a single table is tested by McNemar, everything else by the bootstrap that also
    gives the interval. Holm corrects over the methods, measure by measure; the intervals are not
    corrected. A verdict holds at 1 - ``level`` after Holm; a difference of rounding is none.

    Args:
        results: Method name to probabilities, (N, C), or a list of them, one a seed.
        labels: The true classes of the rows.
        baseline: The method that the others are compared with.
        metrics: Measures to compare, out of ``resample.RESAMPLED_METRICS``.
        n_resamples: Bootstrap draws, shared by all methods and measures.
        level: Confidence of the intervals.
        seed: Seed of the draws.
        n_fits: Tables of each seed, one after another: fits on one training. Their measures are
            averaged before anything is tested, for they are no further seeds.

    Returns:
        One row per measure and method: ``method``, ``baseline``, ``metric``, ``difference``
        (method minus baseline), ``low``, ``high``, ``p_value``, ``p_holm``, ``verdict``,
        ``test``, ``n_rows``, ``n_seeds`` and ``level``.
    """
    check_one_of("baseline", baseline, list(results))
    methods = [name for name in results if name != baseline]
    if not methods:
        raise ValueError(f"results must hold a method besides the baseline, got {list(results)}")
    measured = resample_metrics(results, labels, metrics, n_resamples, seed, n_fits=n_fits)
    n_tables = len(as_seeds(results[baseline]))
    rows = []
    for metric, name in itertools.product(metrics, methods):
        found, test = _difference(measured[name, metric], measured[baseline, metric], level), _BOOT
        if metric == "accuracy" and n_tables == 1:
            pair = (as_seeds(results[key])[0] for key in (name, baseline))
            p_value = mcnemar(*(correct_predictions(probs, labels) for probs in pair))
            found, test = found._replace(p_value=p_value), "McNemar"
        rows.append({"method": name, "metric": metric, **found._asdict(), "test": test})
    table = pd.DataFrame(rows).rename(columns={"mean": "difference"})
    table = table.assign(
        baseline=baseline, n_rows=len(labels), n_seeds=n_tables // n_fits, level=level
    )
    table = with_verdicts(table, family=["metric"])
    first = ["method", "baseline", "metric", "difference", "low", "high", "p_value", "p_holm"]
    return table[[*first, "verdict", "test", "n_rows", "n_seeds", "level"]]


def with_verdicts(table: pd.DataFrame, *, family: Sequence[str]) -> pd.DataFrame:
    """Return the table with ``p_holm`` and ``verdict``, corrected over each family of rows.

    Args:
        table: Columns ``metric``, ``difference``, ``p_value`` and ``level``.
        family: Columns that name a family; Holm corrects over all of its rows.
    """
    table = table.assign(p_holm=np.nan)
    for _, p_values in table.groupby(list(family), dropna=False)["p_value"]:
        table.loc[p_values.index, "p_holm"] = holm(p_values.to_numpy())
    return table.assign(verdict=[_verdict(row) for row in table.to_dict("records")])


def verdict_sentence(row: Mapping | pd.Series) -> str:
    """Return one row of ``compare_methods`` in words."""
    names, metric = (row["method"], row["baseline"]), METRIC_NAMES[row["metric"]]
    n_rows, n_seeds = f"{row['n_rows']:,}".replace(",", " "), row["n_seeds"]
    size = f"{n_rows} rows, {n_seeds} seed{'s' if n_seeds > 1 else ''}"
    if row["verdict"] == "undefined":
        return f"{names[0]} and {names[1]} cannot be compared in {metric}: not finite ({size})."
    p_holm = "p < 0.001" if row["p_holm"] < 0.001 else f"p = {row['p_holm']:.3f}"
    evidence = (
        f"{row['difference']:+.4f}, {100 * row['level']:g} % interval {row['low']:+.4f} to "
        f"{row['high']:+.4f}, Holm-corrected {p_holm}, {size}"
    )
    if row["verdict"] in ("better", "worse"):
        return f"{names[0]} is {row['verdict']} than {names[1]} in {metric} ({evidence})."
    return f"{names[0]} and {names[1]}: {row['verdict']} in {metric} ({evidence})."


def _verdict(row: Mapping) -> str:
    if not np.isfinite(row["p_holm"]):
        return "undefined"
    if row["p_holm"] > 1 - row["level"] or abs(row["difference"]) < ROUNDING:
        return "no difference at this size"
    gained = (row["difference"] > 0) == (row["metric"] in HIGHER_IS_BETTER)
    return "better" if gained else "worse"


def _difference(
    values_a: Float[np.ndarray, "R_plus_1"], values_b: Float[np.ndarray, "R_plus_1"], level: float
) -> Difference:
    """Turn observed values (first entries) and resampled ones (the others) into an interval."""
    check_range("level", level, low=0.0, high=1.0, low_open=True, high_open=True)
    with np.errstate(invalid="ignore"):  # two infinite NLLs
        gaps = values_a - values_b
    observed = float(gaps[0])
    if not np.isfinite(gaps).all():
        return Difference(observed, float("nan"), float("nan"), float("nan"))
    pivot = 2 * observed - gaps[1:]
    low, high = np.quantile(pivot, [(1 - level) / 2, (1 + level) / 2])
    tail = min((pivot <= 0).sum(), (pivot >= 0).sum())
    p_value = min(1.0, 2 * (tail + 1) / (len(pivot) + 1))
    # Rounding goes the same way in every resample, so its p-value would be the smallest there is.
    p_value = 1.0 if abs(observed) < ROUNDING else float(p_value)
    return Difference(observed, float(low), float(high), p_value)
