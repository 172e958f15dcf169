"""Parameters: what was asked for becomes a plan, or is refused by name."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32, Int
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from torch import Tensor
from tqdm import tqdm

from attnknn.checks import check_count, check_finite, check_one_of, check_range
from attnknn.config import (
    BACKBONE_NAMES,
    AttentionConfig,
    EmbedderConfig,
    FittingConfig,
    RunConfig,
    check_field_names,
)
from attnknn.core.attention import Contributions, NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import Calibration, apply_calibration, fit_floor_and_temperature
from attnknn.core.fit import PREPARED_CELLS, fit_on_neighbours, query_folds
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import Attention, at_k, contributions, normalised
from attnknn.data.splits import InputSpec, Split
from attnknn.data.tables import TableEncoder, fit_table_encoder, is_number
from attnknn.embed.loop import Stage1
from attnknn.embed.networks import Embedder, build_embedder
from attnknn.embed.rows import embed
from attnknn.estimator.inputs import Rows, n_rows_of
from attnknn.evaluate.measure import negative_log_likelihood

# ---- Charts: rows of features become points on the unit sphere, where the memory searches by
# cosine.
#
# ``cosine`` keeps the direction of a row. The others keep distances: the plane is wrapped around
# the
# sphere by the inverse stereographic projection
#
#     z = (x - centre) / scale,   row = (2 z, |z|^2 - 1) / (|z|^2 + 1),
#
# which changes lengths by the same factor in every direction, so that near neighbours stay in their
# Euclidean order. The scale lets nearly all rows lie around one pole, where the factor hardly
# changes: farther out it falls quickly, and rows in the tails would come near to everything. (Of
# the
# ten nearest rows of three tables, 98 % are the ten nearest on the sphere.)
#
# Axes: N rows, F features, D embedding width.

CHARTS = ("cosine", "euclidean")
INNER_SHARE, ROOM = 0.99, 2.0


@dataclass(frozen=True)
class Chart:
    """One map from features to the sphere.

    Attributes:
        name: One of ``CHARTS``.
        centre: Mean of the training rows; not used by ``cosine``.
        scale: Twice the distance that few training rows exceed; not used by ``cosine``.
    """

    name: str
    centre: Float32[np.ndarray, "F"]
    scale: float

    def rows(self, features: Float[np.ndarray, "N F"]) -> Float32[np.ndarray, "N D"]:
        """Return unit rows; a row of zeros, which has no direction, gets one of its own."""
        if self.name == "cosine":
            lengths = np.linalg.norm(features, axis=1, keepdims=True)
            no_direction = lengths == 0
            lengths[no_direction] = math.sqrt(features.shape[1])
            return (np.where(no_direction, 1.0, features) / lengths).astype(np.float32, copy=False)
        z = (features - self.centre) / self.scale
        squares = np.square(z).sum(axis=1, keepdims=True)
        rows = np.concatenate([2 * z, squares - 1], axis=1) / (squares + 1)
        return rows.astype(np.float32)


def fit_chart(name: str, features: Float[np.ndarray, "N F"]) -> Chart:
    """Return the chart that suits the training rows."""
    centre = features.mean(axis=0, dtype=np.float64)
    lengths = np.linalg.norm(features - centre, axis=1)
    scale = ROOM * float(np.quantile(lengths, INNER_SHARE))
    return Chart(name, centre.astype(np.float32), scale or 1.0)


# ---- Embedding inside ``fit``: rows become unit rows by a chart, a trained network or a function.
#
# Axes: N rows, F features, D embedding width.

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
        return build_embedder(config, InputSpec(**inputs)).eval()


# ---- Learning inside ``fit``: attentions, the share of wrong labels, and a last calibration.
#
# All of it comes from queries whose own label took no part in what their neighbours say: memory
# rows
# that were left out of their own search, or rows that were held out from the memory altogether.
#
# Axes: B queries, M of them held out, K neighbours of each, C classes.

# Nothing in here is made for a number of classes, so that classes can be added later.
ATTENTION = AttentionConfig(label_bias="none")
FOLDS, FOLDS_OF_FEW = 5, 4
TOO_FEW_QUERIES = 9  # nothing can be held out from so few: they are all there is
FEW_QUERIES = 1500  # up to here every query is held out once, and each fold has its attention
# The most confident rows, of which clean labels would hardly ever differ.
CONFIDENT_SHARE, CONFIDENT_ROWS = 0.05, 30
AMBIGUOUS = 0.05  # an estimate below this may as well be ambiguity: nothing is corrected
# The attention sets a temperature of its own; few or wrong labels must not undo it.
LAST_TEMPERATURES = (1 / 3, 3.0)


@dataclass(frozen=True)
class Committee:
    """The mean of several attentions' votes.

    Attributes:
        k: Neighbours that vote.
        members: Attentions that were fitted on different parts of the queries.
    """

    full_support: ClassVar[bool] = True
    k: int
    members: tuple[NeighbourAttention, ...]

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the mean weight of each of the k neighbours."""
        each = [Attention(self.k, member).weights(neighbours) for member in self.members]
        return torch.stack(each).mean(dim=0)

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return mean class probabilities."""
        each = [Attention(self.k, member).votes(neighbours) for member in self.members]
        return torch.stack(each).mean(dim=0)


@contributions.register
def _(method: Committee, neighbours: Neighbours, classes: Tensor) -> Contributions:
    members = (Attention(method.k, member) for member in method.members)
    each = [contributions(member, neighbours, classes) for member in members]
    votes, prototypes = (torch.stack(part).mean(dim=0) for part in zip(*each, strict=True))
    return Contributions(votes, prototypes)


@dataclass(frozen=True)
class Queries:
    """What is learned from.

    Attributes:
        neighbours: The search of each query, without the query itself.
        labels: Its label.
        weights: How much it counts; None counts all alike.
    """

    neighbours: Neighbours
    labels: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, " B"] | None = None

    def part(self, rows: Int[np.ndarray, " M"]) -> "Queries":
        """Return some of the queries."""
        weights = None if self.weights is None else self.weights[rows]
        return Queries(
            self.neighbours.of_queries(torch.from_numpy(rows)), self.labels[rows], weights
        )


@dataclass(frozen=True)
class Learned:
    """What was learned.

    Attributes:
        method: How neighbours are weighed.
        calibration: Floor and temperature on top.
        label_error: Share of labels that was taken to be wrong.
        held_out: Which queries were predicted by an attention that had not been fitted on them.
        probs: Their calibrated probabilities.
    """

    method: Committee
    calibration: Calibration
    label_error: float
    held_out: Int[np.ndarray, " M"]
    probs: Float[np.ndarray, "M C"]


def blank_attention(bank: MemoryBank) -> NeighbourAttention:
    """Return an attention that has learned nothing yet: similarity, histograms, prototypes."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        attention = NeighbourAttention(ATTENTION, dim=bank.dim, n_classes=bank.n_classes)
    return attention.eval()


