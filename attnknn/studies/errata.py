"""Errata: faults of the published code, each next to its correction, on the same rows.

Every function makes one fault happen and returns a ``Pair`` of probabilities. The faulty behaviour
lives here and nowhere else in the package, apart from the switches that were kept on purpose
(``label_bias="neighbourhood"`` and searching without ``exclude_ids``).

Axes: B queries, K neighbours of each, C classes, N memory rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnknn.attention import (
    SUPPORT_FLOOR,
    NeighbourAttention,
    attention_entropy,
    attention_probs,
    vote,
    with_floor,
)
from attnknn.baselines import fit_adaptive_k
from attnknn.classify import AdaptiveK, Attention, Distance, Uniform, normalised, predict
from attnknn.measure import accuracy
from attnknn.memory import MemoryBank
from attnknn.neighbours import Neighbours
from attnknn.studies.errata_case import PLAIN_ATTENTION, Case, Pair
from attnknn.studies.root_n import some_rows

PUBLISHED_FLOORS = {"attention": 1e-8, "baselines": 1e-9}
PUBLISHED_THRESHOLD = 0.5  # of adaptive k
ENTROPY_STEPS, ENTROPY_LR = 100, 0.1


def self_retrieval(case: Case) -> Pair:
    """Memory rows as queries that find themselves; held-out rows stand in for memory rows.

    They are put into a copy of the memory, so that nothing but self-retrieval is measured: on
    training rows, what the embedder has memorised would come on top.
    """
    run, n_memory = case.run, len(case.run.bank)
    rows, labels = run.rows("val"), run.labels("val")
    bank = MemoryBank(
        np.concatenate([run.rows("train"), rows]),
        np.concatenate([run.labels("train"), labels]),
        n_classes=len(run.class_names),
        index="flat_ip",
    )
    own = n_memory + np.arange(len(rows))
    with_self, without = bank.search(rows, case.k), bank.search(rows, case.k, exclude_ids=own)
    at_one = [accuracy(predict(Uniform(1), each), labels) for each in (with_self, without)]
    detail = f"At k = 1 accuracy is {100 * at_one[0]:.1f} % instead of {100 * at_one[1]:.1f} %."
    uniform = Uniform(case.k)
    return Pair(predict(uniform, with_self), predict(uniform, without), labels, detail)


def self_retrieval_in_fit(case: Case) -> Pair:
    """An attention fitted on memory rows that find themselves."""
    return Pair(_fitted_on_memory(case, leave_one_out=False), case.held_out_probs, case.labels)


def seen_queries(case: Case) -> Pair:
    """An attention fitted on rows that the embedder was trained on, each left out in turn."""
    untrained = case.run.config.training.epochs == 0
    detail = "Nothing was trained here, so no row was memorised." if untrained else ""
    faulty = _fitted_on_memory(case, leave_one_out=True)
    return Pair(faulty, case.held_out_probs, case.labels, detail)


def _fitted_on_memory(case: Case, *, leave_one_out: bool) -> Float[np.ndarray, "B C"]:
    ids = some_rows(len(case.run.bank), case.n_fit, seed=case.run.config.seed)
    rows, labels = case.run.rows("train")[ids], case.run.labels("train")[ids]
    k = min(case.k_eval, len(case.run.bank) - 1)
    found = case.run.bank.search(rows, k, exclude_ids=ids if leave_one_out else None)
    return case.on_test(case.fit(case.run.config.attention, found, labels))


def label_bias_no_op(case: Case) -> Pair:
    """A label bias that adds the same number to all K scores, against one per neighbour."""
    published, corrected = (
        case.fit_held_out(replace(PLAIN_ATTENTION, label_bias=form))
        for form in ("neighbourhood", "neighbour")
    )
    changes = [
        bias_effect(each.module, case.found.test.nearest(each.k)) for each in (published, corrected)
    ]
    detail = (
        f"With all its weights drawn anew no probability moves by more than {changes[0]:.0e}; "
        f"with a bias per neighbour, by up to {changes[1]:.2f}."
    )
    return Pair(case.on_test(published), case.on_test(corrected), case.labels, detail)


def bias_effect(module: NeighbourAttention, found: Neighbours, *, seed: int = 0) -> float:
    """Return by how much a probability moves at most when the label bias is drawn anew."""
    part = module.parts["label_bias"]
    before, learned = attention_probs(module, found)[0], part.state_dict()
    learned = {name: value.clone() for name, value in learned.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in part.parameters():
            parameter.copy_(torch.randn_like(parameter))
    after = attention_probs(module, found)[0]
    part.load_state_dict(learned)
    return float((after - before).abs().max())


def zero_support(case: Case) -> Pair:
    """Classes nobody votes for get 1e-9 instead of a floor that all methods share."""
    votes, labels = Uniform(case.k).votes(case.found.test), case.labels
    faulty = {name: published_floor(votes, floor) for name, floor in PUBLISHED_FLOORS.items()}
    floorless = votes.numpy()[np.arange(len(labels)), labels] == 0
    detail = support_detail(faulty, labels, floorless)
    return Pair(faulty["baselines"], case.on_test(Uniform(case.k)), labels, detail)


def support_detail(
    faulty: dict[str, Float[np.ndarray, "B C"]],
    labels: Int[np.ndarray, " B"],
    without_vote: Bool[np.ndarray, " B"],
) -> str:
    """Say how much of the NLL is decided by rows whose label nobody voted for."""
    if not without_vote.any():
        return "Here every label got a vote, so the floor decides nothing."
    own = {name: -np.log(probs[np.arange(len(labels)), labels]) for name, probs in faulty.items()}
    share = own["baselines"][without_vote].sum() / own["baselines"].sum()
    gap = own["baselines"].mean() - own["attention"].mean()
    return (
        f"{100 * without_vote.mean():.2f} % of the rows have no vote for their label: without any "
        f"floor the NLL is infinite, with 1e-9 they make up {100 * share:.0f} % of it, and the "
        f"same votes with the attention's 1e-8 would look {gap:.3f} better."
    )


def published_floor(votes: Float[Tensor, "B C"], floor: float) -> Float[np.ndarray, "B C"]:
    """Return votes as published: a tiny number added to every class, renormalised."""
    return normalised(votes.double() + floor)


def unit_temperature_on_squares(case: Case) -> Pair:
    """softmax(-squared distance / 1) against a temperature that held-out queries chose."""
    faulty = Distance(case.k, temperature=1.0, squared=True)
    ratios = [
        (each.weights(case.found.test)[:, 0] / each.weights(case.found.test)[:, -1]).median()
        for each in (faulty, case.distance)
    ]
    detail = (
        f"The nearest of {case.k} neighbours counts {ratios[0]:.2f} times as much as the farthest "
        f"(median), with the chosen temperature of {case.distance.temperature:g} it is "
        f"{ratios[1]:.2f} times."
    )
    return Pair(case.on_test(faulty), case.on_test(case.distance), case.labels, detail)


def inverted_similarity(case: Case) -> Pair:
    """Similarities taken for distances: the farthest of the neighbours counts most."""
    near, labels = case.found.test.nearest(case.k), case.labels
    faulty, plain = (
        normalised(with_floor(vote(inverted_weights(near.scores, t), near), SUPPORT_FLOOR))
        for t in (case.distance.temperature, 1.0)
    )
    lost = accuracy(plain, labels) - accuracy(case.on_test(Uniform(case.k)), labels)
    detail = f"At the published temperature of 1 it hides: {100 * lost:+.2f} points to uniform."
    return Pair(faulty, case.on_test(case.distance), labels, detail)


def inverted_weights(scores: Float[Tensor, "B K"], temperature: float) -> Float[Tensor, "B K"]:
    """Return softmax(-similarity / temperature): the published weights over an IP index."""
    return (-scores / temperature).softmax(dim=1)


def entropy_only(case: Case) -> Pair:
    """An attention that only the entropy term trains: the loss sat on a classifier head."""
    near = case.found.held_out.nearest(min(case.k_eval, case.found.held_out.k))
    near = near.of_queries(torch.from_numpy(some_rows(len(near.ids), case.n_fit)))
    bank = case.run.bank
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.run.config.seed)
        module = NeighbourAttention(PLAIN_ATTENTION, dim=bank.dim, n_classes=bank.n_classes)
    optimiser = torch.optim.Adam(module.parameters(), lr=ENTROPY_LR)
    for _ in range(ENTROPY_STEPS):
        optimiser.zero_grad()
        (-attention_entropy(module(near).weights).mean()).backward()
        optimiser.step()
    method, test = Attention(near.k, module.eval()), case.found.test.nearest(near.k)
    entropy = float(attention_entropy(method.weights(test)).mean() / np.log(max(near.k, 2)))
    detail = f"Its weights end at {100 * entropy:.1f} % of the largest entropy: uniform."
    corrected = case.on_test(case.plain_attention)
    return Pair(case.on_test(method), corrected, case.labels, detail)


def adaptive_threshold(case: Case) -> Pair:
    """Adaptive k at an entropy threshold that leaves its largest k out of reach."""
    method = case.plain_attention
    faulty = AdaptiveK(method, PUBLISHED_THRESHOLD)
    chosen = fit_adaptive_k(method, case.found.held_out, case.found.held_out_labels)
    reached = (faulty.chosen_k(case.found.test) == faulty.k).float().mean()
    detail = (
        f"{100 * reached:.1f} % of the test queries reach k = {faulty.k}; "
        f"held-out queries choose a threshold of {chosen.threshold:g}."
    )
    return Pair(case.on_test(faulty), case.on_test(chosen), case.labels, detail)


@dataclass(frozen=True)
class Fault:
    """A fault and how to make it happen.

    Attributes:
        name: In tables and figures.
        wrong: What the published code did, one sentence.
        rows: The rows that its cost is measured on.
        misleads: Whether it falsifies what is measured, rather than the classifier itself.
        make: Makes it happen.
    """

    name: str
    wrong: str
    rows: str
    misleads: bool
    make: Callable[[Case], Pair]


FAULTS = (
    Fault(
        "self-retrieval",
        "Memory rows were their own first neighbour, so the label to be predicted voted.",
        "held-out rows put into the memory",
        True,
        self_retrieval,
    ),
    Fault(
        "fit on self-retrieval",
        "The attention was fitted on rows that found themselves.",
        "test rows",
        False,
        self_retrieval_in_fit,
    ),
    Fault(
        "fit on seen queries",
        "The attention was fitted on rows that the embedder had been trained on.",
        "test rows",
        False,
        seen_queries,
    ),
    Fault(
        "label bias without effect",
        "The label bias added one number to all scores of a query, which a softmax cancels.",
        "test rows",
        False,
        label_bias_no_op,
    ),
    Fault(
        "loss beside the attention",
        "The loss sat on a classifier head, so that only the entropy term reached the attention.",
        "test rows",
        False,
        entropy_only,
    ),
    Fault(
        "zero support",
        "A class without a vote got 1e-9 (1e-8 for attention), which then decided the NLL.",
        "test rows",
        False,
        zero_support,
    ),
    Fault(
        "τ = 1 on squared distances",
        "Squared distances of unit vectors went into a softmax at temperature 1.",
        "test rows",
        False,
        unit_temperature_on_squares,
    ),
    Fault(
        "similarity taken for distance",
        "An inner-product index returns similarities; weights of exp(-similarity) are upside down.",
        "test rows",
        False,
        inverted_similarity,
    ),
    Fault(
        "adaptive k out of reach",
        "At a threshold of 0.5 the largest k is used only where weights are exactly equal.",
        "test rows",
        False,
        adaptive_threshold,
    ),
)
