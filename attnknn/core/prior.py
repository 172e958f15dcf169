"""The attention that is born knowing: learned once over thousands of drawn tables, and shipped.

What it looks at has no unit: relative distances, ranks, shares of labels, entropies, how far the
neighbours, the class prototypes and the global expert agree, and how well each of them does on
memory rows that are left out. So the same few thousand numbers serve every memory, whatever its
width, classes and kind:

    weights = mean over heads of softmax over K of (MLP(neighbour, query, memory) + log row weight)
    vote    = sum of weights * ((1 - mix) * label + mix * label histogram)
    p       = (1 - gate) * vote + gate * prototypes ** sharpness, renormalised
    p       = (1 - floor - share) * p + floor / C + share * class shares
    log p   = power * log p + trust * log expert, normalised
    p       = (1 - 1e-6) * p + 1e-6 / C

mix, gate, sharpness, floor, share, power and trust are set anew for each query by a second MLP.

Axes: B queries, K neighbours of each, C classes, D embedding width, F columns, M members of a
committee, H heads.
"""

import hashlib
import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnknn.core.attention import Attended, Contributions
from attnknn.core.calibrate import LEAST_SHARE
from attnknn.core.facts import N_FACTS, TINY, Facts
from attnknn.core.neighbours import Neighbours
from attnknn.core.parts import euclidean_distances

LOG_TINY = math.log(1e-6)


@dataclass(frozen=True)
class Evidence:
    """All that the prior looks at, of some queries; nothing in it is learned.

    Attributes:
        neighbour: What is known of each neighbour.
        context: What is known of each query and of the memory.
        labels: Label of each neighbour.
        histograms: Label shares around each neighbour.
        prototypes: Log-probabilities of the class prototypes.
        expert: Log-probabilities of the global expert.
        shares: Class shares.
        log_weights: Logarithm of row weights; None where all rows count alike.
    """

    neighbour: Float[Tensor, "*B K F"]
    context: Float[Tensor, "*B G"]
    labels: Int[Tensor, "*B K"]
    histograms: Float[Tensor, "*B K C"]
    prototypes: Float[Tensor, "*B C"]
    expert: Float[Tensor, "*B C"]
    shares: Float[Tensor, " C"]
    log_weights: Float[Tensor, "*B K"] | None

    def of_queries(self, rows: Tensor | slice) -> "Evidence":
        """Return the evidence of some of the queries."""
        weights = None if self.log_weights is None else self.log_weights[rows]
        parts = (self.neighbour, self.context, self.labels, self.histograms)
        more = (self.prototypes, self.expert)
        first = (part[rows] for part in parts)
        return Evidence(*first, *(part[rows] for part in more), self.shares, weights)


def joined(parts: list[Evidence]) -> Evidence:
    """Return the evidence of all queries of one memory, which came in parts."""
    whole = ("shares",)
    found = {}
    for name in (each.name for each in fields(Evidence)):
        values = [getattr(part, name) for part in parts]
        found[name] = values[0] if name in whole or values[0] is None else torch.cat(values)
    return Evidence(**found)


NEIGHBOUR_COLUMNS, CONTEXT_COLUMNS = 10, 20 + N_FACTS


def evidence_of(found: Neighbours) -> Evidence:
    """Return what the prior looks at.

    Args:
        found: What a search found; queries that are memory rows are taken out of all that is said
            about them.
    """
    facts = found.view.facts
    distances = euclidean_distances(found.scores.clamp(max=1))  # (B, K)
    cosines = facts.prototype_scale * found.prototype_cosines
    prototypes = cosines.masked_fill(~found.view.is_present, -1e4).log_softmax(dim=1)
    prototypes = prototypes.clamp(min=LOG_TINY)
    expert = _expert_of(found, facts).clamp(min=LOG_TINY)
    counted = found.row_weights.to(distances)
    shares = distances.new_zeros(len(distances), found.n_classes)
    shares = shares.scatter_add(1, found.labels, counted) / counted.sum(dim=1, keepdim=True)
    opinions = (shares, found.histograms.mean(dim=1), prototypes.exp(), expert.exp())  # (B, C) each
    return Evidence(
        neighbour=_neighbour_columns(found, distances, opinions),
        context=_context_columns(found, distances, opinions),
        labels=found.labels,
        histograms=found.histograms,
        prototypes=prototypes,
        expert=expert,
        shares=facts.shares,
        log_weights=None if found.view.weights is None else found.row_weights.log(),
    )


