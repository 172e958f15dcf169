"""Studies: the tables have their schema, and what they compare is comparable."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnknn.config import AttentionConfig
from attnknn.core.attention import SITUATION_COLUMNS, Evidence
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import Calibration
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.vote import Distance, Uniform, explain, predict
from attnknn.embed import run as trained_module
from attnknn.embed.rows import embed_views
from attnknn.embed.run import train_run
from attnknn.evaluate.compare import interval_table
from attnknn.evaluate.measure import accuracy, negative_log_likelihood
from attnknn.evaluate.tune import BASELINES, FittedMethod, candidates
from attnknn.figures import tables as report
from attnknn.figures.style import method_style, use_style
from attnknn.figures.sweeps import sweep_grid
from attnknn.files import write_json
from attnknn.studies import (
    ablation,
    k_sweep,
    label_noise,
    long_tail,
    published,
    retrained,
    training,
)
from attnknn.studies import ablation as variants
from attnknn.studies import common as chosen
from attnknn.studies import common as contest
from attnknn.studies import common as pictures
from attnknn.studies import label_noise as detection
from attnknn.studies import main as datasets
from attnknn.studies import main as main_results
from tests.tiny import SMALL, config, tiny_splits


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a tiny training."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_module, "load_splits", lambda *_, **__: tiny_splits())
        settings = [config(SMALL, seed=seed, epochs=4, lr=200.0) for seed in (0, 1)]
        made = [train_run(s, folder / f"seed{s.seed}", progress=False) for s in settings]
        for run in made:
            assert run.splits.name == "tiny"  # read while the data is at hand
        yield made


@pytest.fixture(scope="module")
def results(runs):
    return main_results.main_results(runs, k_eval=11, k_baseline=5, k_ensemble=(3, 5), tta_views=3)


def test_main_results_hold_every_method_for_every_seed(results):
    table = results.table
    assert set(table.columns) == {"dataset", "seed", "method", "metric", "value"}
    assert set(table["seed"]) == {0, 1}
    expected = {"uniform", "distance", "attention", "attention + TTA", "cnn + temperature"}
    assert expected | set(main_results.RIVALS) <= set(table["method"])
    assert (
        table.groupby(["seed", "method"]).size().eq(len(main_results.MAIN_RESULTS_MEASURES)).all()
    )
    assert {"ace", "cwce", "aurc"} < set(table["metric"])


def test_the_search_is_as_deep_as_the_tuned_baselines_want(runs, results):
    settings = results.settings
    assert set(settings["method"]) == {f"{name} (tuned)" for name in BASELINES}
    assert set(settings["seed"]) == {0, 1}
    # 60 rows of memory: k = 50 is open to the baselines, though the attention weighs 11.
    deep = main_results.main_results(runs[:1], k_eval=5, k_ensemble=(3,), tta_views=1)
    shallow = main_results.main_results(
        runs[:1], k_eval=5, k_ensemble=(3,), tta_views=1, k_tuned=5, k_baseline=5
    )
    assert shallow.settings["k"].max() <= 5
    nll = "held-out NLL"
    assert (deep.settings[nll] <= shallow.settings[nll] + 1e-9).all()


def test_an_optimum_at_the_edge_is_named():
    tried = candidates("distance", 100)
    inside = chosen.method_edges(Distance(20, 0.1), tried, n_memory=300)
    assert inside == []
    outside = chosen.method_edges(Distance(100, 0.005), tried, n_memory=300)
    assert outside == ["k = 100 is the largest tried", "τ = 0.005 is the smallest tried"]
    # The whole memory, one neighbour: nothing lies beyond.
    assert chosen.method_edges(Uniform(100), candidates("uniform", 100), n_memory=100) == []
    assert chosen.method_edges(Uniform(1), candidates("uniform", 100), n_memory=300) == []
    fitted = FittedMethod(Uniform(5), Calibration(1e-6, 1.3), 0.5)
    assert chosen.calibration_edges(fitted) == ["floor = 1e-06 is at its limit"]
    rows = chosen.chosen_rows({"uniform (tuned)": fitted}, k_max=5, n_memory=300, seed=0)
    table = chosen.chosen_table(rows)
    assert table.loc[0, "edge"].startswith("k = 5 is the largest tried; floor")
    assert "uniform (tuned): k = 5" in chosen.edges_sentence(table)
    assert "inside" in chosen.edges_sentence(table.assign(edge=""))


def test_one_seed_has_intervals_over_rows(runs, results):
    assert results.over_rows is None
    one = main_results.main_results(runs[:1], k_eval=7, k_ensemble=(3,), tta_views=1)
    table = main_results.main_table(one).text
    assert table.drop(columns="n").map(lambda cell: "±" in cell).all(axis=None)
    known = one.over_rows.set_index(["method", "metric"]).loc[("attention", "nll")]
    half = (known["high"] - known["low"]) / 2
    assert table.loc["attention", "NLL"] == f"{known['mean']:.3f} ± {half:.3f}"
    saved = one.measures.set_index(["method", "metric"]).loc[("attention", "nll")]
    assert saved[["low", "high"]].tolist() == known[["low", "high"]].tolist()
    assert results.measures[["low", "high"]].isna().all(axis=None)


def test_what_confidences_are_worth(results):
    table = main_results.calibration_table(results).text
    assert list(table.columns) == ["ECE", "ECE (equal-mass)", "class-wise ECE", "AURC", "n"]
    curves = main_results.risk_curves(results)
    assert set(curves) == set(main_results.RISK) & set(results.probs)
    labels, probs = results.labels, results.probs["attention"][0]
    assert curves["attention"]["risk"].iloc[-1] == pytest.approx(1 - accuracy(probs, labels))


def test_fault_6_the_name_says_what_the_distance_vote_is(results):
    table = main_results.main_table(results)
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
    table = main_results.main_table(results).text
    assert len(table) == len(results.probs)
    assert set(table["n"]) == {"2"}


def test_the_verdict_names_every_measure_and_the_size(results):
    text = main_results.verdict(results)
    for word in ("**NLL**", "**ECE**", "24 test rows, 2 seed(s)", "distance (tuned)"):
        assert word in text


def test_the_worst_mistake_is_a_mistake(results):
    probs = results.probs["attention"][0]
    row = main_results.worst_mistake(results)
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


def test_noise_study_covers_every_level(runs):
    study = label_noise.memory_noise(
        runs[:1], rates=(0.0, 0.3), k_eval=7, k_baseline=5, progress=False
    )
    measured = study.table[~study.table["method"].isin(label_noise.DETECTORS)]
    levels = set(measured[["kind", "rate", "held_out"]].itertuples(index=False, name=None))
    kinds, rates = ("symmetric", "asymmetric"), (0.0, 0.3)
    assert levels == set(itertools.product(kinds, rates, ("clean", "noisy")))
    assert {"attention", "attention, transfer", "distance (tuned)"} <= set(measured["method"])
    auroc = study.table.query("method == 'trust' and metric == 'auroc'")["value"]
    assert set(study.table.query("metric == 'auroc'")["method"]) == {"trust", "cleanlab"}
    assert len(auroc) == 2 and auroc.between(0.5, 1).all()  # once per memory
    with_transfer = measured[measured["method"] == "attention, transfer"]
    assert set(with_transfer["held_out"]) == {"clean"}
    text = label_noise.verdict(label_noise.comparisons(study))
    assert "30 % symmetric, held-out labels noisy" in text and "**NLL**" in text
    assert text.count("\n- ") == 4
    panels = list(dict.fromkeys(label_noise.curves(study.table)["panel"]))
    assert panels == [
        f"{kind},\nheld-out {state}" for kind in kinds for state in ("clean", "noisy")
    ]
    beside = label_noise.beside_published(study).set_index(["method", "source"])["rate = 0.3"]
    own = measured.query(
        "kind == 'symmetric' and rate == 0.3 and held_out == 'clean'"
        " and method == 'attention' and metric == 'accuracy'"
    )["value"].item()
    assert beside["attention", "this run"] == own
    assert beside["attention", "published exp4"] == 0.8918
    assert beside["attention", "published exp7"] == 0.9050
    # One seed: every finite measure has its interval, over test rows or, to detect, memory rows.
    finite = study.table[np.isfinite(study.table["value"])]
    assert finite[["low", "high"]].notna().all(axis=None)
    shown = report.pivot_mean_interval(
        label_noise.noise_table(finite), index=["kind", "held-out labels", "noise", "method"]
    ).text["accuracy (%)"]
    assert shown.str.contains("±").all()


def test_one_kind_of_noise_is_enough_to_draw(runs):
    options = {"k_eval": 7, "k_baseline": 5, "progress": False}
    study = label_noise.memory_noise(
        runs[:1], rates=(0.3,), kinds=("asymmetric",), held_out=("noisy",), **options
    )
    means = interval_table(label_noise.curves(study.table), ["panel", "method", "rate", "metric"])
    figure = sweep_grid(means, x="rate", metrics=["accuracy", "nll"])
    assert len(figure.axes) == 2
    assert figure.axes[0].get_ylabel() == "asymmetric,\nheld-out noisy"


def noise_levels(runs):
    options = {"rates": (0.0, 0.4), "held_out": ("clean", "noisy"), "progress": False}
    label_noise.memory_noise(runs[:1], k_eval=7, k_baseline=5, **options)


def tails(runs):
    options = {"held_out": ("balanced", "long-tailed", "reweighted"), "progress": False}
    long_tail.memory_tail(runs[:1], ratios=(1.0, 0.25), k_eval=7, k_baseline=5, **options)


def retrained_on_noise(runs):
    found = contest.search_run(runs[0], 20)
    for held_out in ("clean", "noisy"):
        level = label_noise.Level("symmetric", 0.3, held_out)
        retrained.noise_predictions(runs[0], found, level, 5, 5)


def other_ks(runs):
    k_sweep.k_sweep(runs[:1], ks=(3, 5, 7), progress=False)


def other_parts(runs):
    ablation.ablate(runs[:1], k_eval=7, epochs=2, repeats=1, progress=False)


def ensembles(runs):
    options = {"k_eval": 11, "k_baseline": 5, "k_ensemble": (3, 5), "tta_views": 1}
    main_results.main_results(runs[:1], **options)


@pytest.mark.parametrize(
    ("study", "n_fits"),
    [
        (noise_levels, 1 + 3 * 2),  # one for all levels; the clean level and two kinds, twice
        (tails, 3),  # whole and tailed memory: the run's own, then one a kind of held-out rows
        (retrained_on_noise, 2),
        (other_ks, 2),  # at k = 7 the run's own
        (ensembles, 3),
        (other_parts, len(variants.forms(AttentionConfig()))),
    ],
)
def test_every_fit_but_the_runs_own_finds_its_length_and_last_temperature(
    runs, monkeypatch, study, n_fits
):
    """What suits one memory, k or form of the attention would hold another one's fit back."""
    fits = []

    def watched(bank, neighbours, labels, **options):
        fitted = fit_on_neighbours(bank, neighbours, labels, **options)
        fits.append((options.get("n_epochs"), options.get("temperature"), len(fitted.history)))
        return fitted

    for module in (contest, ablation):
        monkeypatch.setattr(module, "fit_on_neighbours", watched)
    study(runs)
    assert len(fits) == n_fits
    for n_epochs, temperature, n_tried in fits:
        assert n_epochs is None and temperature is None
        assert n_tried > 0  # a trial of its own has found the length


