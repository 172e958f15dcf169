"""The conda environment lists what pyproject.toml asks for, and nothing else."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"torch": "pytorch"}  # conda-forge calls a few packages otherwise
ONLY_ON_PYPI = {"milvus-lite", "pypandoc_binary", "typst"}


def declared() -> dict[str, str]:
    """Return name -> version bound of the package's own and its dev dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["dev"]
    return dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in lines)


def test_conda_packages_are_those_of_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [line for line in environment["dependencies"] if isinstance(line, str)]
    expected = {
        CONDA_NAMES.get(name, name) + bound
        for name, bound in declared().items()
        if name not in ONLY_ON_PYPI
    }
    assert set(conda) - expected == {"python>=3.11,<3.14", "pip"}
    assert expected <= set(conda)


def test_pip_section_holds_what_only_pypi_has():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(line for line in environment["dependencies"] if isinstance(line, dict))["pip"]
    expected = {name + bound for name, bound in declared().items() if name in ONLY_ON_PYPI}
    assert set(pip) == expected | {"--editable=."}


def test_what_the_arena_compares_with_is_asked_for_by_name_alone():
    """Rivals are heavy: neither the package nor its developers need them, nor conda's file."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    arena = {re.match(r"[\w-]+", line)[0] for line in extras["arena"] + extras["arena-networks"]}
    assert {"catboost", "lightgbm", "pytabkit"} <= arena
    assert not arena & set(declared())
