"""The contest of all studies: runs → one search → every method → a tidy table with intervals.

Each method is fitted on the same held-out queries of the same search: untuned votes, tuned ones,
and the attention. Studies differ in what they do to the memory first.

Axes: B queries, C classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure

from attnknn import figures as plot
from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import LabelError
from attnknn.core.fit import FittedAttention, fit_on_neighbours, judged_nll
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import Attention, Distance, Method, Uniform, explain, predict
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import RESAMPLED_METRICS, compare_in_families, row_intervals
from attnknn.evaluate.measure import accuracy, negative_log_likelihood, summarise
from attnknn.evaluate.tune import BASELINES, KS, FittedMethod, candidates, fit_method

METRICS = ("accuracy", "macro_f1", "nll", "brier", "ece")
TUNED_DEPTH = max(KS)  # neighbours that a tuned baseline may use, where the memory has them
# Method name to probabilities; "_": held-out and test rows differ in number.
Predictions = dict[str, Float[np.ndarray, "_ C"]]
SeedTables = Mapping[str, Sequence[Float[np.ndarray, "_ C"]]]
Groups = Mapping[str, Int[np.ndarray, " _"]]  # name of a group of classes to its class ids

# ---- One search, and the methods that are fitted on its held-out queries.


@dataclass(frozen=True)
class Neighbourhoods:
    """One search of a run: held-out queries to fit on, test queries to report on."""

    held_out: Neighbours
    held_out_labels: Int[np.ndarray, " B"]
    test: Neighbours

    def nearest(self, k: int) -> "Neighbourhoods":
        """Return the first k neighbours, or all where fewer were searched."""
        k = min(k, self.test.k)
        return Neighbourhoods(self.held_out.nearest(k), self.held_out_labels, self.test.nearest(k))

    def kept(self, k: int) -> "Neighbourhoods":
        """Return `nearest` in tensors of its own, so that a deeper search is not held with it."""
        here = self.nearest(k)
        held_out, test = (
            replace(each, scores=each.scores.clone(), ids=each.ids.clone())
            for each in (here.held_out, here.test)
        )
        return Neighbourhoods(held_out, self.held_out_labels, test)


def search_run(run: TrainedRun, k: int, *, bank: MemoryBank | None = None) -> Neighbourhoods:
    """Return the k nearest memory rows of the validation and the test rows; k is lowered to N.

    Args:
        run: Whose rows are asked.
        k: Neighbours of each.
        bank: The memory; None takes the run's own.
    """
    bank = run.bank if bank is None else bank
    k = min(k, len(bank))
    # NOTE: what is fitted sees the validation rows; the test rows only report.
    return Neighbourhoods(
        bank.search(run.rows("val"), k), run.labels("val"), bank.search(run.rows("test"), k)
    )


class Recipe(NamedTuple):
    """How an attention is fitted: which parts it has, the settings of the fit, and the seed."""

    attention: AttentionConfig
    fitting: FittingConfig
    seed: int

    @classmethod
    def of(cls, run: TrainedRun) -> "Recipe":
        """Return the recipe of a run's own attention."""
        return cls(run.config.attention, run.config.fitting, run.config.seed)


def fit_attention(
    bank: MemoryBank,
    found: Neighbourhoods,
    recipe: Recipe,
    *,
    label_error: LabelError | None = None,
    weights: Float[np.ndarray, " B"] | None = None,
) -> FittedAttention:
    """Return an attention fitted on the held-out queries of a search.

    How long to fit, and how much too sure of itself a fit is, depends on memory, queries and k, so
    both are found out here: what suits one memory would hold another one's fit back, while every
    baseline beside it is tuned anew.

    Args:
        bank: The memory that votes.
        found: The held-out queries' neighbours there.
        recipe: Parts, settings and seed.
        label_error: Share of wrong held-out labels, or how classes turn into labels; None leaves
            it to the settings.
        weights: How much each held-out query counts; None counts all alike.
    """
    return fit_on_neighbours(
        bank,
        found.held_out,
        found.held_out_labels,
        **recipe._asdict(),
        label_error=label_error,
        weights=weights,
    )


