"""Stage 1: every setting is really applied, resume is exact, the test rows are never read."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

from attnknn.embed import loop as stage1
from attnknn.embed.loop import Stage1, uses_bfloat16
from attnknn.embed.run import stage_of
from attnknn.files import load_checkpoint, save_checkpoint
from tests.tiny import JOINT, SMALL, config, sealable_splits, tiny_splits

CPU = torch.device("cpu")
BASES = {"joint": JOINT, "head": SMALL}


def train(settings, tmp_path, splits=None, name="run"):
    stage = stage_of(settings, splits or tiny_splits(), device=CPU)
    history = stage.run(tmp_path / f"{name}.pt", progress=False)
    return stage, history


def weights(stage: Stage1) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in stage.embedder.parameters()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A joint training and one of a head, with no setting changed."""
    folder = tmp_path_factory.mktemp("plain")
    return {name: train(config(base), folder, name=name) for name, base in BASES.items()}


def test_training_learns(tmp_path):
    _, history = train(config(SMALL, epochs=10, lr=200.0), tmp_path)
    assert history["loss"].iloc[-1] < history["loss"].iloc[0]
    assert history["val_accuracy"].max() > 0.8


def test_joint_training_learns_and_records_real_entropies(tmp_path):
    _, history = train(config(JOINT, epochs=8, lr=3e-2), tmp_path)
    assert history["val_accuracy"].max() > 0.8
    entropy = history["entropy"]
    # Fault 7: the published log shows a constant 0 here.
    assert (entropy > 0).all() and (entropy <= np.log(5) + 1e-6).all() and entropy.nunique() > 1


# Fault 7: settings that the published loop read and never used.
JOINT_CHANGES = [
    {"knn_weight": 0.3},
    {"contrastive_weight": 0.0},
    {"contrastive_temperature": 0.5},
    {"contrastive_form": "margin"},
    {"entropy_weight": 0.5},
    {"label_smoothing": 0.0},
    {"mixup_alpha": 0.4, "mixup_share": 1.0},
    {"augment": []},
    {"hard_negatives": "keep"},
    {"hard_negatives": "weight"},
    {"warmup_epochs": 1},
    {"schedule": "warm_restarts", "restart_epochs": 1},
    {"clip_norm": 0.01},
    {"backbone_lr_scale": 0.0, "pretrained": False},
    {"attention_lr_scale": 0.5},
    {"k_train": 9},
    {"exclude_self": False},
    {"temperature_start": 0.2},
    {"refresh_epochs": 2},
    {"neighbour_search": "matmul"},
]
WITHOUT_EFFECT = [{"backbone_lr_scale": 0.0, "pretrained": False}]  # nothing is pretrained here


@pytest.mark.parametrize("change", JOINT_CHANGES, ids=str)
def test_fault_7_each_joint_setting_changes_the_training(change, plain, tmp_path):
    base, before = plain["joint"]
    changed, after = train(config(JOINT, **change), tmp_path, name="changed")
    # The weights are those of the best epoch, which may be the first: the losses tell of all.
    same = torch.equal(weights(base), weights(changed)) and before["loss"].equals(after["loss"])
    assert same == (change in WITHOUT_EFFECT)


@pytest.mark.parametrize(
    "change",
    [
        {"label_smoothing": 0.0},
        {"mixup_alpha": 0.4, "mixup_share": 1.0},
        {"augment": []},
        {"crop_pad": 1},
        {"crop_mode": "zero"},
        {"augment": ["crop", "flip"], "alternating_flip": False},
        {"schedule": "cosine"},
        {"optimiser": "muon"},
        {"small_sizes": [6], "small_until": [0.5]},
        {"lookahead": False},
        {"clip_norm": 0.01},
        {"head": "mlp"},
        {"seed": 1},
    ],
    ids=str,
)
def test_each_head_setting_changes_the_training(change, plain, tmp_path):
    base, _ = plain["head"]
    changed, _ = train(config(SMALL, **change), tmp_path, name="changed")
    assert not torch.equal(weights(base), weights(changed))


def test_same_seed_gives_the_same_weights(plain, tmp_path):
    again, _ = train(config(JOINT), tmp_path)
    assert torch.equal(weights(plain["joint"][0]), weights(again))


