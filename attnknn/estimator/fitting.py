"""Fitting: distinct rows and labels become an embedding, a memory and what was learned from it.

Axes: N distinct rows, C classes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32, Int

from attnknn.calibrate import apply_calibration, fit_floor_and_temperature
from attnknn.classify import Attention, at_k, normalised
from attnknn.config import FittingConfig
from attnknn.estimator.embedding import METRICS, UNSCALED, Embedding, charted, trained
from attnknn.estimator.learning import (
    Learned,
    Queries,
    blank_attention,
    learn,
)
from attnknn.holdout import query_folds
from attnknn.measure import negative_log_likelihood
from attnknn.memory import MemoryBank
from attnknn.neighbours import Neighbours
from attnknn.tables import is_number

MAX_QUERIES = 5000  # more queries teach the few parameters of the attention nothing
JUDGES = 1000  # queries that choose between embeddings
NARROW = 100  # columns up to which an array may be a table
NETWORK_ROWS = 1000  # rows from which a network has enough to learn
TRAINED_MARGIN = 0.97  # share of the NLL of plain features that a network has to reach
NETWORK = "mlp-periodic"
K_LIMITS = (5, 50)
BATCH_LIMITS = (32, 200)
FALLS = (0.01, 0.05, 0.15, 0.5)  # of similarity between the first and the last neighbour
# So far away nothing counts any more. Among nearly collinear rows a stretch that suits most would
# take others to -10 000, and the fit with them.
FARTHEST = -3.0
SMALLEST_FALL = 1e-6  # below this all neighbours are equally near


@dataclass(frozen=True)
class Plan:
    """What a fit was asked for.

    Attributes:
        embedder: "auto", "identity", the name of a backbone, or a function.
        metric: "auto" or one of ``METRICS``; counts where no network is trained.
        n_neighbours: Neighbours that vote; None chooses.
        label_noise: Share of wrong labels; None estimates it.
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
        neighbours: What the queries found in it.
        query_ids: Which distinct rows the queries are.
        order: Distinct row of each memory row.
        waiting: Unit rows of the queries where they are not in the memory yet.
        stretch: By how much differences of similarity were enlarged.
    """

    name: str
    embedding: Embedding
    bank: MemoryBank
    neighbours: Neighbours
    query_ids: Int[np.ndarray, " B"]
    order: Int[np.ndarray, " M"]
    waiting: Float32[np.ndarray, "B D"] | None = None
    stretch: float = 1.0


@dataclass(frozen=True)
class Fitted:
    """A classifier's inside.

    Attributes:
        name: Metric or backbone that was chosen.
        embedding: Inputs to unit rows.
        bank: The memory, all distinct rows in it.
        order: Distinct row of each memory row.
        learned: Attention, calibration and held-out probabilities.
        held_out_labels: Labels of the rows that ``learned`` holds probabilities of.
        stretch: By how much differences of similarity are enlarged after a search.
    """

    name: str
    embedding: Embedding
    bank: MemoryBank
    order: Int[np.ndarray, " N"]
    learned: Learned
    held_out_labels: Int[np.ndarray, " H"]
    stretch: float


def fit_all(data: Data, plan: Plan) -> Fitted:
    """Choose or train the embedding, build the memory, and learn from held-out neighbours."""
    makers = list(_makers(data, plan))
    tried, best = None, np.inf
    for make in makers:
        trial, nll = _with_best_stretch(make(), data, plan)
        # Held-out rows choose. What was trained has more ways to look good by chance.
        if nll < best * (1.0 if trial.waiting is None else TRAINED_MARGIN):
            tried, best = trial, nll
    weights = None if data.weights is None else data.weights[tried.query_ids]
    learned = learn(
        tried.bank,
        Queries(tried.neighbours, data.labels[tried.query_ids], weights),
        # The queries that no attention has seen set a calibration of their own: no folds.
        fitting=FittingConfig(fit_batch_size=_batch_size(len(tried.query_ids)), fit_folds=0),
        label_noise=plan.label_noise,
        seed=plan.seed,
        progress=plan.progress,
    )
    labels = data.labels[tried.query_ids[learned.held_out]]
    order = _complete(tried, data)
    # A query of fit had one row fewer to ask than a new one has: itself, or all held-out rows.
    method = at_k(learned.method, _k(data, plan, len(order)))
    learned = replace(learned, method=method)
    return Fitted(tried.name, tried.embedding, tried.bank, order, learned, labels, tried.stretch)


def _makers(data: Data, plan: Plan) -> Iterator[Callable[[], Trial]]:
    """Yield what makes each candidate; see ``AttnKNNClassifier`` for the rule."""
    if isinstance(plan.embedder, str) and plan.embedder not in ("auto", "identity"):
        yield partial(_network_trial, data, plan, plan.embedder)
        return
    names = [plan.metric] if plan.metric != "auto" else _metrics_for(data, plan.embedder)
    yield from (partial(_chart_trial, data, plan, name) for name in names)
    large = len(data.labels) >= NETWORK_ROWS
    suits = data.is_table and large and _has_numbers(data.inputs)
    if plan.embedder == "auto" and plan.metric == "auto" and suits:
        yield partial(_network_trial, data, plan, NETWORK)


def _has_numbers(inputs: Any) -> bool:
    """Return whether there is a number for the network's periodic features to read."""
    return not isinstance(inputs, pd.DataFrame) or any(is_number(inputs[name]) for name in inputs)


