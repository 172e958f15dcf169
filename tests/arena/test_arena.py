"""The arena: problems that never change, cells that are never lost, ranks and reports by hand."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import log_loss
from sklearn.neighbors import KNeighborsClassifier

from benchmarks.arena import cells as cells_module
from benchmarks.arena import knn, rivals, standings
from benchmarks.arena.__main__ import main, parse
from benchmarks.arena.cells import Cell, Settings, grid, path_of, read_all, run_cell, write_json
from benchmarks.arena.problems import (
    FLOOR,
    best_temperature,
    floored,
    make_problem,
    measures,
    tempered,
    with_wrong_labels,
)
from benchmarks.arena.report import write_report
from benchmarks.arena.run import compute, open_arena
from benchmarks.arena.sources import ar_member, read_keel
from benchmarks.arena.tables import LABEL, Table, facts_of, finished, load

ROOT = Path(__file__).parents[2]
DRAWN = {"zoo": 61, "glass": 83}  # drawn tables under names that the command line knows


def drawn_table(name: str, n_rows: int) -> Table:
    """Return a table of numbers, one missing, and categories; three classes of unequal size."""
    rng = np.random.default_rng(n_rows)
    labels = rng.choice(3, n_rows, p=[0.5, 0.3, 0.2])
    table = pd.DataFrame(rng.normal(size=(n_rows, 2)) + labels[:, None], columns=["a", "b"])
    table.loc[7, "a"] = np.nan
    table["kind"] = np.array(["x", "y", None], object)[(labels + (rng.random(n_rows) < 0.2)) % 3]
    return finished(name, table, np.array(["one", "two", "three"])[labels], "drawn")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a folder of prepared tables."""
    folder = tmp_path_factory.mktemp("data") / "arena"
    folder.mkdir()
    for name, n_rows in DRAWN.items():
        table = drawn_table(name, n_rows)
        table.features.assign(**{LABEL: table.labels}).to_parquet(folder / f"{name}.parquet")
        (folder / f"{name}.json").write_text(json.dumps(asdict(table.facts)))
    return folder


def settings_of(folder: Path, tables: Path, **others) -> Settings:
    return Settings(folder, tables, max_rows=None, max_test_rows=50, **others)


# ---- Tables and problems.


def test_a_table_keeps_categories_and_missing_values_and_loses_rare_classes(tables):
    table = load("glass", tables)
    assert table.facts == drawn_table("glass", 83).facts
    assert (table.facts.numbers, table.facts.categories) == (2, 1)
    assert table.features["a"].isna().sum() == 1 and table.features["kind"].isna().any()
    few = finished("t", pd.DataFrame({"a": range(20)}), [0] * 9 + [5] * 6 + [3] * 5, "")
    assert (few.facts.rows, few.facts.left_out, few.facts.classes) == (15, 5, ("0", "5"))
    assert few.labels.tolist() == [0] * 9 + [1] * 6


def test_a_keel_file_is_read_with_its_kinds_of_columns():
    text = "@relation r\n@attribute Size real [0,9]\n@attribute Hue {red, blue}\n"
    features, labels = read_keel(f"{text}@attribute Class {{p,n}}\n@data\n1.5, red, p\n?, <null>,n")
    assert labels.tolist() == ["p", "n"]
    assert features["Size"].dtype == np.float64 and features["Size"].isna().tolist() == [
        False,
        True,
    ]
    assert features["Hue"].isna().tolist() == [False, True] and features["Hue"][0] == "red"


def test_a_member_of_an_ar_archive_is_found_behind_an_odd_one():
    def member(name: str, content: bytes) -> bytes:
        head = f"{name:<16}{'':<32}{len(content):<10}".encode() + b"`\n"
        return head + content + b"\n" * (len(content) % 2)

    archive = b"!<arch>\n" + member("debian-binary", b"2.0") + member("data.tar.xz", b"wanted")
    assert ar_member(archive, "data.tar.xz") == b"wanted"


