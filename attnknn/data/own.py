"""Own data: an image folder, a CSV or Parquet table, or saved embeddings become ``RawData``.

Axes: N rows, D embedding width.
"""

import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Int
from PIL import ExifTags, Image, ImageOps

from attnknn.checks import check_finite, nearest_name
from attnknn.data.splits import TEST, TRAIN, VAL, RawData
from attnknn.data.tables import check_table
from attnknn.progress import progress_bar

PARTS = {"train": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "test": TEST}
LARGEST_SIDE = 224  # of images that differ in size, unless the caller says otherwise
MAX_BYTES = 8 * 2**30
ORIENTATION = ExifTags.Base.Orientation


class UnsupportedFileError(ValueError):
    """The path is of a type that cannot be read as a data set."""


class LabelError(ValueError):
    """Labels are missing, empty or all the same."""


class UnreadableFileError(ValueError):
    """A file is there but cannot be read as what its name says."""


def read_own(
    path: Path,
    *,
    label_column: str = "label",
    image_size: int | None = None,
    allow_missing: bool = False,
) -> RawData:
    """Return the rows of the user's own data.

    Args:
        path: A folder with one sub-folder of images a class (or ``train`` and ``test`` folders
            of such sub-folders), ``.csv``, ``.tsv``, ``.parquet``, ``.npz`` with ``embeddings``
            and ``labels`` (or ``X`` and ``y``), or ``.npy`` with ``<name>_labels.npy`` beside it.
        label_column: The label of a table.
        image_size: Side in pixels of the square images; None keeps a size that all share.
        allow_missing: Let missing numbers of a table pass; whoever asks puts others in.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path, image_size)
    suffix = path.suffix.lower()
    if suffix in TABLE_READERS:
        return _read_table(path, label_column, allow_missing=allow_missing)
    if suffix in (".npy", ".npz"):
        return _read_embeddings(path)
    known = ", ".join([*TABLE_READERS, ".npy", ".npz"])
    raise UnsupportedFileError(f"path must be a folder or end in {known}, got path={str(path)!r}")


def encode_labels(values: np.ndarray) -> tuple[Int[np.ndarray, "N"], tuple[str, ...]]:
    """Return class ids in the sorted order of the label values, and the classes' names."""
    values = pd.Series(values)
    if values.isna().any():
        raise LabelError(f"labels must not be missing, got {values.isna().sum()} missing labels")
    if pd.api.types.is_float_dtype(values) and not (values % 1 == 0).all():
        raise LabelError(f"labels must be names or whole numbers, got {values.iloc[0]}")
    if pd.api.types.is_float_dtype(values):
        values = values.astype(np.int64)  # 1.0 is class "1"
    elif values.dtype == object:
        values = values.map(str)  # a mixture of numbers and names has no order of its own
    names, ids = np.unique(values.to_numpy(), return_inverse=True)
    if len(names) < 2:
        raise LabelError(f"labels must hold at least 2 classes, got {[str(n) for n in names]}")
    return ids.reshape(-1).astype(np.int64), tuple(str(name) for name in names)


def _read_table(path: Path, label_column: str, *, allow_missing: bool) -> RawData:
    try:
        table = TABLE_READERS[path.suffix.lower()](path)
    except (OSError, ValueError) as error:  # pandas' and pyarrow's errors derive from these
        raise UnreadableFileError(f"{path} must be a readable table, got: {error}") from error
    if label_column not in table:
        columns = [str(column) for column in table.columns]
        raise LabelError(
            f"label_column must be one of the columns {', '.join(columns)}, "
            f"got {label_column=}{nearest_name(label_column, columns)}"
        )
    labels, class_names = encode_labels(table.pop(label_column).to_numpy())
    table.columns = [str(column) for column in table.columns]
    checked = check_table(table, allow_missing=allow_missing)
    return RawData("table", checked, labels, class_names, source=str(path))


def _read_delimited(path: Path) -> pd.DataFrame:
    with path.open(encoding="utf-8") as handle:
        header = handle.readline()
    return pd.read_csv(path, sep=max(",;\t", key=header.count))


TABLE_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".parquet": pd.read_parquet,
}


