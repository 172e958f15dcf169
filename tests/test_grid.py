"""Grids: every combination is checked first, equal trainings are made once, failures stay alone."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnknn.cli import main
from attnknn.config import ConfigError
from attnknn.files import read_json, write_json
from attnknn.paper import dask as cluster
from attnknn.paper.dask import Conductor, check_scheduler
from attnknn.paper.execute import Outcome
from attnknn.paper.folder import ORIGIN_NAME, RunFolder, adopt_training, code_digest
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
    _, (first, _) = last.tasks()
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


# ---- equal trainings are made once


def trained(plan, *, text: str = "weights") -> RunFolder:
    """Make a plan's folder look as if its training were finished."""
    (task,), _ = plan.tasks()
    run = RunFolder(plan.folder)
    for name in ("embedder.safetensors", "config.json", "report.json"):
        (run.path / "seed0").mkdir(parents=True, exist_ok=True)
        (run.path / "seed0" / name).write_text(text)
    write_json(run.copy_of(task), {})
    entry = {"status": "complete", "copy": "notebooks/01_training.ipynb", "files": []}
    run.entries[task.name] = entry | {"key": run.key(task), "code": code_digest()}
    run.save()
    return run


def adopt(plan) -> str | None:
    plan.folder.mkdir(parents=True, exist_ok=True)
    return adopt_training(RunFolder(plan.folder), plan.tasks()[0][0])


def test_a_run_takes_over_an_equal_training(project):
    donor = trained(make_plan())
    plan = make_plan(overrides={"k_eval": 9})
    assert adopt(plan) == "quick"
    copied = plan.folder / "seed0"
    assert sorted(p.name for p in copied.iterdir()) == sorted(
        ["embedder.safetensors", "config.json", "report.json", ORIGIN_NAME]
    )
    assert RunFolder(plan.folder).trained_in(plan.tasks()[0][0]) == "quick"
    (copied / "report.json").write_text("another one")
    assert (donor.path / "seed0/report.json").read_text() == "weights"
    assert [p.name for p in plan.folder.iterdir()] == ["seed0"]


def test_what_differs_in_settings_seed_code_or_end_is_not_taken_over(project):
    donor = trained(make_plan())
    assert adopt(make_plan(overrides={"epochs": 9})) is None
    assert adopt(make_plan(seeds=[1], name="other-seed")) is None
    donor.entries["01_training.seed0"]["code"] = "older"
    donor.save()
    assert adopt(make_plan(name="other-code")) is None
    donor.entries["01_training.seed0"] |= {"code": code_digest(), "status": "failed"}
    donor.save()
    assert adopt(make_plan(name="not-finished")) is None


def test_a_training_of_ones_own_is_left_alone(project):
    trained(make_plan())
    plan = make_plan(name="begun")
    (plan.folder / "seed0").mkdir(parents=True)
    (plan.folder / "seed0/.lock").touch()
    (plan.folder / "seed0/checkpoint.pt").touch()
    assert adopt(plan) is None
    (plan.folder / "seed0/checkpoint.pt").unlink()
    assert adopt(plan) == "quick"


def test_grids_and_runs_take_over_from_each_other(project):
    trained(make_plan())
    grid = make_grid(grid_file(project, "k_eval: [3, 5]\nlr: [1, 2]"))
    grid.save()
    assert adopt(make_grid(grid_file(project, "k_eval: [3]")).plans[0]) == "quick"
    trained(grid.plans[1])  # k_eval=3, lr=2
    assert adopt(grid.plans[3]) == "quick-ks/k_eval=3,lr=2.0"
    assert adopt(make_plan(overrides={"lr": 2})) == "quick-ks/k_eval=3,lr=2.0"
    (project / "results/quick/report.json").write_text("{")
    assert adopt(make_plan(name="damaged-beside")) is None


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

    def __init__(self):
        self.waiting, self.order = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def nthreads(self):
        return {"a": 1}

    def submit(self, function, task, run, *_, **__):
        self.waiting.append(FakeFuture(task, run))
        return self.waiting[-1]

    def add(self, future):
        pass

    def __next__(self):
        future = self.waiting.pop(0)
        self.order.append(f"{future.run.name} {future.task.name}")
        return future


def conduct(plans, monkeypatch, **options):
    client = FakeClient()
    monkeypatch.setattr(Conductor, "_client", property(lambda self: client))
    monkeypatch.setattr(Conductor, "_done", property(lambda self: client))
    results = Conductor(lambda: client, pdf=False, **options).run(plans)
    return results, client.order


def test_trainings_come_first_and_equal_ones_once(project, monkeypatch):
    grid = make_grid(grid_file(project, "k_eval: [3, 5]\nlr: [1, 2]"), notebooks=["02"])
    grid.save()
    results, order = conduct(grid.plans, monkeypatch)
    assert all(result.is_complete for result in results)
    for plan in grid.plans:
        name = plan.folder.name
        assert order.index(f"{name} 01_training.seed0") < order.index(f"{name} 02_first")
    # Runs of an equal training wait for it, and take it over.
    assert order.index("k_eval=3,lr=1.0 01_training.seed0") < order.index(
        "k_eval=5,lr=1.0 01_training.seed0"
    )
    assert [result.adopted for result in results] == [
        {},
        {},
        {0: "quick-ks/k_eval=3,lr=1.0"},
        {0: "quick-ks/k_eval=3,lr=2.0"},
    ]
    entry = read_json(grid.plans[2].folder / "report.json")["notebooks"]["01_training.seed0"]
    assert entry["trained_in"] == "quick-ks/k_eval=3,lr=1.0"
    again, order = conduct(grid.plans, monkeypatch)
    assert order == [] and [len(result.kept) for result in again] == [2, 2, 2, 2]
    _, order = conduct(grid.plans, monkeypatch, force=True)
    assert sum("02_first" in name for name in order) == 4 and len(order) == 4


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


def test_many_runs_are_not_all_held_open(project, monkeypatch):
    values = list(range(20, 60))
    grid = make_grid(grid_file(project, f"k_eval: {values}"), notebooks=["02"])
    grid.save()
    most = 0

    class Counting(Conductor):
        def _advance(self, work):
            nonlocal most
            most = max(most, len(self._open))
            super()._advance(work)

    client = FakeClient()
    monkeypatch.setattr(Counting, "_client", property(lambda self: client))
    monkeypatch.setattr(Counting, "_done", property(lambda self: client))
    results = Counting(lambda: client, pdf=False).run(grid.plans)
    assert most <= 32 and all(result.is_complete for result in results) and len(results) == 40


@pytest.mark.parametrize("applications", [[], ["<bokeh.server.tornado.BokehTornado>"]])
def test_a_link_is_told_only_where_a_dashboard_is_behind_it(applications):
    scheduler = SimpleNamespace(
        address="tcp://there:1", http_application=SimpleNamespace(applications=applications)
    )
    client = SimpleNamespace(
        nthreads=lambda: {"tcp://there:2": 1},
        scheduler=scheduler,
        dashboard_link="http://there:8787/status",
        run_on_scheduler=lambda ask: ask(scheduler),
    )
    told = cluster.about(client)
    assert ("dashboard http://there:8787/status" in told) == bool(applications)
    assert ("no dashboard" in told) == (not applications)
