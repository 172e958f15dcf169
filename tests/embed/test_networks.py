"""Backbones: sizes, recipes, unit rows, roles, and the published faults around them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from attnknn.config import BACKBONE_NAMES, EmbedderConfig
from attnknn.data.splits import Split, Splits
from attnknn.embed.images import FastNet, PretrainedUnavailableError, whitening_filters
from attnknn.embed.networks import (
    BACKBONES,
    PeriodicNumbers,
    PrincipalAxes,
    build_embedder,
    build_head,
    build_projection,
)

B, N, F = 5, 13, 7


def make_splits(inputs, *, kind="image", mean=(), std=(), n_numeric=0, n_classes=3):
    split = Split(inputs, np.arange(len(inputs)) % n_classes)
    return Splits(
        name="made",
        kind=kind,
        train=split,
        val=split,
        test=split,
        class_names=tuple("abc"[:n_classes]),
        mean=mean,
        std=std,
        n_numeric=n_numeric,
        feature_names=(),
        augmentation=(),
        source="made for this test",
    )


def image_splits(channels=3, side=32, n_rows=N):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n_rows, channels, side, side), dtype=np.uint8)
    return make_splits(images, mean=(0.4,) * channels, std=(0.2,) * channels)


def table_splits(n_numeric=4):
    rows = np.random.default_rng(0).normal(size=(N, F)).astype(np.float32)
    return make_splits(rows, kind="table", n_numeric=n_numeric)


def batch_of(splits):
    inputs = torch.from_numpy(splits.train.inputs[:B])
    return inputs.float() / 255 if splits.kind == "image" else inputs


def build(backbone, splits, **settings):
    torch.manual_seed(0)
    settings = {"pretrained": False, "widths": (5, 7, 11), **settings}
    config = EmbedderConfig(backbone=backbone, **settings)
    return build_embedder(config, splits.spec, rows=splits.train.inputs)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("backbone", "splits", "width"),
    [
        ("fast", image_splits(), 11),
        ("resnet18", image_splits(), 512),
        ("timm:resnet10t", image_splits(side=64), 512),
        ("timm:vit_tiny_patch16_224", image_splits(channels=1), 192),
        ("mlp", table_splits(), 256),
        ("mlp-periodic", table_splits(), 256),
        ("identity", table_splits(), F),
    ],
)
def test_every_backbone_gives_unit_rows(backbone, splits, width):
    embedder = build(backbone, splits).eval()
    rows = embedder(batch_of(splits))
    assert rows.shape == (B, width)
    assert embedder.embed_dim == width
    assert torch.allclose(rows.norm(dim=1), torch.ones(B), atol=1e-5)
    assert not embedder.pretrained_used
    trainable = [p for p in embedder.parameters() if p.requires_grad]
    by_role = [p for params in embedder.parameter_roles().values() for p in params]
    assert sorted(map(id, trainable)) == sorted(map(id, by_role))  # each exactly once


@pytest.mark.parametrize(("side", "channels"), [(4, 1), (8, 1), (16, 2), (24, 3), (45, 4)])
def test_fast_takes_any_image(side, channels):
    splits = image_splits(channels=channels, side=side)
    embedder = build("fast", splits)
    assert embedder(batch_of(splits)).shape == (B, 11)


def test_published_parameter_count():
    embedder = build("resnet18", image_splits(), projection="deep")
    assert count(embedder) == 11_827_520


def test_fast_parameter_count_by_hand():
    filters = 24 * 64 * 9 + 64 * 64 * 9 + 64 * 256 * 9 + 3 * 256 * 256 * 9
    norms = 2 * 2 * (64 + 256 + 256)
    whitening = 24 * 12 + 24
    assert count(FastNet(3, (64, 256, 256))) == filters + norms + whitening


def test_fault_19_normalisation_comes_after_padding():
    """Padding before it is black; fault 19: the published TTA padded after it."""
    splits = image_splits()
    embedder = build("fast", splits).eval()
    images = batch_of(splits)
    by_hand = embedder.backbone((images - 0.4) / 0.2)
    assert torch.allclose(embedder.features(images), by_hand, atol=1e-5)


def test_zero_features_give_no_nan():
    splits = make_splits(np.zeros((N, F), np.float32), kind="embedding")
    inputs = torch.zeros(B, F, requires_grad=True)
    rows = build("identity", splits)(inputs)
    rows.sum().backward()
    assert torch.equal(rows, torch.zeros(B, F))
    assert torch.isfinite(inputs.grad).all()


def test_whitened_patches_are_uncorrelated():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(3, 3, generator=generator)
    images = torch.randn(200, 3, 9, 9, generator=generator)
    images = torch.einsum("nchw,cd->ndhw", images, mixing)
    responses = nn.functional.conv2d(images, whitening_filters(images, eps=0.0))
    flat = responses.permute(1, 0, 2, 3).flatten(1)
    assert torch.allclose(flat @ flat.T / flat.shape[1], torch.eye(12), atol=1e-3)


def test_fast_whitening_is_set_from_training_images_frozen_and_of_both_signs():
    splits = image_splits()
    whiten = build("fast", splits).backbone.whiten
    images = (torch.from_numpy(splits.train.inputs).float() / 255 - 0.4) / 0.2
    filters = whitening_filters(images)
    assert torch.allclose(whiten.weight, torch.cat([filters, -filters]), atol=1e-4)
    assert not whiten.weight.requires_grad and whiten.bias.requires_grad


def test_whitening_of_constant_images_is_finite():
    splits = make_splits(np.full((N, 1, 8, 8), 255, np.uint8), mean=(1.0,), std=(1e-6,))
    assert torch.isfinite(build("fast", splits)(torch.ones(B, 1, 8, 8))).all()


def test_fast_blocks_start_as_identities():
    block = FastNet(1, (11,)).blocks[0]
    maps = torch.rand(2, 8, 6, 6)
    assert torch.allclose(block.conv1(maps)[:, :8], maps, atol=1e-6)


def test_fast_roles():
    roles = build("fast", image_splits(), projection="layernorm").parameter_roles()
    assert [p.numel() for p in roles["whitening_bias"]] == [24]
    assert [p.numel() for p in roles["norm_bias"]] == [5, 5, 7, 7, 11, 11]
    assert len(roles["filters"]) == 6
    assert not roles["pretrained"]
    assert len(roles["new"]) == 6  # the projection


def test_small_colour_images_keep_their_resolution_in_a_resnet():
    network = build("resnet18", image_splits()).backbone
    assert network.conv1.kernel_size == (3, 3) and network.conv1.stride == (1, 1)
    assert isinstance(network.maxpool, nn.Identity)


def test_other_channel_counts_keep_the_large_stem():
    network = build("resnet18", image_splits(channels=1)).backbone
    assert network.conv1.kernel_size == (7, 7) and network.conv1.stride == (2, 2)
    assert network.conv1.in_channels == 1
    assert isinstance(network.maxpool, nn.Identity)


@pytest.fixture
def weights_at_hand(monkeypatch):
    """Let torchvision 'download' weights that are all 0.01."""
    import torchvision

    state = torchvision.models.resnet18().state_dict()
    state = {k: torch.full_like(v, 0.01) if v.is_floating_point() else v for k, v in state.items()}
    weights = torchvision.models.ResNet18_Weights
    monkeypatch.setattr(weights, "get_state_dict", lambda *args, **kwargs: state)


@pytest.fixture
def no_weights(monkeypatch):
    import torchvision

    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", refuse)


def test_fault_15_the_new_stem_is_not_called_pretrained(weights_at_hand):
    embedder = build("resnet18", image_splits(), pretrained=True, projection="deep")
    roles = embedder.parameter_roles()
    pretrained_ids = {id(p) for p in roles["pretrained"]}
    assert embedder.pretrained_used
    assert embedder._new_stem == [embedder.backbone.conv1.weight]
    assert id(embedder.backbone.conv1.weight) not in pretrained_ids
    assert id(embedder.backbone.layer1[0].conv1.weight) in pretrained_ids
    assert embedder.backbone.layer1[0].conv1.weight.unique().item() == pytest.approx(0.01)
    assert not pretrained_ids & {id(p) for p in embedder.projection.parameters()}


def test_large_images_keep_the_pretrained_stem(weights_at_hand):
    embedder = build("resnet18", image_splits(side=96), pretrained=True)
    assert embedder._new_stem == []
    assert embedder.backbone.conv1.weight.unique().item() == pytest.approx(0.01)


def test_pretrained_auto_says_when_it_starts_at_random(no_weights):
    with pytest.warns(UserWarning, match="resnet18 starts from random weights"):
        embedder = build("resnet18", image_splits(), pretrained="auto")
    assert not embedder.pretrained_used
    assert not embedder.parameter_roles()["pretrained"]


def test_pretrained_true_must_have_the_weights(no_weights):
    with pytest.raises(PretrainedUnavailableError, match=r"resnet18 must be .* no network"):
        build("resnet18", image_splits(), pretrained=True)


def test_projection_shapes_and_sizes_by_hand():
    deep = (F * 512 + 512) + 2 * 512 + (512 * 512 + 512) + 2 * 512 + (512 * 11 + 11)
    batchnorm = (F * 512 + 512) + 2 * 512 + (512 * 11 + 11)
    layernorm = (F * 11 + 11) + 2 * 11 + (11 * 11 + 11)
    for kind, size in [("deep", deep), ("batchnorm", batchnorm), ("layernorm", layernorm)]:
        projection = build_projection(kind, F, 11)
        assert count(projection) == size
        assert projection(torch.rand(B, F)).shape == (B, 11)
    assert count(build_projection("none", F, 11)) == 0


def test_table_network_by_hand():
    embedder = build("mlp", table_splits(), embed_dim=11)
    expected = (F * 256 + 256) + 512 + (256 * 256 + 256) + 512 + (256 * 11 + 11)
    assert count(embedder) == expected
    assert embedder.embed_dim == 11


def test_periodic_numbers_by_hand():
    layer = PeriodicNumbers(2, n_frequencies=1, width=2)
    layer.frequencies.data.fill_(0.25)  # a quarter turn for each unit
    layer.weight.data.copy_(torch.eye(2).expand(2, 2, 2))
    expanded = layer(torch.tensor([[1.0, 0.0]]))
    assert torch.allclose(expanded, torch.tensor([[1.0, 0.0, 0.0, 1.0]]), atol=1e-6)


def test_periodic_network_leaves_one_hot_columns_alone():
    embedder = build("mlp-periodic", table_splits(n_numeric=4))
    widths = embedder.backbone.numbers.out_dim + F - 4
    assert embedder.backbone.layers[0].in_features == widths


def test_linear_head_carries_the_recipe_scale():
    embedder = build("fast", image_splits())
    assert embedder.logit_scale == pytest.approx(1 / 9)
    head = build_head("linear", 2, 2, scale=embedder.logit_scale)
    head.linear.weight.data.copy_(torch.eye(2))
    assert torch.allclose(head(torch.tensor([[9.0, 18.0]])), torch.tensor([[1.0, 2.0]]))


def test_mlp_head_by_hand():
    head = build_head("mlp", F, 3)
    assert count(head) == (F * F + F) + (F * 3 + 3)
    assert head(torch.rand(B, F)).shape == (B, 3)


def test_the_same_seed_builds_the_same_network():
    first, second = (build("fast", image_splits()).state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"backbone must be one of .*did you mean 'resnet18'"):
        build("resnet19", image_splits())
    with pytest.raises(ValueError, match=r"timm network.*did you mean 'resnet"):
        build("timm:resnet19", image_splits())
    with pytest.raises(ValueError, match="'fast' must be given images, got kind='table'"):
        build("fast", table_splits())
    with pytest.raises(ValueError, match="'mlp' must be given rows of features"):
        build("mlp", image_splits())
    with pytest.raises(ValueError, match="at least one number column"):
        build("mlp-periodic", table_splits(n_numeric=0))
    with pytest.raises(ValueError, match="image side must be at least 8 for resnet18"):
        build("resnet18", image_splits(side=4))
    with pytest.raises(ValueError, match="head must be one of"):
        build_head("deep", 3, 3)
    with pytest.raises(ValueError, match=r"projection must be one of"):
        build_projection("deeper", 3, 3)


def test_wrong_shapes_are_named():
    embedder = build("fast", image_splits())
    with pytest.raises(ValueError, match=r"inputs must have shape \(B, 3, 32, 32\), got shape"):
        embedder(torch.rand(B, 1, 32, 32))
    with pytest.raises(ValueError, match="got shape"):
        embedder(torch.rand(B, 3))


def test_the_configuration_knows_every_backbone():
    assert set(BACKBONE_NAMES) == set(BACKBONES)


def test_principal_axes_are_those_of_another_implementation():
    rows = np.random.default_rng(0).normal(size=(97, 7)) @ np.diag([5, 4, 3, 2, 1, 0.5, 0.1])
    network = PrincipalAxes(7, 3)
    network.initialise(torch.from_numpy(rows).float())
    found = network(torch.from_numpy(rows).float()).numpy()
    reference = PCA(3).fit_transform(rows)
    np.testing.assert_allclose(np.abs(found), np.abs(reference), atol=1e-4)


def test_principal_axes_see_training_rows_only():
    splits = image_splits(channels=1, side=8)
    other = Split(splits.test.inputs[::-1] // 2, splits.test.labels)
    first, second = (
        build("pca", splits, embed_dim=5),
        build("pca", replace(splits, test=other, val=other), embed_dim=5),
    )
    assert torch.equal(first.backbone.axes, second.backbone.axes)
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_more_axes_than_values_are_refused():
    with pytest.raises(ValueError, match="embed_dim must be at most the 7 values"):
        PrincipalAxes(7, 8)
