"""Label noise in the memory: what wrong labels among the neighbours do to each method.

The embedder stays as it is; only the labels of the memory rows are flipped. Everything a method
derives from labels (trust, histograms, prototypes) comes from the flipped ones. At each level the
held-out queries tune the baselines and refit the attention. Their labels are clean, or as noisy as
the memory's (the case people really have); then it is estimated how classes turn into labels
(``attnknn.core.noise.label_transition``), and every method fitted on them gets the same correction.

Beside the refitted attention stand two that are fitted once for all levels: *frozen*, the published
protocol, as trained on the clean memory; and *transfer*, fitted there under drawn noise.

Axes: B queries, C classes, N memory rows, U different qualities.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import stats
from sklearn.metrics import roc_auc_score

from attnknn.core.bank import MemoryBank
from attnknn.core.noise import label_transition
from attnknn.core.vote import Attention, predict
from attnknn.data.change import flip_labels
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import standing
from attnknn.evaluate.measure import METRIC_NAMES
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
    fit_attention,
    search_run,
)
from attnknn.studies.published import sweep_beside_published
from attnknn.studies.retrained import BOTH, behind_clean, load_variants

TRANSFER_NOISE, TRANSFER_EPOCHS = 0.4, 60
TUNED = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)")
ONCE = ("attention, frozen", "attention, transfer")  # fitted once, for every level
CURVES = ("uniform", *TUNED, "attention", *ONCE)
RIVALS = (*TUNED, *ONCE)


class Level(NamedTuple):
    """One noise level: what is flipped how often, and whether the held-out labels are too."""

    kind: str
    rate: float
    held_out: str


def memory_noise(
    runs: Sequence[TrainedRun],
    *,
    rates: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4),
    kinds: Sequence[str] = ("symmetric", "asymmetric"),
    held_out: Sequence[str] = ("clean", "noisy"),
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> Study:
    """Return every method's measures at every noise level.

    The methods "trust" and "cleanlab" of the table carry how well each tells flipped rows.

    Args:
        runs: One trained run a seed.
        rates: Shares of memory labels that are flipped.
        kinds: "symmetric" (to any other class) and "asymmetric" (to the next class).
        held_out: "clean" and "noisy" labels of the held-out queries.
        k_eval: Neighbours the attention weighs; tuned baselines may use more (``TUNED_DEPTH``).
        k_baseline: Neighbours of the untuned methods.
        progress: Show a progress bar.
    """
    levels = [
        Level(kind, rate, labels)
        for labels, kind, rate in itertools.product(held_out, kinds, rates)
        if rate > 0 or kind == kinds[0]
    ]
    ks = {"k_eval": k_eval, "k_baseline": k_baseline}

    def entries() -> Iterator[Entry]:
        for run in runs:
            found = search_run(run, max(k_eval, k_baseline, TUNED_DEPTH))
            once = fitted_once(run, found, k_eval)
            for level in progress_bar(levels, "noise levels", disable=not progress):
                bank = noisy_bank(run, level)
                probs = noise_predictions(run, bank, found, level, once=once, **ks)
                # The memory is the same for all held-out labels: its flips are looked for once.
                looked = level.held_out == held_out[0]
                found_flips = detection(bank, run.labels("train")) if looked else []
                yield Entry(run, level, probs, found_flips)

    study = collect(entries(), runs[0].labels("test"))
    clean = study.table[study.table["rate"] == 0]  # the start of every kind's curve
    repeated = [clean.assign(kind=kind) for kind in kinds[1:]]
    return replace(study, table=pd.concat([study.table, *repeated], ignore_index=True))


def noisy_bank(run: TrainedRun, level: Level) -> MemoryBank:
    """Return the memory with flipped labels."""
    options = {"n_classes": len(run.class_names), "kind": level.kind, "seed": run.config.seed}
    return run.bank.relabelled(flip_labels(run.labels("train"), level.rate, **options))


def fitted_once(run: TrainedRun, found: Neighbourhoods, k_eval: int) -> dict[str, Attention]:
    """Return the attentions that are fitted on the clean memory, for every level."""
    recipe = Recipe.of(run)
    drawn = replace(recipe.fitting, fit_noise_max=TRANSFER_NOISE, fit_epochs=TRANSFER_EPOCHS)
    transfer = fit_attention(run.bank, found.nearest(k_eval), recipe._replace(fitting=drawn))
    return dict(zip(ONCE, (attention_at(run, found, k_eval), transfer.method), strict=True))


def noise_predictions(
    run: TrainedRun,
    bank: MemoryBank,
    found: Neighbourhoods,
    level: Level,
    *,
    k_eval: int,
    k_baseline: int,
    own: Attention | None = None,
    once: Mapping[str, Attention] | None = None,
) -> Predictions:
    """Return test probabilities of every method over a memory with wrong labels.

    Args:
        run: Whose kind of attention is fitted.
        bank: The memory.
        found: Its neighbours, whatever labels they have there.
        level: Whether the held-out labels are as noisy as the memory's.
        k_eval: Neighbours the attention weighs.
        k_baseline: Neighbours of the untuned methods.
        own: An attention that is fitted on this memory and clean held-out labels already.
        once: Attentions fitted on clean labels elsewhere, by name.
    """
    labels, is_noisy, error = found.held_out_labels, level.held_out == "noisy", 0.0
    if is_noisy:
        # Another seed: held-out rows must not repeat the memory's draw.
        options = {"n_classes": len(run.class_names), "seed": run.config.seed + 1}
        labels = flip_labels(labels, level.rate, kind=level.kind, **options)
    here = Neighbourhoods(
        found.held_out.with_view(bank.view), labels, found.test.with_view(bank.view)
    )
    if is_noisy:
        error = label_transition(here.held_out.nearest(min(k_eval, here.test.k)), labels)
    options = {"k_eval": k_eval, "k_baseline": k_baseline, "label_error": error}
    own = None if is_noisy else own
    probs = contest(bank, here, Recipe.of(run), own=own, **options).predict(here.test)
    if not is_noisy:  # they were fitted on clean labels, which nobody has at the noisy levels
        probs |= {name: predict(method, here.test) for name, method in (once or {}).items()}
    return probs


def retrained_noise(
    names: Sequence[str | Path],
    base: Study,
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> Study:
    """Return the label-noise study of runs that were trained on wrong labels.

    Args:
        names: Runs, or folders of runs; ``retrained.variant_facts`` names those that do not belong
            here.
        base: The study of the memory alone, whose kinds of held-out labels are used, and whose
            noise-free level begins the curves.
        runs: The runs of that study.
        k_eval: Neighbours the attention weighs; tuned baselines may use more (``TUNED_DEPTH``).
        k_baseline: Neighbours of the untuned methods.
        progress: Show a progress bar.
    """
    variants = load_variants(names, runs, fault="train_noise")
    held_out = list(dict.fromkeys(level.held_out for level in base.probs))
    ks = {"k_eval": k_eval, "k_baseline": k_baseline}

    def entries() -> Iterator[Entry]:
        for run in progress_bar(variants, "retrained", disable=not progress):
            found = search_run(run, max(k_eval, k_baseline, TUNED_DEPTH))
            own, data = attention_at(run, found, k_eval), run.config.data
            for labels in held_out:
                level = Level(data.train_noise_kind, data.train_noise, labels)
                probs = noise_predictions(run, run.bank, found, level, own=own, **ks)
                yield Entry(run, level, probs)

    study = collect(entries(), base.labels, corrupted=BOTH)
    clean = base.table[base.table["rate"] == 0]
    return behind_clean(study, clean[clean["kind"].isin([level.kind for level in study.probs])])


# ---- Finding wrong labels: how well the trust of a memory row, and its peer, tell flipped rows.

DETECTORS = ("trust", "cleanlab")
_N_RESAMPLES = 200


def detection(bank: MemoryBank, true_labels: Int[np.ndarray, " N"]) -> list[dict[str, object]]:
    """Return how well trust and its peer find the flipped rows; nothing without flips.

    ``low`` and ``high`` are 95 % intervals over the memory rows of this one memory.
    """
    wrong = bank.labels.numpy() != true_labels
    if not wrong.any():
        return []
    scores = {"trust": bank.view.trust.numpy(), "cleanlab": cleanlab_scores(bank)}
    halves = half_widths(scores, wrong)
    rows = []
    for (method, score), (metric, measure) in itertools.product(scores.items(), DETECTION.items()):
        value, half = measure(score, wrong), halves[method, metric]
        limits = {"low": value - half, "high": value + half}
        rows.append({"method": method, "metric": metric, "value": value, **limits})
    return rows


def half_widths(
    scores: Mapping[str, Float[np.ndarray, " N"]],
    wrong: Bool[np.ndarray, " N"],
    *,
    n_resamples: int = _N_RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> dict[tuple[str, str], float]:
    """Return, by detector and measure, half of the bootstrap interval over memory rows.

    A resample is a vector of row counts, tallied by quality: nothing is sorted anew.

    Args:
        scores: Detector to the quality of every row, small where a label looks wrong.
        wrong: Which rows are.
        n_resamples: Bootstrap draws, the same for all detectors.
        level: Confidence of the intervals.
        seed: Seed of the draws.
    """
    rng, n_rows = np.random.default_rng(seed), len(wrong)
    places = {name: np.unique(quality, return_inverse=True)[1] for name, quality in scores.items()}
    drawn: dict[tuple[str, str], list[float]] = {}
    for _ in range(n_resamples):
        counts = np.bincount(rng.integers(n_rows, size=n_rows), minlength=n_rows)
        for name, place in places.items():
            bad, good = (
                np.bincount(place, counts * part, minlength=place.max() + 1)
                for part in (wrong, ~wrong)
            )
            for metric, value in zip(DETECTION, _from_tallies(bad, good), strict=True):
                drawn.setdefault((name, metric), []).append(value)
    z = float(stats.norm.ppf((1 + level) / 2))
    return {key: z * float(np.nanstd(values, ddof=1)) for key, values in drawn.items()}


def _from_tallies(
    bad: Float[np.ndarray, " U"], good: Float[np.ndarray, " U"]
) -> tuple[float, float]:
    """Return the measures of ``DETECTION`` from the wrong and right rows at each quality."""
    n_bad, n_good = bad.sum(), good.sum()
    if not n_bad or not n_good:  # a resample of a small memory may lack one kind
        return float("nan"), float("nan")
    above = n_good - np.cumsum(good)
    auroc = (bad * (above + good / 2)).sum() / (n_bad * n_good)
    rows = bad + good
    taken = np.clip(n_bad - (np.cumsum(rows) - rows), 0, rows)  # of each quality, lowest first
    shares = np.divide(taken, rows, out=np.zeros_like(rows), where=rows > 0)
    return float(auroc), float((bad * shares).sum() / n_bad)


def cleanlab_scores(bank: MemoryBank) -> Float[np.ndarray, " N"]:
    """Return cleanlab's label quality of every memory row, from the same probabilities as trust.

    The probabilities are the leave-one-out label shares around each row. With the self-confidence
    score cleanlab would return trust itself; its margin, adjusted for class thresholds (confident
    learning), is the peer.
    """
    from cleanlab.rank import get_label_quality_scores

    return get_label_quality_scores(
        bank.labels.numpy(),
        bank.view.histograms.double().numpy(),
        method="normalized_margin",
        adjust_pred_probs=True,
    )


def label_error_auroc(quality: Float[np.ndarray, " N"], wrong: Bool[np.ndarray, " N"]) -> float:
    """Return how well a low quality tells wrong labels from right ones; 0.5 is chance."""
    return float(roc_auc_score(wrong, -quality))


def precision_at_rate(quality: Float[np.ndarray, " N"], wrong: Bool[np.ndarray, " N"]) -> float:
    """Return the share of wrong labels among the lowest qualities, as many as there are wrong.

    Rows of equal quality count by their chance of being among them.
    """
    n_wrong = int(wrong.sum())
    limit = np.partition(quality, n_wrong - 1)[n_wrong - 1]
    below, level = quality < limit, quality == limit
    drawn = (n_wrong - below.sum()) / level.sum()  # share of the level rows that is taken
    return float((wrong[below].sum() + drawn * wrong[level].sum()) / n_wrong)


DETECTION = {"auroc": label_error_auroc, "precision at the noise rate": precision_at_rate}

# ---- What a page shows of the study.


def curves(table: pd.DataFrame, *, held_out: str | None = None) -> pd.DataFrame:
    """Return the rows to draw, of the methods that tell the story, with the name of their panel.

    Args:
        table: Of the study, or of memory-only and retrained runs together.
        held_out: Held-out labels to show; all of them when None, named in the panel.
    """
    rows = table[table["method"].isin(CURVES)]
    rows = rows if held_out is None else rows[rows["held_out"] == held_out]
    names = rows["kind"] + (",\nheld-out " + rows["held_out"] if held_out is None else "")
    if "corrupted" in rows:
        names = names + ",\n" + rows["corrupted"]
    rows = rows.assign(panel=names)
    for name in ("corrupted", "held_out", "kind"):  # the last one sorts first
        if name in rows:
            seen = list(rows[name].unique())
            rows = rows.sort_values(name, kind="stable", key=lambda names: names.map(seen.index))
    return rows


def noise_table(table: pd.DataFrame, *, rate: float | None = None) -> pd.DataFrame:
    """Return all methods' rows, sorted and with readable levels, for a printed table.

    Args:
        table: Of the study, or of memory-only and retrained runs together.
        rate: Noise level to show; all of them when None.
    """
    table = table[~table["method"].isin(DETECTORS)]
    table = table if rate is None else table[table["rate"] == rate]
    order = [name for name in ("corrupted", "kind", "held_out", "rate") if name in table]
    table = table.sort_values(order, kind="stable", ascending=True)
    shown = [f"{100 * rate:g} %" for rate in table["rate"]]
    return table.assign(noise=shown).rename(columns={"held_out": "held-out labels"})


def beside_published(study: Study) -> pd.DataFrame:
    """Return our accuracies and the published ones side by side, a column a noise level.

    Ours are those of the first kind of noise and the first kind of held-out labels.
    """
    own = study.table
    for name in ("kind", "held_out"):
        own = own[own[name] == own[name].iloc[0]]
    return sweep_beside_published(own, over="rate")


def verdict(compared: pd.DataFrame, *, metrics: Sequence[str] = ("nll", "accuracy")) -> str:
    """Return, in Markdown, how the refitted attention compares at the highest noise level.

    Args:
        compared: From ``common.comparisons``.
        metrics: Measures to tell of.
    """
    highest = compared[compared["rate"] == compared["rate"].max()]
    highest = highest[highest["method"].isin(RIVALS)]
    parts = []
    for (kind, rate, held_out), rows in highest.groupby(["kind", "rate", "held_out"], sort=False):
        phrases = [
            f"**{METRIC_NAMES[metric]}** {standing(rows[rows['metric'] == metric])}"
            for metric in metrics
        ]
        where = f"{100 * rate:g} % {kind}, held-out labels {held_out}"
        parts.append(f"- {where}: {'; '.join(phrases)}.")
    title = "Attention, refitted on the noisy memory, against the others (paired, Holm-corrected):"
    return "\n".join([title, "", *parts])
