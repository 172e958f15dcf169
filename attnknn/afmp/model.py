"""AFMP: images to logits, by messages between patches.

One bottom-up pass: patches are embedded, then every layer routes and exchanges messages. With the
top-down pass on, the first pass's states are refined from the top level down, and a second pass
follows: each layer's input gets the feedback of the level above, and its router compares what is
sent with what the refined level above predicts. The readout sees the second pass.

Axes: B images, P patches, N = B * P, D width, C classes.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnknn.afmp.edges import BatchGraph, Edges, batch_graph, gated_sum
from attnknn.afmp.graph import AFMP_TINY, AFMPConfig, Scaffold, grid_scaffold
from attnknn.checks import check_count
from attnknn.core.kernels import Linear, linear

# ---- The predictive router: states of points to scores on edges, and the edges that are kept.
#
# Axes: N points of the batch, E edges of the batch, B images, D width.

SCORE_WIDTH = 64
BILINEAR_SCALE = 0.02
SMALLEST_SQUARE = 1e-12  # below it a squared error counts as this: the root has no slope at 0


class Routed(NamedTuple):
    """The edges of a layer that carry messages.

    Attributes:
        edges: The kept edges.
        scores: Their scores, image by image.
        places: Where the kept edges of each image stand in the scaffold's list; None keeps all.
    """

    edges: Edges
    scores: Float[Tensor, "B n_kept"]
    places: Int[Tensor, "B n_kept"] | None


class PredictiveRouter(nn.Module):
    """score_ij = (W_q h_i)' U (W_k h_j) + MLP[h_i, h_j, error_ij, length_ij]; i hears j.

    error_ij = |h_j - W_pred t_i| with t_i the state from above; without one nothing is predicted,
    and the error is all of |h_j|. The share of edges with the highest scores is kept in every
    image; their gate is sigmoid(W_gate score), one number for each of the D channels.

    Args:
        width: Width D of the states.
        keep_share: Share of each image's edges that is kept.
        predicts: Whether states from above will be given.
    """

    def __init__(self, width: int, keep_share: float, *, predicts: bool = True) -> None:
        super().__init__()
        self.keep_share = keep_share
        self.prediction = Linear(width, width) if predicts else None
        self.query = nn.Linear(width, SCORE_WIDTH)
        self.key = nn.Linear(width, SCORE_WIDTH)
        self.bilinear = nn.Parameter(BILINEAR_SCALE * torch.randn(SCORE_WIDTH, SCORE_WIDTH))
        self.hidden = nn.Linear(2 * width + 2, SCORE_WIDTH)
        self.score = nn.Linear(SCORE_WIDTH, 1)
        self.gate = nn.Linear(1, width)

    def forward(
        self,
        states: Float[Tensor, "N D"],
        graph: BatchGraph,
        above: Float[Tensor, "N D"] | None = None,
    ) -> Routed:
        """Return the kept edges and their scores.

        Args:
            states: What the layer reads.
            graph: The batch's edges.
            above: States of the level above, which predict ``states``.
        """
        n_kept = kept_edges(graph.n_edges, self.keep_share)
        if not n_kept:  # nothing to choose: nothing is scored
            none = graph.edges.sources.new_empty(graph.n_images, 0)
            return Routed(graph.keep(none), states.new_empty(none.shape), none)
        scores = self.scores(states, graph, above).view(graph.n_images, -1)  # (B, E of one)
        if n_kept == graph.n_edges:
            return Routed(graph.edges, scores, None)
        # NOTE: within each image: its batch mates cannot change what an image keeps.
        places = scores.topk(n_kept, dim=1, sorted=False).indices.sort(dim=1).values
        return Routed(graph.keep(places), scores.gather(1, places), places)

    def scores(
        self,
        states: Float[Tensor, "N D"],
        graph: BatchGraph,
        above: Float[Tensor, "N D"] | None = None,
    ) -> Float[Tensor, " E"]:
        """Return the score of every edge; projections are made once per point, not per edge."""
        edges = graph.edges
        queries, keys, targets, sources = self._projections(states).split(SCORE_WIDTH, dim=1)
        pair = torch.stack([self.errors(states, edges, above), self._lengths(graph)], dim=1)
        hidden = edges.from_targets(targets) + edges.from_sources(sources)  # (E, 64)
        hidden = torch.addmm(hidden, pair, self.hidden.weight[:, -2:].T).relu()
        return edges.dot(queries, keys) + self.score(hidden).squeeze(1)

    def _projections(self, states: Float[Tensor, "N D"]) -> Float[Tensor, "N n_projections"]:
        """Return (W_q h)' U, W_k h, and the receiver's and the sender's part of the MLP.

        One product with the four maps side by side: narrow ones leave most of a CPU idle.
        """
        to_target, to_source, _ = self.hidden.weight.split([states.shape[1]] * 2 + [2], dim=1)
        query, bias = self.bilinear.T @ self.query.weight, self.query.bias @ self.bilinear
        maps = torch.cat([query, self.key.weight, to_target, to_source])
        shifts = torch.cat([bias, self.key.bias, self.hidden.bias, torch.zeros_like(bias)])
        return linear(states, maps, shifts)

    def errors(
        self,
        states: Float[Tensor, "N D"],
        edges: Edges,
        above: Float[Tensor, "N D"] | None = None,
    ) -> Float[Tensor, " E"]:
        """Return how far each sender is from what its receiver's state from above predicts."""
        sent = states.square().sum(dim=1)  # (N,)
        # Not by plain indexing: its gradient adds up in whatever order the threads come.
        if above is None:
            lengths = sent.clamp_min(SMALLEST_SQUARE).sqrt()
            return edges.from_sources(lengths[:, None]).squeeze(1)
        predicted = self.prediction(above)
        own = predicted.square().sum(dim=1)
        sent = edges.from_sources(sent[:, None]) + edges.from_targets(own[:, None])  # (E, 1)
        square = sent.squeeze(1) - 2 * edges.dot(predicted, states)
        return square.clamp_min(SMALLEST_SQUARE).sqrt()

    def gates(self, routed: Routed) -> Float[Tensor, "B n_kept D"]:
        """Return the gates of the kept edges, in (0, 1); those of all others are exactly 0."""
        return torch.sigmoid(self.gate(routed.scores[..., None]))

    def _lengths(self, graph: BatchGraph) -> Float[Tensor, " E"]:
        return graph.lengths.to(self.gate.weight.dtype).repeat(graph.n_images)


