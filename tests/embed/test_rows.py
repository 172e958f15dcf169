"""Embedding: rows free of the batch size, nothing left changed, a cache that can be trusted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from attnknn.config import EmbedderConfig
from attnknn.data.change import tta_views
from attnknn.data.splits import Split
from attnknn.embed import run as run_module
from attnknn.embed.networks import build_embedder, build_head
from attnknn.embed.rows import (
    EmbeddingCache,
    embed,
    embed_views,
    embed_with_logits,
    embedding_key,
    to_batch,
)
from attnknn.embed.run import train_run
from tests.embed.test_networks import image_splits, table_splits
from tests.tiny import SMALL, config, tiny_splits


@pytest.fixture(params=["image", "table"])
def setting(request):
    """Return an untrained embedder and inputs for it."""
    torch.manual_seed(0)
    splits = image_splits(side=8) if request.param == "image" else table_splits()
    backbone = "fast" if request.param == "image" else "mlp"
    config = EmbedderConfig(backbone=backbone, widths=(5, 7, 11), embed_dim=11)
    return build_embedder(config, splits.spec, rows=splits.train.inputs), splits.train.inputs


def test_rows_are_unit_length_in_order_and_free_of_the_batch_size(setting):
    embedder, inputs = setting
    rows = embed(embedder, inputs, batch_size=4, progress=False)
    assert rows.shape == (len(inputs), 11) and rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert np.allclose(rows, embed(embedder, inputs, batch_size=500, progress=False), atol=1e-5)
    assert np.allclose(rows[3:4], embed(embedder, inputs[3:4], progress=False), atol=1e-5)


def test_modes_come_back_and_statistics_do_not_move(setting):
    embedder, inputs = setting
    embedder.train()
    embedder.projection.eval()
    before = {name: value.clone() for name, value in embedder.state_dict().items()}
    rows = embed(embedder, inputs, progress=False)
    assert embedder.training and embedder.backbone.training and not embedder.projection.training
    assert all(torch.equal(value, before[name]) for name, value in embedder.state_dict().items())
    assert np.array_equal(rows, embed(embedder, inputs, progress=False))  # no dropout


def test_modes_come_back_after_an_error(setting):
    embedder, inputs = setting
    embedder.train()
    with pytest.raises(ValueError, match="inputs must have shape"):
        embed(embedder, inputs[:, :1], progress=False)
    assert embedder.training
    assert torch.is_grad_enabled()


def test_logits_come_from_the_same_pass(setting):
    embedder, inputs = setting
    head = build_head("mlp", 11, 3)
    rows, logits = embed_with_logits(embedder, head, inputs, batch_size=4, progress=False)
    assert np.allclose(rows, embed(embedder, inputs, progress=False), atol=1e-5)
    with torch.no_grad():
        expected = head.eval()(embedder.eval().features(to_batch(inputs)))
    assert np.allclose(logits, expected.numpy(), atol=1e-4)


def test_one_pass_calls_the_backbone_once_a_batch(setting):
    embedder, inputs = setting
    calls = []
    embedder.backbone.register_forward_hook(lambda *args: calls.append(1))
    embed_with_logits(embedder, nn.Linear(11, 3), inputs, batch_size=4, progress=False)
    assert len(calls) == -(-len(inputs) // 4)


def test_images_become_floats_between_0_and_1():
    images = np.array([[[[0, 51], [255, 102]]]], dtype=np.uint8)
    batch = to_batch(images)
    assert batch.flatten().tolist() == pytest.approx([0, 0.2, 1, 0.4])


def test_a_view_is_embedded_instead():
    splits = image_splits(side=8)
    config = EmbedderConfig(widths=(5, 7))
    embedder, images = (
        build_embedder(config, splits.spec, rows=splits.train.inputs),
        splits.train.inputs,
    )
    flipped = embed(embedder, images, progress=False, view=lambda batch: batch.flip(-1))
    mirrored = embed(embedder, images[..., ::-1], progress=False)
    assert np.allclose(flipped, mirrored, atol=1e-5)


def test_key_depends_on_weights_inputs_and_view(setting):
    embedder, inputs = setting
    key = embedding_key(embedder, inputs)
    assert key == embedding_key(embedder, inputs.copy())
    changed = inputs.copy()
    changed.flat[0] += 1
    other_keys = {
        embedding_key(embedder, inputs, view="flip"),
        embedding_key(embedder, changed),
        embedding_key(embedder, inputs[:-1]),
    }
    with torch.no_grad():
        next(p for p in embedder.parameters() if p.requires_grad).view(-1)[0] += 1
    other_keys.add(embedding_key(embedder, inputs))
    assert len(other_keys | {key}) == 5


class Counted:
    """Arrays that count how often they were computed."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        rows = np.arange(6, dtype=np.float32).reshape(2, 3)
        return {"rows": rows, "logits": rows.T}