def test_noise_reaches_trust_histograms_and_prototypes(runs):
    run = runs[0]
    found = contest.search_run(run, 7)
    transfer = label_noise.fit_transfer(run, found)
    level = label_noise.Level("symmetric", 0.4, "clean")
    bank = label_noise.noisy_predictions(run, found, transfer, level, 7, 5).bank
    assert bank.view.mean_trust < run.bank.view.mean_trust
    assert not np.allclose(bank.view.prototypes, run.bank.view.prototypes)
    assert (bank.labels.numpy() != run.labels("train")).mean() == pytest.approx(0.4)


def test_tuned_baselines_see_more_of_a_noisy_memory_than_the_attention_weighs(runs, monkeypatch):
    depths = []

    def seen(found, **options):
        depths.append(found.held_out.k)
        return contest.tuned_baselines(found, **options)

    monkeypatch.setattr(label_noise, "tuned_baselines", seen)
    options = {"kinds": ["symmetric"], "held_out": ["clean"], "progress": False}
    label_noise.memory_noise(runs[:1], rates=(0.3,), k_eval=7, k_baseline=5, **options)
    assert depths and set(depths) == {60}  # all rows that this memory has


def test_training_facts_and_verdict(runs):
    facts = training.run_facts(runs[0]).set_index("fact")["value"]
    assert "60 train, 30 val, 24 test" in facts["data"]
    assert training.class_facts(runs[0])["rows"].sum() == 60
    best = 100 * runs[0].history["val_accuracy"].max()
    assert f"{best:.1f} % on the validation rows" in training.verdict(runs[0])


