"""Main results: the tables have their schema, and what they compare is comparable."""

import json
from pathlib import Path

import numpy as np
import pytest

from attnknn.core.calibrate import Calibration
from attnknn.core.vote import Distance, Uniform, explain, predict
from attnknn.embed.rows import embed_views
from attnknn.evaluate.compare import row_intervals
from attnknn.evaluate.measure import accuracy
from attnknn.evaluate.tune import BASELINES, FittedMethod, candidates
from attnknn.figures import tables as report
from attnknn.figures.style import method_style
from attnknn.files import write_json
from attnknn.studies import ablation, common, main, published


def test_main_results_hold_every_method_for_every_seed(results):
    table = results.table
    assert set(table.columns) == {"dataset", "seed", "method", "metric", "value", "low", "high"}
    assert set(table["seed"]) == {0, 1}
    expected = {"uniform", "distance", "attention", "attention + TTA", "cnn + temperature"}
    assert expected | set(main.RIVALS) <= set(table["method"])
    assert table.groupby(["seed", "method"]).size().eq(len(main.MEASURED)).all()
    assert {"ace", "cwce", "aurc"} < set(table["metric"])


def test_the_search_is_as_deep_as_the_tuned_baselines_want(runs, results):
    settings = results.settings
    assert set(settings["method"]) == {f"{name} (tuned)" for name in BASELINES}
    assert set(settings["seed"]) == {0, 1}
    # 60 rows of memory: k = 50 is open to the baselines, though the attention weighs 11.
    deep = main.main_results(runs[:1], k_eval=5, k_ensemble=(3,), tta_views=1)
    shallow = main.main_results(
        runs[:1], k_eval=5, k_ensemble=(3,), tta_views=1, k_tuned=5, k_baseline=5
    )
    assert shallow.settings["k"].max() <= 5
    nll = "held-out NLL"
    assert (deep.settings[nll] <= shallow.settings[nll] + 1e-9).all()


def test_an_optimum_at_the_edge_is_named():
    tried = candidates("distance", 100)
    inside = main.method_edges(Distance(20, 0.1), tried, n_memory=300)
    assert inside == []
    outside = main.method_edges(Distance(100, 0.005), tried, n_memory=300)
    assert outside == ["k = 100 is the largest tried", "τ = 0.005 is the smallest tried"]
    # The whole memory, one neighbour: nothing lies beyond.
    assert main.method_edges(Uniform(100), candidates("uniform", 100), n_memory=100) == []
    assert main.method_edges(Uniform(1), candidates("uniform", 100), n_memory=300) == []
    fitted = FittedMethod(Uniform(5), Calibration(1e-6, 1.3), 0.5)
    assert main.calibration_edges(fitted) == ["floor = 1e-06 is at its limit"]
    rows = main.chosen_rows(
        {"uniform (tuned)": fitted}, {"uniform": candidates("uniform", 5)}, n_memory=300, seed=0
    )
    table = main.chosen_table(rows)
    assert table.loc[0, "edge"].startswith("k = 5 is the largest tried; floor")
    assert "uniform (tuned): k = 5" in main.edges_sentence(table)
    assert "inside" in main.edges_sentence(table.assign(edge=""))


def test_one_seed_has_intervals_over_rows(runs, results):
    assert results.table[["low", "high"]].isna().all(axis=None)
    one = main.main_results(runs[:1], k_eval=7, k_ensemble=(3,), tta_views=1)
    table = main.main_table(one).text
    assert table.drop(columns="n").map(lambda cell: "±" in cell).all(axis=None)
    limits = row_intervals(one.probs, one.labels, metrics=["nll"])
    known = limits.set_index("method").loc["attention"]
    half = (known["high"] - known["low"]) / 2
    assert table.loc["attention", "NLL"] == f"{known['mean']:.3f} ± {half:.3f}"
    saved = one.table.set_index(["method", "metric"]).loc[("attention", "nll")]
    assert saved[["low", "high"]].tolist() == known[["low", "high"]].tolist()


def test_what_confidences_are_worth(results):
    table = main.calibration_table(results).text
    assert list(table.columns) == ["ECE", "ECE (equal-mass)", "class-wise ECE", "AURC", "n"]
    curves = main.risk_curves(results)
    assert set(curves) == set(main.RISK) & set(results.probs)
    labels, probs = results.labels, results.probs["attention"][0]
    assert curves["attention"]["risk"].iloc[-1] == pytest.approx(1 - accuracy(probs, labels))


def test_fault_6_the_name_says_what_the_distance_vote_is(results):
    table = main.main_table(results)
    for frame in table:
        assert "distance (squared, τ = 1)" in frame.index and "distance" not in frame.index
        assert "distance (tuned)" in frame.index
    assert "distance" in set(results.table["method"])  # the key in saved tables
    styles = [method_style(name) for name in ("distance", "distance (tuned)")]
    assert styles[0].label == "distance (squared, τ = 1)" and styles[1].label == "distance (tuned)"
    assert styles[0].colour == styles[1].colour


def test_every_method_gives_full_support(results):
    for name, seeds in results.probs.items():
        for probs in seeds:
            assert probs.min() > 0, name
            np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-9)


def test_the_table_has_one_row_a_method_and_counts_the_seeds(results):
    table = main.main_table(results).text
    assert len(table) == len(results.probs)
    assert set(table["n"]) == {"2"}


def test_the_verdict_names_every_measure_and_the_size(results):
    text = main.verdict(results)
    for word in ("**NLL**", "**ECE**", "24 test rows, 2 seed(s)", "distance (tuned)"):
        assert word in text


