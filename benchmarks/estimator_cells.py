"""Cells: one (data set, seed, noise, method) each, computed once and kept in a file.

A cell says what made it: the code that it depends on, the rows that were drawn and the run that
embeddings are from. Where one of these is another one now, the cell is computed again.
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tqdm import tqdm

from attnknn import report
from attnknn.files import read_json, sha256_file, write_json
from attnknn.peers import (
    ATTENTION,
    CIFAR_EMBEDDINGS,
    CLEANLAB,
    METHODS,
    Parts,
    Problem,
    digest_of,
    load_parts,
    make_problem,
    measure_cleanlab,
    measure_method,
)
from attnknn.pipeline.crew import THREAD_VARIABLES
from attnknn.provenance import REPORT_NAME, commit

ONLY_DRAWN = ("attnknn.plot", "attnknn.studies", "attnknn.report")  # no part of a measure


class Cell(NamedTuple):
    """What is computed at once; cleanlab's methods look for wrong labels and predict nothing."""

    dataset: str
    seed: int
    noise: float
    method: str


@dataclass(frozen=True)
class Settings:
    """What all cells of a comparison share.

    Attributes:
        folder: Where the cells are kept, under ``runs``.
        cifar_run: Trained run that the CIFAR-10 embeddings are from.
        max_rows: Training rows at most, for all methods alike.
        max_test_rows: The same of the test rows.
    """

    folder: Path
    cifar_run: Path | None
    max_rows: int
    max_test_rows: int


def grid(
    datasets: Iterable[str], seeds: Iterable[int], noise: Iterable[float], methods: Iterable[str]
) -> list[Cell]:
    """Return all cells, seed by seed: a stopped comparison has whole seeds, and knows its times."""
    ordered = [name for name in (*METHODS, *CLEANLAB) if name in methods]
    product = itertools.product(seeds, datasets, noise, ordered)
    cells = (Cell(dataset, seed, share, method) for seed, dataset, share, method in product)
    return [cell for cell in cells if cell.noise > 0 or cell.method not in CLEANLAB]


def path_of(folder: Path, cell: Cell) -> Path:
    """Return the file of a cell."""
    name = f"{cell.method} noise{cell.noise:g} seed{cell.seed}"
    return folder / "runs" / report.safe_name(cell.dataset) / f"{report.safe_name(name)}.json"


def code_of(cell: Cell) -> str:
    """Return the digest of the code that a cell depends on; peers do not know the classifier."""
    beyond = {*ONLY_DRAWN}
    if cell.method != ATTENTION:
        beyond.add("attnknn.estimator")
    if cell.dataset != CIFAR_EMBEDDINGS:
        beyond.add("attnknn.trained")
    return digest_of("attnknn.peers.methods", beyond=frozenset(beyond))


def data_of(cell: Cell, settings: Settings) -> str | None:
    """Return the digest of the trained run that a cell's rows are from, if they are from one."""
    if cell.dataset != CIFAR_EMBEDDINGS or settings.cifar_run is None:
        return None
    return sha256_file(settings.cifar_run / REPORT_NAME)


def has_same_rows(stored: dict[str, Any], cell: Cell, settings: Settings) -> bool:
    """Tell whether a stored cell was measured on the rows that are asked for."""
    caps = (
        ("max_rows", "all_rows", settings.max_rows),
        ("max_test_rows", "all_test_rows", settings.max_test_rows),
    )
    for cap, there, now in caps:
        before = stored.get(cap)
        # Rows that fit below both caps are all there: no drawing has taken place.
        if before != now and (before is None or stored[there] > min(before, now)):
            return False
    return stored.get("cifar_run") == data_of(cell, settings)


def is_current(stored: dict[str, Any], cell: Cell, settings: Settings) -> bool:
    """Tell whether a stored cell would come out the same today."""
    return stored.get("code") == code_of(cell) and has_same_rows(stored, cell, settings)


def read_cells(
    cells: Iterable[Cell], settings: Settings, *, accept: Callable = is_current
) -> dict[Cell, dict[str, Any]]:
    """Return the stored cells that ``accept(stored, cell, settings)`` takes."""
    stored = {cell: path_of(settings.folder, cell) for cell in cells}
    there = {cell: read_json(path) for cell, path in stored.items() if path.exists()}
    return {cell: found for cell, found in there.items() if accept(found, cell, settings)}


