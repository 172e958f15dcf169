"""Neighbours: what a search found, and what the bank's labels say about it.

Axes: B queries, K neighbours of each, D embedding width, C classes, N memory rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from attnknn.checks import check_count
from attnknn.core.facts import Facts, facts_of

TINY_WEIGHT = 1e-6  # below any sum of row weights: no neighbour is left to ask
ROW_BLOCK = 65_536  # rows that are weighed at once
TRUSTED = 0.5  # rows whose neighbours mostly disagree do not shape their class's prototype


def nearest_copies(
    left: Float[Tensor, "*S"], weights: Float[Tensor, "*S T"], limit: int
) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S T"]]:
    """Return how many of the ``limit`` nearest copies a row has itself, and each neighbour.

    A row of weight w stands for w rows that are alike. Of few kinds of rows the nearest 20 kinds
    would be all there are; the nearest 20 copies are mostly of one kind, and say how its labels
    spread.

    Args:
        left: Copies of the row itself, without the one that is judged.
        weights: Of its neighbours, nearest first.
        limit: Copies that judge.
    """
    own = left.clamp(max=limit)
    before = weights.cumsum(dim=-1) - weights + own[..., None]
    return own, torch.minimum((limit - before).clamp(min=0), weights)


class LabelView:
    """What a bank's labels say about its rows; each piece is made once, when first asked for.

    Args:
        rows: Unit-length bank rows.
        labels: Label of each row.
        own_neighbours: Returns the leave-one-out neighbours of every row, (N, T). A function,
            because plain votes never need them and finding them is a search of its own.
        n_classes: Number of classes, absent ones included.
        weights: How much each row counts, above 0; None counts all rows alike.
        origin: The view on the bank's own device, where this is its twin elsewhere.
    """

    def __init__(
        self,
        rows: Float[Tensor, "N D"],
        labels: Int[Tensor, " N"],
        own_neighbours: Callable[[], Int[Tensor, "N T"]],
        *,
        n_classes: int,
        weights: Float[Tensor, " N"] | None = None,
        origin: "LabelView | None" = None,
    ) -> None:
        self.rows, self.labels, self.n_classes, self.weights = rows, labels, n_classes, weights
        self._own_neighbours, self._origin = own_neighbours, origin
        self._elsewhere: dict[str, LabelView] = {}

    @cached_property
    def own_neighbours(self) -> Int[Tensor, "N T"]:
        """Leave-one-out neighbours of every row."""
        return self._own_neighbours().to(self.labels.device)

    @cached_property
    def histograms(self) -> Float[Tensor, "N C"]:
        """Label shares among each row's own neighbours."""
        around = self.own_neighbours
        if self.weights is None:
            left, counted = self.rows.new_zeros(len(self.rows)), self.weights_of(around)
        else:
            left = (self.weights - 1).clamp(min=0)  # a row's own copies, itself left out
            left, counted = nearest_copies(left, self.weights[around], around.shape[1])
        # Counted first, divided after: ten times 1/20 is not quite one half.
        counts = self.rows.new_zeros(len(self.rows), self.n_classes)
        counts.scatter_add_(1, self.labels[around], counted)
        counts.scatter_add_(1, self.labels[:, None], left[:, None])
        total = counts.sum(dim=1, keepdim=True)
        return counts / total.clamp(min=TINY_WEIGHT)

    def weights_of(self, ids: Int[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Return how much each of the given rows counts; 1 where all count alike."""
        if self.weights is None:
            return self.rows.new_ones(()).expand(ids.shape)
        return self.weights[ids]

    @cached_property
    def trust(self) -> Float[Tensor, " N"]:
        """Share of each row's own neighbours that carry its label."""
        return self.histograms.gather(1, self.labels[:, None]).squeeze(1)

    @cached_property
    def mean_trust(self) -> float:
        """Mean trust of the whole bank, low where many labels are wrong."""
        return float(self.trust.mean()) if self._origin is None else self._origin.mean_trust

    @cached_property
    def prototype_weights(self) -> Float[Tensor, " N"]:
        """How much each row shapes its class's prototype: only trusted rows do."""
        weights = (self.trust > TRUSTED).float()
        # A class without one trusted row is still better described by its rows than by nothing.
        has_trusted = self.rows.new_zeros(self.n_classes).scatter_add_(0, self.labels, weights) > 0
        weights = torch.where(has_trusted[self.labels], weights, 1.0)
        return weights if self.weights is None else weights * self.weights

    @cached_property
    def _prototype_sums(self) -> Float[Tensor, "C D"]:
        sums = self.rows.new_zeros(self.n_classes, self.rows.shape[1])
        # In blocks, because rows may be a file larger than memory.
        parts = (self.labels, self.rows, self.prototype_weights)
        for labels, rows, weights in zip(*(part.split(ROW_BLOCK) for part in parts), strict=True):
            sums.index_add_(0, labels, rows * weights[:, None])
        return sums

    @cached_property
    def prototypes(self) -> Float[Tensor, "C D"]:
        """Unit-length mean of each class's trusted rows; zero for an absent class."""
        return functional.normalize(self._prototype_sums, dim=1)

    @cached_property
    def is_present(self) -> Bool[Tensor, " C"]:
        """Whether the bank has a row of each class."""
        return self.labels.bincount(minlength=self.n_classes) > 0

    @cached_property
    def facts(self) -> Facts:
        """What the memory is like under these labels."""
        return facts_of(self)

    def prototype_posterior(
        self,
        queries: Float[Tensor, "B D"],
        scale: Float[Tensor, ""] | float,
        own_ids: Int[Tensor, "B M"] | None = None,
        shift: Float[Tensor, "B C"] | float = 0.0,
    ) -> Float[Tensor, "B C"]:
        """Return softmax(scale * cos(query, prototypes) + shift); an absent class gets 0.

        Args:
            queries: Unit-length queries.
            scale: Sharpness of the softmax.
            own_ids: Bank rows of each query that must not shape the prototypes it is held against.
            shift: What else is known about each class.
        """
        return self.posterior_of(self.prototype_cosines(queries, own_ids), scale, shift)

    def posterior_of(
        self,
        cosines: Float[Tensor, "B C"],
        scale: Float[Tensor, ""] | float,
        shift: Float[Tensor, "B C"] | float = 0.0,
    ) -> Float[Tensor, "B C"]:
        """Return softmax(scale * cosines + shift); an absent class gets 0."""
        logits = scale * cosines + shift
        return logits.masked_fill(~self.is_present, float("-inf")).softmax(dim=1)

    def prototype_cosines(
        self, queries: Float[Tensor, "B D"], own_ids: Int[Tensor, "B M"] | None = None
    ) -> Float[Tensor, "B C"]:
        """Return cosines to the prototypes, from which each query's own rows were taken out."""
        cosines = queries @ self.prototypes.T
        if own_ids is None:
            return cosines
        own_labels = self.labels[own_ids]  # (B, M)
        shaping = self.prototype_weights[own_ids]  # (B, M)
        if self.weights is not None:  # one copy of it is the query
            shaping = shaping / self.weights[own_ids].clamp(min=1)
        shares = shaping[..., None] * self.rows[own_ids]  # (B, M, D)
        for labels in own_labels.T:
            same = (own_labels == labels[:, None])[..., None]
            left = self._prototype_sums[labels] - (same * shares).sum(dim=1)  # (B, D)
            reduced = (queries * functional.normalize(left, dim=1)).sum(dim=1, keepdim=True)
            cosines = cosines.scatter(1, labels[:, None], reduced)
        return cosines

    def to(self, device: str | torch.device) -> "LabelView":
        """Return the view on another device; a device is moved to once, for all searches."""
        key = str(device)
        if key not in self._elsewhere:
            weights = None if self.weights is None else self.weights.to(device)
            self._elsewhere[key] = LabelView(
                self.rows.to(device),
                self.labels.to(device),
                self._own_neighbours,
                n_classes=self.n_classes,
                weights=weights,
                origin=self,
            )
        return self._elsewhere[key]


def _per_query(make: Callable[["Neighbours"], Tensor]) -> property:
    """Return a property that is made once, and of which some of the queries take their share."""

    def get(self: "Neighbours") -> Tensor:
        if make.__name__ not in self.made:
            self.made[make.__name__] = make(self)
        return self.made[make.__name__]

    return property(get, doc=make.__doc__)


@dataclass(frozen=True)
class Neighbours:
    """The K nearest bank rows of B queries, nearest first.

    Attributes:
        queries: Unit-length query embeddings.
        scores: Cosine similarity of each neighbour, largest first.
        ids: Bank row of each neighbour.
        view: The bank's rows, and what its labels say about them.
        own_ids: Bank rows that each query is made of, where the queries are memory rows. They are
            not among the neighbours, and must not count in what is said about the neighbours.
        made: What was looked up for all queries so far, by name; every batch takes its share.
    """

    queries: Float[Tensor, "B D"]
    scores: Float[Tensor, "B K"]
    ids: Int[Tensor, "B K"]
    view: LabelView
    own_ids: Int[Tensor, "B M"] | None = None
    made: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def k(self) -> int:
        """Number of neighbours of each query."""
        return self.ids.shape[1]

    @property
    def n_classes(self) -> int:
        """Number of classes, absent ones included."""
        return self.view.n_classes

    @_per_query
    def labels(self) -> Int[Tensor, "B K"]:
        """Label of each neighbour."""
        return self.view.labels[self.ids]

    @cached_property
    def row_weights(self) -> Float[Tensor, "B K"]:
        """How much each neighbour counts before anything is learned; 1 unless rows are weighted."""
        weights = self.view.weights_of(self.ids)
        if self.own_ids is None or self.view.weights is None:
            return weights
        # NOTE: leakage guard. Of a query's own copies one is left out: the query itself.
        is_own = (self.ids[..., None] == self.own_ids[:, None]).any(dim=-1)
        return (weights - is_own.float()).clamp(min=TINY_WEIGHT)

    @_per_query
    def trust(self) -> Float[Tensor, "B K"]:
        """Trust of each neighbour."""
        if self.own_ids is None:
            return self.view.trust[self.ids]
        return self.histograms.gather(2, self.labels[..., None]).squeeze(2)

    @_per_query
    def histograms(self) -> Float[Tensor, "B K C"]:
        """Label shares around each neighbour."""
        if self.own_ids is None:
            return self.view.histograms[self.ids]
        # NOTE: leakage guard. A query that stands near its neighbours is counted in their
        # histograms, and with it the very label that is to be predicted: it is taken out.
        around = self.view.own_neighbours[self.ids]  # (B, K, T)
        is_own = (around[..., None] == self.own_ids[:, None, None]).any(dim=-1).float()
        if self.view.weights is None:
            left, counted = self.scores.new_zeros(self.ids.shape), 1 - is_own
        else:
            known = (self.view.weights[around] - is_own).clamp(min=0)
            left = (self.row_weights - 1).clamp(min=0)
            left, counted = nearest_copies(left, known, around.shape[2])
        counts = self.scores.new_zeros(*self.ids.shape, self.n_classes)
        counts = counts.scatter_add(2, self.view.labels[around], counted)
        counts = counts.scatter_add(2, self.labels[..., None], left[..., None])
        return counts / counts.sum(dim=2, keepdim=True).clamp(min=TINY_WEIGHT)

    def prototype_posterior(
        self,
        queries: Float[Tensor, "B D"],
        scale: Float[Tensor, ""] | float,
        shift: Float[Tensor, "B C"] | float = 0.0,
    ) -> Float[Tensor, "B C"]:
        """Return class probabilities from the bank's prototypes alone."""
        if queries is self.queries:
            return self.view.posterior_of(self.prototype_cosines, scale, shift)
        return self.view.prototype_posterior(queries, scale, self.own_ids, shift)

    @_per_query
    def prototype_cosines(self) -> Float[Tensor, "B C"]:
        """Cosine of each query to each class's prototype."""
        return self.view.prototype_cosines(self.queries, self.own_ids)

    @cached_property
    def keys(self) -> Float[Tensor, "B K D"]:
        """Embedding of each neighbour; large, so only made when a part asks for it."""
        return self.view.rows[self.ids]

    def nearest(self, k: int) -> "Neighbours":
        """Return the first ``k`` neighbours: one search at the largest k serves every k."""
        if check_count("k", k) > self.k:
            raise ValueError(f"k must be at most the {self.k} neighbours searched, got k={k}")
        if k == self.k:
            return self
        return replace(self, scores=self.scores[:, :k], ids=self.ids[:, :k], made={})

    def of_queries(self, which: slice | Tensor) -> "Neighbours":
        """Return the neighbours of some of the queries."""
        return replace(
            self,
            queries=self.queries[which],
            scores=self.scores[which],
            ids=self.ids[which],
            own_ids=None if self.own_ids is None else self.own_ids[which],
            made={name: values[which] for name, values in self.made.items()},
        )

    def to(self, device: str | torch.device) -> "Neighbours":
        """Return the neighbours on another device."""
        if torch.device(device) == self.ids.device:
            return self
        moved = (tensor.to(device) for tensor in (self.queries, self.scores, self.ids))
        own_ids = None if self.own_ids is None else self.own_ids.to(device)
        return Neighbours(*moved, self.view.to(device), own_ids)

    def with_view(self, view: LabelView) -> "Neighbours":
        """Return the same neighbours under other labels of the same rows."""
        return replace(self, view=view, made={})
