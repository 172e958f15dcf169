"""Runs: a configuration becomes a finished run folder, and a finished folder its contents.

A run is data -> stage 1 (embedder) -> embeddings of every split -> stage 2 (attention, fitted on
held-out queries). ``report.json`` is written last: a folder without it is unfinished and is taken
up again where it stopped. ``python -m attnknn.train`` does it as a command, also for several
processes under ``torchrun``.
"""

import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file

from attnknn.config import ConfigError, RunConfig, TrainingConfig
from attnknn.core.attention import NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import fit_attention
from attnknn.core.vote import Attention
from attnknn.data.change import flip_labels, long_tail_rows
from attnknn.data.splits import Split, Splits, load_splits
from attnknn.embed.loop import Stage1
from attnknn.embed.networks import Embedder, build_embedder
from attnknn.embed.parallel import ALONE, Group
from attnknn.embed.rows import embed, embed_with_logits
from attnknn.embed.runs import check_data, claim
from attnknn.files import (
    METHOD_VERSION,
    REPORT_NAME,
    check_sums,
    check_version,
    folder_sums,
    locked_folder,
    provenance,
    read_report,
    read_table,
    save_report,
    write_table,
    write_tensors,
)

PARTS = ("train", "val", "test")
CHECKPOINTS = ("checkpoint.pt", "cnn.pt")  # gone once the report is there


@dataclass(frozen=True)
class TrainedRun:
    """A finished run, read from its folder; large things are loaded when first asked for.

    Attributes:
        folder: Where it is.
        config: What it was made with.
        report: Seconds, versions, hardware, commit, data source.
    """

    folder: Path
    config: RunConfig
    report: dict[str, Any]

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "embeddings.safetensors")

    @property
    def class_names(self) -> list[str]:
        """Name of each class."""
        return self.report["class_names"]

    def rows(self, part: str) -> Float[np.ndarray, "N D"]:
        """Return the unit-length embeddings of a split."""
        return self._tensors[f"{part}_rows"].numpy()

    def labels(self, part: str) -> Int[np.ndarray, " N"]:
        """Return the labels of a split."""
        return self._tensors[f"{part}_labels"].numpy()

    def cnn_logits(self, part: str) -> Float[np.ndarray, "N C"] | None:
        """Return the classifier head's logits of a split; None where no head was trained."""
        logits = self._tensors.get(f"{part}_logits")
        return None if logits is None else logits.numpy()

    @cached_property
    def bank(self) -> MemoryBank:
        """The training rows as a memory."""
        return build_bank(self.rows("train"), self.labels("train"), self.config, self.class_names)

    @cached_property
    def attention(self) -> NeighbourAttention:
        """The attention fitted in stage 2 (or trained jointly, where that was asked for)."""
        attention = NeighbourAttention(
            self.config.attention, dim=self.bank.dim, n_classes=self.bank.n_classes
        )
        attention.load_state_dict(load_file(self.folder / "attention.safetensors"))
        return attention.eval()

    def method(self, k: int) -> Attention:
        """Return the attention as a way to weigh k neighbours."""
        return Attention(k, self.attention)

    @cached_property
    def splits(self) -> Splits:
        """The raw data, checked to be the data the run was made with."""
        splits = load_data(self.config)
        if splits.fingerprint != self.report["data_fingerprint"]:
            raise RuntimeError(
                f"{self.config.data.dataset} is not the data {self.folder} was made with"
            )
        return splits

    @property
    def device(self) -> torch.device:
        """Where its networks run here."""
        return choose_device(self.config.training.device)

    @cached_property
    def embedder(self) -> Embedder:
        """The trained embedder."""
        with torch.random.fork_rng(devices=[]):
            embedder = build_embedder(self.config.embedder, self.splits.spec)
        embedder.load_state_dict(load_file(self.folder / "embedder.safetensors"))
        return embedder.eval()

    @cached_property
    def history(self) -> pd.DataFrame:
        """One row an epoch of stage 1; empty where nothing was trained."""
        return read_table(self.folder / "history.csv")

    @cached_property
    def fit_history(self) -> pd.DataFrame:
        """One row an epoch of stage 2; empty where the joint attention was kept."""
        return read_table(self.folder / "fit_history.csv")


