"""Runs that were trained with a fault: found by name, checked to be comparable, and named.

A run belongs to a study if it has its fault and no other. Runs that do not belong are not refused:
one list of runs may serve the studies of both faults. But ``variant_facts`` says so.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from attnknn.config import ConfigError
from attnknn.runs import load_seeds, run_folder, seeds_in
from attnknn.trained import TrainedRun

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
