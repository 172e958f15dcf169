"""Fitting: distinct rows and labels become an embedding, a memory and what was learned from it.

All that is learned comes from queries whose own label took no part in what their neighbours say:
memory rows that were left out of their own search, or rows that a network has not been trained on.

Axes: N distinct rows, B queries, M of them in a part, K neighbours of each, C classes.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32, Int
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state

from attnknn.checks import check_count, check_one_of, check_range
from attnknn.config import BACKBONE_NAMES, check_field_names
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import query_folds
from attnknn.core.neighbours import Neighbours
from attnknn.core.noise import corrected_nll
from attnknn.core.refine import MAX_CELLS, REFINE, Learned, learn
from attnknn.data.tables import is_number
from attnknn.estimator.embedding import METRICS, SUPERVISED, UNSCALED, Embedding, charted, trained
from attnknn.progress import progress_bar

log = logging.getLogger("attnknn")

MAX_QUERIES = 3000  # more teach the few numbers of the attention nothing
MOST_QUERIES = 20_000  # where everything was asked for
JUDGES = 1000  # queries that choose between embeddings
FEWEST_QUERIES = 9  # from fewer nothing can be held out
NARROW = 100  # columns up to which an array may be a table
# What was shaped by labels has more ways to look good by chance: nats that it has to win by.
SUPERVISED_MARGIN = 0.01
NETWORK, NETWORK_ROWS = "mlp-periodic", 1000  # rows from which a network has enough to learn
TRAINED_MARGIN = 0.97  # share of the NLL of plain features that a network has to reach
GLANCE_ROWS, GLANCE_EPOCHS = 3000, 8  # of a training that shows whether a whole one may win
HOPELESS = 1.15  # times the NLL of plain features after a glance
CASES_OF_A_KIND = 5  # equal rows in the mean, from which rows are a few kinds
K_LIMITS = (5, 50)


@dataclass(frozen=True)
class Plan:
    """What a fit was asked for.

    Attributes:
        embedder: "auto", "identity", the name of a backbone, or a function.
        metric: "auto" or one of ``METRICS``; counts where no network is trained.
        n_neighbours: Neighbours that vote; None chooses.
        label_noise: Share of wrong labels; None estimates it.
        refine: One of ``REFINE``.
        time_limit: Seconds after which nothing more is tried; None waits.
        impute: Whether missing numbers may occur.
        training: Settings of a network's training.
        trust_neighbours: Rows that judge a label.
        index: How neighbours are searched.
        seed: Decides everything random.
        progress: Show progress bars.
    """

    embedder: str | Callable[[Any], Any]
    metric: str
    n_neighbours: int | None
    label_noise: float | None
    refine: str
    time_limit: float | None
    impute: bool
    training: Mapping[str, Any]
    trust_neighbours: int
    index: str
    seed: int
    progress: bool


@dataclass(frozen=True)
class Data:
    """Distinct rows.

    Attributes:
        inputs: Array or table; what a function of the user's own made of the rows.
        labels: Class of each.
        weights: How much each counts; None counts all alike.
        n_classes: C.
        is_table: Whether the columns have meanings of their own, so that a network may help.
    """

    inputs: Any
    labels: Int[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"] | None
    n_classes: int
    is_table: bool


@dataclass(frozen=True)
class Trial:
    """One embedding with its memory, and queries that no label of theirs has shaped.

    Attributes:
        name: Metric or backbone.
        embedding: Inputs to unit rows.
        bank: The memory so far.
        query_ids: Which distinct rows may be asked.
        order: Distinct row of each memory row.
        waiting: Unit rows of the queries where they are not in the memory yet.
    """

    name: str
    embedding: Embedding
    bank: MemoryBank
    query_ids: Int[np.ndarray, " B"]
    order: Int[np.ndarray, " N"]
    waiting: Float32[np.ndarray, "B D"] | None = None

    def neighbours(self, chosen: Int[np.ndarray, " M"], k: int) -> Neighbours:
        """Return what some of the queries find, by their place among them."""
        if self.waiting is not None:
            return self.bank.search(self.waiting[chosen], min(k, len(self.bank)))
        ids = self.query_ids[chosen]
        # NOTE: leakage guard. A row finds neither itself nor its copies, which are the same entry.
        return self.bank.search(
            self.bank.rows.numpy()[ids], min(k, len(self.bank) - 1), exclude_ids=ids
        )


@dataclass(frozen=True)
class Fitted:
    """A classifier's inside.

    Attributes:
        name: Metric or backbone that was chosen.
        embedding: Inputs to unit rows.
        bank: The memory, all distinct rows in it.
        order: Distinct row of each memory row.
        learned: Attention, wrong labels and held-out probabilities.
        held_out_labels: Labels of the rows that ``learned`` holds probabilities of.
    """

    name: str
    embedding: Embedding
    bank: MemoryBank
    order: Int[np.ndarray, " N"]
    learned: Learned
    held_out_labels: Int[np.ndarray, " H"]


def fit_all(data: Data, plan: Plan) -> Fitted:
    """Choose or train the embedding, build the memory, and learn from held-out neighbours."""
    started = time.perf_counter()
    trial = _best_trial(data, plan, started)
    k = k_for(data, plan, len(data.labels))
    limit = MOST_QUERIES if plan.refine == "full" else MAX_QUERIES
    limit = max(FEWEST_QUERIES, min(limit, MAX_CELLS // (k * data.n_classes)))
    chosen = _sample(len(trial.query_ids), limit, plan.seed)
    ids = trial.query_ids[chosen]
    weights = None if data.weights is None else data.weights[ids]
    with progress_bar(
        title="refine", total=REFINE[plan.refine][-1], disable=not plan.progress
    ) as progress:

        def tick() -> bool:
            progress.update()
            return _time_left(plan, started) > 0

        learned = learn(
            trial.neighbours(chosen, k),
            data.labels[ids],
            label_noise=_share_asked(data, plan),
            weights=weights,
            refine=plan.refine,
            seed=plan.seed,
            tick=tick,
        )
    order = _complete(trial, data)
    # A query of fit had one row fewer to ask than a new one has: itself, or all held-out rows.
    learned = learned.at_k(min(k, len(order)))
    return Fitted(trial.name, trial.embedding, trial.bank, order, learned, data.labels[ids])


def _share_asked(data: Data, plan: Plan) -> float | None:
    """Return the share of wrong labels that is known; None where it can be found out.

    Of a few kinds of rows it cannot: how labels spread within a kind is all that can be seen, and
    wrong labels spread alike. There labels are taken as they are given.
    """
    few_kinds = data.weights is not None and data.weights.mean() > CASES_OF_A_KIND
    return 0.0 if plan.label_noise is None and few_kinds else plan.label_noise


def _time_left(plan: Plan, started: float) -> float:
    if plan.time_limit is None:
        return math.inf
    return plan.time_limit - (time.perf_counter() - started)


# ---- Which embedding: the prior, which needs no fit, is asked what it says of held-out rows.


def _best_trial(data: Data, plan: Plan, started: float) -> Trial:
    """Return the embedding under which held-out rows are predicted best."""
    if isinstance(plan.embedder, str) and plan.embedder not in ("auto", "identity"):
        log.info("training %s on %d rows", plan.embedder, len(data.labels))
        return _network_trial(data, plan, plan.embedder)
    names = [plan.metric] if plan.metric != "auto" else _metrics_for(data, plan.embedder)
    trials = [_chart_trial(data, plan, names[0])]
    lowest = math.nan if len(names) == 1 else _judged(trials[0], data, plan)
    best = trials[0]
    for name in names[1:]:
        if _time_left(plan, started) <= 0:
            break
        trial = _chart_trial(data, plan, name)
        loss = _judged(trial, data, plan) + SUPERVISED_MARGIN * (name in SUPERVISED)
        if loss < lowest:
            best, lowest = trial, loss
    if plan.embedder == "auto" and plan.metric == "auto" and _may_train(data):
        best = _network_if_better(data, plan, best, lowest, started)
    return best


def _judged(trial: Trial, data: Data, plan: Plan) -> float:
    """Return the prior's loss of held-out labels, wrong ones allowed for."""
    chosen = _sample(len(trial.query_ids), JUDGES, plan.seed)
    labels = data.labels[trial.query_ids[chosen]]
    found = trial.neighbours(chosen, k_for(data, plan, len(data.labels)))
    learned = learn(found, labels, label_noise=_share_asked(data, plan), refine="none")
    matrix = learned.wrong.transition
    error = 0.0 if matrix is None else torch.from_numpy(matrix)
    logs = torch.from_numpy(learned.probs).log()
    return float(corrected_nll(logs, torch.from_numpy(labels), error))