def judged_attention_at(run: TrainedRun, found: Neighbourhoods, k: int) -> tuple[Attention, float]:
    """Return the attention for k neighbours of a run's own memory, and its held-out NLL.

    It is the run's own where that was fitted for k, else a new one: an attention fitted for 50
    neighbours is valid at 5, but not at its best there. One that was kept from joint training is
    used as it is. The NLL is that of queries which the judged fit has not seen.
    """
    here, fitting = found.nearest(k), run.config.fitting
    method = run.method(here.test.k)
    if fitting.fit_attention_on == "train":
        probs = predict(method, here.held_out)
        return method, negative_log_likelihood(probs, here.held_out_labels)
    if here.test.k == min(fitting.fit_k, len(run.bank)):
        return method, judged_nll(run.fit_history)
    fitted = fit_attention(run.bank, here, Recipe.of(run))
    return fitted.method, fitted.judged_nll


def attention_at(run: TrainedRun, found: Neighbourhoods, k: int) -> Attention:
    """Return the attention of `judged_attention_at` alone."""
    return judged_attention_at(run, found, k)[0]


@dataclass(frozen=True)
class Contest:
    """Every method that meets the others on one search, fitted on its held-out queries.

    Attributes:
        plain: The untuned votes.
        tuned: The votes with everything chosen on the held-out queries.
        attention: The attention.
    """

    plain: Mapping[str, Method]
    tuned: Mapping[str, FittedMethod]
    attention: Attention

    def predict(self, test: Neighbours) -> Predictions:
        """Return the probabilities of every method."""
        probs = {name: predict(method, test) for name, method in self.plain.items()}
        probs |= {name: each.predict(test) for name, each in self.tuned.items()}
        return probs | {"attention": predict(self.attention, test)}


def contest(
    bank: MemoryBank,
    found: Neighbourhoods,
    recipe: Recipe,
    *,
    k_eval: int,
    k_baseline: int,
    own: Attention | None = None,
    tried: Mapping[str, Sequence[Method]] | None = None,
    label_error: LabelError | None = None,
    weights: Float[np.ndarray, " B"] | None = None,
) -> Contest:
    """Fit every method on the held-out queries of one search.

    Args:
        bank: The memory that votes.
        found: A search of it, as deep as the tuned votes may use (``TUNED_DEPTH``): a plain vote
            may need more neighbours than the attention.
        recipe: How the attention is fitted.
        k_eval: Neighbours the attention weighs.
        k_baseline: Neighbours of the untuned votes.
        own: An attention that is fitted on this very memory and these queries already.
        tried: Tuned votes to the settings that are tried; None takes all of `tuned_settings`.
        label_error: Share of wrong held-out labels, or how classes turn into labels: corrected
            for in whatever is fitted.
        weights: How much each held-out query counts for whatever is fitted.
    """
    corrected = 0.0 if label_error is None else label_error
    tuned = tuned_baselines(found, tried, label_error=corrected, weights=weights)
    if own is None:
        here = found.nearest(k_eval)
        own = fit_attention(bank, here, recipe, label_error=label_error, weights=weights).method
    return Contest(plain_methods(min(k_baseline, found.test.k)), tuned, own)


def plain_methods(k: int) -> dict[str, Method]:
    """Return the untuned methods as published: 1 / k, and softmax of minus squared distance."""
    return {"uniform": Uniform(k), "distance": Distance(k, temperature=1.0, squared=True)}


def tuned_baselines(
    found: Neighbourhoods,
    tried: Mapping[str, Sequence[Method]] | None = None,
    *,
    label_error: LabelError = 0.0,
    weights: Float[np.ndarray, " B"] | None = None,
) -> dict[str, FittedMethod]:
    """Return the votes with everything chosen on the held-out queries; see `contest`."""
    held_out, labels = found.held_out, found.held_out_labels
    options = {"label_error": label_error, "weights": weights}
    return {
        f"{name} (tuned)": fit_method(methods, held_out, labels, **options)
        for name, methods in (tried or tuned_settings(found.test.k)).items()
    }


def tuned_settings(k_max: int, names: Sequence[str] = BASELINES) -> dict[str, list[Method]]:
    """Return the settings of each tuned vote that are tried with up to so many neighbours."""
    return {name: candidates(name, k_max) for name in names}


# ---- Tidy tables: what every method made of the test rows, at every level of a study.
#
# Intervals over test rows stand beside every measure as ``low`` and ``high``, where a single
# training has none over trainings; ``compare.interval_table`` uses them there.

