"""One table over data sets: the main results of several finished runs, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from attnknn.files import read_json
from attnknn.provenance import REPORT_NAME
from attnknn.runs import run_folder

NOTEBOOK = "02_main_results"
MEASURES = f"{NOTEBOOK}/measures.csv"
SHOWN = ("uniform", "uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "attention")
HEADS = ("cnn + temperature",)


def finished_runs(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the runs of a table over data sets: those named, in their order, that are finished.

    What else lies in the results folder does not count, nor the order in which runs were made.

    Args:
        folder: The run that asks; in its place among the names, or first.
        names: Runs by name (beside ``folder``) or path. One whose report is missing, not complete
            or without main results is left out.
    """
    own = Path(folder).resolve()
    places = [own.parent / name if Path(name).name == name else run_folder(name) for name in names]
    named = list(dict.fromkeys(path.resolve() for path in places))
    if own not in named:
        named.insert(0, own)
    return [path for path in named if path == own or _is_complete(path)]


def _is_complete(run: Path) -> bool:
    """Whether a run's report says that its main results are complete, and they are there."""
    return (run / MEASURES).is_file() and _entry(run).get("status") == "complete"


def _entry(run: Path) -> dict[str, Any]:
    """Return what a run's report says about its main results; nothing where it says nothing."""
    report = run / REPORT_NAME
    return read_json(report).get("notebooks", {}).get(NOTEBOOK, {}) if report.is_file() else {}


def read_measures(runs: Sequence[Path], own: Path) -> pd.DataFrame:
    """Return the saved measures of several runs, with the run's name and origin as columns.

    Args:
        runs: From ``finished_runs``.
        own: The run that asks, whose report is not written yet.
    """
    tables = []
    for path in runs:
        made = "this run" if path.resolve() == Path(own).resolve() else made_from(path)
        tables.append(pd.read_csv(path / MEASURES).assign(run=path.name, made=made))
    return pd.concat(tables, ignore_index=True)


def made_from(run: Path) -> str:
    """Return the day on which a run's main results were made, and the commit of the code."""
    entry = _entry(run)
    return f"{str(entry.get('finished', ''))[:10]} {str(entry.get('commit', ''))[:7]}".strip()


def datasets_table(
    measures: pd.DataFrame, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")
) -> pd.DataFrame:
    """Return one row per run, method and measure, in the order in which the runs were given.

    ``low`` and ``high`` are the intervals over test rows that a run of one seed has saved.

    Args:
        measures: From ``read_measures``.
        metrics: Measures to keep.
    """
    shown = measures[
        measures["method"].isin([*SHOWN, *HEADS]) & measures["metric"].isin(list(metrics))
    ]
    data = shown["dataset"].map(lambda name: Path(str(name)).stem)
    columns = ["run", "made", "data", "method", "metric", "seed", "value", "low", "high"]
    return shown.assign(data=data).reindex(columns=columns)


def ranks(measures: pd.DataFrame, *, metric: str = "nll") -> pd.DataFrame:
    """Return each method's mean rank over the runs; 1 is best. Only methods that every run has."""
    rows = measures[(measures["metric"] == metric) & measures["method"].isin(SHOWN)]
    wide = rows.pivot_table(index="run", columns="method", values="value", aggfunc="mean")
    wide = wide.dropna(axis=1)[[name for name in SHOWN if name in wide.dropna(axis=1)]]
    ranked = wide.rank(axis=1, ascending=metric != "accuracy")
    return ranked.mean().rename("mean rank").rename_axis("method").reset_index()
