"""Ablations: what each part of the attention is worth, taken away and added alone.

Every variant is refitted on the same held-out queries from the same search, with the same settings
and the same seeds; only the parts differ. How long to fit and the last temperature are found for
each: what suits the whole would hold a form with other parts back. Fits with other initial weights
are averaged: they make the luck of a fit smaller, and are not counted as trainings.

Axes: B test rows, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from tqdm import tqdm

from attnknn.classify import predict
from attnknn.compare import compare_methods, with_verdicts
from attnknn.config import AttentionConfig
from attnknn.fit import fit_on_neighbours
from attnknn.measure import METRIC_NAMES
from attnknn.studies.contest import Neighbourhoods, search_run, tidy_measures
from attnknn.studies.variants import CANCELLED, Variant, forms, variants
from attnknn.trained import TrainedRun

ONE_FIT = "not judged: a single fit"


@dataclass(frozen=True)
class Ablation:
    """Test probabilities of every variant.

    Attributes:
        probs: Name to one table a seed and fit, the fits of a seed one after another.
        labels: True classes of the test rows.
        table: One row per seed, fit, variant and measure.
        variants: What was tried.
        n_fits: Fits of each variant on one training.
    """

    probs: Mapping[str, list[Float[np.ndarray, "B C"]]]
    labels: Int[np.ndarray, " B"]
    table: pd.DataFrame
    variants: Sequence[Variant]
    n_fits: int


def ablate(
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    found: Sequence[Neighbourhoods] | None = None,
    epochs: int = 15,
    repeats: int = 2,
    extras: bool = True,
    progress: bool = True,
) -> Ablation:
    """Refit every one-part variant of the runs' attention and predict the test rows.

    Args:
        runs: One trained run a seed.
        k_eval: Neighbours to weigh.
        found: Their searches, at least as deep, where they are done already; None searches.
        epochs: The most epochs of each fit; fewer than the main fit's to save time.
        repeats: Fits of each variant with different initial weights and orders.
        extras: Also add the published parts that the default leaves out.
        progress: Show a progress bar.
    """
    whole = runs[0].config.attention
    fitted = forms(whole, extras=extras)
    if found is None:
        found = [search_run(run, k_eval) for run in runs]
    jobs = [(run, each.nearest(k_eval)) for run, each in zip(runs, found, strict=True)]
    bar = tqdm(
        total=len(jobs) * repeats * len(fitted),
        desc="ablations",
        disable=not progress,
        leave=False,
    )
    probs: dict[str, list[np.ndarray]] = {name: [] for name in fitted}
    rows = []
    for run, here in jobs:
        for repeat in range(repeats):
            for name, config in fitted.items():
                each = _predict_variant(run, here, config, epochs, repeat)
                probs[name].append(each)
                named = {"seed": run.config.seed, "fit": repeat}
                rows += tidy_measures({name: each}, run.labels("test"), **named)
                bar.update()
    bar.close()
    tried = variants(whole, extras=extras)
    return Ablation(probs, runs[0].labels("test"), pd.DataFrame(rows), tried, repeats)


def ablation_table(ablation: Ablation, *, metrics: Sequence[str] = ("nll", "ece", "accuracy")):
    """Return what every part changes: its form minus the reference, with paired intervals.

    Fits of one training are averaged: intervals cover test rows (and trainings, where there are
    several). Holm corrects over all parts tried on the whole, and over all added alone.

    Returns:
        One row per variant and measure: ``group``, ``part``, ``reference``, ``metric``,
        ``difference``, ``low``, ``high``, ``p_holm``, ``verdict``, ``n_fits`` and ``helps``:
        whether the part makes the measure better, worse, or no difference at this size. The luck
        of one fit is no smaller than what most parts change, so a single fit is not judged.
    """
    tables = []
    for reference in dict.fromkeys(each.reference for each in ablation.variants):
        names = [each.name for each in ablation.variants if each.reference == reference]
        probs = {name: ablation.probs[name] for name in (*names, reference)}
        tables.append(
            compare_methods(
                probs, ablation.labels, reference, metrics=metrics, n_fits=ablation.n_fits
            )
        )
    known = {each.name: each for each in ablation.variants}
    table = pd.concat(tables, ignore_index=True).assign(n_fits=ablation.n_fits)
    table.insert(0, "group", [known[name].group for name in table["method"]])
    table.insert(1, "part", [known[name].part for name in table["method"]])
    alone = table["group"] == "on"
    table = with_verdicts(table.assign(alone=alone), family=["alone", "metric"])
    is_judged = table["n_seeds"].iloc[0] * ablation.n_fits > 1
    table["helps"] = [
        _effect(group, found) if is_judged else ONE_FIT
        for group, found in zip(table["group"], table["verdict"], strict=True)
    ]
    return table.drop(columns="alone")


def verdict(ablation: Ablation, *, metric: str = "nll") -> str:
    """Return, in Markdown, which parts help, taken away from the whole and added alone."""
    table = ablation_table(ablation, metrics=(metric,))
    titles = {
        "off": "Taken from the whole",
        "on": "Added to similarity alone",
        "extra": "Published parts, added to the whole",
    }
    lines = []
    for group, title in titles.items():
        rows = table[table["group"] == group]
        if rows.empty:
            continue
        phrases = [
            f"{effect}: {', '.join(rows.loc[rows['helps'] == effect, 'part'])}"
            for effect in ("helps", "harms", "no difference at this size", "undefined", ONE_FIT)
            if (rows["helps"] == effect).any()
        ]
        lines.append(f"- {title}, {METRIC_NAMES[metric]}: {'; '.join(phrases)}.")
    cancelled = " and ".join(f"“{name}”" for name in CANCELLED)
    n_seeds, fits = table["n_seeds"].iloc[0], ablation.n_fits
    note = (
        f"{n_seeds} training(s), {fits} fit(s) of each form, averaged; intervals cover "
        f"{'test rows' if n_seeds == 1 else 'test rows and trainings'}. {cancelled} are the same "
        "for all neighbours of a query: alone, the softmax cancels them, so they are not tried "
        "alone. The value path is left out: the vote does not read it."
    )
    return "\n".join([*lines, "", note])


def _predict_variant(
    run: TrainedRun, found: Neighbourhoods, config: AttentionConfig, epochs: int, repeat: int
) -> Float[np.ndarray, "B C"]:
    fitted = fit_on_neighbours(
        run.bank,
        found.held_out,
        found.held_out_labels,
        attention=config,
        fitting=replace(run.config.fitting, fit_epochs=epochs),
        seed=1000 * repeat + run.config.seed,
    )
    return predict(fitted.method, found.test)


def _effect(group: str, found: str) -> str:
    """Say whether a part helps: where taking it away makes things worse, it does."""
    if found not in ("better", "worse"):
        return found
    return "helps" if (found == "worse") == (group == "off") else "harms"
