"""Run: the cells that are missing, here, in processes of one thread each, or on a Dask cluster.

A process or worker that dies costs the cells it was at; they are tried once more, then they are
holes.
"""

import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmarks.arena.cells import (
    VERSION,
    Cell,
    Settings,
    path_of,
    read_cell,
    run_cell,
    write_json,
)

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
LOG_SECONDS = 20.0  # between two states of the bar in a log
TEST_ROWS = 4000
TRIES = 2  # of a cell in whose middle a process dies


def open_arena(settings: Settings) -> None:
    """Make the folder of an arena, or refuse one whose cells were measured on other rows."""
    here = {
        "version": VERSION,
        "max_rows": settings.max_rows,
        "max_test_rows": settings.max_test_rows,
    }
    path = settings.folder / "arena.json"
    if not path.is_file():
        write_json(path, here)
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, value in here.items():
        if found[name] != value:
            raise ValueError(
                f"{name} must be that of the cells in {settings.folder} ({found[name]}), "
                f"got {name}={value}; choose another --out"
            )


def limits(folder: Path, rows: int | None, test_rows: int | None) -> tuple[int | None, int]:
    """Return the most rows to train and to test on: as given, as the cells there are, or 4 000."""
    path = folder / "arena.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return rows or known.get("max_rows"), test_rows or known.get("max_test_rows", TEST_ROWS)


def compute(
    cells: list[Cell],
    settings: Settings,
    *,
    n_jobs: int = 1,
    scheduler: str | None = None,
    again: bool = False,
) -> None:
    """Measure the cells that are missing.

    Args:
        cells: All that shall be there.
        settings: What they share.
        n_jobs: Processes, of one thread each; with 1, this process.
        scheduler: Address of a Dask scheduler that does it instead.
        again: Measure holes again.
    """
    known = {cell: found for cell in cells if (found := read_cell(settings.folder, cell))}
    if again:
        for cell in [cell for cell, found in known.items() if "error" in found]:
            path_of(settings.folder, cell).unlink()
            del known[cell]
    waiting = [cell for cell in cells if cell not in known]
    clock = Clock(waiting, known)
    if scheduler:
        measured = _on_cluster(waiting, settings, scheduler)
    elif n_jobs == 1:
        measured = ((cell, run_cell(cell, settings)) for cell in waiting)
    else:
        measured = _in_processes(waiting, settings, n_jobs)
    often = 0.1 if sys.stderr.isatty() else LOG_SECONDS
    with tqdm(total=len(waiting), desc="cells", unit="cell", mininterval=often) as bar:
        for cell, stored in measured:
            clock.done(cell, stored)
            left = tqdm.format_interval(clock.seconds_left() / (1 if scheduler else n_jobs))
            failed = " FAILED" if "error" in stored else ""
            words = f"{cell.table} {cell.noise} {cell.split} {cell.method}{failed}"
            bar.set_postfix_str(f"about {left} left; {words}", refresh=False)
            bar.update()


def _in_processes(
    cells: Iterable[Cell], settings: Settings, n_jobs: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Give each cell with what was stored; at most ``n_jobs`` are under way at any time."""
    spawn = multiprocessing.get_context("spawn")  # threads and forks do not go together
    waiting, tries = list(cells)[::-1], Counter()
    with one_thread_each():
        while waiting:
            running: dict[Future, Cell] = {}
            pool = ProcessPoolExecutor(n_jobs, mp_context=spawn)
            try:
                while waiting or running:
                    while waiting and len(running) < n_jobs:
                        cell = waiting.pop()
                        tries[cell] += 1
                        running[pool.submit(run_cell, cell, settings)] = cell
                    ended, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        result = future.result()
                        yield running.pop(future), result
            except BrokenProcessPool:
                for cell in running.values():
                    if (stored := read_cell(settings.folder, cell)) is not None:
                        yield cell, stored
                    elif tries[cell] < TRIES:
                        waiting.append(cell)
                    else:
                        yield cell, _died(cell, settings)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _on_cluster(
    cells: list[Cell], settings: Settings, scheduler: str
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Give each cell with what a Dask worker stored; workers must see the same folders."""
    from dask.distributed import Client, KilledWorker, as_completed

    with Client(scheduler) as client:
        futures = client.map(run_cell, cells, settings=settings, pure=False, retries=TRIES - 1)
        cell_of = dict(zip(futures, cells, strict=True))
        for future in as_completed(futures):
            cell = cell_of[future]
            try:
                yield cell, future.result()
            except KilledWorker:
                yield cell, _died(cell, settings)


def _died(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Store and return the hole of a cell whose process died, of too little memory mostly."""
    method, _, label = cell.method.partition("@")
    stored = {
        **cell._asdict(),
        "method": method,
        "label": label or None,
        "version": VERSION,
        "error": f"its process died {TRIES} times",
        "seconds": {},
    }
    write_json(path_of(settings.folder, cell), stored)
    return stored


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let processes started here use one thread; libraries read this when they are loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Clock:
    """How long the rest takes, by the mean of cells of the same method, or else of all."""

    def __init__(self, waiting: Iterable[Cell], known: dict[Cell, dict[str, Any]]) -> None:
        self._waiting = Counter(cell.method for cell in waiting)
        self._sums, self._counts = Counter(), Counter()
        for cell, stored in known.items():
            self._learn(cell, stored)

    def _learn(self, cell: Cell, stored: dict[str, Any]) -> None:
        for key in (cell.method, ""):
            self._sums[key] += sum(stored["seconds"].values())
            self._counts[key] += 1

    def done(self, cell: Cell, stored: dict[str, Any]) -> None:
        """Take a cell off what is waiting."""
        self._waiting[cell.method] -= 1
        self._learn(cell, stored)

    def seconds_left(self) -> float:
        """Return the seconds that one process needs for what is waiting."""
        keys = {method: method if self._counts[method] else "" for method in self._waiting}
        return sum(
            count * self._sums[keys[method]] / max(1, self._counts[keys[method]])
            for method, count in self._waiting.items()
        )
