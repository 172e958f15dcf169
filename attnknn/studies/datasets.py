"""One table over data sets: the main results of several finished runs, side by side."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from attnknn.runs import run_folder

MEASURES = "02_main_results/measures.csv"
SHOWN = ("uniform", "uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "attention")
HEADS = ("cnn + temperature",)


def finished_runs(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Return the run folders whose main results are saved.

    Args:
        folder: The run that asks; always among them once its own results are saved.
        names: Other runs, by name or path. Without any, all runs beside ``folder``.
    """
    if names:
        others = [run_folder(name) for name in names]
        missing = [str(path) for path in others if not (path / MEASURES).is_file()]
        if missing:
            raise ValueError(f"beside must name runs with saved main results, got {missing}")
    else:
        others = [path.parents[1] for path in sorted(Path(folder).parent.glob(f"*/{MEASURES}"))]
    own = Path(folder).resolve()
    return [own, *(path for path in others if path.resolve() != own)]


def read_measures(runs: Sequence[Path]) -> pd.DataFrame:
    """Return the saved measures of several runs, with the run's name as a column."""
    tables = [pd.read_csv(path / MEASURES).assign(run=path.name) for path in runs]
    return pd.concat(tables, ignore_index=True)


def datasets_table(
    measures: pd.DataFrame, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")
) -> pd.DataFrame:
    """Return one row per run and method, in the order in which the runs were given.

    Args:
        measures: From ``read_measures``.
        metrics: Measures to keep.
    """
    shown = measures[
        measures["method"].isin([*SHOWN, *HEADS]) & measures["metric"].isin(list(metrics))
    ]
    data = shown["dataset"].map(lambda name: Path(str(name)).stem)
    return shown.assign(data=data)[["run", "data", "method", "metric", "seed", "value"]]


def ranks(measures: pd.DataFrame, *, metric: str = "nll") -> pd.DataFrame:
    """Return each method's mean rank over the runs; 1 is best. Only methods that every run has."""
    rows = measures[(measures["metric"] == metric) & measures["method"].isin(SHOWN)]
    wide = rows.pivot_table(index="run", columns="method", values="value", aggfunc="mean")
    wide = wide.dropna(axis=1)[[name for name in SHOWN if name in wide.dropna(axis=1)]]
    ranked = wide.rank(axis=1, ascending=metric != "accuracy")
    return ranked.mean().rename("mean rank").rename_axis("method").reset_index()
