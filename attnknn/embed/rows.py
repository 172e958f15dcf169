"""Embedding: inputs become unit rows, once; a cache keeps them by content.

Test-time views embed each image as it is and as several changed copies of itself.

Axes: N inputs, D embedding width, C classes, V views.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from attnknn.checks import check_count, check_finite
from attnknn.data.change import max_views, tta_views
from attnknn.embed.networks import Embedder, Inputs
from attnknn.files import write_atomic
from attnknn.progress import progress_bar

View = Callable[[Tensor], Tensor]


def embed(
    embedder: Embedder,
    inputs: Inputs,
    *,
    batch_size: int = 500,
    device: str | torch.device = "cpu",
    progress: bool = True,
    view: View | None = None,
) -> Float[np.ndarray, "N D"]:
    """Return the unit rows of ``inputs``, in order.

    The embedder is in evaluation mode meanwhile and is moved to ``device``.

    Args:
        embedder: Turns a batch into unit rows.
        inputs: Images as uint8, or features.
        batch_size: Inputs embedded at a time; it does not change the result.
        device: Where to compute.
        progress: Show a progress bar.
        view: Changes each batch first, such as a mirror image for test-time augmentation.
    """
    batches = _batches(inputs, batch_size=batch_size, device=device, progress=progress, view=view)
    with _evaluating(embedder, device):
        rows = [embedder(batch).float().cpu() for batch in batches]
    return torch.cat(rows).numpy()


def embed_with_logits(
    embedder: Embedder,
    head: nn.Module,
    inputs: Inputs,
    *,
    batch_size: int = 500,
    device: str | torch.device = "cpu",
    progress: bool = True,
    view: View | None = None,
) -> tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "N C"]]:
    """Return the unit rows of ``inputs`` and the logits of ``head``, from one pass.

    Args: As for `embed`; ``head`` reads the features before they are brought to unit length.
    """
    batches = _batches(inputs, batch_size=batch_size, device=device, progress=progress, view=view)
    rows, logits = [], []
    with _evaluating(embedder, device), _evaluating(head, device):
        for batch in batches:
            features = embedder.features(batch)
            rows.append(F.normalize(features, dim=1).float().cpu())
            logits.append(head(features).float().cpu())
    return torch.cat(rows).numpy(), torch.cat(logits).numpy()


def to_batch(inputs: Inputs, device: str | torch.device = "cpu") -> Tensor:
    """Return inputs as an embedder takes them: images as floats in [0, 1], channels last."""
    batch = torch.from_numpy(np.ascontiguousarray(inputs)).to(device)
    if batch.ndim == 2:
        return batch.float()
    return (batch.float() / 255).contiguous(memory_format=torch.channels_last)


def _batches(
    inputs: Inputs,
    *,
    batch_size: int,
    device: str | torch.device,
    progress: bool,
    view: View | None,
):
    check_count("batch_size", batch_size)
    if not len(inputs):
        raise ValueError("inputs must have at least one row, got none")
    if inputs.ndim == 2:
        check_finite("inputs", inputs)
    starts = range(0, len(inputs), batch_size)
    for start in progress_bar(starts, "embedding", disable=not progress):
        batch = to_batch(inputs[start : start + batch_size], device)
        yield batch if view is None else view(batch)


@contextmanager
def _evaluating(module: nn.Module, device: str | torch.device) -> Iterator[None]:
    """Hold a module in evaluation mode, without gradients; the mode of every part comes back."""
    module.to(device)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def embedding_key(embedder: nn.Module, inputs: Inputs, *, view: str = "original") -> str:
    """Return a name for one embedding: SHA-256 over the weights, the inputs and the view.

    Args:
        embedder: Its whole state counts, BatchNorm statistics included.
        inputs: What is embedded.
        view: Says which change was made to the inputs, with its seed if it has one.
    """
    digest = hashlib.sha256(view.encode())
    for name, value in embedder.state_dict().items():
        _add(digest, name, value.detach().cpu().contiguous().numpy())
    _add(digest, "inputs", inputs)
    return digest.hexdigest()


def _add(digest, name: str, array: np.ndarray) -> None:
    digest.update(f"|{name}|{array.dtype.str}|{array.shape}|".encode())
    digest.update(np.ascontiguousarray(array).data)


class EmbeddingCache:
    """A folder of arrays, one file a key; a file that is not whole counts as absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def get(self, key: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the arrays stored under ``key``; compute and store them when there are none."""
        path = self.folder / f"{key}.safetensors"
        arrays = _load_verified(path)
        if arrays is None:
            arrays = {name: np.ascontiguousarray(array) for name, array in compute().items()}
            content = save(arrays, metadata={"sha256": _checksum(arrays)})
            write_atomic(path, lambda handle: handle.write(content))
        return arrays


def _load_verified(path: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file, or None where it is absent, cut or changed."""
    try:
        with safe_open(path, framework="numpy") as handle:
            arrays = {name: handle.get_tensor(name) for name in handle.keys()}
            expected = (handle.metadata() or {}).get("sha256")
    except (FileNotFoundError, SafetensorError):
        return None
    return arrays if _checksum(arrays) == expected else None


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        _add(digest, name, arrays[name])
    return digest.hexdigest()


# ---- Test-time views.

VIEW_SEED = 0
VIEW_PAD_SHARE = 4 / 32  # of the image side: the published 4 pixels of 32


def embed_views(
    run: "attnknn.embed.run.TrainedRun",
    *,
    n_views: int = 5,
    kind: str = "v5",
    progress: bool = True,
) -> Float[np.ndarray, "V N D"]:
    """Return the embeddings of every view of the test images; the first is the image itself.

    The views are drawn once from a fixed seed and kept in the run's folder.

    Args:
        run: A run on images.
        n_views: Number of views, the original included; at most what the kind has to offer.
        kind: "v5", "narrative" or "shifts"; see ``augment.tta_views``.
        progress: Show a progress bar.
    """
    most = max_views(kind, flip="flip" in run.splits.augmentation)
    n_views = n_views if most is None else min(n_views, most)
    name = f"tta {kind} {n_views} seed {VIEW_SEED}"
    inputs = run.splits.test.inputs
    key = embedding_key(run.embedder, inputs, view=name)
    stored = EmbeddingCache(run.folder / "views").get(
        key, lambda: {"rows": _embed_others(run, n_views, kind, progress)}
    )["rows"]
    # The original view is embedded already; only the others are computed.
    return np.concatenate([run.rows("test")[None], stored])


def _embed_others(
    run: "attnknn.embed.run.TrainedRun", n_views: int, kind: str, progress: bool
) -> Float[np.ndarray, "others N D"]:
    """Embed all views but the first, view after view."""
    splits, device = run.splits, run.device
    settings = {
        "kind": kind,
        "n_views": n_views,
        # A mirrored digit is another sign: views respect what the data set may undergo.
        "flip": "flip" in splits.augmentation,
        "pad": max(1, round(VIEW_PAD_SHARE * splits.test.inputs.shape[-1])),
    }
    rows = []
    for place in range(1, n_views):
        # The same seed each time: every pass draws the same views and embeds another one.
        generator = torch.Generator().manual_seed(VIEW_SEED)
        view = partial(_one_view, place, generator, settings)
        rows.append(
            embed(run.embedder, splits.test.inputs, device=device, progress=progress, view=view)
        )
    return np.stack(rows)


def _one_view(
    place: int, generator: torch.Generator, settings: dict[str, Any], images: Tensor
) -> Tensor:
    return tta_views(images.cpu(), generator, **settings)[place].to(images.device)
