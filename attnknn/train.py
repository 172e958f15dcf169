"""The command ``python -m attnknn.train``: train the seeds of a run, without notebooks.

    python -m attnknn.train --profile quick --set epochs=2
    torchrun --nproc-per-node 2 -m attnknn.train --profile cifar10 --seeds 0-4

Parameters, checks and folders are those of ``attnknn run``, which finds the trained seeds and goes
on with the studies. Under ``torchrun`` all processes train one seed after the other together.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnknn.cli import parse_seeds
from attnknn.config import ConfigError, parse_setting
from attnknn.embed.parallel import joined
from attnknn.embed.run import train_together
from attnknn.embed.runs import seed_folder
from attnknn.files import FolderBusyError, ResultError
from attnknn.paper.plan import Plan, make_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code: 0 done, 2 the request is wrong.

    Args:
        arguments: Words after ``attnknn.train``; those of the process when None.
    """
    options = _parser().parse_args(arguments)
    try:
        plan = make_plan(
            options.profile,
            notebooks=["01"],
            overrides=dict(parse_setting(text) for text in options.settings),
            seeds=parse_seeds(options.seeds) if options.seeds else None,
            name=options.name,
            results=options.results,
        )
        _train(plan)
    except (ConfigError, FolderBusyError, ResultError) as error:
        print(f"attnknn.train: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    description, _, notes = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m attnknn.train",
        description=description,
        epilog=notes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--profile", default="quick", help="a file of notebooks/params, or a path (default: quick)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
        help="change one parameter; may be repeated")  # fmt: skip
    add("--seeds", metavar="0,1,2", help="seeds to train, also 0-9 (default: those of the profile)")
    add("--name", help="name of the run (default: the profile and what --set changes)")
    add("--results", type=Path, metavar="DIR", help="folder of all runs (default: results)")
    return parser


def _train(plan: Plan) -> None:
    with joined() as group:
        for seed in plan.seeds:
            folder = seed_folder(plan.folder, seed)
            if group.is_first:
                print(f"training {folder} on {group.size} processes", flush=True)
            train_together(replace(plan.assignment.config, seed=seed), folder, group)


if __name__ == "__main__":
    sys.exit(main())
