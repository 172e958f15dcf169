"""AFMP ablations: settings, selection, paired tests, and words that follow from the runs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from attnknn import figures as plot
from attnknn.afmp.graph import AFMPConfig, grid_scaffold
from attnknn.afmp.train import AblationRun, Recipe, Setting, build_classifier
from attnknn.data.splits import Split
from attnknn.paper.folder import RunFolder, Task
from attnknn.paper.notebooks import find_notebooks
from attnknn.studies import afmp, afmp_words
from tests.tiny import tiny_splits

ROOT = Path(__file__).parents[2]
MODEL = AFMPConfig(layers=2, width=8, patch=2, keep_share=0.3)
SHARES = {"dense": (0.6, 0.6), "keep 0.3": (0.9, 0.5)}


def made_up_ablation(accuracies: dict[str, tuple[float, float]]) -> afmp.Ablation:
    """Return runs of two seeds with given accuracies on validation and on test rows."""
    others = [afmp.TOP_DOWN, afmp.PUBLISHED, f"{afmp.PUBLISHED}, {afmp.TOP_DOWN}"]
    others += [afmp.WIDER, afmp.DEIT, afmp.DEIT_LARGER]
    rng, runs = np.random.default_rng(0), {}
    for name, (val, test) in {**dict.fromkeys(others, (0.5, 0.5)), **accuracies}.items():
        report = {"metrics": {"val_accuracy": val, "test_accuracy": test}, "parameters": 7}
        logits = {"test": rng.normal(size=(24, 3))}
        history = pd.DataFrame({"epoch": [1, 2], "lr": 1e-3, "val_accuracy": [val / 2, val]})
        history = history.assign(test_accuracy=test, cpu_seconds=2.0)
        history = history.assign(cpu_seconds_with_validation=2.5)
        parts = {"history": history, "gates": pd.DataFrame(), "logits": logits, "report": report}
        runs[name] = [
            AblationRun(Setting(name, MODEL), seed, **parts, gate_maps={}, folder=Path())
            for seed in (0, 1)
        ]
    return afmp.Ablation(runs, "keep 0.3", tiny_splits())


def with_hits(ablation: afmp.Ablation, hits: dict[str, int]) -> afmp.Ablation:
    """Return the ablation with the first so many of 24 test rows of each setting right."""
    labels, runs = ablation.labels, dict(ablation.runs)
    for name, n_hits in hits.items():
        wanted = np.where(np.arange(len(labels)) < n_hits, labels, (labels + 1) % 3)
        logits = {"test": 3.0 * np.eye(3)[wanted]}
        runs[name] = [replace(run, logits=logits) for run in runs[name]]
    return replace(ablation, runs=runs)


SATURATED = pd.DataFrame({"setting": "keep 0.3", "layer": [1, 2], "saturated": [0.75, 0.25]})


def said(ablation: afmp.Ablation) -> str:
    return afmp_words.verdict(ablation, SATURATED, "More.")


# ---- Settings and runs


def test_settings_by_name():
    settings = afmp.ablation_settings(
        AFMPConfig(), keep_shares=[1.0, 0.2, 0.3], sparse_weights=[1e-3, 1e-4, 1e-5]
    )
    assert [setting.name for setting in settings] == [
        *["dense", "keep 0.3", "keep 0.2", "λ 0.001", "λ 1e-05", "top-down"],
        *["one pass, wider", "published", "published, top-down", "DeiT", "DeiT, larger"],
    ]
    on = {setting.name for setting in settings if setting.model.top_down}
    assert on == {"top-down", "published, top-down", "DeiT, larger"}


@pytest.mark.parametrize(
    ("model", "channels", "side"),
    [(AFMPConfig(), 3, 32), (AFMPConfig(layers=3, width=64, patch=4), 1, 8)],
)
def test_models_are_as_large_as_what_they_are_compared_with(model, channels, side):
    settings = afmp.ablation_settings(model, keep_shares=[1.0, 0.3], sparse_weights=[1e-3])
    images = np.zeros((2, channels, side, side), np.uint8)
    splits = replace(tiny_splits(), train=Split(images, np.zeros(2, int)))
    pairs = [(afmp.keep_name(model.keep_share), afmp.DEIT)]
    pairs += [(afmp.TOP_DOWN, larger) for larger in (afmp.DEIT_LARGER, afmp.WIDER)]
    for pair in pairs:
        chosen = [setting for setting in settings if setting.name in pair]
        models = [build_classifier(setting, splits, seed=0) for setting in chosen]
        sizes = [sum(p.numel() for p in each.parameters()) for each in models]
        assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize(
    ("has_cuda", "asked", "expected"),
    [(False, "auto", "cpu"), (True, "auto", "cuda"), (True, "cpu", "cpu")],
)
def test_the_device_is_passed_on(tmp_path, monkeypatch, has_cuda, asked, expected):
    seen, run = [], made_up_ablation({}).runs[afmp.DEIT][0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(afmp, "choose_device", lambda name: name)  # no CUDA on this machine
    monkeypatch.setattr(afmp, "load_splits", lambda **_: tiny_splits())
    monkeypatch.setattr(afmp, "train_setting", lambda *_, device, **__: seen.append(device) or run)
    settings = [Setting(afmp.TOP_DOWN, MODEL)]
    options = {"dataset": "tiny", "recipe": Recipe(epochs=1), "seeds": [0, 1], "device": asked}
    afmp.run_ablation(tmp_path, settings, **options)
    assert seen == [expected] * 2


@pytest.mark.slow
def test_the_study_from_end_to_end(tmp_path):
    settings = afmp.ablation_settings(
        AFMPConfig(layers=2, width=16, patch=4), keep_shares=[1.0], sparse_weights=[1e-3]
    )
    ablation = afmp.run_ablation(
        tmp_path,
        settings,
        dataset="digits",
        recipe=Recipe(epochs=1, batch_size=64),
        seeds=[0, 1],
        max_rows=200,
        workers=2,  # one is what all other tests have
    )
    assert ablation.reference == "keep 0.3"
    assert set(ablation.table()["method"]) == {setting.name for setting in settings}
    assert len(ablation.history()) == 2 * len(settings)
    gates = afmp.saturation_table(ablation, ["keep 0.3", "top-down"])
    assert len(gates) == 2 * 2 and gates["saturated"].between(0, 1).all()
    head = afmp.knn_head(ablation, "top-down", k=20)
    assert "attention" in set(head.table["method"])
    text = afmp_words.verdict(ablation, gates, afmp.knn_sentence(head))
    assert all(word in text for word in ("Keep share", "Top-down", "As published", "DeiT"))
    assert "One and the same model at all shares" in text
    pictures = afmp.gate_pictures(ablation, "keep 0.3")
    assert {len(pictures["images"]), len(pictures["gates"][1])} == {4}
    assert plot.gate_maps(**pictures).axes
    assert len(afmp.ablation_table(ablation).text) == len(settings)


def test_tuned_votes_are_not_held_to_the_attention_s_k(tmp_path, monkeypatch):
    setting = Setting("top-down", AFMPConfig(layers=2, width=16, patch=4))
    options = {"recipe": Recipe(epochs=1, batch_size=64), "seeds": [0], "max_rows": 150}
    ablation = afmp.run_ablation(tmp_path, [setting], dataset="digits", **options)
    depths, tuned = [], afmp.tuned_baselines

    def noting(found):
        depths.append(found.test.k)
        return tuned(found)

    monkeypatch.setattr(afmp, "tuned_baselines", noting)
    afmp.knn_head(ablation, "top-down", k=20)
    assert depths == [len(ablation.splits.train)] and depths[0] > 20


def test_trained_runs_outlive_the_notebook_s_own_results(tmp_path):
    """What a killed notebook wrote is removed before it runs again; trainings must not be."""
    [book] = [each for each in find_notebooks(ROOT / "notebooks") if each.number == "08"]
    cells = json.loads(book.path.read_text())["cells"]
    assert any('run / "afmp_runs"' in "".join(cell["source"]) for cell in cells)
    for name in (book.name, "afmp_runs"):
        (tmp_path / name / "dense").mkdir(parents=True)
    run = RunFolder(tmp_path)
    run.entries[book.name] = {"status": "begun"}
    run.begin(Task(book, {}, (0,), book.name))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["afmp_runs"]


# ---- Memory


class Doubling(torch.nn.Module):
    """Squares (keeps its input), doubles (keeps nothing), and sums to two logits."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def logits_and_penalty(self, pixels):
        self.seen.append(len(pixels))
        rows = pixels.flatten(1).requires_grad_()  # (B, 6)
        return (2 * rows**2)[:, :2], pixels.new_zeros(())


