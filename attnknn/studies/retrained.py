"""Training + memory: runs whose embedder itself learned from wrong labels or a long tail.

The studies of label noise and long tails change the memory of a finished run. With the settings
``train_noise`` and ``train_tail`` embedder and memory share the fault. At one seed the rows and
labels of the memory are the very same in both cases; only the embedder differs. Such runs are
trained apart, as a grid or one by one:

    attnknn run --notebooks 01 --grid notebooks/params/grids/train-noise.yaml

and read by name: ``retrained_runs=[quick-train-noise]``. One list of names may serve both studies,
so runs of the other fault are left out, and named.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attnknn.config import ConfigError
from attnknn.embed.run import TrainedRun
from attnknn.embed.runs import load_seeds, run_folder, seeds_in
from attnknn.evaluate.compare import compare_methods
from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.studies.common import Study

FAULTS = ("train_noise", "train_noise_kind", "train_tail")
USED = "in this study"
MEMORY, BOTH = "memory only", "training + memory"


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
) -> list[TrainedRun]:
    """Return the trained seeds of every variant that has this fault and no other.

    Args:
        names: Runs, or folders of runs. ``variant_facts`` says which of them are not returned.
        runs: The runs they will be compared with: same data, same test rows, same settings.
        fault: ``train_noise`` or ``train_tail``.
    """
    fitting = [v for v in _checked_variants(names, runs) if not why_not(v[0], fault)]
    levels = [tuple(getattr(v[0].config.data, name) for name in FAULTS) for v in fitting]
    if len(set(levels)) < len(levels):
        raise ConfigError(f"retrained_runs must hold each fault once, got {levels} ({FAULTS})")
    return [run for seeds in fitting for run in seeds]


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
    variants, ours = [load_seeds(folder) for folder in variant_folders(names)], runs[0]
    for run in (run for seeds in variants for run in seeds):
        name, other = run.folder.parent.name, other_settings(ours, run)
        if other:
            raise ConfigError(
                f"retrained_runs must differ from {ours.folder.parent.name} in "
                f"{', '.join(FAULTS)} alone, got {name} with {other}"
            )
        if not np.array_equal(ours.labels("test"), run.labels("test")):
            raise ConfigError(
                f"retrained_runs must have the same test rows, got {name} with others"
            )
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


def behind_clean(study: Study, clean: pd.DataFrame) -> Study:
    """Return the study of retrained runs behind the fault-free level, which both kinds share."""
    clean = clean.assign(corrupted=BOTH)
    if study.table.empty:
        return replace(study, table=clean.iloc[:0])
    shared = clean[clean["method"].isin(study.table["method"])]
    return replace(study, table=pd.concat([shared, study.table], ignore_index=True))


def both_tables(base: Study, again: Study) -> pd.DataFrame:
    """Return the rows of both studies, told apart by the column ``corrupted``."""
    return pd.concat([base.table.assign(corrupted=MEMORY), again.table], ignore_index=True)


def verdict(
    base: Study,
    again: Study,
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
        if pair := _common_seeds(base, again, level):
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


def _common_seeds(base: Study, again: Study, level: Any) -> dict[str, list[np.ndarray]]:
    """Return the attention's probabilities in both studies by seed; {} without a common seed."""
    both = [
        dict(zip(study.seeds.get(level, []), study.probs[level]["attention"], strict=True))
        if level in study.probs
        else {}
        for study in (again, base)
    ]
    common = [seed for seed in both[0] if seed in both[1]]
    named = zip((BOTH, MEMORY), both, strict=True)
    return {name: [probs[seed] for seed in common] for name, probs in named} if common else {}
