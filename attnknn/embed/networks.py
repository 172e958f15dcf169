"""The embedder: normalisation, backbone, projection and unit length, in this order.

Axes: B inputs, D embedding width, F features.
"""

import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from attnknn.checks import check_one_of, nearest_name
from attnknn.config import EmbedderConfig
from attnknn.data.splits import InputSpec
from attnknn.embed.images import PATCH, FastNet, build_resnet, build_timm, check_side

# ---- Heads: small networks on top of a backbone.
#
# A projection maps backbone features to the embedding; a classifier head maps the embedding to
# logits and is used by the cross-entropy loss and the CNN baseline alone.

HIDDEN = 512


def build_projection(kind: str, in_dim: int, embed_dim: int) -> nn.Module:
    """Return a projection from ``in_dim`` features to ``embed_dim``; "none" changes nothing."""
    return PROJECTIONS[check_one_of("projection", kind, PROJECTIONS)](in_dim, embed_dim)


def _deep(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(in_dim, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(HIDDEN, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, embed_dim),
    )


def _batchnorm(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(in_dim, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, embed_dim),
    )


def _layernorm(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(in_dim, embed_dim),
        nn.LayerNorm(embed_dim),
        nn.GELU(),
        nn.Linear(embed_dim, embed_dim),
    )


def _none(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Identity()


PROJECTIONS = {"none": _none, "deep": _deep, "batchnorm": _batchnorm, "layernorm": _layernorm}


class LinearHead(nn.Module):
    """Logits = scale * W x, without a bias."""

    def __init__(self, in_dim: int, n_classes: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, n_classes, bias=False)
        self.scale = scale

    def forward(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return logits."""
        return self.scale * self.linear(features)


def build_head(kind: str, in_dim: int, n_classes: int, *, scale: float = 1.0) -> nn.Module:
    """Return a classifier head from ``in_dim`` features to logits.

    Args:
        kind: "linear", or "mlp" with one hidden layer of the same width.
        in_dim: Width of the features, before they are brought to unit length.
        n_classes: Number of classes.
        scale: Linear head: factor on the logits; see `Embedder.logit_scale`.
    """
    check_one_of("head", kind, ("linear", "mlp"))
    if kind == "linear":
        return LinearHead(in_dim, n_classes, scale=scale)
    return nn.Sequential(
        nn.Linear(in_dim, in_dim), nn.ReLU(), nn.Dropout(0.2), nn.Linear(in_dim, n_classes)
    )


# ---- The PCA backbone: an embedding that nobody trained, from the principal axes of raw inputs.
#
# Axes: N rows, B inputs, F values of an input, D principal axes.


class PrincipalAxes(nn.Module):
    """features = axes (flat input - centre), with the axes of largest variance first.

    Args:
        n_values: Values of an input, pixels or features.
        n_axes: Axes kept.
    """

    n_initial_rows = 20_000  # enough for the leading axes, and bounds the time of the fit

    def __init__(self, n_values: int, n_axes: int) -> None:
        super().__init__()
        if n_axes > n_values:
            raise ValueError(
                f"embed_dim must be at most the {n_values} values of an input, got {n_axes}"
            )
        self.register_buffer("centre", torch.zeros(n_values))
        self.register_buffer("axes", torch.zeros(n_axes, n_values))
        self.out_dim = n_axes

    @torch.no_grad()
    def initialise(self, rows: Float[Tensor, "N *shape"]) -> None:
        """Set the axes from training rows."""
        flat = rows.flatten(1)
        self.centre.copy_(flat.mean(dim=0))
        centred = flat - self.centre
        _, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending variance
        axes = vectors.flip(1).T[: len(self.axes)]
        # Eigenvectors come with either sign; fixing it makes runs comparable.
        largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
        self.axes.copy_(axes * largest.sign())

    def forward(self, inputs: Float[Tensor, "B *shape"]) -> Float[Tensor, "B D"]:
        """Return the coordinates along the axes."""
        return (inputs.flatten(1) - self.centre) @ self.axes.T


# ---- The table backbone: a two-layer network, with an optional richer view of each number.
#
# Axes: B rows, F features, M number columns.

TABULAR_HIDDEN = 256


class TableNet(nn.Module):
    """F -> 256 -> LayerNorm -> GELU -> Dropout -> 256 -> LayerNorm -> GELU -> Dropout -> D.

    Args:
        n_features: Width of a row.
        embed_dim: Width of the embedding.
        numbers: Expands the first columns of a row; None takes them as they are.
    """

    def __init__(
        self, n_features: int, embed_dim: int, *, numbers: "PeriodicNumbers | None" = None
    ) -> None:
        super().__init__()
        self.numbers = numbers
        if numbers is not None:
            n_features += numbers.out_dim - numbers.n_numeric
        self.layers = nn.Sequential(
            nn.Linear(n_features, TABULAR_HIDDEN),
            nn.LayerNorm(TABULAR_HIDDEN),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(TABULAR_HIDDEN, TABULAR_HIDDEN),
            nn.LayerNorm(TABULAR_HIDDEN),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(TABULAR_HIDDEN, embed_dim),
        )
        self.out_dim = embed_dim

    def forward(self, rows: Float[Tensor, "B F"]) -> Float[Tensor, "B D"]:
        """Return features of standardised rows."""
        if self.numbers is not None:
            split = self.numbers.n_numeric
            rows = torch.cat([self.numbers(rows[:, :split]), rows[:, split:]], dim=1)
        return self.layers(rows)


class PeriodicNumbers(nn.Module):
    """Each number x becomes ReLU(W [sin(2 pi f x), cos(2 pi f x)] + b), with learned f.

    Sines of several frequencies let the network bend sharply inside the range of one column,
    which a plain layer learns slowly (Gorishniy, Rubachev and Babenko, arXiv:2203.05556).

    Attributes:
        n_numeric: Number columns M.
        out_dim: Width of the flattened output.
    """

    def __init__(
        self, n_numeric: int, *, n_frequencies: int = 24, width: int = 12, spread: float = 0.3
    ) -> None:
        super().__init__()
        self.n_numeric, self.out_dim = n_numeric, n_numeric * width
        self.frequencies = nn.Parameter(spread * torch.randn(n_numeric, n_frequencies))
        bound = 1 / math.sqrt(2 * n_frequencies)
        uniform = torch.empty(n_numeric, 2 * n_frequencies, width).uniform_(-bound, bound)
        self.weight = nn.Parameter(uniform)
        self.bias = nn.Parameter(torch.zeros(n_numeric, width))

    def forward(self, numbers: Float[Tensor, "B M"]) -> Float[Tensor, "B flat"]:
        """Return the expanded columns, side by side."""
        phases = 2 * math.pi * numbers[:, :, None] * self.frequencies  # (B, M, frequencies)
        waves = torch.cat([phases.sin(), phases.cos()], dim=-1)
        expanded = torch.einsum("bmf,mfw->bmw", waves, self.weight) + self.bias
        return expanded.relu().flatten(1)


SMALLEST_RESNET_IMAGE = 8
# A folder of its own, which trains with the loop of this one: called by its address alone.
AFMP_BACKBONE = "attnknn.afmp.model:build_backbone"
Inputs = UInt8[np.ndarray, "N channels height width"] | Float[np.ndarray, "N F"]


@dataclass(frozen=True)
class Built:
    """A backbone with what is known about its weights.

    Attributes:
        network: Turns normalised inputs into features of width ``network.out_dim``.
        pretrained: Whether weights learned elsewhere were loaded.
        new: Parameters that start at random in spite of it.
    """

    network: nn.Module
    pretrained: bool = False
    new: list[nn.Parameter] = field(default_factory=list)


class Embedder(nn.Module):
    """embedding = unit(projection(backbone((inputs - mean) / std))).

    Attributes:
        backbone: The network below the projection.
        projection: The network on top of it.
        embed_dim: Width D of the embedding.
        pretrained_used: Whether the backbone started from pretrained weights.
        logit_scale: Factor that a linear head puts on its logits.
    """

    def __init__(
        self, built: Built, projection: nn.Module, spec: InputSpec, embed_dim: int
    ) -> None:
        super().__init__()
        self.backbone = built.network
        self.projection = projection
        self.embed_dim = embed_dim
        self.pretrained_used = built.pretrained
        self.logit_scale = getattr(built.network, "logit_scale", 1.0)
        self.input_shape = tuple(spec.shape)
        self._new_stem = built.new
        for name in ("mean", "std"):
            statistic = torch.tensor(getattr(spec, name), dtype=torch.float32)
            self.register_buffer(name, statistic[:, None, None])  # empty unless images

    def features(
        self, inputs: Float[Tensor, "B channels height width"] | Float[Tensor, "B F"]
    ) -> Float[Tensor, "B D"]:
        """Return what a classifier head reads: the embedding before unit length.

        Args:
            inputs: Images with pixels in [0, 1], already augmented, or rows of features.
        """
        if inputs.ndim != 1 + len(self.input_shape) or inputs.shape[1] != self.input_shape[0]:
            raise ValueError(
                f"inputs must have shape (B, {', '.join(map(str, self.input_shape))}), "
                f"got shape {tuple(inputs.shape)}"
            )
        # NOTE: normalisation is in here so that padding and jitter always come before it.
        return self.projection(self.backbone(self.normalised(inputs)))

    def normalised(self, inputs: Float[Tensor, "B *shape"]) -> Float[Tensor, "B *shape"]:
        """Return images with the data set's mean and deviation taken out; rows as they are."""
        return (inputs - self.mean) / self.std if self.mean.numel() else inputs

    def forward(
        self, inputs: Float[Tensor, "B channels height width"] | Float[Tensor, "B F"]
    ) -> Float[Tensor, "B D"]:
        """Return rows of unit length; features that are all zero stay zero."""
        return F.normalize(self.features(inputs), dim=1)

    def parameter_roles(self) -> dict[str, list[nn.Parameter]]:
        """Return every trainable parameter once, by how it should be trained.

        Roles: "pretrained" (weights learned elsewhere), "new" (started at random), and where the
        backbone has a recipe of its own "whitening_bias", "norm_bias" and "filters".
        """
        roles = dict(getattr(self.backbone, "parameter_roles", dict)())
        taken = {id(p) for members in roles.values() for p in members}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in taken]
        # NOTE: a stem that replaced the pretrained one knows nothing yet: it is not "pretrained".
        new = {id(p) for p in [*self._new_stem, *self.projection.parameters()]}
        known = {id(p) for p in self.backbone.parameters()} - new if self.pretrained_used else set()
        roles["pretrained"] = [p for p in rest if id(p) in known]
        roles["new"] = [p for p in rest if id(p) not in known]
        return roles


def _fast(config: EmbedderConfig, spec: InputSpec) -> Built:
    channels, side = _image_shape("fast", spec)
    check_side("fast", side, low=PATCH)
    return Built(FastNet(channels, config.widths))


def _afmp(config: EmbedderConfig, spec: InputSpec) -> Built:
    _image_shape("afmp", spec)
    return Built(pkgutil.resolve_name(AFMP_BACKBONE)(spec.shape))


def _resnet(config: EmbedderConfig, spec: InputSpec) -> Built:
    channels, side = _image_shape(config.backbone, spec)
    check_side(config.backbone, side, low=SMALLEST_RESNET_IMAGE)
    return Built(*build_resnet(config.backbone, channels, side, config.pretrained))


def _timm(config: EmbedderConfig, spec: InputSpec) -> Built:
    channels, side = _image_shape(config.backbone, spec)
    name = config.backbone.removeprefix("timm:")
    return Built(*build_timm(name, channels, side, config.pretrained))


def _mlp(config: EmbedderConfig, spec: InputSpec) -> Built:
    return Built(TableNet(_row_width("mlp", spec), config.embed_dim))


def _mlp_periodic(config: EmbedderConfig, spec: InputSpec) -> Built:
    n_features = _row_width("mlp-periodic", spec)
    # Ready-made embeddings have no one-hot columns: there, every column is a number.
    n_numeric = spec.n_numeric if spec.kind == "table" else n_features
    if n_numeric == 0:
        raise ValueError("mlp-periodic must have at least one number column, got n_numeric=0")
    numbers = PeriodicNumbers(n_numeric)
    return Built(TableNet(n_features, config.embed_dim, numbers=numbers))


def _identity(config: EmbedderConfig, spec: InputSpec) -> Built:
    network = nn.Identity()
    network.out_dim = _row_width("identity", spec)
    return Built(network)


def _pca(config: EmbedderConfig, spec: InputSpec) -> Built:
    return Built(PrincipalAxes(math.prod(spec.shape), config.embed_dim))


# A new backbone is one more line here, and its name in choices.BACKBONE_NAMES.
BACKBONES: dict[str, Callable[[EmbedderConfig, InputSpec], Built]] = {
    "fast": _fast,
    "afmp": _afmp,
    "resnet18": _resnet,
    "resnet50": _resnet,
    "timm:<name>": _timm,
    "mlp": _mlp,
    "mlp-periodic": _mlp_periodic,
    "identity": _identity,
    "pca": _pca,
}


def build_embedder(
    config: EmbedderConfig, spec: InputSpec, *, rows: Inputs | None = None
) -> Embedder:
    """Return an untrained embedder for inputs of a kind.

    Random weights come from torch's global generator: seed it first.

    Args:
        config: Backbone, projection and widths; ``embed_dim`` counts where there is a projection
            and for table backbones, elsewhere the backbone decides.
        spec: Kind, shape and statistics of the inputs.
        rows: Training rows, from which data-dependent filters are set; None leaves them blank,
            for saved weights to fill.

    Raises:
        PretrainedUnavailableError: ``pretrained=True`` and no weights.
    """
    name = "timm:<name>" if config.backbone.startswith("timm:") else config.backbone
    if name not in BACKBONES:
        raise ValueError(
            f"backbone must be one of {', '.join(BACKBONES)}, got backbone={config.backbone!r}"
            f"{nearest_name(config.backbone, BACKBONES)}"
        )
    built = BACKBONES[name](config, spec)
    projection = build_projection(config.projection, built.network.out_dim, config.embed_dim)
    width = built.network.out_dim if config.projection == "none" else config.embed_dim
    embedder = Embedder(built, projection, spec, width)
    if rows is not None and hasattr(built.network, "initialise"):
        built.network.initialise(_initial_inputs(embedder, rows))
    # Convolutions run about 1.4 times faster with channels last on a CPU.
    return embedder.to(memory_format=torch.channels_last) if spec.kind == "image" else embedder


def _initial_inputs(embedder: Embedder, rows: Inputs) -> Float[Tensor, "N *shape"]:
    """Return normalised training inputs from all over the training set."""
    wanted = embedder.backbone.n_initial_rows
    # Evenly spaced: rows may be sorted by class.
    ids = np.linspace(0, len(rows) - 1, min(len(rows), wanted)).astype(int)
    inputs = torch.from_numpy(rows[ids])
    return embedder.normalised(inputs.float() / 255 if rows.ndim == 4 else inputs)


def _image_shape(backbone: str, spec: InputSpec) -> tuple[int, int]:
    if spec.kind != "image":
        raise ValueError(f"backbone={backbone!r} must be given images, got kind={spec.kind!r}")
    channels, height, width = spec.shape
    return channels, min(height, width)


def _row_width(backbone: str, spec: InputSpec) -> int:
    if spec.kind == "image":
        raise ValueError(f"backbone={backbone!r} must be given rows of features, got kind='image'")
    return spec.shape[0]
