"""Each published preset trains for an epoch, with all its parts."""

import re
from pathlib import Path

import numpy as np
import pytest

from attnknn.config import RunConfig, field_names, parse_setting, read_params
from attnknn.embed.run import train_run
from attnknn.studies.main import main_results

PARAMS = Path(__file__).parents[1] / "notebooks/params"
SHORT = {
    "epochs": 1,
    "warmup_epochs": 0,
    "max_train_rows": 600,
    "val_rows": 100,
    "max_test_rows": 100,
    "pretrained": False,
    "cnn_baseline": False,  # would double the time; tested on small data
    "fit_epochs": 3,
}
SMALL = SHORT | {
    "dataset": "digits",
    "batch_size": 100,
    "max_train_rows": 300,
    "augment": ["crop"],
    "crop_pad": 1,
}


def settings_of(preset: str) -> dict:
    values = read_params(PARAMS / f"{preset}.yaml")
    return {name: value for name, value in values.items() if name in field_names()}


def variant_of(preset: str) -> dict:
    """Return the other form of an experiment, as the comment of its preset tells to ask for it."""
    text = (PARAMS / f"{preset}.yaml").read_text()
    words = re.findall(r"--set (\S+=\S+?)[.]?(?=\s|$)", text)
    return dict(parse_setting(word) for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["exp1-3", "exp4", "exp5"])  # exp6 is exp5: see below
def test_a_published_preset_completes_an_epoch(preset, tmp_path):
    """On real CIFAR-10 images."""
    config = RunConfig.from_flat(settings_of(preset) | SHORT | {"seed": 42})
    run = train_run(config, tmp_path / "seed42", progress=False)
    (row,) = run.history.to_dict("records")
    # One to three steps: too few to learn, enough to see every part at work.
    assert np.isfinite(row["loss"]) and row["knn"] > 0 and row["contrastive"] > 0
    assert 0 < row["entropy"] <= np.log(config.training.k_train) + 1e-6
    assert run.rows("train").shape == (600, config.embedder.embed_dim)
    results = main_results([run], k_eval=10, k_baseline=10, k_ensemble=(5, 10), tta_views=1)
    assert np.isfinite(results.table["value"]).all()


def test_experiments_1_and_2_are_a_documented_setting_of_their_preset():
    assert variant_of("exp1-3") == {"objective": "cross_entropy", "head": "mlp"}
    assert settings_of("exp1-3")["objective"] == "joint"  # experiment 3


@pytest.mark.parametrize("preset", ["exp1-3", "exp4"])
def test_the_classifier_head_form_of_a_preset_completes_an_epoch(preset, tmp_path):
    """Experiments 1 and 2, and experiment 4 as its notebook had it, on small images."""
    changes = variant_of(preset)
    config = RunConfig.from_flat(settings_of(preset) | changes | SMALL | {"seed": 42})
    assert config.embedder.backbone == "resnet18" and config.training.head == "mlp"
    with pytest.warns(UserWarning, match="not used with objective='cross_entropy': .*k_train"):
        run = train_run(config, tmp_path / "seed42", progress=False)
    (row,) = run.history.to_dict("records")
    assert np.isfinite(row["loss"]) and "knn" not in row  # the loss is the head's
    assert run.cnn_logits("test").shape == (100, 10)
    assert run.rows("train").shape == (300, config.embedder.embed_dim)
    assert len(run.fit_history) == 3  # the attention is fitted afterwards


def test_the_preset_of_experiment_6_completes_an_epoch(tmp_path):
    """On small images: on CIFAR-10 it is experiment 5, which is trained there above."""
    config = RunConfig.from_flat(settings_of("exp6") | SMALL | {"seed": 42})
    assert config.training.objective == "joint" and config.training.mixup_alpha == 0.4
    run = train_run(config, tmp_path / "seed42", progress=False)
    (row,) = run.history.to_dict("records")
    assert np.isfinite(row["loss"]) and row["knn"] > 0 and row["contrastive"] > 0
    assert 0 < row["entropy"] <= np.log(config.training.k_train) + 1e-6
    assert run.rows("train").shape == (300, config.embedder.embed_dim)
    results = main_results([run], k_eval=10, k_baseline=10, k_ensemble=(5, 10), tta_views=1)
    assert np.isfinite(results.table["value"]).all()


def test_experiment_6_is_experiment_5_again():
    config = RunConfig.from_flat(settings_of("exp6") | {"seed": 42})
    assert config == RunConfig.from_flat(settings_of("exp5") | {"seed": 42})
    training, attention = config.training, config.attention
    assert (training.objective, training.epochs, training.batch_size) == ("joint", 20, 512)
    assert (training.k_train, training.mixup_alpha, training.label_smoothing) == (16, 0.4, 0.1)
    assert (config.embedder.backbone, config.embedder.embed_dim, attention.heads) == (
        "resnet18",
        256,
        4,
    )
