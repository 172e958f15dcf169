"""Exact search: every query against every row, block by block, without a copy of the rows.

Whatever an index measures inside, what comes out is cosine similarity, larger = closer. (An inner
product index returns similarities, an L2 index squared distances; mixing them up inverts a vote.)
faiss multiplies blocks of 4 096 queries by 1 024 rows and keeps a heap of the best, so it needs the
same few megabytes for any number of queries and rows; rows may be a memory-mapped file.

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.checks import check_count, check_one_of
from attnknn.core.kernels import faiss, kernel_fault

Found = tuple[Float[np.ndarray, "B K"], Int[np.ndarray, "B K"]]


class Index:
    """Something that finds the most similar rows.

    Attributes:
        name: What was built, also where ``auto`` was asked for.
        exact_scores: Whether the scores are the cosines of the rows as they were added. An index
            may compress or rotate its rows; its scores have to be computed anew, from the rows.
        knobs: Settings that trade recall for speed, each with its values, cheapest first.
        settings: The values in force.
    """

    name: str
    exact_scores: bool = True

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

    def discard(self) -> None:
        """Make room for an index that is built in the place of this one."""
        self.close()


QUERY_TILE, ROW_TILE = 256, 65_536  # one tile of similarities is 64 MB
RERANK_BLOCK = 256  # queries whose candidate rows are gathered at once
TRIAL_QUERIES, TRIAL_ROWS, TRIAL_ROUNDS = 256, 8192, 3


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
    """Return the faster exact index of this process; said once where that is not faiss's best."""
    fault = kernel_fault()
    if fault is None:
        return FlatIndex()
    return MatmulIndex() if _torch_is_faster(fault) else FlatIndex()


@cache
def _torch_is_faster(fault: str) -> bool:
    """Return which of the two wins a short trial, and say why it was held; once a process."""
    rows = np.random.default_rng(0).standard_normal((TRIAL_ROWS, 128), dtype=np.float32)
    flat, matmul = FlatIndex(), MatmulIndex()
    times = []
    for index in (flat, matmul):
        index.extend(rows)
        times.append(_shortest(lambda index=index: index.search(rows[:TRIAL_QUERIES], 16)))
    winner = "torch" if times[1] < times[0] else "faiss"
    warnings.warn(
        f"{fault}: exact searches use {winner}, the faster of faiss ({times[0] * 1e3:.0f} ms) and "
        f"torch ({times[1] * 1e3:.0f} ms) in a trial; import attnknn first to get the full speed",
        RuntimeWarning,
        stacklevel=2,
    )
    return times[1] < times[0]


def _shortest(action: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIAL_ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


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
