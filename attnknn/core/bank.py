"""Memory bank: rows and labels in, the K nearest neighbours of a query out.

What a bank holds never changes in place. ``add``, ``remove``, ``relabel`` and the like make the
next content and put it in the place of the last with one assignment: whoever searches meanwhile
sees all of the one or all of the other, and a search answers from the content it was made on.

A saved bank is one safetensors file. Beside the tensors it holds its version, the bank's settings
and a SHA-256 of each of them: a byte that has changed is an error at load, and no wrong vote later.

Axes: B queries, K neighbours of each, D embedding width, C classes, N memory rows.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.checks import check_count, check_labels
from attnknn.core.index import Index
from attnknn.core.neighbours import LabelView, Neighbours
from attnknn.core.search import ROW_BLOCK, RowBank, unit_rows
from attnknn.files import write_atomic

FILE_VERSION = 2  # version 1 had neither a version nor sums
_TYPES = {torch.float32: "F32", torch.int64: "I64"}
_HEADER_KEY = "memory_bank"


@dataclass(frozen=True, eq=False)
class Content:
    """What a memory bank holds at one moment; a change makes another one.

    Attributes:
        bank: The rows and their index; contents that differ in labels alone share it.
        labels: Class of each row.
        n_classes: C.
        weights: How much each row counts; None counts all alike.
    """

    bank: RowBank
    labels: Int[Tensor, " N"]
    n_classes: int
    weights: Float[Tensor, " N"] | None = None

    @cached_property
    def view(self) -> LabelView:
        """What the labels say about the rows: made once, for all searches of this content."""
        return self.view_of(self.labels)

    def view_of(self, labels: Int[Tensor, " N"]) -> LabelView:
        """Return trust, histograms and prototypes as if the rows had other labels."""
        bank = self.bank  # not self, which holds a view: rows would wait for the collector to go
        return LabelView(
            bank.rows,
            labels,
            lambda: bank.own_neighbours,
            n_classes=self.n_classes,
            weights=self.weights,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: what is derived from them is made anew."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _held(part: str, name: str, doc: str) -> property:
    """Return a read-only property: an attribute of a bank's content, or of the rows in it."""
    if part == "rows":
        return property(lambda self: getattr(self.content.bank, name), doc=doc)
    return property(lambda self: getattr(self.content, name), doc=doc)


