"""One run while its notebooks are executed: what is left of it, and what came of each notebook.

Whoever executes, a crew on this machine or a cluster, asks a session what to do and hands the
outcomes back; folders and reports are the same either way.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from attnknn.config import ConfigError
from attnknn.files import locked_folder
from attnknn.pipeline.crew import Outcome
from attnknn.pipeline.plan import Plan
from attnknn.pipeline.progress import Progress
from attnknn.pipeline.publish import publish, publish_claims
from attnknn.pipeline.reuse import adopt_training
from attnknn.pipeline.settle import now, settle
from attnknn.pipeline.state import RunFolder, Task, code_digest


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
