"""Notebook files → what the pipeline must know of them: parameters, size, digest.

Plain JSON and ``ast`` instead of papermill's own inspection: that takes seconds to import, and a
misspelt parameter should be refused at once.
"""

import ast
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from attnknn.checks import nearest_name
from attnknn.config import (
    QUICKSTART_DATA,
    ConfigError,
    RunConfig,
    check_study_value,
    field_names,
    read_params,
)
from attnknn.data.download import SOURCES

_NAME = re.compile(r"\d\d_\w+")
TRAINING_NUMBER, JUDGING_NUMBER = "01", "10"


@dataclass(frozen=True)
class Notebook:
    """One notebook of the project.

    Attributes:
        name: File name without suffix, ``03_k_sweep``.
        path: The source file, without outputs.
        defaults: Values of the cell tagged ``parameters``, by name.
        n_cells: Code cells that will be executed, without the injected one.
        digest: SHA-256 of the cells; outputs and metadata other than tags do not count.
    """

    name: str
    path: Path
    defaults: dict[str, Any]
    n_cells: int
    digest: str

    @property
    def number(self) -> str:
        """The two digits the name starts with."""
        return self.name[:2]

    @property
    def is_training(self) -> bool:
        """Whether this notebook trains the run that the others read."""
        return self.number == TRAINING_NUMBER

    @property
    def is_judging(self) -> bool:
        """Whether this notebook reads the tables that all others save."""
        return self.number == JUDGING_NUMBER

    @property
    def reads_training(self) -> bool:
        """Whether this notebook needs a trained run."""
        return "run_dir" in self.defaults and not self.is_training


def find_notebooks(folder: Path) -> list[Notebook]:
    """Return the notebooks ``NN_name.ipynb`` of a folder, in order."""
    paths = sorted(path for path in Path(folder).glob("*.ipynb") if _NAME.fullmatch(path.stem))
    if not paths:
        raise ConfigError(f"{folder} must hold notebooks named NN_name.ipynb, got none")
    return [read_notebook(path) for path in paths]


