"""Image backbones: a fast one of our own, residual networks of torchvision, any network of timm.

torchvision and timm are imported when they are used: both are slow to import.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnknn.checks import nearest_name

# ---- The fast backbone: a small convolutional network that trains on a CPU in minutes.
#
# It follows Keller Jordan's airbench recipe: frozen filters that whiten 2x2 patches, three blocks
# that start as identities, BatchNorm without a scale, and a global max-pool.

PATCH = 2
WHITENING_EPS = 5e-4


class FastNet(nn.Module):
    """features = maxpool(blocks(GELU(whiten(images)))).

    Attributes:
        out_dim: Width of the features.
        logit_scale: Factor on the logits of a linear head, part of the recipe.
        n_initial_rows: Training images the frozen filters are made from.
    """

    logit_scale = 1 / 9
    n_initial_rows = 5000

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        n_filters = 2 * channels * PATCH**2  # every whitening direction with both signs
        self.whiten = nn.Conv2d(channels, n_filters, PATCH)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)
        sizes = [n_filters, *widths]
        self.blocks = nn.Sequential(*(FastBlock(*pair) for pair in pairwise(sizes)))
        self.out_dim = sizes[-1]

    def initialise(self, images: Float[Tensor, "N channels height width"]) -> None:
        """Set the frozen filters from normalised images."""
        filters = whitening_filters(images)
        self.whiten.weight.data.copy_(torch.cat([filters, -filters]))

    def forward(self, images: Float[Tensor, "B channels height width"]) -> Float[Tensor, "B D"]:
        """Return features of normalised images."""
        maps = self.blocks(F.gelu(self.whiten(images)))  # (B, D, rows, columns)
        return maps.amax(dim=(2, 3))

    def parameter_roles(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters that the recipe trains in their own way."""
        norms = [norm for block in self.blocks for norm in (block.norm1, block.norm2)]
        filters = [conv.weight for block in self.blocks for conv in (block.conv1, block.conv2)]
        return {
            "whitening_bias": [self.whiten.bias],
            "norm_bias": [norm.bias for norm in norms],
            "filters": filters,
        }


class FastBlock(nn.Module):
    """Convolution, max-pool, convolution, each followed by BatchNorm and GELU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = _dirac_conv(in_channels, out_channels)
        self.norm1 = _shift_norm(out_channels)
        self.conv2 = _dirac_conv(out_channels, out_channels)
        self.norm2 = _shift_norm(out_channels)

    def forward(self, maps: Float[Tensor, "B before _ _"]) -> Float[Tensor, "B after _ _"]:
        """Return maps of half the side; a map of one pixel keeps its size."""
        maps = self.conv1(maps)
        if min(maps.shape[-2:]) >= 2:  # small images would otherwise shrink to nothing
            maps = F.max_pool2d(maps, 2)
        maps = F.gelu(self.norm1(maps))
        return F.gelu(self.norm2(self.conv2(maps)))


def _dirac_conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a 3x3 convolution that passes its input on in its first filters."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:in_channels])
    return conv


def _shift_norm(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm whose scale stays 1 and whose statistics follow the last few batches."""
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


def whitening_filters(
    images: Float[Tensor, "N channels height width"], *, eps: float = WHITENING_EPS
) -> Float[Tensor, "M channels 2 2"]:
    """Return filters whose responses on 2x2 patches are uncorrelated, with unit variance.

    Args:
        images: Normalised images.
        eps: Added to each variance: directions that hardly vary are not blown up.
    """
    channels = images.shape[1]
    windows = images.unfold(2, PATCH, 1).unfold(3, PATCH, 1)  # (N, channels, rows, columns, 2, 2)
    patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, channels * PATCH**2)
    second_moment = patches.T @ patches / len(patches)
    variances, directions = torch.linalg.eigh(second_moment)
    filters = (directions / (variances.clamp_min(0) + eps).sqrt()).T
    return filters.reshape(-1, channels, PATCH, PATCH)


# ---- Networks of others, with or without ImageNet weights.

SMALL_SIDE = 64  # pixels; up to here a ResNet's first convolution must not halve the image


class PretrainedUnavailableError(RuntimeError):
    """Pretrained weights were asked for and cannot be had."""


def with_weights(
    name: str, pretrained: bool | str, build: Callable[[bool], nn.Module]
) -> tuple[nn.Module, bool]:
    """Return a network, and whether it carries pretrained weights.

    Args:
        name: The network, for messages.
        pretrained: True must have the weights, False starts at random, "auto" tries and says so
            when it starts at random.
        build: Makes the network, given whether weights shall be loaded.
    """
    if pretrained is False:
        return build(False), False
    try:
        return build(True), True
    except OSError as error:
        if pretrained is True:
            raise PretrainedUnavailableError(
                f"pretrained weights of {name} must be downloadable or cached when "
                f"pretrained=True, but: {error}; use pretrained='auto' or False to do without"
            ) from error
        warnings.warn(
            f"{name} starts from random weights: its pretrained weights could not be fetched",
            stacklevel=2,
        )
        return build(False), False


def build_resnet(
    name: str, channels: int, side: int, pretrained: bool | str
) -> tuple[nn.Module, bool, list[nn.Parameter]]:
    """Return a torchvision ResNet without its classifier, fitted to small images.

    The first convolution becomes 3x3 with stride 1 for small colour images; other channel counts
    keep 7x7 with stride 2. The max-pool goes, except for large images.

    Returns:
        The network, whether it is pretrained, and the parameters that are new in spite of it.
    """
    import torchvision

    def build(load: bool) -> nn.Module:
        network = getattr(torchvision.models, name)()
        if load:
            weights = torchvision.models.get_model_weights(name).DEFAULT
            # NOTE: weights_only refuses code hidden in a downloaded pickle.
            network.load_state_dict(
                weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
            )
        return network

    network, used = with_weights(name, pretrained, build)
    new = _fit_stem(network, channels, side)
    network.out_dim = network.fc.in_features
    network.fc = nn.Identity()
    return network, used, new


def _fit_stem(network: nn.Module, channels: int, side: int) -> list[nn.Parameter]:
    """Replace the first convolution where the input asks for it; return its new parameters."""
    if side <= SMALL_SIDE:
        network.maxpool = nn.Identity()
    if channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    elif side <= SMALL_SIDE:
        network.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
    else:
        return []
    return list(network.conv1.parameters())


def build_timm(
    name: str, channels: int, side: int, pretrained: bool | str
) -> tuple[nn.Module, bool, list[nn.Parameter]]:
    """Return a timm network without its classifier; see `build_resnet` for what comes back."""
    import timm

    known = timm.list_models()
    base = name.partition(".")[0]  # "resnet18.a1_in1k" names a set of weights too
    if base not in known:
        raise ValueError(
            f"backbone must name a timm network, got backbone='timm:{name}'"
            f"{nearest_name(base, known)}"
        )
    config = timm.get_pretrained_cfg(base)
    size = {"img_size": side} if config is not None and config.fixed_input_size else {}

    def build(load: bool) -> nn.Module:
        return timm.create_model(name, pretrained=load, num_classes=0, in_chans=channels, **size)

    network, used = with_weights(f"timm:{name}", pretrained, build)
    network.out_dim = network.num_features
    return network, used, []


def check_side(backbone: str, side: int, *, low: int) -> None:
    """Refuse images too small for a network."""
    if side < low:
        raise ValueError(f"image side must be at least {low} for {backbone}, got side={side}")
