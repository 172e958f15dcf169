"""Training of AFMP: selection, resume, folders, the ablation study."""

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
from attnknn.afmp.graph import AFMPConfig
from attnknn.afmp.train import (
    AblationRun,
    Recipe,
    Setting,
    build_classifier,
    train_setting,
)
from attnknn.data.splits import Split
from attnknn.paper.folder import RunFolder, Task
from attnknn.paper.notebooks import find_notebooks
from attnknn.studies import afmp as afmp_gates
from attnknn.studies import afmp as afmp_published
from attnknn.studies import afmp as afmp_saved
from attnknn.studies import afmp as afmp_settings
from attnknn.studies import afmp as afmp_verdict
from attnknn.studies import afmp as study
from attnknn.studies import afmp_costs as afmp_memory
from attnknn.studies import afmp_costs as afmp_scaling
from attnknn.studies import afmp_knn
from tests.tiny import tiny_splits

ROOT = Path(__file__).parents[1]

MODEL = AFMPConfig(layers=2, width=8, patch=2, keep_share=0.3)
RECIPE = Recipe(epochs=3, batch_size=20, lr=1e-2)
ONE_EPOCH = Recipe(epochs=1, batch_size=20)
DATA = {"dataset": "tiny", "max_train_rows": None}


def train(folder, setting=None, *, seed=0, recipe=RECIPE, splits=None):
    return train_setting(
        folder,
        setting or Setting("a", MODEL),
        splits or tiny_splits(),
        recipe,
        seed=seed,
        data=DATA,
        progress=False,
    )


def images_of(n_rows: int, *, channels: int = 1, side: int = 8) -> Split:
    return Split(np.zeros((n_rows, channels, side, side), np.uint8), np.zeros(n_rows, int))


@pytest.mark.parametrize(
    ("model", "channels", "side"),
    [(AFMPConfig(), 3, 32), (AFMPConfig(layers=3, width=64, patch=4), 1, 8)],
)
def test_models_are_as_large_as_what_they_are_compared_with(model, channels, side):
    settings = afmp_settings.ablation_settings(model, keep_shares=[1.0, 0.3], sparse_weights=[1e-3])
    splits = replace(tiny_splits(), train=images_of(2, channels=channels, side=side))
    rivals = [(study._reference(settings), afmp_settings.DEIT)]
    rivals += [(study.TOP_DOWN, larger) for larger in (afmp_settings.DEIT_LARGER, study.WIDER)]
    for pair in rivals:
        chosen = [setting for setting in settings if setting.name in pair]
        models = [build_classifier(setting, splits, seed=0) for setting in chosen]
        sizes = [sum(p.numel() for p in each.parameters()) for each in models]
        assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)


def made_up_ablation(accuracies: dict[str, tuple[float, float]]) -> study.Ablation:
    """Return runs of two seeds with given accuracies on validation and on test rows."""
    others = [study.TOP_DOWN, study.PUBLISHED, f"{study.PUBLISHED}, {study.TOP_DOWN}"]
    others += [study.WIDER, afmp_settings.DEIT, afmp_settings.DEIT_LARGER]
    splits, rng = tiny_splits(), np.random.default_rng(0)
    runs = {}
    for name, (val, test) in {**dict.fromkeys(others, (0.5, 0.5)), **accuracies}.items():
        report = {"metrics": {"val_accuracy": val, "test_accuracy": test}, "parameters": 7}
        logits = {"test": rng.normal(size=(24, 3))}
        history = pd.DataFrame({"epoch": [1, 2], "lr": 1e-3, "val_accuracy": [val / 2, val]})
        history = history.assign(test_accuracy=test, cpu_seconds=2.0)
        history = history.assign(cpu_seconds_with_validation=2.5)
        parts = {"history": history, "gates": pd.DataFrame(), "logits": logits, "report": report}
        parts["gate_maps"] = {}
        runs[name] = [
            AblationRun(Setting(name, MODEL), seed, **parts, folder=Path()) for seed in (0, 1)
        ]
    return study.Ablation(runs, "keep 0.3", splits)


