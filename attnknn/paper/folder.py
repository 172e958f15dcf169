"""What a run folder already holds: ``report.json``, and which notebooks of it are still good."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import attnknn
from attnknn.config import ConfigError
from attnknn.data.download import own_files_stamp
from attnknn.embed.runs import project_root, seed_folder
from attnknn.files import REPORT_NAME, read_json, sha256_file, write_json
from attnknn.paper.notebooks import Notebook

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

    def begin(self, task: Task) -> None:
        """Remove a task's outdated copy, PDFs and files; trained seeds stay, they resume."""
        before = self.entries.get(task.name)
        copy = str(self.copy_of(task).relative_to(self.path))
        # First: what is not called complete is no result, and what is not named is not ours.
        self.entries[task.name] = {"status": "begun", "copy": (before or {}).get("copy", copy)}
        self.save()
        if before is not None:
            self._remove_files(task.name)
            self._remove_copy(task.copy)
            if not task.notebook.is_training:
                shutil.rmtree(self.path / task.notebook.name, ignore_errors=True)

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


@cache
def code_digest() -> str:
    """Return the digest of the package's own files, to tell results of older code apart."""
    folder = Path(attnknn.__file__).parent
    files = sorted(p for p in folder.rglob("*") if p.suffix in {".py", ".typ", ".tmTheme"})
    content = [[str(path.relative_to(folder)), sha256_file(path)] for path in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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


# ---- A finished training elsewhere → the same training here.
#
# Runs that differ in study parameters alone ask for one and the same training. Its key (cells,
# settings, seed, own files) and the code tell that it would come out again, so it is taken over.


def adopt_training(run: RunFolder, task: Task) -> str | None:
    """Give a run the trained seed of another run that asked for exactly the same training.

    Args:
        run: The run that needs it; a seed it has begun or trained itself is left alone.
        task: The training.

    Returns:
        Name of the run it was taken from, also written beside the trained seed; None without one.
    """
    target = seed_folder(run.path, task.seeds[0])
    if target.is_dir() and any(not path.name.startswith(".") for path in target.iterdir()):
        return None
    root = run.path.parent
    root = root.parent if (root / GRID_NAME).is_file() else root
    for folder in _runs_below(root):
        if folder != run.path and _has_training(folder, task):
            name = str(folder.relative_to(root))
            if _take_over(seed_folder(folder, task.seeds[0]), target, name):
                return name
    return None


def _runs_below(root: Path) -> Iterator[Path]:
    """Return the runs of a results folder, those inside of grids included."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if (folder / GRID_NAME).is_file():
            yield from sorted(path for path in folder.iterdir() if path.is_dir())
        else:
            yield folder


def _has_training(folder: Path, task: Task) -> bool:
    try:
        donor = RunFolder(folder)
    except ConfigError:  # a damaged report is the business of its own run
        return False
    return donor.is_complete(task) and donor.entries[task.name]["code"] == code_digest()


def _take_over(source: Path, target: Path, name: str) -> bool:
    """Make ``target`` a whole copy of ``source``, or leave nothing."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        ignored = shutil.ignore_patterns(".*")
        shutil.copytree(source, work / "seed", copy_function=_link_or_copy, ignore=ignored)
        write_json(work / "seed" / ORIGIN_NAME, {"run": name})
        if target.exists():  # a folder with nothing but a lock
            shutil.rmtree(target)
        (work / "seed").rename(target)
    except (OSError, shutil.Error):  # replaced meanwhile, or no room: then it is trained here
        return False
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _link_or_copy(source: str, target: str) -> None:
    # Weights and embeddings are large, and only ever replaced as a whole: both runs may share them.
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copy2(source, target)
