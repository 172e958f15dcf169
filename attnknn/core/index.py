"""Index: a name and rows become a filled index.

What ``auto`` takes, and why (``python -m benchmarks million`` measures all of them):

- exact up to 100 000 rows: always right, nothing to build, nothing to tune. A graph wins its build
  back only after many queries to a bank that does not change.
- hnsw up to 500 000 rows: the fastest search. But it takes the longest to build, and it holds a
  second copy of the rows and their links.
- ivfpq above: slower than hnsw, taken for its quick build and its half a byte a number. Candidates
  are ranked by their true cosine, read from the bank's own rows.
- disk where the rows are a memory-mapped file that would fill most of the free memory: the lists
  are a file too, and of the rows only the candidates are read.

Where one takes over from the other is a judgement of how long a build may take.
``autotune`` finds the depth of a search for the bank at hand.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from attnknn.core.approximate import DiskIndex, factory_index, hnsw_index, ivfpq_index
from attnknn.core.exact import FlatIndex, Index, MatmulIndex, exact_index

AUTO_EXACT_ROWS = 100_000
AUTO_HNSW_ROWS = 500_000
AUTO_MEMORY_SHARE = 0.5  # of the free memory that mapped rows may take before lists go to disk


def auto_index(n_rows: int, row_bytes: int, *, on_disk: bool = False) -> str:
    """Return what ``auto`` stands for.

    Args:
        n_rows: Rows of the bank.
        row_bytes: Bytes of all rows together.
        on_disk: Whether the rows are a memory-mapped file.
    """
    if on_disk and row_bytes > AUTO_MEMORY_SHARE * free_memory():
        return "disk"
    if n_rows <= AUTO_EXACT_ROWS:
        return "exact"
    return "hnsw" if n_rows <= AUTO_HNSW_ROWS else "ivfpq"


def free_memory() -> float:
    """Return the bytes that can be had without swapping; infinite where nobody knows."""
    facts = Path("/proc/meminfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


def build_index(
    name: str,
    rows: Float[np.ndarray, "N D"],
    *,
    settings: Mapping[str, int] | None = None,
    on_disk: bool = False,
    folder: Path | None = None,
    uri: str | None = None,
    collection: str | None = None,
) -> Index:
    """Return an index over ``rows``.

    Args:
        name: ``auto`` (by size, see the head of this file), ``flat_ip``, ``flat_l2``, ``hnsw``,
            ``ivfpq``, ``disk``, ``matmul``, ``milvus``, or a FAISS factory string such as
            ``IVF256,PQ32``.
        rows: Unit-length rows; exact indexes keep a reference to them instead of a copy.
        settings: Values of the index's knobs, such as ``{"efSearch": 128}``.
        on_disk: Whether the rows are a memory-mapped file.
        folder: Where a ``disk`` index keeps its lists; None takes a temporary folder.
        uri: Server, or file of the embedded version, of a ``milvus`` index.
        collection: Collection of a ``milvus`` index that outlives this process.
    """
    if name == "auto":
        name = auto_index(len(rows), rows.nbytes, on_disk=on_disk)
    if name == "milvus":
        from attnknn.core.milvus import MilvusIndex

        index: Index = MilvusIndex(rows, uri=uri, collection=collection)
        index.extend(rows)
    else:
        index = _local_index(name, rows, folder)
    index.tune(settings or {})
    return index


def _local_index(name: str, rows: Float[np.ndarray, "N D"], folder: Path | None) -> Index:
    """Return a filled index; rows that a compressed index cannot be trained on are refused."""
    n_rows, dim = rows.shape
    makers = {
        "exact": exact_index,
        "flat_ip": FlatIndex,
        "flat_l2": lambda: FlatIndex("l2"),
        "matmul": MatmulIndex,
        "hnsw": lambda: hnsw_index(dim),
        "ivfpq": lambda: ivfpq_index(n_rows, dim),
        "disk": lambda: DiskIndex(n_rows, dim, folder),
    }
    try:
        index = makers[name]() if name in makers else factory_index(name, dim)
        index.extend(rows)
    except RuntimeError as error:
        # faiss begins with the C++ signature; the reason stands behind the source line.
        reason = " ".join(str(error).split(": ", 2)[-1].split())
        raise ValueError(
            "index must be auto, flat_ip, flat_l2, hnsw, ivfpq, disk, matmul, milvus or a FAISS "
            f"factory string that suits {n_rows} rows of width {dim}, got index={name!r} ({reason})"
        ) from None
    return index
