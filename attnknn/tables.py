"""Tables: columns of numbers and categories become standardised and one-hot features.

The encoder is fitted on training rows alone. Axes: N rows, F features.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Float32
from scipy.stats import norm

from attnknn.checks import check_one_of

NUMERIC_SCALES = ("standard", "quantile")
MISSING = "missing"  # a category of its own: not knowing is often informative
MAX_CATEGORIES = 1000


@dataclass(frozen=True)
class TableEncoder:
    """What was learned from the training rows of a table.

    Attributes:
        numeric: "standard": (x - mean) / std. "quantile": normal scores of the ranks among the
            training rows, then standardised; for skewed columns and for outliers.
        ranks: Sorted training values of each number column ("quantile" only).
        mean: Of each number column, after ranking.
        std: Of each number column, after ranking; 1 where the column is constant.
        categories: Known values of each category column; others encode as all zeros.
    """

    numeric: str
    ranks: dict[str, np.ndarray]
    mean: dict[str, float]
    std: dict[str, float]
    categories: dict[str, list[str]]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns: numbers first, then ``column=value``."""
        pairs = ((column, value) for column, known in self.categories.items() for value in known)
        return (*self.mean, *(f"{column}={value}" for column, value in pairs))

    def encode(self, table: pd.DataFrame) -> Float32[np.ndarray, "N F"]:
        """Return the features of each row of ``table``."""
        numbers = [
            (self._scores(column, table[column].to_numpy(np.float64)) - mean) / self.std[column]
            for column, mean in self.mean.items()
        ]
        flags = [
            pd.Index(known).get_indexer(_as_text(table[column]))[:, None] == np.arange(len(known))
            for column, known in self.categories.items()
        ]
        columns = [column[:, None] for column in numbers] + flags
        return np.concatenate(columns, axis=1).astype(np.float32)

    def _scores(self, column: str, values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
        return normal_scores(values, self.ranks[column]) if self.numeric == "quantile" else values


def fit_table_encoder(train: pd.DataFrame, *, numeric: str = "standard") -> TableEncoder:
    """Return the encoder of a table.

    Args:
        train: Training rows alone; columns of numbers are scaled, all others are categories.
        numeric: "standard" or "quantile", see ``TableEncoder``.
    """
    check_one_of("numeric", numeric, NUMERIC_SCALES)
    number_columns = [column for column in train if is_number(train[column])]
    values = {column: train[column].to_numpy(np.float64) for column in number_columns}
    ranks = {}
    if numeric == "quantile":
        ranks = {column: np.sort(value) for column, value in values.items()}
        values = {column: normal_scores(value, ranks[column]) for column, value in values.items()}
    return TableEncoder(
        numeric=numeric,
        ranks=ranks,
        mean={column: float(value.mean()) for column, value in values.items()},
        std={column: float(value.std()) or 1.0 for column, value in values.items()},
        categories={
            column: sorted(set(_as_text(train[column])))
            for column in train
            if column not in number_columns
        },
    )


def normal_scores(
    values: Float[np.ndarray, "N"], ranks: Float[np.ndarray, "M"]
) -> Float[np.ndarray, "N"]:
    """Return the normal quantile of each value's rank among the sorted ``ranks``.

    Ties take their middle rank. (scikit-learn's QuantileTransformer sends a tied smallest value,
    such as the zeros that fill most of a column of gains, to its far end instead.)
    """
    below, upto = (np.searchsorted(ranks, values, side=side) for side in ("left", "right"))
    middle = (below + upto) / 2
    return norm.ppf(np.clip(middle, 0.5, len(ranks) - 0.5) / len(ranks))


def is_number(column: pd.Series) -> bool:
    """Return whether a column holds numbers; truth values are categories."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def check_table(table: pd.DataFrame, *, allow_missing: bool = False) -> pd.DataFrame:
    """Return ``table`` if all its columns can be encoded, missing numbers put in where allowed."""
    if table.shape[1] == 0:
        raise ValueError("table must have at least one feature column, got none")
    for column in table:
        if is_number(table[column]):
            values = table[column].to_numpy(np.float64, na_value=np.nan)
            bad = np.isinf(values) if allow_missing else ~np.isfinite(values)
            rule, count = "be finite numbers", int(bad.sum())
            found = f"{count} NaN or infinite values, first in row {int(bad.argmax())}"
        else:
            rule, count = f"hold at most {MAX_CATEGORIES} values", table[column].nunique()
            found = f"{count} (leave out names and ids)"
            count = max(0, count - MAX_CATEGORIES)
        if count:
            raise ValueError(f"column {column!r} must {rule}, got {found}")
    return table


def _as_text(column: pd.Series) -> pd.Series:
    return column.astype(object).where(column.notna(), MISSING).map(str)
