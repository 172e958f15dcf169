"""Run folders: complete or resumed, never overwritten, and what they hold is consistent."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnknn.config import ConfigError, RunConfig
from attnknn.embed import run as module
from attnknn.embed import runs
from attnknn.embed.run import choose_device, load_data, load_run, train_run
from attnknn.files import DamagedError, OutdatedError
from tests.tiny import JOINT, SMALL, config, sealable_splits, tiny_splits


@pytest.fixture(autouse=True)
def tiny_data(monkeypatch):
    monkeypatch.setattr(module, "load_splits", lambda *_, **__: tiny_splits())


@pytest.fixture
def run(tmp_path):
    return train_run(config(SMALL), tmp_path / "seed0", progress=False)


def test_a_run_holds_rows_labels_logits_and_an_attention(run):
    assert run.rows("train").shape == (60, 8)
    np.testing.assert_allclose(np.linalg.norm(run.rows("test"), axis=1), 1, rtol=1e-5)
    assert run.labels("val").tolist() == tiny_splits().val.labels.tolist()
    assert run.cnn_logits("test").shape == (24, 3)
    assert len(run.history) == 2 and len(run.fit_history) == 3
    assert run.report["data_source"] == "made by a test"
    assert {"config", "seed", "seconds", "versions", "hardware", "commit"} <= set(run.report)


def test_a_finished_run_is_loaded_not_trained_again(run, monkeypatch):
    monkeypatch.setattr(module, "Stage1", None)  # would fail if it were used
    again = train_run(config(SMALL), run.folder, progress=False)
    np.testing.assert_array_equal(again.rows("test"), run.rows("test"))


def test_another_configuration_is_refused_by_name(run):
    with pytest.raises(ConfigError, match=r"epochs: 2 -> 3"):
        train_run(config(SMALL, epochs=3), run.folder, progress=False)


def test_the_saved_embedder_gives_the_saved_rows(run):
    inputs = torch.from_numpy(tiny_splits().test.inputs).float() / 255
    with torch.no_grad():
        rows = run.embedder(inputs)
    np.testing.assert_allclose(rows, run.rows("test"), atol=1e-5)


def test_an_unfinished_folder_is_not_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"report\.json"):
        load_run(tmp_path)


def test_no_checkpoint_is_left_behind(run):
    assert not (run.folder / "checkpoint.pt").exists()


def test_joint_attention_is_kept_when_asked(tmp_path):
    settings = config(JOINT, fit_attention_on="train")
    run = train_run(settings, tmp_path / "seed0", progress=False)
    assert run.fit_history.empty
    assert run.cnn_logits("test") is None
    stored = run.attention.state_dict()
    held_out = train_run(config(JOINT), tmp_path / "other", progress=False)
    assert not held_out.fit_history.empty
    name = "parts.query_key.log_temperature"
    assert not torch.equal(stored[name], held_out.attention.state_dict()[name])


def test_report_is_plain_json_that_rebuilds_the_configuration(run):
    report = json.loads((run.folder / "report.json").read_text())
    assert RunConfig.from_flat(report["config"]) == config(SMALL)


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(ConfigError, match="device must be usable here, got device='warp'"):
        choose_device("warp")


def test_fault_8_noise_reaches_the_training_labels_when_asked():
    """Noise in training and memory is a setting of the run; in the memory alone, a study."""
    clean, noisy = load_data(config(SMALL)), load_data(config(SMALL, train_noise=0.3))
    changed = clean.train.labels != noisy.train.labels
    assert changed.sum() == 18
    np.testing.assert_array_equal(clean.val.labels, noisy.val.labels)
    np.testing.assert_array_equal(clean.test.labels, noisy.test.labels)


def test_fault_8_noisy_training_labels_are_those_of_the_memory(tmp_path):
    run = train_run(config(SMALL, train_noise=0.3), tmp_path / "seed0", progress=False)
    assert (run.labels("train") != tiny_splits().train.labels).sum() == 18
    assert run.bank.labels.tolist() == run.labels("train").tolist()


def test_fault_8_a_long_tail_reaches_the_training_rows_when_asked():
    counts = np.bincount(load_data(config(SMALL, train_tail=0.1)).train.labels)
    assert counts.tolist() == [20, 6, 2]  # 20 * 0.1 ** (c / 2)


def test_fault_14_the_cnn_baseline_has_the_same_budget(tmp_path, monkeypatch):
    made = []

    class Watched(module.Stage1):
        def __init__(self, settings, *rest, **options):
            made.append(settings.training)
            super().__init__(settings, *rest, **options)

    monkeypatch.setattr(module, "Stage1", Watched)
    run = train_run(config(JOINT, cnn_baseline=True), tmp_path / "seed0", progress=False)
    joint, cnn = made
    assert cnn == replace(joint, objective="cross_entropy", head="linear")
    assert run.cnn_logits("test").shape == (24, 3)
    assert not (run.folder / "cnn.pt").exists()


@pytest.fixture
def fits(monkeypatch):
    """Every call of the attention's fit: the memory, the queries, and the rows they may not see."""
    calls, fit_attention = [], module.fit_attention

    def watched(bank, rows, labels, **options):
        calls.append((bank, rows, labels, options["exclude_ids"]))
        return fit_attention(bank, rows, labels, **options)

    monkeypatch.setattr(module, "fit_attention", watched)
    return calls


