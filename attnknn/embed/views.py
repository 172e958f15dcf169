"""Test-time views: each test image embedded as it is and as several changed copies of itself.

Axes: V views, N rows, D embedding width.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attnknn.data.change import max_views, tta_views
from attnknn.embed.rows import EmbeddingCache, embed, embedding_key
from attnknn.embed.run import TrainedRun, choose_device

VIEW_SEED = 0
VIEW_PAD_SHARE = 4 / 32  # of the image side: the published 4 pixels of 32


def embed_views(
    run: TrainedRun, *, n_views: int = 5, kind: str = "v5", progress: bool = True
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
    run: TrainedRun, n_views: int, kind: str, progress: bool
) -> Float[np.ndarray, "others N D"]:
    """Embed all views but the first, view after view."""
    splits, device = run.splits, choose_device(run.config.training.device)
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
