"""Plans → results: many runs at a time on a Dask cluster, or one after the other without.

A notebook is one task of the cluster. A task whose worker is lost is started again by Dask on
another one; there, a training goes on from its checkpoint.
"""

import json
import logging
import os
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from attnknn.config import ConfigError
from attnknn.paper.execute import (
    THREAD_VARIABLES,
    Crew,
    Lines,
    Outcome,
    Progress,
    RunResult,
    Session,
    check_jobs,
    n_cores,
    open_session,
    run_pipeline,
    threads_each,
    threads_used,
)
from attnknn.paper.folder import Task, code_digest
from attnknn.paper.plan import Plan

# ---- A Dask cluster, here or elsewhere, and what its workers do: execute one notebook at a time.
#
# Folders are the only way results travel: every worker must see the project and the results folder
# under the same paths, and have the same code.

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


_FEWEST_OPEN = 32  # runs held open at a time, even where the cluster is small


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
    if scheduler == "none":
        return [_run_alone(plan, n_jobs=n_jobs, force=force, pdf=pdf) for plan in plans]
    code = None if scheduler == "local" else code_digest()
    how = {"code": code, "force": force, "pdf": pdf}
    return Conductor(lambda: connect(scheduler, n_workers), **how).run(plans)


def _run_alone(plan: Plan, **options: Any) -> RunResult:
    print(f"run {plan.folder.name}", flush=True)
    return run_pipeline(plan, **options)


@dataclass
class _Work:
    """An open run: what comes next, and how many of its notebooks are under way."""

    session: Session
    stack: ExitStack
    stages: list[Callable[[], list[Task]]]
    n_left: int = 0


class Conductor:
    """Keeps a cluster busy with the notebooks of many runs.

    The studies of a run are handed out when its trainings are settled, by this process: as tasks
    that depend on each other inside of Dask, a finished training would be executed again whenever
    the worker that remembers its outcome is lost, though its files are all there.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager["distributed.Client"]],
        *,
        code: str | None = None,
        force: bool = False,
        pdf: bool = True,
    ):
        """Prepare without starting anything.

        Args:
            connect: Gives the client; called when the first notebook has to run.
            code: Digest of the code that the workers must have; not asked for when None.
            force: As for `run_plans`.
            pdf: As for `run_plans`.
        """
        self._connect, self._code = connect, code
        self._options = {"force": force, "pdf": pdf}
        self._waiting: list[tuple[Plan, set[str]]] = []
        self._open: list[_Work] = []
        self._under_way: dict[Any, tuple[_Work, Task]] = {}
        self._trained_now: Counter[str] = Counter()
        self._lines = Lines()

    def run(self, plans: Sequence[Plan]) -> list[RunResult]:
        """Execute all plans, and return their results in the same order."""
        self._waiting = [(plan, _training_keys(plan)) for plan in plans]
        results: dict[Path, RunResult] = {}
        # The cluster ends first: nothing may write into a folder that is no longer held.
        with self._lines, ExitStack() as self._runs, ExitStack() as self._cluster:
            while self._waiting or self._under_way:
                self._start_some(results)
                if self._under_way:
                    self._collect(next(self._done))
        return [results[plan.folder] for plan in plans]

    @cached_property
    def _client(self) -> "distributed.Client":
        client = self._cluster.enter_context(self._connect())
        print(about(client), flush=True)
        client.subscribe_topic("all", self._hear)
        # Else the scheduler would tell a client that is gone of its own going.
        self._cluster.callback(client.unsubscribe_topic, "all")
        return client

    @cached_property
    def _done(self) -> "distributed.as_completed":
        from distributed import as_completed

        return as_completed([], loop=self._client.loop)

    def _start_some(self, results: dict[Path, RunResult]) -> None:
        """Open runs that may start, up to a number that keeps every worker busy."""
        for entry in list(self._waiting):
            plan, keys = entry
            if len(self._open) >= self._most_open():
                return
            # A run that wants a training now under way waits for it, and takes it over.
            if any(self._trained_now[key] for key in keys):
                continue
            self._waiting.remove(entry)
            stack = self._runs.enter_context(ExitStack())
            progress = self._lines.of(plan.folder.name)
            session = stack.enter_context(open_session(plan, progress=progress, **self._options))
            results[plan.folder] = session.result
            self._trained_now.update(keys)
            work = _Work(session, stack, [session.training, partial(self._rest, session, keys)])
            self._open.append(work)
            self._advance(work)

    def _rest(self, session: Session, keys: set[str]) -> list[Task]:
        self._trained_now.subtract(keys)
        return session.rest()

    def _most_open(self) -> int:
        n_slots = sum(self._client.nthreads().values()) if "_client" in vars(self) else 0
        return max(_FEWEST_OPEN, 2 * n_slots)

    def _advance(self, work: _Work) -> None:
        """Hand out the next notebooks of a run, or close it after the last."""
        while work.stages:
            tasks = work.stages.pop(0)()
            if tasks:
                work.n_left = len(tasks)
                for task in tasks:
                    self._submit(work, task)
                return
        self._open.remove(work)
        work.stack.close()

    def _submit(self, work: _Work, task: Task) -> None:
        run = work.session.run.path
        future = self._client.submit(
            execute_task,
            task,
            run,
            work.session.work,
            self._code,
            key=f"{run.name}/{task.name}-{uuid4().hex[:8]}",
            pure=False,
        )
        self._under_way[future] = (work, task)
        self._done.add(future)
        self._lines.expect()

    def _collect(self, future: "distributed.Future") -> None:
        work, task = self._under_way.pop(future)
        outcome, n_threads = _outcome_of(future, work.session, task)
        work.session.record(outcome, n_threads=n_threads)
        work.n_left -= 1
        if not work.n_left:
            self._advance(work)

    def _hear(self, event: tuple[float, Any]) -> None:
        """Tell which notebooks a lost worker was at; Dask starts them again by itself."""
        _, message = event
        if isinstance(message, dict) and message.get("action") == "remove-worker":
            own = {future.key for future in list(self._under_way)}
            for key in sorted(own & set(message["processing-tasks"])):
                self._lines.say(f"a worker was lost, {key.rpartition('-')[0]} starts again")


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
    missing = session.work / f"{task.copy}.ipynb"
    return Outcome(task, "failed", 0.0, missing, {"error": reason, "traceback": []}), 0


def _training_keys(plan: Plan) -> set[str]:
    """Return what tells the trainings of a plan from others, wherever they are to go."""
    keys = set()
    for task in plan.tasks()[0]:
        settings = {name: value for name, value in task.parameters.items() if name != "run_dir"}
        keys.add(json.dumps([task.notebook.digest, settings], sort_keys=True))
    return keys
