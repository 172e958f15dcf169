"""Linear maps by oneDNN against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnknn.afmp.graph import AFMPConfig
from attnknn.afmp.model import AFMP
from attnknn.core import kernels as module
from attnknn.core.kernels import Linear, linear, with_fast_linear

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")


def parts(*, shape=(5, 7), width=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(size, generator=generator, dtype=dtype).requires_grad_()
        for size in (shape, (width, shape[-1]), (width,))
    ]


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 7), (5, 7), (2, 3, 7), (211, 13)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_those_of_torch(shape, with_bias):
    rows, weight, bias = parts(shape=shape)
    inputs = [rows, weight, bias] if with_bias else [rows, weight]
    made = []
    for function in (linear, F.linear):
        mapped = function(*inputs)
        upstream = torch.sin(torch.arange(float(mapped.numel()))).view(mapped.shape)
        made.append([mapped, *torch.autograd.grad(mapped, inputs, upstream)])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_transposed_and_sliced_rows():
    rows = torch.randn(7, 10, generator=torch.Generator().manual_seed(1))
    weight = parts()[1].detach()
    for view in (rows[:, 2:9], rows[:, :5].t()):
        torch.testing.assert_close(linear(view, weight), F.linear(view, weight))


@needs_onednn
def test_which_products_are_made(monkeypatch):
    """Float32 on a CPU goes to oneDNN; float64 and autocast stay with torch."""
    assert module._has_onednn()
    calls, product = [], module._product
    monkeypatch.setattr(module, "_product", lambda *args: calls.append(1) or product(*args))
    rows, weight, bias = parts()
    linear(rows, weight, bias).sum().backward()
    assert len(calls) == 3
    linear(rows.detach(), weight, bias).sum().backward()  # nothing asks for the rows' gradient
    assert len(calls) == 5
    linear(*parts(dtype=torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(rows, weight, bias).dtype == torch.bfloat16
    assert len(calls) == 5


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError])
def test_a_torch_without_the_product_has_its_own(monkeypatch, error):
    """The operation is private: it may be gone, or take other arguments."""
    calls = []

    def missing(*_):
        calls.append(1)
        raise error

    monkeypatch.setattr(module, "_product", missing)
    module._has_onednn.cache_clear()
    rows, weight, bias = parts()
    try:
        for _ in range(2):
            torch.testing.assert_close(linear(rows, weight, bias), F.linear(rows, weight, bias))
    finally:
        module._has_onednn.cache_clear()
    assert len(calls) <= 1  # asked once; never where there is no oneDNN


def test_the_gradient_in_float64():
    assert torch.autograd.gradcheck(linear, parts(dtype=torch.float64))


def test_a_network_keeps_its_weights_and_its_output():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 3))
    rows = torch.randn(11, 7)
    before, names = network(rows), list(network.state_dict())
    assert with_fast_linear(network) is network
    assert [type(network[place]) for place in (0, 2)] == [Linear, Linear]
    assert list(network.state_dict()) == names
    torch.testing.assert_close(network(rows), before)


def test_float32_agrees_with_float64():
    """The whole model, forwards and backwards, by two libraries."""
    made = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = AFMP(AFMPConfig(layers=2, width=16, patch=4, keep_share=1.0), 3)
        images = torch.randn(5, 3, 12, 12).to(dtype)
        F.cross_entropy(model.to(dtype)(images), torch.arange(5) % 3).backward()
        made.append([p.grad.double() for p in model.parameters()])
    for single, double in zip(*made, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-6)