def test_a_problem_is_the_same_on_every_call_and_its_test_labels_are_right():
    table = drawn_table("glass", 83)
    right = table.features.assign(label=table.labels)
    for noise in ("clean", "sym40", "class30"):
        one, two = (make_problem(table, split=2, noise=noise, max_test_rows=20) for _ in range(2))
        pd.testing.assert_frame_equal(one.features, two.features)
        np.testing.assert_array_equal(one.labels, two.labels)
        shown = one.test_features.assign(label=one.test_labels)
        assert len(shown.merge(right, on=["a", "b", "label"])) == len(shown) == 20
        train = one.features.assign(label=np.where(one.flipped, -1, one.labels))
        assert len(train.merge(right, on=["a", "b", "label"])) == len(train) - one.flipped.sum()
        assert not set(one.features["b"]) & set(one.test_features["b"])
        share = {"clean": 0, "sym40": 0.4, "class30": 0.3}[noise]
        assert one.flipped.sum() == round(share * len(one.labels))
    clean = make_problem(table, split=2, noise="clean", max_test_rows=20)
    assert clean.features["b"].tolist() == one.features["b"].tolist()  # noise moves no row
    # Pinned: cells of other days and machines were measured on these rows and labels.
    assert zlib.crc32(one.labels.astype(np.uint8).tobytes()) == 1591161010


def test_a_cap_of_rows_keeps_some_of_every_class():
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    table = finished("t", pd.DataFrame({"a": np.arange(1000.0)}), labels, "")
    problem = make_problem(table, split=0, noise="clean", max_rows=70, max_test_rows=9999)
    assert np.bincount(problem.labels).tolist() == [63, 6, 4]
    assert len(problem.test_labels) == 300


def test_wrong_labels_go_into_any_other_class_or_into_one():
    right = np.repeat(np.arange(5), 200)
    symmetric = with_wrong_labels(right, "symmetric", 0.4, 5, np.random.default_rng(0))
    wrong = symmetric != right
    assert wrong.sum() == 400
    assert len({(a, b) for a, b in zip(right[wrong], symmetric[wrong], strict=True)}) == 20
    ring = with_wrong_labels(right, "class", 0.3, 5, np.random.default_rng(0))
    wrong = ring != right
    pairs = dict(sorted({(a, b) for a, b in zip(right[wrong], ring[wrong], strict=True)}))
    assert wrong.sum() == 300
    assert sorted(pairs) == sorted(pairs.values()) == list(range(5))


def test_measures_by_hand():
    probs, labels = np.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7]]), np.array([0, 1, 1])
    found = measures(probs, labels)
    kept = (1 - FLOOR) * probs + FLOOR / 2
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["nll"] == pytest.approx(log_loss(labels, kept))
    assert found["brier"] == pytest.approx(((kept - np.eye(2)[labels]) ** 2).sum(axis=1).mean())
    # 0.8 twice with one hit: 0.6; 0.7 with its hit: 0.3; both floored towards a half
    assert found["ece"] == pytest.approx((2 * (kept[0, 0] - 0.5) + 1 - kept[2, 1]) / 3)
    np.testing.assert_allclose(floored(np.array([[0.0, 2.0]])), [[FLOOR / 2, 1 - FLOOR / 2]])


def test_probabilities_that_are_none_make_a_hole():
    with pytest.raises(ValueError, match="probs must be finite"):
        measures(np.array([[np.nan, 1.0]]), np.array([1]))


def test_a_temperature_undoes_what_was_sharpened():
    rng = np.random.default_rng(0)
    honest = rng.dirichlet(np.ones(3), 4000)
    labels = (honest.cumsum(axis=1) < rng.random((4000, 1))).sum(axis=1)
    sharp = tempered(honest, 0.5)
    assert best_temperature(sharp, labels) == pytest.approx(2, rel=0.1)


# ---- Rivals.


@pytest.mark.parametrize("power", knn.POWERS)
def test_the_grid_of_neighbours_is_that_of_scikit_learn(power):
    rng = np.random.default_rng(3)
    memory, queries = rng.normal(size=(53, 4)), rng.normal(size=(7, 4))
    queries[0] = memory[5]  # a copy votes alone by distance
    labels = rng.integers(0, 3, 53)
    ((_, ids, distance),) = knn.nearest(queries, memory, power, 50)
    found = knn.shares(ids, distance, labels, 3, (1, 3, 20, 50))
    for (k, weights), probs in found.items():
        model = KNeighborsClassifier(k, weights=weights, p=power, algorithm="brute")
        model.fit(memory, labels)
        # p = 1.5 and copies at p = 2 are counted in single precision or by a product
        np.testing.assert_allclose(probs[1:], model.predict_proba(queries)[1:], atol=1e-5)


