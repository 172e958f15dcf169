"""Errata: faults of the published code, each next to its correction, on the same rows.

Every fault is a function that makes it happen and returns a ``Pair`` of probabilities. The faulty
behaviour lives here and nowhere else in the package, apart from the switches that were kept on
purpose (``label_bias="neighbourhood"`` and searching without ``exclude_ids``).

Axes: B queries, K neighbours of each, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnknn.config import AttentionConfig
from attnknn.core.attention import (
    SUPPORT_FLOOR,
    NeighbourAttention,
    attention_entropy,
    attention_probs,
    vote,
    with_floor,
)
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import AdaptiveK, Attention, Distance, Method, Uniform, normalised, predict
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import compare_methods
from attnknn.evaluate.measure import (
    HIGHER_IS_BETTER,
    METRIC_NAMES,
    accuracy,
    negative_log_likelihood,
)
from attnknn.evaluate.tune import DISTANCE_TEMPERATURES, fit_adaptive_k
from attnknn.progress import progress_bar
from attnknn.studies.common import Neighbourhoods, search_run
from attnknn.studies.theory import some_rows

# ---- What every fault is made on: one run, one search, fits of equal size

# Nothing but similarity: what a published part does is not hidden by other parts.
PLAIN_ATTENTION = AttentionConfig(
    situation=(),
    label_bias="none",
    denoise=False,
    prototype_gate=False,
    floor=False,
    query_temperature=False,
)


class Pair(NamedTuple):
    """Probabilities with the fault and without it, for the same rows, and a sentence."""

    faulty: Float[np.ndarray, "B C"]
    corrected: Float[np.ndarray, "B C"]
    labels: Int[np.ndarray, " B"]
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """A run, one search of it, and the attention that all fits are held against.

    Attributes:
        run: The trained run.
        k_eval: Neighbours that an attention weighs.
        k_baseline: Neighbours of plain votes.
        epochs: Of every fit, faulty or not.
        max_queries: The most queries that any fit gets; faulty and corrected fits get equally many.
    """

    run: TrainedRun
    k_eval: int = 50
    k_baseline: int = 16
    epochs: int = 15
    max_queries: int = 2000

    @cached_property
    def found(self) -> Neighbourhoods:
        """Held-out and test queries in the memory; one row fewer than it has, for leave-one-out."""
        return search_run(self.run, min(max(self.k_eval, self.k_baseline), len(self.run.bank) - 1))

    @property
    def k(self) -> int:
        """Neighbours of plain votes, where the memory has as many."""
        return min(self.k_baseline, self.found.test.k)

    @property
    def labels(self) -> Int[np.ndarray, " B"]:
        """True classes of the test rows."""
        return self.run.labels("test")

    @property
    def n_fit(self) -> int:
        """Queries that every fit gets."""
        return min(self.max_queries, len(self.found.held_out_labels), len(self.run.bank))

    def fit(
        self, config: AttentionConfig, found: Neighbours, labels: Int[np.ndarray, " _"]
    ) -> Attention:
        """Return an attention fitted on queries whose neighbours were found."""
        fitting = replace(self.run.config.fitting, fit_epochs=self.epochs, fit_noise_max=0.0)
        fitted = fit_on_neighbours(
            self.run.bank,
            found.nearest(min(self.k_eval, found.k)),
            labels,
            attention=config,
            fitting=fitting,
            seed=self.run.config.seed,
            n_epochs=self.epochs,
            temperature=1.0,
        )
        return fitted.method

    def fit_held_out(self, config: AttentionConfig) -> Attention:
        """Return an attention fitted as it should be: on queries that the embedder never saw."""
        rows = some_rows(len(self.found.held_out_labels), self.n_fit)
        held_out = self.found.held_out.of_queries(torch.from_numpy(rows))
        return self.fit(config, held_out, self.found.held_out_labels[rows])

    def fit_on_memory(self, *, leave_one_out: bool) -> Attention:
        """Return an attention fitted on the rows of the memory itself."""
        run = self.run
        ids = some_rows(len(run.bank), self.n_fit, seed=run.config.seed)
        rows, k = run.rows("train")[ids], min(self.k_eval, len(run.bank) - 1)
        found = run.bank.search(rows, k, exclude_ids=ids if leave_one_out else None)
        return self.fit(run.config.attention, found, run.labels("train")[ids])

    def on_test(self, method: Method) -> Float[np.ndarray, "_ C"]:
        """Return test probabilities of a method."""
        return predict(method, self.found.test)

    @cached_property
    def held_out_probs(self) -> Float[np.ndarray, "B C"]:
        """Test probabilities of the run's kind of attention, fitted on held-out queries."""
        return self.on_test(self.fit_held_out(self.run.config.attention))

    @cached_property
    def plain_attention(self) -> Attention:
        """Weights from similarity alone, fitted on held-out queries."""
        return self.fit_held_out(PLAIN_ATTENTION)

    @cached_property
    def distance(self) -> Distance:
        """Distance weights whose temperature the held-out queries chose."""
        held_out, labels = self.found.held_out, self.found.held_out_labels
        tried = [Distance(self.k, temperature) for temperature in DISTANCE_TEMPERATURES]
        return min(tried, key=lambda each: negative_log_likelihood(predict(each, held_out), labels))


