"""Index: a name and rows become something that finds the most similar rows.

Whatever an index measures inside, what comes out is cosine similarity, larger = closer. (An inner
product index returns similarities, an L2 index squared distances; mixing them up inverts a vote.)

What ``auto`` takes, and why (``python -m benchmarks million`` measures all of them):

- exact up to 100 000 rows: always right, nothing to build, nothing to tune. A graph wins its build
  back only after many queries to a bank that does not change.
- hnsw up to 500 000 rows: the fastest search. But it takes the longest to build, and it holds a
  second copy of the rows and their links.
- ivfpq above: slower than hnsw, taken for its quick build and its half a byte a number. Candidates
  are ranked by their true cosine, read from the bank's own rows.
- disk where the rows are a memory-mapped file that would fill most of the free memory: the lists
  are a file too, and of the rows only the candidates are read.

Where one takes over from the other is a judgement of how long a build may take. How deep to search
is measured (``attnknn.core.search``).

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

import copy
import math
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.checks import check_count, check_one_of
from attnknn.core.kernels import faiss, kernel_fault

AUTO_EXACT_ROWS = 100_000
AUTO_HNSW_ROWS = 500_000
AUTO_MEMORY_SHARE = 0.5  # of the free memory that mapped rows may take before lists go to disk
QUERY_TILE, ROW_TILE = 256, 65_536  # one tile of similarities is 64 MB
RERANK_BLOCK = 256  # queries whose candidate rows are gathered at once
K_FACTORS = (1, 2, 4, 8, 16)
HNSW_LINKS, HNSW_BUILD_DEPTH, HNSW_SEARCH_DEPTH = 32, 200, 64
EF_LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NPROBE_LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
IVF_START = {"nprobe": 64, "k_factor": 8}
CELLS_PER_ROOT = 4  # inverted lists: about 4 * sqrt(N)
TRAIN_ROWS_PER_CELL, TRAIN_ROUNDS = 64, 10
MIN_ROWS_PER_CENTRE = 39  # below that, faiss warns that clusters may stay empty
ADD_BLOCK = 131_072  # rows that are compressed at once

Found = tuple[Float[np.ndarray, "B K"], Int[np.ndarray, "B K"]]


class Index:
    """Something that finds the most similar rows.

    Attributes:
        name: What was built, also where ``auto`` was asked for.
        exact_scores: Whether the scores are the cosines of the rows as they were added. An index
            may compress or rotate its rows; its scores have to be computed anew, from the rows.
        knobs: Settings that trade recall for speed, each with its values, cheapest first.
        settings: The values in force.
        collection: Name of what outlives this process at a server; None for nothing.
    """

    name: str
    exact_scores: bool = True
    collection: str | None = None

    def __init__(self) -> None:
        self.knobs: dict[str, tuple[int, ...]] = {}
        self.settings: dict[str, int] = {}

    @property
    def k_factor(self) -> int:
        """Candidates fetched per neighbour asked for; the bank ranks them by their true cosine."""
        return self.settings.get("k_factor", 1)

    def extend(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Take in the rows behind those that are there already; ``rows`` are all of the bank's."""
        raise NotImplementedError

    def grown(self, rows: Float[np.ndarray, "N D"]) -> "Index":
        """Return an index over more rows; this one, which others may search, stays as it is."""
        twin = copy.copy(self)
        twin.settings = dict(self.settings)
        twin.extend(rows)
        return twin

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Found:
        """Return cosines, largest first, and row ids; id -1 where fewer than k were found."""
        raise NotImplementedError

    def tune(self, settings: Mapping[str, int]) -> None:
        """Change settings; names that this index does not have are refused."""
        for name, value in settings.items():
            check_one_of("index_settings", name, tuple(self.knobs))
            self._apply(name, check_count(name, value))
            self.settings[name] = int(value)

    def _apply(self, name: str, value: int) -> None:
        """Pass a setting on; ``k_factor`` is only read by the bank."""

    def close(self) -> None:
        """Give back what does not go away by itself."""

    def share(self) -> None:
        """Take note that a second bank searches this index."""

    def discard(self) -> str | None:
        """Make room for the index of fewer rows; return the collection that it is to take over."""


