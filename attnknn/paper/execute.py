"""A plan → a run folder with executed notebooks, PDFs and ``report.json``."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from attnknn.checks import check_count
from attnknn.config import ConfigError
from attnknn.embed.runs import RESULTS_VARIABLE, seed_folder
from attnknn.files import locked_folder, write_text
from attnknn.paper.folder import RunFolder, Task
from attnknn.paper.plan import Plan
from attnknn.progress import progress_bar

# ---- What the user sees: a line for each notebook that ends, above one bar where a person watches


class Progress:
    """The ends of notebooks as lines, and a bar of the cells of those under way."""

    def __init__(self):
        """Start a bar when stderr is a terminal."""
        self._cells: dict[str, int] = {}
        self._bar = progress_bar(unit=" cells")

    def expect(self, tasks: Sequence[Task]) -> None:
        """Make the bar longer by the cells of some notebooks."""
        self._bar.total = (self._bar.total or 0) + sum(task.n_cells for task in tasks)
        self._bar.refresh()

    def update(self, name: str, *, done: int = 0, says: str = "") -> None:
        """Note the cells done, or the last line a notebook printed."""
        if done:
            self._bar.update(done - self._cells.get(name, 0))
            self._cells[name] = done
        self._bar.set_postfix_str(f"{name} {says[:40]}", refresh=False)

    def tick(self) -> None:
        """Draw the bar again: its seconds move during a long cell."""
        self._bar.refresh()

    def finish(self, task: Task, seconds: float, status: str, *, label: str = "") -> None:
        """Show the end of a notebook: ``complete``, ``kept``, ``failed`` or ``skipped``."""
        done = task.n_cells if status in {"complete", "kept"} else self._cells.get(task.name, 0)
        cells = f"{done}/{task.n_cells} cells"
        self.say(f"{status:<8}  {label}{task.name:<18}  {cells:>11}  {seconds:.1f} s")

    def say(self, line: str) -> None:
        """Show a line above the bar."""
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


# ---- Tasks → executed copies: worker processes, a few at a time, that all end with the pipeline

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PATIENCE = 10.0  # seconds a worker may take to end its kernel
_MOST_JOBS = 4  # by default; each process holds torch and a memory bank


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    Attributes:
        task: The task.
        status: ``complete`` or ``failed``.
        seconds: Wall time.
        output: The executed copy, whole or partial, under its working name.
        details: Of a failure: ``error``, ``traceback`` and, if a cell failed, ``cell``, ``prompt``
            and ``source``.
    """

    task: Task
    status: str
    seconds: float
    output: Path
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def failed(cls, task: Task, output: Path, error: str, trace: Sequence[str] = ()) -> "Outcome":
        """Return the failure of a task that no cell of it caused."""
        return cls(task, "failed", 0.0, output, {"error": error, "traceback": list(trace)})


def n_cores() -> int:
    """Return the number of cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def check_jobs(n_jobs: int | None) -> int:
    """Return how many notebooks run at a time: ``n_jobs``, or what suits this machine."""
    return min(n_cores(), _MOST_JOBS) if n_jobs is None else check_count("jobs", n_jobs)


def threads_each(n_jobs: int) -> int:
    """Return how many threads each of ``n_jobs`` processes gets."""
    return max(1, n_cores() // n_jobs)


def threads_used(n_threads: int) -> int:
    """Return how many threads a kernel offered ``n_threads`` has: the user's setting wins."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else n_threads