class Fault(NamedTuple):
    """A fault: what the published code did, and how to make it happen."""

    name: str
    wrong: str
    make: Callable[[Case], Pair]
    rows: str = "test rows"  # that its cost is measured on
    misleads: bool = False  # falsifies what is measured, rather than the classifier itself


FAULTS: list[Fault] = []


def fault(name: str, **how: str | bool) -> Callable:
    """Register a function as a fault; its first line says what the published code did."""

    def register(make: Callable[[Case], Pair]) -> Callable[[Case], Pair]:
        FAULTS.append(Fault(name, make.__doc__.splitlines()[0], make, **how))
        return make

    return register


# ---- The faults

PUBLISHED_FLOORS = {"attention": 1e-8, "baselines": 1e-9}
PUBLISHED_THRESHOLD = 0.5  # of adaptive k
ENTROPY_STEPS, ENTROPY_LR = 100, 0.1


@fault("self-retrieval", rows="held-out rows put into the memory", misleads=True)
def self_retrieval(case: Case) -> Pair:
    """Memory rows were their own first neighbour, so the label to be predicted voted."""
    # Held-out rows go into a copy of the memory: on training rows, what the embedder has memorised
    # would come on top.
    run, rows, labels = case.run, case.run.rows("val"), case.run.labels("val")
    bank = MemoryBank(
        np.concatenate([run.rows("train"), rows]),
        np.concatenate([run.labels("train"), labels]),
        n_classes=len(run.class_names),
        index="flat_ip",
    )
    own = len(run.bank) + np.arange(len(rows))
    both = bank.search(rows, case.k), bank.search(rows, case.k, exclude_ids=own)
    at_one = [accuracy(predict(Uniform(1), each), labels) for each in both]
    detail = f"At k = 1 accuracy is {100 * at_one[0]:.1f} % instead of {100 * at_one[1]:.1f} %."
    return Pair(*(predict(Uniform(case.k), each) for each in both), labels, detail)


@fault("fit on self-retrieval")
def self_retrieval_in_fit(case: Case) -> Pair:
    """The attention was fitted on rows that found themselves."""
    faulty = case.on_test(case.fit_on_memory(leave_one_out=False))
    return Pair(faulty, case.held_out_probs, case.labels)


@fault("fit on seen queries")
def seen_queries(case: Case) -> Pair:
    """The attention was fitted on rows that the embedder had been trained on."""
    untrained = case.run.config.training.epochs == 0
    detail = "Nothing was trained here, so no row was memorised." if untrained else ""
    faulty = case.on_test(case.fit_on_memory(leave_one_out=True))
    return Pair(faulty, case.held_out_probs, case.labels, detail)


