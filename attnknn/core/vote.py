"""Classification: search -> weigh -> vote.

A method turns the neighbours of one search into class probabilities. Each method works at any k up
to the number searched, so k-sweeps, k-ensembles and adaptive k cost no second search; wrappers
take any method. To add a weighting method, write a class with the
members of ``Method``.

Axes: B queries, K neighbours of each, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.checks import check_range
from attnknn.core.attention import (
    SUPPORT_FLOOR,
    Contributions,
    NeighbourAttention,
    attention_contributions,
    attention_entropy,
    attention_probs,
    label_contributions,
    vote,
)
from attnknn.core.calibrate import Calibration, apply_calibration, with_floor
from attnknn.core.neighbours import Neighbours
from attnknn.core.parts import euclidean_distances
from attnknn.core.prior import PriorAttention

K_ENSEMBLE = (5, 10, 20)
ADAPTIVE_SHARES = (0.3, 0.6, 1.0)  # of k_max, for clear, middling and unclear neighbourhoods
ENTROPY_ROUNDING = 1e-5  # float32 puts the entropy of equal weights on either side of its limit


@runtime_checkable
class Method(Protocol):
    """A way to weigh neighbours.

    Attributes:
        k: Neighbours that vote.
        full_support: Whether every class always gets some probability.
    """

    k: int
    full_support: bool

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the weight of each of the k neighbours; rows sum to 1."""

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class shares; rows sum to 1, classes nobody votes for may have 0."""


@dataclass(frozen=True)
class Uniform:
    """Every neighbour counts 1 / k, or in proportion to its row weight where rows have one."""

    full_support: ClassVar[bool] = False
    k: int

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the weight of each of the k neighbours."""
        nearest = neighbours.nearest(self.k)
        counts = nearest.row_weights.to(nearest.scores)
        return counts / counts.sum(dim=1, keepdim=True)

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class shares."""
        return vote(self.weights(neighbours), neighbours.nearest(self.k))


@dataclass(frozen=True)
class Distance:
    """A neighbour at distance d counts softmax(-d / temperature).

    Attributes:
        k: Neighbours that vote.
        temperature: In units of the distance; smaller looks at the nearest only.
        squared: Use squared Euclidean distances. On unit vectors they lie between 0 and 4, and a
            temperature of 1 makes them nearly uniform.
    """

    full_support: ClassVar[bool] = False
    k: int
    temperature: float = 1.0
    squared: bool = False

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, low=0, low_open=True)

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the weight of each of the k neighbours."""
        distances = euclidean_distances(neighbours.nearest(self.k).scores)
        if self.squared:
            distances = distances**2
        counts = neighbours.nearest(self.k).row_weights.to(distances)
        return (counts.log() - distances / self.temperature).softmax(dim=1)

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class shares."""
        return vote(self.weights(neighbours), neighbours.nearest(self.k))


@dataclass(frozen=True)
class PriorCorrected:
    """A distance-weighted vote divided by each class's share of the memory, renormalised.

    A neighbour at distance d with label c counts softmax(-d / temperature) / share(c) ** strength,
    brought to sum 1: rows of a class that fills half of the memory are near by sheer number.

    Attributes:
        k: Neighbours that vote.
        temperature: In units of the distance.
        strength: 1 divides by the whole share, 0 is the plain distance-weighted vote.
    """

    full_support: ClassVar[bool] = False
    k: int
    temperature: float = 1.0
    strength: float = 1.0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, low=0, low_open=True)
        check_range("strength", self.strength, low=0, high=1)

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the weight of each of the k neighbours."""
        nearest, view = neighbours.nearest(self.k), neighbours.view
        counts = view.labels.bincount(view.weights, minlength=view.n_classes).float()
        shares = (counts / counts.sum())[nearest.labels]  # (B, K)
        distances = euclidean_distances(nearest.scores)
        scores = -distances / self.temperature - self.strength * shares.log()
        return (scores + nearest.row_weights.to(scores).log()).softmax(dim=1)

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class shares."""
        return vote(self.weights(neighbours), neighbours.nearest(self.k))


@dataclass(frozen=True)
class Attention:
    """Learned weights; see attnknn.core.attention."""

    full_support: ClassVar[bool] = True
    k: int
    module: NeighbourAttention | PriorAttention

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the weight of each of the k neighbours."""
        return attention_probs(self.module, neighbours.nearest(self.k))[1]

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class probabilities, which have full support already."""
        return attention_probs(self.module, neighbours.nearest(self.k))[0]


@dataclass(frozen=True)
class Prototypes:
    """No neighbours: the posterior over the bank's trusted class prototypes."""

    full_support: ClassVar[bool] = False  # a class absent from the bank gets nothing
    scale: float = 10.0
    k: int = 1

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return all weight on the nearest neighbour, which stands in: prototypes weigh none."""
        nearest = torch.zeros_like(neighbours.nearest(self.k).scores)
        nearest[:, 0] = 1.0
        return nearest

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class probabilities."""
        return neighbours.prototype_posterior(neighbours.queries, self.scale)


