"""Efficiency: what building, searching, weighing and voting cost, on the rows of a real run.

All times are wall times measured in turns; medians are compared. Rows beyond those of the run are
embedded augmented views of its training images, where it has images; else the sizes end with the
run's rows, and the study says so.
"""

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from attnknn.checks import check_count
from attnknn.core.index import FaissIndex, build_index, cosines_of_ids
from attnknn.core.kernels import faiss, linear
from attnknn.core.neighbours import Neighbours
from attnknn.core.search import RowBank
from attnknn.core.vote import Attention, Uniform, predict
from attnknn.data.change import augment_batch
from attnknn.embed.rows import VIEW_PAD_SHARE, VIEW_SEED, EmbeddingCache, embed, embedding_key
from attnknn.embed.run import TrainedRun, choose_device
from attnknn.files import hardware
from attnknn.studies.claims import PUBLISHED_ATTENTION_MS

# ---- Timing: actions measured in turns become medians with intervals, and sizes become exponents.
#
# On a shared machine a slow minute hits whoever runs in it. Actions that are to be compared are
# therefore measured in turns, round after round, and compared by medians.

Key = TypeVar("Key", bound=Hashable)


class Median(NamedTuple):
    """A median of ``n`` values with its interval; NaN limits where n is below 6."""

    median: float
    low: float
    high: float
    n: int


class Exponent(NamedTuple):
    """The slope of log time against log size with its interval; NaN limits below 3 sizes."""

    exponent: float
    low: float
    high: float
    n: int


