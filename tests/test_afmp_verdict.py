"""The verdict of AFMP ablations: every sentence follows from the runs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from attnknn.afmp.graph import grid_scaffold
from attnknn.studies import afmp as afmp_gates
from attnknn.studies import afmp as afmp_published
from attnknn.studies import afmp as afmp_verdict
from attnknn.studies import afmp as study
from tests.test_afmp_train import made_up_ablation

SHARES = {"dense": (0.6, 0.6), "keep 0.3": (0.9, 0.5)}
PUBLISHED_PAIR = "published, in which one image of a batch exchanges messages, "


def with_hits(ablation: study.Ablation, hits: dict[str, int]) -> study.Ablation:
    """Return the ablation with the first so many of 24 test rows of each setting right."""
    labels, runs = ablation.labels, dict(ablation.runs)
    for name, n_hits in hits.items():
        wanted = np.where(np.arange(len(labels)) < n_hits, labels, (labels + 1) % 3)
        logits = {"test": 3.0 * np.eye(3)[wanted]}
        runs[name] = [replace(run, logits=logits) for run in runs[name]]
    return replace(ablation, runs=runs)


@pytest.mark.parametrize(
    ("dense", "published", "said"),
    [
        (24, 6, "is 75.00 points worse than dense. They also differ in"),
        (6, 24, "is 75.00 points better than dense. They also differ in"),
        (12, 12, "cannot be told from dense. They also differ in"),
    ],
)
def test_the_published_model_is_held_against_the_dense_one(dense, published, said):
    """Neither of them prunes; the reference does."""
    hits = {"dense": dense, study.PUBLISHED: published}
    text = afmp_verdict.verdict(with_hits(made_up_ablation(SHARES), hits))
    assert PUBLISHED_PAIR + said in text


def test_without_a_dense_model_nothing_is_said_of_it():
    assert PUBLISHED_PAIR not in afmp_verdict.verdict(made_up_ablation({"keep 0.3": (0.9, 0.5)}))


def test_the_top_down_pass_is_held_against_what_is_as_large():
    hits = {study.TOP_DOWN: 24, study.DEIT_LARGER: 6, study.WIDER: 12}
    ablation = with_hits(made_up_ablation(SHARES), hits)
    assert "top-down is better than DeiT, larger in accuracy (+0.7500" in (
        afmp_verdict.verdict(ablation)
    )
    assert "“one pass, wider” has 7. top-down is better than one pass, wider in accuracy (" in (
        afmp_verdict.verdict(ablation)
    )
    table = study.comparison_table(ablation)
    pairs = set(zip(table["setting"], table["against"], strict=True))
    assert {("published", "dense"), ("top-down", "DeiT, larger")} <= pairs
    assert {("dense", "keep 0.3"), ("top-down", "one pass, wider")} <= pairs


@pytest.mark.parametrize(
    ("share", "n_kept", "hits", "said"),
    [
        (0.001, 1, (24, 6), "A few edges are not none."),
        (0.0, 0, (24, 6), "Messages help on these data."),
        (0.0, 0, (6, 24), "Messages cost accuracy on these data."),
        (0.0, 0, (12, 12), "That messages help on these data is not shown."),
    ],
)
def test_all_edges_are_held_against_the_fewest(share, n_kept, hits, said):
    """Whether messages help at all is told by a model without any, alike but for that."""
    name = study.keep_name(share)
    ablation = made_up_ablation(SHARES | {name: (0.5, 0.5)})
    runs = ablation.runs[name]
    setting = replace(runs[0].setting, model=replace(runs[0].setting.model, keep_share=share))
    runs = ablation.runs | {name: [replace(run, setting=setting) for run in runs]}
    ablation = with_hits(
        replace(ablation, runs=runs), dict(zip(("dense", name), hits, strict=True))
    )
    n_edges = grid_scaffold(*ablation.splits.train.inputs.shape[2:], 2).n_edges
    (line,) = [x for x in afmp_verdict.verdict(ablation).split("\n") if "**Messages.**" in x]
    assert f"“{name}” keeps {n_kept} of the {n_edges} edges of an image. dense " in line
    assert line.endswith(said)


def test_the_rivals_of_the_reference():
    others = ["top-down", "published", "published, top-down", study.WIDER, "DeiT", "DeiT, larger"]
    assert made_up_ablation({}).rivals == ["keep 0.3", *others]


def test_without_a_sparser_model_nothing_is_said_of_messages():
    assert "**Messages.**" not in afmp_verdict.verdict(made_up_ablation(SHARES))


def test_the_dense_model_is_compared_whatever_share_is_best():
    text = afmp_verdict.verdict(made_up_ablation(SHARES))
    assert "best on validation rows: keep 0.3." in text
    assert any(line.startswith(("- dense and keep 0.3", "- dense is")) for line in text.split("\n"))


def history(peaks: list[int], rates: list[float], *, epochs: int = 4) -> pd.DataFrame:
    """Return runs that are best in given epochs and end with given rates."""
    return pd.concat(
        pd.DataFrame({"setting": "a", "seed": seed, "epoch": np.arange(1, epochs + 1)}).assign(
            val_accuracy=lambda run, peak=peak: -(run["epoch"] - peak).abs(),
            lr=lambda run, rate=rate: np.where(run["epoch"] == epochs, rate, 1.0),
        )
        for seed, (peak, rate) in enumerate(zip(peaks, rates, strict=True))
    )


def test_runs_that_have_not_converged_say_so():
    text = afmp_verdict.training_words(history([2, 4, 4], [0.2, 1.0, 1.0]))
    assert text == (
        "3 runs of 4 epochs were best on validation rows in epochs 2 to 4 (median 4), 2 of them in "
        "the last; the learning rate was lowered in 1. They have not all converged: the "
        "differences are those of this budget."
    )
    assert "converged" not in afmp_verdict.training_words(history([2, 3], [0.2, 0.2]))
    assert "have not all" in afmp_verdict.training_words(history([2, 3], [1.0, 0.2]))


def test_fault_21_the_published_sweep_is_told_by_its_counts():
    sweep = pd.DataFrame(
        {"edges to keep": [409, 614], "edges": 33, "pruned": 0, "same logits": True}
    )
    said = "One and the same model at all shares: it keeps 409 edges or more out of 33"
    assert said in afmp_published.sweep_words(sweep)
    other = sweep.assign(pruned=[5, 0], **{"same logits": [True, False]})
    assert "prunes at 1 of 2 shares" in afmp_published.sweep_words(other)


def test_penalties_are_called_by_their_weights():
    """Without a name of its own, the reference's weight could not be read off the figure."""
    ablation = made_up_ablation({"keep 0.3": (0.5, 0.5), "λ 1e-05": (0.5, 0.5)})
    (run, *_) = ablation.runs["λ 1e-05"]
    model = replace(run.setting.model, sparse_weight=1e-5)
    runs = ablation.runs | {"λ 1e-05": [replace(run, setting=replace(run.setting, model=model))]}
    names = study.penalty_names(replace(ablation, runs=runs))
    assert list(names.items()) == [("keep 0.3", "λ 0.0001"), ("λ 1e-05", "λ 1e-05")]


