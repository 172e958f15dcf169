"""Benchmarks: ratios by hand, a check that fails when it must, a plan that follows its figures."""

import copy
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are run from there

from attnknn.core.bank import MemoryBank
from benchmarks import plan, stages
from benchmarks.__main__ import main
from benchmarks.bare_faiss import BareFaiss
from benchmarks.estimator import METHODS, compare_memory, memory_ratios
from benchmarks.growth import exponent
from benchmarks.plan import Machine, foretold, label_bytes, need, queries_to_pay, write_page
from benchmarks.search import row_of
from benchmarks.suite import FILE, groups, other_machine, regressions, run_suite, table
from benchmarks.timing import (
    QUICK,
    Missing,
    Ratio,
    clustered_rows,
    divided,
    interleaved,
    random_rows,
)


def test_actions_take_turns_and_the_first_round_does_not_count():
    calls = []
    actions = {"a": lambda: calls.append("a"), "b": lambda: (calls.append("b"), 7.0)[1]}
    times = interleaved(actions, 2)
    assert "".join(calls) == "ababab"
    assert times["b"] == [7.0, 7.0]  # an action may time itself
    assert len(times["a"]) == 2


def test_a_ratio_by_hand():
    ratio = Ratio("r", "a over b", divided([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]), "lower", target=3.5)
    row = ratio.as_row()
    assert row["values"] == [2.0, 3.0, 4.0]
    assert (row["median"], row["low"], row["high"]) == (3.0, 2.0, 4.0)


def test_drawn_rows_have_unit_length_and_clusters_are_shared():
    for rows in (random_rows(53, 7, 0), clustered_rows(53, 7, 0, n_clusters=3)):
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    rows = clustered_rows(200, 64, 0, n_clusters=3)
    queries = clustered_rows(50, 64, 1, n_clusters=3)
    assert (queries @ rows.T).max(axis=1).min() > (random_rows(50, 64, 2) @ rows.T).max()


HARDWARE = {"cpu": "a cpu", "cores": 2, "memory_gb": 16.0}


def result_of(**medians):
    """Return a stored result; names that begin with low_ are better when lower."""
    ratios = [
        {
            "name": name,
            "title": name,
            "median": value,
            "better": "lower" if name.startswith("low_") else "higher",
        }
        for name, value in medians.items()
    ]
    return {"ratios": ratios, "missing": [], "hardware": HARDWARE}


@pytest.mark.parametrize(
    ("name", "before", "after", "fails"),
    [
        ("speed", 4.0, 4.0, False),
        ("speed", 4.0, 3.21, False),
        ("speed", 4.0, 3.19, True),
        ("speed", 4.0, 40.0, False),
        ("low_cost", 2.0, 2.49, False),
        ("low_cost", 2.0, 2.51, True),
        ("low_cost", 2.0, 0.1, False),
    ],
)
def test_a_ratio_worse_by_a_quarter_fails(name, before, after, fails):
    found = regressions(result_of(**{name: after}), result_of(**{name: before}))
    assert bool(found) == fails


def test_a_ratio_that_is_no_longer_measured_fails():
    [line] = regressions(result_of(), result_of(speed=2.0))
    assert line == "speed: 2.000 in the baseline, not measured now"


def test_another_machine_is_named():
    here, there = result_of(), copy.deepcopy(result_of())
    assert other_machine(here, there) is None
    there["hardware"]["cpu"] = "another"
    assert "'another'" in other_machine(here, there)


def test_the_check_command_fails_on_a_worsened_ratio(tmp_path, capsys):
    (tmp_path / FILE).write_text(json.dumps(result_of(speed=3.0, low_cost=1.0)))
    baseline = tmp_path / "baseline.json"
    command = ["check", "--reuse", "--out", str(tmp_path), "--baseline", str(baseline)]
    assert main(command) == 2  # nothing to compare with
    baseline.write_text(json.dumps(result_of(speed=3.1, low_cost=0.9)))
    assert main(command) == 0
    baseline.write_text(json.dumps(result_of(speed=5.0, low_cost=0.9)))
    assert main(command) == 1
    assert "speed: 5.000 -> 3.000, 67 % worse" in capsys.readouterr().out


