"""What an attention is fitted on: queries, their labels, and draws of wrong memory labels.

Axes: B queries, C classes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.config import FittingConfig
from attnknn.memory import MemoryBank
from attnknn.neighbours import LabelView, Neighbours
from attnknn.noisy import corrected_nll, noisy_views, view_pool
from attnknn.transition import LabelError, is_identity, transition_matrix

NOISE_CHECKS = (0.0, 0.5, 1.0)  # shares of the largest noise rate at which a transfer fit is judged


@dataclass(frozen=True)
class Queries:
    """Queries with their labels and how much each counts.

    Attributes:
        neighbours: What the queries found.
        labels: Their labels.
        label_error: How classes turn into labels; 0 where the labels are right.
        weights: How much each query counts; None counts all alike.
        views: Draws of wrong memory labels, of which every batch meets one; none leaves them be.
    """

    neighbours: Neighbours
    labels: Int[Tensor, " B"]
    label_error: float | Float[Tensor, "C C"]
    weights: Float[Tensor, " B"] | None
    views: list[LabelView]

    def batch(self, rows: Int[Tensor, " R"], generator: torch.Generator) -> Neighbours:
        """Return the neighbours of some queries, under one of the draws where there are any."""
        batch = self.neighbours.of_queries(rows)
        if not self.views:
            return batch
        place = torch.randint(len(self.views), (), generator=generator)
        return batch.with_view(self.views[int(place)])

    def loss(
        self, log_probs: Float[Tensor, "R C"], rows: Int[Tensor, " R"], *, reduce: bool = True
    ) -> Tensor:
        """Return the loss of the given rows, as a mean or one by one."""
        weights = None if self.weights is None else self.weights[rows]
        return corrected_nll(log_probs, self.labels[rows], self.label_error, weights, reduce=reduce)


def make_queries(
    bank: MemoryBank,
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    label_error: LabelError,
    weights: Float[np.ndarray, " B"] | None,
    fitting: FittingConfig,
    seed: int,
) -> Queries:
    """Return the queries as tensors, with the draws that trial and final fit share."""
    matrix = transition_matrix(label_error, bank.n_classes)
    generator = torch.Generator().manual_seed(seed + 2)
    return Queries(
        neighbours,
        torch.from_numpy(labels),
        0.0 if is_identity(matrix) else torch.from_numpy(matrix).float(),
        None if weights is None else torch.tensor(weights).float(),
        view_pool(bank, fitting.fit_noise_max, generator) if fitting.fit_noise_max else [],
    )


def judging_sets(
    bank: MemoryBank, held: Neighbours, fitting: FittingConfig, seed: int
) -> list[Neighbours]:
    """Return the neighbourhoods that judge an epoch: as they are, or at fixed noise draws."""
    if fitting.fit_noise_max == 0:
        return [held]
    # Draws of their own: the fit has not seen them.
    generator = torch.Generator().manual_seed(seed)
    rates = fitting.fit_noise_max * torch.tensor(NOISE_CHECKS)
    return [held.with_view(view) for view in noisy_views(bank, rates, generator)]
