"""Inputs: whatever a user hands over becomes checked rows, labels and row weights.

Axes: N rows, F features, C classes.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator
from sklearn.utils import _safe_indexing, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    _num_samples,
    check_array,
    column_or_1d,
    validate_data,
)

from attnknn.data.splits import duplicate_groups
from attnknn.data.tables import MAX_CATEGORIES, is_number, n_categories, with_numbers

# ---- The ledger: which memory row each given row became, and how much it counts there.
#
# Ids are places in what was handed to ``fit``, and go on counting with ``partial_fit``; they never
# change. Copies share a memory row.
#
# Axes: N given rows, M memory rows.

GONE = -1
KINDS_DISAGREE = 0.02  # share of repeated rows with several labels, from which rows are kinds


@dataclass(frozen=True)
class Ledger:
    """Given rows to memory rows.

    Attributes:
        entries: Memory row of each given row; ``GONE`` for one that was forgotten or weighs 0.
        weights: How much each given row counts.
        kinds: Whether equal rows are different cases, which their labels tell apart, and not one
            case that was copied.
    """

    entries: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]
    kinds: bool = False

    def row_weights(self) -> Float[np.ndarray, " M"] | None:
        """Return how much each memory row counts; None where all count alike."""
        kept = self.entries != GONE
        sums = np.bincount(self.entries[kept], weights=self.weights[kept])
        # Only ratios matter to a vote, and the plain one is faster. What is left out of its own
        # neighbourhood goes with all its copies where it weighs no more than 1, and else alone.
        if np.ptp(sums) == 0 and not (self.kinds and sums[0] > 1):
            return None
        return sums if self.kinds else sums / sums.max()

    def first_ids(self) -> Int[np.ndarray, " M"]:
        """Return the first given row of each memory row."""
        ids = np.flatnonzero(self.entries != GONE)
        return ids[np.unique(self.entries[ids], return_index=True)[1]]

    def ids(self) -> Int[np.ndarray, " K"]:
        """Return the given rows that are still in the memory."""
        return np.flatnonzero(self.entries != GONE)

    def grown(
        self,
        entries: Int[np.ndarray, " A"],
        weights: Float[np.ndarray, " A"],
        known: Int[np.ndarray, " R"],
    ) -> "Ledger":
        """Return the ledger with more given rows.

        Args:
            entries: Which of R distinct rows each of them is.
            weights: How much each of them counts.
            known: Memory row that a distinct row is a copy of; ``GONE`` for a new one, which
                continues the count.
        """
        new = known == GONE
        rows = np.where(new, self.entries.max() + new.cumsum(), known)
        shifted = np.where(entries == GONE, GONE, rows[entries])
        return replace(
            self,
            entries=np.concatenate([self.entries, shifted]),
            weights=np.concatenate([self.weights, weights]),
        )

    def without(self, ids: Int[np.ndarray, " G"]) -> tuple["Ledger", Int[np.ndarray, " R"]]:
        """Return the ledger without some given rows, and the memory rows nobody needs any more."""
        if (self.entries[ids] == GONE).any():
            unknown = ids[self.entries[ids] == GONE]
            raise ValueError(f"ids must be in the memory, got {unknown.tolist()}, which are not")
        entries = self.entries.copy()
        entries[ids] = GONE
        if (entries == GONE).all():
            raise ValueError("ids must leave at least one row in the memory, got all of them")
        kept = np.unique(entries[entries != GONE])
        removed = np.setdiff1d(np.arange(self.entries.max() + 1), kept)
        renumbered = np.where(entries == GONE, GONE, np.searchsorted(kept, entries))
        return replace(self, entries=renumbered), removed


WEIGHT_LIMITS = (1e-20, 1e12)  # their ratios, copies summed, stay in single precision
LARGEST = 1e15  # the squares of larger numbers, and sums of them, leave single precision
Rows = np.ndarray | pd.DataFrame
# Errors of scikit-learn's that say what they are about; numpy's never do.
SPOKEN = re.compile(
    r"\bX\b|\by\b|sample_weight|Sample weights|Expected 2D array|Found array|Complex data|"
    "feature names|Unknown label type"
)


@contextmanager
def naming(name: str, rule: str) -> Iterator[None]:
    """Let what numpy says about a value say which argument that is."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        if SPOKEN.search(str(error)):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} must {rule}, got: {error}") from error


