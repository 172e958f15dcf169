"""Fit: the prior learns a little more from a memory's own rows, where that helps.

Queries are rows left out of their own search, or held out altogether. Each of four members starts
from the prior, is fitted on three quarters of the queries and judged on the last; weights are tied
to the prior. The length of the fit is the one whose out-of-fold loss is smallest, and no step at
all is among the lengths: refinement does no harm. The four members are the committee.

Axes: B queries, K neighbours of each, C classes, M members.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.core.neighbours import Neighbours
from attnknn.core.noise import WrongLabels, find_wrong_labels, known_wrong_labels
from attnknn.core.prior import (
    Evidence,
    PriorAttention,
    PriorNetwork,
    evidence_in_blocks,
    shipped_prior,
    spoken,
)
from attnknn.core.vote import Attention

MEMBERS = 4
FEW_QUERIES = 24  # below this nothing is refined: a fold would judge by a handful of rows
# Of rates 1e-3 to 4e-3 the fastest: on drawn tables they lead equally far, at a fourth of the time.
LENGTHS = (0, 1, 2, 4, 8)
RATE, TIE, BATCH = 4e-3, 10.0, 192
WORTH = 0.5  # standard errors by which refinement must beat the prior as it is
GIVE_UP = 1.0  # standard errors behind the best at which longer fits are not tried


@dataclass(frozen=True)
class Refined:
    """What refinement came to.

    Attributes:
        network: The committee; the prior itself where no step helped.
        n_epochs: Epochs of its fit.
        log_probs: Out-of-fold log-probabilities of the queries' right labels' classes.
        losses: Out-of-fold loss at each length that was tried, by number of epochs.
    """

    network: PriorNetwork
    n_epochs: int
    log_probs: Float[Tensor, "B C"]
    losses: dict[int, float]


def refine_prior(
    prior: PriorNetwork,
    seen: Evidence,
    labels: Int[Tensor, " B"],
    *,
    transition: Float[Tensor, "C C"] | None = None,
    weights: Float[Tensor, " B"] | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 0,
    start: Float[Tensor, "B C"] | None = None,
    tick: Callable[[], bool] = lambda: True,
) -> Refined:
    """Return the prior, refined where out-of-fold queries show that it helps.

    Args:
        prior: One member.
        seen: Evidence of the queries.
        labels: Their labels.
        transition: Chances T[i, j] that class i is labelled j; None takes the labels as right.
        weights: How much each query counts; None counts all alike.
        lengths: Numbers of epochs to try, rising from 0.
        seed: Decides folds and order.
        start: What the prior says of the queries, where that is known already.
        tick: Called after every epoch; False ends the refinement where it is.
    """
    chances = None if transition is None else transition.T[labels].clamp(min=1e-9).log()  # (B, C)
    start = spoken(prior, seen) if start is None else start
    best_losses = _losses(start, labels, chances)
    tried = {0: _mean(best_losses, weights)}
    unrefined = Refined(prior, 0, start, tried)
    if len(labels) < FEW_QUERIES or max(lengths) == 0:
        return unrefined
    counted = labels.new_ones(len(labels)).float() if weights is None else weights / weights.mean()
    folds = _folds(labels, seed)
    network = committee(prior, MEMBERS)
    best = unrefined
    for length, log_probs in _descend(
        network, prior, seen, labels, chances, counted, folds, lengths, seed, tick
    ):
        losses = _losses(log_probs, labels, chances)
        gain = (best_losses - losses) * counted
        error = float(gain.std()) / len(gain) ** 0.5
        tried[length] = _mean(losses, weights)
        needed = WORTH * error if best.n_epochs == 0 else 0.0
        if float(gain.mean()) > needed:
            best, best_losses = Refined(copy.deepcopy(network), length, log_probs, tried), losses
        elif float(gain.mean()) < -GIVE_UP * error:
            break
    return best


def committee(prior: PriorNetwork, members: int) -> PriorNetwork:
    """Return copies of the prior, stacked."""
    network = PriorNetwork(members, prior.bias_in.shape[-1])
    with torch.no_grad():
        for name, value in network.named_parameters():
            value.copy_(getattr(prior, name).expand_as(value))
    return network


def _folds(labels: Int[Tensor, " B"], seed: int) -> Int[np.ndarray, " B"]:
    """Return the fold of each query; a class is spread over the folds as evenly as it can be."""
    order = np.lexsort((np.random.default_rng(seed).random(len(labels)), labels.numpy()))
    folds = np.empty(len(labels), dtype=np.int64)
    folds[order] = np.arange(len(labels)) % MEMBERS
    return folds


def _losses(log_probs, labels, chances) -> Float[Tensor, "*B"]:
    """Return the loss of each query: of right labels, or forward-corrected."""
    if chances is None:
        return -log_probs.gather(-1, labels[..., None]).squeeze(-1)
    return -(log_probs + chances).logsumexp(dim=-1)


def _mean(losses: Tensor, weights: Tensor | None) -> float:
    return float(losses.mean() if weights is None else (losses * weights).sum() / weights.sum())


def _descend(network, prior, seen, labels, chances, counted, folds, lengths, seed, tick):
    """Fit all members at once; yield the lengths with out-of-fold log-probabilities."""
    rng = np.random.default_rng([seed, 1])
    # NOTE: leakage guard. Member m is fitted on the queries outside of fold m alone, and what it
    # says of fold m is what the length is chosen by.
    inside = [np.flatnonzero(folds != m) for m in range(MEMBERS)]
    outside = [np.flatnonzero(folds == m) for m in range(MEMBERS)]
    size = min(len(rows) for rows in inside)
    parameters = dict(network.named_parameters())
    anchors = {name: getattr(prior, name).detach() for name in parameters}
    optimiser = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.0, fused=True)
    batch = min(BATCH, max(16, size // 3))
    for epoch in range(1, max(lengths) + 1):
        order = np.stack([rng.permutation(rows)[:size] for rows in inside])  # (M, size)
        for start in range(0, size - batch // 2, batch):
            chosen = torch.from_numpy(order[:, start : start + batch])
            log_probs = network(seen.of_queries(chosen)).log_probs  # (M, b, C)
            part = None if chances is None else chances[chosen]
            losses = _losses(log_probs, labels[chosen], part) * counted[chosen]
            tie = sum((p - anchors[name]).square().sum() for name, p in parameters.items())
            loss = losses.mean(dim=1).sum() + TIE / size * tie
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        goes_on = tick()
        if epoch in lengths:
            yield epoch, _out_of_fold(network, seen, outside)
        if not goes_on:
            return


@torch.no_grad()
def _out_of_fold(network, seen, outside) -> Float[Tensor, "B C"]:
    """Return what each member says of the queries it was not fitted on."""
    log_probs = torch.empty_like(seen.prototypes)
    for m, rows in enumerate(outside):
        for part in np.array_split(rows, max(1, len(rows) // 1024)):
            chosen = torch.from_numpy(part)
            log_probs[chosen] = network.member(m)(seen.of_queries(chosen)).log_probs[0]
    return log_probs


# ---- The fit: what a memory's queries teach, from evidence to a last temperature.

LAST_TEMPERATURES = torch.exp(torch.linspace(-0.7, 1.1, 37))  # 0.5 to 3
TEMPERATURE_ROWS = 4.0  # log-likelihood that a temperature of e or 1/e must bring, half of it
REFINE = {"none": (0,), "auto": LENGTHS, "full": (*LENGTHS, 16, 32)}
MAX_CELLS = 60_000_000  # query-neighbour-class histograms that a fit holds


@dataclass(frozen=True)
class Learned:
    """What was learned from the queries of a memory.

    Attributes:
        attention: How neighbours are weighed.
        k: Neighbours that vote.
        wrong: Which labels were taken to be wrong.
        n_epochs: Epochs of refinement; 0 is the prior as it is.
        losses: Out-of-fold loss at each length that was tried, by number of epochs.
        probs: Probabilities of the queries, none by a member that was fitted on it.
    """

    attention: PriorAttention
    k: int
    wrong: WrongLabels
    n_epochs: int
    losses: dict[int, float]
    probs: Float[np.ndarray, "B C"]

    @property
    def method(self) -> Attention:
        """The attention as a way to weigh k neighbours."""
        return Attention(self.k, self.attention)

    def at_k(self, k: int) -> "Learned":
        """Return the same for another number of neighbours."""
        return replace(self, k=k)


def learn(
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    label_noise: float | WrongLabels | None = None,
    weights: Float[np.ndarray, " B"] | None = None,
    refine: str = "auto",
    seed: int = 0,
    prior: PriorNetwork | None = None,
    tick: Callable[[], bool] = lambda: True,
) -> Learned:
    """Return what queries teach about weighing the neighbours of a memory.

    Args:
        neighbours: What the queries found; memory rows are left out of their own search.
        labels: Their labels.
        label_noise: Share of wrong labels, or all that is known of them; None finds out.
        weights: How much each query counts; None counts all alike.
        refine: One of ``REFINE``: no step at all, as many as help, or up to four times as many.
        seed: Decides folds and order.
        prior: What to start from; None takes the shipped one.
        tick: Called after every epoch; False ends the refinement where it is.
    """
    prior = shipped_prior() if prior is None else prior
    seen, targets = evidence_in_blocks(neighbours), torch.from_numpy(labels)
    start = spoken(prior, seen)
    wrong = label_noise
    if label_noise is None:
        wrong = find_wrong_labels(start.double().numpy(), labels, weights)
    elif not isinstance(label_noise, WrongLabels):
        wrong = known_wrong_labels(label_noise, neighbours.n_classes)
    matrix = None if wrong.transition is None else torch.from_numpy(wrong.transition).float()
    counted = None if weights is None else torch.tensor(weights).float()
    options = {"transition": matrix, "weights": counted, "seed": seed, "tick": tick}
    refined = refine_prior(prior, seen, targets, start=start, lengths=REFINE[refine], **options)
    # A copy: the shipped prior is one for all classifiers.
    attention = PriorAttention(copy.deepcopy(refined.network).requires_grad_(False).eval())
    log_probs = refined.log_probs
    if refine != "none":
        temperature = _last_temperature(log_probs, targets, matrix, counted)
        attention.last_temperature.fill_(temperature)
        log_probs = (log_probs / temperature).log_softmax(dim=1)
    probs = log_probs.double().exp().numpy()
    probs /= probs.sum(axis=1, keepdims=True)
    return Learned(attention, neighbours.k, wrong, refined.n_epochs, refined.losses, probs)


def _last_temperature(log_probs, labels, transition, weights) -> float:
    """Return the temperature that out-of-fold queries ask for, held to 1 where they are few."""
    chances = None if transition is None else transition.T[labels].clamp(min=1e-9).log()
    best, lowest = 1.0, np.inf
    for temperature in [torch.tensor(1.0), *LAST_TEMPERATURES]:
        tempered = (log_probs / temperature).log_softmax(dim=1)
        held = TEMPERATURE_ROWS * float(temperature.log()) ** 2 / len(labels)
        loss = _mean(_losses(tempered, labels, chances), weights) + held
        if loss < lowest:
            best, lowest = float(temperature), loss
    return best
