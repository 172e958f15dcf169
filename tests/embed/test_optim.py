"""Optimisers and schedules: numbers by hand, references, exact resume."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnknn.config import TrainingConfig
from attnknn.embed.images import FastNet
from attnknn.embed.optim import Lookahead, Muon, build_optimiser, lr_factor, orthogonalised

STEPS = 10  # optimiser steps an epoch


class TinyEmbedder(nn.Module):
    """Stands for an embedder: the optimiser only asks for the roles of its parameters."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(3, 2)
        self.stem = nn.Linear(2, 3)

    def parameter_roles(self):
        return {
            "pretrained": list(self.backbone.parameters()),
            "new": list(self.stem.parameters()),
        }

    def forward(self, inputs):
        return self.backbone(self.stem(inputs))


class FastEmbedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = FastNet(1, (5, 7))

    def parameter_roles(self):
        return {**self.backbone.parameter_roles(), "new": []}


def factor(step, schedule, **settings):
    return lr_factor(step, **{"schedule": schedule, "epochs": 20, "steps_per_epoch": 10} | settings)


def rates(optimiser):
    return {group["role"]: group["lr"] for group in optimiser.groups()}


def test_triangle_by_hand():
    assert factor(0, "triangle") == pytest.approx(0.2)
    assert factor(23, "triangle") == pytest.approx(0.6)
    assert factor(46, "triangle") == pytest.approx(1.0)
    assert factor(123, "triangle") == pytest.approx((1 + 0.07) / 2)
    assert factor(200, "triangle") == pytest.approx(0.07)


def test_cosine_and_linear_by_hand():
    assert factor(0, "cosine") == 1
    assert factor(50, "cosine") == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert factor(200, "cosine") == pytest.approx(0)
    assert factor(50, "linear") == 0.75


def test_warm_up_is_linear_and_the_schedule_fills_the_rest():
    with_warmup = [factor(step, "cosine", warmup_epochs=3) for step in range(200)]
    assert with_warmup[0] == pytest.approx(1 / 30)
    assert with_warmup[14] == pytest.approx(0.5)
    assert with_warmup[30] == 1
    assert with_warmup[115] == pytest.approx(0.5)
    assert with_warmup[199] < 1e-3


def test_warm_restarts_follow_torch_until_the_last_cycle():
    """Two whole cycles of 5 and 10 epochs agree with torch's own scheduler."""
    parameter = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(inner, T_0=50, T_mult=2)
    for step in range(150):
        assert factor(step, "warm_restarts") == pytest.approx(scheduler.get_last_lr()[0], abs=1e-9)
        inner.step()
        scheduler.step()


def test_fault_15_warm_restarts_end_the_last_epoch_low():
    """Cut at 20 epochs, cycles of 5, 10 and 20 end near the peak; the last one must be fitted."""
    last_epoch = [factor(step, "warm_restarts") for step in range(190, 200)]
    assert max(last_epoch) < 0.1
    assert factor(199, "warm_restarts") < 0.002
    assert factor(150, "warm_restarts") == 1  # there is a third cycle


@pytest.mark.parametrize(
    ("restarts", "starts"),
    [((5, 2), [0, 50, 150]), ((5, 1), [0, 50, 100, 150]), ((2, 3), [0, 20, 80])],
    ids=str,
)
def test_restarts_come_when_the_settings_say(restarts, starts):
    """Of 20 epochs: cycles of 5, 10 and the 5 left; of 5 each; of 2, 6 and the 12 left."""
    epochs, growth = restarts
    config = TrainingConfig(
        optimiser="adamw",
        schedule="warm_restarts",
        epochs=20,
        restart_epochs=epochs,
        restart_factor=growth,
    )
    optimiser = build_optimiser(config, embedder=TinyEmbedder(), steps_per_epoch=STEPS)
    assert [step for step in range(200) if optimiser.factor(step) == 1] == starts


@pytest.mark.parametrize("epochs", range(1, 41))
def test_warm_restarts_always_end_low_and_never_restart_for_a_short_rest(epochs):
    factors = [factor(step, "warm_restarts", epochs=epochs) for step in range(10 * epochs)]
    assert factors[0] == 1
    assert factors[-1] < 0.03
    restarts = [step for step in range(1, len(factors)) if factors[step] > factors[step - 1]]
    assert all(10 * epochs - step >= 50 for step in restarts)


