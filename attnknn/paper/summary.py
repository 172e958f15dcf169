"""A grid and its results → one table: what varied, what was done, and what came out."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnknn.embed.runs import seed_folder
from attnknn.files import read_json
from attnknn.paper.execute import Outcome, RunResult
from attnknn.paper.notebooks import slug
from attnknn.paper.plan import Grid, Plan

if TYPE_CHECKING:
    import pandas as pd

# ---- Plans and results → what the command line says of them.


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


_MEASURES = Path("02_main_results/measures.csv")
_METHOD, _METRICS = "attention", ("accuracy", "nll", "ece")
_COUNTS = ("executed", "kept", "failures", "skipped")


def summarise_grid(grid: Grid, results: Sequence[RunResult]) -> "pd.DataFrame":
    """Write ``grid.csv`` and ``grid.md``, and return the table as text.

    One line a run: its own values; notebooks executed, kept, failed and skipped; and, as mean and
    half of the 95 % interval over seeds, accuracy on the validation rows and the measures of the
    attention on the test rows, where 02_main_results was executed.
    """
    import pandas as pd  # slow to import, and the checks of a command need none of it

    from attnknn.figures.tables import MISSING, pivot_mean_interval, save_table

    lines = []
    for plan, result in zip(grid.plans, results, strict=True):
        values = {name: slug(value) for name, value in grid.point(plan).items()}
        counts = {name: len(getattr(result, name)) for name in _COUNTS}
        lines.append({"run": plan.folder.name} | values | counts)
    table = pd.DataFrame(lines).set_index("run").rename(columns={"failures": "failed"})
    tidy = pd.DataFrame(
        [row for plan in grid.plans for row in _outcomes(plan.folder, plan.seeds)],
        columns=["run", "metric", "value"],
    )
    if len(tidy):
        measured = pivot_mean_interval(tidy, index="run").text
        table = table.join(measured.rename(columns={"n": "seeds"})).fillna(MISSING)
    table = table.reset_index(drop=True)
    caption = f"The runs of {grid.folder.name}."
    save_table(table, grid.folder, "grid", caption=caption, also=["md"])
    return table


def _outcomes(run: Path, seeds: Sequence[int]) -> Iterator[dict[str, object]]:
    for seed in seeds:
        report = seed_folder(run, seed) / "report.json"
        metrics = read_json(report).get("metrics", {}) if report.is_file() else {}
        if metrics.get("val_accuracy") is not None:
            yield {"run": run.name, "metric": "val_accuracy", "value": metrics["val_accuracy"]}
    if (run / _MEASURES).is_file():
        import pandas as pd

        found = pd.read_csv(run / _MEASURES)
        shown = found[(found["method"] == _METHOD) & found["metric"].isin(_METRICS)]
        for row in shown.to_dict("records"):
            yield {"run": run.name, "metric": row["metric"], "value": row["value"]}
