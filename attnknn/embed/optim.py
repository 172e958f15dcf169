"""Optimisation: the parameters of a model become an optimiser with a schedule.

All rates are meant for a loss that is the *mean* over a batch. Everything that a step depends on
is either a pure function of its number or part of the state, so a resumed run is exact.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnknn.checks import check_count, check_one_of
from attnknn.config import TrainingConfig

# ---- Schedules: the step of a training run becomes a factor on the learning rate.
#
# Every schedule is a pure function, so a resumed run continues where it stopped, to the last digit.

TRIANGLE_START, TRIANGLE_PEAK, TRIANGLE_END = 0.2, 0.23, 0.07


def lr_factor(
    step: int,
    *,
    schedule: str,
    epochs: int,
    steps_per_epoch: int,
    warmup_epochs: int = 0,
    restart_epochs: int = 5,
    restart_factor: int = 2,
) -> float:
    """Return the factor on the peak learning rate at ``step``.

    A linear warm-up comes first; the schedule fills the steps after it.

    Args:
        step: Optimiser step, from 0.
        schedule: "triangle" (0.2 up to 1 at 23 %, down to 0.07), "linear" (1 to 0), "cosine"
            (1 to 0) or "warm_restarts" (cosines that start again).
        epochs: Length of the whole run.
        steps_per_epoch: Optimiser steps of one epoch.
        warmup_epochs: Length of the warm-up.
        restart_epochs: Warm restarts: length of the first cosine.
        restart_factor: Warm restarts: each cosine is this many times as long as the last.
    """
    check_one_of("schedule", schedule, SCHEDULES)
    check_count("steps_per_epoch", steps_per_epoch)
    warmup = warmup_epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    total = max(epochs * steps_per_epoch - warmup, 1)
    first = restart_epochs * steps_per_epoch
    return SCHEDULES[schedule](step - warmup, total, first, restart_factor)


def _triangle(step: int, total: int, first: int, growth: int) -> float:
    peak = TRIANGLE_PEAK * total
    if step < peak:
        return TRIANGLE_START + (1 - TRIANGLE_START) * step / peak
    return 1 + (TRIANGLE_END - 1) * (step - peak) / (total - peak)


def _linear(step: int, total: int, first: int, growth: int) -> float:
    return 1 - step / total


def _cosine(step: int, total: int, first: int, growth: int) -> float:
    return (1 + math.cos(math.pi * step / total)) / 2


def _warm_restarts(step: int, total: int, first: int, growth: int) -> float:
    start, length = _cycle_at(step, total, first, growth)
    return _cosine(step - start, length, first, growth)


def _cycle_at(step: int, total: int, first: int, growth: int) -> tuple[int, int]:
    """Return the first step and the length of the cycle that ``step`` falls into.

    The last cycle always ends with the run: one that the run would cut near its peak is shortened,
    and a rest shorter than the first cycle lengthens the cycle before it.
    """
    start, length = 0, first
    while True:
        if total - start - length < first:  # no room for another cycle
            return start, total - start
        if step < start + length:
            return start, length
        start, length = start + length, length * growth


SCHEDULES: dict[str, Callable[[int, int, int, int], float]] = {
    "triangle": _triangle,
    "linear": _linear,
    "cosine": _cosine,
    "warm_restarts": _warm_restarts,
}


# ---- Muon: momentum for convolution filters, with every update made orthogonal.
#
# A layer's averaged gradient G = U S V' is replaced by about U V', so that rare directions move as
# far as common ones; the filters keep a fixed norm. After Keller Jordan's optimiser.

# Coefficients of a quintic that drives singular values in (0, 1] towards 1 in a few rounds.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; the rows of each filter bank keep unit mean norm.

    Args:
        params: Tensors of at least two axes; the first is the output axis.
        lr: Step in units of the filters' own norm: scale of the gradient plays no part.
        momentum: Weight of the past updates.
    """

    def __init__(self, params, *, lr: float, momentum: float = 0.6) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """Make one step along the gradients that are present."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group["lr"], group["momentum"])

    def _move(self, weight: Tensor, lr: float, momentum: float) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        average = state["momentum_buffer"].mul_(momentum).add_(weight.grad)
        ahead = weight.grad.add(average, alpha=momentum)
        weight.mul_(len(weight) ** 0.5 / weight.norm())
        weight.sub_(orthogonalised(ahead.flatten(1)).view_as(weight), alpha=lr)


def orthogonalised(matrix: Float[Tensor, "rows columns"], *, rounds: int = 3):
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    current = matrix.T if tall else matrix
    current = current / (current.norm() + 1e-7)  # singular values at most 1
    linear, cubic, quintic = QUINTIC
    for _ in range(rounds):
        gram = current @ current.T
        current = linear * current + (cubic * gram + quintic * gram @ gram) @ current
    return current.T if tall else current


MOMENTUM = 0.85
# The recipe's rate and decay are per 1024 examples. Nesterov momentum makes a constant gradient
# move a weight 1 + 1 / (1 - momentum) times; dividing by that keeps rates comparable.
KILOSTEP = 1024 * (1 + 1 / (1 - MOMENTUM))
NORM_BIAS_SCALE = 64.0
# Muon's rate was found at batch 2000, together with lr 6.5 for the other parameters.
MUON_RATE, MUON_LR, MUON_BATCH = 0.24, 6.5, 2000
WHITENING_EPOCHS = 3
LOOKAHEAD_STEPS = 5
LOOKAHEAD_DECAY = 0.95**LOOKAHEAD_STEPS


class Optimiser:
    """One or more optimisers under one schedule, with clipping and lookahead.

    Call ``set_step(step)`` before each step, then ``step()`` after the gradients are there, and
    ``end_of_training()`` after the last step; ``end_of_epoch(score)`` after each validation.

    Args:
        parts: The optimisers.
        lr: The rate that was asked for.
        factor: Step to factor on all rates; None where ``plateau`` sets them.
        whitening_steps: Steps after which whitening biases stay as they are.
        clip_norm: Largest norm of all gradients together.
        lookahead: Slow weights.
        plateau: Lowers the rate of the only part when the score stalls.
    """

    def __init__(
        self,
        parts: list[torch.optim.Optimizer],
        *,
        lr: float,
        factor: Callable[[int], float] | None = None,
        whitening_steps: int = 0,
        clip_norm: float | None = None,
        lookahead: "Lookahead | None" = None,
        plateau: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None,
    ) -> None:
        self.parts, self.lr, self.factor, self.plateau = parts, lr, factor, plateau
        self.whitening_steps, self.clip_norm, self.lookahead = whitening_steps, clip_norm, lookahead
        self.current_step = 0
        for group in self.groups():
            group["peak_lr"] = group["lr"]
            group.setdefault("role", "new")

    def groups(self) -> Iterable[dict[str, Any]]:
        """Return the parameter groups of all parts; each has "role", "lr" and "peak_lr"."""
        return [group for part in self.parts for group in part.param_groups]

    def set_step(self, step: int) -> None:
        """Set every learning rate for step number ``step``, from 0."""
        self.current_step = step
        for group in self.groups():
            if self.factor is not None:
                group["lr"] = group["peak_lr"] * self.factor(step)
            if group["role"] == "whitening_bias":
                _set_trainable(group["params"], step < self.whitening_steps)

    @property
    def rate(self) -> float:
        """The rate of this step, as a person would say it: on the scale of ``lr``."""
        if self.factor is None:
            return next(iter(self.groups()))["lr"]
        return self.lr * self.factor(self.current_step)

    def step(self) -> None:
        """Clip the gradients if asked to, update the weights, and look ahead when it is time."""
        if self.clip_norm is not None:
            params = [p for group in self.groups() for p in group["params"]]
            nn.utils.clip_grad_norm_(params, self.clip_norm)
        for part in self.parts:
            part.step()
        if self.lookahead is not None:
            self.lookahead.after_step(self.current_step)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def end_of_epoch(self, score: float) -> None:
        """Lower the rate if the score of the validation rows, larger is better, has stalled."""
        if self.plateau is not None:
            self.plateau.step(score)

    def end_of_training(self) -> None:
        """Leave the model with its final weights: the averaged ones under lookahead."""
        if self.lookahead is not None:
            self.lookahead.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, enough to continue exactly."""
        slow = None if self.lookahead is None else self.lookahead.slow
        plateau = None if self.plateau is None else self.plateau.state_dict()
        parts = [part.state_dict() for part in self.parts]
        return {"parts": parts, "slow": slow, "plateau": plateau}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for part, part_state in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(part_state)
        if self.lookahead is not None:
            self.lookahead.load(state["slow"])
        if self.plateau is not None:
            self.plateau.load_state_dict(state["plateau"])


