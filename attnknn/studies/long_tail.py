"""Long tail in the memory: what it does to each method when some classes have hardly any rows.

Memory rows are dropped so that class sizes fall geometrically; the embedder stays as it is. Trust,
histograms and prototypes come from the rows that are left, and each memory gets an exact search of
its own. Test rows stay as they are. Held-out queries tune the baselines and refit the attention;
they stay balanced, or are as long-tailed as the memory (the case people really have). "Reweighted"
are long-tailed ones of which every class counts the same, for each method that is fitted on them.

Many-, medium- and few-shot classes are the thirds of the classes by their rows in the most
long-tailed memory of the study; they are the same at every ratio, so that a curve follows the same
classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from tqdm import tqdm

from attnknn.core.bank import MemoryBank
from attnknn.core.vote import Attention, predict
from attnknn.data.change import long_tail_rows
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import compare_in_families, compare_methods, standing
from attnknn.evaluate.measure import METRIC_NAMES, accuracy, summarise
from attnknn.evaluate.tune import BASELINES, IMBALANCE_BASELINES, fit_baseline
from attnknn.studies.common import (
    TUNED_DEPTH,
    Neighbourhoods,
    Predictions,
    attention_at,
    group_limits,
    plain_methods,
    refit,
    search_run,
    with_limits,
)

# ---- A long-tailed memory: fewer rows of some classes, an exact search of what is left, all
# methods.
#
# Axes: B queries, C classes, N training rows, M kept rows.

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


HELD_OUT_ROWS = ("balanced", "long-tailed", "reweighted")
TUNED = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "prior-corrected (tuned)")
CURVES = (*TUNED, "attention", "attention, transfer")
RIVALS = (*TUNED, "attention, transfer")

SeedTables = dict[str, list[Float[np.ndarray, "B C"]]]


class TailLevel(NamedTuple):
    """One long tail: smallest class over largest, and whether the held-out rows have it too."""

    ratio: float
    held_out: str


@dataclass(frozen=True)
class TailStudy:
    """Measures of every method at every long tail.

    Attributes:
        table: One row per seed, ratio, held-out rows, method, classes and measure; ``classes`` is
            "all" or a group, ``corrupted`` says what was long-tailed; ``low`` and ``high``, with
            one seed: 95 % over test rows.
        probs: Level to method name to one table of test probabilities a seed.
        labels: True classes of the test rows.
        groups: Which classes are many-, medium- and few-shot.
        sizes: Memory rows by ratio (rows of the table) and class (columns), first seed.
    """

    table: pd.DataFrame
    probs: dict[TailLevel, SeedTables]
    labels: Int[np.ndarray, " B"]
    groups: Groups
    sizes: pd.DataFrame


def memory_tail(
    runs: Sequence[TrainedRun],
    *,
    ratios: Sequence[float] = (1.0, 0.1, 0.01),
    held_out: Sequence[str] = HELD_OUT_ROWS,
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> TailStudy:
    """Return every method's measures at every long tail of the memory.

    Args:
        runs: One trained run a seed. A run trained on a long tail has no rows for a milder one:
            ratios above its own are lowered to it.
        ratios: Rows of the last class over those of the first.
        held_out: "balanced", "long-tailed" and "reweighted" held-out queries.
        k_eval: Neighbours the attention weighs; tuned baselines may use more (``TUNED_DEPTH``).
        k_baseline: Neighbours of the untuned methods.
        progress: Show a progress bar.
    """
    possible = sorted({min(ratio, runs[0].config.data.train_tail) for ratio in ratios})[::-1]
    sizes = memory_sizes(runs[0], possible)
    groups = shot_groups(sizes.iloc[-1].to_numpy())
    rows, kept = [], {}
    for run in runs:
        transfer = attention_at(run, search_run(run, k_eval), k_eval)
        for ratio in tqdm(possible, desc="long tails", disable=not progress, leave=False):
            found = level_predictions(run, transfer, ratio, held_out, k_eval, k_baseline)
            for level, probs in found.items():
                named = {"dataset": run.config.data.dataset, "seed": run.config.seed}
                named |= {"corrupted": "memory only", **level._asdict()}
                rows += tail_measures(probs, run.labels("test"), groups, named)
                for name, each in probs.items():
                    kept.setdefault(level, {}).setdefault(name, []).append(each)
    labels = runs[0].labels("test")
    limits = group_limits(kept, labels, groups, metrics=MEASURES)
    return TailStudy(with_limits(pd.DataFrame(rows), limits), kept, labels, groups, sizes)


def level_predictions(
    run: TrainedRun,
    transfer: Attention,
    ratio: float,
    held_out: Sequence[str],
    k_eval: int,
    k_baseline: int,
) -> dict[TailLevel, Predictions]:
    """Return test probabilities over one memory for each kind of held-out queries, one search."""
    bank = tailed_bank(run, ratio)
    whole = search_bank(run, bank, max(k_eval, k_baseline, TUNED_DEPTH))
    levels: dict[TailLevel, Predictions] = {}
    for name in held_out:
        if ratio == 1 and levels:  # nothing is dropped: all kinds are the same rows
            levels[TailLevel(ratio, name)] = dict(levels[TailLevel(ratio, held_out[0])])
            continue
        own = transfer if ratio == 1 else None  # fitted on this very memory
        levels[TailLevel(ratio, name)] = held_out_predictions(
            run, bank, whole, TailLevel(ratio, name), k_eval, k_baseline, attention=own
        )
    if "balanced" in held_out:  # long-tailed queries go with nothing that was fitted on balanced
        nearest = whole.test.nearest(min(k_eval, whole.test.k))
        probs = predict(Attention(nearest.k, transfer.module), nearest)
        levels[TailLevel(ratio, "balanced")]["attention, transfer"] = probs
    return levels


def held_out_predictions(
    run: TrainedRun,
    bank: MemoryBank,
    whole: Neighbourhoods,
    level: TailLevel,
    k_eval: int,
    k_baseline: int,
    *,
    attention: Attention | None = None,
) -> Predictions:
    """Return test probabilities of every method, fitted on the held-out queries of a level."""
    here = whole if level.held_out == "balanced" else thinned(whole, level.ratio, run)
    weights = balancing_weights(here.held_out_labels) if level.held_out == "reweighted" else None
    options = {"weights": weights, "attention": attention}
    return memory_predictions(run, bank, here, k_eval, k_baseline, **options)


def curves(study: TailStudy, *, held_out: str, groups: bool = False) -> pd.DataFrame:
    """Return the rows to draw, with the imbalance (largest class over smallest) as ``imbalance``.

    Args:
        study: What was measured.
        held_out: Which held-out queries, one of ``HELD_OUT_ROWS``.
        groups: Accuracies of many-, medium- and few-shot classes, each as a measure of its own in
            per cent, instead of the measures over all classes.
    """
    table = study.table[study.table["method"].isin(CURVES)]
    table = table[(table["held_out"] == held_out) & ((table["classes"] != "all") == groups)]
    table = table.assign(imbalance=1 / table["ratio"])
    if not groups:
        return table
    shares = ["value", "low", "high"]
    table = table.assign(metric=table["classes"].map(group_titles(study)))
    return table.assign(**{name: 100 * table[name] for name in shares})


def group_titles(study: TailStudy) -> dict[str, str]:
    """Return how each group's accuracy is called in a figure."""
    return {name: f"{name}-shot accuracy (%)" for name in study.groups}