def test_verdicts_are_held_against_the_seeds_alone():
    """Three seeds with gaps of 1, 2 and 3 rows in 24: t = 2 sqrt(3), p = 0.0742 by hand."""
    ablation = made_up_ablation(SHARES)
    runs = {name: [*own, replace(own[0], seed=2)] for name, own in ablation.runs.items()}
    ablation = with_hits(replace(ablation, runs=runs), dict.fromkeys(runs, 12))
    dense = [with_hits(ablation, {"dense": 12 + n}).runs["dense"][n - 1] for n in (1, 2, 3)]
    table = study.comparison_table(replace(ablation, runs=ablation.runs | {"dense": dense}))
    rows = table[table["metric"] == "accuracy"].set_index(["setting", "against"])
    assert rows.loc[("dense", "keep 0.3"), "p_seeds"] == pytest.approx(0.0742, abs=1e-4)
    assert np.isnan(rows.loc[("top-down", "keep 0.3"), "p_seeds"])  # no spread, no test
    tests = pd.DataFrame(
        {"verdict": ["better", "worse", "better", "no difference at this size"]}
        | {"p_seeds": [0.05, 0.2, np.nan, 0.01]}
    )
    assert "Of 3 differences" in afmp_verdict.seed_words(tests)
    assert "tests, 1 also hold" in afmp_verdict.seed_words(tests)


def test_fault_26_what_validation_adds_to_an_epoch_is_said():
    """2.0 s of training and 0.5 s of validation an epoch."""
    assert "adds 25 % of CPU time" in afmp_verdict.verdict(made_up_ablation(SHARES))


def test_saturated_gates_are_counted_by_hand(monkeypatch):
    values = pd.DataFrame({"layer": [1] * 4 + [2] * 4, "gate": [0.01, 0.99, 0.985, 0.5] * 2})
    values.loc[4:, "gate"] = [0.02, 0.98, 0.5, 0.001]  # the limits themselves are not beyond
    monkeypatch.setattr(afmp_gates, "gate_values", lambda *_: values)
    table = afmp_gates.saturation_table(made_up_ablation({}), ["keep 0.3"])
    assert table["nearly closed"].tolist() == [0.25, 0.25]
    assert table["nearly open"].tolist() == [0.5, 0.0]
    words = afmp_gates.saturation_words(table)
    assert "in 1 of 2 layers; from the first to the last: 75 %, 25 %." in words
