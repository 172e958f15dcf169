"""The machinery under the classifier's methods: checked arguments, fitting, searching, voting."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from tqdm import tqdm

from attnknn.checks import check_one_of
from attnknn.core.kernels import faiss
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import at_k, normalised
from attnknn.estimator.embedding import Embedding, embedded_by, takes_images
from attnknn.estimator.fitting import (
    NARROW,
    NEW_CLASSES,
    Data,
    Fitted,
    check_jobs,
    check_noise,
    fit_all,
    plan_for,
)
from attnknn.estimator.inputs import (
    GONE,
    Ledger,
    are_kinds,
    check_classes,
    check_rows,
    check_weights,
    distinct_rows,
    label_kind,
    mixed_number_columns,
    n_rows_of,
    take,
)

NEARLY_ONE = 1 - 1e-5  # cosine of a row with its copy, rounding allowed for
# Queries at a time, and class shares of their neighbours at most: both bound the memory of a
# prediction. Fewer queries would leave the search's matrix products too small to be fast.
QUERY_BLOCK, SHARE_CELLS = 768, 1_000_000
FEW_ROWS = 5000  # up to here a second thread burns time and gains none
ONE_FAISS_THREAD = sys.platform == "darwin"  # a second pool may crash: see index.load


class Machinery(BaseEstimator):
    """What the public methods are made of; the parameters stand in ``AttnKNNClassifier``."""

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, classes: Any) -> "Machinery":
        before = dict(vars(self))
        try:
            return self._fitted_on(X, y, sample_weight, classes=classes)
        except BaseException:  # an interrupt too: what was fitted before still is, and nothing else
            vars(self).clear()
            vars(self).update(before)
            raise

    def _fitted_on(self, X: Any, y: Any, sample_weight: Any, *, classes: Any) -> "Machinery":
        plan = plan_for(self)
        rows = self._checked(X, reset=True)
        labels = check_classes(y, n_rows_of(rows))
        known = labels if classes is None else check_classes(classes, len(classes))
        self.classes_ = np.unique(known)
        if unknown := np.setdiff1d(labels, self.classes_).tolist():
            raise ValueError(f"y must hold no class outside of classes, got {unknown}")
        weights = self._weights(sample_weight, labels, self.classes_)
        codes = np.searchsorted(self.classes_, labels)
        _check_enough(self.classes_, codes[weights > 0])
        check_noise(self.label_noise, len(self.classes_))
        inputs, labels, entries = self._distinct(rows, codes, weights)
        self._ledger = Ledger(entries, weights, are_kinds(inputs, entries, weights))
        data = Data(
            inputs=inputs,
            labels=labels,
            weights=self._ledger.row_weights(),
            n_classes=len(self.classes_),
            is_table=_is_table(inputs),
        )
        if self.n_neighbors != "auto":
            lowered(self.n_neighbors, len(labels), stacklevel=5)
        with self._threads():
            self._set_fitted(fit_all(data, plan))
        return self

    def _set_fitted(self, fitted: Fitted) -> None:
        self._fitted = fitted
        place = np.argsort(fitted.order)  # memory row of each distinct row
        entries = self._ledger.entries
        moved = np.where(entries == GONE, GONE, place[entries])
        self._ledger = replace(self._ledger, entries=moved)
        self.memory_ = fitted.bank
        self.embedder_ = fitted.name
        self.n_neighbors_ = fitted.learned.k
        wrong = fitted.learned.wrong
        self.label_noise_, self.label_noise_interval_ = wrong.share, wrong.interval
        n_classes = len(self.classes_)
        self.transition_ = np.eye(n_classes) if wrong.transition is None else wrong.transition

    def _checked(self, X: Any, *, reset: bool = False) -> Any:
        """Return checked rows; an embedder of the user's own gets them as they are."""
        if callable(self.embedder):
            n_rows_of(X)  # refuses what has no rows
            return X
        rows = check_rows(
            self,
            X,
            reset=reset,
            allow_missing=self.missing == "impute" and (reset or self._imputes),
            images=takes_images(self.embedder),
            number_columns=getattr(self, "_number_columns", None),
            columns=() if reset else self._columns,
        )
        if reset:
            is_table = isinstance(rows, pd.DataFrame)
            self._number_columns = mixed_number_columns(rows) if is_table else None
        return rows

    @property
    def _imputes(self) -> bool:
        """Whether ``fit`` has learned what stands in for missing numbers."""
        features = self._fitted.embedding.features
        return features is not None and bool(features.medians)

    @property
    def _columns(self) -> tuple[str, ...]:
        """Names of the columns that a table must have."""
        features = self._fitted.embedding.features
        encoder = None if features is None else features.encoder
        return () if encoder is None else (*encoder.mean, *encoder.categories)

    def _weights(self, sample_weight: Any, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
        return check_weights(sample_weight, labels, classes=classes, class_weight=self.class_weight)

    def _distinct(
        self,
        rows: Any,
        codes: np.ndarray,
        weights: np.ndarray,
        *,
        known_by: Embedding | None = None,
    ) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return one row of each set of copies, its code, and the set of every given row.

        Rows of weight 0 are in no set. An embedder of the user's own has read the rows that come
        back: what they are is known to it alone, and rows it cannot tell apart are copies. After
        ``fit`` it must read them as it did there, ``known_by`` the embedding of then.
        """
        counted = np.flatnonzero(weights > 0)
        if not len(counted):
            raise ValueError("sample_weight must be above 0 for some rows, got none")
        rows, codes = take(rows, counted), codes[counted]
        if callable(self.embedder):
            rows = embedded_by(self.embedder, rows) if known_by is None else known_by.encode(rows)
        entries = np.full(len(weights), GONE)
        first, entries[counted] = distinct_rows(rows, codes)
        return take(rows, first), codes[first], entries

    def _classes_with(self, labels: np.ndarray) -> np.ndarray:
        """Return all classes, those of more labels included, or refuse new ones."""
        if label_kind(labels[0]) != label_kind(self.classes_[0]):
            seen, given = (type(values[0]).__name__ for values in (self.classes_, labels))
            raise ValueError(f"y must hold labels of the kind seen in fit, {seen}, got {given}")
        unknown = np.setdiff1d(labels, self.classes_)
        known = check_one_of("new_classes", self.new_classes, NEW_CLASSES) == "error"
        if known and len(unknown):
            raise ValueError(
                f"y must hold known classes, got {unknown.tolist()}; new_classes='add' lets "
                "partial_fit add classes"
            )
        return np.union1d(self.classes_, unknown)

    def _open_classes(self, classes: np.ndarray) -> None:
        """Make room for classes that have not been seen."""
        if len(classes) == len(self.classes_):
            return
        old, self.classes_ = self.classes_, classes
        codes = np.searchsorted(self.classes_, old)
        self.memory_.rename_classes(codes, n_classes=len(self.classes_))
        learned = self._fitted.learned
        probs = np.zeros((len(learned.probs), len(self.classes_)))
        probs[:, codes] = learned.probs
        wrong = learned.wrong.renamed(codes, len(self.classes_))
        self._fitted = replace(
            self._fitted,
            learned=replace(learned, probs=probs, wrong=wrong),
            held_out_labels=codes[self._fitted.held_out_labels],
        )

    def _known_entries(self, added: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return the memory row that each added row is a copy of, or ``GONE``."""
        k = min(len(self.classes_), len(self.memory_))  # a row may be there with every label
        found = self.memory_.search(added, k)
        query, place = (found.scores > NEARLY_ONE).nonzero(as_tuple=True)
        entries = found.ids[query, place].numpy()
        query = query.numpy()
        same = (self.memory_.rows.numpy()[entries] == added[query]).all(axis=1)
        same &= self.memory_.labels.numpy()[entries] == codes[query]
        known = np.full(len(added), GONE)
        known[query[same]] = entries[same]
        return known

    def _neighbours(self, X: Any, *, k: int | None = None) -> Neighbours:
        """Return the neighbours of new rows."""
        check_is_fitted(self)
        rows = self._checked(X)
        with self._threads():
            queries = self._fitted.embedding.rows(rows, progress=self.verbose > 0)
            return self._search(queries, self._voters if k is None else k)

    def _probs_in_blocks(
        self,
        queries: Callable[[slice], np.ndarray],
        n_rows: int,
        k: int,
        *,
        title: str,
        leave_out: bool = False,
    ) -> np.ndarray:
        """Return calibrated probabilities of rows, some at a time.

        Args:
            queries: Returns the unit rows of a block.
            n_rows: Number of rows in all.
            k: Neighbours that vote.
            title: What the progress bar says.
            leave_out: The rows are those of the memory, and none finds itself.
        """
        probs = np.empty((n_rows, len(self.classes_)))
        block = max(1, min(QUERY_BLOCK, SHARE_CELLS // len(self.classes_)))
        starts = range(0, n_rows, block)
        for start in tqdm(starts, desc=title, disable=self.verbose <= 0, leave=False):
            part = slice(start, min(start + block, n_rows))
            own = np.arange(part.start, part.stop) if leave_out else None
            with self._threads():
                found = self._search(queries(part), k, own)
            probs[part] = self._probs(found)
        return probs

    def _search(self, queries: np.ndarray, k: int, own: np.ndarray | None = None) -> Neighbours:
        return self.memory_.search(queries, k, exclude_ids=own)

    @property
    def _voters(self) -> int:
        """Neighbours that vote; rows may have been forgotten since ``fit``."""
        return min(self.n_neighbors_, len(self.memory_))

    def _probs(self, neighbours: Neighbours) -> np.ndarray:
        """Return calibrated probabilities."""
        method = at_k(self._fitted.learned.method, neighbours.k)
        with self._threads():
            return normalised(method.votes(neighbours))

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Hold torch and FAISS to ``n_jobs`` threads; few rows are given one, and no slower."""
        before = torch.get_num_threads(), faiss.omp_get_max_threads()
        if self.n_jobs is not None:
            n_threads = effective_n_jobs(check_jobs(self.n_jobs))
        elif len(self._ledger.entries) > FEW_ROWS:
            n_threads = before[0]
        else:
            n_threads = 1
        torch.set_num_threads(n_threads)
        if not ONE_FAISS_THREAD:
            faiss.omp_set_num_threads(n_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before[0])
            faiss.omp_set_num_threads(before[1])


def lowered(n_neighbors: int, n_rows: int, *, stacklevel: int) -> int:
    """Return at most as many neighbours as there are rows; say it where that is fewer."""
    if n_neighbors <= n_rows:
        return n_neighbors
    warnings.warn(
        f"n_neighbors={n_neighbors} is lowered to the {n_rows} distinct rows",
        stacklevel=stacklevel,
    )
    return n_rows


def _check_enough(classes: np.ndarray, codes: np.ndarray) -> None:
    present = len(np.unique(codes))
    if present < 2:
        raise ValueError(
            "y must hold at least 2 classes (with weight above 0), "
            f"got {present} class out of {len(classes)}"
        )


def _is_table(rows: Any) -> bool:
    """Return whether columns have meanings of their own: categories, or few columns."""
    if isinstance(rows, pd.DataFrame):
        return True
    return isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] <= NARROW