def test_exponents_of_known_laws():
    sizes = (100, 1000, 10_000)
    assert exponent(sizes, [3e-4 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert exponent(sizes, [7.0, 7.0, 7.0]) == pytest.approx(0)


FIGURES = {
    "n_rows": 1000,
    "dim": 25,
    "k": 5,
    "index_bytes": 50_000,
    "disk_bytes": 20_000,
    "build_seconds": 36.0,
    "queries_per_second": 400.0,
    "recall": 0.99,
    "settings": {"nprobe": 8},
    "threads": 2,
}


def test_label_bytes_are_what_a_bank_keeps():
    bank = MemoryBank(random_rows(53, 7, 0), np.arange(53) % 3, n_classes=3)
    view = bank.view
    kept = (view.labels, view.own_neighbours, view.histograms, view.trust, view.prototype_weights)
    assert sum(each.nbytes for each in kept) == 53 * label_bytes(3)
    assert label_bytes(3) == 8 + 20 * 8 + 3 * 4 + 4 + 4


# In the plans below 11 classes make 220 bytes a row: 8 + 20 * 8 + 11 * 4 + 4 + 4.


def test_a_plan_by_hand():
    # 100 bytes a row, 50 of the index, 220 of the labels; 0.7 * 1 GB holds all; twice the cores.
    machine = Machine(memory_gb=1.0, cores=4)
    each = need(700_000, "ivfpq", FIGURES, {"ivfpq": 0.5}, machine, n_classes=11)
    assert each.memory_gb == pytest.approx(0.7 * 0.37)
    assert each.machines == 1
    assert each.queries_per_second == pytest.approx(400 * 2 / 700**0.5)
    assert each.build_hours == pytest.approx(36 / 2 * 700**1.5 / 3600)
    assert each.trust_hours == pytest.approx(700_000 / each.queries_per_second / 3600)


def test_rows_past_one_machine_are_shared():
    machine = Machine(memory_gb=1.0, cores=2)
    each = need(10_000_000, "exact", FIGURES, {"exact": 1.0}, machine, n_classes=11)
    assert each.memory_gb == pytest.approx(3.7)
    assert each.machines == 6  # 3.7 / 0.7, rounded up
    assert each.queries_per_second == pytest.approx(400 * 1000 * 6 / 10_000_000)


def test_rows_on_disk_take_no_memory():
    machine = Machine(memory_gb=1.0, cores=2)
    each = need(10_000_000, "disk", FIGURES, {"ivfpq": 0.5}, machine, n_classes=11)
    assert each.memory_gb == pytest.approx(2.7)  # the index and the labels
    assert each.disk_gb == pytest.approx(1.2)  # 100 bytes a row and 20 in the lists


def test_a_search_is_never_foretold_to_get_faster_with_more_rows():
    each = need(10_000, "hnsw", FIGURES, {"hnsw": -0.2}, Machine(memory_gb=1.0, cores=2))
    assert each.queries_per_second == pytest.approx(400)


def test_when_a_build_pays_by_hand():
    # 2 ms a query instead of 10: 8 ms won by each.
    assert queries_to_pay(4.0, 500.0, 100.0) == pytest.approx(500)
    assert queries_to_pay(4.0, 100.0, 100.0) == math.inf


def test_a_speed_is_foretold_by_hand():
    assert foretold(FIGURES, 0.5, 4000) == pytest.approx(200)


def test_the_page_is_computed_from_the_figures(tmp_path):
    ratios = result_of(speed=3.25)
    ratios["ratios"][0] |= {"low": 3.0, "high": 4.0, "target": None, "note": ""}
    measured = {
        "n_rows": 1000,
        "threads": 2,
        "hardware": HARDWARE,
        "commit": "abc",
        "indexes": {"exact": FIGURES, "ivfpq": FIGURES},
    }
    fitted = {
        "rows": [10, 100],
        "exponents": {"exact": 1.0, "ivfpq": 0.4},
        "ranges": {"exact": [0.9, 1.1], "ivfpq": [0.3, 0.5]},
        "expected": {"exact": 1.0, "ivfpq": 0.5},
        "indexes": {
            "exact": [FIGURES | {"n_rows": 100, "queries_per_second": 2000.0}],
            "ivfpq": [FIGURES | {"n_rows": 100, "queries_per_second": 8000.0}],
        },
    }
    (tmp_path / "baseline.json").write_text(json.dumps(ratios))
    with pytest.raises(FileNotFoundError, match="run `python -m benchmarks million --save` first"):
        write_page(tmp_path, tmp_path / "page.md")
    (tmp_path / "million.json").write_text(json.dumps(measured))
    (tmp_path / "exponents.json").write_text(json.dumps(fitted))
    page = write_page(tmp_path, tmp_path / "page.md").read_text()
    assert "| speed | 3.25 | 3.00 to 4.00 | higher | - | - |" in page
    assert "| ivfpq | 0.40 | 0.30 to 0.50 | 0.5 |" in page
    assert "| 100 | 2,000 | 36.0 | 8,000 | 96,000 |" in page  # 36 s / 0.375 ms
    assert "| exact | 200 | 400 | 0.50 |" in page
    assert "| 100,000,000 | exact | 72.6 |" in page  # 100 + 50 + 576 bytes a row
    assert "576 with the 100 classes assumed below" in page
    for n_rows in plan.ROWS:
        assert page.count(f"| {n_rows:,} | ivfpq |") == 2  # for two kinds of machines


@pytest.mark.slow
def test_the_whole_suite_runs_at_small_sizes(tmp_path):
    result = run_suite(tmp_path, sizes=QUICK)
    named = {row["name"] for row in result["ratios"] + result["missing"]}
    assert {"exact_share_of_roof_k10", "attention_over_uniform", "afmp_over_deit"} <= named
    assert all(row["median"] > 0 for row in result["ratios"])
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "bench.svg"}
    assert regressions(result, result) == []
    assert "exact_share_of_roof_k10" in table(result)
    assert all(row["recall"] >= 0.99 for row in result["curves"]["ivfpq"] if row["chosen"])


def test_every_group_is_known_by_name():
    assert list(groups({})) == [
        "exact",
        "approximate",
        "rows",
        "estimator",
        "images",
        "stage1",
        "stage2",
        "notebooks",
        "afmp",
    ]


def test_a_row_that_cannot_be_measured_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "attnknn.afmp.model", None)
    [row] = stages.measure_afmp(QUICK)
    assert isinstance(row, Missing)
    assert "cannot be imported" in row.reason


