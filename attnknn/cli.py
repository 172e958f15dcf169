"""The command ``attnknn``: run notebooks, fetch data, print PDFs.

Everything heavy is imported by the command that needs it, so that ``--help`` answers at once.
"""

import argparse
import errno
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

_EXAMPLES = """\
examples:
  attnknn run                                   all notebooks on a small data set, in minutes
  attnknn run --profile cifar10 --seeds 0-4     five seeds, and every study on all of them
  attnknn run --notebooks 01,03 --set k_eval=10
  attnknn run --grid grid.yaml --seeds 0-9      every combination of the lists in a file, on Dask
  attnknn data list
  attnknn data fetch cifar10 mnist
  attnknn pdf results/quick/notebooks/03_k_sweep.ipynb
"""
_RUN_NOTES = """\
A run is a folder: results/NAME/ with trained seeds, executed notebooks, tables, figures, PDFs and
report.json. Started again, only what is missing or outdated is executed; a killed run goes on where
it was, more --seeds extend it. With --grid, results/NAME/ holds one such folder a combination
(k_eval=9,lr=0.5) and a table of all of them; the notebooks go to a Dask cluster.
Exit code: 0 done, 1 a notebook failed, 2 the request is wrong.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: Words after ``attnknn``; those of the process when None.
    """
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_note
            return options.command(options)
    except KeyboardInterrupt:
        return _complain("interrupted; the same command goes on from here", code=130)
    except OSError as error:
        return _complain(_spoken(error))
    except Exception as error:
        # What speaks for itself; a traceback would only hide it. By name: their homes load much.
        named = {"FolderBusyError", "DataUnavailableError", "PDFError", "DamagedError"}
        if not isinstance(error, ValueError) and type(error).__name__ not in named:
            raise
        return _complain(str(error))