def test_fault_26_memory_is_what_the_whole_batch_keeps_for_backward():
    """By hand: the square keeps its 6 numbers a row, the loss 2 log-probabilities; 8-byte labels.

    Memory of forward alone, or of two images, is what was published.
    """
    batch = Split(np.zeros((500, 1, 2, 3), np.uint8), np.zeros(500, dtype=int))
    model = Doubling()
    assert afmp.kept_for_backward(model, batch) == pytest.approx(500 * (6 + 2 + 2) * 4e-6, rel=0.01)
    assert model.seen == [500]


def test_a_larger_batch_keeps_more_and_weights_do_not_count():
    model = build_classifier(Setting("a", MODEL), tiny_splits(), seed=0).train()
    train = tiny_splits().train
    few, many = (
        afmp.kept_for_backward(model, Split(train.inputs[:n], train.labels[:n])) for n in (10, 40)
    )
    assert 3.5 < many / few < 4.5
    assert all(p.grad is not None for p in model.network.parameters() if p.ndim > 1)


# ---- Words


@pytest.mark.parametrize(
    ("dense", "published", "words"), [(24, 6, "worse"), (6, 24, "better"), (12, 12, "difference")]
)
def test_the_published_model_is_held_against_the_dense_one(dense, published, words):
    """Neither of them prunes; the reference does."""
    ablation = with_hits(made_up_ablation(SHARES), {"dense": dense, afmp.PUBLISHED: published})
    (line,) = [line for line in said(ablation).split("\n") if "**As published.**" in line]
    told = {"difference": "published and dense: no difference"}
    assert told.get(words, f"published is {words} than dense in accuracy") in line