def test_three_rates_of_adamw():
    config = TrainingConfig(optimiser="adamw", lr=1e-3, weight_decay=1e-4, schedule="cosine")
    optimiser = build_optimiser(
        config,
        embedder=TinyEmbedder(),
        head=nn.Linear(2, 2),
        attention=nn.Linear(2, 1),
        steps_per_epoch=STEPS,
    )
    optimiser.set_step(0)
    expected = {"pretrained": 1e-4, "new": 1e-3, "head": 1e-3, "attention": 2e-3}
    assert rates(optimiser) == pytest.approx(expected)
    assert all(group["weight_decay"] == 1e-4 for group in optimiser.groups())
    optimiser.set_step(40)  # half of 8 epochs
    assert rates(optimiser) == pytest.approx({role: lr / 2 for role, lr in expected.items()})


def test_sgd_rates_per_1024_examples_by_hand():
    config = TrainingConfig(batch_size=500)
    optimiser = build_optimiser(
        config, embedder=FastEmbedder(), head=nn.Linear(7, 2, bias=False), steps_per_epoch=STEPS
    )
    kilostep = 1024 * (1 + 1 / 0.15)
    rate = 11.5 / kilostep * 500  # for a mean loss
    by_role = {group["role"]: group for group in optimiser.groups()}
    assert set(by_role) == {"whitening_bias", "norm_bias", "filters", "head"}
    assert by_role["filters"]["peak_lr"] == pytest.approx(rate)
    assert by_role["norm_bias"]["peak_lr"] == pytest.approx(64 * rate)
    for group in by_role.values():  # what one step takes off a weight is the same everywhere
        decay = group["peak_lr"] * group["weight_decay"]
        assert decay == pytest.approx(0.0153 * 500 / kilostep)


def test_batch_size_does_not_change_the_step_of_a_summed_loss():
    """Twice the batch with the same mean gradient moves a weight twice as far."""
    moves = []
    for batch_size in (100, 200):
        embedder = FastEmbedder()
        config = TrainingConfig(batch_size=batch_size, weight_decay=0.0, lookahead=False)
        optimiser = build_optimiser(config, embedder=embedder, steps_per_epoch=STEPS)
        weight = embedder.backbone.blocks[0].conv2.weight
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimiser.set_step(0)
        optimiser.step()
        moves.append((before - weight).mean().item())
    assert moves[1] == pytest.approx(2 * moves[0], rel=1e-3)


