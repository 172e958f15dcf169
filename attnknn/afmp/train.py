"""Trained AFMP models: a setting and a seed become a classifier of pixels, kept in a folder.

Axes: B and N images, C classes, D width, E edges.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import TqdmWarning

from attnknn.afmp.graph import AFMPConfig
from attnknn.afmp.model import AFMP, AFMPTrunk
from attnknn.afmp.published import PublishedAFMP
from attnknn.checks import check_count, check_one_of, check_range
from attnknn.core.kernels import with_fast_linear
from attnknn.data.change import augment_batch
from attnknn.data.splits import Split, Splits
from attnknn.embed.loop import Training
from attnknn.embed.objectives import Batch
from attnknn.embed.optim import Optimiser
from attnknn.embed.rows import to_batch
from attnknn.files import (
    AFMP_VERSION,
    REPORT_NAME,
    check_sums,
    check_version,
    folder_sums,
    locked_folder,
    provenance,
    read_report,
    read_table,
    save_report,
    validity_key,
    write_table,
    write_tensors,
)

KINDS = ("afmp", "published", "deit")


@dataclass(frozen=True)
class Setting:
    """One entry of an ablation.

    Attributes:
        name: What it is called in tables and figures.
        model: Sizes and switches; a transformer takes its depth, patch and size from it.
        kind: "afmp", "published" (with the faults) or "deit" (a transformer of about this size).
    """

    name: str
    model: AFMPConfig
    kind: str = "afmp"

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, KINDS)


@dataclass(frozen=True)
class Recipe:
    """How every setting is trained; the defaults are the published ones.

    Attributes:
        epochs: Rounds over the training rows.
        batch_size: Images a step.
        lr: First rate of AdamW.
        weight_decay: Decay of AdamW.
        patience: Epochs without a better validation accuracy before the rate is lowered.
        factor: What the rate is multiplied by then.
        augment: Transforms, out of those that suit the data.
    """

    epochs: int = 100
    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 1e-4
    patience: int = 5
    factor: float = 0.2
    augment: tuple[str, ...] = ("crop", "flip")

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        check_range("lr", self.lr, low=0, low_open=True)
        check_range("weight_decay", self.weight_decay, low=0)
        check_count("patience", self.patience, low=0)
        check_range("factor", self.factor, low=0, high=1, low_open=True, high_open=True)


# The transformer that stands beside AFMP: steps of its width, fine enough for sizes within 10 %,
# and the least width of a head.
WIDTH_STEP, HEAD_WIDTH = 4, 32


class Classifier(nn.Module):
    """Pixels in [0, 1] to logits: the data's mean and deviation are taken out, then the model."""

    def __init__(self, network: nn.Module, splits: Splits) -> None:
        super().__init__()
        self.network = network
        for name in ("mean", "std"):
            statistic = torch.tensor(getattr(splits, name), dtype=torch.float32)
            self.register_buffer(name, statistic[:, None, None])

    def normalised(self, pixels: Float[Tensor, "B c h w"]) -> Float[Tensor, "B c h w"]:
        """Return what the network sees."""
        return (pixels - self.mean) / self.std

    def forward(self, pixels: Float[Tensor, "B c h w"]) -> Float[Tensor, "B C"]:
        """Return the logits."""
        return self.network(self.normalised(pixels))

    def logits_and_penalty(
        self, pixels: Float[Tensor, "B c h w"]
    ) -> tuple[Float[Tensor, "B C"], Float[Tensor, ""]]:
        """Return the logits and what the model's own regulariser adds to the loss."""
        if isinstance(self.network, AFMP):
            return self.network.logits_and_penalty(self.normalised(pixels))
        return self(pixels), pixels.new_zeros(())

    def features(self, pixels: Float[Tensor, "B c h w"]) -> Float[Tensor, "B D"]:
        """Return what the readout reads."""
        return self.network.trunk(self.normalised(pixels))


def build_classifier(setting: Setting, splits: Splits, *, seed: int) -> Classifier:
    """Return the untrained model of a setting; the seed decides its weights."""
    if splits.kind != "image":
        raise ValueError(f"dataset must hold images for AFMP, got kind={splits.kind!r}")
    channels, side = splits.train.inputs.shape[1], splits.train.inputs.shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if setting.kind == "deit":
            network = build_transformer(setting.model, splits.n_classes, channels, side)
        else:
            kind = AFMP if setting.kind == "afmp" else PublishedAFMP
            network = kind(setting.model, splits.n_classes, channels=channels)
    return Classifier(network, splits)


