"""Errata: faults of the published code, each next to its correction, on the same rows.

Every function makes one fault happen and returns a ``Pair`` of probabilities. The faulty behaviour
lives here and nowhere else in the package, apart from the switches that were kept on purpose
(``label_bias="neighbourhood"`` and searching without ``exclude_ids``).

Axes: B queries, K neighbours of each, C classes, N memory rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from attnknn.checks import check_count
from attnknn.config import AttentionConfig
from attnknn.core.attention import (
    SUPPORT_FLOOR,
    NeighbourAttention,
    attention_entropy,
    attention_probs,
    vote,
)
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import with_floor
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import AdaptiveK, Attention, Distance, Method, Uniform, normalised, predict
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import Interval, compare_methods, mean_interval
from attnknn.evaluate.measure import (
    HIGHER_IS_BETTER,
    METRIC_NAMES,
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
    per_sample,
)
from attnknn.evaluate.tune import DISTANCE_TEMPERATURES, fit_adaptive_k
from attnknn.studies.common import Neighbourhoods, search_run
from attnknn.studies.theory import some_rows

# ---- Selection on the rows that are reported: how much better than they are do chosen settings
# look?
#
# The held-out rows are split in halves at random, many times. On each half, the setting chosen on
# that very half is compared with the setting chosen on the other half. Both are measured on the
# same
# rows, so the difference is what the choice alone adds. (It has the same mean as the difference
# between the half that chose and the half that did not, without the noise of unequal halves.)
#
# Axes: B rows, C classes, S settings.

SELECTION_KS = (1, 3, 5, 10, 20, 50)
CRITERIA = {"accuracy": "correct", "nll": "nll"}


def candidate_probs(found: Neighbours) -> list[Float[np.ndarray, "B C"]]:
    """Return the probabilities of every setting that may be chosen: k and distance temperature."""
    ks = [k for k in SELECTION_KS if k <= found.k]
    methods = [Uniform(k) for k in ks]
    methods += [Distance(k, t) for k in ks if k > 1 for t in DISTANCE_TEMPERATURES]
    return [predict(method, found) for method in methods]


def selection_optimism(
    candidates: Sequence[Float[np.ndarray, "B C"]],
    labels: Int[np.ndarray, " B"],
    *,
    criterion: str = "accuracy",
    n_halves: int = 200,
    seed: int = 0,
) -> pd.DataFrame:
    """Return, per random half, measures of the own choice minus those of the other half's choice.

    Args:
        candidates: Probabilities of each setting for the same rows.
        labels: Labels of the rows.
        criterion: "accuracy" or "nll"; what the choice looks at.
        n_halves: Random splits; each gives two rows.
        seed: Of the splits.

    Returns:
        Columns ``accuracy``, ``nll`` and ``ece``.
    """
    check_count("n_halves", n_halves)
    each = [per_sample(probs, labels) for probs in candidates]
    values = {name: np.stack([table[name] for table in each]) for name in ("correct", "nll")}
    sign = 1.0 if criterion == "accuracy" else -1.0
    judged = sign * values[CRITERIA[criterion]]  # (S, B)
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n_halves):
        half = np.zeros(len(labels), dtype=bool)
        half[rng.permutation(len(labels))[: len(labels) // 2]] = True
        chosen = {is_in: int(judged[:, half == is_in].mean(axis=1).argmax()) for is_in in (0, 1)}
        for is_in in (0, 1):
            own, other = chosen[is_in], chosen[1 - is_in]
            rows.append(_gaps(candidates, values, labels, half == is_in, own, other))
    return pd.DataFrame(rows)


def _gaps(
    candidates: Sequence[Float[np.ndarray, "B C"]],
    values: dict[str, Float[np.ndarray, "S B"]],
    labels: Int[np.ndarray, " B"],
    rows: Bool[np.ndarray, " B"],
    own: int,
    other: int,
) -> dict[str, float]:
    """Return own minus other in every measure, on some of the rows."""
    correct, nll = (values[name][own, rows] - values[name][other, rows] for name in values)
    eces = (
        0.0 if own == other else expected_calibration_error(candidates[place][rows], labels[rows])
        for place in (own, other)
    )
    return {"accuracy": correct.mean(), "nll": nll.mean(), "ece": next(eces) - next(eces)}


# ---- What every fault of the published code is made on: one run, one search, fits of equal size.
#
# Axes: B queries, K neighbours of each, C classes, N memory rows.

# Nothing but similarity: what a published part does is not hidden by other parts.
PLAIN_ATTENTION = AttentionConfig(
    similarity=True,
    situation=(),
    denoise=False,
    prototype_gate=False,
    floor=False,
    query_temperature=False,
    qk="none",
    distance_bias="none",
    label_bias="none",
    prototype_score=False,
    self_attention=False,
    value_path=False,
)


class Pair(NamedTuple):
    """Probabilities with the fault and without it, for the same rows.

    Attributes:
        faulty: As published.
        corrected: As it should be.
        labels: True classes of the rows.
        detail: One more thing that was measured, in words.
    """

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

    @cached_property
    def labels(self) -> Int[np.ndarray, " B"]:
        """True classes of the test rows."""
        return self.run.labels("test")

    @cached_property
    def n_fit(self) -> int:
        """Queries that every fit gets."""
        return min(self.max_queries, len(self.found.held_out_labels), len(self.run.bank))

    def fit(
        self, config: AttentionConfig, found: Neighbours, labels: Int[np.ndarray, " _"]
    ) -> Attention:
        """Return an attention fitted on queries whose neighbours were found."""
        fitting = replace(self.run.config.fitting, fit_epochs=self.epochs, fit_noise_max=0.0)
        found = found.nearest(min(self.k_eval, found.k))
        fitted = fit_on_neighbours(
            self.run.bank,
            found,
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

    @cached_property
    def held_out_probs(self) -> Float[np.ndarray, "B C"]:
        """Test probabilities of the run's kind of attention, fitted on held-out queries."""
        return self.on_test(self.fit_held_out(self.run.config.attention))

    @cached_property
    def plain_attention(self) -> Attention:
        """Weights from similarity alone, fitted on held-out queries."""
        return self.fit_held_out(PLAIN_ATTENTION)

    def on_test(self, method: Method) -> Float[np.ndarray, "_ C"]:
        """Return test probabilities of a method."""
        return predict(method, self.found.test)

    @cached_property
    def distance(self) -> Distance:
        """Distance weights whose temperature the held-out queries chose."""
        held_out, labels = self.found.held_out, self.found.held_out_labels
        tried = [Distance(self.k, temperature) for temperature in DISTANCE_TEMPERATURES]
        return min(tried, key=lambda each: negative_log_likelihood(predict(each, held_out), labels))


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


