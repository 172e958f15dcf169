"""Pipeline: parameters are checked first, notebooks run once, nothing half-done counts."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnknn.config import QUICKSTART_DATA, ConfigError, parse_setting
from attnknn.files import FolderBusyError, locked_folder, read_json, write_json
from attnknn.paper.execute import (
    THREAD_VARIABLES,
    Progress,
    Workers,
    run_pipeline,
    threads_each,
)
from attnknn.paper.folder import RunFolder
from attnknn.paper.notebooks import assign, find_notebooks, read_notebook, run_name
from attnknn.paper.plan import make_plan
from attnknn.studies.quickstart import PROBLEMS
from tests.toy_project import cell, make_project, study_cells, training_cells, write_notebook

FAILING = "import time\nvalues = [1]\nvalues[3]"


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("ATTNKNN_RESULTS", raising=False)
    monkeypatch.chdir(make_project(tmp_path / "project"))
    return tmp_path / "project"


@pytest.fixture
def books(project):
    return find_notebooks(project / "notebooks")


def edit(path: Path, *, say: str) -> None:
    """Add a sentence to a notebook."""
    notebook = json.loads(path.read_text())
    notebook["cells"].append(cell(say, kind="markdown"))
    path.write_text(json.dumps(notebook))


def wait_until(condition, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def result_names(result) -> list[str]:
    return sorted(result.executed)


# ---- the command


def test_a_plan_knows_the_command_that_makes_it(project):
    overrides = {"k_eval": 7, "lr": 1e-5, "augment": ["crop", "flip"], "dataset": "digits"}
    plan = make_plan(overrides=overrides, notebooks=["02"], seeds=[0, 3], name="mine")
    assert plan.command == (
        "attnknn run --profile quick --set k_eval=7 --set lr=1.0e-05 --set 'augment=[crop, flip]' "
        "--set dataset=digits --notebooks 02 --seeds 0,3 --name mine"
    )
    words = shlex.split(plan.command)
    given = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    assert dict(parse_setting(text) for text in given) == overrides
    assert make_plan().command == "attnknn run --profile quick --seeds 0 --name quick"


# ---- parameters


def test_parameters_are_read_without_executing_the_cell(books):
    assert books[0].defaults == {"seed": 0, "run_dir": "", "settings": {}}
    assert [book.name for book in books] == ["01_training", "02_first", "03_second"]
    assert books[0].is_training and not books[0].reads_training
    assert books[1].reads_training and books[1].n_cells == 4


@pytest.mark.parametrize(
    "source", ["k = 1 + n", "import os", "k = j = 1", "k: int", "%time", "k += 1"]
)
def test_a_parameters_cell_that_computes_is_refused(tmp_path, source):
    path = write_notebook(tmp_path / "04_bad.ipynb", [cell(source, "parameters")])
    with pytest.raises(ConfigError, match=r"parameters cell of 04_bad.ipynb must hold plain"):
        read_notebook(path)


def test_a_broken_notebook_file_is_refused(tmp_path):
    (tmp_path / "04_bad.ipynb").write_text('{"cells": [')
    with pytest.raises(ConfigError, match=r"04_bad.ipynb must be a notebook"):
        read_notebook(tmp_path / "04_bad.ipynb")


def test_outputs_do_not_change_a_notebooks_digest(project, books):
    path = books[1].path
    notebook = json.loads(path.read_text())
    notebook["cells"][-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x"}]
    path.write_text(json.dumps(notebook))
    assert read_notebook(path).digest == books[1].digest
    edit(path, say="more")
    assert read_notebook(path).digest != books[1].digest


def test_settings_go_to_the_training_and_parameters_to_their_notebooks(books):
    made = assign({"epochs": 3, "lr": 1, "k_eval": 5}, books)
    assert made.by_notebook == {
        "01_training": {"settings": {"epochs": 3, "lr": 1.0}},
        "02_first": {"k_eval": 5},
        "03_second": {"k_eval": 5},
    }
    assert made.config.training.lr == 1.0
    assert made.values == {"epochs": 3, "k_eval": 5, "lr": 1.0}


def test_what_the_training_notebook_declares_is_given_to_it_by_name(project):
    cells = training_cells()
    cells[1] = cell('epochs = 5\nlr = 0.5\nseed = 0\nsettings = {"heads": 2}', "parameters")
    write_notebook(project / "notebooks/01_training.ipynb", cells)
    made = make_plan(overrides={"batch_size": 11}).assignment  # the profile sets epochs: 2
    assert made.by_notebook["01_training"] == {"epochs": 2, "settings": {"batch_size": 11}}
    assert (made.config.training.epochs, made.config.training.lr) == (2, 0.5)
    assert made.config.attention.heads == 4  # the profile decides, not the cell's example


def test_training_files_are_told_apart_by_seed(project):
    (first, _), *_ = make_plan(notebooks=["01"], seeds=[1, 12]).tasks()
    run = RunFolder(project / "results/quick")
    for name in ("facts_seed1.csv", "facts_seed12.csv", ".facts_seed1.csv.x.part"):
        write_json(run.path / "01_training" / name, {})
    assert run.files_of(first) == ["01_training/facts_seed1.csv"]


def test_a_misspelt_parameter_is_refused_with_the_nearest_name(project):
    message = (
        r"k_evall must be a parameter of a notebook or a setting of the run, "
        r"got k_evall=3 \(did you mean 'k_eval'\?\)"
    )
    with pytest.raises(ConfigError, match=message):
        make_plan(overrides={"k_evall": 3})
    assert not (project / "results").exists()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("quick", "false", "true or false"),
        ("quick", 0, "true or false"),
        ("k_eval", "10", "an integer"),
        ("k_eval", 10.0, "an integer"),
        ("k_eval", True, "an integer"),
        ("k_eval", None, "an integer"),
        ("rate", "fast", "a number"),
        ("rate", float("nan"), "finite"),
        ("title", 3, "text"),
        ("ks", 3, "a list"),
        ("ks", [1, "3"], "a list"),
        ("ks", [3, 3], "hold different values"),
        ("coverage", 1.5, "at most 0.999"),
        ("noise", -0.1, "at least 0"),
        ("data", "digts", "one of .*did you mean 'digits'"),
        ("afmp_dataset", "cifr10", "one of .*did you mean 'cifar10'"),
        ("bracket_datasets", ["irs"], "one of .*did you mean 'iris'"),
        ("backbone", "timm:resnet_18", "name a timm network"),
        ("epochs", "many", "an integer"),
        ("epochs", -1, "at least 0"),
        ("warmup_epochs", 99, "not exceed epochs"),
    ],
)
def test_a_wrong_type_or_value_is_refused(project, books, name, value, rule):
    source = 'rate = 0.5\ntitle = "a"\nks = [1, 3]\nlimit = None\ncoverage = 0.9\nnoise = 0.1'
    source += '\ndata = "digits"\nafmp_dataset = "digits"\nbracket_datasets = ["digits"]'
    write_notebook(project / "notebooks/04_more.ipynb", [cell(source, "parameters")])
    with pytest.raises(ConfigError, match=f"{name} must (be )?{rule}") as caught:
        make_plan(overrides={name: value})
    assert f"got {name}=" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("rate", 1, 1.0),
        ("rate", "2e-4", 2e-4),  # what YAML makes of 2e-4
        ("ks", [3], [3]),
        ("ks", [5, 7], [5, 7]),
        ("limit", None, None),
        ("limit", 5, 5),
        ("k_eval", 5, 5),
    ],
)
def test_a_harmless_value_is_taken(project, name, value, kept):
    source = "rate = 0.5\nks = [1, 3]\nlimit = None\nk_eval = 3"
    write_notebook(project / "notebooks/04_more.ipynb", [cell(source, "parameters")])
    assert make_plan(overrides={name: value}).assignment.by_notebook["04_more"][name] == kept


def test_own_files_are_found_from_any_folder_and_changes_noticed(project, monkeypatch):
    source = 'data = "digits"\nsave_to = ""'
    write_notebook(project / "notebooks/04_own.ipynb", [cell(source, "parameters")])
    (project / "my.csv").write_text("a,label\n1,x\n")
    monkeypatch.chdir(project)
    plan = make_plan(overrides={"data": "my.csv"}, notebooks=["04"])
    (task,) = plan.tasks()[1]
    own = {"data": str(project.resolve() / "my.csv"), "save_to": plan.folder.name}
    assert task.parameters == own
    before = RunFolder(plan.folder).key(task)
    (project / "my.csv").write_text("a,label\n1,x\n2,y\n")
    assert RunFolder(plan.folder).key(task) != before


def test_the_quickstart_knows_the_names_it_is_checked_against():
    assert set(QUICKSTART_DATA) == PROBLEMS.keys() - {"CIFAR-10 embeddings"}


@pytest.mark.parametrize("name", ["run_dir", "save_to", "seed", "seeds", "settings"])
def test_what_the_pipeline_fills_in_is_no_parameter(project, name):
    with pytest.raises(ConfigError, match=f"{name} must be given as .*, got {name}=1"):
        make_plan(overrides={name: 1})


def test_unknown_profiles_notebooks_and_names_are_refused(project, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"profile must be one of quick.*did you mean 'quick'"):
        make_plan("quik")
    with pytest.raises(ConfigError, match=r"notebooks must be among .*got '02_fist'.*02_first"):
        make_plan(notebooks=["02_fist"])
    for name in ("../x", "a/b", ".hidden", ""):
        with pytest.raises(ConfigError, match="name must be a folder name"):
            make_plan(name=name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="inside the project"):
        make_plan()


def test_profiles_may_name_seeds_and_lie_elsewhere(project, tmp_path):
    (tmp_path / "mine.yaml").write_text("seeds: [5, 3]\nk_eval: 11\n")
    plan = make_plan(str(tmp_path / "mine.yaml"))
    assert (plan.folder.name, plan.seeds) == ("mine", [3, 5])
    training, rest, _ = plan.tasks()
    assert [task.copy for task in training] == ["01_training.seed3", "01_training.seed5"]
    assert training[0].parameters == {"run_dir": "mine", "seed": 3, "settings": {}}
    expected = {"k_eval": 11, "run_dir": "mine", "seeds": [3, 5]}
    assert [task.parameters for task in rest] == [expected, expected]


def test_a_study_brings_its_training_along(project):
    plan = make_plan(notebooks=["03"])
    assert [book.name for book in plan.notebooks] == ["01_training", "03_second"]
    assert plan.wanted == {"03_second"}
    write_notebook(project / "notebooks/09_alone.ipynb", [cell("n = 1", "parameters")])
    assert [book.name for book in make_plan(notebooks=["09"]).notebooks] == ["09_alone"]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({}, "quick"),
        ({"k_eval": 10}, "quick-k_eval=10"),
        ({"lr": 0.5, "augment": False}, "quick-augment=false-lr=0.5"),
        ({"ks": [1, 3], "limit": None}, "quick-ks=1,3-limit=null"),
        ({"dataset": "/data/my set"}, "quick-dataset=-data-my-set"),
    ],
)
def test_run_names_are_readable_folder_names(overrides, name):
    assert run_name("quick", overrides) == name


def test_long_run_names_are_cut_and_stay_different():
    names = {run_name("quick", {"dataset": "x" * 90 + end}) for end in "ab"}
    assert len(names) == 2 and all(len(name) == 80 for name in names)


def test_claims_are_judged_last_and_anew_when_a_study_is(project):
    write_notebook(project / "notebooks/10_claims.ipynb", study_cells("10_claims"))
    _, (study, _), (judging,) = make_plan().tasks()
    assert judging.name == "10_claims"
    run = RunFolder(project / "results/quick")
    write_json(run.path / "seed0/report.json", {})
    for task in (study, judging):
        write_json(run.copy_of(task), {})
        run.entries[task.name] = {"status": "complete", **run.facts(task)}
    assert run.is_complete(judging)
    write_json(run.path / study.name / "table.json", {})
    run.entries[study.name] |= run.facts(study)
    assert run.is_complete(study) and not run.is_complete(judging)


def test_threads_are_shared_out():
    assert threads_each(1) >= threads_each(2) >= threads_each(10_000) == 1


def test_more_seeds_extend_a_run(project):
    (alone,), *_ = make_plan(notebooks=["01"]).tasks()
    run = RunFolder(project / "results/quick")
    write_json(run.path / "seed0/report.json", {})
    write_json(run.copy_of(alone), {})
    assert alone.copy == "01_training"
    run.entries[alone.name] = {"status": "complete", **run.facts(alone)}
    (first, second), *_ = make_plan(notebooks=["01"], seeds=[0, 1]).tasks()
    run.report["seeds"] = [0]
    run.refuse_other_parameters({}, [0, 1])
    assert run.is_complete(first) and not run.is_complete(second)
    (run.path / "seed0/report.json").unlink()
    assert not run.is_complete(first)


# ---- execution: one run, looked at from several sides


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two seeds and two studies, in a home whose own kernelspec is broken."""
    folder = tmp_path_factory.mktemp("finished")
    make_project(folder)
    wrong = {"argv": ["/nowhere/python"], "display_name": "?", "language": "python"}
    spec = folder / "jupyter/kernels/python3/kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps(wrong))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("ATTNKNN_RESULTS", raising=False)
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
        patch.delenv("OMP_NUM_THREADS", raising=False)
        result = run_pipeline(make_plan(seeds=[0, 1]), n_jobs=2, pdf=False)
        yield result


