"""Tables: small parquet files, numbers as numbers, categories as categories, and their facts.

``prepare`` (sources) makes them once; ``load`` reads one and needs nothing of the package, so that
the arena can judge any version of it. Axes: N rows.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

MIN_CLASS_ROWS = 6  # rarer classes are left out: both sides of a 70/30 split must have each class
LABEL = "__label__"

COMMON_TABLES = (
    *("abalone", "ada", "appendicitis", "automobile", "balance", "car", "cleveland", "cm1"),
    *("dermatology", "ecoli", "fars", "fertility", "flare", "glass", "haberman", "hepatitis"),
    *("hiva", "hypothyroid", "kc1", "kr-vs-k", "lymphography", "newthyroid", "nursery"),
    *("page-blocks", "pc1", "poker-9_vs_7", "post-operative", "spectfheart", "sylva", "yeast"),
    "zoo",
)
KNOWN_TABLES = ("wine_red", "wine_white", "adult", "digits", "breast_cancer")
MLBENCH_TABLES = ("shuttle", "soybean")
EMBEDDINGS = ("mnist_pca", "cifar10_lite1", "mail_words")
TABLES = (*COMMON_TABLES, *KNOWN_TABLES, *MLBENCH_TABLES, *EMBEDDINGS)


@dataclass(frozen=True)
class Facts:
    """What is known of a table without reading it.

    Attributes:
        name: The table.
        rows: All rows kept.
        numbers: Columns of numbers.
        categories: Columns of categories.
        missing: Share of entries that are missing.
        classes: Names of the classes, by label.
        left_out: Rows of classes rarer than ``MIN_CLASS_ROWS``.
        source: Where it came from.
        data: Digest of features and labels, the same on every machine.
    """

    name: str
    rows: int
    numbers: int
    categories: int
    missing: float
    classes: tuple[str, ...]
    left_out: int
    source: str
    data: str


@dataclass(frozen=True)
class Table:
    """Features, labels from 0 on, and facts."""

    features: pd.DataFrame
    labels: np.ndarray
    facts: Facts


def tables_folder() -> Path:
    """Return where prepared tables are: in the data cache.

    Its rule is the package's, repeated here because ``load`` must not need the package.
    """
    if chosen := os.environ.get("ATTNKNN_DATA"):
        return Path(chosen).expanduser() / "arena"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "attnknn" / "arena"


def facts_of(names: Iterable[str], folder: Path | None = None) -> list[Facts]:
    """Return the facts of prepared tables."""
    folder = folder or tables_folder()
    found = []
    for name in names:
        path = folder / f"{name}.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"tables must be prepared first (python -m benchmarks.arena prepare), got {name=}"
            )
        stored = json.loads(path.read_text(encoding="utf-8"))
        found.append(Facts(**{**stored, "classes": tuple(stored["classes"])}))
    return found


def load(name: str, folder: Path | None = None) -> Table:
    """Return a prepared table."""
    folder = folder or tables_folder()
    (facts,) = facts_of([name], folder)
    features = pd.read_parquet(folder / f"{name}.parquet")
    labels = features.pop(LABEL).to_numpy(np.int64)
    return Table(features, labels, facts)


def finished(name: str, features: pd.DataFrame, labels: Iterable, source: str) -> Table:
    """Return a table without its rarest classes, labels as codes, and its facts.

    Args:
        name: The table.
        features: Columns; those that are not numbers become text, None where missing.
        labels: Anything that can be sorted.
        source: Where it came from, in words.
    """
    given = np.asarray(list(labels))
    values, codes, counts = np.unique(given, return_inverse=True, return_counts=True)
    kept = counts[codes] >= MIN_CLASS_ROWS
    values, codes = np.unique(given[kept], return_inverse=True)
    features = features[kept].reset_index(drop=True)
    features.columns = [str(column) for column in features]
    is_number = [pd.api.types.is_numeric_dtype(features[column]) for column in features]
    for column, number in zip(features, is_number, strict=True):
        if not number:
            text = features[column].astype(object)
            features[column] = text.where(text.notna(), None)
    facts = Facts(
        name=name,
        rows=len(features),
        numbers=sum(is_number),
        categories=features.shape[1] - sum(is_number),
        missing=float(features.isna().to_numpy().mean()),
        classes=tuple(str(value) for value in values),
        left_out=int((~kept).sum()),
        source=source,
        data=digest(features, codes),
    )
    return Table(features, codes.astype(np.int64), facts)


def digest(features: pd.DataFrame, labels: np.ndarray) -> str:
    """Return a short digest of what a method sees: names, values and labels in their order."""
    found = hashlib.sha256("\n".join(features.columns).encode())
    found.update(pd.util.hash_pandas_object(features, index=False).to_numpy().tobytes())
    found.update(np.asarray(labels, np.int64).tobytes())
    return found.hexdigest()[:16]
