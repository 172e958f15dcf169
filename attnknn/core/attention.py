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
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnknn.config import AttentionConfig, check_heads
from attnknn.core.calibrate import LEAST_SHARE, with_floor
from attnknn.core.kernels import linear
from attnknn.core.neighbours import Neighbours

# ---- Prototype posterior: what the classes' mean directions alone say about a query.
#
#     logits    = scale * cos(query, prototypes) [+ query . shift + bias]
#     posterior = softmax(logits), 0 for classes that the memory does not have
#
# The prototypes come from the memory, and follow it when it changes. The shift is learned on
# held-out
# queries: it turns each prototype a little away from the classes it is confused with, as a trained
# classifier head would. It starts at nothing and is held down, so that few queries say little.
#
# Axes: B queries, C classes, D embedding width.

SCALE_START = 10.0
# Of 1e-4, 3e-4 and 1e-3 the best on held-out rows of CIFAR-10 (three splits; MNIST cannot tell).
SHIFT_PENALTY = 1e-4


class PrototypePosterior(nn.Module):
    """Class probabilities from prototypes; the equations stand at the head of this file.

    Args:
        shifted: Whether the prototypes may be corrected; that fixes the classes.
        dim: Embedding width D.
        n_classes: Number of classes C.
    """

    def __init__(self, *, shifted: bool, dim: int, n_classes: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(SCALE_START)))
        self.shift = nn.Linear(dim, n_classes) if shifted else None
        if self.shift is not None:
            nn.init.zeros_(self.shift.weight)
            nn.init.zeros_(self.shift.bias)

    def forward(self, neighbours: Neighbours, query: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return the posterior of each query."""
        shift = 0.0 if self.shift is None else self.shift(query)
        return neighbours.prototype_posterior(query, self.log_scale.exp(), shift)

    def penalty(self) -> Float[Tensor, ""]:
        """Return what a loss adds to hold the shift down."""
        if self.shift is None:
            return self.log_scale.new_zeros(())
        return SHIFT_PENALTY * self.shift.weight.square().sum()


# ---- Score parts: each turns a query's neighbours into scores, one per neighbour and head.
#
# The scores of all parts in use are added and put through a softmax over the K neighbours. A part
# is one class with one entry in the table at the end; switching it off removes its parameters.
#
# Axes: B queries, K neighbours of each, D embedding width, C classes, H heads.


class Evidence:
    """All that the parts may look at, each piece computed once and only when asked for.

    Args:
        neighbours: What the search found.
        query: The queries with their gradient, during joint training; their similarities are then
            computed anew so that the gradient reaches the embedder.
        posterior: Turns neighbours and queries into the prototype posterior, for parts that ask.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        *,
        query: Float[Tensor, "B D"] | None = None,
        posterior: PrototypePosterior | None = None,
    ) -> None:
        self.neighbours = neighbours
        self.query = neighbours.queries if query is None else query
        self.labels = neighbours.labels
        self._keys: Tensor | None = None
        if query is None:
            self.similarity = neighbours.scores
        else:
            self.similarity = torch.einsum("bd,bkd->bk", query, self.keys)  # (B, K)
        self._posterior = posterior
        counts = self.similarity.new_zeros(len(self.labels), neighbours.n_classes)
        counted = neighbours.row_weights.to(counts)  # (B, K)
        total = counted.sum(dim=1, keepdim=True)
        self.label_shares = counts.scatter_add_(1, self.labels, counted) / total  # (B, C)

    @property
    def keys(self) -> Float[Tensor, "B K D"]:
        """Neighbour embeddings, as the bank holds them or as a part has rewritten them."""
        return self.neighbours.keys if self._keys is None else self._keys

    @keys.setter
    def keys(self, rewritten: Float[Tensor, "B K D"]) -> None:
        self._keys = rewritten

    @cached_property
    def prototype_posterior(self) -> Float[Tensor, "B C"]:
        """Class probabilities from the bank's prototypes alone."""
        if self._posterior is None:
            raise RuntimeError("the evidence was made without a prototype posterior")
        return self._posterior(self.neighbours, self.query)

    @cached_property
    def histogram_shares(self) -> Float[Tensor, "B C"]:
        """Mean label histogram of the K neighbours."""
        return self.neighbours.histograms.mean(dim=1)

    def of_own_label(self, per_class: Float[Tensor, "B C"]) -> Float[Tensor, "B K"]:
        """Return, for each neighbour, the entry of its own label."""
        return per_class.gather(1, self.labels)


