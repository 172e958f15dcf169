"""What a memory is like: a global expert, and how well left-out rows are predicted.

The expert is ridge regression on the memory's rows. It sees the whole memory where neighbours see
a corner of it:

    scores = share + (row - mean) . V diag(1 / (e + strength)) V' X' Y
    probs  = softmax(sharpness * scores)

with V, e the axes and energies of the centred rows X and Y the centred one-hot labels. Its
leave-one-out scores have a closed form:

    left out = scores - leverage / (1 - leverage) * (one-hot label - scores)

Strength and sharpness are those of the best leave-one-out likelihood. Everything here follows from
rows and labels alone, so it follows a memory that changes.

Axes: B queries, N memory rows, P picked rows, T own neighbours, D embedding width, C classes, R
axes, F columns.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from attnknn.core.neighbours import LabelView

MOST_AXES = 256  # wider rows keep their strongest axes
EXPERT_JUDGES = 2048  # rows whose left-out scores choose strength and sharpness
STRENGTHS = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # in units of the mean energy
SHARPNESSES = tuple(float(x) for x in np.logspace(0, 2, 13))
ROW_BLOCK = 65_536
TINY = 1e-6


@dataclass(frozen=True)
class Axes:
    """What the rows alone decide: shared by all labels that they may have.

    Attributes:
        mean: Weighted mean row.
        basis: The axes, unit columns.
        energies: Weighted sum of squares along each axis.
        total: Sum of row weights.
    """

    mean: Float[Tensor, " D"]
    basis: Float[Tensor, "D R"]
    energies: Float[Tensor, " R"]
    total: float


def axes_of(rows: Float[Tensor, "N D"], weights: Float[Tensor, " N"] | None = None) -> Axes:
    """Return the axes of the rows, at most ``MOST_AXES``, strongest first."""
    weights = rows.new_ones(len(rows)) if weights is None else weights
    total = float(weights.sum())
    mean = rows.T @ weights / total
    products = rows.new_zeros(rows.shape[1], rows.shape[1])
    for part, weight in zip(rows.split(ROW_BLOCK), weights.split(ROW_BLOCK), strict=True):
        centred = part - mean
        products += (centred * weight[:, None]).T @ centred
    energies, basis = torch.linalg.eigh(products.double())
    keep = min(MOST_AXES, len(rows) - 1, int((energies > 1e-6 * energies[-1]).sum()))
    keep = max(1, keep)
    return Axes(mean, basis[:, -keep:].flip(1).to(rows), energies[-keep:].flip(0).to(rows), total)


@dataclass(frozen=True)
class Expert:
    """Ridge regression with a chosen strength and sharpness.

    Attributes:
        axes: Of the rows.
        coefficients: Of each axis and class.
        shares: Weighted class shares.
        shrunk: 1 / (energy + strength) of each axis.
        sharpness: What scores are multiplied by.
        nll: Left-out NLL of the labels as given.
        hit_rate: Left-out share of labels that have the largest score.
    """

    axes: Axes
    coefficients: Float[Tensor, "R C"]
    shares: Float[Tensor, " C"]
    shrunk: Float[Tensor, " R"]
    sharpness: float
    nll: float
    hit_rate: float

    def log_probs(self, rows: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return the expert's log-probabilities of rows that are not in the memory."""
        projected = (rows - self.axes.mean) @ self.axes.basis
        return (self.sharpness * (projected @ self.coefficients + self.shares)).log_softmax(dim=1)

    def left_out(
        self,
        rows: Float[Tensor, "B D"],
        labels: Int[Tensor, " B"],
        weights: Float[Tensor, " B"] | float,
    ) -> Float[Tensor, "B C"]:
        """Return log-probabilities of memory rows, each as if it had not been there."""
        projected = (rows - self.axes.mean) @ self.axes.basis
        scores = _left_out(
            projected, labels, weights, self.coefficients, self.shares, self.shrunk, self.axes.total
        )
        return (self.sharpness * scores).log_softmax(dim=1)