@pytest.mark.parametrize("base", [SMALL, JOINT], ids=["cross_entropy", "joint"])
def test_fault_4_the_attention_is_fitted_on_held_out_queries(base, tmp_path, fits):
    run = train_run(config(base), tmp_path / "seed0", progress=False)
    ((bank, rows, labels, exclude_ids),) = fits
    np.testing.assert_array_equal(rows, run.rows("val"))
    np.testing.assert_array_equal(labels, tiny_splits().val.labels)
    np.testing.assert_array_equal(bank.rows, run.rows("train"))
    assert exclude_ids is None  # none of them is in the memory


def test_fault_4_fitting_on_seen_queries_must_be_asked_for(tmp_path, fits):
    settings = config(SMALL, fit_attention_on="train")
    run = train_run(settings, tmp_path / "seed0", progress=False)
    ((_, rows, labels, exclude_ids),) = fits
    np.testing.assert_array_equal(rows, run.rows("train"))
    np.testing.assert_array_equal(labels, tiny_splits().train.labels)
    assert exclude_ids.tolist() == list(range(60))  # no row is its own neighbour


class SealedTensors(dict):
    """Embeddings of a run, those of test rows out of reach."""

    def __getitem__(self, name):
        if name.startswith("test"):
            raise AssertionError(f"{name} was read")
        return super().__getitem__(name)


@pytest.mark.parametrize("base", [SMALL, JOINT | {"cnn_baseline": True}], ids=["head", "joint"])
def test_fault_5_no_test_row_is_read_in_either_stage(base, tmp_path, monkeypatch):
    splits, stages = sealable_splits(), []

    class Sealed(module.Stage1):
        def run(self, *arguments, **options):
            stages.append("stage 1")
            with splits.test.seal():
                return super().run(*arguments, **options)

    def sealed_stage2(stage, tensors, splits, folder, **options):
        stages.append("stage 2")
        with splits.test.seal():
            stage2(stage, SealedTensors(tensors), splits, folder, **options)

    stage2 = module._stage2
    monkeypatch.setattr(module, "load_splits", lambda *_, **__: splits)
    monkeypatch.setattr(module, "Stage1", Sealed)
    monkeypatch.setattr(module, "_stage2", sealed_stage2)
    run = train_run(config(base), tmp_path / "seed0", progress=False)
    assert stages == ["stage 1"] * (1 + config(base).training.cnn_baseline) + ["stage 2"]
    assert len(run.rows("test")) == 24  # embedded, between the two


def test_settings_that_are_not_used_are_named(tmp_path):
    with pytest.warns(UserWarning, match="not used with objective='cross_entropy': entropy_weight"):
        train_run(config(SMALL, entropy_weight=0.5), tmp_path / "seed0", progress=False)


@pytest.mark.parametrize("base", [SMALL, JOINT], ids=["cross_entropy", "joint"])
def test_a_width_that_the_heads_cannot_share_is_refused_before_training(
    base, tmp_path, monkeypatch
):
    monkeypatch.setattr(module.Stage1, "run", None)  # would fail if it were called
    settings = config(base, widths=[4, 6, 10], qk="full", heads=4)
    with pytest.raises(ConfigError, match=r"width must be a multiple of heads .*=10, heads=4"):
        train_run(settings, tmp_path / "seed0", progress=False)