@fault("label bias without effect")
def label_bias_no_op(case: Case) -> Pair:
    """The label bias added one number to all scores of a query, which a softmax cancels."""
    both = [
        case.fit_held_out(replace(PLAIN_ATTENTION, label_bias=form))
        for form in ("neighbourhood", "neighbour")
    ]
    moved = [bias_effect(each.module, case.found.test.nearest(each.k)) for each in both]
    detail = (
        f"With all its weights drawn anew no probability moves by more than {moved[0]:.0e}; "
        f"with a bias per neighbour, by up to {moved[1]:.2f}."
    )
    return Pair(*map(case.on_test, both), case.labels, detail)


def bias_effect(module: NeighbourAttention, found: Neighbours, *, seed: int = 0) -> float:
    """Return by how much a probability moves at most when the label bias is drawn anew."""
    part = module.parts["label_bias"]
    before = attention_probs(module, found)[0]
    learned = {name: value.clone() for name, value in part.state_dict().items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in part.parameters():
            parameter.copy_(torch.randn_like(parameter))
    after = attention_probs(module, found)[0]
    part.load_state_dict(learned)
    return float((after - before).abs().max())


@fault("loss beside the attention")
def entropy_only(case: Case) -> Pair:
    """The loss sat on a classifier head, so that only the entropy term reached the attention."""
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
    return Pair(case.on_test(method), case.on_test(case.plain_attention), case.labels, detail)


@fault("zero support")
def zero_support(case: Case) -> Pair:
    """A class without a vote got 1e-9 (1e-8 for attention), which then decided the NLL."""
    votes, labels = Uniform(case.k).votes(case.found.test), case.labels
    faulty = {name: published_floor(votes, floor) for name, floor in PUBLISHED_FLOORS.items()}
    corrected = case.on_test(Uniform(case.k))
    return Pair(faulty["baselines"], corrected, labels, support_detail(faulty, labels))


def published_floor(votes: Float[Tensor, "B C"], floor: float) -> Float[np.ndarray, "B C"]:
    """Return votes as published: a tiny number added to every class, renormalised."""
    return normalised(votes.double() + floor)


def support_detail(
    faulty: dict[str, Float[np.ndarray, "B C"]], labels: Int[np.ndarray, " B"]
) -> str:
    """Say how much of the NLL is decided by rows whose label nobody voted for."""
    own = {name: probs[np.arange(len(labels)), labels] for name, probs in faulty.items()}
    nll = -np.log(own["baselines"])
    without_vote = own["baselines"] < 2 * PUBLISHED_FLOORS["baselines"]
    if not without_vote.any():
        return "Here every label got a vote, so the floor decides nothing."
    gap = (nll + np.log(own["attention"])).mean()
    return (
        f"{100 * without_vote.mean():.2f} % of the rows have no vote for their label and make up "
        f"{100 * nll[without_vote].sum() / nll.sum():.0f} % of the NLL (without any floor it is "
        f"infinite); the same votes with the attention's 1e-8 would look {gap:.3f} better."
    )


@fault("τ = 1 on squared distances")
def unit_temperature_on_squares(case: Case) -> Pair:
    """Squared distances of unit vectors went into a softmax at temperature 1."""
    both = Distance(case.k, temperature=1.0, squared=True), case.distance
    weights = [each.weights(case.found.test) for each in both]
    ratios = [(each[:, 0] / each[:, -1]).median() for each in weights]
    detail = (
        f"The nearest of {case.k} neighbours counts {ratios[0]:.2f} times as much as the farthest "
        f"(median), {ratios[1]:.2f} times with the chosen temperature of "
        f"{case.distance.temperature:g}."
    )
    return Pair(*map(case.on_test, both), case.labels, detail)


@fault("similarity taken for distance")
def inverted_similarity(case: Case) -> Pair:
    """An inner-product index returns similarities; weights of exp(-similarity) are upside down."""
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


@fault("adaptive k out of reach")
def adaptive_threshold(case: Case) -> Pair:
    """At a threshold of 0.5 the largest k is used only where weights are exactly equal."""
    method = case.plain_attention
    faulty = AdaptiveK(method, PUBLISHED_THRESHOLD)
    chosen = fit_adaptive_k(method, case.found.held_out, case.found.held_out_labels)
    reached = (faulty.chosen_k(case.found.test) == faulty.k).float().mean()
    detail = (
        f"{100 * reached:.1f} % of the test queries reach k = {faulty.k}; "
        f"held-out queries choose a threshold of {chosen.threshold:g}."
    )
    return Pair(case.on_test(faulty), case.on_test(chosen), case.labels, detail)


SELECTION_KS = (1, 3, 5, 10, 20, 50)
CRITERIA = {"accuracy": accuracy, "nll": negative_log_likelihood}


def selected(case: Case, criterion: str) -> Pair:
    """Choose k and distance temperature on the test rows, against a choice on held-out rows."""
    found, labels = case.found, case.labels
    ks = [k for k in SELECTION_KS if k <= found.test.k]
    weighed = [Distance(k, t) for k in ks if k > 1 for t in DISTANCE_TEMPERATURES]
    tried = [*map(Uniform, ks), *weighed]
    reported = [case.on_test(method) for method in tried]
    held_out = [predict(method, found.held_out) for method in tried]
    honest = best_of(held_out, found.held_out_labels, criterion)
    return Pair(reported[best_of(reported, labels, criterion)], reported[honest], labels)


def best_of(
    candidates: Sequence[Float[np.ndarray, "B C"]], labels: Int[np.ndarray, " B"], criterion: str
) -> int:
    """Return which of the candidates is best by a criterion; the first of equals."""
    values = [CRITERIA[criterion](probs, labels) for probs in candidates]
    return int(np.argmax(values) if criterion in HIGHER_IS_BETTER else np.argmin(values))


_WRONG = "Settings were chosen on the rows that were then reported."
FAULTS += [
    Fault(f"selection by reported {METRIC_NAMES[by]}", _WRONG, make, misleads=True)
    for by, make in ((by, partial(selected, criterion=by)) for by in CRITERIA)
]


# ---- Costs: paired differences, one table, one sentence each

UNCLEAR = "no difference at this size"
# A faulty vote may give a true class no probability at all: no interval, but no small matter.
INFINITE, UNDEFINED = "infinite", "undefined"
# What a better or a worse measure means where a fault misleads; elsewhere it is that.
MISLEADING = {"better": "looks better than it is", "worse": "looks worse than it is"}
METRICS = ("accuracy", "nll", "ece")
_COLUMNS = "fault wrong rows misleads metric difference low high effect n_rows n_seeds".split()


class Costs(NamedTuple):
    """What each fault costs.

    Attributes:
        table: One row per fault and measure; ``difference`` is faulty minus corrected, ``effect``
            says what that means (``INFINITE`` or ``UNDEFINED`` where a loss is not finite).
        details: Fault to what else was measured, first seed.
        accuracy_noise: Half of the 95 % interval of one accuracy on these test rows.
    """

    table: pd.DataFrame
    details: dict[str, str]
    accuracy_noise: float


def fault_costs(
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    k_baseline: int = 16,
    errata_epochs: int = 15,
    errata_queries: int = 2000,
    progress: bool = True,
) -> Costs:
    """Return the cost of every fault.

    Args:
        runs: One trained run a seed.
        k_eval: Neighbours that an attention weighs.
        k_baseline: Neighbours of plain votes.
        errata_epochs: Epochs of every fit, faulty or corrected.
        errata_queries: The most queries that a fit gets.
        progress: Show a bar.
    """
    options = {"epochs": errata_epochs, "max_queries": errata_queries}
    cases = [Case(run, k_eval, k_baseline, **options) for run in runs]
    level = 1 - 0.05 / len(FAULTS)  # one look per fault (Bonferroni), intervals included
    tables, details = [], {}
    for each in progress_bar(FAULTS, "faults", disable=not progress):
        pairs = [each.make(case) for case in cases]
        tables.append(paired_cost(each, pairs, level=level))
        details[each.name] = pairs[0].detail
    right = np.mean([case.held_out_probs.argmax(axis=1) == case.labels for case in cases])
    noise = 1.96 * np.sqrt(right * (1 - right) / len(cases[0].labels))
    return Costs(pd.concat(tables, ignore_index=True), details, float(noise))


def paired_cost(fault: Fault, pairs: Sequence[Pair], *, level: float = 0.95) -> pd.DataFrame:
    """Return faulty minus corrected in every measure, over the seeds."""
    results = {name: [getattr(pair, name) for pair in pairs] for name in ("faulty", "corrected")}
    table = compare_methods(results, pairs[0].labels, "corrected", metrics=METRICS, level=level)
    effects = [
        effect(row.difference, row.verdict, misleads=fault.misleads) for row in table.itertuples()
    ]
    described = {"fault": fault.name, "wrong": fault.wrong, "rows": fault.rows}
    return table.assign(**described, misleads=fault.misleads, effect=effects)[_COLUMNS]


def effect(difference: float, verdict: str, *, misleads: bool) -> str:
    """Name what a difference shows; one that is not finite has a name of its own."""
    if not np.isfinite(difference):
        return INFINITE if difference == np.inf else UNDEFINED
    return UNCLEAR if verdict not in MISLEADING else MISLEADING[verdict] if misleads else verdict


def cost_table(costs: Costs) -> pd.DataFrame:
    """Return one row a fault: its cost in every measure with the interval, ready to print."""
    titles = {"nll": "NLL", "ece": "ECE", "accuracy": "accuracy (points)"}
    rows = []
    for name, mine in costs.table.groupby("fault", sort=False):
        shown = {titles[row["metric"]]: _cell(row) for row in mine.to_dict("records")}
        rows.append({"fault": name, "measured on": mine["rows"].iloc[0], **shown})
    return pd.DataFrame(rows)


def verdict(costs: Costs) -> str:
    """Return, in Markdown, what each fault was and what it makes better or worse."""
    lines = []
    for name, mine in costs.table.groupby("fault", sort=False):
        parts = [mine["wrong"].iloc[0], effect_sentence(mine), costs.details.get(name, "")]
        lines.append(f"- **{name}**: {' '.join(part for part in parts if part)}")
    note = (
        "Faulty minus corrected, paired, intervals of 95 % over all faults together; "
        f"{costs.table['n_seeds'].iloc[0]} seed(s). One accuracy on these test rows is uncertain "
        f"by ±{100 * costs.accuracy_noise:.2f} points: smaller differences between separate "
        "measurements, without a paired test, mean nothing."
    )
    return "\n".join([*lines, "", note])


def effect_sentence(rows: pd.DataFrame) -> str:
    """Return what one fault does to the measures, in words."""
    phrases = [
        f"{METRIC_NAMES[row['metric']]} {row['effect'].replace('looks', 'look')} ({_cell(row)})"
        for row in rows.to_dict("records")
        if row["effect"] != UNCLEAR
    ]
    said = ", ".join(phrases) or UNCLEAR
    return f"It makes {said.replace(f' ({INFINITE})', '').replace(f' ({UNDEFINED})', '')}."


def _cell(row: dict) -> str:
    if not np.isfinite(row["difference"]):
        return f"minus {INFINITE}" if row["difference"] == -np.inf else row["effect"]
    scale, digits = (100, 2) if row["metric"] in HIGHER_IS_BETTER else (1, 4)
    shown = [f"{scale * row[name]:+.{digits}f}" for name in ("difference", "low", "high")]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"