def check_rows(
    estimator: BaseEstimator,
    rows: Any,
    *,
    reset: bool,
    allow_missing: bool,
    images: bool,
    number_columns: list[str] | None,
    columns: Collection[str] = (),
) -> Rows:
    """Return a finite float array, a table with categories, or uint8 images.

    Args:
        estimator: Remembers the number and the names of the features.
        rows: Array-like, pandas or Polars table, or images.
        reset: True in ``fit``: the features are those of this estimator from now on.
        allow_missing: Let NaN pass.
        images: Expect (N, channels, height, width).
        number_columns: After ``fit`` on a table with categories: its columns of numbers.
        columns: All of its columns. (scikit-learn compares names that are strings alone.)
    """
    if images:
        return _check_images(estimator, rows, reset=reset)
    frame = _as_frame(rows)
    if reset:
        number_columns = mixed_number_columns(frame)
    elif frame is not None:
        _name_empty_columns(frame, number_columns)
    if number_columns is None:
        return _check_array(estimator, rows, frame, reset=reset, allow_missing=allow_missing)
    if frame is None:
        raise ValueError(f"X must be a data frame, as in fit, got {type(rows).__name__}")
    validate_data(estimator, frame, reset=reset, skip_check_array=True)
    if absent := [name for name in columns if name not in set(map(str, frame))]:
        raise ValueError(f"X must have the columns of fit, got none named {', '.join(absent)}")
    return _check_table(frame, number_columns, allow_missing=allow_missing)


def _as_frame(rows: Any) -> pd.DataFrame | None:
    """Return a pandas or Polars data frame as a pandas one, numbers as such; None for all else."""
    if hasattr(rows, "to_pandas"):  # Polars
        rows = rows.to_pandas()
    if not isinstance(rows, pd.DataFrame):
        return None
    if not rows.columns.is_unique:
        raise ValueError(f"X must have columns of different names, got {list(rows.columns)}")
    if not rows.shape[1]:
        raise ValueError("X must have at least one column, got none")
    return with_numbers(rows.reset_index(drop=True))


def mixed_number_columns(frame: pd.DataFrame | None) -> list[str] | None:
    """Return the columns of numbers of a frame that has others too; None for all else."""
    if frame is None or all(is_number(frame[name]) for name in frame):
        return None
    return [str(name) for name in frame if is_number(frame[name])]


def _name_empty_columns(frame: pd.DataFrame, number_columns: list[str] | None) -> None:
    """Let columns without any value, which have no kind of their own, be what they are in fit."""
    for name in frame:
        was_number = number_columns is None or str(name) in number_columns
        if was_number and frame[name].isna().all():
            frame[name] = np.nan


def _check_array(
    estimator: BaseEstimator,
    rows: Any,
    frame: pd.DataFrame | None,
    *,
    reset: bool,
    allow_missing: bool,
) -> Float[np.ndarray, "N F"]:
    if mixed_number_columns(frame) is not None:
        others = [name for name in frame if not is_number(frame[name])]
        raise ValueError(f"X must hold numbers alone, as in fit, got other columns {others}")
    with naming("X", "be numbers, in rows of one length"):
        checked = validate_data(
            estimator,
            rows if frame is None else frame,
            reset=reset,
            dtype=[np.float64, np.float32],
            ensure_all_finite="allow-nan",
        )
    _check_missing("X", checked, allow_missing=allow_missing)
    _check_size(checked)
    return checked


def _check_table(
    table: pd.DataFrame, number_columns: list[str], *, allow_missing: bool
) -> pd.DataFrame:
    if not len(table):
        raise ValueError("X must have at least one row, got Found array with 0 sample(s)")
    for name in table:
        if str(name) in number_columns:
            if not is_number(table[name]) or np.iscomplexobj(table[name]):
                raise ValueError(f"column {name!r} must hold real numbers, got {table[name].dtype}")
            values = table[name].to_numpy(np.float64, na_value=np.nan)[:, None]
            check_array(values, ensure_all_finite="allow-nan", input_name=f"column {name!r}")
            _check_missing(f"column {name!r}", values, allow_missing=allow_missing)
            _check_size(values)
        elif (found := n_categories(table[name])) > MAX_CATEGORIES:
            raise ValueError(
                f"column {name!r} must hold at most {MAX_CATEGORIES} categories, "
                f"got {found} (leave out names and ids)"
            )
    return table


def _check_missing(name: str, values: np.ndarray, *, allow_missing: bool) -> None:
    if not allow_missing and (missing := int(np.isnan(values).sum())):
        raise ValueError(
            f"{name} must have no missing number, got {missing} times NaN; missing='impute' in "
            "fit puts the column's median in its place"
        )


def _check_size(values: np.ndarray) -> None:
    # Not by absolute values, which would be a copy of all of them.
    largest = max(np.nanmax(values, initial=0.0), -np.nanmin(values, initial=0.0))
    if largest > LARGEST:
        raise ValueError(f"X must hold numbers of size at most {LARGEST:g}, got {largest:g}")


def _check_images(estimator: BaseEstimator, rows: Any, *, reset: bool) -> np.ndarray:
    images = np.asarray(rows)
    if images.ndim != 4 or images.dtype != np.uint8 or not len(images):
        raise ValueError(
            "X must be uint8 images of shape (N, channels, height, width) for this embedder, "
            f"got {images.dtype} of shape {images.shape}"
        )
    validate_data(estimator, images.reshape(len(images), -1), reset=reset, skip_check_array=True)
    return images


