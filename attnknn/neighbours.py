"""Neighbours: what a search found, and what the bank's labels say about it.

Axes: B queries, K neighbours of each, D embedding width, C classes, N memory rows.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.checks import check_count

TRUSTED = 0.5  # rows whose neighbours mostly disagree do not shape their class's prototype


@dataclass(frozen=True)
class LabelView:
    """What a bank's labels say about its rows: made once for the labels of a bank.

    Attributes:
        labels: Label of each row.
        histograms: Label shares among each row's own neighbours (leave-one-out).
        trust: Share of those neighbours that carry the row's own label.
        prototypes: Unit-length mean of each class's trusted rows; zero for an absent class.
        noise: Mean trust of the whole bank, low where many labels are wrong.
    """

    labels: Int[Tensor, " N"]
    histograms: Float[Tensor, "N C"]
    trust: Float[Tensor, " N"]
    prototypes: Float[Tensor, "C D"]
    noise: float

    @property
    def n_classes(self) -> int:
        """Number of classes, absent ones included."""
        return self.histograms.shape[1]

    def to(self, device: str | torch.device) -> "LabelView":
        """Return the view on another device."""
        tensors = (self.labels, self.histograms, self.trust, self.prototypes)
        return LabelView(*(tensor.to(device) for tensor in tensors), self.noise)


def view_labels(
    rows: Float[Tensor, "N D"],
    labels: Int[Tensor, " N"],
    neighbour_ids: Int[Tensor, "N K"],
    *,
    n_classes: int,
) -> LabelView:
    """Return trust, histograms and prototypes of ``labels`` over given leave-one-out neighbours."""
    n_rows, k = neighbour_ids.shape
    neighbour_labels = labels[neighbour_ids]  # (N, K)
    # Counted first, divided after: ten times 1/20 is not quite one half.
    ones = rows.new_ones(()).expand(n_rows, k)
    histograms = rows.new_zeros(n_rows, n_classes).scatter_add_(1, neighbour_labels, ones) / k
    trust = histograms.gather(1, labels[:, None]).squeeze(1)  # (N,)
    prototypes = _prototypes(rows, labels, trust, n_classes)
    return LabelView(labels, histograms, trust, prototypes, float(trust.mean()))


def _prototypes(
    rows: Float[Tensor, "N D"],
    labels: Int[Tensor, " N"],
    trust: Float[Tensor, " N"],
    n_classes: int,
) -> Float[Tensor, "C D"]:
    weights = (trust > TRUSTED).float()
    # A class without one trusted row is still better described by its rows than by nothing.
    has_trusted = rows.new_zeros(n_classes).scatter_add_(0, labels, weights) > 0
    weights = torch.where(has_trusted[labels], weights, 1.0)
    sums = rows.new_zeros(n_classes, rows.shape[1]).index_add_(0, labels, rows * weights[:, None])
    return torch.nn.functional.normalize(sums, dim=1)


@dataclass(frozen=True)
class Neighbours:
    """The K nearest bank rows of B queries, nearest first.

    Attributes:
        queries: Unit-length query embeddings.
        scores: Cosine similarity of each neighbour, largest first.
        ids: Bank row of each neighbour.
        rows: All bank rows.
        view: What the bank's labels say about its rows.
    """

    queries: Float[Tensor, "B D"]
    scores: Float[Tensor, "B K"]
    ids: Int[Tensor, "B K"]
    rows: Float[Tensor, "N D"]
    view: LabelView

    @property
    def k(self) -> int:
        """Number of neighbours of each query."""
        return self.ids.shape[1]

    @property
    def n_classes(self) -> int:
        """Number of classes, absent ones included."""
        return self.view.n_classes

    @cached_property
    def labels(self) -> Int[Tensor, "B K"]:
        """Label of each neighbour."""
        return self.view.labels[self.ids]

    @cached_property
    def trust(self) -> Float[Tensor, "B K"]:
        """Trust of each neighbour."""
        return self.view.trust[self.ids]

    @cached_property
    def histograms(self) -> Float[Tensor, "B K C"]:
        """Label shares around each neighbour."""
        return self.view.histograms[self.ids]

    @cached_property
    def keys(self) -> Float[Tensor, "B K D"]:
        """Embedding of each neighbour; large, so only made when a part asks for it."""
        return self.rows[self.ids]

    def nearest(self, k: int) -> "Neighbours":
        """Return the first ``k`` neighbours: one search at the largest k serves every k."""
        if check_count("k", k) > self.k:
            raise ValueError(f"k must be at most the {self.k} neighbours searched, got k={k}")
        return (
            self if k == self.k else replace(self, scores=self.scores[:, :k], ids=self.ids[:, :k])
        )

    def of_queries(self, which: slice | Tensor) -> "Neighbours":
        """Return the neighbours of some of the queries."""
        return replace(
            self, queries=self.queries[which], scores=self.scores[which], ids=self.ids[which]
        )

    def to(self, device: str | torch.device) -> "Neighbours":
        """Return the neighbours on another device."""
        if torch.device(device) == self.rows.device:
            return self
        view = self.view.to(device)
        moved = (t.to(device) for t in (self.queries, self.scores, self.ids, self.rows))
        return Neighbours(*moved, view)

    def with_view(self, view: LabelView) -> "Neighbours":
        """Return the same neighbours under other labels of the same rows."""
        return replace(self, view=view)
