"""Plans → results: many runs at a time on a Dask cluster, or one after the other without.

A notebook is one task of the cluster. A task whose worker is lost is started again by Dask on
another one; there, a training goes on from its checkpoint. Folders are the only way results
travel: every worker must see the project and the results folder, and have the same package.
"""

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from attnknn.config import ConfigError
from attnknn.files import METHOD_VERSION
from attnknn.paper.execute import (
    THREAD_VARIABLES,
    Outcome,
    Progress,
    RunResult,
    Session,
    Workers,
    check_jobs,
    n_cores,
    open_session,
    run_pipeline,
    threads_each,
    threads_used,
)
from attnknn.paper.folder import RunFolder, Task
from attnknn.paper.plan import Plan

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


def execute_task(task: Task, run: Path, version: int) -> tuple[Outcome, int]:
    """Execute one notebook on the worker that this is called on.

    The notebook has a process of its own, as on one machine. It ends with the worker, even by
    ``kill -9``, and as soon as nobody waits for it: a lost client, a cancelled task.

    Args:
        task: What to execute.
        run: The run's folder.
        version: Of the method, where the run was asked for.

    Returns:
        How it ended, and how many threads it had.
    """
    from distributed import get_worker

    worker = get_worker()
    place = f"{worker.address} ({socket.gethostname()})"
    for path in (task.notebook.path, run):
        if not path.exists():
            raise RuntimeError(
                f"every worker must see {path}: the one at {place} does not; "
                "put project and results on a file system that all machines share"
            )
    if version != METHOD_VERSION:
        raise RuntimeError(
            f"every worker must have version {version} of the method: the one at {place} has "
            f"version {METHOD_VERSION}"
        )
    n_threads = threads_used(max(1, n_cores() // worker.state.nthreads))
    outcomes: list[Outcome] = []
    workers = Workers(run.parent, RunFolder(run).work, _Watch(worker))
    workers.run([task], outcomes.append, n_jobs=1, n_threads=n_threads)
    return outcomes[0], n_threads


class _Watch(Progress):
    """Takes the place of a progress display: each tick asks whether anybody still waits."""

    def __init__(self, worker: Any):
        self._worker, self._key = worker, worker.get_current_task()

    def update(self, name: str, **_: Any) -> None:
        pass

    def tick(self) -> None:
        task = self._worker.state.tasks.get(self._key)
        wanted = task is not None and task.state in ("executing", "long-running")
        if not wanted or self._worker.status.name in ("closing", "closed", "failed"):
            raise AbandonedError(f"nobody waits for {self._key} any more")


_MOST_OPEN = 200  # runs held open at a time: each holds a lock, which is an open file


def run_plans(
    plans: Sequence[Plan],
    *,
    scheduler: str = "local",
    n_jobs: int | None = None,
    force: bool = False,
    pdf: bool = True,
) -> list[RunResult]:
    """Execute what is missing or outdated of several plans; the folders are the same either way.

    Args:
        plans: What to run, each into its own folder.
        scheduler: ``local`` starts a Dask cluster on this machine, an address uses an existing
            one, ``none`` takes the runs one after the other without Dask.
        n_jobs: Notebooks at a time on this machine; its cores, at most 4, when None.
        force: Execute complete notebooks again, and replace runs with other parameters.
        pdf: Write the PDFs, too.

    Returns:
        What was done for each plan; failing notebooks are no exception, everything else goes on.
    """
    scheduler, n_workers = check_scheduler(scheduler, n_jobs=n_jobs), check_jobs(n_jobs)
    results = []
    if scheduler == "none":
        for plan in plans:
            print(f"run {plan.folder.name}", flush=True)
            results.append(run_pipeline(plan, n_jobs=n_jobs, force=force, pdf=pdf))
        return results
    for first in range(0, len(plans), _MOST_OPEN):
        with ExitStack() as runs:
            shown = Progress()
            runs.callback(shown.close)
            sessions = []
            for plan in plans[first : first + _MOST_OPEN]:
                how = {"force": force, "pdf": pdf, "label": f"{plan.folder.name}  "}
                sessions.append(runs.enter_context(open_session(plan, progress=shown, **how)))
            # The cluster ends first: nothing may write into a folder that is no longer held.
            with Conductor(scheduler, n_workers) as conductor:
                conductor.run([(session, session.training) for session in sessions])
                conductor.run([(session, session.studies) for session in sessions])
                conductor.run([(session, session.judging) for session in sessions])
        results += [session.result for session in sessions]
    return results


class Conductor:
    """Executes the stages of several runs on a cluster, which starts with the first notebook.

    The studies are handed out when the trainings are settled, by this process: as tasks that
    depend on each other inside of Dask, a finished training would be executed again whenever the
    worker that remembers its outcome is lost, though its files are all there.
    """

    def __init__(self, scheduler: str, n_workers: int):
        """Prepare without starting anything."""
        self._scheduler, self._n_workers = scheduler, n_workers
        self._under_way: dict[Any, tuple[Session, Task]] = {}

    def __enter__(self) -> "Conductor":
        """Return itself."""
        self._stack = ExitStack()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the client, and the cluster where it is ours."""
        self._stack.close()

    def run(self, stages: Sequence[tuple[Session, Callable[[], list[Task]]]]) -> None:
        """Execute one stage of every run, and record each outcome as it comes."""
        waiting = [(session, task) for session, stage in stages for task in stage()]
        if not waiting:
            return
        from distributed import as_completed

        folders = [session.run.path for session, _ in waiting]
        names = [f"{session.run.path.name}/{task.name}" for session, task in waiting]
        futures = self._client.map(
            execute_task,
            [task for _, task in waiting],
            folders,
            [METHOD_VERSION] * len(waiting),
            key=[f"{name}-{uuid4().hex[:8]}" for name in names],
            pure=False,
        )
        self._under_way = dict(zip(futures, waiting, strict=True))
        for future in as_completed(futures, loop=self._client.loop):
            session, task = self._under_way.pop(future)
            outcome, n_threads = _outcome_of(future, session, task)
            session.record(outcome, n_threads=n_threads)

    @cached_property
    def _client(self) -> "distributed.Client":
        client = self._stack.enter_context(connect(self._scheduler, self._n_workers))
        n_workers = len(client.nthreads())
        waiting = "" if n_workers else " (waiting for the first)"
        print(f"cluster {client.scheduler.address}: {n_workers} workers{waiting}", flush=True)
        client.subscribe_topic("all", self._hear)
        # Else the scheduler would tell a client that is gone of its own going.
        self._stack.callback(client.unsubscribe_topic, "all")
        return client

    def _hear(self, event: tuple[float, Any]) -> None:
        """Tell which notebooks a lost worker was at; Dask starts them again by itself."""
        _, message = event
        if isinstance(message, dict) and message.get("action") == "remove-worker":
            own = {future.key for future in list(self._under_way)}
            for key in sorted(own & set(message["processing-tasks"])):
                print(f"a worker was lost, {key.rpartition('-')[0]} starts again", flush=True)


def _outcome_of(future: "distributed.Future", session: Session, task: Task) -> tuple[Outcome, int]:
    """Return how a task ended; trouble of the cluster itself is a failure with a reason."""
    from distributed import KilledWorker

    if future.cancelled():
        raise ConnectionError("the scheduler is gone; the same command goes on from here")
    error = future.exception()
    if error is None:
        return future.result()
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, KilledWorker):
        reason = "every worker that took it was lost (too little memory?)"
    return Outcome.failed(task, session.run.work / f"{task.copy}.ipynb", reason), 0
