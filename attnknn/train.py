"""Training: a configuration becomes a finished run folder.

A run is data -> stage 1 (embedder) -> embeddings of every split -> stage 2 (attention, fitted on
held-out queries). ``report.json`` is written last: a folder without it is unfinished and is taken
up again where it stopped.
"""

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save

from attnknn.config import ConfigError, RunConfig, TrainingConfig
from attnknn.data import Splits
from attnknn.embed import embed, embed_with_logits
from attnknn.files import locked_folder, read_json, write_atomic, write_json, write_text
from attnknn.fit import fit_attention
from attnknn.provenance import REPORT_NAME, provenance, save_report
from attnknn.sources import own_files_stamp
from attnknn.stage1 import Stage1
from attnknn.trained import PARTS, TrainedRun, build_bank, choose_device, load_data, load_run

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
    folder = Path(folder)
    with locked_folder(folder):
        _claim(folder, config)
        if (folder / REPORT_NAME).exists():
            _check_own_files(folder, config.data.dataset)
        else:
            _train(config, folder, progress=progress)
    return load_run(folder)


def _train(config: RunConfig, folder: Path, *, progress: bool) -> None:
    """Fill a folder; its report comes last."""
    origin = provenance()  # now: the code on disk may change while this process runs
    _say_unused(config)
    splits = load_data(config)
    _check_data(folder, splits, config.data.dataset)
    device = choose_device(config.training.device)
    stage = Stage1(config, splits, device=device)
    history = _train_stage1(stage, folder, progress=progress)
    start = time.perf_counter()
    tensors = _embed_parts(stage, splits, progress=progress)
    if config.training.objective == "joint" and config.training.cnn_baseline:
        tensors |= _cnn_logits(config, splits, device, folder / "cnn.pt", progress=progress)
    _write_tensors(folder / "embedder.safetensors", stage.embedder.state_dict())
    _write_tensors(folder / "embeddings.safetensors", tensors)
    fit_start = time.perf_counter()
    _stage2(stage, tensors, splits, folder, progress=progress)
    _write_table(folder / "history.csv", history)
    # The history counts every epoch, also those of a process that was killed.
    seconds = {
        "stage1": float(history["seconds"].sum()) if len(history) else 0.0,
        "embed": fit_start - start,
        "stage2": time.perf_counter() - fit_start,
    }
    _write_report(folder, config, splits, stage, seconds, origin)
    for checkpoint in ("checkpoint.pt", "cnn.pt"):
        (folder / checkpoint).unlink(missing_ok=True)


def _claim(folder: Path, config: RunConfig) -> None:
    """Write the configuration first thing, or refuse a folder that has another one."""
    path, wanted = folder / "config.json", config.flat()
    if not path.exists():
        write_json(path, wanted)
        return
    # A setting that did not exist when the folder was made had its default value.
    found = RunConfig().flat() | read_json(path)
    other = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    if other:
        changes = ", ".join(f"{n}: {found.get(n)!r} -> {wanted.get(n)!r}" for n in other)
        raise ConfigError(
            f"{folder} was made with another configuration ({changes}); use another folder"
        )


def _check_data(folder: Path, splits: Splits, dataset: str) -> None:
    """Note which rows a folder is made from, or refuse to go on with others."""
    path = folder / "data.json"
    if not path.exists():
        stamp = own_files_stamp(dataset)
        facts = {"source": splits.source, "fingerprint": splits.fingerprint, "own_files": stamp}
        write_json(path, facts)
    elif read_json(path)["fingerprint"] != splits.fingerprint:
        raise ConfigError(f"{folder} was begun with other rows of {dataset}; use another folder")


def _check_own_files(folder: Path, dataset: str) -> None:
    """Refuse a finished folder whose own data files have changed since."""
    path = folder / "data.json"
    stamp = read_json(path).get("own_files") if path.exists() else None
    if stamp is not None and stamp != own_files_stamp(dataset):
        raise ConfigError(
            f"{dataset} has changed since {folder} was made from it; use another folder"
        )


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
        origin=origin,
    )


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    write_atomic(path, lambda handle: handle.write(content))


def _write_table(path: Path, table: pd.DataFrame) -> None:
    write_text(path, table.to_csv(index=False))
