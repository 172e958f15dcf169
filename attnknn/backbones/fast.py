"""The fast backbone: a small convolutional network that trains on a CPU in minutes.

It follows Keller Jordan's airbench recipe: frozen filters that whiten 2x2 patches, three blocks
that start as identities, BatchNorm without a scale, and a global max-pool.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

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
