"""Tables: columns of numbers and categories become standardised and one-hot features.

The encoder is fitted on training rows alone. Axes: N rows, F features.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Float32, Int
from scipy.stats import norm

from attnknn.checks import check_one_of

NUMERIC_SCALES = ("standard", "quantile")
MISSING = "missing"  # name of a category of its own: not knowing is often informative
MAX_CATEGORIES = 1000
# What pandas finds in columns that it does not call numeric.
NUMBERS = ("floating", "integer", "mixed-integer-float", "decimal")
NO_FEATURES = ("datetime64", "datetime", "date", "time", "timedelta64", "timedelta", "period")


@dataclass(frozen=True)
class TableEncoder:
    """What was learned from the training rows of a table.

    Attributes:
        numeric: "standard": (x - mean) / std. "quantile": normal scores of the ranks among the
            training rows, then standardised; for skewed columns and for outliers.
        ranks: Sorted training values of each number column ("quantile" only).
        mean: Of each number column, after ranking.
        std: Of each number column, after ranking; 1 where the column is constant.
        categories: Known values of each category column, None for a missing one; others encode
            as all zeros.
    """

    numeric: str
    ranks: dict[str, np.ndarray]
    mean: dict[str, float]
    std: dict[str, float]
    categories: dict[str, list[str | None]]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns: numbers first, then ``column=value``."""
        pairs = ((column, value) for column, known in self.categories.items() for value in known)
        return (*self.mean, *(f"{column}={_name(value)}" for column, value in pairs))

    def encode(self, table: pd.DataFrame) -> Float32[np.ndarray, "N F"]:
        """Return the features of each row of ``table``."""
        numbers = [
            (self._scores(column, table[column].to_numpy(np.float64)) - mean) / self.std[column]
            for column, mean in self.mean.items()
        ]
        flags = [
            _places(table[column], known)[:, None] == np.arange(len(known))
            for column, known in self.categories.items()
        ]
        columns = [column[:, None] for column in numbers] + flags
        return np.concatenate(columns, axis=1).astype(np.float32)

    def _scores(self, column: str, values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
        return normal_scores(values, self.ranks[column]) if self.numeric == "quantile" else values


def fit_table_encoder(train: pd.DataFrame, *, numeric: str = "standard") -> TableEncoder:
    """Return the encoder of a table.

    Args:
        train: Training rows alone; columns of numbers are scaled, all others are categories. What
            ``with_numbers`` returned, where columns may hold numbers as objects.
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
            column: sorted(
                set(_as_text(train[column])), key=lambda text: (_name(text), text is None)
            )
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


def with_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Return ``table`` with all its columns of numbers as such, whatever pandas calls them.

    Objects that are numbers (decimals, floats that some reader has left as they came) become
    floats: as categories every one of them would be a stranger to all others. Times are refused,
    for no unit and no origin of theirs would suit every table.
    """
    floats = {}
    for name in table:
        column = table[name]
        kind = "number" if is_number(column) else pd.api.types.infer_dtype(column, skipna=True)
        if kind in NO_FEATURES:
            raise ValueError(
                f"column {name!r} must hold numbers or categories, got {column.dtype} "
                f"({kind}: give the time since some day as a number)"
            )
        if kind in NUMBERS:
            floats[name] = _as_floats(column)
    table = table.copy(deep=False)
    for name, column in floats.items():
        table[name] = column
    return table


def _as_floats(column: pd.Series) -> pd.Series:
    try:
        return column.where(column.notna(), np.nan).astype(np.float64)
    except OverflowError:  # an integer beyond all floats
        raise ValueError(
            f"column {column.name!r} must be finite numbers, got larger ones"
        ) from None


def n_categories(column: pd.Series) -> int:
    """Return how many categories a column holds, or refuse what cannot be told apart."""
    try:
        return column.nunique()
    except TypeError:
        kinds = sorted({type(value).__name__ for value in column.dropna()})
        raise ValueError(
            f"column {column.name!r} must hold numbers or categories, got {' and '.join(kinds)}"
        ) from None


def check_table(table: pd.DataFrame, *, allow_missing: bool = False) -> pd.DataFrame:
    """Return ``table`` if all its columns can be encoded, numbers as numbers.

    Args:
        table: Features alone.
        allow_missing: Let missing numbers pass.
    """
    if table.shape[1] == 0:
        raise ValueError("table must have at least one feature column, got none")
    table = with_numbers(table)
    for column in table:
        if is_number(table[column]):
            values = table[column].to_numpy(np.float64, na_value=np.nan)
            bad = np.isinf(values) if allow_missing else ~np.isfinite(values)
            rule, count = "be finite numbers", int(bad.sum())
            found = f"{count} NaN or infinite values, first in row {int(bad.argmax())}"
        else:
            rule, count = f"hold at most {MAX_CATEGORIES} values", n_categories(table[column])
            found = f"{count} (leave out names and ids)"
            count = max(0, count - MAX_CATEGORIES)
        if count:
            raise ValueError(f"column {column!r} must {rule}, got {found}")
    return table


def _places(column: pd.Series, known: list[str | None]) -> Int[np.ndarray, "N"]:
    """Return the place of each value among the known ones; -1 for another."""
    place = {value: i for i, value in enumerate(known)}
    return np.array([place.get(text, -1) for text in _as_text(column)], dtype=np.int64)


def _as_text(column: pd.Series) -> list[str | None]:
    """Return each category as text; None, which no value can be taken for, where it is missing."""
    pairs = zip(column.astype(object), column.isna(), strict=True)
    return [None if missing else _text(value) for value, missing in pairs]


def _text(value: object) -> str:
    # Integers that have passed through a column with missing values come back as floats.
    integral = isinstance(value, float | np.floating) and value.is_integer()
    return str(int(value)) if integral else str(value)


def _name(value: str | None) -> str:
    return MISSING if value is None else value