def _metrics_for(data: Data, embedder: str | Callable) -> list[str]:
    """Return the metrics that suit the rows."""
    if isinstance(data.inputs, pd.DataFrame):
        # A category has no unit: its columns are scaled.
        return [name for name in METRICS if name not in UNSCALED]
    width = data.inputs.shape[1]
    fits = {"cosine": width > 1}  # one number has no direction
    fits |= dict.fromkeys(("quantile", *SUPERVISED), width <= NARROW)
    names = UNSCALED if callable(embedder) else METRICS
    return [name for name in names if fits.get(name, True)]


def _may_train(data: Data) -> bool:
    """Return whether a network has enough rows, and numbers for its periodic features to read."""
    if not data.is_table or len(data.labels) < NETWORK_ROWS:
        return False
    inputs = data.inputs
    return not isinstance(inputs, pd.DataFrame) or any(is_number(inputs[name]) for name in inputs)


def _network_if_better(data: Data, plan: Plan, best: Trial, lowest: float, started: float) -> Trial:
    """Return a trained network where it predicts held-out rows clearly better.

    A glance, a few epochs on a part of the rows, tells first whether a whole training may win and
    how long it would take.
    """
    if math.isnan(lowest):
        lowest = _judged(best, data, plan)
    glance_start = time.perf_counter()
    few = _sample(len(data.labels), GLANCE_ROWS, plan.seed)
    part = Data(
        inputs=data.inputs.iloc[few] if isinstance(data.inputs, pd.DataFrame) else data.inputs[few],
        labels=data.labels[few],
        weights=None if data.weights is None else data.weights[few],
        n_classes=data.n_classes,
        is_table=True,
    )
    log.info("trying %s on %d of %d rows", NETWORK, len(few), len(data.labels))
    settings = {"epochs": GLANCE_EPOCHS} | dict(plan.training)
    glance = _judged(_network_trial(part, plan, NETWORK, settings), part, plan)
    taken = time.perf_counter() - glance_start
    seconds = 5 * taken * max(1.0, len(data.labels) / GLANCE_ROWS)
    if glance > HOPELESS * lowest:
        log.info("%s will not win: %.3f against %.3f", NETWORK, glance, lowest)
        return best
    if seconds > _time_left(plan, started):
        log.info("%s would take about %.0f seconds: left out", NETWORK, seconds)
        return best
    log.info("training %s, about %.0f seconds", NETWORK, seconds)
    trial = _network_trial(data, plan, NETWORK)
    return trial if _judged(trial, data, plan) < TRAINED_MARGIN * lowest else best


