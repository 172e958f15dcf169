"""A trained classifier and images become logits, features, measures and facts about gates.

Axes: N images, C classes, D width.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from attnknn.afmp.published import PublishedAFMP
from attnknn.afmptrain.networks import Classifier
from attnknn.data import Split
from attnknn.embed import to_batch

LOOKED_AT = 256  # validation images whose gates are looked at
DRAWN = 4  # validation images whose gates are kept, edge by edge
EVALUATION_BATCH = 500  # of models whose results do not depend on it


@torch.no_grad()
def predict_logits(
    model: nn.Module, inputs: UInt8[np.ndarray, "N c h w"], *, batch_size: int | None = None
) -> Float[np.ndarray, "N C"]:
    """Return the logits of images, in evaluation mode.

    Args:
        model: A classifier.
        inputs: The images.
        batch_size: Images at once; None takes the model's own.
    """
    return _forward(model, model, inputs, batch_size or evaluation_batch(model))


def evaluation_batch(model: nn.Module) -> int:
    """Return how many images a model is evaluated on at once.

    NOTE: in the published model only the first image of a batch exchanges messages, so its
    accuracy depends on the batch: it keeps the source notebook's.
    """
    network = getattr(model, "network", model)
    return network.batch_size if isinstance(network, PublishedAFMP) else EVALUATION_BATCH


@torch.no_grad()
def embed_features(
    model: Classifier, inputs: UInt8[np.ndarray, "N c h w"], *, batch_size: int = EVALUATION_BATCH
) -> Float[np.ndarray, "N D"]:
    """Return the unit-length features of images."""
    rows = _forward(model, model.features, inputs, batch_size)
    return F.normalize(torch.from_numpy(rows), dim=1).numpy()


def _forward(
    model: nn.Module, call: Callable[[Tensor], Tensor], inputs: np.ndarray, batch_size: int
) -> np.ndarray:
    model.eval()
    device = next(model.parameters()).device
    starts = range(0, len(inputs), batch_size)
    parts = [call(to_batch(inputs[start : start + batch_size], device)).cpu() for start in starts]
    return torch.cat(parts).numpy()


def judge(model: nn.Module, split: Split, name: str) -> dict[str, float]:
    """Return accuracy and NLL of a split."""
    return measures(predict_logits(model, split.inputs), split.labels, name)


def measures(
    logits: Float[np.ndarray, "N C"], labels: Int[np.ndarray, " N"], name: str
) -> dict[str, float]:
    """Return accuracy and NLL of logits, called by the name of their split."""
    rows, truth = torch.from_numpy(logits), torch.from_numpy(labels)
    hits = (rows.argmax(dim=1) == truth).float().mean()
    nll = F.cross_entropy(rows, truth)
    return {f"{name}_accuracy": float(hits), f"{name}_nll": float(nll)}


def gate_facts(model: Classifier, split: Split) -> list[dict[str, float]]:
    """Return what the gates of each layer do on some images of a split.

    ``kept`` is the share of edges that carry a message, ``closed`` the share of all gates (edges
    and channels) below one half, pruned ones included, and ``mean`` the mean gate of kept edges;
    NaN where none is.
    """
    device = next(model.parameters()).device
    pixels = model.normalised(to_batch(split.inputs[:LOOKED_AT], device))
    if isinstance(model.network, PublishedAFMP):  # one list of edges for the whole batch
        opened = model.network.opened(pixels)
        facts = [(1.0, (gates < 0.5).float().mean(), gates.mean()) for gates in opened]
    else:
        facts = []
        for layer in model.network.gates(pixels):
            kept = layer.kept.float().mean()
            n_open = (layer.channels >= 0.5).sum()
            n_gates = layer.kept.numel() * layer.channels.shape[2]
            facts.append((kept, 1 - n_open / n_gates, layer.channels.mean()))
    return [
        {"kept": float(kept), "closed": float(closed), "mean": float(mean)}
        for kept, closed, mean in facts
    ]


def middle_gates(model: Classifier, split: Split) -> Float[Tensor, "n_images E"]:
    """Return the middle layer's mean gate of every edge of a split's first images, 0 if pruned."""
    device = next(model.parameters()).device
    model.eval()
    layers = model.network.gates(model.normalised(to_batch(split.inputs[:DRAWN], device)))
    return layers[len(layers) // 2].gates.cpu()