def test_cache_computes_once(tmp_path):
    compute, cache = Counted(), EmbeddingCache(tmp_path / "cache")
    first, second = cache.get("key", compute), cache.get("key", compute)
    assert compute.calls == 1
    assert all(np.array_equal(first[name], second[name]) for name in ("rows", "logits"))
    cache.get("other", compute)
    assert compute.calls == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "foreign"])
def test_a_damaged_cache_file_is_computed_again(tmp_path, damage):
    compute, cache = Counted(), EmbeddingCache(tmp_path)
    cache.get("key", compute)
    path = tmp_path / "key.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[-5] ^= 1
    spoilt = {"cut": content[:-7], "changed": content, "emptied": b"", "foreign": b"x" * 99}
    path.write_bytes(spoilt[damage])
    arrays = cache.get("key", compute)
    assert compute.calls == 2
    assert np.array_equal(arrays["rows"], [[0, 1, 2], [3, 4, 5]])
    with safe_open(path, framework="numpy") as handle:  # and the file is whole again
        assert set(handle.keys()) == {"rows", "logits"}


def test_bad_input_is_refused(setting):
    embedder, inputs = setting
    with pytest.raises(ValueError, match="inputs must have at least one row"):
        embed(embedder, inputs[:0], progress=False)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        embed(embedder, inputs, batch_size=0, progress=False)


def test_nan_features_are_refused():
    splits = table_splits()
    inputs = splits.train.inputs.copy()
    inputs[1, 2] = np.nan
    embedder = build_embedder(EmbedderConfig(backbone="identity"), splits.spec)
    with pytest.raises(ValueError, match=r"inputs must be finite, got 1 NaN .* first at \(1, 2\)"):
        embed(embedder, inputs, progress=False)


# ---- Views: what a changed copy of a test image looks like to the network.


@pytest.fixture
def white_run(tmp_path, monkeypatch):
    """A run whose test images are white all over: what is not white in a view is padding."""
    splits = tiny_splits()
    white = Split(np.full_like(splits.test.inputs, 255), splits.test.labels)
    splits = replace(splits, test=white)
    monkeypatch.setattr(run_module, "load_splits", lambda *_, **__: splits)
    return train_run(config(SMALL, epochs=1, fit_epochs=1), tmp_path / "seed0", progress=False)


@pytest.mark.parametrize("kind", ["v5", "narrative"])
def test_fault_19_padding_of_a_view_is_black_to_the_network(white_run, kind):
    run, seen = white_run, []
    run.embedder.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    embed_views(run, n_views=4, kind=kind, progress=False)
    pixels = torch.cat([batch.flatten() for batch in seen]).unique()
    # Padding after normalisation would be 0, a grey that no black pixel has.
    (mean,), (std,) = run.splits.mean, run.splits.std
    torch.testing.assert_close(pixels, torch.tensor([(0 - mean) / std, (1 - mean) / std]))


@pytest.mark.parametrize("kind", ["v5", "narrative", "shifts"])
def test_every_view_is_embedded_once_and_the_first_is_the_image(tmp_path, monkeypatch, kind):
    splits = tiny_splits()
    monkeypatch.setattr(run_module, "load_splits", lambda *_, **__: splits)
    settings = config(SMALL, epochs=1, fit_epochs=1)
    run = train_run(settings, tmp_path / "seed0", progress=False)
    found = embed_views(run, n_views=3, kind=kind, progress=False)
    how = {"kind": kind, "n_views": 3, "flip": False, "pad": 1}
    views = tta_views(to_batch(splits.test.inputs), torch.Generator().manual_seed(0), **how)
    with torch.no_grad():
        expected = torch.stack([run.embedder(view) for view in views]).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(found[0], run.rows("test"))
    apart = [np.abs(found[a] - found[b]).max() for a, b in ((0, 1), (0, 2), (1, 2))]
    assert min(apart) > 1e-3  # no view stands there twice
