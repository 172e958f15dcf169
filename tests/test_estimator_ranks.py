"""The comparison of the classifier with its peers: what is computed again, and what is said."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from attnknn.files import read_json
from attnknn.peers import ATTENTION, CIFAR_EMBEDDINGS

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are run from there

from benchmarks import estimator_cells, estimator_ranks
from benchmarks.estimator_cells import Cell, Settings, code_of, grid, path_of, seconds_left
from benchmarks.estimator_words import issue_sentences, notes, verdict

PLAIN, TUNED, LOGISTIC = "kNN, default", "kNN uniform, tuned", "logistic regression"


@pytest.fixture
def settings(tmp_path):
    return Settings(folder=tmp_path, cifar_run=None, max_rows=60, max_test_rows=30)


@pytest.fixture
def calls(monkeypatch):
    """Measure nothing, and count how often that is done."""
    made = []

    def measure(method, problem, *, seed):
        made.append((method, len(problem.labels), seed))
        return {"metrics": {}, "seconds": {"fit": 3.0, "predict": 1.0}}

    monkeypatch.setattr(estimator_cells, "measure_method", measure)
    return made


def changed(settings, **fields):
    return Settings(**(vars(settings) | fields))


def test_a_cell_is_computed_once(settings, calls):
    cells = grid(["iris"], [0, 1], [0.0], [PLAIN])
    estimator_cells.compute(cells, settings)
    estimator_cells.compute(cells, settings)
    assert calls == [(PLAIN, 60, 0), (PLAIN, 60, 1)]
    stored = read_json(path_of(settings.folder, cells[0]))
    assert (stored["rows"], stored["all_rows"], stored["max_rows"]) == (60, 120, 60)
    assert stored["code"] == code_of(cells[0])


def test_a_cell_of_other_code_is_computed_again(settings, calls, monkeypatch):
    cells = grid(["iris"], [0], [0.0], [PLAIN])
    estimator_cells.compute(cells, settings)
    monkeypatch.setattr(estimator_cells, "code_of", lambda cell: "other code")
    estimator_cells.compute(cells, settings)
    assert len(calls) == 2
    assert read_json(path_of(settings.folder, cells[0]))["code"] == "other code"


def test_a_cell_that_does_not_say_what_made_it_is_computed_again(settings, calls):
    cells = grid(["iris"], [0], [0.0], [PLAIN])
    estimator_cells.compute(cells, settings)
    path = path_of(settings.folder, cells[0])
    path.write_text('{"seconds": {"fit": 1.0}}')
    estimator_cells.compute(cells, settings)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        ({"max_rows": 60}, {"max_rows": 70}, True),
        ({"max_rows": 200}, {"max_rows": 60}, True),
        ({"max_rows": 60}, {"max_rows": 200}, True),
        ({"max_rows": 200}, {"max_rows": 300}, False),  # iris has 120 training rows: all of them
        ({"max_test_rows": 20}, {"max_test_rows": 25}, True),
        ({"max_test_rows": 40}, {"max_test_rows": 50}, False),
    ],
)
def test_a_cell_of_other_rows_is_computed_again(settings, calls, before, after, again):
    cells = grid(["iris"], [0], [0.0], [PLAIN])
    estimator_cells.compute(cells, changed(settings, **before))
    estimator_cells.compute(cells, changed(settings, **after))
    assert len(calls) == 1 + again


def test_embeddings_of_another_run_are_other_rows(tmp_path, settings):
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        run.mkdir()
        (run / "report.json").write_text(f'"{run.name}"')
    one, two = (changed(settings, cifar_run=run) for run in runs)
    cell = Cell(CIFAR_EMBEDDINGS, 0, 0.0, PLAIN)
    caps = {"max_rows": 60, "max_test_rows": 30, "all_rows": 90, "all_test_rows": 90}
    stored = caps | {"cifar_run": estimator_cells.data_of(cell, one)}
    assert estimator_cells.has_same_rows(stored, cell, one)
    assert not estimator_cells.has_same_rows(stored, cell, two)
    # Other data sets do not care which run it is.
    iris = Cell("iris", 0, 0.0, PLAIN)
    assert estimator_cells.has_same_rows(caps | {"cifar_run": None}, iris, two)


def test_peers_do_not_depend_on_the_classifier():
    cells = [Cell("iris", 0, 0.0, method) for method in (ATTENTION, PLAIN, LOGISTIC)]
    attention, plain, logistic = map(code_of, cells)
    assert attention != plain == logistic


def test_clean_labels_have_no_issues_to_find():
    cells = grid(["iris", "wine"], [0, 1], [0.0, 0.3], ["cleanlab, kNN", PLAIN])
    assert len(cells) == 12
    assert [cell.seed for cell in cells] == [0] * 6 + [1] * 6  # a stopped run has whole seeds
    assert all(cell.noise > 0 for cell in cells if cell.method == "cleanlab, kNN")


def test_time_left_by_hand():
    def known(dataset, method, seconds):
        return {Cell(dataset, 0, 0.0, method): {"seconds": {"fit": seconds, "predict": 1.0}}}

    done = known("iris", PLAIN, 3.0) | known("wine", PLAIN, 5.0) | known("iris", LOGISTIC, 7.0)
    same = [Cell("iris", seed, 0.0, PLAIN) for seed in (1, 2)]  # 4 s each
    other_data = [Cell("digits", 1, 0.0, PLAIN)]  # the mean of 4 s and 6 s
    other_method = [Cell("iris", 1, 0.0, ATTENTION)]  # the mean of 4 s, 6 s and 8 s
    assert seconds_left(same, done, 2) == 4
    assert seconds_left([*same, *other_data, *other_method], done, 1) == 8 + 5 + 6


def ranked(noise, own, peers):
    """Return tidy measures on three data sets of the classifier and of others."""
    values = {ATTENTION: own} | peers
    return pd.DataFrame(
        [
            {"dataset": d, "seed": 0, "noise": noise, "method": m, "metric": metric, "value": v}
            for d in ("one", "two", "three")
            for metric in ("nll", "ece")
            for m, v in values.items()
        ]
    )


def test_the_verdict_follows_the_ranks():
    clean = ranked(0.0, 1.0, {PLAIN: 2.0, LOGISTIC: 0.5})
    noisy = ranked(0.3, 1.0, {PLAIN: 2.0, LOGISTIC: 0.5})
    lines = verdict({0.0: clean, 0.3: noisy}, pd.DataFrame())
    assert len(lines) == 6
    assert lines[0].startswith(
        "Mean rank in NLL among the kNN family (2 methods, 3 data sets, clean labels): attention "
        "kNN (1.00) is first, before kNN, default (2.00): 1.00 apart, less than the critical"
    )
    assert lines[0].endswith("goal of the best mean rank reached.")
    assert "ECE among all methods (3 methods, 3 data sets, 30 % wrong labels)" in lines[5]
    assert "logistic regression (1.00) is ahead, before attention kNN (2.00)" in lines[5]
    assert lines[5].endswith("missed.")


def test_label_issues_against_each_peer():
    table = pd.DataFrame(
        {ATTENTION: [0.9, 0.7], "cleanlab, kNN": [0.8, 0.75], "cleanlab, gradient boosting": 0.95}
    )
    boosting, knn = issue_sentences(table)
    assert knn.startswith("AUROC of label_issues 0.800, of cleanlab, kNN 0.775: mean of 2 data")
    assert "at least as high on 1 of them" in knn and knn.endswith("reached.")
    assert "boosting 0.950" in boosting and boosting.endswith("missed.")


def test_drawn_rows_are_said():
    cells = [
        {"dataset": "iris", "rows": 120, "all_rows": 120, "test_rows": 30, "all_test_rows": 30},
        {"dataset": "adult", "rows": 50, "all_rows": 3200, "test_rows": 30, "all_test_rows": 30},
    ]
    seconds = pd.DataFrame({"iris": {"a": 1.0, "b": 0.1}, "adult": {"a": 7.0, "b": 0.2}})
    found = notes(cells, seconds)
    assert "test rows" not in found
    assert "adult 50 of 3,200" in found["rows"] and "iris" not in found["rows"]
    assert "a takes 7 s on adult" in found["rows"]
    assert "rows" not in notes(cells[:1], seconds)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Compare two methods on two small data sets; return the folder."""
    folder = tmp_path_factory.mktemp("ranks")
    words = ["--datasets", "iris;wine", "--methods", f"{PLAIN};{TUNED};cleanlab, kNN"]
    estimator_ranks.main([*words, "--seeds", "0", "--out", str(folder)])
    return folder