def build_transformer(config: AFMPConfig, n_classes: int, channels: int, side: int) -> nn.Module:
    """Return a DeiT-type model with the patches, the depth and about the size of an AFMP model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # a hint about widgets nobody asked for
        from timm.models.vision_transformer import VisionTransformer

    wanted = sum(p.numel() for p in AFMPTrunk(config, channels=channels).parameters())
    pixels = channels * config.patch**2

    def size(width: int) -> int:  # blocks: 12 width^2; embedding: pixels * width
        return config.layers * 12 * width**2 + pixels * width

    widths = range(WIDTH_STEP, 1025, WIDTH_STEP)
    width = min(widths, key=lambda width: abs(size(width) - wanted))
    most = max(1, width // HEAD_WIDTH)
    transformer = VisionTransformer(
        img_size=side,
        patch_size=config.patch,
        in_chans=channels,
        num_classes=n_classes,
        embed_dim=width,
        depth=config.layers,
        num_heads=next(heads for heads in range(most, 0, -1) if width % heads == 0),
    )
    return with_fast_linear(transformer)  # the same products as AFMP's: times can be compared


# ---- A trained classifier and images become logits, features, measures and facts about gates.

LOOKED_AT = 256  # validation images whose gates are looked at
DRAWN = 4  # validation images whose gates are kept, edge by edge
EVALUATION_BATCH = 500  # of models whose results do not depend on it


def predict_logits(
    model: nn.Module, inputs: UInt8[np.ndarray, "N c h w"]
) -> Float[np.ndarray, "N C"]:
    """Return the logits of images, in evaluation mode and in batches that suit the model."""
    return _forward(model, model, inputs, evaluation_batch(model))


def evaluation_batch(model: nn.Module) -> int:
    """Return how many images a model is evaluated on at once.

    NOTE: in the published model only the first image of a batch exchanges messages, so its
    accuracy depends on the batch: it keeps the source notebook's.
    """
    network = getattr(model, "network", model)
    return network.batch_size if isinstance(network, PublishedAFMP) else EVALUATION_BATCH


def embed_features(
    model: Classifier, inputs: UInt8[np.ndarray, "N c h w"], *, batch_size: int = EVALUATION_BATCH
) -> Float[np.ndarray, "N D"]:
    """Return the unit-length features of images."""
    rows = _forward(model, model.features, inputs, batch_size)
    return F.normalize(torch.from_numpy(rows), dim=1).numpy()


@torch.no_grad()
def _forward(
    model: nn.Module, call: Callable[[Tensor], Tensor], inputs: np.ndarray, batch_size: int
) -> np.ndarray:
    model.eval()
    device = next(model.parameters()).device
    batches = np.split(inputs, range(batch_size, len(inputs), batch_size))
    return torch.cat([call(to_batch(batch, device)).cpu() for batch in batches]).numpy()


def judge(model: nn.Module, split: Split, name: str) -> dict[str, float]:
    """Return accuracy and NLL of a split."""
    return measures(predict_logits(model, split.inputs), split.labels, name)


def measures(
    logits: Float[np.ndarray, "N C"], labels: Int[np.ndarray, " N"], name: str
) -> dict[str, float]:
    """Return accuracy and NLL of logits, called by the name of their split."""
    nll = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    hits = torch.from_numpy(logits.argmax(axis=1) == labels).float().mean()
    return {f"{name}_accuracy": float(hits), f"{name}_nll": float(nll)}


def gate_facts(model: Classifier, split: Split) -> list[dict[str, float]]:
    """Return what the gates of each layer do on some images of a split.

    ``kept`` is the share of edges that carry a message, ``closed`` the share of all gates (edges
    and channels) below one half, pruned ones included, and ``mean`` the mean gate of kept edges;
    NaN where none is.
    """
    device = next(model.parameters()).device
    pixels = model.normalised(to_batch(split.inputs[:LOOKED_AT], device))
    if isinstance(model.network, PublishedAFMP):  # one list of edges for the whole batch
        opened = model.network.opened(pixels)
        facts = [(1.0, (gates < 0.5).float().mean(), gates.mean()) for gates in opened]
    else:
        facts = []
        for layer in model.network.gates(pixels):
            kept = layer.kept.float().mean()
            n_open = (layer.channels >= 0.5).sum()
            n_gates = layer.kept.numel() * layer.channels.shape[2]
            facts.append((kept, 1 - n_open / n_gates, layer.channels.mean()))
    return [
        {"kept": float(kept), "closed": float(closed), "mean": float(mean)}
        for kept, closed, mean in facts
    ]


def middle_gates(model: Classifier, split: Split) -> Float[Tensor, "n_images E"]:
    """Return the middle layer's mean gate of every edge of a split's first images, 0 if pruned."""
    device = next(model.parameters()).device
    model.eval()
    layers = model.network.gates(model.normalised(to_batch(split.inputs[:DRAWN], device)))
    return layers[len(layers) // 2].gates.cpu()


# ---- The training of a setting, and the folder of a run. A run is finished when its
# ``report.json`` is there: it is written last.

LOOK_EVERY = 10  # epochs between two looks at the gates


class AFMPTraining(Training):
    """The training of a setting.

    Validation rows choose the epoch and lower the rate. Test rows are read for the published form
    alone, to show what choosing by them adds; nothing is chosen by them here.

    Args:
        setting: What is trained.
        splits: Rows to learn from, to choose by, and to report on.
        recipe: How.
        seed: Decides weights, order and augmentation.
        device: Where.
    """

    prefers_later = False

    def __init__(
        self,
        setting: Setting,
        splits: Splits,
        recipe: Recipe,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.setting, self.splits, self.recipe, self.title = setting, splits, recipe, setting.name
        self.model = build_classifier(setting, splits, seed=seed).to(device)
        self.augment = [name for name in recipe.augment if name in splits.augmentation]
        self.gates: list[dict[str, Any]] = []
        self.gate_maps: dict[str, Tensor] = {}  # epoch to the gates of a few images
        super().__init__(
            {"model": self.model},
            _optimiser(self.model, recipe),
            splits.train,
            splits.val,
            epochs=recipe.epochs,
            batch_size=recipe.batch_size,
            whole_batches=False,
            seed=seed,
            device=device,
        )

    def load(self, ids: Int[Tensor, " B"]) -> tuple[Tensor, Batch]:
        """Return augmented pixels on the device, and what they are made of."""
        pixels = to_batch(self.train.inputs[ids.numpy()])
        pixels = augment_batch(pixels, self.augment, self.generator).to(self.device)
        return pixels, Batch(ids, self._labels[ids])

    def forward(self, inputs: Tensor) -> tuple[Float[Tensor, "M C"], dict[str, Tensor]]:
        """Return logits, and what sparsity adds to the loss."""
        logits, penalty = self.model.logits_and_penalty(inputs)
        return logits, {"sparsity_loss": penalty}

    def loss(
        self, features: Float[Tensor, "B C"], batch: Batch
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Return the cross-entropy of logits, and means to record."""
        labels = batch.labels.to(features.device)
        hits = (features.argmax(dim=1) == labels).float().mean()
        return F.cross_entropy(features, labels), {"train_accuracy": hits}

    def validate(self) -> dict[str, float]:
        """Return accuracy and NLL of the validation rows."""
        return judge(self.model, self.val, "val")

    def after_epoch(self, row: dict[str, Any]) -> None:
        """Record the gates of some validation images, now and then and after the last epoch."""
        if self.setting.kind == "published":
            # Only to show what choosing the epoch on test rows, as published, makes of it.
            row["test_accuracy"] = judge(self.model, self.splits.test, "test")["test_accuracy"]
        due = self.epoch % LOOK_EVERY == 0 or self.epoch == self.epochs
        if not due or self.setting.kind == "deit":
            return
        self.gates += [
            {"epoch": self.epoch, "layer": place + 1, **facts}
            for place, facts in enumerate(gate_facts(self.model, self.val))
        ]
        if self.setting.kind == "afmp":
            self.gate_maps[str(self.epoch)] = middle_gates(self.model, self.val)

    def own_state(self) -> dict[str, Any]:
        """Return what was seen of the gates."""
        return {"gates": self.gates, "gate_maps": self.gate_maps}

    def restore_own(self, state: dict[str, Any]) -> None:
        """Take over what was seen of the gates."""
        self.gates, self.gate_maps = state["gates"], state["gate_maps"]


