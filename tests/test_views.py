"""Views: what a changed copy of a test image looks like to the network."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnknn.data.splits import Split
from attnknn.embed import run as trained_module
from attnknn.embed.train import train_run
from attnknn.embed.views import embed_views
from tests.tiny import SMALL, config, tiny_splits


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose test images are white all over: what is not white in a view is padding."""
    splits = tiny_splits()
    white = Split(np.full_like(splits.test.inputs, 255), splits.test.labels)
    splits = replace(splits, test=white)
    monkeypatch.setattr(trained_module, "load_splits", lambda *_, **__: splits)
    return train_run(config(SMALL, epochs=1, fit_epochs=1), tmp_path / "seed0", progress=False)


@pytest.mark.parametrize("kind", ["v5", "narrative"])
def test_fault_19_padding_of_a_view_is_black_to_the_network(run, kind):
    seen = []
    run.embedder.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    embed_views(run, n_views=4, kind=kind, progress=False)
    pixels = torch.cat([batch.flatten() for batch in seen]).unique()
    # Padding after normalisation would be 0, a grey that no black pixel has.
    (mean,), (std,) = run.splits.mean, run.splits.std
    torch.testing.assert_close(pixels, torch.tensor([(0 - mean) / std, (1 - mean) / std]))
