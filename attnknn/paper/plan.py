"""A grid file → one checked plan for every combination of its values.

The file is a YAML mapping of parameter names to lists; the runs are the product of the lists.
``results/<grid>/`` holds one ordinary run folder each, named after its own values, and
``grid.json``. Started again with more values or seeds, a grid grows.
"""

import itertools
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from attnknn.config import ConfigError, read_params
from attnknn.embed.runs import profile_seeds, project_root, results_root
from attnknn.files import read_json, write_json
from attnknn.paper.folder import GRID_NAME, RunFolder, Task
from attnknn.paper.notebooks import (
    LONGEST_NAME,
    Assignment,
    Notebook,
    assign,
    check_run_name,
    find_notebooks,
    read_profile,
    run_name,
    select,
    slug,
)

# ---- A request → a checked plan: which notebook runs with which parameters, into which folder.


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

    def tasks(self) -> tuple[list[Task], list[Task], list[Task]]:
        """Return the training, one task a seed, the studies, and what judges their tables."""
        training = [
            self._task(b, (s,)) for b in self.notebooks if b.is_training for s in self.seeds
        ]
        others = [self._task(b, tuple(self.seeds)) for b in self.notebooks if not b.is_training]
        studies = [task for task in others if not task.notebook.is_judging]
        return training, studies, [task for task in others if task.notebook.is_judging]

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


_PLAIN = re.compile(r"[\w.=+,-]+", flags=re.ASCII)
_MOST_RUNS = 10_000  # more is a slip of the pen, and would take minutes to check


@dataclass(frozen=True)
class Grid:
    """A checked grid.

    Attributes:
        folder: Folder of its runs.
        axes: What varies: the values of each parameter, in their declared types.
        plans: One plan a combination, the last parameter varying fastest.
    """

    folder: Path
    axes: dict[str, list[Any]]
    plans: list[Plan]

    def point(self, plan: Plan) -> dict[str, Any]:
        """Return the values that a plan has on the axes."""
        return {name: plan.assignment.values[name] for name in self.axes}

    def refuse_other_parameters(self) -> None:
        """Raise when a folder was made with other parameters, before any run has started."""
        if (self.folder / "report.json").is_file():
            raise ConfigError(
                f"name must not be that of a run, got name={self.folder.name!r}: "
                f"{self.folder} is one"
            )
        for plan in self.plans:
            RunFolder(plan.folder).refuse_other_parameters(plan.assignment.values, plan.seeds)

    def refuse_foreign(self) -> None:
        """Raise when a folder holds something in the way that no run made."""
        for plan in self.plans:
            plan.refuse_foreign()

    def save(self) -> None:
        """Write ``grid.json``: the values of every combination asked for so far, by folder."""
        path = self.folder / GRID_NAME
        before = read_json(path)["runs"] if path.is_file() else {}
        now = {plan.folder.name: self.point(plan) for plan in self.plans}
        write_json(path, {"runs": before | now})


def read_grid(path: Path) -> dict[str, list[Any]]:
    """Return the lists of a grid file by parameter."""
    if not Path(path).is_file():
        raise ConfigError(f"grid must be a file that exists, got grid={str(path)!r}")
    axes = read_params(path)
    if not axes:
        raise ConfigError(f"grid must name at least one parameter, got grid={str(path)!r}")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{name} must be a list of at least one value in a grid, got {name}={values!r}"
            )
    return axes


def make_grid(
    path: Path,
    profile: str = "quick",
    *,
    notebooks: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    name: str | None = None,
    results: Path | None = None,
) -> Grid:
    """Check every combination of a grid without writing anything.

    Args:
        path: The grid file.
        profile: As for ``make_plan``; the grid's own values win.
        notebooks: As for ``make_plan``.
        overrides: Parameters that all runs share and that differ from the profile.
        seeds: Seeds of every run.
        name: Name of the grid's folder; made of profile, overrides and the file's name when None.
        results: As for ``make_plan``.

    Raises:
        ConfigError: For anything unknown, mistyped or impossible, with the first combination.
    """
    axes, overrides = read_grid(path), dict(overrides or {})
    if both := sorted(axes.keys() & overrides.keys()):
        raise ConfigError(f"{both[0]} must be in the grid or set for all runs, got both")
    if (n_runs := math.prod(len(values) for values in axes.values())) > _MOST_RUNS:
        raise ConfigError(f"grid must have at most {_MOST_RUNS} combinations, got {n_runs}")
    request = read_request(profile, notebooks=notebooks, seeds=seeds, results=results)
    own_name = f"{run_name(profile, overrides)}-{Path(path).stem}"
    folder = request.root / check_run_name(own_name if name is None else name)
    plans: dict[str, Plan] = {}
    for values in itertools.product(*axes.values()):
        plan = _plan_of(request, overrides, dict(zip(axes, values, strict=True)), folder)
        if plan.folder.name in plans:
            raise ConfigError(f"a grid must name every value once, got {plan.folder.name} twice")
        plans[plan.folder.name] = plan
    points = [plan.assignment.values for plan in plans.values()]
    typed = {axis: _distinct(point[axis] for point in points) for axis in axes}
    return Grid(folder, typed, list(plans.values()))


def _plan_of(
    request: Request, overrides: dict[str, Any], point: dict[str, Any], folder: Path
) -> Plan:
    try:
        plan = request.plan(overrides | point, folder)
    except ConfigError as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in point.items())
        raise ConfigError(f"{error} (in the combination {shown})") from None
    # Named after the values in their declared types: 1 and 1.0 are the same rate.
    return replace(plan, folder=folder / point_name({n: plan.assignment.values[n] for n in point}))


def point_name(values: Mapping[str, Any]) -> str:
    """Return the folder name of one combination: readable, and never that of another one.

    >>> point_name({"k_eval": 9, "lr": 0.5})
    'k_eval=9,lr=0.5'
    """
    name = ",".join(f"{name}={slug(values[name], between='+')}" for name in sorted(values))
    if _PLAIN.fullmatch(name) and len(name) <= LONGEST_NAME and not _ambiguous(values):
        return name
    digest = sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:8]
    plain = re.sub(r"[^\w.=+,-]+", "-", name, flags=re.ASCII)
    return f"{plain[: LONGEST_NAME - 9]}-{digest}"


def _ambiguous(values: Mapping[str, Any]) -> bool:
    """Tell whether a text in ``values`` holds a sign that also separates values."""
    lists = (value if isinstance(value, list) else [value] for value in values.values())
    return any(
        isinstance(item, str) and set(item) & set(",+=") for items in lists for item in items
    )


def _distinct(values: Iterable[Any]) -> list[Any]:
    # Lists cannot be put into a set.
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
