"""Long tail in the memory: what it does to each method when some classes have hardly any rows.

Memory rows are dropped so that class sizes fall geometrically; the embedder stays as it is. Trust,
histograms and prototypes come from the rows that are left, and each memory gets an exact search of
its own. Test rows stay as they are. Held-out queries tune the baselines and refit the attention;
they stay balanced, or are as long-tailed as the memory (the case people really have). "Reweighted"
are long-tailed ones of which every class counts the same, for each method that is fitted on them.

Many-, medium- and few-shot classes are the thirds of the classes by their rows in the most
long-tailed memory of the study; they are the same at every ratio, so that a curve follows the same
classes.

Axes: B queries, C classes, M kept rows.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int

from attnknn.core.bank import MemoryBank
from attnknn.core.vote import Attention, predict
from attnknn.data.change import long_tail_rows
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import compare_methods, standing
from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.evaluate.tune import BASELINES, IMBALANCE_BASELINES
from attnknn.progress import progress_bar
from attnknn.studies.common import (
    TUNED_DEPTH,
    Entry,
    Neighbourhoods,
    Predictions,
    Recipe,
    Study,
    attention_at,
    collect,
    contest,
    search_run,
    tuned_settings,
)
from attnknn.studies.retrained import BOTH, MEMORY, behind_clean, load_variants

SHOTS = ("many", "medium", "few")
MEASURES = ("accuracy", "balanced_accuracy", "nll", "brier", "ece")
HELD_OUT_ROWS = ("balanced", "long-tailed", "reweighted")
TUNED = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "prior-corrected (tuned)")
CURVES = (*TUNED, "attention", "attention, transfer")
RIVALS = (*TUNED, "attention, transfer")


class TailLevel(NamedTuple):
    """One long tail: smallest class over largest, and whether the held-out rows have it too."""

    ratio: float
    held_out: str


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


def shot_groups(counts: Int[np.ndarray, " C"]) -> dict[str, Int[np.ndarray, " _"]]:
    """Return the thirds of the classes by memory rows: many-, medium- and few-shot.

    Of equal counts the lower class comes first; where three do not divide the classes, the first
    groups are larger. Two classes are one many-shot and one few-shot class.
    """
    order = np.argsort(-counts, kind="stable")
    names = SHOTS if len(counts) > 2 else (SHOTS[0], SHOTS[-1])
    return dict(zip(names, np.array_split(order, len(names)), strict=True))


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


def memory_tail(
    runs: Sequence[TrainedRun],
    *,
    ratios: Sequence[float] = (1.0, 0.1, 0.01),
    held_out: Sequence[str] = HELD_OUT_ROWS,
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> Study:
    """Return every method's measures at every long tail of the memory.

    Its groups are the many-, medium- and few-shot classes.

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
    groups = shot_groups(memory_sizes(runs[0], possible[-1:]).iloc[0].to_numpy())
    ks = {"k_eval": k_eval, "k_baseline": k_baseline}

    def entries() -> Iterator[Entry]:
        for run in runs:
            frozen = attention_at(run, search_run(run, k_eval), k_eval)
            for ratio in progress_bar(possible, "long tails", disable=not progress):
                for level, probs in level_predictions(run, frozen, ratio, held_out, **ks).items():
                    yield Entry(run, level, probs)

    labels = runs[0].labels("test")
    return collect(entries(), labels, metrics=MEASURES, groups=groups, corrupted=MEMORY)


def level_predictions(
    run: TrainedRun,
    frozen: Attention,
    ratio: float,
    held_out: Sequence[str],
    *,
    k_eval: int,
    k_baseline: int,
) -> dict[TailLevel, Predictions]:
    """Return test probabilities over one memory for each kind of held-out queries, one search.

    The attention that is ``frozen``, as fitted on the whole memory, is shown as "transfer".
    """
    bank, ks = tailed_bank(run, ratio), {"k_eval": k_eval, "k_baseline": k_baseline}
    whole = search_run(run, max(k_eval, k_baseline, TUNED_DEPTH), bank=bank)
    levels: dict[TailLevel, Predictions] = {}
    for name in held_out:
        level, first = TailLevel(ratio, name), TailLevel(ratio, held_out[0])
        if ratio == 1 and levels:  # nothing is dropped: all kinds are the same rows
            levels[level] = dict(levels[first])
        else:
            own = frozen if ratio == 1 else None  # fitted on this very memory
            levels[level] = tail_predictions(run, bank, whole, level, own=own, **ks)
    if "balanced" in held_out:  # long-tailed queries go with nothing that was fitted on balanced
        nearest = whole.test.nearest(min(k_eval, whole.test.k))
        probs = predict(Attention(nearest.k, frozen.module), nearest)
        levels[TailLevel(ratio, "balanced")]["attention, transfer"] = probs
    return levels