@pytest.mark.parametrize(
    "base",
    [
        SMALL,
        # Killed between two refreshes: the memory is older than the networks.
        JOINT | {"refresh_epochs": 3, "mixup_alpha": 0.4},
        # Dropout draws from the generator of the process.
        SMALL | {"projection": "deep", "embed_dim": 8},
    ],
    ids=["head", "joint", "dropout"],
)
def test_a_killed_training_ends_with_the_same_numbers(base, tmp_path, monkeypatch):
    settings = config(base, epochs=4)
    whole, history = train(settings, tmp_path, name="whole")

    class KilledError(BaseException):
        """Stands for kill -9 in the third epoch."""

    def killed(self, bar):
        if self.epoch == 2:
            raise KilledError
        return original(self, bar)

    original = Stage1._run_epoch
    with monkeypatch.context() as patch:
        patch.setattr(Stage1, "_run_epoch", killed)
        with pytest.raises(KilledError):
            train(settings, tmp_path, name="broken")
    torch.manual_seed(12345)  # another process has another state
    resumed, resumed_history = train(settings, tmp_path, name="broken")
    assert torch.equal(weights(whole), weights(resumed))
    columns = [name for name in history if "seconds" not in name]
    assert history[columns].equals(resumed_history[columns])


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.5, 70, 130), (1.0, 200, 200)])
def test_fault_16_mixup_share_is_the_share_of_mixed_batches(share, low, high):
    settings = config(SMALL, mixup_alpha=0.4, mixup_share=share)
    stage = stage_of(settings, tiny_splits(), device=CPU)
    batches = [stage.load(torch.arange(7))[1] for _ in range(200)]
    # Four deviations of the binomial around a half are 100 +- 28.
    assert low <= sum(batch.partners is not None for batch in batches) <= high


@pytest.mark.parametrize("base", [SMALL, JOINT], ids=["cross_entropy", "joint"])
def test_fault_5_no_test_row_is_read_in_training_or_choosing(base, tmp_path):
    splits = sealable_splits()
    with splits.test.seal():
        stage, history = train(config(base), tmp_path, splits)
        with pytest.raises(AssertionError, match="inputs of sealed rows were read"):
            stage.objective.log_probs(stage.embedder, splits.test.inputs)
    assert history["val_accuracy"].notna().all()  # there was something to choose by


def test_the_best_epoch_is_the_one_that_validates_best(tmp_path):
    stage, history = train(config(SMALL, epochs=6, lr=30.0), tmp_path)
    log_probs = stage.objective.log_probs(stage.embedder, stage.val.inputs)
    labels = torch.from_numpy(stage.val.labels)
    accuracy = (log_probs.argmax(dim=1) == labels).float().mean()
    assert float(accuracy) == pytest.approx(history["val_accuracy"].max())