def kept_edges(n_edges: int, keep_share: float) -> int:
    """Return how many edges of an image are kept: the nearest whole number, 0 for a share of 0."""
    return max(1, round(keep_share * n_edges)) if keep_share else 0


# ---- Units: gated messages to new states, states from above to lower ones, gates to a penalty.
#
# Axes: N points of the batch, D width.


class CapsuleUnit(nn.Module):
    """h_i' = GELU(W_self h_i + sum over kept edges of gate_ij * W_msg h_j)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = Linear(width, width)
        self.message = Linear(width, width)

    def forward(
        self, states: Float[Tensor, "N D"], routed: Routed, gate: nn.Linear
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, ""]]:
        """Return the new states and the sum of all gates; only kept edges carry messages.

        Args:
            states: What the layer reads.
            routed: The kept edges and their scores.
            gate: Turns a score into one gate a channel, before the sigmoid.
        """
        # NOTE: W_msg is applied once per point; an edge only gates what its source says.
        said, scores = self.message(states), routed.scores
        heard, total = gated_sum(said, scores, gate.weight[:, 0], gate.bias, routed.edges)
        return F.gelu(self.own(states) + heard), total


class LayerOutput(NamedTuple):
    """States of the next level, what was routed, and the layer's mean gate.

    The mean is over all edges and channels; a pruned edge counts as 0.
    """

    states: Float[Tensor, "N D"]
    routed: Routed
    mean_gate: Float[Tensor, ""]


class Layer(nn.Module):
    """A router and the capsule unit that uses its gates."""

    def __init__(self, width: int, keep_share: float, *, predicts: bool) -> None:
        super().__init__()
        self.router = PredictiveRouter(width, keep_share, predicts=predicts)
        self.unit = CapsuleUnit(width)

    def forward(
        self,
        states: Float[Tensor, "N D"],
        graph: BatchGraph,
        above: Float[Tensor, "N D"] | None = None,
    ) -> LayerOutput:
        """Return the states of the next level and how they came about."""
        routed = self.router(states, graph, above)
        states, total = self.unit(states, routed, self.router.gate)
        n_gates = graph.n_images * graph.n_edges * states.shape[1]
        return LayerOutput(states, routed, total / n_gates)


class TopDown(nn.Module):
    """feedback_l = W_l H t_(l+1), t_l = h_l + feedback_l, from the top level (t_L = h_L) down.

    H gives every patch the mean of its 2 x 2 block: the level above speaks for a region.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(Linear(width, width) for _ in range(layers - 1))

    def forward(
        self, states: list[Float[Tensor, "N D"]], graph: BatchGraph
    ) -> tuple[list[Float[Tensor, "N D"]], list[Float[Tensor, "N D"]]]:
        """Return the refined states of all levels, and the feedback into all but the top one."""
        refined, feedback = [states[-1]], []
        for state, to_lower in zip(states[-2::-1], reversed(self.maps), strict=True):
            feedback.append(to_lower(graph.spread_blocks(refined[-1])))
            refined.append(state + feedback[-1])
        return refined[::-1], feedback[::-1]


