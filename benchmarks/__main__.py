"""Command line of the benchmarks: ``python -m benchmarks [suite|check|million|exponents|plan]``."""

import argparse
import shutil
import sys
from pathlib import Path

from benchmarks import set_settings_aside

ROOT = Path(__file__).parent
RESULTS = ROOT.parent / "results" / "bench"
BASELINE = ROOT / "baseline.json"
PLAN = ROOT.parent / "docs" / "scaling.md"


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    return COMMANDS[options.command](options)


def suite(options: argparse.Namespace) -> int:
    """Measure all ratios; with --save they become the baseline."""
    from attnknn.files import write_json
    from benchmarks.suite import run_suite, table
    from benchmarks.timing import FULL, QUICK

    sizes = QUICK if options.quick else FULL
    result = run_suite(options.out, sizes=sizes, only=tuple(options.only))
    print(table(result))
    if options.save:
        write_json(BASELINE, result)
        PLAN.parent.mkdir(exist_ok=True)
        shutil.copy(options.out / "bench.svg", PLAN.parent / "bench.svg")
    return 0


def check(options: argparse.Namespace) -> int:
    """Measure and compare with the baseline; 1 when a ratio has become worse."""
    from attnknn.files import read_json
    from benchmarks.suite import FILE, other_machine, regressions

    if not options.baseline.exists():
        print(f"{options.baseline} must exist: make it with `python -m benchmarks suite --save`")
        return 2
    if not options.reuse:
        suite(argparse.Namespace(**vars(options) | {"save": False}))
    result, baseline = read_json(options.out / FILE), read_json(options.baseline)
    if options.only:
        measured = {row["name"] for row in result["ratios"]}
        baseline["ratios"] = [row for row in baseline["ratios"] if row["name"] in measured]
    if difference := other_machine(result, baseline):
        print(f"note: {difference}")
    found = regressions(result, baseline)
    print("\n".join(found) or f"all {len(baseline['ratios'])} ratios are within the tolerance")
    return 1 if found else 0


def million(options: argparse.Namespace) -> int:
    """Build, tune and search a million rows of width 128."""
    from benchmarks.growth import MILLION_FILE, run_million

    for name, row in run_million(
        options.out, n_rows=options.rows, names=tuple(options.only)
    ).items():
        print(name, {key: value for key, value in row.items() if key != "curve"})
    return _kept(options, MILLION_FILE)


def exponents(options: argparse.Namespace) -> int:
    """Fit how search, trust and stage 2 grow with the rows."""
    from benchmarks.growth import EXPONENTS_FILE, run_exponents

    for name, value in run_exponents(options.out, quick=options.quick).items():
        print(f"{name:<8} n ** {value:.2f}")
    return _kept(options, EXPONENTS_FILE)


def plan(options: argparse.Namespace) -> int:
    """Write docs/scaling.md from the figures that were saved."""
    from benchmarks.plan import write_page

    try:
        print(write_page(options.figures, options.page))
    except FileNotFoundError as error:
        print(error)
        return 2
    return 0


def _kept(options: argparse.Namespace, name: str) -> int:
    """With --save, put a result where the plan reads it."""
    if options.save:
        shutil.copy(options.out / name, ROOT / name)
    return 0


COMMANDS = {
    "suite": suite,
    "check": check,
    "million": million,
    "exponents": exponents,
    "plan": plan,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    helps = [f"{name}: {run.__doc__.splitlines()[0]}" for name, run in COMMANDS.items()]
    parser.add_argument(
        "command", nargs="?", default="suite", choices=COMMANDS, help=" ".join(helps)
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--only", nargs="*", default=[], help="groups of the suite, or indexes")
    parser.add_argument("--save", action="store_true", help="keep it as baseline or figures")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="what check compares with")
    parser.add_argument("--reuse", action="store_true", help="check the last result again")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the million command")
    parser.add_argument("--figures", type=Path, default=ROOT, help="folder that the plan reads")
    parser.add_argument("--page", type=Path, default=PLAN, help="page that the plan writes")
    return parser


if __name__ == "__main__":
    set_settings_aside()  # before anything loads numpy
    sys.exit(main())
