"""A grid and its results → one table: what varied, what was done, and what came out."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from attnknn.files import read_json
from attnknn.pipeline.grid import Grid
from attnknn.pipeline.parameters import slug
from attnknn.pipeline.session import RunResult
from attnknn.report import pivot_mean_interval, save_table
from attnknn.report.display import MISSING
from attnknn.runs import seed_folder

_MEASURES = Path("02_main_results/measures.csv")
_METHOD, _METRICS = "attention", ("accuracy", "nll", "ece")
_COUNTS = ("executed", "kept", "failures", "skipped")


def summarise_grid(grid: Grid, results: Sequence[RunResult]) -> pd.DataFrame:
    """Write ``grid.csv``, ``grid.md`` and ``grid.tex``, and return the table as text.

    One line a run: its own values; notebooks executed, kept, failed and skipped; and, as mean and
    half of the 95 % interval over seeds, accuracy on the validation rows and the measures of the
    attention on the test rows, where 02_main_results was executed.
    """
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
    save_table(table, grid.folder, "grid", caption=f"The runs of {grid.folder.name}.")
    return table


def _outcomes(run: Path, seeds: Sequence[int]) -> Iterator[dict[str, object]]:
    for seed in seeds:
        report = seed_folder(run, seed) / "report.json"
        metrics = read_json(report).get("metrics", {}) if report.is_file() else {}
        if metrics.get("val_accuracy") is not None:
            yield {"run": run.name, "metric": "val_accuracy", "value": metrics["val_accuracy"]}
    if (run / _MEASURES).is_file():
        found = pd.read_csv(run / _MEASURES)
        shown = found[(found["method"] == _METHOD) & found["metric"].isin(_METRICS)]
        for row in shown.to_dict("records"):
            yield {"run": run.name, "metric": row["metric"], "value": row["value"]}