def read_notebook(path: Path) -> Notebook:
    """Return the description of one notebook file."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = [("".join(cell["source"]), cell) for cell in cells]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ConfigError(f"{path} must be a notebook in format 4") from None
    described = [[cell["cell_type"], source, _tags(cell)] for source, cell in sources]
    return Notebook(
        name=path.stem,
        path=path,
        defaults=_defaults(path, described),
        n_cells=sum(kind == "code" and bool(source.strip()) for kind, source, _ in described),
        digest=hashlib.sha256(json.dumps(described).encode()).hexdigest(),
    )


def select(notebooks: Sequence[Notebook], wanted: Iterable[str] | None) -> list[Notebook]:
    """Return the notebooks named by number or name; all when ``wanted`` is None."""
    if wanted is None:
        return list(notebooks)
    by_name = {key: book for book in notebooks for key in (book.number, book.name)}
    chosen = set()
    for name in (word.strip().removesuffix(".ipynb") for word in wanted):
        if name not in by_name:
            listed = ", ".join(book.name for book in notebooks)
            hint = nearest_name(name, by_name)
            raise ConfigError(f"notebooks must be among {listed}, got {name!r}{hint}")
        chosen.add(by_name[name].name)
    return [book for book in notebooks if book.name in chosen]


def _tags(cell: dict[str, Any]) -> list[str]:
    return list(cell.get("metadata", {}).get("tags", []))


def _defaults(path: Path, described: list[list[Any]]) -> dict[str, Any]:
    """Return the assignments of the first cell tagged ``parameters``, as papermill reads it."""
    source = next((text for _, text, tags in described if "parameters" in tags), "")
    try:
        return dict(_assignment(node) for node in ast.parse(source).body)
    except (ValueError, SyntaxError) as error:
        # A derived value would keep its old default: papermill injects after this cell.
        raise ConfigError(
            f"the parameters cell of {path.name} must hold plain 'name = value' lines only: {error}"
        ) from None


def _assignment(node: ast.stmt) -> tuple[str, Any]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            pass
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            pass
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not one")
    try:
        return name, ast.literal_eval(value)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} is computed") from None


# ---- Flat parameters → what each notebook receives; every mistake is found before anything starts.

# Names the pipeline fills in itself, and how the user says them instead.
_RESERVED = {
    "run_dir": "--name or --results",
    "save_to": "--name or --results",
    "settings": "each setting by its own name",
    "seed": "--seeds",
    "seeds": "--seeds",
}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list"}
# Parameters that name data sets or the path of own files, and the names each of them knows.
_DATA_NAMES = {
    "dataset": tuple(SOURCES),
    "afmp_dataset": tuple(SOURCES),
    "bracket_datasets": tuple(SOURCES),
    "data": QUICKSTART_DATA,
}
LONGEST_NAME = 80


@dataclass(frozen=True)
class Assignment:
    """Checked parameters of a run.

    Attributes:
        values: Everything that was given, flat, in the declared types.
        config: The training configuration, seed 0.
        by_notebook: What each notebook receives, by notebook name.
    """

    values: dict[str, Any]
    config: RunConfig
    by_notebook: dict[str, dict[str, Any]]


def assign(values: Mapping[str, Any], notebooks: Sequence[Notebook]) -> Assignment:
    """Give every parameter to the notebooks that declare it, and settings to the training.

    A name that is both a setting of the run and declared by a notebook reaches both.

    Args:
        values: Flat ``name: value`` pairs.
        notebooks: All notebooks of the project, selected or not.

    Raises:
        ConfigError: For the first unknown, mistyped or impossible parameter.
    """
    _check_names(values, notebooks)
    values = dict(values)
    for name in values.keys() & _DATA_NAMES.keys():
        values[name] = _known_data(name, values[name])
    settings = {name: value for name, value in values.items() if name in field_names()}
    config = RunConfig.from_flat(_training_defaults(notebooks) | settings)
    _check_timm(config.embedder.backbone)
    checked = {name: config.flat()[name] for name in settings}
    by_notebook = {}
    for book in notebooks:
        given = {name: values[name] for name in values if name in book.defaults}
        typed = {name: _typed(name, value, book) for name, value in given.items()}
        checked |= typed
        by_notebook[book.name] = typed
        if book.is_training and "settings" in book.defaults:
            rest = {name: config.flat()[name] for name in settings if name not in typed}
            by_notebook[book.name] = typed | {"settings": rest}
    return Assignment({name: checked[name] for name in sorted(checked)}, config, by_notebook)


def _known_data(name: str, value: Any) -> Any:
    """Return a known name as it is, and the path of own files as an absolute one."""
    if isinstance(value, list):
        return [_known_data(name, item) for item in value]
    known = _DATA_NAMES[name]
    if not isinstance(value, str) or value in known:
        return value  # a wrong type is refused with all the other parameters
    path = Path(value).expanduser()
    if not path.exists():
        raise ConfigError(
            f"{name} must be one of {', '.join(known)}, or an existing path, "
            f"got {name}={value!r}{nearest_name(value, known)}"
        )
    # Notebooks run in their own folder, where a relative path would mean something else.
    return str(path.resolve())


def _check_timm(backbone: str) -> None:
    """Refuse a timm network that does not exist; timm is slow to load, so only where it is used."""
    if not backbone.startswith("timm:"):
        return
    import timm

    name = backbone.removeprefix("timm:")
    if not timm.is_model(name):
        hint = nearest_name(name, timm.list_models())
        raise ConfigError(f"backbone must name a timm network, got {backbone=}{hint}")


def read_profile(folder: Path, profile: str) -> dict[str, Any]:
    """Return the parameters of ``folder/<profile>.yaml``, or of a path that ends in ``.yaml``."""
    if profile.endswith((".yaml", ".yml")):
        path = Path(profile)
        if not path.is_file():
            raise ConfigError(f"profile must be a file that exists, got {profile=}")
        return read_params(path)
    known = sorted(path.stem for path in Path(folder).glob("*.yaml"))
    if profile not in known:
        listed, hint = ", ".join(known), nearest_name(profile, known)
        raise ConfigError(f"profile must be one of {listed}, got {profile=}{hint}")
    return read_params(Path(folder) / f"{profile}.yaml")


def run_name(profile: str, overrides: Mapping[str, Any]) -> str:
    """Return a readable folder name: the profile, and the values set by hand.

    >>> run_name("quick", {"k_eval": 10})
    'quick-k_eval=10'
    """
    stem = Path(profile).stem if profile.endswith((".yaml", ".yml")) else profile
    pairs = [f"{name}={slug(overrides[name])}" for name in sorted(overrides)]
    name = re.sub(r"[^\w.=+,-]+", "-", "-".join([stem, *pairs]), flags=re.ASCII).strip("-.")
    if len(name) <= LONGEST_NAME:
        return name
    digest = sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def check_run_name(name: str) -> str:
    """Return ``name`` if it is a plain folder name."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.=+,-]*", name, flags=re.ASCII):
        raise ConfigError(
            f"name must be a folder name of letters, digits and any of . = + , - _, got {name=}"
        )
    return name