def learn(
    bank: MemoryBank,
    queries: Queries,
    *,
    fitting: FittingConfig,
    label_noise: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Learned:
    """Return attentions and a calibration for a memory.

    Args:
        bank: The memory that votes.
        queries: What is learned from; at least two.
        fitting: Epochs and rates.
        label_noise: Share of wrong labels. None estimates it, and corrects for it where it is too
            large to be ambiguity.
        seed: Decides folds, initial weights and the order of batches.
        progress: Show progress bars.
    """
    if queries.neighbours.ids.numel() * bank.n_classes <= PREPARED_CELLS:
        _ = queries.neighbours.histograms, queries.neighbours.prototype_cosines  # for all folds
    options = {"fitting": fitting, "seed": seed, "progress": progress}
    if label_noise is not None:
        return _learn_at(bank, queries, label_noise, **options)
    plain = _learn_at(bank, queries, 0.0, **options)
    rate = label_noise_rate(plain.probs, queries.labels[plain.held_out])
    return plain if rate < AMBIGUOUS else _learn_at(bank, queries, rate, **options)


def _learn_at(
    bank: MemoryBank,
    queries: Queries,
    label_error: float,
    *,
    fitting: FittingConfig,
    seed: int,
    progress: bool,
) -> Learned:
    """Learn under a given share of wrong labels."""
    parts = _fold_parts(queries.labels, seed)
    members, held_out, votes = [], [], []
    bar = tqdm(parts, desc="attention", disable=not progress, leave=False)
    for fold, (inside, outside) in enumerate(bar):
        used, left = queries.part(inside), queries.part(outside)
        fitted = fit_on_neighbours(
            bank,
            used.neighbours,
            used.labels,
            attention=ATTENTION,
            fitting=fitting,
            seed=seed + fold,
            label_error=label_error,
            weights=used.weights,
            progress=progress and len(parts) == 1,
        )
        members.append(fitted.attention)
        held_out.append(outside)
        votes.append(Attention(fitted.k, fitted.attention).votes(left.neighbours))
    rows, probs = np.concatenate(held_out), normalised(torch.cat(votes))
    judges = queries.part(rows)
    calibration = fit_floor_and_temperature(
        probs,
        judges.labels,
        label_error=label_error,
        weights=judges.weights,
        temperatures=LAST_TEMPERATURES,
    )
    return Learned(
        method=Committee(queries.neighbours.k, tuple(members)),
        calibration=calibration,
        label_error=label_error,
        held_out=rows,
        probs=apply_calibration(probs, calibration),
    )


def _fold_parts(
    labels: Int[np.ndarray, " B"], seed: int
) -> list[tuple[Int[np.ndarray, " I"], Int[np.ndarray, " O"]]]:
    """Return the queries inside and outside of each fit."""
    n_queries = len(labels)
    if n_queries < TOO_FEW_QUERIES:
        return [(np.arange(n_queries), np.arange(n_queries))]
    few = n_queries <= FEW_QUERIES
    folds = query_folds(labels, FOLDS_OF_FEW if few else FOLDS, seed=seed)
    n_fits = FOLDS_OF_FEW if few else 1
    return [
        (np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)) for fold in range(n_fits)
    ]


