"""Rows before the split, and the drawing of stratified, duplicate-safe parts from them.

Axes: N rows, C classes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Int

TRAIN, VAL, TEST = 0, 1, 2


class SplitError(ValueError):
    """The rows cannot be divided into training, validation and test rows as asked."""


@dataclass(frozen=True)
class Rows:
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
