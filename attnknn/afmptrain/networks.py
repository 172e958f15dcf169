"""A setting becomes an untrained classifier of pixels. Axes: B images, C classes, D width."""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import TqdmWarning

from attnknn.afmp import AFMP, AFMPConfig, AFMPTrunk
from attnknn.afmp.published import PublishedAFMP
from attnknn.afmptrain.settings import Setting
from attnknn.data import Splits
from attnknn.linear import with_fast_linear

# The transformer that stands beside AFMP: steps of its width, fine enough for sizes within 10 %,
# and the least width of a head.
WIDTH_STEP, HEAD_WIDTH = 4, 32


class Classifier(nn.Module):
    """Pixels in [0, 1] to logits: the data's mean and deviation are taken out, then the model."""

    def __init__(self, network: nn.Module, splits: Splits) -> None:
        super().__init__()
        self.network = network
        for name in ("mean", "std"):
            statistic = torch.tensor(getattr(splits, name), dtype=torch.float32)
            self.register_buffer(name, statistic[:, None, None])

    def normalised(self, pixels: Float[Tensor, "B c h w"]) -> Float[Tensor, "B c h w"]:
        """Return what the network sees."""
        return (pixels - self.mean) / self.std

    def forward(self, pixels: Float[Tensor, "B c h w"]) -> Float[Tensor, "B C"]:
        """Return the logits."""
        return self.network(self.normalised(pixels))

    def logits_and_penalty(
        self, pixels: Float[Tensor, "B c h w"]
    ) -> tuple[Float[Tensor, "B C"], Float[Tensor, ""]]:
        """Return the logits and what the model's own regulariser adds to the loss."""
        if isinstance(self.network, AFMP):
            return self.network.logits_and_penalty(self.normalised(pixels))
        return self(pixels), pixels.new_zeros(())

    def features(self, pixels: Float[Tensor, "B c h w"]) -> Float[Tensor, "B D"]:
        """Return what the readout reads."""
        return self.network.trunk(self.normalised(pixels))


def build_classifier(setting: Setting, splits: Splits, *, seed: int) -> Classifier:
    """Return the untrained model of a setting; the seed decides its weights."""
    if splits.kind != "image":
        raise ValueError(f"dataset must hold images for AFMP, got kind={splits.kind!r}")
    channels, side = splits.train.inputs.shape[1], splits.train.inputs.shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if setting.kind == "deit":
            network = build_transformer(setting.model, splits.n_classes, channels, side)
        else:
            kind = AFMP if setting.kind == "afmp" else PublishedAFMP
            network = kind(setting.model, splits.n_classes, channels=channels)
    return Classifier(network, splits)


def build_transformer(config: AFMPConfig, n_classes: int, channels: int, side: int) -> nn.Module:
    """Return a DeiT-type model with the patches, the depth and about the size of an AFMP model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # a hint about widgets nobody asked for
        from timm.models.vision_transformer import VisionTransformer

    wanted = sum(p.numel() for p in AFMPTrunk(config, channels=channels).parameters())
    pixels = channels * config.patch**2

    def size(width: int) -> int:  # blocks: 12 width^2; embedding: pixels * width
        return config.layers * 12 * width**2 + pixels * width

    widths = range(WIDTH_STEP, 1025, WIDTH_STEP)
    width = min(widths, key=lambda width: abs(size(width) - wanted))
    most = max(1, width // HEAD_WIDTH)
    transformer = VisionTransformer(
        img_size=side,
        patch_size=config.patch,
        in_chans=channels,
        num_classes=n_classes,
        embed_dim=width,
        depth=config.layers,
        num_heads=next(heads for heads in range(most, 0, -1) if width % heads == 0),
    )
    return with_fast_linear(transformer)  # the same products as AFMP's: times can be compared