class TestStudy:
    """Settings, and the study on digits."""

    def test_settings_by_name(self):
        settings = afmp_settings.ablation_settings(
            AFMPConfig(), keep_shares=[1.0, 0.2, 0.3], sparse_weights=[1e-3, 1e-4, 1e-5]
        )
        assert [setting.name for setting in settings] == [
            *["dense", "keep 0.3", "keep 0.2", "λ 0.001", "λ 1e-05", "top-down"],
            *["one pass, wider", "published", "published, top-down", "DeiT", "DeiT, larger"],
        ]
        on = {setting.name for setting in settings if setting.model.top_down}
        assert on == {"top-down", "published, top-down", "DeiT, larger"}

    def test_validation_rows_choose_the_share_that_is_tested(self):
        """On test rows "keep 0.2" is best, on validation rows "dense": the verdict is on dense."""
        accuracies = {"keep 0.3": (0.6, 0.6), "dense": (0.9, 0.5), "keep 0.2": (0.5, 0.9)}
        text = afmp_verdict.verdict(made_up_ablation(accuracies))
        assert "best on validation rows: dense." in text
        assert "dense 50.00 %" in text  # but test rows report

    @pytest.mark.parametrize(
        ("has_cuda", "asked", "expected"),
        [(False, "auto", "cpu"), (True, "auto", "cuda"), (True, "cpu", "cpu")],
    )
    def test_the_device_is_passed_on(self, tmp_path, monkeypatch, has_cuda, asked, expected):
        seen, run = [], made_up_ablation({}).runs[afmp_settings.DEIT][0]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
        monkeypatch.setattr(study, "choose_device", lambda name: name)  # no CUDA on this machine
        monkeypatch.setattr(study, "load_splits", lambda **_: tiny_splits())
        monkeypatch.setattr(
            study, "train_setting", lambda *_, device, **__: seen.append(device) or run
        )
        settings = [Setting(study.TOP_DOWN, MODEL)]
        options = {"dataset": "tiny", "recipe": RECIPE, "seeds": [0, 1], "device": asked}
        study.run_ablation(tmp_path, settings, **options)
        assert seen == [expected] * 2

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_study_from_end_to_end(self, tmp_path, workers):
        settings = afmp_settings.ablation_settings(
            AFMPConfig(layers=2, width=16, patch=4), keep_shares=[1.0], sparse_weights=[1e-3]
        )
        ablation = study.run_ablation(
            tmp_path,
            settings,
            dataset="digits",
            recipe=Recipe(epochs=1, batch_size=64),
            seeds=[0, 1],
            max_rows=200,
            workers=workers,
        )
        assert ablation.reference == "keep 0.3"
        assert set(ablation.table()["method"]) == {setting.name for setting in settings}
        assert len(ablation.history()) == 2 * len(settings)
        text = afmp_verdict.verdict(ablation)
        assert all(word in text for word in ("Keep share", "Top-down", "As published", "DeiT"))
        sweep = afmp_published.published_sweep(ablation)
        assert sweep["same logits"].tolist() == [True] * 5
        assert "One and the same model" in afmp_published.sweep_words(sweep)
        gates = afmp_gates.saturation_table(ablation, ["keep 0.3", "top-down"])
        assert len(gates) == 2 * 2 and gates["saturated"].between(0, 1).all()
        head = afmp_knn.knn_head(ablation, "top-down", k=20)
        assert "attention" in set(head.table["method"]) and afmp_knn.knn_sentence(head)
        pictures = afmp_gates.gate_pictures(ablation, "keep 0.3")
        assert {len(pictures["images"]), len(pictures["gates"][1])} == {4}
        assert plot.gate_maps(**pictures).axes
        assert afmp_gates.gate_values(ablation, "keep 0.3", n_images=3)["gate"].between(0, 1).all()

    def test_tuned_votes_are_not_held_to_the_attention_s_k(self, tmp_path, monkeypatch):
        setting = Setting("top-down", AFMPConfig(layers=2, width=16, patch=4))
        options = {"recipe": Recipe(epochs=1, batch_size=64), "seeds": [0], "max_rows": 150}
        ablation = study.run_ablation(tmp_path, [setting], dataset="digits", **options)
        depths, tuned = [], afmp_knn.tuned_baselines

        def noting(found):
            depths.append(found.test.k)
            return tuned(found)

        monkeypatch.setattr(afmp_knn, "tuned_baselines", noting)
        afmp_knn.knn_head(ablation, "top-down", k=20)
        assert depths == [len(ablation.splits.train)] and depths[0] > 20

    def test_trained_runs_outlive_the_notebook_s_own_results(self, tmp_path):
        """What a killed notebook wrote is removed before it runs again; trainings must not be."""
        books = find_notebooks(Path(__file__).parents[1] / "notebooks")
        [book] = [each for each in books if each.number == "08"]
        cells = json.loads(book.path.read_text())["cells"]
        assert any('run / "afmp_runs"' in "".join(cell["source"]) for cell in cells)
        for name in (book.name, "afmp_runs"):
            (tmp_path / name / "dense").mkdir(parents=True)
        run = RunFolder(tmp_path)
        run.entries[book.name] = {"status": "begun"}
        run.begin(Task(book, {}, (0,), book.name))
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["afmp_runs"]