def test_a_fast_search_that_misses_rows_is_no_row():
    tuned = {"recall": 0.97512, "reached": False}
    row = row_of("hnsw", (3.0, 4.0), tuned, {"ef": 1024})
    assert isinstance(row, Missing)
    assert row.reason == ("no setting keeps a recall of 0.99; the best, 0.9751, has {'ef': 1024}")
    row = row_of("hnsw", (3.0, 4.0), tuned | {"recall": 0.9932, "reached": True}, {"ef": 64})
    assert isinstance(row, Ratio) and row.median == 3.5
    assert row.note == "recall 0.9932 with {'ef': 64}, clustered rows"


def test_memory_ratios_by_hand():
    memory = {
        "attention": {
            "peak_mb": 900.0,
            "beyond_imports_mb": 280.0,
            "of_model_mb": 120.0,
            "of_prediction_mb": 30.0,
        },
        "brute": {
            "peak_mb": 500.0,
            "beyond_imports_mb": 200.0,
            "of_model_mb": 100.0,
            "of_prediction_mb": 60.0,
        },
    }
    found = memory_ratios(memory)
    assert {kind: row["ratio"] for kind, row in found.items()} == {
        "peak_mb": 1.8,
        "beyond_imports_mb": 1.4,
        "of_model_mb": 1.2,
        "of_prediction_mb": 0.5,
    }
    assert [row["reached"] for row in found.values()] == [False, True, True, True]
    memory["brute"]["of_prediction_mb"] = 0.2
    tiny = memory_ratios(memory)["of_prediction_mb"]
    assert tiny["ratio"] is None and tiny["reached"] is None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read on Linux")
def test_each_classifier_is_measured_with_its_own_libraries(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    found = compare_memory(5, 300, 40)
    assert {"attnknn", "faiss", "torch"}.isdisjoint(found["memory"]["brute"]["libraries"])
    assert {"attnknn", "torch"} <= set(found["memory"]["attention"]["libraries"])
    for name in METHODS:
        kept = found["memory"][name]
        # The kernel may take back a page or two of the libraries between the two readings.
        assert 0 < kept["imported_mb"] <= 1.02 * kept["peak_mb"]
        assert kept["beyond_imports_mb"] == kept["peak_mb"] - kept["imported_mb"]
    peak = found["memory_ratios"]["peak_mb"]
    assert peak["ratio"] > 1 and peak["reached"] == (peak["ratio"] <= 1.5)


def test_bare_faiss_answers_from_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "no such core")  # must not reach the other process
    bare = BareFaiss(53, 7, 5)
    assert [bare.search(k) > 0 for k in (3, 5)] == [True, True]
    assert bare.kernels
    bare.close()
    assert bare.process.returncode == 0