def tail_table(table: pd.DataFrame, *, ratio: float | None = None) -> pd.DataFrame:
    """Return a study's rows sorted and with readable columns, for a printed table.

    Args:
        table: Rows of a study.
        ratio: Imbalance to show; all of them when None.
    """
    table = table if ratio is None else table[table["ratio"] == ratio]
    order = table.assign(place=table["held_out"].map(HELD_OUT_ROWS.index), ratio=-table["ratio"])
    order = order.sort_values(["corrupted", "place", "ratio"], kind="stable")
    shown = order.assign(ratio=[f"{-ratio:g}" for ratio in order["ratio"]])
    return shown.drop(columns="place").rename(columns={"held_out": "held-out rows"})


def group_table(study: TailStudy, class_names: Sequence[str]) -> pd.DataFrame:
    """Return which classes each group holds, and its smallest and largest class at each ratio."""
    rows = []
    for name, classes in study.groups.items():
        row = {"group": name, "classes": ", ".join(class_names[label] for label in classes)}
        for ratio, counts in zip(study.sizes.index, study.sizes.to_numpy(), strict=True):
            row[f"rows a class, ratio {ratio:g}"] = _span(counts[classes])
        rows.append(row)
    return pd.DataFrame(rows)


def _span(counts: Int[np.ndarray, " _"]) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} to {high}"


