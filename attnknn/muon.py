"""Muon: momentum for convolution filters, with every update made orthogonal.

A layer's averaged gradient G = U S V' is replaced by about U V', so that rare directions move as
far as common ones; the filters keep a fixed norm. After Keller Jordan's optimiser.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# Coefficients of a quintic that drives singular values in (0, 1] towards 1 in a few rounds.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; the rows of each filter bank keep unit mean norm.

    Args:
        params: Tensors of at least two axes; the first is the output axis.
        lr: Step in units of the filters' own norm: scale of the gradient plays no part.
        momentum: Weight of the past updates.
    """

    def __init__(self, params, *, lr: float, momentum: float = 0.6) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """Make one step along the gradients that are present."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group["lr"], group["momentum"])

    def _move(self, weight: Tensor, lr: float, momentum: float) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        average = state["momentum_buffer"].mul_(momentum).add_(weight.grad)
        ahead = weight.grad.add(average, alpha=momentum)
        weight.mul_(len(weight) ** 0.5 / weight.norm())
        weight.sub_(orthogonalised(ahead.flatten(1)).view_as(weight), alpha=lr)


def orthogonalised(matrix: Float[Tensor, "rows columns"], *, rounds: int = 3):
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    current = matrix.T if tall else matrix
    current = current / (current.norm() + 1e-7)  # singular values at most 1
    linear, cubic, quintic = QUINTIC
    for _ in range(rounds):
        gram = current @ current.T
        current = linear * current + (cubic * gram + quintic * gram @ gram) @ current
    return current.T if tall else current
