"""Training + memory: runs trained with a fault are read, checked and told apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnknn.config import ConfigError
from attnknn.core.vote import predict
from attnknn.data.change import flip_labels
from attnknn.embed import run as trained_module
from attnknn.embed.run import train_run
from attnknn.embed.runs import load_seeds
from attnknn.paper.plan import make_grid
from attnknn.studies import label_noise, long_tail, retrained
from attnknn.studies.common import search_run
from tests.tiny import SMALL, config, tiny_splits

GRIDS = Path(__file__).parents[2] / "notebooks/params/grids"
OPTIONS = {"k_eval": 7, "k_baseline": 5, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A clean run of two seeds, and one seed each of four runs with a fault, two in a grid."""
    root = tmp_path_factory.mktemp("results")
    wanted = {
        "clean": [{}, {"seed": 1}],
        "noise-0.3": [{"train_noise": 0.3}],
        "both-faults": [{"train_noise": 0.3, "train_tail": 0.5}],
        "tails/train_tail=0.25": [{"train_tail": 0.25}],
        "tails/train_tail=0.5": [{"train_tail": 0.5, "epochs": 3}],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_module, "load_splits", lambda *_, **__: tiny_splits())
        patch.setenv("ATTNKNN_RESULTS", str(root))
        for name, seeds in wanted.items():
            for settings in seeds:
                made = config(SMALL, lr=200.0, **settings)
                train_run(made, root / name / f"seed{made.seed}", progress=False)
        yield root


@pytest.fixture(scope="module")
def runs(folder):
    return load_seeds(folder / "clean")


@pytest.fixture(scope="module")
def tails(runs):
    """Memory-only and retrained long tails."""
    kinds = {"held_out": ["balanced", "reweighted"]}
    base = long_tail.memory_tail(runs, ratios=(1.0, 0.25), **kinds, **OPTIONS)
    return base, long_tail.retrained_tail(["tails"], base, runs, **OPTIONS)


@pytest.fixture(scope="module")
def noises(runs):
    """Memory-only and retrained label noise."""
    base = label_noise.memory_noise(runs[:1], rates=(0.0, 0.3), **OPTIONS)
    return base, label_noise.retrained_noise(["noise-0.3", "tails"], base, runs, **OPTIONS)


def test_names_paths_and_grids_become_run_folders(folder):
    found = retrained.variant_folders(["noise-0.3", str(folder / "tails")])
    assert [path.name for path in found] == ["noise-0.3", "train_tail=0.25", "train_tail=0.5"]


def test_a_folder_without_a_run_is_refused(folder):
    with pytest.raises(ConfigError, match="retrained_runs must name finished runs"):
        retrained.variant_folders(["nothing-here"])


def test_memory_and_labels_are_those_of_the_memory_only_study(folder, runs):
    """At one seed only the embedder differs: the comparison is paired."""
    noisy, tailed = (load_seeds(folder / n)[0] for n in ("noise-0.3", "tails/train_tail=0.25"))
    flipped = flip_labels(runs[0].labels("train"), 0.3, n_classes=3, seed=0)
    np.testing.assert_array_equal(noisy.labels("train"), flipped)
    kept = long_tail.tailed_bank(runs[0], 0.25).labels.numpy()
    np.testing.assert_array_equal(tailed.labels("train"), kept)
    assert not np.allclose(noisy.rows("test"), runs[0].rows("test"))


def test_the_tail_study_covers_the_runs_and_shares_the_balanced_level(tails):
    base, again = tails
    assert set(again.table["corrupted"]) == {"training + memory"}
    levels = set(again.table[["ratio", "held_out"]].itertuples(index=False, name=None))
    ratios, kinds = (1.0, 0.25, 0.5), ("balanced", "reweighted")
    assert levels == {(ratio, kind) for ratio in ratios for kind in kinds}
    assert set(level.ratio for level in again.probs) == {0.25, 0.5}
    assert "attention, transfer" not in set(again.table["method"])
    assert again.groups is base.groups
    own = base.table.query("ratio == 1 and method == 'attention'")["value"].to_numpy()
    shared = again.table.query("ratio == 1 and method == 'attention'")["value"].to_numpy()
    np.testing.assert_array_equal(own, shared)


def test_balanced_queries_use_the_attention_of_the_run(folder, tails):
    run = load_seeds(folder / "tails/train_tail=0.25")[0]
    probs = predict(run.method(7), search_run(run, 7).test)
    level = long_tail.TailLevel(0.25, "balanced")
    np.testing.assert_allclose(tails[1].probs[level]["attention"][0], probs, atol=1e-6)


def test_the_noise_study_leaves_tails_out(noises):
    _, again = noises
    assert set(again.probs) == {label_noise.Level("symmetric", 0.3, h) for h in ("clean", "noisy")}
    assert set(again.table["rate"]) == {0.0, 0.3}
    assert set(again.table["corrupted"]) == {"training + memory"}
    assert {"uniform", "distance (tuned)", "attention"} <= set(again.table["method"])
    clean, noisy = (again.probs[level]["attention"][0] for level in again.probs)
    assert not np.allclose(clean, noisy)


def test_both_studies_stay_apart_in_one_table(noises):
    base, again = noises
    both = retrained.both_tables(base, again)
    counts = both["corrupted"].value_counts()
    assert counts["memory only"] == len(base.table)
    assert counts["training + memory"] == len(again.table)


