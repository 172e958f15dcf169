"""AFMP: images to logits, by messages between patches.

One bottom-up pass: patches are embedded, then every layer routes and exchanges messages. With the
top-down pass on, the first pass's states are refined from the top level down, and a second pass
follows: each layer's input gets the feedback of the level above, and its router compares what is
sent with what the refined level above predicts. The readout sees the second pass.

Axes: B images, P patches, N = B * P, D width, C classes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnknn.afmp.edges import BatchGraph, batch_graph
from attnknn.afmp.router import Routed
from attnknn.afmp.scaffold import Scaffold, grid_scaffold
from attnknn.afmp.settings import AFMPConfig
from attnknn.afmp.units import Layer, LayerOutput, TopDown
from attnknn.checks import check_count
from attnknn.linear import Linear

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
