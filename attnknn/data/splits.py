"""Data: the name of a data set, or a path, becomes training, validation and test rows.

Scalers, encoders and statistics are fitted on training rows alone. Axes: N rows, F features.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, UInt8

from attnknn.checks import check_count, check_one_of, nearest_name
from attnknn.data.tables import NUMERIC_SCALES, fit_table_encoder

TRAIN, VAL, TEST = 0, 1, 2


class SplitError(ValueError):
    """The rows cannot be divided into training, validation and test rows as asked."""


@dataclass(frozen=True)
class RawData:
    """Everything read from a data set, in file order, nothing fitted yet.

    Attributes:
        kind: "image", "table" or "embedding".
        inputs: uint8 images (N, channels, height, width), a table of N rows, or float32 (N, D).
        labels: Class ids.
        class_names: Name of each class id.
        source: Where the rows came from.
        part: TRAIN, VAL or TEST where the data set fixes it; None where all is to be drawn.
        val_share: Share of the rows left after the test rows that become validation rows.
        test_share: Share of all rows that become test rows, where ``part`` names none.
        mean: Published channel means, or empty to compute them from training rows.
        std: Published channel deviations, or empty.
        augmentation: Training transforms that keep the label of these images.
        image_size: Usual side of the square images in pixels; None leaves them as they are.
        channels: Channels that a grey image is repeated to.
    """

    kind: str
    inputs: np.ndarray | pd.DataFrame
    labels: Int[np.ndarray, "N"]
    class_names: tuple[str, ...]
    source: str
    part: Int[np.ndarray, "N"] | None = None
    val_share: float = 0.2
    test_share: float = 0.2
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augmentation: tuple[str, ...] = ()
    image_size: int | None = None
    channels: int = 1


class UnknownDatasetError(ValueError):
    """The data set is neither a known name nor an existing path."""


@dataclass(frozen=True)
class Split:
    """Rows and their labels.

    Attributes:
        inputs: Images as uint8, or features.
        labels: Class ids.
    """

    inputs: UInt8[np.ndarray, "N channels height width"] | Float[np.ndarray, "N F"]
    labels: Int[np.ndarray, "N"]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(
                f"labels must have one entry a row, got {len(self.labels)} for {len(self.inputs)}"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class InputSpec:
    """What a network must know of its inputs; nothing of the rows themselves.

    Attributes:
        kind: "image", "table" or "embedding".
        shape: Of one input: (channels, height, width) or (features,).
        mean: Channel means of pixels scaled to [0, 1]; empty unless images.
        std: Channel deviations of pixels scaled to [0, 1]; empty unless images.
        n_numeric: Tables: the first columns are standardised numbers, the rest one-hot.
    """

    kind: str
    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    n_numeric: int = 0


@dataclass(frozen=True)
class Splits:
    """A data set, ready for training.

    Attributes:
        name: The data set as it was asked for.
        kind: "image", "table" or "embedding".
        train: Rows to learn from.
        val: Rows to choose by.
        test: Rows to report on.
        class_names: Name of each class id.
        mean: Channel means of pixels scaled to [0, 1]; empty unless images.
        std: Channel deviations of pixels scaled to [0, 1]; empty unless images.
        n_numeric: Tables: the first columns are standardised numbers, the rest one-hot.
        feature_names: Tables: name of each column.
        augmentation: Training transforms that suit these images, out of "crop", "flip",
            "jitter" and "rotate".
        source: Where the rows came from.
    """

    name: str
    kind: str
    train: Split
    val: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    n_numeric: int
    feature_names: tuple[str, ...]
    augmentation: tuple[str, ...]
    source: str

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def spec(self) -> InputSpec:
        """What a network must know of the inputs."""
        shape = self.train.inputs.shape[1:]
        return InputSpec(self.kind, shape, self.mean, self.std, self.n_numeric)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the rows and labels of all splits, in order."""
        digest = hashlib.sha256()
        for split in (self.train, self.val, self.test):
            for array in (split.inputs, split.labels):
                digest.update(f"{array.dtype.str}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def load_splits(
    dataset: str | Path,
    *,
    val_rows: int | None = None,
    seed: int = 42,
    max_train_rows: int | None = None,
    max_test_rows: int | None = None,
    label_column: str = "label",
    image_size: int | None = None,
    numeric: str = "standard",
) -> Splits:
    """Return the training, validation and test rows of a data set.

    Rows with identical inputs never fall on two sides of a split that is drawn here.

    Args:
        dataset: A known name, or the path of an image folder (one sub-folder a class), a CSV or
            Parquet table, or ``.npy`` / ``.npz`` embeddings.
        val_rows: Validation rows to draw; None takes the data set's own share.
        seed: Decides which rows are drawn.
        max_train_rows: Draw a stratified part of the training rows, for quick runs.
        max_test_rows: The same for the test rows.
        label_column: Tables of one's own: the column that holds the label.
        image_size: Images: side in pixels; None keeps the data set's usual size.
        numeric: Tables: "standard" or "quantile" scaling of number columns.

    Raises:
        UnknownDatasetError: Neither a known name nor an existing path.
        DataUnavailableError: A known data set that no route delivers.
        SplitError: Too few rows of some class.
    """
    check_one_of("numeric", numeric, NUMERIC_SCALES)
    name = str(dataset)
    rows = _read(name, label_column=label_column, image_size=image_size)
    parts = _draw_parts(
        rows, seed, val_rows=val_rows, max_train_rows=max_train_rows, max_test_rows=max_test_rows
    )
    images = rows.kind == "image"
    fields = _image_fields(rows, parts) if images else _feature_fields(rows, parts, numeric)
    train, val, test = (
        Split(inputs, rows.labels[ids])
        for inputs, ids in zip(fields.pop("inputs"), parts, strict=True)
    )
    return Splits(
        name=name,
        kind=rows.kind,
        train=train,
        val=val,
        test=test,
        class_names=rows.class_names,
        augmentation=rows.augmentation,
        source=rows.source,
        **fields,
    )


