"""Scaling: what finding the k nearest rows takes as the memory grows, for every contender.

Axes: B queries, N memory rows, D embedding width.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attnknn.augment import augment_batch
from attnknn.embed import EmbeddingCache, embed, embedding_key
from attnknn.studies.contenders import CONTENDERS, FLAT, ROOF, Searcher, of_kind, recall
from attnknn.studies.timing import fit_exponent, median_interval, time_in_turns
from attnknn.trained import TrainedRun, choose_device
from attnknn.views import VIEW_PAD_SHARE, VIEW_SEED

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
