"""Claims: verdicts follow the saved tables, and a missing study is said to be missing."""

import pandas as pd
import pytest

from attnknn.studies import claims, judges

METHODS = ("uniform", "distance", "uniform (tuned)", "distance (tuned)")


def comparison(verdicts, metric="ece"):
    """Return a comparison table with one row a rival and the given verdicts."""
    rows = [
        {"method": name, "metric": metric, "difference": 0.01, "low": 0.0, "high": 0.02,
         "verdict": verdict, "n_rows": 10, "n_seeds": 1}
        for name, verdict in zip(METHODS, verdicts, strict=True)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def save(folder, notebook, name, table):
    path = folder / notebook / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    table.to_csv(path, index=False)


def verdict_of(folder, words):
    table = claims.judge_claims(folder)
    (row,) = table[table["claim"].str.startswith(words)].to_dict("records")
    return row["verdict"], row["evidence"]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["worse"] * 4, judges.CONFIRMED),
        (["worse", "worse", "worse", judges.NO_DIFFERENCE], judges.PARTLY),
        (["worse", "worse", "worse", "better"], judges.REFUTED),
        ([judges.NO_DIFFERENCE] * 4, judges.REFUTED),
    ],
)
def test_attention_must_beat_every_rival(tmp_path, verdicts, expected):
    save(tmp_path, "02_main_results", "comparison", comparison(verdicts))
    verdict, evidence = verdict_of(tmp_path, "Attention improves calibration")
    assert verdict == expected
    assert "distance (tuned) +0.0100 [+0.0000, +0.0200]" in evidence and "10 rows" in evidence


def test_a_missing_study_is_said_to_be_missing(tmp_path):
    table = claims.judge_claims(tmp_path)
    assert len(table) == len(claims.CLAIMS)
    assert set(table["verdict"]) == {judges.NOT_MEASURED}
    assert "needs 03_k_sweep/measures.csv" in set(table["evidence"])


@pytest.mark.parametrize(("at_30", "expected"), [(0.89, judges.CONFIRMED), (0.85, judges.REFUTED)])
def test_retention_under_noise(tmp_path, at_30, expected):
    rows = [
        {"kind": "symmetric", "rate": rate, "held_out": "clean", "method": "attention",
         "metric": "accuracy", "value": value}
        for rate, value in ((0.0, 0.9), (0.3, at_30), (0.4, 0.1))
    ]  # fmt: skip
    save(tmp_path, "04_label_noise", "measures", pd.DataFrame(rows))
    verdict, evidence = verdict_of(tmp_path, "Under 10, 20, 30 %")
    assert verdict == expected and "at 30 %" in evidence and "40 %" not in evidence


@pytest.mark.parametrize(("cnn", "expected"), [(0.96, judges.CONFIRMED), (0.91, judges.REFUTED)])
def test_the_gap_to_the_cnn(tmp_path, cnn, expected):
    rows = [
        {"method": name, "metric": "accuracy", "value": value, "seed": seed}
        for name, value in (("attention", 0.9), ("cnn", cnn))
        for seed in (0, 1)
    ]
    save(tmp_path, "02_main_results", "measures", pd.DataFrame(rows))
    assert verdict_of(tmp_path, "The gap of 5 to 9")[0] == expected


def test_the_file_names_the_run_and_every_claim(tmp_path):
    save(tmp_path, "02_main_results", "comparison", comparison(["worse"] * 4))
    text = claims.write_claims(tmp_path).read_text()
    assert f"`{tmp_path.name}`" in text
    for claim in claims.CLAIMS:
        assert claim.said in text.replace("\\", "")


@pytest.mark.parametrize(("extra", "expected"), [(0.3, judges.CONFIRMED), (0.6, judges.REFUTED)])
def test_overhead_is_judged_on_single_queries(tmp_path, extra, expected):
    rows = [
        {"batch": batch, "scope": "search and vote", "extra_ms": value}
        for batch, value in (("all at once", 0.01), ("one by one", extra))
    ]
    save(tmp_path, "06_efficiency", "overhead", pd.DataFrame(rows))
    verdict, evidence = verdict_of(tmp_path, "Attention adds less than")
    assert verdict == expected and f"{extra:.3f} ms to a single query" in evidence


@pytest.mark.parametrize(
    ("largest", "build_seconds", "expected"),
    [
        (100_000, 1000.0, judges.CONFIRMED),  # 10 000 rows: pays after a million queries
        (100_000, 1.0, judges.REFUTED),  # after a thousand
        (50_000, 1.0, judges.NOT_MEASURED),
    ],
)
def test_hnsw_is_needed_where_its_build_pays(tmp_path, largest, build_seconds, expected):
    measured = {"HNSW": (1.0, build_seconds), "Flat IP": (2.0, 0.0)}
    rows = [
        {"rows": n, "index": name, "metric": metric, "value": value}
        for n in (10_000, largest)
        for name, values in measured.items()
        for metric, value in zip(("search_ms", "build_seconds"), values, strict=True)
    ]
    save(tmp_path, "06_efficiency", "measures", pd.DataFrame(rows))
    assert verdict_of(tmp_path, "HNSW is needed")[0] == expected


@pytest.mark.parametrize(
    ("nll", "ece", "expected"),
    [(0.6, 0.5, judges.CONFIRMED), (0.9, 1.1, judges.PARTLY), (1.0, 1.1, judges.REFUTED)],
)
def test_views_must_help_about_as_much_as_published(tmp_path, nll, ece, expected):
    rows = [
        {"method": method, "metric": metric, "value": value}
        for method, values in (("attention", (1, 1, 0.9)), ("attention + TTA", (nll, ece, 0.9)))
        for metric, value in zip(("nll", "ece", "accuracy"), values, strict=True)
    ]
    save(tmp_path, "02_main_results", "measures", pd.DataFrame(rows))
    assert verdict_of(tmp_path, "TTA makes attention")[0] == expected