_LIMITS = ("low", "high")


@dataclass(frozen=True)
class Study:
    """What every method made of the test rows at every level.

    Attributes:
        table: One row per seed, level, method and measure; with one seed ``low`` and ``high`` are
            95 % over test rows.
        probs: Level (a NamedTuple, whose fields are columns) to method name to one table of test
            probabilities a seed.
        labels: True classes of the test rows.
        seeds: Level to the seeds in the order of their probabilities.
        groups: Groups of classes whose accuracy is measured by itself.
    """

    table: pd.DataFrame
    probs: dict[Any, dict[str, list[Float[np.ndarray, "_ C"]]]]
    labels: Int[np.ndarray, " _"]
    seeds: dict[Any, list[int]]
    groups: Groups = field(default_factory=dict)


class Entry(NamedTuple):
    """What one run contributes to one level: probabilities, and rows of the table besides."""

    run: TrainedRun
    level: Any
    probs: Predictions
    more: Sequence[Mapping[str, Any]] = ()


def collect(
    entries: Iterable[Entry],
    labels: Int[np.ndarray, " _"],
    *,
    metrics: Sequence[str] = METRICS,
    groups: Groups | None = None,
    **named: Any,
) -> Study:
    """Return the study that the entries make up.

    Args:
        entries: From every run and level.
        labels: True classes of the test rows.
        metrics: Measures of the table.
        groups: Groups of classes whose accuracy is measured, too.
        named: Columns that are the same in every row.
    """
    rows: list[dict[str, Any]] = []
    probs: dict[Any, dict[str, list[np.ndarray]]] = {}
    seeds: dict[Any, list[int]] = {}
    for run, level, made, more in entries:
        of_run = {"dataset": run.config.data.dataset, "seed": run.config.seed}
        at = of_run | named | level._asdict()
        rows += group_measures(made, labels, groups or {}, metrics=metrics, **at)
        rows += [at | each for each in more]
        seeds.setdefault(level, []).append(run.config.seed)
        for name, each in made.items():
            probs.setdefault(level, {}).setdefault(name, []).append(each)
    resampled = [name for name in metrics if name in RESAMPLED_METRICS]
    limits = group_limits(probs, labels, groups or {}, metrics=resampled)
    return Study(with_limits(pd.DataFrame(rows), limits), probs, labels, seeds, groups or {})


def tidy_measures(
    probs: Predictions,
    labels: Int[np.ndarray, " B"],
    *,
    metrics: Sequence[str] = METRICS,
    **named: Any,
) -> list[dict[str, Any]]:
    """Return one row per method and measure, each with the given columns in front."""
    return [
        named | {"method": name, "metric": metric, "value": value}
        for name, table in probs.items()
        for metric, value in summarise(table, labels).items()
        if metric in metrics
    ]


def group_measures(
    probs: Predictions,
    labels: Int[np.ndarray, " B"],
    groups: Groups,
    *,
    metrics: Sequence[str] = METRICS,
    **named: Any,
) -> list[dict[str, Any]]:
    """Return `tidy_measures`, and each group's accuracy; ``classes`` is "all" or the group.

    A group without test rows has none; without groups there is no such column.
    """
    if not groups:
        return tidy_measures(probs, labels, metrics=metrics, **named)
    rows = tidy_measures(probs, labels, metrics=metrics, **named, classes="all")
    for name, own in _rows_of(groups, labels):
        at = named | {"classes": name}
        for method, table in probs.items():
            value = accuracy(table[own], labels[own])
            rows.append(at | {"method": method, "metric": "accuracy", "value": value})
    return rows


def _rows_of(
    groups: Groups, labels: Int[np.ndarray, " B"]
) -> Iterator[tuple[str, Bool[np.ndarray, " B"]]]:
    """Yield the groups that have test rows, with which rows those are."""
    for name, classes in groups.items():
        own = np.isin(labels, classes)
        if own.any():
            yield name, own