class TestMemory:
    """Peak memory of a step, measured in a process of its own."""

    @pytest.mark.parametrize("kind", ["afmp", "deit"])
    def test_fault_26_a_step_is_forward_and_backward_on_the_whole_batch(self, kind):
        """Memory of forward alone, or of a few images, is what was published."""
        splits, seen = tiny_splits(), []
        model = build_classifier(Setting("a", MODEL, kind), splits, seed=0).train()
        whole = afmp_memory.to_batch(splits.train.inputs)
        part = model.network.trunk.patches if kind == "afmp" else model.network
        part.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
        afmp_memory._step(model, splits.train, len(splits.train))
        assert seen == [len(whole)]
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert all(p.grad.abs().max() > 0 for p in model.network.parameters() if p.ndim > 1)

    def test_fault_26_the_peak_is_that_of_the_whole_batch(self, monkeypatch):
        """Two images warm up; the peak begins anew, and then comes all that was asked for."""
        done, step = [], afmp_memory._step

        def noted(model, batch, n_images):
            done.append(n_images)
            step(model, batch, n_images)

        monkeypatch.setattr(afmp_memory, "_step", noted)
        monkeypatch.setattr(afmp_memory, "_restart_peak", lambda: done.append("restart") or 0.0)
        monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
        splits = tiny_splits()
        assert afmp_memory._step_peak(Setting("a", MODEL), splits) > 0
        assert done == [2, "restart", len(splits.train)]

    @pytest.mark.slow
    def test_one_model_has_one_peak(self):
        """Left to the allocator, peaks of equal processes differ by more than settings do."""
        setting = Setting("a", AFMPConfig(layers=2, width=64, patch=2))
        peaks = [afmp_memory.measure_step(setting, tiny_splits(), 400) for _ in range(3)]
        assert max(peaks) < 1.1 * min(peaks)

    @pytest.mark.slow
    def test_a_larger_batch_needs_more(self):
        setting = Setting("a", AFMPConfig(layers=2, width=64, patch=2))
        small, large = (afmp_memory.measure_step(setting, tiny_splits(), n) for n in (40, 400))
        assert 0 < small < large / 4  # 1 x and 10 x, but for what libraries take

    def test_it_is_measured_once_at_the_training_batch(self, tmp_path, monkeypatch):
        asked = []

        def measured(setting, splits, batch_size):
            asked.append((setting.name, batch_size))
            return 7.5

        monkeypatch.setattr(afmp_memory, "measure_step", measured)
        runs = [train(tmp_path, recipe=ONE_EPOCH, seed=seed) for seed in (0, 1)]
        ablation = study.Ablation({"a": runs}, "a", tiny_splits())
        for _ in range(2):
            assert afmp_memory.step_memory(ablation, progress=False) == {"a": 7.5}
        assert asked == [("a", ONE_EPOCH.batch_size)]

    def test_the_table_shows_it(self, monkeypatch):
        ablation = made_up_ablation({"keep 0.3": (0.5, 0.5)})
        monkeypatch.setattr(study, "_epoch_seconds", lambda _: 1.0)
        table = study.ablation_table(ablation, {name: 12.4 for name in ablation.runs})
        assert set(table.text["MB of a step"]) == {"12"}


