"""Theory: what can be checked of it on a run's own embeddings, and a verdict on every claim.

Let p be the softmax over all N rows and q its k largest weights, renormalised. The mass thrown
away, m = 1 - (p of the k largest), decides everything: over rows the total variation of p and q is
m itself; over classes it is at most m, as rows of one class may make up for each other. How fast m
falls with k depends on the weights alone.

Axes: B queries, N memory rows, C classes, T temperatures, K numbers of kept rows.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.checks import check_count, check_range
from attnknn.config import AttentionConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.index import build_index, cosines_of_ids
from attnknn.core.parts import QueryKey, Similarity
from attnknn.core.vote import Uniform, predict
from attnknn.embed.run import PARTS, TrainedRun
from attnknn.evaluate.compare import compare_methods
from attnknn.evaluate.measure import (
    HIGHER_IS_BETTER,
    METRIC_NAMES,
    accuracy,
    negative_log_likelihood,
)
from attnknn.progress import progress_bar
from attnknn.studies.claims import SAME_ACCURACY, SAME_NLL_SHARE

# ---- Truncation: what is lost when a softmax over the whole memory is cut to its k largest weights

QUERY_BLOCK = 64  # queries a block: bounds the (block, N) weights in double precision
FIT_FROM, FIT_SHARE = 3, 0.1  # rates are fitted from this k to this share of N: at N none is lost
SMALLEST_MASS = 1e-12  # below it a mass is rounding, and has no rate
EXPONENT_TOLERANCE = 0.05  # of the claimed 1: 1/(k + 1/2) fits as k^-0.98
MASS_LIMIT = 1e-10  # double precision, sums of some ten thousand weights
N_RESAMPLES = 500


def truncation_errors(
    weights: Float[Tensor, "B N"], labels: Int[Tensor, "B N"], ks: Sequence[int], n_classes: int
) -> Float[Tensor, "2 K B"]:
    """Return the discarded mass, and the total variation of full and truncated vote, at each k.

    Weights are sorted, largest first, and ``ks`` rise, each below N.
    """
    cuts = itertools.pairwise([0, *ks, weights.shape[1]])
    empty = weights.new_zeros(len(weights), n_classes)
    # One pass: votes of the rows between two cuts, then sums from the far end. Small weights are
    # added to small ones, so that a mass of 1e-9 is not lost beside the large ones.
    votes = [empty.scatter_add(1, labels[:, a:b], weights[:, a:b]) for a, b in cuts]
    between = torch.stack(votes)  # (K + 1, B, C)
    mass = between.flip(0).cumsum(0).flip(0)[1:].sum(dim=2)  # (K, B)
    within = between.cumsum(0)[:-1]  # (K, B, C): votes of the kept rows
    kept = within.sum(dim=2, keepdim=True)  # 1 - mass, but exact where it is small
    vote_error = (within / kept - between.sum(dim=0)).abs().sum(dim=2) / 2
    return torch.stack([mass, vote_error])


def truncation_tables(
    bank: MemoryBank,
    queries: Float[np.ndarray, "B D"],
    *,
    temperatures: Sequence[float],
    ks: Sequence[int],
) -> dict[str, pd.DataFrame]:
    """Return ``masses``, means at each temperature and k, and ``rates``, how fast they fall.

    ``above`` counts the queries whose vote error exceeds its bound, the discarded mass.

    Args:
        bank: The memory.
        queries: Unit-length queries.
        temperatures: Of softmax(similarity / temperature).
        ks: Rows to keep; those beyond N - 1 are left out.
    """
    temperatures = [check_range("temperature", t, low=0, low_open=True) for t in temperatures]
    ks = sorted({check_count("k", k) for k in ks if k < len(bank)})
    if not ks or not temperatures:
        raise ValueError(f"ks and temperatures must not be empty, got {ks=} and {temperatures=}")
    blocks = []
    for block in torch.from_numpy(queries).split(QUERY_BLOCK):
        scores, order = (block @ bank.rows.T).sort(dim=1, descending=True)  # (B, N)
        softmaxes = ((scores.double() / t).softmax(dim=1) for t in temperatures)
        labels, n_classes = bank.labels[order], bank.n_classes
        each = [truncation_errors(weights, labels, ks, n_classes) for weights in softmaxes]
        blocks.append(torch.stack(each, dim=1))
    mass, vote_error = torch.cat(blocks, dim=-1).numpy()  # (T, K, B) each
    above = (vote_error > mass + MASS_LIMIT).sum(axis=2)
    columns = {"discarded mass": mass.mean(axis=2), "vote error": vote_error.mean(axis=2)}
    columns |= {"above": above, "n": np.full_like(above, len(queries))}
    levels = pd.MultiIndex.from_product([temperatures, ks], names=["temperature", "k"])
    masses = pd.DataFrame({name: each.ravel() for name, each in columns.items()}, index=levels)
    rates = [
        {"weights": f"τ = {t:g}"} | fitted_rate(ks, own, len(bank))
        for t, own in zip(temperatures, mass, strict=True)
    ]
    return {"masses": masses.reset_index(), "rates": pd.DataFrame(rates)}


def power_exponent(
    ks: Sequence[int] | np.ndarray, errors: Float[np.ndarray, "*S K"]
) -> Float[np.ndarray, "*S"]:
    """Return a of the least-squares fit error = c / k^a: 1 for O(1/k), 0 for no fall at all."""
    x = np.log(np.asarray(ks, dtype=np.float64))
    x = x - x.mean()
    return np.asarray(-(np.log(errors) @ x) / (x @ x))


def fitted_rate(
    ks: Sequence[int], mass: Float[np.ndarray, "K B"], n_rows: int
) -> dict[str, float | str]:
    """Return how the mean mass of the queries falls with k, with a 95 % interval over queries."""
    kept, means = np.asarray(ks), mass.mean(axis=1)
    used = (kept >= FIT_FROM) & (kept <= FIT_SHARE * n_rows) & (means > SMALLEST_MASS)
    if used.sum() < 3:  # too few rows, or nothing left to discard
        return dict.fromkeys(("exponent", "low", "high"), np.nan) | {"falls": "undefined"}
    n = mass.shape[1]
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), N_RESAMPLES)
    drawn = np.maximum(counts / n @ mass[used].T, SMALLEST_MASS)  # (resamples, K)
    low, high = np.quantile(power_exponent(kept[used], drawn), [0.025, 0.975]).tolist()
    exponent = float(power_exponent(kept[used], means[used]))
    return {"exponent": exponent, "low": low, "high": high, "falls": against_claim(low, high)}


def against_claim(low: float, high: float) -> str:
    """Say how the interval of a fitted exponent stands to the claimed 1."""
    if high < 1 - EXPONENT_TOLERANCE:
        return "slower than 1/k"
    if low < 1 - EXPONENT_TOLERANCE:
        return "not decided"
    return "faster than 1/k" if low > 1 + EXPONENT_TOLERANCE else "as 1/k"


# ---- k against the square root of n: the memory is thinned to several sizes; at each of them
# held-out queries choose k for the plain vote, and test queries tell what that and k = √n are worth

CRITERIA = {"nll": negative_log_likelihood, "accuracy": accuracy}
ROOT, CHOSEN = "k = √n", "k chosen on held-out queries"
K_REACH, K_STEP = 16.0, math.sqrt(2)  # k is tried up to this many times √n, in steps of this factor
CLAIMED_REACH = 4.0  # nobody claims that the error falls with k far beyond √n


def k_grid(n_rows: int) -> list[int]:
    """Return the k that are tried in a memory of n rows: 1 to 16 √n, and √n itself."""
    largest = min(n_rows, K_REACH * math.sqrt(n_rows))
    steps = int(math.log(largest, K_STEP)) + 1
    ends = {root_of(n_rows)} | ({n_rows} if largest == n_rows else set())
    return sorted({round(K_STEP**step) for step in range(steps)} | ends)


def root_of(n_rows: int) -> int:
    """Return √n as a number of neighbours."""
    return max(1, round(math.sqrt(n_rows)))


def some_rows(n_rows: int, n_wanted: int, *, seed: int = 0) -> Int[np.ndarray, " M"]:
    """Return up to ``n_wanted`` row numbers, drawn without replacement, in rising order."""
    if n_wanted >= n_rows:
        return np.arange(n_rows)
    return np.sort(np.random.default_rng(seed).choice(n_rows, n_wanted, replace=False))


def root_n_tables(
    runs: Sequence[TrainedRun], share: float, *, n_queries: int, level: float
) -> dict[str, pd.DataFrame]:
    """Return what k = √n and a chosen k are worth in memories thinned to a share of their rows.

    Args:
        runs: One trained run a seed.
        share: Share of the memory rows that is kept, drawn at random.
        n_queries: The most held-out and test queries that are used, each.
        level: Confidence of the comparison.

    Returns:
        ``root_n``: measures on test queries by seed and k. ``choice``: by seed and criterion √n,
        the chosen k and whether that is the largest tried (``capped``: the best is at least that).
        ``comparison``: k = √n minus the chosen k on test queries.
    """
    measured, choices = [], []
    probs = {criterion: {CHOSEN: [], ROOT: []} for criterion in CRITERIA}
    for run in runs:
        bank = thinned_bank(run, share)
        named = {"seed": run.config.seed, "share": share, "n": len(bank)}
        held_out = votes_by_k(run, bank, "val", n_queries)
        test, labels = votes_by_k(run, bank, "test", n_queries)
        for criterion, measure in CRITERIA.items():
            rows = [{"k": k, "value": measure(each, labels)} for k, each in test.items()]
            measured += [named | {"queries": "test", "metric": criterion} | row for row in rows]
            k, root = choose_k(*held_out, criterion), root_of(len(bank))
            found = {"root": root, "chosen": k, "capped": k == max(test) < len(bank)}
            choices.append(named | {"criterion": criterion} | found)
            probs[criterion][CHOSEN].append(test[k])
            probs[criterion][ROOT].append(test[root])
    compared = [
        compare_methods(pair, labels, CHOSEN, metrics=(criterion,), level=level)
        for criterion, pair in probs.items()
    ]
    comparison = pd.concat(compared, ignore_index=True).assign(share=share, n=len(bank))
    tables = {"root_n": pd.DataFrame(measured), "choice": pd.DataFrame(choices)}
    return tables | {"comparison": comparison}


def thinned_bank(run: TrainedRun, share: float) -> MemoryBank:
    """Return an exact memory of a share of a run's training rows, two rows or more."""
    rows, labels = run.rows("train"), run.labels("train")
    keep = some_rows(len(rows), max(2, round(share * len(rows))), seed=run.config.seed)
    return MemoryBank(rows[keep], labels[keep], n_classes=len(run.class_names), index="flat_ip")


