"""Each published preset trains for an epoch on real CIFAR-10 images, with all its parts."""

from pathlib import Path

import numpy as np
import pytest

from attnknn.config import RunConfig, field_names, read_params
from attnknn.studies.main_results import main_results
from attnknn.train import train_run

PARAMS = Path(__file__).parents[1] / "notebooks/params"
SHORT = {
    "epochs": 1,
    "warmup_epochs": 0,
    "max_train_rows": 2000,
    "val_rows": 100,
    "max_test_rows": 100,
    "pretrained": False,
    "cnn_baseline": False,  # would double the time; tested on small data
    "fit_epochs": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["exp1-3", "exp4", "exp5"])  # exp6 has exp5's settings
def test_a_published_preset_completes_an_epoch(preset, tmp_path):
    values = read_params(PARAMS / f"{preset}.yaml")
    settings = {name: value for name, value in values.items() if name in field_names()}
    config = RunConfig.from_flat(settings | SHORT | {"seed": 42})
    run = train_run(config, tmp_path / "seed42", progress=False)
    (row,) = run.history.to_dict("records")
    # An epoch of 2 000 rows is a few steps: too few to learn, enough to see every part at work.
    assert np.isfinite(row["loss"]) and row["knn"] > 0 and row["contrastive"] > 0
    assert 0 < row["entropy"] <= np.log(config.training.k_train) + 1e-6
    assert run.rows("train").shape == (2000, config.embedder.embed_dim)
    results = main_results([run], k_eval=10, k_baseline=10, k_ensemble=(5, 10), tta_views=1)
    assert np.isfinite(results.table["value"]).all()
