"""Vector indexes: unit rows -> something that finds the K most similar rows of a query."""

from attnknn.index.approximate import DiskIndex, FaissIndex
from attnknn.index.base import Index
from attnknn.index.choose import auto_index, build_index
from attnknn.index.exact import FlatIndex, MatmulIndex, cosines_of_ids, search_by_matmul
from attnknn.index.tune import recall_of, tune_index

__all__ = [
    "DiskIndex",
    "FaissIndex",
    "FlatIndex",
    "Index",
    "MatmulIndex",
    "auto_index",
    "build_index",
    "cosines_of_ids",
    "recall_of",
    "search_by_matmul",
    "tune_index",
]