def tail_predictions(
    run: TrainedRun,
    bank: MemoryBank,
    whole: Neighbourhoods,
    level: TailLevel,
    *,
    k_eval: int,
    k_baseline: int,
    own: Attention | None = None,
) -> Predictions:
    """Return test probabilities of every method, fitted on the held-out queries of a level.

    Args:
        run: Whose kind of attention is fitted.
        bank: The memory.
        whole: A search of it.
        level: How long the tail is, and which held-out queries are fitted on.
        k_eval: Neighbours the attention weighs.
        k_baseline: Neighbours of the untuned methods.
        own: An attention that is fitted on this memory and these queries already.
    """
    here = whole if level.held_out == "balanced" else thinned(whole, level.ratio, run)
    weights = balancing_weights(here.held_out_labels) if level.held_out == "reweighted" else None
    tried = tuned_settings(here.test.k, (*BASELINES, *IMBALANCE_BASELINES))
    options = {"k_eval": k_eval, "k_baseline": k_baseline, "tried": tried, "weights": weights}
    return contest(bank, here, Recipe.of(run), own=own, **options).predict(here.test)


def retrained_tail(
    names: Sequence[str | Path],
    base: Study,
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> Study:
    """Return the long-tail study of runs that were trained on a long tail.

    Args:
        names: Runs, or folders of runs; ``retrained.variant_facts`` names those that do not belong
            here.
        base: The study of the memory alone. Its groups of classes and its kinds of held-out
            queries are used, and its balanced level begins the curves.
        runs: The runs of that study.
        k_eval: Neighbours the attention weighs; tuned baselines may use more (``TUNED_DEPTH``).
        k_baseline: Neighbours of the untuned methods.
        progress: Show a progress bar.
    """
    variants = load_variants(names, runs, fault="train_tail")
    held_out = list(dict.fromkeys(level.held_out for level in base.probs))
    ks = {"k_eval": k_eval, "k_baseline": k_baseline}

    def entries() -> Iterator[Entry]:
        for run in progress_bar(variants, "retrained", disable=not progress):
            found = search_run(run, max(k_eval, k_baseline, TUNED_DEPTH))
            for name in held_out:
                level = TailLevel(run.config.data.train_tail, name)
                own = attention_at(run, found, k_eval) if name == "balanced" else None
                probs = tail_predictions(run, run.bank, found, level, own=own, **ks)
                yield Entry(run, level, probs)

    options = {"metrics": MEASURES, "groups": base.groups, "corrupted": BOTH}
    study = collect(entries(), base.labels, **options)
    return behind_clean(study, base.table[base.table["ratio"] == 1])


# ---- What a page shows of the study.


def curves(study: Study, *, held_out: str, groups: bool = False) -> pd.DataFrame:
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


def group_titles(study: Study) -> dict[str, str]:
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


def group_table(study: Study, run: TrainedRun) -> pd.DataFrame:
    """Return which classes each group holds, and its smallest and largest class at each ratio."""
    sizes = memory_sizes(run, list(dict.fromkeys(level.ratio for level in study.probs)))
    rows = []
    for name, classes in study.groups.items():
        row = {"group": name, "classes": ", ".join(run.class_names[label] for label in classes)}
        for ratio, counts in zip(sizes.index, sizes.to_numpy(), strict=True):
            low, high = counts[classes].min(), counts[classes].max()
            row[f"rows a class, ratio {ratio:g}"] = f"{low}" if low == high else f"{low} to {high}"
        rows.append(row)
    return pd.DataFrame(rows)


def verdict(study: Study, compared: pd.DataFrame) -> str:
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


def cost_of_tail(study: Study, *, methods: Sequence[str] = ("attention", *TUNED)) -> str:
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
