"""Memory bank: rows and labels in, the K nearest neighbours of a query out.

Axes: B queries, K neighbours of each, D embedding width, C classes, N memory rows.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.bankfile import load_arrays, save_tensors, unit_rows
from attnknn.checks import check_count, check_labels
from attnknn.neighbours import LabelView, Neighbours
from attnknn.rowbank import RowBank


class MemoryBank(RowBank):
    """Unit rows with labels that can be searched, changed and saved.

    Args:
        rows: Unit-length embeddings; float32 rows are not copied, so leave them as they are. A
            memory-mapped file (``np.load(path, mmap_mode="r")``) stays on disk.
        labels: Class of each row, 0 to C - 1.
        n_classes: C; classes may be absent from the bank.
        index: ``auto`` (by size), ``flat_ip``, ``flat_l2``, ``hnsw``, ``ivfpq``, ``disk``,
            ``matmul``, ``milvus`` or a FAISS factory string; see ``attnknn.index.choose``.
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
