"""Exponents: how search, trust and stage 2 grow with the number of memory rows n.

Each time is fitted by c * n ** e over several n, all sizes measured in turns.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnknn.config import AttentionConfig, FittingConfig
from attnknn.files import write_json
from attnknn.fit import fit_on_neighbours
from attnknn.memory import MemoryBank
from attnknn.provenance import provenance
from benchmarks.sizes import clustered_rows
from benchmarks.timing import Action, interleaved

FILE = "exponents.json"
DIM, K, N_QUERIES = 128, 50, 1000
ROWS, QUICK_ROWS = (6_250, 12_500, 25_000, 50_000, 100_000), (500, 1_000, 2_000)
EXPECTED = {"exact": 1.0, "hnsw": 0.0, "ivfpq": 0.5, "trust": 2.0, "fit": 0.0}


def run_exponents(folder: Path, *, quick: bool = False) -> dict[str, float]:
    """Measure, write ``exponents.json`` and return the exponents by name."""
    sizes, rounds = (QUICK_ROWS, 1) if quick else (ROWS, 3)
    measured = {name: [] for name in EXPECTED}
    for name in EXPECTED:
        actions = {str(n): action(name, n) for n in sizes}
        times = interleaved(actions, rounds)
        measured[name] = [min(times[str(n)]) for n in sizes]
    fitted = {name: exponent(sizes, times) for name, times in measured.items()}
    result = {
        "rows": list(sizes),
        "seconds": measured,
        "exponents": fitted,
        "expected": EXPECTED,
        "threads": torch.get_num_threads(),
        **provenance(),
    }
    write_json(folder / FILE, result)
    return fitted


def exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the slope of log seconds in log n."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), deg=1)[0])


def action(name: str, n_rows: int) -> Action:
    """Return what is timed at one size, ready to go."""
    n_clusters = max(10, n_rows // 100)
    rows, queries = (
        clustered_rows(n, DIM, seed, n_clusters=n_clusters)
        for seed, n in enumerate((n_rows, N_QUERIES))
    )
    index = name if name in ("exact", "hnsw", "ivfpq") else "exact"
    bank = MemoryBank(rows, np.arange(n_rows) % 10, n_classes=10, index=index)
    if name == "trust":
        return lambda: bank.nearest_rows(bank.rows, 20, torch.arange(n_rows))
    if name == "fit":
        return _fit(bank, queries)
    return lambda: bank.search(queries, K)


def _fit(bank: MemoryBank, queries: np.ndarray) -> Action:
    found, labels = bank.search(queries, K), np.arange(len(queries)) % 10
    _ = bank.view.prototypes  # trust is made once a bank, whoever asks
    options: dict[str, Any] = {
        "attention": AttentionConfig(),
        "fitting": FittingConfig(fit_epochs=3, fit_k=K),
    }
    return lambda: fit_on_neighbours(bank, found, labels, **options)