def test_the_grid_is_that_of_tabarena():
    assert knn.KS[:5] == (1, 2, 3, 4, 5) and knn.KS[-3:] == (300, 400, 500) and len(knn.KS) == 22
    assert (knn.POWERS, knn.WEIGHTS) == ((1.0, 1.5, 2.0), ("uniform", "distance"))
    assert knn.SCALINGS == ("standard", "quantile")


@pytest.mark.parametrize("method", [name for name in rivals.RIVALS if name not in rivals.DEEP])
def test_a_rival_takes_any_table_and_never_sees_what_it_predicts(method, monkeypatch):
    if method in ("lightgbm", "catboost"):
        pytest.importorskip(method)
    monkeypatch.setattr(rivals, "MOST_ROUNDS", 20)
    monkeypatch.setattr(rivals, "TREES", 60)
    monkeypatch.setattr(rivals, "CS", (0.1, 1.0))
    table = drawn_table("glass", 83)
    problem = make_problem(table, split=0, noise="sym20", max_test_rows=50)
    labels = np.where(problem.labels == 2, 1, problem.labels)  # a class without training rows
    labels[:3] = 0
    rows = rivals.Rows(problem.features, labels, 4, 0)
    fitted = rivals.fit_rival(method, rows)
    for probs in (
        fitted.predict(problem.test_features),
        rivals.held_out_probs(method, fitted, rows),
    ):
        assert probs.shape[1] == 4
        np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-5)
        assert (probs >= 0).all() and probs[:, 2:].max() == 0


def test_held_out_probabilities_do_not_know_their_own_row():
    """Each row is alone in its place: a model that has seen it is certain, others err."""
    labels = np.tile([0, 1], 30)
    rows = rivals.Rows(pd.DataFrame({"a": np.arange(60.0)}), labels, 2, 0)

    def nearest(seen):
        model = KNeighborsClassifier(1).fit(seen.features, seen.labels)
        return lambda features: model.predict_proba(features)

    probs = rivals.out_of_fold(nearest, rows)
    assert (probs.argmax(axis=1) == labels).mean() < 0.6


# ---- Cells: whole or absent, measured once, a failure is a hole.


def test_a_failing_rival_and_a_slow_one_are_holes_and_the_rest_goes_on(
    tables, tmp_path, monkeypatch
):
    def fail(rows):
        raise RuntimeError("no such thing")

    monkeypatch.setitem(rivals.FITS, "histgb", fail)
    monkeypatch.setitem(rivals.FITS, "lightgbm", lambda rows: time.sleep(5))
    compute([Cell("zoo", "sym20", 0, "lightgbm")], settings_of(tmp_path, tables, limit=0.3))
    cells = [Cell("zoo", "sym20", 0, method) for method in ("lightgbm", "histgb", "knn")]
    compute(cells, settings_of(tmp_path, tables))
    found = {cell["method"]: cell for cell in read_all(tmp_path)}
    assert found["histgb"]["error"].startswith("RuntimeError: no such thing (test_arena.py:")
    assert "longer than 0.3 seconds" in found["lightgbm"]["error"]
    assert set(found["knn"]["metrics"]) == {"accuracy", "nll", "brier", "ece"}
    assert 0 <= found["knn"]["issue_auroc"] <= 1
    assert set(found["knn"]["cpu"]) == {"fit", "predict", "temperature", "issues"}


def test_cells_come_split_by_split_and_small_tables_first(tables):
    cells = grid(facts_of(["glass", "zoo"], tables), ["clean", "sym40"], 2, ["knn", "nca"])
    assert len(cells) == len(set(cells)) == 16
    assert [cell.split for cell in cells] == [0] * 8 + [1] * 8
    assert [cell.table for cell in cells[:8]] == ["zoo"] * 4 + ["glass"] * 4


