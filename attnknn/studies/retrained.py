"""Training + memory: runs whose embedder itself learned from wrong labels or a long tail.

The label-noise and long-tail studies change the memory of a finished run. Here the settings
``train_noise`` and ``train_tail`` changed the training rows: embedder and memory share the fault.
At one seed the rows and labels of the memory are the very same in both cases; only the embedder
differs. Such runs are trained apart, as a grid or one by one:

    attnknn run --notebooks 01 --grid notebooks/params/grids/train-noise.yaml
    attnknn run --notebooks 01 --set train_tail=0.1 --name quick-tail-0.1

and read by name: ``retrained_runs=[quick-train-noise]`` or ``[quick-tail-0.1]``. Held-out and test
rows of these runs are clean and complete; studies may make the held-out ones as bad as the memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from attnknn.config import ConfigError
from attnknn.core.noise import label_transition
from attnknn.core.vote import predict
from attnknn.data.change import flip_labels
from attnknn.embed.run import TrainedRun
from attnknn.embed.runs import load_seeds, run_folder, seeds_in
from attnknn.evaluate.compare import compare_methods
from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.studies.common import (
    METRICS,
    TUNED_DEPTH,
    Neighbourhoods,
    Predictions,
    attention_at,
    group_limits,
    level_limits,
    plain_methods,
    refit,
    search_run,
    tidy_measures,
    tuned_baselines,
    with_limits,
)
from attnknn.studies.label_noise import Level, NoiseStudy
from attnknn.studies.long_tail import (
    MEASURES,
    TailLevel,
    TailStudy,
    held_out_predictions,
    tail_measures,
)

# ---- Runs that were trained with a fault: found by name, checked to be comparable, and named.
#
# A run belongs to a study if it has its fault and no other. Runs that do not belong are not
# refused:
# one list of runs may serve the studies of both faults. But ``variant_facts`` says so.

FAULTS = ("train_noise", "train_noise_kind", "train_tail")
USED = "in this study"


def variant_folders(names: Sequence[str | Path]) -> list[Path]:
    """Return the run folders behind names or paths of runs, or of folders of runs (grids)."""
    found = []
    for name in names:
        folder = run_folder(str(name))
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        runs = [folder] if seeds_in(folder) else [path for path in inside if seeds_in(path)]
        if not runs:
            raise ConfigError(
                f"retrained_runs must name finished runs or folders of them, got {str(name)!r}: "
                f"nothing is trained in {folder}"
            )
        found += runs
    return found


def load_variants(
    names: Sequence[str | Path], runs: Sequence[TrainedRun], *, fault: str
) -> list[list[TrainedRun]]:
    """Return the trained seeds of every variant that has this fault and no other.

    Args:
        names: Runs, or folders of runs. ``variant_facts`` says which of them are not returned.
        runs: The runs they will be compared with: same data, same test rows, same settings.
        fault: ``train_noise`` or ``train_tail``.
    """
    fitting = [v for v in _checked_variants(names, runs) if not why_not(v[0], fault)]
    settings = [seeds[0].config.data for seeds in fitting]
    levels = [
        f"train_tail={each.train_tail:g}"
        if fault == "train_tail"
        else f"{each.train_noise_kind} train_noise={each.train_noise:g}"
        for each in settings
    ]
    twice = sorted({level for level in levels if levels.count(level) > 1})
    if twice:
        raise ConfigError(f"retrained_runs must hold each fault once, got {twice[0]} twice")
    return fitting


def why_not(run: TrainedRun, fault: str) -> str:
    """Return why a run is not part of the study of a fault; "" where it is."""
    is_noisy, is_tailed = run.config.data.train_noise > 0, run.config.data.train_tail < 1
    if is_noisy and is_tailed:
        return "no: two faults at once"
    if not is_noisy and not is_tailed:
        return "no: trained without a fault"
    if fault == "train_noise":
        return "no: a long tail, see 05_long_tail" if is_tailed else ""
    return "no: wrong labels, see 04_label_noise" if is_noisy else ""


def _checked_variants(
    names: Sequence[str | Path], runs: Sequence[TrainedRun]
) -> list[list[TrainedRun]]:
    """Return the trained seeds of every named run, checked to be comparable."""
    variants = [load_seeds(folder) for folder in variant_folders(names)]
    for run in (run for seeds in variants for run in seeds):
        other = other_settings(runs[0], run)
        if other:
            raise ConfigError(
                f"retrained_runs must differ from {runs[0].folder.parent.name} in "
                f"{', '.join(FAULTS)} alone, got {run.folder.parent.name} with {other}"
            )
        _check_test_rows(runs[0], run)
    return variants


def other_settings(run: TrainedRun, variant: TrainedRun) -> str:
    """Return in which settings two runs differ besides the fault and the seed; "" for none.

    A run on fewer rows may have more epochs: with the same epochs it would be trained on a
    fraction of the steps, and be judged by that.
    """
    ours, theirs = run.config.flat(), variant.config.flat()
    allowed = (*FAULTS, "seed", *(["epochs"] if variant.config.data.train_tail < 1 else []))
    names = [n for n in ours if ours[n] != theirs[n] and n not in allowed]
    return ", ".join(f"{name}: {ours[name]!r} -> {theirs[name]!r}" for name in names)


def variant_facts(
    names: Sequence[str | Path], runs: Sequence[TrainedRun], *, fault: str
) -> pd.DataFrame:
    """Return what every named run was trained on, the run they are compared with first.

    The last column says whether a run is part of the study of the fault, or why it is not.

    Args: As for ``load_variants``.
    """
    rows = []
    for run in [runs[0], *(seeds[0] for seeds in _checked_variants(names, runs))]:
        data, n_rows, training = run.config.data, len(run.rows("train")), run.config.training
        noise = f"{100 * data.train_noise:g} % {data.train_noise_kind}"
        fact = {"run": run.folder.parent.name, "training rows": n_rows}
        fact["wrong labels"] = noise if data.train_noise else "none"
        fact |= {"smallest / largest class": f"{data.train_tail:g}", "epochs": training.epochs}
        fact["steps"] = training.epochs * (n_rows // training.batch_size)
        rows.append(fact | {USED: why_not(run, fault) or "yes"})
    rows[0][USED] = "compared with"
    return pd.DataFrame(rows)


def _check_test_rows(run: TrainedRun, variant: TrainedRun) -> None:
    if not np.array_equal(run.labels("test"), variant.labels("test")):
        raise ConfigError(
            f"retrained_runs must have the test rows of {run.folder.parent.name}, "
            f"got {variant.folder.parent.name} with others"
        )


MEMORY, BOTH = "memory only", "training + memory"


def retrained_tail(
    names: Sequence[str | Path],
    base: TailStudy,
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> TailStudy:
    """Return the long-tail study of runs that were trained on a long tail.

    Args:
        names: Runs, or folders of runs; ``variant_facts`` names those that do not belong here.
        base: The study of the memory alone. Its groups of classes and its kinds of held-out
            queries are used, and its balanced level begins the curves.
        runs: The runs of that study.
        k_eval: Neighbours the attention weighs; tuned baselines may use more (``TUNED_DEPTH``).
        k_baseline: Neighbours of the untuned methods.
        progress: Show a progress bar.
    """
    levels = list(dict.fromkeys(level.held_out for level in base.probs))
    rows, kept, sizes = [], {}, {}
    variants = load_variants(names, runs, fault="train_tail")
    for run in tqdm([*chain(*variants)], desc="retrained", disable=not progress, leave=False):
        depth = max(k_eval, k_baseline, TUNED_DEPTH)
        ratio, found = run.config.data.train_tail, search_run(run, depth)
        sizes[ratio] = np.bincount(run.labels("train"), minlength=len(run.class_names))
        for level in (TailLevel(ratio, held_out) for held_out in levels):
            own = attention_at(run, found, k_eval) if level.held_out == "balanced" else None
            probs = held_out_predictions(
                run, run.bank, found, level, k_eval, k_baseline, attention=own
            )
            named = {"dataset": run.config.data.dataset, "seed": run.config.seed}
            named |= {"corrupted": BOTH, **level._asdict()}
            rows += tail_measures(probs, run.labels("test"), base.groups, named)
            _keep(kept, level, probs)
    counts = pd.DataFrame.from_dict(sizes, orient="index", columns=base.sizes.columns)
    clean = base.table[base.table["ratio"] == 1]
    limits = group_limits(kept, base.labels, base.groups, metrics=MEASURES)
    return TailStudy(_joined(rows, limits, clean), kept, base.labels, base.groups, counts)


def retrained_noise(
    names: Sequence[str | Path],
    base: NoiseStudy,
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> NoiseStudy:
    """Return the label-noise study of runs that were trained on wrong labels.

    Args: As for ``retrained_tail``.
    """
    levels = list(dict.fromkeys(level.held_out for level in base.probs))
    rows, kept = [], {}
    variants = load_variants(names, runs, fault="train_noise")
    for run in tqdm([*chain(*variants)], desc="retrained", disable=not progress, leave=False):
        depth = max(k_eval, k_baseline, TUNED_DEPTH)
        data, found = run.config.data, search_run(run, depth)
        for held_out in levels:
            level = Level(data.train_noise_kind, data.train_noise, held_out)
            probs = noise_predictions(run, found, level, k_eval, k_baseline)
            named = {"dataset": data.dataset, "seed": run.config.seed, "corrupted": BOTH}
            rows += tidy_measures(probs, run.labels("test"), **named, **level._asdict())
            _keep(kept, level, probs)
    clean = base.table[base.table["rate"] == 0]
    clean = clean[clean["kind"].isin([level.kind for level in kept])]
    limits = level_limits(kept, base.labels, metrics=METRICS)
    return NoiseStudy(_joined(rows, limits, clean), kept, base.labels)


def noise_predictions(
    run: TrainedRun, found: Neighbourhoods, level: Level, k_eval: int, k_baseline: int
) -> Predictions:
    """Return test probabilities of every method of a run that was trained on wrong labels."""
    labels, is_noisy = found.held_out_labels, level.held_out == "noisy"
    if is_noisy:
        # Another seed than the training rows', as in the study of the memory alone.
        options = {"n_classes": len(run.class_names), "kind": level.kind}
        labels = flip_labels(labels, level.rate, seed=run.config.seed + 1, **options)
    whole = Neighbourhoods(found.held_out, labels, found.test)
    here = whole.nearest(k_eval)
    error = label_transition(here.held_out, labels) if is_noisy else 0.0
    plain = plain_methods(min(k_baseline, found.test.k))
    probs = {name: predict(method, found.test) for name, method in plain.items()}
    tuned = tuned_baselines(whole, label_error=error)
    probs |= {name: fitted.predict(whole.test) for name, fitted in tuned.items()}
    if is_noisy:
        fitting = replace(run.config.fitting, fit_noisy_labels=True)
        attention = refit(run, run.bank, here, fitting=fitting).method
    else:
        attention = attention_at(run, found, k_eval)
    return probs | {"attention": predict(attention, here.test)}


def _keep(kept: dict, level: TailLevel | Level, probs: Predictions) -> None:
    for name, each in probs.items():
        kept.setdefault(level, {}).setdefault(name, []).append(each)


def _joined(rows: list[dict], limits: pd.DataFrame, clean: pd.DataFrame) -> pd.DataFrame:
    """Return the measured rows, behind those of the fault-free run that both kinds share."""
    table = with_limits(pd.DataFrame(rows), limits)
    if table.empty:
        return clean.iloc[:0].assign(corrupted=BOTH)
    shared = clean[clean["method"].isin(table["method"])].assign(corrupted=BOTH)
    return pd.concat([shared, table], ignore_index=True)


def both_tables(base: pd.DataFrame, retrained: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of both studies, told apart by the column ``corrupted``."""
    return pd.concat([base.assign(corrupted=MEMORY), retrained], ignore_index=True)


