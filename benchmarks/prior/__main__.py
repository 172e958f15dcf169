"""The prior: ``python -m benchmarks.prior train|report``.

    python -m benchmarks.prior train     # draws tables, learns, writes the file that is shipped
    python -m benchmarks.prior report    # validation NLL by kind of table, beside simple voices

Tables are drawn once and kept under ``--work``, and so is the training: a stopped run goes on where
it was and ends with the same digits.
"""

import argparse
from pathlib import Path

import torch

from attnknn.checks import check_count
from attnknn.core.prior import PRIOR_FILE, read_prior, save_prior
from benchmarks.prior.samples import VALIDATION_SEEDS, Sample, kept_samples
from benchmarks.prior.train import LOG_NAME, Settings, compared, summed_up, train

LOG_FILE = Path(__file__).with_name(LOG_NAME)  # of the shipped prior


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # tiny tensors: more threads are slower, and add in another order
    return {"train": learn, "report": report}[options.command](options)


def learn(options: argparse.Namespace) -> int:
    """Learn a prior and write it, with the curve of its validation."""
    settings = Settings(
        n_tables=check_count("tables", options.tables),
        n_steps=check_count("steps", options.steps),
        width=check_count("width", options.width),
        seed=options.seed,
    )
    judges = validation(options)
    samples = kept_samples(options.work, 0, settings.n_tables)
    network = train(settings, options.work, samples, judges)
    made_from = {"tables": str(settings.n_tables), "steps": str(settings.n_steps)}
    print(save_prior(network, options.to, made_from))
    shipped = options.to.resolve() == PRIOR_FILE.resolve()
    log = LOG_FILE if shipped else options.to.with_suffix(".csv")
    log.write_bytes((options.work / LOG_NAME).read_bytes())
    return 0


def report(options: argparse.Namespace) -> int:
    """Print the validation NLL of a prior, of plain votes, prototypes and the expert."""
    table = summed_up(compared(read_prior(options.prior), validation(options)))
    print(table.to_string(index=False, float_format="{:.3f}".format))
    return 0


def validation(options: argparse.Namespace) -> list[Sample]:
    """Return samples of tables that are never trained on."""
    count = check_count("validation", options.validation)
    return kept_samples(options.work, VALIDATION_SEEDS, count, title="validation")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prior",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub = parser.add_subparsers(dest="command", required=True)
    learning = sub.add_parser("train", help=learn.__doc__)
    reporting = sub.add_parser("report", help=report.__doc__)
    for each in (learning, reporting):
        each.add_argument("--work", type=Path, default=Path(".prior"), help="folder to go on from")
        each.add_argument("--validation", type=int, default=300, help="tables that judge")
    learning.add_argument("--tables", type=int, default=Settings.n_tables, help="to learn from")
    learning.add_argument("--steps", type=int, default=Settings.n_steps)
    learning.add_argument("--width", type=int, default=Settings.width, help="of hidden layers")
    learning.add_argument("--seed", type=int, default=Settings.seed)
    learning.add_argument("--to", type=Path, default=PRIOR_FILE, help="file to write")
    reporting.add_argument("--prior", type=Path, default=PRIOR_FILE, help="file to judge")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
