"""Small trainings, run once by a test itself and once by several processes under torchrun."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from attnknn.data.splits import load_splits
from attnknn.embed import images as fast
from attnknn.embed.parallel import Group, joined
from attnknn.embed.run import stage_of
from tests.tiny import JOINT, SMALL, config

# 49 rows a batch: shares of 24 and 25. A mixed batch has partners across the shares.
COMMON = {"dataset": "digits", "batch_size": 49, "augment": ["crop"], "crop_pad": 1}
MIXED = {"mixup_alpha": 0.4, "mixup_share": 0.5}
CASES = {
    "cross_entropy": SMALL | COMMON | MIXED | {"epochs": 3, "lr": 100.0},
    "joint": JOINT | COMMON | MIXED | {"epochs": 3, "lr": 1e-3, "hard_negatives": "weight"},
    "batchnorm": SMALL | COMMON | {"epochs": 3, "lr": 100.0},
    "dropout": SMALL | COMMON | {"epochs": 2, "head": "mlp", "projection": "deep"},
}
PLAIN = ("cross_entropy", "joint")  # exact in shares: neither BatchNorm nor dropout


class KilledError(BaseException):
    """Stands for kill -9 after the first epoch."""


@contextmanager
def layers_of(case: str) -> Iterator[None]:
    """Put normalisations that look at single rows into the backbone of the plain cases."""
    original = fast._shift_norm
    if case in PLAIN:
        fast._shift_norm = lambda channels: nn.GroupNorm(1, channels)
    try:
        yield
    finally:
        fast._shift_norm = original


def train(case: str, checkpoint: Path, group: Group, *, stop_after: int | None = None) -> dict:
    """Train one case and return its history and weights."""
    settings = config(CASES[case])
    splits = load_splits("digits", max_train_rows=299, max_test_rows=50)
    with layers_of(case):
        stage = stage_of(settings, splits, device=torch.device("cpu"), group=group)
    run_epoch = stage._run_epoch

    def perhaps_killed(bar: tqdm) -> None:
        if stage.epoch == stop_after:
            raise KilledError
        run_epoch(bar)

    stage._run_epoch = perhaps_killed
    history = stage.run(checkpoint, progress=False)
    history = history[[name for name in history if "seconds" not in name]]
    weights = torch.cat([p.detach().flatten() for p in stage.embedder.parameters()])
    return {"history": history.to_dict("list"), "weights": weights}


def main(folder: Path) -> None:
    """Train every case, and one of them with a break, as one of several processes."""
    with joined() as group:
        results = {case: train(case, folder / f"{case}.pt", group) for case in CASES}
        try:
            train("dropout", folder / "broken.pt", group, stop_after=1)
        except KilledError:
            torch.manual_seed(12345)  # another process has another state
            results["resumed"] = train("dropout", folder / "broken.pt", group)
    results["threads"] = thread_names()
    torch.save(results, folder / f"results{group.rank}.pt")


def thread_names() -> list[str]:
    """Return the names of this process's threads, also of those that Python does not know."""
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
