"""Approximate search by faiss: a graph (HNSW), inverted lists of compressed rows, factory strings.

Its depth is tuned by measuring: the cheapest settings that keep the asked recall, the share of the
k true nearest rows that a search returns, over held-out queries.

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

import math
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from attnknn.checks import check_range
from attnknn.core.exact import Found, Index, cosines_from
from attnknn.core.kernels import faiss

K_FACTORS = (1, 2, 4, 8, 16)
HNSW_LINKS, HNSW_BUILD_DEPTH, HNSW_SEARCH_DEPTH = 32, 200, 64
EF_LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NPROBE_LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
IVF_START = {"nprobe": 64, "k_factor": 8}
CELLS_PER_ROOT = 4  # inverted lists: about 4 * sqrt(N)
TRAIN_ROWS_PER_CELL, TRAIN_ROUNDS = 64, 10
MIN_ROWS_PER_CENTRE = 39  # below that, faiss warns that clusters may stay empty
ADD_BLOCK = 131_072  # rows that are compressed at once


class FaissIndex(Index):
    """Any faiss index over unit rows.

    Args:
        index: The empty faiss index.
        name: What it is called in messages.
        exact_scores: Whether its scores are cosines of the very rows.
    """

    def __init__(self, index: faiss.Index, name: str, *, exact_scores: bool = True) -> None:
        super().__init__()
        self.index, self.name, self.exact_scores = index, name, exact_scores
        self.lists, self.graph = inverted_lists(index), _graph(index)
        if self.graph is not None:
            self.knobs["efSearch"] = EF_LADDER
            self.settings["efSearch"] = self.graph.hnsw.efSearch
        if self.lists is not None:
            self.knobs["nprobe"] = tuple(p for p in NPROBE_LADDER if p <= self.lists.nlist)
            self.settings["nprobe"] = self.lists.nprobe
        if not exact_scores:
            self.knobs["k_factor"] = K_FACTORS
            self.settings["k_factor"] = 1

    def extend(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Add the new rows; a quantising index is trained on a sample of the first ones it gets."""
        if not self.index.is_trained:
            self.index.train(self._sample(rows))
        for start in range(self.index.ntotal, len(rows), ADD_BLOCK):
            self.index.add(rows[start : start + ADD_BLOCK])

    def _sample(self, rows: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "M D"]:
        n_lists = 0 if self.lists is None else self.lists.nlist
        wanted = TRAIN_ROWS_PER_CELL * max(n_lists, 1024)
        if len(rows) <= wanted:
            return rows
        return rows[np.sort(np.random.default_rng(0).choice(len(rows), wanted, replace=False))]

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Found:
        """Return cosines, largest first, and row ids; id -1 where fewer than k were found."""
        scores, ids = self.index.search(queries, k)
        return cosines_from(scores, self.index.metric_type), ids

    def _apply(self, name: str, value: int) -> None:
        if name == "efSearch":
            self.graph.hnsw.efSearch = value
        elif name == "nprobe":
            self.lists.nprobe = value


class DiskIndex(FaissIndex):
    """Inverted lists of compressed rows in a file, read through the page cache.

    Args:
        n_rows: Rows it is made for; decides the number of lists.
        dim: Embedding width.
        folder: Where the lists are kept while the index is in use; None takes a temporary folder.
    """

    def __init__(self, n_rows: int, dim: int, folder: Path | None = None) -> None:
        # Scalar codes of as many bits: the quick kind of product codes is not made for disk.
        super().__init__(_empty_lists(n_rows, dim, "SQ4"), "disk", exact_scores=False)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        lists = Path(tempfile.mkdtemp(prefix="attnknn-lists-", dir=folder))
        self._cleanup = weakref.finalize(self, shutil.rmtree, lists, ignore_errors=True)
        file = str(lists / "lists.ivf")
        self.file = faiss.OnDiskInvertedLists(self.index.nlist, self.index.code_size, file)
        self.index.replace_invlists(self.file, False)
        self.tune(_affordable(self))

    def close(self) -> None:
        """Delete the file of lists."""
        self._cleanup()


def hnsw_index(dim: int) -> FaissIndex:
    """Return an empty graph index."""
    index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_BUILD_DEPTH
    index.hnsw.efSearch = HNSW_SEARCH_DEPTH
    return FaissIndex(index, "hnsw")


def ivfpq_index(n_rows: int, dim: int) -> FaissIndex:
    """Return empty inverted lists of compressed rows, whose finds are ranked by true cosine."""
    # A code of 4 bits for every number: at 2 bits, real embeddings lose too many neighbours.
    lists = _empty_lists(n_rows, dim, f"PQ{dim}x4fs")
    index = FaissIndex(lists, "ivfpq", exact_scores=False)
    index.tune(_affordable(index))
    return index


def factory_index(recipe: str, dim: int) -> FaissIndex:
    """Return the empty index of a faiss factory string."""
    made = faiss.index_factory(dim, recipe, faiss.METRIC_INNER_PRODUCT)
    return FaissIndex(made, recipe, exact_scores=False)


