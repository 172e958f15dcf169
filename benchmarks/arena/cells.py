"""Cells: one method on one problem, measured once and kept in one small file.

A file is whole or absent, so a stopped run goes on where it was. A method that fails leaves a hole:
a file with the error instead of measures. Nothing of the package is needed but, for our own
methods, the classifier.
"""

import json
import os
import platform
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

from benchmarks.arena import ours
from benchmarks.arena.problems import (
    Problem,
    Stopwatch,
    best_temperature,
    make_problem,
    measures,
    tempered,
)
from benchmarks.arena.rivals import DEEP, RIVALS, Rows, fit_rival, held_out_probs
from benchmarks.arena.tables import Facts, Table, load

VERSION = 1  # of problems, rivals and measures: raised where cells would come out differently
METHODS = (*ours.OURS, *RIVALS)
CHEAP = tuple(method for method in METHODS if method not in DEEP)
FEW_ROWS, FEW_ROWS_SPLITS, SPLITS = 1000, 10, 5  # small tables get more splits
PACKAGES = ("numpy", "scipy", "scikit-learn", "pandas", "torch", "faiss-cpu", "lightgbm")
PACKAGES += ("catboost", "pytabkit", "cleanlab")


class Cell(NamedTuple):
    """What is measured at once.

    Attributes:
        table: A table.
        noise: A key of ``NOISE``.
        split: Seed of the split.
        method: A rival, or one of ours with the label of its version, such as "attnknn@now".
    """

    table: str
    noise: str
    split: int
    method: str


@dataclass(frozen=True)
class Settings:
    """What all cells of an arena share.

    Attributes:
        folder: Where cells are kept.
        tables: Where prepared tables are.
        max_rows: Training rows at most; None takes all.
        max_test_rows: Test rows at most.
        limit: Seconds after which a cell is given up; None waits.
        package: Checkout that ours is taken from; None takes what Python finds first.
    """

    folder: Path
    tables: Path
    max_rows: int | None
    max_test_rows: int
    limit: float | None = None
    package: Path | None = None


def grid(
    facts: Iterable[Facts],
    noise: Iterable[str],
    n_splits: int | None,
    methods: Iterable[str],
    *,
    max_rows: int | None = None,
) -> list[Cell]:
    """Return all cells, split by split and small tables first: a stopped run is a balanced one.

    Args:
        facts: Of the tables.
        noise: Keys of ``NOISE``.
        n_splits: Of every table; None takes 10 of small tables and 5 of others.
        methods: Rivals and ours with their labels.
        max_rows: As of ``Settings``.
    """
    cost = lambda f: min(f.rows, max_rows or f.rows) * (f.numbers + f.categories)  # noqa: E731
    ordered = sorted(facts, key=cost)
    methods, noise = list(methods), list(noise)
    splits = {
        f.name: n_splits or (FEW_ROWS_SPLITS if f.rows < FEW_ROWS else SPLITS) for f in ordered
    }
    return [
        Cell(f.name, kind, split, method)
        for split in range(max(splits.values(), default=0))
        for f in ordered
        if split < splits[f.name]
        for kind in noise
        for method in methods
    ]


def path_of(folder: Path, cell: Cell) -> Path:
    """Return the file of a cell."""
    return folder / "cells" / cell.table / f"{cell.noise}-{cell.split}-{cell.method}.json"


