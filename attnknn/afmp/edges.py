"""Edges of a batch: states of points to values on edges and back, with their gradients.

A batch of B images is one graph of B * P points without edges between images, so nothing can pass
from one image to another. Sums over edges are bags of sorted rows: no atomics, the same bits in
every run, and no (edges, width) table where a dot product or a weighted sum is all that is needed.

Axes: N points of the batch (B * P), E edges of the batch, D width.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnknn.afmp.graph import Scaffold

CACHED_BATCHES = 16


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows in groups: row ``order[starts[g] : starts[g + 1]]`` are the members of group g."""

    order: Int[Tensor, " E"]
    starts: Int[Tensor, " N_plus_1"]


@dataclass(frozen=True, eq=False)
class Edges:
    """Directed edges over the points of a batch, sorted by target.

    Attributes:
        sources: Who sends along each edge.
        targets: Who receives along each edge.
        n_points: Number N of points.
    """

    sources: Int[Tensor, " E"]
    targets: Int[Tensor, " E"]
    n_points: int

    @cached_property
    @torch.inference_mode(False)  # kept: a training that comes later must be able to use it
    def by_target(self) -> Groups:
        """The edges that end in each point."""
        places = torch.arange(len(self.targets), device=self.targets.device)
        return Groups(places, _starts(self.targets, self.n_points))

    @cached_property
    @torch.inference_mode(False)
    def by_source(self) -> Groups:
        """The edges that begin in each point."""
        values, order = self.sources.sort(stable=True)
        return Groups(order, _starts(values, self.n_points))

    def from_sources(self, rows: Float[Tensor, "N D"]) -> Float[Tensor, "E D"]:
        """Return the sender's row on each edge."""
        return _Gather.apply(rows, self.sources, self.by_source)

    def from_targets(self, rows: Float[Tensor, "N D"]) -> Float[Tensor, "E D"]:
        """Return the receiver's row on each edge."""
        return _Gather.apply(rows, self.targets, self.by_target)

    def sum_at_targets(self, rows: Float[Tensor, "E D"]) -> Float[Tensor, "N D"]:
        """Return the sum of the rows that arrive at each point; zero where none does."""
        return _Sum.apply(rows, self.targets, self.by_target)

    def dot(
        self, at_targets: Float[Tensor, "N D"], at_sources: Float[Tensor, "N D"]
    ) -> Float[Tensor, " E"]:
        """Return, on each edge, the receiver's row of the one times the sender's of the other."""
        return _Dot.apply(at_targets, at_sources, self)


