"""Approximate search: how much faster than exact at a recall of at least 0.99."""

from typing import Any

import numpy as np

from attnknn.memory import MemoryBank
from benchmarks.sizes import Sizes, clustered_rows
from benchmarks.timing import Ratio, divided, interleaved

RECALL = 0.99
INDEXES = ("hnsw", "ivfpq")


def measure(sizes: Sizes, curves: dict[str, Any]) -> list[Ratio]:
    """Return the speed-ups; the recall/speed curves go to ``curves``."""
    rows, queries, held_out = (
        clustered_rows(n, sizes.dim, seed, n_clusters=max(10, sizes.rows // 100))
        for seed, n in enumerate((sizes.rows, sizes.queries, min(1000, sizes.queries)))
    )
    labels = np.arange(len(rows)) % 10
    banks = {
        name: MemoryBank(rows, labels, n_classes=10, index=name) for name in ("exact", *INDEXES)
    }
    chosen = {}
    for name, bank in banks.items():
        curve = bank.autotune(held_out, recall=RECALL, k=sizes.k)
        curves[name] = curve.round(5).to_dict(orient="records")
        chosen[name] = curve[curve["chosen"]].iloc[0]
    actions = {
        name: (lambda bank=bank: bank.search(queries, sizes.k)) for name, bank in banks.items()
    }
    times = interleaved(actions, sizes.rounds)
    return [
        Ratio(
            f"{name}_over_exact",
            f"{name} search: times the speed of our exact one",
            divided(times["exact"], times[name]),
            "higher",
            note=f"recall {chosen[name]['recall']:.4f} with {banks[name].index_settings}, "
            "clustered rows",
        )
        for name in INDEXES
    ]