def test_the_top_down_pass_is_held_against_what_is_as_large():
    hits = {afmp.TOP_DOWN: 24, afmp.DEIT_LARGER: 6, afmp.WIDER: 12}
    ablation = with_hits(made_up_ablation(SHARES), hits)
    for rival in ("DeiT, larger", "one pass, wider"):
        assert f"top-down is better than {rival} in accuracy (+" in said(ablation)
    table = afmp.comparison_table(ablation)
    pairs = set(zip(table["setting"], table["against"], strict=True))
    assert {("published", "dense"), ("top-down", "DeiT, larger")} <= pairs
    assert {("dense", "keep 0.3"), ("top-down", "one pass, wider")} <= pairs


@pytest.mark.parametrize(
    ("share", "n_kept", "hits", "end"),
    [
        (0.001, 1, (24, 6), ")."),
        (0.0, 0, (24, 6), "Messages help on these data."),
        (0.0, 0, (6, 24), "Messages cost accuracy on these data."),
        (0.0, 0, (12, 12), "That messages help on these data is not shown."),
    ],
)
def test_all_edges_are_held_against_the_fewest(share, n_kept, hits, end):
    """Whether messages help at all is told by a model without any, alike but for that."""
    name = afmp.keep_name(share)
    ablation = made_up_ablation(SHARES | {name: (0.5, 0.5)})
    runs = ablation.runs[name]
    setting = replace(runs[0].setting, model=replace(runs[0].setting.model, keep_share=share))
    runs = ablation.runs | {name: [replace(run, setting=setting) for run in runs]}
    hits = dict(zip(("dense", name), hits, strict=True))
    text = said(with_hits(replace(ablation, runs=runs), hits))
    n_edges = grid_scaffold(*ablation.splits.train.inputs.shape[2:], 2).n_edges
    (line,) = [line for line in text.split("\n") if "**Messages.**" in line]
    assert f"“{name}” keeps {n_kept} of the {n_edges} edges of an image. dense " in line
    assert line.endswith(end)


def test_without_a_sparser_model_nothing_is_said_of_messages():
    assert "**Messages.**" not in said(made_up_ablation(SHARES))


def test_validation_rows_choose_the_share_that_is_tested():
    """On test rows "keep 0.2" is best, on validation rows "dense": the verdict is on dense."""
    accuracies = {"keep 0.3": (0.6, 0.6), "dense": (0.9, 0.5), "keep 0.2": (0.5, 0.9)}
    text = said(made_up_ablation(accuracies))
    assert "best on validation rows: dense. dense" in text
    assert "dense 50.00 %" in text  # but test rows report


