"""Embedding inside ``fit``: rows become unit rows by a chart, a trained network or a function.

Axes: N rows, F features, D embedding width.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32, Int

from attnknn.checks import check_finite
from attnknn.config import EmbedderConfig, RunConfig
from attnknn.data.splits import InputSpec, Split
from attnknn.data.tables import TableEncoder, fit_table_encoder, is_number
from attnknn.embed.loop import Stage1
from attnknn.embed.networks import Embedder, build_embedder
from attnknn.embed.rows import embed
from attnknn.estimator.inputs import Rows, n_rows_of

# ---- Charts: rows of features become points on the unit sphere, where the memory searches.
#
# ``cosine`` keeps the direction of a row. The others keep distances: the plane is wrapped around
# the sphere by the inverse stereographic projection
#
#     z = (x - centre) / scale,   row = (2 z, |z|^2 - 1) / (|z|^2 + 1),
#
# which changes lengths by the same factor in every direction, so that near neighbours stay in their
# Euclidean order. The scale lets nearly all rows lie around one pole, where the factor hardly
# changes: farther out it falls quickly, and rows in the tails would come near to everything. (Of
# the ten nearest rows of three tables, 98 % are the ten nearest on the sphere.)

CHARTS = ("cosine", "euclidean")
INNER_SHARE, ROOM = 0.99, 2.0


@dataclass(frozen=True)
class Chart:
    """One map from features to the sphere.

    Attributes:
        name: One of ``CHARTS``.
        centre: Mean of the training rows; not used by ``cosine``.
        scale: Twice the distance that few training rows exceed; not used by ``cosine``.
        weights: What each feature is multiplied by; None leaves them.
    """

    name: str
    centre: Float32[np.ndarray, "F"]
    scale: float
    weights: Float32[np.ndarray, "F"] | None = None

    def rows(self, features: Float[np.ndarray, "N F"]) -> Float32[np.ndarray, "N D"]:
        """Return unit rows; a row of zeros, which has no direction, gets one of its own."""
        if self.name == "cosine":
            lengths = np.linalg.norm(features, axis=1, keepdims=True)
            no_direction = lengths == 0
            lengths[no_direction] = math.sqrt(features.shape[1])
            return (np.where(no_direction, 1.0, features) / lengths).astype(np.float32, copy=False)
        if self.weights is not None:
            features = features * self.weights
        z = (features - self.centre) / self.scale
        squares = np.square(z).sum(axis=1, keepdims=True)
        rows = np.concatenate([2 * z, squares - 1], axis=1) / (squares + 1)
        return rows.astype(np.float32)


def label_information(
    features: Float[np.ndarray, "N F"], labels: Int[np.ndarray, " N"], n_classes: int
) -> Float32[np.ndarray, "F"]:
    """Return how much each feature says of the labels, as a weight between 0.05 and 1.

    The square root of the mutual information of a feature in eight bins with the labels, less
    what chance alone would give, in shares of the largest.
    """
    flags = np.eye(n_classes)[labels]
    found = np.zeros(features.shape[1])
    by_label = flags.mean(axis=0)
    for place, column in enumerate(features.T):
        edges = np.unique(np.quantile(column, np.linspace(0, 1, INFORMED_BINS + 1)[1:-1]))
        bins = np.searchsorted(edges, column)
        joint = np.zeros((len(edges) + 1, n_classes))
        np.add.at(joint, bins, flags)
        joint /= len(labels)
        chance = joint.sum(axis=1, keepdims=True) * by_label
        some = joint > 0
        bias = len(edges) * (n_classes - 1) / (2 * len(labels))
        found[place] = (joint[some] * np.log(joint[some] / chance[some])).sum() - bias
    if found.max() <= 0:
        return np.ones(len(found), np.float32)
    weights = np.sqrt(np.clip(found, 0, None) / found.max())
    return np.maximum(weights, LEAST_INFORMED).astype(np.float32)


def fit_chart(
    name: str,
    features: Float[np.ndarray, "N F"],
    weights: Float32[np.ndarray, "F"] | None = None,
) -> Chart:
    """Return the chart that suits the training rows."""
    if weights is not None:
        return replace(fit_chart(name, features * weights), weights=weights)
    centre = features.mean(axis=0, dtype=np.float64)
    lengths = np.linalg.norm(features - centre, axis=1)
    scale = ROOM * float(np.quantile(lengths, INNER_SHARE))
    return Chart(name, centre.astype(np.float32), scale or 1.0)


# ---- The embedding: features, then a chart or a network.

IMAGE_BACKBONES = ("fast", "afmp", "resnet18", "resnet50", "timm:")
# metric -> (scaling of number columns, chart, whether columns count by what they say of labels)
METRICS = {
    "cosine": ("none", "cosine", False),
    "euclidean": ("none", "euclidean", False),
    "standardised": ("standard", "euclidean", False),
    "quantile": ("quantile", "euclidean", False),
    "weighted": ("standard", "euclidean", True),
    "weighted quantile": ("quantile", "euclidean", True),
}
UNSCALED = tuple(name for name, (scaling, *_) in METRICS.items() if scaling == "none")
SUPERVISED = tuple(name for name, (*_, informed) in METRICS.items() if informed)
INFORMED_BINS, LEAST_INFORMED = 8, 0.05
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
    inputs: Any,
    metric: str,
    *,
    impute: bool,
    function: Callable | None,
    labels: Int[np.ndarray, " N"] | None = None,
) -> tuple[Embedding, Float32[np.ndarray, "N D"]]:
    """Return the embedding of a metric, and the unit rows of the distinct rows it is made from.

    Args:
        inputs: Distinct training rows; where there is a function, what it made of them.
        metric: One of ``METRICS``.
        impute: Learn what stands in for missing numbers.
        function: The user's own embedder.
        labels: Of the rows, for a metric that they inform.
    """
    scaling, name, informed = METRICS[metric]
    features = None if function is not None else fit_features(inputs, scaling, impute=impute)
    numbers = inputs if features is None else features.encode(inputs)
    weights = label_information(numbers, labels, int(labels.max()) + 1) if informed else None
    embedding = Embedding(features, function, chart=fit_chart(name, numbers, weights))
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
        backbone: One of the names of ``attnknn.embed.networks``.
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
    spec = _input_spec(parts[0].inputs, features)
    recipe = {"embedder": asdict(config.embedder), **asdict(spec)}
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        cpu = torch.device("cpu")
        stage = Stage1(config, *parts, spec=spec, n_classes=n_classes, device=cpu)
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


def _input_spec(inputs: np.ndarray, features: Features) -> InputSpec:
    """Return what a network must know of inputs like these."""
    shape = inputs.shape[1:]
    if inputs.ndim == 2:
        n_numeric = inputs.shape[1] if features.encoder is None else len(features.encoder.mean)
        return InputSpec("table", shape, n_numeric=n_numeric)
    pixels = inputs / np.float32(255)  # NOTE: rows that are learned from alone
    std = np.maximum(pixels.std(axis=(0, 2, 3)), 1e-6)
    return InputSpec(
        "image", shape, tuple(pixels.mean(axis=(0, 2, 3)).tolist()), tuple(std.tolist())
    )


def blank_network(recipe: Mapping[str, Any]) -> Embedder:
    """Return a network built like the one of the recipe, to be filled with its weights."""
    inputs = dict(recipe)
    settings = dict(inputs.pop("embedder")) | {"pretrained": False}
    config = EmbedderConfig(**settings | {"widths": tuple(settings["widths"])})
    with torch.random.fork_rng(devices=[]):
        # JSON has no tuples.
        spec = {name: tuple(v) if isinstance(v, list) else v for name, v in inputs.items()}
        return build_embedder(config, InputSpec(**spec)).eval()
