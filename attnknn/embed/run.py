"""Trained runs: a finished run folder becomes its contents.

All that later studies need is in the folder; ``report.json`` is written last, so a folder without
it is unfinished.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file

from attnknn.config import ConfigError, RunConfig
from attnknn.core.attention import NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.vote import Attention
from attnknn.data.change import flip_labels, long_tail_rows
from attnknn.data.splits import Split, Splits, load_splits
from attnknn.embed.networks import Embedder, build_embedder
from attnknn.files import METHOD_VERSION, REPORT_NAME, check_sums, check_version, read_report

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
            embedder = build_embedder(self.config.embedder, self.splits.spec)
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


def _read_table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