def test_the_rivals_of_the_reference():
    others = ["top-down", "published", "published, top-down", afmp.WIDER, "DeiT", "DeiT, larger"]
    assert made_up_ablation({}).rivals == ["keep 0.3", *others]


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
    text = afmp_words.training_words(history([2, 4, 4], [0.2, 1.0, 1.0]))
    assert "in epochs 2 to 4 (median 4), 2 of them in the last" in text
    assert "lowered in 1. They have not all converged" in text
    assert "converged" not in afmp_words.training_words(history([2, 3], [0.2, 0.2]))
    assert "have not all" in afmp_words.training_words(history([2, 3], [1.0, 0.2]))


def test_fault_21_the_published_sweep_is_told_by_its_counts():
    sweep = pd.DataFrame(
        {"edges to keep": [409, 614], "edges": 33, "pruned": 0, "same logits": True}
    )
    same = "One and the same model at all shares: it keeps 409 edges or more out of 33"
    assert same in afmp_words.sweep_words(sweep)
    other = sweep.assign(pruned=[5, 0], **{"same logits": [True, False]})
    assert "prunes at 1 of 2 shares" in afmp_words.sweep_words(other)


def test_penalties_are_called_by_their_weights():
    """Without a name of its own, the reference's weight could not be read off the figure."""
    ablation = made_up_ablation({"keep 0.3": (0.5, 0.5), "λ 1e-05": (0.5, 0.5)})
    (run, *_) = ablation.runs["λ 1e-05"]
    model = replace(run.setting.model, sparse_weight=1e-5)
    runs = ablation.runs | {"λ 1e-05": [replace(run, setting=replace(run.setting, model=model))]}
    names = afmp.penalty_names(replace(ablation, runs=runs))
    assert list(names.items()) == [("keep 0.3", "λ 0.0001"), ("λ 1e-05", "λ 1e-05")]


def test_verdicts_are_held_against_the_seeds_alone():
    """Three seeds with gaps of 1, 2 and 3 rows in 24: t = 2 sqrt(3), p = 0.0742 by hand."""
    ablation = made_up_ablation(SHARES)
    runs = {name: [*own, replace(own[0], seed=2)] for name, own in ablation.runs.items()}
    ablation = with_hits(replace(ablation, runs=runs), dict.fromkeys(runs, 12))
    dense = [with_hits(ablation, {"dense": 12 + n}).runs["dense"][n - 1] for n in (1, 2, 3)]
    table = afmp.comparison_table(replace(ablation, runs=ablation.runs | {"dense": dense}))
    rows = table[table["metric"] == "accuracy"].set_index(["setting", "against"])
    assert rows.loc[("dense", "keep 0.3"), "p_seeds"] == pytest.approx(0.0742, abs=1e-4)
    assert np.isnan(rows.loc[("top-down", "keep 0.3"), "p_seeds"])  # no spread, no test
    tests = pd.DataFrame(
        {"verdict": ["better", "worse", "better", "no difference at this size"]}
        | {"p_seeds": [0.05, 0.2, np.nan, 0.01]}
    )
    assert "Of 3 differences in the table of paired tests, 1 also hold" in (
        afmp_words.seed_words(tests)
    )


def test_fault_26_what_validation_adds_to_an_epoch_is_said():
    """2.0 s of training and 0.5 s of validation an epoch."""
    assert "adds 25 % of CPU time" in said(made_up_ablation(SHARES))


def test_saturated_gates_are_counted_by_hand(monkeypatch):
    values = pd.DataFrame({"layer": [1] * 4 + [2] * 4, "gate": [0.01, 0.99, 0.985, 0.5] * 2})
    values.loc[4:, "gate"] = [0.02, 0.98, 0.5, 0.001]  # the limits themselves are not beyond
    monkeypatch.setattr(afmp, "gate_values", lambda *_: values)
    table = afmp.saturation_table(made_up_ablation({}), ["keep 0.3"])
    assert table["nearly closed"].tolist() == [0.25, 0.25]
    assert table["nearly open"].tolist() == [0.5, 0.0]
    assert "from the first layer on: 75 %, 25 %." in afmp_words.saturation_words(table)


# ---- What benchmarks saved