Images = Float[Tensor, "B channels height width"]


@dataclass(frozen=True)
class Passage:
    """What a batch left behind in a model.

    Attributes:
        features: Mean top state over the patches of each image.
        gate_penalty: Mean gate over edges, channels and layers of the last pass.
        layers: What each layer of the last pass made.
        graph: The batch's edges.
    """

    features: Float[Tensor, "B D"]
    gate_penalty: Float[Tensor, ""]
    layers: list[LayerOutput]
    graph: BatchGraph


@dataclass(frozen=True)
class LayerGates:
    """Gates of one layer, image by image.

    Attributes:
        gates: Mean gate over the channels of every scaffold edge; exactly 0 where pruned.
        kept: Which edges carried a message.
        channels: Gates of the kept edges, channel by channel.
    """

    gates: Float[Tensor, "B E"]
    kept: Bool[Tensor, "B E"]
    channels: Float[Tensor, "B n_kept D"]


class AFMPTrunk(nn.Module):
    """Everything below the readout: images to one feature row each.

    Args:
        config: Sizes and switches.
        channels: Colour channels of the images.
    """

    def __init__(self, config: AFMPConfig, *, channels: int = 3) -> None:
        super().__init__()
        self.config, self.out_dim = config, config.width
        self.channels = check_count("channels", channels)
        self.patches = Linear(channels * config.patch**2, config.width)
        self.places = Linear(2, config.width)
        self.layers = nn.ModuleList(
            Layer(config.width, config.keep_share, predicts=config.top_down)
            for _ in range(config.layers)
        )
        self.top_down = TopDown(config.width, config.layers) if config.top_down else None

    def forward(self, images: Images) -> Float[Tensor, "B D"]:
        """Return the mean top state of each image."""
        return self.passage(images).features

    def passage(self, images: Images) -> Passage:
        """Return the features with the gates and states they came from."""
        scaffold = self.scaffold(images)
        graph = batch_graph(scaffold, len(images), images.device)
        embedded = self._embed(images, scaffold)
        layers = self._bottom_up(embedded, graph)
        if self.top_down is not None:
            refined, feedback = self.top_down([layer.states for layer in layers], graph)
            layers = self._bottom_up(embedded, graph, refined, feedback)
        top = layers[-1].states.view(len(images), scaffold.n_points, -1)  # (B, P, D)
        penalty = torch.stack([layer.mean_gate for layer in layers]).mean()
        return Passage(top.mean(dim=1), penalty, layers, graph)

    def scaffold(self, images: Images) -> Scaffold:
        """Return the scaffold over the patches of these images."""
        if images.ndim != 4 or images.shape[1] != self.channels or not len(images):
            raise ValueError(
                f"images must have shape (B, {self.channels}, height, width) with B at least 1, "
                f"got shape {tuple(images.shape)}"
            )
        height, width = images.shape[2:]
        kind, window = self.config.scaffold, self.config.window
        return grid_scaffold(height, width, self.config.patch, kind=kind, window=window)

    def _embed(self, images: Images, scaffold: Scaffold) -> Float[Tensor, "N D"]:
        """Return the embedded patches: their pixels, and where their centres are in [-1, 1]."""
        centres = torch.tensor(scaffold.points).to(images)
        places = 2 * centres / (centres.max(dim=0).values + 0.5) - 1  # (P, 2)
        pixels = self.patches(cut_patches(images, self.config.patch))  # (B, P, D)
        return (pixels + self.places(places)).flatten(0, 1)  # (N, D)

    def _bottom_up(
        self,
        states: Float[Tensor, "N D"],
        graph: BatchGraph,
        above: list[Float[Tensor, "N D"]] | None = None,
        feedback: list[Float[Tensor, "N D"]] | None = None,
    ) -> list[LayerOutput]:
        """Return what each layer makes of the one below it."""
        outputs = []
        for place, layer in enumerate(self.layers):
            if feedback is not None and place > 0:
                states = states + feedback[place - 1]
            outputs.append(layer(states, graph, None if above is None else above[place]))
            states = outputs[-1].states
        return outputs


