"""Folders of AFMP runs: a setting and a seed become a finished run, trained or read.

A run is finished when its ``report.json`` is there: it is written last. Axes: C classes.
"""

import ast
import json
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save

import attnknn
from attnknn.afmptrain.loop import Training
from attnknn.afmptrain.networks import Classifier, build_classifier
from attnknn.afmptrain.predict import measures, predict_logits
from attnknn.afmptrain.settings import Recipe, Setting
from attnknn.data import Splits
from attnknn.files import locked_folder, write_atomic, write_text
from attnknn.provenance import REPORT_NAME, provenance, read_report, save_report

# The files whose code decides what a training ends with; reports name the versions of libraries.
TRAINED_BY = ("linear.py", "augment.py", "embed.py", "afmp/**/*.py", "afmptrain/**/*.py")


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
    """Return the folder of one run; another setting, recipe, row or code means another folder."""
    identity = [asdict(setting), asdict(recipe), splits.fingerprint, training_code()]
    content = json.dumps(identity, sort_keys=True)
    slug = "".join(sign if sign.isalnum() or sign in ".-" else "-" for sign in setting.name)
    return Path(folder) / f"{slug}-{sha256(content.encode()).hexdigest()[:8]}" / f"seed{seed}"


@cache
def training_code() -> str:
    """Return the digest of the code that trains; studies and figures are no part of it.

    Statements count, comments and docstrings do not. Another Python may write the same statements
    in another way: then a run is trained again.
    """
    root = Path(attnknn.__file__).parent
    files = sorted(path for pattern in TRAINED_BY for path in root.glob(pattern))
    content = [[str(path.relative_to(root)), _statements(path.read_text())] for path in files]
    return sha256(json.dumps(content).encode()).hexdigest()


def _statements(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


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
    judged = {"val": splits.val, "test": splits.test}
    logits = {part: predict_logits(model, split.inputs) for part, split in judged.items()}
    metrics = {}
    for part, split in judged.items():
        metrics |= measures(logits[part], split.labels, part)
    tensors = {f"{part}_logits": torch.from_numpy(rows) for part, rows in logits.items()}
    write_atomic(path / "logits.safetensors", lambda handle: handle.write(save(tensors)))
    maps = save(training.gate_maps)
    write_atomic(path / "gate_maps.safetensors", lambda handle: handle.write(maps))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    write_atomic(path / "model.safetensors", lambda handle: handle.write(save(weights)))
    write_text(path / "history.csv", history.to_csv(index=False))
    write_text(path / "gates.csv", pd.DataFrame(training.gates).to_csv(index=False))
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
        data_fingerprint=splits.fingerprint,
        training_code=training_code(),
    )
    checkpoint.unlink(missing_ok=True)


def load_ablation_run(path: Path, setting: Setting) -> AblationRun:
    """Return a finished run."""
    report = read_report(path)
    tensors = load_file(path / "logits.safetensors")
    maps = load_file(path / "gate_maps.safetensors")
    sorted_maps = sorted(maps.items(), key=lambda item: int(item[0]))
    try:
        gates = pd.read_csv(path / "gates.csv")
    except pd.errors.EmptyDataError:
        gates = pd.DataFrame()
    return AblationRun(
        setting=setting,
        seed=report["seed"],
        history=pd.read_csv(path / "history.csv"),
        gates=gates,
        gate_maps={int(epoch): table.numpy() for epoch, table in sorted_maps},
        logits={part: tensors[f"{part}_logits"].numpy() for part in ("val", "test")},
        report=report,
        folder=path,
    )