def test_every_notebook_is_executed_in_parallel(finished):
    assert result_names(finished) == [
        "01_training.seed0",
        "01_training.seed1",
        "02_first",
        "03_second",
    ]
    assert finished.is_complete and not finished.kept
    table = (finished.folder / "02_first/table.txt").read_text()
    assert table == f"[0, 1] 7 {threads_each(2)} {sys.executable}"
    assert (finished.folder / "seed1/settings.txt").read_text() == "{'epochs': 2}"


def test_the_report_tells_what_was_done(finished):
    report = read_json(finished.folder / "report.json")
    assert report["status"] == "complete" and report["seeds"] == [0, 1]
    assert report["parameters"] == {"epochs": 2, "k_eval": 7}
    assert report["config"]["epochs"] == 2 and "versions" in report and "hardware" in report
    entry = report["notebooks"]["02_first"]
    assert entry["status"] == "complete" and entry["files"] == ["02_first/table.txt"]
    assert 0 < entry["seconds"] < 300 and entry["threads"] == threads_each(2)


def test_executed_copies_carry_outputs_and_provenance_but_no_private_path(finished):
    path = finished.folder / "notebooks/02_first.ipynb"
    copy = json.loads(path.read_text())
    provenance = copy["metadata"]["attnknn"]["provenance"]
    assert set(provenance) == {"run", "dataset", "seeds", "commit", "versions", "seconds"}
    assert (provenance["run"], provenance["seeds"]) == ("quick", [0, 1])
    assert "a line of output" in path.read_text()
    assert str(finished.folder.parent) not in path.read_text()
    leftovers = [p.name for p in path.parent.iterdir() if p.suffix != ".ipynb"]
    assert leftovers == []