class Workers:
    """Worker processes that end together."""

    def __init__(self, results: Path, work: Path, progress: Progress):
        """Prepare without starting any.

        Args:
            results: Folder of all runs, told to the kernels as ``$ATTNKNN_RESULTS``.
            work: Folder of unfinished copies.
            progress: Where cell counts are shown.
        """
        self._results, self._work, self._progress = results, work, progress
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen] = set()
        self._stopped = False

    def run(
        self,
        tasks: Sequence[Task],
        on_outcome: Callable[[Outcome], None],
        *,
        n_jobs: int,
        n_threads: int,
    ) -> None:
        """Execute tasks, ``n_jobs`` at a time, and hand over each outcome as it comes.

        An exception here, Ctrl-C above all, ends every worker and its kernel.
        """
        environment = self._environment(n_threads)
        pool = ThreadPoolExecutor(n_jobs)
        try:
            left = {pool.submit(self._execute, task, environment) for task in tasks}
            while left:
                done, left = wait(left, timeout=1.0, return_when=FIRST_COMPLETED)
                self._progress.tick()
                for future in done:
                    on_outcome(future.result())
        finally:
            self._stop()
            pool.shutdown(cancel_futures=True)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            processes = list(self._processes)
        for process in processes:
            _close(process.stdin)  # tells a worker to end its kernel and itself
        for process in processes:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()

    def _environment(self, n_threads: int) -> dict[str, str]:
        # One number for all libraries, also where the user set it for OpenMP alone: two threads of
        # one library on the single thread of another make a training several times slower.
        threads = dict.fromkeys(THREAD_VARIABLES, str(threads_used(n_threads)))
        # Idle threads sleep: spinning ones slow everybody down as soon as the cores are shared.
        threads["OMP_WAIT_POLICY"] = "PASSIVE"
        # The user's own thread settings win.
        return threads | dict(os.environ) | {RESULTS_VARIABLE: str(self._results)}

    def _execute(self, task: Task, environment: Mapping[str, str]) -> Outcome:
        self._work.mkdir(parents=True, exist_ok=True)
        output, log = self._work / f"{task.copy}.ipynb", self._work / f"{task.copy}.log"
        job = {"notebook": str(task.notebook.path), "output": str(output)}
        start = time.monotonic()
        with log.open("w", encoding="utf-8") as errors, self._start(environment, errors) as worker:
            details = self._follow(worker, task.name, job | {"parameters": task.parameters})
            _close(worker.stdin)
        with self._lock:
            self._processes.discard(worker)
        status = details.pop("outcome", "failed")
        if status == "failed" and not details:  # it ended without a word
            code = worker.returncode
            why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            details = {"error": f"its process {why} (too little memory?)", "traceback": lines[-12:]}
        return Outcome(task, status, time.monotonic() - start, output, details)

    def _start(self, environment: Mapping[str, str], errors: IO[str]) -> subprocess.Popen:
        with self._lock:
            if self._stopped:
                raise CancelledError
            worker = subprocess.Popen(
                [sys.executable, "-m", "attnknn.paper.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches the pipeline alone, which ends the workers
            )
            self._processes.add(worker)
            return worker

    def _follow(self, worker: subprocess.Popen, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """Give a worker its job, read its messages, and return the last one, its outcome."""
        try:
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
        except BrokenPipeError:  # it died before it could read; its log says why
            return {}
        for line in worker.stdout:
            message = json.loads(line)
            if "outcome" in message:
                return message
            self._progress.update(name, **message)
        return {}


def _close(stream: Any) -> None:
    with suppress(OSError):  # a worker that is gone already has broken the pipe
        stream.close()


# ---- One run while its notebooks are executed: what is left of it, and what came of each notebook.
#
# Whoever executes, workers of this machine or a cluster, asks a session what to do and hands the
# outcomes back; folders and reports are the same either way.


@dataclass
class RunResult:
    """What a call of :func:`run_pipeline` did.

    Attributes:
        folder: The run's folder.
        executed: Names of the notebooks executed now.
        kept: Names of those that were complete already.
        failures: How each failed notebook ended, in the order of failing.
        skipped: Names of those not started because the training failed.
        problems: PDFs that could not be made, one line each.
        seconds: Wall time.
    """

    folder: Path
    executed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failures: list[Outcome] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether everything asked for is there."""
        return not (self.failures or self.skipped or self.problems)


class Session:
    """A run's folder, open for execution.

    Attributes:
        plan: What was asked for.
        run: The folder and its report.
        result: What has been done so far.
        progress: Where the end of each notebook is shown.
        label: Told before its name, where several runs go on at a time.
    """

    def __init__(self, plan: Plan, *, force: bool, progress: Progress, label: str = ""):
        """Refuse or clear what is in the folder, and write the head of the report."""
        self.plan, self.run, self.result = plan, RunFolder(plan.folder), RunResult(plan.folder)
        self.progress, self.label = progress, label
        try:
            self.run.refuse_other_parameters(plan.assignment.values, plan.seeds)
        except ConfigError:
            if not force:
                raise
            self.run.erase()
        if force:
            for task in (task for stage in plan.tasks() for task in stage):
                if task.notebook.name in plan.wanted:
                    self.run.begin(task)
                    self.run.clear_seed(task)
        self._write_head()

    def training(self) -> list[Task]:
        """Return the trainings to execute."""
        return self._left_of(self.plan.tasks()[0])

    def studies(self) -> list[Task]:
        """Return the studies to execute, as far as the training allows."""
        return self._left_of(self._possible(self.plan.tasks()[1]))

    def judging(self) -> list[Task]:
        """Return what judges the tables of the studies; one that failed leaves claims open."""
        return self._left_of(self._possible(self.plan.tasks()[2]))

    def record(self, outcome: Outcome, *, n_threads: int) -> None:
        """Put what a notebook left in its place, and note it in the report.

        Args:
            outcome: How it ended; a training without a trained seed is a failure.
            n_threads: Threads it had; they can change the last digits of a result.
        """
        task, seconds = outcome.task, outcome.seconds
        report = seed_folder(self.run.path, task.seeds[0]) / "report.json"
        if outcome.status == "complete" and task.notebook.is_training and not report.is_file():
            missing = f"{task.notebook.name} must write {report}, got no such file"
            outcome = Outcome.failed(task, outcome.output, missing)
        entry = {"status": outcome.status, "seconds": round(seconds, 3), "finished": now()}
        if outcome.status == "complete":
            self._write_copy(outcome)
            entry |= {"threads": n_threads, "commit": self.run.provenance["commit"]}
            entry |= self.run.facts(task)
            self.result.executed.append(task.name)
        else:
            copy = self.run.copies / f"{task.copy}.failed.ipynb"
            if outcome.output.is_file():
                outcome.output.replace(copy)
            entry |= {"error": outcome.details["error"]}
            self.result.failures.append(replace(outcome, output=copy))
        outcome.output.unlink(missing_ok=True)
        outcome.output.with_suffix(".log").unlink(missing_ok=True)
        self.run.entries[task.name] = entry
        self.run.save()
        self.progress.finish(task, seconds, outcome.status, label=self.label)

    def _write_head(self) -> None:
        plan, report = self.plan, self.run.report
        config = {n: v for n, v in plan.assignment.config.flat().items() if n != "seed"}
        given = report.get("commands", [])
        report |= {
            "run": plan.folder.name,
            "profile": plan.profile,
            # All that were given for this folder: each may have asked for other notebooks.
            "commands": list(dict.fromkeys([*given, plan.command])),
            "status": "running",
            "started": now(),
            "dataset": plan.assignment.config.data.dataset,
            "seeds": plan.seeds,
            "parameters": plan.assignment.values,
            "config": config,
        }
        self.run.save()

    def _possible(self, tasks: Sequence[Task]) -> list[Task]:
        if not any(failure.task.notebook.is_training for failure in self.result.failures):
            return list(tasks)
        for task in (task for task in tasks if task.notebook.reads_training):
            self._skip(task)
        return [task for task in tasks if not task.notebook.reads_training]

    def _left_of(self, tasks: Sequence[Task]) -> list[Task]:
        todo = []
        for task in tasks:
            if self.run.is_complete(task):
                self.result.kept.append(task.name)
                seconds = self.run.entries[task.name]["seconds"]
                if not self.label:  # of many runs, the summary tells
                    self.progress.finish(task, seconds, "kept")
            else:
                todo.append(task)
        if todo:
            self.run.report |= self.run.provenance
        for task in todo:
            self.run.begin(task)
        self.progress.expect(todo)
        return todo

    def _skip(self, task: Task) -> None:
        self.result.skipped.append(task.name)
        # What an earlier, smaller training gave stays a result.
        if self.run.entries.get(task.name, {}).get("status") != "complete":
            self.run.entries[task.name] = {"status": "skipped", "error": "training failed"}
        self.progress.finish(task, 0.0, "skipped", label=self.label)

    def _write_copy(self, outcome: Outcome) -> None:
        """Write the executed copy with its provenance, whole or not at all."""
        notebook = json.loads(outcome.output.read_text(encoding="utf-8"))
        copy, report = self.run.copy_of(outcome.task), self.run.report
        metadata = notebook["metadata"]
        metadata.setdefault("attnknn", {})["provenance"] = {
            "run": report["run"],
            "dataset": report["dataset"],
            "seeds": list(outcome.task.seeds),
            "commit": self.run.provenance["commit"],
            "versions": self.run.provenance["versions"],
            "seconds": round(outcome.seconds, 3),
        }
        # papermill notes full paths; a published copy should not tell them.
        metadata["papermill"] |= {
            "input_path": f"notebooks/{outcome.task.notebook.path.name}",
            "output_path": str(copy.relative_to(self.run.path.parent)),
        }
        write_text(copy, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def open_session(
    plan: Plan,
    *,
    force: bool = False,
    pdf: bool = True,
    progress: Progress | None = None,
    label: str = "",
) -> Iterator[Session]:
    """Hold a run's folder, and publish what was executed in the end.

    Args:
        plan: What to run.
        force: Execute complete notebooks again, and replace a run with other parameters.
        pdf: Write the PDFs, too.
        progress: Where the end of each notebook is shown; a display of its own when None.
        label: Told before the name of a notebook, where several runs go on at a time.

    Raises:
        ConfigError: If the folder holds what no run made, or a run with other parameters while
            ``force`` is not set.
        FolderBusyError: If another process is writing this run.
    """
    start, shown = time.monotonic(), progress or Progress()
    plan.refuse_foreign()  # before the lock: a folder that is not a run's is left as it is
    with locked_folder(plan.folder):
        session = Session(plan, force=force, progress=shown, label=label)
        run, result = session.run, session.result
        try:
            yield session
            shutil.rmtree(run.work, ignore_errors=True)
            result.problems = _publish(run, is_new=bool(result.executed), pdf=pdf)
            run.report["status"] = "complete" if result.is_complete else "failed"
        except BaseException:
            run.report["status"] = "interrupted"
            raise
        finally:
            if progress is None:
                shown.close()
            run.report["finished"] = now()
            run.save()
    result.seconds = time.monotonic() - start


def run_pipeline(
    plan: Plan, *, n_jobs: int | None = None, force: bool = False, pdf: bool = True
) -> RunResult:
    """Execute what is missing or outdated of a plan; a killed run goes on where it was.

    Args:
        plan: What to run, from :func:`make_plan`.
        n_jobs: Notebooks at a time; the cores of this machine, at most 4, when None.
        force: Execute complete notebooks again, and replace a run with other parameters.
        pdf: Write the PDFs, too.

    Returns:
        What was done; a failing notebook is no exception, the others go on.

    Raises:
        ConfigError, FolderBusyError: As for :func:`open_session`.
    """
    n_jobs = check_jobs(n_jobs)
    with open_session(plan, force=force, pdf=pdf) as session:
        # Threads follow from the request alone, never from what is left of it: a resumed run
        # must end with the same digits as an unbroken one.
        n_trainers = min(n_jobs, len(plan.tasks()[0]) or 1)
        stages = session.training, session.studies, session.judging
        for stage, jobs in zip(stages, (n_trainers, n_jobs, n_jobs), strict=True):
            n_threads = threads_each(jobs)
            Workers(plan.folder.parent, session.run.work, session.progress).run(
                stage(),
                lambda outcome, n=n_threads: session.record(outcome, n_threads=threads_used(n)),
                n_jobs=jobs,
                n_threads=n_threads,
            )
    return session.result


def _publish(run: RunFolder, *, is_new: bool, pdf: bool) -> list[str]:
    """Judge the published claims by the tables of the studies, where there are any, and print."""
    if is_new and any((run.path / f"{name}/measures.csv").is_file() for name in run.entries):
        from attnknn.studies.claims import write_claims

        write_claims(run.path)
    if not pdf:
        return []
    from attnknn.paper.book import publish

    return publish(run)
