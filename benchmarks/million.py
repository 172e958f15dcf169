"""A million rows: build, tune, search, recall and memory of every index that is made for them."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from attnknn.core.index import build_index
from attnknn.core.search import RowBank
from attnknn.files import provenance, read_json, write_json
from benchmarks.environment import set_aside
from benchmarks.sizes import clustered_rows, clusters_of

FILE = "million.json"
DIM, K, N_QUERIES, RECALL = 128, 50, 2000, 0.99
INDEXES = ("exact", "hnsw", "ivfpq", "disk")


def run_million(
    folder: Path, *, n_rows: int = 1_000_000, names: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Measure and write ``million.json``, index by index; one that is there already is replaced.

    Args:
        folder: Where the file goes; the rows are kept there while they are in use.
        n_rows: Number of rows.
        names: Indexes to measure; all when empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.npy"
    n_clusters = clusters_of(n_rows)
    np.save(path, clustered_rows(n_rows, DIM, 0, n_clusters=n_clusters))
    rows = np.load(path, mmap_mode="r")
    queries = clustered_rows(N_QUERIES, DIM, 1, n_clusters=n_clusters)
    held_out = clustered_rows(1000, DIM, 2, n_clusters=n_clusters)
    result = _known(folder, n_rows) | {
        "threads": torch.get_num_threads(),
        "set_aside": dict(set_aside),
        **provenance(),
    }
    for name in tqdm(names or INDEXES, desc=f"{n_rows} rows"):
        result["indexes"][name] = measure(name, rows, queries, held_out)
        write_json(folder / FILE, result)
    path.unlink()
    return result["indexes"]


def measure(
    name: str, rows: np.ndarray, queries: np.ndarray, held_out: np.ndarray
) -> dict[str, Any]:
    """Return build seconds, memory, tuned settings, recall and speed of one index."""
    kept = rows if name == "disk" else np.array(rows)
    start, before = time.perf_counter(), resident()
    bank = RowBank.over(kept, index=name)
    built = {"build_seconds": time.perf_counter() - start, "index_bytes": resident() - before}
    curve = pd.DataFrame(bank.autotune(held_out, recall=RECALL, k=K))
    probes = torch.from_numpy(queries)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        ids = bank.nearest_rows(probes, K)[1]
        times.append(time.perf_counter() - start)
    true = bank.nearest_rows(probes, K, index=build_index("exact", bank.rows.numpy()))[1]
    hits = (ids[:, :, None] == true[:, None]).any(dim=2).float().mean()
    settings = dict(bank.index_settings)
    on_disk = bank.index.file.totsize if name == "disk" else 0
    bank.close()
    return built | {
        "disk_bytes": int(on_disk),
        "n_rows": len(rows),
        "dim": rows.shape[1],
        "k": K,
        "settings": settings,
        "recall": float(hits),
        "queries_per_second": len(queries) / min(times),
        "curve": curve.round(5).to_dict(orient="records"),
    }


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    facts = Path("/proc/self/status")
    if not facts.exists():
        return 0
    line = next(x for x in facts.read_text().splitlines() if x.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def _known(folder: Path, n_rows: int) -> dict[str, Any]:
    """Return what was measured before for as many rows."""
    path = folder / FILE
    if path.exists() and (known := read_json(path)).get("n_rows") == n_rows:
        return known
    return {"n_rows": n_rows, "indexes": {}}
