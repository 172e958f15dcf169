"""Intervals over test rows beside every measure: what a single training can say of its own.

A tidy table carries them as ``low`` and ``high``, so that they go with their row through every
choice, sorting and file; ``compare.interval_table`` uses them where a group has one run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from attnknn.compare import row_intervals

SeedTables = Mapping[str, Sequence[Float[np.ndarray, "_ C"]]]
_LIMITS = ("low", "high")


def with_limits(table: pd.DataFrame, limits: pd.DataFrame | None) -> pd.DataFrame:
    """Return the table with the columns ``low`` and ``high``, empty where no limits are known.

    Limits that the table has already stay where no others are given.

    Args:
        table: One row per run, method and measure.
        limits: From ``compare.row_intervals`` or ``level_limits``, one row per choice of the
            columns that both tables name; None without any.
    """
    table = table.reindex(columns=list(dict.fromkeys([*table, *_LIMITS])))
    if limits is None or limits.empty:
        return table
    by = [name for name in limits if name in table and name not in _LIMITS]
    known = limits.set_index(by)[[*_LIMITS]]
    found = known.reindex(pd.MultiIndex.from_frame(table[by])).set_index(table.index)
    return table.fillna(found)


def level_limits(
    probs: Mapping[Any, SeedTables], labels: Int[np.ndarray, " B"], *, metrics: Sequence[str]
) -> pd.DataFrame:
    """Return intervals over test rows at every level of a study, of methods with a single run.

    Args:
        probs: Level (a NamedTuple, whose fields become columns) to method name to one table of
            probabilities a seed.
        labels: True classes of the rows.
        metrics: Out of ``resample.RESAMPLED_METRICS``.
    """
    parts = []
    for level, methods in probs.items():  # one by one: all at once would fill the memory
        alone = {name: tables for name, tables in methods.items() if len(tables) == 1}
        if alone:
            found = row_intervals(alone, labels, metrics=metrics)
            parts.append(found.drop(columns="mean").assign(**level._asdict()))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def group_limits(
    probs: Mapping[Any, SeedTables],
    labels: Int[np.ndarray, " B"],
    groups: Mapping[str, Int[np.ndarray, " _"]],
    *,
    metrics: Sequence[str],
) -> pd.DataFrame:
    """Return ``level_limits`` of all classes, and of the accuracy in every group of classes.

    A group's interval draws from the test rows of its own classes alone; the column ``classes``
    holds "all" or the group.
    """
    parts = [level_limits(probs, labels, metrics=metrics).assign(classes="all")]
    for name, classes in groups.items():
        own = np.isin(labels, classes)
        if own.any():
            inside = {
                level: {method: [each[own] for each in tables] for method, tables in at.items()}
                for level, at in probs.items()
            }
            found = level_limits(inside, labels[own], metrics=("accuracy",))
            parts.append(found.assign(classes=name))
    return pd.concat(parts, ignore_index=True)
