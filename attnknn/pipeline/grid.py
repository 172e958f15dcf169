"""A grid file → one checked plan for every combination of its values.

The file is a YAML mapping of parameter names to lists; the runs are the product of the lists.
``results/<grid>/`` holds one ordinary run folder each, named after its own values, and
``grid.json``. Started again with more values or seeds, a grid grows.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from attnknn.config import ConfigError, read_params
from attnknn.files import read_json, write_json
from attnknn.pipeline.parameters import LONGEST_NAME, check_run_name, run_name, slug
from attnknn.pipeline.plan import Plan, Request, read_request
from attnknn.pipeline.state import GRID_NAME, RunFolder

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
