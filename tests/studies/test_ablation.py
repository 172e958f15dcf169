"""Ablations: every variant differs in one part, and the luck of a fit is no finding."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from attnknn.config import AttentionConfig
from attnknn.core.parts import SITUATION_COLUMNS, Evidence
from attnknn.studies import ablation
from attnknn.studies.common import search_run

WHOLE = AttentionConfig(label_bias="neighbour", prototype_shift=True)


@pytest.mark.parametrize("whole", [AttentionConfig(), WHOLE, replace(WHOLE, heads=1)])
def test_variants_differ_from_their_reference_in_one_part(whole):
    fitted = ablation.forms(whole)
    tried = ablation.variants(whole)
    assert len(fitted) == 2 + len(tried)
    for each in tried:
        before, after = (
            dataclasses.asdict(config) for config in (fitted[each.reference], each.config)
        )
        changed = [name for name in before if before[name] != after[name]]
        assert len(changed) == 1, f"{each.name} against {each.reference}: {changed}"
        if changed == ["situation"] and each.part != "all of these":
            assert len(set(before["situation"]) ^ set(after["situation"])) == 1


def test_every_part_is_tried_where_it_can_be_told():
    tried = ablation.variants(WHOLE)
    parts = {
        group: {each.part for each in tried if each.group == group}
        for group in ("off", "on", "extra")
    }
    assert parts["off"] >= {"similarity", "trust", "prototype gate", "denoised labels", "nearest"}
    assert parts["on"] >= {"full query-key", "distance bias", "prototype score", "label bias"}
    # The same for all neighbours: the softmax cancels them, and what is left is rounding.
    assert not parts["on"] & {"nearest", "noise", "label bias as published"}
    assert "label bias" not in parts["extra"]  # the whole has it already
    assert {"label bias", "label bias as published"} <= {
        each.part for each in ablation.variants(AttentionConfig()) if each.group == "extra"
    }
    references = {each.name: each.reference for each in tried}
    assert references["with self-attention"] == "with prototype score"
    assert references["only shifted prototypes"] == "only prototype gate"


def test_features_that_are_not_tried_alone_are_cancelled(runs):
    found = search_run(runs[0], 7).test
    evidence = Evidence(found, posterior=runs[0].attention.posterior)
    for name, column in SITUATION_COLUMNS.items():
        values = column(evidence).expand(found.scores.shape)
        constant = bool((values == values[:, :1]).all())
        assert constant == (name in ablation.CANCELLED), name


def test_an_ablation_of_searched_neighbours_is_the_one_that_searches(runs, searches):
    options = {"k_eval": 5, "epochs": 1, "repeats": 1, "extras": False, "progress": False}
    own = ablation.ablate(runs[:1], **options)
    found = [search_run(runs[0], 11)]
    searches.clear()
    given = ablation.ablate(runs[:1], found=found, **options)
    assert searches == []
    for name, tables in own.probs.items():
        np.testing.assert_array_equal(given.probs[name][0], tables[0])


def test_a_single_fit_of_one_training_is_not_judged(runs):
    study = ablation.ablate(runs[:1], k_eval=7, epochs=1, repeats=1, extras=False, progress=False)
    table = ablation.ablation_table(study, metrics=("nll",))
    assert set(table["helps"]) == {ablation.ONE_FIT}
    text = ablation.verdict(study)
    assert ablation.ONE_FIT in text and "helps" not in text and "harms" not in text


def test_ablation_table_and_verdict(runs):
    study = ablation.ablate(runs[:1], k_eval=7, epochs=2, repeats=2, progress=False)
    assert all(len(each) == 2 for each in study.probs.values())
    table = ablation.ablation_table(study, metrics=("nll", "accuracy"))
    assert len(table) == 2 * len(study.variants)
    assert set(table["group"]) == {"off", "on", "extra"}
    assert set(table["helps"]) <= {"helps", "harms", "no difference at this size", "undefined"}
    text = ablation.verdict(study)
    assert "Taken from the whole" in text and "1 training(s), 2 fit(s)" in text


def test_fits_of_one_training_are_not_seeds(runs):
    study = ablation.ablate(runs, k_eval=7, epochs=1, repeats=2, extras=False, progress=False)
    table = ablation.ablation_table(study, metrics=("nll",)).set_index("method")
    assert set(table["n_seeds"]) == {2} and set(table["n_fits"]) == {2}
    means = study.table[study.table["metric"] == "nll"].groupby("method")["value"].mean()
    gap = means["without trust"] - means["full attention"]
    assert table.loc["without trust", "difference"] == pytest.approx(gap)


def test_a_part_helps_where_taking_it_away_harms():
    assert ablation._effect("off", "worse") == "helps"
    assert ablation._effect("off", "better") == "harms"
    assert ablation._effect("on", "better") == "helps"
    assert ablation._effect("extra", "worse") == "harms"
    assert ablation._effect("on", "undefined") == "undefined"
