"""Attn-KNN: a k-nearest-neighbour classifier that learns how much each neighbour counts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnknn.config import RunConfig
    from attnknn.core.bank import MemoryBank
    from attnknn.core.vote import (
        AdaptiveK,
        Attention,
        Distance,
        KEnsemble,
        Uniform,
        explain,
        predict,
    )
    from attnknn.estimator import AttnKNNClassifier

# The public names and where they live: ``import attnknn`` stays light, each loads when asked for.
_PLACES = {
    "AdaptiveK": "attnknn.core.vote",
    "Attention": "attnknn.core.vote",
    "AttnKNNClassifier": "attnknn.estimator",
    "Distance": "attnknn.core.vote",
    "KEnsemble": "attnknn.core.vote",
    "MemoryBank": "attnknn.core.bank",
    "RunConfig": "attnknn.config",
    "Uniform": "attnknn.core.vote",
    "explain": "attnknn.core.vote",
    "predict": "attnknn.core.vote",
}
__all__ = [
    "AdaptiveK",
    "Attention",
    "AttnKNNClassifier",
    "Distance",
    "KEnsemble",
    "MemoryBank",
    "RunConfig",
    "Uniform",
    "explain",
    "predict",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'attnknn' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