def test_heads_share_the_width_of_the_backbone_not_embed_dim(tmp_path):
    settings = config(SMALL, widths=[4, 6, 9], qk="full", heads=3)  # embed_dim is 256
    assert train_run(settings, tmp_path / "seed0", progress=False).rows("test").shape == (24, 9)


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (SMALL, {"fit_k": 61}, "fit_k from 61 to 60"),
        (SMALL, {"fit_k": 60, "fit_attention_on": "train"}, "fit_k from 60 to 59"),
        (JOINT, {"fit_k": 61, "k_train": 59}, "k_train from 59 to 58, fit_k from 61 to 60"),
        (JOINT, {"fit_k": 61, "k_train": 59, "fit_attention_on": "train"}, "k_train from 59 to 58"),
    ],
    ids=["fit", "fit on train", "both", "joint"],
)
def test_more_neighbours_than_rows_are_lowered_with_one_word(base, changes, named, tmp_path):
    with pytest.warns(UserWarning, match=f"to the training rows there are: {named}$") as said:
        train_run(config(base, **changes), tmp_path / "seed0", progress=False)
    assert len(said) == 1


def test_as_many_neighbours_as_there_are_rows_are_taken_without_a_word(tmp_path):
    settings = config(JOINT, fit_k=60, k_train=58)  # warnings are errors
    run = train_run(settings, tmp_path / "seed0", progress=False)
    assert len(run.bank) == 60


def test_a_joint_attention_without_a_trained_embedder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="objective must be 'cross_entropy'"):
        train_run(config(JOINT, epochs=0), tmp_path / "seed0", progress=False)


def test_a_folder_begun_with_other_rows_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "seed0"
    train_run(config(SMALL), folder, progress=False)
    (folder / "report.json").unlink()  # as if it had been killed
    monkeypatch.setattr(module, "load_splits", lambda *_, **__: tiny_splits(seed=1))
    with pytest.raises(ConfigError, match="begun with other rows"):
        train_run(config(SMALL), folder, progress=False)


def test_a_setting_that_is_newer_than_the_folder_had_its_default(run):
    path = run.folder / "config.json"
    older = json.loads(path.read_text())
    del older["clip_norm"]
    path.write_text(json.dumps(older))
    runs.claim(run.folder, config(SMALL))
    with pytest.raises(ConfigError, match=r"clip_norm: None -> 1\.0"):
        runs.claim(run.folder, config(SMALL, clip_norm=1.0))


def test_a_finished_run_whose_files_changed_is_refused_by_name(run):
    rows = run.folder / "embeddings.safetensors"
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedError, match=r"embeddings\.safetensors .* got other content"):
        train_run(config(SMALL), run.folder, progress=False)
    rows.unlink()
    with pytest.raises(DamagedError, match="got no such file"):
        load_run(run.folder)


def test_a_moved_run_is_taken_and_one_of_another_version_is_not(run, tmp_path, monkeypatch):
    moved = run.folder.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(module, "Stage1", None)  # would fail if it were used
    train_run(config(SMALL), moved, progress=False)
    monkeypatch.setattr(module, "METHOD_VERSION", 2)
    with pytest.raises(OutdatedError, match="by version 2 of the method, got version 1"):
        train_run(config(SMALL), moved, progress=False)


def test_the_report_tells_of_the_epoch_that_was_kept(run):
    best = run.history["val_accuracy"].max()
    assert run.report["metrics"]["val_accuracy"] == best
    assert run.report["seconds"]["stage1"] == pytest.approx(
        run.history["seconds_with_validation"].sum(), abs=0.01
    )


def test_a_kill_before_the_report_loses_no_training(tmp_path, monkeypatch):
    folder = tmp_path / "seed0"
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_report", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_run(config(SMALL), folder, progress=False)
    assert (folder / "checkpoint.pt").exists()
    monkeypatch.setattr(module.Stage1, "_run_epoch", None)  # no epoch is trained again
    assert len(train_run(config(SMALL), folder, progress=False).history) == 2


def test_changed_own_files_are_noticed(tmp_path, monkeypatch):
    monkeypatch.undo()  # real files this time
    rng = np.random.default_rng(0)
    rows, path = rng.normal(size=(60, 5)).astype(np.float32), tmp_path / "mine.npz"
    np.savez(path, X=rows, y=np.arange(60) % 3)
    settings = config({"backbone": "identity", "fit_epochs": 2, "fit_k": 5}, dataset=str(path))
    train_run(settings, tmp_path / "seed0", progress=False)
    assert train_run(settings, tmp_path / "seed0", progress=False).config == settings
    moment = path.stat().st_mtime_ns
    os.utime(path, ns=(moment + 10**9, moment + 10**9))  # a copy: the same rows at another time
    train_run(settings, tmp_path / "seed0", progress=False)
    np.savez(path, X=rows + 1, y=np.arange(60) % 3)
    with pytest.raises(ConfigError, match=r"mine\.npz has changed since"):
        train_run(settings, tmp_path / "seed0", progress=False)
