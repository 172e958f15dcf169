"""A tiny image set and the settings of a training that takes a second."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from attnknn.config import RunConfig
from attnknn.data.splits import Split, Splits

N_CLASSES = 3


def tiny_splits(seed: int = 0, *, n_train: int = 60, noise: float = 60.0) -> Splits:
    """Return images of 3 classes under noise: vertical stripes, horizontal stripes, a chequer."""
    rng = np.random.default_rng(seed)
    row, column = np.indices((8, 8))
    patterns = np.stack([column % 2, row % 2, (row + column) % 2])

    def draw(n_rows: int) -> Split:
        labels = np.arange(n_rows) % N_CLASSES
        images = 60 + 90 * patterns[labels][:, None] + rng.normal(0, noise, (n_rows, 1, 8, 8))
        return Split(images.clip(0, 255).astype(np.uint8), labels)

    return Splits(
        name="tiny",
        kind="image",
        train=draw(n_train),
        val=draw(30),
        test=draw(24),
        class_names=("a", "b", "c"),
        mean=(0.35,),
        std=(0.25,),
        n_numeric=0,
        feature_names=(),
        augmentation=("crop",),
        source="made by a test",
    )


SMALL = {
    "backbone": "fast",
    "widths": [4, 6, 8],
    "epochs": 2,
    "batch_size": 20,
    "fit_k": 7,
    "fit_epochs": 3,
    "trust_neighbours": 5,
    "device": "cpu",
}
JOINT = SMALL | {
    "objective": "joint",
    "k_train": 5,
    "optimiser": "adamw",
    "lr": 1e-2,
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "lookahead": False,
    "qk": "full",
    "heads": 2,
}


def config(base: dict, **changes) -> RunConfig:
    """Return a configuration from flat settings."""
    return RunConfig.from_flat(base | changes)


class SealedSplit(Split):
    """Rows that fail the test that reads them while they are sealed."""

    is_sealed = False

    def __getattribute__(self, name: str):
        if name in ("inputs", "labels") and object.__getattribute__(self, "is_sealed"):
            raise AssertionError(f"{name} of sealed rows were read")
        return super().__getattribute__(name)

    @contextmanager
    def seal(self) -> Iterator[None]:
        """Let nobody read the rows meanwhile."""
        object.__setattr__(self, "is_sealed", True)
        try:
            yield
        finally:
            object.__setattr__(self, "is_sealed", False)


def sealable_splits() -> Splits:
    """Return the tiny image set with test rows that can be sealed."""
    splits = tiny_splits()
    return replace(splits, test=SealedSplit(splits.test.inputs, splits.test.labels))
