"""How AFMP-Small and DeiT-Tiny scale with the number of patches: time and peak memory.

Each (model, size) is measured in a process of its own, which does forward + backward on one batch.
All processes of one size are alive together and take turns pass by pass, so that a busy machine
slows all of them alike. Memory that cannot be had is marked, and the rest goes on.

Usage: ``python benchmarks/afmp_scaling.py [--out results/afmp/scaling] [--batch 64]``
"""

import argparse
import json
import multiprocessing as mp
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

PATCH = 16
OUT_OF_MEMORY = "out of memory"
# How libraries below torch say that they got no memory: C++ and oneDNN, which has one status for
# all that can fail; the same product works where there is room.
NO_MEMORY = ("bad_alloc", "could not create a primitive", "could not execute a primitive")
# Name to (top-down pass, share of kept edges), or None for DeiT-Tiny. Its linear maps get the same
# products as AFMP's, or two libraries would be compared; beside it stands the model of timm.
DEIT, DEIT_OF_TIMM = "DeiT-Tiny", "DeiT-Tiny of timm"
MODELS: dict[str, tuple[bool, float] | None] = {
    DEIT: None,
    DEIT_OF_TIMM: None,
    "AFMP-Small dense": (False, 1.0),
    "AFMP-Small keep 0.6": (False, 0.6),
    "AFMP-Small keep 0.3": (False, 0.3),
    "AFMP-Small keep 0.1": (False, 0.1),
    "AFMP-Small keep 0.3, top-down": (True, 0.3),
}


def build(name: str, side: int) -> Any:
    """Return an untrained model for 100 classes."""
    from attnknn.afmp.graph import AFMP_SMALL
    from attnknn.afmp.model import AFMP
    from attnknn.core.kernels import with_fast_linear

    if MODELS[name] is None:
        import timm

        model = timm.create_model("deit_tiny_patch16_224", num_classes=100, img_size=side)
        return model if name == DEIT_OF_TIMM else with_fast_linear(model)

    top_down, keep_share = MODELS[name]
    return AFMP(replace(AFMP_SMALL, top_down=top_down, keep_share=keep_share), 100)


def training_pass(model: Any, images: Any, labels: Any) -> None:
    """Do forward and backward on a whole batch."""
    import torch.nn.functional as F

    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(images), labels).backward()


def peak_mb(device: str) -> float:
    """Return the most memory this process (or its GPU) has held, in MB."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    # Linux counts a parent's memory into ru_maxrss of the processes it starts; VmHWM is its own.
    if Path("/proc/self/status").is_file():
        return _fact("/proc/self/status", "VmHWM") / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def limit_memory(gigabytes: float | None) -> None:
    """Let this process fail when it takes too much: the system would kill any other instead.

    Asked for before every pass: what is free then is what the processes that wait their turn have
    left over.

    Args:
        gigabytes: Most memory; None takes what it has and nine tenths of what is free now.
    """
    if gigabytes is None and Path("/proc/meminfo").is_file():
        own, free = _fact("/proc/self/status", "VmData"), _fact("/proc/meminfo", "MemAvailable")
        gigabytes = (own + 0.9 * free) / 1e9
    if gigabytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(1e9 * gigabytes), resource.RLIM_INFINITY))


def _fact(path: str, name: str) -> int:
    """Return an entry of one of Linux's lists of facts, in bytes."""
    line = next(x for x in Path(path).read_text().splitlines() if x.startswith(name))
    return 1024 * int(line.split()[1])


