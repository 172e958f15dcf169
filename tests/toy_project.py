"""A project of tiny notebooks that only write files, for tests of the pipeline."""

import json
import zlib
from pathlib import Path
from typing import Any

_SETUP = """\
import os, sys, time, uuid
from pathlib import Path
run = Path(os.environ["ATTNKNN_RESULTS"]) / run_dir"""
_TRAIN = """\
folder = run / f"seed{seed}"
folder.mkdir(parents=True, exist_ok=True)
(folder / "settings.txt").write_text(repr(settings))
(folder / "report.json").write_text(f'{{"id": "{uuid.uuid4()}"}}')"""
_STUDY = """\
folder = run / "NAME"
folder.mkdir(parents=True)
threads = os.environ["OMP_NUM_THREADS"]
(folder / "table.txt").write_text(f"{seeds} {k_eval} {threads} {sys.executable}")
print("a line of output")"""


def cell(source: str, *tags: str, kind: str = "code") -> dict[str, Any]:
    """Return one notebook cell."""
    made = {"cell_type": kind, "id": f"c{zlib.crc32(source.encode())}", "source": source}
    made["metadata"] = {"tags": list(tags)} if tags else {}
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def write_notebook(path: Path, cells: list[dict[str, Any]]) -> Path:
    """Write a notebook without outputs."""
    # A kernelspec that exists nowhere: the pipeline must start its own Python all the same.
    metadata = {"kernelspec": {"name": "elsewhere", "display_name": "?", "language": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def training_cells(body: str = _TRAIN) -> list[dict[str, Any]]:
    """Return the cells of a notebook 01."""
    parameters = cell('seed = 0\nrun_dir = ""\nsettings = {}  # any field', "parameters")
    title = cell("# Training", kind="markdown")
    return [title, parameters, cell(_SETUP), cell(body)]


def study_cells(name: str, *extra: str) -> list[dict[str, Any]]:
    """Return the cells of a notebook that reads the training."""
    parameters = cell('run_dir = ""\nseeds = []\nk_eval = 20\nquick = True', "parameters")
    title, study = cell(f"# Study {name}", kind="markdown"), cell(_STUDY.replace("NAME", name))
    verdict = cell("from IPython.display import Markdown\nMarkdown('**Yes.**')", "verdict")
    return [title, parameters, cell(_SETUP), *map(cell, extra), study, verdict]


def make_project(folder: Path, *, studies: tuple[str, ...] = ("02_first", "03_second")) -> Path:
    """Write a whole project and return its folder."""
    notebooks = folder / "notebooks"
    write_notebook(notebooks / "01_training.ipynb", training_cells())
    for name in studies:
        write_notebook(notebooks / f"{name}.ipynb", study_cells(name))
    (notebooks / "params").mkdir()
    (notebooks / "params/quick.yaml").write_text("k_eval: 7\nepochs: 2\n")
    (folder / "pyproject.toml").touch()
    return folder
