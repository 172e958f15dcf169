"""Parameters and notebooks → a run folder with executed notebooks, PDFs and ``report.json``."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from attnknn.checks import check_count
from attnknn.config import ConfigError
from attnknn.embed.runs import RESULTS_VARIABLE, seed_folder
from attnknn.files import locked_folder, sha256_file, write_text
from attnknn.paper.folder import RunFolder, Task, adopt_training, code_digest
from attnknn.paper.plan import Plan

# ---- What the user sees while notebooks run: live lines in a terminal, plain lines elsewhere.

_SAYS_WIDTH = 40  # characters of a notebook's own output beside its count


class Progress:
    """One line a notebook: cells done, cells in all, seconds."""

    def __init__(self, tasks: Iterable[Task]):
        """Draw a waiting line for each task when stderr is a terminal."""
        self._totals = {t.name: t.notebook.n_cells + bool(t.parameters) for t in tasks}
        self._done = dict.fromkeys(self._totals, 0)
        self._says = dict.fromkeys(self._totals, "")
        self._starts: dict[str, float] = {}
        self._width = max((len(name) for name in self._totals), default=0)
        self._bars: dict[str, Any] = {}
        if sys.stderr.isatty():
            self._bars = {name: self._bar(place) for place, name in enumerate(self._totals)}
            self.tick()

    def start(self, name: str) -> None:
        """Let the seconds of a task run."""
        self._starts[name] = time.monotonic()

    def update(self, name: str, *, done: int | None = None, says: str | None = None) -> None:
        """Note the cells done, or the last line a task printed."""
        self._done[name] = self._done[name] if done is None else done
        self._says[name] = self._says[name] if says is None else says

    def tick(self) -> None:
        """Draw all lines again: their seconds move during a long cell, too."""
        for name in self._bars:
            if name in self._starts:
                seconds = time.monotonic() - self._starts[name]
                self._draw(name, ">", f"{seconds:.0f} s  {self._says[name][:_SAYS_WIDTH]}")

    def finish(self, name: str, seconds: float, status: str) -> None:
        """Show the end of a task: ``complete``, ``kept``, ``failed`` or ``skipped``."""
        self._starts.pop(name, None)
        if status == "kept":  # executed by an earlier call, in so many seconds
            self._done[name] = self._totals[name]
        if self._bars:
            mark = "+" if status in {"complete", "kept"} else "x"
            self._draw(name, mark, f"{seconds:.1f} s  {status}")
            return
        cells = f"{self._done[name]}/{self._totals[name]} cells"
        print(f"{status:<8}  {name:<{self._width}}  {cells:>11}  {seconds:.1f} s", flush=True)

    def close(self) -> None:
        """Leave the terminal below the last line."""
        for bar in self._bars.values():
            bar.close()

    def _bar(self, place: int) -> Any:
        from tqdm import tqdm

        form = "{desc} {n_fmt:>3}/{total_fmt} cells{postfix}"
        name = list(self._totals)[place]
        total = self._totals[name]
        waiting = f". {name:<{self._width}}"
        return tqdm(desc=waiting, total=total, position=place, bar_format=form, dynamic_ncols=True)

    def _draw(self, name: str, mark: str, note: str) -> None:
        bar = self._bars[name]
        bar.n = self._done[name]
        bar.set_description_str(f"{mark} {name:<{self._width}}", refresh=False)
        bar.set_postfix_str(note)


class Lines:
    """The end of each notebook of many runs, a line each, above one bar for all of them."""

    def __enter__(self) -> "Lines":
        """Start a bar when stderr is a terminal."""
        from tqdm import tqdm

        self._bar = tqdm(desc="notebooks", total=0, disable=not sys.stderr.isatty(), leave=False)
        return self

    def __exit__(self, *_: Any) -> None:
        """Remove the bar."""
        self._bar.close()

    def of(self, run: str) -> "RunLines":
        """Return the display of one run."""
        return RunLines(run, self)

    def expect(self) -> None:
        """Count one more notebook that is to be executed."""
        self._bar.total += 1
        self._bar.refresh()

    def finish(self, line: str) -> None:
        """Show a line, and one notebook less to wait for."""
        self._bar.update()
        self.say(line)

    def say(self, line: str) -> None:
        """Show a line above the bar."""
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()


class RunLines(Progress):
    """Shows what was executed of one run; what was there already is told in the summary."""

    def __init__(self, run: str, lines: Lines):
        """Prepare without showing anything."""
        super().__init__([])
        self._run, self._lines = run, lines

    def finish(self, name: str, seconds: float, status: str) -> None:
        """Show the end of a task: ``complete``, ``failed`` or ``skipped``."""
        line = f"{status:<8}  {self._run}  {name}  {seconds:.1f} s"
        if status == "skipped":
            self._lines.say(line)
        elif status != "kept":
            self._lines.finish(line)


# ---- Tasks → executed copies: worker processes, a few at a time, that all end with the pipeline.

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PATIENCE = 10.0  # seconds a worker may take to end its kernel


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


def n_cores() -> int:
    """Return the number of cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def threads_each(n_jobs: int) -> int:
    """Return how many threads each of ``n_jobs`` processes gets."""
    return max(1, n_cores() // n_jobs)


def threads_used(n_threads: int) -> int:
    """Return how many threads a kernel offered ``n_threads`` has: the user's setting wins."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else n_threads


class Crew:
    """Worker processes that end together."""

    def __init__(self, results: Path, work: Path, progress: Progress):
        """Prepare a crew without workers.

        Args:
            results: Folder of all runs, told to the kernels as ``$ATTNKNN_RESULTS``.
            work: Folder of unfinished copies.
            progress: Where cell counts are shown.
        """
        self._results, self._work, self._progress = results, work, progress
        self._lock = threading.Lock()
        self._workers: set[subprocess.Popen] = set()
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
            workers = list(self._workers)
        for worker in workers:
            _close(worker.stdin)  # tells a worker to end its kernel and itself
        for worker in workers:
            try:
                worker.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                worker.kill()

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
        paths = {"notebook": str(task.notebook.path), "output": str(output)}
        start = time.monotonic()
        self._progress.start(task.name)
        with log.open("w", encoding="utf-8") as errors, self._start(environment, errors) as worker:
            details = self._follow(worker, task.name, paths | {"parameters": task.parameters})
            _close(worker.stdin)
        with self._lock:
            self._workers.discard(worker)
        status = details.pop("outcome", "failed")
        if status == "failed" and not details:
            details = _unexplained(worker.returncode, log)
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
            self._workers.add(worker)
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
    try:
        stream.close()
    except OSError:  # a worker that is gone already has broken the pipe
        pass


def _unexplained(code: int | None, log: Path) -> dict[str, Any]:
    """Describe a worker that ended without a word."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    why = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
    return {"error": f"its process {why} (too little memory?)", "traceback": lines[-12:]}


# ---- The end of a task → files under their final names and an entry in the report, in this order.


def settle(run: RunFolder, outcome: Outcome, *, n_threads: int) -> Outcome:
    """Put the executed copy in its place and note the task in the report.

    Args:
        run: The run that the task belongs to.
        outcome: How it ended.
        n_threads: Threads it had; they can change the last digits of a result.

    Returns:
        The outcome with the copy's final path; failed if a training left no trained seed.
    """
    outcome = _check_training(run, outcome)
    task, seconds = outcome.task, round(outcome.seconds, 3)
    entry: dict[str, Any] = {"status": outcome.status, "seconds": seconds, "finished": now()}
    if outcome.status == "complete":
        copy = _write_copy(run, task, outcome)
        entry |= {
            "copy": str(copy.relative_to(run.path)),
            "files": run.files_of(task),
            "threads": n_threads,
            "commit": run.provenance["commit"],
            "code": code_digest(),
            "key": run.key(task),
        }
        if trained_in := run.trained_in(task):
            entry["trained_in"] = trained_in
    else:
        copy = _keep_partial(run, task, outcome.output)
        entry |= {"error": outcome.details["error"]}
    run.entries[task.name] = entry
    run.save()
    return replace(outcome, output=copy)


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_training(run: RunFolder, outcome: Outcome) -> Outcome:
    task = outcome.task
    if outcome.status != "complete" or not task.notebook.is_training:
        return outcome
    report = seed_folder(run.path, task.seeds[0]) / "report.json"
    if report.is_file():
        return outcome
    missing = f"{task.notebook.name} must write {report}, got no such file"
    return replace(outcome, status="failed", details={"error": missing, "traceback": []})


def _write_copy(run: RunFolder, task: Task, outcome: Outcome) -> Path:
    """Write the executed copy with its provenance, whole or not at all."""
    notebook = json.loads(outcome.output.read_text(encoding="utf-8"))
    copy = run.copy_of(task)
    provenance = {
        "run": run.report["run"],
        "dataset": run.report["dataset"],
        "seeds": list(task.seeds),
        "commit": run.provenance["commit"],
        "versions": run.provenance["versions"],
        "seconds": round(outcome.seconds, 3),
    }
    metadata = notebook["metadata"]
    metadata.setdefault("attnknn", {})["provenance"] = provenance
    # papermill notes full paths; a published copy should not tell them.
    metadata["papermill"] |= {
        "input_path": f"notebooks/{task.notebook.path.name}",
        "output_path": str(copy.relative_to(run.path.parent)),
    }
    write_text(copy, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    _remove_work(outcome.output)
    return copy


def _keep_partial(run: RunFolder, task: Task, output: Path) -> Path:
    """Move the partly executed copy to where the user finds it."""
    copy = run.copies / f"{task.copy}.failed.ipynb"
    if output.is_file():
        output.replace(copy)
    _remove_work(output)
    return copy


def _remove_work(output: Path) -> None:
    output.unlink(missing_ok=True)
    output.with_suffix(".log").unlink(missing_ok=True)


# ---- Executed copies → PDFs: one for each notebook, and one that binds them all; and the claims.


def publish(run: RunFolder) -> list[str]:
    """Write the PDFs of a run that are missing or older than their notebooks.

    Args:
        run: A run; only its complete notebooks are printed.

    Returns:
        One line for each PDF that could not be made.
    """
    names = sorted(name for name, entry in run.entries.items() if entry["status"] == "complete")
    problems = []
    for name in names:
        entry = run.entries[name]
        copy = run.path / entry["copy"]
        # PDFs cost half a second each: any change of our own code is a reason to print again.
        key = _digest([sha256_file(copy), code_digest()])
        if entry.get("pdf_key") == key and copy.with_suffix(".pdf").is_file():
            continue
        entry.pop("pdf_key", None)
        if problem := _print_notebook(copy):
            problems.append(problem)
        else:
            entry["pdf_key"] = key
        run.save()
    return problems + _publish_report(run, names)


def publish_claims(run: RunFolder) -> None:
    """Judge the published claims by the tables of the studies, where there are any."""
    if any((run.path / f"{name}/measures.csv").is_file() for name in run.entries):
        from attnknn.studies.claims import write_claims

        write_claims(run.path)


def _print_notebook(copy: Path) -> str:
    from attnknn.paper.pdf import notebook_to_pdf

    try:
        notebook_to_pdf(copy)
    except (RuntimeError, ValueError) as error:
        return f"no PDF of {copy}: {error}"
    return ""


def _publish_report(run: RunFolder, names: list[str]) -> list[str]:
    output, claims = run.path / "report.pdf", run.path / "claims.md"
    preface = claims.read_text(encoding="utf-8") if claims.is_file() else ""
    key = _digest([preface, [[name, run.entries[name].get("pdf_key")] for name in names]])
    if not names or (run.report.get("pdf_key") == key and output.is_file()):
        return []
    from attnknn.paper.book import bind_report

    copies = [run.path / run.entries[name]["copy"] for name in names]
    facts = {name: run.report.get(name) for name in ("run", "dataset", "seeds", "commit")}
    try:
        bind_report(
            copies,
            output,
            title=f"Attn-KNN: {run.report['run']}",
            provenance=facts | {"versions": run.report.get("versions", {})},
            preface=preface,
        )
    except (RuntimeError, ValueError) as error:
        return [f"no {output}: {error}"]
    run.report["pdf_key"] = key
    run.save()
    return []


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# ---- One run while its notebooks are executed: what is left of it, and what came of each notebook.
#
# Whoever executes, a crew on this machine or a cluster, asks a session what to do and hands the
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
        outdated: Names of kept notebooks made by other code of this package.
        adopted: Seeds whose training was taken over, and the run it was taken from.
        seconds: Wall time.
    """

    folder: Path
    executed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failures: list[Outcome] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    adopted: dict[int, str] = field(default_factory=dict)
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
    """

    def __init__(self, plan: Plan, *, force: bool = False, progress: Progress | None = None):
        """Refuse or clear what is in the folder, and write the head of the report."""
        self.plan, self.run, self.result = plan, RunFolder(plan.folder), RunResult(plan.folder)
        _open(self.run, plan, force=force)
        training, rest = plan.tasks()
        self.progress = Progress([*training, *rest]) if progress is None else progress
        wanted = any(task.notebook.name in plan.wanted for task in training)
        self._may_adopt = not (force and wanted)

    @property
    def work(self) -> Path:
        """Folder of unfinished copies."""
        return self.run.work

    def training(self) -> list[Task]:
        """Return the trainings to execute, those of a finished equal run taken over."""
        todo = self._left_of(self.plan.tasks()[0])
        for task in todo if self._may_adopt else ():
            if source := adopt_training(self.run, task):
                self.result.adopted[task.seeds[0]] = source
        return todo

    def rest(self) -> list[Task]:
        """Return the other notebooks to execute, as far as the training allows."""
        rest = self.plan.tasks()[1]
        if self.result.failures:
            blocked = [task for task in rest if task.notebook.reads_training]
            rest = [task for task in rest if task not in blocked]
            for task in blocked:
                self._skip(task)
        return self._left_of(rest)

    def record(self, outcome: Outcome, *, n_threads: int) -> None:
        """Put what a notebook left in its place, and note it."""
        outcome = settle(self.run, outcome, n_threads=n_threads)
        if outcome.status == "complete":
            self.result.executed.append(outcome.task.name)
        else:
            self.result.failures.append(outcome)
        self.progress.finish(outcome.task.name, outcome.seconds, outcome.status)

    def _left_of(self, tasks: list[Task]) -> list[Task]:
        kept = [task for task in tasks if self.run.is_complete(task)]
        for task in kept:
            self.result.kept.append(task.name)
            if self.run.entries[task.name]["code"] != code_digest():
                self.result.outdated.append(task.name)
            self.progress.finish(task.name, self.run.entries[task.name]["seconds"], "kept")
        todo = [task for task in tasks if task not in kept]
        if todo:
            self.run.report |= self.run.provenance
        for task in todo:
            self.run.begin(task)
        return todo

    def _skip(self, task: Task) -> None:
        self.result.skipped.append(task.name)
        # What an earlier, smaller training gave stays a result.
        if self.run.entries.get(task.name, {}).get("status") != "complete":
            self.run.entries[task.name] = {"status": "skipped", "error": "training failed"}
        self.progress.finish(task.name, 0.0, "skipped")


@contextmanager
def open_session(
    plan: Plan, *, force: bool = False, pdf: bool = True, progress: Progress | None = None
) -> Iterator[Session]:
    """Hold a run's folder, and publish what was executed in the end.

    Args:
        plan: What to run.
        force: Execute complete notebooks again, and replace a run with other parameters.
        pdf: Write the PDFs, too.
        progress: Where the end of each notebook is shown; lines of its own when None.

    Raises:
        ConfigError: If the folder holds what no run made, or a run with other parameters while
            ``force`` is not set.
        FolderBusyError: If another process is writing this run.
    """
    start = time.monotonic()
    plan.refuse_foreign()  # before the lock: a folder that is not a run's is left as it is
    with locked_folder(plan.folder):
        session = Session(plan, force=force, progress=progress)
        report, result = session.run.report, session.result
        try:
            yield session
            shutil.rmtree(session.work, ignore_errors=True)
            session.progress.close()
            if result.executed:
                publish_claims(session.run)
            if pdf:
                result.problems = publish(session.run)
            report["status"] = "complete" if result.is_complete else "failed"
        except BaseException:
            session.progress.close()
            report["status"] = "interrupted"
            raise
        finally:
            report["finished"] = now()
            session.run.save()
    result.seconds = time.monotonic() - start


def _open(run: RunFolder, plan: Plan, *, force: bool) -> None:
    """Refuse or clear what is in the folder, and write the head of the report."""
    try:
        run.refuse_other_parameters(plan.assignment.values, plan.seeds)
    except ConfigError:
        if not force:
            raise
        run.erase()
    if force:
        training, rest = plan.tasks()
        for task in (*training, *rest):
            if task.notebook.name in plan.wanted:
                run.begin(task)
                run.clear_seed(task)
    config = {n: v for n, v in plan.assignment.config.flat().items() if n != "seed"}
    run.report |= {
        "run": plan.folder.name,
        "profile": plan.profile,
        # All that were given for this folder, in order: each may have asked for other notebooks.
        "commands": list(dict.fromkeys([*run.report.get("commands", []), plan.command])),
        "status": "running",
        "started": now(),
        "dataset": plan.assignment.config.data.dataset,
        "seeds": plan.seeds,
        "parameters": plan.assignment.values,
        "config": config,
    }
    run.save()


_MOST_JOBS = 4  # by default; each process holds torch and a memory bank


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
        ConfigError: If the folder holds what no run made, or a run with other parameters while
            ``force`` is not set.
        FolderBusyError: If another process is writing this run.
    """
    n_jobs = check_jobs(n_jobs)
    with open_session(plan, force=force, pdf=pdf) as session:
        # Threads follow from the request alone, never from what is left of it: a resumed run
        # must end with the same digits as an unbroken one.
        n_trainers = min(n_jobs, len(plan.tasks()[0]) or 1)
        _execute(session, session.training(), n_jobs=n_trainers)
        _execute(session, session.rest(), n_jobs=n_jobs)
    return session.result


def check_jobs(n_jobs: int | None) -> int:
    """Return how many notebooks run at a time: ``n_jobs``, or what suits this machine."""
    return min(n_cores(), _MOST_JOBS) if n_jobs is None else check_count("jobs", n_jobs)


def _execute(session: Session, tasks: list[Task], *, n_jobs: int) -> None:
    if not tasks:
        return
    n_threads = threads_each(n_jobs)
    crew = Crew(session.run.path.parent, session.work, session.progress)
    crew.run(
        tasks,
        lambda outcome: session.record(outcome, n_threads=threads_used(n_threads)),
        n_jobs=n_jobs,
        n_threads=n_threads,
    )