def test_two_methods_end_to_end(compared):
    found = read_json(compared / "report.json")
    for noise in ("noise 0", "noise 0.3"):
        family = found["metrics"][noise]["knn_family"]
        assert set(family["mean_ranks"]["nll"]) == {PLAIN, TUNED}
        assert sum(family["mean_ranks"]["nll"].values()) == 3
        assert family["datasets"] == 2
    assert set(found["metrics"]["label_issues_auroc"]) == {"cleanlab, kNN"}
    assert set(found["seconds"]) == {PLAIN, TUNED, "cleanlab, kNN"}
    # 2 data sets x (2 methods, clean and noisy, and cleanlab at noise)
    assert sum(part["cells"] for part in found["cells"]) == 10
    assert {name for part in found["cells"] for name in part["methods"]} == set(found["seconds"])
    assert len(pd.read_csv(compared / "cells.csv")) == 10
    lines = (compared / "verdict.md").read_text().splitlines()
    assert [line.removeprefix("- ") for line in lines] == found["verdict"]
    files = {path.name for path in compared.iterdir()}
    assert {"ranks_noise0.svg", "ranks_knn_noise30.md", "seconds.csv", "label_issues.md"} <= files


def test_a_report_alone_names_older_code(compared, monkeypatch, capsys):
    monkeypatch.setattr(estimator_cells, "measure_method", None)  # must not be called
    [path] = compared.glob("runs/wine/kNN-default-noise0-seed0.json")
    path.write_text(path.read_text().replace('"commit": "', '"commit": "older'))
    words = ["--datasets", "iris;wine", "--methods", f"{PLAIN};{TUNED}", "--seeds", "0"]
    estimator_ranks.main([*words, "--out", str(compared), "--only-report"])
    assert "1 from commit older" in capsys.readouterr().out


