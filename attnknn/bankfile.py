"""Bank files: rows that may be larger than memory, checked, copied and saved block by block.

Axes: D embedding width, N rows.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attnknn.checks import check_finite
from attnknn.files import write_atomic

ROW_BLOCK = 65_536  # rows that are in memory at once
UNIT_TOLERANCE = 1e-3
_TYPES = {torch.float32: "F32", torch.int64: "I64"}
_HEADER_KEY = "memory_bank"


def unit_rows(name: str, rows: np.ndarray, dim: int) -> Float[Tensor, "N D"]:
    """Return float32 rows after checking width, finiteness and unit length.

    A memory-mapped file of float32 rows is not read into memory.
    """
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"{name} must have shape (rows, {dim}), got shape {rows.shape}")
    mapped = isinstance(rows, np.memmap) and rows.dtype == np.float32 and rows.flags.c_contiguous
    if not mapped:  # writable, because torch warns of tensors over memory that is not
        rows = np.require(rows, dtype=np.float32, requirements="CW")
    for start in range(0, len(rows), ROW_BLOCK):
        _check_unit(name, rows[start : start + ROW_BLOCK])
    with warnings.catch_warnings():  # a bank never writes to its rows
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(rows)


def _check_unit(name: str, rows: Float[np.ndarray, "N D"]) -> None:
    lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    if not np.isfinite(lengths).all():
        check_finite(name, rows)
    if np.abs(lengths - 1).max() > UNIT_TOLERANCE:
        worst = float(lengths[np.abs(lengths - 1).argmax()])
        raise ValueError(f"{name} must have unit length, got a row of length {worst:.4g}")


def mapped_copy(
    blocks: Iterable[Float[Tensor, "_ D"]], n_rows: int, dim: int, folder: Path | None
) -> Float[Tensor, "N D"]:
    """Write blocks of rows to a file that lives as long as the tensor, and return them mapped."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="attnknn-rows-", suffix=".npy", dir=folder)
    os.close(handle)
    try:
        mapped = np.lib.format.open_memmap(name, mode="w+", dtype=np.float32, shape=(n_rows, dim))
        place = 0
        for block in blocks:
            mapped[place : place + len(block)] = block.numpy()
            place += len(block)
    finally:
        if os.name == "posix":  # the mapping keeps the content; nothing is left to clean up
            Path(name).unlink()
    return torch.from_numpy(mapped)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Path:
    """Write one safetensors file, atomically, without a second copy of it in memory."""
    header: dict[str, Any] = {"__metadata__": {_HEADER_KEY: json.dumps(settings)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind, shape = _TYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data that begins at a multiple of 8

    def write(handle: IO[bytes]) -> None:
        handle.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for block in tensor.split(ROW_BLOCK):
                handle.write(np.ascontiguousarray(block.numpy()).data)

    return write_atomic(path, write)


def load_arrays(path: Path, *, on_disk: bool) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return arrays and settings of a file that ``save_tensors`` wrote.

    Args:
        path: The file.
        on_disk: Leave the rows in the file, memory-mapped.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as handle:
            settings = json.loads((handle.metadata() or {}).get(_HEADER_KEY, "null"))
            if settings is None:
                raise ValueError(f"path must be a saved memory bank, got path={str(path)!r}")
            names = [name for name in handle.keys() if not (on_disk and name == "rows")]
            arrays = {name: handle.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(
            f"path must be a whole file of a saved memory bank, got path={str(path)!r} ({error})"
        ) from None
    return (arrays | {"rows": _mapped_rows(path)} if on_disk else arrays), settings


def _mapped_rows(path: Path) -> np.memmap:
    with Path(path).open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        entry = json.loads(handle.read(length))["rows"]
    offset = 8 + length + entry["data_offsets"][0]
    return np.memmap(path, dtype=np.float32, mode="r", offset=offset, shape=tuple(entry["shape"]))