def test_the_checkpoint_keeps_the_random_state_of_mps(tmp_path, monkeypatch):
    # Trained first: torch's compiler, which training loads, cannot be loaded under the patches.
    stage, _ = train(config(SMALL, epochs=1), tmp_path)
    restored = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.arange(5, dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    save_checkpoint(tmp_path / "mps.pt", stage._state())
    stage._restore(load_checkpoint(tmp_path / "mps.pt"))
    assert [state.tolist() for state in restored] == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    stage._restore(load_checkpoint(tmp_path / "mps.pt"))  # on a machine without MPS
    assert len(restored) == 1


@pytest.mark.parametrize(
    ("base", "names"),
    [(SMALL, ["loss", "accuracy"]), (JOINT, ["loss", "accuracy", "entropy"])],
    ids=["cross_entropy", "joint"],
)
def test_the_bar_shows_running_means(base, names, tmp_path, monkeypatch):
    shown, made = [], []

    class Watched(tqdm):
        def __init__(self, *items, **options):
            made.append(options)
            super().__init__(*items, **options | {"file": io.StringIO()})

        def set_postfix(self, values, **options):
            shown.append(values)
            super().set_postfix(values, **options)

    monkeypatch.setattr(
        stage1, "progress_bar", lambda title, disable, **how: Watched(desc=title, **how)
    )
    _, history = train(config(base, epochs=2), tmp_path)
    assert [(each["total"], each["initial"]) for each in made] == [(6, 0)]  # one bar for all
    assert [list(values) for values in shown] == [names] * 6  # two epochs of three steps
    columns = {"loss": "loss", "accuracy": "train_accuracy", "entropy": "entropy"}
    assert shown[-1] == {name: f"{history[columns[name]].iloc[-1]:.3f}" for name in names}


# In a process of its own: the shape checks that tests switch on cannot be compiled.
COMPILED = """
import json, sys
from pathlib import Path
from tests.embed.test_loop import train
from tests.tiny import SMALL, config
histories = {}
for compiled in (False, True):
    settings = config(SMALL, compile=compiled)
    stage, history = train(settings, Path(sys.argv[1]), name=f"compiled {compiled}")
    histories[hasattr(stage.features, "_torchdynamo_orig_callable")] = history.to_dict("list")
print(json.dumps([histories[False], histories[True]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler: no g++")
def test_compiled_features_train_the_same_network(tmp_path):
    root = Path(__file__).parents[2]
    places = {
        "PYTHONPATH": str(root),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", COMPILED, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, compiled = json.loads(done.stdout.splitlines()[-1])
    for name in ("loss", "val_nll"):
        np.testing.assert_allclose(compiled[name], plain[name], rtol=1e-3)


def test_a_joint_epoch_is_judged_with_a_memory_of_its_own_weights(tmp_path):
    stage, history = train(config(JOINT, epochs=4), tmp_path)
    best = history[history["val_accuracy"] == history["val_accuracy"].max()].iloc[-1]
    stage._remember(stage._embed_all())  # as the finished run will have it
    assert stage.validate() == {name: best[name] for name in ("val_accuracy", "val_nll")}


@pytest.mark.parametrize(("refresh_epochs", "ages"), [(1, [0, 0, 0, 0]), (3, [1, 2, 0, 1])])
def test_the_memory_is_as_old_as_asked_and_embedded_once(refresh_epochs, ages, tmp_path):
    stage = stage_of(
        config(JOINT, epochs=4, refresh_epochs=refresh_epochs), tiny_splits(), device=CPU
    )
    found, embedded = [], []
    embed_all, validate = stage._embed_all, stage.validate

    def watched_embed_all():
        embedded.append(stage.epoch)
        return embed_all()

    def watched_validate():
        fresh = torch.equal(stage.objective.memory.bank.rows, torch.from_numpy(embed_all()))
        found.append(stage.epoch - embedded[-1])
        assert fresh == (found[-1] == 0)
        return validate()

    stage._embed_all, stage.validate = watched_embed_all, watched_validate
    stage.run(tmp_path / "run.pt", progress=False)
    assert found == ages
    assert embedded == [epoch for epoch in range(5) if epoch % refresh_epochs == 0]


def test_fault_13_the_vote_alone_reaches_the_attention_and_the_embedder():
    """Gradients are looked at: weight decay moves weights too."""
    settings = config(JOINT, entropy_weight=0.0, contrastive_weight=0.0)
    stage = stage_of(settings, tiny_splits(), device=CPU)
    stage.before_epoch()
    stage._train_step(torch.arange(20))
    slopes = {name: p.grad for name, p in stage.objective.network.named_parameters()}
    assert slopes["parts.query_key.log_temperature"].abs().min() > 1e-6
    convolutions = stage.embedder.backbone.parameter_roles()["filters"]
    assert all(weight.grad.abs().max() > 1e-6 for weight in convolutions)


@pytest.mark.parametrize("prefers_later", [True, False])
def test_of_epochs_that_validate_alike_one_is_kept_by_rule(tmp_path, monkeypatch, prefers_later):
    monkeypatch.setattr(Stage1, "prefers_later", prefers_later)
    after, said = [], iter([0.4, 0.6, 0.6, 0.5])

    def scripted(self):
        after.append(weights(self).clone())
        return {"val_accuracy": next(said), "val_nll": 1.0}

    monkeypatch.setattr(Stage1, "validate", scripted)
    stage, _ = train(config(SMALL, epochs=4, lookahead=False), tmp_path)
    same = [torch.equal(weights(stage), each) for each in after]
    assert same == [False, not prefers_later, prefers_later, False]


def test_a_loss_that_is_not_finite_stops_with_advice(tmp_path):
    with pytest.raises(RuntimeError, match="lower lr"):
        train(config(SMALL, lr=1e30, lookahead=False), tmp_path)


def test_early_epochs_see_small_images(tmp_path):
    stage = stage_of(
        config(SMALL, small_sizes=[4, 6], small_until=[0.5, 0.7]), tiny_splits(), device=CPU
    )
    sides = []
    features = stage.features

    def watched(inputs):
        sides.append(inputs.shape[-1])
        return features(inputs)

    stage.features = watched
    stage.run(tmp_path / "run.pt", progress=False)
    assert sides == [4, 4, 4, 6, 6, 8]  # two epochs of three steps


def test_small_sizes_need_their_shares():
    with pytest.raises(ValueError, match="small_until must hold one rising share"):
        config(SMALL, small_sizes=[4, 6], small_until=[0.5])


def test_precision_is_chosen_by_name_or_by_the_hardware(monkeypatch):
    cpu = torch.device("cpu")
    assert uses_bfloat16("bfloat16", cpu) and not uses_bfloat16("float32", cpu)
    for capable in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda c=capable: c)
        assert uses_bfloat16("auto", cpu) is capable


def test_bfloat16_trains_nearly_the_same_network(tmp_path):
    exact, _ = train(config(SMALL), tmp_path, name="exact")
    coarse, _ = train(config(SMALL, precision="bfloat16"), tmp_path, name="coarse")
    assert all(p.dtype == torch.float32 for p in coarse.embedder.parameters())
    assert not torch.equal(weights(exact), weights(coarse))
    torch.testing.assert_close(weights(exact), weights(coarse), rtol=0.2, atol=0.05)
