"""Gates of a trained AFMP setting, as tables and pictures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from attnknn.afmp import grid_scaffold
from attnknn.embed import to_batch
from attnknn.studies.afmp import Ablation

LOW, HIGH = 0.02, 0.98  # a gate beyond these is saturated: hardly any gradient passes it


def gate_values(ablation: Ablation, name: str, *, n_images: int = 64) -> pd.DataFrame:
    """Return every channel's gate of the kept edges of some validation images, one row a gate.

    Of all seeds; the weights are those of the chosen epoch, which make the predictions.

    Args:
        ablation: The runs.
        name: A setting of the corrected model.
        n_images: Validation images to look at.
    """
    pixels = to_batch(ablation.splits.val.inputs[:n_images])
    tables = []
    for run in ablation.runs[name]:
        model = run.load_model(ablation.splits)
        for place, layer in enumerate(model.network.gates(model.normalised(pixels)), start=1):
            gates = layer.channels.flatten().numpy()
            tables.append(pd.DataFrame({"seed": run.seed, "layer": place, "gate": gates}))
    return pd.concat(tables, ignore_index=True)


def saturation_table(ablation: Ablation, names: Sequence[str]) -> pd.DataFrame:
    """Return, by setting and layer, which shares of the kept edges' gates are saturated.

    Args:
        ablation: The runs.
        names: Settings of the corrected model.

    Returns:
        One row per setting and layer: ``setting``, ``layer``, ``nearly closed``, ``nearly open``
        and their sum ``saturated``, as shares of all channels of all kept edges.
    """
    rows = []
    for name in names:
        for layer, gates in gate_values(ablation, name).groupby("layer")["gate"]:
            shut, wide = float((gates < LOW).mean()), float((gates > HIGH).mean())
            shares = {"nearly closed": shut, "nearly open": wide, "saturated": shut + wide}
            rows.append({"setting": name, "layer": layer} | shares)
    return pd.DataFrame(rows)


def saturation_words(table: pd.DataFrame) -> str:
    """Say how many gates of a table's first setting are saturated, layer by layer."""
    name = table["setting"].iloc[0]
    rows = table[table["setting"] == name]
    shown = ", ".join(f"{100 * share:.0f} %" for share in rows["saturated"])
    n_layers = int((rows["saturated"] > 0.5).sum())
    return (
        f"**Gates.** More than half of the gates of “{name}” are saturated (below {LOW:g} or above "
        f"{HIGH:g}) in {n_layers} of {len(rows)} layers; from the first to the last: {shown}."
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
