"""Unseen queries: by how much a fit is too sure of itself, in one number.

An attention knows the queries it is fitted on better than new ones, the more so the more parameters
it has and the fewer queries there are. What it says of them is honest; of new ones it says too
much. So every query is once left out and predicted by a fit on the others, and one temperature is
fitted to those predictions.

Axes: B queries, M of them in a fold.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from attnknn.attention import NeighbourAttention, attention_probs
from attnknn.config import FittingConfig
from attnknn.holdout import query_folds
from attnknn.memory import MemoryBank
from attnknn.queries import Queries, judging_sets

# Unseen queries may hold an attention back, never embolden it: a few rows that all happen to be
# right would ask for certainty.
LAST_TEMPERATURES = (1.0, 10.0)


def unseen_temperature(
    fit_part: Callable[[Int[Tensor, " F"]], NeighbourAttention],
    bank: MemoryBank,
    queries: Queries,
    fitting: FittingConfig,
    seed: int,
) -> float:
    """Return the temperature, at least 1, that suits queries which a fit has not seen.

    Args:
        fit_part: Fits an attention on some of the queries.
        bank: The memory that votes.
        queries: All of them.
        fitting: Number of folds; fewer than 2, or than there are queries, leaves the temperature 1.
        seed: Decides the folds.
    """
    if not 2 <= fitting.fit_folds <= len(queries.labels):
        return 1.0
    folds = torch.from_numpy(query_folds(queries.labels.numpy(), fitting.fit_folds, seed=seed))
    judges = judging_sets(bank, queries.neighbours, fitting, seed)
    rows, log_probs = [], []
    for fold in range(fitting.fit_folds):
        left_out = (folds == fold).nonzero().squeeze(1)
        # NOTE: leakage guard. The fit that predicts these queries has not seen them.
        attention = fit_part((folds != fold).nonzero().squeeze(1))
        for held in judges:
            rows.append(left_out)
            log_probs.append(attention_probs(attention, held.of_queries(left_out))[0].log())
    return _best_temperature(torch.cat(log_probs), torch.cat(rows), queries)


def _best_temperature(
    log_probs: Float[Tensor, "R C"], rows: Int[Tensor, " R"], queries: Queries
) -> float:
    """Return the temperature with the smallest loss of the given rows."""

    def loss(log_temperature: float) -> float:
        tempered = (log_probs / np.exp(log_temperature)).log_softmax(dim=1)
        return float(queries.loss(tempered, rows))

    found = minimize_scalar(loss, bounds=np.log(LAST_TEMPERATURES), method="bounded")
    return float(np.exp(found.x)) if found.fun < loss(0.0) else 1.0