def label_noise_rate(probs: Float[np.ndarray, "B C"], labels: Int[np.ndarray, " B"]) -> float:
    """Return a cautious estimate of the share of labels that are wrong.

    Wrong labels are taken to fall on any other class alike. Two shares can then not be smaller
    than theirs, and the smaller of the two is taken:

    - Labels that differ from the prediction among the most confident rows. The rows are taken in
      the order of confidence, and the share is read where it is smallest, counting its own
      uncertainty; farther down the true classes begin to mix.
    - Labels on the half of the classes that is least probable, row by row, for three classes or
      more: rows that merely look alike are confused with few classes, and not with all.

    What is left may still be ambiguity, the more so the nearer it comes to chance, and too strong
    a correction costs far more than too weak a one: so it is shrunk towards 0 there.

    Args:
        probs: Held-out probabilities, fitted to the labels as they are.
        labels: The labels.
    """
    if len(labels) < 2 * CONFIDENT_ROWS:  # too few to tell anything
        return 0.0
    rate = _confident_difference(probs, labels)
    n_classes = probs.shape[1]
    if n_classes > 2:
        rate = min(rate, _unlikely_share(probs, labels))
    chance = 1 - 1 / n_classes
    return float(rate * max(0.0, 1 - (rate / chance) ** 4))


