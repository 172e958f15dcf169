"""Memory bank: rows and labels in, the K nearest neighbours of a query out.

Axes: B queries, K neighbours of each, D embedding width, C classes, N memory rows.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from attnknn.checks import check_count, check_finite, check_labels
from attnknn.core.approximate import tune_index
from attnknn.core.exact import Index, cosines_of_ids
from attnknn.core.index import build_index
from attnknn.core.neighbours import LabelView, Neighbours
from attnknn.files import write_atomic

# ---- Bank files: rows that may be larger than memory, checked, copied and saved block by block.
#
# Axes: D embedding width, N rows.

ROW_BLOCK = 65_536  # rows that are in memory at once
UNIT_TOLERANCE = 1e-3
_TYPES = {torch.float32: "F32", torch.int64: "I64"}
_HEADER_KEY = "memory_bank"


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


def save_tensors(path: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Path:
    """Write one safetensors file, atomically, without a second copy of it in memory."""
    header: dict[str, Any] = {"__metadata__": {_HEADER_KEY: json.dumps(settings)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind, shape = _TYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data that begins at a multiple of 8

    def write(handle: IO[bytes]) -> None:
        handle.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for block in tensor.split(ROW_BLOCK):
                handle.write(np.ascontiguousarray(block.numpy()).data)

    return write_atomic(path, write)


def load_arrays(path: Path, *, on_disk: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return arrays and settings of a file that ``save_tensors`` wrote.

    Args:
        path: The file.
        on_disk: Leave the rows in the file, memory-mapped.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as handle:
            settings = json.loads((handle.metadata() or {}).get(_HEADER_KEY, "null"))
            if settings is None:
                raise ValueError(f"path must be a saved memory bank, got path={str(path)!r}")
            names = [name for name in handle.keys() if not (on_disk and name == "rows")]
            arrays = {name: handle.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(
            f"path must be a whole file of a saved memory bank, got path={str(path)!r} ({error})"
        ) from None
    return (arrays | {"rows": _mapped_rows(path)} if on_disk else arrays), settings


def _mapped_rows(path: Path) -> np.memmap:
    with Path(path).open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        entry = json.loads(handle.read(length))["rows"]
    offset = 8 + length + entry["data_offsets"][0]
    return np.memmap(path, dtype=np.float32, mode="r", offset=offset, shape=tuple(entry["shape"]))


# ---- Row bank: unit rows in memory or in a file, their index, and the search for the nearest.
#
# Axes: B queries, K neighbours of each, D embedding width, N rows.

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


class MemoryBank(RowBank):
    """Unit rows with labels that can be searched, changed and saved.

    Args:
        rows: Unit-length embeddings; float32 rows are not copied, so leave them as they are. A
            memory-mapped file (``np.load(path, mmap_mode="r")``) stays on disk.
        labels: Class of each row, 0 to C - 1.
        n_classes: C; classes may be absent from the bank.
        index: ``auto`` (by size), ``flat_ip``, ``flat_l2``, ``hnsw``, ``ivfpq``, ``disk``,
            ``matmul``, ``milvus`` or a FAISS factory string; see ``attnknn.core.index``.
        trust_neighbours: How many leave-one-out neighbours judge a row's label.
        weights: How much each row counts in every vote, above 0; None counts all alike. Only their
            ratios matter.
        index_settings: Depth of an approximate search, such as ``{"efSearch": 128}``; see
            ``autotune``.
        folder: Where files of a bank on disk go; None takes the system's temporary folder.
        uri: Server, or file of the embedded version, of a ``milvus`` index.
        collection: Name of a ``milvus`` collection that is to outlive this process.
    """

    def __init__(
        self,
        rows: Float[np.ndarray, "N D"],
        labels: Int[np.ndarray, " N"] | Sequence[int],
        *,
        n_classes: int,
        index: str = "auto",
        trust_neighbours: int = 20,
        weights: Float[np.ndarray, " N"] | None = None,
        index_settings: Mapping[str, int] | None = None,
        folder: Path | None = None,
        uri: str | None = None,
        collection: str | None = None,
    ) -> None:
        self.n_classes = check_count("n_classes", n_classes, low=2)
        self.trust_neighbours = check_count("trust_neighbours", trust_neighbours)
        self.labels = self._checked_labels(labels, len(rows))
        self.weights = None if weights is None else _checked_weights(weights, len(rows))
        super().__init__(
            rows,
            index=index,
            index_settings=index_settings,
            folder=folder,
            uri=uri,
            collection=collection,
        )

    def search(
        self,
        queries: Float[np.ndarray, "B D"],
        k: int,
        *,
        exclude_ids: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    ) -> Neighbours:
        """Return the k nearest rows of each query.

        Args:
            queries: Unit-length query embeddings.
            k: Neighbours to return, at most the number of rows (less one with ``exclude_ids``).
            exclude_ids: The bank row of each query that must not be returned: a row that finds
                itself votes with the very label that is to be predicted.
        """
        checked = unit_rows("queries", queries, self.dim)
        own = None if exclude_ids is None else self._checked_own(exclude_ids, len(queries))
        scores, ids = self.nearest_rows(checked, k, own)
        return Neighbours(checked, scores, ids, self.view, None if own is None else own[:, None])

    @cached_property
    def own_neighbours(self) -> Int[Tensor, "N T"]:
        """Leave-one-out neighbours of every row, the ones that judge its label."""
        if len(self) < 2:  # nobody to ask: the only row is taken at its word
            return torch.zeros(len(self), 1, dtype=torch.int64)
        k = min(self.trust_neighbours, len(self) - 1)
        return self.nearest_rows(self.rows, k, torch.arange(len(self)))[1]

    @cached_property
    def view(self) -> LabelView:
        """What the bank's own labels say about its rows."""
        return self.view_of(self.labels)

    def view_of(self, labels: Int[Tensor, " N"]) -> LabelView:
        """Return trust, histograms and prototypes as if the bank had other labels."""
        made_for = self.rows

        def own_neighbours() -> Int[Tensor, "N T"]:
            if self.rows is not made_for:
                raise RuntimeError("the bank has changed since this search: search again")
            return self.own_neighbours

        return LabelView(
            self.rows, labels, own_neighbours, n_classes=self.n_classes, weights=self.weights
        )

    def relabelled(self, labels: Int[np.ndarray, " N"] | Sequence[int]) -> "MemoryBank":
        """Return a bank over the same rows, index and leave-one-out neighbours, other labels."""
        checked = self._checked_labels(labels, len(self))
        _ = self.own_neighbours  # searched at most once for any number of twins
        self._shares_index = True
        twin = object.__new__(MemoryBank)
        twin.__dict__ = {name: value for name, value in vars(self).items() if name != "view"}
        twin.labels = checked
        return twin

    def add(
        self,
        rows: Float[np.ndarray, "N D"],
        labels: Int[np.ndarray, " N"] | Sequence[int],
        *,
        weights: Float[np.ndarray, " N"] | None = None,
    ) -> None:
        """Append rows; their ids continue the count, and without ``weights`` each counts 1."""
        new, added = unit_rows("rows", rows, self.dim), self._checked_labels(labels, len(rows))
        both = self.weights
        if weights is not None or self.weights is not None:
            old = torch.ones(len(self)) if self.weights is None else self.weights
            weights = np.ones(len(rows)) if weights is None else weights
            both = torch.cat([old, _checked_weights(weights, len(rows))])
        # Whatever may fail, a full disk for one, comes before the first change.
        self.rows, self.weights = self._with_rows(new), both
        self.labels = torch.cat([self.labels, added])
        self._forget_derived()
        self._extend_index()

    def remove(self, ids: Int[np.ndarray, " M"] | Sequence[int]) -> None:
        """Delete rows; the rows behind them move up. The index is built anew."""
        keep = torch.ones(len(self), dtype=torch.bool)
        keep[self._checked_ids(ids)] = False
        if not keep.any():
            raise ValueError("ids must leave at least one memory row, got all of them")
        self.rows, self.labels = self._only_rows(keep), self.labels[keep]
        self.weights = None if self.weights is None else self.weights[keep]
        self._forget_derived()
        self._rebuild_index()

    def relabel(
        self,
        ids: Int[np.ndarray, " M"] | Sequence[int],
        labels: Int[np.ndarray, " M"] | Sequence[int],
    ) -> None:
        """Give rows other labels; the neighbours of the rows stay valid."""
        changed = self.labels.clone()
        changed[self._checked_ids(ids)] = self._checked_labels(labels, len(ids))
        self.labels = changed
        self.__dict__.pop("view", None)

    def rename_classes(self, codes: Int[np.ndarray, " C"], *, n_classes: int) -> None:
        """Let class c be ``codes[c]`` from now on, out of ``n_classes``: room for new classes."""
        self.n_classes = check_count("n_classes", n_classes, low=self.n_classes)
        self.labels = self._checked_labels(codes[self.labels.numpy()], len(self))
        self.__dict__.pop("view", None)

    def reweigh(self, weights: Float[np.ndarray, " N"] | None) -> None:
        """Let rows count differently; the neighbours of the rows stay valid."""
        self.weights = None if weights is None else _checked_weights(weights, len(self))
        self.__dict__.pop("view", None)

    def save(self, path: Path) -> Path:
        """Write the bank to one safetensors file, atomically."""
        settings = {
            "n_classes": self.n_classes,
            "index": self.index_name,
            "trust_neighbours": self.trust_neighbours,
            "index_settings": self.index_settings,
            **self._milvus,
        }
        tensors = {"labels": self.labels, "rows": self.rows}
        if self.weights is not None:
            tensors["weights"] = self.weights
        return save_tensors(path, tensors, settings)

    @classmethod
    def load(cls, path: Path, *, on_disk: bool = False, folder: Path | None = None) -> "MemoryBank":
        """Read a bank written by ``save``; the index is built anew.

        Args:
            path: The file.
            on_disk: Leave the rows in the file instead of reading them into memory.
            folder: Where files of a bank on disk go.
        """
        arrays, settings = load_arrays(path, on_disk=on_disk)
        return cls(**arrays, **settings, folder=folder)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs; the index is built anew there."""
        derived = ("_index", "view", "own_neighbours")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_shares_index": False}
        self._index = self._built_index(self.index_settings)

    def _checked_labels(self, labels: np.ndarray | Sequence[int], n_rows: int) -> Int[Tensor, " M"]:
        checked = check_labels("labels", _as_array(labels), n_rows=n_rows, n_classes=self.n_classes)
        return torch.from_numpy(checked)

    def _checked_ids(self, ids: np.ndarray | Sequence[int], name: str = "ids") -> Int[Tensor, " M"]:
        # A row id is checked like a label: an integer, one of N. (A yes/no mask is neither.)
        checked = check_labels(name, _as_array(ids), n_rows=len(ids), n_classes=len(self))
        return torch.from_numpy(checked)

    def _checked_own(
        self, exclude_ids: np.ndarray | Sequence[int], n_queries: int
    ) -> Int[Tensor, " B"]:
        if len(exclude_ids) != n_queries:
            raise ValueError(
                f"exclude_ids must have one row id per query ({n_queries}), got {len(exclude_ids)}"
            )
        return self._checked_ids(exclude_ids, "exclude_ids")

    def _forget_derived(self) -> None:
        for name in ("own_neighbours", "view"):
            self.__dict__.pop(name, None)


def _as_array(numbers: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return the numbers as an array; numpy alone would take an empty list for one of floats."""
    return np.asarray(numbers, dtype=None if len(numbers) else np.int64)


def _checked_weights(weights: np.ndarray, n_rows: int) -> Float[Tensor, " M"]:
    checked = torch.tensor(weights, dtype=torch.float32)
    # Checked after narrowing: a float64 of 1e-50 becomes 0 here, and its logarithm infinite.
    if checked.shape != (n_rows,) or not (checked.isfinite() & (checked > 0)).all():
        raise ValueError(
            f"weights must be {n_rows} finite numbers above 0 in single precision, "
            f"got {weights=} of {weights.shape=}"
        )
    return checked
