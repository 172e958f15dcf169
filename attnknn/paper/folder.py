"""What a run folder already holds: ``report.json``, and which notebooks of it are still good."""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attnknn.config import ConfigError
from attnknn.data.download import own_files_stamp
from attnknn.embed.runs import project_root, seed_folder
from attnknn.files import (
    AFMP_VERSION,
    METHOD_VERSION,
    REPORT_NAME,
    DamagedError,
    check_sums,
    read_json,
    sha256_file,
    validity_key,
    write_json,
)
from attnknn.paper.notebooks import Notebook

GRID_NAME = "grid.json"  # a folder with this file holds runs, and is none itself
PLACES = ("run_dir", "save_to")  # parameters that only say where a run is


@dataclass(frozen=True)
class Task:
    """One notebook to execute once.

    Attributes:
        notebook: What is executed.
        parameters: What is injected, ``run_dir`` included.
        seeds: The seeds it trains (one) or reads (all of the run).
        copy: Name of the executed copy, without suffix.
    """

    notebook: Notebook
    parameters: dict[str, Any]
    seeds: tuple[int, ...]
    copy: str

    @property
    def n_cells(self) -> int:
        """Code cells that are executed, the injected one included."""
        return self.notebook.n_cells + bool(self.parameters)

    @property
    def name(self) -> str:
        """The name under which the report knows this task; it never changes for a seed."""
        if self.notebook.is_training:
            return f"{self.notebook.name}.seed{self.seeds[0]}"
        return self.notebook.name