def _relative(distances: Float[Tensor, "B K"], facts: Facts) -> Float[Tensor, "B K"]:
    return (distances / facts.distance).clamp(max=4)


def _neighbour_columns(
    found: Neighbours, distances: Float[Tensor, "B K"], opinions: tuple[Tensor, ...]
) -> Float[Tensor, "B K F"]:
    """Return what is known of each neighbour: how near it is, and what speaks for its label."""
    facts = found.view.facts
    relative = _relative(distances, facts)
    ranks = torch.arange(found.k, device=distances.device).to(distances) / found.k
    columns = [
        relative,
        ((distances - distances[:, :1]) / facts.spread).clamp(max=4),
        relative / relative[:, -1:].clamp(min=TINY),
        ranks.expand_as(relative),
        found.trust,
        *(opinion.gather(1, found.labels) for opinion in opinions),
        facts.shares[found.labels],
    ]
    return torch.stack(columns, dim=-1)


def _context_columns(
    found: Neighbours, distances: Float[Tensor, "B K"], opinions: tuple[Tensor, ...]
) -> Float[Tensor, "B G"]:
    """Return what is known of each query, how far the opinions agree, and the memory's facts."""
    facts = found.view.facts
    relative, scale = _relative(distances, facts), 1 / math.log(found.n_classes)
    agree = [
        (first * second).sum(dim=1)
        for place, first in enumerate(opinions)
        for second in opinions[place + 1 :]
    ]
    columns = [
        relative[:, 0],
        relative.mean(dim=1),
        relative[:, -1],
        found.trust.mean(dim=1),
        found.trust.std(dim=1, correction=0),
        *(each.amax(dim=1) for each in opinions),
        *(scale * torch.special.entr(each).sum(dim=1) for each in opinions),
        *agree,
        distances.new_full((len(distances),), math.log(found.k) / 4),
    ]
    table = facts.columns.to(distances).expand(len(distances), -1)
    return torch.cat([torch.stack(columns, dim=1), table], dim=1)


def _expert_of(found: Neighbours, facts: Facts) -> Float[Tensor, "B C"]:
    if found.own_ids is None:
        return facts.expert.log_probs(found.queries)
    if found.own_ids.shape[1] != 1:
        raise ValueError(
            f"own_ids must name one memory row a query, got {found.own_ids.shape[1]} of each"
        )
    own = found.own_ids.squeeze(1)
    return facts.expert.left_out(
        found.view.rows[own], found.view.labels[own], found.view.weights_of(own)
    )


# ---- The network: a committee of M members, whose parameters are stacked and run at once.

WIDTH, HEADS, N_SETTINGS = 48, 4, 7
# mix, gate, log sharpness, floor, share, log power, trust of the expert
SETTING_STARTS = (0.0, -1.5, 0.0, -4.0, -4.0, 0.0, -1.0)


@dataclass(frozen=True)
class Said:
    """What the prior makes of some queries; M members each."""

    weights: Float[Tensor, "M B K"]
    log_probs: Float[Tensor, "M B C"]
    mix: Float[Tensor, "M B 1"]
    gate: Float[Tensor, "M B 1"]
    told: Float[Tensor, "M B C"]


