"""Parameters and notebooks → a run folder with executed notebooks, PDFs and ``report.json``."""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from attnknn.checks import check_count
from attnknn.config import ConfigError
from attnknn.files import locked_folder
from attnknn.pipeline.crew import Crew, Outcome, n_cores, threads_each
from attnknn.pipeline.plan import Plan
from attnknn.pipeline.progress import Progress
from attnknn.pipeline.publish import publish
from attnknn.pipeline.settle import now, settle
from attnknn.pipeline.state import RunFolder, Task, code_digest

_MOST_JOBS = 4  # by default; each process holds torch and a memory bank


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
        seconds: Wall time.
    """

    folder: Path
    executed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failures: list[Outcome] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether everything asked for is there."""
        return not (self.failures or self.skipped or self.problems)


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
        ConfigError: If the folder holds a run with other parameters and ``force`` is not set.
        FolderBusyError: If another process is writing this run.
    """
    n_jobs = min(n_cores(), _MOST_JOBS) if n_jobs is None else check_count("jobs", n_jobs)
    start = time.monotonic()
    with locked_folder(plan.folder):
        run = RunFolder(plan.folder)
        _open(run, plan, force=force)
        result = RunResult(plan.folder)
        try:
            _execute_all(run, plan, result, n_jobs=n_jobs)
            if pdf:
                result.problems = publish(run)
            run.report["status"] = "complete" if result.is_complete else "failed"
        except BaseException:
            run.report["status"] = "interrupted"
            raise
        finally:
            run.report["finished"] = now()
            run.save()
    result.seconds = time.monotonic() - start
    return result


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
                run.clear(task)
                run.clear_seed(task)
    config = {n: v for n, v in plan.assignment.config.flat().items() if n != "seed"}
    run.report |= {
        "run": plan.folder.name,
        "profile": plan.profile,
        "status": "running",
        "started": now(),
        "dataset": plan.assignment.config.data.dataset,
        "seeds": plan.seeds,
        "parameters": plan.assignment.values,
        "config": config,
    }
    run.save()


def _execute_all(run: RunFolder, plan: Plan, result: RunResult, *, n_jobs: int) -> None:
    """Run the training first, then the rest as far as the training allows."""
    training, rest = plan.tasks()
    progress = Progress([*training, *rest])
    try:
        # Threads follow from the request alone, never from what is left of it: a resumed run
        # must end with the same digits as an unbroken one.
        n_trainers = min(n_jobs, len(training) or 1)
        _execute(run, training, result, progress, n_jobs=n_trainers)
        if result.failures:
            blocked = [task for task in rest if task.notebook.reads_training]
            rest = [task for task in rest if task not in blocked]
            for task in blocked:
                result.skipped.append(task.name)
                # What an earlier, smaller training gave stays a result.
                if run.entries.get(task.name, {}).get("status") != "complete":
                    run.entries[task.name] = {"status": "skipped", "error": "training failed"}
                progress.finish(task.name, 0.0, "skipped")
        _execute(run, rest, result, progress, n_jobs=n_jobs)
    finally:
        progress.close()


def _execute(
    run: RunFolder, tasks: list[Task], result: RunResult, progress: Progress, *, n_jobs: int
) -> None:
    kept = [task for task in tasks if run.is_complete(task)]
    for task in kept:
        result.kept.append(task.name)
        if run.entries[task.name]["code"] != code_digest():
            result.outdated.append(task.name)
        progress.finish(task.name, run.entries[task.name]["seconds"], "kept")
    todo = [task for task in tasks if task not in kept]
    if not todo:
        return
    run.report |= run.provenance
    for task in todo:
        run.clear(task)
    n_threads = threads_each(n_jobs)
    crew = Crew(run.path.parent, run.copies / ".partial", progress)

    def record(outcome: Outcome) -> None:
        outcome = settle(run, outcome, n_threads=n_threads)
        target = result.executed if outcome.status == "complete" else result.failures
        target.append(outcome.task.name if outcome.status == "complete" else outcome)
        progress.finish(outcome.task.name, outcome.seconds, outcome.status)

    crew.run(todo, record, n_jobs=n_jobs, n_threads=n_threads)
    shutil.rmtree(run.copies / ".partial", ignore_errors=True)
