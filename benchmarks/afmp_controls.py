"""What AFMP owes to its messages and to its feedback: two controls, trained like the ablation.

"keep 0" is the model without any message, all else equal; the other settings are held against it.
"one pass, wider" has about the parameters of the model with the top-down pass. Every run is kept as
it ends and never trained twice.

Usage: ``python benchmarks/afmp_controls.py [--out results/afmp/controls] [--workers 2]``
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from attnknn.afmp.graph import AFMP_TINY, AFMPConfig
from attnknn.afmp.train import Recipe
from attnknn.evaluate.compare import verdict_sentence
from attnknn.figures import tables as report
from attnknn.files import provenance, write_json
from attnknn.studies.afmp import (
    DENSE,
    TOP_DOWN,
    WIDER,
    Ablation,
    ablation_settings,
    comparison_table,
    keep_name,
    run_ablation,
)
from attnknn.studies.afmp_words import training_words

SILENT = keep_name(0)
TRAINED = (DENSE, keep_name(AFMP_TINY.keep_share), SILENT, TOP_DOWN, WIDER)


def train_controls(options: argparse.Namespace) -> Ablation:
    """Train the settings, or read them, and hold all of them against the one without messages."""
    model = AFMPConfig(layers=options.layers, width=options.width, patch=options.patch)
    known = ablation_settings(model, keep_shares=[1.0, 0.0], sparse_weights=[])
    ablation = run_ablation(
        options.runs,
        [setting for setting in known if setting.name in TRAINED],
        dataset=options.dataset,
        recipe=Recipe(epochs=options.epochs, batch_size=options.batch),
        seeds=options.seeds,
        max_rows=options.max_rows,
        workers=options.workers,
    )
    return replace(ablation, reference=SILENT)


def summary(ablation: Ablation, words: Sequence[str]) -> dict[str, Any]:
    """Return the verdicts, with the settings' sizes and what they were found by."""
    told = pd.concat([ablation.comparison(), ablation.pairs()]).to_dict("records")
    return {
        "command": " ".join(["python benchmarks/afmp_controls.py", *words]),
        "seeds": [run.seed for run in ablation.runs[SILENT]],
        "images": len(ablation.splits.train),
        "parameters": {name: runs[0].report["parameters"] for name, runs in ablation.runs.items()},
        "verdicts": [verdict_sentence(row) for row in told],
        "training": training_words(ablation.history()),
        **provenance(),
    }


def parser() -> argparse.ArgumentParser:
    """Return what can be asked for; the defaults are those of the ablation on CIFAR-10."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dataset", default="cifar10")
    add("--max-rows", type=int, default=20_000, help="training images to draw")
    add("--epochs", type=int, default=15)
    add("--batch", type=int, default=128)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for name in ("layers", "width", "patch"):
        add(f"--{name}", type=int, default=getattr(AFMP_TINY, name))
    add("--workers", type=int, default=2, help="trainings at the same time")
    add("--runs", type=Path, default=Path("results/afmp/afmp_runs"), help="where runs are kept")
    add("--out", type=Path, default=None, help="folder for tables and summary")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Train, save and print one JSON object."""
    words = sys.argv[1:] if words is None else words
    options = parser().parse_args(words)
    ablation = train_controls(options)
    found = summary(ablation, words)
    if options.out is not None:
        means = report.pivot_mean_interval(ablation.table()).text
        report.save_table(means, options.out, "measures", caption="AFMP and its controls.")
        tests = comparison_table(ablation)
        caption = "Paired tests."
        report.save_table(tests, options.out, "paired_tests", caption=caption, also=["md"])
        write_json(options.out / "controls.json", found)
    print(json.dumps(found, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
