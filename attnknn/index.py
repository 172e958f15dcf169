"""Vector indexes: unit rows -> something that finds the K most similar rows of a query.

Whatever the index measures inside, what comes out is cosine similarity, larger = closer. (An inner
product index returns similarities, an L2 index squared distances; mixing them up inverts a vote.)
"""

import sys
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.blas import choose_core_type

choose_core_type()
import faiss  # noqa: E402  (the BLAS core type must be set first)

if sys.platform == "darwin":
    # torch and faiss bring an OpenMP runtime each; on macOS two thread pools are known to crash.
    faiss.omp_set_num_threads(1)

AUTO_HNSW_ROWS = 100_000  # below this an exact search is fast enough on any machine we measured
HNSW_LINKS, HNSW_BUILD_DEPTH, HNSW_SEARCH_DEPTH = 32, 200, 64
MATMUL_BLOCK = 1024  # queries a block: bounds the (block, N) similarity matrix


@runtime_checkable
class Index(Protocol):
    """The few calls a memory bank needs.

    Attributes:
        exact_scores: Whether the scores are the cosines of the rows as they were added. A factory
            index may compress or rotate its rows; its scores have to be computed anew.
    """

    exact_scores: bool

    def add(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Append rows; their ids continue the count."""

    def search(
        self, queries: Float[np.ndarray, "B D"], k: int
    ) -> tuple[Float[np.ndarray, "B K"], Int[np.ndarray, "B K"]]:
        """Return cosine similarities, largest first, and row ids."""


class FaissIndex:
    """Any FAISS index over unit rows."""

    def __init__(self, index: faiss.Index, *, exact_scores: bool = True) -> None:
        self.index = index
        self.exact_scores = exact_scores

    def add(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Append rows; a quantising index is trained on the first ones it gets."""
        if not self.index.is_trained:
            self.index.train(rows)
        self.index.add(rows)

    def search(
        self, queries: Float[np.ndarray, "B D"], k: int
    ) -> tuple[Float[np.ndarray, "B K"], Int[np.ndarray, "B K"]]:
        """Return cosine similarities, largest first, and row ids."""
        scores, ids = self.index.search(queries, k)
        if self.index.metric_type == faiss.METRIC_L2:
            scores = 1 - scores / 2  # |a - b|^2 = 2 - 2 a.b for unit vectors
        return scores, ids


class MatmulIndex:
    """Exact search by blocked matrix product and top-k, on the device where the rows are."""

    exact_scores = True

    def __init__(self, dim: int, *, device: str = "cpu") -> None:
        self.rows = torch.empty(0, dim, device=device)

    def add(self, rows: Float[np.ndarray, "N D"]) -> None:
        """Append rows."""
        self.rows = torch.cat([self.rows, torch.as_tensor(rows, device=self.rows.device)])

    def search(
        self, queries: Float[np.ndarray, "B D"], k: int
    ) -> tuple[Float[np.ndarray, "B K"], Int[np.ndarray, "B K"]]:
        """Return cosine similarities, largest first, and row ids."""
        scores, ids = search_by_matmul(torch.as_tensor(queries).to(self.rows), self.rows, k)
        return scores.cpu().numpy(), ids.cpu().numpy()


def search_by_matmul(
    queries: Float[Tensor, "B D"], rows: Float[Tensor, "N D"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the k largest dot products of each query and their row ids, block by block."""
    blocks = [(block @ rows.T).topk(k, dim=1) for block in queries.split(MATMUL_BLOCK)]
    scores = torch.cat([block.values for block in blocks])  # (B, K)
    return scores, torch.cat([block.indices for block in blocks])


def cosines_of_ids(
    queries: Float[Tensor, "B D"], rows: Float[Tensor, "N D"], ids: Int[Tensor, "B K"]
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the cosines of rows already found, largest first, and the ids in that order."""
    blocks = zip(queries.split(MATMUL_BLOCK), ids.split(MATMUL_BLOCK), strict=True)
    scores = torch.cat([torch.einsum("bd,bkd->bk", query, rows[near]) for query, near in blocks])
    order = scores.argsort(dim=1, descending=True, stable=True)  # (B, K)
    return scores.gather(1, order), ids.gather(1, order)


def build_index(name: str, rows: Float[np.ndarray, "N D"]) -> Index:
    """Return an index over ``rows``.

    Args:
        name: ``auto`` (exact up to 100 000 rows, HNSW above), ``flat_ip``, ``flat_l2``, ``hnsw``,
            ``matmul``, or any FAISS factory string such as ``IVF256,PQ32``.
        rows: Unit-length rows.
    """
    dim = rows.shape[1]
    if name == "auto":
        name = "flat_ip" if len(rows) <= AUTO_HNSW_ROWS else "hnsw"
    if name == "matmul":
        index: Index = MatmulIndex(dim)
    elif name == "flat_ip":
        index = FaissIndex(faiss.IndexFlatIP(dim))
    elif name == "flat_l2":
        index = FaissIndex(faiss.IndexFlatL2(dim))
    elif name == "hnsw":
        index = FaissIndex(_hnsw(dim))
    else:
        return _from_factory(name, rows)
    index.add(rows)
    return index


def _hnsw(dim: int) -> faiss.Index:
    index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_BUILD_DEPTH
    index.hnsw.efSearch = HNSW_SEARCH_DEPTH
    return index


def _from_factory(name: str, rows: Float[np.ndarray, "N D"]) -> FaissIndex:
    try:
        made = faiss.index_factory(rows.shape[1], name, faiss.METRIC_INNER_PRODUCT)
        index = FaissIndex(made, exact_scores=False)
        index.add(rows)
    except RuntimeError as error:
        # faiss begins with the C++ signature; the reason stands behind the source line.
        reason = " ".join(str(error).split(": ", 2)[-1].split())
        raise ValueError(
            "index must be auto, flat_ip, flat_l2, hnsw, matmul or a FAISS factory string that "
            f"suits {len(rows)} rows of width {rows.shape[1]}, got index={name!r} ({reason})"
        ) from None
    return index
