"""A Dask cluster, here or elsewhere, and what its workers do: execute one notebook at a time.

Folders are the only way results travel: every worker must see the project and the results folder
under the same paths, and have the same code.
"""

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnknn.config import ConfigError
from attnknn.pipeline.crew import (
    THREAD_VARIABLES,
    Crew,
    Outcome,
    n_cores,
    threads_each,
    threads_used,
)
from attnknn.pipeline.progress import Progress
from attnknn.pipeline.state import Task, code_digest

_ADDRESS_STARTS = ("tcp://", "tls://", "ws://", "wss://")
_SECONDS_TO_CONNECT = 20


class AbandonedError(RuntimeError):
    """Nobody waits for a notebook any more: its pipeline or its worker is going away."""


def check_scheduler(scheduler: str, *, n_jobs: int | None = None) -> str:
    """Return ``scheduler`` if it can be used: ``none``, ``local`` or an address, with Dask there.

    Args:
        scheduler: Where notebooks run.
        n_jobs: Notebooks at a time, if the user says so; an existing cluster has its own number.
    """
    if scheduler == "none":
        return scheduler
    is_address = scheduler.startswith(_ADDRESS_STARTS) or Path(scheduler).suffix == ".json"
    if scheduler != "local" and not is_address:
        raise ConfigError(
            f"scheduler must be none, local or an address such as tcp://host:8786, got {scheduler=}"
        )
    if find_spec("distributed") is None:
        raise ConfigError(
            f"scheduler={scheduler} needs Dask, which is not installed: "
            "pip install 'attnknn[dask]'; --scheduler none does without"
        )
    if is_address and n_jobs is not None:
        raise ConfigError(f"jobs must be left to the workers of {scheduler}, got jobs={n_jobs}")
    return scheduler


@contextmanager
def connect(scheduler: str, n_jobs: int) -> Iterator["distributed.Client"]:
    """Give a client of a scheduler; a local cluster of ``n_jobs`` workers ends with the client."""
    from distributed import Client

    if scheduler == "local":
        with _local_cluster(n_jobs) as cluster, Client(cluster, set_as_default=False) as client:
            yield client
        return
    place = {"scheduler_file": scheduler} if scheduler.endswith(".json") else {"address": scheduler}
    try:
        client = Client(**place, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"scheduler must answer, got {scheduler=} ({error})") from None
    with client:
        yield client


def about(client: "distributed.Client") -> str:
    """Return what a cluster is: address, workers, and a dashboard only where one will open."""
    n_workers = len(client.nthreads())
    text = f"cluster {client.scheduler.address}: {n_workers} workers"
    text += "" if n_workers else " (waiting for the first)"
    # A scheduler has a web address also where no dashboard is behind it; it alone knows. Without a
    # name the question travels as it is: a scheduler may lack this package.
    if client.run_on_scheduler(
        lambda dask_scheduler: any(
            "bokeh" in str(part) for part in dask_scheduler.http_application.applications
        )
    ):
        return f"{text}, dashboard {client.dashboard_link}"
    return f"{text}, no dashboard (bokeh is not installed, or it was switched off)"


@contextmanager
def _local_cluster(n_jobs: int) -> Iterator[Any]:
    import dask
    from distributed import LocalCluster

    before = dict(os.environ)
    threads = dict.fromkeys(THREAD_VARIABLES, threads_used(threads_each(n_jobs)))
    environment = {"distributed.nanny.pre-spawn-environ": threads}
    try:
        with warnings.catch_warnings(), dask.config.set(environment), _deaf_children():
            # A second cluster on a machine only finds the usual port of the dashboard taken.
            warnings.filterwarnings("ignore", message="Port .* is already in use")
            cluster = LocalCluster(
                n_workers=n_jobs,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:8787",
                memory_limit=None,  # notebooks have processes of their own, which Dask cannot see
                silence_logs=logging.CRITICAL,
            )
        with cluster:
            yield cluster
    finally:
        # Dask sets the workers' variables in this process, too.
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Let processes started here ignore Ctrl-C: it is meant for the pipeline, which ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def execute_task(task: Task, run: Path, work: Path, code: str | None = None) -> tuple[Outcome, int]:
    """Execute one notebook on the worker that this is called on.

    The notebook has a process of its own, as on one machine. It ends with the worker, even by
    ``kill -9``, and as soon as nobody waits for it: a lost client, a cancelled task.

    Args:
        task: What to execute.
        run: The run's folder.
        work: Folder of unfinished copies.
        code: Digest of the code that the pipeline runs on, where workers have their own copy.

    Returns:
        How it ended, and how many threads it had.
    """
    from distributed import get_worker

    worker = get_worker()
    for path in (task.notebook.path, run):
        if not path.exists():
            raise RuntimeError(
                f"every worker must see {path}: the one at {_place(worker)} does not; "
                "put project and results on a file system that all machines share"
            )
    if code is not None and code_digest() != code:
        raise RuntimeError(
            f"every worker must have the code of the pipeline: the one at {_place(worker)} has "
            "another version"
        )
    n_threads = threads_used(max(1, n_cores() // worker.state.nthreads))
    outcomes: list[Outcome] = []
    crew = Crew(run.parent, work, _Watch(worker))
    crew.run([task], outcomes.append, n_jobs=1, n_threads=n_threads)
    return outcomes[0], n_threads


class _Watch(Progress):
    """Takes the place of a progress display: each tick asks whether anybody still waits."""

    def __init__(self, worker: Any):
        super().__init__([])
        self._worker, self._key = worker, worker.get_current_task()

    def start(self, name: str) -> None:
        pass

    def update(self, name: str, *, done: int | None = None, says: str | None = None) -> None:
        pass

    def tick(self) -> None:
        task = self._worker.state.tasks.get(self._key)
        wanted = task is not None and task.state in ("executing", "long-running")
        if not wanted or self._worker.status.name in ("closing", "closed", "failed"):
            raise AbandonedError(f"nobody waits for {self._key} any more")


def _place(worker: Any) -> str:
    return f"{worker.address} ({socket.gethostname()})"