def n_cells(n_rows: int) -> int:
    """Return the number of inverted lists: a power of two near 4 * sqrt(N).

    A search compares the query with every list's centre and then with the rows of the lists it
    probes; both shares are of one size when the lists number a few sqrt(N).
    """
    wanted = 2 ** round(math.log2(CELLS_PER_ROOT * math.sqrt(n_rows)))
    return max(1, min(wanted, n_rows // MIN_ROWS_PER_CENTRE))


def inverted_lists(index: faiss.Index) -> faiss.IndexIVF | None:
    """Return the part of a faiss index that has inverted lists, or None."""
    return faiss.try_extract_index_ivf(index)


def _graph(index: faiss.Index) -> faiss.IndexHNSW | None:
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexPreTransform | faiss.IndexIDMap):
        index = faiss.downcast_index(index.index)
    return index if isinstance(index, faiss.IndexHNSW) else None


def _empty_lists(n_rows: int, dim: int, code: str) -> faiss.IndexIVF:
    recipe = f"IVF{n_cells(n_rows)},{code}"
    index = faiss.index_factory(dim, recipe, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter = TRAIN_ROUNDS
    index.cp.max_points_per_centroid = TRAIN_ROWS_PER_CELL
    if hasattr(index, "pq"):
        index.pq.cp.min_points_per_centroid = 1  # few rows are no reason to write to the terminal
    return index


def _affordable(index: FaissIndex) -> dict[str, int]:
    """Return the start settings, as far as there are lists to probe."""
    return IVF_START | {"nprobe": min(IVF_START["nprobe"], index.lists.nlist)}


# ---- Tuning.

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 2  # each setting is timed twice; the shorter time counts
Z_95 = 1.645  # one-sided: in 95 of 100 samples the true recall is above the lower bound
NO_GAIN = 1e-4  # a deeper search that finds less than this more has come to its limit


def recall_of(
    ids: Int[np.ndarray, "B M"], true_ids: Int[np.ndarray, "B K"]
) -> Float[np.ndarray, " B"]:
    """Return the share of each query's true neighbours that was found."""
    pairs = zip(ids, true_ids, strict=True)
    return np.array([np.isin(true, found).mean() for found, true in pairs], dtype=np.float64)


def tune_index(
    index: Index,
    search: Callable[[], Int[np.ndarray, "B K"]],
    true_ids: Int[np.ndarray, "B K"],
    *,
    recall: float,
) -> "pd.DataFrame":
    """Leave ``index`` at its fastest settings that keep the recall; return all that was measured.

    Args:
        index: What is tuned.
        search: Searches all queries at the settings in force and returns the ids found.
        true_ids: What an exact search finds.
        recall: The lower 95 % bound of the mean recall must reach this.

    Returns:
        One row a setting tried: the settings, ``recall``, ``recall_low`` (the lower bound),
        ``queries_per_second``, ``reached`` and ``chosen``. When no setting reaches the recall, the
        one that came closest is chosen, and ``reached`` says so.
    """
    import pandas as pd

    check_range("recall", recall, low=0, high=1, low_open=True)
    table = pd.DataFrame(_measure_ladders(index, search, true_ids, recall))
    good = table[table["reached"]]
    best = good["queries_per_second"].idxmax() if len(good) else table["recall_low"].idxmax()
    index.tune({name: int(table.loc[best, name]) for name in index.knobs})
    return table.assign(chosen=table.index == best)


def _measure_ladders(
    index: Index,
    search: Callable[[], Int[np.ndarray, "B K"]],
    true_ids: Int[np.ndarray, "B K"],
    recall: float,
) -> list[dict[str, Any]]:
    """Climb the first knob for every value of the others, until the recall is there."""
    first, *others = index.knobs or {"": ()}
    rows: list[dict[str, Any]] = []
    for fixed in product(*(index.knobs[name] for name in others)):
        before = -1.0
        for value in index.knobs.get(first, (0,)):
            settings = dict(zip([first, *others], [value, *fixed], strict=True))
            index.tune(settings if first else {})
            rows.append(_measured(settings if first else {}, search, true_ids, recall))
            now = rows[-1]["recall"]  # 0 where the search is too shallow for k rows: go on
            if rows[-1]["reached"] or 0 < now < before + NO_GAIN:
                break
            before = now
    return rows


def _measured(
    settings: dict[str, int],
    search: Callable[[], Int[np.ndarray, "B K"]],
    true_ids: Int[np.ndarray, "B K"],
    recall: float,
) -> dict[str, Any]:
    """Return recall and speed of one setting."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        ids = search()
        seconds.append(time.perf_counter() - start)
    each = recall_of(ids, true_ids)
    error = each.std() / math.sqrt(len(each))
    low = float(each.mean() - Z_95 * error)
    return {
        **settings,
        "recall": float(each.mean()),
        "recall_low": low,
        "queries_per_second": len(each) / min(seconds),
        "reached": low >= recall,
    }
