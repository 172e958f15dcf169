"""Linear maps of float32 rows on a CPU by oneDNN: the products of ``F.linear``, often faster.

torch multiplies matrices with MKL, which keeps to narrow vectors on CPUs of other makers. oneDNN,
which torch brings along for convolutions, uses all of them. Its product is a private operation of
torch: where a version of torch lacks it, ``F.linear`` does the work.

Axes: N rows, D width in, F width out.
"""

from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def linear(
    rows: Float[Tensor, "*rows D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None = None,
) -> Float[Tensor, "*rows F"]:
    """Return rows times weight transposed, plus bias: ``F.linear`` within float tolerance."""
    if not _has_kernel(rows, weight):
        return F.linear(rows, weight, bias)
    flat = _Linear.apply(rows.reshape(-1, rows.shape[-1]), weight, bias)
    return flat.view(*rows.shape[:-1], len(weight))


class Linear(nn.Linear):
    """``nn.Linear`` with the products of ``linear``."""

    def forward(self, rows: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows F"]:
        """Return the mapped rows."""
        return linear(rows, self.weight, self.bias)


def with_fast_linear(network: nn.Module) -> nn.Module:
    """Return the network, its plain linear layers turned into ``Linear``; weights are untouched."""
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    return network


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    return (
        rows.device.type == "cpu"
        and rows.dtype == weight.dtype == torch.float32
        and rows.numel() > 0
        and _has_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def _has_onednn() -> bool:
    """Return whether this torch has the product; tried once, as it is no public part of it."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        return torch.equal(_product(torch.ones(1, 1), torch.ones(1, 1)), torch.ones(1, 1))
    except (AttributeError, RuntimeError, TypeError):  # no such operation, or other arguments
        return False


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left times right transposed, plus bias."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """Three products, one forwards and two backwards."""

    @staticmethod
    def forward(ctx, rows, weight, bias):
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        rows, weight = ctx.saved_tensors
        to_rows, to_weight, to_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight.t()) if to_rows else None,
            _product(gradient.t(), rows.t()) if to_weight else None,
            gradient.sum(dim=0) if to_bias else None,
        )
