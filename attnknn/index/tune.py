"""Tuning: the cheapest settings of an index that keep the asked recall, found by measuring.

Recall is the share of the k true nearest rows that a search returns, over held-out queries.

Axes: B queries, K neighbours of each.
"""

import math
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from attnknn.checks import check_range
from attnknn.index.base import Index

if TYPE_CHECKING:
    import pandas as pd

ROUNDS = 2  # each setting is timed twice; the shorter time counts
Z_95 = 1.645  # one-sided: in 95 of 100 samples the true recall is above the lower bound
NO_GAIN = 1e-4  # a deeper search that finds less than this more has come to its limit


def recall_of(
    ids: Int[np.ndarray, "B M"], true_ids: Int[np.ndarray, "B K"]
) -> Float[np.ndarray, " B"]:
    """Return the share of each query's true neighbours that was found."""
    pairs = zip(ids, true_ids, strict=True)
    return np.array([np.isin(true, found).mean() for found, true in pairs], dtype=np.float64)


def tune_index(
    index: Index,
    search: Callable[[], Int[np.ndarray, "B K"]],
    true_ids: Int[np.ndarray, "B K"],
    *,
    recall: float,
) -> "pd.DataFrame":
    """Leave ``index`` at its fastest settings that keep the recall; return all that was measured.

    Args:
        index: What is tuned.
        search: Searches all queries at the settings in force and returns the ids found.
        true_ids: What an exact search finds.
        recall: The lower 95 % bound of the mean recall must reach this.

    Returns:
        One row a setting tried: the settings, ``recall``, ``recall_low`` (the lower bound),
        ``queries_per_second``, ``reached`` and ``chosen``. When no setting reaches the recall, the
        one that came closest is chosen, and ``reached`` says so.
    """
    import pandas as pd

    check_range("recall", recall, low=0, high=1, low_open=True)
    table = pd.DataFrame(_measure_ladders(index, search, true_ids, recall))
    good = table[table["reached"]]
    best = good["queries_per_second"].idxmax() if len(good) else table["recall_low"].idxmax()
    index.tune({name: int(table.loc[best, name]) for name in index.knobs})
    return table.assign(chosen=table.index == best)


def _measure_ladders(
    index: Index,
    search: Callable[[], Int[np.ndarray, "B K"]],
    true_ids: Int[np.ndarray, "B K"],
    recall: float,
) -> list[dict[str, Any]]:
    """Climb the first knob for every value of the others, until the recall is there."""
    first, *others = index.knobs or {"": ()}
    rows: list[dict[str, Any]] = []
    for fixed in product(*(index.knobs[name] for name in others)):
        before = -1.0
        for value in index.knobs.get(first, (0,)):
            settings = dict(zip([first, *others], [value, *fixed], strict=True))
            index.tune(settings if first else {})
            rows.append(_measured(settings if first else {}, search, true_ids, recall))
            now = rows[-1]["recall"]  # 0 where the search is too shallow for k rows: go on
            if rows[-1]["reached"] or 0 < now < before + NO_GAIN:
                break
            before = now
    return rows


def _measured(
    settings: dict[str, int],
    search: Callable[[], Int[np.ndarray, "B K"]],
    true_ids: Int[np.ndarray, "B K"],
    recall: float,
) -> dict[str, Any]:
    """Return recall and speed of one setting."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        ids = search()
        seconds.append(time.perf_counter() - start)
    each = recall_of(ids, true_ids)
    error = each.std() / math.sqrt(len(each))
    low = float(each.mean() - Z_95 * error)
    return {
        **settings,
        "recall": float(each.mean()),
        "recall_low": low,
        "queries_per_second": len(each) / min(seconds),
        "reached": low >= recall,
    }
