"""Checkpoints: the full state of a training in one file that cannot run code when it is read."""

import pickle
from pathlib import Path
from typing import Any

import torch

from attnknn.files import write_atomic


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> Path:
    """Write tensors, numbers, text and containers of them, atomically."""
    return write_atomic(path, lambda handle: torch.save(state, handle))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return what ``save_checkpoint`` wrote; anything but plain data is refused."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} must be a checkpoint of this program; delete it to train from the start "
            f"({error})"
        ) from error
