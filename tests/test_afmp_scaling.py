"""The benchmark of AFMP's scaling: its arithmetic, and what it does when memory runs out."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from attnknn.core.kernels import Linear

BENCHMARK = Path(__file__).parents[1] / "benchmarks/afmp_scaling.py"


@pytest.fixture
def scaling():
    spec = importlib.util.spec_from_file_location("afmp_scaling", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(**seconds):
    return pd.DataFrame(
        {"model": model, "side": 16 * n, "n_patches": n**2, "seconds": value, "peak_mb": 1.0}
        | {"outcome": "ok"}
        for model, function in seconds.items()
        for n, value in ((n, function(n)) for n in (4, 7, 14))
    )


def test_exponents_and_ratios(scaling):
    measured = table(linear=lambda n: 3.0 * n**2, square=lambda n: 0.1 * n**4)
    found = scaling.exponents(measured)
    assert found == {"linear": pytest.approx(1), "square": pytest.approx(2)}
    measured["model"] = measured["model"].replace({"square": "DeiT-Tiny"})
    assert scaling.ratios(measured)["64"]["linear"] == pytest.approx(48 / 25.6, abs=1e-3)


def test_what_ran_out_of_memory_bends_no_exponent(scaling):
    measured = table(**{"AFMP-Small dense": lambda n: float(n), "DeiT-Tiny": lambda n: float(n)})
    measured.loc[2, ["seconds", "peak_mb", "outcome"]] = [np.nan, np.nan, "out of memory"]
    assert set(scaling.exponents(measured)) == {"AFMP-Small dense", "DeiT-Tiny"}


def measured_by(scaling, *, exitcode=None, answer=None):
    """Return a model whose process has answered, or has ended without a word."""

    def recv():
        if answer is None:
            raise EOFError
        return answer

    measured = object.__new__(scaling.Measured)
    measured.row, measured.pipe = {"model": "m", "side": 64}, SimpleNamespace(recv=recv)
    measured.process = SimpleNamespace(join=lambda: None, exitcode=exitcode)
    return measured


def test_only_a_killed_process_counts_as_out_of_memory(scaling):
    assert measured_by(scaling, exitcode=-9).hear() == {"outcome": "out of memory"}
    for exitcode in (1, -11):  # the others go on, but nobody takes it for a lack of memory
        said = measured_by(scaling, exitcode=exitcode).hear()
        assert said == {"outcome": f"exit code {exitcode}"}
    with pytest.raises(RuntimeError, match="a wrong name"):
        measured_by(scaling, answer={"error": "a wrong name"}).hear()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "outcome"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "outcome"),
        (RuntimeError("std::bad_alloc"), "outcome"),
        (RuntimeError("could not create a primitive"), "outcome"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "error"),
        (ValueError("not about memory"), "error"),
    ],
)
def test_a_process_says_what_went_wrong(scaling, monkeypatch, error, expected):
    sent = []

    def fails(*_):
        raise error

    limits = []
    monkeypatch.setattr(scaling, "work", fails)
    monkeypatch.setattr(scaling.resource, "setrlimit", lambda _, pair: limits.append(pair))
    scaling.child(SimpleNamespace(send=sent.append), "m", 64, None)
    assert [list(answer) for answer in sent] == [[expected]]
    assert limits == [(scaling.resource.RLIM_INFINITY,) * 2]  # or there is no room for an answer


def test_the_limit_is_what_the_others_have_left_over(scaling, monkeypatch):
    facts, limits = {"VmData": int(1e9), "MemAvailable": int(4e9)}, []
    monkeypatch.setattr(scaling, "_fact", lambda _, name: facts[name])
    monkeypatch.setattr(scaling.Path, "is_file", lambda _: True)
    monkeypatch.setattr(scaling.resource, "setrlimit", lambda _, pair: limits.append(pair[0]))
    scaling.limit_memory(None)
    facts["MemAvailable"] = int(1e9)  # another one works, or has kept what it took
    scaling.limit_memory(None)
    scaling.limit_memory(2.0)
    assert limits == [4.6e9, 1.9e9, 2e9]


def test_peak_memory_is_the_process_s_own(scaling, monkeypatch):
    """What a parent held is counted into ``ru_maxrss`` of a process it starts."""
    status = "Name:\tpython\nVmHWM:\t  300000 kB\nVmRSS:\t  200000 kB\n"
    monkeypatch.setattr(scaling.Path, "is_file", lambda _: True)
    monkeypatch.setattr(scaling.Path, "read_text", lambda _: status)
    assert scaling.peak_mb("cpu") == 307.2


def run_benchmark(out: Path, *options: str) -> pd.DataFrame:
    words = ["--sides", "64", "--models", "DeiT-Tiny", "--warm-up", "1", "--rounds", "1"]
    command = [sys.executable, str(BENCHMARK), *words, "--out", str(out), *options]
    subprocess.run(command, check=True, capture_output=True)
    return pd.read_csv(out / "scaling.csv")


def test_fault_26_a_pass_is_forward_and_backward_on_the_whole_batch(scaling):
    seen, model = [], torch.nn.Linear(7, 3)
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    for _ in range(2):  # gradients of an earlier pass do not add up
        scaling.training_pass(model, torch.ones(5, 7), torch.zeros(5, dtype=torch.long))
    assert seen == [5, 5]
    shares = torch.softmax(model(torch.ones(1, 7))[0], dim=0) - torch.eye(3)[0]
    torch.testing.assert_close(model.bias.grad, shares.detach())


def test_fault_26_the_benchmark_passes_the_batch_it_was_asked_for(scaling, monkeypatch):
    asked, sent, seen = iter([True, True, False]), [], []
    pipe = SimpleNamespace(send=sent.append, recv=lambda: next(asked))
    monkeypatch.setattr(scaling, "limit_memory", lambda _: None)
    monkeypatch.setattr(scaling, "build", lambda *_: torch.nn.Linear(7, 3))
    monkeypatch.setattr(
        scaling, "training_pass", lambda _, images, labels: seen.append(len(images))
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    options = SimpleNamespace(batch=5, device="cpu", threads=1, memory_gb=None)
    scaling.work(pipe, "m", 16, options)
    assert seen == [5, 5] and sent[0] == {"parameters": 24}
    assert all(set(answer) == {"seconds", "cpu_seconds", "peak_mb"} for answer in sent[1:])


def test_both_transformers_have_the_same_weights(scaling):
    fast, plain = (scaling.build(name, 32) for name in (scaling.DEIT, scaling.DEIT_OF_TIMM))
    plain.load_state_dict(fast.state_dict())
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fast.eval()(images), plain.eval()(images))
    kinds = [{type(each) for each in model.modules()} for model in (fast, plain)]
    assert [torch.nn.Linear in kinds[0], Linear in kinds[0]] == [False, True]
    assert Linear not in kinds[1]


@pytest.mark.slow
def test_fault_26_memory_is_that_of_forward_and_backward(tmp_path):
    """Measured in a process of its own, with the real batch: a larger batch needs more."""
    small, large = (run_benchmark(tmp_path / size, "--batch", size) for size in ("2", "32"))
    assert (small["outcome"] == "ok").all() and (large["outcome"] == "ok").all()
    assert large["peak_mb"].iloc[0] > 1.3 * small["peak_mb"].iloc[0]


@pytest.mark.slow
def test_too_little_memory_is_not_fatal(tmp_path):
    found = run_benchmark(tmp_path, "--batch", "512", "--memory-gb", "1")
    assert found["outcome"].tolist() == ["out of memory"]