def test_neighbours_are_drawn(runs):
    use_style()
    found = contest.search_run(runs[0], 7).test
    figure = pictures.neighbours_figure(runs[0], found, 3, method=runs[0].method(7))
    assert len(figure.axes) > 2


@pytest.fixture
def searches(monkeypatch):
    """How many neighbours each search asked for."""
    asked, search = [], MemoryBank.search

    def counted(bank, queries, k, **options):
        asked.append(k)
        return search(bank, queries, k, **options)

    monkeypatch.setattr(MemoryBank, "search", counted)
    return asked


@pytest.fixture
def drawn(monkeypatch):
    """What each picture of a prediction shows: the method, its table, and the words above it."""
    pictured, methods, explanation = [], [], pictures.plot.explanation

    def watched_explain(method, *arguments, **options):
        methods.append(method)
        return explain(method, *arguments, **options)

    def watched(table, **options):
        pictured.append((methods.pop(), table, options["query_note"]))
        return explanation(table, **options)

    monkeypatch.setattr(pictures, "explain", watched_explain)
    monkeypatch.setattr(pictures.plot, "explanation", watched)
    return pictured


def run_cells(notebook, names, *calls):
    """Run, among the names given, the cells of a notebook that make one of the calls."""
    text = (Path(__file__).parents[1] / f"notebooks/{notebook}.ipynb").read_text()
    sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    chosen_cells = [each for each in sources if any(f"{call}(" in each for call in calls)]
    assert len(chosen_cells) == len(calls)
    for each in chosen_cells:
        exec(each, names)