def _confident_difference(probs: np.ndarray, labels: np.ndarray) -> float:
    """Return how often labels differ from the prediction where it is most confident."""
    order = np.argsort(-probs.max(axis=1), kind="stable")
    differs = (probs.argmax(axis=1) != labels)[order]
    taken = np.arange(1, len(differs) + 1)
    rates = (differs.cumsum() + 0.5) / (taken + 1)
    bounds = rates + np.sqrt(rates * (1 - rates) / taken)
    first = max(CONFIDENT_ROWS, int(CONFIDENT_SHARE * len(taken)))
    return float(rates[first + bounds[first:].argmin()])


def _unlikely_share(probs: np.ndarray, labels: np.ndarray) -> float:
    """Return the noise rate at which so many labels fall on the least probable classes."""
    n_rows, n_classes = probs.shape
    half = n_classes // 2
    unlikely = np.argsort(probs, axis=1, kind="stable")[:, :half]
    share = ((unlikely == labels[:, None]).sum() + 0.5) / (n_rows + 1)
    return float(share / half * (n_classes - 1))


# ---- Fitting: distinct rows and labels become an embedding, a memory and what was learned from it.
#
# Axes: N distinct rows, C classes.

MAX_QUERIES = 5000  # more queries teach the few parameters of the attention nothing
JUDGES = 1000  # queries that choose between embeddings
NARROW = 100  # columns up to which an array may be a table
NETWORK_ROWS = 1000  # rows from which a network has enough to learn
TRAINED_MARGIN = 0.97  # share of the NLL of plain features that a network has to reach
NETWORK = "mlp-periodic"
K_LIMITS = (5, 50)
BATCH_LIMITS = (32, 200)
FALLS = (0.01, 0.05, 0.15, 0.5)  # of similarity between the first and the last neighbour
# So far away nothing counts any more. Among nearly collinear rows a stretch that suits most would
# take others to -10 000, and the fit with them.
FARTHEST = -3.0
SMALLEST_FALL = 1e-6  # below this all neighbours are equally near


@dataclass(frozen=True)
class Plan:
    """What a fit was asked for.

    Attributes:
        embedder: "auto", "identity", the name of a backbone, or a function.
        metric: "auto" or one of ``METRICS``; counts where no network is trained.
        n_neighbours: Neighbours that vote; None chooses.
        label_noise: Share of wrong labels; None estimates it.
        impute: Whether missing numbers may occur.
        training: Settings of a network's training.
        trust_neighbours: Rows that judge a label.
        index: How neighbours are searched.
        seed: Decides everything random.
        progress: Show progress bars.
    """

    embedder: str | Callable[[Any], Any]
    metric: str
    n_neighbours: int | None
    label_noise: float | None
    impute: bool
    training: Mapping[str, Any]
    trust_neighbours: int
    index: str
    seed: int
    progress: bool


@dataclass(frozen=True)
class Data:
    """Distinct rows.

    Attributes:
        inputs: Array or table; what a function of the user's own made of the rows.
        labels: Class of each.
        weights: How much each counts; None counts all alike.
        n_classes: C.
        is_table: Whether the columns have meanings of their own, so that a network may help.
    """

    inputs: Any
    labels: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"] | None
    n_classes: int
    is_table: bool


@dataclass(frozen=True)
class Trial:
    """One embedding with its memory, and queries that no label of theirs has shaped.

    Attributes:
        name: Metric or backbone.
        embedding: Inputs to unit rows.
        bank: The memory so far.
        neighbours: What the queries found in it.
        query_ids: Which distinct rows the queries are.
        order: Distinct row of each memory row.
        waiting: Unit rows of the queries where they are not in the memory yet.
        stretch: By how much differences of similarity were enlarged.
    """

    name: str
    embedding: Embedding
    bank: MemoryBank
    neighbours: Neighbours
    query_ids: Int[np.ndarray, " B"]
    order: Int[np.ndarray, " M"]
    waiting: Float32[np.ndarray, "B D"] | None = None
    stretch: float = 1.0


