"""Lazy Gumbel sampling: draw from a softmax over N rows while looking at few of them.

The row with the largest score + Gumbel noise is a draw from the softmax of the scores. The k
largest scores get their noise as usual. Any other row has a score below the k-th, so it can only
win with noise above the threshold b = (best of the k so far) - (k-th score). How many of the
N - k others get such noise is binomial; only these are looked at, with noise drawn above b.
(Mussmann, Levy and Ermon 2017; used for attention in arXiv:2411.04013.)

With r = sum over the k largest of exp(score - k-th score) >= k, the mean number of extra rows is
(N - k) / (1 + r) <= (N - k) / (k + 1), about N / k: exactly that where the k scores are equal,
fewer where the softmax is sharp.

Axes: N memory rows, K largest scores, S samples.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy import stats
from scipy.special import softmax
from tqdm import tqdm

from attnknn.checks import check_count
from attnknn.core.bank import MemoryBank
from attnknn.evaluate.compare import holm

EXPECTED_IN_BIN = 10.0  # draws that a bin of the chi-square test should get
MISMATCH_LEVEL = 0.01  # Holm-corrected p-value below which samples do not follow the softmax
N_EXACT_DRAWS = 400  # exact samples that show how far off chance alone takes a sample


class LazySamples(NamedTuple):
    """Draws from a softmax, and what they cost.

    Attributes:
        places: Row of each draw; the k largest scores are rows 0 to k - 1.
        extra: Rows beyond the k largest that were looked at for each draw.
    """

    places: Int[np.ndarray, " S"]
    extra: Int[np.ndarray, " S"]


def lazy_gumbel(
    top_scores: Float[np.ndarray, " K"],
    tail_scores: Callable[[Int[np.ndarray, " M"]], Float[np.ndarray, " M"]],
    n_tail: int,
    *,
    n_samples: int,
    rng: np.random.Generator,
) -> LazySamples:
    """Return exact draws from the softmax over all rows.

    Args:
        top_scores: The k largest scores.
        tail_scores: Returns the scores of some of the other rows, numbered 0 to n_tail - 1; it is
            only asked for rows that can win. None may exceed the smallest of ``top_scores``.
        n_tail: How many other rows there are.
        n_samples: Draws.
        rng: Source of all noise.
    """
    k = check_count("top_scores", len(top_scores))
    check_count("n_tail", n_tail, low=0)
    noisy = top_scores + rng.gumbel(size=(check_count("n_samples", n_samples), k))  # (S, K)
    places, best = noisy.argmax(axis=1), noisy.max(axis=1)
    threshold = best - top_scores.min()  # (S,)
    # P(Gumbel > b) = 1 - exp(-exp(-b)), in a form that is exact for large b.
    chance = -np.expm1(-np.exp(-threshold))
    extra = rng.binomial(n_tail, chance)
    for sample in np.flatnonzero(extra):
        rows = rng.choice(n_tail, size=extra[sample], replace=False, shuffle=False)
        noise = gumbel_above(chance[sample], rng.random(len(rows)))
        raised = tail_scores(rows) + noise
        if raised.max() > best[sample]:
            places[sample] = k + rows[raised.argmax()]
    return LazySamples(places, extra)


def gumbel_above(chance: float, uniform: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    """Return Gumbel noise above the threshold that it exceeds with probability ``chance``."""
    # Inverse of the distribution function, written in the upper tail: 1 - u would lose all digits.
    upper = chance * (1 - uniform)  # in (0, chance]
    return -np.log(-np.log1p(-upper))


def expected_extra(top_scores: Float[np.ndarray, " K"], n_tail: int) -> tuple[float, float]:
    """Return mean and standard deviation of the number of extra rows of one draw.

    The chance of a row is 1 - exp(-x) with x exponential of rate r, so its first two moments are
    1 / (1 + r) and 2 / ((1 + r)(2 + r)); the count is binomial given that chance.
    """
    r = float(np.exp(top_scores - top_scores.min()).sum())
    mean, square = 1 / (1 + r), 2 / ((1 + r) * (2 + r))
    variance = n_tail * (mean - square) + n_tail**2 * (square - mean**2)
    return n_tail * mean, float(np.sqrt(variance))


def extra_bound(k: int, n_tail: int) -> float:
    """Return the most that the mean number of extra rows can be, (N - k) / (k + 1)."""
    return n_tail / (k + 1)


def equal_bins(probs: Float[np.ndarray, " N"], n_samples: int) -> Int[np.ndarray, " N"]:
    """Return a bin for each row, likeliest rows first, that expects ten or more draws.

    Args:
        probs: Probabilities, largest first.
        n_samples: Draws that will be counted.
    """
    ends = probs.cumsum()
    needed, starts, start = EXPECTED_IN_BIN / n_samples, [0], 0
    while True:
        done = ends[start - 1] if start else 0.0
        start = int(np.searchsorted(ends, done + needed)) + 1
        # What is left for the next bin must be enough for a bin of its own.
        if start >= len(probs) or ends[-1] - ends[start - 1] < needed:
            break
        starts.append(start)
    bins = np.zeros(len(probs), dtype=np.int64)
    bins[starts[1:]] = 1
    return bins.cumsum()


class Fit(NamedTuple):
    """How well draws follow a softmax.

    Attributes:
        p_value: Chi-square test over bins.
        distance: Total variation between drawn and exact bin shares.
        by_chance: What an exact sampler of the same size stays below in 95 % of cases.
    """

    p_value: float
    distance: float
    by_chance: float


def goodness_of_fit(
    places: Int[np.ndarray, " S"], probs: Float[np.ndarray, " N"], rng: np.random.Generator
) -> Fit:
    """Return how well draws follow ``probs`` (largest first)."""
    bins = equal_bins(probs, len(places))
    expected = np.bincount(bins, weights=probs)
    expected /= expected.sum()
    counts = np.bincount(bins[places], minlength=len(expected))
    exact = rng.multinomial(len(places), expected, size=N_EXACT_DRAWS)
    distances = np.abs(exact / len(places) - expected).sum(axis=1) / 2
    p_value = 1.0
    if len(expected) > 1:
        p_value = float(stats.chisquare(counts, expected * len(places)).pvalue)
    distance = float(np.abs(counts / len(places) - expected).sum() / 2)
    return Fit(p_value, distance, float(np.quantile(distances, 0.95)))


def gumbel_study(
    bank: MemoryBank,
    queries: Float[np.ndarray, "B D"],
    *,
    temperatures: Sequence[float],
    ks: Sequence[int],
    n_samples: int = 4000,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Return fit and cost of lazy Gumbel sampling for each query, temperature and k.

    Returns:
        One row each: ``query``, ``temperature``, ``k``, ``n_rows``, ``n_samples``; the mean of
        ``extra`` rows with its ``expected`` value, standard ``error`` and ``bound``; ``p_value``,
        ``distance`` and ``by_chance`` of the fit; and ``discarded``, the distance at which
        sampling from the k largest alone would stay.
    """
    rng, rows = np.random.default_rng(seed), []
    scores = (torch.from_numpy(queries) @ bank.rows.T).double().sort(dim=1, descending=True).values
    ks = sorted({check_count("k", k) for k in ks if k < len(bank)})
    cases = [(q, t, k) for q in range(len(queries)) for t in temperatures for k in ks]
    for query, temperature, k in tqdm(cases, desc="Gumbel", disable=not progress, leave=False):
        logits = scores[query].numpy() / temperature
        tail, probs = logits[k:], softmax(logits)
        drawn = lazy_gumbel(logits[:k], tail.__getitem__, len(tail), n_samples=n_samples, rng=rng)
        case = {"query": query, "temperature": temperature, "k": k, "n_rows": len(bank)}
        case["n_samples"] = n_samples
        expected, deviation = expected_extra(logits[:k], len(tail))
        cost = {
            "extra": float(drawn.extra.mean()),
            "expected": expected,
            "error": deviation / np.sqrt(n_samples),
            "bound": extra_bound(k, len(tail)),
        }
        fit = goodness_of_fit(drawn.places, probs, rng)._asdict()
        rows.append(case | cost | fit | {"discarded": float(probs[k:].sum())})
    return pd.DataFrame(rows)


def smallest_p(table: pd.DataFrame) -> float:
    """Return the smallest p-value of all tests, corrected for their number."""
    return float(np.nanmin(holm(table["p_value"].to_numpy())))
