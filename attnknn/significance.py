"""Significance: paired outcomes to a p-value, and p-values corrected for looking at many.

Axes: N rows, M tests.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

# Above this number of discordant rows chi-squared is as good as the exact test.
EXACT_MCNEMAR_LIMIT = 100


def mcnemar(correct_a: Bool[np.ndarray, "N"], correct_b: Bool[np.ndarray, "N"]) -> float:
    """Return the two-sided p-value that two classifiers of the same rows are equally accurate.

    Only rows that exactly one of them gets right matter. Up to 100 of those the test is exact
    (binomial); above, chi-squared with continuity correction.
    """
    if correct_a.shape != correct_b.shape:
        raise ValueError(
            f"correct_a must match correct_b, got {correct_a.shape=} and {correct_b.shape=}"
        )
    only_a, only_b = int((correct_a & ~correct_b).sum()), int((~correct_a & correct_b).sum())
    discordant = only_a + only_b
    if discordant == 0:
        return 1.0
    if discordant <= EXACT_MCNEMAR_LIMIT:
        return float(stats.binomtest(only_a, discordant).pvalue)
    statistic = max(abs(only_a - only_b) - 1, 0) ** 2 / discordant
    return float(stats.chi2.sf(statistic, df=1))


def holm(p_values: Sequence[float] | np.ndarray) -> Float[np.ndarray, "M"]:
    """Return p-values corrected for looking at all of them (Holm's step-down).

    NaN (no test was possible) stays NaN and does not count.
    """
    p_values = np.asarray(p_values, dtype=np.float64)
    if ((p_values < 0) | (p_values > 1)).any():
        raise ValueError(f"p_values must lie in [0, 1], got p_values={p_values.tolist()}")
    order = np.argsort(p_values, kind="stable")  # NaN last
    order = order[: np.count_nonzero(~np.isnan(p_values))]
    stepped = p_values[order] * np.arange(len(order), 0, -1)
    corrected = np.full(p_values.shape, np.nan)
    corrected[order] = np.maximum.accumulate(stepped).clip(max=1)
    return corrected
