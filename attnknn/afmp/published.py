"""AFMP as published, faults and all: kept to be measured next to the corrected model.

Nothing but comparisons uses this module. What is wrong on purpose:

- edge ids are not moved per image: only the first image of a batch exchanges messages;
- the kept count is share * patches * batch size, which exceeds the edges of that one image, so
  nothing is pruned; where something would be, a score of 0 still opens the gate to sigmoid(bias);
- the batch size in that count is a constant of the notebook, whatever the batch really is;
- the "top-down prediction" is the layer's own input, and edges run one way only;
- the top-down pass rewrites lower states, but the readout sees the top one alone.

Axes: B images, P patches, N = B * P, E one-way edges, D width, C classes.
"""

from collections.abc import Hashable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnknn.afmp.graph import AFMPConfig, Scaffold
from attnknn.afmp.model import AFMP, Images, Layer

PUBLISHED_BATCH = 128


class PublishedAFMP(AFMP):
    """The published model: the parameters of AFMP, used as in the source notebook.

    Args:
        config: Sizes and switches.
        n_classes: Number C of classes.
        channels: Colour channels of the images.
        batch_size: The notebook's global, which decides how many edges are "kept".
    """

    def __init__(
        self,
        config: AFMPConfig,
        n_classes: int,
        *,
        channels: int = 3,
        batch_size: int = PUBLISHED_BATCH,
    ) -> None:
        super().__init__(config, n_classes, channels=channels)
        self.batch_size = batch_size
        if not config.top_down:  # the published router always has this map
            for layer in self.trunk.layers:
                layer.router.prediction = nn.Linear(config.width, config.width)

    def forward(self, images: Images) -> Float[Tensor, "B C"]:
        """Return the logits of normalised images."""
        return self.logits_and_penalty(images)[0]

    def logits_and_penalty(self, images: Images) -> tuple[Float[Tensor, "B C"], Float[Tensor, ""]]:
        """Return the logits and the weighted mean gate."""
        states, gates = self._pass(images)
        top = states[-1].view(len(images), -1, self.config.width).mean(dim=1)
        weight = 0.0 if self.config.is_dense else self.config.sparse_weight
        return self.readout(top), weight * torch.stack([each.mean() for each in gates]).mean()

    @torch.no_grad()
    def opened(self, images: Images) -> list[Float[Tensor, "E D"]]:
        """Return the gates of each layer: one list for the whole batch."""
        return self._pass(images)[1]

    def _pass(self, images: Images) -> tuple[list[Tensor], list[Tensor]]:
        scaffold = self.trunk.scaffold(images)
        pairs, lengths = one_way_edges(scaffold)
        pairs, lengths = pairs.to(images.device), lengths.to(images)
        n_kept = int(self.config.keep_share * scaffold.n_points * self.batch_size)
        states, gates = [self.trunk._embed(images, scaffold)], []
        for layer in self.trunk.layers:
            new, opened = _published_layer(layer, states[-1], pairs, lengths, n_kept)
            states.append(new)
            gates.append(opened)
        if self.trunk.top_down is not None:
            for place, to_lower in reversed(list(enumerate(self.trunk.top_down.maps, start=1))):
                states[place] = states[place] + to_lower(states[place + 1])
        return states, gates


def one_way_edges(scaffold: Scaffold) -> tuple[Int[Tensor, "2 E"], Float[Tensor, " E"]]:
    """Return (receiver, sender) pairs with receiver < sender, and their lengths."""
    forward = scaffold.targets < scaffold.sources
    pairs = np.stack([scaffold.targets[forward], scaffold.sources[forward]])
    return torch.from_numpy(pairs), torch.from_numpy(scaffold.lengths[forward])


def published_cache_key(points: Float[np.ndarray, "P n_axes"]) -> Hashable:
    """Return the published key of a graph, which many sets of points share."""
    return len(points), float(points.mean())


def _published_layer(
    layer: Layer,
    states: Float[Tensor, "N D"],
    pairs: Int[Tensor, "2 E"],
    lengths: Float[Tensor, " E"],
    n_kept: int,
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "E D"]]:
    """Return new states and gates: only points below P, the first image's, occur in ``pairs``."""
    router, unit = layer.router, layer.unit
    receiver, sender = states[pairs[0]], states[pairs[1]]  # (E, D)
    error = (sender - router.prediction(receiver)).norm(dim=1, keepdim=True)
    hidden = router.hidden(torch.cat([receiver, sender, error, lengths[:, None]], dim=1))
    products = (router.query(receiver) @ router.bilinear * router.key(sender)).sum(dim=1)
    scores = products + router.score(hidden.relu()).squeeze(1)
    if n_kept < len(scores):
        threshold = scores.topk(n_kept).values[-1] if n_kept else scores.max() + 1
        scores = torch.where(scores >= threshold, scores, 0.0)
    gates = torch.sigmoid(router.gate(scores[:, None]))  # (E, D)
    heard = torch.zeros_like(states).index_add(0, pairs[0], gates * unit.message(sender))
    return F.gelu(unit.own(states) + heard), gates
