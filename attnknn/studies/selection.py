"""Selection on the rows that are reported: how much better than they are do chosen settings look?

The held-out rows are split in halves at random, many times. On each half, the setting chosen on
that very half is compared with the setting chosen on the other half. Both are measured on the same
rows, so the difference is what the choice alone adds. (It has the same mean as the difference
between the half that chose and the half that did not, without the noise of unequal halves.)

Axes: B rows, C classes, S settings.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from attnknn.baselines import DISTANCE_TEMPERATURES
from attnknn.checks import check_count
from attnknn.classify import Distance, Uniform, predict
from attnknn.measure import expected_calibration_error, per_sample
from attnknn.neighbours import Neighbours

SELECTION_KS = (1, 3, 5, 10, 20, 50)
CRITERIA = {"accuracy": "correct", "nll": "nll"}


def candidate_probs(found: Neighbours) -> list[Float[np.ndarray, "B C"]]:
    """Return the probabilities of every setting that may be chosen: k and distance temperature."""
    ks = [k for k in SELECTION_KS if k <= found.k]
    methods = [Uniform(k) for k in ks]
    methods += [Distance(k, t) for k in ks if k > 1 for t in DISTANCE_TEMPERATURES]
    return [predict(method, found) for method in methods]


def selection_optimism(
    candidates: Sequence[Float[np.ndarray, "B C"]],
    labels: Int[np.ndarray, " B"],
    *,
    criterion: str = "accuracy",
    n_halves: int = 200,
    seed: int = 0,
) -> pd.DataFrame:
    """Return, per random half, measures of the own choice minus those of the other half's choice.

    Args:
        candidates: Probabilities of each setting for the same rows.
        labels: Labels of the rows.
        criterion: "accuracy" or "nll"; what the choice looks at.
        n_halves: Random splits; each gives two rows.
        seed: Of the splits.

    Returns:
        Columns ``accuracy``, ``nll`` and ``ece``.
    """
    check_count("n_halves", n_halves)
    each = [per_sample(probs, labels) for probs in candidates]
    values = {name: np.stack([table[name] for table in each]) for name in ("correct", "nll")}
    sign = 1.0 if criterion == "accuracy" else -1.0
    judged = sign * values[CRITERIA[criterion]]  # (S, B)
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n_halves):
        half = np.zeros(len(labels), dtype=bool)
        half[rng.permutation(len(labels))[: len(labels) // 2]] = True
        chosen = {is_in: int(judged[:, half == is_in].mean(axis=1).argmax()) for is_in in (0, 1)}
        for is_in in (0, 1):
            own, other = chosen[is_in], chosen[1 - is_in]
            rows.append(_gaps(candidates, values, labels, half == is_in, own, other))
    return pd.DataFrame(rows)


def _gaps(
    candidates: Sequence[Float[np.ndarray, "B C"]],
    values: dict[str, Float[np.ndarray, "S B"]],
    labels: Int[np.ndarray, " B"],
    rows: Bool[np.ndarray, " B"],
    own: int,
    other: int,
) -> dict[str, float]:
    """Return own minus other in every measure, on some of the rows."""
    correct, nll = (values[name][own, rows] - values[name][other, rows] for name in values)
    eces = (
        0.0 if own == other else expected_calibration_error(candidates[place][rows], labels[rows])
        for place in (own, other)
    )
    return {"accuracy": correct.mean(), "nll": nll.mean(), "ece": next(eces) - next(eces)}