class Similarity(nn.Module):
    """score = similarity * sharpness of the head; the heads start from broad to sharp."""

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        start = torch.logspace(math.log10(5), math.log10(40), config.heads)
        self.log_sharpness = nn.Parameter(start.log())

    def forward(self, evidence: Evidence) -> Float[Tensor, "B K H"]:
        """Return the scores."""
        return evidence.similarity[..., None] * self.log_sharpness.exp()


class Situation(nn.Module):
    """score = MLP of what is known about a neighbour; see choices.SITUATION_FEATURES."""

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        self.names = config.situation
        last = nn.Linear(32, config.heads)
        nn.init.zeros_(last.weight)  # the attention starts as plain similarity weights
        nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(
            nn.Linear(len(self.names), 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), last
        )

    def forward(self, evidence: Evidence) -> Float[Tensor, "B K H"]:
        """Return the scores."""
        columns = [SITUATION_COLUMNS[name](evidence) for name in self.names]
        shape = evidence.similarity.shape
        return self.mlp(torch.stack([column.expand(shape) for column in columns], dim=-1))


SITUATION_COLUMNS = {
    "gap": lambda e: e.similarity - e.similarity[:, :1],
    "nearest": lambda e: e.similarity[:, :1],
    "rank": lambda e: torch.arange(e.neighbours.k).to(e.similarity) / e.neighbours.k,
    "trust": lambda e: e.neighbours.trust,
    "label_share": lambda e: e.of_own_label(e.label_shares),
    "histogram_share": lambda e: e.of_own_label(e.histogram_shares),
    "prototype": lambda e: e.of_own_label(e.prototype_posterior),
    "noise": lambda e: e.similarity.new_tensor(e.neighbours.view.mean_trust),
}


class QueryKey(nn.Module):
    """score = (W_q q . W_k n) / sqrt(D / H) / temperature of the head."""

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.log_temperature = nn.Parameter(
            torch.full((config.heads,), math.log(config.temperature_start))
        )
        self.bounds = (config.temperature_low, config.temperature_high)

    def temperatures(self) -> Float[Tensor, " H"]:
        """Temperature of each head, inside its bounds."""
        return self.log_temperature.exp().clamp(*self.bounds)

    def forward(self, evidence: Evidence) -> Float[Tensor, "B K H"]:
        """Return the scores."""
        queries = self.query(evidence.query).unflatten(-1, (self.heads, -1))  # (B, H, D/H)
        # W_q q is turned by W_k first: B rows, where W_k n would be B K of them.
        weight = self.key.weight.unflatten(0, (self.heads, -1))  # (H, D/H, D)
        bias = self.key.bias.unflatten(0, (self.heads, -1))  # (H, D/H)
        directions = torch.einsum("bhe,hed->bhd", queries, weight)  # (B, H, D)
        scores = evidence.keys @ directions.mT + (queries * bias).sum(dim=-1)[:, None]  # (B, K, H)
        return scores / math.sqrt(queries.shape[-1]) / self.temperatures()


class LowRankQueryKey(nn.Module):
    """score = (A q) . (B n) with few rows in A and B, and B starting at zero.

    A full query-key product overfits a few thousand held-out queries; this one cannot say much,
    starts by saying nothing and is held down by weight decay.
    """

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, config.qk_rank, bias=False)
        self.key = nn.Linear(dim, config.qk_rank, bias=False)
        nn.init.zeros_(self.key.weight)

    def forward(self, evidence: Evidence) -> Float[Tensor, "B K 1"]:
        """Return the scores, the same for every head."""
        # A q is turned back into D dimensions first: (B, D) is far smaller than (B, K, rank).
        directions = self.query(evidence.query) @ self.key.weight  # (B, D)
        return torch.einsum("bd,bkd->bk", directions, evidence.keys)[..., None]


class DistanceBias(nn.Module):
    """score = MLP of the Euclidean distance."""

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        if config.distance_bias == "deep":
            layers = [nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()]
            self.mlp = nn.Sequential(*layers, nn.Linear(64, config.heads))
        else:
            self.mlp = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, config.heads))

    def forward(self, evidence: Evidence) -> Float[Tensor, "B K H"]:
        """Return the scores."""
        return self.mlp(euclidean_distances(evidence.similarity)[..., None])


