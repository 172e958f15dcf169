"""Plans and results → what the command line says of them."""

import sys
from collections.abc import Sequence

from attnknn.pipeline.crew import Outcome
from attnknn.pipeline.grid import Grid
from attnknn.pipeline.plan import Plan
from attnknn.pipeline.session import RunResult


def plan_in_words(plan: Plan) -> str:
    """Return what is going to run, and where to, in one line."""
    seeds = ", ".join(str(seed) for seed in plan.seeds)
    names = [
        book.number + ("" if book.name in plan.wanted else " (needed)") for book in plan.notebooks
    ]
    return f"run {plan.folder.name}: notebooks {', '.join(names)}; seeds {seeds}; in {plan.folder}"


def grid_in_words(grid: Grid) -> str:
    """Return what varies, how many runs that makes, and where they go, in one line."""
    sizes = " x ".join(f"{len(values)} {name}" for name, values in grid.axes.items())
    seeds = ", ".join(str(seed) for seed in grid.plans[0].seeds)
    head = f"grid {grid.folder.name}: {len(grid.plans)} runs ({sizes})"
    return f"{head}; seeds {seeds}; in {grid.folder}"


def tell_problems(result: RunResult, label: str = "") -> None:
    """Print what the user should know of a run, failures on stderr; ``label`` goes before it."""
    for outcome in result.failures:
        print(label + failure_in_words(outcome), file=sys.stderr)
    for problem in result.problems:
        print(label + problem, file=sys.stderr)
    if result.adopted:
        taken = ", ".join(f"seed {seed} from {run}" for seed, run in result.adopted.items())
        print(f"{label}trained before, taken over: {taken} (--force trains again)")
    if result.outdated:
        names = ", ".join(result.outdated)
        print(f"{label}kept, though made by other code: {names} (--force remakes them)")


def counts_in_words(results: Sequence[RunResult]) -> str:
    """Return how many notebooks were executed, kept, failed and skipped."""
    names = {"executed": "executed", "kept": "kept", "failures": "failed", "skipped": "skipped"}
    totals = {told: sum(len(getattr(r, name)) for r in results) for name, told in names.items()}
    return ", ".join(f"{count} {told}" for told, count in totals.items() if count)


def failure_in_words(outcome: Outcome) -> str:
    """Return the cell, the error and where to look, in a few lines."""
    details = outcome.details
    where = f" in cell {details['cell']}, In [{details['prompt']}]" if "cell" in details else ""
    source = [f"    | {line}" for line in details.get("source", "").splitlines()[:5]]
    trace = [f"    {line}" for line in details["traceback"]]
    copy = [f"  partly executed copy: {outcome.output}"] if outcome.output.is_file() else []
    head = f"{outcome.task.name} failed{where}: {details['error']}"
    return "\n".join([head, *source, *trace, *copy])