def with_limits(table: pd.DataFrame, limits: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the columns ``low`` and ``high``, empty where no limits are known.

    Limits that the table has already stay where no others are given.

    Args:
        table: One row per run, method and measure.
        limits: From ``level_limits``, one row per choice of the columns that both tables name.
    """
    table = table.reindex(columns=list(dict.fromkeys([*table, *_LIMITS])))
    if limits.empty:
        return table
    by = [name for name in limits if name in table and name not in _LIMITS]
    known = limits.set_index(by)[[*_LIMITS]]
    found = known.reindex(pd.MultiIndex.from_frame(table[by])).set_index(table.index)
    return table.fillna(found)


def level_limits(
    probs: Mapping[Any, SeedTables], labels: Int[np.ndarray, " B"], *, metrics: Sequence[str]
) -> pd.DataFrame:
    """Return intervals over test rows at every level of a study, of methods with a single run.

    Args:
        probs: As in a `Study`.
        labels: True classes of the rows.
        metrics: Out of ``compare.RESAMPLED_METRICS``.
    """
    parts = []
    for level, methods in probs.items():  # one by one: all at once would fill the memory
        alone = {name: tables for name, tables in methods.items() if len(tables) == 1}
        if alone:
            found = row_intervals(alone, labels, metrics=metrics)
            parts.append(found.drop(columns="mean").assign(**level._asdict()))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def group_limits(
    probs: Mapping[Any, SeedTables],
    labels: Int[np.ndarray, " B"],
    groups: Groups,
    *,
    metrics: Sequence[str],
) -> pd.DataFrame:
    """Return ``level_limits`` of all classes, and of the accuracy in every group of classes.

    A group's interval draws from the test rows of its own classes alone.
    """
    parts = [level_limits(probs, labels, metrics=metrics).assign(classes="all")]
    for name, own in _rows_of(groups, labels):
        found = level_limits(_inside(probs, own), labels[own], metrics=("accuracy",))
        parts.append(found.assign(classes=name))
    return pd.concat(parts, ignore_index=True)


def _inside(probs: Mapping[Any, SeedTables], own: Bool[np.ndarray, " B"]) -> dict[Any, SeedTables]:
    """Return the probabilities of some rows."""
    return {
        level: {name: [each[own] for each in tables] for name, tables in methods.items()}
        for level, methods in probs.items()
    }


def comparisons(
    study: Study, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")
) -> pd.DataFrame:
    """Return every method's paired difference to the attention, for each level and group.

    A group's rows are the test rows of its classes; only accuracy and NLL are compared there,
    because calibration is a matter of all classes together.
    """
    everything = ("all", np.ones(len(study.labels), dtype=bool))
    parts = []
    for name, own in (everything, *_rows_of(study.groups, study.labels)):
        asked = [each for each in metrics if name == "all" or each in ("nll", "accuracy")]
        where = {"classes": name} if study.groups else {}
        for level, tables in _inside(study.probs, own).items():
            if asked and len(tables) > 1:
                at = level._asdict() | where
                found = compare_in_families(tables, study.labels[own], "attention", metrics=asked)
                parts.append(found.assign(**at))
    return pd.concat(parts, ignore_index=True)


# ---- Pictures of single predictions: a query, its neighbours, and how much each of them counts.


def neighbours_figure(
    run: TrainedRun, found: Neighbours, query: int, *, method: Method, part: str = "test"
) -> Figure:
    """Return a figure of one query's neighbours: images where there are images, else bars.

    Args:
        run: Where names, labels and images come from.
        found: A search with the rows of ``part`` as queries.
        query: Which of the queries.
        method: What weighs the neighbours: the one whose prediction is explained.
        part: "val" or "test".
    """
    one = found.of_queries(slice(query, query + 1))
    names = run.class_names
    probs = predict(method, one)[0]
    predicted, actual = int(probs.argmax()), int(run.labels(part)[query])
    note = f"{names[actual]}?\n{names[predicted]} {100 * probs[predicted]:.0f} %"
    seen = {"predicted": names[predicted], "query_note": note}
    if run.splits.kind == "image":
        seen["image"] = drawable(getattr(run.splits, part).inputs[query][None])[0]
        seen["images"] = drawable(run.splits.train.inputs)
    return plot.explanation(explain(method, one, class_names=names), **seen)


def drawable(images: np.ndarray) -> np.ndarray:
    """Return (N, height, width[, 3]) bytes from (N, channels, height, width)."""
    moved = np.moveaxis(images, 1, -1)
    return moved[..., 0] if moved.shape[-1] == 1 else moved