class MemoryBank:
    """Unit rows with labels that can be searched, changed and saved.

    Searches may run in any number of threads, also while one thread changes the bank.

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

    Attributes:
        content: What the bank holds now, frozen.
    """

    content: Content

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
        check_count("n_classes", n_classes, low=2)
        check_count("trust_neighbours", trust_neighbours)
        checked = _checked_codes("labels", labels, len(rows), n_classes)
        weighed = None if weights is None else _checked_weights(weights, len(rows))
        where = {"folder": folder, "uri": uri, "collection": collection}
        options = {"trust_neighbours": trust_neighbours, "index_settings": index_settings, **where}
        self.content = Content(
            RowBank.over(rows, index=index, **options), checked, n_classes, weighed
        )

    rows = _held("rows", "rows", "Unit-length embeddings, (N, D).")
    dim = _held("rows", "dim", "Embedding width D.")
    index = _held("rows", "index", "What finds the rows.")
    index_name = _held("rows", "index_name", "What index was asked for.")
    on_disk = _held("rows", "on_disk", "Whether the rows are a memory-mapped file.")
    trust_neighbours = _held("rows", "trust_neighbours", "Neighbours that judge a row's label.")
    own_neighbours = _held("rows", "own_neighbours", "Leave-one-out neighbours of every row.")
    labels = _held("content", "labels", "Class of each row, (N,).")
    n_classes = _held("content", "n_classes", "Number of classes, absent ones included.")
    weights = _held("content", "weights", "How much each row counts; None counts all alike.")
    view = _held("content", "view", "What the bank's own labels say about its rows.")

    @property
    def index_settings(self) -> dict[str, int]:
        """Depth of an approximate search, as it is in force."""
        return dict(self.index.settings)

    def __len__(self) -> int:
        return len(self.rows)

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
        content = self.content  # once: it may be replaced meanwhile
        checked = unit_rows("queries", queries, content.bank.dim)
        own = None
        if exclude_ids is not None:
            if len(exclude_ids) != len(queries):
                raise ValueError(
                    f"exclude_ids must have one row id per query ({len(queries)}), "
                    f"got {len(exclude_ids)}"
                )
            own = _checked_ids("exclude_ids", exclude_ids, content)
        left_out = own
        if own is not None and content.weights is not None:
            # A row that stands for several copies leaves out one: the others stay neighbours.
            left_out = torch.where(content.weights[own] > 1, -1, own)
        scores, ids = content.bank.nearest_rows(checked, k, left_out)
        return Neighbours(checked, scores, ids, content.view, None if own is None else own[:, None])

    def nearest_rows(
        self,
        queries: Float[Tensor, "B D"],
        k: int,
        own: Int[Tensor, " B"] | None = None,
        *,
        index: Index | None = None,
    ) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
        """Return cosines, largest first, and ids of the k nearest rows; see ``RowBank``."""
        return self.content.bank.nearest_rows(queries, k, own, index=index)

    def view_of(self, labels: Int[Tensor, " N"]) -> LabelView:
        """Return trust, histograms and prototypes as if the bank had other labels."""
        return self.content.view_of(labels)

    def relabelled(self, labels: Int[np.ndarray, " N"] | Sequence[int]) -> "MemoryBank":
        """Return a bank over the same rows, index and leave-one-out neighbours, other labels."""
        content = self.content
        checked = _checked_codes("labels", labels, len(content.labels), content.n_classes)
        content.bank.index.share()
        twin = copy.copy(self)
        twin.content = replace(content, labels=checked)
        return twin

    def add(
        self,
        rows: Float[np.ndarray, "N D"],
        labels: Int[np.ndarray, " N"] | Sequence[int],
        *,
        weights: Float[np.ndarray, " N"] | None = None,
    ) -> None:
        """Append rows; their ids continue the count, and without ``weights`` each counts 1."""
        old = self.content
        new = unit_rows("rows", rows, old.bank.dim)
        added = _checked_codes("labels", labels, len(rows), old.n_classes)
        both = old.weights
        if weights is not None or both is not None:
            before = torch.ones(len(old.labels)) if both is None else both
            after = np.ones(len(rows)) if weights is None else weights
            both = torch.cat([before, _checked_weights(after, len(rows))])
        every = torch.cat([old.labels, added])
        self.content = replace(old, bank=old.bank.grown(new), labels=every, weights=both)

    def remove(self, ids: Int[np.ndarray, " M"] | Sequence[int]) -> None:
        """Delete rows; the rows behind them move up. The index is built anew."""
        old = self.content
        keep = torch.ones(len(old.labels), dtype=torch.bool)
        keep[_checked_ids("ids", ids, old)] = False
        if not keep.any():
            raise ValueError("ids must leave at least one memory row, got all of them")
        weights = None if old.weights is None else old.weights[keep]
        kept = {"labels": old.labels[keep], "weights": weights}
        self.content = replace(old, bank=old.bank.cut(keep), **kept)

    def relabel(
        self,
        ids: Int[np.ndarray, " M"] | Sequence[int],
        labels: Int[np.ndarray, " M"] | Sequence[int],
    ) -> None:
        """Give rows other labels; the neighbours of the rows stay valid."""
        old = self.content
        changed = old.labels.clone()
        codes = _checked_codes("labels", labels, len(ids), old.n_classes)
        changed[_checked_ids("ids", ids, old)] = codes
        self.content = replace(old, labels=changed)

    def rename_classes(self, codes: Int[np.ndarray, " C"], *, n_classes: int) -> None:
        """Let class c be ``codes[c]`` from now on, out of ``n_classes``: room for new classes."""
        old = self.content
        check_count("n_classes", n_classes, low=old.n_classes)
        renamed = codes[old.labels.numpy()]
        labels = _checked_codes("labels", renamed, len(renamed), n_classes)
        self.content = replace(old, labels=labels, n_classes=n_classes)

    def reweigh(self, weights: Float[np.ndarray, " N"] | None) -> None:
        """Let rows count differently; the neighbours of the rows stay valid."""
        old = self.content
        new = None if weights is None else _checked_weights(weights, len(old.labels))
        self.content = replace(old, weights=new)

    def autotune(
        self,
        queries: Float[np.ndarray, "B D"] | None = None,
        *,
        recall: float = 0.99,
        k: int = 50,
        n_queries: int = 1000,
        seed: int = 0,
    ) -> list[dict[str, Any]]:
        """Search as shallowly, and so as fast, as the asked recall allows.

        Args:
            queries: Held-out unit-length queries, like those to come. None takes memory rows, each
                left out of its own search; a graph finds rows it holds a little more easily.
            recall: Share of the k true neighbours that must be found, as a lower 95 % bound.
            k: Neighbours that will be asked for.
            n_queries: How many queries to measure on.
            seed: Decides which.

        Returns:
            What was measured, one entry a setting (a table: ``pd.DataFrame(bank.autotune())``);
            ``chosen`` marks the one now in force, here and in banks that share the index.
        """
        options = {"recall": recall, "k": k, "n_queries": n_queries, "seed": seed}
        return self.content.bank.autotune(queries, **options)

    def save(self, path: Path) -> Path:
        """Write the bank to one safetensors file, atomically."""
        content, bank = self.content, self.content.bank
        settings = {
            "n_classes": content.n_classes,
            "index": bank.index_name,
            "trust_neighbours": bank.trust_neighbours,
            "index_settings": bank.index.settings,
            "uri": bank.uri,
            "collection": bank.index.collection,
        }
        tensors = {"labels": content.labels, "rows": bank.rows}
        if content.weights is not None:
            tensors["weights"] = content.weights
        return save_tensors(path, tensors, settings)

    @classmethod
    def load(cls, path: Path, *, on_disk: bool = False, folder: Path | None = None) -> "MemoryBank":
        """Read a bank written by ``save``; the index is built anew.

        Args:
            path: The file. One with a changed byte, or of an older version, is refused.
            on_disk: Leave the rows in the file instead of reading them into memory.
            folder: Where files of a bank on disk go.
        """
        arrays, settings = load_arrays(path, on_disk=on_disk)
        return cls(**arrays, **settings, folder=folder)

    def close(self) -> None:
        """Give back what the index holds outside this process; the bank is then of no more use.

        That is the file of a ``disk`` index, or a ``milvus`` collection without a name.
        """
        self.index.close()


