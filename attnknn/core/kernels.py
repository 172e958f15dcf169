"""Kernels: matrix products at the speed of this CPU, in faiss and in torch.

faiss is loaded here and nowhere else, because its kernels are chosen by the environment while it
loads. Linear maps of float32 rows go to oneDNN where that is there: the products of ``F.linear``,
often faster.

Axes: N rows, D width in, F width out.
"""

import os
import platform
import sys
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# ---- CPU features -> the matrix kernel that faiss's own OpenBLAS should use.
#
# The faiss-cpu wheel carries an OpenBLAS (0.3.15) that does not know newer CPUs: it takes new Intel
# ones for a Prescott and AMD's Zen 5 for a Barcelona, whose kernels are several times slower. The
# choice is made when the library loads, so it has to be in the environment before faiss is first
# imported. (A name that it does not know, such as COOPERLAKE, means Prescott again: SKYLAKEX is the
# newest that it does.) A setting of the user's own is never changed, nor judged.

VARIABLE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AVX2 = {"avx2", "fma"}
# Kernels that use what the CPU has, by the core type that we would ask for.
WIDE = {"SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS"}
GOOD_KERNELS = {"SKYLAKEX": WIDE, "HASWELL": WIDE | {"HASWELL", "ZEN", "EXCAVATOR"}}


def core_type(flags: set[str]) -> str | None:
    """Return the OpenBLAS core name for a set of CPU flags, or None to leave the choice to it."""
    if flags >= AVX512:
        return "SKYLAKEX"
    return "HASWELL" if flags >= AVX2 else None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the feature flags of the first core; empty where the system does not tell."""
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def choose_core_type() -> str | None:
    """Set the core type for a faiss that is not loaded yet; return what is in force."""
    if VARIABLE not in os.environ and "faiss" not in sys.modules:
        chosen = core_type(cpu_flags())
        if chosen:
            os.environ[VARIABLE] = chosen
    return os.environ.get(VARIABLE)


def running_core_type() -> str | None:
    """Return the core type that the loaded faiss's own OpenBLAS runs on; None where unknown."""
    from threadpoolctl import threadpool_info

    for library in threadpool_info():
        if library["internal_api"] == "openblas" and "faiss" in library["filepath"]:
            return library.get("architecture")
    return None


def kernel_fault() -> str | None:
    """Return what is wrong with the kernels of the loaded faiss; None when right or unknown.

    They can only be wrong when faiss was imported before us: afterwards nobody can change them.
    A core type that stands in the environment is ours or the user's own, and never a fault.
    """
    wanted = core_type(cpu_flags())
    if wanted is None or VARIABLE in os.environ:
        return None
    running = running_core_type()
    if running is None or running.upper() in GOOD_KERNELS[wanted]:
        return None
    return f"faiss was imported before attnknn and runs on {running} kernels, not on {wanted}"


choose_core_type()
import faiss  # noqa: E402  (the BLAS core type must be set first)

if sys.platform == "darwin":
    # torch and faiss bring an OpenMP runtime each; on macOS two thread pools are known to crash.
    faiss.omp_set_num_threads(1)

# ---- Linear maps by oneDNN.
#
# torch multiplies matrices with MKL, which keeps to narrow vectors on CPUs of other makers. oneDNN,
# which torch brings along for convolutions, uses all of them. Its product is a private operation of
# torch: where a version of torch lacks it, ``F.linear`` does the work.


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
    """Return the network with ``Linear`` for its plain linear layers, over the same weights."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                fast = Linear(child.in_features, child.out_features, device="meta")
                fast.weight, fast.bias = child.weight, child.bias
                module.register_module(name, fast)
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
