"""The arena: ``python -m benchmarks.arena prepare|run|report``.

    python -m benchmarks.arena prepare
    python -m benchmarks.arena run --splits 3 --noise clean,sym20,sym40 --rows 2000 --jobs 2
    python -m benchmarks.arena run --methods attnknn --label now --like before   # ours alone, again
    python -m benchmarks.arena report --labels before,now --to results/arena

Cells are kept under ``--out`` and never measured twice, so a stopped run goes on where it was, and
rivals are measured once for all versions of ours. ``--package`` names another checkout whose
``attnknn`` is judged, under a ``--label`` of its own.
"""

import argparse
from pathlib import Path

from benchmarks.arena.cells import CHEAP, METHODS, Settings, grid, problems_of
from benchmarks.arena.ours import OURS, code, use_package
from benchmarks.arena.problems import NOISE
from benchmarks.arena.tables import TABLES, facts_of, tables_folder

OUT = Path(".arena")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arena",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = lambda text: [part.strip() for part in text.split(",") if part.strip()]  # noqa: E731
    sub = parser.add_subparsers(dest="command", required=True)
    fetch = sub.add_parser("prepare", help="fetch tables into the data cache")
    run = sub.add_parser("run", help="measure the cells that are missing")
    report = sub.add_parser("report", help="write tables and figures from the cells there are")
    for each in (fetch, run, report):
        each.add_argument("--tables", type=names, help="names with commas; all by default")
    for each in (run, report):
        each.add_argument("--out", type=Path, default=OUT, help="folder of the cells")
    run.add_argument("--noise", type=names, default=list(NOISE), help=",".join(NOISE))
    run.add_argument("--splits", type=int, help="of every table; else 10 of small, 5 of large ones")
    run.add_argument("--methods", type=names, default=list(CHEAP), help=",".join(METHODS))
    run.add_argument("--label", help="of our version; the commit by default")
    run.add_argument("--like", help="label whose problems are asked again, no others")
    run.add_argument("--package", type=Path, help="checkout that ours is taken from")
    run.add_argument("--rows", type=int, help="training rows at most; as the cells there are")
    run.add_argument("--test-rows", type=int, help="test rows at most; as the cells there are")
    run.add_argument("--limit", type=float, help="seconds after which a cell is given up")
    run.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    run.add_argument("--scheduler", help="address of a Dask scheduler")
    run.add_argument("--again", action="store_true", help="measure failed cells again")
    report.add_argument("--to", type=Path, default=Path("results/arena"), help="folder to write to")
    report.add_argument("--labels", type=names, help="versions of ours; all by default")
    options = parser.parse_args(arguments)
    if options.tables is None:
        options.tables = list(TABLES)
    known = {"tables": TABLES, "noise": NOISE, "methods": METHODS}
    for name, choices in known.items():
        if wrong := [each for each in getattr(options, name, []) if each not in choices]:
            parser.error(f"{name} must be some of {', '.join(choices)}, got {', '.join(wrong)}")
    for name in ("splits", "rows", "test_rows", "jobs"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            parser.error(f"{name} must be at least 1, got {name}={value}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run one of the three commands."""
    options = parse(arguments)
    if options.command == "prepare":
        from benchmarks.arena.sources import prepare  # needs the package, a run must not

        prepare(options.tables)
        for facts in facts_of(options.tables):
            print(f"{facts.name}: {facts.rows} rows, {facts.numbers} numbers, "
                  f"{facts.categories} categories, {len(facts.classes)} classes")  # fmt: skip
        return
    if options.command == "run":
        run_command(options)
        return
    from benchmarks.arena.report import write_report  # drawing needs the package, a run must not

    print(write_report(options.out, options.to, tables=options.tables, labels=options.labels))


def run_command(options: argparse.Namespace) -> None:
    """Measure the cells that the options ask for."""
    from benchmarks.arena.run import compute, limits, one_thread_each, open_arena

    methods, package = list(options.methods), options.package and options.package.resolve()
    if any(method in OURS for method in methods):
        with one_thread_each():  # asking for its commit imports the package
            use_package(package)
            label = options.label or code()[:7] + ("-dirty" if code().endswith("-dirty") else "")
        print(f"ours: {code()}, labelled {label}")
        methods = [f"{name}@{label}" if name in OURS else name for name in methods]
    folder = options.out.resolve()
    rows, test_rows = limits(folder, options.rows, options.test_rows)
    settings = Settings(folder, tables_folder(), rows, test_rows, options.limit, package)
    open_arena(settings)
    cells = grid(facts_of(options.tables), options.noise, options.splits, methods, max_rows=rows)
    if options.like:
        asked = problems_of(folder, options.like)
        cells = [cell for cell in cells if cell[:3] in asked]
    compute(
        cells,
        settings,
        n_jobs=options.jobs,
        scheduler=options.scheduler,
        again=options.again,
    )


if __name__ == "__main__":
    main()
