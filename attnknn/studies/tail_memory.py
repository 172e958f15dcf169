"""A long-tailed memory: fewer rows of some classes, an exact search of what is left, all methods.

Axes: B queries, C classes, N training rows, M kept rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int

from attnknn.baselines import BASELINES, IMBALANCE_BASELINES, fit_baseline
from attnknn.classify import Attention, predict
from attnknn.corrupt import long_tail_rows
from attnknn.measure import accuracy, summarise
from attnknn.memory import MemoryBank
from attnknn.studies.contest import Neighbourhoods, Predictions, plain_methods, refit
from attnknn.trained import TrainedRun

SHOTS = ("many", "medium", "few")
MEASURES = ("accuracy", "balanced_accuracy", "nll", "brier", "ece")

# Name of a group of classes to its class ids.
Groups = dict[str, Int[np.ndarray, " _"]]


def tail_rows(run: TrainedRun, ratio: float) -> Int[np.ndarray, " M"]:
    """Return the ids of the training rows that stay in the memory."""
    options = {"n_classes": len(run.class_names), "seed": run.config.seed}
    return long_tail_rows(run.labels("train"), ratio, **options)


def tailed_bank(run: TrainedRun, ratio: float) -> MemoryBank:
    """Return the long-tailed memory with an index of its own.

    A search of the whole memory, filtered, could run out of kept rows; this one is exact.
    """
    kept = tail_rows(run, ratio)
    return MemoryBank(
        run.rows("train")[kept],
        run.labels("train")[kept],
        n_classes=len(run.class_names),
        index="flat_ip",
        trust_neighbours=run.config.fitting.trust_neighbours,
    )


def memory_sizes(run: TrainedRun, ratios: Sequence[float]) -> pd.DataFrame:
    """Return the memory rows of each class (columns) at each ratio (rows)."""
    labels, n_classes = run.labels("train"), len(run.class_names)
    counts = [np.bincount(labels[tail_rows(run, r)], minlength=n_classes) for r in ratios]
    return pd.DataFrame(counts, index=pd.Index(ratios, name="ratio"), columns=run.class_names)


def shot_groups(counts: Int[np.ndarray, " C"]) -> Groups:
    """Return the thirds of the classes by memory rows: many-, medium- and few-shot.

    Of equal counts the lower class comes first; where three do not divide the classes, the first
    groups are larger. Two classes are one many-shot and one few-shot class.
    """
    order = np.argsort(-counts, kind="stable")
    names = SHOTS if len(counts) > 2 else (SHOTS[0], SHOTS[-1])
    return dict(zip(names, np.array_split(order, len(names)), strict=True))


def search_bank(run: TrainedRun, bank: MemoryBank, k: int) -> Neighbourhoods:
    """Return the k nearest rows of a memory for the validation and the test rows of a run."""
    k = min(k, len(bank))
    found = [bank.search(run.rows(part), k) for part in ("val", "test")]
    return Neighbourhoods(found[0], run.labels("val"), found[1])


def thinned(whole: Neighbourhoods, ratio: float, run: TrainedRun) -> Neighbourhoods:
    """Return the search with held-out queries as long-tailed as the memory."""
    # Another seed: held-out rows must not repeat the memory's draw.
    options = {"n_classes": len(run.class_names), "seed": run.config.seed + 1}
    kept = long_tail_rows(whole.held_out_labels, ratio, **options)
    queries = whole.held_out.of_queries(torch.from_numpy(kept))
    return Neighbourhoods(queries, whole.held_out_labels[kept], whole.test)


def balancing_weights(labels: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """Return weights of mean 1 under which every class that occurs counts the same."""
    counts = np.bincount(labels)
    return len(labels) / ((counts > 0).sum() * counts[labels])


def memory_predictions(
    run: TrainedRun,
    bank: MemoryBank,
    whole: Neighbourhoods,
    k_eval: int,
    k_baseline: int,
    *,
    weights: Float[np.ndarray, " _"] | None = None,
    attention: Attention | None = None,
) -> Predictions:
    """Return test probabilities of every method over one memory, fitted on its held-out queries.

    Args:
        run: The run whose kind of attention is fitted.
        bank: The memory.
        whole: A search of it.
        k_eval: Neighbours the attention weighs; tuned baselines may use more (``TUNED_DEPTH``).
        k_baseline: Neighbours of the untuned methods.
        weights: How much each held-out query counts for every method that is fitted.
        attention: One that is already fitted on this memory and these queries.
    """
    here = whole.nearest(k_eval)
    attention = attention or refit(run, bank, here, weights=weights).method
    plain = plain_methods(min(k_baseline, whole.test.k))
    probs = {name: predict(method, whole.test) for name, method in plain.items()}
    for name in (*BASELINES, *IMBALANCE_BASELINES):
        fitted = fit_baseline(name, whole.held_out, whole.held_out_labels, weights=weights)
        probs[f"{name} (tuned)"] = fitted.predict(whole.test)
    return probs | {"attention": predict(attention, here.test)}


def tail_measures(
    probs: Predictions, labels: Int[np.ndarray, " B"], groups: Groups, named: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return one row per method, measure and group of classes; groups without rows have none."""
    rows = []
    for method, table in probs.items():
        every = summarise(table, labels)
        rows += [("all", method, metric, every[metric]) for metric in MEASURES]
        for group, classes in groups.items():
            own = np.isin(labels, classes)
            if own.any():
                rows.append((group, method, "accuracy", accuracy(table[own], labels[own])))
    names = ("classes", "method", "metric", "value")
    return [named | dict(zip(names, row, strict=True)) for row in rows]