def _read_embeddings(path: Path) -> RawData:
    embeddings, values = _load_arrays(path)
    if embeddings.ndim != 2 or embeddings.dtype.kind not in "fiu":
        raise ValueError(
            "embeddings must be numbers of shape (N, D), "
            f"got {embeddings.dtype} of shape {embeddings.shape}"
        )
    if values.shape != (len(embeddings),):
        raise LabelError(f"labels must have shape ({len(embeddings)},), got {values.shape}")
    labels, class_names = encode_labels(values)
    # Checked after narrowing: a float64 of 1e300 becomes infinite here.
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(embeddings, dtype=np.float32)
    return RawData("embedding", check_finite("embeddings", narrow), labels, class_names, str(path))


def _load_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    beside = path.with_name(f"{path.stem}_labels.npy")
    single = path.suffix.lower() == ".npy"
    if single and not beside.is_file():
        raise LabelError(f"labels must lie beside the embeddings, got no file {beside}")
    try:
        with path.open("rb") as handle:  # ours to close: numpy leaves a damaged archive open
            # Pickled objects can run code, so they are refused.
            loaded = np.load(handle, allow_pickle=False)
            if single:
                return loaded, np.load(beside, allow_pickle=False)
            for inputs, labels in (("embeddings", "labels"), ("X", "y")):
                if inputs in loaded and labels in loaded:
                    return loaded[inputs], loaded[labels]
            held = ", ".join(loaded)
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise UnreadableFileError(f"{path} must hold plain arrays, got: {error}") from error
    raise LabelError(f"{path} must hold 'embeddings' and 'labels' (or 'X' and 'y'), got {held}")


def _read_folder(root: Path, image_size: int | None) -> RawData:
    folders = _sub_folders(root)
    names = {folder.name.lower() for folder in folders}
    if names <= set(PARTS) and "train" in names:
        parts = [(PARTS[folder.name.lower()], _sub_folders(folder)) for folder in folders]
        fixed = True
    else:
        parts, fixed = [(TRAIN, folders)], False
    found = [
        (file, folder.name, code)
        for code, class_folders in parts
        for folder in class_folders
        for file in _image_files(folder)
    ]
    if not found:
        raise LabelError(f"{root} must hold one sub-folder of images a class, got none")
    files, classes, codes = zip(*found, strict=True)
    labels, class_names = encode_labels(np.array(classes))
    return RawData(
        kind="image",
        inputs=_read_images(files, image_size),
        labels=labels,
        class_names=class_names,
        source=str(root),
        part=np.array(codes, dtype=np.int64) if fixed else None,
        augmentation=("crop", "flip"),
    )


def _sub_folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    known = Image.registered_extensions()
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    images = [path for path in files if path.suffix.lower() in known]
    if not images:
        raise LabelError(f"class folder {folder} must hold images, got {len(files)} other files")
    return images


def _read_images(files: tuple[Path, ...], image_size: int | None) -> np.ndarray:
    width, height = _common_size(files, image_size)
    shape = (len(files), 3, height, width)
    if np.prod(shape) > MAX_BYTES:
        raise ValueError(
            f"images must fit into {MAX_BYTES >> 30} GB, got {len(files)} of {width} x {height}; "
            "choose a smaller image_size"
        )
    images = np.empty(shape, dtype=np.uint8)
    for row, file in enumerate(progress_bar(files, "reading images", delay=2)):
        with _naming(file), Image.open(file) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
            # Scaled, then cut around the centre: proportions stay as they are.
            fitted = ImageOps.fit(upright, (width, height))
        images[row] = np.asarray(fitted).transpose(2, 0, 1)
    return images


def _common_size(files: tuple[Path, ...], image_size: int | None) -> tuple[int, int]:
    if image_size is not None:
        return image_size, image_size
    bar = progress_bar(files, "measuring images", delay=2)
    sizes = [_upright_size(file) for file in bar]
    if len(set(sizes)) == 1:
        return sizes[0]
    side = min(int(np.median([min(size) for size in sizes])), LARGEST_SIDE)
    warnings.warn(
        f"{len(files)} images of {len(set(sizes))} sizes are resized to {side} x {side} pixels; "
        "set image_size to choose another",
        stacklevel=2,
    )
    return side, side


def _upright_size(file: Path) -> tuple[int, int]:
    with _naming(file), Image.open(file) as image:
        turned = image.getexif().get(ORIENTATION, 1) >= 5  # lies on its side
        return image.size[::-1] if turned else image.size


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn whatever the image library raises into one error that names the file."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableFileError(f"{file} must be a readable image, got: {error}") from error
