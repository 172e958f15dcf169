"""Attention: by hand, the published size, every switch, limits, invariances, gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnknn.config import AttentionConfig, ConfigError
from attnknn.core import attention as module
from attnknn.core.attention import (
    SUPPORT_FLOOR,
    NeighbourAttention,
    attention_probs,
    vote,
)
from attnknn.core.calibrate import with_floor
from attnknn.core.neighbours import Neighbours
from attnknn.embed.objectives import soft_targets, vote_loss

PUBLISHED = AttentionConfig(
    heads=4,
    similarity=False,
    situation=(),
    denoise=False,
    prototype_gate=False,
    floor=False,
    query_temperature=False,
    qk="full",
    distance_bias="deep",
    label_bias="neighbourhood",
    prototype_score=True,
    self_attention=True,
    value_path=True,
)
EVERYTHING = AttentionConfig(
    heads=3,
    qk="full",
    distance_bias="deep",
    label_bias="neighbour",
    prototype_score=True,
    self_attention=True,
    value_path=True,
    prototype_shift=True,
)
# Each part of the full model turned off alone.
SWITCHES = {
    "similarity": False,
    "situation": (),
    "denoise": False,
    "prototype_gate": False,
    "prototype_shift": False,
    "floor": False,
    "query_temperature": False,
    "qk": "none",
    "distance_bias": "none",
    "label_bias": "none",
    "prototype_score": False,
    "self_attention": False,
    "value_path": False,
}


def build(config: AttentionConfig, seed: int = 0, *, shaken: float = 0.0) -> NeighbourAttention:
    """Return an attention for the blobs; ``shaken`` moves parts that start at zero."""
    torch.manual_seed(seed)
    attention = NeighbourAttention(config, dim=6, n_classes=5).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(attention.named_parameters()):
        if name.startswith("vote_settings") or "situation" in name or "shift" in name:
            parameter.data += shaken * torch.randn(parameter.shape, generator=generator)
    return attention


def count(attention: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in attention.parameters())


def test_two_neighbours_by_hand(circle, east):
    # One head of sharpness 2 and cosines 1 and 0.5: weights e^2 : e^1.
    config = AttentionConfig(
        heads=1,
        situation=(),
        denoise=False,
        prototype_gate=False,
        floor=False,
        query_temperature=False,
    )
    attention = NeighbourAttention(config, dim=2, n_classes=4)
    attention.parts["similarity"].log_sharpness.data = torch.tensor([2.0]).log()
    attended = attention(circle.search(east, 2))
    first = np.e / (np.e + 1)
    assert attended.weights[0].tolist() == pytest.approx([first, 1 - first])
    floor = SUPPORT_FLOOR / 4
    votes = [(1 - SUPPORT_FLOOR) * weight + floor for weight in (first, 1 - first)]
    assert attended.log_probs.exp()[0].tolist() == pytest.approx([*votes, floor, floor])
    entropy = -first * np.log(first) - (1 - first) * np.log(1 - first)
    assert attended.entropy().item() == pytest.approx(entropy, rel=1e-5)
    assert attended.value is None


def test_the_whole_vote_by_hand(circle, east):
    """The four equations at the head of the module, one after the other."""
    attention = NeighbourAttention(AttentionConfig(heads=1), dim=2, n_classes=4)
    attention.vote_settings.mlp[-1].bias.data[3] = np.log(2.0)  # temperature 2
    found = circle.search(east, 3)
    weights = torch.tensor([5.0, 2.5, 0.0]).softmax(dim=0)
    label_vote = torch.stack([weights[0], weights[1] + weights[2], *torch.zeros(2)])
    p = 0.5 * label_vote + 0.5 * weights @ circle.view.histograms[:3]
    raw = (10 * circle.view.prototypes @ found.queries[0]).exp()
    posterior = raw * torch.tensor([1, 1, 1, 0])  # the bank has no row of class 3
    posterior = posterior / posterior.sum()
    p = (1 - 0.27) * p + 0.27 * posterior
    p = (1 - 0.007) * p + 0.007 / 4
    p = p**0.5 / (p**0.5).sum()
    torch.testing.assert_close(attention(found).log_probs.exp()[0], p, rtol=1e-4, atol=1e-6)


def test_the_published_model_has_its_published_size():
    attention = NeighbourAttention(PUBLISHED, dim=256, n_classes=10)
    assert count(attention) == 534_925
    embedder = 11_827_520  # ResNet-18 with a 3 x 3 stem and the deep projection head
    assert count(attention) + embedder == 12_362_445


def test_the_default_is_small():
    assert count(NeighbourAttention(AttentionConfig(), dim=256, n_classes=10)) < 2_000


def test_the_switches_are_all_there():
    sizes = {"heads", "qk_rank", "temperature_start", "temperature_low", "temperature_high"}
    assert set(SWITCHES) == set(AttentionConfig.__dataclass_fields__) - sizes


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_changes_something(neighbours, name):
    whole = build(EVERYTHING, shaken=0.5)
    without = build(replace(EVERYTHING, **{name: SWITCHES[name]}))
    # Shared parameters are given the same values, so that a difference is the part's own.
    with torch.no_grad():
        shared = dict(whole.named_parameters())
        for key, parameter in without.named_parameters():
            if parameter.shape == shared[key].shape:
                parameter.copy_(shared[key])
        full, cut = whole(neighbours), without(neighbours)
    if name == "value_path":  # read by nothing in the vote: it only makes an embedding
        assert full.value.shape == (29, 6) and cut.value is None
        assert count(without) < count(whole)
    else:
        assert (full.log_probs - cut.log_probs).abs().max() > 1e-4
    probs = cut.log_probs.exp()
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(29))
    torch.testing.assert_close(cut.weights.sum(dim=1), torch.ones(29))
    assert probs.min() > 0


@pytest.mark.parametrize("feature", AttentionConfig().situation)
def test_every_situation_feature_changes_something(neighbours, feature):
    rest = tuple(name for name in AttentionConfig().situation if name != feature)
    config = AttentionConfig(situation=rest)
    whole, without = build(AttentionConfig(), shaken=0.5), build(config)
    kept = [name != feature for name in AttentionConfig().situation]
    with torch.no_grad():
        shared = dict(whole.named_parameters())
        for key, parameter in without.named_parameters():
            if parameter.shape == shared[key].shape:
                parameter.copy_(shared[key])
            elif key.startswith("parts.situation"):
                parameter.copy_(shared[key][:, kept])
        difference = whole(neighbours).weights - without(neighbours).weights
    assert difference.abs().max() > 1e-5


@pytest.mark.parametrize(
    ("feature", "also_off", "source"),
    [
        ("trust", {}, "trust"),
        ("histogram_share", {"denoise": False}, "histogram_share"),
        ("prototype", {"prototype_gate": False}, "prototype"),
        ("noise", {}, "noise"),
    ],
)
def test_what_is_switched_off_does_not_come_back_through_the_vote(feature, also_off, source):
    rest = tuple(name for name in AttentionConfig().situation if name != feature)
    whole = build(AttentionConfig()).vote_settings
    without = build(AttentionConfig(situation=rest, **also_off)).vote_settings
    assert source in whole.names and source not in without.names
    assert without.mlp[0].in_features == whole.mlp[0].in_features - 1 == 6


def test_one_head_and_head_free_scores_still_fit_the_value_path(neighbours):
    config = replace(
        EVERYTHING, similarity=False, situation=(), qk="lowrank", distance_bias="none",
        label_bias="none",
    )  # fmt: skip
    attended = build(config)(neighbours)
    assert attended.value.shape == (29, 6)
    torch.testing.assert_close(attended.weights.sum(dim=1), torch.ones(29))


def test_an_attention_without_score_parts_is_refused():
    config = AttentionConfig(similarity=False, situation=())
    with pytest.raises(ValueError, match="attention must have at least one score part"):
        NeighbourAttention(config, dim=6, n_classes=5)


def test_fault_2_neighbourhood_label_bias_is_a_no_op_and_neighbour_is_not(neighbours):
    outputs = {}
    for form in ("none", "neighbourhood", "neighbour"):
        attention = build(AttentionConfig(label_bias=form), seed=3)
        if form != "none":
            torch.manual_seed(5)
            for parameter in attention.parts["label_bias"].parameters():
                torch.nn.init.normal_(parameter)
        outputs[form] = attention(neighbours).weights
    torch.testing.assert_close(outputs["neighbourhood"], outputs["none"])
    assert (outputs["neighbour"] - outputs["none"]).abs().max() > 0.01


def test_fault_3_no_class_is_left_without_probability(circle, east):
    # Class 3 is absent from the bank, class 2 from the two neighbours.
    for config in (AttentionConfig(), replace(AttentionConfig(), floor=False)):
        attention = NeighbourAttention(config, dim=2, n_classes=4)
        log_probs = attention(circle.search(east, 2)).log_probs
        assert torch.isfinite(log_probs).all()
        assert log_probs.exp().min() > SUPPORT_FLOOR / 10


def test_fault_13_the_vote_loss_reaches_every_parameter_and_the_queries(neighbours):
    attention = build(EVERYTHING, shaken=0.5)
    query = neighbours.queries.clone().requires_grad_()
    attended = attention(neighbours, query=query)
    targets = soft_targets(torch.arange(29) % 5, n_classes=5)
    vote_loss(attended.log_probs, targets).mean().backward()
    assert (query.grad.abs().sum(dim=1) > 0).all()
    silent = {
        name
        for name, parameter in attention.named_parameters()
        if parameter.grad is None or parameter.grad.abs().max() == 0
    }
    assert silent == {f"value_path.{n}.{p}" for n in ("value", "out") for p in ("weight", "bias")}


def test_fault_13_the_published_model_learns_from_its_vote_too(neighbours):
    attention = build(replace(PUBLISHED, heads=3, label_bias="neighbour", value_path=False))
    query = neighbours.queries.clone().requires_grad_()
    log_probs, labels = attention(neighbours, query=query).log_probs, torch.arange(29) % 5
    vote_loss(log_probs, soft_targets(labels, n_classes=5)).mean().backward()
    # A vote that all or none of the neighbours carry is the same whatever they weigh.
    right = neighbours.labels == labels[:, None]
    assert torch.equal(query.grad.abs().sum(dim=1) > 1e-7, right.any(dim=1) & ~right.all(dim=1))
    for name, parameter in attention.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "alone",
    [
        {"similarity": True},
        {"situation": ("gap",)},
        {"situation": ("prototype",)},
        {"qk": "full"},
        {"qk": "lowrank"},
        {"distance_bias": "deep"},
        {"label_bias": "neighbour", "prototype_gate": True},
    ],
)
def test_fault_13_each_part_that_reads_the_query_passes_its_gradient_on(neighbours, alone):
    off = replace(PUBLISHED, **SWITCHES, heads=3)
    attention = build(replace(off, **alone), shaken=0.5)
    if "low_rank" in attention.parts:
        torch.nn.init.normal_(attention.parts["low_rank"].key.weight)
    query = neighbours.queries.clone().requires_grad_()
    log_probs = attention(neighbours, query=query).log_probs
    vote_loss(log_probs, soft_targets(torch.arange(29) % 5, n_classes=5)).mean().backward()
    assert query.grad.abs().max() > 1e-5


def test_a_query_on_top_of_a_memory_row_has_a_finite_gradient(bank, blobs):
    attention = build(replace(EVERYTHING, situation=()))
    found = bank.search(blobs.rows[:7], 5)
    query = found.queries.clone().requires_grad_()
    attention(found, query=query).log_probs.sum().backward()
    assert torch.isfinite(query.grad).all()


@pytest.mark.parametrize("config", [AttentionConfig(), EVERYTHING, replace(PUBLISHED, heads=3)])
def test_given_queries_and_searched_ones_agree(neighbours, config):
    attention = build(config, shaken=0.3)
    plain, joint = attention(neighbours), attention(neighbours, query=neighbours.queries)
    torch.testing.assert_close(plain.log_probs, joint.log_probs, rtol=1e-4, atol=1e-4)


def test_renaming_the_labels_renames_the_probabilities(bank, blobs):
    attention = build(AttentionConfig(), shaken=0.3)
    order = np.array([3, 0, 4, 1, 2])
    plain = attention(bank.search(blobs.queries, 11))
    renamed = attention(bank.relabelled(order[blobs.labels]).search(blobs.queries, 11))
    torch.testing.assert_close(renamed.weights, plain.weights)
    torch.testing.assert_close(renamed.log_probs[:, order], plain.log_probs)


def test_the_published_scores_do_not_depend_on_the_order_of_the_neighbours(neighbours):
    attention = build(replace(PUBLISHED, heads=3, label_bias="neighbour"))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    mixed = Neighbours(
        neighbours.queries,
        neighbours.scores[:, order],
        neighbours.ids[:, order],
        neighbours.view,
    )
    plain, permuted = attention(neighbours), attention(mixed)
    torch.testing.assert_close(permuted.weights, plain.weights[:, order], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(permuted.log_probs, plain.log_probs, rtol=1e-4, atol=1e-5)


def test_queries_do_not_see_each_other(neighbours):
    attention = build(EVERYTHING, shaken=0.3)
    whole = attention(neighbours).log_probs
    alone = attention(neighbours.of_queries(slice(13, 14))).log_probs
    torch.testing.assert_close(alone, whole[13:14], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [1, 4, 29, 1000])
def test_blocks_do_not_change_the_probabilities(neighbours, monkeypatch, block):
    attention = build(AttentionConfig(), shaken=0.3)
    expected = attention(neighbours)
    monkeypatch.setattr(module, "PROBS_BLOCK", block)
    probs, weights = attention_probs(attention, neighbours)
    torch.testing.assert_close(probs, expected.log_probs.exp())
    torch.testing.assert_close(weights, expected.weights)


def test_no_queries_give_no_probabilities(neighbours):
    probs, weights = attention_probs(build(AttentionConfig()), neighbours.of_queries(slice(0, 0)))
    assert probs.shape == (0, 5) and weights.shape == (0, 11)


def test_predicting_leaves_the_training_mode_as_it_was(neighbours):
    attention = build(AttentionConfig()).train()
    attention_probs(attention, neighbours)
    assert attention.training
    attention_probs(attention.eval(), neighbours)
    assert not attention.training


def test_predicting_does_not_spoil_later_training(neighbours):
    attention = build(AttentionConfig())
    attention_probs(attention, neighbours)
    attention(neighbours).log_probs.sum().backward()


def test_fault_13_predicting_does_not_spoil_later_joint_training(neighbours):
    """The memory's view keeps the prototypes that the prediction asked for first."""
    attention = build(AttentionConfig())
    attention_probs(attention, neighbours)
    queries = neighbours.queries.clone().requires_grad_()
    attention(neighbours, query=queries).log_probs[:, 0].sum().backward()
    assert queries.grad.abs().sum() > 0


