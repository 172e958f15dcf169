"""Growth: how times grow with the rows, and what a million of them take.

Each time is fitted by c * n ** e over several n, all sizes measured in turns. An approximate index
is tuned to the same recall at every n: at fixed settings it would get faster and worse.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.index import build_index
from attnknn.core.search import RowBank
from attnknn.files import provenance, read_json, write_json
from benchmarks import set_aside
from benchmarks.timing import Action, clustered_rows, clusters_of, interleaved

# ---- A million rows: build, tune, search, recall and memory of every index made for them.

MILLION_FILE = "million.json"
DIM, K, RECALL = 128, 50, 0.99
MILLION_QUERIES = 2000
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
    queries = clustered_rows(MILLION_QUERIES, DIM, 1, n_clusters=n_clusters)
    held_out = clustered_rows(1000, DIM, 2, n_clusters=n_clusters)
    result = _known(folder, n_rows) | {
        "threads": torch.get_num_threads(),
        "set_aside": dict(set_aside),
        **provenance(),
    }
    for name in tqdm(names or INDEXES, desc=f"{n_rows} rows"):
        result["indexes"][name] = measure_index(name, rows, queries, held_out)
        write_json(folder / MILLION_FILE, result)
    path.unlink()
    return result["indexes"]


def measure_index(
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
    path = folder / MILLION_FILE
    if path.exists() and (known := read_json(path)).get("n_rows") == n_rows:
        return known
    return {"n_rows": n_rows, "indexes": {}}


# ---- Exponents of search, trust and stage 2.

EXPONENTS_FILE = "exponents.json"
N_QUERIES = 1000
ROWS, QUICK_ROWS = (6_250, 12_500, 25_000, 50_000, 100_000), (500, 1_000, 2_000)
EXPECTED = {"exact": 1.0, "hnsw": 0.0, "ivfpq": 0.5, "trust": 2.0, "fit": 0.0}
SEARCHES = ("exact", "hnsw", "ivfpq")


def run_exponents(folder: Path, *, quick: bool = False) -> dict[str, float]:
    """Measure, write ``exponents.json`` and return the exponents by name."""
    sizes, rounds = (QUICK_ROWS, 2) if quick else (ROWS, 3)
    measured, indexes = {}, {}
    for name in EXPECTED:
        banks = [tuned_bank(name if name in SEARCHES else "exact", n) for n in sizes]
        actions = {str(n): action(name, bank) for n, (bank, _) in zip(sizes, banks, strict=True)}
        measured[name] = list(interleaved(actions, rounds).values())
        if name in SEARCHES:
            indexes[name] = [
                facts | {"queries_per_second": N_QUERIES / min(times)}
                for (_, facts), times in zip(banks, measured[name], strict=True)
            ]
    result = {
        "rows": list(sizes),
        "dim": DIM,
        "k": K,
        "seconds": {name: [min(each) for each in times] for name, times in measured.items()},
        "exponents": {name: slope(sizes, times) for name, times in measured.items()},
        "ranges": {name: slope_range(sizes, times) for name, times in measured.items()},
        "expected": EXPECTED,
        "indexes": indexes,
        "threads": torch.get_num_threads(),
        "set_aside": dict(set_aside),
        **provenance(),
    }
    write_json(folder / EXPONENTS_FILE, result)
    return result["exponents"]


def exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the slope of log seconds in log n."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), deg=1)[0])


def slope(sizes: tuple[int, ...], times: list[list[float]]) -> float:
    """Return the exponent of the shortest time at each size."""
    return exponent(sizes, [min(each) for each in times])


def slope_range(sizes: tuple[int, ...], times: list[list[float]]) -> tuple[float, float]:
    """Return the smallest and the largest exponent that a single round gives."""
    each = [exponent(sizes, list(seconds)) for seconds in zip(*times, strict=True)]
    return min(each), max(each)


def tuned_bank(index: str, n_rows: int) -> tuple[MemoryBank, dict[str, Any]]:
    """Return a bank at the asked recall, and what building and tuning it gave."""
    rows, held_out = _drawn(n_rows, n_rows, 0), _drawn(n_rows, N_QUERIES, 2)
    start = time.perf_counter()
    bank = MemoryBank(rows, np.arange(n_rows) % 10, n_classes=10, index=index)
    built = time.perf_counter() - start
    curve = pd.DataFrame(bank.autotune(held_out, recall=RECALL, k=K))
    return bank, {
        "n_rows": n_rows,
        "build_seconds": built,
        "recall": float(curve.loc[curve["chosen"], "recall"].iloc[0]),
        "settings": dict(bank.index_settings),
    }


def action(name: str, bank: MemoryBank) -> Action:
    """Return what is timed at one size, ready to go."""
    queries = _drawn(len(bank), N_QUERIES, 1)
    if name == "trust":
        return lambda: bank.nearest_rows(bank.rows, 20, torch.arange(len(bank)))
    if name == "fit":
        return _fit(bank, queries)
    return lambda: bank.search(queries, K)


def _drawn(n_rows: int, n_drawn: int, seed: int) -> np.ndarray:
    return clustered_rows(n_drawn, DIM, seed, n_clusters=clusters_of(n_rows))


def _fit(bank: MemoryBank, queries: np.ndarray) -> Action:
    found, labels = bank.search(queries, K), np.arange(len(queries)) % 10
    _ = bank.view.prototypes  # trust is made once a bank, whoever asks
    options: dict[str, Any] = {
        "attention": AttentionConfig(),
        "fitting": FittingConfig(fit_epochs=3, fit_k=K),
    }
    return lambda: fit_on_neighbours(bank, found, labels, **options)