def _left_out(projected, labels, weights, coefficients, shares, shrunk, total):
    scores = projected @ coefficients + shares
    # NOTE: leakage guard. A row's own label is taken out of the scores it is judged by.
    if isinstance(weights, Tensor):
        weights = weights.clamp(max=1)  # of copies, one is left out
    leverage = weights * ((projected.square() * shrunk).sum(dim=1) + 1 / total)
    factor = leverage.clamp(max=0.99) / (1 - leverage.clamp(max=0.99))
    one_hot = torch.nn.functional.one_hot(labels, scores.shape[1])
    return scores - factor[:, None] * (one_hot - scores)


def fit_expert(
    axes: Axes,
    rows: Float[Tensor, "N D"],
    labels: Int[Tensor, " N"],
    n_classes: int,
    weights: Float[Tensor, " N"] | None = None,
) -> Expert:
    """Return the expert of a memory's labels.

    Args:
        axes: Of the same rows and weights.
        rows: Memory rows.
        labels: Their labels.
        n_classes: C.
        weights: How much each row counts; None counts all alike.
    """
    weights = rows.new_ones(len(rows)) if weights is None else weights
    shares = rows.new_zeros(n_classes).index_add_(0, labels, weights) / axes.total
    sums = rows.new_zeros(rows.shape[1], n_classes)
    for part in torch.arange(len(rows)).split(ROW_BLOCK):
        sums.index_add_(1, labels[part], ((rows[part] - axes.mean) * weights[part, None]).T)
    products = axes.basis.T @ sums  # (R, C): centred rows times labels need no centred labels
    picked = _picked(len(rows), EXPERT_JUDGES)
    projected = (rows[picked] - axes.mean) @ axes.basis
    own, counted = labels[picked], weights[picked]
    sharpnesses = rows.new_tensor(SHARPNESSES)
    best = None
    unit = axes.energies.mean().clamp(min=TINY)  # rows that are all alike have no energy
    for strength in STRENGTHS:
        shrunk = 1 / (axes.energies + strength * unit)
        coefficients = shrunk[:, None] * products
        scores = _left_out(projected, own, counted, coefficients, shares, shrunk, axes.total)
        logs = (sharpnesses[:, None, None] * scores).log_softmax(dim=2)  # (S, P, C)
        of_label = logs.gather(2, own.expand(len(logs), -1)[..., None]).squeeze(2)
        losses = -(of_label * counted).sum(dim=1) / counted.sum()
        which = int(losses.argmin())
        if best is None or losses[which] < best.nll:
            hits = (scores.argmax(dim=1) == own).to(counted) @ counted / counted.sum()
            chosen = SHARPNESSES[which], float(losses[which]), float(hits)
            best = Expert(axes, coefficients, shares, shrunk, *chosen)
    return best


def _picked(n_rows: int, limit: int) -> Int[Tensor, " P"]:
    """Return rows to judge by: all, or as many as allowed, drawn with a fixed seed."""
    if n_rows <= limit:
        return torch.arange(n_rows)
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(n_rows, generator=generator)[:limit].sort().values


# ---- Facts: numbers without a unit, which the prior reads.

PROTOTYPE_SCALES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
JUDGES = 1024  # memory rows that tell what a memory is like


@dataclass(frozen=True)
class Facts:
    """What a memory is like, from rows that are left out of their own neighbourhood.

    Attributes:
        distance: Median distance of a row to the last of its own neighbours.
        spread: Median of that distance minus the one to the first.
        prototype_scale: Sharpness at which the class prototypes predict left-out rows best.
        columns: How well neighbours, prototypes and expert predict them, and the memory's size.
        shares: Class shares.
        expert: The global expert.
    """

    distance: float
    spread: float
    prototype_scale: float
    columns: Float[Tensor, " F"]
    shares: Float[Tensor, " C"]
    expert: Expert