def _read(name: str, *, label_column: str, image_size: int | None) -> RawData:
    from attnknn.data.known import READERS  # both make what stands above
    from attnknn.data.own import read_own

    if image_size is not None:
        check_count("image_size", image_size)
    if name in READERS:
        rows = READERS[name]()
    elif Path(name).exists():
        rows = read_own(Path(name), label_column=label_column, image_size=image_size)
    else:
        raise UnknownDatasetError(
            f"dataset must be one of {', '.join(READERS)}, or an existing path, "
            f"got dataset={name!r}{nearest_name(name, READERS)}"
        )
    if image_size is None:
        return rows
    if rows.kind != "image":
        raise ValueError(f"image_size must be None for a {rows.kind} data set, got {image_size=}")
    return replace(rows, image_size=image_size)


def _draw_parts(
    rows: RawData,
    seed: int,
    *,
    val_rows: int | None,
    max_train_rows: int | None,
    max_test_rows: int | None,
) -> list[Int[np.ndarray, "M"]]:
    """Return the row ids of the training, validation and test part."""
    check_count("seed", seed, low=0)
    n_classes = len(rows.class_names)
    part = np.full(len(rows.labels), TRAIN) if rows.part is None else rows.part.copy()
    draw_test, draw_val = not (part == TEST).any(), not (part == VAL).any()
    if val_rows is not None and not draw_val:
        raise ValueError(f"val_rows must be None: the data set fixes its own, got {val_rows=}")
    _check_class_sizes(rows, part == TRAIN, need=1 + draw_test + draw_val)
    if draw_test:
        # A small data set still shows every class.
        n_test = max(n_classes, round(rows.test_share * len(part)))
        _move(rows, part, TEST, n_test, seed=seed)
    if draw_val:
        if val_rows is not None:
            n_val = check_count("val_rows", val_rows, low=n_classes)
        else:
            n_val = max(n_classes, round(rows.val_share * (part == TRAIN).sum()))
        _move(rows, part, VAL, n_val, seed=seed)
    train, val, test = (np.flatnonzero(part == code) for code in (TRAIN, VAL, TEST))
    train = _thin(rows, train, "max_train_rows", max_train_rows, seed=(seed, 3))
    return [train, val, _thin(rows, test, "max_test_rows", max_test_rows, seed=(seed, 4))]


