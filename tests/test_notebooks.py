"""Notebooks are thin, clean and parameterised, and they run."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from attnknn.config import RunConfig, field_names, read_params
from attnknn.paper.plan import make_plan

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROFILES = sorted(path.stem for path in (ROOT / "notebooks/params").glob("*.yaml"))


def cells(path: Path, kind: str) -> list[dict]:
    notebook = json.loads(path.read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tagged(path: Path, tag: str) -> list[dict]:
    return [cell for cell in cells(path, "code") if tag in cell["metadata"].get("tags", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestForm:
    """The six parts every notebook has, and what it must not have."""

    def test_it_has_no_outputs(self, path):
        code = cells(path, "code")
        assert not any(cell["outputs"] or cell["execution_count"] for cell in code)

    def test_it_asks_a_question_and_states_an_expectation(self, path):
        head = source(cells(path, "markdown")[0])
        assert head.startswith("# ") and "**Question.**" in head
        assert "**Expectation, written before the run.**" in head

    def test_it_has_one_parameters_cell_of_plain_commented_values(self, path):
        (cell,) = tagged(path, "parameters")
        for line in source(cell).splitlines():
            assert re.fullmatch(r"\w+ = .+  # .+", line), line
        for node in ast.parse(source(cell)).body:
            ast.literal_eval(node.value)

    def test_it_ends_with_a_computed_verdict(self, path):
        assert tagged(path, "verdict") == [cells(path, "code")[-1]]

    def test_it_holds_no_logic(self, path):
        code = [source(cell) for cell in cells(path, "code")]
        assert not any(re.search(r"^\s*(def|class|for|while) ", text, re.M) for text in code)
        assert all(len(text.splitlines()) <= 15 for text in code)
        assert sum(len(text.splitlines()) for text in code) <= 80

    def test_it_shows_no_path_of_what_it_saves(self, path):
        last = [ast.parse(source(cell)).body[-1:] for cell in cells(path, "code")]
        saved = [
            source(c)
            for c, body in zip(cells(path, "code"), last, strict=True)
            if body and isinstance(body[0], ast.Expr) and "report.save_" in ast.unparse(body[0])
        ]
        assert all(text.rstrip().endswith(";") for text in saved)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_asks_of_the_package_is_there(path):
    """A renamed function would fail only when the notebook is run, minutes later."""
    tree = ast.parse("\n".join(source(cell) for cell in cells(path, "code")))
    modules = {
        alias.asname or alias.name: getattr(importlib.import_module(node.module), alias.name, None)
        or importlib.import_module(f"{node.module}.{alias.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("attnknn")
        for alias in node.names
    }
    asked = [
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    # A function, too, where one has the name of its module and is imported in its place.
    kinds = ModuleType, FunctionType
    asked = [(name, attr) for name, attr in asked if isinstance(modules.get(name), kinds)]
    assert asked
    missing = [f"{name}.{attr}" for name, attr in asked if not hasattr(modules[name], attr)]
    assert not missing


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_can_be_planned(profile):
    plan = make_plan(profile)
    assert plan.seeds


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (
            "exp1-3",
            {"backbone": "resnet18", "embed_dim": 128, "heads": 1, "epochs": 30, "lr": 1e-3},
        ),
        ("exp1-3", {"batch_size": 256, "k_train": 10}),
        ("exp4", {"backbone": "resnet50", "embed_dim": 256, "heads": 4, "epochs": 50, "lr": 1e-4}),
        ("exp4", {"batch_size": 256, "k_train": 10, "warmup_epochs": 5, "hard_weight": 2.0}),
        ("exp4", {"contrastive_form": "margin", "contrastive_margin": 0.5}),
        ("exp5", {"backbone": "resnet18", "embed_dim": 256, "heads": 4, "epochs": 20, "lr": 2e-4}),
        ("exp5", {"batch_size": 512, "k_train": 16, "mixup_alpha": 0.4, "label_smoothing": 0.1}),
    ],
)
def test_presets_hold_the_published_values(profile, expected):
    values = read_params(ROOT / f"notebooks/params/{profile}.yaml")
    assert values["seeds"] == [42] and values["dataset"] == "cifar10"
    config = RunConfig.from_flat({k: v for k, v in values.items() if k in field_names()}).flat()
    assert {name: config[name] for name in expected} == expected


def test_experiment_6_repeats_experiment_5():
    params = ROOT / "notebooks/params"
    assert read_params(params / "exp6.yaml") == read_params(params / "exp5.yaml")


TINY = ["epochs=1", "max_train_rows=300", "max_test_rows=60", "fit_epochs=2", "rates=[0.0, 0.3]"]
TINY += ["ratios=[1.0, 0.1]", "timing_sizes=[300, 600]", "timing_repeats=2"]


@pytest.mark.slow
def test_all_notebooks_run_on_tiny_data_and_print_a_report(tmp_path):
    settings = [word for value in TINY for word in ("--set", value)]
    command = [sys.executable, "-m", "attnknn.cli", "run", "--results", str(tmp_path), "--name"]
    done = subprocess.run([*command, "tiny", *settings], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "tiny"
    assert (run / "report.pdf").stat().st_size > 20_000
    assert {path.stem for path in (run / "notebooks").glob("*.pdf")} == {p.stem for p in NOTEBOOKS}


@pytest.mark.slow
def test_one_notebook_runs_under_plain_papermill(tmp_path):
    """Nothing of the pipeline is needed: the notebook makes itself a run, and says which."""
    command = [sys.executable, "-m", "papermill", "notebooks/01_training.ipynb"]
    parameters = ["-p", "epochs", "1", "-p", "run_dir", str(tmp_path / "own"), "--no-progress-bar"]
    done = subprocess.run(
        [*command, str(tmp_path / "out.ipynb"), *parameters],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own/seed0/report.json").exists()
