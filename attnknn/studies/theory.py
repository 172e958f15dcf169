"""Theory: what can be checked of it, on a run's own embeddings.

Axes: B queries, K neighbours, D embedding width, H heads.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from attnknn.checks import check_count, check_range
from attnknn.config import AttentionConfig
from attnknn.core.attention import QueryKey, Similarity, attention_entropy
from attnknn.core.bank import MemoryBank
from attnknn.core.exact import cosines_of_ids
from attnknn.core.index import build_index
from attnknn.core.vote import Distance, Method, Uniform, predict
from attnknn.embed.run import PARTS, TrainedRun
from attnknn.evaluate.compare import compare_methods
from attnknn.evaluate.measure import HIGHER_IS_BETTER, accuracy, negative_log_likelihood
from attnknn.evaluate.tune import DISTANCE_TEMPERATURES, fit_method
from attnknn.studies.bayes import raw_brackets, run_brackets
from attnknn.studies.common import attention_at, search_run
from attnknn.studies.gumbel import gumbel_study

# ---- Truncation: what is lost when a softmax over the whole memory is cut to its k largest
# weights.
#
# Let p be the softmax over all N rows and q its k largest entries, renormalised. The mass that is
# thrown away, m = 1 - (p of the k largest), decides everything:
#
# - over rows, total variation(p, q) = m exactly (half of the L1 distance);
# - over classes, total variation of the two votes <= m, because rows of one class may make up for
#   each other.
#
# How fast m falls with k depends on the weights alone: like 1/k where p falls like 1/rank^2, faster
# where p falls faster, and not at all where p is flat.
#
# Axes: B queries, N memory rows, C classes, T temperatures, K numbers of kept rows.

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


# ---- k against the square root of n: does the rule of thumb find a good number of neighbours?
#
# The memory is thinned to several sizes. At each size held-out queries choose k for the plain vote,
# and test queries tell what the choice, and k = √n, are worth.
#
# Axes: B queries, C classes.

CRITERIA = {"nll": negative_log_likelihood, "accuracy": accuracy}
ROOT, CHOSEN = "k = √n", "k chosen on held-out queries"
K_REACH = 4.0  # the search goes to this many times √n at first,
K_REACH_MOST = 32.0  # and to this many where the best k is the largest tried
K_STEP = math.sqrt(2)


@dataclass(frozen=True)
class RootN:
    """The plain vote at every memory size and k.

    Attributes:
        table: One row per seed, memory share, n, queries ("held-out", "test"), k and measure.
        choice: One row per seed, memory share and criterion: √n, the chosen k, the largest tried
            and whether these two are the same (``capped``): the best k is then at least that.
        comparison: k = √n minus the chosen k on test queries, per memory share and criterion.
    """

    table: pd.DataFrame
    choice: pd.DataFrame
    comparison: pd.DataFrame


def k_grid(n_rows: int, reach: float = K_REACH) -> list[int]:
    """Return the k that are tried in a memory of n rows: 1 to ``reach`` √n, and √n itself."""
    largest = min(n_rows, reach * math.sqrt(n_rows))
    steps = int(math.log(max(largest, 1), K_STEP)) + 1
    ends = {root_of(n_rows)} | ({n_rows} if largest == n_rows else set())
    return sorted({round(K_STEP**step) for step in range(steps)} | ends)


def root_of(n_rows: int) -> int:
    """Return √n as a number of neighbours."""
    return max(1, round(math.sqrt(check_count("n_rows", n_rows))))


def root_n_study(
    runs: Sequence[TrainedRun],
    *,
    shares: Sequence[float] = (0.05, 0.1, 0.25, 0.5, 1.0),
    n_queries: int = 2000,
    progress: bool = True,
) -> RootN:
    """Return the plain vote over thinned memories.

    Args:
        runs: One trained run a seed.
        shares: Shares of the memory rows that are kept, drawn at random.
        n_queries: The most held-out and test queries that are used, each.
        progress: Show a progress bar.
    """
    rows, choices, comparisons = [], [], []
    for share in tqdm(shares, desc="memory sizes", disable=not progress, leave=False):
        probs: dict[str, dict[str, list]] = {criterion: {} for criterion in CRITERIA}
        for run in runs:
            bank = thinned_bank(run, check_range("share", share, low=0, high=1, low_open=True))
            named = {"seed": run.config.seed, "share": share, "n": len(bank)}
            labels = run.labels("val")[some_rows(len(run.labels("val")), n_queries)]
            held_out = deep_votes(
                partial(votes_by_k, run, bank, "val", n_queries), labels, len(bank)
            )
            test = votes_by_k(run, bank, "test", n_queries, list(held_out))
            rows += _measured(held_out, run, "val", n_queries, named | {"queries": "held-out"})
            rows += _measured(test, run, "test", n_queries, named | {"queries": "test"})
            for criterion in CRITERIA:
                k, root = choose_k(held_out, labels, criterion), root_of(len(bank))
                found = {"root": root, "chosen": k, "largest": max(held_out)}
                capped = k == max(held_out) < len(bank)
                choices.append(named | {"criterion": criterion, **found, "capped": capped})
                for name, each in ((CHOSEN, k), (ROOT, root)):
                    probs[criterion].setdefault(name, []).append(test[each])
        labels = runs[0].labels("test")
        labels = labels[some_rows(len(labels), n_queries)]
        for criterion, pair in probs.items():
            # Each size is one more look: the level is shared among them (Bonferroni).
            level = 1 - 0.05 / len(shares)
            table = compare_methods(pair, labels, CHOSEN, metrics=(criterion,), level=level)
            comparisons.append(table.assign(share=share, n=len(bank)))
    table, choice = pd.DataFrame(rows), pd.DataFrame(choices)
    return RootN(table, choice, pd.concat(comparisons, ignore_index=True))


def thinned_bank(run: TrainedRun, share: float) -> MemoryBank:
    """Return an exact memory of a share of a run's training rows, two rows or more."""
    rows, labels = run.rows("train"), run.labels("train")
    keep = some_rows(len(rows), max(2, round(share * len(rows))), seed=run.config.seed)
    return MemoryBank(rows[keep], labels[keep], n_classes=len(run.class_names), index="flat_ip")