def _check_class_sizes(rows: RawData, drawable: np.ndarray, *, need: int) -> None:
    counts = np.bincount(rows.labels[drawable], minlength=len(rows.class_names))
    if counts.min() < need:
        name = rows.class_names[counts.argmin()]
        raise SplitError(
            f"every class must have at least {need} rows to be split, "
            f"got {counts.min()} of class {name!r}"
        )


def _move(rows: RawData, part: np.ndarray, code: int, n_rows: int, *, seed: int) -> None:
    """Turn about ``n_rows`` training rows into validation or test rows, in place."""
    ids = np.flatnonzero(part == TRAIN)
    # NOTE: copies of one row stay together; a test row seen in training is a leak.
    inputs = rows.inputs.iloc[ids] if isinstance(rows.inputs, pd.DataFrame) else rows.inputs[ids]
    groups = duplicate_groups(inputs)
    part[ids[draw_rows(rows.labels[ids], n_rows, seed=(seed, code), groups=groups)]] = code


def _thin(
    rows: RawData,
    ids: Int[np.ndarray, "M"],
    name: str,
    limit: int | None,
    *,
    seed: tuple[int, int],
) -> Int[np.ndarray, "L"]:
    """Return a stratified part of ``ids`` of at most ``limit`` rows."""
    if limit is None or check_count(name, limit, low=len(rows.class_names)) >= len(ids):
        return ids
    return ids[draw_rows(rows.labels[ids], limit, seed=seed, leave=0)]


def _image_fields(rows: RawData, parts: list[np.ndarray]) -> dict:
    """Return the inputs of each part and the fields of ``Splits`` that depend on them."""
    inputs = [_shaped(rows.inputs[ids], rows) for ids in parts]
    mean, std = rows.mean, rows.std
    if not mean:
        pixels = inputs[0] / np.float32(255)  # NOTE: training rows alone
        mean = tuple(pixels.mean(axis=(0, 2, 3), dtype=np.float64).tolist())
        std = tuple(max(s, 1e-6) for s in pixels.std(axis=(0, 2, 3), dtype=np.float64).tolist())
    repeats = inputs[0].shape[1] // len(mean)
    return {
        "inputs": inputs,
        "mean": mean * repeats,
        "std": std * repeats,
        "n_numeric": 0,
        "feature_names": (),
    }


def _shaped(images: np.ndarray, rows: RawData) -> np.ndarray:
    if rows.image_size is not None:
        images = resize_images(images, rows.image_size)
    return images.repeat(rows.channels, axis=1) if images.shape[1] == 1 else images


def _feature_fields(rows: RawData, parts: list[np.ndarray], numeric: str) -> dict:
    """Return what ``_image_fields`` does, for tables and embeddings."""
    fields = {"mean": (), "std": (), "n_numeric": 0, "feature_names": ()}
    if rows.kind == "embedding":
        return {**fields, "inputs": [rows.inputs[ids] for ids in parts]}
    tables = [rows.inputs.iloc[ids] for ids in parts]
    encoder = fit_table_encoder(tables[0], numeric=numeric)  # NOTE: training rows alone
    fields |= {"n_numeric": len(encoder.mean), "feature_names": encoder.feature_names}
    return {**fields, "inputs": [encoder.encode(table) for table in tables]}


def resize_images(
    images: UInt8[np.ndarray, "N channels h w"], size: int
) -> UInt8[np.ndarray, "N channels size size"]:
    """Return square images of ``size`` pixels a side, bilinear."""
    if images.shape[2:] == (size, size):
        return images
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(images), (size, size), mode="bilinear", align_corners=False, antialias=True
    )
    return resized.numpy()


