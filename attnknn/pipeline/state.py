"""What a run folder already holds: ``report.json``, and which notebooks of it are still good."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import attnknn
from attnknn.config import ConfigError
from attnknn.files import read_json, sha256_file, write_json
from attnknn.pipeline.notebooks import Notebook
from attnknn.provenance import REPORT_NAME
from attnknn.runs import seed_folder
from attnknn.sources import own_files_stamp

GRID_NAME = "grid.json"  # a folder with this file holds runs, and is none itself
PLACES = ("run_dir", "save_to")  # parameters that only say where a run is
ORIGIN_NAME = "trained_in.json"  # in a trained seed: the run it was taken over from


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
        from attnknn.provenance import provenance

        return provenance()

    @property
    def entries(self) -> dict[str, Any]:
        """Status of each task, by task name."""
        return self.report.setdefault("notebooks", {})

    @property
    def copies(self) -> Path:
        """Folder of the executed copies."""
        return self.path / "notebooks"

    def save(self) -> None:
        """Write ``report.json``."""
        write_json(self.path / "report.json", self.report)

    def copy_of(self, task: Task) -> Path:
        """Return the path of the finished copy of a task."""
        return self.copies / f"{task.copy}.ipynb"

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
            inputs += [sha256_file(seed_folder(self.path, s) / "report.json") for s in task.seeds]
        content = json.dumps([task.notebook.digest, parameters, inputs], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def is_complete(self, task: Task) -> bool:
        """Tell whether the executed copy and its files are there and still up to date."""
        entry = self.entries.get(task.name, {})
        if entry.get("status") != "complete":
            return False
        files = [entry["copy"], *entry["files"]]
        if task.notebook.is_training:
            files.append(f"seed{task.seeds[0]}/report.json")
        return all((self.path / f).is_file() for f in files) and entry["key"] == self.key(task)

    def files_of(self, task: Task) -> list[str]:
        """Return the tables and figures a task has written, relative to the run."""
        folder = self.path / task.notebook.name
        # A dot marks a file that is being written; seeds trained side by side share a folder.
        found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        if task.notebook.is_training:
            own = re.compile(rf"seed{task.seeds[0]}(?!\d)")
            found = (path for path in found if own.search(path.name))
        return sorted(str(path.relative_to(self.path)) for path in found)

    def trained_in(self, task: Task) -> str | None:
        """Return the run that a training was taken over from, None if it was made here."""
        origin = seed_folder(self.path, task.seeds[0]) / ORIGIN_NAME
        return read_json(origin)["run"] if task.notebook.is_training and origin.is_file() else None

    def clear(self, task: Task) -> None:
        """Remove a task's outdated copy, PDFs and files; trained seeds stay, they resume."""
        entry = self.entries.pop(task.name, {})
        self.save()  # first: what the report does not name is no result
        for stem in {task.copy, Path(entry.get("copy", task.copy)).stem}:
            for suffix in (".ipynb", ".pdf", ".failed.ipynb"):
                (self.copies / f"{stem}{suffix}").unlink(missing_ok=True)
        (self.path / "report.pdf").unlink(missing_ok=True)
        if not task.notebook.is_training:
            shutil.rmtree(self.path / task.notebook.name, ignore_errors=True)

    def clear_seed(self, task: Task) -> None:
        """Remove what a training task has trained."""
        if task.notebook.is_training:
            folder = seed_folder(self.path, task.seeds[0])
            # First what makes it count as complete: a kill in between must not leave a torso.
            (folder / REPORT_NAME).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def erase(self) -> None:
        """Remove all that a run wrote, the report last: until then the folder is the old run's."""
        for path in self.path.iterdir():
            if path.is_dir() and _is_ours(path.name):
                (path / REPORT_NAME).unlink(missing_ok=True)
                shutil.rmtree(path)
        (self.path / "report.pdf").unlink(missing_ok=True)
        (self.path / "report.json").unlink(missing_ok=True)
        self.report = {}


@cache
def code_digest() -> str:
    """Return the digest of the package's own files, to tell results of older code apart."""
    folder = Path(attnknn.__file__).parent
    files = sorted(p for p in folder.rglob("*") if p.suffix in {".py", ".typ", ".tmTheme"})
    content = [[str(path.relative_to(folder)), sha256_file(path)] for path in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _is_ours(name: str) -> bool:
    return name == "notebooks" or re.fullmatch(r"seed\d+|\d\d_\w+", name) is not None


def _shown(values: dict[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "the default"