def _checked_codes(
    name: str, codes: np.ndarray | Sequence[int], n_rows: int, n_codes: int
) -> Int[Tensor, " M"]:
    """Return integers of 0 .. n_codes - 1, one a row; numpy takes an empty list for floats."""
    array = np.asarray(codes, dtype=None if len(codes) else np.int64)
    return torch.from_numpy(check_labels(name, array, n_rows=n_rows, n_classes=n_codes))


def _checked_ids(name: str, ids: np.ndarray | Sequence[int], content: Content) -> Int[Tensor, " M"]:
    # A row id is checked like a label: an integer, one of N. (A yes/no mask is neither.)
    return _checked_codes(name, ids, len(ids), len(content.labels))


def _checked_weights(weights: np.ndarray, n_rows: int) -> Float[Tensor, " M"]:
    checked = torch.tensor(weights, dtype=torch.float32)
    # Checked after narrowing: a float64 of 1e-50 becomes 0 here, and its logarithm infinite.
    if checked.shape != (n_rows,) or not (checked.isfinite() & (checked > 0)).all():
        raise ValueError(
            f"weights must be {n_rows} finite numbers above 0 in single precision, "
            f"got {weights=} of {weights.shape=}"
        )
    return checked


# ---- Bank files.


def save_tensors(path: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Path:
    """Write one safetensors file, atomically, without a second copy of it in memory."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    facts = {"version": FILE_VERSION, "settings": settings, "sha256": _sums(arrays, settings)}
    header: dict[str, Any] = {"__metadata__": {_HEADER_KEY: json.dumps(facts)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind, shape = _TYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data that begins at a multiple of 8

    def write(handle: IO[bytes]) -> None:
        handle.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            for block in _blocks(array):
                handle.write(block)

    return write_atomic(path, write)


def load_arrays(path: Path, *, on_disk: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return arrays and settings of a file that ``save_tensors`` wrote, after checking its sums.

    Args:
        path: The file.
        on_disk: Leave the rows in the file, memory-mapped; they are read once, to be checked.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as handle:
            facts = json.loads((handle.metadata() or {}).get(_HEADER_KEY, "null"))
            _check_version(path, facts)
            names = [name for name in handle.keys() if not (on_disk and name == "rows")]
            arrays = {name: handle.get_tensor(name) for name in names}
        if on_disk:
            arrays["rows"] = _mapped_rows(path)
        settings, sums = facts["settings"], facts["sha256"]
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"path must be a whole file of a saved memory bank, got path={str(path)!r} ({error})"
        ) from None
    wrong = _sums(arrays, settings).items() ^ sums.items()
    if wrong:
        changed = ", ".join(sorted({name for name, _ in wrong}))
        raise ValueError(
            f"path must be a memory bank as it was saved, got path={str(path)!r}, "
            f"in which these have changed since: {changed}"
        )
    return arrays, settings


def _check_version(path: Path, facts: Any) -> None:
    if facts is None:
        raise ValueError(f"path must be a saved memory bank, got path={str(path)!r}")
    version = facts.get("version", 1)
    if version != FILE_VERSION:
        raise ValueError(
            f"path must be a memory bank of file version {FILE_VERSION}, got path={str(path)!r} of "
            f"{version=}: build the bank anew from its rows and labels"
        )


def _sums(arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a SHA-256 of the settings and of each array with its type and shape."""
    plain = json.dumps(settings, sort_keys=True).encode()
    return {"settings": hashlib.sha256(plain).hexdigest()} | {
        name: _sum_of(array) for name, array in arrays.items()
    }


def _sum_of(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    for block in _blocks(array):
        digest.update(block)
    return digest.hexdigest()


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of an array, some rows at a time."""
    for start in range(0, len(array), ROW_BLOCK):
        yield np.ascontiguousarray(array[start : start + ROW_BLOCK]).data


def _mapped_rows(path: Path) -> np.memmap:
    with Path(path).open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        entry = json.loads(handle.read(length))["rows"]
    offset = 8 + length + entry["data_offsets"][0]
    return np.memmap(path, dtype=np.float32, mode="r", offset=offset, shape=tuple(entry["shape"]))
