"""Plans → results: many runs at a time on a Dask cluster, or one after the other without.

A notebook is one task of the cluster. A task whose worker is lost is started again by Dask on
another one; there, a training goes on from its checkpoint.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from attnknn.pipeline.cluster import about, check_scheduler, connect, execute_task
from attnknn.pipeline.crew import Outcome
from attnknn.pipeline.plan import Plan
from attnknn.pipeline.progress import Lines
from attnknn.pipeline.run import check_jobs, run_pipeline
from attnknn.pipeline.session import RunResult, Session, open_session
from attnknn.pipeline.state import Task, code_digest

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
