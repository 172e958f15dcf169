"""Samples: what the prior sees of a drawn table, made by the same code that serves a fit.

Axes: B queries, K neighbours of each, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnknn.core.bank import MemoryBank
from attnknn.core.prior import (
    CONTEXT_COLUMNS,
    NEIGHBOUR_COLUMNS,
    Evidence,
    evidence_of,
    joined,
)
from attnknn.estimator.embedding import charted
from attnknn.estimator.fitting import default_k
from attnknn.estimator.inputs import distinct_rows
from attnknn.files import load_checkpoint, save_checkpoint
from attnknn.progress import progress_bar
from benchmarks.prior.draw import DrawnTable, draw_table

LEFT_OUT_QUERIES = 48
MOST_CELLS = 600_000  # of label histograms that a sample holds
VALIDATION_SEEDS = 10_000_000  # drawn tables from here on are never trained on
CHUNK = 250  # tables a file
SAMPLES_VERSION = 1  # raise it when tables are drawn, or evidence is made, in another way


@dataclass(frozen=True)
class Sample:
    """Evidence of new queries and of left-out memory rows, and their right labels.

    Attributes:
        evidence: Its large parts in half precision.
        targets: Right labels.
        kind: How the table's labels depend on its rows.
        noise: How they went wrong; "clean" where none did.
        metric: Under which neighbours were found.
    """

    evidence: Evidence
    targets: Tensor
    kind: str
    noise: str
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
    targets = torch.from_numpy(np.concatenate(targets))
    return Sample(halved, targets, str(table.kind), table.noise, metric)


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


# ---- Kept samples: drawn once, chunk by chunk, so that a stopped program draws on where it was.


def kept_samples(
    folder: Path, first: int, n_tables: int, *, noise: bool = True, title: str = "tables"
) -> list[Sample]:
    """Return the samples of some seeds; what has been drawn before is read.

    Args:
        folder: Where chunks are kept.
        first: First seed.
        n_tables: Seeds from there on.
        noise: Whether labels may be wrong.
        title: Of the bar.
    """
    samples = []
    with progress_bar(title=title, total=n_tables) as bar:
        for start in range(first, first + n_tables, CHUNK):
            seeds = range(start, min(start + CHUNK, first + n_tables))
            name = f"{'tables' if noise else 'clean'}-{start}-{len(seeds)}.pt"
            samples += _chunk(folder / name, seeds, noise, bar)
    return samples


def _chunk(path: Path, seeds: Sequence[int], noise: bool, bar) -> list[Sample]:
    made_by = [SAMPLES_VERSION, NEIGHBOUR_COLUMNS, CONTEXT_COLUMNS]
    if path.exists():
        kept = load_checkpoint(path)
        if kept["made_by"] != made_by:
            raise ValueError(
                f"{path} must hold samples as they are made now, got version and columns "
                f"{kept['made_by']} instead of {made_by}; delete it"
            )
        bar.update(len(seeds))
        return [
            Sample(**each | {"evidence": Evidence(**each["evidence"])}) for each in kept["samples"]
        ]
    samples = []
    for seed in seeds:
        samples.append(make_sample(seed, noise=noise))
        bar.update()
    save_checkpoint(path, {"made_by": made_by, "samples": [_plain(each) for each in samples]})
    return samples


def _plain(sample: Sample) -> dict:
    parts = {name: getattr(sample.evidence, name) for name in Evidence.__dataclass_fields__}
    # A part of a larger tensor would bring the whole of it along.
    parts = {name: None if part is None else part.clone() for name, part in parts.items()}
    names = ("targets", "kind", "noise", "metric")
    return {"evidence": parts} | {name: getattr(sample, name) for name in names}