class RunFolder:
    """A run's folder and its ``report.json``.

    Attributes:
        path: The folder.
        report: Content of ``report.json``; ``save`` writes it.
    """

    def __init__(self, path: Path):
        """Read what is there."""
        self.path = Path(path)
        report = self.path / "report.json"
        try:
            self.report: dict[str, Any] = read_json(report) if report.is_file() else {}
        except ValueError as error:
            raise ConfigError(
                f"{report} must be the report of a run, got unreadable JSON ({error}); "
                "move it away or choose another --name"
            ) from None

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Hardware, versions and commit of this process; asked for once, as it loads torch."""
        from attnknn.files import provenance

        return provenance()

    @property
    def entries(self) -> dict[str, Any]:
        """Status of each task, by task name."""
        return self.report.setdefault("notebooks", {})

    @property
    def copies(self) -> Path:
        """Folder of the executed copies."""
        return self.path / "notebooks"

    @property
    def work(self) -> Path:
        """Folder of unfinished copies."""
        return self.copies / ".partial"

    def save(self) -> None:
        """Write ``report.json``."""
        write_json(self.path / "report.json", self.report)

    def copy_of(self, task: Task) -> Path:
        """Return the path of the finished copy of a task."""
        return self.copies / f"{task.copy}.ipynb"

    def refuse_foreign(self, tasks: Sequence[Task]) -> None:
        """Raise when the folder, or a place in it that a task needs, is not a run's own.

        Tasks replace what they find in their places. So these must be new, or named by the report
        of the run that made them; a seed that was trained without notebooks is its own record.
        """
        project = project_root()
        if project is not None and project.is_relative_to(self.path.resolve()):
            raise ConfigError(
                f"name must be that of a run, got {self.path}, which is or holds the project; "
                "choose another --name"
            )
        if self.report and "parameters" not in self.report:
            raise ConfigError(
                f"{self.path / 'report.json'} must be the report of a run, got that of something "
                "else; choose another --name"
            )
        if strangers := self._strangers(tasks):
            raise ConfigError(
                f"{self.path} must be a new folder or hold what a run made, got also "
                f"{', '.join(strangers)}; move it away or choose another --name"
            )

    def _strangers(self, tasks: Sequence[Task]) -> list[str]:
        """Return what no run made: of all in the folder without a report, else where tasks go."""
        if not self.report:
            # Hidden files, a lock above all, are in nobody's way.
            paths = [p for p in self.path.glob("*") if not p.name.startswith(".")]
        else:
            known = {_notebook_of(name) for name in self.entries}
            paths = [self.copy_of(task) for task in tasks if task.name not in self.entries]
            paths += [self.path / t.notebook.name for t in tasks if t.notebook.name not in known]
            seeds = {seed for t in tasks if t.notebook.is_training for seed in t.seeds}
            unknown = seeds - set(self.report.get("seeds", ()))
            paths += [seed_folder(self.path, seed) for seed in unknown]
        found = {p.relative_to(self.path) for p in paths if p.exists() and not _is_training(p)}
        return sorted(map(str, found))

    def refuse_other_parameters(self, values: dict[str, Any], seeds: Iterable[int]) -> None:
        """Raise when the folder was made with other parameters; more seeds are no difference."""
        if not self.report:
            return
        before, missing = self.report.get("parameters", {}), object()
        changed = [
            f"{name} (there {_shown(before, name)}, now {_shown(values, name)})"
            for name in sorted(before.keys() | values.keys())
            if before.get(name, missing) != values.get(name, missing)
        ]
        if dropped := sorted(set(self.report.get("seeds", ())) - set(seeds)):
            changed.append(f"seeds (there also {dropped})")
        if changed:
            raise ConfigError(
                f"{self.path} must hold a run with the same parameters, got other "
                f"{', '.join(changed)}; --name NAME keeps both, --force replaces it"
            )

    def key(self, task: Task) -> str:
        """Return the digest of all a task's result depends on: cells, parameters, trained seeds."""
        # The folder's own place is no part of the result: a moved run stays complete.
        parameters = {n: v for n, v in task.parameters.items() if n not in PLACES}
        dataset = parameters.get("dataset")
        inputs = [own_files_stamp(dataset)] if isinstance(dataset, str) else []
        others = (parameters.get(name) for name in ("data", "afmp_dataset"))
        # Only the path of own files is absolute: the plan has made it so.
        inputs += [own_files_stamp(x) for x in others if x is not None and Path(x).is_absolute()]
        if task.notebook.reads_training:
            inputs += [sha256_file(seed_folder(self.path, s) / REPORT_NAME) for s in task.seeds]
        if task.notebook.is_judging:  # by the tables of all other notebooks that are there
            others = (e for name, e in self.entries.items() if name != task.name)
            inputs += sorted(json.dumps(e["sums"], sort_keys=True) for e in others if "sums" in e)
        is_afmp = any(name.startswith("afmp") for name in task.notebook.defaults)
        cells = [task.notebook.digest, AFMP_VERSION if is_afmp else None]
        return validity_key([cells, parameters], version=METHOD_VERSION, data=inputs)

    def facts(self, task: Task) -> dict[str, Any]:
        """Return what the report says of a finished task, for ``is_complete`` to ask later."""
        copy = str(self.copy_of(task).relative_to(self.path))
        names = self.files_of(task)
        sums = {name: sha256_file(self.path / name) for name in [copy, *names]}
        return {"copy": copy, "files": names, "sums": sums, "key": self.key(task)}

    def is_complete(self, task: Task) -> bool:
        """Tell whether a task was finished with the same inputs, and left its files as they are."""
        entry = self.entries.get(task.name, {})
        if entry.get("status") != "complete" or "sums" not in entry:
            return False
        if task.notebook.is_training:
            seed = seed_folder(self.path, task.seeds[0])
            if not (seed / REPORT_NAME).is_file() or self._is_damaged(task):
                return False
        try:
            check_sums(self.path, entry["sums"])
            return entry["key"] == self.key(task)
        except (DamagedError, FileNotFoundError):
            return False

    def files_of(self, task: Task) -> list[str]:
        """Return the tables and figures a task has written, relative to the run."""
        folder = self.path / task.notebook.name
        # A dot marks a file that is being written; seeds trained side by side share a folder.
        found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        if task.notebook.is_training:
            own = re.compile(rf"seed{task.seeds[0]}(?!\d)")
            found = (path for path in found if own.search(path.name))
        return sorted(str(path.relative_to(self.path)) for path in found)

    def begin(self, task: Task) -> None:
        """Remove a task's outdated copy, PDFs and files; trained seeds stay, they resume."""
        before = self.entries.get(task.name)
        copy = str(self.copy_of(task).relative_to(self.path))
        # First: what is not called complete is no result, and what is not named is not ours.
        self.entries[task.name] = {"status": "begun", "copy": (before or {}).get("copy", copy)}
        self.save()
        if before is not None:
            if self._is_damaged(task):  # a training would refuse to take it up
                self.clear_seed(task)
            self._remove_files(task.name)
            self._remove_copy(task.copy)
            if not task.notebook.is_training:
                shutil.rmtree(self.path / task.notebook.name, ignore_errors=True)

    def _is_damaged(self, task: Task) -> bool:
        """Tell whether a trained seed is not what its own report says."""
        seed = seed_folder(self.path, task.seeds[0])
        if not task.notebook.is_training or not (seed / REPORT_NAME).is_file():
            return False
        try:
            check_sums(seed, read_json(seed / REPORT_NAME).get("files", {}))
        except (DamagedError, ValueError):
            return True
        return False

    def clear_seed(self, task: Task) -> None:
        """Remove what a training task has trained."""
        if task.notebook.is_training:
            _remove_training(seed_folder(self.path, task.seeds[0]))

    def erase(self) -> None:
        """Remove all that the report names, itself last: until then the folder is the old run's."""
        for name in self.entries:
            self._remove_files(name)
            shutil.rmtree(self.path / _notebook_of(name), ignore_errors=True)
        for seed in self.report.get("seeds", ()):
            _remove_training(seed_folder(self.path, seed))
        shutil.rmtree(self.work, ignore_errors=True)
        if self.copies.is_dir() and not any(self.copies.iterdir()):
            self.copies.rmdir()
        (self.path / "report.json").unlink(missing_ok=True)
        self.report = {}

    def _remove_files(self, name: str) -> None:
        """Remove the copy and the PDFs of a task that the report names."""
        self._remove_copy(Path(self.entries[name].get("copy", name)).stem)
        if "pdf_key" in self.report:
            (self.path / "report.pdf").unlink(missing_ok=True)

    def _remove_copy(self, stem: str) -> None:
        for suffix in (".ipynb", ".pdf", ".failed.ipynb"):
            (self.copies / f"{stem}{suffix}").unlink(missing_ok=True)


def _notebook_of(name: str) -> str:
    """Return the notebook of a task by the task's name, which has the seed behind a dot."""
    return Path(name).name.partition(".")[0]


def _is_training(path: Path) -> bool:
    """Tell whether a path is a seed's folder, trained or begun with or without notebooks."""
    if not path.is_dir() or re.fullmatch(r"seed\d+", path.name) is None:
        return False
    # A training writes its configuration first of all; before that there is a lock alone.
    return (path / "config.json").is_file() or all(p.name.startswith(".") for p in path.iterdir())


def _remove_training(folder: Path) -> None:
    # First what makes it count as complete: a kill in between must not leave a torso.
    (folder / REPORT_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _shown(values: dict[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "the default"
