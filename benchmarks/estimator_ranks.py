"""Rank AttnKNNClassifier among its peers: data sets x seeds, clean and with wrong labels.

    python -m benchmarks.estimator_ranks --cifar-run results/cifar10/seed0 --jobs 2

Each (data set, seed, noise, method) is one file under ``<out>/runs`` and is not computed twice, so
a stopped comparison goes on where it was; ``estimator_cells`` says when a file is out of date.
``--datasets`` and ``--methods`` take names separated by ``;`` and restrict what is computed.
``--only-report`` draws tables and figures from what is there, also of older code, and says so.

Without ``--cifar-run`` there are no CIFAR-10 embeddings, and the principal axes of its pixels stand
alone. Of data sets with more than ``--max-rows`` training rows each seed draws as many, for all
methods alike: ranks are fair only on the same rows, and cross-validated peers do not cope with all
of them on a small machine. The report has the seconds of every method.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attnknn import plot, report
from attnknn.compare import interval_table
from attnknn.files import locked_folder, write_text
from attnknn.peers import (
    ATTENTION,
    CIFAR_EMBEDDINGS,
    CLEANLAB,
    KNN_FAMILY,
    METHODS,
    PROBLEMS,
    critical_difference,
    rank_table,
)
from benchmarks.estimator_cells import Settings, compute, grid, has_same_rows, read_cells
from benchmarks.estimator_words import code_words, notes, verdict

SHOWN = ("nll", "brier", "ece", "accuracy")


def tidy_metrics(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Return one row per cell and measure."""
    keys = ("dataset", "seed", "noise", "method")
    rows = [
        {**{key: cell[key] for key in keys}, "metric": metric, "value": cell["metrics"][metric]}
        for cell in found
        for metric in SHOWN
        if "metrics" in cell
    ]
    return pd.DataFrame(rows, columns=[*keys, "metric", "value"])


def complete(tidy: pd.DataFrame) -> pd.DataFrame:
    """Return the problems that every method has been measured on: ranks need all of them."""
    n_methods = tidy["method"].nunique()
    whole = tidy.groupby(["dataset", "noise", "seed"])["method"].transform("nunique") == n_methods
    return tidy[whole]


def write_ranks(tidy: pd.DataFrame, noise: float, folder: Path) -> dict[str, Any]:
    """Save ranks, their figure and the measures of one noise level; return what was found.

    Args:
        tidy: Problems that every method has been measured on.
        noise: Their noise.
        folder: Where to.
    """
    name = f"noise{round(100 * noise)}"
    ranks = ordered_ranks(tidy)
    figure = plot.method_dots(
        ranks.assign(metric="rank in " + ranks["metric"].map(plot.metric_label)),
        [f"rank in {plot.metric_label(metric)}" for metric in SHOWN],
    )
    report.save_figure(figure, folder, f"ranks_{name}")
    values = interval_table(tidy, ["dataset", "method", "metric"])
    report.save_table(values, folder, f"measures_{name}", caption="Means over seeds.")
    family = tidy[tidy["method"].isin(KNN_FAMILY)]
    found = {"all": write_rank_table(tidy, noise, folder, f"ranks_{name}")}
    if family["method"].nunique() > 1:
        found["knn_family"] = write_rank_table(family, noise, folder, f"ranks_knn_{name}")
    return found


def ordered_ranks(tidy: pd.DataFrame) -> pd.DataFrame:
    """Return the rank table, methods in the order of their rank in NLL."""
    ranks = rank_table(tidy)
    order = ranks[ranks["metric"] == "nll"].sort_values("mean")["method"]
    return ranks.set_index("method").loc[order.tolist()].reset_index()


def write_rank_table(tidy: pd.DataFrame, noise: float, folder: Path, name: str) -> dict[str, Any]:
    """Save the mean ranks of the methods of ``tidy`` among each other; return them."""
    means = ordered_ranks(tidy).pivot(index="method", columns="metric", values="mean")
    means = means.loc[means["nll"].sort_values().index, list(SHOWN)]
    n_seeds = tidy.groupby("dataset")["seed"].nunique()
    seeds = f"{n_seeds.min()} to {n_seeds.max()}" if np.ptp(n_seeds) else f"{n_seeds.max()}"
    gap = critical_difference(len(means), len(n_seeds))
    caption = (
        f"Mean rank over {len(n_seeds)} data sets ({seeds} seeds each) with {round(100 * noise)} % "
        f"of all training labels wrong (1 is best); ranks that differ by {gap:.2f} can be told "
        "apart (Nemenyi, 5 %)."
    )
    shown = means.map("{:.2f}".format).rename(columns=lambda m: f"rank in {plot.metric_label(m)}")
    report.save_table(shown, folder, name, caption=caption)
    return {
        "critical_difference": gap,
        "datasets": len(n_seeds),
        "seeds": n_seeds.to_dict(),
        "first": {metric: str(means[metric].idxmin()) for metric in SHOWN},
        "mean_ranks": {metric: means[metric].to_dict() for metric in SHOWN},
    }


