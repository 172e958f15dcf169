"""Search: unit rows, in memory or in a file, and the k nearest of them to each query.

A search is exact, or as deep as its settings say; tuning measures how shallow it may be while it
keeps the asked recall, the share of the k true nearest rows that it returns.

Axes: B queries, K neighbours of each, D embedding width, N rows.
"""

import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnknn.checks import check_count, check_finite, check_range
from attnknn.core.index import Index, build_index, cosines_of_ids
from attnknn.progress import progress_bar

ROW_BLOCK = 65_536  # rows that are in memory at once
UNIT_TOLERANCE = 1e-3
SEARCH_BLOCK = 16_384  # queries searched at once: bounds the candidates that are ranked
STRAGGLERS = 0.01  # share of queries that may need an exact search after an approximate one
MANY_BLOCKS = 8  # from here on a progress bar is shown
ROUNDS = 2  # each setting is timed twice; the shorter time counts
Z_95 = 1.645  # one-sided: in 95 of 100 samples the true recall is above the lower bound
NO_GAIN = 1e-4  # a deeper search that finds less than this more has come to its limit


def unit_rows(name: str, rows: np.ndarray, dim: int) -> Float[Tensor, "N D"]:
    """Return float32 rows after checking width, finiteness and unit length.

    A memory-mapped file of float32 rows is not read into memory.
    """
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"{name} must have shape (rows, {dim}), got shape {rows.shape}")
    mapped = isinstance(rows, np.memmap) and rows.dtype == np.float32 and rows.flags.c_contiguous
    if not mapped:  # writable, because torch warns of tensors over memory that is not
        rows = np.require(rows, dtype=np.float32, requirements="CW")
    for start in range(0, len(rows), ROW_BLOCK):
        _check_unit(name, rows[start : start + ROW_BLOCK])
    with warnings.catch_warnings():  # a bank never writes to its rows
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(rows)


def _check_unit(name: str, rows: Float[np.ndarray, "N D"]) -> None:
    lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    if not np.isfinite(lengths).all():
        check_finite(name, rows)
    if np.abs(lengths - 1).max() > UNIT_TOLERANCE:
        worst = float(lengths[np.abs(lengths - 1).argmax()])
        raise ValueError(f"{name} must have unit length, got a row of length {worst:.4g}")


