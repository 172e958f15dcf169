"""AFMP ablations: settings and seeds become histories, measures, paired tests and gates.

Axes: B rows, C classes.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from scipy import stats
from scipy.special import log_softmax, softmax

from attnknn.afmp.graph import AFMPConfig, Scaffold, grid_scaffold
from attnknn.afmp.model import AFMPTrunk
from attnknn.afmp.train import (
    AblationRun,
    Recipe,
    Setting,
    build_classifier,
    embed_features,
    run_path,
    train_setting,
)
from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import apply_temperature, fit_temperature
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.vote import Attention, Uniform, predict
from attnknn.data.splits import Split, Splits, load_splits
from attnknn.embed.rows import to_batch
from attnknn.embed.run import choose_device
from attnknn.evaluate.compare import (
    compare_in_families,
    compare_methods,
    standing,
    with_verdicts,
)
from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.figures.tables import DisplayTable, pivot_mean_interval
from attnknn.files import REPORT_NAME
from attnknn.progress import progress_bar
from attnknn.studies.common import (
    METRICS,
    TUNED_DEPTH,
    Neighbourhoods,
    Predictions,
    tidy_measures,
    tuned_baselines,
)

# ---- What is compared: a model becomes the settings that are trained

DENSE, TOP_DOWN, PUBLISHED = "dense", "top-down", "published"
WIDER, DEIT, DEIT_LARGER = "one pass, wider", "DeiT", "DeiT, larger"
# Besides the reference, each with its counterpart: the published model prunes nothing, and the
# wider model and the larger transformer have the size of the model with the top-down pass.
PAIRS = ((PUBLISHED, DENSE), (TOP_DOWN, WIDER), (TOP_DOWN, DEIT_LARGER))
TESTED = ("accuracy", "nll", "ece")


def keep_name(share: float) -> str:
    """Return what a setting is called by the share of edges it keeps."""
    return DENSE if share == 1 else f"keep {share:g}"


def ablation_settings(
    model: AFMPConfig, *, keep_shares: Sequence[float], sparse_weights: Sequence[float]
) -> list[Setting]:
    """Return the settings of the study.

    Shares kept and penalty weights are tried without the top-down pass; then the pass is added to
    the reference (the model's own share and weight). Beside them stand one pass that is as large
    as both, the published model, with and without its top-down pass, and two transformers: one of
    about the reference's size, and one of about the size of the model with the top-down pass.

    Args:
        model: The full model: its sizes, share and weight are the reference's.
        keep_shares: Shares of edges to keep; 1 is the dense model, 0 one without messages.
        sparse_weights: Weights of the mean gate in the loss, at the reference's share.
    """
    plain, both = replace(model, top_down=False), replace(model, top_down=True)
    shares = sorted({*keep_shares, model.keep_share}, reverse=True)
    weights = sorted({*sparse_weights} - {model.sparse_weight}, reverse=True)
    return [
        *(Setting(keep_name(share), replace(plain, keep_share=share)) for share in shares),
        *(Setting(f"λ {weight:g}", replace(plain, sparse_weight=weight)) for weight in weights),
        Setting(TOP_DOWN, both),
        Setting(WIDER, widened(plain)),
        Setting(PUBLISHED, plain, "published"),
        Setting(f"{PUBLISHED}, {TOP_DOWN}", both, "published"),
        # NOTE: as large as what it is compared with; the top-down pass has half as much again.
        Setting(DEIT, plain, "deit"),
        Setting(DEIT_LARGER, both, "deit"),
    ]


def widened(plain: AFMPConfig) -> AFMPConfig:
    """Return one pass that is wide enough to have about the parameters of the top-down model.

    What the second pass gains could have come from its parameters alone.
    """
    wanted = _n_parameters(replace(plain, top_down=True))
    wider = (replace(plain, width=width) for width in range(plain.width, 2 * plain.width, 2))
    return min(wider, key=lambda config: abs(_n_parameters(config) - wanted))


def _n_parameters(config: AFMPConfig) -> int:
    with torch.device("meta"):  # counted, not made
        return sum(p.numel() for p in AFMPTrunk(config).parameters())


# ---- The runs


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

    def comparison(self, *, metrics: Sequence[str] = TESTED) -> pd.DataFrame:
        """Return every setting's paired difference to the reference."""
        return compare_methods(self.probs, self.labels, self.reference, metrics=metrics)

    def pairs(self, *, metrics: Sequence[str] = TESTED) -> pd.DataFrame:
        """Return the paired differences of ``PAIRS`` and of all edges against the fewest.

        As far as both were trained; one family.
        """
        tables = [
            compare_methods({n: self.probs[n] for n in pair}, self.labels, pair[1], metrics=metrics)
            for pair in (*PAIRS, (DENSE, self.sparsest))
            if set(pair) <= set(self.runs) and self.reference not in pair
        ]
        if not tables:
            return self.comparison(metrics=metrics).iloc[:0]
        return with_verdicts(pd.concat(tables, ignore_index=True), family=["metric"])

    def mean(self, name: str, part: str = "test") -> float:
        """Return the mean accuracy of a setting on the "val" or the "test" rows."""
        return np.mean([run.report["metrics"][f"{part}_accuracy"] for run in self.runs[name]])

    def parameters(self, name: str) -> int:
        """Return how many parameters a setting has."""
        return self.runs[name][0].report["parameters"]

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
    fixed = {"recipe": recipe, "data": data, "device": choose_device(device), "progress": False}
    todo = [
        (setting, seed)
        for setting, seed in jobs
        if not (run_path(folder, setting, splits, recipe, seed=seed) / REPORT_NAME).exists()
    ]
    is_parallel = workers > 1 and len(todo) > 1
    with progress_bar(title="AFMP trainings", total=len(todo), disable=not todo) as bar:
        if is_parallel:
            threads = max(1, (os.cpu_count() or 1) // workers)
            # Spawned, not forked: a fork of a process with running threads can hang.
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                waiting = [pool.submit(_train_one, folder, *job, fixed, threads) for job in todo]
                try:
                    for done in as_completed(waiting):
                        done.result()  # each keeps its run, so nothing comes back
                        bar.update()
                except BaseException:
                    pool.shutdown(cancel_futures=True)  # the rest would train for nothing
                    raise
        runs: dict[str, list[AblationRun]] = {}
        for setting, seed in jobs:
            run = train_setting(folder, setting, splits=splits, seed=seed, **fixed)
            runs.setdefault(setting.name, []).append(run)
            bar.update(not is_parallel and (setting, seed) in todo)
    share = next(s.model.keep_share for s in settings if s.name == TOP_DOWN)
    return Ablation(runs, keep_name(share), splits)


def _train_one(
    folder: Path, setting: Setting, seed: int, fixed: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    splits = load_splits(**fixed["data"])
    train_setting(folder, setting, splits=splits, seed=seed, **fixed)


# ---- Tables


def ablation_table(ablation: Ablation) -> DisplayTable:
    """Return settings against measures and cost; bold where the best beats the reference."""
    shown = pivot_mean_interval(ablation.table(), comparison=ablation.comparison())
    names = shown.text.index
    extra = {
        "parameters": [f"{ablation.parameters(name):,}" for name in names],
        "CPU s / 1 000 images": [f"{_epoch_seconds(ablation.runs[name]):.2f}" for name in names],
        "MB kept for backward": [f"{step_memory(ablation, name):.1f}" for name in names],
    }
    none = dict.fromkeys(extra, False)
    return DisplayTable(shown.text.assign(**extra), shown.bold.assign(**none))


def _epoch_seconds(runs: list[AblationRun]) -> float:
    """Return the median CPU seconds of training on 1 000 images; validation is not in them."""
    rows = runs[0].report["rows"]["train"]
    return float(np.median([run.history["cpu_seconds"].median() for run in runs]) * 1000 / rows)


def step_memory(ablation: Ablation, name: str) -> float:
    """Return the MB that forward of one training batch keeps for its backward pass."""
    run, train = ablation.runs[name][0], ablation.splits.train
    places = np.arange(run.report["config"]["recipe"]["batch_size"]) % len(train)
    model = build_classifier(run.setting, ablation.splits, seed=0).train()
    return kept_for_backward(model, Split(train.inputs[places], train.labels[places]))


def kept_for_backward(model: torch.nn.Module, batch: Split) -> float:
    """Return the MB of all that a model's forward pass on a batch keeps, weights left out."""
    blocks = {each.untyped_storage().data_ptr(): 0 for each in model.parameters()}

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        blocks.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        logits, penalty = model.logits_and_penalty(to_batch(batch.inputs))
        loss = F.cross_entropy(logits, torch.from_numpy(batch.labels)) + penalty
    loss.backward()  # until here all of it is held: no two blocks had one place
    return sum(blocks.values()) / 1e6


def comparison_table(ablation: Ablation) -> pd.DataFrame:
    """Return the paired tests against the reference, then those of ``PAIRS``, for printing.

    Holm corrects each of the two families on its own, measure by measure. ``p_seeds`` is that of a
    paired t test over the seeds alone: three of them can carry little, and the bootstrap, which
    draws from the same three, says more than they do.
    """
    table = pd.concat([ablation.comparison(), ablation.pairs()], ignore_index=True)
    by_seed = ablation.table().pivot(index=["metric", "seed"], columns="method", values="value")
    p_seeds = []
    for row in table.itertuples():
        gaps = by_seed.loc[row.metric, row.method] - by_seed.loc[row.metric, row.baseline]
        testable = len(gaps) > 1 and gaps.std() > 0
        p_seeds.append(float(stats.ttest_1samp(gaps, 0).pvalue) if testable else np.nan)
    columns = ["method", "baseline", "metric", "difference", "low", "high", "p_holm", "p_seeds"]
    shown = table.assign(p_seeds=p_seeds)[[*columns, "verdict"]]
    return shown.rename(columns={"method": "setting", "baseline": "against"})


def penalty_names(ablation: Ablation) -> dict[str, str]:
    """Return the settings that differ in the penalty alone, each with its weight as its label."""
    names = [name for name in ablation.runs if name == ablation.reference or name.startswith("λ")]
    weights = {name: ablation.runs[name][0].setting.model.sparse_weight for name in names}
    return {name: f"λ {weights[name]:g}" for name in sorted(names, key=weights.get, reverse=True)}


# ---- Gates of a trained setting

LOW, HIGH = 0.02, 0.98  # a gate beyond these is saturated: hardly any gradient passes it


def gate_values(ablation: Ablation, name: str, *, n_images: int = 64) -> pd.DataFrame:
    """Return every channel's gate of the kept edges of some validation images, one row a gate.

    Of all seeds of a corrected setting; the weights are those of the chosen epoch.
    """
    pixels = to_batch(ablation.splits.val.inputs[:n_images])
    tables = []
    for run in ablation.runs[name]:
        model = run.load_model(ablation.splits)
        for place, layer in enumerate(model.network.gates(model.normalised(pixels)), start=1):
            gates = layer.channels.flatten().numpy()
            tables.append(pd.DataFrame({"seed": run.seed, "layer": place, "gate": gates}))
    return pd.concat(tables, ignore_index=True)


def saturation_table(ablation: Ablation, names: Sequence[str]) -> pd.DataFrame:
    """Return, by setting and layer, which shares of the kept edges' gates are saturated."""
    rows = []
    for name in names:
        for layer, gates in gate_values(ablation, name).groupby("layer")["gate"]:
            shut, wide = float((gates < LOW).mean()), float((gates > HIGH).mean())
            shares = {"nearly closed": shut, "nearly open": wide, "saturated": shut + wide}
            rows.append({"setting": name, "layer": layer} | shares)
    return pd.DataFrame(rows)


def gate_pictures(ablation: Ablation, name: str) -> dict[str, Any]:
    """Return what ``plot.gate_maps`` draws: validation images with the middle layer's gates.

    The gates are those of the first seed's weights at every recorded epoch, as in ``gates()``.
    """
    run = ablation.runs[name][0]
    images = ablation.splits.val.inputs[: len(next(iter(run.gate_maps.values())))]
    scaffold = scaffold_of(ablation, run)
    pairs = np.stack([scaffold.sources, scaffold.targets])
    drawn = {"images": images, "points": scaffold.points, "pairs": pairs}
    return drawn | {"gates": run.gate_maps, "patch": run.setting.model.patch}


def scaffold_of(ablation: Ablation, run: AblationRun) -> Scaffold:
    """Return the edges of a run of the corrected model."""
    model, shape = run.setting.model, ablation.splits.train.inputs.shape[2:]
    return grid_scaffold(*shape, model.patch, kind=model.scaffold, window=model.window)


# ---- AFMP features through the kNN head: does attention over neighbours help this model too?

RIVALS = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "readout + temperature")


@dataclass(frozen=True)
class KNNHead:
    """What the kNN methods and the model's own readout make of the features of a setting.

    ``probs``: method name to one table of probabilities a seed; ``table``: one row per seed, method
    and measure.
    """

    probs: dict[str, list[Float[np.ndarray, "B C"]]]
    labels: Int[np.ndarray, " B"]
    table: pd.DataFrame
    setting: str


def knn_head(ablation: Ablation, name: str, *, k: int = 50) -> KNNHead:
    """Return the kNN head over the features of a setting; ``k`` is the attention's."""
    seeds = [_knn_predictions(run, ablation.splits, k) for run in ablation.runs[name]]
    rows, labels = [], ablation.labels
    for run, probs in zip(ablation.runs[name], seeds, strict=True):
        rows += tidy_measures(probs, labels, seed=run.seed)
    by_method = {method: [probs[method] for probs in seeds] for method in seeds[0]}
    return KNNHead(by_method, labels, pd.DataFrame(rows), name)


def _knn_predictions(run: AblationRun, splits: Splits, k: int) -> Predictions:
    """Return the test probabilities of all methods, from one search, and of the readout."""
    model = run.load_model(splits)
    train, val, test = (
        embed_features(model, part.inputs) for part in (splits.train, splits.val, splits.test)
    )
    bank = MemoryBank(train, splits.train.labels, n_classes=splits.n_classes)
    # Plain votes may need more neighbours than the attention: they must not be held to its k.
    k, depth = min(k, len(bank)), min(max(k, TUNED_DEPTH), len(bank))
    searched = Neighbourhoods(bank.search(val, depth), splits.val.labels, bank.search(test, depth))
    found = searched.nearest(k)
    # NOTE: leakage guard. Validation rows chose the epoch, but no weight was trained on them.
    fitted = fit_on_neighbours(
        bank,
        found.held_out,
        found.held_out_labels,
        attention=AttentionConfig(),
        fitting=FittingConfig(fit_k=k),
        seed=run.seed,
    )
    probs = {"uniform": predict(Uniform(min(16, k)), found.test)}
    probs |= {name: fit.predict(searched.test) for name, fit in tuned_baselines(searched).items()}
    probs["attention"] = predict(Attention(k, fitted.attention), found.test)
    held_out, tested = (run.logits[part].astype(np.float64) for part in ("val", "test"))
    temperature = fit_temperature(log_softmax(held_out, axis=1), splits.val.labels)
    readout = softmax(tested, axis=1)
    scaled = apply_temperature(readout, temperature)
    return probs | {"readout": readout, "readout + temperature": scaled}


def knn_table(head: KNNHead) -> DisplayTable:
    """Return methods against measures; bold where the best beats tuned distance weights."""
    rival = compare_in_families(head.probs, head.labels, "distance (tuned)", metrics=METRICS)
    return pivot_mean_interval(head.table, comparison=rival)


def knn_sentence(head: KNNHead) -> str:
    """Return, in Markdown, how attention fares on AFMP features against its rivals."""
    table = compare_in_families(head.probs, head.labels, "attention", metrics=("nll", "accuracy"))
    table = table[table["method"].isin(RIVALS)]
    parts = [
        f"{METRIC_NAMES[metric]}: {standing(table[table['metric'] == metric])}"
        for metric in ("nll", "accuracy")
    ]
    return f"**kNN head.** Attention on the features of “{head.setting}”: {'; '.join(parts)}."
