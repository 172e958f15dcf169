"""Rows changed on purpose: images augmented and mixed, labels made wrong, classes made rare.

Axes: N rows, B images of a batch, V views, C classes.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnknn.checks import check_count, check_one_of, check_range

# ---- Augmentation: a batch of images becomes another batch that deserves the same labels.
#
# Pixels are floats in [0, 1], before normalisation: black padding is then really black. Every
# random choice comes from the given generator, so the same state gives the same images.
# Axes: B images, V views.

Images = Float[Tensor, "B channels height width"]
AUGMENTATIONS = ("crop", "flip", "jitter", "rotate", "cutout")
PAD_MODES = {"zero": "constant", "reflect": "reflect"}
GREY = (0.299, 0.587, 0.114)  # luma of red, green and blue (ITU-R BT.601)


def augment_batch(
    images: Images,
    names: Sequence[str],
    generator: torch.Generator,
    *,
    pad: int = 4,
    pad_mode: str = "zero",
    cutout_size: int = 8,
    flips: Bool[Tensor, "B"] | None = None,
) -> Images:
    """Return the batch after the named transforms, applied in the fixed order of `AUGMENTATIONS`.

    Args:
        images: Pixels in [0, 1].
        names: Transforms out of `AUGMENTATIONS`.
        generator: Source of every random choice.
        pad: Largest shift of a crop, in pixels.
        pad_mode: What a shift uncovers: "zero" (black) or "reflect".
        cutout_size: Side of the erased square, in pixels.
        flips: Which images to mirror, see `alternating_flips`; drawn at random when None.
    """
    for name in names:
        check_one_of("augmentation", name, AUGMENTATIONS)
    if "crop" in names:
        images = random_crop(images, generator, pad=pad, mode=pad_mode)
    if "flip" in names:
        images = random_flip(images, generator) if flips is None else flip_where(images, flips)
    if "jitter" in names:
        images = colour_jitter(images, generator)
    if "rotate" in names:
        images = random_rotation(images, generator)
    return cutout(images, generator, size=cutout_size) if "cutout" in names else images


def random_crop(
    images: Images, generator: torch.Generator, *, pad: int = 4, mode: str = "zero"
) -> Images:
    """Return each image shifted by up to ``pad`` pixels in both directions, at the same size."""
    check_one_of("mode", mode, PAD_MODES)
    check_count("pad", pad, low=0)
    if mode == "reflect" and pad >= min(images.shape[-2:]):
        raise ValueError(f"pad must be smaller than the image to reflect, got {pad=}")
    shifts = torch.randint(0, 2 * pad + 1, (2, len(images)), generator=generator)
    return _shift(images, shifts.to(images.device), pad=pad, mode=mode)


def _shift(images: Images, shifts: Int[Tensor, "2 B"], *, pad: int, mode: str) -> Images:
    """Cut each padded image at its own (row, column) corner; (pad, pad) changes nothing."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (pad, pad, pad, pad), mode=PAD_MODES[mode])
    rows = shifts[0][:, None] + torch.arange(height, device=images.device)  # (B, height)
    columns = shifts[1][:, None] + torch.arange(width, device=images.device)  # (B, width)
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    # Channels last, so that one gathered pixel is one contiguous read.
    cut = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2)  # (B, channels, height, width)


def random_flip(images: Images, generator: torch.Generator) -> Images:
    """Return the images, each mirrored left to right with probability one half."""
    return flip_where(images, torch.rand(len(images), generator=generator) < 0.5)


def flip_where(images: Images, flips: Bool[Tensor, "B"]) -> Images:
    """Return the images with those marked in ``flips`` mirrored left to right."""
    return torch.where(flips.to(images.device)[:, None, None, None], images.flip(-1), images)


def alternating_flips(ids: Int[Tensor, "B"], *, epoch: int, seed: int = 0) -> Bool[Tensor, "B"]:
    """Return which images to mirror, so that every image is seen both ways in any two epochs.

    Random flips show a quarter of the images the same way in three epochs running; taking turns
    does not, and trains faster. The first way round is a hash of the image's id.

    Args:
        ids: Place of each image in the training set.
        epoch: Current epoch, from 0.
        seed: Another seed starts other images mirrored.
    """
    mixed = ids.long() + 0x632BE5AB * (seed + 1)
    for _ in range(2):  # 32-bit multiply-xorshift rounds; int64 holds every product
        mixed = ((mixed ^ (mixed >> 16)) & 0xFFFFFFFF) * 0x45D9F3B & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 16)) + epoch) % 2 == 1