def test_an_arena_of_other_rows_is_refused(tables, tmp_path):
    open_arena(settings_of(tmp_path, tables))
    open_arena(settings_of(tmp_path, tables))
    with pytest.raises(ValueError, match="max_rows must be that of the cells"):
        open_arena(Settings(tmp_path, tables, max_rows=9, max_test_rows=50))


def test_a_new_version_is_asked_what_an_old_one_has_answered(tables, tmp_path, monkeypatch):
    """Its rows are those of the cells there are; others are left alone."""
    monkeypatch.setenv("ATTNKNN_DATA", str(tables.parent))
    open_arena(Settings(tmp_path, tables, max_rows=40, max_test_rows=50))
    for split, label in ((1, "before"), (0, "other")):
        write_json(
            path_of(tmp_path, Cell("zoo", "sym20", split, f"attnknn@{label}")),
            made_up("zoo", "sym20", split, "attnknn", 0.5, label=label),
        )
    asked: list[tuple] = []
    monkeypatch.setattr("benchmarks.arena.run.compute", lambda *given, **_: asked.append(given))
    command = ["run", "--tables", "zoo,glass", "--methods", "attnknn", "--label", "now"]
    main([*command, "--like", "before", "--out", str(tmp_path)])
    ((cells, settings),) = asked
    assert cells == [Cell("zoo", "sym20", 1, "attnknn@now")]
    assert (settings.max_rows, settings.max_test_rows) == (40, 50)


def test_wrong_options_are_refused_by_name(capsys):
    for options, words in ({"--tables": "iris"}, "tables must be"), ({"--jobs": "0"}, "jobs must"):
        with pytest.raises(SystemExit):
            parse(["run", *(word for pair in options.items() for word in pair)])
        assert words in capsys.readouterr().err