class PriorNetwork(nn.Module):
    """The two MLPs; see the head of this file.

    Args:
        members: M.
        width: Of the hidden layers.
    """

    def __init__(self, members: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        f, g, h, s = NEIGHBOUR_COLUMNS, CONTEXT_COLUMNS, HEADS, N_SETTINGS
        shapes = {
            "neighbour_in": (f, width),
            "context_in": (g, width),
            "bias_in": (1, width),
            "hidden": (width, width),
            "bias_hidden": (1, width),
            "scores": (width, h),
            "slope": (f, h),
            "settings_in": (g, width),
            "settings_bias": (1, width),
            "settings_hidden": (width, width),
            "settings_hidden_bias": (1, width),
            "settings_out": (width, s),
            "settings_start": (1, s),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(members, *shape)))

    @classmethod
    def fresh(cls, width: int, *, seed: int) -> "PriorNetwork":
        """Return one member that has learned nothing: similarity weights and equal parts."""
        network, generator = cls(1, width), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in network.named_parameters():
                if "bias" not in name and name not in ("scores", "slope", "settings_out"):
                    value.copy_(torch.randn(value.shape, generator=generator))
                    value.div_(math.sqrt(value.shape[1]))
            network.settings_start.copy_(torch.tensor(SETTING_STARTS))
            network.slope[:, 0] = torch.tensor([-1.0, -2.0, -4.0, -8.0])
        return network

    def forward(self, seen: Evidence) -> Said:
        """Weigh and vote; ``seen`` may hold the queries of each member in a first axis M."""
        x, context = seen.neighbour, seen.context
        if x.dim() == 3:
            x, context = x[None], context[None]
        given = context @ self.context_in + self.bias_in  # (M, B, W)
        m, b, k, f = x.shape
        flat = x.reshape(m, b * k, f)
        first = (flat @ self.neighbour_in).unflatten(1, (b, k)) + given[:, :, None]
        hidden = nn.functional.relu(first).flatten(1, 2)
        hidden = nn.functional.relu(hidden @ self.hidden + self.bias_hidden)
        scores = (hidden @ self.scores + flat @ self.slope).unflatten(1, (b, k))  # (M, B, K, H)
        if seen.log_weights is not None:
            scores = scores + seen.log_weights[..., None]
        weights = scores.softmax(dim=2).mean(dim=3)  # (M, B, K)
        mix, gate, sharpness, floor, share, power, trust = self._settings(context)
        labels = seen.labels.expand(len(weights), -1, -1)
        n_classes = seen.prototypes.shape[-1]
        vote = weights.new_zeros(*weights.shape[:2], n_classes).scatter_add(2, labels, weights)
        histograms = seen.histograms if seen.histograms.dim() == 4 else seen.histograms[None]
        around = (weights[:, :, None] @ histograms).squeeze(2)  # (M, B, C)
        vote = (1 - mix) * vote + mix * around
        told = (sharpness * seen.prototypes).softmax(dim=-1)
        probs = (1 - gate) * vote + gate * told
        probs = (1 - floor - share) * probs + floor / n_classes + share * seen.shares
        logs = (power * probs.clamp(min=1e-12).log() + trust * seen.expert).log_softmax(dim=-1)
        least = logs.new_tensor(math.log(LEAST_SHARE / n_classes))
        logs = torch.logaddexp(logs + math.log1p(-LEAST_SHARE), least)
        return Said(weights, logs, mix, gate, told)

    def member(self, place: int) -> "PriorNetwork":
        """Return one member alone; it shares its numbers with this committee."""
        alone = PriorNetwork.__new__(PriorNetwork)
        nn.Module.__init__(alone)
        for name, value in self.named_parameters():
            alone.register_parameter(name, nn.Parameter(value.detach()[place : place + 1]))
        return alone

    def _settings(self, context: Float[Tensor, "M B G"]) -> tuple[Tensor, ...]:
        hidden = nn.functional.relu(context @ self.settings_in + self.settings_bias)
        hidden = nn.functional.relu(hidden @ self.settings_hidden + self.settings_hidden_bias)
        raw = hidden @ self.settings_out + self.settings_start
        mix, gate, sharpness, floor, share, power, trust = raw.split(1, dim=-1)
        floor, share = 0.5 * floor.sigmoid() + 1e-5, 0.5 * share.sigmoid()
        return (
            mix.sigmoid(), gate.sigmoid(), sharpness.clamp(-4, 4).exp(), floor, share,
            power.clamp(-3, 3).exp(), nn.functional.softplus(trust),
        )  # fmt: skip


@torch.no_grad()
def spoken(network: PriorNetwork, seen: Evidence, *, block: int = 1024) -> Float[Tensor, "B C"]:
    """Return the log-probabilities of the first member, block by block."""
    blocks = [
        network(seen.of_queries(slice(start, start + block))).log_probs[0]
        for start in range(0, len(seen.context), block)
    ]
    return torch.cat(blocks)