def test_a_complete_run_is_kept(finished):
    again = run_pipeline(make_plan(seeds=[0, 1]), pdf=False)
    report = json.loads((finished.folder / "report.json").read_text())
    command = "attnknn run --profile quick --seeds 0,1 --name quick"
    assert report["commands"].count(command) == 1  # given twice, told once
    assert again.executed == [] and len(again.kept) == 4 and again.is_complete
    assert again.seconds < 5


def test_a_moved_run_is_still_complete(finished, tmp_path):
    new = tmp_path / "elsewhere"
    new.mkdir()
    moved = finished.folder.rename(new / "quick")
    try:
        again = run_pipeline(make_plan(seeds=[0, 1], results=new), pdf=False)
        assert again.executed == [] and len(again.kept) == 4
    finally:
        moved.rename(finished.folder)


def test_other_parameters_are_refused(finished):
    other = make_plan(seeds=[0, 1], overrides={"k_eval": 9, "lr": 0.5}, name="quick")
    message = r"got other k_eval \(there 7, now 9\), lr \(there the default, now 0.5\).*--force"
    with pytest.raises(ConfigError, match=message):
        run_pipeline(other, pdf=False)
    with pytest.raises(ConfigError, match=r"seeds \(there also \[1\]\)"):
        run_pipeline(make_plan(seeds=[0]), pdf=False)
    assert len(run_pipeline(make_plan(seeds=[0, 1]), pdf=False).kept) == 4