class LabelBias(nn.Module):
    """score = MLP of the neighbour's label in the context of the neighbourhood's labels.

    ``neighbour`` feeds each neighbour its own label, weighted by how common that label is among
    the K. ``neighbourhood`` is the published form: it feeds every neighbour the same label shares,
    adds the same number to all K scores, and the softmax cancels it.
    """

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        self.per_neighbour = config.label_bias == "neighbour"
        self.mlp = nn.Sequential(nn.Linear(n_classes, 64), nn.GELU(), nn.Linear(64, config.heads))

    def forward(self, evidence: Evidence) -> Float[Tensor, "B K H"]:
        """Return the scores."""
        if self.per_neighbour:
            return self._of_own_labels(evidence)
        shared = self.mlp(evidence.label_shares)[:, None]  # (B, 1, H)
        return shared.expand(-1, evidence.neighbours.k, -1)

    def _of_own_labels(self, evidence: Evidence) -> Float[Tensor, "B K H"]:
        """Return the MLP of one-hot label times share; its first layer is a look-up."""
        first, *rest = self.mlp
        # Neighbours of one label and query score alike: with few classes, each is scored once.
        few = evidence.neighbours.n_classes < evidence.neighbours.k
        if few:
            hidden = evidence.label_shares[..., None] * first.weight.T + first.bias  # (B, C, 64)
        else:
            share = evidence.of_own_label(evidence.label_shares)[..., None]
            hidden = nn.functional.embedding(evidence.labels, first.weight.T) * share + first.bias
        for layer in rest:
            hidden = layer(hidden)
        if few:
            which = evidence.labels[..., None].expand(-1, -1, hidden.shape[-1])  # (B, K, H)
            hidden = hidden.gather(1, which)
        return hidden


class PrototypeScore(nn.Module):
    """score = scale * cos(neighbour, learnable prototype of its label)."""

    def __init__(self, config: AttentionConfig, *, dim: int, n_classes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(0.1 * torch.randn(n_classes, dim))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, evidence: Evidence) -> Float[Tensor, "B K 1"]:
        """Return the scores, the same for every head."""
        prototypes = nn.functional.normalize(self.prototypes, dim=1)
        keys = nn.functional.normalize(evidence.keys, dim=-1)
        # All C cosines and then the own one: the gradient of a look-up of (B, K, D) is far slower.
        cosines = linear(keys, prototypes)  # (B, K, C)
        return self.scale * cosines.gather(2, evidence.labels[..., None])


class SelfAttention(nn.Module):
    """Neighbours look at each other before they are scored: residual attention, then LayerNorm."""

    def __init__(self, config: AttentionConfig, *, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, config.heads, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, keys: Float[Tensor, "B K D"]) -> Float[Tensor, "B K D"]:
        """Return the rewritten neighbour embeddings."""
        # What ``self.attention(keys, keys, keys)`` does, with the faster products of ``linear``.
        parts, heads = self.attention, self.attention.num_heads
        projected = linear(keys, parts.in_proj_weight, parts.in_proj_bias)  # (B, K, 3 D)
        split = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, H, K, D/H)
        mixed = nn.functional.scaled_dot_product_attention(*split)  # (B, H, K, D/H)
        joined = mixed.transpose(1, 2).flatten(2)  # (B, K, D)
        return self.norm(keys + linear(joined, parts.out_proj.weight, parts.out_proj.bias))


class ValuePath(nn.Module):
    """The weighted value embedding W_o(sum of weights * W_v n), head by head."""

    def __init__(self, config: AttentionConfig, *, dim: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(
        self, weights: Float[Tensor, "B K H"], keys: Float[Tensor, "B K D"]
    ) -> Float[Tensor, "B D"]:
        """Return one embedding per query."""
        values = linear(keys, self.value.weight, self.value.bias).unflatten(
            -1, (self.heads, -1)
        )  # (B, K, H, D/H)
        return self.out(torch.einsum("bkh,bkhd->bhd", weights, values).flatten(1))


def euclidean_distances(similarity: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return |a - b| of unit vectors from their cosine; not squared."""
    # The floor keeps the square root's gradient finite for identical vectors.
    return (2 - 2 * similarity).clamp(min=1e-12).sqrt()


def score_parts(config: AttentionConfig, *, dim: int, n_classes: int) -> nn.ModuleDict:
    """Return the score parts that are switched on."""
    wanted: dict[str, tuple[bool, type[nn.Module]]] = {
        "similarity": (config.similarity, Similarity),
        "situation": (bool(config.situation), Situation),
        "query_key": (config.qk == "full", QueryKey),
        "low_rank": (config.qk == "lowrank", LowRankQueryKey),
        "distance_bias": (config.distance_bias != "none", DistanceBias),
        "label_bias": (config.label_bias != "none", LabelBias),
        "prototype_score": (config.prototype_score, PrototypeScore),
    }
    parts = {
        name: part(config, dim=dim, n_classes=n_classes)
        for name, (on, part) in wanted.items()
        if on
    }
    return nn.ModuleDict(parts)


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