@dataclass(frozen=True)
class KEnsemble:
    """The mean of a method's votes over several k.

    Attributes:
        method: The method.
        ks: The k at which it votes.
        fitted: The method fitted anew for each k, in their order; without, the one at every k.
    """

    method: Method
    ks: tuple[int, ...] = K_ENSEMBLE
    fitted: tuple[Method, ...] = ()

    def __post_init__(self) -> None:
        if not self.ks:
            raise ValueError("ks must hold at least one k, got ks=()")
        if self.fitted and [each.k for each in self.fitted] != list(self.ks):
            given = [each.k for each in self.fitted]
            raise ValueError(f"fitted must hold one method for each of ks={self.ks}, got {given}")

    @property
    def members(self) -> tuple[Method, ...]:
        """The methods that vote."""
        return self.fitted or tuple(at_k(self.method, k) for k in self.ks)

    @property
    def full_support(self) -> bool:
        """Whether every class always gets some probability."""
        return self.method.full_support

    @property
    def k(self) -> int:
        """The largest k that votes."""
        return max(self.ks)

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the mean weight of each of the largest k neighbours."""
        total = torch.zeros_like(neighbours.nearest(self.k).scores)
        for k, member in zip(self.ks, self.members, strict=True):
            total[:, :k] += member.weights(neighbours) / len(self.ks)
        return total

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class shares."""
        return torch.stack([each.votes(neighbours) for each in self.members]).mean(dim=0)


@dataclass(frozen=True)
class AdaptiveK:
    """A clear neighbourhood asks few neighbours, an unclear one asks all.

    The entropy of the method's weights at k_max, divided by log k_max, picks 0.3, 0.6 or 1 times
    k_max: below ``threshold``, below twice the threshold, or above. At the published threshold of
    0.5 only exactly equal weights reach the third branch: a normalised entropy cannot exceed 1.
    """

    method: Method
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, low=0, high=1, low_open=True)

    @property
    def full_support(self) -> bool:
        """Whether every class always gets some probability."""
        return self.method.full_support

    @property
    def k(self) -> int:
        """The largest k that votes."""
        return self.method.k

    def chosen_k(self, neighbours: Neighbours) -> Int[Tensor, " B"]:
        """Return the k of each query."""
        weights = self.method.weights(neighbours)
        entropy = attention_entropy(weights) / np.log(max(self.k, 2))
        entropy = entropy + ENTROPY_ROUNDING
        branch = (entropy >= self.threshold).long() + (entropy >= 2 * self.threshold).long()
        choices = torch.tensor([max(1, round(share * self.k)) for share in ADAPTIVE_SHARES])
        return choices.to(branch.device)[branch]

    def weights(self, neighbours: Neighbours) -> Float[Tensor, "B K"]:
        """Return the weight of each neighbour; 0 beyond the query's own k."""
        chosen, out = self.chosen_k(neighbours), torch.zeros_like(neighbours.nearest(self.k).scores)
        for k in chosen.unique().tolist():
            rows = (chosen == k).nonzero().squeeze(1)
            out[rows, :k] = at_k(self.method, k).weights(neighbours.of_queries(rows))
        return out

    def votes(self, neighbours: Neighbours) -> Float[Tensor, "B C"]:
        """Return class shares."""
        chosen = self.chosen_k(neighbours)
        out = neighbours.scores.new_zeros(len(chosen), neighbours.n_classes)
        for k in chosen.unique().tolist():
            rows = (chosen == k).nonzero().squeeze(1)
            out[rows] = at_k(self.method, k).votes(neighbours.of_queries(rows))
        return out


def at_k(method: Method, k: int) -> Method:
    """Return the same method at another k; for adaptive k that is its largest."""
    if isinstance(method, KEnsemble):
        raise ValueError(f"method must have one k of its own, got a k-ensemble over {method.ks}")
    if isinstance(method, AdaptiveK):
        return replace(method, method=at_k(method.method, k))
    return replace(method, k=k)


def predict(
    method: Method, neighbours: Neighbours, *, calibration: Calibration | None = None
) -> Float[np.ndarray, "B C"]:
    """Return class probabilities with full support.

    Args:
        method: How neighbours are weighed.
        neighbours: One search, at the method's k or deeper.
        calibration: A fitted floor and temperature. Without one, every method gets the same small
            floor, so that no method wins or loses by how it treats classes nobody voted for.
    """
    votes = method.votes(neighbours)
    if calibration is not None:
        return apply_calibration(normalised(votes), calibration)
    return normalised(votes if method.full_support else with_floor(votes, SUPPORT_FLOOR))