def load_run(folder: Path) -> TrainedRun:
    """Return a finished run, checked to be whole and of this version."""
    folder = Path(folder)
    if not (folder / REPORT_NAME).exists():
        raise FileNotFoundError(
            f"{folder} must be a finished run, got a folder without report.json"
        )
    report = read_report(folder)
    check_version(report.get("method_version"), METHOD_VERSION, folder=folder)
    check_sums(folder, report["files"])
    return TrainedRun(folder, RunConfig.from_flat(report["config"]), report)


def load_data(config: RunConfig) -> Splits:
    """Return the rows a configuration asks for.

    ``train_noise`` and ``train_tail`` change the training rows themselves, so that the embedder
    learns from wrong labels or few rows and the memory holds them too. (Studies that change the
    memory alone do so on a finished run.) Validation and test rows stay as they are.
    """
    data = config.data
    splits = load_splits(
        data.dataset,
        val_rows=data.val_rows,
        seed=data.split_seed,
        max_train_rows=data.max_train_rows,
        max_test_rows=data.max_test_rows,
        label_column=data.label_column,
        image_size=data.image_size,
        numeric=data.numeric,
    )
    inputs, labels = splits.train.inputs, splits.train.labels
    options = {"n_classes": splits.n_classes, "seed": config.seed}
    if data.train_tail < 1:
        kept = long_tail_rows(labels, data.train_tail, **options)
        inputs, labels = inputs[kept], labels[kept]
    if data.train_noise > 0:
        labels = flip_labels(labels, data.train_noise, kind=data.train_noise_kind, **options)
    return replace(splits, train=Split(inputs, labels))


def build_bank(
    rows: Float[np.ndarray, "N D"],
    labels: Int[np.ndarray, " N"],
    config: RunConfig,
    class_names: list[str],
) -> MemoryBank:
    """Return the memory a configuration asks for."""
    return MemoryBank(
        rows,
        labels,
        n_classes=len(class_names),
        index=config.fitting.index,
        trust_neighbours=config.fitting.trust_neighbours,
    )


def choose_device(name: str) -> torch.device:
    """Return the named device; ``auto`` takes CUDA, then MPS, then the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device must be usable here, got device={name!r} ({reason})") from None
    return device


# ---- Training.

# Settings of the neighbours' vote, which a classifier head does not have.
JOINT_ONLY = (
    "k_train",
    "knn_weight",
    "contrastive_weight",
    "contrastive_form",
    "contrastive_temperature",
    "contrastive_margin",
    "entropy_weight",
    "hard_negatives",
    "hard_share",
    "hard_weight",
    "refresh_epochs",
    "exclude_self",
    "neighbour_search",
    "cnn_baseline",
)


def train_run(config: RunConfig, folder: Path, *, progress: bool = True) -> TrainedRun:
    """Train everything a configuration asks for, or return what is already there.

    Args:
        config: The whole configuration.
        folder: Complete: loaded, if it was made with the same configuration. Unfinished: resumed.
        progress: Show progress bars.

    Raises:
        ConfigError: The folder belongs to another configuration.
    """
    train_together(config, folder, ALONE, progress=progress)
    return load_run(folder)


def train_together(config: RunConfig, folder: Path, group: Group, *, progress: bool = True) -> None:
    """Train as one of several processes; the first one alone reads and writes the folder.

    Args:
        config: The whole configuration, the same in all processes.
        folder: As for `train_run`.
        group: The processes; every one of them makes this call.
        progress: Show progress bars.
    """
    folder, progress = Path(folder), progress and group.is_first
    with locked_folder(folder) if group.is_first else nullcontext():
        is_finished = group.from_first(_is_finished(folder, config) if group.is_first else None)
        if not is_finished:
            _train(config, folder, group, progress=progress)


def _is_finished(folder: Path, config: RunConfig) -> bool:
    """Take the folder for this configuration, and tell whether it is complete."""
    claim(folder, config)
    if not (folder / REPORT_NAME).exists():
        return False
    check_data(folder, config.data.dataset)
    return True


def _train(config: RunConfig, folder: Path, group: Group, *, progress: bool) -> None:
    """Fill a folder; its report comes last."""
    origin = provenance()  # now: the code on disk may change while this process runs
    splits = _load_in_turn(config, folder, group)
    device = group.device(choose_device(config.training.device))
    stage = stage_of(config, splits, device=device, group=group)
    history = _train_stage1(stage, folder, progress=progress)
    start = time.perf_counter()
    tensors = _embed_parts(stage, splits, progress=progress)
    if config.training.objective == "joint" and config.training.cnn_baseline:
        tensors |= _cnn_logits(stage, splits, folder / "cnn.pt", progress=progress)
    if not group.is_first:
        return
    write_tensors(folder / "embedder.safetensors", stage.embedder.state_dict())
    write_tensors(folder / "embeddings.safetensors", tensors)
    fit_start = time.perf_counter()
    _stage2(stage, tensors, splits, folder, progress=progress)
    write_table(folder / "history.csv", history)
    # The history counts every epoch, also those of a process that was killed.
    seconds = {
        "stage1": float(history["seconds_with_validation"].sum()) if len(history) else 0.0,
        "embed": fit_start - start,
        "stage2": time.perf_counter() - fit_start,
    }
    _write_report(folder, config, splits, stage, seconds, origin)
    for checkpoint in CHECKPOINTS:
        (folder / checkpoint).unlink(missing_ok=True)


def stage_of(
    config: RunConfig, splits: Splits, *, device: torch.device, group: Group = ALONE
) -> Stage1:
    """Return the training of a data set's embedder."""
    # NOTE: leakage guard. Test rows are not handed over.
    return Stage1(
        config,
        splits.train,
        splits.val,
        spec=splits.spec,
        n_classes=splits.n_classes,
        augmentation=splits.augmentation,
        device=device,
        group=group,
    )


