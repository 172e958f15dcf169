"""Efficiency: what building, searching, weighing and voting cost, on the rows of a real run.

All times are wall times measured in turns, round after round, and medians are compared: on a
shared machine a slow minute would otherwise hit whoever runs in it. Rows beyond those of the run
are embedded augmented views of its training images, where it has images; else the sizes end with
the run's rows, and the study says so.

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy import stats
from tqdm import tqdm

from attnknn.checks import check_count
from attnknn.core.index import FaissIndex, build_index, cosines_of_ids
from attnknn.core.kernels import faiss, linear
from attnknn.core.search import RowBank
from attnknn.core.vote import Uniform, predict
from attnknn.data.change import augment_batch
from attnknn.embed.rows import VIEW_PAD_SHARE, VIEW_SEED, EmbeddingCache, embed, embedding_key
from attnknn.embed.run import TrainedRun, choose_device
from attnknn.files import hardware
from attnknn.progress import progress_bar

# ---- Timing

BUDGET = 4.0  # seconds of one action after which it is not repeated: large HNSW builds run once


def time_in_turns(
    actions: Mapping[Any, Callable[[], object]],
    *,
    repeats: int,
    budget: float = BUDGET,
    bar: tqdm | None = None,
) -> dict[Any, list[float]]:
    """Return the wall seconds of every action, measured in turns.

    Every action runs once in the first round; beyond a ``budget`` of seconds it is not repeated.
    """
    check_count("repeats", repeats)
    times: dict[Any, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            if sum(times[name]) < budget:
                start = time.perf_counter()
                action()
                times[name].append(time.perf_counter() - start)
            if bar is not None:
                bar.update()
    return times


def median_interval(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return the median as ``value`` and its exact 95 % interval ``low`` to ``high`` of ``n``.

    Of n values the j-th smallest and the j-th largest enclose the true median unless fewer than j
    lie on one side of it, which is a matter of coin tosses: no shape of the noise is assumed. Below
    6 values there is no such interval.
    """
    ordered, n = np.sort(values), len(values)
    ranks = [j for j in range(1, n // 2 + 1) if 2 * stats.binom.cdf(j - 1, n, 0.5) <= 0.05]
    low, high = (ordered[ranks[-1] - 1], ordered[-ranks[-1]]) if ranks else (np.nan, np.nan)
    return {"value": float(np.median(ordered)), "low": float(low), "high": float(high), "n": n}


def fit_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
    """Return b of seconds = a * size ** b as ``exponent``, with its 95 % interval.

    By least squares on logarithms; there is no interval below 3 different sizes.
    """
    n = len(set(sizes))
    if n < 2:
        raise ValueError(f"sizes must hold at least 2 different values, got sizes={list(sizes)}")
    if min(seconds) <= 0:
        raise ValueError(f"seconds must be above 0, got seconds={list(seconds)}")
    fit, degrees = stats.linregress(np.log(sizes), np.log(seconds)), len(sizes) - 2
    half = stats.t.ppf(0.975, degrees) * fit.stderr if degrees > 0 else np.nan
    limits = {"low": float(fit.slope - half), "high": float(fit.slope + half)}
    return {"exponent": float(fit.slope), **limits, "n": n}


# ---- Contenders: the memory's own indexes, two peers, and the roof: the bare matrix product of
# queries and rows, which every exact search has to do and none can beat

ROOF_BLOCK = 8192  # rows a block: what is multiplied at once stays small
TIE = 1e-6  # rows this close in cosine are equally near; copies of a row are all right
FLAT, ROOF = "Flat IP", "GEMM roof"
EXACT, APPROXIMATE, PEERS = ("Flat L2", FLAT), ("HNSW", "IVF-PQ"), ("scikit-learn", "torch")

Rows = Float[np.ndarray, "N D"]


class Searcher(NamedTuple):
    """Made from rows; ``search`` returns the ids of the k nearest (None: it only multiplies)."""

    search: Callable[[Float[np.ndarray, "B D"], int], Int[np.ndarray, "B K"] | None]
    settings: str
    nbytes: int | None = None


def own_index(name: str, rows: Rows) -> Searcher:
    """Return an index that is searched as the memory does: compressed finds are ranked anew."""
    index, bank = (
        build_index(name, rows),
        RowBank.over(rows, index="flat_ip"),
    )  # the bank builds nothing
    settings, nbytes = [f"{key} {value}" for key, value in index.settings.items()], rows.nbytes
    if isinstance(index, FaissIndex):
        nbytes += faiss.serialize_index(index.index).nbytes if index.index is not None else 0
        settings = ([f"{index.lists.nlist} lists"] if index.lists is not None else []) + settings

    def search(queries: Float[np.ndarray, "B D"], k: int) -> Int[np.ndarray, "B K"]:
        return bank.nearest_rows(torch.from_numpy(queries), k, index=index)[1].numpy()

    return Searcher(search, ", ".join(settings) or "every row compared", nbytes)


def sklearn_search(rows: Rows) -> Searcher:
    """Return scikit-learn's exact search."""
    from sklearn.neighbors import NearestNeighbors

    finder = NearestNeighbors(algorithm="brute", metric="euclidean").fit(rows)
    return Searcher(partial(finder.kneighbors, return_distance=False), "brute force")


def matrix_product(rows: Rows) -> Searcher:
    """Return no search: the matrix product alone, block by block, by the faster kernels."""
    blocks = torch.from_numpy(rows).split(ROOF_BLOCK)

    @torch.inference_mode()
    def multiply(queries: Float[np.ndarray, "B D"], k: int) -> None:
        for block in blocks:
            # Not torch.mm: where that is slower than faiss's own products, it is no roof.
            linear(torch.from_numpy(queries), block)

    return Searcher(multiply, "matrix product alone")


CONTENDERS: dict[str, Callable[[Rows], Searcher]] = {
    "Flat L2": partial(own_index, "flat_l2"),
    FLAT: partial(own_index, "flat_ip"),
    "HNSW": partial(own_index, "hnsw"),
    "IVF-PQ": partial(own_index, "ivfpq"),
    "scikit-learn": sklearn_search,
    "torch": partial(own_index, "matmul"),
    ROOF: matrix_product,
}


def recall(
    queries: Float[np.ndarray, "B D"],
    rows: Rows,
    found: Int[np.ndarray, "B K"],
    nearest: Int[np.ndarray, "B K"],
) -> float:
    """Return the share of the k nearest rows that was found; id -1 is a miss.

    Of rows as near as the k-th nearest any may be found.
    """
    both, k = (torch.from_numpy(queries), torch.from_numpy(rows)), found.shape[1]
    last = cosines_of_ids(*both, torch.from_numpy(nearest), k)[0][:, -1:]  # (B, 1)
    scores = cosines_of_ids(*both, torch.from_numpy(found), k)[0]  # (B, K)
    return float((scores >= last - TIE).float().mean())


# ---- Scaling: what finding the k nearest rows takes as the memory grows


def many_rows(run: TrainedRun, n_rows: int) -> Rows:
    """Return up to ``n_rows`` embeddings: the run's training rows in random order, then views."""
    own = run.rows("train")
    own = own[np.random.default_rng(VIEW_SEED).permutation(len(own))]
    missing = n_rows - len(own)
    if missing <= 0 or run.splits.kind != "image" or not run.splits.augmentation:
        return np.ascontiguousarray(own[:n_rows])
    return np.concatenate([own, augmented_rows(run, missing)])


def augmented_rows(run: TrainedRun, n_rows: int) -> Rows:
    """Return embeddings of randomly changed training images, kept in the run's folder."""
    inputs, names = run.splits.train.inputs, run.splits.augmentation
    pad = max(1, round(VIEW_PAD_SHARE * inputs.shape[-1]))
    key = embedding_key(run.embedder, inputs, view=f"augmented {n_rows} {names} {pad} {VIEW_SEED}")
    generator = torch.Generator().manual_seed(VIEW_SEED)

    def changed(images: torch.Tensor) -> torch.Tensor:
        return augment_batch(images.cpu(), names, generator, pad=pad).to(images.device)

    def compute() -> dict[str, np.ndarray]:
        cycled = inputs[np.arange(n_rows) % len(inputs)]
        device = choose_device(run.config.training.device)
        return {"rows": embed(run.embedder, cycled, device=device, progress=False, view=changed)}

    return EmbeddingCache(run.folder / "views").get(key, compute)["rows"]


def index_scaling(
    rows: Rows,
    queries: Float[np.ndarray, "B D"],
    sizes: Sequence[int],
    *,
    k: int = 10,
    repeats: int = 7,
    bar: tqdm | None = None,
) -> pd.DataFrame:
    """Return build time, search time, memory and recall of every contender at every size.

    All sizes are built before any is searched, and both are measured in turns over sizes and
    contenders: a slow spell of the machine does not fall on one size.
    """
    pairs = [(name, n) for n in sizes for name in CONTENDERS]
    built: dict[tuple[str, int], Searcher] = {}

    def build(pair: tuple[str, int]) -> None:
        built[pair] = CONTENDERS[pair[0]](rows[: pair[1]])

    builds = time_in_turns({p: partial(build, p) for p in pairs}, repeats=repeats, bar=bar)
    asked = {p: partial(built[p].search, queries, k) for p in pairs}
    searches = time_in_turns(asked, repeats=repeats, bar=bar)
    table = []
    for name, n in pairs:
        searcher = built[name, n]
        measured = {"search_ms": [1000 * t / len(queries) for t in searches[name, n]]}
        if name != ROOF:
            nearest, found = built[FLAT, n].search(queries, k), searcher.search(queries, k)
            measured["build_seconds"] = builds[name, n]
            measured["recall"] = [recall(queries, rows[:n], found, nearest)]
        if searcher.nbytes is not None:
            measured["memory_mb"] = [searcher.nbytes / 1e6]
        named = {"index": name, "settings": searcher.settings, "rows": n}
        table += [named | {"metric": m} | median_interval(each) for m, each in measured.items()]
    return pd.DataFrame(table)


def scaling_exponents(scaling: pd.DataFrame) -> pd.DataFrame:
    """Return how search times, and build times of what is built, grow: time ~ rows ** exponent."""
    is_build = (scaling["metric"] == "build_seconds") & scaling["index"].isin(APPROXIMATE)
    timed = scaling[is_build | (scaling["metric"] == "search_ms")]
    table = [
        {"index": name, "metric": metric}
        | fit_exponent(group["rows"].tolist(), group["value"].tolist())
        for (name, metric), group in timed.groupby(["index", "metric"], sort=False)
        if group["rows"].nunique() > 1
    ]
    return pd.DataFrame(table, columns=["index", "metric", "exponent", "low", "high", "n"])


# ---- Stages of a prediction: what embedding, search, vote and attention take per query

SINGLE_QUERIES = 20  # queries that are asked one by one
BATCHES = ("all at once", "one by one")
TIMED = ("embedding", "search", "uniform", "attention")

StageTimes = dict[str, dict[str, list[float]]]  # batch to what was timed to ms a query, by round


def stage_times(
    run: TrainedRun,
    k: int,
    *,
    n_queries: int = 1_000,
    repeats: int = 7,
    bar: tqdm | None = None,
) -> StageTimes:
    """Return ms a query of embedding, search and both votes, for whole batches and single ones."""
    k, n = min(k, len(run.bank)), min(n_queries, len(run.rows("test")))
    _ = run.bank.view.histograms, run.bank.view.prototypes  # made once per memory, not per query
    device = choose_device(run.config.training.device)
    inputs, rows = run.splits.test.inputs[:n], run.rows("test")[:n]
    found, votes = run.bank.search(rows, k), {"uniform": Uniform(k), "attention": run.method(k)}
    acts: dict[str, Callable[[slice], object]] = {
        "embedding": lambda part: embed(run.embedder, inputs[part], device=device, progress=False),
        "search": lambda part: run.bank.search(rows[part], k),
        # Taken anew from what was found: labels and trust are looked up again.
        "uniform": lambda part: predict(votes["uniform"], found.of_queries(part)),
        "attention": lambda part: predict(votes["attention"], found.of_queries(part)),
    }
    single = [slice(place, place + 1) for place in range(min(SINGLE_QUERIES, n))]
    times: StageTimes = {}
    for batch, parts in zip(BATCHES, ([slice(0, n)], single), strict=True):
        asked = sum(part.stop - part.start for part in parts)
        each = {name: partial(_for_each, acts[name], parts) for name in TIMED}
        timed = time_in_turns(each, repeats=repeats, budget=np.inf, bar=bar)
        times[batch] = {name: [1000 * t / asked for t in rounds] for name, rounds in timed.items()}
    return times


def _for_each(action: Callable[[slice], object], parts: Sequence[slice]) -> None:
    for part in parts:
        action(part)


def stage_table(times: StageTimes) -> pd.DataFrame:
    """Return ms a query of every stage; "attention" is what it takes beyond a uniform vote."""
    table = []
    for batch, timed in times.items():
        extra = np.subtract(timed["attention"], timed["uniform"])  # round by round
        stages = {"embedding": timed["embedding"], "search": timed["search"]}
        stages |= {"vote": timed["uniform"], "attention": extra}
        for method in ("uniform", "attention"):
            taken = [name for name in stages if name != "attention" or method == "attention"]
            named = [{"batch": batch, "method": method, "stage": name} for name in taken]
            table += [row | median_interval(stages[row["stage"]]) for row in named]
    return pd.DataFrame(table)


def overheads(times: StageTimes) -> pd.DataFrame:
    """Return the attention's cost over the uniform vote's, round by round: difference and ratio."""
    table = []
    for batch, timed in times.items():
        embedding, search, uniform, attention = (np.array(timed[name]) for name in TIMED)
        extra = float(np.median(attention - uniform))
        before = {"search and vote": search, "embedding, search and vote": embedding + search}
        for scope, shared in before.items():
            ratio = median_interval((shared + attention) / (shared + uniform))
            row = {"batch": batch, "scope": scope, "extra_ms": extra, "ratio": ratio.pop("value")}
            table.append(row | ratio)
    return pd.DataFrame(table)


# ---- The study, and what it says


@dataclass(frozen=True)
class Efficiency:
    """What was measured.

    Attributes:
        scaling: One row per index, number of rows and measure (build_seconds, search_ms a query,
            memory_mb, recall): ``value`` with ``low``, ``high`` and ``n`` repeats.
        exponents: One row per index and timed measure: how it grows with the rows.
        stages: One row per batch ("all at once", "one by one"), method and stage, ms a query.
        overhead: One row per batch and scope: attention over uniform.
        facts: Conditions of the measurement, one a row.
        n_real: Rows of the run itself; larger sizes hold augmented views.
        load: The most processes that wanted a core, before or after.
    """

    scaling: pd.DataFrame
    exponents: pd.DataFrame
    stages: pd.DataFrame
    overhead: pd.DataFrame
    facts: pd.DataFrame
    n_real: int
    load: float


def efficiency(
    run: TrainedRun,
    *,
    sizes: Sequence[int] = (1_000, 3_000, 10_000, 30_000, 100_000),
    k: int = 10,
    k_eval: int = 50,
    n_queries: int = 1_000,
    repeats: int = 7,
    progress: bool = True,
) -> Efficiency:
    """Return what search, attention and vote cost.

    Args:
        run: A trained run.
        sizes: Memory rows; those that cannot be had are left out for the largest that can.
        k: Neighbours searched when indexes are compared.
        k_eval: Neighbours the attention weighs.
        n_queries: Test rows that are asked, at most all.
        repeats: Rounds of every measurement.
        progress: Show a bar.
    """
    before, rows = _load(), many_rows(run, max(sizes))
    possible = sorted({min(size, len(rows)) for size in sizes})
    queries = run.rows("test")[:n_queries]
    n_actions = 2 * len(possible) * len(CONTENDERS) + len(BATCHES) * len(TIMED)
    with progress_bar(title="timing", total=repeats * n_actions, disable=not progress) as bar:
        scaling = index_scaling(rows, queries, possible, k=k, repeats=repeats, bar=bar)
        times = stage_times(run, k_eval, n_queries=n_queries, repeats=repeats, bar=bar)
    loads = (before, _load())
    return Efficiency(
        scaling=scaling,
        exponents=scaling_exponents(scaling),
        stages=stage_table(times),
        overhead=overheads(times),
        facts=conditions(run, len(queries), max(sizes), len(rows), loads),
        n_real=len(run.rows("train")),
        load=max(loads),
    )


def _load() -> float:
    """Return how many processes want a core; NaN where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def conditions(
    run: TrainedRun, n_queries: int, asked: int, had: int, loads: tuple[float, float]
) -> pd.DataFrame:
    """Return what the measurement was made with, one fact a row."""
    machine, own = hardware(), len(run.rows("train"))
    rows = f"{min(own, had):,} of the run, {max(0, had - own):,} embedded augmented views"
    if had < asked:
        rows += f"; {asked:,} were asked for, more cannot be had from this data"
    facts = {
        "machine": f"{machine['cpu']}, {machine['cores']} cores",
        "threads": f"{torch.get_num_threads()} (torch), {faiss.omp_get_max_threads()} (faiss)",
        "load before and after": "{:.1f}, {:.1f}".format(*loads),
        "rows": rows,
        "width": str(run.bank.dim),
        "queries": f"{n_queries:,} test rows",
        "memory of the stages": f"{len(run.bank):,} rows, index {run.bank.index_name}",
    }
    return pd.DataFrame({"fact": facts.keys(), "value": facts.values()})


def drawn(study: Efficiency) -> pd.DataFrame:
    """Return the rows worth drawing: build time and recall only of indexes that build and miss."""
    is_trivial = study.scaling["metric"].isin(["build_seconds", "recall"])
    return study.scaling[~is_trivial | study.scaling["index"].isin(APPROXIMATE)]


def scaling_table(study: Efficiency) -> pd.DataFrame:
    """Return one row per index and size, with medians of all measures, for a printed table."""
    index = ["rows", "index", "settings"]
    order = pd.MultiIndex.from_frame(study.scaling[index].drop_duplicates())
    wide = study.scaling.pivot(index=index, columns="metric", values="value").reindex(order)
    titles = {"build_seconds": "build (s)", "search_ms": "search (ms a query)"}
    titles |= {"memory_mb": "memory (MB)", "recall": "recall"}
    wide = wide.reindex(columns=list(titles)).rename(columns=titles)
    return wide.reset_index().rename_axis(columns=None)


PUBLISHED_ATTENTION_MS = 0.5  # what attention was said to add to a query
GOOD_RECALL = 0.95  # from here on an approximate index counts as usable


def verdict(study: Efficiency) -> str:
    """Return, in Markdown, what was found."""
    at = study.scaling.pivot(index=["rows", "index"], columns="metric", values="value")
    lines = [*_overhead_lines(study.overhead), _exact_line(at)]
    lines += [_approximate_line(at, name) for name in APPROXIMATE]
    searched = study.exponents[study.exponents["metric"] == "search_ms"]
    grows = [f"{row.index} {row.exponent:.2f}" for row in searched.itertuples(index=False)]
    if grows:
        lines.append(f"Search time grows with the rows to the power of: {', '.join(grows)}.")
    note = "Medians of interleaved rounds on the machine named above; compare ratios, not times."
    if study.load > hardware()["cores"]:
        note += f" It was busy: {study.load:.1f} processes wanted a core."
    return "\n".join([*(f"- {line}" for line in lines), "", note])


def _overhead_lines(overhead: pd.DataFrame) -> list[str]:
    lines = []
    for batch, group in overhead.groupby("batch", sort=False):
        extra = group["extra_ms"].iloc[0]
        held = "under" if extra < PUBLISHED_ATTENTION_MS else "not under"
        ratios = " and ".join(f"{row.scope} {row.ratio:.2f}" for row in group.itertuples())
        lines.append(
            f"Queries {batch}: attention adds {extra:.3f} ms a query ({held} the published "
            f"{PUBLISHED_ATTENTION_MS:g} ms); times over those with a uniform vote: {ratios}."
        )
    return lines


def _exact_line(at: pd.DataFrame) -> str:
    n = at.index.get_level_values("rows").max()
    times = at.loc[n, "search_ms"]
    best = times[list(EXACT)].idxmin()
    peers = ", ".join(f"{name} {times[name] / times[best]:.1f} times as long" for name in PEERS)
    return (
        f"Exact search of {n:,} rows: {best} takes {times[best]:.3f} ms a query, "
        f"{times[best] / times[ROOF]:.1f} times the bare matrix product; {peers}."
    )


def _approximate_line(at: pd.DataFrame, name: str) -> str:
    """Say from how many rows on an approximate index pays, and after how many queries."""
    own, flat = at.xs(name, level="index"), at.xs(FLAT, level="index")
    is_good = (own["search_ms"] < flat["search_ms"]) & (own["recall"] >= GOOD_RECALL)
    sizes = own.index[is_good[::-1].cummin()[::-1]]  # from here on every size is good
    since = f"from {sizes.min():,} rows on" if len(sizes) else "not at the largest size"
    here, there = own.iloc[-1], flat.iloc[-1]
    gain = (there["search_ms"] - here["search_ms"]) / 1000
    extra = here["build_seconds"] - there["build_seconds"]
    pays = f"pays after {extra / gain:,.0f} queries" if gain > 0 else "never pays"
    return (
        f"{name}: faster than {FLAT} at a recall of {GOOD_RECALL:g} {since}. At "
        f"{own.index[-1]:,} rows it takes {here['search_ms'] / there['search_ms']:.2f} of the time "
        f"at a recall of {here['recall']:.3f}, and its build {pays}."
    )