def child(pipe: Connection, name: str, side: int, options: argparse.Namespace) -> None:
    """Work as asked; answer with what went wrong, if something does."""
    try:
        work(pipe, name, side, options)
    except Exception as error:
        # The answer needs memory too: without this, its own lack of it would end the process.
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        out = is_out_of_memory(error)
        pipe.send({"outcome": OUT_OF_MEMORY} if out else {"error": traceback.format_exc()})


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory could not be had; torch has no one class for it."""
    words = str(error).lower()
    said = "memory" in words and "illegal memory access" not in words
    said = said or any(each in words for each in NO_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and said)


def work(pipe: Connection, name: str, side: int, options: argparse.Namespace) -> None:
    """Do one forward + backward for every message received; answer with its times."""
    import timm  # noqa: F401  (all imports before the first look at the memory)
    import torch

    import attnknn.afmp.model  # noqa: F401

    batch, device = options.batch, options.device
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    limit_memory(options.memory_gb)
    base = peak_mb(device)
    model = build(name, side).to(device).train()
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.arange(batch, device=device) % 100
    pipe.send({"parameters": sum(p.numel() for p in model.parameters())})
    while pipe.recv():
        limit_memory(options.memory_gb)
        start, cpu = time.perf_counter(), time.process_time()
        training_pass(model, images, labels)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        pipe.send({"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak_mb(device) - base})


class Measured:
    """One model at one size, in its own process."""

    def __init__(self, name: str, side: int, options: argparse.Namespace) -> None:
        context = mp.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=child, args=(other, name, side, options), daemon=True)
        self.process.start()
        other.close()
        self.row = {"model": name, "side": side, "n_patches": (side // PATCH) ** 2, "outcome": "ok"}
        self.row |= dict.fromkeys(("seconds", "cpu_seconds", "fastest", "peak_mb"), float("nan"))
        self.times: list[dict[str, float]] = []

    def hear(self) -> dict[str, Any]:
        """Return the next answer; a process that the system killed ran out of memory.

        One that broke off without a word is marked with its exit code: a library that does not
        check what it was given ends so when memory is short, and the other models can go on.

        Raises:
            RuntimeError: The process said that it failed for another reason.
        """
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            return {"outcome": OUT_OF_MEMORY if code == -signal.SIGKILL else f"exit code {code}"}
        if "error" in answer:
            place = f"{self.row['model']} at {self.row['side']} px"
            raise RuntimeError(f"{place} could not be measured: {answer['error']}")
        return answer

    def step(self, *, timed: bool) -> None:
        """Do one pass, unless memory has run out."""
        if self.row["outcome"] != "ok":
            return
        with suppress(BrokenPipeError):  # it has ended: hear() says why
            self.pipe.send(True)
        answer = self.hear()
        if "outcome" in answer:
            self.row |= answer
        elif timed:
            self.times.append(answer)

    def result(self) -> dict[str, Any]:
        """End the process and return the row of the table."""
        if self.row["outcome"] == "ok":
            with suppress(BrokenPipeError):
                self.pipe.send(False)
            for name in ("seconds", "cpu_seconds"):
                self.row[name] = median(each[name] for each in self.times)
            self.row["fastest"] = min(each["seconds"] for each in self.times)
            self.row["peak_mb"] = max(each["peak_mb"] for each in self.times)
        self.process.join(timeout=30)
        return self.row


def measure(side: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one image size, measured in turns."""
    from tqdm import tqdm

    models = [Measured(name, side, options) for name in options.models]
    for model in models:  # they start together
        model.row |= model.hear()
    passes = [False] * options.warm_up + [True] * options.rounds
    for timed in tqdm(passes, desc=f"{side} px", leave=False):
        for model in models:
            model.step(timed=timed)
    return [model.result() for model in models]


def exponents(table: pd.DataFrame, column: str = "seconds") -> dict[str, float]:
    """Return the slope of log time in log patches of each model, over the sizes measured."""
    slopes = {}
    for model, rows in table[table["outcome"] == "ok"].groupby("model", sort=False):
        if len(rows) > 1:
            logs = np.log(rows[["n_patches", column]].to_numpy(dtype=float))
            slopes[model] = float(np.polyfit(*logs.T, deg=1)[0])
    return slopes


def ratios(table: pd.DataFrame, column: str = "seconds") -> dict[str, dict[str, float]]:
    """Return each model's time over DeiT-Tiny's, size by size."""
    wide = table.pivot(index="side", columns="model", values=column)
    if DEIT not in wide:
        return {}
    shares = wide.div(wide[DEIT], axis=0).round(3)
    return {str(side): row.dropna().to_dict() for side, row in shares.iterrows()}


def save(table: pd.DataFrame, options: argparse.Namespace) -> dict[str, Any]:
    """Write table, summary and figure; return the summary."""
    from attnknn import figures as plot
    from attnknn.figures import tables as report
    from attnknn.files import provenance, write_json

    summary = {
        "command": "python benchmarks/afmp_scaling.py " + " ".join(sys.argv[1:]),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "exponents": exponents(table, options.clock),
        "time_over_deit": ratios(table, options.clock),
        **provenance(),
    }
    if options.out is not None:
        report.save_table(table, options.out, "scaling", caption="Forward + backward.")
        write_json(options.out / "scaling.json", summary)
        if (table["outcome"] == "ok").any():
            plot.use_style()
            report.save_figure(
                plot.scaling_panels(table, clock=options.clock), options.out, "scaling"
            )
    return summary


def main() -> None:
    """Measure all sizes and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sides = [64, 96, 128, 160, 192, 224, 320, 448]
    parser.add_argument("--sides", type=int, nargs="+", default=sides)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    clocks = ["seconds", "cpu_seconds"]
    about = "time on the wall, or of all threads: a busy machine changes that less"
    parser.add_argument("--clock", choices=clocks, default="seconds", help=about)
    parser.add_argument("--memory-gb", type=float, default=None, help="most memory of a process")
    parser.add_argument("--out", type=Path, default=None, help="folder for table and figure")
    options = parser.parse_args()
    # Processes that wait for their turn must not spin on the cores of the one that works.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    rows: list[dict[str, Any]] = []
    for side in options.sides:
        rows += measure(side, options)
        summary = save(pd.DataFrame(rows), options)  # after every size: nothing is lost
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
