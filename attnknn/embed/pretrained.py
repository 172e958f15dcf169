"""Residual networks of torchvision and any network of timm, with or without ImageNet weights.

torchvision and timm are imported when they are used: both are slow to import.
"""

import warnings
from collections.abc import Callable

from torch import nn

from attnknn.checks import nearest_name

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
