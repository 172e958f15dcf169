"""Embedding inside ``fit``: rows become unit rows by a chart, a trained network or a function.

Axes: N rows, F features, D embedding width.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32, Int

from attnknn.backbones import Embedder, build_embedder
from attnknn.checks import check_finite
from attnknn.config import EmbedderConfig, RunConfig
from attnknn.data import Split, Splits
from attnknn.embed import embed
from attnknn.estimator.charts import Chart, fit_chart
from attnknn.estimator.inputs import Rows, n_rows_of
from attnknn.stage1 import Stage1
from attnknn.tables import TableEncoder, fit_table_encoder, is_number

IMAGE_BACKBONES = ("fast", "afmp", "resnet18", "resnet50", "timm:")
# metric -> (scaling of number columns, chart)
METRICS = {
    "cosine": ("none", "cosine"),
    "euclidean": ("none", "euclidean"),
    "standardised": ("standard", "euclidean"),
    "quantile": ("quantile", "euclidean"),
}
UNSCALED = tuple(name for name, (scaling, _) in METRICS.items() if scaling == "none")
TABLE_TRAINING = {
    "optimiser": "adamw",
    "lr": 1e-3,
    "weight_decay": 1e-2,
    "schedule": "cosine",
    "batch_size": 256,
    "label_smoothing": 0.0,
    "lookahead": False,
    "embed_dim": 64,
}
TABLE_STEPS = 600  # about as many updates as suit a table, whatever its size
TABLE_EPOCHS = (4, 50)
BLANK_ROWS = 64  # inputs that only show a network the shape of inputs


def takes_images(embedder: str | Callable) -> bool:
    """Return whether an embedder reads images."""
    return isinstance(embedder, str) and embedder.startswith(IMAGE_BACKBONES)


@dataclass(frozen=True)
class Features:
    """Rows to numbers.

    Attributes:
        medians: What a missing number of a column becomes; empty where none may be missing.
        encoder: Scales numbers and opens up categories; None leaves an array as it is.
    """

    medians: dict[str, float]
    encoder: TableEncoder | None

    def encode(self, rows: Rows) -> Float[np.ndarray, "N F"] | np.ndarray:
        """Return the features of each row; images stay images."""
        if self.medians:
            rows = _filled(_as_frame(rows), self.medians)
            rows = rows if self.encoder is not None else rows.to_numpy()
        return rows if self.encoder is None else self.encoder.encode(_as_frame(rows))


def fit_features(rows: Rows, scaling: str, *, impute: bool) -> Features:
    """Return what turns rows like these into features.

    Args:
        rows: Distinct training rows.
        scaling: "none", "standard" or "quantile"; a table with categories is always scaled.
        impute: Learn what stands in for missing numbers.
    """
    frame = _as_frame(rows) if rows.ndim == 2 else pd.DataFrame()
    numbers = [name for name in frame if is_number(frame[name])] if impute else []
    # A column without a single number says nothing: any constant will do.
    medians = {name: float(frame[name].median()) for name in numbers}
    medians = {name: 0.0 if np.isnan(value) else value for name, value in medians.items()}
    if scaling == "none" and not isinstance(rows, pd.DataFrame):
        return Features(medians, None)
    scaling = "standard" if scaling == "none" else scaling
    return Features(medians, fit_table_encoder(_filled(frame, medians), numeric=scaling))


def _filled(frame: pd.DataFrame, medians: Mapping[str, float]) -> pd.DataFrame:
    # A column of integers that knows missing ones would refuse a median between two of them.
    return frame.astype(dict.fromkeys(medians, np.float64)).fillna(medians)


def _as_frame(rows: Rows) -> pd.DataFrame:
    if isinstance(rows, pd.DataFrame):
        return rows.rename(columns=str)
    return pd.DataFrame(rows, columns=[str(place) for place in range(rows.shape[1])])


@dataclass(frozen=True)
class Embedding:
    """Rows to unit rows.

    Attributes:
        features: Rows to numbers; None where ``function`` does that.
        function: The user's own embedder.
        chart: Numbers to the sphere, where no network does that.
        network: A trained embedder.
        recipe: What ``blank_network`` needs to build the network anew.
    """

    features: Features | None
    function: Callable[[Any], Any] | None = None
    chart: Chart | None = None
    network: Embedder | None = None
    recipe: dict[str, Any] | None = None

    def rows(self, inputs: Any, *, progress: bool = False) -> Float32[np.ndarray, "N D"]:
        """Return unit rows."""
        return self.place(self.encode(inputs), progress=progress)

    def place(self, features: np.ndarray, *, progress: bool = False) -> Float32[np.ndarray, "N D"]:
        """Return the unit rows of what ``encode`` returned."""
        if self.network is None:
            return self.chart.rows(features)
        return embed(self.network, features, progress=progress)

    def encode(self, inputs: Any) -> np.ndarray:
        """Return what the chart or the network reads."""
        if self.function is None:
            return self.features.encode(inputs)
        return embedded_by(self.function, inputs, width=len(self.chart.centre))


def embedded_by(
    function: Callable[[Any], Any], inputs: Any, *, width: int | None = None
) -> Float32[np.ndarray, "N F"]:
    """Return what a user's own embedder makes of rows, or refuse it.

    Args:
        function: The embedder.
        inputs: The rows.
        width: Numbers a row that it returned in ``fit``; None in ``fit`` itself.
    """
    features = np.asarray(function(inputs))
    numbers = features.dtype.kind in "fiub"
    one_each = features.ndim == 2 and len(features) == n_rows_of(inputs)
    if not numbers or not one_each or not features.shape[1]:
        raise ValueError(
            f"embedder must return one row of numbers for each of {n_rows_of(inputs)} inputs, "
            f"got an array of {features.dtype} of shape {features.shape}"
        )
    if width not in (None, features.shape[1]):
        raise ValueError(
            f"embedder must return rows of width {width}, as in fit, got {features.shape[1]}"
        )
    with np.errstate(over="ignore"):  # a float64 of 1e300 becomes infinite, and is refused
        narrow = features.astype(np.float32)
    return check_finite("embedder(X)", narrow)


def charted(
    inputs: Any, metric: str, *, impute: bool, function: Callable | None
) -> tuple[Embedding, Float32[np.ndarray, "N D"]]:
    """Return the embedding of a metric, and the unit rows of the distinct rows it is made from.

    Args:
        inputs: Distinct training rows; where there is a function, what it made of them.
        metric: One of ``METRICS``.
        impute: Learn what stands in for missing numbers.
        function: The user's own embedder.
    """
    scaling, name = METRICS[metric]
    features = None if function is not None else fit_features(inputs, scaling, impute=impute)
    numbers = inputs if features is None else features.encode(inputs)
    embedding = Embedding(features, function, chart=fit_chart(name, numbers))
    return embedding, embedding.place(numbers)


def trained(
    inputs: Rows,
    labels: Int[np.ndarray, "N"],
    held_out: Int[np.ndarray, "M"],
    *,
    backbone: str,
    n_classes: int,
    settings: Mapping[str, Any],
    impute: bool,
    seed: int,
    progress: bool,
) -> Embedding:
    """Return a network trained on all rows but the held-out ones, which choose its epoch.

    Args:
        inputs: Distinct rows.
        labels: Their labels.
        held_out: Rows the network must not learn from: the attention is fitted on them.
        backbone: One of the names of ``attnknn.backbones``.
        n_classes: Number of classes, absent ones included.
        settings: Settings of a run by their flat names, such as ``epochs`` or ``lr``.
        impute: Learn what stands in for missing numbers.
        seed: Decides the initial weights and the order of batches.
        progress: Show progress bars.
    """
    is_held = np.isin(np.arange(len(labels)), held_out)
    images = takes_images(backbone)
    # NOTE: leakage guard. Scaling is learned from the rows that the network learns from.
    fit_part = inputs[~is_held]
    features = Features({}, None) if images else fit_features(fit_part, "quantile", impute=impute)
    parts = [Split(features.encode(inputs[m]), labels[m]) for m in (~is_held, is_held)]
    config = _run_config(backbone, settings, parts[0], seed=seed, images=images)
    recipe = _recipe(config, parts[0].inputs, features)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        stage = Stage1(config, _splits(parts, recipe, n_classes), device=torch.device("cpu"))
        if any(p.requires_grad for p in stage.embedder.parameters()):
            stage.run(Path(folder) / "checkpoint.pt", progress=progress)
    return Embedding(features, network=stage.embedder.eval(), recipe=recipe)


def _run_config(
    backbone: str, settings: Mapping[str, Any], part: Split, *, seed: int, images: bool
) -> RunConfig:
    """Return the settings of a training; the user's own come last."""
    values: dict[str, Any] = {"backbone": backbone, "seed": seed, "device": "cpu"}
    if not images:
        batch = min(TABLE_TRAINING["batch_size"], max(2, len(part) // 4))
        epochs = int(np.clip(round(TABLE_STEPS / max(1, len(part) // batch)), *TABLE_EPOCHS))
        values |= TABLE_TRAINING | {"batch_size": batch, "epochs": epochs}
    if backbone == "pca":
        values["embed_dim"] = min(TABLE_TRAINING["embed_dim"], part.inputs.shape[1])
    return RunConfig.from_flat(values | dict(settings))


def _recipe(config: RunConfig, inputs: np.ndarray, features: Features) -> dict[str, Any]:
    """Return plain values that say how the network is built."""
    recipe = {"embedder": asdict(config.embedder), "shape": list(inputs.shape[1:])}
    if inputs.ndim == 2:
        n_numeric = inputs.shape[1] if features.encoder is None else len(features.encoder.mean)
        return recipe | {"kind": "table", "n_numeric": n_numeric, "mean": [], "std": []}
    pixels = inputs / np.float32(255)  # NOTE: rows that are learned from alone
    std = np.maximum(pixels.std(axis=(0, 2, 3)), 1e-6)
    mean = pixels.mean(axis=(0, 2, 3)).tolist()
    return recipe | {"kind": "image", "n_numeric": 0, "mean": mean, "std": std.tolist()}


def _splits(parts: list[Split], recipe: Mapping[str, Any], n_classes: int) -> Splits:
    return Splits(
        name="fit",
        kind=recipe["kind"],
        train=parts[0],
        val=parts[1],
        test=parts[1],
        class_names=tuple(map(str, range(n_classes))),
        mean=tuple(recipe["mean"]),
        std=tuple(recipe["std"]),
        n_numeric=recipe["n_numeric"],
        feature_names=(),
        augmentation=(),
        source="rows given to fit",
    )


def blank_network(recipe: Mapping[str, Any]) -> Embedder:
    """Return a network built like the one of the recipe, to be filled with its weights."""
    settings = dict(recipe["embedder"]) | {"pretrained": False}
    config = EmbedderConfig(**settings | {"widths": tuple(settings["widths"])})
    rng, shape = np.random.default_rng(0), (BLANK_ROWS, *recipe["shape"])
    noise = rng.integers(256, size=shape, dtype=np.uint8)
    inputs = noise if recipe["kind"] == "image" else noise.astype(np.float32)
    blank = Split(inputs, np.zeros(BLANK_ROWS, dtype=np.int64))
    with torch.random.fork_rng(devices=[]):
        return build_embedder(config, _splits([blank, blank], recipe, 2)).eval()
