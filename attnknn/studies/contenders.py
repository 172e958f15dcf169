"""Contenders: ways to find the k nearest rows, each made from rows and then searched.

The memory's own indexes, two peers, and the roof: the bare matrix product of queries and rows,
which every exact search has to do and none can beat.

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int

from attnknn.index import FaissIndex, build_index, cosines_of_ids
from attnknn.index.load import faiss
from attnknn.linear import linear
from attnknn.rowbank import RowBank

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
        return RowBank(self.rows, index="flat_ip")  # a reference to the rows, nothing is built

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