def issue_table(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the AUROC of finding flipped labels: a row per data set that all were measured on."""
    keys = ["dataset", "seed", "method", "issue_auroc"]
    rows = [{key: cell[key] for key in keys} for cell in found if "issue_auroc" in cell]
    tidy = pd.DataFrame(rows, columns=keys)
    means = tidy.groupby(["dataset", "method"], sort=False)["issue_auroc"].mean()
    return means.unstack("method").dropna().rename_axis("data set")


def write_issues(table: pd.DataFrame, folder: Path) -> dict[str, float]:
    """Save how well wrong labels are found; return the mean over data sets."""
    if table.empty:
        return {}
    means = table.mean()
    caption = "Area under the ROC curve of finding the flipped labels; mean over seeds."
    shown = pd.concat([table, means.rename("mean").to_frame().T]).rename_axis("data set")
    report.save_table(shown, folder, "label_issues", caption=caption)
    return means.to_dict()


def write_cells(found: list[dict[str, Any]], folder: Path) -> None:
    """Save every cell as one row of a table: what all else can be computed from."""
    rows = [
        {key: value for key, value in cell.items() if not isinstance(value, dict)}
        | cell.get("metrics", {})
        | {f"seconds_{stage}": taken for stage, taken in cell["seconds"].items()}
        for cell in found
    ]
    write_text(folder / "cells.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


def write_seconds(found: list[dict[str, Any]], folder: Path) -> pd.DataFrame:
    """Save and return the mean seconds of one cell, by data set and method."""
    keys = ("dataset", "method")
    taken = pd.DataFrame(
        [{k: cell[k] for k in keys} | {"seconds": sum(cell["seconds"].values())} for cell in found]
    )
    means = taken.groupby([*keys], sort=False)["seconds"].mean().unstack("dataset")
    caption = "Seconds of fitting and predicting once (finding label issues, cleanlab); the mean."
    report.save_table(means.round(2), folder, "seconds", caption=caption)
    return means


def write_all(found: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """Write tables, figures, ``verdict.md`` and ``report.json``; return the verdict."""
    tidy, folder = tidy_metrics(found), options.out
    whole = {noise: complete(tidy[tidy["noise"] == noise]) for noise in options.noise}
    whole = {noise: each for noise, each in whole.items() if not each.empty}
    plot.use_style()
    write_cells(found, folder)
    issues, seconds = issue_table(found), write_seconds(found, folder)
    metrics: dict[str, Any] = {
        f"noise {noise:g}": write_ranks(each, noise, folder) for noise, each in whole.items()
    }
    metrics["label_issues_auroc"] = write_issues(issues, folder)
    words = [*verdict(whole, issues), *code_words(found)]
    write_text(folder / "verdict.md", "".join(f"- {line}\n" for line in words))
    report.save_report(
        folder,
        config={
            "command": command(options),
            "seeds": options.seeds,
            "noise": options.noise,
            "max_rows": options.max_rows,
            "max_test_rows": options.max_test_rows,
            "notes": notes(found, seconds),
            "rows": {cell["dataset"]: [cell["rows"], cell["test_rows"]] for cell in found},
        },
        seed=options.seeds[0],
        metrics=metrics,
        seconds={
            name: float(sum(sum(c["seconds"].values()) for c in found if c["method"] == name))
            for name in seconds.index
        },
        overwrite=True,
        method=ATTENTION,
        verdict=words,
        cells=code_counts(found),
    )
    return words


def code_counts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many cells came from which code: commit, digest of what counts, and who."""
    rows = pd.DataFrame(
        [{"commit": c.get("commit"), "code": c.get("code"), "method": c["method"]} for c in found]
    )
    groups = rows.groupby(["commit", "code"], sort=False, dropna=False)["method"]
    return [
        {"commit": made, "code": code, "cells": len(each), "methods": sorted(set(each))}
        for (made, code), each in groups
    ]


def command(options: argparse.Namespace) -> str:
    """Return what has to be typed for the same comparison; runs are looked for in results."""
    words = ["python -m benchmarks.estimator_ranks", f"--max-rows {options.max_rows}"]
    words.append(f"--max-test-rows {options.max_test_rows}")
    words.append(f"--seeds {','.join(map(str, options.seeds))}")
    if options.cifar_run:
        words.append(f"--cifar-run {Path('results', *options.cifar_run.parts[-2:])}")
    return " ".join(words)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--max-test-rows", type=int, default=4000, help="test rows at most")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--only-report", action="store_true", help="compute nothing")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"jobs must be at least 1, got jobs={options.jobs}")
    known = (*METHODS, *CLEANLAB)
    if unknown := [name for name in options.methods if name not in known]:
        parser.error(f"methods must be some of {'; '.join(known)}, got {'; '.join(unknown)}")
    if options.datasets is None:
        options.datasets = [
            name for name in PROBLEMS if options.cifar_run or name != CIFAR_EMBEDDINGS
        ]
    return options


def main(arguments: list[str] | None = None) -> None:
    """Compute what is missing, then write tables, figures and report.json."""
    options = parse(arguments)
    cells = grid(options.datasets, options.seeds, options.noise, options.methods)
    settings = Settings(options.out, options.cifar_run, options.max_rows, options.max_test_rows)
    with locked_folder(options.out):
        if not options.only_report:
            compute(cells, settings, n_jobs=options.jobs)
        # Also cells of older code, where nothing is computed: the report names the code of each.
        found = list(read_cells(cells, settings, accept=has_same_rows).values())
        print(*write_all(found, options), sep=os.linesep)


if __name__ == "__main__":
    main()
