"""Learn the prior over drawn tables, and say how well it does on others.

Axes: B queries, C classes.
"""

import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from attnknn.core.prior import Evidence, PriorNetwork
from benchmarks.prior.samples import Sample, make_sample

VALIDATION_SEEDS = 10_000_000  # drawn tables from here on are never trained on
TABLES_PER_STEP, QUERIES_PER_TABLE = 8, 128


@dataclass(frozen=True)
class Settings:
    """How the prior is learned."""

    n_tables: int = 3000
    n_validation: int = 300
    n_steps: int = 8000
    lr: float = 3e-3
    weight_decay: float = 1e-2
    width: int = 32
    noise: bool = True
    seed: int = 0


def drawn_samples(first: int, n_tables: int, *, noise: bool = True, title: str) -> list[Sample]:
    """Return the samples of some seeds."""
    seeds = range(first, first + n_tables)
    return [
        make_sample(seed, noise=noise)
        for seed in tqdm(seeds, desc=title, leave=False, disable=None)
    ]


def batch_of(sample: Sample, limit: int, generator: torch.Generator) -> tuple[Evidence, Tensor]:
    """Return some queries of a sample, in single precision."""
    rows = torch.randperm(len(sample.targets), generator=generator)[:limit]
    return full(sample.evidence.of_queries(rows)), sample.targets[rows]


def full(evidence: Evidence) -> Evidence:
    """Return evidence in single precision."""
    return replace(
        evidence, neighbour=evidence.neighbour.float(), histograms=evidence.histograms.float()
    )


def nll(network: PriorNetwork, evidence: Evidence, targets: Tensor) -> Tensor:
    """Return the mean NLL of the right labels."""
    logs = network(evidence).log_probs.mean(dim=0)
    return -logs.gather(1, targets[:, None]).mean()


def train(settings: Settings, folder: Path, train_set: Sequence[Sample], judges) -> PriorNetwork:
    """Return the trained network; a log of the validation goes beside it."""
    network = PriorNetwork.fresh(settings.width, seed=settings.seed)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.lr, total_steps=settings.n_steps, pct_start=0.1
    )
    generator, log = torch.Generator().manual_seed(settings.seed), []
    started, losses = time.perf_counter(), []
    bar = tqdm(range(1, settings.n_steps + 1), desc="prior", leave=False, disable=None)
    for step in bar:
        places = torch.randint(len(train_set), (TABLES_PER_STEP,), generator=generator)
        optimiser.zero_grad()
        for place in places.tolist():
            evidence, targets = batch_of(train_set[place], QUERIES_PER_TABLE, generator)
            loss = nll(network, evidence, targets) / TABLES_PER_STEP
            loss.backward()
            losses.append(float(loss.detach()) * TABLES_PER_STEP)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 500 == 0 or step == settings.n_steps:
            row = {"step": step, "train_nll": np.mean(losses[-4000:]), **judged(network, judges)}
            log.append(row | {"seconds": round(time.perf_counter() - started, 1)})
            print({k: round(float(v), 4) for k, v in log[-1].items()}, flush=True)
            write_log(folder / "log.csv", log)
    return network


@torch.no_grad()
def judged(network: PriorNetwork, judges: Sequence[Sample]) -> dict[str, float]:
    """Return the mean validation NLL, of all tables, the clean and the wrong ones."""
    values = np.array([float(nll(network, full(each.evidence), each.targets)) for each in judges])
    clean = np.array([each.table.noise == "clean" for each in judges])
    found = {"nll": values.mean(), "clean": values[clean].mean(), "wrong": values[~clean].mean()}
    return {name: float(value) for name, value in found.items()}


def write_log(path: Path, rows: list[dict]) -> None:
    """Write the validation curve."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, rows[0])
        writer.writeheader()
        writer.writerows(rows)
