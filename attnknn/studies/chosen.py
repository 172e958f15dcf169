"""Chosen settings: what the held-out queries picked for every tuned baseline, as a table.

An optimum at the edge of what was tried may lie beyond it, so the table says where that is so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from attnknn.baselines import FittedMethod, candidates
from attnknn.calibrate import FLOOR_LIMITS, TEMPERATURE_LIMITS
from attnknn.classify import Method

# Settings of a method that lie on a grid, and where a grid ends by nature.
NATURAL = {"k": (1,), "strength": (0.0, 1.0), "temperature": (), "scale": ()}
SPOKEN = {"temperature": "τ"}
COLUMNS = ("method", "k", "τ", "squared", "scale", "floor", "temperature", "held-out NLL", "edge")


def chosen_rows(tuned: Mapping[str, FittedMethod], *, k_max: int, n_memory: int, **named: Any):
    """Return one row per tuned baseline: its settings, and which of them lie at an edge.

    Args:
        tuned: Name to fitted baseline, as from ``contest.tuned_baselines``.
        k_max: Neighbours that were searched.
        n_memory: Rows of the memory; all of them cannot be exceeded.
        named: Columns to put in front.
    """
    rows = []
    for name, fitted in tuned.items():
        method = fitted.method
        tried = candidates(name.removesuffix(" (tuned)"), k_max)
        neighbours = {} if hasattr(method, "scale") else {"k": method.k}
        row = named | {"method": name, **neighbours}
        row |= {"τ": getattr(method, "temperature", np.nan)}
        row |= {"squared": getattr(method, "squared", None)}
        row |= {"scale": getattr(method, "scale", np.nan)}
        row |= fitted.calibration._asdict() | {"held-out NLL": fitted.nll}
        edges = [*method_edges(method, tried, n_memory=n_memory), *calibration_edges(fitted)]
        rows.append(row | {"edge": "; ".join(edges)})
    return rows


def chosen_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table; k as whole numbers, empty where a method has none."""
    table = pd.DataFrame(rows)
    table["k"] = table["k"].astype("Int64")
    first = [name for name in table.columns if name not in COLUMNS]
    return table[[*first, *COLUMNS]]


def method_edges(method: Method, tried: Sequence[Method], *, n_memory: int) -> list[str]:
    """Return which settings are the smallest or largest that were tried, in words."""
    alike = [each for each in tried if _kind(each) == _kind(method)]
    found = []
    for name in (each.name for each in fields(method) if each.name in NATURAL):
        values = {getattr(each, name) for each in alike}
        value, natural = getattr(method, name), NATURAL[name]
        at_end = value in (min(values), max(values)) and len(values) > 1
        if at_end and value not in natural and not (name == "k" and value >= n_memory):
            which = "largest" if value == max(values) else "smallest"
            found.append(f"{SPOKEN.get(name, name)} = {value:g} is the {which} tried")
    return found


def calibration_edges(fitted: FittedMethod) -> list[str]:
    """Return whether floor or temperature stand at their limits, in words."""
    limits = {"floor": FLOOR_LIMITS, "temperature": TEMPERATURE_LIMITS}
    return [
        f"{name} = {value:.3g} is at its limit"
        for name, value in fitted.calibration._asdict().items()
        if np.isclose(value, limits[name], rtol=1e-3, atol=0).any()
    ]


def edges_sentence(table: pd.DataFrame) -> str:
    """Say which tuned baselines may be better beyond what was tried."""
    at_edge = table[table["edge"] != ""].drop_duplicates(["method", "edge"])
    if at_edge.empty:
        return "Every tuned baseline has its optimum inside of what was tried."
    named = "; ".join(f"{row['method']}: {row['edge']}" for row in at_edge.to_dict("records"))
    return f"At the edge of what was tried: {named}."


def _kind(method: Method) -> tuple[type, bool]:
    """Squared and plain distances have temperatures of their own."""
    return type(method), getattr(method, "squared", False)