def test_the_verdict_pairs_the_seeds_that_both_have(tails, runs):
    base, again = tails
    facts = retrained.variant_facts(["tails"], runs, fault="train_tail")
    text = retrained.verdict(base, again, facts, metrics=("accuracy",))
    level = long_tail.TailLevel(0.25, "balanced")
    right = [s.probs[level]["attention"][0].argmax(axis=1) == base.labels for s in (again, base)]
    assert f"{right[0].mean() - right[1].mean():+.4f}" in text
    assert text.count("\n- ") == 2  # the ratio that both have, twice; 0.5 is only retrained
    assert "ratio 0.25, held-out balanced: **accuracy**" in text
    assert "Without a counterpart in the memory alone: ratio 0.5, held-out balanced" in text
    assert "not part of this study" not in text


def test_without_runs_nothing_is_claimed(tails, runs):
    base, _ = tails
    again = long_tail.retrained_tail([], base, runs, **OPTIONS)
    assert len(again.table) == 0 and again.probs == {}
    facts = retrained.variant_facts([], runs, fault="train_tail")
    assert "No retrained runs were given" in retrained.verdict(base, again, facts)
    both = retrained.both_tables(base, again)
    assert len(both) == len(base.table)


def test_facts_name_the_fault_and_the_steps(runs):
    facts = retrained.variant_facts(["noise-0.3", "tails"], runs, fault="train_noise")
    facts = facts.set_index("run")
    assert facts.loc["clean", "wrong labels"] == "none"
    assert facts.loc["noise-0.3", "wrong labels"] == "30 % symmetric"
    assert facts.loc["train_tail=0.25", "training rows"] == 35
    assert facts.loc["train_tail=0.5", "steps"] == 3 * (44 // 20)


@pytest.mark.parametrize(
    ("fault", "used", "elsewhere"),
    [
        ("train_noise", "noise-0.3", "train_tail=0.25 (no: a long tail, see 05_long_tail)"),
        ("train_tail", "train_tail=0.25", "noise-0.3 (no: wrong labels, see 04_label_noise)"),
    ],
)
def test_runs_that_do_not_belong_are_named(fault, used, elsewhere, runs, noises, tails):
    names = ["noise-0.3", "tails", "both-faults", "clean"]
    given = retrained.variant_facts(names, runs, fault=fault)
    facts = given.set_index("run")["in this study"]
    assert facts.iloc[0] == "compared with" and facts[used] == "yes"
    loaded = retrained.load_variants(names, runs, fault=fault)
    assert {run.folder.parent.name for run in loaded} == set(facts[facts == "yes"].index)
    base, again = noises if fault == "train_noise" else tails
    text = retrained.verdict(base, again, given, metrics=("accuracy",))
    assert "both-faults (no: two faults at once), clean (no: trained without a fault)" in text
    assert elsewhere in text


def test_runs_of_another_fault_alone_are_not_taken_for_none(runs, tails):
    base, _ = tails
    again = long_tail.retrained_tail(["noise-0.3"], base, runs, **OPTIONS)
    facts = retrained.variant_facts(["noise-0.3"], runs, fault="train_tail")
    text = retrained.verdict(base, again, facts)
    assert "not part of this study: noise-0.3" in text
    assert "No retrained runs were given" not in text


def test_runs_with_other_settings_are_refused_by_name(runs):
    other = replace(runs[0], config=replace(runs[0].config, training=replace(
        runs[0].config.training, epochs=9)))  # fmt: skip
    with pytest.raises(ConfigError, match=r"got noise-0\.3 with epochs: 9 -> 2"):
        retrained.variant_facts(["noise-0.3"], [other], fault="train_noise")


def test_retrained_noise_is_drawn_and_listed_apart(noises):
    """What notebook 04 shows: a panel and rows of its own."""
    base, again = noises
    both = retrained.both_tables(base, again)
    panels = set(label_noise.curves(both, held_out="clean")["panel"])
    # Nobody trained on asymmetric noise: no panel that holds nothing but the clean start.
    memory = {f"{kind},\nmemory only" for kind in ("symmetric", "asymmetric")}
    assert panels == memory | {"symmetric,\ntraining + memory"}
    listed = label_noise.noise_table(both, rate=0.3)
    listed = listed[listed["kind"] == "symmetric"]
    attention = listed[(listed["method"] == "attention") & (listed["metric"] == "nll")]
    values = attention[attention["held-out labels"] == "clean"].set_index("corrupted")["value"]
    assert set(values.index) == {"memory only", "training + memory"}
    assert values["memory only"] != values["training + memory"]


def test_other_settings_are_refused(runs, folder):
    variant = load_seeds(folder / "noise-0.3")[0]
    training = replace(variant.config.training, epochs=9)
    other = replace(variant, config=replace(variant.config, training=training))
    assert retrained.other_settings(runs[0], variant) == ""
    assert retrained.other_settings(runs[0], other) == "epochs: 2 -> 9"
    tailed = replace(other.config.data, train_tail=0.5)
    longer = replace(other, config=replace(other.config, data=tailed))
    assert retrained.other_settings(runs[0], longer) == ""  # fewer rows, more epochs


def test_a_fault_must_not_come_twice(tails, runs):
    with pytest.raises(ConfigError, match="each fault once"):
        long_tail.retrained_tail(["tails", "tails"], tails[0], runs, **OPTIONS)


@pytest.mark.parametrize(("grid", "n_runs"), [("train-noise", 8), ("train-tail", 2)])
def test_the_grids_can_be_planned(grid, n_runs, tmp_path):
    made = make_grid(GRIDS / f"{grid}.yaml", "quick", notebooks=["01"], results=tmp_path)
    assert len(made.plans) == n_runs
    assert made.folder.name == f"quick-{grid}"
