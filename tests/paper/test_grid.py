"""Grids: every combination is checked first, trainings come first, failures stay alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from attnknn.cli import main
from attnknn.config import ConfigError
from attnknn.files import read_json, write_json
from attnknn.paper import dask as cluster
from attnknn.paper.dask import check_scheduler
from attnknn.paper.execute import Outcome
from attnknn.paper.plan import make_grid, make_plan, point_name
from attnknn.paper.summary import summarise_grid
from tests.toy_project import cell, make_project, write_notebook


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("ATTNKNN_RESULTS", raising=False)
    monkeypatch.chdir(make_project(tmp_path / "project"))
    return tmp_path / "project"


def grid_file(project: Path, text: str) -> Path:
    path = project / "ks.yaml"
    path.write_text(text)
    return path


# ---- what a grid is


def test_a_grid_is_the_product_of_its_lists(project):
    grid = make_grid(grid_file(project, "lr: [1, 0.5]\nk_eval: [3, 5, 7]\n"), seeds=[0, 2])
    names = [plan.folder.name for plan in grid.plans]
    assert names == [f"k_eval={k},lr={lr}" for lr in (1.0, 0.5) for k in (3, 5, 7)]
    assert grid.axes == {"lr": [1.0, 0.5], "k_eval": [3, 5, 7]}
    assert grid.folder == project / "results/quick-ks"
    last = grid.plans[-1]
    assert last.assignment.values == {"epochs": 2, "k_eval": 7, "lr": 0.5}
    assert last.seeds == [0, 2] and grid.point(last) == {"lr": 0.5, "k_eval": 7}
    _, (first, _), _ = last.tasks()
    assert first.parameters == {"run_dir": "k_eval=7,lr=0.5", "seeds": [0, 2], "k_eval": 7}
    assert not (project / "results").exists()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"k_eval": 9, "lr": 0.5}, "k_eval=9,lr=0.5"),
        ({"lr": 0.5, "augment": False}, "augment=false,lr=0.5"),
        ({"ks": [1, 3], "limit": None}, "ks=1+3,limit=null"),
    ],
)
def test_folder_names_can_be_read(values, name):
    assert point_name(values) == name


def test_folder_names_never_mean_two_things():
    points = [
        *({"title": text} for text in ("a b", "a-b", "a,b", "a+b", "a=b")),
        {"title": ["a", "b"]},
        {"ks": list(range(60))},
        {"ks": list(range(61))},
    ]
    names = [point_name(point) for point in points]
    assert len(set(names)) == len(names) and all(len(name) <= 80 for name in names)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("k_evall: [3]", r"k_evall must be a parameter.*did you mean 'k_eval'.*k_evall=3"),
        ("k_eval: [3, 0]", r"k_eval must be at least 1.*in the combination k_eval=0"),
        ("k_eval: [3, many]", r"k_eval must be an integer.*in the combination k_eval='many'"),
        ("epochs: [3, 1]\nwarmup_epochs: [2]", "not exceed epochs.*epochs=1, warmup_epochs=2"),
        ("k_eval: 3", r"k_eval must be a list of at least one value in a grid, got k_eval=3"),
        ("k_eval: []", r"k_eval must be a list of at least one value"),
        ("lr: [1, 1.0]", "name every value once, got lr=1.0 twice"),
        ("seeds: [[0], [1]]", "seeds must be given as --seeds"),
        ("quick: [true]", "quick must be in the grid or set for all runs, got both"),
        ("{}", "grid must name at least one parameter"),
        ("- k_eval", "must hold 'name: value' lines"),
        ("k_eval: [", "must be valid YAML"),
        ("\n".join(f"{n}: [{','.join(map(str, range(1, 102)))}]" for n in ("k_eval", "epochs"))
         + "\nheads: [1, 2]", "at most 10000 combinations, got 20402"),
    ],
)  # fmt: skip
def test_every_combination_is_checked_before_anything_runs(project, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_grid(grid_file(project, text), overrides={"quick": True})
    assert not (project / "results").exists()


def test_a_missing_file_is_told(project):
    with pytest.raises(ConfigError, match=r"grid must be a file that exists, got grid='no.yaml'"):
        make_grid(Path("no.yaml"))


def test_runs_and_grids_do_not_take_each_others_folders(project):
    path = grid_file(project, "k_eval: [3]")
    make_grid(path).save()
    with pytest.raises(ConfigError, match="name must not be that of a grid, got name='quick-ks'"):
        make_plan(name="quick-ks")
    write_json(project / "results/mine/report.json", {"parameters": {}})
    with pytest.raises(ConfigError, match="name must not be that of a run, got name='mine'"):
        make_grid(path, name="mine").refuse_other_parameters()


def test_a_grid_grows_and_refuses_other_parameters(project):
    path = grid_file(project, "k_eval: [3]")
    grid = make_grid(path)
    grid.save()
    (plan,) = grid.plans
    write_json(
        plan.folder / "report.json", {"parameters": plan.assignment.values, "seeds": plan.seeds}
    )
    more = make_grid(grid_file(project, "k_eval: [3, 5]"))
    more.refuse_other_parameters()
    more.save()
    runs = read_json(grid.folder / "grid.json")["runs"]
    assert runs == {"k_eval=3": {"k_eval": 3}, "k_eval=5": {"k_eval": 5}}
    with pytest.raises(ConfigError, match=r"got other epochs \(there 2, now 9\)"):
        make_grid(path, overrides={"epochs": 9}, name="quick-ks").refuse_other_parameters()


# ---- where it runs


def test_checks_load_nothing_heavy(project):
    grid_file(project, "k_evall: [3]")
    code = (
        "import sys; from attnknn.cli import main\n"
        "main(['run', '--grid', 'ks.yaml'])\n"
        "print(sorted({'torch', 'pandas', 'dask', 'distributed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and "did you mean 'k_eval'?" in done.stderr


def test_without_dask_the_remedy_is_told(project, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert main(["run", "--grid", str(grid_file(project, "k_eval: [3]"))]) == 2
    assert "pip install 'attnknn[dask]'" in capsys.readouterr().err
    assert check_scheduler("none") == "none"
    assert not (project / "results").exists()


@pytest.mark.parametrize("scheduler", ["remote", "host:8786", "http://host:8786", ""])
def test_an_unknown_scheduler_is_refused(scheduler):
    with pytest.raises(ConfigError, match="scheduler must be none, local or an address"):
        check_scheduler(scheduler)


def test_an_existing_cluster_has_its_own_number_of_jobs():
    with pytest.raises(ConfigError, match="jobs must be left to the workers of tcp://a:1"):
        check_scheduler("tcp://a:1", n_jobs=2)


def test_a_grid_without_dask_runs_one_after_the_other(project, capsys):
    source = "assert level < 3, 'too high'"
    cells = [cell("level = 0", "parameters"), cell(source)]
    write_notebook(project / "notebooks/09_alone.ipynb", cells)
    path = grid_file(project, "level: [1, 5, 2]")
    words = ["run", "--grid", str(path), "--notebooks", "09", "--scheduler", "none", "--no-pdf"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "grid quick-ks: 3 runs (3 level); seeds 0" in out and "2 executed, 1 failed" in out
    assert "level=5: 09_alone failed in cell 3, In [3]: AssertionError: too high" in err
    copy = project / "results/quick-ks/level=2/notebooks/09_alone.ipynb"
    assert "level = 2" in copy.read_text()
    assert "| 5 | 0 | 0 | 1 |" in (project / "results/quick-ks/grid.md").read_text()


# ---- the order of things, with a cluster that is only pretended


class FakeFuture:
    """A task that is executed when somebody waits for it."""

    def __init__(self, task, run):
        self.key, self.task, self.run = f"{run.name}/{task.name}-0", task, run

    def cancelled(self):
        return False

    def exception(self):
        return None

    def result(self):
        copy = self.run / "notebooks/.partial" / f"{self.task.copy}.ipynb"
        write_json(copy, {"cells": [], "metadata": {"papermill": {}}})
        folder = self.run / (f"seed{self.task.seeds[0]}" if self.is_training else self.task.name)
        write_json(folder / "report.json", {"metrics": {"val_accuracy": 0.75}})
        failed = self.task.parameters.get("k_eval") == 13
        status, details = (
            ("failed", {"error": "E", "traceback": []}) if failed else ("complete", {})
        )
        return Outcome(self.task, status, 1.0, copy, details), 1

    @property
    def is_training(self):
        return self.task.notebook.is_training


class FakeClient:
    """Hands tasks back in the order they came, and remembers it."""

    loop = None

    def __init__(self):
        self.order = []

    def map(self, function, tasks, runs, *_, **__):
        futures = [FakeFuture(task, run) for task, run in zip(tasks, runs, strict=True)]
        self.order += [f"{future.run.name} {future.task.name}" for future in futures]
        return futures


def conduct(plans, monkeypatch, **options):
    client = FakeClient()
    monkeypatch.setattr(cluster.Conductor, "_client", property(lambda self: client))
    monkeypatch.setattr("distributed.as_completed", lambda futures, loop: list(futures))
    results = cluster.run_plans(plans, scheduler="local", pdf=False, **options)
    return results, client.order


def test_trainings_come_first(project, monkeypatch):
    grid = make_grid(grid_file(project, "k_eval: [3, 5]"), notebooks=["02"])
    grid.save()
    monkeypatch.setattr(cluster, "_MOST_OPEN", 1)
    _, order = conduct(grid.plans[:1], monkeypatch)
    assert order == ["k_eval=3 01_training.seed0", "k_eval=3 02_first"]
    results, order = conduct(grid.plans, monkeypatch)
    assert order == ["k_eval=5 01_training.seed0", "k_eval=5 02_first"]
    assert all(result.is_complete for result in results)
    assert [len(result.kept) for result in results] == [2, 0]
    _, order = conduct(grid.plans, monkeypatch, force=True)
    assert [name.split()[1] for name in order] == ["02_first", "02_first"]


def test_a_failure_is_told_for_its_run_and_the_others_go_on(project, monkeypatch, capsys):
    grid = make_grid(grid_file(project, "k_eval: [13, 5]"), notebooks=["02"])
    grid.save()
    results, _ = conduct(grid.plans, monkeypatch)
    assert [len(result.failures) for result in results] == [1, 0]
    assert "failed    k_eval=13  02_first" in capsys.readouterr().out
    table = summarise_grid(grid, results)
    assert list(table["k_eval"]) == ["13", "5"] and list(table["failed"]) == [1, 0]
    assert list(table["val_accuracy"].str.startswith("0.75")) == [True, True]
    assert (grid.folder / "grid.csv").is_file() and (grid.folder / "grid.md").is_file()
    report = read_json(grid.plans[0].folder / "report.json")
    assert report["status"] == "failed"
