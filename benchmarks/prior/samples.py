"""Samples: what the prior sees of a drawn table, made by the same code that serves a fit.

Axes: B queries, K neighbours of each, C classes.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnknn.core.bank import MemoryBank
from attnknn.core.prior import Evidence, evidence_of, joined
from attnknn.estimator.embedding import charted
from attnknn.estimator.fitting import default_k
from attnknn.estimator.inputs import distinct_rows
from benchmarks.prior.draw import DrawnTable, draw_table

LEFT_OUT_QUERIES = 48
MOST_CELLS = 600_000  # of label histograms that a sample holds


@dataclass(frozen=True)
class Sample:
    """Evidence of new queries and of left-out memory rows, and their right labels."""

    evidence: Evidence
    targets: Tensor
    table: DrawnTable
    metric: str


def make_sample(seed: int, *, noise: bool = True, metric: str | None = None) -> Sample:
    """Return the sample of a drawn table; its metric and k are drawn too."""
    table = draw_table(seed, noise=noise)
    rng = np.random.default_rng([7, seed])
    metric = metric or str(rng.choice(metrics_for(table)))
    bank, embedding, right = memory_of(table, metric)
    k = default_k(len(bank), table.n_classes)
    if rng.random() < 0.4:
        k = round(k * np.exp(rng.uniform(np.log(0.5), np.log(2))))
    k = int(np.clip(k, 3, min(64, len(bank) - 1)))
    n_new = min(len(table.targets), max(16, MOST_CELLS // (k * table.n_classes)))
    found = bank.search(embedding.rows(table.queries)[:n_new], k)
    parts, targets = [evidence_of(found)], [table.targets[:n_new]]
    if bank.weights is None:  # copies of one row may have different right labels
        own = rng.permutation(len(bank))[: min(LEFT_OUT_QUERIES, n_new)]
        found = bank.search(bank.rows.numpy()[own], k, exclude_ids=own)
        parts.append(evidence_of(found))
        targets.append(right[own])
    seen = joined(parts)
    halved = replace(seen, neighbour=seen.neighbour.half(), histograms=seen.histograms.half())
    return Sample(halved, torch.from_numpy(np.concatenate(targets)), table, metric)


def metrics_for(table: DrawnTable) -> list[str]:
    """Return the metrics that suit a drawn table."""
    if isinstance(table.memory, pd.DataFrame):
        return ["standardised", "quantile", "weighted", "weighted quantile"]
    if table.kind == "embedding":
        return ["cosine", "cosine", "euclidean"]
    return ["standardised", "quantile", "weighted", "weighted quantile"]


def memory_of(table: DrawnTable, metric: str):
    """Return the memory of a table, what embeds rows, and the right labels of the memory."""
    inputs, labels, right, weights = table.memory, table.labels, table.right, None
    if table.kind == "categories":
        first, entries = distinct_rows(inputs, labels)
        inputs, labels, right = inputs.iloc[first], labels[first], right[first]
        weights = np.bincount(entries).astype(np.float32)
    embedding, rows = charted(inputs, metric, impute=False, function=None, labels=labels)
    bank = MemoryBank(rows, labels, n_classes=table.n_classes, weights=weights)
    return bank, embedding, right
