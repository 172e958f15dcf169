"""Layers: a module imports only from modules earlier in the list; ``import attnknn`` is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import attnknn

PACKAGE = Path(__file__).parent.parent / "attnknn"

# The one place where the order is written down: a folder is a layer, and so is a module beside it.
ORDER = """
    progress checks files config core evaluate data embed afmp figures estimator studies paper cli
    train
""".split()


def module_of(path: Path) -> str:
    """Return the module, or the sub-package, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files_by_module() -> dict[str, list[Path]]:
    """Return the source files of every module of the package."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        # A __main__ is a command: like the cli it stands above everything, and nobody imports it.
        if path != PACKAGE / "__init__.py" and path.name != "__main__.py":
            found.setdefault(module_of(path), []).append(path)
    return found


def imported_modules(source: str) -> set[str]:
    """Return the modules of the package that a source imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports within the package are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = (name.split(".") for name in names)
        found |= {part[1] for part in parts if part[0] == "attnknn" and len(part) > 1}
    return found


MODULES = files_by_module()


def test_every_module_has_its_place():
    missing = sorted(set(MODULES) - set(ORDER))
    assert not missing, f"put {missing} into ORDER in tests/test_layers.py, behind what they import"
    assert len(set(ORDER)) == len(ORDER), "a module stands in ORDER twice"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_earlier_ones(module):
    imports = set().union(*(imported_modules(path.read_text()) for path in MODULES[module]))
    allowed = set(ORDER[: ORDER.index(module)]) if module in ORDER else set()
    wrong = sorted(name for name in imports - {module} - allowed if name in MODULES)
    assert not wrong, f"attnknn.{module} imports {wrong}, which come later in ORDER"


def test_the_imports_are_all_seen():
    source = (
        "import attnknn.core.bank\nfrom attnknn import files as f, config\n"
        "from attnknn.paper.book import bind\nimport numpy\n"
        "def late():\n    from attnknn.embed.run import load_run\n"
    )
    assert imported_modules(source) == {"core", "files", "config", "paper", "embed"}


def imports_faiss(source: str) -> bool:
    """Return whether a source loads faiss by itself."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == "faiss" for name in names)


def test_faiss_is_loaded_in_one_place():
    # Elsewhere it would come before its matrix kernels are chosen.
    found = [path for path in PACKAGE.rglob("*.py") if imports_faiss(path.read_text())]
    assert found == [PACKAGE / "core/kernels.py"]


@pytest.mark.parametrize(
    ("source", "loads"),
    [
        ("import numpy, faiss as f", True),
        ("def late():\n    from faiss.contrib import vecs_io", True),
        ("from attnknn.core.index import faiss", False),
    ],
)
def test_a_load_of_faiss_is_seen(source, loads):
    assert imports_faiss(source) == loads


def test_every_public_name_is_where_it_is_said_to_be():
    assert sorted(attnknn._PLACES) == sorted(attnknn.__all__)
    for name in attnknn.__all__:
        assert getattr(attnknn, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Uniformm'"):
        _ = attnknn.Uniformm


def test_importing_the_package_is_light():
    heavy = [
        "pydantic",
        "torch",
        "torchvision",
        "timm",
        "matplotlib",
        "papermill",
        "faiss",
        "dask",
        "pymilvus",
    ]
    code = f"import sys, attnknn; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_search_weigh_and_vote_need_neither_tables_nor_scikit_learn():
    code = (
        "import sys, attnknn.core.bank, attnknn.core.vote\n"
        "print([name for name in ('pandas', 'sklearn', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