def test_notebook_01_explains_what_the_fitted_attention_weighs(runs, drawn, tmp_path):
    names = {"run": runs[0], "folder": tmp_path, "seed": 0, "report": report, "explain": explain}
    names |= {"training": training, "pictures": pictures}
    run_cells("01_training", names, "pictures.neighbours_figure", "explain")
    # Of 60 memory rows the attention of these runs was fitted to weigh 7.
    ((method, table, _),) = drawn
    assert method.module is runs[0].attention
    assert len(table) == len(names["table"]) == 7
    np.testing.assert_array_equal(table["weight"], names["table"]["weight"])
    assert table["weight"].sum() == pytest.approx(1)


def test_notebook_02_draws_the_prediction_of_its_table_from_one_search(
    runs, searches, drawn, tmp_path
):
    """With a k other than the run's own: the attention of the table is a refitted one."""
    names = {"runs": runs[:1], "folder": tmp_path, "report": report, "common": pictures}
    names |= {"main": main_results, "ablation": ablation}
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
    here = contest.search_run(runs[0], 11).test
    np.testing.assert_allclose(predict(method, here)[query], probs, rtol=1e-9)


def test_an_ablation_of_searched_neighbours_is_the_one_that_searches(runs, searches):
    options = {"k_eval": 5, "epochs": 1, "repeats": 1, "extras": False, "progress": False}
    own = ablation.ablate(runs[:1], **options)
    found = [contest.search_run(runs[0], 11)]
    searches.clear()
    given = ablation.ablate(runs[:1], found=found, **options)
    assert searches == []
    for name, tables in own.probs.items():
        np.testing.assert_array_equal(given.probs[name][0], tables[0])