def some_rows(n_rows: int, n_wanted: int, *, seed: int = 0) -> Int[np.ndarray, " M"]:
    """Return up to ``n_wanted`` row numbers, drawn without replacement, in rising order."""
    if n_wanted >= n_rows:
        return np.arange(n_rows)
    return np.sort(np.random.default_rng(seed).choice(n_rows, n_wanted, replace=False))


def deep_votes(
    votes: Callable[[list[int]], dict[int, Float[np.ndarray, "B C"]]],
    labels: Int[np.ndarray, " B"],
    n_rows: int,
) -> dict[int, Float[np.ndarray, "B C"]]:
    """Return votes at every k, searched deeper until the best k is not the largest.

    Args:
        votes: Returns the probabilities at every k asked for.
        labels: The true classes of the queries.
        n_rows: Rows of the memory.
    """
    reach = K_REACH
    while True:
        probs = votes(k_grid(n_rows, reach))
        best = [choose_k(probs, labels, criterion) for criterion in CRITERIA]
        if max(best) < max(probs) or reach >= K_REACH_MOST or max(probs) == n_rows:
            return probs
        reach *= 2


def votes_by_k(
    run: TrainedRun, bank: MemoryBank, part: str, n_queries: int, ks: Sequence[int]
) -> dict[int, Float[np.ndarray, "B C"]]:
    """Return the plain vote's probabilities at every k, from one search."""
    rows = run.rows(part)
    found = bank.search(rows[some_rows(len(rows), n_queries)], max(ks))
    return {k: predict(Uniform(k), found) for k in ks}


