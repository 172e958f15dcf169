"""The scaffold: points become the edges along which messages may travel.

Built once for each set of points and then taken from a cache whose key is the points themselves.
Every edge is there in both directions. Axes: P points (patches), E directed edges.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import Delaunay, QhullError

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