def slug(value: Any, *, between: str = ",") -> str:
    """Return a value as part of a folder name; the items of a list are put together."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return between.join(slug(item) for item in value)
    return str(value)


def _training_defaults(notebooks: Sequence[Notebook]) -> dict[str, Any]:
    """Return the settings that the training notebook itself declares, but for its seed."""
    declared = (pair for book in notebooks if book.is_training for pair in book.defaults.items())
    return {name: value for name, value in declared if name in field_names() and name != "seed"}


def _check_names(values: Mapping[str, Any], notebooks: Sequence[Notebook]) -> None:
    known = {name for book in notebooks for name in book.defaults} | set(field_names())
    for name, value in values.items():
        if name in _RESERVED:
            raise ConfigError(
                f"{name} must be given as {_RESERVED[name]}, got {name}={value!r} as a parameter"
            )
        if name not in known:
            hint = nearest_name(name, sorted(known - set(_RESERVED)))
            raise ConfigError(
                f"{name} must be a parameter of a notebook or a setting of the run, "
                f"got {name}={value!r}{hint}"
            )


def _typed(name: str, value: Any, book: Notebook) -> Any:
    """Return ``value`` in the type of the default in ``book``, or refuse it."""
    default = book.defaults[name]
    if default is None:
        return _finite(name, value)
    kind = type(default)
    try:
        converted = _convert(value, kind)
        if kind is list and default:
            item_kind = _common_kind(default)
            converted = [_convert(item, item_kind) for item in converted]
    except TypeError:
        raise ConfigError(
            f"{name} must be {_KINDS.get(kind, kind.__name__)} like the default {default!r} of "
            f"{book.name}, got {name}={value!r} ({type(value).__name__})"
        ) from None
    return check_study_value(name, _finite(name, converted))


def _convert(value: Any, kind: type) -> Any:
    """Return ``value`` as ``kind`` where nothing is lost, else raise TypeError."""
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads 2e-4 as text: it wants a dot in the mantissa.
        try:
            return float(value)
        except ValueError:
            raise TypeError from None
    if kind is float and type(value) is int:
        return float(value)
    if kind is not object and type(value) is not kind:
        raise TypeError
    return value


def _common_kind(items: list[Any]) -> type:
    kinds = {type(item) for item in items}
    if kinds == {int, float}:
        return float
    return kinds.pop() if len(kinds) == 1 else object


def _finite(name: str, value: Any) -> Any:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and not math.isfinite(item):
            raise ConfigError(f"{name} must be finite, got {name}={value!r}")
    return value
