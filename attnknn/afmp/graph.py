"""The scaffold: points become the edges along which messages may travel.

Built once for each set of points and then taken from a cache whose key is the points themselves.
Every edge is there in both directions. Axes: P points (patches), E directed edges.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from scipy.spatial import Delaunay, QhullError
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnknn.checks import check_count, check_finite, check_one_of, check_range

# ---- Settings of an AFMP model: sizes, how many edges are kept, with or without the top-down pass.

SCAFFOLDS = ("delaunay", "window")


@dataclass(frozen=True)
class AFMPConfig:
    """What an AFMP model is made of; the defaults are AFMP-Tiny.

    Attributes:
        layers: Rounds of messages from bottom to top.
        width: Width of every state.
        patch: Side of the square patches, in pixels.
        keep_share: Share of the edges of every image that carry a message, to the nearest whole
            edge, at least one. At 1 the model is dense: every edge is gated and none is pruned. At
            0 nothing is sent and every patch is on its own: a control, not a model to use.
        sparse_weight: Weight of the mean gate in the loss.
        top_down: Whether a second pass is made, routed by predictions from the first.
        scaffold: Who may talk to whom: "delaunay" (triangulated patch centres) or "window" (patches
            at most ``window`` places apart in reading order).
        window: Reach of the 1-D window, in patches.
    """

    layers: int = 4
    width: int = 128
    patch: int = 8
    keep_share: float = 0.3
    sparse_weight: float = 1e-4
    top_down: bool = True
    scaffold: str = "delaunay"
    window: int = 8

    def __post_init__(self) -> None:
        for name in ("layers", "width", "patch", "window"):
            check_count(name, getattr(self, name))
        check_range("keep_share", self.keep_share, low=0, high=1)
        check_range("sparse_weight", self.sparse_weight, low=0)
        check_one_of("scaffold", self.scaffold, SCAFFOLDS)

    @property
    def is_dense(self) -> bool:
        """Whether every edge is kept."""
        return self.keep_share == 1


AFMP_TINY = AFMPConfig()
AFMP_SMALL = AFMPConfig(layers=5, width=512, patch=16)


CACHED_SCAFFOLDS = 64


@dataclass(frozen=True, eq=False)
class Scaffold:
    """Directed edges over points, sorted by target, then by source.

    Attributes:
        points: Coordinates of the points.
        sources: Who sends along each edge.
        targets: Who receives along each edge.
        lengths: Euclidean length of each edge, in the unit of the points.
        parents: Block of the next coarser level that each point belongs to.
    """

    points: Float[np.ndarray, "P n_axes"]
    sources: Int[np.ndarray, " E"]
    targets: Int[np.ndarray, " E"]
    lengths: Float[np.ndarray, " E"]
    parents: Int[np.ndarray, " P"]

    @property
    def n_points(self) -> int:
        """Number P of points."""
        return len(self.points)

    @property
    def n_edges(self) -> int:
        """Number E of directed edges."""
        return len(self.sources)


def patch_centres(height: int, width: int, patch: int) -> Float[np.ndarray, "P 2"]:
    """Return the (x, y) centres of an image's patches in reading order, in units of one patch."""
    check_count("patch", patch)
    for name, side in (("height", height), ("width", width)):
        if side < 1 or side % patch:
            raise ValueError(
                f"{name} must be a multiple of patch={patch}, got {name}={side}: "
                "resize the images or choose another patch"
            )
    y, x = np.indices((height // patch, width // patch), dtype=np.float64) + 0.5
    return np.stack([x.ravel(), y.ravel()], axis=1)


def grid_scaffold(
    height: int, width: int, patch: int, *, kind: str = "delaunay", window: int = 8
) -> Scaffold:
    """Return the scaffold over the patch centres of an image, its lengths in units of one patch."""
    return build_scaffold(patch_centres(height, width, patch), kind=kind, window=window)


def build_scaffold(
    points: Float[np.ndarray, "P n_axes"], *, kind: str = "delaunay", window: int = 8
) -> Scaffold:
    """Return the scaffold over any points.

    Args:
        points: Coordinates; for a window, in the order in which the window moves over them.
        kind: "delaunay" (two coordinates) or "window" (any number of them).
        window: Reach of the window to both sides, in points.
    """
    check_one_of("kind", kind, SCAFFOLDS)
    check_count("window", window)
    points = np.ascontiguousarray(points, dtype=np.float64)
    check_finite("points", points)
    # NOTE: the key is the content. Count and mean, as published, belong to many sets of points.
    return _cached_scaffold(kind, window, points.shape, points.tobytes())


@lru_cache(maxsize=CACHED_SCAFFOLDS)
def _cached_scaffold(kind: str, window: int, shape: tuple[int, int], content: bytes) -> Scaffold:
    points = np.frombuffer(content).reshape(shape)
    pairs = _delaunay_pairs(points) if kind == "delaunay" else _window_pairs(len(points), window)
    # Both directions of every pair; as single numbers they are sorted and made unique at once.
    flat = np.concatenate([pairs @ [len(points), 1], pairs @ [1, len(points)]])
    targets, sources = np.divmod(np.unique(flat), len(points))
    lengths = np.linalg.norm(points[targets] - points[sources], axis=1)
    return Scaffold(points, sources, targets, lengths, _blocks(points))


def _delaunay_pairs(points: Float[np.ndarray, "P n_axes"]) -> Int[np.ndarray, "n_pairs 2"]:
    """Return the sides of the triangles between the points."""
    if points.shape[1] != 2 or len(points) < 3:
        raise ValueError(
            "points must be at least 3 pairs of coordinates for a Delaunay scaffold, "
            f"got shape {points.shape}: use smaller patches or kind='window'"
        )
    try:
        found = Delaunay(points)
    except QhullError:
        raise ValueError(
            "points must not all lie on one line for a Delaunay scaffold, got "
            f"{len(points)} points: use smaller patches or kind='window'"
        ) from None
    if len(found.coplanar):
        raise ValueError(f"points must all be different, got point {found.coplanar[0, 0]} twice")
    return np.concatenate([found.simplices[:, [a, b]] for a, b in ((0, 1), (1, 2), (0, 2))])


def _window_pairs(n_points: int, window: int) -> Int[np.ndarray, "n_pairs 2"]:
    """Return all pairs at most ``window`` places apart."""
    if n_points < 2:
        raise ValueError(f"points must number at least 2 for a window scaffold, got {n_points}")
    places = np.arange(n_points)
    steps = range(1, min(window, n_points - 1) + 1)  # one at a time: not all pairs of points
    return np.concatenate([np.stack([places[:-step], places[step:]], axis=1) for step in steps])


def _blocks(points: Float[np.ndarray, "P n_axes"]) -> Int[np.ndarray, " P"]:
    """Return which 2 x 2 block of unit cells each point lies in, numbered from 0."""
    cells = np.floor((points - points.min(axis=0)) / 2 + 1e-9).astype(np.int64)
    return np.unique(cells, axis=0, return_inverse=True)[1].reshape(-1)


# ---- Edges of a batch: states of points to values on edges and back, with their gradients.
#
# A batch of B images is one graph of B * P points without edges between images, so nothing can pass
# from one image to another. Sums over edges are bags of sorted rows: no atomics, the same bits in
# every run, and no (edges, width) table where a dot product or a weighted sum is all that is
# needed.
#
# Axes: N points of the batch (B * P), E edges of the batch, D width.

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