def votes_by_k(
    run: TrainedRun, bank: MemoryBank, part: str, n_queries: int
) -> tuple[dict[int, Float[np.ndarray, "B C"]], Int[np.ndarray, " B"]]:
    """Return the plain vote's probabilities at every k, from one search, and the true labels."""
    rows, ks = some_rows(len(run.rows(part)), n_queries), k_grid(len(bank))
    found = bank.search(run.rows(part)[rows], max(ks))
    return {k: predict(Uniform(k), found) for k in ks}, run.labels(part)[rows]


def choose_k(
    probs: dict[int, Float[np.ndarray, "B C"]], labels: Int[np.ndarray, " B"], criterion: str
) -> int:
    """Return the k that is best by ``criterion``; the smallest of equals."""
    values = {k: CRITERIA[criterion](each, labels) for k, each in probs.items()}
    return (max if criterion in HIGHER_IS_BETTER else min)(values, key=values.get)


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
    mine = table[(table["metric"] == "accuracy") & (table["share"] == table["share"].max())]
    mine = mine[mine["k"] <= CLAIMED_REACH * np.sqrt(mine["n"])]
    errors = 1 - mine.groupby("k")["value"].mean()
    errors = errors[errors > 0]
    if len(errors) < 3:
        return float("nan")
    return float(power_exponent(errors.index.to_numpy(), errors.to_numpy()))


