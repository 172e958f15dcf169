"""Ablations: what each part of the attention is worth, taken away and added alone.

Every variant is refitted on the same held-out queries from the same search, with the same number
of epochs and the same seeds; only the parts differ. Repeated fits tell the effect of a part from
the luck of a fit.

Axes: B test rows, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from tqdm import tqdm

from attnknn.classify import predict
from attnknn.compare import compare_methods, interval_table
from attnknn.config import AttentionConfig
from attnknn.fit import fit_on_neighbours
from attnknn.studies.contest import Neighbourhoods, search_run, tidy_measures
from attnknn.trained import TrainedRun

FULL, BARE = "full attention", "similarity alone"
_NOTHING = AttentionConfig(
    situation=(),
    label_bias="none",
    denoise=False,
    prototype_gate=False,
    floor=False,
    query_temperature=False,
)
NEEDS = {"prototype_shift": {"prototype_gate": True}}  # parts that nothing reads when alone
VOTE_PARTS = {
    "denoise": "denoised labels",
    "prototype_gate": "prototype gate",
    "prototype_shift": "shifted prototypes",
    "floor": "fitted floor",
    "query_temperature": "temperature per query",
}
# The parts of the published model that the default leaves out, each added to the whole.
PUBLISHED_PARTS = {
    "low-rank query-key": {"qk": "lowrank"},
    "full query-key": {"qk": "full"},
    "distance bias": {"distance_bias": "deep"},
    "label bias": {"label_bias": "neighbour"},
    "label bias as published": {"label_bias": "neighbourhood"},
    "prototype score": {"prototype_score": True},
    "self-attention": {"self_attention": True, "prototype_score": True},
}


@dataclass(frozen=True)
class Variant:
    """One form of the attention.

    Attributes:
        group: "off" (a part taken from the whole), "on" (a part added to similarity alone) or
            "extra" (a part added to the whole).
        part: The part.
        reference: Name of the form it is compared with.
        config: Its settings.
    """

    group: str
    part: str
    reference: str
    config: AttentionConfig

    @property
    def name(self) -> str:
        """Group and part in one word."""
        sign = {"off": "without", "on": "only", "extra": "with"}[self.group]
        return f"{sign} {self.part}"


def variants(whole: AttentionConfig, *, extras: bool = True) -> list[Variant]:
    """Return all one-part variants of an attention.

    Args:
        whole: The attention with every part it is used with.
        extras: Also add the published parts that ``whole`` leaves out.
    """
    bare = replace(_NOTHING, heads=whole.heads)
    switched = [name for name in VOTE_PARTS if getattr(whole, name)]
    situation = whole.situation
    made = [Variant("off", "similarity", FULL, replace(whole, similarity=False))]
    made += [
        Variant("off", _spoken(name), FULL, replace(whole, situation=_but(situation, name)))
        for name in situation
    ]
    made += [Variant("off", "all of these", FULL, replace(whole, situation=()))]
    if whole.label_bias == "neighbour":
        made += [Variant("off", "label bias", FULL, replace(whole, label_bias="none"))]
        made += [Variant("on", "label bias", BARE, replace(bare, label_bias="neighbour"))]
    made += [
        Variant("off", VOTE_PARTS[name], FULL, replace(whole, **{name: False})) for name in switched
    ]
    if whole.heads > 1:
        made += [Variant("off", "more than one head", FULL, replace(whole, heads=1))]
    made += [
        Variant("on", _spoken(name), BARE, replace(bare, situation=(name,))) for name in situation
    ]
    made += [Variant("on", "all of these", BARE, replace(bare, situation=situation))]
    made += [
        Variant("on", VOTE_PARTS[name], BARE, replace(bare, **NEEDS.get(name, {}), **{name: True}))
        for name in switched
    ]
    if extras:
        made += [
            Variant("extra", part, FULL, replace(whole, **settings))
            for part, settings in PUBLISHED_PARTS.items()
            if all(getattr(whole, name) in (False, "none") for name in settings)
        ]
    return [each for each in made if _scores_something(each.config)]


@dataclass(frozen=True)
class Ablation:
    """Test probabilities of every variant.

    Attributes:
        probs: Name to one table a seed and repeat.
        labels: True classes of the test rows.
        table: One row per seed, repeat, variant and measure.
        variants: What was tried.
    """

    probs: Mapping[str, list[Float[np.ndarray, "B C"]]]
    labels: Int[np.ndarray, " B"]
    table: pd.DataFrame
    variants: Sequence[Variant]


def ablate(
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    epochs: int = 15,
    repeats: int = 2,
    extras: bool = True,
    progress: bool = True,
) -> Ablation:
    """Refit every one-part variant of the runs' attention and predict the test rows.

    Args:
        runs: One trained run a seed.
        k_eval: Neighbours to weigh.
        epochs: Epochs of each fit, the same for all; fewer than the main fit's to save time.
        repeats: Fits of each variant with different initial weights and orders.
        extras: Also add the published parts that the default leaves out.
        progress: Show a progress bar.
    """
    whole = runs[0].config.attention
    tried = variants(whole, extras=extras)
    forms = {FULL: whole, BARE: replace(_NOTHING, heads=whole.heads)}
    forms |= {each.name: each.config for each in tried}
    jobs = [(run, search_run(run, k_eval)) for run in runs]
    bar = tqdm(
        total=len(jobs) * repeats * len(forms),
        desc="ablations",
        disable=not progress,
        leave=False,
    )
    probs: dict[str, list[np.ndarray]] = {name: [] for name in forms}
    rows = []
    for run, found in jobs:
        for repeat in range(repeats):
            for name, config in forms.items():
                each = _predict_variant(run, found, config, epochs, repeat)
                probs[name].append(each)
                named = {"seed": run.config.seed, "repeat": repeat}
                rows += tidy_measures({name: each}, run.labels("test"), **named)
                bar.update()
    bar.close()
    return Ablation(probs, runs[0].labels("test"), pd.DataFrame(rows), tried)


def ablation_table(ablation: Ablation, *, metrics: Sequence[str] = ("nll", "ece", "accuracy")):
    """Return what every part changes: its form minus the reference, with paired intervals.

    Returns:
        One row per variant and measure: ``group``, ``part``, ``reference``, ``metric``,
        ``difference``, ``low``, ``high``, ``p_holm``, ``verdict`` and ``helps``: whether the part
        makes the measure better, worse, or no difference at this size.
    """
    tables = []
    for reference in (FULL, BARE):
        group = [each for each in ablation.variants if each.reference == reference]
        probs = {each.name: ablation.probs[each.name] for each in group}
        probs[reference] = ablation.probs[reference]
        compared = compare_methods(probs, ablation.labels, reference, metrics=metrics)
        tables.append(compared)
    known = {each.name: each for each in ablation.variants}
    table = pd.concat(tables, ignore_index=True)
    table.insert(0, "group", [known[name].group for name in table["method"]])
    table.insert(1, "part", [known[name].part for name in table["method"]])
    table["helps"] = [
        _effect(group, found) for group, found in zip(table["group"], table["verdict"], strict=True)
    ]
    return table


def summary_table(ablation: Ablation, *, metrics: Sequence[str] = ("nll", "ece", "accuracy")):
    """Return each variant's mean measures and whether its part helps, ready to print."""
    effects = ablation_table(ablation, metrics=metrics).set_index(["method", "metric"])["helps"]
    means = interval_table(ablation.table, ["method", "metric"]).set_index(["method", "metric"])
    rows = []
    for name in ablation.probs:
        variant = next((each for each in ablation.variants if each.name == name), None)
        row = {"form": name}
        for metric in metrics:
            row[metric] = means.loc[(name, metric), "mean"]
        row["effect of the part on NLL"] = effects.get((name, "nll"), "reference")
        row["group"] = variant.group if variant else "reference"
        rows.append(row)
    return pd.DataFrame(rows)


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
            for effect in ("helps", "harms", "no difference at this size", "undefined")
            if (rows["helps"] == effect).any()
        ]
        lines.append(f"- {title}, NLL: {'; '.join(phrases)}.")
    return "\n".join(lines)


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
        n_epochs=epochs,
    )
    return predict(fitted.method, found.test)


def _effect(group: str, found: str) -> str:
    """Say whether a part helps: where taking it away makes things worse, it does."""
    if found not in ("better", "worse"):
        return found
    return "helps" if (found == "worse") == (group == "off") else "harms"


def _but(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(each for each in names if each != name)


def _spoken(feature: str) -> str:
    return feature.replace("_", " ")


def _scores_something(config: AttentionConfig) -> bool:
    others = (config.situation, config.qk != "none", config.prototype_score)
    return config.similarity or any(others)
