"""Neighbour attention: turn retrieved neighbours into vote weights and class probabilities.

    weights = mean over heads of softmax over K of (sum of the score parts + log row weight)
    vote    = (1 - mix) * sum of weights on labels + mix * sum of weights * label histograms
    p       = (1 - gate) * vote + gate * prototype posterior
    p       = (1 - floor) * p + floor / C,  then p ** (1 / temperature), renormalised
    p       = p ** (1 / last temperature), renormalised
    p       = (1 - 1e-6) * p + 1e-6 / C, where floor and temperature are fitted

mix, gate, floor and temperature are set anew for each query, from how clear its neighbourhood is.
The last temperature is one number, of queries that the rest was not fitted on (``attnknn.unseen``).
Every class keeps some probability, so no single query can decide the log-likelihood.

Axes: B queries, K neighbours of each, D embedding width, C classes, H heads.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnknn.calibrate import LEAST_SHARE
from attnknn.config import AttentionConfig, check_heads
from attnknn.neighbours import Neighbours
from attnknn.parts import Evidence, SelfAttention, ValuePath, score_parts
from attnknn.posterior import PrototypePosterior

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
    """

    weights: Float[Tensor, "B K"]
    log_probs: Float[Tensor, "B C"]
    value: Float[Tensor, "B D"] | None

    def entropy(self) -> Float[Tensor, " B"]:
        """Entropy of each query's weights in nats, between 0 and log K."""
        return attention_entropy(self.weights)


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
        return Attended(weights, self._vote(weights, evidence), value)

    def _evidence(self, neighbours: Neighbours, query: Tensor | None) -> Evidence:
        return Evidence(neighbours, query=query, posterior=self.posterior)

    def penalty(self) -> Float[Tensor, ""] | float:
        """Return what a loss adds to hold down the parts that could learn queries by heart."""
        return 0.0 if self.posterior is None else self.posterior.penalty()

    def _vote(self, weights: Float[Tensor, "B K"], evidence: Evidence) -> Float[Tensor, "B C"]:
        """Return log probabilities with full support."""
        probs = vote(weights, evidence.neighbours)  # (B, C)
        if self.vote_settings is None:
            log_probs = with_floor(probs, SUPPORT_FLOOR).log()
            return (log_probs / self.last_temperature).log_softmax(dim=-1)
        gate, floor, mix, log_temperature = self.vote_settings(evidence)
        if self.config.denoise:
            denoised = torch.einsum("bk,bkc->bc", weights, evidence.neighbours.histograms)
            probs = (1 - mix) * probs + mix * denoised
        if self.config.prototype_gate:
            probs = (1 - gate) * probs + gate * evidence.prototype_posterior
        log_probs = with_floor(probs, floor).log()
        temperature = log_temperature.exp() * self.last_temperature
        tempered = (log_probs / temperature).log_softmax(dim=-1)
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


def with_floor(probs: Float[Tensor, "B C"], floor: Tensor | float) -> Float[Tensor, "B C"]:
    """Return probabilities in which every class has at least ``floor / C``."""
    return (1 - floor) * probs + floor / probs.shape[1]


@torch.no_grad()  # not inference_mode: what a memory's view keeps from here serves training too
def attention_probs(
    attention: NeighbourAttention, neighbours: Neighbours
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B K"]]:
    """Return class probabilities and weights of all queries, block by block."""
    was_training = attention.training
    attention.eval()
    starts = range(0, max(len(neighbours.ids), 1), PROBS_BLOCK)
    blocks = [
        attention(neighbours.of_queries(slice(start, start + PROBS_BLOCK))) for start in starts
    ]
    attention.train(was_training)
    probs = torch.cat([block.log_probs.exp() for block in blocks])
    return probs, torch.cat([block.weights for block in blocks])


def _adapts_votes(config: AttentionConfig) -> bool:
    return config.denoise or config.prototype_gate or config.floor or config.query_temperature


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
