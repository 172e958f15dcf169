"""k against the square root of n: does the rule of thumb find a good number of neighbours?

The memory is thinned to several sizes. At each size held-out queries choose k for the plain vote,
and test queries tell what the choice, and k = √n, are worth.

Axes: B queries, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from tqdm import tqdm

from attnknn.checks import check_count, check_range
from attnknn.classify import Uniform, predict
from attnknn.compare import compare_methods
from attnknn.measure import HIGHER_IS_BETTER, accuracy, negative_log_likelihood
from attnknn.memory import MemoryBank
from attnknn.studies.truncation import power_exponent
from attnknn.trained import TrainedRun

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