def colour_jitter(images: Images, generator: torch.Generator, *, strength: float = 0.2) -> Images:
    """Return images with random brightness, contrast and (for colour) saturation.

    Each factor is drawn from [1 - strength, 1 + strength] for every image.
    """
    check_range("strength", strength, low=0, high=1)
    draws = torch.rand((3, len(images), 1, 1, 1), generator=generator)
    brightness, contrast, saturation = (1 + strength * (2 * draws - 1)).to(images.device)
    images = (images * brightness).clamp(0, 1)
    grey_level = _grey(images).mean(dim=(2, 3), keepdim=True)  # (B, 1, 1, 1)
    images = torch.lerp(grey_level.expand_as(images), images, contrast).clamp(0, 1)
    if images.shape[1] != 3:
        return images
    return torch.lerp(_grey(images).expand_as(images), images, saturation).clamp(0, 1)


def _grey(images: Images) -> Float[Tensor, "B 1 height width"]:
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    luma = torch.tensor(GREY, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, luma).unsqueeze(1)


def random_rotation(images: Images, generator: torch.Generator, *, degrees: float = 10.0) -> Images:
    """Return each image turned by a random angle of at most ``degrees`` about its centre."""
    check_range("degrees", degrees, low=0, high=180)
    angles = math.radians(degrees) * (2 * torch.rand(len(images), generator=generator) - 1)
    return rotate(images, angles.to(images.device))


def rotate(images: Images, angles: Float[Tensor, "B"]) -> Images:
    """Return each image turned counter-clockwise by its own angle in radians; corners are black."""
    height, width = images.shape[-2:]
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # Grid coordinates run from -1 to 1 along both sides, whatever their lengths.
    top = torch.stack([cos, -sin * height / width, zero], dim=1)  # (B, 3)
    bottom = torch.stack([sin * width / height, cos, zero], dim=1)  # (B, 3)
    turn = torch.stack([top, bottom], dim=1).to(images.dtype)  # (B, 2, 3)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="zeros", align_corners=False)


def cutout(images: Images, generator: torch.Generator, *, size: int = 8) -> Images:
    """Return images with a random square of ``size`` pixels set to the image's mean colour."""
    height, width = images.shape[-2:]
    if not 1 <= size <= min(height, width):
        raise ValueError(f"size must lie between 1 and the image side, got {size=}")
    tops = torch.randint(0, height - size + 1, (len(images),), generator=generator)
    lefts = torch.randint(0, width - size + 1, (len(images),), generator=generator)
    rows = torch.arange(height) - tops[:, None]  # (B, height)
    columns = torch.arange(width) - lefts[:, None]  # (B, width)
    erased = _within(rows, size)[:, :, None] & _within(columns, size)[:, None, :]
    # NOTE: the mean colour stands for "nothing here" after normalisation; black would be a signal.
    mean = images.mean(dim=(2, 3), keepdim=True)  # (B, channels, 1, 1)
    return torch.where(erased[:, None].to(images.device), mean, images)


def _within(offsets: Int[Tensor, "B side"], size: int) -> Bool[Tensor, "B side"]:
    return (offsets >= 0) & (offsets < size)


def shrink(images: Images, side: int) -> Float[Tensor, "B channels _ _"]:
    """Return the images scaled so that their shorter side has ``side`` pixels, without aliasing."""
    height, width = images.shape[-2:]
    check_count("side", side)
    if side == min(height, width):
        return images
    scale = side / min(height, width)
    size = (round(height * scale), round(width * scale))
    return F.interpolate(images, size=size, mode="bilinear", antialias=True).clamp(0, 1)


def mixup(
    images: Images, alpha: float, generator: torch.Generator
) -> tuple[Images, Int[Tensor, "B"], float]:
    """Return images blended with partners, the partners' places, and the share of the original.

    image = share * image + (1 - share) * image[partner]; the loss is to be blended alike:
    share * loss(labels) + (1 - share) * loss(labels[partner]).

    Args:
        images: Pixels in [0, 1].
        alpha: Both parameters of the Beta distribution of the share.
        generator: Source of every random choice.

    Returns:
        The mixed images, the partner of each image, and the share, at least one half: the
        original dominates.
    """
    check_range("alpha", alpha, low=0, low_open=True)
    partners = torch.randperm(len(images), generator=generator)
    # torch draws Beta variates from its global state only; NumPy takes a seed from our generator.
    seed = int(torch.randint(2**62, (1,), generator=generator))
    share = float(np.random.default_rng(seed).beta(alpha, alpha))
    share = max(share, 1 - share)
    partners = partners.to(images.device)
    return share * images + (1 - share) * images[partners], partners, share


TTA_KINDS = ("v5", "narrative", "shifts")


