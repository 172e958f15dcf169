"""AFMP ablations: settings and seeds become histories, measures and paired tests.

Axes: B rows, C classes.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy import stats
from scipy.special import softmax
from tqdm import tqdm

from attnknn.afmptrain import AblationRun, Recipe, Setting, run_path, train_setting
from attnknn.compare import compare_methods, with_verdicts
from attnknn.data import Splits, load_splits
from attnknn.provenance import REPORT_NAME
from attnknn.report import DisplayTable, pivot_mean_interval
from attnknn.studies.afmp_settings import (
    DEIT_LARGER,
    DENSE,
    PUBLISHED,
    TOP_DOWN,
    WIDER,
    keep_name,
)
from attnknn.studies.contest import tidy_measures
from attnknn.trained import choose_device

# Besides the reference, each with its counterpart: the published model prunes nothing, and the
# wider model and the larger transformer have the size of the model with the top-down pass.
PAIRS = ((PUBLISHED, DENSE), (TOP_DOWN, WIDER), (TOP_DOWN, DEIT_LARGER))


@dataclass(frozen=True)
class Ablation:
    """All runs of an ablation.

    Attributes:
        runs: Name of each setting to its runs, one a seed.
        reference: Name of the setting that the others are compared with.
        splits: The data.
    """

    runs: dict[str, list[AblationRun]]
    reference: str
    splits: Splits

    @property
    def labels(self) -> Int[np.ndarray, " B"]:
        """True classes of the test rows."""
        return self.splits.test.labels

    @cached_property
    def probs(self) -> dict[str, list[Float[np.ndarray, "B C"]]]:
        """Test probabilities of each setting, one table a seed."""
        return {
            name: [softmax(run.logits["test"].astype(np.float64), axis=1) for run in runs]
            for name, runs in self.runs.items()
        }

    @property
    def sparsest(self) -> str:
        """Name of the setting that keeps the fewest edges."""
        models = {name: runs[0].setting.model for name, runs in self.runs.items()}
        shares = {name: models[name].keep_share for name in models if name.startswith("keep ")}
        return min(shares, key=shares.get, default=DENSE)

    @property
    def rivals(self) -> list[str]:
        """Names of the reference and of what differs from it in more than shares and penalties."""
        names = list(self.runs)
        return [self.reference, *names[names.index(TOP_DOWN) :]]

    def history(self) -> pd.DataFrame:
        """Return one row per setting, seed and epoch."""
        return self._joined("history")

    def gates(self) -> pd.DataFrame:
        """Return one row per setting, seed, recorded epoch and layer."""
        return self._joined("gates")

    def table(self) -> pd.DataFrame:
        """Return one row per setting, seed and measure, on the test rows."""
        rows = []
        for name, tables in self.probs.items():
            for run, probs in zip(self.runs[name], tables, strict=True):
                rows += tidy_measures({name: probs}, self.labels, seed=run.seed)
        return pd.DataFrame(rows)

    def comparison(self, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")) -> pd.DataFrame:
        """Return every setting's paired difference to the reference."""
        return compare_methods(self.probs, self.labels, self.reference, metrics=metrics)

    def pairs(self, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")) -> pd.DataFrame:
        """Return the paired differences of ``PAIRS`` and of all edges against the fewest.

        As far as both were trained; one family.
        """
        tables = [
            compare_methods(
                {name: self.probs[name] for name in pair}, self.labels, pair[1], metrics=metrics
            )
            for pair in (*PAIRS, (DENSE, self.sparsest))
            if set(pair) <= set(self.runs) and self.reference not in pair
        ]
        if not tables:
            return self.comparison(metrics=metrics).iloc[:0]
        return with_verdicts(pd.concat(tables, ignore_index=True), family=["metric"])

    def _joined(self, part: str) -> pd.DataFrame:
        tables = [
            getattr(run, part).assign(setting=name, seed=run.seed)
            for name, runs in self.runs.items()
            for run in runs
        ]
        return pd.concat([table for table in tables if len(table)], ignore_index=True)


def run_ablation(
    folder: Path,
    settings: Sequence[Setting],
    *,
    dataset: str,
    recipe: Recipe,
    seeds: Sequence[int],
    max_rows: int | None = None,
    workers: int = 1,
    device: str = "auto",
) -> Ablation:
    """Train every setting with every seed, or read what is finished, and return them all.

    Each run is kept as soon as it ends; started again, the study goes on where it was.

    Args:
        folder: Where the runs are kept.
        settings: What to train; the first one without a top-down pass that keeps the share of the
            setting "top-down" is the reference.
        dataset: A data set of images.
        recipe: How to train.
        seeds: Seeds of every setting.
        max_rows: Training images to draw; None takes all.
        workers: Processes that train at the same time, each on its share of the cores.
        device: Where to train; "auto" takes CUDA where it is present, or else the CPU.
    """
    if device == "auto":  # not MPS: it has no sparse products
        device = "cuda" if torch.cuda.is_available() else "cpu"
    data = {"dataset": dataset, "max_train_rows": max_rows}
    splits = load_splits(**data)
    jobs = [(setting, seed) for setting in settings for seed in seeds]
    fixed = {"recipe": recipe, "data": data, "device": choose_device(device)}
    todo = [
        (setting, seed)
        for setting, seed in jobs
        if not (run_path(folder, setting, splits, recipe, seed=seed) / REPORT_NAME).exists()
    ]
    if workers > 1 and len(todo) > 1:
        _train_apart(folder, todo, fixed, workers)
    runs: dict[str, list[AblationRun]] = {}
    bar = tqdm(jobs, desc="AFMP ablation", disable=not todo)
    for setting, seed in bar:
        bar.set_postfix_str(f"{setting.name}, seed {seed}")
        run = train_setting(folder, setting, splits=splits, seed=seed, progress=False, **fixed)
        runs.setdefault(setting.name, []).append(run)
    return Ablation(runs, _reference(settings), splits)


def _reference(settings: Iterable[Setting]) -> str:
    share = next(s.model.keep_share for s in settings if s.name == TOP_DOWN)
    return keep_name(share)


def _train_apart(
    folder: Path, jobs: list[tuple[Setting, int]], fixed: dict[str, Any], workers: int
) -> None:
    """Train in processes of their own; each keeps its run, so nothing comes back."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    # Spawned, not forked: a fork of a process with running threads can hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_train_one, folder, *job, fixed, threads) for job in jobs]
        bar = tqdm(as_completed(waiting), total=len(jobs), desc=f"{workers} trainings at once")
        try:
            for done in bar:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what has not begun would train for nothing
            raise


def _train_one(
    folder: Path, setting: Setting, seed: int, fixed: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    splits = load_splits(**fixed["data"])
    train_setting(folder, setting, splits=splits, seed=seed, progress=False, **fixed)


def ablation_table(ablation: Ablation, step_mb: dict[str, float]) -> DisplayTable:
    """Return settings against measures; bold where the best beats the reference.

    Args:
        ablation: The runs.
        step_mb: Peak memory of a training step of each setting, in MB.
    """
    shown = pivot_mean_interval(
        ablation.table(), comparison=ablation.comparison(metrics=("accuracy", "nll", "ece"))
    )
    first = {name: runs[0] for name, runs in ablation.runs.items()}
    extra = {
        "parameters": [f"{first[name].report['parameters']:,}" for name in shown.text.index],
        "CPU s / 1 000 images": [
            f"{_epoch_seconds(ablation.runs[name]):.2f}" for name in shown.text.index
        ],
        "MB of a step": [f"{step_mb[name]:.0f}" for name in shown.text.index],
    }
    none = dict.fromkeys(extra, False)
    return DisplayTable(shown.text.assign(**extra), shown.bold.assign(**none))


def _epoch_seconds(runs: list[AblationRun]) -> float:
    """Return the median CPU seconds of training on 1 000 images; validation is not in them."""
    rows = runs[0].report["rows"]["train"]
    return float(np.median([run.history["cpu_seconds"].median() for run in runs]) * 1000 / rows)


def comparison_table(ablation: Ablation) -> pd.DataFrame:
    """Return the paired tests against the reference, then those of ``PAIRS``, for printing.

    Holm corrects each of the two families on its own, measure by measure. ``p_seeds`` is that of a
    paired t test over the seeds alone: three of them can carry little, and the bootstrap, which
    draws from the same three, says more than they do.
    """
    table = pd.concat([ablation.comparison(), ablation.pairs()], ignore_index=True)
    table = table.assign(p_seeds=_seed_p_values(table, ablation.table()))
    columns = ["method", "baseline", "metric", "difference", "low", "high", "p_holm", "p_seeds"]
    shown = table[[*columns, "verdict"]]
    return shown.rename(columns={"method": "setting", "baseline": "against"})


def _seed_p_values(tests: pd.DataFrame, measures: pd.DataFrame) -> list[float]:
    """Return, for each test, the p-value of a paired t test over seeds; NaN where none is."""
    by_seed = measures.pivot(index=["metric", "seed"], columns="method", values="value")
    p_values = []
    for row in tests.itertuples():
        gaps = by_seed.loc[row.metric, row.method] - by_seed.loc[row.metric, row.baseline]
        testable = len(gaps) > 1 and gaps.std() > 0
        p_values.append(float(stats.ttest_1samp(gaps, 0).pvalue) if testable else float("nan"))
    return p_values


def penalty_names(ablation: Ablation) -> dict[str, str]:
    """Return the settings that differ in the penalty alone, each with its weight as its label."""
    names = [name for name in ablation.runs if name == ablation.reference or name.startswith("λ")]
    weights = {name: ablation.runs[name][0].setting.model.sparse_weight for name in names}
    return {name: f"λ {weights[name]:g}" for name in sorted(names, key=weights.get, reverse=True)}


def mean_accuracy(runs: list[AblationRun], part: str) -> float:
    """Return the mean accuracy of runs on the "val" or the "test" rows."""
    return float(np.mean([run.report["metrics"][f"{part}_accuracy"] for run in runs]))
