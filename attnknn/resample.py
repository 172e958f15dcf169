"""Paired resampling: probabilities of several methods and seeds to resampled measures.

All methods and measures share the same draws of rows and seeds, so differences are paired.

Axes: N rows, C classes, S seeds, R resamples, V per-row values whose sums make up a measure.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from attnknn.checks import check_count, check_one_of
from attnknn.measure import bin_index, check_probs, per_sample

RESAMPLED_METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "nll", "brier", "ece", "cwce")
_N_BINS = 15
_CHUNK = 200  # resamples a matrix product: 16 MB of counts for 10 000 rows

# One (N, C) table, or one a seed.
SeedProbs = np.ndarray | Sequence[np.ndarray]


def as_seeds(probs: SeedProbs) -> list[np.ndarray]:
    """Return one (N, C) table a seed; a bare table is a single seed."""
    return [probs] if isinstance(probs, np.ndarray) and probs.ndim == 2 else list(probs)


def resample_metrics(
    results: Mapping[str, SeedProbs],
    labels: Int[np.ndarray, "N"],
    metrics: Sequence[str],
    n_resamples: int,
    seed: int,
    *,
    n_fits: int = 1,
) -> dict[tuple[str, str], Float[np.ndarray, "R_plus_1"]]:
    """Return, by (method, metric), the mean over seeds: as observed, then of every resample.

    A resample is a vector of row counts. Each measure is a function of sums over rows, so one
    matrix product serves many resamples of all methods.

    Args:
        results: Method name to probabilities, (N, C), or a list of them, one a seed.
        labels: The true classes of the rows, the same for all seeds.
        metrics: Out of ``RESAMPLED_METRICS``.
        n_resamples: Draws of seeds and rows, with replacement.
        seed: Seed of the draws.
        n_fits: Tables of each seed, one after another; a draw of the seed takes all of them.
    """
    check_count("n_resamples", n_resamples)
    seeds = {name: as_seeds(probs) for name, probs in results.items()}
    sizes = {name: len(probs) for name, probs in seeds.items()}
    if len(set(sizes.values())) > 1 or not min(sizes.values()):
        raise ValueError(f"results must hold the same seeds for every method, got {sizes}")
    n_tables = next(iter(sizes.values()))
    if n_tables % check_count("n_fits", n_fits):
        raise ValueError(f"n_fits must divide the {n_tables} tables of a method, got {n_fits=}")
    values = {
        (name, metric, position): _row_values(metric, check_probs(one, labels), labels)
        for metric in metrics
        for name, probs in seeds.items()
        for position, one in enumerate(probs)
    }
    stacked = np.hstack(list(values.values()))  # one (N, sum of V) table
    ends = np.cumsum([one.shape[1] for one in values.values()])
    chunks: dict[tuple[str, str], list[np.ndarray]] = {key[:2]: [] for key in values}
    for row_counts, seed_shares in _draws(len(labels), n_tables // n_fits, n_resamples, seed):
        shares = np.repeat(seed_shares, n_fits, axis=1) / n_fits
        with np.errstate(invalid="ignore"):  # an infinite NLL times a count of 0
            sums = np.split(row_counts @ stacked, ends[:-1], axis=1)
            for (name, metric), parts in chunks.items():
                own = (sums[place] for place, key in enumerate(values) if key[:2] == (name, metric))
                per_seed = np.stack([_from_sums(metric, one, len(labels)) for one in own], axis=1)
                parts.append((per_seed * shares).sum(axis=1))  # (R,)
    return {key: np.concatenate(parts) for key, parts in chunks.items()}


def _draws(
    n_rows: int, n_seeds: int, n_resamples: int, seed: int
) -> Iterator[tuple[Float[np.ndarray, "R N"], Float[np.ndarray, "R S"]]]:
    """Yield row counts and seed shares: the sample itself first, then chunks of resamples."""
    rng = np.random.default_rng(seed)
    yield np.ones((1, n_rows)), np.full((1, n_seeds), 1 / n_seeds)
    for start in range(0, n_resamples, _CHUNK):
        size = min(_CHUNK, n_resamples - start)
        picked = rng.integers(n_rows, size=(size, n_rows))
        counts = np.stack([np.bincount(row, minlength=n_rows) for row in picked])
        shares = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=size) / n_seeds
        yield counts.astype(np.float64), shares


def _row_values(
    metric: str, probs: Float[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]
) -> Float[np.ndarray, "N V"]:
    """Return per-row values whose sums over rows are enough to compute ``metric``."""
    check_one_of("metric", metric, RESAMPLED_METRICS)
    predicted, classes = probs.argmax(axis=1), np.arange(probs.shape[1])
    is_label, is_predicted = labels[:, None] == classes, predicted[:, None] == classes
    if metric == "balanced_accuracy":
        return np.hstack([is_label & is_predicted, is_label]).astype(np.float64)  # (N, 2C)
    if metric == "macro_f1":
        return np.hstack([is_label & is_predicted, 1.0 * is_label + is_predicted])  # (N, 2C)
    if metric in ("ece", "cwce"):
        top = metric == "ece"
        given = probs.max(axis=1, keepdims=True) if top else probs  # (N, 1) or (N, C)
        happened = (predicted == labels)[:, None] if top else labels[:, None] == classes
        in_bin = bin_index(given, _N_BINS)[..., None] == np.arange(_N_BINS)
        return ((given - happened)[..., None] * in_bin).reshape(len(probs), -1)
    column = "correct" if metric == "accuracy" else metric
    return per_sample(probs, labels)[[column]].to_numpy()


def _from_sums(metric: str, sums: Float[np.ndarray, "R V"], n_rows: int) -> Float[np.ndarray, "R"]:
    """Return ``metric`` from the sums of ``_row_values`` over a resample."""
    if metric in ("balanced_accuracy", "macro_f1"):
        hits, sizes = np.split(sums, 2, axis=1)  # (R, C) each
        shares = hits / np.where(sizes > 0, sizes, np.nan)
        return np.nanmean(shares, axis=1) * (2 if metric == "macro_f1" else 1)
    if metric in ("ece", "cwce"):
        return np.abs(sums).sum(axis=1) / n_rows / (sums.shape[1] // _N_BINS)
    return sums[:, 0] / n_rows
