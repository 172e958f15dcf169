"""Rank AttnKNNClassifier among its peers: data sets x seeds, clean and with wrong labels.

    python benchmarks/estimator_ranks.py --cifar-run results/cifar10/seed0

Each (data set, seed, noise, method) is one file under ``<out>/runs`` and is not computed twice, so
a stopped comparison goes on where it was; the tables and the figure are drawn from what is there.
``--datasets`` and ``--methods`` take names separated by ``;`` and restrict what is computed.

Without ``--cifar-run`` there are no CIFAR-10 embeddings, and the principal axes of its pixels stand
alone. Of data sets with more than ``--max-rows`` training rows each seed draws as many, for all
methods alike, to save time: cross-validated gradient boosting and NCA are slow on many rows.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from attnknn import plot, report
from attnknn.compare import interval_table
from attnknn.files import locked_folder, read_json, write_json, write_text
from attnknn.peers import (
    ATTENTION,
    CIFAR_EMBEDDINGS,
    CLEANLAB,
    KNN_FAMILY,
    METHODS,
    PROBLEMS,
    critical_difference,
    load_problem,
    measure_cleanlab,
    measure_method,
    rank_table,
)

SHOWN = ("nll", "brier", "ece", "accuracy")
NOTES = {
    "kNN": "tuned on at most 5 000 training rows, fitted on all",
    "NCA + kNN": "metric learned on at most 2 000 training rows",
    "floor": "every method's probabilities get the same floor of 0.001 / C",
}


def cells(options: argparse.Namespace) -> list[tuple[str, int, float, str]]:
    """Return what is to be computed; everything of one problem stands together."""
    methods = [name for name in (*METHODS, *CLEANLAB) if name in options.methods]
    grid = itertools.product(options.datasets, options.seeds, options.noise, methods)
    return [cell for cell in grid if cell[2] > 0 or cell[3] not in CLEANLAB]


def path_of(folder: Path, cell: tuple[str, int, float, str]) -> Path:
    """Return the file of a cell."""
    dataset, seed, noise, method = cell
    name = f"{method} noise{noise:g} seed{seed}"
    return folder / "runs" / report.safe_name(dataset) / f"{report.safe_name(name)}.json"


def compute(options: argparse.Namespace) -> None:
    """Fill in the cells that are not there yet."""
    missing = [cell for cell in cells(options) if not path_of(options.out, cell).exists()]
    problem, loaded = None, None
    for cell in (bar := tqdm(missing, desc="cells")):
        dataset, seed, noise, method = cell
        bar.set_postfix_str(f"{dataset}, seed {seed}, noise {noise:g}, {method}")
        if loaded != cell[:3]:
            problem = load_problem(
                dataset,
                seed=seed,
                noise=noise,
                cifar_run=options.cifar_run,
                max_rows=options.max_rows,
            )
            loaded = cell[:3]
        measure = measure_cleanlab if method in CLEANLAB else measure_method
        found = measure(method, problem, seed=seed)
        facts = {"dataset": dataset, "seed": seed, "noise": noise, "method": method}
        rows = {"rows": len(problem.labels), "test_rows": len(problem.test_labels)}
        write_json(path_of(options.out, cell), facts | rows | found)


def read_cells(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return every cell that is asked for and there."""
    paths = (path_of(options.out, cell) for cell in cells(options))
    return [read_json(path) for path in paths if path.exists()]


