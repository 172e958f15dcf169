"""The command line: friendly help, one clear line for mistakes, exit codes."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import attnknn.paper.execute
from attnknn.cli import main, parse_seeds
from attnknn.config import ConfigError
from attnknn.data import download as sources
from tests.toy_project import cell, make_project, write_notebook


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("ATTNKNN_RESULTS", raising=False)
    monkeypatch.chdir(make_project(tmp_path / "project"))
    return tmp_path / "project"


def told(capsys) -> str:
    """Return the single line of complaint."""
    errors = capsys.readouterr().err
    assert errors.startswith("attnknn: ") and errors.count("\n") == 1, errors
    return errors


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["data", "--help"], ["--version"]]
)
def test_help_and_version(capsys, words):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 0 and "attnknn" in capsys.readouterr().out


def test_help_and_checks_load_nothing_heavy(project):
    code = (
        "import sys; from attnknn.cli import main\n"
        "main(['run', '--set', 'k_evall=3'])\n"
        "print(sorted({'torch', 'pandas', 'papermill', 'nbformat', 'IPython', 'matplotlib'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert "did you mean 'k_eval'?" in done.stderr


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0", [0]), ("0,1,2", [0, 1, 2]), ("0-9", list(range(10))), ("7, 2-4", [7, 2, 3, 4])],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "3-1", "1,1", "0-2,2", "1.5"])
def test_seeds_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="seeds must"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--set", "k_evall=3"], "did you mean 'k_eval'?"),
        (["--set", "quick='false'"], "quick must be true or false"),
        (["--set", "k_eval"], "must look like name=value"),
        (["--set", "k_eval=[1,"], "k_eval must be a YAML value"),
        (["--profile", "quik"], "did you mean 'quick'?"),
        (["--notebooks", "77"], "notebooks must be among"),
        (["--seeds", "x"], "seeds must look like"),
        (["--jobs", "0"], "jobs must be an integer of at least 1"),
        (["--name", "../up"], "name must be a folder name"),
    ],
)
def test_a_wrong_request_gets_one_line_and_code_2(project, capsys, words, complaint):
    assert main(["run", *words]) == 2
    assert complaint in told(capsys)
    assert not (project / "results").exists()


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "the disk is full (/x/y)"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "no permission to write"),
        (KeyboardInterrupt(), "interrupted; the same command goes on"),
    ],
)
def test_trouble_of_the_machine_gets_one_line(project, capsys, monkeypatch, error, complaint):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(attnknn.paper.execute, "run_pipeline", fail)
    assert main(["run"]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert complaint in told(capsys)


def test_a_defect_of_ours_keeps_its_traceback(project, monkeypatch):
    monkeypatch.setattr(attnknn.paper.execute, "run_pipeline", lambda *_, **__: {}["absent"])
    with pytest.raises(KeyError):
        main(["run"])


def test_a_failing_notebook_is_told_with_cell_error_and_copy(project, capsys):
    cells = [cell("n = 1", "parameters"), cell("print('fine')"), cell("x = n\n1 / (x - 1)")]
    write_notebook(project / "notebooks/09_fails.ipynb", cells)
    assert main(["run", "--notebooks", "09", "--name", "mine", "--no-pdf"]) == 1
    out, err = capsys.readouterr()
    assert "09_fails failed in cell 3, In [3]: ZeroDivisionError: division by zero" in err
    assert "    | 1 / (x - 1)" in err and "\x1b" not in err
    copy = project / "results/mine/notebooks/09_fails.failed.ipynb"
    assert str(copy) in err
    assert "fine" in json.dumps(json.loads(copy.read_text())["cells"])
    assert "failed    09_fails" in out and "1 failed in" in out


def test_a_good_run_ends_with_the_path_of_its_report(project, capsys):
    write_notebook(project / "notebooks/09_fine.ipynb", [cell("# %% fine\nprint('fine')")])
    words = ["run", "--notebooks", "09", "--results", str(project / "out")]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == "" and "complete  09_fine" in out and "1/1 cells" in out
    assert out.rstrip().endswith(str(project / "out/quick/report.pdf"))
    assert main(words) == 0
    assert "1 kept in 0 s" in capsys.readouterr().out


def test_pdf_of_notebooks(project, capsys):
    path = write_notebook(project / "one.ipynb", [cell("# One", kind="markdown")])
    assert main(["pdf", str(path)]) == 0
    assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert main(["pdf", str(path), str(path), "--output", "x.pdf"]) == 2
    assert main(["pdf", str(path), "--output", str(project / "deep")]) == 0
    assert (project / "deep/one.pdf").is_file()
    capsys.readouterr()
    assert main(["pdf", "absent.ipynb"]) == 2
    assert "absent.ipynb" in told(capsys)


def test_data_commands(capsys, monkeypatch):
    listing = pd.DataFrame({"name": ["alpha", "beta"], "rows": [3, 5]})
    monkeypatch.setattr(sources, "list_datasets", lambda: listing)

    def fetch(name, *, progress=True, force=False):
        if name == "beta":
            raise sources.DataUnavailableError("beta cannot be had: no network")
        return {"a.bin": Path("a.bin")}

    monkeypatch.setattr(sources, "fetch", fetch)
    assert main(["data", "list"]) == 0
    assert "alpha" in capsys.readouterr().out
    assert main(["data", "fetch", "--all"]) == 2
    out, err = capsys.readouterr()
    assert "alpha: 1 files verified" in out and err == "attnknn: beta cannot be had: no network\n"
    assert main(["data", "fetch"]) == 2
    assert "names or --all" in told(capsys)
