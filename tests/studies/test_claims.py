"""Claims: every claim is listed with what it rests on, missing studies are named, and summed up."""

import pandas as pd
import pytest

from attnknn.studies import claims
from attnknn.studies import claims as judging
from attnknn.studies.claims import CONFIRMED, NOT_DECIDED, NOT_MEASURED, PARTLY, REFUTED
from scripts import readme as showcase


def save_comparison(folder):
    """Save main results in which the attention beats two rivals in ECE."""
    rows = [
        {"method": name, "metric": "ece", "difference": 0.01, "low": 0.0, "high": 0.02,
         "verdict": "worse", "n_rows": 10, "n_seeds": 1}
        for name in ("uniform", "distance")
    ]  # fmt: skip
    (folder / "02_main_results").mkdir()
    pd.DataFrame(rows).to_csv(folder / "02_main_results" / "comparison.csv", index=False)


def test_a_missing_study_is_said_to_be_missing(tmp_path):
    table = claims.judge_claims(tmp_path)
    assert len(table) == len(claims.CLAIMS) and table["claim"].is_unique
    assert set(table["verdict"]) == {NOT_MEASURED}
    assert set(table["rests on"]) == {judging.NOTHING}
    assert "needs 03_k_sweep/measures.csv" in set(table["evidence"])


def test_a_missing_row_is_named(tmp_path):
    save_comparison(tmp_path)
    evidence = claims.judge_claims(tmp_path).set_index("claim")["evidence"]
    words = evidence["The gap of 5 to 9 points to the CNN is fundamental"]
    assert words == "needs method cnn, metric accuracy in 02_main_results/comparison.csv"


def test_the_file_names_the_run_every_claim_and_every_basis(tmp_path):
    save_comparison(tmp_path)
    text = claims.write_claims(tmp_path).read_text()
    assert f"`{tmp_path.name}`" in text
    for claim in claims.CLAIMS:
        assert claim.said in text.replace("\\", "")
    assert "| Attention improves calibration | confirmed | paired test | rival minus" in text
    assert all(f"- *{basis}*: " in text for basis in claims.BASES)
    last = text.strip().splitlines()[-1]
    assert last.startswith("**Summary.**") and "1 confirmed, 7 not measured in this run" in last


def test_claims_are_judged_anew_by_a_command(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    save_comparison(run)
    claims.main([str(run)])
    written = (run / "claims.md").read_text()
    assert "| Attention improves calibration | confirmed |" in written
    with pytest.raises(SystemExit):
        claims.main([str(run), str(tmp_path / "absent")])
    assert "must hold the tables of studies" in capsys.readouterr().err


def test_saved_comparisons_are_judged_by_families(tmp_path):
    # Saved with a correction over 20 methods, of which 2 are votes of one view.
    save_comparison(tmp_path)
    path = tmp_path / "02_main_results" / "comparison.csv"
    old = {"p_value": 0.02, "p_holm": 0.4, "level": 0.95, "verdict": "no difference at this size"}
    pd.read_csv(path).assign(**old).to_csv(path, index=False)
    table = claims.judge_claims(tmp_path).set_index("claim")
    assert table.loc["Attention improves calibration", "verdict"] == CONFIRMED


def judged(*verdicts):
    """Return a table in which the core claims have these verdicts, then none, and others hold."""
    core = iter(verdicts)
    rows = [
        (claim.said, next(core, NOT_MEASURED) if claim.is_core else CONFIRMED)
        for claim in claims.CLAIMS
    ]
    return pd.DataFrame(rows, columns=["claim", "verdict"])


@pytest.mark.parametrize(
    ("verdicts", "ours", "narrative", "experiment_7"),
    [
        ((CONFIRMED,) * 5 + (REFUTED,), "partially validated", CONFIRMED, REFUTED),
        ((PARTLY,) * 6 + (NOT_DECIDED,), "partially validated", CONFIRMED, REFUTED),
        ((REFUTED,) * 6 + (NOT_DECIDED,), "not supported", REFUTED, CONFIRMED),
        ((CONFIRMED,) * 7 + (NOT_DECIDED,), "validated", REFUTED, REFUTED),
    ],
)
def test_the_summary_follows_from_the_verdicts(verdicts, ours, narrative, experiment_7):
    line = claims.summary(judged(*verdicts))
    assert f"the hypothesis is {ours}:" in line
    assert f'"partially validated" (the narrative) is {narrative}' in line
    assert f'"not supported" (experiment 7) is {experiment_7}' in line


@pytest.mark.parametrize(
    "verdicts",
    [(CONFIRMED,), (CONFIRMED, REFUTED), (PARTLY,) * 5, (REFUTED,) * 5 + (NOT_DECIDED,) * 3],
)
def test_a_part_of_the_claims_does_not_judge_the_whole(verdicts):
    line = claims.summary(judged(*verdicts))
    decided = sum(verdict != NOT_DECIDED for verdict in verdicts)
    assert "Too few are measured and decided to judge the hypothesis" in line
    assert f"({decided}, at least 6 are needed)" in line
    assert "the hypothesis is" not in line and '"' not in line


def test_a_summary_of_nothing_says_so():
    line = claims.summary(judged(NOT_DECIDED, NOT_DECIDED))
    assert "2 not decided at this size, 6 not measured" in line and "Nothing is decided" in line


def test_the_readme_counts_every_verdict(tmp_path):
    assert set(showcase.VERDICTS) == {CONFIRMED, PARTLY, REFUTED, NOT_DECIDED}
    path = tmp_path / "claims.md"
    rows = [f"| a | {verdict} | means | b | 02 |" for verdict in (*showcase.VERDICTS, NOT_MEASURED)]
    path.write_text("\n".join(["| claim | verdict |", *rows]))
    line = showcase._verdict_counts(path)
    assert all(f"1 {verdict}" in line for verdict in showcase.VERDICTS)
    assert NOT_MEASURED not in line
