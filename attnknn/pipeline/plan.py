"""A request → a checked plan: which notebook runs with which parameters, into which folder."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attnknn.config import ConfigError
from attnknn.pipeline.notebooks import Notebook, find_notebooks, select
from attnknn.pipeline.parameters import (
    Assignment,
    assign,
    check_run_name,
    read_profile,
    run_name,
)
from attnknn.pipeline.state import GRID_NAME, RunFolder, Task
from attnknn.runs import profile_seeds, project_root, results_root


@dataclass(frozen=True)
class Plan:
    """A checked request: nothing in it can be wrong any more.

    Attributes:
        profile: Name of the profile.
        folder: The run's folder.
        notebooks: Selected notebooks, the training added where one of them reads it.
        wanted: Names of the notebooks selected by the user.
        assignment: Checked parameters.
        seeds: Seeds to train and read.
        set_by_hand: Names of the parameters that differ from the profile.
        selected: Numbers of the notebooks that were selected; empty where all of them were.
    """

    profile: str
    folder: Path
    notebooks: list[Notebook]
    wanted: set[str]
    assignment: Assignment
    seeds: list[int]
    set_by_hand: tuple[str, ...] = ()
    selected: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that makes this run, whoever asked for it and from where."""
        # A profile by path is named by its file: reports tell nothing of the machine's folders.
        profile = Path(self.profile).name
        words = ["attnknn", "run", "--profile", profile]
        for name in self.set_by_hand:
            words += ["--set", f"{name}={_as_yaml(self.assignment.values[name])}"]
        if self.selected:
            words += ["--notebooks", ",".join(self.selected)]
        words += ["--seeds", ",".join(map(str, self.seeds)), "--name", self.folder.name]
        return shlex.join(words)

    def tasks(self) -> tuple[list[Task], list[Task]]:
        """Return the training, one task a seed, and all the rest."""
        training = [
            self._task(b, (s,)) for b in self.notebooks if b.is_training for s in self.seeds
        ]
        rest = [self._task(b, tuple(self.seeds)) for b in self.notebooks if not b.is_training]
        return training, rest

    def refuse_foreign(self) -> None:
        """Raise when the folder holds something in the way that no run made."""
        RunFolder(self.folder).refuse_foreign([task for part in self.tasks() for task in part])

    def _task(self, book: Notebook, seeds: tuple[int, ...]) -> Task:
        # A bare name instead of a path: executed copies tell nothing of the machine's folders.
        place = self.folder.name
        own = {"run_dir": place, "save_to": place, "seed": seeds[0], "seeds": list(seeds)}
        given = {name: value for name, value in own.items() if name in book.defaults}
        many = book.is_training and len(self.seeds) > 1
        copy = f"{book.name}.seed{seeds[0]}" if many else book.name
        return Task(book, self.assignment.by_notebook[book.name] | given, seeds, copy)


@dataclass(frozen=True)
class Request:
    """What the runs of one command share; their parameters are added by :meth:`plan`.

    Attributes:
        profile: Name of the profile, or its path.
        values: Parameters of the profile.
        books: All notebooks of the project.
        wanted: Those selected by the user.
        seeds: Seeds to train and read.
        root: Folder of all runs.
    """

    profile: str
    values: dict[str, Any]
    books: list[Notebook]
    wanted: list[Notebook]
    seeds: list[int]
    root: Path

    def plan(self, overrides: Mapping[str, Any], folder: Path) -> Plan:
        """Return the checked plan of one run.

        Args:
            overrides: Parameters that differ from the profile.
            folder: The run's folder.
        """
        assignment = assign(self.values | overrides, self.books)
        trained = any(book.reads_training for book in self.wanted)
        needed = [b for b in self.books if b in self.wanted or (trained and b.is_training)]
        names = {book.name for book in self.wanted}
        whole = len(self.wanted) == len(self.books)
        return Plan(
            self.profile,
            folder,
            needed,
            names,
            assignment,
            self.seeds,
            set_by_hand=tuple(overrides),
            selected=() if whole else tuple(book.number for book in self.wanted),
        )


def read_request(
    profile: str,
    *,
    notebooks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    results: Path | None = None,
) -> Request:
    """Return what a request says besides single parameters; arguments as for `make_plan`."""
    project = project_root()
    if project is None:
        raise ConfigError(
            "a run must be started inside the project (a folder with notebooks/ and "
            f"pyproject.toml), got {Path.cwd()}"
        )
    values = read_profile(project / "notebooks/params", profile)
    own_seeds = profile_seeds(values)
    chosen = own_seeds if seeds is None else profile_seeds({"seeds": list(seeds)})
    books = find_notebooks(project / "notebooks")
    root = results_root() if results is None else Path(results).expanduser().resolve()
    return Request(profile, values, books, select(books, notebooks), chosen, root)


def make_plan(
    profile: str = "quick",
    *,
    notebooks: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    name: str | None = None,
    results: Path | None = None,
) -> Plan:
    """Check a request completely, in well under a second, without writing anything.

    Args:
        profile: Name of a file in ``notebooks/params``, or a path that ends in ``.yaml``.
        notebooks: Numbers or names of the notebooks to execute; all when None.
        overrides: Parameters that differ from the profile.
        seeds: Seeds to train; those of the profile (else seed 0) when None.
        name: Name of the run's folder; made of profile and overrides when None.
        results: Folder of all runs; ``results_root()`` when None.

    Raises:
        ConfigError: For anything unknown, mistyped or impossible.
    """
    request = read_request(profile, notebooks=notebooks, seeds=seeds, results=results)
    overrides = dict(overrides or {})
    name = check_run_name(run_name(profile, overrides) if name is None else name)
    plan = request.plan(overrides, request.root / name)
    if (plan.folder / GRID_NAME).is_file():
        raise ConfigError(f"name must not be that of a grid, got {name=}: {plan.folder} is one")
    return plan


def _as_yaml(value: Any) -> str:
    """Return a value as ``--set`` reads it, in one line.

    >>> _as_yaml(1e-5)
    '1.0e-05'
    """
    plain = list(value) if isinstance(value, tuple) else value
    # As the one item of a list: a lone value would end with a mark of its own.
    shown = yaml.safe_dump([plain], default_flow_style=True, width=float("inf"), allow_unicode=True)
    return shown.strip()[1:-1]
