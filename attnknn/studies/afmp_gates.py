"""Gates of a trained AFMP setting, as tables and pictures."""

from typing import Any

import numpy as np
import pandas as pd
import torch

from attnknn.afmp import LayerGates, grid_scaffold
from attnknn.studies.afmp import Ablation


def gate_values(ablation: Ablation, name: str, *, n_images: int = 64) -> pd.DataFrame:
    """Return every channel's gate of the kept edges of some test images, one row a gate.

    The weights are those of the chosen epoch, which make the predictions.

    Args:
        ablation: The runs.
        name: A setting of the corrected model.
        n_images: Test images to look at.
    """
    layers = _look(ablation, name, n_images)
    return pd.DataFrame(
        {
            "layer": np.concatenate(
                [np.full(each.channels.numel(), i + 1) for i, each in enumerate(layers)]
            ),
            "gate": np.concatenate([each.channels.flatten().numpy() for each in layers]),
        }
    )


def gate_pictures(ablation: Ablation, name: str) -> dict[str, Any]:
    """Return what ``plot.gate_maps`` draws: validation images with the middle layer's gates.

    The gates are those of the first seed's weights at every recorded epoch, as in ``gates()``.
    """
    run = ablation.runs[name][0]
    model, maps = run.setting.model, run.gate_maps
    images = ablation.splits.val.inputs[: len(next(iter(maps.values())))]
    scaffold = grid_scaffold(
        *images.shape[2:], model.patch, kind=model.scaffold, window=model.window
    )
    return {
        "images": images,
        "points": scaffold.points,
        "pairs": np.stack([scaffold.sources, scaffold.targets]),
        "gates": maps,
        "patch": model.patch,
    }


def _look(ablation: Ablation, name: str, n_images: int) -> list[LayerGates]:
    model = ablation.runs[name][0].load_model(ablation.splits)
    pixels = torch.from_numpy(ablation.splits.test.inputs[:n_images]).float() / 255
    return model.network.gates(model.normalised(pixels))
