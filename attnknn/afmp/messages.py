"""Gated messages: what points say, summed at who hears it, without a table of all edges.

A message is gate * value with gate = sigmoid(score * weight + bias), one number a channel. Written
with plain operations, ten tables of (edges, width) would go through main memory in every layer.
Here a few images at a time go through buffers that stay in the cache, and the gates are computed
again on the way back instead of being kept.

Axes: N points of the batch, E edges of the batch, D width.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnknn.afmp.edges import Edges, Groups, bag_sum

BUFFER_NUMBERS = 2**18  # 1 MB of float32: a buffer's share of the cache


def gated_sum(
    values: Float[Tensor, "N D"],
    scores: Float[Tensor, "B E_of_one"],
    weight: Float[Tensor, " D"],
    bias: Float[Tensor, " D"],
    edges: Edges,
) -> tuple[Float[Tensor, "N D"], Float[Tensor, ""]]:
    """Return the sum of gated messages at each point, and the sum of all gates.

    Args:
        values: What each point says.
        scores: Score of each edge, image by image; each image has as many edges as the next.
        weight: Slope of the gate in the score, channel by channel.
        bias: Gate at score 0, before the sigmoid.
        edges: The edges, sorted by image and by target.
    """
    return _GatedSum.apply(values.contiguous(), scores.contiguous(), weight, bias, edges)


class _Chunk(NamedTuple):
    """Whole images that are worked on at once, with their points and their edges."""

    images: slice
    points: slice
    edges: slice


def _chunks(scores: Tensor, edges: Edges, width: int) -> Iterator[_Chunk]:
    n_images, n_edges = scores.shape
    n_points = edges.n_points // n_images
    step = max(1, BUFFER_NUMBERS // (max(1, n_edges) * width))
    for first in range(0, n_images, step):
        last = min(first + step, n_images)
        yield _Chunk(
            slice(first, last),
            slice(first * n_points, last * n_points),
            slice(first * n_edges, last * n_edges),
        )


class _Buffers:
    """Three tables of one chunk's size, used again by every chunk."""

    def __init__(self, like: Tensor, chunks: list[_Chunk], n_edges: int) -> None:
        most = max(chunk.images.stop - chunk.images.start for chunk in chunks) * n_edges
        self.tables = like.new_empty(3, most, like.shape[1])

    def rows(self, chunk: _Chunk) -> tuple[Tensor, ...]:
        return self.tables[:, : chunk.edges.stop - chunk.edges.start].unbind(0)


def _gates(scores: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    torch.addmm(bias, scores.reshape(-1, 1), weight[None], out=out)
    return out.sigmoid_()


class _GatedSum(torch.autograd.Function):
    """The sums and, from their gradients, those of values, scores, weight and bias."""

    @staticmethod
    def forward(ctx, values, scores, weight, bias, edges):
        ctx.save_for_backward(values, scores, weight, bias)
        ctx.edges = edges
        chunks = list(_chunks(scores, edges, values.shape[1]))
        buffers, groups = _Buffers(values, chunks, scores.shape[1]), edges.by_target
        sums, total = torch.empty_like(values), values.new_zeros(())
        for chunk in chunks:
            gates, said, _ = buffers.rows(chunk)
            _gates(scores[chunk.images], weight, bias, gates)
            total += gates.sum()
            torch.index_select(values, 0, edges.sources[chunk.edges], out=said)
            sums[chunk.points] = _summed(said.mul_(gates), groups, chunk)
        return sums, total

    @staticmethod
    @once_differentiable
    def backward(ctx, of_sums, of_total):
        values, scores, weight, bias = ctx.saved_tensors
        edges, of_sums = ctx.edges, of_sums.contiguous()
        chunks = list(_chunks(scores, edges, values.shape[1]))
        buffers, groups = _Buffers(values, chunks, scores.shape[1]), edges.by_source
        of_values, of_scores = torch.empty_like(values), torch.empty_like(scores)
        of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for chunk in chunks:
            gates, said, heard = buffers.rows(chunk)
            _gates(scores[chunk.images], weight, bias, gates)
            torch.index_select(of_sums, 0, edges.targets[chunk.edges], out=heard)
            torch.index_select(values, 0, edges.sources[chunk.edges], out=said)
            said.mul_(heard).add_(of_total)  # gradient of the gates
            of_values[chunk.points] = _summed(heard.mul_(gates), groups, chunk)
            slope = torch.addcmul(gates, gates, gates, value=-1, out=heard)  # gate * (1 - gate)
            said.mul_(slope)
            flat = scores[chunk.images].reshape(-1)
            torch.mv(said, weight, out=of_scores[chunk.images].view(-1))
            of_weight += flat @ said
            of_bias += said.sum(dim=0)
        return of_values, of_scores, of_weight, of_bias, None


def _summed(rows: Tensor, groups: Groups, chunk: _Chunk) -> Tensor:
    """Return the sums of a chunk's rows at its points."""
    starts = groups.starts[chunk.points.start : chunk.points.stop + 1] - chunk.edges.start
    return bag_sum(rows, groups.order[chunk.edges] - chunk.edges.start, starts)