@lru_cache(maxsize=1)
def _parts(dataset: str, seed: int, cifar_run: Path | None) -> Parts:
    return load_parts(dataset, seed=seed, cifar_run=cifar_run)


@lru_cache(maxsize=1)
def _problem(dataset: str, seed: int, noise: float, settings: Settings) -> Problem:
    return make_problem(
        _parts(dataset, seed, settings.cifar_run),
        seed=seed,
        noise=noise,
        max_rows=settings.max_rows,
        max_test_rows=settings.max_test_rows,
    )


def measure_cell(cell: Cell, settings: Settings, made_by: dict[str, Any]) -> dict[str, Any]:
    """Compute and store a cell; return what is stored.

    Args:
        cell: What is computed.
        settings: What all cells share.
        made_by: ``code``, ``commit`` and ``cifar_run``, taken when the comparison began.
    """
    problem = _problem(cell.dataset, cell.seed, cell.noise, settings)
    measure = measure_cleanlab if cell.method in CLEANLAB else measure_method
    rows = {
        "rows": len(problem.labels),
        "all_rows": problem.all_rows,
        "max_rows": settings.max_rows,
        "test_rows": len(problem.test_labels),
        "all_test_rows": problem.all_test_rows,
        "max_test_rows": settings.max_test_rows,
    }
    found = measure(cell.method, problem, seed=cell.seed)
    stored = cell._asdict() | rows | made_by | found
    write_json(path_of(settings.folder, cell), stored)
    return stored


def compute(cells: list[Cell], settings: Settings, *, n_jobs: int = 1) -> None:
    """Compute the cells that are missing or out of date.

    Args:
        cells: All that shall be there.
        settings: What they share.
        n_jobs: Processes, of one thread each; with 1, this process with all its threads.
    """
    known = read_cells(cells, settings)
    waiting = [cell for cell in cells if cell not in known]
    here = commit()
    made_by = {
        cell: {"code": code_of(cell), "commit": here, "cifar_run": data_of(cell, settings)}
        for cell in waiting
    }
    left = dict.fromkeys(waiting)
    with tqdm(total=len(waiting), desc="cells") as bar:
        for cell, stored in _measured(waiting, settings, made_by, n_jobs):
            known[cell] = stored
            left.pop(cell)
            bar.set_postfix_str(
                f"about {_clock(seconds_left(left, known, n_jobs))} left; "
                f"{cell.dataset}, seed {cell.seed}, noise {cell.noise:g}, {cell.method}"
            )
            bar.update()


def _measured(
    cells: list[Cell], settings: Settings, made_by: dict[Cell, dict[str, Any]], n_jobs: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Give each cell with what was stored, as soon as it is there."""
    if n_jobs == 1:
        yield from ((cell, measure_cell(cell, settings, made_by[cell])) for cell in cells)
        return
    spawn = multiprocessing.get_context("spawn")  # threads and forks do not go together
    with _one_thread_each(), ProcessPoolExecutor(n_jobs, mp_context=spawn) as pool:
        try:
            futures: dict[Future, Cell] = {
                pool.submit(measure_cell, cell, settings, made_by[cell]): cell for cell in cells
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let processes started here use one thread; libraries read this when they are loaded."""
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def seconds_left(waiting: Iterable[Cell], known: dict[Cell, dict[str, Any]], n_jobs: int) -> float:
    """Return how long the rest takes, going by cells of the same method on the same data set.

    Where there is none yet, cells of the same method count, then all.
    """
    taken: dict[tuple[str, ...], list[float]] = {}
    for cell, stored in known.items():
        for key in ((cell.dataset, cell.method), (cell.method,), ()):
            taken.setdefault(key, []).append(sum(stored["seconds"].values()))
    means = {key: fmean(values) for key, values in taken.items()}
    keys = (((cell.dataset, cell.method), (cell.method,), ()) for cell in waiting)
    return sum(next((means[key] for key in each if key in means), 0.0) for each in keys) / n_jobs


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