def _show_note(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line; where in the code it arose helps nobody on a command line."""
    print(f"attnknn: note: {message}", file=sys.stderr)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of ``"0,1,2"``, ``"0-9"`` or a mixture of both."""
    from attnknn.config import ConfigError

    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"seeds must look like 0,1,2 or 0-9, got seeds={text!r}")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds must be different and at least one, got seeds={text!r}")
    return seeds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnknn",
        description="A k-nearest-neighbour classifier that learns how much each neighbour counts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"attnknn {version('attnknn')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    data = commands.add_parser("data", help="list or fetch data sets")
    actions = data.add_subparsers(title="commands", required=True, metavar="COMMAND")
    listing = actions.add_parser("list", help="show all data sets and whether they are here")
    listing.set_defaults(command=_list_data)
    fetching = actions.add_parser("fetch", help="fetch and verify data sets")
    fetching.add_argument("names", nargs="*", metavar="NAME", help="data sets, see `data list`")
    fetching.add_argument("--all", action="store_true", help="every data set that can be fetched")
    fetching.add_argument("--force", action="store_true", help="fetch again what is here already")
    fetching.set_defaults(command=_fetch_data)
    printing = commands.add_parser("pdf", help="turn executed notebooks into PDFs")
    printing.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    printing.add_argument("--output", type=Path, help="the PDF, or a folder for several")
    printing.set_defaults(command=_print_pdfs)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="execute the notebooks with one set of parameters",
        epilog=_RUN_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = run.add_argument
    add("--profile", default="quick", help="a file of notebooks/params, or a path (default: quick)")
    add("--notebooks", metavar="01,03", help="numbers or names (default: all)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
        help="change one parameter; may be repeated")  # fmt: skip
    add("--seeds", metavar="0,1,2", help="seeds to train, also 0-9 (default: those of the profile)")
    add("--grid", type=Path, metavar="FILE",
        help="YAML, a list of values a parameter: one run for each combination")  # fmt: skip
    add("--scheduler", metavar="WHERE",
        help="local (a Dask cluster on this machine, the default with --grid), the address of an "
        "existing one (tcp://host:8786), or none (without Dask)")  # fmt: skip
    add("--jobs", type=int, help="notebooks at a time (default: the cores, at most 4)")
    add("--name", help="name of the run (default: the profile and what --set changes)")
    add("--results", type=Path, metavar="DIR", help="folder of all runs (default: results)")
    add("--force", action="store_true", help="execute again what is complete, and replace it")
    add("--no-pdf", action="store_true", help="leave the PDFs out")
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from attnknn.config import parse_setting

    request = {
        "notebooks": options.notebooks.split(",") if options.notebooks else None,
        "overrides": dict(parse_setting(text) for text in options.settings),
        "seeds": parse_seeds(options.seeds) if options.seeds else None,
        "name": options.name,
        "results": options.results,
    }
    if options.grid is not None:
        return _run_grid(options, request)
    from attnknn.paper.dask import check_scheduler, run_plans
    from attnknn.paper.execute import run_pipeline
    from attnknn.paper.plan import make_plan
    from attnknn.paper.summary import counts_in_words, plan_in_words, tell_problems

    plan = make_plan(options.profile, **request)
    scheduler = check_scheduler(options.scheduler or "none", n_jobs=options.jobs)
    print(plan_in_words(plan), flush=True)
    _end_like_ctrl_c()
    how = {"n_jobs": options.jobs, "force": options.force, "pdf": not options.no_pdf}
    if scheduler == "none":
        result = run_pipeline(plan, **how)
    else:
        (result,) = run_plans([plan], scheduler=scheduler, **how)
    tell_problems(result)
    report = result.folder / "report.pdf"
    place = report if result.is_complete and report.is_file() else result.folder
    print(f"{counts_in_words([result])} in {result.seconds:.0f} s: {place}")
    return 0 if result.is_complete else 1


def _run_grid(options: argparse.Namespace, request: dict[str, Any]) -> int:
    from attnknn.files import locked_folder
    from attnknn.paper.dask import check_scheduler, run_plans
    from attnknn.paper.plan import make_grid
    from attnknn.paper.summary import (
        counts_in_words,
        grid_in_words,
        summarise_grid,
        tell_problems,
    )

    grid = make_grid(options.grid, options.profile, **request)
    scheduler = check_scheduler(options.scheduler or "local", n_jobs=options.jobs)
    grid.refuse_foreign()
    if not options.force:
        grid.refuse_other_parameters()
    print(grid_in_words(grid), flush=True)
    _end_like_ctrl_c()
    start = time.monotonic()
    with locked_folder(grid.folder):
        grid.save()
        results = run_plans(
            grid.plans,
            scheduler=scheduler,
            n_jobs=options.jobs,
            force=options.force,
            pdf=not options.no_pdf,
        )
        for result in results:
            tell_problems(result, f"{result.folder.name}: ")
        print(summarise_grid(grid, results).to_string(index=False))
    seconds = time.monotonic() - start
    print(f"{counts_in_words(results)} in {seconds:.0f} s: {grid.folder / 'grid.md'}")
    return 0 if all(result.is_complete for result in results) else 1


def _end_like_ctrl_c() -> None:
    """Let a polite kill or a closed terminal end the kernels, too, as Ctrl-C does."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # nohup ignores SIGHUP on purpose: only the default behaviour is replaced.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _list_data(_: argparse.Namespace) -> int:
    from attnknn.data.download import list_datasets

    print(list_datasets().to_string(index=False))
    return 0


def _fetch_data(options: argparse.Namespace) -> int:
    from attnknn.config import ConfigError
    from attnknn.data.download import DataUnavailableError, fetch, list_datasets

    if bool(options.names) == options.all:
        raise ConfigError("data fetch must get names or --all, and not both")
    missing = 0
    for name in list(list_datasets()["name"]) if options.all else options.names:
        try:
            files = fetch(name, force=options.force)
            print(f"{name}: {len(files)} files verified")
        except DataUnavailableError as error:
            missing = _complain(str(error))
    return missing


def _print_pdfs(options: argparse.Namespace) -> int:
    from attnknn.paper.pdf import notebook_to_pdf

    output = options.output
    if output and len(options.notebooks) > 1 and output.suffix == ".pdf":
        raise ValueError(f"output must be a folder for several notebooks, got output={output}")
    for path in options.notebooks:
        target = output / f"{path.stem}.pdf" if output and output.suffix != ".pdf" else output
        print(notebook_to_pdf(path, target))
    return 0


def _spoken(error: OSError) -> str:
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{place}; make room, the same command goes on from here"
    if isinstance(error, PermissionError):
        return f"no permission to write or read{place}"
    return f"{error.strerror or error}{place}"


def _complain(message: str, *, code: int = 2) -> int:
    print(f"attnknn: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
