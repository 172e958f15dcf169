"""Ablations: what each part of the attention is worth, taken away and added alone.

Every variant is refitted on the same held-out queries from the same search, with the same settings
and the same seeds; only the parts differ. How long to fit and the last temperature are found for
each: what suits the whole would hold a form with other parts back. Fits with other initial weights
are averaged: they make the luck of a fit smaller, and are not counted as trainings.

Axes: B test rows, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from attnknn.config import AttentionConfig
from attnknn.core.vote import predict
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import compare_methods, with_verdicts
from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.progress import progress_bar
from attnknn.studies.common import (
    Neighbourhoods,
    Recipe,
    fit_attention,
    search_run,
    tidy_measures,
)

# ---- Variants of an attention: what is taken away or added, and the form each is compared with.
#
# Every variant differs from its reference in one part, so that a difference has one cause.

FULL, BARE = "full attention", "similarity alone"
_NOTHING = AttentionConfig(
    situation=(),
    label_bias="none",
    denoise=False,
    prototype_gate=False,
    floor=False,
    query_temperature=False,
)
# The same number for all neighbours of a query: alone, the softmax cancels it.
CANCELLED = ("nearest", "noise")
VOTE_PARTS = {
    "denoise": "denoised labels",
    "prototype_gate": "prototype gate",
    "prototype_shift": "shifted prototypes",
    "floor": "fitted floor",
    "query_temperature": "temperature per query",
}
# The parts of the published model that the default leaves out. Its value path is not among them:
# it makes an embedding of the weighted neighbours, which the vote does not read.
PUBLISHED_PARTS = {
    "low-rank query-key": ("qk", "lowrank"),
    "full query-key": ("qk", "full"),
    "distance bias": ("distance_bias", "deep"),
    "label bias": ("label_bias", "neighbour"),
    "label bias as published": ("label_bias", "neighbourhood"),
    "prototype score": ("prototype_score", True),
    "self-attention": ("self_attention", True),
}
# Left out alone: the published label bias, which the softmax cancels, and self-attention, the
# slowest part, which is tried on the whole.
PUBLISHED_ALONE = ("low-rank query-key", "full query-key", "distance bias", "prototype score")
# Parts that nothing reads without another one: they are added to the form that has it.
NEEDS = {"prototype_shift": "prototype gate", "self_attention": "prototype score"}
SIGNS = {"off": "without", "on": "only", "extra": "with"}


@dataclass(frozen=True)
class Variant:
    """One form of the attention.

    Attributes:
        group: "off" (a part taken from the whole), "on" (a part added to similarity alone) or
            "extra" (a published part added to the whole).
        part: The part.
        reference: Name of the form it is compared with, from which it differs in this part alone.
        config: Its settings.
    """

    group: str
    part: str
    reference: str
    config: AttentionConfig

    @property
    def name(self) -> str:
        """Group and part in one word."""
        return f"{SIGNS[self.group]} {self.part}"


def forms(whole: AttentionConfig, *, extras: bool = True) -> dict[str, AttentionConfig]:
    """Return every form that is fitted, by name: the two references and all variants."""
    found = {FULL: whole, BARE: bare(whole)}
    return found | {each.name: each.config for each in variants(whole, extras=extras)}


def bare(whole: AttentionConfig) -> AttentionConfig:
    """Return similarity alone, with as many heads as the whole."""
    return replace(_NOTHING, heads=whole.heads)


def variants(whole: AttentionConfig, *, extras: bool = True) -> list[Variant]:
    """Return all one-part variants of an attention.

    Args:
        whole: The attention with every part it is used with.
        extras: Also add the published parts that ``whole`` leaves out, to it and alone.
    """
    made = _taken_away(whole) + _added_alone(whole, extras)
    if extras:
        made += _added("extra", _absent_parts(whole), FULL, whole)
    return [each for each in made if _scores_something(each.config)]


def _taken_away(whole: AttentionConfig) -> list[Variant]:
    """Return the whole without each of its parts."""
    without: dict[str, dict[str, Any]] = {}
    if whole.similarity:
        without["similarity"] = {"similarity": False}
    without |= {
        _spoken(name): {"situation": tuple(each for each in whole.situation if each != name)}
        for name in whole.situation
    }
    if whole.situation:
        without["all of these"] = {"situation": ()}
    if whole.label_bias == "neighbour":
        without["label bias"] = {"label_bias": "none"}
    without |= {
        spoken: {name: False} for name, spoken in VOTE_PARTS.items() if getattr(whole, name)
    }
    if whole.heads > 1:
        without["more than one head"] = {"heads": 1}
    return [
        Variant("off", part, FULL, replace(whole, **changed)) for part, changed in without.items()
    ]


def _added_alone(whole: AttentionConfig, extras: bool) -> list[Variant]:
    """Return similarity alone with each part of the whole, and each published one."""
    alone = {
        _spoken(name): ("situation", (name,)) for name in whole.situation if name not in CANCELLED
    }
    if whole.situation:
        alone["all of these"] = ("situation", whole.situation)
    if whole.label_bias == "neighbour":
        alone["label bias"] = ("label_bias", "neighbour")
    alone |= {
        spoken: (name, True)
        for name, spoken in VOTE_PARTS.items()
        if getattr(whole, name) and (name != "prototype_shift" or whole.prototype_gate)
    }
    if extras:
        alone |= {name: PUBLISHED_PARTS[name] for name in PUBLISHED_ALONE if name not in alone}
    return _added("on", alone, BARE, bare(whole))


def _absent_parts(whole: AttentionConfig) -> dict[str, tuple[str, Any]]:
    """Return the published parts that the whole leaves out."""
    return {
        name: (setting, value)
        for name, (setting, value) in PUBLISHED_PARTS.items()
        if getattr(whole, setting) in (False, "none")
    }


def _added(
    group: str, parts: Mapping[str, tuple[str, Any]], start: str, config: AttentionConfig
) -> list[Variant]:
    """Return a form with each part added: to the start, or to the form with what it needs."""
    made: dict[str, Variant] = {}
    for part, (setting, value) in parts.items():
        needed = made.get(NEEDS.get(setting, ""))
        name, base = (start, config) if needed is None else (needed.name, needed.config)
        made[part] = Variant(group, part, name, replace(base, **{setting: value}))
    return list(made.values())


def _spoken(feature: str) -> str:
    return feature.replace("_", " ")


def _scores_something(config: AttentionConfig) -> bool:
    others = (config.situation, config.qk != "none", config.prototype_score)
    return config.similarity or any(others)


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
    steps = len(jobs) * repeats * len(fitted)
    bar = progress_bar(title="ablations", total=steps, disable=not progress)
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
    settings = replace(run.config.fitting, fit_epochs=epochs)
    recipe = Recipe(config, settings, 1000 * repeat + run.config.seed)
    fitted = fit_attention(run.bank, found, recipe)
    return predict(fitted.method, found.test)


def _effect(group: str, found: str) -> str:
    """Say whether a part helps: where taking it away makes things worse, it does."""
    if found not in ("better", "worse"):
        return found
    return "helps" if (found == "worse") == (group == "off") else "harms"