def test_a_killed_run_goes_on_without_losing_or_repeating_a_cell(tables, tmp_path):
    """Killed with signal 9 in its middle; the second run takes only what is missing."""
    out = tmp_path / "arena"
    command = [sys.executable, "-m", "benchmarks.arena", "run", "--tables", "zoo,glass"]
    command += ["--noise", "clean", "--splits", "6", "--methods", "knn,logistic"]
    environment = os.environ | {"ATTNKNN_DATA": str(tables.parent)}
    run = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, env=environment)
    stored = lambda: sorted(out.glob("cells/*/*.json"))  # noqa: E731
    end = time.time() + 400  # of a busy machine
    while len(stored()) < 3 and time.time() < end:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = {path: path.stat().st_mtime_ns for path in stored()}
    assert 3 <= len(before) < 24
    assert all(json.loads(path.read_text())["metrics"] for path in before)
    cells = grid(facts_of(DRAWN, tables), ["clean"], 6, ["knn", "logistic"])
    settings = Settings(out, tables, max_rows=None, max_test_rows=4000)
    open_arena(settings)
    measured = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells_module, "measure", spy(cells_module.measure, measured))
        compute(cells, settings)
    assert len(stored()) == len(cells) == 24
    assert len(measured) == 24 - len(before)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def spy(function, calls: list):
    def called(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return called


@pytest.mark.slow
def test_processes_and_one_process_give_the_same_digits(tables, tmp_path):
    cells = grid(facts_of(DRAWN, tables), ["sym20"], 2, ["knn", "forest"])
    for name, n_jobs in (("one", 1), ("two", 2)):
        compute(cells, settings_of(tmp_path / name, tables), n_jobs=n_jobs)
    one, two = (standings.frame_of(read_all(tmp_path / name)) for name in ("one", "two"))
    kept = [name for name in one if not name.endswith(("_seconds", "_cpu"))]
    pd.testing.assert_frame_equal(one[kept], two[kept])


@pytest.mark.slow
def test_a_lost_worker_costs_a_cluster_nothing(tables, tmp_path):
    from dask.distributed import LocalCluster

    cells = grid(facts_of(DRAWN, tables), ["clean", "sym20"], 9, ["knn", "logistic"])
    settings = settings_of(tmp_path, tables)
    with LocalCluster(2, threads_per_worker=1, dashboard_address=":0") as cluster:
        lost = next(iter(cluster.workers.values())).pid

        def kill_once(cell, stored):
            if len(list(tmp_path.glob("cells/*/*.json"))) < 30 and not killed:
                os.kill(lost, signal.SIGKILL)
                killed.append(lost)

        killed: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("benchmarks.arena.run.Clock.done", lambda *each: kill_once(*each[1:]))
            compute(cells, settings, scheduler=cluster.scheduler_address)
    found = read_all(tmp_path)
    assert killed and len(found) == len(cells) == 72
    assert not [cell for cell in found if "error" in cell]


@pytest.mark.slow
def test_ours_is_measured_with_label_issues_sets_and_its_commit(tables, tmp_path):
    settings = settings_of(tmp_path, tables, package=ROOT)
    found = run_cell(Cell("zoo", "sym20", 0, "attnknn@now"), settings)
    assert found["label"] == "now" and found["method"] == "attnknn"
    assert 0 <= found["label_noise"] <= 1 and 0 <= found["issue_ap"] <= 1
    assert 0 <= found["set_coverage"] <= 1 <= found["set_size"] <= 3
    assert found["code"] != "unknown"
    other = settings_of(tmp_path, tables, package=tmp_path)
    with pytest.raises(ValueError, match="package must be imported from there alone"):
        run_cell(Cell("zoo", "sym20", 1, "attnknn@now"), other)


# ---- Ranks, wins, ratings.


def test_mean_ranks_by_hand_and_as_scipy():
    means = pd.DataFrame({"a": [0.1, 0.2, 0.3], "b": [0.2, 0.2, 0.1], "c": [0.9, 0.8, 0.7]})
    found = standings.mean_ranks(means, "nll")
    assert found["rank"].tolist() == pytest.approx([4.5 / 3, 4.5 / 3, 3])
    assert found["rank"].to_list() == stats.rankdata(means, axis=1).mean(axis=0).tolist()
    half = stats.t.ppf(0.975, 2) * np.std([1, 1.5, 2], ddof=1) / np.sqrt(3)
    assert found.loc["a", "high"] == pytest.approx(1.5 + half)
    assert standings.mean_ranks(means, "accuracy")["rank"].tolist()[2] == 1


@pytest.mark.parametrize(
    ("n_methods", "n_tables", "expected"),
    [(4, 14, 1.25), (5, 30, 1.113), (2, 10, 0.62)],  # q = 2.569, 2.728, 1.960 (Demšar 2006)
)
def test_critical_differences_are_those_of_the_tables(n_methods, n_tables, expected):
    assert standings.critical_difference(n_methods, n_tables) == pytest.approx(expected, abs=0.005)


def test_wins_by_a_paired_test_over_splits():
    gaps = np.array([1.0, 1.2, 1.1])
    t = 1.1 / np.sqrt((1 / 3 + 3 / 7) * 0.01)
    assert standings.resampled_p(gaps) == pytest.approx(2 * stats.t.sf(t, 2))
    assert standings.resampled_p(gaps[:2]) == 1
    index = pd.MultiIndex.from_product([["t", "u", "v"], [0, 1, 2]], names=["table", "split"])
    ours = np.r_[gaps - 2, gaps, [-1.0, 0.1, 0.5]]
    values = pd.DataFrame({"ours": ours, "rival": 0.0}, index=index)
    counts = standings.paired_counts(values, "ours", "rival")
    assert counts == {"better": 2, "worse": 1, "wins": 1, "ties": 1, "losses": 1}


def test_ratings_tell_odds_of_ten_to_one():
    n = 110
    index = pd.Index(range(n), name="table")
    means = pd.DataFrame({"good": np.r_[np.zeros(100), np.ones(10)], "bad": 0.5}, index=index)
    found = standings.ratings(means, anchor="bad")
    assert found.loc["bad", "rating"] == 1000
    assert found.loc["good", "rating"] == pytest.approx(1400, abs=10)
    assert 1300 < found.loc["good", "low"] < 1400 < found.loc["good", "high"] < 1600


# ---- The report, on made-up cells.


def made_up(table, noise, split, method, nll, *, label=None, **others):
    kept = {"metrics": {"nll": nll, "brier": nll / 2, "ece": 0.1, "accuracy": 1 - nll}}
    if not label:
        kept["tempered"] = kept["metrics"] | {"nll": nll - 0.05}
    timed = {"seconds": {"fit": 4.0, "predict": 1.0}, "cpu": {"fit": 2.0, "predict": 0.5}}
    keys = {"table": table, "noise": noise, "split": split, "method": method, "label": label}
    facts = {"rows": 250, "classes": 3, "true_noise": 0.2, "data": "d", "version": 1}
    return keys | facts | kept | timed | others


def made_up_arena(folder: Path) -> None:
    """Ours .2 on zoo and .4 on glass, the forest .3 on both, the old version .1 and .4."""
    cells = []
    for split in range(3):
        for noise in ("clean", "sym20"):
            found = {"issue_auroc": 0.9, "issue_ap": 0.8} if noise == "sym20" else {}
            ours = found | {"label_noise": 0.1, "set_coverage": 0.95, "set_size": 2.0, "code": "c"}
            for table, (now, old) in {"zoo": (0.2, 0.1), "glass": (0.4, 0.4)}.items():
                at = (table, noise, split)
                tilt = 0.001 * split
                cells += [
                    made_up(*at, "attnknn", now + tilt, label="now", **ours),
                    made_up(*at, "attnknn", old, label="before", **ours),
                    made_up(*at, "forest", 0.3, **found),
                    made_up(*at, "knn", 0.9, **found),
                ]
    hole = made_up("zoo", "clean", 0, "catboost", 0.0) | {"error": "ValueError: broken"}
    cells.append({k: v for k, v in hole.items() if k not in ("metrics", "tempered")})
    for cell in cells:
        name = f"{cell['noise']}-{cell['split']}-{cell['method']}@{cell['label']}.json"
        path = folder / "cells" / cell["table"] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(cell))