def mapped_copy(
    blocks: Iterable[Float[Tensor, "_ D"]], n_rows: int, dim: int, folder: Path | None
) -> Float[Tensor, "N D"]:
    """Write blocks of rows to a file that lives as long as the tensor, and return them mapped."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="attnknn-rows-", suffix=".npy", dir=folder)
    os.close(handle)
    try:
        mapped = np.lib.format.open_memmap(name, mode="w+", dtype=np.float32, shape=(n_rows, dim))
        place = 0
        for block in blocks:
            mapped[place : place + len(block)] = block.numpy()
            place += len(block)
    finally:
        if os.name == "posix":  # the mapping keeps the content; nothing is left to clean up
            Path(name).unlink()
    return torch.from_numpy(mapped)


class TooShallowError(ValueError):
    """An approximate search found fewer rows than were asked for."""


@dataclass(frozen=True, eq=False)
class RowBank:
    """Unit rows that can be searched; the part of a memory bank without labels.

    Attributes:
        rows: Unit-length embeddings.
        index: What finds them.
        index_name: What was asked for, ``auto`` for one.
        trust_neighbours: How many leave-one-out neighbours judge a row's label.
        on_disk: Whether the rows are a memory-mapped file.
        folder: Where files of a bank on disk go; None takes the system's temporary folder.
        uri: Server, or file of the embedded version, of a ``milvus`` index.
    """

    rows: Float[Tensor, "N D"]
    index: Index
    index_name: str = "auto"
    trust_neighbours: int = 20
    on_disk: bool = False
    folder: Path | None = None
    uri: str | None = None

    @classmethod
    def over(
        cls,
        rows: Float[np.ndarray, "N D"],
        *,
        index: str = "auto",
        trust_neighbours: int = 20,
        index_settings: Mapping[str, int] | None = None,
        folder: Path | None = None,
        uri: str | None = None,
        collection: str | None = None,
    ) -> "RowBank":
        """Check rows and build their index; the arguments are those of ``MemoryBank``."""
        if len(rows) == 0:
            raise ValueError("rows must hold at least one memory row, got an empty bank")
        where = {"on_disk": isinstance(rows, np.memmap), "folder": folder, "uri": uri}
        checked = unit_rows("rows", rows, rows.shape[-1])
        options = {"settings": index_settings, "collection": collection, **where}
        built = build_index(index, checked.numpy(), **options)
        return cls(checked, built, index, trust_neighbours, **where)

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy in another process needs; the index is built anew there."""
        settings, collection = self.index.settings, self.index.collection
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return _with_new_index, (known | {"index": None}, settings, collection)

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
        for start in progress_bar(starts, "search", disable=len(starts) < MANY_BLOCKS):
            part = slice(start, start + SEARCH_BLOCK)
            excluded = None if own is None else own[part]
            blocks.append(self._search_block(index or self.index, queries[part], k, excluded))
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

    @cached_property
    def own_neighbours(self) -> Int[Tensor, "N T"]:
        """Leave-one-out neighbours of every row, the ones that judge its label."""
        if len(self) < 2:  # nobody to ask: the only row is taken at its word
            return torch.zeros(len(self), 1, dtype=torch.int64)
        k = min(self.trust_neighbours, len(self) - 1)
        return self.nearest_rows(self.rows, k, torch.arange(len(self)))[1]

    def autotune(
        self,
        queries: Float[np.ndarray, "B D"] | None = None,
        *,
        recall: float = 0.99,
        k: int = 50,
        n_queries: int = 1000,
        seed: int = 0,
    ) -> list[dict[str, Any]]:
        """Search as shallowly, and so as fast, as the asked recall allows; see ``MemoryBank``."""
        pool = self.rows.numpy() if queries is None else queries
        order = np.random.default_rng(seed).permutation(len(pool))
        picked = order[: check_count("n_queries", n_queries)]
        probes = unit_rows("queries", pool[picked], self.dim)
        own = torch.from_numpy(picked) if queries is None else None
        k = min(k, len(self) - (own is not None))
        exact = build_index("exact", self.rows.numpy())
        true_ids = self.nearest_rows(probes, k, own, index=exact)[1].numpy()
        tried = tune_index(self.index, lambda: self._tried(probes, k, own), true_ids, recall=recall)
        if not any(each["reached"] for each in tried):
            best = max(each["recall_low"] for each in tried)
            warnings.warn(
                f"recall={recall} is out of reach of the {self.index.name!r} index: "
                f"{best:.4f} is the best lower bound it gets",
                RuntimeWarning,
                stacklevel=3,
            )
        return tried

    def _tried(
        self, queries: Float[Tensor, "B D"], k: int, own: Int[Tensor, " B"] | None
    ) -> Int[np.ndarray, "B K"]:
        """Return the ids found; none where the search is too shallow for k."""
        try:
            return self.nearest_rows(queries, k, own)[1].numpy()
        except TooShallowError:
            return np.full((len(queries), k), -1)

    def grown(self, rows: Float[Tensor, "M D"]) -> "RowBank":
        """Return a bank of these rows and others behind them."""
        blocks = [*self.rows.split(ROW_BLOCK), rows]
        stored = self._stored(blocks, len(self) + len(rows))
        return replace(self, rows=stored, index=self.index.grown(stored.numpy()))

    def cut(self, keep: Bool[Tensor, " N"]) -> "RowBank":
        """Return a bank of some of these rows."""
        pairs = zip(self.rows.split(ROW_BLOCK), keep.split(ROW_BLOCK), strict=True)
        stored = self._stored((rows[here] for rows, here in pairs), int(keep.sum()))
        # Whatever may fail, a full disk for one, comes before the first change.
        collection = self.index.discard()
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        settings = self.index.settings
        return _with_new_index(known | {"rows": stored}, settings, collection)

    def _stored(self, blocks: Iterable[Float[Tensor, "_ D"]], n_rows: int) -> Float[Tensor, "M D"]:
        """Return rows where the bank keeps them: in memory, or in a file."""
        if self.on_disk:
            return mapped_copy(blocks, n_rows, self.dim, self.folder)
        return torch.cat(list(blocks))


def _with_new_index(
    known: dict[str, Any], settings: Mapping[str, int], collection: str | None
) -> RowBank:
    """Return a bank with an index over its rows built anew."""
    where = {name: known[name] for name in ("on_disk", "folder", "uri")}
    options = {"settings": settings, "collection": collection, **where}
    index = build_index(known["index_name"], known["rows"].numpy(), **options)
    return RowBank(**known | {"index": index})


def _drop_own(
    scores: Float[Tensor, "B K1"], ids: Int[Tensor, "B K1"], own: Int[Tensor, " B"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Drop each query's own id, or the last neighbour where duplicates pushed the own id out."""
    is_own = ids == own[:, None]
    is_own[:, -1] |= ~is_own.any(dim=1)
    kept = ~is_own
    return scores[kept].view(-1, k), ids[kept].view(-1, k)


# ---- Tuning: the fastest settings that keep the recall.


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
) -> list[dict[str, Any]]:
    """Leave ``index`` at its fastest settings that keep the recall; return all that was measured.

    Args:
        index: What is tuned.
        search: Searches all queries at the settings in force and returns the ids found.
        true_ids: What an exact search finds.
        recall: The lower 95 % bound of the mean recall must reach this.

    Returns:
        One entry a setting tried: the settings, ``recall``, ``recall_low`` (the lower bound),
        ``queries_per_second``, ``reached`` and ``chosen``. When no setting reaches the recall, the
        one that came closest is chosen, and ``reached`` says so.
    """
    check_range("recall", recall, low=0, high=1, low_open=True)
    tried = _measure_ladders(index, search, true_ids, recall)
    good = [each for each in tried if each["reached"]]
    by = "queries_per_second" if good else "recall_low"
    best = max(good or tried, key=lambda each: each[by])
    index.tune({name: best[name] for name in index.knobs})
    return [each | {"chosen": each is best} for each in tried]


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