# ---- The study: every check, on all seeds of a run

INDEX_QUERIES = 2000


def theory(
    runs: Sequence[TrainedRun],
    *,
    temperatures: Sequence[float] = (1.0, 0.2, 0.1, 0.05, 0.02),
    truncation_ks: Sequence[int] = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000),
    truncation_queries: int = 500,
    memory_shares: Sequence[float] = (0.05, 0.1, 0.25, 0.5, 1.0),
    root_queries: int = 2000,
    k_eval: int = 50,
    progress: bool = True,
) -> dict[str, pd.DataFrame]:
    """Return every check on the seeds of a run, one table a question, each with a column ``seed``.

    Args:
        runs: One trained run a seed.
        temperatures: Of softmax(similarity / temperature) over the whole memory.
        truncation_ks: Rows that a truncated softmax keeps.
        truncation_queries: Test queries for the truncation errors.
        memory_shares: Shares of the memory over which k = √n is tried.
        root_queries: Held-out and test queries for that.
        k_eval: Neighbours that two indexes are asked for.
        progress: Show a bar.

    Returns:
        ``norms``, ``indexes``, ``masses``, ``rates``, ``heads``, ``root_n``, ``choice`` and
        ``comparison``; see the functions that make them.
    """
    by_seed, by_share, cut = [], [], {"temperatures": temperatures, "ks": truncation_ks}
    level = 1 - 0.05 / len(memory_shares)  # each size is one more look (Bonferroni)
    steps = len(runs) + len(memory_shares)
    with progress_bar(title="theory", total=steps, disable=not progress) as bar:
        for run in runs:
            few = run.rows("test")[some_rows(len(run.rows("test")), truncation_queries)]
            tables = truncation_tables(run.bank, few, **cut)
            tables |= {"norms": norm_table(run), "indexes": index_table(run, k_eval)}
            tables |= {"heads": learned_temperatures(run)}
            by_seed.append({n: each.assign(seed=run.config.seed) for n, each in tables.items()})
            bar.update()
        for share in memory_shares:
            by_share.append(root_n_tables(runs, share, n_queries=root_queries, level=level))
            bar.update()
    return _joined(by_seed) | _joined(by_share)


