"""How long one training epoch of AFMP-Tiny takes: 45 000 images of CIFAR-10, all cores.

The real training loop, with augmentation, optimiser and every step; validation is not in the times.
Settings take turns, so that a busy machine slows all of them alike.

Usage: ``python benchmarks/afmp_epoch.py [--out results/afmp/epoch] [--rounds 3]``
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from attnknn.afmp.graph import AFMP_TINY
from attnknn.afmp.train import AFMPTraining, Recipe, Setting
from attnknn.data.splits import Splits, load_splits
from attnknn.figures import tables as report
from attnknn.files import provenance, write_json
from attnknn.studies.afmp import DEIT, DENSE, TOP_DOWN, ablation_settings, keep_name

REFERENCE = keep_name(AFMP_TINY.keep_share)
TIMED = (REFERENCE, DENSE, TOP_DOWN, DEIT)
SECONDS = "seconds of an epoch"


def epoch_times(splits: Splits, setting: Setting) -> dict[str, float]:
    """Return the seconds of the first epoch of a fresh training, on the clock and of all cores."""
    training = AFMPTraining(setting, splits, Recipe(epochs=1), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        training.run(Path(folder) / "checkpoint.pt", progress=False)
    [row] = training.history
    return {SECONDS: row["seconds"], "CPU seconds": row["cpu_seconds"]}


def measure(dataset: str, max_rows: int | None, rounds: int) -> pd.DataFrame:
    """Return one row per setting and round."""
    splits = load_splits(dataset=dataset, max_train_rows=max_rows)
    known = ablation_settings(AFMP_TINY, keep_shares=[1.0], sparse_weights=[])
    settings = [setting for setting in known if setting.name in TIMED]
    jobs = [(number, setting) for number in range(1, rounds + 1) for setting in settings]
    return pd.DataFrame(
        {"setting": setting.name, "round": number, "images": len(splits.train)}
        | epoch_times(splits, setting)
        for number, setting in tqdm(jobs, desc="epochs")
    )


def summary(table: pd.DataFrame, options: argparse.Namespace) -> dict[str, Any]:
    """Return the median epoch of each setting, with what it was measured by."""
    medians = table.groupby("setting", sort=False)[SECONDS].agg(median)
    return {
        "command": "python benchmarks/afmp_epoch.py " + " ".join(sys.argv[1:]),
        "images": int(table["images"].iloc[0]),
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "seconds": medians.to_dict(),
        **provenance(),
    }


def main() -> None:
    """Measure, save and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--max-rows", type=int, default=None, help="training images to draw")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=None, help="folder for table and summary")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = measure(options.dataset, options.max_rows, options.rounds)
    found = summary(table, options)
    if options.out is not None:
        report.save_table(table, options.out, "epoch", caption="Training epochs of AFMP-Tiny.")
        write_json(options.out / "epoch.json", found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
