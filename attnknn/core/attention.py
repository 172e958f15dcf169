"""Neighbour attention: turn retrieved neighbours into vote weights and class probabilities.

    weights = mean over heads of softmax over K of (sum of the score parts + log row weight)
    vote    = (1 - mix) * sum of weights on labels + mix * sum of weights * label histograms
    p       = (1 - gate) * vote + gate * prototype posterior
    p       = (1 - floor) * p + floor / C,  then p ** (1 / temperature), renormalised
    p       = p ** (1 / last temperature), renormalised
    p       = (1 - 1e-6) * p + 1e-6 / C, where floor and temperature are fitted

mix, gate, floor and temperature are set anew for each query, from how clear its neighbourhood is.
The last temperature is one number, of queries that the rest was not fitted on (see ``fit``).
Every class keeps some probability, so no single query can decide the log-likelihood.

Axes: B queries, K neighbours of each, D embedding width, C classes, H heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnknn.config import AttentionConfig, check_heads
from attnknn.core.calibrate import LEAST_SHARE, with_floor
from attnknn.core.neighbours import Neighbours
from attnknn.core.parts import Evidence, PrototypePosterior, SelfAttention, ValuePath, score_parts

SUPPORT_FLOOR = 1e-3  # probability shared by all classes, the same for every method unless fitted
GATE_START, FLOOR_START, MIX_START = 0.27, 0.007, 0.5
PROBS_BLOCK = 128  # queries a block: bounds the (block, K, C) histograms, and stays in the cache


@dataclass(frozen=True)
class Attended:
    """What the attention made of a batch.

    Attributes:
        weights: Weight of each neighbour; rows sum to 1.
        log_probs: Log class probabilities with full support.
        value: Weighted value embedding, where the value path is on.
        mix: Share of the vote that goes by label histograms.
        gate: Share of the probability that comes from the prototypes.
        posterior: What the prototypes say, where the gate is on.
    """

    weights: Float[Tensor, "B K"]
    log_probs: Float[Tensor, "B C"]
    value: Float[Tensor, "B D"] | None
    mix: Float[Tensor, "B 1"]
    gate: Float[Tensor, "B 1"]
    posterior: Float[Tensor, "B C"] | None

    def entropy(self) -> Float[Tensor, " B"]:
        """Entropy of each query's weights in nats, between 0 and log K."""
        return attention_entropy(self.weights)


class Contributions(NamedTuple):
    """What the probability of one class of each query is made of, before floor and temperature.

    Attributes:
        votes: What each neighbour adds, by its label and by the labels around it.
        prototypes: What the class's prototype adds.
    """

    votes: Float[Tensor, "B K"]
    prototypes: Float[Tensor, " B"]


