"""Settings of an AFMP model: sizes, how many edges are kept, with or without the top-down pass."""

from dataclasses import dataclass

from attnknn.checks import check_count, check_one_of, check_range

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
