"""Readers: the raw files of each known data set become ``RawData``.

Axes: N rows.
"""

import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from attnknn.data import download as sources
from attnknn.data.splits import TEST, TRAIN, RawData
from attnknn.data.tables import MISSING

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
ADULT_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)


def read_digits() -> RawData:
    """Return scikit-learn's 1 797 digits as one-channel images of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return RawData(
        kind="image",
        inputs=pixels,
        labels=labels.astype(np.int64),
        class_names=tuple("0123456789"),
        source="scikit-learn load_digits",
        val_share=0.25,  # of the 80 % that are not test rows: 60 / 20 / 20
        augmentation=("rotate",),  # a crop would cut strokes that fill the frame
        # The least that three halvings of a convolutional embedder survive, at a quarter of the
        # cost of 32 pixels.
        image_size=16,
    )


def read_iris() -> RawData:
    """Return Fisher's 150 irises."""
    from sklearn.datasets import load_iris

    bunch = load_iris()
    columns = [name.removesuffix(" (cm)") for name in bunch.feature_names]
    return RawData(
        kind="table",
        inputs=pd.DataFrame(bunch.data, columns=columns),
        labels=bunch.target.astype(np.int64),
        class_names=tuple(str(name) for name in bunch.target_names),
        source="scikit-learn load_iris",
    )


def read_cifar10() -> RawData:
    """Return CIFAR-10: 50 000 training and 10 000 test images."""
    files = sources.fetch("cifar10")
    # 3073 bytes a row: label, then 32 x 32 red, green, blue
    raw = np.concatenate([np.fromfile(path, np.uint8) for path in files.values()])
    rows = raw.reshape(-1, 3073)
    return _cifar_rows(
        "cifar10",
        rows[:, 1:],
        rows[:, 0],
        class_names=CIFAR10_CLASSES,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.247, 0.243, 0.261),
    )


def read_cifar100() -> RawData:
    """Return CIFAR-100 with its 100 fine labels: 50 000 training and 10 000 test images."""
    (archive,) = sources.fetch("cifar100").values()
    members = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile():
                members[Path(member.name).name] = tar.extractfile(member).read()
    # 3074 bytes a row: coarse label, fine label, then 32 x 32 red, green, blue
    raw = np.frombuffer(members["train.bin"] + members["test.bin"], np.uint8)
    rows = raw.reshape(-1, 3074)
    return _cifar_rows(
        "cifar100",
        rows[:, 2:],
        rows[:, 1],
        class_names=tuple(members["fine_label_names.txt"].decode().split()),
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
    )


def _cifar_rows(name: str, pixels: np.ndarray, labels: np.ndarray, **facts: tuple) -> RawData:
    """Return what CIFAR-10 and CIFAR-100 have in common around their own facts."""
    return RawData(
        kind="image",
        inputs=pixels.reshape(-1, 3, 32, 32),
        labels=labels.astype(np.int64),
        source=_cached(name),
        part=_train_then_test(50_000, 10_000),
        val_share=0.1,
        augmentation=("crop", "flip", "jitter"),
        **facts,
    )


def read_mnist() -> RawData:
    """Return MNIST: 60 000 training and 10 000 test images, one channel of 28 x 28 pixels."""
    files = sources.fetch("mnist")

    def read(file: str, header: int) -> np.ndarray:
        return np.fromfile(files[file], np.uint8, offset=header)

    parts = ("train", "t10k")
    pixels = np.concatenate([read(f"{part}-images-idx3-ubyte", 16) for part in parts])
    labels = np.concatenate([read(f"{part}-labels-idx1-ubyte", 8) for part in parts])
    return RawData(
        kind="image",
        inputs=pixels.reshape(-1, 1, 28, 28),
        labels=labels.astype(np.int64),
        class_names=tuple("0123456789"),
        source=_cached("mnist"),
        part=_train_then_test(60_000, 10_000),
        val_share=1 / 12,  # 5 000 rows, as many as CIFAR-10 holds out
        mean=(0.1307,),
        std=(0.3081,),
        augmentation=("rotate",),
        image_size=32,  # as published: the shape that the CIFAR-10 embedders take
        channels=3,
    )


def read_wine(colour: str) -> RawData:
    """Return Wine Quality with the label "quality is 6 or more"."""
    name = f"wine_{colour}"
    (path,) = sources.fetch(name).values()
    table = pd.read_csv(path, sep=";")
    quality = table.pop("quality")
    return RawData(
        kind="table",
        inputs=table.astype(np.float64),
        labels=(quality >= 6).to_numpy(np.int64),
        class_names=("quality below 6", "quality 6 or more"),
        source=_cached(name),
    )


def read_adult() -> RawData:
    """Return Adult: 32 561 training and 16 281 test persons, income above 50 000 or not."""
    files = sources.fetch("adult")
    tables = [
        pd.read_csv(path, names=ADULT_COLUMNS, skiprows=skip, skipinitialspace=True)
        for path, skip in ((files["adult.data"], 0), (files["adult.test"], 1))
    ]
    table = pd.concat(tables, ignore_index=True).replace("?", MISSING)
    income = table.pop("income").str.removesuffix(".")  # the test file ends labels with a dot
    return RawData(
        kind="table",
        inputs=table,
        labels=(income == ">50K").to_numpy(np.int64),
        class_names=("<=50K", ">50K"),
        source=_cached("adult"),
        part=_train_then_test(32_561, 16_281),
    )


def _train_then_test(n_train: int, n_test: int) -> np.ndarray:
    return np.repeat(np.array([TRAIN, TEST]), [n_train, n_test])


def _cached(name: str) -> str:
    sums = "".join(sources.SOURCES[name].files.values())
    return f"verified files {name} (SHA-256 {sums[:12]}…)"


READERS: dict[str, Callable[[], RawData]] = {
    "digits": read_digits,
    "iris": read_iris,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "mnist": read_mnist,
    "wine_red": lambda: read_wine("red"),
    "wine_white": lambda: read_wine("white"),
    "adult": read_adult,
}
