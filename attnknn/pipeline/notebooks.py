"""Notebook files → what the pipeline must know of them: parameters, size, digest.

Plain JSON and ``ast`` instead of papermill's own inspection: that takes seconds to import, and a
misspelt parameter should be refused at once.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnknn.checks import nearest_name
from attnknn.config import ConfigError

_NAME = re.compile(r"\d\d_\w+")
TRAINING_NUMBER = "01"


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
