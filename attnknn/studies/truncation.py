"""Truncation: what is lost when a softmax over the whole memory is cut to its k largest weights.

Let p be the softmax over all N rows and q its k largest entries, renormalised. The mass that is
thrown away, m = 1 - (p of the k largest), decides everything:

- over rows, total variation(p, q) = m exactly (half of the L1 distance);
- over classes, total variation of the two votes <= m, because rows of one class may make up for
  each other.

How fast m falls with k depends on the weights alone: like 1/k where p falls like 1/rank^2, faster
where p falls faster, and not at all where p is flat.

Axes: B queries, N memory rows, C classes, T temperatures, K numbers of kept rows.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from attnknn.checks import check_count, check_range
from attnknn.memory import MemoryBank

QUERY_BLOCK = 64  # queries a block: bounds the (block, N) weights in double precision
FIT_FROM, FIT_SHARE = (
    3,
    0.1,
)  # rates are fitted from this k to this share of N: at N nothing is lost
SMALLEST_MASS = 1e-12  # below it a mass is rounding, and has no rate
CLAIMED_EXPONENT, EXPONENT_TOLERANCE = 1.0, 0.05  # "O(1/k)"; 1/(k + 1/2) fits as k^-0.98
N_RESAMPLES = 500


@dataclass(frozen=True)
class Truncation:
    """Errors of the truncated softmax of every query.

    Attributes:
        temperatures: Of the softmax of similarity / temperature.
        ks: Rows that are kept.
        n_rows: Memory rows N.
        mass: Discarded mass m.
        row_error: Total variation between full and truncated softmax over rows.
        vote_error: Total variation between full and truncated vote over classes.
    """

    temperatures: tuple[float, ...]
    ks: tuple[int, ...]
    n_rows: int
    mass: Float[np.ndarray, "T K B"]
    row_error: Float[np.ndarray, "T K B"]
    vote_error: Float[np.ndarray, "T K B"]


def truncation(
    bank: MemoryBank,
    queries: Float[np.ndarray, "B D"],
    *,
    temperatures: Sequence[float],
    ks: Sequence[int],
    progress: bool = True,
) -> Truncation:
    """Return the truncation errors of softmax attention over a memory.

    Args:
        bank: The memory.
        queries: Unit-length queries.
        temperatures: Temperatures of the softmax over cosine similarities.
        ks: Rows to keep; those beyond N - 1 are left out.
        progress: Show a progress bar.
    """
    temperatures = tuple(check_range("temperature", t, low=0, low_open=True) for t in temperatures)
    ks = tuple(sorted({check_count("k", k) for k in ks if k < len(bank)}))
    if not ks or not temperatures:
        raise ValueError(f"ks and temperatures must not be empty, got {ks=} and {temperatures=}")
    blocks = []
    starts = range(0, len(queries), QUERY_BLOCK)
    for start in tqdm(starts, desc="truncation", disable=not progress, leave=False):
        block = torch.from_numpy(queries[start : start + QUERY_BLOCK])
        scores, order = (block @ bank.rows.T).sort(dim=1, descending=True)  # (B, N)
        labels = bank.labels[order]
        each = [
            truncation_errors((scores.double() / t).softmax(dim=1), labels, ks, bank.n_classes)
            for t in temperatures
        ]
        blocks.append(torch.stack(each))  # (T, 3, K, B)
    mass, row_error, vote_error = torch.cat(blocks, dim=-1).numpy().swapaxes(0, 1)
    return Truncation(temperatures, ks, len(bank), mass, row_error, vote_error)


def truncation_errors(
    weights: Float[Tensor, "B N"], labels: Int[Tensor, "B N"], ks: Sequence[int], n_classes: int
) -> Float[Tensor, "3 K B"]:
    """Return discarded mass, row error and vote error of each k.

    Args:
        weights: Softmax weights, largest first; rows sum to 1.
        labels: Labels of the rows in the same order.
        ks: Kept rows, rising, each below N.
        n_classes: Number of classes.
    """
    cuts = [0, *ks, weights.shape[1]]
    empty = weights.new_zeros(len(weights), n_classes)
    # One pass: votes of the rows between two cuts, then sums from the far end. Small weights are
    # added to small ones, so that a mass of 1e-9 is not lost beside the large ones.
    between = torch.stack(
        [
            empty.scatter_add(1, labels[:, low:high], weights[:, low:high])
            for low, high in itertools.pairwise(cuts)
        ]
    )  # (K + 1, B, C)
    beyond = between.flip(0).cumsum(0).flip(0)[1:]  # (K, B, C): votes of the discarded rows
    mass = beyond.sum(dim=2)  # (K, B)
    within = between.cumsum(0)[:-1]  # (K, B, C): votes of the kept rows
    kept = within.sum(dim=2)  # 1 - mass, but exact where it is small
    whole = between.sum(dim=0)
    vote_error = (within / kept[..., None] - whole).abs().sum(dim=2) / 2
    # Measured, not taken from the identity in the head of this file.
    row_error = torch.stack(
        [
            ((weights[:, :k] / left[:, None] - weights[:, :k]).abs().sum(dim=1) + lost) / 2
            for k, left, lost in zip(ks, kept, mass, strict=True)
        ]
    )
    return torch.stack([mass, row_error, vote_error])


def power_exponent(
    ks: Sequence[int] | np.ndarray, errors: Float[np.ndarray, "*S K"]
) -> Float[np.ndarray, "*S"]:
    """Return a of the least-squares fit error = c / k^a: 1 for O(1/k), 0 for no fall at all."""
    x = np.log(np.asarray(ks, dtype=np.float64))
    x = x - x.mean()
    return np.asarray(-(np.log(errors) @ x) / (x @ x))


def shape_of_fall(ks: Float[np.ndarray, " K"], errors: Float[np.ndarray, " K"]) -> str:
    """Say whether errors hardly fall ("flat"), or lie closer to a "power" or an "exponential"."""
    if errors[-1] > errors[0] / 2:
        return "flat"
    log_errors = np.log(errors)
    against_power = np.corrcoef(np.log(ks), log_errors)[0, 1] ** 2
    against_exponential = np.corrcoef(ks, log_errors)[0, 1] ** 2
    return "exponential" if against_exponential > against_power else "power"


def fitted_rate(
    ks: Sequence[int], mass: Float[np.ndarray, "K B"], n_rows: int, *, seed: int = 0
) -> dict[str, float | str]:
    """Return how the mean discarded mass falls with k, with an interval over queries.

    Args:
        ks: Kept rows.
        mass: Discarded mass of each k and query.
        n_rows: Memory rows; only k from 3 to a tenth of them are fitted.
        seed: Of the resampled queries.

    Returns:
        ``exponent`` with ``low`` and ``high`` (95 %, resampled queries), ``form`` (see
        ``shape_of_fall``) and ``against_claim``.
    """
    means, kept = mass.mean(axis=1), np.asarray(ks)
    used = (kept >= FIT_FROM) & (kept <= FIT_SHARE * n_rows) & (means > SMALLEST_MASS)
    if used.sum() < 3:  # too few rows, or nothing left to discard
        nothing = {name: float("nan") for name in ("exponent", "low", "high")}
        return nothing | {"form": "undefined", "against_claim": "undefined"}
    ks, mass = np.asarray(ks, dtype=np.float64)[used], mass[used]
    n_queries = mass.shape[1]
    rng = np.random.default_rng(seed)
    shares = rng.multinomial(n_queries, np.full(n_queries, 1 / n_queries), N_RESAMPLES) / n_queries
    drawn = np.maximum(shares @ mass.T, SMALLEST_MASS)  # (R, K)
    low, high = np.quantile(power_exponent(ks, drawn), [0.025, 0.975])
    return {
        "exponent": float(power_exponent(ks, means[used])),
        "low": float(low),
        "high": float(high),
        "form": shape_of_fall(ks, means[used]),
        "against_claim": against_claim(float(low), float(high)),
    }


def against_claim(low: float, high: float) -> str:
    """Say how the interval of a fitted exponent stands to the claimed one."""
    if high < CLAIMED_EXPONENT - EXPONENT_TOLERANCE:
        return "slower than 1/k"
    if low < CLAIMED_EXPONENT - EXPONENT_TOLERANCE:
        return "not decided"
    return "faster than 1/k" if low > CLAIMED_EXPONENT + EXPONENT_TOLERANCE else "as 1/k"


def synthetic_masses(n_rows: int, ks: Sequence[int]) -> dict[str, Float[np.ndarray, "K 1"]]:
    """Return the discarded mass of three weightings that can be worked out on paper."""
    ranks = np.arange(1, n_rows + 1, dtype=np.float64)
    logits = {
        "weights 1/rank²": -2 * np.log(ranks),
        "weights exp(-rank/10)": -ranks / 10,
        "equal weights": np.zeros(n_rows),
    }
    masses = {}
    for name, scores in logits.items():
        weights = np.exp(scores - scores.max())
        tails = weights[::-1].cumsum()[::-1]  # from the small end, as above
        masses[name] = (tails[list(ks)] / tails[0])[:, None]
    return masses


def synthetic_table(n_rows: int, ks: Sequence[int]) -> pd.DataFrame:
    """Return the discarded mass of the made-up weightings, one row per weighting and k."""
    return pd.DataFrame(
        [
            {"weights": name, "k": k, "discarded mass": float(mass)}
            for name, masses in synthetic_masses(n_rows, ks).items()
            for k, mass in zip(ks, masses[:, 0], strict=True)
        ]
    )


def rate_table(result: Truncation, *, seed: int = 0) -> pd.DataFrame:
    """Return one fitted rate per temperature, then one per synthetic weighting."""
    real = {f"τ = {t:g}": mass for t, mass in zip(result.temperatures, result.mass, strict=True)}
    made = synthetic_masses(result.n_rows, result.ks)
    return pd.DataFrame(
        [
            {"weights": name, "synthetic": name in made}
            | fitted_rate(result.ks, mass, result.n_rows, seed=seed)
            for name, mass in (real | made).items()
        ]
    )


def mass_table(result: Truncation) -> pd.DataFrame:
    """Return the mean errors of each temperature and k, and the share of the bound that is used."""
    rows = []
    for place, temperature in enumerate(result.temperatures):
        for each, k in enumerate(result.ks):
            mass, vote = result.mass[place, each], result.vote_error[place, each]
            rows.append(
                {
                    "temperature": temperature,
                    "k": k,
                    "discarded mass": float(mass.mean()),
                    "row error": float(result.row_error[place, each].mean()),
                    "vote error": float(vote.mean()),
                    "largest vote error / mass": float((vote / np.maximum(mass, 1e-300)).max()),
                }
            )
    return pd.DataFrame(rows)
