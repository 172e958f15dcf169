"""Bars: seen by people, and not kept in executed notebooks."""

import sys
from types import SimpleNamespace

import nbformat
import papermill
import pytest

from attnknn import progress

CELLS = (
    "from attnknn.progress import progress_bar\nfor _ in progress_bar(range(3), 'steps'): pass",
    "import numpy as np\nfrom attnknn import AttnKNNClassifier\n"
    "from attnknn.progress import is_watched\n"
    "rows, labels = np.random.default_rng(0).random((60, 3)), np.arange(60) % 2\n"
    "_ = AttnKNNClassifier(verbose=int(is_watched())).fit(rows, labels)",
)


def test_an_executed_notebook_holds_no_progress_text(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(notebook, tmp_path / "in.ipynb")
    done = papermill.execute_notebook(
        tmp_path / "in.ipynb", tmp_path / "out.ipynb", kernel_name="python3", progress_bar=False
    )
    assert [cell.outputs for cell in done.cells] == [[]] * len(CELLS)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_bar_is_shown_where_a_notebook_is_open(monkeypatch, is_open):
    request = {"content": {"allow_stdin": is_open}}
    shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda channel: request))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert progress.is_watched() == is_open


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_is_shown_at_a_terminal_and_gone_when_done(monkeypatch, is_terminal):
    written = []
    stream = SimpleNamespace(
        isatty=lambda: is_terminal, write=written.append, flush=lambda: None, encoding="utf-8"
    )
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress.progress_bar(range(3), "steps")) == [0, 1, 2]
    assert any("steps" in text for text in written) == is_terminal
    assert list(progress.progress_bar(range(3), "steps", disable=True)) == [0, 1, 2]
    if is_terminal:
        assert written[-1].strip() == ""
