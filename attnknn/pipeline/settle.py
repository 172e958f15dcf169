"""The end of a task → files under their final names and an entry in the report, in this order."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnknn.files import write_text
from attnknn.pipeline.crew import Outcome
from attnknn.pipeline.state import RunFolder, Task, code_digest
from attnknn.runs import seed_folder


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