@pytest.mark.slow
def test_the_classifier_is_judged_end_to_end(tmp_path):
    words = ["--datasets", "iris;wine", "--methods", f"{ATTENTION};{PLAIN};cleanlab, kNN"]
    words += ["--seeds", "0", "--noise", "0.3", "--max-rows", "60", "--out", str(tmp_path)]
    estimator_ranks.main(words)
    found = read_json(tmp_path / "report.json")
    ranks = found["metrics"]["noise 0.3"]["all"]["mean_ranks"]
    said = [f"{ATTENTION} ({ranks[metric][ATTENTION]:.2f})" for metric in ("nll", "ece")]
    for line, words in zip(found["verdict"], [*said, *said], strict=False):
        assert words in line
    assert set(found["metrics"]["label_issues_auroc"]) == {ATTENTION, "cleanlab, kNN"}
    assert "AUROC of label_issues" in found["verdict"][4]
    assert len(found["verdict"]) == 6
    assert "60 of " in found["config"]["notes"]["rows"]


def test_an_unknown_method_is_refused(capsys):
    with pytest.raises(SystemExit):
        estimator_ranks.parse(["--methods", "kNN"])
    assert "methods must be some of attention kNN; kNN, default;" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_find_the_same(settings, tmp_path):
    cells = grid(["iris"], [0, 1], [0.3], [PLAIN, LOGISTIC])
    twin = changed(settings, folder=tmp_path / "twin")
    estimator_cells.compute(cells, settings, n_jobs=2)
    estimator_cells.compute(cells, twin, n_jobs=1)
    found = [estimator_cells.read_cells(cells, each) for each in (settings, twin)]
    assert len(found[0]) == 4
    for cell in cells:
        one, two = (each[cell]["metrics"] for each in found)
        assert one == pytest.approx(two, abs=1e-6)