@dataclass(frozen=True)
class Fitted:
    """A classifier's inside.

    Attributes:
        name: Metric or backbone that was chosen.
        embedding: Inputs to unit rows.
        bank: The memory, all distinct rows in it.
        order: Distinct row of each memory row.
        learned: Attention, calibration and held-out probabilities.
        held_out_labels: Labels of the rows that ``learned`` holds probabilities of.
        stretch: By how much differences of similarity are enlarged after a search.
    """

    name: str
    embedding: Embedding
    bank: MemoryBank
    order: Int[np.ndarray, " N"]
    learned: Learned
    held_out_labels: Int[np.ndarray, " H"]
    stretch: float


def fit_all(data: Data, plan: Plan) -> Fitted:
    """Choose or train the embedding, build the memory, and learn from held-out neighbours."""
    makers = list(_makers(data, plan))
    tried, best = None, np.inf
    for make in makers:
        trial, nll = _with_best_stretch(make(), data, plan)
        # Held-out rows choose. What was trained has more ways to look good by chance.
        if nll < best * (1.0 if trial.waiting is None else TRAINED_MARGIN):
            tried, best = trial, nll
    weights = None if data.weights is None else data.weights[tried.query_ids]
    learned = learn(
        tried.bank,
        Queries(tried.neighbours, data.labels[tried.query_ids], weights),
        # The queries that no attention has seen set a calibration of their own: no folds.
        fitting=FittingConfig(fit_batch_size=_batch_size(len(tried.query_ids)), fit_folds=0),
        label_noise=plan.label_noise,
        seed=plan.seed,
        progress=plan.progress,
    )
    labels = data.labels[tried.query_ids[learned.held_out]]
    order = _complete(tried, data)
    # A query of fit had one row fewer to ask than a new one has: itself, or all held-out rows.
    method = at_k(learned.method, _k(data, plan, len(order)))
    learned = replace(learned, method=method)
    return Fitted(tried.name, tried.embedding, tried.bank, order, learned, labels, tried.stretch)


def _makers(data: Data, plan: Plan) -> Iterator[Callable[[], Trial]]:
    """Yield what makes each candidate; see ``AttnKNNClassifier`` for the rule."""
    if isinstance(plan.embedder, str) and plan.embedder not in ("auto", "identity"):
        yield partial(_network_trial, data, plan, plan.embedder)
        return
    names = [plan.metric] if plan.metric != "auto" else _metrics_for(data, plan.embedder)
    yield from (partial(_chart_trial, data, plan, name) for name in names)
    large = len(data.labels) >= NETWORK_ROWS
    suits = data.is_table and large and _has_numbers(data.inputs)
    if plan.embedder == "auto" and plan.metric == "auto" and suits:
        yield partial(_network_trial, data, plan, NETWORK)


def _has_numbers(inputs: Any) -> bool:
    """Return whether there is a number for the network's periodic features to read."""
    return not isinstance(inputs, pd.DataFrame) or any(is_number(inputs[name]) for name in inputs)


def _metrics_for(data: Data, embedder: str | Callable) -> list[str]:
    if isinstance(data.inputs, pd.DataFrame):
        return ["standardised", "quantile"]  # a category has no unit: its columns are scaled
    width = data.inputs.shape[1]
    fits = {"cosine": width > 1, "quantile": width <= NARROW}  # one number has no direction
    names = UNSCALED if callable(embedder) else METRICS
    return [name for name in names if fits.get(name, True)]