def _optimiser(model: nn.Module, recipe: Recipe) -> Optimiser:
    # Fused: one call for all parameters; one by one they cost a third of a small step.
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    rates = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    adamw = torch.optim.AdamW(model.parameters(), **rates, fused=fused)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        adamw, mode="max", patience=recipe.patience, factor=recipe.factor
    )
    return Optimiser([adamw], lr=recipe.lr, plateau=plateau)


@dataclass(frozen=True)
class AblationRun:
    """A finished run, read from its folder.

    Attributes:
        setting: What was trained.
        seed: Its seed.
        history: One row an epoch.
        gates: Gates by epoch and layer; empty for a transformer.
        gate_maps: Epoch to the middle layer's gates of the first validation images, edge by edge;
            of the corrected model only.
        logits: Logits of the "val" and the "test" rows.
        report: Metrics, seconds, provenance.
        folder: Where it is.
    """

    setting: Setting
    seed: int
    history: pd.DataFrame
    gates: pd.DataFrame
    gate_maps: dict[int, Float[np.ndarray, "n_images E"]]
    logits: dict[str, Float[np.ndarray, "_ C"]]
    report: dict[str, Any]
    folder: Path

    def load_model(self, splits: Splits) -> Classifier:
        """Return the trained model of the best epoch."""
        model = build_classifier(self.setting, splits, seed=self.seed)
        model.load_state_dict(load_file(self.folder / "model.safetensors"))
        return model.eval()