class TestScaling:
    """What the benchmark saved, in the notebook."""

    def test_without_a_measurement_the_command_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert afmp_scaling.read_scaling() is None
        assert "python benchmarks/afmp_scaling.py --out" in afmp_scaling.scaling_words(None)
        assert "python benchmarks/afmp_epoch.py --out" in afmp_saved.epoch_words()
        assert "python benchmarks/afmp_controls.py --out" in afmp_saved.controls_words()

    def test_the_epoch_benchmark_becomes_words(self, tmp_path, monkeypatch):
        """The real benchmark, on few rows: what it saves is what the notebook reads."""
        folder = tmp_path / "afmp" / "epoch"
        words = ["--dataset", "digits", "--max-rows", "101", "--rounds", "1", "--threads", "1"]
        command = [sys.executable, "benchmarks/afmp_epoch.py", *words, "--out", str(folder)]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
        said, table = afmp_saved.epoch_words(), pd.read_csv(folder / "epoch.csv")
        seconds = table.set_index("setting")["seconds of an epoch"]
        assert list(seconds.index) == ["dense", "keep 0.3", "top-down", "DeiT"]
        assert "on 101 images, median of 1, 1 threads" in said
        assert all(f"{name} {value:.1f}" in said for name, value in seconds.items())

    def test_the_controls_are_held_against_no_messages(self, tmp_path, monkeypatch):
        """The real program, on few rows; started again, it reads its runs."""
        words = "--dataset digits --max-rows 101 --epochs 1 --batch 20 --seeds 0 1".split()
        words += "--layers 2 --width 8 --patch 4 --workers 1".split()
        out = tmp_path / "afmp" / "controls"
        words += ["--runs", str(tmp_path / "runs"), "--out", str(out)]
        command = [sys.executable, "benchmarks/afmp_controls.py", *words]
        first, again = (
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT, text=True)
            for _ in range(2)
        )
        assert "AFMP ablation" in first.stderr and "AFMP ablation" not in again.stderr
        told, saved = (json.loads(run.stdout)["verdicts"] for run in (first, again))
        assert told == saved
        tests = pd.read_csv(out / "paired_tests.csv")
        pairs = list(zip(tests["setting"], tests["against"], strict=True))
        kept = ["dense", "keep 0.3", "top-down", "one pass, wider"]
        expected = [(name, "keep 0") for name in kept] + [("top-down", "one pass, wider")]
        assert sorted(set(pairs)) == sorted(expected)
        assert len(told) == len(pairs)
        assert "± " in (out / "measures.md").read_text()
        monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
        said = afmp_saved.controls_words()
        assert "- top-down and one pass, wider: no difference" in said and "in NLL" not in said

    def test_a_measurement_becomes_words(self, tmp_path, monkeypatch):
        folder = tmp_path / "afmp" / "scaling"
        folder.mkdir(parents=True)
        rows = [("DeiT-Tiny", 64, 1.0), ("DeiT-Tiny", 96, 4.0), ("AFMP", 64, 1.0), ("AFMP", 96, 3)]
        table = pd.DataFrame(rows, columns=["model", "side", "cpu_seconds"]).assign(outcome="ok")
        failed = {"model": "DeiT-Tiny", "side": 128, "outcome": "out of memory"}
        table = pd.concat([table, pd.DataFrame([failed])])
        table.to_csv(folder / "scaling.csv", index=False)
        options = {"clock": "cpu_seconds", "batch": 64, "sides": [64, 96, 128, 160]}
        saved = {"options": options, "exponents": {"AFMP": 1.04}, "command": "go"}
        (folder / "scaling.json").write_text(json.dumps(saved))
        monkeypatch.setenv("ATTNKNN_RESULTS", str(tmp_path))
        found = afmp_scaling.read_scaling()
        assert found.clock == "cpu_seconds" and len(found.table) == 5
        words = afmp_scaling.scaling_words(found)
        assert "AFMP 1.04" in words and "`go`" in words
        assert "at 96 px: AFMP 0.75." in words and "DeiT-Tiny at 128 px: out of memory;" in words
        assert "Asked for, but not measured: 160 px." in words
        assert "Peak memory" not in words and "Parameters" not in words  # nothing to say it by
        (folder.parent / "scaling-large").mkdir()
        for name in ("scaling.csv", "scaling.json"):
            (folder.parent / "scaling-large" / name).write_text((folder / name).read_text())
        both = afmp_scaling.read_scalings()
        assert list(both) == ["scaling", "scaling-large"]
        assert afmp_scaling.all_scaling_words(both).count("batch 64") == 2

    @pytest.mark.parametrize(
        ("peaks", "said"),
        [
            ((80.0, 70.0), "0.80; AFMP-Small keep 0.1 0.70: pruning saves memory ("),
            ((110.0, 90.0), "1.10; AFMP-Small keep 0.1 0.90: pruning saves no memory ("),
            ((110.0, 80.0), "pruning saves memory at some shares only ("),
        ],
    )
    def test_memory_and_sizes_by_hand(self, peaks, said):
        models = ["dense", "keep 0.3", "keep 0.1", "keep 0.3, top-down"]
        table = pd.DataFrame(
            {"model": [f"AFMP-Small {name}" for name in models], "side": 96, "outcome": "ok"}
            | {"peak_mb": [100.0, *peaks, 500.0], "parameters": [3, 3, 3, 6], "seconds": 1.0}
        )
        table["seconds"] = [4.0, 3.0, 2.0, 9.0]
        found = afmp_scaling.Scaling(table, "seconds", {}, "go", {"batch": 2, "sides": [96]})
        words = afmp_scaling.scaling_words(found)
        assert f"AFMP-Small keep 0.3 {peaks[0] / 100:.2f}" in words and said in words
        assert "3 of AFMP-Small with one pass, 6 with the top-down pass" in words
        assert "at 96 px: dense 4.00 s, keep 0.3 3.00 s, keep 0.1 2.00 s: fewer edges are" in words
        slower = replace(found, table=table.assign(seconds=[4.0, 3.0, 3.5, 9.0]))
        assert "time does not fall at every step" in afmp_scaling.scaling_words(slower)
        assert "not measured" not in words
