"""The quickstart notebook on a user's own files: its cells are run as they stand."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.datasets import load_iris

from attnknn.core import refine
from attnknn.studies.quickstart import Problem, answer_words, load_problem

NOTEBOOK = Path(__file__).parents[2] / "notebooks/00_quickstart.ipynb"


def run_quickstart(folder: Path, **values) -> dict:
    """Run the notebook's code with other parameters; return the names it leaves behind."""
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    names: dict = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
        if "parameters" in cell["metadata"].get("tags", []):
            assert values.keys() <= names.keys(), "no such parameter"
            names |= values | {"noise": 0.0, "save_to": str(folder)}
    return names


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few epochs, and figures that nobody looks at."""
    from matplotlib import pyplot

    monkeypatch.setitem(refine.REFINE, "auto", (0, 2))
    yield
    pyplot.close("all")


def flower_table() -> pd.DataFrame:
    rows, labels = load_iris(return_X_y=True)
    table = pd.DataFrame(rows[::2], columns=list("abcd"))
    return table.assign(colour=np.where(rows[::2, 3] > 1, "red", "blue"), kind=labels[::2])


def as_csv(folder: Path) -> dict:
    table = flower_table()
    table.loc[[3, 40], "a"] = np.nan
    table.to_csv(folder / "own.csv", index=False)
    return {"data": str(folder / "own.csv"), "label_column": "kind", "missing": "impute"}


def as_npz(folder: Path) -> dict:
    rows, labels = load_iris(return_X_y=True)
    np.savez(folder / "own.npz", embeddings=rows[::2], labels=labels[::2])
    return {"data": str(folder / "own.npz")}


def as_images(folder: Path) -> dict:
    rng = np.random.default_rng(0)
    for name, light in (("dark", 40), ("light", 180)):
        (folder / "own" / name).mkdir(parents=True)
        for place in range(20):
            pixels = rng.integers(light, light + 60, size=(4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "own" / name / f"{place}.png")
    return {"data": str(folder / "own")}


@pytest.mark.slow
@pytest.mark.parametrize("write", [as_csv, as_npz, as_images])
def test_the_quickstart_runs_on_own_files(tmp_path, write):
    names = run_quickstart(tmp_path / "run", **write(tmp_path))
    problem, probs = names["problem"], names["probs"]["attention"]
    assert (probs.argmax(axis=1) == problem.test_labels).mean() > 0.8
    assert names["same"].tolist() == names["answers"].tolist()
    known = {None, *problem.class_names}
    assert set(names["answers"]) <= known
    made = {path.stem for path in (tmp_path / "run/00_quickstart").iterdir()}
    assert made >= {"classifier", "coverage", "explanation", "label_issues", "measures"}


def test_missing_numbers_of_own_tables_are_refused_or_imputed(tmp_path):
    own = as_csv(tmp_path)
    with pytest.raises(ValueError, match="column 'a' must be finite numbers, got 2 NaN"):
        load_problem(own["data"], seed=0, label_column="kind")
    problem = load_problem(own["data"], seed=0, label_column="kind", missing="impute")
    assert pd.concat(problem.inputs)["a"].isna().sum() == 2
    assert all(np.isfinite(part).all() for part in problem.features)
    with pytest.raises(ValueError, match="missing must be one of 'error', 'impute'"):
        load_problem(own["data"], seed=0, missing="drop")


def test_what_is_imputed_is_the_median_of_the_training_rows(tmp_path):
    own = as_csv(tmp_path)
    problem = load_problem(own["data"], seed=0, label_column="kind", missing="impute")
    train, column = problem.inputs[0]["a"], problem.features[0][:, 0]
    median = train.median()
    filled = train.fillna(median)
    expected = (filled - filled.mean()) / filled.std(ddof=0)
    np.testing.assert_allclose(column, expected, rtol=1e-4, atol=1e-5)


def test_infinite_numbers_are_refused_even_where_missing_ones_may_be(tmp_path):
    flower_table().assign(b=np.inf).to_csv(tmp_path / "own.csv", index=False)
    with pytest.raises(ValueError, match="column 'b' must be finite numbers"):
        load_problem(str(tmp_path / "own.csv"), seed=0, label_column="kind", missing="impute")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (["a", "b", None, "b"], "answers 75 % of the test rows, 33.3 % wrongly"),
        ([None] * 4, "answers no test row"),
    ],
)
def test_what_was_answered_is_said(answers, words):
    rows, labels = np.zeros((4, 1)), np.array([0, 0, 1, 1])
    flipped = np.zeros(4, dtype=bool)
    problem = Problem((rows, rows), (rows, rows), labels, flipped, labels, ("a", "b"))
    said = answer_words(np.array(answers, dtype=object), problem, max_risk=0.01)
    assert said.startswith("Asked for at most 1 % errors, it ") and words in said