def read_cell(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """Return a stored cell, or None."""
    path = path_of(folder, cell)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Return all stored cells of an arena, sorted by their files' names."""
    paths = sorted((folder / "cells").glob("*/*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def write_json(path: Path, value: Any) -> None:
    """Write a small file so that it is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as handle:
        handle.write(text + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    Path(handle.name).replace(path)


def problems_of(folder: Path, label: str) -> set[tuple[str, str, int]]:
    """Return the problems (table, noise, split) that a version of ours has answered."""
    found = [cell for cell in read_all(folder) if cell["label"] == label and "error" not in cell]
    return {(cell["table"], cell["noise"], cell["split"]) for cell in found}


@lru_cache(maxsize=1)
def _table(name: str, folder: Path) -> Table:
    return load(name, folder)


@lru_cache(maxsize=1)
def _problem(table: str, noise: str, split: int, settings: Settings) -> Problem:
    return make_problem(
        _table(table, settings.tables),
        split=split,
        noise=noise,
        max_rows=settings.max_rows,
        max_test_rows=settings.max_test_rows,
    )


def run_cell(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Measure and store a cell, or the error that its method ends in; return what is stored."""
    if (stored := read_cell(settings.folder, cell)) is not None:  # another run was faster
        return stored
    ours.use_package(settings.package)
    problem = _problem(cell.table, cell.noise, cell.split, settings)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(), _time_limit(settings.limit):
            warnings.simplefilter("ignore")  # of rivals, about convergence; nobody would read them
            found = measure(cell.method, problem)
    except Exception as error:
        found = hole(error, time.perf_counter() - start)
    stored = described(cell, settings, problem) | found
    write_json(path_of(settings.folder, cell), stored)
    return stored


def hole(error: BaseException, seconds: float) -> dict[str, Any]:
    """Return what is stored of a method that failed."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    words = f"{type(error).__name__}: {error}{where}"
    return {"error": words[:500], "seconds": {"failed": seconds}}


def described(cell: Cell, settings: Settings, problem: Problem) -> dict[str, Any]:
    """Return what a cell is about and what made it."""
    method, _, label = cell.method.partition("@")
    return {
        **cell._asdict(),
        "method": method,
        "label": label or None,
        "version": VERSION,
        "data": _table(cell.table, settings.tables).facts.data,
        "rows": len(problem.labels),
        "test_rows": len(problem.test_labels),
        "classes": problem.n_classes,
        "seed": problem.seed,
        "true_noise": float(problem.flipped.mean()),
        "versions": versions(),
    }


def measure(method: str, problem: Problem) -> dict[str, Any]:
    """Return the measures of a method, as it comes and, of rivals, with a temperature."""
    name, watch = method.partition("@")[0], Stopwatch()
    if name in ours.OURS:
        answer = ours.answer(name, problem, watch)
        found = {"metrics": measures(answer.probs, problem.test_labels), **answer.facts}
        issues = answer.issues
    else:
        found, issues = measure_rival(name, problem, watch)
    if problem.flipped.any():
        found["issue_auroc"] = float(roc_auc_score(problem.flipped, -issues))
        found["issue_ap"] = float(average_precision_score(problem.flipped, -issues))
    return {**found, "seconds": watch.wall, "cpu": watch.cpu}


def measure_rival(
    method: str, problem: Problem, watch: Stopwatch
) -> tuple[dict[str, Any], np.ndarray]:
    """Return a rival's measures and its quality of labels by cleanlab."""
    rows = Rows(problem.features, problem.labels, problem.n_classes, problem.seed)
    with watch.stage("fit"):
        fitted = fit_rival(method, rows)
    with watch.stage("predict"):
        probs = fitted.predict(problem.test_features)
    found: dict[str, Any] = {"metrics": measures(probs, problem.test_labels)}
    if fitted.settings:
        found["settings"] = fitted.settings
    # NOTE: temperature and label issues know training rows alone, each predicted without itself.
    with watch.stage("temperature"):
        held_out = held_out_probs(method, fitted, rows)
        temperature = best_temperature(held_out, problem.labels)
    found["temperature"] = temperature
    found["tempered"] = measures(tempered(probs, temperature), problem.test_labels)
    with watch.stage("issues"):
        issues = label_quality(held_out, problem.labels)
    return found, issues


def label_quality(probs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return cleanlab's quality of each label, from held-out probabilities."""
    from cleanlab.rank import get_label_quality_scores

    return get_label_quality_scores(labels, probs)


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise where the body takes longer; only where signals can be had, so not on a cluster."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of Python and of what decides the figures."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