def predict_views(
    method: Method, views: Sequence[Neighbours], *, calibration: Calibration | None = None
) -> Float[np.ndarray, "B C"]:
    """Return the mean probabilities over test-time views of the same queries (TTA)."""
    if not views:
        raise ValueError("views must hold at least one view, got none")
    return np.mean([predict(method, each, calibration=calibration) for each in views], axis=0)


def normalised(probs: Float[Tensor, "B C"]) -> Float[np.ndarray, "B C"]:
    """Return double-precision rows that sum to 1 exactly enough for every metric."""
    wide = probs.double().cpu().numpy()
    return wide / wide.sum(axis=1, keepdims=True)


# ---- Explanations: which memory rows a prediction rests on, and how much each of them counts.
#
# A neighbour has a weight, and with it it votes for its label and, where label histograms are mixed
# in, for the labels around it; class prototypes add their part. So what the neighbours and the
# prototypes contribute to the predicted class sums to its probability before floor and temperature.


def explain(
    method: Method, neighbours: Neighbours, *, class_names: Sequence[str] | None = None
) -> "pandas.DataFrame":
    """Return the neighbours of every query with what is known about them.

    Args:
        method: How neighbours are weighed.
        neighbours: The search to explain; a few queries, not thousands.
        class_names: Name of each class; class numbers when None.

    Returns:
        One row per query and neighbour, nearest first: ``query`` (its place in the search),
        ``rank`` (1 = nearest), ``id`` (memory row), ``label``, ``similarity``, ``trust``,
        ``weight`` (those of a query sum to 1), ``vote`` (what the row adds to the probability of
        the predicted class), and for the whole query ``prototypes`` (what the class prototypes
        add to it) and ``predicted``. The votes of a query and its ``prototypes`` sum to the
        predicted class's probability before floor and temperature. ``plot.explanation`` draws it.
    """
    import pandas as pd  # the one table of this folder, and slow to load

    seen = neighbours.nearest(method.k)
    weights = method.weights(neighbours)
    predicted = method.votes(neighbours).argmax(dim=1)  # (B,)
    votes, prototypes = contributions(method, neighbours, predicted)
    n_queries, k = seen.ids.shape
    names = list(range(seen.n_classes)) if class_names is None else list(class_names)
    return pd.DataFrame(
        {
            "query": [query for query in range(n_queries) for _ in range(k)],
            "rank": list(range(1, k + 1)) * n_queries,
            "id": seen.ids.flatten().numpy(),
            "label": [names[label] for label in seen.labels.flatten().tolist()],
            "similarity": seen.scores.flatten().numpy(),
            "trust": seen.trust.flatten().numpy(),
            "weight": weights.flatten().numpy(),
            "vote": votes.flatten().numpy(),
            "prototypes": prototypes.repeat_interleave(k).numpy(),
            "predicted": [names[label] for label in predicted.repeat_interleave(k).tolist()],
        }
    )


@singledispatch
def contributions(
    method: Method, neighbours: Neighbours, classes: Int[Tensor, " B"]
) -> Contributions:
    """Return what the probability of one class of each query is made of.

    A method whose neighbours vote for more than their label registers a function of its own.

    Args:
        method: How neighbours are weighed.
        neighbours: The search.
        classes: The class of each query that is asked about.
    """
    return label_contributions(method.weights(neighbours), neighbours.nearest(method.k), classes)


@contributions.register
def _(method: Attention, neighbours: Neighbours, classes: Tensor) -> Contributions:
    nearest = neighbours.nearest(method.k)
    if isinstance(method.module, PriorAttention):
        return method.module.contributions(nearest, classes)
    return attention_contributions(method.module, nearest, classes)


@contributions.register
def _(method: Prototypes, neighbours: Neighbours, classes: Tensor) -> Contributions:
    told = method.votes(neighbours).gather(1, classes[:, None]).squeeze(1)
    return Contributions(torch.zeros_like(neighbours.nearest(method.k).scores), told)


@contributions.register
def _(method: KEnsemble, neighbours: Neighbours, classes: Tensor) -> Contributions:
    each = [contributions(member, neighbours, classes) for member in method.members]
    votes = torch.zeros_like(neighbours.nearest(method.k).scores)
    for part in each:
        votes[:, : part.votes.shape[1]] += part.votes / len(each)
    return Contributions(votes, torch.stack([part.prototypes for part in each]).mean(dim=0))


@contributions.register
def _(method: AdaptiveK, neighbours: Neighbours, classes: Tensor) -> Contributions:
    chosen = method.chosen_k(neighbours)
    votes = torch.zeros_like(neighbours.nearest(method.k).scores)
    told = votes.new_zeros(len(votes))
    for k in chosen.unique().tolist():
        rows = (chosen == k).nonzero().squeeze(1)
        part = contributions(at_k(method.method, k), neighbours.of_queries(rows), classes[rows])
        votes[rows, :k], told[rows] = part
    return Contributions(votes, told)