def run_path(folder: Path, setting: Setting, splits: Splits, recipe: Recipe, *, seed: int) -> Path:
    """Return the folder of one run: one for each setting, recipe, version and set of rows."""
    asked, data = [asdict(setting), asdict(recipe)], [splits.fingerprint]
    key = validity_key(asked, version=AFMP_VERSION, data=data)
    slug = "".join(sign if sign.isalnum() or sign in ".-" else "-" for sign in setting.name)
    return Path(folder) / f"{slug}-{key[:8]}" / f"seed{seed}"


def train_setting(
    folder: Path,
    setting: Setting,
    splits: Splits,
    recipe: Recipe,
    *,
    seed: int,
    data: dict[str, Any],
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> AblationRun:
    """Train a setting with one seed, or read the run if it is finished.

    Args:
        folder: Folder of all runs of an ablation.
        setting: What is trained.
        splits: The rows.
        recipe: How.
        seed: Decides weights, order and augmentation.
        data: What was asked of ``load_splits``, for the report.
        device: Where.
        progress: Show a bar over the epochs.
    """
    path = run_path(folder, setting, splits, recipe, seed=seed)
    if not (path / REPORT_NAME).exists():
        with locked_folder(path):
            training = AFMPTraining(setting, splits, recipe, seed=seed, device=device)
            _train(path, training, data, progress=progress)
    return load_ablation_run(path, setting)


def _train(path: Path, training: AFMPTraining, data: dict[str, Any], *, progress: bool) -> None:
    origin, checkpoint, splits = provenance(), path / "checkpoint.pt", training.splits
    history = training.run(checkpoint, progress=progress)
    model = training.model.cpu()
    metrics, logits = {}, {}
    for part, split in {"val": splits.val, "test": splits.test}.items():
        rows = predict_logits(model, split.inputs)
        metrics |= measures(rows, split.labels, part)
        logits[f"{part}_logits"] = torch.from_numpy(rows)
    write_tensors(path / "logits.safetensors", logits)
    write_tensors(path / "gate_maps.safetensors", training.gate_maps)
    write_tensors(path / "model.safetensors", model.state_dict())
    write_table(path / "history.csv", history)
    write_table(path / "gates.csv", pd.DataFrame(training.gates))
    save_report(
        path,
        config={
            "setting": asdict(training.setting),
            "recipe": asdict(training.recipe),
            "data": data,
        },
        seed=training.seed,
        metrics=metrics,
        seconds=float(history["seconds"].sum()),
        origin=origin,
        parameters=sum(p.numel() for p in model.parameters()),
        threads=torch.get_num_threads(),
        rows={part: len(getattr(splits, part)) for part in ("train", "val", "test")},
        data_source=splits.source,
        data_fingerprint=splits.fingerprint,
        afmp_version=AFMP_VERSION,
        files=folder_sums(path, without=(REPORT_NAME, checkpoint.name)),
    )
    checkpoint.unlink(missing_ok=True)


def load_ablation_run(path: Path, setting: Setting) -> AblationRun:
    """Return a finished run."""
    report = read_report(path)
    check_version(report.get("afmp_version"), AFMP_VERSION, folder=path)
    check_sums(path, report["files"])
    tensors = load_file(path / "logits.safetensors")
    maps = load_file(path / "gate_maps.safetensors")
    return AblationRun(
        setting=setting,
        seed=report["seed"],
        history=read_table(path / "history.csv"),
        gates=read_table(path / "gates.csv"),
        gate_maps={int(epoch): maps[epoch].numpy() for epoch in sorted(maps, key=int)},
        logits={part: tensors[f"{part}_logits"].numpy() for part in ("val", "test")},
        report=report,
        folder=path,
    )
