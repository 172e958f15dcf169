"""Attn-KNN: a k-nearest-neighbour classifier that learns how much each neighbour counts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnknn.estimator import AttnKNNClassifier

__all__ = ["AttnKNNClassifier"]


def __getattr__(name: str) -> Any:
    """Load the classifier when it is first asked for: ``import attnknn`` stays light."""
    if name == "AttnKNNClassifier":
        from attnknn.estimator import AttnKNNClassifier

        return AttnKNNClassifier
    raise AttributeError(f"module 'attnknn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