def test_kept_neighbourhoods_let_a_deeper_search_go(runs):
    deep = contest.search_run(runs[0], 20)
    kept = deep.kept(5)
    np.testing.assert_array_equal(kept.test.ids, deep.test.ids[:, :5])
    for neighbours in (kept.held_out, kept.test):
        for tensor in (neighbours.ids, neighbours.scores):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_k_sweep_covers_every_k_from_one_search(runs, searches):
    sweep = k_sweep.k_sweep(runs[:1], ks=(1, 5, 11, 1000), progress=False)
    assert searches == [11, 11]  # held-out and test queries, once each; 1000 rows are not there
    assert set(sweep.table["k"]) == {1, 5, 11}
    assert set(sweep.table["method"]) == set(sweep.probs)
    assert set(k_sweep.best_k(sweep)) == set(sweep.probs)
    best = sweep.held_out.query("method == 'uniform (tuned)'").set_index("k")["nll"].idxmin()
    assert k_sweep.best_k(sweep)["uniform (tuned)"] == best
    assert "chosen on held-out queries" in k_sweep.verdict(sweep)
    assert "NLL: " in k_sweep.verdict(sweep) and "accuracy: " in k_sweep.verdict(sweep)
    keys = sweep.over_rows.set_index(["method", "k", "metric"]).index
    assert keys.is_unique and set(keys.get_level_values("k")) == {1, 5, 11}
    table = report.sweep_table(
        sweep.table, over="k", metrics=["nll", "ece"], over_rows=sweep.over_rows
    ).text
    assert table.drop(columns="n").map(lambda cell: "±" in cell).all(axis=None)


def test_a_single_k_has_a_verdict(runs):
    sweep = k_sweep.k_sweep(runs, ks=(5,), progress=False)
    assert "no other k was tried" in k_sweep.verdict(sweep)
    assert sweep.over_rows is None  # two seeds have intervals over seeds


def test_k_eval_is_what_the_attention_weighs(runs):
    found = contest.search_run(runs[0], 11)
    own, other = contest.attention_at(runs[0], found, 7), contest.attention_at(runs[0], found, 5)
    assert own.module is runs[0].attention and own.k == 7  # fit_k of these runs
    assert other.module is not runs[0].attention and other.k == 5


def test_the_nll_that_judges_an_attention_comes_from_queries_it_has_not_seen(runs):
    found = contest.search_run(runs[0], 11)
    _, own = contest.judged_attention_at(runs[0], found, 7)
    history = runs[0].fit_history
    assert own == history["stop_nll"][history["kept"].sum() - 1]
    attention, other = contest.judged_attention_at(runs[0], found, 5)
    here = found.nearest(5)
    seen = negative_log_likelihood(predict(attention, here.held_out), here.held_out_labels)
    assert other != pytest.approx(seen, rel=1e-3)


def test_per_class_shares_are_those_of_scikit_learn(results):
    from sklearn.metrics import precision_recall_fscore_support

    table = main_results.per_class(results, ["a", "b", "c"], ["attention"]).set_index("class")
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
    shown = main_results.per_class_table(table.reset_index())
    assert list(shown.columns) == ["class", "attention"] and len(shown) == 3


def test_precision_at_the_noise_rate_by_hand():
    wrong = np.array([True, True, False, False, False])
    assert detection.precision_at_rate(np.array([0.1, 0.2, 0.3, 0.4, 0.5]), wrong) == 1.0
    assert detection.precision_at_rate(np.array([0.5, 0.4, 0.3, 0.2, 0.1]), wrong) == 0.0
    # One of four equal rows joins the lowest: a quarter of a chance for the second wrong one.
    assert detection.precision_at_rate(np.array([0.1, 0.5, 0.5, 0.5, 0.5]), wrong) == 0.625


