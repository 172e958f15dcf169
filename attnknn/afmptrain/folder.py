"""Folders of AFMP runs: a setting and a seed become a finished run, trained or read.

A run is finished when its ``report.json`` is there: it is written last. Axes: C classes.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save

from attnknn.afmptrain.loop import Training
from attnknn.afmptrain.networks import Classifier, build_classifier
from attnknn.afmptrain.predict import judge, predict_logits
from attnknn.afmptrain.settings import Recipe, Setting
from attnknn.data import Splits
from attnknn.files import locked_folder, write_atomic, write_text
from attnknn.provenance import REPORT_NAME, provenance, read_report, save_report


@dataclass(frozen=True)
class AblationRun:
    """A finished run, read from its folder.

    Attributes:
        setting: What was trained.
        seed: Its seed.
        history: One row an epoch.
        gates: Gates by epoch and layer; empty for a transformer.
        logits: Logits of the "val" and the "test" rows.
        report: Metrics, seconds, provenance.
        folder: Where it is.
    """

    setting: Setting
    seed: int
    history: pd.DataFrame
    gates: pd.DataFrame
    logits: dict[str, Float[np.ndarray, "_ C"]]
    report: dict[str, Any]
    folder: Path

    def load_model(self, splits: Splits) -> Classifier:
        """Return the trained model of the best epoch."""
        model = build_classifier(self.setting, splits, seed=self.seed)
        model.load_state_dict(load_file(self.folder / "model.safetensors"))
        return model.eval()


def run_path(
    folder: Path, setting: Setting, recipe: Recipe, *, seed: int, data: dict[str, Any]
) -> Path:
    """Return the folder of one run; another setting, recipe or data means another folder."""
    content = json.dumps([asdict(setting), asdict(recipe), data], sort_keys=True)
    slug = "".join(sign if sign.isalnum() or sign in ".-" else "-" for sign in setting.name)
    return Path(folder) / f"{slug}-{sha256(content.encode()).hexdigest()[:8]}" / f"seed{seed}"


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
        data: What was asked of ``load_splits``: part of the run's identity.
        device: Where.
        progress: Show a bar over the epochs.
    """
    path = run_path(folder, setting, recipe, seed=seed, data=data)
    if not (path / REPORT_NAME).exists():
        with locked_folder(path):
            _train(path, setting, splits, recipe, seed, data, device, progress)
    return load_ablation_run(path, setting)


def _train(
    path: Path,
    setting: Setting,
    splits: Splits,
    recipe: Recipe,
    seed: int,
    data: dict[str, Any],
    device: torch.device | str,
    progress: bool,
) -> None:
    origin, checkpoint = provenance(), path / "checkpoint.pt"
    training = Training(setting, splits, recipe, seed=seed, device=device)
    training.run(checkpoint, progress=progress)
    history = pd.DataFrame(training.history)
    model = training.model.cpu()
    logits = {f"{part}_logits": getattr(splits, part) for part in ("val", "test")}
    tensors = {
        name: torch.from_numpy(predict_logits(model, each.inputs)) for name, each in logits.items()
    }
    write_atomic(path / "logits.safetensors", lambda handle: handle.write(save(tensors)))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    write_atomic(path / "model.safetensors", lambda handle: handle.write(save(weights)))
    write_text(path / "history.csv", history.to_csv(index=False))
    write_text(path / "gates.csv", pd.DataFrame(training.gates).to_csv(index=False))
    metrics = judge(model, splits.val, "val") | judge(model, splits.test, "test")
    save_report(
        path,
        config={"setting": asdict(setting), "recipe": asdict(recipe), "data": data},
        seed=seed,
        metrics=metrics,
        seconds=float(history["seconds"].sum()),
        origin=origin,
        parameters=sum(p.numel() for p in model.parameters()),
        threads=torch.get_num_threads(),
        rows={part: len(getattr(splits, part)) for part in ("train", "val", "test")},
        data_source=splits.source,
    )
    checkpoint.unlink(missing_ok=True)


def load_ablation_run(path: Path, setting: Setting) -> AblationRun:
    """Return a finished run."""
    report = read_report(path)
    tensors = load_file(path / "logits.safetensors")
    try:
        gates = pd.read_csv(path / "gates.csv")
    except pd.errors.EmptyDataError:
        gates = pd.DataFrame()
    return AblationRun(
        setting=setting,
        seed=report["seed"],
        history=pd.read_csv(path / "history.csv"),
        gates=gates,
        logits={part: tensors[f"{part}_logits"].numpy() for part in ("val", "test")},
        report=report,
        folder=path,
    )