def _joined(parts: Sequence[dict[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    return {name: pd.concat([p[name] for p in parts], ignore_index=True) for name in parts[0]}


def norm_table(run: TrainedRun) -> pd.DataFrame:
    """Return the mean length of each split's embeddings, and the largest deviation from 1."""
    lengths = {part: np.linalg.norm(run.rows(part).astype(np.float64), axis=1) for part in PARTS}
    rows = [
        {"rows": part, "n": len(each), "mean": each.mean()}
        | {"largest deviation": np.abs(each - 1).max()}
        for part, each in lengths.items()
    ]
    return pd.DataFrame(rows)


def index_table(run: TrainedRun, k: int) -> pd.DataFrame:
    """Return how far neighbours by inner product and by L2 distance agree on test queries.

    ``same sets`` is the share of queries with the same k rows. Where sets differ, rows are equally
    near up to rounding; ``largest cosine gap`` is the largest difference between the two lists
    of similarities, each computed anew in double precision.
    """
    queries = run.rows("test")[some_rows(len(run.rows("test")), INDEX_QUERIES)]
    rows, k = run.rows("train"), min(k, len(run.bank))
    wide = (torch.from_numpy(queries).double(), torch.from_numpy(rows).double())
    indexes = [build_index(name, rows) for name in ("flat_ip", "flat_l2")]
    near = [torch.from_numpy(index.search(queries, k)[1]) for index in indexes]  # (B, K) each
    cosines = [cosines_of_ids(*wide, each, k)[0] for each in near]
    ids = [each.sort(dim=1).values for each in near]
    same = float((ids[0] == ids[1]).all(dim=1).double().mean())
    gap = float((cosines[0] - cosines[1]).abs().max())
    named = {"k": k, "n_queries": len(queries)}
    return pd.DataFrame([named | {"same sets": same, "largest cosine gap": gap}])


def learned_temperatures(run: TrainedRun) -> pd.DataFrame:
    """Return each head's learned temperature, and where it started."""
    rows = []
    for name, part in run.attention.parts.items():
        if isinstance(part, Similarity):
            learned = _temperatures(part)
            config = AttentionConfig(heads=len(learned))
            starts = _temperatures(Similarity(config, dim=1, n_classes=2))
        elif isinstance(part, QueryKey):
            learned = part.temperatures().detach().numpy().astype(np.float64)
            starts = np.full(len(learned), run.config.attention.temperature_start)
        else:
            continue
        each = enumerate(zip(starts, learned, strict=True), start=1)
        rows += [{"part": name, "head": h, "start": s, "temperature": t} for h, (s, t) in each]
    return pd.DataFrame(rows, columns=["part", "head", "start", "temperature"])


def _temperatures(part: Similarity) -> Float[np.ndarray, " H"]:
    """A sharpness multiplies the similarity, a temperature divides it."""
    return (-part.log_sharpness.detach()).exp().numpy().astype(np.float64)


# ---- Claims: what is said, what was measured over all seeds, and a verdict

HOLDS, FAILS, PARTLY, UNDECIDED = "holds", "does not hold", "holds in part", "not decided"
NORM_LIMIT = 1e-5  # float32 rows of a few hundred entries
COSINE_LIMIT = 1e-6  # two neighbours this close are equally near in float32


Claim = tuple[str, str, str, str]  # claim, bound, measured, verdict


def claims_table(found: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return every claim with its bound, what was measured over all seeds, and a verdict."""
    made = [
        *identities(found["norms"], found["indexes"], found["masses"]),
        truncation_falls(found["rates"]),
        error_falls(found["root_n"]),
        root_is_best(found["root_n"], found["choice"], found["comparison"]),
        k_far_below_root(found["choice"]),
        temperatures_move(found["heads"]),
    ]
    return pd.DataFrame(made, columns=["claim", "bound", "measured", "verdict"])


def verdict(found: dict[str, pd.DataFrame]) -> str:
    """Return, in Markdown, one line a claim."""
    rows = claims_table(found).to_dict("records")
    lines = [f"- {row['claim']}: **{row['verdict']}** ({row['measured']})." for row in rows]
    n_seeds = found["norms"]["seed"].nunique()
    return "\n".join([*lines, "", f"Worst case over {n_seeds} seed(s) where a bound is checked."])


def _of_all(holds: pd.Series) -> str:
    return HOLDS if holds.all() else PARTLY if holds.any() else FAILS


def identities(norms: pd.DataFrame, indexes: pd.DataFrame, masses: pd.DataFrame) -> list[Claim]:
    """Judge what must hold up to rounding, in the worst case of all queries."""
    norm, gap = norms["largest deviation"].max(), indexes["largest cosine gap"].max()
    same, above = 100 * indexes["same sets"].min(), masses["above"].sum()
    used = 100 * masses["vote error"].mean() / masses["discarded mass"].mean()
    said = [
        ("Embeddings have unit length", f"deviation ≤ {NORM_LIMIT:g}"),
        ("Inner product and L2 find the same neighbours", f"similarities ± {COSINE_LIMIT:g}"),
        ("Truncation error of the vote is at most the discarded mass", "for every query"),
    ]
    measured = [
        (f"largest deviation {norm:.1e}", norm <= NORM_LIMIT),
        (f"same set for {same:.2f} % of queries, largest gap {gap:.1e}", gap <= COSINE_LIMIT),
        (f"{above} of {masses['n'].sum()} cases above; on average {used:.0f} % of it", not above),
    ]
    return [
        (*claim, shown, HOLDS if holds else FAILS)
        for claim, (shown, holds) in zip(said, measured, strict=True)
    ]


def truncation_falls(rates: pd.DataFrame) -> Claim:
    """Judge the published rate, temperature by temperature."""
    by_weights = rates.groupby("weights", sort=False)
    said = by_weights["falls"].agg(set)
    slow = any("slower than 1/k" in each for each in said)
    kept = any(each <= {"as 1/k", "faster than 1/k"} for each in said)
    shown = ", ".join(f"{x:.2f} at {name}" for name, x in by_weights["exponent"].mean().items())
    found = PARTLY if slow and kept else FAILS if slow else HOLDS if kept else UNDECIDED
    return ("Truncation error falls as O(1/k)", "exponent ≥ 1", shown, found)


def error_falls(table: pd.DataFrame) -> Claim:
    """Judge the same rate, read as a claim on the classification error."""
    exponent = error_exponent(table)
    found = UNDECIDED if np.isnan(exponent) else HOLDS if exponent >= 1 else FAILS
    shown = f"exponent {exponent:.2f} (uniform vote)"
    return ("Test error falls as O(1/k)", "exponent ≥ 1", shown, found)


def root_is_best(root_n: pd.DataFrame, choice: pd.DataFrame, comparison: pd.DataFrame) -> Claim:
    """Judge √n by what it may lose: inside the margin it holds; a test that finds nothing is none.

    The margins are those of the published claims.
    """
    chosen = choice[choice["criterion"] == "nll"].rename(columns={"chosen": "k"})
    measured, at = root_n[root_n["metric"] == "nll"], ["seed", "share", "k"]
    nll = chosen[at].merge(measured, on=at).groupby("share")["value"].mean()
    margins = comparison["share"].map(nll) * SAME_NLL_SHARE
    margins = margins.where(comparison["metric"] == "nll", SAME_ACCURACY)
    is_gain = comparison["metric"].isin(HIGHER_IS_BETTER)
    lost = comparison["high"].where(~is_gain, -comparison["low"])  # the most that √n may lose
    holds = lost <= margins
    worse = comparison[(comparison["verdict"] == "worse") & ~holds]
    where = [
        f"worse in {METRIC_NAMES[name]} at n = {', '.join(map(str, sorted(set(rows['n']))))}"
        for name, rows in worse.groupby("metric", sort=False)
    ]
    found = FAILS if len(worse) and not holds.any() else PARTLY if len(worse) else UNDECIDED
    return (
        "k = √n is as good as a chosen k",
        f"at most {100 * SAME_NLL_SHARE:g} % of the NLL and {100 * SAME_ACCURACY:g} points lost",
        "; ".join([*where, f"within the margin in {holds.sum()} of {len(comparison)} comparisons"]),
        HOLDS if holds.all() else found,
    )


def k_far_below_root(choice: pd.DataFrame) -> Claim:
    """Judge the published "practical k is far below √n"; a tenth counts as far."""
    full = choice[choice["share"] == choice["share"].max()]
    by_criterion = full.assign(ratio=full["chosen"] / full["root"]).groupby("criterion", sort=False)
    ratios, capped = by_criterion["ratio"].median(), by_criterion["capped"].any()
    parts = []
    for name, ratio in ratios.items():
        least, exponent = "at least " if capped[name] else "", chosen_exponent(choice, name)
        grows = "not fitted" if np.isnan(exponent) else f"n^{exponent:.2f}"
        parts.append(f"{least}{ratio:.2f} √n by {METRIC_NAMES[name]} (growth: {grows})")
    bound, shown = "chosen k ≤ 0.1 √n at the full memory", ", ".join(parts)
    return ("The best k is far below √n", bound, shown, _of_all(ratios <= 0.1))


def temperatures_move(heads: pd.DataFrame) -> Claim:
    """Judge whether the fit moved the heads' temperatures."""
    by_head = heads.groupby(["part", "head"], sort=False)[["start", "temperature"]].mean()
    moved = np.abs(np.log(by_head["temperature"] / by_head["start"])) >= np.log(1.1)
    shown = ", ".join(f"{start:.3g} → {now:.3g}" for start, now in by_head.to_numpy())
    found = _of_all(moved) if len(moved) else UNDECIDED
    return ("Heads learn their temperatures", "moved by 10 % or more", shown or "none", found)
