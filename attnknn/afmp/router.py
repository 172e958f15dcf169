"""The predictive router: states of points to scores on edges, and the edges that are kept.

Axes: N points of the batch, E edges of the batch, B images, D width.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnknn.afmp.edges import BatchGraph, Edges
from attnknn.linear import Linear, linear

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
