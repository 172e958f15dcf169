"""Row bank: unit rows in memory or in a file, their index, and the search for the nearest.

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from attnknn.bankfile import ROW_BLOCK, mapped_copy, unit_rows
from attnknn.checks import check_count
from attnknn.index import Index, build_index, cosines_of_ids, tune_index

if TYPE_CHECKING:
    import pandas as pd

SEARCH_BLOCK = 16_384  # queries searched at once: bounds the candidates that are ranked
STRAGGLERS = 0.01  # share of queries that may need an exact search after an approximate one
MANY_BLOCKS = 8  # from here on a progress bar is shown


class RowBank:
    """Unit rows that can be searched, grown and cut; the part of a memory bank without labels.

    Args:
        rows: Unit-length embeddings.
        index: Name of the index.
        index_settings: Depth of an approximate search.
        folder: Where files of a bank on disk go; None takes the system's temporary folder.
        uri: Server, or file of the embedded version, of a ``milvus`` index.
        collection: Name of a ``milvus`` collection that is to outlive this process.
    """

    def __init__(
        self,
        rows: Float[np.ndarray, "N D"],
        *,
        index: str = "auto",
        index_settings: Mapping[str, int] | None = None,
        folder: Path | None = None,
        uri: str | None = None,
        collection: str | None = None,
    ) -> None:
        if len(rows) == 0:
            raise ValueError("rows must hold at least one memory row, got an empty bank")
        self.index_name, self.index_settings = index, dict(index_settings or {})
        self.on_disk, self.folder = isinstance(rows, np.memmap), folder
        self._milvus = {"uri": uri, "collection": collection}
        self.rows = unit_rows("rows", rows, rows.shape[-1])
        self._index = self._built_index(self.index_settings)
        self._shares_index = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        """Embedding width."""
        return self.rows.shape[1]

    def nearest_rows(
        self,
        queries: Float[Tensor, "B D"],
        k: int,
        own: Int[Tensor, " B"] | None = None,
        *,
        index: Index | None = None,
    ) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
        """Return cosines, largest first, and ids of the k nearest rows.

        Args:
            queries: Unit-length queries; what is held at once does not grow with their number.
            k: Neighbours to return.
            own: The row of each query that must not be returned.
            index: Search this one instead of the bank's own.
        """
        available = len(self) - (own is not None)
        if check_count("k", k) > available:
            left = " that are left" if own is not None else ""
            raise ValueError(f"k must be at most the {available} memory rows{left}, got k={k}")
        starts = range(0, max(len(queries), 1), SEARCH_BLOCK)
        blocks = []
        for start in tqdm(starts, desc="search", disable=len(starts) < MANY_BLOCKS, leave=False):
            part = slice(start, start + SEARCH_BLOCK)
            excluded = None if own is None else own[part]
            blocks.append(self._search_block(index or self._index, queries[part], k, excluded))
        scores, ids = zip(*blocks, strict=True)
        return torch.cat(scores), torch.cat(ids)

    def _search_block(
        self, index: Index, queries: Float[Tensor, "B D"], k: int, own: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
        # NOTE: leakage guard. One spare neighbour is asked for, and the query's own row dropped.
        wanted = k + (own is not None)
        found = index.search(queries.numpy(), min(wanted * index.k_factor, len(self)))
        scores, ids = map(torch.from_numpy, found)
        if not index.exact_scores:
            scores, ids = cosines_of_ids(queries, self.rows, ids, wanted)
        # An approximate index may find fewer rows than asked; id -1 would read the last label.
        short = (ids < 0).any(dim=1)
        if short.any():
            self._complete(scores, ids, queries, short)
        return (scores, ids) if own is None else _drop_own(scores, ids, own, k)

    def _complete(
        self,
        scores: Float[Tensor, "B K"],
        ids: Int[Tensor, "B K"],
        queries: Float[Tensor, "B D"],
        short: Bool[Tensor, " B"],
    ) -> None:
        """Answer the few queries that found too little by an exact search; many are an error."""
        if short.sum() > max(1, STRAGGLERS * len(queries)):
            raise TooShallowError(
                f"k must be within reach of the {self.index_name!r} index, which found fewer than "
                f"{ids.shape[1]} rows for {int(short.sum())} of {len(queries)} queries; "
                "lower k or search deeper"
            )
        exact = build_index("exact", self.rows.numpy())
        found = exact.search(queries[short].numpy(), ids.shape[1])
        scores[short], ids[short] = map(torch.from_numpy, found)

    def autotune(
        self,
        queries: Float[np.ndarray, "B D"] | None = None,
        *,
        recall: float = 0.99,
        k: int = 50,
        n_queries: int = 1000,
        seed: int = 0,
    ) -> "pd.DataFrame":
        """Search as shallowly, and so as fast, as the asked recall allows.

        Args:
            queries: Held-out unit-length queries, like those to come. None takes memory rows, each
                left out of its own search; a graph finds rows it holds a little more easily.
            recall: Share of the k true neighbours that must be found, as a lower 95 % bound.
            k: Neighbours that will be asked for.
            n_queries: How many queries to measure on.
            seed: Decides which.

        Returns:
            What was measured, one row a setting; ``chosen`` marks the one now in force.
        """
        pool = self.rows.numpy() if queries is None else queries
        order = np.random.default_rng(seed).permutation(len(pool))
        picked = order[: check_count("n_queries", n_queries)]
        probes = unit_rows("queries", pool[picked], self.dim)
        own = torch.from_numpy(picked) if queries is None else None
        k = min(k, len(self) - (own is not None))
        exact = build_index("exact", self.rows.numpy())
        true_ids = self.nearest_rows(probes, k, own, index=exact)[1].numpy()
        table = tune_index(
            self._index, lambda: self._tried(probes, k, own), true_ids, recall=recall
        )
        self.index_settings = dict(self._index.settings)
        if not table["reached"].any():
            warnings.warn(
                f"recall={recall} is out of reach of the {self._index.name!r} index: "
                f"{table['recall_low'].max():.4f} is the best lower bound it gets",
                RuntimeWarning,
                stacklevel=2,
            )
        return table

    def _tried(
        self, queries: Float[Tensor, "B D"], k: int, own: Int[Tensor, " B"] | None
    ) -> Int[np.ndarray, "B K"]:
        """Return the ids found; none where the search is too shallow for k."""
        try:
            return self.nearest_rows(queries, k, own)[1].numpy()
        except TooShallowError:
            return np.full((len(queries), k), -1)

    def close(self) -> None:
        """Give back what the index holds outside this process; the bank is then of no more use.

        That is the file of a ``disk`` index, or a ``milvus`` collection without a name.
        """
        self._index.close()

    def _with_rows(self, rows: Float[Tensor, "M D"]) -> Float[Tensor, "_ D"]:
        """Return the bank's rows with others behind them, stored but not yet the bank's."""
        return self._stored([*self.rows.split(ROW_BLOCK), rows], len(self) + len(rows))

    def _only_rows(self, keep: Bool[Tensor, " N"]) -> Float[Tensor, "_ D"]:
        """Return some of the bank's rows, stored but not yet the bank's."""
        pairs = zip(self.rows.split(ROW_BLOCK), keep.split(ROW_BLOCK), strict=True)
        return self._stored((rows[here] for rows, here in pairs), int(keep.sum()))

    def _stored(self, blocks: Iterable[Float[Tensor, "_ D"]], n_rows: int) -> Float[Tensor, "M D"]:
        """Return rows where the bank keeps them: in memory, or in a file."""
        if self.on_disk:
            return mapped_copy(blocks, n_rows, self.dim, self.folder)
        return torch.cat(list(blocks))

    def _built_index(self, settings: Mapping[str, int]) -> Index:
        return build_index(
            self.index_name,
            self.rows.numpy(),
            settings=settings,
            on_disk=self.on_disk,
            folder=self.folder,
            **self._milvus,
        )

    def _extend_index(self) -> None:
        """Let the index find the rows that are new."""
        if self._shares_index:  # a twin must not find rows that it does not have
            self._rebuild_index()
        else:
            self._index.extend(self.rows.numpy())

    def _rebuild_index(self) -> None:
        if self._shares_index:  # a named collection stays with the twin
            self._milvus = self._milvus | {"collection": None}
        else:
            self._index.discard()
        before, self._shares_index = self._index.name, False
        self._index = self._built_index({})
        # What ``auto`` builds for another number of rows may have other knobs.
        self.index_settings = self.index_settings if self._index.name == before else {}
        self._index.tune(self.index_settings)


class TooShallowError(ValueError):
    """An approximate search found fewer rows than were asked for."""


def _drop_own(
    scores: Float[Tensor, "B K1"], ids: Int[Tensor, "B K1"], own: Int[Tensor, " B"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Drop each query's own id, or the last neighbour where duplicates pushed the own id out."""
    is_own = ids == own[:, None]
    is_own[:, -1] |= ~is_own.any(dim=1)
    kept = ~is_own
    return scores[kept].view(-1, k), ids[kept].view(-1, k)