def test_a_report_of_made_up_cells(tables, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKNN_DATA", str(tables.parent))
    made_up_arena(tmp_path / "arena")
    out = tmp_path / "report"
    main(["report", "--out", str(tmp_path / "arena"), "--to", str(out), "--labels", "before,now"])
    report = (out / "report.md").read_text()
    standing = pd.read_csv(out / "standings.csv").set_index(["noise", "method"])
    assert standing.loc[("clean", "attnknn@now"), "mean_nll"] == pytest.approx(0.301)
    assert standing.loc[("clean", "attnknn@now"), "rank_nll"] == pytest.approx(2.25 + 0.25)
    assert standing.loc[("clean", "forest"), "rank_nll"] == 2
    assert standing.loc[("clean", "forest"), "fit_cpu"] == 2
    duel = pd.read_csv(out / "duels.csv").set_index(["noise", "method"]).loc[("clean", "forest")]
    assert duel.tolist() == [1, 1, 1, 0, 1]
    assert "ValueError: broken" in report and "CatBoost, 0 of 6 problems" in report
    assert (
        "- Not measured: Attn-KNN, label_noise=0, Attn-KNN, no fit, kNN, tuned, NCA + kNN,"
        in report
    )
    assert "- zoo, clean labels: +0.101 NLL, +0.000 ECE, 250 rows, 3 splits." in report
    before = pd.read_csv(out / "before.csv")
    assert before["worse"].sum() == 2 and len(before) == 4
    assert pd.read_csv(out / "tempered.csv")["mean_nll"].min() == pytest.approx(0.25, abs=1e-3)
    figures = sorted(path.stem for path in out.glob("*.svg"))
    assert figures == ["gaps", "noise", "ranks", "speed"]
    again = write_report(out, tmp_path / "again", labels=["before", "now"])  # of what was saved
    assert again == report.split("\n\n")[1]
    alone = write_report(tmp_path / "arena", tmp_path / "alone", labels=["now"])
    assert "first of 3 with clean labels" in alone  # of forest, kNN and itself, a tie


def test_cells_of_other_data_are_refused(tmp_path):
    made_up_arena(tmp_path)
    path = next(tmp_path.glob("cells/zoo/*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "other"}))
    with pytest.raises(ValueError, match="cells must share their data, got table='zoo'"):
        standings.read_frame(tmp_path)
