"""Backbones: a name becomes a network that turns inputs into unit-length rows."""

from attnknn.backbones.embedder import BACKBONES, Embedder, build_embedder
from attnknn.backbones.heads import PROJECTIONS, build_head, build_projection
from attnknn.backbones.pretrained import PretrainedUnavailableError

__all__ = [
    "BACKBONES",
    "PROJECTIONS",
    "Embedder",
    "PretrainedUnavailableError",
    "build_embedder",
    "build_head",
    "build_projection",
]
