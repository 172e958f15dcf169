"""Training: a configuration becomes a finished run folder, and a run folder becomes its contents.

A run is data -> stage 1 (embedder) -> embeddings of every split -> stage 2 (attention, fitted on
held-out queries). All that later studies need is in the folder; ``report.json`` is written last,
so a folder without it is unfinished and is taken up again where it stopped.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save

from attnknn.attention import NeighbourAttention
from attnknn.backbones import Embedder, build_embedder
from attnknn.classify import Attention
from attnknn.config import ConfigError, RunConfig
from attnknn.corrupt import flip_labels, long_tail_rows
from attnknn.data import Split, Splits, load_splits
from attnknn.embed import embed, embed_with_logits
from attnknn.files import locked_folder, read_json, write_atomic, write_json, write_text
from attnknn.fit import fit_attention
from attnknn.memory import MemoryBank
from attnknn.provenance import save_report
from attnknn.stage1 import Stage1

PARTS = ("train", "val", "test")


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

    @cached_property
    def embedder(self) -> Embedder:
        """The trained embedder."""
        with torch.random.fork_rng(devices=[]):
            embedder = build_embedder(self.config.embedder, self.splits)
        embedder.load_state_dict(load_file(self.folder / "embedder.safetensors"))
        return embedder.eval()

    @cached_property
    def history(self) -> pd.DataFrame:
        """One row an epoch of stage 1; empty where nothing was trained."""
        return _read_table(self.folder / "history.csv")

    @cached_property
    def fit_history(self) -> pd.DataFrame:
        """One row an epoch of stage 2; empty where the joint attention was kept."""
        return _read_table(self.folder / "fit_history.csv")


def train_run(config: RunConfig, folder: Path, *, progress: bool = True) -> TrainedRun:
    """Train everything a configuration asks for, or return what is already there.

    Args:
        config: The whole configuration.
        folder: Complete: loaded, if it was made with the same configuration. Unfinished: resumed.
        progress: Show progress bars.

    Raises:
        ConfigError: The folder belongs to another configuration.
    """
    folder = Path(folder)
    with locked_folder(folder):
        _claim(folder, config)
        if not (folder / "report.json").exists():
            _train(config, folder, progress=progress)
    return load_run(folder)


def _train(config: RunConfig, folder: Path, *, progress: bool) -> None:
    """Fill a folder; its report comes last."""
    start = time.perf_counter()
    splits = load_data(config)
    device = choose_device(config.training.device)
    stage = Stage1(config, splits, device=device)
    history = _train_stage1(stage, folder, progress=progress)
    stage1_seconds = time.perf_counter() - start
    tensors = _embed_parts(stage, splits, progress=progress)
    if config.training.objective == "joint" and config.training.cnn_baseline:
        tensors |= _cnn_logits(config, splits, device, folder / "cnn.pt", progress=progress)
    _write_tensors(folder / "embedder.safetensors", stage.embedder.state_dict())
    _write_tensors(folder / "embeddings.safetensors", tensors)
    fit_start = time.perf_counter()
    _stage2(stage, tensors, splits, folder, progress=progress)
    _write_table(folder / "history.csv", history)
    for checkpoint in ("checkpoint.pt", "cnn.pt"):
        (folder / checkpoint).unlink(missing_ok=True)
    seconds = {
        "total": time.perf_counter() - start,
        "stage1": stage1_seconds,
        "stage2": time.perf_counter() - fit_start,
    }
    _write_report(folder, config, splits, stage, seconds)


def load_run(folder: Path) -> TrainedRun:
    """Return a finished run."""
    folder = Path(folder)
    if not (folder / "report.json").exists():
        raise FileNotFoundError(
            f"{folder} must be a finished run, got a folder without report.json"
        )
    report = read_json(folder / "report.json")
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


def _claim(folder: Path, config: RunConfig) -> None:
    """Write the configuration first thing, or refuse a folder that has another one."""
    path, wanted = folder / "config.json", config.flat()
    if not path.exists():
        write_json(path, wanted)
        return
    found = read_json(path)
    other = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    if other:
        changes = ", ".join(f"{n}: {found.get(n)!r} -> {wanted.get(n)!r}" for n in other)
        raise ConfigError(
            f"{folder} was made with another configuration ({changes}); use another folder"
        )


def _train_stage1(stage: Stage1, folder: Path, *, progress: bool) -> pd.DataFrame:
    if not any(parameter.requires_grad for parameter in stage.embedder.parameters()):
        return pd.DataFrame()  # ready-made embeddings: there is nothing to train
    return stage.run(folder / "checkpoint.pt", progress=progress)


def _embed_parts(stage: Stage1, splits: Splits, *, progress: bool) -> dict[str, torch.Tensor]:
    """Return rows, labels and head logits of all splits, from one pass over the data."""
    tensors = {}
    has_head = stage.config.training.objective == "cross_entropy" and stage.epoch > 0
    for part in PARTS:
        split, options = getattr(splits, part), {"device": stage.device, "progress": progress}
        if has_head:
            head = stage.objective.network
            rows, logits = embed_with_logits(stage.embedder, head, split.inputs, **options)
            tensors[f"{part}_logits"] = torch.from_numpy(logits)
        else:
            rows = embed(stage.embedder, split.inputs, **options)
        tensors[f"{part}_rows"] = torch.from_numpy(rows)
        tensors[f"{part}_labels"] = torch.from_numpy(split.labels)
    return tensors


def _cnn_logits(
    config: RunConfig, splits: Splits, device: torch.device, checkpoint: Path, *, progress: bool
) -> dict[str, torch.Tensor]:
    """Train the same backbone on a classifier head, with the same budget, and return its logits.

    Same epochs, batches, augmentation, optimiser and rates as the joint training: what is left of
    a gap between the two is the gap between the objectives.
    """
    training = replace(config.training, objective="cross_entropy", head="linear")
    stage = Stage1(replace(config, training=training), splits, device=device)
    stage.run(checkpoint, progress=progress)
    tensors = _embed_parts(stage, splits, progress=progress)
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
        _write_tensors(folder / "attention.safetensors", stage.objective.network.state_dict())
        _write_table(folder / "fit_history.csv", pd.DataFrame())
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
    _write_tensors(folder / "attention.safetensors", fitted.attention.state_dict())
    _write_table(folder / "fit_history.csv", fitted.history)


def _write_report(
    folder: Path, config: RunConfig, splits: Splits, stage: Stage1, seconds: dict[str, float]
) -> None:
    save_report(
        folder,
        config=config.flat(),
        seed=config.seed,
        metrics=stage.history[-1] if stage.history else {},
        seconds={name: round(value, 2) for name, value in seconds.items()},
        class_names=list(splits.class_names),
        data_source=splits.source,
        data_fingerprint=splits.fingerprint,
        rows={part: len(getattr(splits, part)) for part in PARTS},
        pretrained=stage.embedder.pretrained_used,
        parameters=sum(p.numel() for p in stage.embedder.parameters()),
    )


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    write_atomic(path, lambda handle: handle.write(content))


def _write_table(path: Path, table: pd.DataFrame) -> None:
    write_text(path, table.to_csv(index=False))


def _read_table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
