"""Theory: what can be checked of it, on a run's own embeddings.

Axes: B queries, K neighbours, D embedding width, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from attnknn.attention import attention_entropy
from attnknn.baselines import DISTANCE_TEMPERATURES, fit_method
from attnknn.classify import Distance, Method, predict
from attnknn.config import AttentionConfig
from attnknn.index import build_index, cosines_of_ids
from attnknn.parts import QueryKey, Similarity
from attnknn.studies.bayes import raw_brackets, run_brackets
from attnknn.studies.contest import attention_at, search_run
from attnknn.studies.gumbel import gumbel_study
from attnknn.studies.root_n import RootN, root_n_study, root_of, some_rows
from attnknn.studies.truncation import Truncation, mass_table, rate_table, truncation
from attnknn.trained import PARTS, TrainedRun

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
