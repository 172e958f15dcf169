"""Code: which files of the package a result depends on, and their digest."""

import ast
import hashlib
import json
from collections.abc import Collection
from functools import cache
from pathlib import Path

import attnknn
from attnknn.files import sha256_file

PACKAGE = Path(attnknn.__file__).parent


@cache
def digest_of(*modules: str, beyond: frozenset[str] = frozenset()) -> str:
    """Return the digest of modules and of all that they import from the package.

    Args:
        modules: Names such as ``attnknn.peers.methods``.
        beyond: Modules and sub-packages that do not count, though they are imported.
    """
    files = sorted(reached(modules, beyond=beyond))
    content = [[str(path.relative_to(PACKAGE)), sha256_file(path)] for path in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def reached(modules: Collection[str], *, beyond: Collection[str] = ()) -> set[Path]:
    """Return the files of modules and of all that they import from the package, late imports too.

    Of a sub-package whose module is imported by its full name, that module alone counts.
    """
    waiting, found = list(modules), set()
    while waiting:
        name = waiting.pop()
        if any(name == each or name.startswith(f"{each}.") for each in beyond):
            continue
        path = _file_of(name)
        if path is not None and path not in found:
            found.add(path)
            waiting += _imports(path)
    return found


def _file_of(name: str) -> Path | None:
    """Return the file of a module; None for the package itself and for what is no module."""
    place = PACKAGE.joinpath(*name.split(".")[1:])
    if place == PACKAGE:
        return None
    known = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in known if path.is_file()), None)


def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # What is imported may be a module itself, or a name inside one.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] == PACKAGE.name]
