"""Parts: what turns a query's neighbours into scores, one class and one switch each.

Axes: B queries, K neighbours of each, D embedding width, C classes, H heads.
"""

import math
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnknn.config import AttentionConfig
from attnknn.core.kernels import linear
from attnknn.core.neighbours import Neighbours

# ---- Prototype posterior: what the classes' mean directions alone say about a query.
#
#     logits    = scale * cos(query, prototypes) [+ query . shift + bias]
#     posterior = softmax(logits), 0 for classes that the memory does not have
#
# The prototypes come from the memory, and follow it when it changes. The shift is learned on
# held-out queries: it turns each prototype a little away from the classes it is confused with, as a
# trained classifier head would. It starts at nothing and is held down, so that few queries say
# little.
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
