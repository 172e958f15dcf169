"""Training of AFMP: selection, resume, folders."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from attnknn.afmp import train as module
from attnknn.afmp.graph import AFMPConfig
from attnknn.afmp.train import AFMPTraining, Recipe, Setting, build_classifier, train_setting
from attnknn.config import EmbedderConfig
from attnknn.data.splits import InputSpec, Split
from attnknn.embed import loop
from attnknn.embed.networks import build_embedder
from attnknn.embed.parallel import ALONE, Group
from attnknn.files import DamagedError, OutdatedError
from tests.tiny import tiny_splits

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


def untimed(history: pd.DataFrame) -> pd.DataFrame:
    return history[[name for name in history if "seconds" not in name]]


@pytest.mark.slow
def test_a_run_learns_and_is_kept(tmp_path):
    run = train(tmp_path, recipe=Recipe(epochs=12, batch_size=10, lr=1e-2))
    assert run.report["metrics"]["val_accuracy"] > 0.8  # chance is 1/3
    assert run.history["val_accuracy"].max() == pytest.approx(run.report["metrics"]["val_accuracy"])
    assert list(run.gates["epoch"].unique()) == [10, 12]  # every tenth epoch and the last
    assert np.allclose(run.gates["kept"], round(0.3 * 66) / 66)
    assert not (run.folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("kind", ["afmp", "published", "deit"])
def test_gates_over_images_are_kept_at_the_recorded_epochs(tmp_path, monkeypatch, kind):
    """The last one is that of the last epoch's weights, as are the shares by layer."""
    monkeypatch.setattr(module, "LOOK_EVERY", 2)
    splits, last = tiny_splits(), []
    run_epoch = AFMPTraining._run_epoch

    def noting(self, bar):
        run_epoch(self, bar)
        last[:] = [copy.deepcopy(self.model)]

    monkeypatch.setattr(AFMPTraining, "_run_epoch", noting)
    run = train(tmp_path, Setting("a", MODEL, kind), splits=splits)
    if kind != "afmp":
        assert run.gate_maps == {}
        return
    assert list(run.gate_maps) == [2, 3] == list(run.gates["epoch"].unique())
    pixels = torch.from_numpy(splits.val.inputs[:4]).float() / 255
    model = last[0].eval()
    middle = model.network.gates(model.normalised(pixels))[1]
    np.testing.assert_allclose(run.gate_maps[3], middle.gates.numpy(), rtol=1e-6)


def test_a_finished_run_is_read_not_trained_again(tmp_path, monkeypatch):
    first = train(tmp_path)
    monkeypatch.setattr(AFMPTraining, "forward", lambda *_: pytest.fail("trained again"))
    again = train(tmp_path)
    np.testing.assert_array_equal(first.logits["test"], again.logits["test"])
    pd.testing.assert_frame_equal(first.history, again.history)


def test_other_settings_get_other_folders(tmp_path):
    paths = {
        train(tmp_path).folder,
        train(tmp_path, seed=1).folder,
        train(tmp_path, recipe=Recipe(epochs=2, batch_size=20)).folder,
        train(tmp_path, Setting("a", replace(MODEL, keep_share=0.5))).folder,
    }
    assert len(paths) == 4


def test_other_rows_get_another_folder(tmp_path):
    """Files of one's own can change under the same name."""
    one, two = (
        train(tmp_path, recipe=ONE_EPOCH, splits=tiny_splits(seed)).folder for seed in (0, 1)
    )
    assert one != two


def test_the_version_decides_the_folder_and_a_changed_file_is_named(tmp_path, monkeypatch):
    run = train(tmp_path, recipe=ONE_EPOCH)
    (run.folder / "gates.csv").write_text("epoch,layer\n")
    with pytest.raises(DamagedError, match=r"gates\.csv must be as it was written"):
        train(tmp_path, recipe=ONE_EPOCH)
    monkeypatch.setattr(module, "AFMP_VERSION", 2)
    assert train(tmp_path, recipe=ONE_EPOCH).folder != run.folder
    with pytest.raises(OutdatedError, match="by version 2 of the method, got version 1"):
        module.load_ablation_run(run.folder, run.setting)