def test_the_worst_mistake_is_a_mistake(results):
    probs = results.probs["attention"][0]
    row = main.worst_mistake(results)
    wrong = probs.argmax(axis=1) != results.labels
    assert wrong[row] or not wrong.any()


def test_fault_10_views_are_embedded_once(runs, monkeypatch):
    first = embed_views(runs[0], n_views=3, progress=False)
    monkeypatch.setattr("attnknn.embed.rows.embed", None)  # a second embedding would fail
    again = embed_views(runs[0], n_views=3, progress=False)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[0], runs[0].rows("test"))
    assert first.shape == (3, 24, 8)
    assert not np.array_equal(first[1], first[2])


def test_per_class_shares_are_those_of_scikit_learn(results):
    from sklearn.metrics import precision_recall_fscore_support

    table = main.per_class(results, ["a", "b", "c"], ["attention"]).set_index("class")
    expected = np.mean(
        [
            precision_recall_fscore_support(
                results.labels, probs.argmax(axis=1), labels=[0, 1, 2], zero_division=0
            )[:3]
            for probs in results.probs["attention"]
        ],
        axis=0,
    )
    np.testing.assert_allclose(table["precision"], expected[0])
    np.testing.assert_allclose(table["recall"], expected[1])
    np.testing.assert_allclose(table["f1"], expected[2])
    shown = main.per_class_table(table.reset_index())
    assert list(shown.columns) == ["class", "attention"] and len(shown) == 3


@pytest.fixture
def drawn(monkeypatch):
    """What each picture of a prediction shows: the method, its table, and the words above it."""
    pictured, methods, explanation = [], [], common.plot.explanation

    def watched_explain(method, *arguments, **options):
        methods.append(method)
        return explain(method, *arguments, **options)

    def watched(table, **options):
        pictured.append((methods.pop(), table, options["query_note"]))
        return explanation(table, **options)

    monkeypatch.setattr(common, "explain", watched_explain)
    monkeypatch.setattr(common.plot, "explanation", watched)
    return pictured


def run_cells(notebook, names, *calls):
    """Run, among the names given, the cells of a notebook that make one of the calls."""
    text = (Path(__file__).parents[2] / f"notebooks/{notebook}.ipynb").read_text()
    sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    chosen_cells = [each for each in sources if any(f"{call}(" in each for call in calls)]
    assert len(chosen_cells) == len(calls)
    for each in chosen_cells:
        exec(each, names)


def test_notebook_02_draws_the_prediction_of_its_table_from_one_search(
    runs, searches, drawn, tmp_path
):
    """With a k other than the run's own: the attention of the table is a refitted one."""
    names = {"runs": runs[:1], "folder": tmp_path, "report": report, "common": common}
    names |= {"main": main, "ablation": ablation}
    names |= {"k_eval": 11, "k_baseline": 5, "k_tuned": 20, "k_ensemble": [3], "tta_views": 1}
    names |= {"tta_kind": "v5", "ablation_epochs": 1, "ablation_repeats": 1}
    calls = ["main.main_results", "common.neighbours_figure", "ablation.ablate"]
    run_cells("02_main_results", names, *calls)
    assert searches == [20, 20]  # held-out and test queries, once each
    results, query = names["results"], names["query"]
    probs = results.probs["attention"][0][query]
    ((method, table, note),) = drawn
    assert note.endswith(f"{runs[0].class_names[probs.argmax()]} {100 * probs.max():.0f} %")
    assert method.module is not runs[0].attention and len(table) == 11
    here = common.search_run(runs[0], 11).test
    np.testing.assert_allclose(predict(method, here)[query], probs, rtol=1e-9)


def finished_folder(folder, table, *, status="complete"):
    """Write what a run with main results leaves behind."""
    (folder / "02_main_results").mkdir(parents=True)
    table.to_csv(folder / "02_main_results" / "measures.csv", index=False)
    entry = {"status": status, "finished": "2026-03-04T05:06:07+00:00", "commit": "0123456789ab"}
    write_json(folder / "report.json", {"notebooks": {"02_main_results": entry}})


def test_data_sets_side_by_side(results, tmp_path):
    for name in ("quick", "two", "one"):
        finished_folder(tmp_path / name, results.table)
    finished_folder(tmp_path / "broken", results.table, status="failed")
    own = tmp_path / "two"
    found = main.finished_runs(own, ["one", "two", "broken", "absent"])
    assert [path.name for path in found] == ["one", "two"]  # as named; nothing else that lies there
    assert [path.name for path in main.finished_runs(own, ["one"])] == ["two", "one"]
    assert main.finished_runs(own, []) == [own]
    measures = main.read_measures(found, own)
    made = measures.groupby("run")["made"].first()
    assert made.to_dict() == {"one": "2026-03-04 0123456", "two": "this run"}
    table = main.datasets_table(measures.assign(low=0.1, high=0.3))
    assert (table["low"] == 0.1).all() and (table["high"] == 0.3).all()
    table = main.datasets_table(measures)
    assert table[["low", "high"]].isna().all(axis=None)  # saved before there were any
    assert set(table["run"]) == {"one", "two"} and "attention" in set(table["method"])


def test_published_figures_stay_apart(results):
    table = published.beside_published(results.table, ours="ours", experiments=["exp5"])
    own = table[table["source"] == "ours"].set_index("method")
    mean = results.table.query("method == 'attention' and metric == 'nll'")["value"].mean()
    assert own.loc["attention", "nll"] == pytest.approx(mean)
    theirs = table[table["source"] == "published exp5"].set_index("method")
    assert theirs.loc["attention", "nll"] == 2.054
    assert set(table["source"]) == {"ours", "published exp5"}
