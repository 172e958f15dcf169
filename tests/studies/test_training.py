"""Training: what the page of a training says and draws."""

import json
from pathlib import Path

import numpy as np
import pytest

from attnknn.core.vote import explain
from attnknn.figures import tables as report
from attnknn.studies import common as pictures
from attnknn.studies import training


def test_training_facts_and_verdict(runs):
    facts = training.run_facts(runs[0]).set_index("fact")["value"]
    assert "60 train, 30 val, 24 test" in facts["data"]
    assert training.class_facts(runs[0])["rows"].sum() == 60
    best = 100 * runs[0].history["val_accuracy"].max()
    assert f"{best:.1f} % on the validation rows" in training.verdict(runs[0])


@pytest.fixture
def drawn(monkeypatch):
    """What each picture of a prediction shows: the method, its table, and the words above it."""
    pictured, methods, explanation = [], [], pictures.plot.explanation

    def watched_explain(method, *arguments, **options):
        methods.append(method)
        return explain(method, *arguments, **options)

    def watched(table, **options):
        pictured.append((methods.pop(), table, options["query_note"]))
        return explanation(table, **options)

    monkeypatch.setattr(pictures, "explain", watched_explain)
    monkeypatch.setattr(pictures.plot, "explanation", watched)
    return pictured


def run_cells(notebook, names, *calls):
    """Run, among the names given, the cells of a notebook that make one of the calls."""
    text = (Path(__file__).parents[2] / f"notebooks/{notebook}.ipynb").read_text()
    sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    chosen_cells = [each for each in sources if any(f"{call}(" in each for call in calls)]
    assert len(chosen_cells) == len(calls)
    for each in chosen_cells:
        exec(each, names)


def test_notebook_01_explains_what_the_fitted_attention_weighs(runs, drawn, tmp_path):
    names = {"run": runs[0], "folder": tmp_path, "seed": 0, "report": report, "explain": explain}
    names |= {"training": training, "pictures": pictures}
    run_cells("01_training", names, "pictures.neighbours_figure", "explain")
    # Of 60 memory rows the attention of these runs was fitted to weigh 7.
    ((method, table, _),) = drawn
    assert method.module is runs[0].attention
    assert len(table) == len(names["table"]) == 7
    np.testing.assert_array_equal(table["weight"], names["table"]["weight"])
    assert table["weight"].sum() == pytest.approx(1)