@dataclass(frozen=True, eq=False)
class BatchGraph:
    """A scaffold repeated for every image of a batch, on a device.

    Attributes:
        edges: All edges of all images, image after image.
        lengths: Length of each edge of one image.
        n_images: Number B of images.
        blocks: The points of each block of the next coarser level.
        block_of: Block of each point.
        block_sizes: Points in each block.
    """

    edges: Edges
    lengths: Float[Tensor, " E"]
    n_images: int
    blocks: Groups
    block_of: Int[Tensor, " N"]
    block_sizes: Float[Tensor, "n_blocks 1"]

    @property
    def n_edges(self) -> int:
        """Edges of one image."""
        return len(self.lengths)

    def spread_blocks(self, rows: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Return, for each point, the mean row of its block: what the coarser level knows of it."""
        means = _Sum.apply(rows, self.block_of, self.blocks) / self.block_sizes.to(rows.dtype)
        return _Gather.apply(means, self.block_of, self.blocks)

    def keep(self, places: Int[Tensor, "B n_kept"]) -> Edges:
        """Return only the given edges of each image.

        Args:
            places: Places of the edges in one image's list, ascending.
        """
        first = torch.arange(self.n_images, device=places.device)[:, None] * self.n_edges
        flat = (places + first).reshape(-1)
        return Edges(self.edges.sources[flat], self.edges.targets[flat], self.edges.n_points)


@lru_cache(maxsize=CACHED_BATCHES)
@torch.inference_mode(False)
def batch_graph(scaffold: Scaffold, n_images: int, device: torch.device) -> BatchGraph:
    """Return the graph of a batch of images that share a scaffold; made once for each size."""

    def repeated(ids, step):
        # NOTE: every image has its own range of ids; without it only the first would exchange.
        shift = torch.arange(n_images, device=device)[:, None] * step
        return (torch.from_numpy(ids).to(device) + shift).reshape(-1)

    n_points, n_blocks = scaffold.n_points, int(scaffold.parents.max()) + 1
    sources, targets = (repeated(ids, n_points) for ids in (scaffold.sources, scaffold.targets))
    block_of = repeated(scaffold.parents, n_blocks)
    values, order = block_of.sort(stable=True)
    starts = _starts(values, n_images * n_blocks)
    return BatchGraph(
        edges=Edges(sources, targets, n_images * n_points),
        lengths=torch.from_numpy(scaffold.lengths).float().to(device),
        n_images=n_images,
        blocks=Groups(order, starts),
        block_of=block_of,
        block_sizes=starts.diff()[:, None].float(),
    )


def _starts(sorted_ids: Int[Tensor, " E"], n_groups: int) -> Int[Tensor, " N_plus_1"]:
    return torch.searchsorted(
        sorted_ids, torch.arange(n_groups + 1, device=sorted_ids.device, dtype=sorted_ids.dtype)
    )


def bag_sum(
    rows: Float[Tensor, "n_rows D"],
    members: Int[Tensor, " E"],
    starts: Int[Tensor, " n_groups_plus_1"],
    weights: Float[Tensor, " E"] | None = None,
) -> Float[Tensor, "n_groups D"]:
    """Return the (weighted) sum of the member rows of each group.

    Args:
        rows: The table.
        members: Rows of the table, group after group.
        starts: Where each group begins in ``members``, and where the last one ends.
        weights: Factor of each member.
    """
    return F.embedding_bag(
        members, rows, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


class _Gather(torch.autograd.Function):
    """rows[index]; the gradient of a row is the sum over the group that reads it."""

    @staticmethod
    def forward(ctx, rows, index, groups):
        ctx.groups = groups
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        groups = ctx.groups
        return bag_sum(gradient.contiguous(), groups.order, groups.starts), None, None


class _Sum(torch.autograd.Function):
    """Sum of each group's rows; the gradient of a row is that of its group."""

    @staticmethod
    def forward(ctx, rows, index, groups):
        ctx.save_for_backward(index)
        return bag_sum(rows.contiguous(), groups.order, groups.starts)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        return gradient.index_select(0, index), None, None


class _Dot(torch.autograd.Function):
    """Dot products on edges only: a sampled matrix product, and weighted bags for its gradient."""

    @staticmethod
    def forward(ctx, at_targets, at_sources, edges):
        at_targets, at_sources = at_targets.contiguous(), at_sources.contiguous()
        ctx.save_for_backward(at_targets, at_sources)
        ctx.edges = edges
        return _sampled_product(at_targets, at_sources, edges)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (at_targets, at_sources), edges = ctx.saved_tensors, ctx.edges
        gradient, back = gradient.contiguous(), edges.by_source
        to_targets = bag_sum(at_sources, edges.sources, edges.by_target.starts, gradient)
        to_sources = bag_sum(
            at_targets, edges.targets[back.order], back.starts, gradient[back.order]
        )
        return to_targets, to_sources, None


def _sampled_product(at_targets: Tensor, at_sources: Tensor, edges: Edges) -> Tensor:
    if at_targets.device.type not in ("cpu", "cuda"):  # no sparse kernels elsewhere
        return (at_targets[edges.targets] * at_sources[edges.sources]).sum(dim=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        pattern = torch.sparse_csr_tensor(
            edges.by_target.starts,
            edges.sources,
            at_targets.new_zeros(len(edges.sources)),
            size=(edges.n_points, edges.n_points),
            check_invariants=False,
        )
        product = torch.sparse.sampled_addmm(pattern, at_targets, at_sources.t(), beta=0.0)
    return product.values()


# ---- Gated messages: what points say, summed at who hears it, without a table of all edges.
#
# A message is gate * value with gate = sigmoid(score * weight + bias), one number a channel.
# Written
# with plain operations, ten tables of (edges, width) would go through main memory in every layer.
# Here a few images at a time go through buffers that stay in the cache, and the gates are computed
# again on the way back instead of being kept.
#
# Axes: N points of the batch, E edges of the batch, D width.

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
