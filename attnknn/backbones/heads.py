"""Heads: small networks on top of a backbone.

A projection maps backbone features to the embedding; a classifier head maps the embedding to
logits and is used by the cross-entropy loss and the CNN baseline alone.
"""

from jaxtyping import Float
from torch import Tensor, nn

from attnknn.checks import check_one_of

HIDDEN = 512


def build_projection(kind: str, in_dim: int, embed_dim: int) -> nn.Module:
    """Return a projection from ``in_dim`` features to ``embed_dim``; "none" changes nothing."""
    return PROJECTIONS[check_one_of("projection", kind, PROJECTIONS)](in_dim, embed_dim)


def _deep(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(in_dim, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(HIDDEN, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, embed_dim),
    )


def _batchnorm(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(in_dim, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, embed_dim),
    )


def _layernorm(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(in_dim, embed_dim),
        nn.LayerNorm(embed_dim),
        nn.GELU(),
        nn.Linear(embed_dim, embed_dim),
    )


def _none(in_dim: int, embed_dim: int) -> nn.Module:
    return nn.Identity()


PROJECTIONS = {"none": _none, "deep": _deep, "batchnorm": _batchnorm, "layernorm": _layernorm}


class LinearHead(nn.Module):
    """Logits = scale * W x, without a bias."""

    def __init__(self, in_dim: int, n_classes: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, n_classes, bias=False)
        self.scale = scale

    def forward(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return logits."""
        return self.scale * self.linear(features)


def build_head(kind: str, in_dim: int, n_classes: int, *, scale: float = 1.0) -> nn.Module:
    """Return a classifier head from ``in_dim`` features to logits.

    Args:
        kind: "linear", or "mlp" with one hidden layer of the same width.
        in_dim: Width of the features, before they are brought to unit length.
        n_classes: Number of classes.
        scale: Linear head: factor on the logits; see `Embedder.logit_scale`.
    """
    check_one_of("head", kind, ("linear", "mlp"))
    if kind == "linear":
        return LinearHead(in_dim, n_classes, scale=scale)
    return nn.Sequential(
        nn.Linear(in_dim, in_dim), nn.ReLU(), nn.Dropout(0.2), nn.Linear(in_dim, n_classes)
    )