@pytest.mark.parametrize("kind", ["afmp", "published"])
def test_a_killed_run_ends_with_the_same_numbers(tmp_path, monkeypatch, kind):
    setting = Setting("a", MODEL, kind)
    whole = train(tmp_path / "whole", setting)
    run_epoch, calls = AFMPTraining._run_epoch, []

    def dies_in_the_third(self, bar):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        run_epoch(self, bar)

    monkeypatch.setattr(AFMPTraining, "_run_epoch", dies_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", setting)
    monkeypatch.undo()
    resumed = train(tmp_path / "cut", setting)
    np.testing.assert_array_equal(whole.logits["test"], resumed.logits["test"])
    pd.testing.assert_frame_equal(*(untimed(run.history) for run in (whole, resumed)))


def test_the_rate_falls_when_validation_stalls(tmp_path):
    recipe = Recipe(epochs=5, batch_size=60, lr=1e-12, patience=1, factor=0.5)
    rates = train(tmp_path, recipe=recipe).history["lr"].to_numpy()
    assert rates[0] == 1e-12 and rates[-1] == pytest.approx(0.5e-12)


def test_fault_26_only_validation_rows_are_read_in_training(tmp_path, monkeypatch):
    """The published model's test rows are looked at, to show what its choice of epoch made."""
    read, splits, judge = [], tiny_splits(), module.judge

    def noting(model, split, name):
        read.append("val" if split is splits.val else "test" if split is splits.test else "?")
        return judge(model, split, name)

    monkeypatch.setattr(module, "judge", noting)
    run = train(tmp_path, splits=splits)
    assert read == ["val"] * RECIPE.epochs
    read.clear()
    published = train(tmp_path, Setting("p", MODEL, "published"), splits=splits)
    assert read == ["val", "test"] * RECIPE.epochs
    assert "test_accuracy" in published.history and "test_accuracy" not in run.history


@pytest.mark.parametrize("kind", ["afmp", "published"])
def test_fault_26_the_best_epoch_on_validation_rows_is_kept(tmp_path, monkeypatch, kind):
    """Validation says the second of three epochs, test rows the third: the second is kept."""
    after, said = [], {"val": [0.3, 0.9, 0.5], "test": [0.1, 0.2, 0.9]}

    def scripted(model, split, name):
        if name == "val":
            after.append({key: value.clone() for key, value in model.state_dict().items()})
        return {f"{name}_accuracy": said[name][len(after) - 1], f"{name}_nll": 1.0}

    monkeypatch.setattr(module, "judge", scripted)
    splits = tiny_splits()
    kept = train(tmp_path, Setting("a", MODEL, kind), splits=splits).load_model(splits)
    same = [
        all(torch.equal(value, weights[name]) for name, value in kept.state_dict().items())
        for weights in after
    ]
    assert same == [False, True, False]


def test_fault_26_epoch_seconds_are_training_alone(tmp_path, monkeypatch):
    """On a clock that moves by 1 in a step and by 100 and more beside it, an epoch is 3 steps."""
    clock, forward = [0.0], AFMPTraining.forward

    def slow(part, seconds):
        def slowly(*arguments):
            clock[0] += seconds
            return part(*arguments)

        return slowly

    def unit_step(*arguments):
        clock[0] += 1
        return forward(*arguments)

    monkeypatch.setattr(
        loop,
        "time",
        SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: clock[0]),
    )
    for name, seconds in (("judge", 100), ("gate_facts", 1000), ("middle_gates", 10_000)):
        monkeypatch.setattr(module, name, slow(getattr(module, name), seconds))
    monkeypatch.setattr(module, "LOOK_EVERY", 1)
    monkeypatch.setattr(AFMPTraining, "forward", unit_step)
    history = train(tmp_path).history
    assert history["seconds"].tolist() == [3.0] * RECIPE.epochs
    assert history["cpu_seconds"].tolist() == [3.0] * RECIPE.epochs
    assert history["seconds_with_validation"].tolist() == [103.0] * RECIPE.epochs
    assert history["cpu_seconds_with_validation"].tolist() == [103.0] * RECIPE.epochs


def test_the_same_seed_gives_the_same_weights():
    splits = tiny_splits()
    models = [build_classifier(Setting("a", MODEL), splits, seed=seed) for seed in (3, 3, 4)]
    one, two, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(one, two) and not torch.equal(one, other)