@pytest.mark.parametrize("part", [{"qk": "full"}, {"value_path": True}])
def test_a_width_that_the_heads_cannot_share_is_refused(part):
    config = AttentionConfig(heads=4, **part)
    with pytest.raises(ConfigError, match=r"dim must be a multiple of heads .* dim=30, heads=4"):
        NeighbourAttention(config, dim=30, n_classes=5)


def test_sharpness_has_the_uniform_and_the_nearest_vote_as_limits(neighbours):
    config = AttentionConfig(
        heads=1, situation=(), denoise=False, prototype_gate=False, floor=False,
        query_temperature=False,
    )  # fmt: skip
    attention = build(config)
    attention.parts["similarity"].log_sharpness.data.fill_(-30.0)
    weights = attention(neighbours).weights
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 11))
    attention.parts["similarity"].log_sharpness.data.fill_(15.0)
    nearest = attention(neighbours).weights[:, 0]
    torch.testing.assert_close(nearest, torch.ones(29))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_it_answers_at_other_k_than_it_was_made_for(neighbours, k):
    attended = build(EVERYTHING, shaken=0.3)(neighbours.nearest(k))
    assert attended.weights.shape == (29, k)
    torch.testing.assert_close(attended.log_probs.exp().sum(dim=1), torch.ones(29))


def test_votes_and_floor_by_hand(circle, east):
    votes = vote(torch.tensor([[0.5, 0.25, 0.125, 0.125]]), circle.search(east, 4))
    assert votes.tolist() == [[0.5, 0.375, 0.125, 0.0]]
    assert with_floor(votes, 0.5).tolist() == [[0.375, 0.3125, 0.1875, 0.125]]