def _load_in_turn(config: RunConfig, folder: Path, group: Group) -> Splits:
    """Return the rows; the first process goes ahead, as it may have to fetch them."""
    if not group.is_first:
        group.from_first()
        return load_data(config)
    _say_unused(config)
    splits = load_data(config)
    rows = {"source": splits.source, "fingerprint": splits.fingerprint}
    check_data(folder, config.data.dataset, rows)
    _say_lowered(config, len(splits.train))
    group.from_first()
    return splits


def _say_unused(config: RunConfig) -> None:
    """Say once which settings the chosen objective does not use, instead of ignoring them."""
    if config.training.objective == "joint":
        return
    defaults = TrainingConfig()
    ignored = [n for n in JOINT_ONLY if getattr(config.training, n) != getattr(defaults, n)]
    if ignored:
        warnings.warn(
            f"not used with objective='cross_entropy': {', '.join(ignored)}", stacklevel=2
        )


def _say_lowered(config: RunConfig, n_rows: int) -> None:
    """Say once which numbers of neighbours are beyond the training rows, instead of lowering them.

    A row never counts for itself, nor the row that MixUp blended into it; see ``selfmemory``.
    """
    training, on_train = config.training, config.fitting.fit_attention_on == "train"
    is_joint = training.objective == "joint"
    asked = {}  # name to the number asked for, and the most that can be had
    if is_joint:
        asked["k_train"] = (training.k_train, max(1, n_rows - 2))
    if not (is_joint and on_train):  # else stage 2 keeps the attention of stage 1
        asked["fit_k"] = (config.fitting.fit_k, n_rows - (on_train and training.exclude_self))
    lowered = [f"{name} from {k} to {most}" for name, (k, most) in asked.items() if k > most]
    if lowered:
        warnings.warn(f"lowered to the training rows there are: {', '.join(lowered)}", stacklevel=2)


def _train_stage1(stage: Stage1, folder: Path, *, progress: bool) -> pd.DataFrame:
    training = stage.config.training
    is_trainable = any(p.requires_grad for p in stage.embedder.parameters())
    if training.objective == "joint" and not (is_trainable and training.epochs):
        raise ConfigError(
            "objective must be 'cross_entropy' where no embedder is trained, got objective='joint'"
        )
    if not is_trainable:
        return pd.DataFrame()  # ready-made embeddings: there is nothing to train
    return stage.run(folder / "checkpoint.pt", progress=progress)