class FlatIndex(Index):
    """Exact search by faiss."""

    def __init__(self, metric: Literal["ip", "l2"] = "ip") -> None:
        super().__init__()
        self.name = f"flat_{metric}"
        self.metric = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT

    def extend(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Look at these rows from now on."""
        self.rows = rows

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Found:
        """Return cosines, largest first, and row ids."""
        scores, ids = faiss.knn(queries, self.rows, k, metric=self.metric)
        return cosines_from(scores, self.metric), ids


class MatmulIndex(Index):
    """Exact search by tiled matrix product and top-k, on the device where the rows are."""

    name = "matmul"

    def __init__(self, *, device: str = "cpu") -> None:
        super().__init__()
        self.device = device

    def extend(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Look at these rows from now on."""
        with warnings.catch_warnings():  # rows mapped read-only are never written to
            warnings.filterwarnings("ignore", message=".*not writable")
            self.rows = torch.from_numpy(rows).to(self.device)

    def search(self, queries: Float[np.ndarray, "B D"], k: int) -> Found:
        """Return cosines, largest first, and row ids."""
        scores, ids = search_by_matmul(torch.as_tensor(queries).to(self.rows), self.rows, k)
        return scores.cpu().numpy(), ids.cpu().numpy()


def exact_index() -> Index:
    """Return the fastest exact index of this process."""
    fault = kernel_fault()
    if fault is None:
        return FlatIndex()
    _say_once(fault)
    return MatmulIndex()


@cache
def _say_once(fault: str) -> None:
    warnings.warn(
        f"{fault}: exact searches use torch; import attnknn first to get the full speed",
        RuntimeWarning,
        stacklevel=2,
    )


def cosines_from(scores: Float[np.ndarray, "B K"], metric: int) -> Float[np.ndarray, "B K"]:
    """Return cosines of unit vectors from faiss's scores: |a - b|^2 = 2 - 2 a.b."""
    return 1 - scores / 2 if metric == faiss.METRIC_L2 else scores


@torch.no_grad()
def search_by_matmul(
    queries: Float[Tensor, "B D"], rows: Float[Tensor, "N D"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the k largest dot products of each query and their row ids, tile by tile."""
    # Both the answers and the tile are there from the start: small answers between large tiles
    # that come and go would leave holes in the memory, and let it grow with the queries.
    scores = queries.new_empty(len(queries), k)
    ids = torch.empty(len(queries), k, dtype=torch.int64, device=queries.device)
    tile = queries.new_empty(min(QUERY_TILE, len(queries)) * min(ROW_TILE, len(rows)))
    for start in range(0, len(queries), QUERY_TILE):
        part = slice(start, start + QUERY_TILE)
        scores[part], ids[part] = _search_block(queries[part], rows, k, tile)
    return scores, ids


def _search_block(
    queries: Float[Tensor, "B D"], rows: Float[Tensor, "N D"], k: int, room: Float[Tensor, " M"]
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the best of each tile of rows, and of those the k best; ``room`` holds a tile."""
    scores, ids = [], []
    for start in range(0, len(rows), ROW_TILE):
        keys = rows[start : start + ROW_TILE]
        tile = room[: len(queries) * len(keys)].view(len(queries), len(keys))  # (B, tile)
        torch.mm(queries, keys.T, out=tile)
        best = tile.topk(min(k, tile.shape[1]), dim=1)
        scores.append(best.values)
        ids.append(best.indices + start)
    if len(scores) == 1:
        return scores[0], ids[0]
    best = torch.cat(scores, dim=1).topk(k, dim=1)
    return best.values, torch.cat(ids, dim=1).gather(1, best.indices)


def cosines_of_ids(
    queries: Float[Tensor, "B D"], rows: Float[Tensor, "N D"], ids: Int[Tensor, "B M"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the k largest true cosines among rows already found, and their ids in that order.

    Args:
        queries: Unit-length queries.
        rows: All rows.
        ids: Candidates of each query; -1 stands for none, and comes last.
        k: How many to keep.
    """
    blocks = zip(queries.split(RERANK_BLOCK), ids.split(RERANK_BLOCK), strict=True)
    ranked = [_ranked(query, rows, near, k) for query, near in blocks]
    scores, best = zip(*ranked, strict=True)
    return torch.cat(scores), torch.cat(best)


def _ranked(
    queries: Float[Tensor, "B D"], rows: Float[Tensor, "N D"], ids: Int[Tensor, "B M"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    keys = rows[ids.clamp(min=0)]  # (B, M, D)
    scores = torch.bmm(keys, queries[..., None]).squeeze(2).masked_fill(ids < 0, -torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]  # (B, K)
    return scores.gather(1, order), ids.gather(1, order)


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
        self._train(rows)
        for start in range(self.index.ntotal, len(rows), ADD_BLOCK):
            self.index.add(rows[start : start + ADD_BLOCK])

    def grown(self, rows: Float[np.ndarray, "N D"]) -> "FaissIndex":
        """Return a copy over more rows: faiss adds in place, and others may be searching."""
        twin = FaissIndex(faiss.clone_index(self.index), self.name, exact_scores=self.exact_scores)
        twin.tune(self.settings)
        twin.extend(rows)
        return twin

    def _train(self, rows: Float[np.ndarray, "N D"]) -> None:
        if self.index.is_trained:
            return
        n_lists = 0 if self.lists is None else self.lists.nlist
        wanted = TRAIN_ROWS_PER_CELL * max(n_lists, 1024)
        if len(rows) > wanted:
            rows = rows[np.sort(np.random.default_rng(0).choice(len(rows), wanted, replace=False))]
        self.index.train(rows)

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
        lists: Inverted lists in memory, empty.
        folder: Where the file is kept while the index is in use; None takes a temporary folder.
    """

    def __init__(self, lists: faiss.IndexIVF, folder: Path | None = None) -> None:
        super().__init__(lists, "disk", exact_scores=False)
        self.folder, self.file = folder, None

    def extend(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Add the new rows to the file, which is made when the first ones come."""
        if self.file is None:
            self._train(rows)
            self._empty = faiss.clone_index(self.index)  # what a file holds cannot be cloned
            self._open_file()
        super().extend(rows)

    def grown(self, rows: Float[np.ndarray, "N D"]) -> "DiskIndex":
        """Return an index with a file of its own, its lists as they were learned here."""
        twin = DiskIndex(faiss.clone_index(self._empty), self.folder)
        twin.tune(self.settings)
        twin.extend(rows)
        return twin

    def _open_file(self) -> None:
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="attnknn-lists-", dir=self.folder))
        self._cleanup = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        sizes = self.index.nlist, self.index.code_size
        self.file = faiss.OnDiskInvertedLists(*sizes, str(folder / "lists.ivf"))
        self.index.replace_invlists(self.file, False)

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
    return _at_start(FaissIndex(lists, "ivfpq", exact_scores=False))


def disk_index(n_rows: int, dim: int, folder: Path | None = None) -> DiskIndex:
    """Return empty inverted lists that will be a file."""
    # Scalar codes of as many bits: the quick kind of product codes is not made for disk.
    return _at_start(DiskIndex(_empty_lists(n_rows, dim, "SQ4"), folder))


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


def _at_start(index: FaissIndex) -> Any:
    """Return the index at its start settings, as far as there are lists to probe."""
    index.tune(IVF_START | {"nprobe": min(IVF_START["nprobe"], index.lists.nlist)})
    return index


def auto_index(n_rows: int, row_bytes: int, *, on_disk: bool = False) -> str:
    """Return what ``auto`` stands for.

    Args:
        n_rows: Rows of the bank.
        row_bytes: Bytes of all rows together.
        on_disk: Whether the rows are a memory-mapped file.
    """
    if on_disk and row_bytes > AUTO_MEMORY_SHARE * free_memory():
        return "disk"
    if n_rows <= AUTO_EXACT_ROWS:
        return "exact"
    return "hnsw" if n_rows <= AUTO_HNSW_ROWS else "ivfpq"


def free_memory() -> float:
    """Return the bytes that can be had without swapping; infinite where nobody knows."""
    facts = Path("/proc/meminfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


def build_index(
    name: str,
    rows: Float[np.ndarray, "N D"],
    *,
    settings: Mapping[str, int] | None = None,
    on_disk: bool = False,
    folder: Path | None = None,
    uri: str | None = None,
    collection: str | None = None,
) -> Index:
    """Return an index over ``rows``.

    Args:
        name: ``auto`` (by size, see the head of this file), ``flat_ip``, ``flat_l2``, ``hnsw``,
            ``ivfpq``, ``disk``, ``matmul``, ``milvus``, or a FAISS factory string such as
            ``IVF256,PQ32``.
        rows: Unit-length rows; exact indexes keep a reference to them instead of a copy.
        settings: Values of the index's knobs, such as ``{"efSearch": 128}``; ``auto`` takes those
            that what it builds has.
        on_disk: Whether the rows are a memory-mapped file.
        folder: Where a ``disk`` index keeps its lists; None takes a temporary folder.
        uri: Server, or file of the embedded version, of a ``milvus`` index.
        collection: Collection of a ``milvus`` index that outlives this process.
    """
    is_auto = name == "auto"
    if is_auto:
        name = auto_index(len(rows), rows.nbytes, on_disk=on_disk)
    if name == "milvus":
        from attnknn.core.milvus import MilvusIndex

        index: Index = MilvusIndex(rows, uri=uri, collection=collection)
        index.extend(rows)
    else:
        index = _local_index(name, rows, folder)
    settings = settings or {}
    if is_auto:  # what it builds for another number of rows may have other knobs
        settings = {knob: value for knob, value in settings.items() if knob in index.knobs}
    index.tune(settings)
    return index


def _local_index(name: str, rows: Float[np.ndarray, "N D"], folder: Path | None) -> Index:
    """Return a filled index; rows that a compressed index cannot be trained on are refused."""
    n_rows, dim = rows.shape
    makers = {
        "exact": exact_index,
        "flat_ip": FlatIndex,
        "flat_l2": lambda: FlatIndex("l2"),
        "matmul": MatmulIndex,
        "hnsw": lambda: hnsw_index(dim),
        "ivfpq": lambda: ivfpq_index(n_rows, dim),
        "disk": lambda: disk_index(n_rows, dim, folder),
    }
    try:
        index = makers[name]() if name in makers else factory_index(name, dim)
        index.extend(rows)
    except RuntimeError as error:
        # faiss begins with the C++ signature; the reason stands behind the source line.
        reason = " ".join(str(error).split(": ", 2)[-1].split())
        raise ValueError(
            "index must be auto, flat_ip, flat_l2, hnsw, ivfpq, disk, matmul, milvus or a FAISS "
            f"factory string that suits {n_rows} rows of width {dim}, got index={name!r} ({reason})"
        ) from None
    return index