def time_in_turns(
    actions: Mapping[Key, Callable[[], object]],
    *,
    repeats: int,
    budget: float = float("inf"),
    desc: str = "timing",
    progress: bool = True,
) -> dict[Key, list[float]]:
    """Return the wall seconds of every action, measured in turns.

    Args:
        actions: What to time, by any name.
        repeats: Rounds. Every action runs once in the first.
        budget: Seconds after which an action is not repeated any more.
        desc: Title of the progress bar.
        progress: Show a progress bar.
    """
    check_count("repeats", repeats)
    times: dict[Key, list[float]] = {name: [] for name in actions}
    with tqdm(total=repeats * len(actions), desc=desc, disable=not progress, leave=False) as bar:
        for _ in range(repeats):
            for name, action in actions.items():
                if sum(times[name]) < budget:
                    times[name].append(_seconds(action))
                bar.update()
    return times


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def median_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95) -> Median:
    """Return the median and its exact interval between order statistics.

    Of n values the j-th smallest and the j-th largest enclose the true median unless fewer than j
    lie on one side of it, which is a matter of coin tosses: no shape of the noise is assumed.
    """
    ordered, n = np.sort(values), len(values)
    ranks = [j for j in range(1, n // 2 + 1) if 2 * stats.binom.cdf(j - 1, n, 0.5) <= 1 - level]
    low, high = (ordered[ranks[-1] - 1], ordered[-ranks[-1]]) if ranks else (np.nan, np.nan)
    return Median(float(np.median(ordered)), float(low), float(high), n)


def fit_exponent(
    sizes: Sequence[int], seconds: Sequence[float], *, level: float = 0.95
) -> Exponent:
    """Return b of seconds = a * size ** b, by least squares on logarithms, with its t-interval.

    Args:
        sizes: Two or more different sizes.
        seconds: Time at each size.
        level: Confidence of the interval.
    """
    n = len(set(sizes))
    if n < 2:
        raise ValueError(f"sizes must hold at least 2 different values, got sizes={list(sizes)}")
    if min(seconds) <= 0:
        raise ValueError(f"seconds must be above 0, got seconds={list(seconds)}")
    fit = stats.linregress(np.log(sizes), np.log(seconds))
    degrees = len(sizes) - 2
    half = stats.t.ppf((1 + level) / 2, degrees) * fit.stderr if degrees > 0 else float("nan")
    return Exponent(float(fit.slope), float(fit.slope - half), float(fit.slope + half), n)


# ---- Contenders: ways to find the k nearest rows, each made from rows and then searched.
#
# The memory's own indexes, two peers, and the roof: the bare matrix product of queries and rows,
# which every exact search has to do and none can beat.
#
# Axes: B queries, K neighbours of each, D embedding width, N rows.

ROOF_BLOCK = 8192  # rows a block: what is multiplied at once stays small
TIE = 1e-6  # rows this close in cosine are equally near; copies of a row are all right
FLAT, ROOF = "Flat IP", "GEMM roof"


class Searcher(Protocol):
    """Something made from rows that finds the nearest of them."""

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Int[np.ndarray, "B K"] | None:
        """Return the ids of the k nearest rows."""


class IndexSearcher:
    """An index of the memory, searched as the memory does: compressed finds are ranked anew."""

    def __init__(self, name: str, rows: Float[np.ndarray, "N D"]) -> None:
        self.rows, self.index = rows, build_index(name, rows)

    @cached_property
    def _bank(self) -> RowBank:
        return RowBank.over(self.rows, index="flat_ip")  # a reference to the rows, nothing is built

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Int[np.ndarray, "B K"]:
        """Return the ids of the k nearest rows."""
        found = self._bank.nearest_rows(torch.from_numpy(queries), k, index=self.index)
        return found[1].numpy()

    @property
    def nbytes(self) -> int:
        """Size of the rows and of what the index keeps beside them."""
        own = self.index.index if isinstance(self.index, FaissIndex) else None
        return self.rows.nbytes + (0 if own is None else faiss.serialize_index(own).nbytes)

    @property
    def settings(self) -> str:
        """What it was built and is searched with."""
        found = [f"{name} {value}" for name, value in self.index.settings.items()]
        if isinstance(self.index, FaissIndex) and self.index.lists is not None:
            found.insert(0, f"{self.index.lists.nlist} lists")
        return ", ".join(found) or "every row compared"


class SklearnSearcher:
    """Exact search by scikit-learn's brute force."""

    settings = "brute force"

    def __init__(self, rows: Float[np.ndarray, "N D"]) -> None:
        from sklearn.neighbors import NearestNeighbors

        self.finder = NearestNeighbors(algorithm="brute", metric="euclidean").fit(rows)

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Int[np.ndarray, "B K"]:
        """Return the ids of the k nearest rows."""
        return self.finder.kneighbors(queries, k, return_distance=False)


class MatrixProduct:
    """No search: the matrix product alone, block by block, by the faster kernels there are."""

    settings = "matrix product alone"

    def __init__(self, rows: Float[np.ndarray, "N D"]) -> None:
        self.rows = torch.from_numpy(rows)

    @torch.inference_mode()
    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> None:
        """Multiply; ``k`` does not matter."""
        wanted = torch.from_numpy(queries)
        for block in self.rows.split(ROOF_BLOCK):
            # Not torch.mm: where that is slower than faiss's own products, it is no roof.
            linear(wanted, block)


@dataclass(frozen=True)
class Contender:
    """A way to search.

    Attributes:
        build: Rows to a searcher.
        kind: "exact", "approximate", "peer" or "roof".
    """

    build: Callable[[Float[np.ndarray, "N D"]], Searcher]
    kind: str


CONTENDERS = {
    "Flat L2": Contender(partial(IndexSearcher, "flat_l2"), "exact"),
    FLAT: Contender(partial(IndexSearcher, "flat_ip"), "exact"),
    "HNSW": Contender(partial(IndexSearcher, "hnsw"), "approximate"),
    "IVF-PQ": Contender(partial(IndexSearcher, "ivfpq"), "approximate"),
    "scikit-learn": Contender(SklearnSearcher, "peer"),
    "torch": Contender(partial(IndexSearcher, "matmul"), "peer"),
    ROOF: Contender(MatrixProduct, "roof"),
}


def of_kind(kind: str) -> list[str]:
    """Return the names of the contenders of a kind."""
    return [name for name, contender in CONTENDERS.items() if contender.kind == kind]


def recall(
    queries: Float[np.ndarray, "B D"],
    rows: Float[np.ndarray, "N D"],
    found: Int[np.ndarray, "B K"],
    nearest: Int[np.ndarray, "B K"],
) -> float:
    """Return the share of the k nearest rows that was found.

    Of rows as near as the k-th nearest any may be found; id -1 is a miss.

    Args:
        queries: Unit-length queries.
        rows: Unit-length rows.
        found: Ids from the search that is judged.
        nearest: Ids from an exact search.
    """
    both, k = (torch.from_numpy(queries), torch.from_numpy(rows)), found.shape[1]
    last = cosines_of_ids(*both, torch.from_numpy(nearest), k)[0][:, -1:]  # (B, 1)
    scores = cosines_of_ids(*both, torch.from_numpy(found), k)[0]  # (B, K)
    return float((scores >= last - TIE).float().mean())


# ---- Scaling: what finding the k nearest rows takes as the memory grows, for every contender.
#
# Axes: B queries, N memory rows, D embedding width.

BUDGET = 4.0  # seconds of one action after which it is not repeated: large HNSW builds run once


def many_rows(run: TrainedRun, n_rows: int, *, progress: bool = True) -> Float[np.ndarray, "N D"]:
    """Return up to ``n_rows`` embeddings: the run's training rows in random order, then views."""
    own = run.rows("train")
    own = own[np.random.default_rng(VIEW_SEED).permutation(len(own))]
    missing = n_rows - len(own)
    has_views = missing > 0 and run.splits.kind == "image" and run.splits.augmentation
    if not has_views:
        return np.ascontiguousarray(own[:n_rows])
    return np.concatenate([own, augmented_rows(run, missing, progress=progress)])


def augmented_rows(
    run: TrainedRun, n_rows: int, *, progress: bool = True
) -> Float[np.ndarray, "N D"]:
    """Return embeddings of randomly changed training images, kept in the run's folder."""
    inputs, names = run.splits.train.inputs, run.splits.augmentation
    pad = max(1, round(VIEW_PAD_SHARE * inputs.shape[-1]))
    key = embedding_key(run.embedder, inputs, view=f"augmented {n_rows} {names} {pad} {VIEW_SEED}")
    generator = torch.Generator().manual_seed(VIEW_SEED)

    def changed(images: Tensor) -> Tensor:
        return augment_batch(images.cpu(), names, generator, pad=pad).to(images.device)

    def compute() -> dict[str, np.ndarray]:
        cycled = inputs[np.arange(n_rows) % len(inputs)]
        device = choose_device(run.config.training.device)
        return {"rows": embed(run.embedder, cycled, device=device, progress=progress, view=changed)}

    return EmbeddingCache(run.folder / "views").get(key, compute)["rows"]


def index_scaling(
    rows: Float[np.ndarray, "N D"],
    queries: Float[np.ndarray, "B D"],
    sizes: Sequence[int],
    *,
    k: int = 10,
    repeats: int = 7,
    progress: bool = True,
) -> pd.DataFrame:
    """Return build time, search time, memory and recall of every contender at every size.

    All sizes are built before any is searched, and both are measured in turns over sizes and
    contenders: a slow spell of the machine does not fall on one size.
    """
    pairs = [(name, n) for n in sizes for name in CONTENDERS]
    built: dict[tuple[str, int], Searcher] = {}

    def build(pair: tuple[str, int]) -> None:
        built[pair] = CONTENDERS[pair[0]].build(rows[: pair[1]])

    options = {"repeats": repeats, "budget": BUDGET, "progress": progress}
    builds = time_in_turns({p: partial(build, p) for p in pairs}, desc="building", **options)
    asked = {p: partial(built[p].search, queries, k) for p in pairs}
    searches = time_in_turns(asked, desc="searching", **options)
    table = []
    for name, n in pairs:
        searcher = built[name, n]
        measured = {"search_ms": [1000 * t / len(queries) for t in searches[name, n]]}
        if name != ROOF:
            nearest, found = built[FLAT, n].search(queries, k), searcher.search(queries, k)
            measured["build_seconds"] = builds[name, n]
            measured["recall"] = [recall(queries, rows[:n], found, nearest)]
        if hasattr(searcher, "nbytes"):
            measured["memory_mb"] = [searcher.nbytes / 1e6]
        named = {"index": name, "settings": searcher.settings, "rows": n}
        table += [named | {"metric": m} | _described(values) for m, values in measured.items()]
    return pd.DataFrame(table)


def _described(values: Sequence[float]) -> dict[str, float]:
    value, low, high, n = median_interval(values)
    return {"value": value, "low": low, "high": high, "n": n}


def scaling_exponents(scaling: pd.DataFrame) -> pd.DataFrame:
    """Return how search times, and build times of what is built, grow: time ~ rows ** exponent."""
    is_build = (scaling["metric"] == "build_seconds") & scaling["index"].isin(
        of_kind("approximate")
    )
    timed = scaling[is_build | (scaling["metric"] == "search_ms")]
    table = []
    for (name, metric), group in timed.groupby(["index", "metric"], sort=False):
        if group["rows"].nunique() > 1:
            fit = fit_exponent(group["rows"].tolist(), group["value"].tolist())
            table.append({"index": name, "metric": metric, **fit._asdict()})
    return pd.DataFrame(table, columns=["index", "metric", "exponent", "low", "high", "n"])


# ---- Stages of a prediction: what embedding, search, vote and attention take per query.

SINGLE_QUERIES = 20  # queries that are asked one by one
STAGES = ("embedding", "search", "vote", "attention")
TIMED = ("embedding", "search", "uniform", "attention")

# Batch to what was timed to ms a query in every round.
StageTimes = dict[str, dict[str, list[float]]]


def stage_times(
    run: TrainedRun, k: int, *, n_queries: int = 1_000, repeats: int = 7, progress: bool = True
) -> StageTimes:
    """Return ms a query of embedding, search and both votes: batch to stage to rounds."""
    k, n = min(k, len(run.bank)), min(n_queries, len(run.rows("test")))
    _ = run.bank.view.histograms, run.bank.view.prototypes  # made once per memory, not per query
    batches = {"all at once": [slice(0, n)]}
    batches["one by one"] = [slice(place, place + 1) for place in range(min(SINGLE_QUERIES, n))]
    times = {}
    for batch, parts in batches.items():
        asked = sum(part.stop - part.start for part in parts)
        actions = {name: partial(_each, act, parts) for name, act in _stages(run, k, n).items()}
        options = {"repeats": repeats, "desc": f"stages, {batch}", "progress": progress}
        found = time_in_turns(actions, **options)
        times[batch] = {name: [1000 * t / asked for t in each] for name, each in found.items()}
    return times


def _each(action: Callable[[slice], object], parts: Sequence[slice]) -> None:
    for part in parts:
        action(part)


def _stages(run: TrainedRun, k: int, n_queries: int) -> dict[str, Callable[[slice], object]]:
    """Return what is done with some of the queries, stage by stage."""
    device = choose_device(run.config.training.device)
    inputs, rows = run.splits.test.inputs[:n_queries], run.rows("test")[:n_queries]
    found, attention, uniform = run.bank.search(rows, k), run.method(k), Uniform(k)

    def vote(method: Uniform | Attention, part: slice) -> np.ndarray:
        fresh: Neighbours = found.of_queries(part)  # labels and trust are looked up anew
        return predict(method, fresh)

    return {
        "embedding": lambda part: embed(run.embedder, inputs[part], device=device, progress=False),
        "search": lambda part: run.bank.search(rows[part], k),
        "uniform": partial(vote, uniform),
        "attention": partial(vote, attention),
    }


def stage_table(times: StageTimes) -> pd.DataFrame:
    """Return ms a query of every stage; "attention" is what it takes beyond a uniform vote."""
    table = []
    for batch, stages in times.items():
        extra = np.subtract(stages["attention"], stages["uniform"])  # round by round
        each = stages | {"vote": stages["uniform"], "attention": extra}
        for method in ("uniform", "attention"):
            for stage in STAGES if method == "attention" else STAGES[:-1]:
                value, low, high, n = median_interval(each[stage])
                row = {"batch": batch, "method": method, "stage": stage, "value": value}
                table.append(row | {"low": low, "high": high, "n": n})
    return pd.DataFrame(table)


def overheads(times: StageTimes) -> pd.DataFrame:
    """Return the attention's cost over the uniform vote's, round by round: difference and ratio."""
    table = []
    for batch, stages in times.items():
        embedding, search, uniform, attention = (np.array(stages[name]) for name in TIMED)
        before = {"search and vote": search, "embedding, search and vote": embedding + search}
        for scope, shared in before.items():
            ratio, low, high, n = median_interval((shared + attention) / (shared + uniform))
            extra = float(np.median(attention - uniform))
            row = {"batch": batch, "scope": scope, "extra_ms": extra, "ratio": ratio}
            table.append(row | {"low": low, "high": high, "n": n})
    return pd.DataFrame(table)


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
        loads: Processes that wanted a core, before and after.
        cores: Cores there are.
    """

    scaling: pd.DataFrame
    exponents: pd.DataFrame
    stages: pd.DataFrame
    overhead: pd.DataFrame
    facts: pd.DataFrame
    n_real: int
    loads: tuple[float, float]
    cores: int


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
        progress: Show progress bars.
    """
    load = _load()
    rows = many_rows(run, max(sizes), progress=progress)
    possible = sorted({min(size, len(rows)) for size in sizes})
    queries = run.rows("test")[:n_queries]
    scaling = index_scaling(rows, queries, possible, k=k, repeats=repeats, progress=progress)
    times = stage_times(run, k_eval, n_queries=n_queries, repeats=repeats, progress=progress)
    loads = (load, _load())
    return Efficiency(
        scaling=scaling,
        exponents=scaling_exponents(scaling),
        stages=stage_table(times),
        overhead=overheads(times),
        facts=conditions(run, len(queries), max(sizes), len(rows), loads),
        n_real=len(run.rows("train")),
        loads=loads,
        cores=hardware()["cores"],
    )


def _load() -> float:
    """Return how many processes want a core; NaN where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def conditions(
    run: TrainedRun, n_queries: int, asked: int, had: int, loads: tuple[float, float]
) -> pd.DataFrame:
    """Return what the measurement was made with, one fact a row."""
    machine, own = hardware(), len(run.rows("train"))
    views = f"{had - own:,} embedded augmented views" if had > own else "no views"
    rows = f"{min(own, had):,} of the run, {views}"
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
    table = study.scaling
    is_trivial = table["metric"].isin(["build_seconds", "recall"])
    return table[~is_trivial | table["index"].isin(of_kind("approximate"))]


def scaling_table(study: Efficiency) -> pd.DataFrame:
    """Return one row per index and size, with medians of all measures, for a printed table."""
    index = ["rows", "index", "settings"]
    order = pd.MultiIndex.from_frame(study.scaling[index].drop_duplicates())
    wide = study.scaling.pivot(index=index, columns="metric", values="value").reindex(order)
    titles = {
        "build_seconds": "build (s)",
        "search_ms": "search (ms a query)",
        "memory_mb": "memory (MB)",
        "recall": "recall",
    }
    wide = wide.reindex(columns=list(titles)).rename(columns=titles)
    return wide.reset_index().rename_axis(columns=None)


def verdict(
    study: Efficiency, *, limit_ms: float = PUBLISHED_ATTENTION_MS, good_recall: float = 0.95
) -> str:
    """Return, in Markdown, what was found, with the published claims decided by the figures.

    Args:
        study: What was measured.
        limit_ms: Published bound of the attention's overhead per query.
        good_recall: Recall from which an approximate index counts as usable.
    """
    lines = [*_overhead_lines(study, limit_ms), *_search_lines(study, good_recall)]
    lines += [_growth_line(study)]
    note = "Medians of interleaved rounds on the machine named above; compare ratios, not times."
    if max(study.loads) > study.cores:
        note += f" It was busy (load {max(study.loads):.1f} on {study.cores} cores)."
    return "\n".join([*(f"- {line}" for line in lines), "", note])


def _overhead_lines(study: Efficiency, limit_ms: float) -> list[str]:
    lines = []
    for batch, group in study.overhead.groupby("batch", sort=False):
        extra = group["extra_ms"].iloc[0]
        held = "under" if extra < limit_ms else "not under"
        ratios = "; ".join(
            f"{scope} take {ratio:.2f} times as long as with a uniform vote{_limits(low, high)}"
            for scope, ratio, low, high in group[["scope", "ratio", "low", "high"]].to_numpy()
        )
        lines.append(
            f"Queries {batch}: attention adds {extra:.3f} ms a query ({held} the published "
            f"{limit_ms:g} ms); {ratios}."
        )
    return lines


def _limits(low: float, high: float) -> str:
    return f" ({low:.2f} to {high:.2f})" if np.isfinite(low) else ""


def _search_lines(study: Efficiency, good_recall: float) -> list[str]:
    at = study.scaling.pivot(index=["rows", "index"], columns="metric", values="value")
    n = int(at.index.get_level_values("rows").max())
    times = at.loc[n, "search_ms"]
    best = times[of_kind("exact")].idxmin()
    peers = [f"{times[name] / times[best]:.1f} times as long" for name in of_kind("peer")]
    taken = ", ".join(f"{name} {each}" for name, each in zip(of_kind("peer"), peers, strict=True))
    line = (
        f"Exact search of {n:,} rows: {best} takes {times[best]:.3f} ms a query, "
        f"{times[best] / times[ROOF]:.1f} times the bare matrix product; {taken}."
    )
    return [line, *(_approximate_line(at, name, good_recall) for name in of_kind("approximate"))]


def _approximate_line(at: pd.DataFrame, name: str, good_recall: float) -> str:
    """Say from how many rows on an approximate index pays, and after how many queries."""
    own, flat = at.xs(name, level="index"), at.xs(FLAT, level="index")
    is_good = (own["search_ms"] < flat["search_ms"]) & (own["recall"] >= good_recall)
    sizes = own.index[is_good[::-1].cummin()[::-1]]  # from here on every size is good
    since = (
        f"faster than {FLAT} at a recall of {good_recall:g} from {sizes.min():,} rows on"
        if len(sizes)
        else f"not both faster than {FLAT} and at a recall of {good_recall:g} at the largest size"
    )
    here, there = own.iloc[-1], flat.iloc[-1]
    gain = (there["search_ms"] - here["search_ms"]) / 1000
    extra = here["build_seconds"] - there["build_seconds"]
    pays = f"pays after {extra / gain:,.0f} queries" if gain > 0 else "never pays"
    return (
        f"{name}: {since}. At {own.index[-1]:,} rows it takes "
        f"{here['search_ms'] / there['search_ms']:.2f} of the time at a recall of "
        f"{here['recall']:.3f}, and its build {pays}."
    )


def _growth_line(study: Efficiency) -> str:
    searched = study.exponents[study.exponents["metric"] == "search_ms"]
    if searched.empty:
        return "Only one size was measured: nothing can be said about growth."
    each = ", ".join(
        f"{row['index']} {row['exponent']:.2f}{_limits(row['low'], row['high'])}"
        for row in searched.to_dict("records")
    )
    return f"Search time grows with the rows to the power of: {each} (95 % intervals of the fit)."