def choose_k(
    probs: dict[int, Float[np.ndarray, "B C"]], labels: Int[np.ndarray, " B"], criterion: str
) -> int:
    """Return the k that is best by ``criterion``; the smallest of equals."""
    values = {k: CRITERIA[criterion](each, labels) for k, each in probs.items()}
    pick = max if criterion in HIGHER_IS_BETTER else min
    return pick(values, key=values.get)


def chosen_exponent(choice: pd.DataFrame, criterion: str) -> float:
    """Return a of the fit chosen k = c · n^a; the rule of thumb says 0.5.

    NaN for one size, and where a chosen k is the largest tried: a fit would show how the grid
    grows, not how the best k does.
    """
    mine = choice[choice["criterion"] == criterion]
    if mine["n"].nunique() < 2 or mine["capped"].any():
        return float("nan")
    return -float(power_exponent(mine["n"].to_numpy(), mine["chosen"].to_numpy(dtype=np.float64)))


def error_exponent(table: pd.DataFrame) -> float:
    """Return a of the fit error = c / k^a of the test error over the largest memory."""
    mine = table[(table["queries"] == "test") & (table["metric"] == "accuracy")]
    mine = mine[mine["share"] == mine["share"].max()]
    # Not as deep as a search for the best k may have gone: nobody claims that error falls there.
    mine = mine[mine["k"] <= K_REACH * np.sqrt(mine["n"])]
    errors = 1 - mine.groupby("k")["value"].mean()
    errors = errors[errors > 0]
    if len(errors) < 3:
        return float("nan")
    return float(power_exponent(errors.index.to_numpy(), errors.to_numpy()))


def _measured(
    probs: dict[int, Float[np.ndarray, "B C"]],
    run: TrainedRun,
    part: str,
    n_queries: int,
    named: dict[str, object],
) -> list[dict[str, object]]:
    labels = run.labels(part)
    labels = labels[some_rows(len(labels), n_queries)]
    return [
        named | {"k": k, "metric": metric, "value": measure(each, labels)}
        for k, each in probs.items()
        for metric, measure in CRITERIA.items()
    ]


INDEX_QUERIES, GUMBEL_QUERIES, HEAD_QUERIES = 2000, 2, 128
GUMBEL_ROOTS = (0.25, 1.0, 4.0)  # k of the sampler, in units of √n


@dataclass(frozen=True)
class Theory:
    """All that was measured, one table a question; every table has a column ``seed``.

    Attributes:
        norms: Lengths of the embeddings, per split.
        indexes: Neighbours by inner product against neighbours by L2.
        truncations: Truncation errors, one a seed.
        masses: Their means per temperature and k.
        rates: How fast they fall with k, per temperature and for made-up weights.
        gumbel: Fit and cost of lazy Gumbel sampling.
        root_n: The plain vote over memories of several sizes.
        brackets: The 1-NN error's bracket of the Bayes error.
        heads: Learned temperatures.
        entropies: One row per seed, method and test query: entropy of its weights.
        errors: Test error of the attention and the tuned distance vote.
    """

    norms: pd.DataFrame
    indexes: pd.DataFrame
    truncations: list[Truncation]
    masses: pd.DataFrame
    rates: pd.DataFrame
    gumbel: pd.DataFrame
    root_n: RootN
    brackets: pd.DataFrame
    heads: pd.DataFrame
    entropies: pd.DataFrame
    errors: pd.DataFrame