def test_without_a_measurement_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert afmp_words.read_scalings() == {}
    words = afmp_words.cost_words({})
    assert "python benchmarks/afmp_scaling.py --out results/afmp/scaling" in words
    assert "python benchmarks/afmp_epoch.py --out" in words
    assert "python benchmarks/afmp_controls.py --out" in afmp_words.controls_words()


@pytest.mark.slow
def test_the_epoch_benchmark_becomes_words(tmp_path, monkeypatch):
    """The real benchmark, on few rows: what it saves is what the notebook reads."""
    folder = tmp_path / "afmp" / "epoch"
    words = ["--dataset", "digits", "--max-rows", "101", "--rounds", "1", "--threads", "1"]
    command = [sys.executable, "benchmarks/afmp_epoch.py", *words, "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
    text, table = afmp_words.cost_words({}), pd.read_csv(folder / "epoch.csv")
    seconds = table.set_index("setting")["seconds of an epoch"]
    assert list(seconds.index) == ["dense", "keep 0.3", "top-down", "DeiT"]
    assert "on 101 images, median of 1, 1 threads" in text
    assert all(f"{name} {value:.1f}" in text for name, value in seconds.items())


@pytest.mark.slow
def test_the_controls_are_held_against_no_messages(tmp_path, monkeypatch):
    """The real program, on few rows; started again, it reads its runs."""
    words = "--dataset digits --max-rows 101 --epochs 1 --batch 20 --seeds 0 1".split()
    words += "--layers 2 --width 8 --patch 4 --workers 1".split()
    out = tmp_path / "afmp" / "controls"
    words += ["--runs", str(tmp_path / "runs"), "--out", str(out)]
    command = [sys.executable, "benchmarks/afmp_controls.py", *words]
    told = []
    for _ in range(2):
        done = subprocess.run(command, check=True, capture_output=True, cwd=ROOT, text=True)
        made = sorted((tmp_path / "runs").rglob("report.json"))
        told.append((json.loads(done.stdout)["verdicts"], [path.stat().st_mtime for path in made]))
    assert told[0] == told[1]
    tests = pd.read_csv(out / "paired_tests.csv")
    pairs = list(zip(tests["setting"], tests["against"], strict=True))
    kept = ["dense", "keep 0.3", "top-down", "one pass, wider"]
    expected = [(name, "keep 0") for name in kept] + [("top-down", "one pass, wider")]
    assert sorted(set(pairs)) == sorted(expected)
    assert len(told[0][0]) == len(pairs)
    monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
    text = afmp_words.controls_words()
    assert "- top-down and one pass, wider: no difference" in text and "in NLL" not in text


def test_a_measurement_becomes_words(tmp_path, monkeypatch):
    rows = [("DeiT-Tiny", 64, 1.0), ("DeiT-Tiny", 96, 4.0), ("AFMP", 64, 1.0), ("AFMP", 96, 3)]
    table = pd.DataFrame(rows, columns=["model", "side", "cpu_seconds"]).assign(outcome="ok")
    table["peak_mb"] = [100.0, 200.0, 100.0, 100.0]
    failed = {"model": "DeiT-Tiny", "side": 128, "outcome": "out of memory"}
    table = pd.concat([table, pd.DataFrame([failed])])
    saved = {"options": {"clock": "cpu_seconds", "batch": 64}}
    saved |= {"exponents": {"AFMP": 1.04}, "command": "go"}
    for name in ("scaling", "scaling-large"):
        folder = tmp_path / "afmp" / name
        folder.mkdir(parents=True)
        table.to_csv(folder / "scaling.csv", index=False)
        (folder / "scaling.json").write_text(json.dumps(saved))
    monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
    found = afmp_words.read_scalings()
    assert list(found) == ["scaling", "scaling-large"]
    assert found["scaling"]["clock"] == "cpu_seconds" and len(found["scaling"]["table"]) == 5
    words = afmp_words.cost_words(found)
    assert words.count("Batch 64: time grows") == 2 and "AFMP 1.04 (`go`)" in words
    assert "Time over that of DeiT-Tiny at 96 px: AFMP 0.75." in words
    assert "Peak memory over that of DeiT-Tiny at 96 px: AFMP 0.50." in words
    assert "DeiT-Tiny at 128 px: out of memory." in words