def verdict(
    base: TailStudy | NoiseStudy,
    again: TailStudy | NoiseStudy,
    facts: pd.DataFrame,
    *,
    metrics: Sequence[str] = ("nll", "accuracy"),
) -> str:
    """Return, in Markdown, what the same fault costs the attention when it was trained with it.

    Memory and test rows are the same in both cases, so the differences are paired; levels are
    compared over the seeds that both have. Runs and levels that cannot be compared are named.

    Args:
        base: The study of the memory alone.
        again: The study of the runs that were trained with the fault.
        facts: All runs that were given, from ``variant_facts``.
        metrics: Measures to compare.
    """
    given = facts.iloc[1:]
    if given.empty:
        return "No retrained runs were given: only the memory was changed."
    lines, alone = [], []
    for level in again.probs:
        where = ", ".join(f"{name} {value}" for name, value in level._asdict().items())
        where = where.replace("_", "-")
        pair = _common_seeds(base, again, level) if level in base.probs else {}
        if pair:
            table = compare_methods(pair, base.labels, MEMORY, metrics=metrics)
            lines.append(f"- {where}: {_differences(table)}.")
        else:
            alone.append(where)
    title = "Attention of runs trained with the fault, against the fault in the memory alone:"
    parts = ["\n".join([title, "", *lines])] if lines else []
    if alone:
        parts.append(f"Without a counterpart in the memory alone: {'; '.join(alone)}.")
    others = given[given[USED] != "yes"]
    if len(others):
        named = (f"{run} ({why})" for run, why in zip(others["run"], others[USED], strict=True))
        parts.append(f"Given, but not part of this study: {', '.join(named)}.")
    return "\n\n".join(parts)


def _differences(table: pd.DataFrame) -> str:
    """Return the rows of ``compare_methods`` in words."""
    return "; ".join(
        f"**{METRIC_NAMES[row['metric']]}** {row['difference']:+.4f} "
        f"({row['low']:+.4f} to {row['high']:+.4f}): {row['verdict']}"
        for row in table.to_dict("records")
    )


def _common_seeds(
    base: TailStudy | NoiseStudy, again: TailStudy | NoiseStudy, level: TailLevel | Level
) -> dict[str, list[np.ndarray]]:
    """Return the attention's probabilities in both studies, seed by seed; {} without a common one.

    Probabilities lie in the order in which the seeds entered the tables.
    """
    by_seed = []
    for study in (again, base):
        at = study.table
        for name, value in level._asdict().items():
            at = at[at[name] == value]
        seeds = at.loc[at["method"] == "attention", "seed"].unique()
        by_seed.append(dict(zip(seeds, study.probs[level]["attention"], strict=True)))
    common = [seed for seed in by_seed[0] if seed in by_seed[1]]
    pairs = zip((BOTH, MEMORY), by_seed, strict=True)
    return {name: [probs[seed] for seed in common] for name, probs in pairs} if common else {}