def test_detection_from_tallies_is_the_detection_of_the_drawn_rows():
    rng = np.random.default_rng(5)
    quality, wrong = rng.integers(7, size=53) / 7, rng.random(53) < 0.3
    halves = detection.half_widths({"a": quality}, wrong, n_resamples=11, seed=3)
    # The same draws, replayed row by row.
    rng = np.random.default_rng(3)
    rows = [rng.integers(53, size=53) for _ in range(11)]
    for name, measure in detection.DETECTION.items():
        slow = [measure(quality[each], wrong[each]) for each in rows]
        assert halves["a", name] == pytest.approx(1.959964 * np.std(slow, ddof=1))


def test_cleanlab_sees_the_same_probabilities_as_trust(runs):
    from cleanlab.rank import get_label_quality_scores

    bank = runs[0].bank
    own = get_label_quality_scores(
        bank.labels.numpy(), bank.view.histograms.double().numpy(), method="self_confidence"
    )
    np.testing.assert_allclose(own, bank.view.trust.numpy(), atol=1e-6)


# ---- ablations


WHOLE = AttentionConfig(label_bias="neighbour", prototype_shift=True)


@pytest.mark.parametrize("whole", [AttentionConfig(), WHOLE, replace(WHOLE, heads=1)])
def test_variants_differ_from_their_reference_in_one_part(whole):
    fitted = variants.forms(whole)
    tried = variants.variants(whole)
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
    tried = variants.variants(WHOLE)
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
        each.part for each in variants.variants(AttentionConfig()) if each.group == "extra"
    }
    references = {each.name: each.reference for each in tried}
    assert references["with self-attention"] == "with prototype score"
    assert references["only shifted prototypes"] == "only prototype gate"


def test_features_that_are_not_tried_alone_are_cancelled(runs):
    found = contest.search_run(runs[0], 7).test
    evidence = Evidence(found, posterior=runs[0].attention.posterior)
    for name, column in SITUATION_COLUMNS.items():
        values = column(evidence).expand(found.scores.shape)
        constant = bool((values == values[:, :1]).all())
        assert constant == (name in variants.CANCELLED), name


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


# ---- data sets, published figures


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
    found = datasets.finished_runs(own, ["one", "two", "broken", "absent"])
    assert [path.name for path in found] == ["one", "two"]  # as named; nothing else that lies there
    assert [path.name for path in datasets.finished_runs(own, ["one"])] == ["two", "one"]
    assert datasets.finished_runs(own, []) == [own]
    measures = datasets.read_measures(found, own)
    made = measures.groupby("run")["made"].first()
    assert made.to_dict() == {"one": "2026-03-04 0123456", "two": "this run"}
    table = datasets.datasets_table(measures.assign(low=0.1, high=0.3))
    assert (table["low"] == 0.1).all() and (table["high"] == 0.3).all()
    table = datasets.datasets_table(measures)
    assert table[["low", "high"]].isna().all(axis=None)  # saved before there were any
    assert set(table["run"]) == {"one", "two"} and "attention" in set(table["method"])
    ranks = datasets.ranks(measures).set_index("method")["mean rank"]
    assert ranks.sum() == sum(range(1, len(ranks) + 1))


def test_published_figures_stay_apart(results):
    table = published.beside_published(results.table, ours="ours", experiments=["exp5"])
    own = table[table["source"] == "ours"].set_index("method")
    mean = results.table.query("method == 'attention' and metric == 'nll'")["value"].mean()
    assert own.loc["attention", "nll"] == pytest.approx(mean)
    theirs = table[table["source"] == "published exp5"].set_index("method")
    assert theirs.loc["attention", "nll"] == 2.054
    assert set(table["source"]) == {"ours", "published exp5"}