def tidy_metrics(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Return one row per cell and measure."""
    keys = ("dataset", "seed", "noise", "method")
    return pd.DataFrame(
        [
            {**{key: cell[key] for key in keys}, "metric": metric, "value": cell["metrics"][metric]}
            for cell in found
            for metric in SHOWN
            if "metrics" in cell
        ]
    )


def complete(tidy: pd.DataFrame) -> pd.DataFrame:
    """Return the problems that every method has been measured on: ranks need all of them."""
    n_methods = tidy["method"].nunique()
    whole = tidy.groupby(["dataset", "noise", "seed"])["method"].transform("nunique") == n_methods
    return tidy[whole]


def write_ranks(tidy: pd.DataFrame, noise: float, folder: Path) -> dict[str, Any]:
    """Save the ranks, their figure and the measures of one noise level; return what was found."""
    here = complete(tidy[tidy["noise"] == noise])
    ranks = rank_table(here)
    order = ranks[ranks["metric"] == "nll"].sort_values("mean")["method"].tolist()
    ranks = ranks.set_index("method").loc[order].reset_index()
    n_datasets = int(here["dataset"].nunique())
    gap = critical_difference(len(order), n_datasets)
    name = f"noise{round(100 * noise)}"
    shown = ranks.assign(
        text=[
            f"{row.mean_rank:.2f}"
            for row in ranks.rename(columns={"mean": "mean_rank"}).itertuples()
        ]
    ).pivot(index="method", columns="metric", values="text")
    shown = shown.loc[order, list(SHOWN)].rename(
        columns=lambda m: f"rank in {plot.metric_label(m)}"
    )
    n_seeds = here.groupby("dataset")["seed"].nunique()
    seeds = f"{n_seeds.min()} to {n_seeds.max()}" if np.ptp(n_seeds) else f"{n_seeds.max()}"
    caption = (
        f"Mean rank over {n_datasets} data sets ({seeds} seeds each) with {round(100 * noise)} % "
        f"of all training labels wrong (1 is best); ranks that differ by {gap:.2f} can be told "
        "apart (Nemenyi, 5 %)."
    )
    report.save_table(shown, folder, f"ranks_{name}", caption=caption)
    values = interval_table(here, ["dataset", "method", "metric"])
    report.save_table(values, folder, f"measures_{name}", caption="Means over seeds.")
    figure = plot.method_dots(
        ranks.assign(metric="rank in " + ranks["metric"].map(plot.metric_label)),
        [f"rank in {plot.metric_label(metric)}" for metric in SHOWN],
    )
    report.save_figure(figure, folder, f"ranks_{name}")
    return {
        "critical_difference": gap,
        "datasets": n_datasets,
        "seeds": n_seeds.to_dict(),
        "first": {m: _first(ranks, m, METHODS) for m in SHOWN},
        "first_of_knn_family": {m: _first(ranks, m, KNN_FAMILY) for m in SHOWN},
        "mean_ranks": {
            m: dict(ranks[ranks["metric"] == m][["method", "mean"]].to_numpy()) for m in SHOWN
        },
    }


def _first(ranks: pd.DataFrame, metric: str, among: tuple[str, ...]) -> str:
    rows = ranks[(ranks["metric"] == metric) & ranks["method"].isin(among)]
    return str(rows.loc[rows["mean"].idxmin(), "method"])


def write_issues(found: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """Save how well wrong labels are found; return the mean over data sets."""
    rows = [
        {key: cell[key] for key in ("dataset", "seed", "method", "issue_auroc")}
        for cell in found
        if "issue_auroc" in cell
    ]
    if not rows:
        return {}
    means = pd.DataFrame(rows).groupby(["dataset", "method"], sort=False)["issue_auroc"].mean()
    table = means.unstack("method").dropna()
    table.loc["mean"] = table.mean()
    caption = "Area under the ROC curve of finding the flipped labels; mean over seeds."
    report.save_table(table.rename_axis("data set"), folder, "label_issues", caption=caption)
    return {name: float(value) for name, value in table.loc["mean"].items()}


def write_cells(found: list[dict[str, Any]], folder: Path) -> None:
    """Save every cell as one row of a table: what all else can be computed from."""
    rows = [
        {key: value for key, value in cell.items() if not isinstance(value, dict)}
        | cell.get("metrics", {})
        | {f"seconds_{stage}": taken for stage, taken in cell["seconds"].items()}
        for cell in found
    ]
    write_text(folder / "cells.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


def command(options: argparse.Namespace) -> str:
    """Return what has to be typed for the same comparison; runs are looked for in results."""
    words = ["python benchmarks/estimator_ranks.py", f"--max-rows {options.max_rows}"]
    words.append(f"--seeds {','.join(map(str, options.seeds))}")
    if options.cifar_run:
        words.append(f"--cifar-run {Path('results', *options.cifar_run.parts[-2:])}")
    return " ".join(words)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = lambda text: [part.strip() for part in text.split(";")]  # noqa: E731
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--out", type=Path, default=Path("results/estimator"))
    parser.add_argument("--datasets", type=names, help="separated by ;")
    parser.add_argument("--methods", type=names, default=[*METHODS, *CLEANLAB])
    parser.add_argument("--seeds", type=numbers(int), default=[0, 1, 2, 3, 4])
    parser.add_argument("--noise", type=numbers(float), default=[0.0, 0.3])
    parser.add_argument("--cifar-run", type=Path, help="folder of a trained CIFAR-10 run")
    parser.add_argument("--max-rows", type=int, default=10_000, help="training rows at most")
    parser.add_argument("--only-report", action="store_true", help="compute nothing")
    options = parser.parse_args()
    if options.datasets is None:
        options.datasets = [
            name for name in PROBLEMS if options.cifar_run or name != CIFAR_EMBEDDINGS
        ]
    return options


def main() -> None:
    """Compute what is missing, then write tables, figures and report.json."""
    options = parse()
    with locked_folder(options.out):
        if not options.only_report:
            compute(options)
        found = read_cells(options)
        tidy = tidy_metrics(found)
        write_cells(found, options.out)
        plot.use_style()
        metrics = {
            f"noise {noise:g}": write_ranks(tidy, noise, options.out)
            for noise in options.noise
            if noise in set(tidy["noise"])
        }
        metrics["label_issues_auroc"] = write_issues(found, options.out)
        seconds = {"fit and predict": float(np.sum([sum(c["seconds"].values()) for c in found]))}
        report.save_report(
            options.out,
            config={
                "command": command(options),
                "seeds": options.seeds,
                "noise": options.noise,
                "max_rows": options.max_rows,
                "notes": NOTES,
                "rows": {cell["dataset"]: [cell["rows"], cell["test_rows"]] for cell in found},
            },
            seed=options.seeds[0],
            metrics=metrics,
            seconds=seconds,
            overwrite=True,
            method=ATTENTION,
        )


if __name__ == "__main__":
    main()