def evidence_in_blocks(neighbours: Neighbours) -> Evidence:
    """Return the evidence of all queries; made block by block, for what is made on the way."""
    starts = range(0, len(neighbours.ids), 1024)
    return joined([evidence_of(neighbours.of_queries(slice(s, s + 1024))) for s in starts])


# ---- The attention of a memory: the prior, or a committee that was refined from it.

BLOCK = 256  # queries at a time: bounds the (block, K, C) histograms, and stays in the cache


class PriorAttention(nn.Module):
    """A committee of priors as a way to weigh neighbours: the mean of its members' opinions.

    Args:
        network: The committee; the shipped prior itself is one member.
    """

    def __init__(self, network: PriorNetwork) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("last_temperature", torch.ones(()))

    def forward(self, neighbours: Neighbours) -> Attended:
        """Weigh the neighbours and let them vote."""
        seen = evidence_of(neighbours)
        said = self.network(seen)
        logs = _mean_of_members(said.log_probs)
        logs = (logs / self.last_temperature).log_softmax(dim=1)
        return Attended(
            weights=said.weights.mean(dim=0),
            log_probs=logs,
            value=None,
            mix=said.mix.mean(dim=0),
            gate=said.gate.mean(dim=0),
            posterior=seen.prototypes.exp(),
        )

    def contributions(self, neighbours: Neighbours, classes: Int[Tensor, " B"]) -> Contributions:
        """Return what each neighbour and the prototypes add to one class of each query.

        They sum to its probability before floor, expert and temperature.
        """
        seen = evidence_of(neighbours)
        said = self.network(seen)
        wanted = classes[:, None]
        own = (seen.labels == wanted).to(said.weights)  # (B, K)
        around = seen.histograms.gather(2, wanted[..., None].expand(-1, neighbours.k, 1)).squeeze(2)
        spoken = (1 - said.mix) * own + said.mix * around  # (M, B, K)
        votes = ((1 - said.gate) * said.weights * spoken).mean(dim=0)
        told = (said.gate * said.told.gather(2, wanted.expand(len(said.told), -1, 1))).mean(dim=0)
        return Contributions(votes, told.squeeze(1))


def _mean_of_members(log_probs: Float[Tensor, "M B C"]) -> Float[Tensor, "B C"]:
    return log_probs.logsumexp(dim=0) - math.log(len(log_probs))


# ---- The file of the shipped prior.

PRIOR_FILE = Path(__file__).with_name("prior.safetensors")
PRIOR_VERSION = 1  # raised where columns or layers change: an older file is refused


def save_prior(network: PriorNetwork, path: Path, facts: dict[str, str]) -> Path:
    """Write a prior with its version and the sum of its numbers."""
    from safetensors.torch import save_file

    state = {name: value.detach().contiguous() for name, value in network.state_dict().items()}
    header = {"prior": json.dumps({"version": PRIOR_VERSION, "sum": _sum_of(state), **facts})}
    save_file(state, path, metadata=header)
    return path


def read_prior(path: Path = PRIOR_FILE) -> PriorNetwork:
    """Return the prior of a file, or refuse a file that is damaged or of another version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            facts = json.loads((handle.metadata() or {}).get("prior", "null"))
            state = {name: handle.get_tensor(name) for name in handle.keys()}
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"path must be a whole prior file, got path={str(path)!r}") from error
    if facts is None or facts["version"] != PRIOR_VERSION:
        found = None if facts is None else facts["version"]
        raise ValueError(f"path must hold a prior of version {PRIOR_VERSION}, got {found}")
    if facts["sum"] != _sum_of(state):
        raise ValueError(f"path must hold the numbers it was written with, got {str(path)!r}")
    network = PriorNetwork(len(state["bias_in"]), state["bias_in"].shape[-1])
    network.load_state_dict(state)
    return network.requires_grad_(False).eval()


@lru_cache(maxsize=1)
def shipped_prior() -> PriorNetwork:
    """Return the prior that the package brings along; read once, never changed."""
    return read_prior()


def _sum_of(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
