"""The embedder: normalisation, backbone, projection and unit length, in this order.

Axes: B inputs, D embedding width, F features.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnknn.afmp import AFMP_TINY, AFMPTrunk
from attnknn.backbones.fast import PATCH, FastNet
from attnknn.backbones.heads import build_projection
from attnknn.backbones.pca import PrincipalAxes
from attnknn.backbones.pretrained import build_resnet, build_timm, check_side
from attnknn.backbones.tabular import PeriodicNumbers, TableNet
from attnknn.checks import nearest_name
from attnknn.config import EmbedderConfig
from attnknn.data import Splits

SMALLEST_RESNET_IMAGE = 8


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

    def __init__(self, built: Built, projection: nn.Module, splits: Splits, embed_dim: int) -> None:
        super().__init__()
        self.backbone = built.network
        self.projection = projection
        self.embed_dim = embed_dim
        self.pretrained_used = built.pretrained
        self.logit_scale = getattr(built.network, "logit_scale", 1.0)
        self.input_shape = splits.train.inputs.shape[1:]
        self._new_stem = built.new
        for name in ("mean", "std"):
            statistic = torch.tensor(getattr(splits, name), dtype=torch.float32)
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

    def new_stem_parameters(self) -> list[nn.Parameter]:
        """Return backbone parameters that replaced pretrained ones and start at random."""
        return self._new_stem

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


def _fast(config: EmbedderConfig, splits: Splits) -> Built:
    channels, side = _image_shape("fast", splits)
    check_side("fast", side, low=PATCH)
    return Built(FastNet(channels, config.widths))


def _afmp(config: EmbedderConfig, splits: Splits) -> Built:
    """AFMP-Tiny without its readout: three tenths of the edges kept, top-down pass on.

    Neither can be set here, and nothing asks for small gates: losses of embedders know no sparsity
    penalty. ``attnknn.afmptrain`` trains AFMP with all its settings.
    """
    channels, side = _image_shape("afmp", splits)
    # Patches of 8 pixels, as in AFMP-Tiny; small images still get a grid of 4 x 4.
    wanted = min(AFMP_TINY.patch, max(1, side // 4))
    height, width = splits.train.inputs.shape[2:]
    patch = next(p for p in range(wanted, 0, -1) if height % p == width % p == 0)
    if 2 * patch < wanted:
        raise ValueError(
            f"images must be cut into patches of {-(-wanted // 2)} to {wanted} pixels for "
            f"backbone='afmp', got {height} x {width}: set image_size to a multiple of {wanted}"
        )
    return Built(SinglePrecisionTrunk(replace(AFMP_TINY, patch=patch), channels=channels))


class SinglePrecisionTrunk(AFMPTrunk):
    """AFMP's trunk, left out of autocast: its sparse products have no bfloat16 form."""

    def forward(self, images: Float[Tensor, "B channels height width"]) -> Float[Tensor, "B D"]:
        """Return the mean top state of each image."""
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images.float())


def _resnet(config: EmbedderConfig, splits: Splits) -> Built:
    channels, side = _image_shape(config.backbone, splits)
    check_side(config.backbone, side, low=SMALLEST_RESNET_IMAGE)
    return Built(*build_resnet(config.backbone, channels, side, config.pretrained))


def _timm(config: EmbedderConfig, splits: Splits) -> Built:
    channels, side = _image_shape(config.backbone, splits)
    name = config.backbone.removeprefix("timm:")
    return Built(*build_timm(name, channels, side, config.pretrained))


def _mlp(config: EmbedderConfig, splits: Splits) -> Built:
    return Built(TableNet(_row_width("mlp", splits), config.embed_dim))


def _mlp_periodic(config: EmbedderConfig, splits: Splits) -> Built:
    n_features = _row_width("mlp-periodic", splits)
    # Ready-made embeddings have no one-hot columns: there, every column is a number.
    n_numeric = splits.n_numeric if splits.kind == "table" else n_features
    if n_numeric == 0:
        raise ValueError("mlp-periodic must have at least one number column, got n_numeric=0")
    numbers = PeriodicNumbers(n_numeric)
    return Built(TableNet(n_features, config.embed_dim, numbers=numbers))


def _identity(config: EmbedderConfig, splits: Splits) -> Built:
    network = nn.Identity()
    network.out_dim = _row_width("identity", splits)
    return Built(network)


def _pca(config: EmbedderConfig, splits: Splits) -> Built:
    return Built(PrincipalAxes(int(np.prod(splits.train.inputs.shape[1:])), config.embed_dim))


# A new backbone is one more line here, and its name in choices.BACKBONE_NAMES.
BACKBONES: dict[str, Callable[[EmbedderConfig, Splits], Built]] = {
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


def build_embedder(config: EmbedderConfig, splits: Splits) -> Embedder:
    """Return an untrained embedder for the given data.

    Random weights come from torch's global generator: seed it first. Data-dependent filters are
    set here, from training rows alone.

    Args:
        config: Backbone, projection and widths; ``embed_dim`` counts where there is a projection
            and for table backbones, elsewhere the backbone decides.
        splits: The data to embed.

    Raises:
        PretrainedUnavailableError: ``pretrained=True`` and no weights.
    """
    name = "timm:<name>" if config.backbone.startswith("timm:") else config.backbone
    if name not in BACKBONES:
        raise ValueError(
            f"backbone must be one of {', '.join(BACKBONES)}, got backbone={config.backbone!r}"
            f"{nearest_name(config.backbone, BACKBONES)}"
        )
    built = BACKBONES[name](config, splits)
    projection = build_projection(config.projection, built.network.out_dim, config.embed_dim)
    width = built.network.out_dim if config.projection == "none" else config.embed_dim
    embedder = Embedder(built, projection, splits, width)
    if hasattr(built.network, "initialise"):
        built.network.initialise(_initial_inputs(embedder, splits))
    # Convolutions run about 1.4 times faster with channels last on a CPU.
    return embedder.to(memory_format=torch.channels_last) if splits.kind == "image" else embedder


def _initial_inputs(embedder: Embedder, splits: Splits) -> Float[Tensor, "N *shape"]:
    """Return normalised training inputs from all over the training set."""
    n_rows, wanted = len(splits.train), embedder.backbone.n_initial_rows
    # Evenly spaced: rows may be sorted by class.
    ids = np.linspace(0, n_rows - 1, min(n_rows, wanted)).astype(int)
    inputs = torch.from_numpy(splits.train.inputs[ids])
    return embedder.normalised(inputs.float() / 255 if splits.kind == "image" else inputs)


def _image_shape(backbone: str, splits: Splits) -> tuple[int, int]:
    if splits.kind != "image":
        raise ValueError(f"backbone={backbone!r} must be given images, got kind={splits.kind!r}")
    channels, height, width = splits.train.inputs.shape[1:]
    return channels, min(height, width)


def _row_width(backbone: str, splits: Splits) -> int:
    if splits.kind == "image":
        raise ValueError(f"backbone={backbone!r} must be given rows of features, got kind='image'")
    return splits.train.inputs.shape[1]