def _embed_parts(stage: Stage1, splits: Splits, *, progress: bool) -> dict[str, torch.Tensor]:
    """Return rows, labels and head logits of all splits, from one pass over the data."""
    tensors = {}
    has_head = stage.config.training.objective == "cross_entropy" and stage.epoch > 0
    options = {"device": stage.device, "progress": progress}
    for part in PARTS:
        split = getattr(splits, part)

        def embedded(share: slice, inputs: Any = split.inputs) -> torch.Tensor:
            if not has_head:
                return torch.from_numpy(embed(stage.embedder, inputs[share], **options))
            head = stage.objective.network
            pair = embed_with_logits(stage.embedder, head, inputs[share], **options)
            return torch.from_numpy(np.concatenate(pair, axis=1))

        both = stage.group.compute(len(split), embedded)  # (N, D) or (N, D + C)
        width = stage.embedder.embed_dim
        if has_head:
            tensors[f"{part}_logits"] = both[:, width:].contiguous()
        tensors[f"{part}_rows"] = both[:, :width].contiguous()
        tensors[f"{part}_labels"] = torch.from_numpy(split.labels)
    return tensors


def _cnn_logits(
    stage: Stage1, splits: Splits, checkpoint: Path, *, progress: bool
) -> dict[str, torch.Tensor]:
    """Train the same backbone on a classifier head, with the same budget, and return its logits.

    Same epochs, batches, augmentation, optimiser and rates as the joint training: what is left of
    a gap between the two is the gap between the objectives.
    """
    training = replace(stage.config.training, objective="cross_entropy", head="linear")
    config = replace(stage.config, training=training)
    other = stage_of(config, splits, device=stage.device, group=stage.group)
    other.run(checkpoint, progress=progress)
    tensors = _embed_parts(other, splits, progress=progress)
    return {name: tensor for name, tensor in tensors.items() if name.endswith("_logits")}


def _stage2(
    stage: Stage1,
    tensors: dict[str, torch.Tensor],
    splits: Splits,
    folder: Path,
    *,
    progress: bool,
) -> None:
    """Fit the attention, or keep the joint one where the configuration says so."""
    config = stage.config
    on_train = config.fitting.fit_attention_on == "train"
    if on_train and config.training.objective == "joint":
        write_tensors(folder / "attention.safetensors", stage.objective.network.state_dict())
        write_table(folder / "fit_history.csv", pd.DataFrame())
        return
    part = "train" if on_train else "val"
    rows, labels = (tensors[f"{part}_{what}"].numpy() for what in ("rows", "labels"))
    bank = build_bank(
        tensors["train_rows"].numpy(),
        tensors["train_labels"].numpy(),
        config,
        list(splits.class_names),
    )
    own = np.arange(len(rows)) if on_train and config.training.exclude_self else None
    fitted = fit_attention(
        bank,
        rows,
        labels,
        attention=config.attention,
        fitting=config.fitting,
        seed=config.seed,
        exclude_ids=own,
        progress=progress,
    )
    write_tensors(folder / "attention.safetensors", fitted.attention.state_dict())
    write_table(folder / "fit_history.csv", fitted.history)


def _write_report(
    folder: Path,
    config: RunConfig,
    splits: Splits,
    stage: Stage1,
    seconds: dict[str, float],
    origin: dict[str, Any],
) -> None:
    kept = max(stage.history, key=lambda row: (row["val_accuracy"], row["epoch"]), default={})
    save_report(
        folder,
        config=config.flat(),
        seed=config.seed,
        metrics=kept,  # of the epoch whose weights are kept
        seconds={name: round(value, 2) for name, value in seconds.items()},
        class_names=list(splits.class_names),
        data_source=splits.source,
        data_fingerprint=splits.fingerprint,
        rows={part: len(getattr(splits, part)) for part in PARTS},
        pretrained=stage.embedder.pretrained_used,
        parameters=sum(p.numel() for p in stage.embedder.parameters()),
        processes=stage.group.size,
        precision="bfloat16" if stage.bfloat16 else "float32",
        origin=origin,
        method_version=METHOD_VERSION,
        files=folder_sums(folder, without=(REPORT_NAME, *CHECKPOINTS)),
    )