def _set_trainable(params: list[nn.Parameter], trainable: bool) -> None:
    for param in params:
        param.requires_grad_(trainable)
        if not trainable:
            param.grad = None  # else momentum would go on moving it


class Lookahead:
    """Every 5 steps the weights go back to a slow average of themselves.

    slow = decay * slow + (1 - decay) * weights, with decay = 0.95^5 * t^3 at share t of the run:
    nearly no averaging at first, a long memory at the end. BatchNorm statistics take part.
    """

    def __init__(self, modules: Iterable[nn.Module], total_steps: int) -> None:
        self.modules, self.total_steps = nn.ModuleList(modules), total_steps
        self.slow = {name: value.clone() for name, value in self._fast().items()}

    def _fast(self) -> dict[str, torch.Tensor]:
        state = self.modules.state_dict()
        return {name: value for name, value in state.items() if value.is_floating_point()}

    def after_step(self, step: int) -> None:
        """Average after step number ``step`` if it is the last of five."""
        done = step + 1
        if done % LOOKAHEAD_STEPS == 0:
            self._average(LOOKAHEAD_DECAY * (done / self.total_steps) ** 3)

    def finish(self) -> None:
        """Put the slow weights in place."""
        self._average(1.0)

    @torch.no_grad()
    def _average(self, decay: float) -> None:
        for name, value in self._fast().items():
            self.slow[name].lerp_(value, 1 - decay)
            value.copy_(self.slow[name])

    def load(self, slow: dict[str, torch.Tensor]) -> None:
        """Take over saved slow weights."""
        for name, value in self.slow.items():
            value.copy_(slow[name])