class VoteSettings(nn.Module):
    """MLP of up to 7 numbers -> 16 -> 4: a query's situation -> gate, floor, mix, temperature."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.names = _vote_columns(config)
        last = nn.Linear(16, 4)
        nn.init.zeros_(last.weight)
        starts = [GATE_START, FLOOR_START, MIX_START]
        last.bias.data = torch.tensor([*map(_logit, starts), 0.0])
        self.mlp = nn.Sequential(nn.Linear(len(self.names), 16), nn.GELU(), last)

    def forward(self, evidence: Evidence) -> tuple[Float[Tensor, "B 1"], ...]:
        """Return gate, floor, mix and log temperature; a part that is off is constant."""
        columns = [VOTE_COLUMNS[name](evidence) for name in self.names]
        gate, floor, mix, log_temperature = self.mlp(torch.stack(columns, dim=1)).split(1, dim=1)
        zero = torch.zeros_like(gate)
        return (
            gate.sigmoid() if self.config.prototype_gate else zero,
            floor.sigmoid() if self.config.floor else zero + SUPPORT_FLOOR,
            mix.sigmoid() if self.config.denoise else zero,
            log_temperature if self.config.query_temperature else zero,
        )


VOTE_COLUMNS = {
    "nearest": lambda e: e.similarity[:, 0],
    "similarity": lambda e: e.similarity.mean(dim=1),
    "label_share": lambda e: e.label_shares.amax(dim=1),
    "histogram_share": lambda e: e.histogram_shares.amax(dim=1),
    "prototype": lambda e: e.prototype_posterior.amax(dim=1),
    "trust": lambda e: e.neighbours.trust.mean(dim=1),
    "noise": lambda e: e.similarity.new_tensor(e.neighbours.view.mean_trust).expand(len(e.labels)),
}


def _vote_columns(config: AttentionConfig) -> tuple[str, ...]:
    """Return what the settings may look at: a source that is switched off is off here too."""
    known = set(config.situation)
    hidden = {
        "histogram_share": not (config.denoise or "histogram_share" in known),
        "prototype": not (config.prototype_gate or "prototype" in known),
        "trust": "trust" not in known,
        "noise": "noise" not in known,
    }
    return tuple(name for name in VOTE_COLUMNS if not hidden.get(name, False))


class NeighbourAttention(nn.Module):
    """Learned weights over a query's neighbours; the equations stand at the head of this file.

    Args:
        config: Which parts are on.
        dim: Embedding width D.
        n_classes: Number of classes C.
    """

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        check_heads("dim", dim, config)
        self.config = config
        self.parts = score_parts(config, dim=dim, n_classes=n_classes)
        if not self.parts:
            raise ValueError("attention must have at least one score part switched on, got none")
        self.self_attention = SelfAttention(config, dim=dim) if config.self_attention else None
        self.value_path = ValuePath(config, dim=dim) if config.value_path else None
        self.vote_settings = VoteSettings(config) if _adapts_votes(config) else None
        reads_posterior = config.prototype_gate or "prototype" in config.situation
        self.posterior = (
            PrototypePosterior(shifted=config.prototype_shift, dim=dim, n_classes=n_classes)
            if reads_posterior
            else None
        )
        self.register_buffer("last_temperature", torch.ones(()))

    def forward(
        self, neighbours: Neighbours, *, query: Float[Tensor, "B D"] | None = None
    ) -> Attended:
        """Weigh the neighbours and let them vote.

        Args:
            neighbours: What the search found, nearest first.
            query: The queries with their gradient, for joint training of the embedder.
        """
        evidence = self._evidence(neighbours, query)
        if self.self_attention is not None:
            evidence.keys = self.self_attention(evidence.keys)
        scores = sum(part(evidence) for part in self.parts.values())  # (B, K, H)
        if neighbours.view.weights is not None:
            scores = scores + neighbours.row_weights.log()[..., None]
        weights = scores.softmax(dim=1).expand(-1, -1, self.config.heads)
        value = None if self.value_path is None else self.value_path(weights, evidence.keys)
        weights = weights.mean(dim=-1)  # (B, K)
        gate, floor, mix, log_temperature = self._settings(evidence)
        posterior = evidence.prototype_posterior if self.config.prototype_gate else None
        probs = vote(weights, neighbours)  # (B, C)
        if self.config.denoise:
            denoised = torch.einsum("bk,bkc->bc", weights, neighbours.histograms)
            probs = (1 - mix) * probs + mix * denoised
        if posterior is not None:
            probs = (1 - gate) * probs + gate * posterior
        log_probs = self._tempered(with_floor(probs, floor).log(), log_temperature.exp())
        return Attended(weights, log_probs, value, mix, gate, posterior)

    def _evidence(self, neighbours: Neighbours, query: Tensor | None) -> Evidence:
        return Evidence(neighbours, query=query, posterior=self.posterior)

    def penalty(self) -> Float[Tensor, ""] | float:
        """Return what a loss adds to hold down the parts that could learn queries by heart."""
        return 0.0 if self.posterior is None else self.posterior.penalty()

    def _settings(self, evidence: Evidence) -> tuple[Float[Tensor, "B 1"], ...]:
        """Return gate, floor, mix and log temperature, constants where nothing is learned."""
        if self.vote_settings is not None:
            return self.vote_settings(evidence)
        zero = torch.zeros_like(evidence.similarity[:, :1])
        return zero, zero + SUPPORT_FLOOR, zero, zero

    def _tempered(
        self, log_probs: Float[Tensor, "B C"], temperature: Float[Tensor, "B 1"]
    ) -> Float[Tensor, "B C"]:
        """Return log probabilities at the query's own and the last temperature, none at zero."""
        tempered = (log_probs / (temperature * self.last_temperature)).log_softmax(dim=-1)
        if self.vote_settings is None:
            return tempered
        # A fit may drive floor and temperature to zero: no class goes with them.
        least = tempered.new_tensor(math.log(LEAST_SHARE / tempered.shape[1]))
        return torch.logaddexp(tempered + math.log1p(-LEAST_SHARE), least)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        # Attentions that were saved before there was a last temperature have none.
        state_dict.setdefault(f"{prefix}last_temperature", torch.ones(()))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def attention_entropy(weights: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    """Return the entropy of each row's weights in nats; its negative is what the loss adds."""
    return torch.special.entr(weights).sum(dim=1)


def vote(weights: Float[Tensor, "B K"], neighbours: Neighbours) -> Float[Tensor, "B C"]:
    """Return the weight that falls on each class; rows sum to 1."""
    empty = weights.new_zeros(len(weights), neighbours.n_classes)
    return empty.scatter_add(1, neighbours.labels, weights)


@torch.no_grad()  # not inference_mode: what a memory's view keeps from here serves training too
def attention_probs(
    attention: nn.Module, neighbours: Neighbours
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B K"]]:
    """Return class probabilities and weights of all queries, block by block."""
    blocks = [(a.log_probs.exp(), a.weights) for _, a in _blocks(attention, neighbours)]
    probs, weights = map(torch.cat, zip(*blocks, strict=True))
    return probs, weights


@torch.inference_mode()
def attention_contributions(
    attention: NeighbourAttention, neighbours: Neighbours, classes: Int[Tensor, " B"]
) -> Contributions:
    """Return what the attention's probability of one class of each query is made of."""
    parts, end = [], 0
    for found, attended in _blocks(attention, neighbours):
        start, end = end, end + len(found.ids)
        wanted = classes[start:end, None]  # (b, 1)
        said = (found.labels == wanted).to(attended.weights)  # (b, K)
        if attention.config.denoise:
            places = wanted[..., None].expand(-1, found.k, 1)
            around = found.histograms.gather(2, places).squeeze(2)  # (b, K)
            said = (1 - attended.mix) * said + attended.mix * around
        votes = (1 - attended.gate) * attended.weights * said
        told = votes.new_zeros(len(votes))
        if attended.posterior is not None:
            told = (attended.gate * attended.posterior.gather(1, wanted)).squeeze(1)
        parts.append((votes, told))
    return Contributions(*map(torch.cat, zip(*parts, strict=True)))


def label_contributions(
    weights: Float[Tensor, "B K"], neighbours: Neighbours, classes: Int[Tensor, " B"]
) -> Contributions:
    """Return what a plain vote is made of: the weights of the rows with the class for a label."""
    votes = weights * (neighbours.labels == classes[:, None])
    return Contributions(votes, weights.new_zeros(len(weights)))


def _blocks(attention: nn.Module, neighbours: Neighbours) -> Iterator[tuple[Neighbours, Attended]]:
    """Yield some queries at a time, and what the attention makes of them."""
    was_training = attention.training
    attention.eval()
    for start in range(0, max(len(neighbours.ids), 1), PROBS_BLOCK):
        found = neighbours.of_queries(slice(start, start + PROBS_BLOCK))
        yield found, attention(found)
    attention.train(was_training)


def _adapts_votes(config: AttentionConfig) -> bool:
    return config.denoise or config.prototype_gate or config.floor or config.query_temperature


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