def _chart_trial(data: Data, plan: Plan, metric: str) -> Trial:
    """Ask memory rows themselves: no label of theirs has to be held out."""
    function = plan.embedder if callable(plan.embedder) else None
    embedding, rows = charted(
        data.inputs, metric, impute=plan.impute, function=function, labels=data.labels
    )
    order = np.arange(len(rows))
    return Trial(metric, embedding, _bank(data, plan, rows, order), order, order)


def _network_trial(
    data: Data, plan: Plan, backbone: str, settings: Mapping[str, Any] | None = None
) -> Trial:
    """Hold rows out from the network's training, and ask them."""
    held_out = _held_out(data, plan.seed)
    embedding = trained(
        data.inputs,
        data.labels,
        held_out,
        backbone=backbone,
        n_classes=data.n_classes,
        settings=plan.training if settings is None else settings,
        impute=plan.impute,
        seed=plan.seed,
        progress=plan.progress,
    )
    rows = embedding.rows(data.inputs, progress=plan.progress)
    order = np.setdiff1d(np.arange(len(rows)), held_out)
    bank = _bank(data, plan, rows[order], order)
    return Trial(backbone, embedding, bank, held_out, order, waiting=rows[held_out])


def default_k(n_rows: int, n_classes: int) -> int:
    """Return how many neighbours to ask: half of an average class, within limits."""
    return int(np.clip(n_rows // (2 * n_classes), *K_LIMITS))


def k_for(data: Data, plan: Plan, available: int) -> int:
    """Return how many neighbours vote."""
    return min(plan.n_neighbours or default_k(len(data.labels), data.n_classes), available)


def _complete(trial: Trial, data: Data) -> Int[np.ndarray, " N"]:
    """Put the rows that were held out into the memory too; return the order of its rows."""
    if trial.waiting is None:
        return trial.order
    ids = trial.query_ids
    weights = None if data.weights is None else data.weights[ids]
    trial.bank.add(trial.waiting, data.labels[ids], weights=weights)
    return np.concatenate([trial.order, ids])


def _bank(
    data: Data, plan: Plan, rows: Float32[np.ndarray, "M D"], ids: Int[np.ndarray, " M"]
) -> MemoryBank:
    return MemoryBank(
        rows,
        data.labels[ids],
        n_classes=data.n_classes,
        index=plan.index,
        trust_neighbours=plan.trust_neighbours,
        weights=None if data.weights is None else data.weights[ids],
    )


def _held_out(data: Data, seed: int) -> Int[np.ndarray, " M"]:
    """Return a fifth of the rows, but no more than the attention can use."""
    n_rows = len(data.labels)
    n_folds = max(2, min(5, n_rows // 2), -(-n_rows // MAX_QUERIES))
    return np.flatnonzero(query_folds(data.labels, n_folds, seed=seed) == 0)


def _sample(n_rows: int, limit: int, seed: int) -> Int[np.ndarray, " M"]:
    return np.sort(np.random.default_rng(seed).permutation(n_rows)[:limit])


# ---- Parameters: what was asked for becomes a plan, or is refused by name.

MISSING = ("error", "impute")
NEW_CLASSES = ("error", "add")


def plan_for(model: BaseEstimator) -> Plan:
    """Return what a classifier's parameters ask for, or refuse it."""
    if model.n_neighbors != "auto":
        check_count("n_neighbors", model.n_neighbors)
    if not callable(model.embedder) and not str(model.embedder).startswith("timm:"):
        check_one_of("embedder", model.embedder, ("auto", *BACKBONE_NAMES))
    check_one_of("metric", model.metric, ("auto", *METRICS))
    if callable(model.embedder) and model.metric not in ("auto", *UNSCALED):
        raise ValueError(
            f"metric must be 'auto' or one of {UNSCALED} for an embedder of your own, whose "
            f"numbers are not scaled, got metric={model.metric!r}"
        )
    check_one_of("missing", model.missing, MISSING)
    check_one_of("new_classes", model.new_classes, NEW_CLASSES)
    if model.label_noise != "auto":
        check_number("label_noise", model.label_noise)
    check_reject(model.reject_below)
    if model.training is not None and not isinstance(model.training, Mapping):
        raise ValueError(f"training must be settings by name, got training={model.training!r}")
    check_field_names(model.training or {})
    check_number("verbose", model.verbose)
    check_one_of("refine", model.refine, tuple(REFINE))
    if model.time_limit is not None:
        check_range("time_limit", check_number("time_limit", model.time_limit), low=0)
    check_jobs(model.n_jobs)
    if not isinstance(model.index, str):
        raise ValueError(f"index must be the name of an index, got index={model.index!r}")
    return Plan(
        embedder=model.embedder,
        metric=model.metric,
        n_neighbours=None if model.n_neighbors == "auto" else int(model.n_neighbors),
        label_noise=None if model.label_noise == "auto" else float(model.label_noise),
        refine=model.refine,
        time_limit=None if model.time_limit is None else float(model.time_limit),
        impute=model.missing == "impute",
        training=model.training or {},
        trust_neighbours=check_count("trust_neighbours", model.trust_neighbours),
        index=model.index,
        seed=_seed(model.random_state),
        progress=model.verbose > 0,
    )


def check_reject(reject_below: Any) -> None:
    """Refuse what is no threshold; infinity, never to answer, is one."""
    if reject_below is None:
        return
    check_number("reject_below", reject_below)
    if reject_below != math.inf:
        check_range("reject_below", reject_below, low=0, high=1)


def check_jobs(n_jobs: Any) -> int | None:
    """Return a number of threads as joblib counts them, from the end where it is negative."""
    if n_jobs is None:
        return None
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, Integral) or n_jobs == 0:
        raise ValueError(f"n_jobs must be None or an integer other than 0, got {n_jobs=}")
    return int(n_jobs)


def _seed(random_state: Any) -> int:
    """Return a seed; a generator gives another one every time."""
    try:
        return int(check_random_state(random_state).randint(2**31 - 1))
    except ValueError:
        rule = "be None, a RandomState or an integer from 0 to 2**32 - 1"
        raise ValueError(f"random_state must {rule}, got {random_state=}") from None


def check_noise(label_noise: Any, n_classes: int) -> None:
    """Refuse a share of wrong labels from which nothing can be learned: that of chance."""
    if label_noise != "auto":
        check_range("label_noise", label_noise, low=0, high=1 - 1 / n_classes, high_open=True)


def check_number(name: str, value: Any) -> float:
    """Return a number as a float, or refuse it."""
    if isinstance(value, Real):
        with suppress(OverflowError):  # an integer beyond all floats
            return float(value)
    raise ValueError(f"{name} must be a number, got {name}={value!r}")