# ---- Costs of the published faults: paired differences, one figure, one table, one sentence each.

METRICS = ("accuracy", "nll", "ece")
UNCLEAR = "no difference at this size"
# A faulty vote may give a true class no probability at all: no interval, but no small matter.
INFINITE, UNDEFINED = "infinite", "undefined"
# What a better or a worse measure means for a fault that misleads, and for one that does harm.
EFFECTS = {
    (True, "better"): "looks better than it is",
    (True, "worse"): "looks worse than it is",
    (False, "better"): "better",
    (False, "worse"): "worse",
}
SELECTION_WRONG = "Settings were chosen on the rows that were then reported (here by {criterion})."
SELECTION_ROWS = "halves of the held-out rows (interval: of the mean over halves)"
CAPTION = (
    "What each published fault costs: faulty minus corrected with its interval, 95 % for all "
    "faults together. Of a selection: the mean over random halves with its own 95 % interval, "
    "which allows for halves that share rows."
)


@dataclass(frozen=True)
class Costs:
    """What each fault costs.

    Attributes:
        table: One row per fault and measure: ``fault``, ``wrong``, ``rows``, ``misleads``,
            ``metric``, ``difference`` (faulty minus corrected), ``low``, ``high``, ``effect``
            (``INFINITE`` or ``UNDEFINED`` where a loss is not finite), ``n_rows`` and ``n_seeds``.
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
    n_halves: int = 200,
    progress: bool = True,
) -> Costs:
    """Return the cost of every fault.

    Args:
        runs: One trained run a seed.
        k_eval: Neighbours that an attention weighs.
        k_baseline: Neighbours of plain votes.
        errata_epochs: Epochs of every fit, faulty or corrected.
        errata_queries: The most queries that a fit gets.
        n_halves: Random halves for the selection on reported rows.
        progress: Show a progress bar.
    """
    options = {"epochs": errata_epochs, "max_queries": errata_queries}
    cases = [Case(run, k_eval, k_baseline, **options) for run in runs]
    level = 1 - 0.05 / len(FAULTS)  # one look per fault (Bonferroni), intervals included
    tables, details = [], {}
    for fault in tqdm(FAULTS, desc="faults", disable=not progress, leave=False):
        pairs = [fault.make(case) for case in cases]
        tables.append(paired_cost(fault, pairs, level=level))
        details[fault.name] = pairs[0].detail
    tables += [selection_cost(cases, criterion, n_halves) for criterion in CRITERIA]
    right = np.mean([case.held_out_probs.argmax(axis=1) == case.labels for case in cases])
    noise = 1.96 * np.sqrt(right * (1 - right) / len(cases[0].labels))
    return Costs(pd.concat(tables, ignore_index=True), details, float(noise))


def paired_cost(fault: Fault, pairs: Sequence[Pair], *, level: float = 0.95) -> pd.DataFrame:
    """Return faulty minus corrected in every measure, over the seeds."""
    results = {
        "faulty": [pair.faulty for pair in pairs],
        "corrected": [pair.corrected for pair in pairs],
    }
    table = compare_methods(results, pairs[0].labels, "corrected", metrics=METRICS, level=level)
    effects = [_effect(fault.misleads, row) for row in table.to_dict("records")]
    described = {"fault": fault.name, "wrong": fault.wrong, "rows": fault.rows}
    table = table.assign(**described, misleads=fault.misleads, effect=effects)
    return table[_COLUMNS]


def _effect(misleads: bool, row: dict) -> str:
    """Name what a paired difference shows; one that is not finite has a name of its own."""
    if row["verdict"] == "undefined":
        return INFINITE if row["difference"] == np.inf else UNDEFINED
    return EFFECTS.get((misleads, row["verdict"]), UNCLEAR)


def selection_cost(cases: Sequence[Case], criterion: str, n_halves: int) -> pd.DataFrame:
    """Return what choosing on the reported rows adds, with the interval of its mean."""
    gaps = pd.concat(
        [
            selection_optimism(
                candidate_probs(case.found.held_out),
                case.found.held_out_labels,
                criterion=criterion,
                n_halves=n_halves,
                seed=case.run.config.seed,
            )
            for case in cases
        ]
    )
    name, found = METRIC_NAMES[criterion], {each: halves_interval(gaps[each]) for each in METRICS}
    rows = [
        {
            "fault": f"selection by reported {name}",
            "wrong": SELECTION_WRONG.format(criterion=name),
            "rows": SELECTION_ROWS,
            "misleads": True,
            "metric": metric,
            "difference": found[metric].mean,
            "low": found[metric].low,
            "high": found[metric].high,
            "effect": _selection_effect(found[metric], metric),
            "n_rows": len(cases[0].found.held_out_labels) // 2,
            "n_seeds": len(cases),
        }
        for metric in METRICS
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


_COLUMNS = "fault wrong rows misleads metric difference low high effect n_rows n_seeds".split()


def halves_interval(gaps: pd.Series, *, level: float = 0.95) -> Interval:
    """Return the mean over random splits with an interval that more splits cannot shrink to none.

    The splits share their rows, so their spread over the root of their number would be far too
    small. For halves, Nadeau and Bengio (2003) add 1 to 1 / n under the root; the two halves of a
    split are averaged first.

    Args:
        gaps: One number a half, the two of a split next to each other.
        level: Confidence of the interval.
    """
    values = gaps.to_numpy(dtype=np.float64).reshape(-1, 2)
    with np.errstate(invalid="ignore"):  # infinite losses
        splits = values.mean(axis=1)
        found = mean_interval(splits, level=level)
    half = (found.high - found.mean) * np.sqrt(1 + found.n)
    return found._replace(low=float(found.mean - half), high=float(found.mean + half))


def _selection_effect(found: Interval, metric: str) -> str:
    """Call an effect clear where the interval of its mean excludes 0.

    The own choice is the best on its own half by construction: that no half contradicts it says
    nothing.
    """
    if not np.isfinite(found.mean):
        return INFINITE if found.mean == np.inf else UNDEFINED
    low, high = (found.low, found.high) if metric in HIGHER_IS_BETTER else (-found.high, -found.low)
    if low > 0:
        return EFFECTS[True, "better"]
    return EFFECTS[True, "worse"] if high < 0 else UNCLEAR


def cost_table(costs: Costs) -> pd.DataFrame:
    """Return one row a fault: its cost in every measure with the interval, ready to print."""
    rows = []
    for name, mine in costs.table.groupby("fault", sort=False):
        first = mine.iloc[0]
        shown = {_title(row["metric"]): _cell(row) for row in mine.to_dict("records")}
        rows.append({"fault": name, "measured on": first["rows"], **shown})
    return pd.DataFrame(rows)


def verdict(costs: Costs) -> str:
    """Return, in Markdown, what each fault was and what it makes better or worse."""
    lines = []
    for name, mine in costs.table.groupby("fault", sort=False):
        parts = [mine["wrong"].iloc[0], effect_sentence(mine), costs.details.get(name, "")]
        lines.append(f"- **{name}**: {' '.join(part for part in parts if part)}")
    first = costs.table.iloc[0]
    note = (
        f"Faulty minus corrected, paired, intervals of 95 % over all faults together; "
        f"{first['n_seeds']} seed(s). For selection: the 95 % interval of the mean over halves. "
        f"One accuracy on these test rows is uncertain by ±{100 * costs.accuracy_noise:.2f} "
        "points: smaller differences between separate measurements, without a paired test, mean "
        "nothing."
    )
    return "\n".join([*lines, "", note])


def effect_sentence(rows: pd.DataFrame) -> str:
    """Return what one fault does to the measures, in words."""
    clear = [row for row in rows.to_dict("records") if row["effect"] != UNCLEAR]
    if not clear:
        return "It makes no difference at this size."
    phrases = [
        f"{METRIC_NAMES[row['metric']]} {row['effect'].replace('looks', 'look')}"
        + ("" if _cell(row) == row["effect"] else f" ({_cell(row)})")
        for row in clear
    ]
    return f"It makes {', '.join(phrases)}."


def _title(metric: str) -> str:
    unit = " (points)" if metric in HIGHER_IS_BETTER else ""
    return f"{METRIC_NAMES[metric]}{unit}"


def _cell(row: dict) -> str:
    if not np.isfinite(row["difference"]):
        return {np.inf: INFINITE, -np.inf: f"minus {INFINITE}"}.get(row["difference"], UNDEFINED)
    scale, digits = (100, 2) if row["metric"] in HIGHER_IS_BETTER else (1, 4)
    shown = [f"{scale * row[name]:+.{digits}f}" for name in ("difference", "low", "high")]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"
