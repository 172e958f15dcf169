"""Images and networks that the benchmarks of embedding and training share."""

import numpy as np
import torch

from attnknn.config import RunConfig
from attnknn.data.splits import Split, Splits
from attnknn.embed.networks import Embedder, build_embedder


def random_images(n_train: int, n_test: int) -> Splits:
    """Return images of CIFAR-10's shape: a network takes as long for any content."""
    rng = np.random.default_rng(0)

    def split(n_images: int) -> Split:
        images = rng.integers(0, 256, (n_images, 3, 32, 32), dtype=np.uint8)
        return Split(images, np.arange(n_images) % 10)

    return Splits(
        name="random",
        kind="image",
        train=split(n_train),
        val=split(100),
        test=split(n_test),
        class_names=tuple(map(str, range(10))),
        mean=(0.5, 0.5, 0.5),
        std=(0.29, 0.29, 0.29),
        n_numeric=0,
        feature_names=(),
        augmentation=("crop", "flip"),
        source="drawn",
    )


def fast_embedder(splits: Splits) -> Embedder:
    """Return the untrained fast embedder."""
    torch.manual_seed(0)
    return build_embedder(RunConfig().embedder, splits.spec, rows=splits.train.inputs)
