"""Exponents: how search, trust and stage 2 grow with the number of memory rows n.

Each time is fitted by c * n ** e over several n, all sizes measured in turns. An approximate index
is tuned to the same recall at every n: at fixed settings it would get faster and worse.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import fit_on_neighbours
from attnknn.files import provenance, write_json
from benchmarks.environment import set_aside
from benchmarks.sizes import clustered_rows, clusters_of
from benchmarks.timing import Action, interleaved

FILE = "exponents.json"
DIM, K, N_QUERIES, RECALL = 128, 50, 1000, 0.99
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
    write_json(folder / FILE, result)
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