def check_classes(labels: Any, n_rows: int) -> np.ndarray:
    """Return labels as a vector of class names, whatever their type."""
    if labels is None:
        raise ValueError("requires y to be passed, but the target y is None")
    with naming("y", "be a list of labels"):
        labels = column_or_1d(labels, warn=True)
    if pd.isna(labels).any() or (labels.dtype.kind == "f" and np.isinf(labels).any()):
        raise ValueError("y must not contain NaN, None or infinity, which are no labels")
    try:
        np.unique(labels)
    except TypeError:
        kinds = sorted({type(label).__name__ for label in labels})
        raise ValueError(f"y must hold labels of one kind, got {' and '.join(kinds)}") from None
    with naming("y", "hold strings or integers"):
        check_classification_targets(labels)
    if len(labels) != n_rows:
        raise ValueError(f"y must have one label a row, got {len(labels)} for {n_rows} rows")
    return labels


def check_weights(
    sample_weight: Any,
    labels: np.ndarray,
    *,
    classes: np.ndarray,
    class_weight: dict | str | None,
) -> Float[np.ndarray, "N"]:
    """Return how much each row counts: its own weight times that of its class."""
    with naming("sample_weight", "be a number for each row"):
        weights = _check_sample_weight(sample_weight, labels, ensure_non_negative=True)
    if class_weight is None:
        return _check_weight_limits(weights.astype(np.float64))
    if isinstance(class_weight, Mapping):
        numbers = all(isinstance(weight, Real) for weight in class_weight.values())
        if not numbers:
            raise ValueError(f"class_weight must hold a number for each class, got {class_weight=}")
    elif class_weight != "balanced":
        raise ValueError(
            f"class_weight must be None, 'balanced' or a weight for each class, got {class_weight=}"
        )
    of_class = compute_class_weight(class_weight, classes=classes, y=labels)
    if not (np.isfinite(of_class) & (of_class >= 0)).all():
        raise ValueError(f"class_weight must not be negative, got {class_weight=}")
    return _check_weight_limits(weights * of_class[np.searchsorted(classes, labels)])


def _check_weight_limits(weights: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    low, high = WEIGHT_LIMITS
    wrong = (weights != 0) & ~((low <= weights) & (weights <= high))
    if wrong.any():
        raise ValueError(
            f"sample_weight (times class_weight) must be 0 or lie between {low:g} and {high:g}, "
            f"got {weights[wrong][0]:g}"
        )
    return weights


def label_kind(label: Any) -> str:
    """Return the kind of a label: two kinds have no order, or are equal and yet not the same."""
    kinds = {"str": str, "bool": bool | np.bool_, "integer": Integral, "number": Real}
    found = (name for name, kind in kinds.items() if isinstance(label, kind))
    return next(found, type(label).__name__)


def n_rows_of(rows: Any) -> int:
    """Return the number of rows of anything that has a length, one at least."""
    with naming("X", "be rows"):
        n_rows = _num_samples(rows)
    if not n_rows:
        raise ValueError("X must have at least one row, got none")
    return n_rows


def distinct_rows(
    rows: Rows, codes: Int[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "N"]]:
    """Return one row of each set of copies (same inputs, same label), and the set of every row.

    The sets are ordered by what is in them. So neither the order of the rows nor whether a row
    comes twice or with twice the weight changes anything that is learned, and a row that is left
    out of its own neighbourhood is left out with all of its copies.
    """
    keys = duplicate_groups(rows) * (int(codes.max()) + 1) + codes
    _, first, entry = np.unique(keys, return_index=True, return_inverse=True)
    return first, entry


def are_kinds(
    distinct: Rows, entries: Int[np.ndarray, " N"], weights: Float[np.ndarray, " N"]
) -> bool:
    """Return whether equal rows are different cases of a few kinds, rather than copies of one.

    Copies agree in their labels; cases of one kind do not. A table of three categories has a dozen
    kinds of rows, and how labels spread within a kind is all it can say.

    Args:
        distinct: One row of each pair of inputs and label.
        entries: Which of them each given row is; ``GONE`` for none.
        weights: How often each given row counts.
    """
    kept = entries != GONE
    copies = np.bincount(entries[kept], weights=weights[kept])
    kinds = duplicate_groups(distinct)
    several = np.bincount(kinds, weights=copies) > 1
    n_labels = np.bincount(kinds)
    several &= n_labels > 0
    return bool(several.any() and (n_labels[several] > 1).mean() > KINDS_DISAGREE)


def take(rows: Any, ids: Int[np.ndarray, "M"]) -> Any:
    """Return some of the rows of an array, a table or a list."""
    if isinstance(rows, pd.DataFrame):
        return rows.iloc[ids].reset_index(drop=True)
    return _safe_indexing(rows, ids)