def default_k(n_rows: int, n_classes: int) -> int:
    """Return how many neighbours to ask: half of an average class, within limits."""
    return int(np.clip(n_rows // (2 * n_classes), *K_LIMITS))


def _k(data: Data, plan: Plan, available: int) -> int:
    return min(plan.n_neighbours or default_k(len(data.labels), data.n_classes), available)


def _chart_trial(data: Data, plan: Plan, metric: str) -> Trial:
    """Ask memory rows themselves: no label shaped the embedding, so none has to be held out."""
    function = plan.embedder if callable(plan.embedder) else None
    embedding, rows = charted(data.inputs, metric, impute=plan.impute, function=function)
    order = np.arange(len(rows))
    bank = _bank(data, plan, rows, order)
    ids = _sample(len(rows), MAX_QUERIES, plan.seed)
    # NOTE: leakage guard. A row finds neither itself nor its copies, which are the same entry.
    found = bank.search(rows[ids], _k(data, plan, len(bank) - 1), exclude_ids=ids)
    return Trial(metric, embedding, bank, found, ids, order)


def _network_trial(data: Data, plan: Plan, backbone: str) -> Trial:
    """Hold rows out from the network's training, and ask them."""
    held_out = _held_out(data, plan.seed)
    embedding = trained(
        data.inputs,
        data.labels,
        held_out,
        backbone=backbone,
        n_classes=data.n_classes,
        settings=plan.training,
        impute=plan.impute,
        seed=plan.seed,
        progress=plan.progress,
    )
    rows = embedding.rows(data.inputs, progress=plan.progress)
    order = np.setdiff1d(np.arange(len(rows)), held_out)
    bank = _bank(data, plan, rows[order], order)
    found = bank.search(rows[held_out], _k(data, plan, len(bank)))
    return Trial(backbone, embedding, bank, found, held_out, order, waiting=rows[held_out])


def _with_best_stretch(trial: Trial, data: Data, plan: Plan) -> tuple[Trial, float]:
    """Return the trial with similarities on the scale that suits it, and its held-out NLL.

    How fast similarity falls from the first to the last neighbour depends on the metric, the
    number of rows and their dimension. A monotone stretch brings the typical fall to one of a few
    sizes, from nearly equal weights to a narrow kernel; an attention that has learned nothing yet
    is asked which of them predicts best.
    """
    which = torch.from_numpy(_sample(len(trial.query_ids), JUDGES, plan.seed))
    judges, labels = trial.neighbours.of_queries(which), data.labels[trial.query_ids[which]]
    fall = float((judges.scores[:, 0] - judges.scores[:, -1]).median())
    sizes = [size / fall for size in FALLS] if fall > SMALLEST_FALL else [1.0]
    blank = blank_attention(trial.bank)
    tried = {}
    for stretch in sizes:
        votes = Attention(judges.k, blank).votes(stretch_scores(judges, stretch))
        probs = normalised(votes)
        calibration = fit_floor_and_temperature(probs, labels)
        tried[stretch] = negative_log_likelihood(apply_calibration(probs, calibration), labels)
    stretch = min(tried, key=tried.get)
    found = stretch_scores(trial.neighbours, stretch)
    return replace(trial, neighbours=found, stretch=stretch), tried[stretch]


def stretch_scores(neighbours: Neighbours, stretch: float) -> Neighbours:
    """Return the neighbours with similarities 1 - stretch * (1 - cosine), -3 where that is less."""
    stretched = 1 - stretch * (1 - neighbours.scores)
    return replace(neighbours, scores=stretched.clamp(min=FARTHEST))


def _complete(trial: Trial, data: Data) -> Int[np.ndarray, " N"]:
    """Put the rows that were held out into the memory too; return the order of its rows."""
    if trial.waiting is None:
        return trial.order
    ids = trial.query_ids
    weights = None if data.weights is None else data.weights[ids]
    trial.bank.add(trial.waiting, data.labels[ids], weights=weights)
    return np.concatenate([trial.order, ids])


def _bank(
    data: Data, plan: Plan, rows: Float32[np.ndarray, "M D"], ids: Int[np.ndarray, " M"]
) -> MemoryBank:
    return MemoryBank(
        rows,
        data.labels[ids],
        n_classes=data.n_classes,
        index=plan.index,
        trust_neighbours=plan.trust_neighbours,
        weights=None if data.weights is None else data.weights[ids],
    )


def _held_out(data: Data, seed: int) -> Int[np.ndarray, " M"]:
    """Return a fifth of the rows, but no more than the attention can use."""
    n_rows = len(data.labels)
    n_folds = max(2, min(5, n_rows // 2), -(-n_rows // MAX_QUERIES))
    return np.flatnonzero(query_folds(data.labels, n_folds, seed=seed) == 0)


def _batch_size(n_queries: int) -> int:
    """Return a batch that makes for several steps an epoch also where queries are few."""
    return int(np.clip(n_queries // 12, *BATCH_LIMITS))


def _sample(n_rows: int, limit: int, seed: int) -> Int[np.ndarray, " M"]:
    return np.sort(np.random.default_rng(seed).permutation(n_rows)[:limit])


MISSING = ("error", "impute")
NEW_CLASSES = ("error", "add")


def plan_for(model: BaseEstimator) -> Plan:
    """Return what a classifier's parameters ask for, or refuse it."""
    if model.n_neighbors != "auto":
        check_count("n_neighbors", model.n_neighbors)
    if not callable(model.embedder) and not str(model.embedder).startswith("timm:"):
        check_one_of("embedder", model.embedder, ("auto", *BACKBONE_NAMES))
    check_one_of("metric", model.metric, ("auto", *METRICS))
    if callable(model.embedder) and model.metric not in ("auto", *UNSCALED):
        raise ValueError(
            f"metric must be 'auto' or one of {UNSCALED} for an embedder of your own, whose "
            f"numbers are not scaled, got metric={model.metric!r}"
        )
    check_one_of("missing", model.missing, MISSING)
    check_one_of("new_classes", model.new_classes, NEW_CLASSES)
    if model.label_noise != "auto":
        check_number("label_noise", model.label_noise)
    check_reject(model.reject_below)
    if model.training is not None and not isinstance(model.training, Mapping):
        raise ValueError(f"training must be settings by name, got training={model.training!r}")
    check_field_names(model.training or {})
    check_number("verbose", model.verbose)
    check_jobs(model.n_jobs)
    if not isinstance(model.index, str):
        raise ValueError(f"index must be the name of an index, got index={model.index!r}")
    return Plan(
        embedder=model.embedder,
        metric=model.metric,
        n_neighbours=None if model.n_neighbors == "auto" else int(model.n_neighbors),
        label_noise=None if model.label_noise == "auto" else float(model.label_noise),
        impute=model.missing == "impute",
        training=model.training or {},
        trust_neighbours=check_count("trust_neighbours", model.trust_neighbours),
        index=model.index,
        seed=_seed(model.random_state),
        progress=model.verbose > 0,
    )


def check_reject(reject_below: Any) -> None:
    """Refuse what is no threshold; infinity, never to answer, is one."""
    if reject_below is None:
        return
    check_number("reject_below", reject_below)
    if reject_below != math.inf:
        check_range("reject_below", reject_below, low=0, high=1)


def check_jobs(n_jobs: Any) -> int | None:
    """Return a number of threads as joblib counts them, from the end where it is negative."""
    if n_jobs is None:
        return None
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, Integral) or n_jobs == 0:
        raise ValueError(f"n_jobs must be None or an integer other than 0, got {n_jobs=}")
    return int(n_jobs)


def _seed(random_state: Any) -> int:
    """Return a seed; a generator gives another one every time."""
    try:
        return int(check_random_state(random_state).randint(2**31 - 1))
    except ValueError:
        rule = "be None, a RandomState or an integer from 0 to 2**32 - 1"
        raise ValueError(f"random_state must {rule}, got {random_state=}") from None


def check_noise(label_noise: Any, n_classes: int) -> None:
    """Refuse a share of wrong labels from which nothing can be learned: that of chance."""
    if label_noise != "auto":
        check_range("label_noise", label_noise, low=0, high=1 - 1 / n_classes, high_open=True)


def check_number(name: str, value: Any) -> float:
    """Return a number as a float, or refuse it."""
    if isinstance(value, Real):
        with suppress(OverflowError):  # an integer beyond all floats
            return float(value)
    raise ValueError(f"{name} must be a number, got {name}={value!r}")