def test_whitening_bias_trains_for_three_epochs_only():
    embedder = FastEmbedder()
    head = nn.Linear(7, 2, bias=False)
    optimiser = build_optimiser(
        TrainingConfig(), embedder=embedder, head=head, steps_per_epoch=STEPS
    )
    history, inputs = [], torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for step in range(4 * STEPS):
        optimiser.set_step(step)
        head(embedder.backbone(inputs)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        history.append(embedder.backbone.whiten.bias.detach().clone())
    assert not torch.equal(history[3 * STEPS - 6], history[3 * STEPS - 1])
    # Lookahead may blend towards its average; the optimiser itself must stand still.
    assert not embedder.backbone.whiten.bias.requires_grad
    last_group = next(g for g in optimiser.groups() if g["role"] == "whitening_bias")
    assert all(p.grad is None for p in last_group["params"])


def test_a_scale_of_zero_freezes():
    embedder = TinyEmbedder()
    config = TrainingConfig(optimiser="adamw", lr=0.1, backbone_lr_scale=0.0, lookahead=False)
    optimiser = build_optimiser(config, embedder=embedder, steps_per_epoch=STEPS)
    before = copy.deepcopy(embedder.state_dict())
    optimiser.set_step(0)
    embedder(torch.ones(2, 2)).sum().backward()
    optimiser.step()
    assert torch.equal(embedder.backbone.weight, before["backbone.weight"])
    assert not torch.equal(embedder.stem.weight, before["stem.weight"])


def test_lookahead_by_hand():
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(0.0)
    lookahead = Lookahead([module], total_steps=10)
    for step in range(5):
        module.weight.data.fill_(1.0)
        lookahead.after_step(step)
    decay = 0.95**5 * 0.5**3
    assert module.weight.item() == pytest.approx(1 - decay)
    module.weight.data.fill_(9.0)
    lookahead.after_step(5)  # the sixth step: not yet
    assert module.weight.item() == 9
    lookahead.finish()
    assert module.weight.item() == pytest.approx(1 - decay)


def test_lookahead_averages_batchnorm_statistics_but_not_counters():
    module = nn.BatchNorm1d(2)
    lookahead = Lookahead([module], total_steps=5)
    module.running_mean.fill_(1.0)
    module.num_batches_tracked.fill_(7)
    lookahead.finish()
    assert module.running_mean.tolist() == [0, 0]
    assert module.num_batches_tracked == 7


def test_clipping_limits_the_whole_gradient():
    embedder = TinyEmbedder()
    config = TrainingConfig(optimiser="adamw", lr=0.1, clip_norm=1.0, lookahead=False)
    optimiser = build_optimiser(config, embedder=embedder, steps_per_epoch=STEPS)
    optimiser.set_step(0)
    (1000 * embedder(torch.ones(2, 2)).sum()).backward()
    optimiser.step()
    norm = torch.stack([p.grad.norm() for p in embedder.parameters()]).norm()
    assert norm.item() == pytest.approx(1, rel=1e-4)


def test_orthogonalised_pulls_singular_values_together():
    matrix = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    spread = torch.tensor([1.0, 0.5, 0.3, 0.2, 0.1])
    values = torch.linalg.svdvals(orthogonalised(left @ spread.diag() @ right))
    assert values.min() > 0.4 and values.max() < 1.6
    tall = orthogonalised((left @ spread.diag() @ right).T)
    assert torch.allclose(tall, orthogonalised(left @ spread.diag() @ right).T, atol=1e-5)


def test_muon_ignores_the_scale_of_the_gradient():
    moved = []
    for scale in (1.0, 1000.0):
        weight = nn.Parameter(torch.eye(3).repeat(1, 2))
        optimiser = Muon([weight], lr=0.1)
        weight.grad = scale * torch.arange(18.0).reshape(3, 6).sin()
        optimiser.step()
        moved.append(weight.detach().clone())
    assert torch.allclose(moved[0], moved[1], atol=1e-4)
    assert not torch.allclose(moved[0], torch.eye(3).repeat(1, 2) / 2**0.5, atol=1e-3)


CONFIGS = {
    "sgd": TrainingConfig(lr=1.0, epochs=4, clip_norm=1.0),
    "adamw": TrainingConfig(optimiser="adamw", lr=0.01, epochs=4, schedule="warm_restarts"),
    "muon": TrainingConfig(optimiser="muon", lr=2.0, epochs=4, schedule="linear"),
}


def train(config, steps, *, checkpoint=None, start=0):
    """Train a little network, from scratch or from a checkpoint; return it all."""
    torch.manual_seed(0)
    embedder, head = FastEmbedder(), nn.Linear(7, 3, bias=False)
    optimiser = build_optimiser(config, embedder=embedder, head=head, steps_per_epoch=STEPS)
    if checkpoint is not None:
        embedder.load_state_dict(checkpoint["embedder"])
        head.load_state_dict(checkpoint["head"])
        optimiser.load_state_dict(checkpoint["optimiser"])
    for step in range(start, steps):
        inputs = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        labels = torch.arange(6) % 3
        optimiser.set_step(step)
        nn.functional.cross_entropy(head(embedder.backbone(inputs)), labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    return embedder, head, optimiser


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stop", [7, 33])  # before and after the whitening bias is frozen
def test_resume_is_exact(name, stop, tmp_path):
    config = CONFIGS[name]
    whole, whole_head, optimiser = train(config, 40)
    optimiser.end_of_training()
    part, part_head, optimiser = train(config, stop)
    saved = {
        "embedder": part.state_dict(),
        "head": part_head.state_dict(),
        "optimiser": optimiser.state_dict(),
    }
    torch.save(saved, tmp_path / "checkpoint.pt")
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed, resumed_head, optimiser = train(config, 40, checkpoint=checkpoint, start=stop)
    optimiser.end_of_training()
    for ours, theirs in ((whole, resumed), (whole_head, resumed_head)):
        for key, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[key]), key


def test_a_run_without_epochs_can_be_built():
    config = replace(CONFIGS["sgd"], epochs=0)
    optimiser = build_optimiser(config, embedder=TinyEmbedder(), steps_per_epoch=STEPS)
    optimiser.set_step(0)
    optimiser.end_of_training()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of"):
        factor(0, "cosines")
    with pytest.raises(ValueError, match="steps_per_epoch must be an integer of at least 1"):
        build_optimiser(TrainingConfig(), embedder=TinyEmbedder(), steps_per_epoch=0)
    with pytest.raises(ValueError, match="'muon' must be given a backbone with filters"):
        build_optimiser(CONFIGS["muon"], embedder=TinyEmbedder(), steps_per_epoch=STEPS)