def facts_of(view: "LabelView") -> Facts:
    """Return what the memory under these labels is like."""
    expert = fit_expert(
        axes_of(view.rows, view.weights), view.rows, view.labels, view.n_classes, view.weights
    )
    picked = _picked(len(view.rows), JUDGES).to(view.labels.device)
    counted = view.weights_of(picked)
    counted = counted / counted.sum()
    own, labels = view.own_neighbours[picked], view.labels[picked]
    cosines = torch.einsum("pd,ptd->pt", view.rows[picked], view.rows[own])
    distances = (2 - 2 * cosines.clamp(max=1)).clamp(min=1e-12).sqrt()
    distance = max(float(distances[:, -1].median()), TINY)
    spread = max(float((distances[:, -1] - distances[:, 0]).median()), TINY)
    shares, n_classes = expert.shares, view.n_classes
    chance = max(float(torch.special.entr(shares).sum()), TINY)  # NLL of the class shares
    histograms, n_own = view.histograms[picked], own.shape[1]
    smoothed = (histograms * n_own + shares) / (n_own + 1)
    told = expert.left_out(view.rows[picked], labels, view.weights_of(picked)).exp()
    prototype = view.prototype_cosines(view.rows[picked], picked[:, None])
    prototype = prototype.masked_fill(~view.is_present, -1e4)
    scale, prototype_nll = _best_scale(prototype, labels, counted)
    hits = [(each.argmax(dim=1) == labels).float() @ counted for each in (smoothed, prototype)]
    columns = [
        _mean_nll(smoothed.log(), labels, counted) / chance,
        prototype_nll / chance,
        expert.nll / chance,
        *map(float, hits),
        expert.hit_rate,
        float(view.trust[picked] @ counted),
        float(view.trust[picked].std(correction=0)),
        float((distances[:, 0].median()) / distance),
        float(torch.special.entr(histograms).sum(dim=1) @ counted) / chance,
        chance / math.log(n_classes),
        math.log(n_classes) / 4,
        math.log(len(view.rows)) / 8,
        math.log(len(view.rows) / n_classes) / 8,
        math.log(max(len(expert.axes.energies), 1)) / 5,
        # Wrong labels disagree wherever they fall, ambiguous ones hardly among the surest rows.
        *_surest(smoothed, labels),
        *_surest(told, labels),
        *torch.quantile(smoothed.amax(dim=1), smoothed.new_tensor([0.1, 0.9])).tolist(),
        *torch.quantile(told.amax(dim=1), told.new_tensor([0.1, 0.9])).tolist(),
    ]
    table = torch.tensor(columns, dtype=torch.float32).clamp(-3, 3)
    return Facts(distance, spread, scale, table, shares, expert)


N_FACTS = 23
SUREST = (0.1, 0.3)  # shares of the most confident left-out rows


def _surest(probs: Float[Tensor, "P C"], labels: Int[Tensor, " P"]) -> list[float]:
    """Return the share of labels that are predicted, among the surest rows."""
    confidence, guesses = probs.max(dim=1)
    hits = (guesses == labels)[confidence.argsort(descending=True, stable=True)].float()
    return [float(hits[: max(5, round(share * len(hits)))].mean()) for share in SUREST]


def _mean_nll(
    logs: Float[Tensor, "P C"], labels: Int[Tensor, " P"], counted: Float[Tensor, " P"]
) -> float:
    return -float(logs.gather(1, labels[:, None]).squeeze(1) @ counted)


def _best_scale(
    cosines: Float[Tensor, "P C"], labels: Int[Tensor, " P"], counted: Float[Tensor, " P"]
) -> tuple[float, float]:
    """Return the sharpness at which prototypes predict left-out rows best, and their NLL."""
    losses = {
        scale: _mean_nll((scale * cosines).log_softmax(dim=1), labels, counted)
        for scale in PROTOTYPE_SCALES
    }
    best = min(losses, key=losses.get)
    return best, losses[best]