# ---- Stratified, duplicate-safe drawing.


def duplicate_groups(inputs: np.ndarray | pd.DataFrame) -> Int[np.ndarray, "N"]:
    """Return a group id for each row; rows with identical inputs share one."""
    if isinstance(inputs, pd.DataFrame):
        keys = pd.util.hash_pandas_object(inputs, index=False).to_numpy()
    else:
        flat = np.ascontiguousarray(inputs.reshape(len(inputs), -1))
        if flat.dtype.kind == "f":  # zero has two signs; rows that differ by it alone are identical
            flat = flat + flat.dtype.type(0)
        keys = np.array([hashlib.blake2b(row, digest_size=8).digest() for row in flat], dtype="S8")
        keys = keys.view(np.uint64)
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def draw_rows(
    labels: Int[np.ndarray, "N"],
    n_rows: int,
    *,
    seed: Sequence[int],
    groups: Int[np.ndarray, "N"] | None = None,
    leave: int = 1,
) -> Int[np.ndarray, "M"]:
    """Draw rows so that classes keep their shares and no group is torn apart.

    Args:
        labels: Class ids of the rows to draw from.
        n_rows: Rows to draw. Slightly fewer come back where whole groups do not fit exactly.
        seed: Entropy of the drawing.
        groups: Rows of one group are drawn together or not at all; None lets each row stand
            alone.
        leave: Rows of each class that must stay behind.

    Returns:
        Drawn row ids, ascending, at least one of every class present.
    """
    groups = np.arange(len(labels)) if groups is None else groups
    rng = np.random.default_rng(list(seed))
    # A group counts for the class of its first row: duplicates may disagree about the label.
    _, first, group_of_row, sizes = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    taken = np.zeros(len(sizes), dtype=bool)
    for label, quota in _quotas(labels[first], sizes, n_rows, leave).items():
        order = rng.permutation(np.flatnonzero(labels[first] == label))
        if leave and len(order) == 1:
            raise SplitError(f"class {label} must hold different rows to be split, got copies")
        taken[_fill(order, sizes, quota)] = True
    return np.flatnonzero(taken[group_of_row]).astype(np.int64)


def _fill(order: Int[np.ndarray, "G"], sizes: Int[np.ndarray, "S"], quota: int) -> list[int]:
    """Return groups, in order, that fill the quota without going over; at least one."""
    chosen, room = [], quota
    for group in order.tolist():
        if sizes[group] <= room:
            chosen.append(group)
            room -= sizes[group]
        if room == 0:
            break
    return chosen or [int(order[sizes[order].argmin()])]


def _quotas(
    group_labels: Int[np.ndarray, "G"], sizes: Int[np.ndarray, "G"], n_rows: int, leave: int
) -> dict[int, int]:
    """Return the rows to draw of each class: proportional, largest remainders rounded up."""
    classes, inverse = np.unique(group_labels, return_inverse=True)
    counts = np.bincount(inverse, weights=sizes).astype(np.int64)
    if counts.min() <= leave:
        label = classes[counts.argmin()]
        raise SplitError(
            f"every class must have {leave + 1} rows to be split, got {counts.min()} of {label}"
        )
    most = counts - leave
    if not len(classes) <= n_rows <= most.sum():
        raise SplitError(
            f"rows drawn must be {len(classes)} to {most.sum()}, at least one of each class and "
            f"{leave} left behind, got {n_rows} of {counts.sum()}"
        )
    exact = n_rows * counts / counts.sum()
    quotas = np.clip(np.floor(exact).astype(np.int64), 1, most)
    while (short := n_rows - quotas.sum()) != 0:
        step = int(np.sign(short))
        open_classes = quotas < most if step > 0 else quotas > 1
        need = np.where(open_classes, step * (exact - quotas), -np.inf)
        quotas[need.argmax()] += step
    return dict(zip(classes.tolist(), quotas.tolist(), strict=True))
