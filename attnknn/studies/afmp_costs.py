"""Saved measurements of AFMP's cost, beside DeiT-Tiny's, become a figure's table and words."""

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tqdm import tqdm

from attnknn.afmp.train import Classifier, Setting, build_classifier
from attnknn.data.splits import Split, Splits
from attnknn.embed.rows import to_batch
from attnknn.files import read_json, write_json
from attnknn.studies.afmp import Ablation, saved_place

# ---- Peak memory of one training step of every ablation setting, each in a process of its own.
#
# A training shares its process with the data, and often with other trainings, so its process tells
# nothing about a setting. Here a fresh process loads the model and one batch, and does forward +
# backward: what it holds at most during that, above what it held before, is the step's memory.
#
# The process gives large blocks back as soon as they are free. Left to itself, the allocator of
# Linux keeps some for later, and one model shows other peaks in every process.

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


NAMES = ("scaling", "scaling-large")  # the usual sizes, and those for which a smaller batch is due
COMMAND = "python benchmarks/afmp_scaling.py --out results/afmp/scaling"
SAME_MEMORY = 0.15  # a judgement: peaks of single processes, which the allocator moves
RIVAL, FAMILY, DENSE, TOP_DOWN = "DeiT-Tiny", "AFMP-Small", "AFMP-Small dense", "top-down"


@dataclass(frozen=True)
class Scaling:
    """What the benchmark saved.

    Attributes:
        table: One row per model and image size.
        clock: Which column of the table holds the times that count.
        exponents: Slope of log time in log patches, by model.
        command: What was run.
        options: What was asked for: batch, image sizes, ...
    """

    table: pd.DataFrame
    clock: str
    exponents: dict[str, float]
    command: str
    options: dict[str, Any]

    @property
    def drawn(self) -> dict[str, Any]:
        """What ``plot.scaling_panels`` draws."""
        return {"table": self.table, "clock": self.clock}

    @property
    def good(self) -> pd.DataFrame:
        """What was measured."""
        return self.table[self.table["outcome"] == "ok"]


def read_scalings() -> dict[str, Scaling]:
    """Return all that the benchmark has saved, by name."""
    found = {name: read_scaling(name) for name in NAMES}
    return {name: scaling for name, scaling in found.items() if scaling is not None}


def read_scaling(name: str = NAMES[0]) -> Scaling | None:
    """Return what the benchmark saved, or None where it has not been run.

    Args:
        name: One of ``NAMES``: a folder among the results, or else in the project.
    """
    place = saved_place(name, "scaling.csv")
    if place is None:
        return None
    saved = read_json(place / "scaling.json")
    table, options = pd.read_csv(place / "scaling.csv"), saved["options"]
    return Scaling(table, options["clock"], saved["exponents"], saved["command"], options)


def all_scaling_words(scalings: Mapping[str, Scaling]) -> str:
    """Return, in Markdown, what was measured, one list a measurement."""
    if not scalings:
        return scaling_words(None)
    return "\n\n".join(
        f"**{name}**, batch {each.options['batch']}\n\n{scaling_words(each)}"
        for name, each in scalings.items()
    )


def scaling_words(scaling: Scaling | None) -> str:
    """Return, in Markdown, how time grows with the patches, or how to measure it."""
    if scaling is None:
        return f"Not measured here; `{COMMAND}` does."
    grows = "; ".join(f"{name} {value:.2f}" for name, value in scaling.exponents.items())
    lines = [f"Exponent of the time in the number of patches: {grows}."]
    lines += _over_rival(scaling) + _share_words(scaling)
    lines += _memory_words(scaling) + _size_words(scaling)
    failed = scaling.table[scaling.table["outcome"] != "ok"]
    lines += [
        f"{row.model} at {row.side} px: {row.outcome}; its exponent is that of the other sizes."
        for row in failed.itertuples(index=False)
    ]
    asked = scaling.options.get("sides", [])
    if missing := sorted(set(asked) - set(scaling.table["side"])):
        lines.append(f"Asked for, but not measured: {', '.join(map(str, missing))} px.")
    return "\n".join(f"- {line}" for line in [*lines, f"Measured by `{scaling.command}`."])


def _over_rival(scaling: Scaling) -> list[str]:
    """Say how the times compare at the largest size that the rival managed."""
    good = scaling.good
    side = good.loc[good["model"] == RIVAL, "side"].max()
    times = good[good["side"] == side].set_index("model")[scaling.clock]
    if RIVAL not in times:
        return []
    shares = (times / times[RIVAL]).drop(RIVAL).items()
    shown = "; ".join(f"{name} {value:.2f}" for name, value in shares)
    return [f"Time over that of {RIVAL} at {side} px: {shown}."]


def _one_pass(scaling: Scaling) -> pd.DataFrame:
    """Return the rows of AFMP without the top-down pass at the largest size that dense managed."""
    good = scaling.good
    side = good.loc[good["model"] == DENSE, "side"].max()
    names = good["model"]
    rows = good[(good["side"] == side) & names.str.startswith(FAMILY)]
    return rows[~rows["model"].str.endswith(TOP_DOWN)].set_index("model")


def _share_words(scaling: Scaling) -> list[str]:
    """Say how long a pass takes at each share of kept edges, and whether fewer are faster."""
    rows = _one_pass(scaling)
    if DENSE not in rows.index or len(rows) < 2:
        return []
    times, side = rows[scaling.clock], int(rows["side"].iloc[0])
    shown = ", ".join(f"{name.removeprefix(FAMILY).strip()} {x:.2f} s" for name, x in times.items())
    falls = times.is_monotonic_decreasing  # rows go from dense to the smallest share
    said = "fewer edges are faster" if falls else "time does not fall at every step"
    return [f"{FAMILY}, one pass at {side} px: {shown}: {said}."]


def _memory_words(scaling: Scaling) -> list[str]:
    """Say what pruning does to the peak memory, over that of the dense model."""
    rows = _one_pass(scaling)
    if DENSE not in rows.index or "peak_mb" not in rows or len(rows) < 2:
        return []
    shares = (rows["peak_mb"] / rows.loc[DENSE, "peak_mb"]).drop(DENSE)
    shown = "; ".join(f"{name} {value:.2f}" for name, value in shares.items())
    if (shares < 1 - SAME_MEMORY).all():
        said = "pruning saves memory"
    elif (shares < 1 - SAME_MEMORY).any():
        said = "pruning saves memory at some shares only"
    else:
        said = "pruning saves no memory"
    side = int(rows["side"].iloc[0])
    return [
        f"Peak memory over that of {DENSE} at {side} px: {shown}: {said} (one process a model: "
        f"differences within {100 * SAME_MEMORY:.0f} % are not told apart)."
    ]


def _size_words(scaling: Scaling) -> list[str]:
    """Say how many parameters the timed models have: one pass needs fewer than two."""
    good = scaling.good
    if "parameters" not in good:
        return []
    counts = good.groupby("model", sort=False)["parameters"].max()
    family = counts[counts.index.str.startswith(FAMILY)]
    two = family[family.index.str.endswith(TOP_DOWN)]
    one = family.drop(two.index)
    if one.empty or two.empty:
        return []
    return [
        f"Parameters: {one.max():,.0f} of {FAMILY} with one pass, {two.max():,.0f} with the "
        f"top-down pass; it is the latter that stands for {FAMILY}'s size."
    ]