def images_of(n_rows: int, *, channels: int = 1, side: int = 8) -> Split:
    return Split(np.zeros((n_rows, channels, side, side), np.uint8), np.zeros(n_rows, int))


def test_the_transformer_reads_the_same_images():
    network = module.build_transformer(AFMPConfig(), 10, 3, 32)
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_without_messages_every_gate_is_closed():
    splits = tiny_splits()
    model = build_classifier(Setting("a", replace(MODEL, keep_share=0.0)), splits, seed=0)
    for layer in module.gate_facts(model, splits.val):
        assert (layer["kept"], layer["closed"]) == (0, 1) and np.isnan(layer["mean"])
    assert not module.middle_gates(model, splits.val).any()


@pytest.mark.parametrize(("kind", "batches"), [("published", [128, 128, 44]), ("afmp", [300])])
def test_fault_20_the_published_model_is_judged_in_its_own_batches(kind, batches):
    """One image of a batch exchanges messages: larger batches would make it worse."""
    model = build_classifier(Setting("a", MODEL, kind), tiny_splits(), seed=0)
    seen = []
    model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    module.judge(model, images_of(300), "val")
    assert seen == batches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr must"),
        ({"weight_decay": -1.0}, "weight_decay must"),
        ({"patience": -1}, "patience must"),
        ({"factor": 1.0}, "factor must"),
    ],
)
def test_bad_recipes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_tables_are_refused():
    with pytest.raises(ValueError, match="must hold images"):
        build_classifier(Setting("a", MODEL), replace(tiny_splits(), kind="table"), seed=0)
    with pytest.raises(ValueError, match="kind must be one of"):
        Setting("a", MODEL, "cnn")


def test_afmp_is_a_backbone():
    splits = tiny_splits()
    embedder = build_embedder(EmbedderConfig(backbone="afmp"), splits.spec)
    rows = embedder(torch.rand(4, 1, 8, 8))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))
    assert embedder.backbone.config.patch == 2 and embedder.embed_dim == 128


@pytest.mark.parametrize(("height", "width", "patch"), [(32, 32, 8), (30, 30, 6), (36, 50, 2)])
def test_the_backbone_takes_a_patch_that_divides_the_images(height, width, patch):
    if patch == 2:  # far from 8: so many patches would take hours without a word
        with pytest.raises(ValueError, match=f"images must .* got {height} x {width}: set image_"):
            afmp_embedder(height, width)
        return
    embedder = afmp_embedder(height, width)
    assert embedder.backbone.config.patch == patch
    assert embedder(torch.rand(2, 1, height, width)).isfinite().all()


def test_the_backbone_keeps_out_of_half_precision():
    """Profiles with ``precision: auto`` train with bfloat16 where a CPU has it."""
    embedder, pixels = afmp_embedder(16, 16), torch.rand(2, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        rows = embedder(pixels)
        rows.sum().backward()
    torch.testing.assert_close(rows, embedder(pixels))


def afmp_embedder(height: int, width: int):
    config = EmbedderConfig(backbone="afmp", projection="none")
    return build_embedder(config, InputSpec("image", (1, height, width), (0.5,), (0.5,)))


def test_the_gradients_of_shares_add_up_to_that_of_the_batch():
    """What sparsity adds is a mean over a share's images: shares of 4 and 7 weigh by their size."""
    recipe = Recipe(epochs=1, batch_size=11, augment=())
    training = AFMPTraining(
        Setting("a", replace(MODEL, sparse_weight=3.0)), tiny_splits(), recipe, seed=0
    )
    ids = torch.arange(11)
    everyone = training.forward(training.load(ids)[0])[0].detach()

    class Pretended(Group):
        def share(self, n_rows):
            return slice(0, 4) if self.rank == 0 else slice(4, n_rows)

        def _gathered(self, own, n_rows):
            return everyone

        def combine(self, added, averaged):
            pass

    def slope(group):
        training.group, training.optimiser.step = group, lambda: None
        training._train_step(ids)
        return torch.cat([p.grad.flatten() for p in training.model.parameters()])

    parts = slope(Pretended(0, 2)) + slope(Pretended(1, 2))
    torch.testing.assert_close(parts, slope(ALONE), rtol=1e-4, atol=1e-6)
