"""Run folders: names to paths, finished or not, newest first."""

import os
import sys
import types
from pathlib import Path

import pytest

from attnknn.config import ConfigError, RunConfig
from attnknn.embed import runs
from attnknn.files import write_json


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def train(run: Path, *seeds: int, age: float = 0.0) -> Path:
    for seed in seeds:
        path = write_json(runs.seed_folder(run, seed) / "report.json", {})
        os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    return run


def fake_train(monkeypatch, **functions):
    for name in ("attnknn.embed.run",):
        module = types.ModuleType(name)
        module.TrainedRun = object
        for function_name, function in functions.items():
            setattr(module, function_name, function)
        monkeypatch.setitem(sys.modules, name, module)


def test_results_root_walks_up_to_the_project(tmp_path, monkeypatch):
    monkeypatch.delenv("ATTNKNN_RESULTS", raising=False)
    (tmp_path / "notebooks/params").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks/params")
    assert runs.results_root() == Path.cwd() / "results"  # no pyproject.toml: no project
    (tmp_path / "pyproject.toml").touch()
    assert runs.results_root() == tmp_path / "results"


def test_results_root_prefers_the_environment(results):
    assert runs.results_root() == results


def test_run_folder_reads_names_and_paths(results, tmp_path):
    assert runs.run_folder("quick") == results / "quick"
    assert runs.run_folder("./quick") == tmp_path / "quick"
    assert runs.run_folder("some/quick") == tmp_path / "some/quick"
    assert runs.run_folder(str(tmp_path / "x")) == tmp_path / "x"


def test_run_folder_finds_project_paths_from_the_notebooks_folder(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "results/quick").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks")
    assert runs.run_folder("results/quick") == tmp_path / "results/quick"


def test_training_folder_gives_each_configuration_a_run_of_its_own(results):
    base = {"dataset": "/data/my set.csv", "backbone": "timm:tiny", "epochs": 3}
    config = RunConfig.from_flat(base | {"seed": 5})
    assert runs.training_folder("quick", config) == results / "quick/seed5"
    own = runs.training_folder("", config)
    assert own.parent.parent == results and own.name == "seed5"
    assert own.parent.name.startswith("my-set-timm-tiny-")
    sibling = runs.training_folder("", RunConfig.from_flat(base | {"seed": 7}))
    assert sibling == own.parent / "seed7"
    other = runs.training_folder("", RunConfig.from_flat(base | {"epochs": 4}))
    assert other.parent != own.parent


def test_seeds_in_counts_complete_seeds_in_order(results):
    run = train(results / "a", 11, 2)
    (run / "seed5").mkdir()  # started, not finished
    (run / "seedling").mkdir()
    (run / "seed03").mkdir()
    assert runs.seeds_in(run) == [2, 11]
    assert not runs.is_finished(run)
    assert runs.seeds_in(results / "absent") == []


def test_a_run_is_finished_when_all_wanted_seeds_are(results):
    run = train(results / "a", 0)
    assert runs.is_finished(run)
    write_json(run / "report.json", {"seeds": [0, 1]})
    assert not runs.is_finished(run)
    train(run, 1)
    assert runs.is_finished(run)
    assert not runs.is_finished(results / "absent")
    (run / "report.json").write_text("{")
    assert not runs.is_finished(run)


def test_resolve_run_takes_the_newest_finished_run(results, capsys):
    train(results / "old", 0, age=100)
    train(results / "newer", 0, 1, age=50)
    train(results / "unfinished", 0)
    (results / "unfinished/seed1").mkdir()
    assert runs.resolve_run() == results / "newer"
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "'newer'" in printed and "newest finished" in printed and "2023-11-1" in printed
    assert "seeds 0, 1" in printed


def test_resolve_run_takes_a_name_or_a_path(results, capsys):
    train(results / "a", 0)
    assert runs.resolve_run("a") == results / "a"
    assert runs.resolve_run(str(results / "a")) == results / "a"
    assert runs.resolve_run("results/a") == results / "a"
    assert "as asked" in capsys.readouterr().out


def test_resolve_run_refuses_absent_and_unfinished_runs(results):
    train(results / "quick", 0)
    with pytest.raises(ConfigError, match=r"run_dir='quik'.*did you mean 'quick'"):
        runs.resolve_run("quik")
    (results / "quick/seed4").mkdir()
    with pytest.raises(ConfigError, match=r"must be a finished run.*seeds \[4\] are not trained"):
        runs.resolve_run("quick")


def test_resolve_run_trains_the_quick_profile_when_there_is_none(results, monkeypatch, capsys):
    (Path.cwd() / "notebooks/params").mkdir(parents=True)
    Path("pyproject.toml").touch()
    Path("notebooks/params/quick.yaml").write_text("epochs: 3\nk_eval: 5\nseeds: [4, 6]\n")
    asked = []

    def train_run(config, folder, *, progress=True):
        asked.append((config.training.epochs, config.seed, folder))
        train(folder.parent, 4)

    fake_train(monkeypatch, train_run=train_run)
    assert runs.resolve_run() == results / "quick"
    assert asked == [(3, 4, results / "quick/seed4")]
    printed = capsys.readouterr().out
    assert "training the quick profile" in printed and "trained just now" in printed


def test_load_seeds_keeps_the_order_and_means_all_by_default(results, monkeypatch):
    run = train(results / "a", 0, 1, 2)
    fake_train(monkeypatch, load_run=lambda folder: folder.name)
    assert runs.load_seeds(run, [2, 0]) == ["seed2", "seed0"]
    assert runs.load_seeds(run) == ["seed0", "seed1", "seed2"]
    with pytest.raises(ConfigError, match=r"seeds must be trained.*got seeds=\[0, 7\]"):
        runs.load_seeds(run, [0, 7])


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1], [True], "0-3", [0.0]])
def test_profile_seeds_refuses(seeds):
    with pytest.raises(ConfigError, match="seeds must be a list of different integers"):
        runs.profile_seeds({"seeds": seeds})


def test_profile_seeds_takes_one_or_many():
    values = {"seed": 42, "epochs": 3}
    assert runs.profile_seeds(values) == [42] and values == {"epochs": 3}
    assert runs.profile_seeds({"seeds": [3, 1]}) == [1, 3]
    assert runs.profile_seeds({}) == [0]
    with pytest.raises(ConfigError, match="seed or seeds"):
        runs.profile_seeds({"seed": 1, "seeds": [1]})
