"""Memory bank: rows and labels in, the K nearest neighbours of a query out.

Axes: B queries, K neighbours of each, D embedding width, C classes, N memory rows.
"""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from attnknn.checks import check_count, check_finite, check_labels
from attnknn.files import write_atomic
from attnknn.index import build_index, cosines_of_ids
from attnknn.neighbours import LabelView, Neighbours

UNIT_TOLERANCE = 1e-3


class MemoryBank:
    """Unit rows with labels that can be searched, changed and saved.

    Args:
        rows: Unit-length embeddings; float32 rows are not copied, so leave them as they are.
        labels: Class of each row, 0 to C - 1.
        n_classes: C; classes may be absent from the bank.
        index: ``auto``, ``flat_ip``, ``flat_l2``, ``hnsw``, ``matmul`` or a FAISS factory string.
        trust_neighbours: How many leave-one-out neighbours judge a row's label.
    """

    def __init__(
        self,
        rows: Float[np.ndarray, "N D"],
        labels: Int[np.ndarray, " N"],
        *,
        n_classes: int,
        index: str = "auto",
        trust_neighbours: int = 20,
    ) -> None:
        self.n_classes = check_count("n_classes", n_classes, low=2)
        self.trust_neighbours = check_count("trust_neighbours", trust_neighbours)
        self.index_name = index
        if len(rows) == 0:
            raise ValueError("rows must hold at least one memory row, got an empty bank")
        self.rows = torch.from_numpy(_unit_rows("rows", rows, rows.shape[-1]))
        self.labels = self._checked_labels(labels, len(rows))
        self._index = build_index(index, self.rows.numpy())
        self._shares_index = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        """Embedding width."""
        return self.rows.shape[1]

    def search(
        self,
        queries: Float[np.ndarray, "B D"],
        k: int,
        *,
        exclude_ids: Int[np.ndarray, " B"] | None = None,
    ) -> Neighbours:
        """Return the k nearest rows of each query.

        Args:
            queries: Unit-length query embeddings.
            k: Neighbours to return, at most the number of rows (less one with ``exclude_ids``).
            exclude_ids: The bank row of each query that must not be returned: a row that finds
                itself votes with the very label that is to be predicted.
        """
        queries = _unit_rows("queries", queries, self.dim)
        scores, ids = self._search(queries, k, exclude_ids)
        own = None if exclude_ids is None else torch.tensor(exclude_ids, dtype=torch.int64)[:, None]
        return Neighbours(torch.from_numpy(queries), scores, ids, self.view, own)

    def _search(
        self,
        queries: Float[np.ndarray, "B D"],
        k: int,
        exclude_ids: Int[np.ndarray, " B"] | None,
    ) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
        own = None if exclude_ids is None else self._checked_own(exclude_ids, len(queries))
        available = len(self) - (own is not None)
        if check_count("k", k) > available:
            left = " that are left" if own is not None else ""
            raise ValueError(f"k must be at most the {available} memory rows{left}, got k={k}")
        # NOTE: leakage guard. One spare neighbour is asked for, and the query's own row dropped.
        scores, ids = self._index.search(queries, k + (own is not None))
        if (ids < 0).any():
            # An approximate index may find fewer rows than asked; id -1 would read the last label.
            raise ValueError(
                f"k must be within reach of the {self.index_name!r} index, which found fewer than "
                f"k={k} rows for some queries; lower k or search deeper"
            )
        scores, ids = torch.from_numpy(scores), torch.from_numpy(ids)
        if not self._index.exact_scores:
            scores, ids = cosines_of_ids(torch.from_numpy(queries), self.rows, ids)
        return (scores, ids) if own is None else _drop_own(scores, ids, own, k)

    @cached_property
    def own_neighbours(self) -> Int[Tensor, "N T"]:
        """Leave-one-out neighbours of every row, the ones that judge its label."""
        if len(self) < 2:  # nobody to ask: the only row is taken at its word
            return torch.zeros(len(self), 1, dtype=torch.int64)
        k = min(self.trust_neighbours, len(self) - 1)
        return self._search(self.rows.numpy(), k, np.arange(len(self)))[1]

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

        return LabelView(self.rows, labels, own_neighbours, n_classes=self.n_classes)

    def relabelled(self, labels: Int[np.ndarray, " N"]) -> "MemoryBank":
        """Return a bank over the same rows, index and leave-one-out neighbours, other labels."""
        checked = self._checked_labels(labels, len(self))
        _ = self.own_neighbours  # searched at most once for any number of twins
        self._shares_index = True
        twin = object.__new__(MemoryBank)
        twin.__dict__ = {name: value for name, value in vars(self).items() if name != "view"}
        twin.labels = checked
        return twin

    def add(self, rows: Float[np.ndarray, "N D"], labels: Int[np.ndarray, " N"]) -> None:
        """Append rows; their ids continue the count."""
        rows = _unit_rows("rows", rows, self.dim)
        added = self._checked_labels(labels, len(rows))
        self.rows = torch.cat([self.rows, torch.from_numpy(rows)])
        if self._shares_index:  # a relabelled twin must not find rows that it does not have
            self._index, self._shares_index = build_index(self.index_name, self.rows.numpy()), False
        else:
            self._index.add(rows)
        self.labels = torch.cat([self.labels, added])
        self._forget_derived()

    def remove(self, ids: Int[np.ndarray, " M"]) -> None:
        """Delete rows; the rows behind them move up. The index is built anew."""
        keep = torch.ones(len(self), dtype=torch.bool)
        keep[self._checked_ids(ids)] = False
        if not keep.any():
            raise ValueError("ids must leave at least one memory row, got all of them")
        self.rows, self.labels = self.rows[keep], self.labels[keep]
        self._index, self._shares_index = build_index(self.index_name, self.rows.numpy()), False
        self._forget_derived()

    def relabel(self, ids: Int[np.ndarray, " M"], labels: Int[np.ndarray, " M"]) -> None:
        """Give rows other labels; the neighbours of the rows stay valid."""
        changed = self.labels.clone()
        changed[self._checked_ids(ids)] = self._checked_labels(labels, len(ids))
        self.labels = changed
        self.__dict__.pop("view", None)

    def save(self, path: Path) -> Path:
        """Write the bank to one safetensors file, atomically."""
        settings = {
            "n_classes": self.n_classes,
            "index": self.index_name,
            "trust_neighbours": self.trust_neighbours,
        }
        tensors = {"rows": self.rows.contiguous(), "labels": self.labels.contiguous()}
        content = save(tensors, metadata={"memory_bank": json.dumps(settings)})
        return write_atomic(path, lambda handle: handle.write(content))

    @classmethod
    def load(cls, path: Path) -> "MemoryBank":
        """Read a bank written by ``save``; the index is built anew."""
        with safe_open(path, framework="pt") as handle:
            settings = json.loads((handle.metadata() or {}).get("memory_bank", "null"))
        if settings is None:
            raise ValueError(f"path must be a saved memory bank, got path={str(path)!r}")
        tensors = load_file(path)
        return cls(tensors["rows"].numpy(), tensors["labels"].numpy(), **settings)

    def _checked_labels(self, labels: np.ndarray, n_rows: int) -> Int[Tensor, " M"]:
        checked = check_labels("labels", labels, n_rows=n_rows, n_classes=self.n_classes)
        return torch.from_numpy(checked)

    def _checked_ids(self, ids: np.ndarray, name: str = "ids") -> Int[Tensor, " M"]:
        # A row id is checked like a label: an integer, one of N. (A yes/no mask is neither.)
        checked = check_labels(name, ids, n_rows=len(ids), n_classes=len(self))
        return torch.from_numpy(checked)

    def _checked_own(self, exclude_ids: np.ndarray, n_queries: int) -> Int[Tensor, " B"]:
        if len(exclude_ids) != n_queries:
            raise ValueError(
                f"exclude_ids must have one row id per query ({n_queries}), got {len(exclude_ids)}"
            )
        return self._checked_ids(exclude_ids, "exclude_ids")

    def _forget_derived(self) -> None:
        for name in ("own_neighbours", "view"):
            self.__dict__.pop(name, None)


def _drop_own(
    scores: Float[Tensor, "B K1"], ids: Int[Tensor, "B K1"], own: Int[Tensor, " B"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Drop each query's own id, or the last neighbour where duplicates pushed the own id out."""
    is_own = ids == own[:, None]
    is_own[:, -1] |= ~is_own.any(dim=1)
    kept = ~is_own
    return scores[kept].view(-1, k), ids[kept].view(-1, k)


def _unit_rows(name: str, rows: np.ndarray, dim: int) -> Float[np.ndarray, "N D"]:
    """Return float32 rows after checking width, finiteness and unit length."""
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"{name} must have shape (rows, {dim}), got shape {rows.shape}")
    # Writable, because torch warns of tensors over read-only memory such as a mapped file.
    rows = check_finite(name, np.require(rows, dtype=np.float32, requirements="CW"))
    lengths = np.linalg.norm(rows, axis=1)
    if len(rows) and np.abs(lengths - 1).max() > UNIT_TOLERANCE:
        worst = float(lengths[np.abs(lengths - 1).argmax()])
        raise ValueError(f"{name} must have unit length, got a row of length {worst:.4g}")
    return rows
