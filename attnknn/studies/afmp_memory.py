"""Peak memory of one training step of every ablation setting, each in a process of its own.

A training shares its process with the data, and often with other trainings, so its process tells
nothing about a setting. Here a fresh process loads the model and one batch, and does forward +
backward: what it holds at most during that, above what it held before, is the step's memory.

The process gives large blocks back as soon as they are free. Left to itself, the allocator of
Linux keeps some for later, and one model shows other peaks in every process.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from attnknn.afmptrain import Classifier, Setting, build_classifier
from attnknn.data import Split, Splits
from attnknn.embed import to_batch
from attnknn.files import read_json, write_json
from attnknn.studies.afmp import Ablation

MEMORY_NAME = "memory.json"
WARM_UP = 2  # images of a first step, in which libraries set themselves up
# glibc reads it when a process starts: blocks from this size on (in bytes) are never kept.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def step_memory(ablation: Ablation, *, progress: bool = True) -> dict[str, float]:
    """Return the peak memory of a step of each setting at its training batch, in MB.

    Measured on the CPU with one thread, wherever the runs were trained, and without the optimiser:
    AdamW holds two more numbers a parameter. Kept beside the runs, so it is measured once.
    """
    found = {}
    bar = tqdm(ablation.runs.items(), desc="peak memory", disable=not progress)
    for name, runs in bar:
        path = runs[0].folder.parent / MEMORY_NAME
        if not path.is_file():
            batch = runs[0].report["config"]["recipe"]["batch_size"]
            megabytes = measure_step(runs[0].setting, ablation.splits, batch)
            write_json(path, {"step_mb": megabytes, "batch_size": batch, "device": "cpu"})
        found[name] = read_json(path)["step_mb"]
    return found


def measure_step(setting: Setting, splits: Splits, batch_size: int) -> float:
    """Return the peak memory of forward + backward of one batch, in MB, from a fresh process."""
    places = np.arange(batch_size) % len(splits.train)
    batch = Split(splits.train.inputs[places], splits.train.labels[places])
    # NOTE: only the batch goes along: reading the data could need more than the step.
    small = replace(splits, train=batch, val=batch, test=batch)
    with _environment(GIVE_BACK), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_step_peak, setting, small).result()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Let processes that start meanwhile see other environment variables."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _step_peak(setting: Setting, splits: Splits) -> float:
    torch.set_num_threads(1)
    model = build_classifier(setting, splits, seed=0).train()
    _step(model, splits.train, WARM_UP)
    before = _restart_peak()
    _step(model, splits.train, len(splits.train))
    return own_peak_mb() - before


def _step(model: Classifier, batch: Split, n_images: int) -> None:
    model.zero_grad(set_to_none=True)
    logits, penalty = model.logits_and_penalty(to_batch(batch.inputs[:n_images]))
    labels = torch.from_numpy(batch.labels[:n_images])
    (F.cross_entropy(logits, labels) + penalty).backward()


def _restart_peak() -> float:
    """Begin a new peak where the system can, and return where it starts, in MB."""
    if os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is held now
    return own_peak_mb()


def own_peak_mb() -> float:
    """Return the most memory this process has held, in MB.

    Linux counts a parent's memory into ``ru_maxrss`` of the processes it starts; ``VmHWM`` is the
    process's own.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