def test_a_second_run_into_the_same_folder_is_refused(finished):
    code = (
        "import sys; from attnknn.files import locked_folder\n"
        "with locked_folder(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(finished.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(FolderBusyError, match="being written by another process"):
            run_pipeline(make_plan(seeds=[0, 1]), pdf=False)
        holder.stdin.close()


@pytest.mark.parametrize("name", ["02_first/table.txt", "notebooks/02_first.ipynb"])
def test_a_file_that_is_no_longer_what_was_written_is_made_again(finished, name):
    path = finished.folder / name
    before = (finished.folder / "02_first/table.txt").read_text()
    path.write_text(path.read_text().replace("7", "8", 1))
    again = run_pipeline(make_plan(seeds=[0, 1]), pdf=False)
    assert again.executed == ["02_first"] and len(again.kept) == 3
    # The threads are those of a run alone: all but their number comes out as before.
    assert (finished.folder / "02_first/table.txt").read_text().split()[:3] == before.split()[:3]


def test_a_trained_seed_that_is_no_longer_what_was_written_is_made_again(project):
    body = "import json, hashlib\nfolder = run / f'seed{seed}'\nfolder.mkdir(parents=True)\n"
    body += "(folder / 'rows.bin').write_bytes(b'rows')\n"
    body += "sums = {'rows.bin': hashlib.sha256(b'rows').hexdigest()}\n"
    body += "(folder / 'report.json').write_text(json.dumps({'files': sums}))"
    write_notebook(project / "notebooks/01_training.ipynb", training_cells(body))
    run_pipeline(make_plan(notebooks=["01"]), pdf=False)
    rows = project / "results/quick/seed0/rows.bin"
    rows.write_bytes(b"rowS")
    assert run_pipeline(make_plan(notebooks=["01"]), pdf=False).executed == ["01_training.seed0"]
    assert rows.read_bytes() == b"rows"


def test_a_results_path_may_hold_braces(project):
    write_notebook(project / "notebooks/09_alone.ipynb", [cell("n = 1", "parameters"), cell("n")])
    plan = make_plan(notebooks=["09"], results=project / "out{0}{x}")
    assert run_pipeline(plan).is_complete
    assert (project / "out{0}{x}/quick/report.pdf").is_file()


def test_only_what_changed_is_executed_again(finished):
    edit(Path("notebooks/03_second.ipynb"), say="Another sentence.")
    (finished.folder / "02_first/table.txt").unlink()
    again = run_pipeline(make_plan(seeds=[0, 1]), n_jobs=2, pdf=False)
    assert again.failures == []
    assert result_names(again) == ["02_first", "03_second"]
    assert again.kept == ["01_training.seed0", "01_training.seed1"]
    assert (finished.folder / "02_first/table.txt").is_file()


def test_a_new_training_outdates_the_studies(finished):
    before = (finished.folder / "seed1/report.json").read_text()
    again = run_pipeline(make_plan(seeds=[0, 1], notebooks=["01", "02"]), n_jobs=2, pdf=False)
    assert again.executed == []
    (finished.folder / "seed1/report.json").unlink()
    again = run_pipeline(make_plan(seeds=[0, 1], notebooks=["01", "02"]), n_jobs=2, pdf=False)
    assert result_names(again) == ["01_training.seed1", "02_first"]
    assert (finished.folder / "seed1/report.json").read_text() != before


def test_pdfs_are_made_once(finished):
    first = run_pipeline(make_plan(seeds=[0, 1], notebooks=["01", "02"]))
    assert first.executed == [] and first.problems == []
    pdfs = [*finished.folder.glob("notebooks/*.pdf"), finished.folder / "report.pdf"]
    assert len(pdfs) == 5 and all(path.read_bytes().startswith(b"%PDF") for path in pdfs)
    times = [path.stat().st_mtime_ns for path in pdfs]
    content = pdfs[-1].read_bytes()
    pdfs[-1].write_bytes(content[: len(content) // 2])  # only what is damaged is printed again
    run_pipeline(make_plan(seeds=[0, 1], notebooks=["01", "02"]))
    assert [path.stat().st_mtime_ns for path in pdfs[:-1]] == times[:-1]
    assert pdfs[-1].read_bytes() == content


# ---- failures


def test_a_failing_notebook_does_not_stop_the_others(project):
    cells = study_cells("02_first", FAILING)
    write_notebook(project / "notebooks/02_first.ipynb", cells)
    result = run_pipeline(make_plan(), n_jobs=2, pdf=False)
    assert result_names(result) == ["01_training.seed0", "03_second"]
    (failure,) = result.failures
    assert failure.task.name == "02_first" and failure.details["error"].startswith("IndexError: ")
    assert failure.details["source"] == FAILING
    assert any("values[3]" in line for line in failure.details["traceback"])
    # Title, parameters, the injected ones, set-up: the failing cell is the fifth of the copy.
    assert failure.details["cell"] == 5
    assert failure.output.name == "02_first.failed.ipynb" and failure.output.is_file()
    report = read_json(result.folder / "report.json")
    assert report["status"] == "failed" and report["notebooks"]["02_first"]["status"] == "failed"
    assert not (result.folder / "notebooks/02_first.ipynb").exists()
    write_notebook(project / "notebooks/02_first.ipynb", study_cells("02_first"))
    again = run_pipeline(make_plan(), n_jobs=2, pdf=False)
    assert again.executed == ["02_first"] and again.is_complete
    assert not failure.output.exists()


def test_a_failed_training_skips_only_its_readers(project):
    write_notebook(project / "notebooks/01_training.ipynb", training_cells("pass"))
    write_notebook(project / "notebooks/09_alone.ipynb", [cell("n = 1", "parameters"), cell("n")])
    result = run_pipeline(make_plan(notebooks=["02", "09"]), n_jobs=2, pdf=False)
    (failure,) = result.failures
    assert "01_training must write" in failure.details["error"]
    assert "seed0/report.json" in failure.details["error"]
    assert result.skipped == ["02_first"] and result.executed == ["09_alone"]


def test_a_dead_kernel_is_a_failure_with_a_reason(project):
    body = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    write_notebook(project / "notebooks/09_dies.ipynb", [cell(body)])
    result = run_pipeline(make_plan(notebooks=["09"]), pdf=False)
    assert "kernel was killed or crashed" in result.failures[0].details["error"]


def test_force_replaces_a_run_with_other_parameters(project):
    old = project / "results/quick"
    for name in ("seed3", "seed4", "05_gone", "06_mine", "seed_notes", "notebooks"):
        (old / name).mkdir(parents=True)
    for name in ("05_gone.ipynb", "05_gone.pdf", "mine.ipynb"):
        (old / "notebooks" / name).touch()
    entries = {"05_gone": {"status": "complete", "copy": "notebooks/05_gone.ipynb", "files": []}}
    report = {"parameters": {"k_eval": 1}, "seeds": [3], "notebooks": entries}
    write_json(old / "report.json", report)
    write_notebook(project / "notebooks/09_alone.ipynb", [cell("n = 1", "parameters")])
    result = run_pipeline(make_plan(notebooks=["09"]), force=True, pdf=False)
    assert result.is_complete
    # What its report names is gone, and nothing else.
    left = ["06_mine", "notebooks", "seed4", "seed_notes"]
    assert sorted(p.name for p in old.iterdir() if p.is_dir()) == left
    copies = ["09_alone.ipynb", "mine.ipynb"]
    assert sorted(p.name for p in (old / "notebooks").iterdir()) == copies


# ---- folders that are not a run's


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return every path below a folder, with the content of the files."""
    paths = folder.rglob("*")
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


@pytest.mark.parametrize("force", [False, True])
def test_a_clone_with_the_name_of_a_run_is_refused_and_stays_as_it_is(project, force):
    clone = make_project(project / "results/clone")
    (clone / "02_first").mkdir()
    (clone / "02_first/mine.csv").write_text("a\n1\n")
    before = tree(clone)
    message = r"results/clone must be a new folder or hold what a run made, got also 02_first, note"
    with pytest.raises(ConfigError, match=message):
        run_pipeline(make_plan(name="clone"), force=force, pdf=False)
    assert tree(clone) == before


@pytest.mark.parametrize("force", [False, True])
def test_the_project_itself_is_refused_whatever_it_holds(project, force):
    write_json(project / "report.json", {"parameters": {}, "seeds": [0], "notebooks": {}})
    plan = make_plan(name="project", results=project.parent)
    before = tree(project)
    with pytest.raises(ConfigError, match="which is or holds the project"):
        run_pipeline(plan, force=force, pdf=False)
    assert tree(project) == before


def test_what_lies_in_the_way_of_a_notebook_and_was_not_made_by_the_run_is_refused(project):
    run_pipeline(make_plan(notebooks=["02"]), pdf=False)
    run = project / "results/quick"
    for name in ("03_second/table.txt", "notebooks/03_second.ipynb", "seed1/weights.bin"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    before = tree(run)
    message = r"got also 03_second, notebooks/03_second\.ipynb, seed1;"
    for force in (False, True):
        with pytest.raises(ConfigError, match=message):
            run_pipeline(make_plan(seeds=[0, 1]), force=force, pdf=False)
        assert tree(run) == before
    kept = run_pipeline(make_plan(notebooks=["02"]), pdf=False).kept  # nothing is in its way
    assert kept == ["01_training.seed0", "02_first"]


def test_a_report_that_is_not_a_runs_is_refused(project):
    write_json(project / "results/quick/report.json", {"config": {}, "metrics": {}})
    with pytest.raises(ConfigError, match="must be the report of a run, got that of something"):
        run_pipeline(make_plan(), force=True, pdf=False)


def test_a_seed_that_was_trained_without_notebooks_is_taken_up(project):
    for name, file in (("seed0", "config.json"), ("seed1", ".lock")):
        write_json(project / "results/quick" / name / file, {})
    assert run_pipeline(make_plan(seeds=[0, 1]), n_jobs=2, pdf=False).is_complete


# ---- interruption


def start_run(project: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "attnknn.cli", "run", "--no-pdf", "--jobs", "2", *words]
    environment = {n: v for n, v in os.environ.items() if n != "ATTNKNN_RESULTS"}
    return subprocess.Popen(command, cwd=project, env=environment)


@pytest.fixture
def sleeper(project) -> Path:
    """Make notebook 03 tell its pid and sleep until a file named ``go`` is there."""
    marker = project / "pid"
    body = (
        f"Path({str(marker)!r}).write_text(str(os.getpid()))\n"
        f"while not Path({str(project / 'go')!r}).exists(): time.sleep(0.05)"
    )
    write_notebook(project / "notebooks/03_second.ipynb", study_cells("03_second", body))
    return marker


def status_of(run: Path, name: str) -> str:
    return read_json(run / "report.json")["notebooks"].get(name, {}).get("status", "")


def test_a_killed_run_goes_on_without_computing_twice(project, sleeper):
    run = project / "results/quick"
    process = start_run(project)
    wait_until(lambda: sleeper.exists() and sleeper.read_text() != "")
    wait_until(lambda: status_of(run, "02_first") == "complete")
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(int(sleeper.read_text())), 20)
    assert not (run / "notebooks/03_second.ipynb").exists()
    trained = (run / "seed0/report.json").read_text()
    (project / "go").touch()
    again = run_pipeline(make_plan(), n_jobs=2, pdf=False)
    assert again.executed == ["03_second"] and len(again.kept) == 2
    assert (run / "seed0/report.json").read_text() == trained
    assert not (run / "notebooks/.partial").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_ends_its_kernels(project, sleeper, number):
    body = json.loads((project / "notebooks/03_second.ipynb").read_text())["cells"]
    body[1] = cell('run_dir_of = ""', "parameters")  # reads no training: starts at once
    body[2] = cell("import os, time\nfrom pathlib import Path")
    write_notebook(project / "notebooks/03_second.ipynb", body)
    process = start_run(project, "--notebooks", "03")
    wait_until(lambda: sleeper.exists() and sleeper.read_text() != "")
    process.send_signal(number)
    assert process.wait(90) == 130
    wait_until(lambda: not is_alive(int(sleeper.read_text())))
    assert read_json(project / "results/quick/report.json")["status"] == "interrupted"
    with locked_folder(project / "results/quick"):
        pass


@pytest.mark.parametrize(("given", "expected"), [(None, "2"), ("1", "1")])
def test_all_libraries_get_the_threads_that_openmp_gets(monkeypatch, tmp_path, given, expected):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    environment = Workers(tmp_path, tmp_path, Progress())._environment(2)
    assert {environment[name] for name in THREAD_VARIABLES} == {expected}