def build_backbone(shape: tuple[int, int, int]) -> "SinglePrecisionTrunk":
    """Return AFMP-Tiny without its readout: three tenths of the edges kept, top-down pass on.

    Neither can be set here, and nothing asks for small gates: losses of embedders know no sparsity
    penalty. ``attnknn.afmp.train`` trains AFMP with all its settings.

    Args:
        shape: Channels, height and width of the images.
    """
    channels, height, width = shape
    # Patches of 8 pixels, as in AFMP-Tiny; small images still get a grid of 4 x 4.
    wanted = min(AFMP_TINY.patch, max(1, min(height, width) // 4))
    patch = next(p for p in range(wanted, 0, -1) if height % p == width % p == 0)
    if 2 * patch < wanted:
        raise ValueError(
            f"images must be cut into patches of {-(-wanted // 2)} to {wanted} pixels for "
            f"backbone='afmp', got {height} x {width}: set image_size to a multiple of {wanted}"
        )
    return SinglePrecisionTrunk(replace(AFMP_TINY, patch=patch), channels=channels)


class SinglePrecisionTrunk(AFMPTrunk):
    """AFMP's trunk, left out of autocast: its sparse products have no bfloat16 form."""

    def forward(self, images: Images) -> Float[Tensor, "B D"]:
        """Return the mean top state of each image."""
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images.float())


class AFMP(nn.Module):
    """logits = W (mean over patches of the top states).

    Args:
        config: Sizes and switches.
        n_classes: Number C of classes.
        channels: Colour channels of the images.
    """

    def __init__(self, config: AFMPConfig, n_classes: int, *, channels: int = 3) -> None:
        super().__init__()
        self.config = config
        self.trunk = AFMPTrunk(config, channels=channels)
        self.readout = Linear(config.width, check_count("n_classes", n_classes, low=2))

    def forward(self, images: Images) -> Float[Tensor, "B C"]:
        """Return the logits of normalised images."""
        return self.readout(self.trunk(images))

    def logits_and_penalty(self, images: Images) -> tuple[Float[Tensor, "B C"], Float[Tensor, ""]]:
        """Return the logits and what the sparsity adds to a loss: its weight times the mean gate.

        A dense model has no sparsity to ask for, and no penalty.
        """
        passage = self.trunk.passage(images)
        weight = 0.0 if self.config.is_dense else self.config.sparse_weight
        return self.readout(passage.features), weight * passage.gate_penalty

    @torch.no_grad()
    def gates(self, images: Images) -> list[LayerGates]:
        """Return the gates of every layer, for looking at."""
        passage = self.trunk.passage(images)
        return [
            _layer_gates(made.routed, layer.router.gates(made.routed), passage.graph)
            for made, layer in zip(passage.layers, self.trunk.layers, strict=True)
        ]


def cut_patches(images: Images, patch: int) -> Float[Tensor, "B P F"]:
    """Return the flattened patches of each image, in reading order."""
    rows = images.unflatten(2, (-1, patch)).unflatten(4, (-1, patch))  # (B, c, y, patch, x, patch)
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, P, c * patch * patch)


def _layer_gates(
    routed: Routed, gates: Float[Tensor, "B n_kept D"], graph: BatchGraph
) -> LayerGates:
    means = gates.mean(dim=2)  # (B, kept edges)
    if routed.places is None:
        return LayerGates(means, torch.ones_like(means, dtype=torch.bool), gates)
    empty = means.new_zeros(graph.n_images, graph.n_edges)
    kept = empty.bool().scatter(1, routed.places, True)
    return LayerGates(empty.scatter(1, routed.places, means), kept, gates)