def tta_views(
    images: Images,
    generator: torch.Generator,
    *,
    kind: str = "v5",
    n_views: int = 5,
    pad: int = 4,
    pad_mode: str = "zero",
    flip: bool = True,
) -> Float[Tensor, "V B channels height width"]:
    """Return test-time views of each image; the first is the image itself.

    Args:
        images: Pixels in [0, 1].
        generator: Source of every random choice.
        kind: "v5": the others are randomly flipped, then randomly cropped. "narrative": one flip,
            the others are random crops. "shifts": image and mirror image, as they are and moved by
            one pixel along both diagonals, which is free of chance (at most 6 views).
        n_views: Number of views, the original included.
        pad: Largest shift of a crop, in pixels.
        pad_mode: "zero" or "reflect".
        flip: Whether a mirror image means the same; without it, views are only moved.
    """
    check_one_of("kind", kind, TTA_KINDS)
    check_count("n_views", n_views)
    most = max_views(kind, flip=flip)
    if most is not None and n_views > most:
        raise ValueError(f"n_views must be at most {most} for {kind=} and {flip=}, got {n_views=}")
    if kind == "shifts":
        return torch.stack(_shifted_views(images, flip=flip)[:n_views])
    views = [images]
    if kind == "narrative" and flip and n_views > 1:
        views.append(images.flip(-1))
    while len(views) < n_views:
        flipped = random_flip(images, generator) if kind == "v5" and flip else images
        views.append(random_crop(flipped, generator, pad=pad, mode=pad_mode))
    return torch.stack(views)


def max_views(kind: str, *, flip: bool) -> int | None:
    """Return how many views a kind has to offer; None where they are drawn at random."""
    if kind != "shifts":
        return None
    return 6 if flip else 3


def _shifted_views(images: Images, *, flip: bool) -> list[Images]:
    views = []
    for corner in (1, 0, 2):
        shifts = torch.full((2, len(images)), corner, device=images.device)
        moved = _shift(images, shifts, pad=1, mode="reflect")
        views += [moved, moved.flip(-1)] if flip else [moved]
    return views


NOISE_KINDS = ("symmetric", "asymmetric")


def flip_labels(
    labels: Int[np.ndarray, "N"],
    rate: float | int,
    *,
    n_classes: int,
    kind: str = "symmetric",
    seed: int,
) -> Int[np.ndarray, "N"]:
    """Return a copy of the labels with exactly ``round(rate * N)`` wrong ones.

    The flipped rows of a lower rate are among those of a higher one at the same seed, so a sweep
    over rates compares growing noise and not different draws.

    Args:
        labels: True class ids.
        rate: Share of rows to flip, in [0, 1].
        n_classes: Number of classes, at least 2.
        kind: "symmetric" draws uniformly among the other classes; "asymmetric" turns class c
            into c + 1, the last into the first.
        seed: Decides the rows and their new labels.
    """
    check_range("rate", rate, low=0.0, high=1.0)
    check_one_of("kind", kind, NOISE_KINDS)
    _check_labels(labels, n_classes)
    rng = np.random.default_rng(check_count("seed", seed, low=0))
    rows = rng.permutation(len(labels))[: round(rate * len(labels))]
    # A shift of 1 .. C - 1 reaches every other class once and never the class itself.
    shift = rng.integers(1, n_classes, size=len(labels)) if kind == "symmetric" else 1
    noisy = labels.copy()
    noisy[rows] = ((labels + shift) % n_classes)[rows]
    return noisy


def long_tail_rows(
    labels: Int[np.ndarray, "N"], ratio: float | int, *, n_classes: int, seed: int
) -> Int[np.ndarray, "M"]:
    """Return the ids of rows to keep so that class sizes fall geometrically.

    Class c keeps ``n_max * ratio ** (c / (C - 1))`` rows, rounded, at least one and at most what
    it has, where ``n_max`` is the size of the largest class: class 0 keeps all, the last class
    the share ``ratio``.

    Args:
        labels: Class ids.
        ratio: Size of the last class over the first, in (0, 1]; 1 keeps all rows of balanced data.
        n_classes: Number of classes, at least 2.
        seed: Decides the rows. Those of a smaller ratio are among those of a larger one.

    Returns:
        Kept row ids, ascending.
    """
    check_range("ratio", ratio, low=0.0, high=1.0, low_open=True)
    _check_labels(labels, n_classes)
    rng = np.random.default_rng(check_count("seed", seed, low=0))
    n_max = np.bincount(labels, minlength=n_classes).max()
    kept = []
    for label in range(n_classes):
        rows = rng.permutation(np.flatnonzero(labels == label))
        n_rows = max(1, round(n_max * ratio ** (label / (n_classes - 1))))
        kept.append(rows[:n_rows])
    return np.sort(np.concatenate(kept)).astype(np.int64)


def _check_labels(labels: Int[np.ndarray, "N"], n_classes: int) -> None:
    check_count("n_classes", n_classes, low=2)
    if len(labels) == 0:
        raise ValueError("labels must not be empty, got 0 rows")
    if labels.min() < 0 or labels.max() >= n_classes:
        raise ValueError(
            f"labels must lie in [0, {n_classes - 1}], got {labels.min()} to {labels.max()}"
        )
