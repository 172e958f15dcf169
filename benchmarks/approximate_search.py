"""Approximate search: how much faster than exact at a recall of at least 0.99."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from attnknn.core.bank import MemoryBank
from benchmarks.sizes import Sizes, clustered_rows
from benchmarks.timing import Missing, Ratio, divided, interleaved

RECALL = 0.99
INDEXES = ("hnsw", "ivfpq")


def measure(sizes: Sizes, curves: dict[str, Any]) -> list[Ratio | Missing]:
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
        curve = pd.DataFrame(bank.autotune(held_out, recall=RECALL, k=sizes.k))
        curves[name] = curve.round(5).to_dict(orient="records")
        chosen[name] = curve[curve["chosen"]].iloc[0]
    actions = {
        name: (lambda bank=bank: bank.search(queries, sizes.k)) for name, bank in banks.items()
    }
    times = interleaved(actions, sizes.rounds)
    ratios = {name: divided(times["exact"], times[name]) for name in INDEXES}
    settings = {name: banks[name].index_settings for name in INDEXES}
    return [row_of(name, ratios[name], chosen[name], settings[name]) for name in INDEXES]


def row_of(
    name: str, ratios: tuple[float, ...], chosen: Mapping[str, Any], settings: Mapping[str, int]
) -> Ratio | Missing:
    """Return the speed-up of an index, or that it has none: a fast answer must also be right.

    Args:
        name: The index.
        ratios: How much faster than exact it is, in each round.
        chosen: The row of ``autotune`` that was chosen: ``recall`` and ``reached``.
        settings: The settings in force.
    """
    title = f"{name} search: times the speed of our exact one"
    if not chosen["reached"]:
        reason = f"no setting keeps a recall of {RECALL:g}; the best, {chosen['recall']:.4f}, has "
        return Missing(f"{name}_over_exact", title, f"{reason}{dict(settings)}")
    note = f"recall {chosen['recall']:.4f} with {dict(settings)}, clustered rows"
    return Ratio(f"{name}_over_exact", title, ratios, "higher", note=note)