def comparisons(study: TailStudy, *, metrics: Sequence[str] = ("nll", "accuracy", "ece")):
    """Return every method's paired difference to the attention, for each level and group.

    A group's rows are the test rows of its classes; only accuracy and NLL are compared there,
    because calibration is a matter of all classes together.
    """
    parts = []
    for level, probs in study.probs.items():
        for name, own in _test_rows(study).items():
            asked = metrics if name == "all" else [m for m in metrics if m in ("nll", "accuracy")]
            if len(probs) < 2 or not own.any() or not asked:
                continue
            tables = {method: [each[own] for each in seeds] for method, seeds in probs.items()}
            table = compare_in_families(tables, study.labels[own], "attention", metrics=asked)
            parts.append(table.assign(**level._asdict(), classes=name))
    return pd.concat(parts, ignore_index=True)


def _test_rows(study: TailStudy) -> dict[str, Bool[np.ndarray, " B"]]:
    groups = {name: np.isin(study.labels, ids) for name, ids in study.groups.items()}
    return {"all": np.ones(len(study.labels), dtype=bool)} | groups


def verdict(study: TailStudy, compared: pd.DataFrame) -> str:
    """Return, in Markdown, how the attention stands at the longest tail, and what the tail costs.

    Args:
        study: What was measured.
        compared: From ``comparisons``.
    """
    ratio = min(level.ratio for level in study.probs)
    rows = compared[(compared["ratio"] == ratio) & compared["method"].isin(RIVALS)]
    lines = []
    for (held_out, classes, metric), table in rows.groupby(
        ["held_out", "classes", "metric"], sort=False
    ):
        if (classes, metric) in (("all", "nll"), ("all", "accuracy"), ("few", "accuracy")):
            which = "" if classes == "all" else f" of {classes}-shot classes"
            name = f"**{METRIC_NAMES[metric]}{which}**"
            lines.append(f"- held-out rows {held_out}, {name}: {standing(table)}.")
    title = (
        f"Attention, refitted on a memory of ratio {ratio:g}, against the others "
        "(paired, Holm-corrected):"
    )
    return "\n".join([title, "", *lines, "", cost_of_tail(study)])


def cost_of_tail(study: TailStudy, *, methods: Sequence[str] = ("attention", *TUNED)) -> str:
    """Return, in Markdown, what each method loses in accuracy from the mildest to the longest tail.

    The same test rows are predicted with both memories, so the differences are paired.
    """
    levels = [level for level in study.probs if level.held_out == next(iter(study.probs)).held_out]
    first, last = max(levels), min(levels)
    if first == last:
        return "Only one ratio was measured: nothing can be said about the cost of a longer tail."
    lines = [f"What the tail costs, ratio {last.ratio:g} against {first.ratio:g}:", ""]
    for method in methods:
        pair = {"tail": study.probs[last][method], "full": study.probs[first][method]}
        row = compare_methods(pair, study.labels, "full", metrics=("accuracy",)).iloc[0]
        points = [100 * row[name] for name in ("difference", "low", "high")]
        limits = f"95 % interval {points[1]:+.2f} to {points[2]:+.2f}"
        lines.append(f"- {method}: {points[0]:+.2f} points ({limits}): {row['verdict']}.")
    return "\n".join(lines)