def theory(
    runs: Sequence[TrainedRun],
    *,
    temperatures: Sequence[float] = (1.0, 0.2, 0.1, 0.05, 0.02),
    truncation_ks: Sequence[int] = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000),
    truncation_queries: int = 500,
    memory_shares: Sequence[float] = (0.05, 0.1, 0.25, 0.5, 1.0),
    root_queries: int = 2000,
    gumbel_samples: int = 4000,
    bracket_datasets: Sequence[str] = (),
    k_eval: int = 50,
    progress: bool = True,
) -> Theory:
    """Return every check on the seeds of a run.

    Args:
        runs: One trained run a seed.
        temperatures: Of softmax(similarity / temperature) over the whole memory.
        truncation_ks: Rows that a truncated softmax keeps.
        truncation_queries: Test queries for the truncation errors.
        memory_shares: Shares of the memory over which k = √n is tried.
        root_queries: Held-out and test queries for that.
        gumbel_samples: Draws of each lazy Gumbel test.
        bracket_datasets: Further data sets whose Bayes error is bracketed, untrained.
        k_eval: Neighbours the attention weighs.
        progress: Show progress bars.
    """
    found: dict[str, list] = {name: [] for name in ("truncations", *_BY_SEED)}
    for run in runs:
        queries = run.rows("test")
        few = queries[some_rows(len(queries), truncation_queries)]
        cut = truncation(
            run.bank, few, temperatures=temperatures, ks=truncation_ks, progress=progress
        )
        found["truncations"].append(cut)
        entropies, errors = weight_entropies(run, k_eval)
        tables = {
            "norms": norm_table(run),
            "indexes": index_table(run, k_eval),
            "masses": mass_table(cut),
            "rates": rate_table(cut),
            "gumbel": gumbel_study(
                run.bank,
                few[:GUMBEL_QUERIES],
                temperatures=sorted({*temperatures[:: max(1, len(temperatures) // 2)]}),
                ks=[max(1, round(root * root_of(len(run.bank)))) for root in GUMBEL_ROOTS],
                n_samples=gumbel_samples,
                progress=progress,
            ),
            "brackets": run_brackets(run),
            "heads": learned_temperatures(run, k_eval),
            "entropies": entropies,
            "errors": errors,
        }
        for name, table in tables.items():
            found[name].append(table.assign(seed=run.config.seed))
    found["brackets"].append(raw_brackets(bracket_datasets))
    rooted = root_n_study(runs, shares=memory_shares, n_queries=root_queries, progress=progress)
    joined = {name: pd.concat(found[name], ignore_index=True) for name in _BY_SEED}
    return Theory(truncations=found["truncations"], root_n=rooted, **joined)


_BY_SEED = (
    "norms indexes masses rates gumbel brackets heads entropies errors"  # tables made seed by seed
).split()


def norm_table(run: TrainedRun) -> pd.DataFrame:
    """Return the mean length of each split's embeddings, and the largest deviation from 1."""
    rows = []
    for part in PARTS:
        lengths = np.linalg.norm(run.rows(part).astype(np.float64), axis=1)
        deviation = float(np.abs(lengths - 1).max())
        rows.append({"rows": part, "n": len(lengths), "mean": float(lengths.mean())})
        rows[-1]["largest deviation"] = deviation
    return pd.DataFrame(rows)


def index_table(run: TrainedRun, k: int) -> pd.DataFrame:
    """Return how far neighbours by inner product and by L2 distance agree on test queries.

    ``same sets`` is the share of queries with the same k rows. Where sets differ, rows are equally
    near up to rounding; ``largest cosine gap`` is the largest difference between the two lists
    of similarities, each computed anew in double precision.
    """
    queries = run.rows("test")[some_rows(len(run.rows("test")), INDEX_QUERIES)]
    rows, k = run.rows("train"), min(k, len(run.bank))
    ids, cosines = [], []
    for name in ("flat_ip", "flat_l2"):
        near = torch.from_numpy(build_index(name, rows).search(queries, k)[1])  # (B, K)
        wide = (torch.from_numpy(queries).double(), torch.from_numpy(rows).double())
        cosines.append(cosines_of_ids(*wide, near, k)[0])
        ids.append(near.sort(dim=1).values)
    same = (ids[0] == ids[1]).all(dim=1).double().mean()
    gap = (cosines[0] - cosines[1]).abs().max()
    measured = {"same sets": float(same), "largest cosine gap": float(gap)}
    return pd.DataFrame([{"k": k, "n_queries": len(queries)} | measured])


def learned_temperatures(run: TrainedRun, k: int) -> pd.DataFrame:
    """Return each head's learned temperature, where it started, and what it leaves beyond k.

    The discarded mass is that of softmax(similarity / temperature) over the whole memory; a
    query-key head scores something else than similarity, so it has none.
    """
    rows = []
    for name, part in run.attention.parts.items():
        if isinstance(part, Similarity):
            learned = _temperatures(part)
            starts = _temperatures(Similarity(_heads(len(learned)), dim=1, n_classes=2))
            masses = _masses_beyond(run, learned, k)
        elif isinstance(part, QueryKey):
            learned = part.temperatures().detach().numpy().astype(np.float64)
            starts = np.full(len(learned), run.config.attention.temperature_start)
            masses = np.full(len(learned), np.nan)
        else:
            continue
        rows += [
            {"part": name, "head": head + 1, "start": start, "temperature": now, "beyond k": mass}
            for head, (start, now, mass) in enumerate(zip(starts, learned, masses, strict=True))
        ]
    return pd.DataFrame(rows, columns=["part", "head", "start", "temperature", "beyond k"])


def weight_entropies(run: TrainedRun, k: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the entropy of each test query's weights, and the test errors of the methods.

    Entropies are divided by log k: 1 for equal weights, 0 where one neighbour has them all.
    """
    found = search_run(run, k)
    labels, k = run.labels("test"), found.test.k
    # At the same k as the attention, or their entropies could not be compared.
    distances = [Distance(k, temperature) for temperature in DISTANCE_TEMPERATURES]
    distance = fit_method(distances, found.held_out, found.held_out_labels)
    methods: dict[str, Method] = {
        "distance (tuned)": distance.method,
        "attention": attention_at(run, found, k),
    }
    probs = {
        "distance (tuned)": distance.predict(found.test),
        "attention": predict(methods["attention"], found.test),
    }
    entropies, errors = [], []
    for name, method in methods.items():
        entropy = attention_entropy(method.weights(found.test)).numpy() / np.log(max(k, 2))
        correct = probs[name].argmax(axis=1) == labels
        table = pd.DataFrame({"entropy": entropy.astype(np.float64), "correct": correct})
        entropies.append(table.assign(method=name, k=k))
        errors.append({"method": name, "error": float(1 - correct.mean())})
    return pd.concat(entropies, ignore_index=True), pd.DataFrame(errors)


def entropy_table(entropies: pd.DataFrame) -> pd.DataFrame:
    """Return mean and quartiles of ``Theory.entropies``, by seed, method, and right or wrong."""
    found = entropies.groupby(["seed", "method", "correct"], sort=False)["entropy"].describe()
    names = {"count": "n", "mean": "mean", "25%": "lower quartile", "50%": "median"}
    table = found[[*names, "75%"]].rename(columns=names | {"75%": "upper quartile"})
    return table.astype({"n": int}).reset_index()


def with_exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose largest deviations are text: "1.19e-07" would print as 0.0000."""
    worst = [column for column in table if column.startswith("largest")]
    return table.assign(**{column: table[column].map("{:.2e}".format) for column in worst})


def _heads(n_heads: int) -> AttentionConfig:
    return AttentionConfig(heads=n_heads)


def _temperatures(part: Similarity) -> Float[np.ndarray, " H"]:
    """A sharpness multiplies the similarity, a temperature divides it."""
    return (-part.log_sharpness.detach()).exp().numpy().astype(np.float64)


def _masses_beyond(
    run: TrainedRun, temperatures: Float[np.ndarray, " H"], k: int
) -> Float[np.ndarray, " H"]:
    queries, options = run.rows("test"), {"ks": (min(k, len(run.bank) - 1),), "progress": False}
    few = queries[some_rows(len(queries), HEAD_QUERIES)]
    cut = truncation(run.bank, few, temperatures=temperatures.tolist(), **options)
    return cut.mass[:, 0].mean(axis=1)