def _metrics_for(data: Data, embedder: str | Callable) -> list[str]:
    if isinstance(data.inputs, pd.DataFrame):
        return ["standardised", "quantile"]  # a category has no unit: its columns are scaled
    width = data.inputs.shape[1]
    fits = {"cosine": width > 1, "quantile": width <= NARROW}  # one number has no direction
    names = UNSCALED if callable(embedder) else METRICS
    return [name for name in names if fits.get(name, True)]


def default_k(n_rows: int, n_classes: int) -> int:
    """Return how many neighbours to ask: half of an average class, within limits."""
    return int(np.clip(n_rows // (2 * n_classes), *K_LIMITS))


def _k(data: Data, plan: Plan, available: int) -> int:
    return min(plan.n_neighbours or default_k(len(data.labels), data.n_classes), available)


def _chart_trial(data: Data, plan: Plan, metric: str) -> Trial:
    """Ask memory rows themselves: no label shaped the embedding, so none has to be held out."""
    function = plan.embedder if callable(plan.embedder) else None
    embedding, rows = charted(data.inputs, metric, impute=plan.impute, function=function)
    order = np.arange(len(rows))
    bank = _bank(data, plan, rows, order)
    ids = _sample(len(rows), MAX_QUERIES, plan.seed)
    # NOTE: leakage guard. A row finds neither itself nor its copies, which are the same entry.
    found = bank.search(rows[ids], _k(data, plan, len(bank) - 1), exclude_ids=ids)
    return Trial(metric, embedding, bank, found, ids, order)


def _network_trial(data: Data, plan: Plan, backbone: str) -> Trial:
    """Hold rows out from the network's training, and ask them."""
    held_out = _held_out(data, plan.seed)
    embedding = trained(
        data.inputs,
        data.labels,
        held_out,
        backbone=backbone,
        n_classes=data.n_classes,
        settings=plan.training,
        impute=plan.impute,
        seed=plan.seed,
        progress=plan.progress,
    )
    rows = embedding.rows(data.inputs, progress=plan.progress)
    order = np.setdiff1d(np.arange(len(rows)), held_out)
    bank = _bank(data, plan, rows[order], order)
    found = bank.search(rows[held_out], _k(data, plan, len(bank)))
    return Trial(backbone, embedding, bank, found, held_out, order, waiting=rows[held_out])


def _with_best_stretch(trial: Trial, data: Data, plan: Plan) -> tuple[Trial, float]:
    """Return the trial with similarities on the scale that suits it, and its held-out NLL.

    How fast similarity falls from the first to the last neighbour depends on the metric, the
    number of rows and their dimension. A monotone stretch brings the typical fall to one of a few
    sizes, from nearly equal weights to a narrow kernel; an attention that has learned nothing yet
    is asked which of them predicts best.
    """
    which = torch.from_numpy(_sample(len(trial.query_ids), JUDGES, plan.seed))
    judges, labels = trial.neighbours.of_queries(which), data.labels[trial.query_ids[which]]
    fall = float((judges.scores[:, 0] - judges.scores[:, -1]).median())
    sizes = [size / fall for size in FALLS] if fall > SMALLEST_FALL else [1.0]
    blank = blank_attention(trial.bank)
    tried = {}
    for stretch in sizes:
        votes = Attention(judges.k, blank).votes(stretch_scores(judges, stretch))
        probs = normalised(votes)
        calibration = fit_floor_and_temperature(probs, labels)
        tried[stretch] = negative_log_likelihood(apply_calibration(probs, calibration), labels)
    stretch = min(tried, key=tried.get)
    found = stretch_scores(trial.neighbours, stretch)
    return replace(trial, neighbours=found, stretch=stretch), tried[stretch]


def stretch_scores(neighbours: Neighbours, stretch: float) -> Neighbours:
    """Return the neighbours with similarities 1 - stretch * (1 - cosine), -3 where that is less."""
    stretched = 1 - stretch * (1 - neighbours.scores)
    return replace(neighbours, scores=stretched.clamp(min=FARTHEST))


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


def _batch_size(n_queries: int) -> int:
    """Return a batch that makes for several steps an epoch also where queries are few."""
    return int(np.clip(n_queries // 12, *BATCH_LIMITS))


def _sample(n_rows: int, limit: int, seed: int) -> Int[np.ndarray, " M"]:
    return np.sort(np.random.default_rng(seed).permutation(n_rows)[:limit])
