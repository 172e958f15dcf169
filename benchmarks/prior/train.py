"""Learn the prior over drawn tables, and say how well it does on others.

Axes: B queries, C classes.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnknn.core.prior import Evidence, PriorNetwork
from attnknn.files import load_checkpoint, save_checkpoint, write_table
from attnknn.progress import progress_bar
from benchmarks.prior.samples import Sample

TABLES_PER_STEP, QUERIES_PER_TABLE = 8, 128
JUDGE_EVERY, KEEP_EVERY = 500, 1000  # steps
RECENT = 4000  # training losses that the log takes the mean of
LOG_NAME, CHECKPOINT_NAME = "log.csv", "checkpoint.pt"


@dataclass(frozen=True)
class Settings:
    """How the prior is learned."""

    n_tables: int = 4000
    n_steps: int = 12_000
    lr: float = 3e-3
    weight_decay: float = 1e-2
    width: int = 48
    seed: int = 0


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


class Training:
    """A network on its way: all that a stopped program needs to end with the same digits.

    Args:
        settings: How the prior is learned.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.step, self.seconds = settings, 0, 0.0
        self.network = PriorNetwork.fresh(settings.width, seed=settings.seed)
        self.optimiser = torch.optim.AdamW(
            self.network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser, settings.lr, total_steps=settings.n_steps, pct_start=0.1
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.losses, self.log = [], []

    def advance(self, samples: Sequence[Sample]) -> None:
        """Make one step on a few tables."""
        places = torch.randint(len(samples), (TABLES_PER_STEP,), generator=self.generator)
        self.optimiser.zero_grad()
        for place in places.tolist():
            evidence, targets = batch_of(samples[place], QUERIES_PER_TABLE, self.generator)
            loss = nll(self.network, evidence, targets) / TABLES_PER_STEP
            loss.backward()
            self.losses.append(float(loss.detach()) * TABLES_PER_STEP)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        self.step += 1
        self.losses = self.losses[-RECENT:]

    def _parts(self) -> dict[str, object]:
        return {"network": self.network, "optimiser": self.optimiser, "schedule": self.schedule}

    def save(self, path: Path) -> None:
        """Keep everything as it is."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        facts = {name: getattr(self, name) for name in ("step", "seconds", "losses", "log")}
        random = self.generator.get_state()
        save_checkpoint(path, state | facts | {"random": random, "settings": asdict(self.settings)})

    @classmethod
    def resumed(cls, settings: Settings, path: Path) -> "Training":
        """Return the training where it was kept; a new one where nothing is."""
        training = cls(settings)
        if not path.exists():
            return training
        state = load_checkpoint(path)
        if state["settings"] != asdict(settings):
            raise ValueError(
                f"work must hold a training of these settings, got {path} of {state['settings']}; "
                "delete it or use another folder"
            )
        for name, part in training._parts().items():
            part.load_state_dict(state[name])
        for name in ("step", "seconds", "losses", "log"):
            setattr(training, name, state[name])
        training.generator.set_state(state["random"])
        return training


def train(
    settings: Settings, folder: Path, samples: Sequence[Sample], judges: Sequence[Sample]
) -> PriorNetwork:
    """Return the trained network; checkpoints and a log of the validation go into the folder."""
    training = Training.resumed(settings, folder / CHECKPOINT_NAME)
    started = time.perf_counter() - training.seconds
    with progress_bar(title="prior", total=settings.n_steps, initial=training.step) as bar:
        while training.step < settings.n_steps:
            training.advance(samples)
            bar.update()
            is_last = training.step == settings.n_steps
            if training.step % JUDGE_EVERY == 0 or is_last:
                row = {"step": training.step, "train_nll": float(np.mean(training.losses))}
                training.seconds = round(time.perf_counter() - started, 1)
                training.log.append(row | judged(training.network, judges))
                training.log[-1]["seconds"] = training.seconds
                bar.set_postfix(nll=f"{training.log[-1]['nll']:.4f}", refresh=False)
                write_table(folder / LOG_NAME, pd.DataFrame(training.log))
            if training.step % KEEP_EVERY == 0 or is_last:
                training.save(folder / CHECKPOINT_NAME)
    return training.network


@torch.no_grad()
def judged(network: PriorNetwork, judges: Sequence[Sample]) -> dict[str, float]:
    """Return the mean validation NLL, of all tables, the clean and the wrong ones."""
    values = np.array([float(nll(network, full(each.evidence), each.targets)) for each in judges])
    clean = np.array([each.noise == "clean" for each in judges])
    found = {"nll": values, "clean": values[clean], "wrong": values[~clean]}
    return {name: float(part.mean()) if len(part) else None for name, part in found.items()}


# ---- The report: the prior beside each of the things that it looks at.


@torch.no_grad()
def compared(network: PriorNetwork, judges: Sequence[Sample]) -> pd.DataFrame:
    """Return the NLL of right labels of each table, by kind, noise and who speaks.

    Plain votes are smoothed by one vote of the class shares: a class without a vote would cost
    everything.
    """
    rows = []
    for each in judges:
        seen = full(each.evidence)
        voices = {
            "prior": network(seen).log_probs[0],
            "votes": _votes(seen).log(),
            "prototypes": seen.prototypes.log_softmax(dim=1),
            "expert": seen.expert.log_softmax(dim=1),
        }
        losses = {
            name: -float(logs.gather(1, each.targets[:, None]).mean())
            for name, logs in voices.items()
        }
        labels = "clean" if each.noise == "clean" else "wrong"
        rows.append({"kind": each.kind, "labels": labels} | losses)
    return pd.DataFrame(rows)


def _votes(seen: Evidence) -> Tensor:
    counted = torch.ones(seen.labels.shape)
    if seen.log_weights is not None:
        counted = seen.log_weights.exp()
        counted = counted * counted.shape[1] / counted.sum(dim=1, keepdim=True)
    votes = torch.zeros_like(seen.prototypes).scatter_add(1, seen.labels, counted)
    return (votes + seen.shares) / (seen.labels.shape[1] + 1)


def summed_up(losses: pd.DataFrame) -> pd.DataFrame:
    """Return the mean NLL of each kind and of all, with the number of tables."""
    everything = losses.assign(kind="all")
    groups = pd.concat([losses, everything]).groupby(["kind", "labels"], sort=True)
    return groups.size().rename("tables").to_frame().join(groups.mean()).reset_index()