def build_optimiser(
    config: TrainingConfig,
    *,
    embedder: nn.Module,
    head: nn.Module | None = None,
    attention: nn.Module | None = None,
    steps_per_epoch: int,
) -> Optimiser:
    """Return the optimiser of a run; the loss must be the mean over a batch.

    Pretrained weights train at ``backbone_lr_scale`` times the rate, the attention at
    ``attention_lr_scale`` times, everything that starts at random at the full rate. A scale of 0
    freezes.

    Args:
        config: Rates, decay, schedule, clipping and lookahead.
        embedder: Its ``parameter_roles()`` say how each parameter is to be trained.
        head: Classifier head, when the loss uses one.
        attention: Neighbour attention, when it is trained jointly.
        steps_per_epoch: Optimiser steps of one epoch.
    """
    check_count("steps_per_epoch", steps_per_epoch)
    roles = dict(embedder.parameter_roles())
    roles["head"] = _trainable(head)
    roles["attention"] = _trainable(attention)
    build = PARTS[check_one_of("optimiser", config.optimiser, PARTS)]
    factor = partial(
        lr_factor,
        schedule=config.schedule,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        warmup_epochs=config.warmup_epochs,
        restart_epochs=config.restart_epochs,
        restart_factor=config.restart_factor,
    )
    modules = [module for module in (embedder, head, attention) if module is not None]
    total_steps = config.epochs * steps_per_epoch
    return Optimiser(
        build(config, {role: params for role, params in roles.items() if params}),
        lr=config.lr,
        factor=factor,
        whitening_steps=WHITENING_EPOCHS * steps_per_epoch,
        clip_norm=config.clip_norm,
        lookahead=Lookahead(modules, total_steps) if config.lookahead else None,
    )


Roles = dict[str, list[nn.Parameter]]


def _adamw(config: TrainingConfig, roles: Roles) -> list[torch.optim.Optimizer]:
    groups = _groups(roles, config, config.lr)
    return [torch.optim.AdamW(groups, weight_decay=config.weight_decay)]


def _sgd(config: TrainingConfig, roles: Roles) -> list[torch.optim.Optimizer]:
    # The recipe sums its loss over the batch; ours is a mean, hence batch_size in the rate.
    rate = config.lr * config.batch_size / KILOSTEP
    decay = config.weight_decay * config.batch_size / KILOSTEP
    groups = _groups(roles, config, rate, norm_bias=NORM_BIAS_SCALE)
    for group in groups:
        group["weight_decay"] = decay / group["lr"]  # the decay of a step is the same for all
    return [torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True)]


def _muon(config: TrainingConfig, roles: Roles) -> list[torch.optim.Optimizer]:
    if not roles.get("filters"):
        raise ValueError("optimiser='muon' must be given a backbone with filters, such as 'fast'")
    rate = MUON_RATE * config.lr / MUON_LR * (config.batch_size / MUON_BATCH) ** 0.5
    filters = {"params": roles["filters"], "lr": rate, "role": "filters"}
    rest = {role: params for role, params in roles.items() if role != "filters"}
    return [Muon([filters], lr=rate), *_sgd(config, rest)]


PARTS = {"sgd": _sgd, "adamw": _adamw, "muon": _muon}


def _groups(
    roles: Roles, config: TrainingConfig, rate: float, **scales: float
) -> list[dict[str, Any]]:
    """Return one parameter group a role; roles with rate 0 are frozen and left out."""
    scales = {
        "pretrained": config.backbone_lr_scale,
        "attention": config.attention_lr_scale,
        **scales,
    }
    groups = []
    for role, params in roles.items():
        if scale := scales.get(role, 1.0):
            groups.append({"params": params, "lr": rate * scale, "role": role})
        else:
            _set_trainable(params, False)
    return groups


def _trainable(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else [p for p in module.parameters() if p.requires_grad]
