"""The contest: one search of a run, and the methods that all studies compare on it.

Axes: B queries, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from attnknn import figures as plot
from attnknn.config import FittingConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import FLOOR_LIMITS, TEMPERATURE_LIMITS, LabelError
from attnknn.core.fit import FittedAttention, fit_on_neighbours, judged_nll
from attnknn.core.neighbours import Neighbours
from attnknn.core.vote import Attention, Distance, Method, Uniform, explain, predict
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import row_intervals
from attnknn.evaluate.measure import negative_log_likelihood, summarise
from attnknn.evaluate.tune import BASELINES, KS, FittedMethod, candidates, fit_baseline

# ---- Intervals over test rows beside every measure: what a single training can say of its own.
#
# A tidy table carries them as ``low`` and ``high``, so that they go with their row through every
# choice, sorting and file; ``compare.interval_table`` uses them where a group has one run.

SeedTables = Mapping[str, Sequence[Float[np.ndarray, "_ C"]]]
_LIMITS = ("low", "high")


def with_limits(table: pd.DataFrame, limits: pd.DataFrame | None) -> pd.DataFrame:
    """Return the table with the columns ``low`` and ``high``, empty where no limits are known.

    Limits that the table has already stay where no others are given.

    Args:
        table: One row per run, method and measure.
        limits: From ``compare.row_intervals`` or ``level_limits``, one row per choice of the
            columns that both tables name; None without any.
    """
    table = table.reindex(columns=list(dict.fromkeys([*table, *_LIMITS])))
    if limits is None or limits.empty:
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
        probs: Level (a NamedTuple, whose fields become columns) to method name to one table of
            probabilities a seed.
        labels: True classes of the rows.
        metrics: Out of ``resample.RESAMPLED_METRICS``.
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
    groups: Mapping[str, Int[np.ndarray, " _"]],
    *,
    metrics: Sequence[str],
) -> pd.DataFrame:
    """Return ``level_limits`` of all classes, and of the accuracy in every group of classes.

    A group's interval draws from the test rows of its own classes alone; the column ``classes``
    holds "all" or the group.
    """
    parts = [level_limits(probs, labels, metrics=metrics).assign(classes="all")]
    for name, classes in groups.items():
        own = np.isin(labels, classes)
        if own.any():
            inside = {
                level: {method: [each[own] for each in tables] for method, tables in at.items()}
                for level, at in probs.items()
            }
            found = level_limits(inside, labels[own], metrics=("accuracy",))
            parts.append(found.assign(classes=name))
    return pd.concat(parts, ignore_index=True)


METRICS = ("accuracy", "macro_f1", "nll", "brier", "ece")
TUNED_DEPTH = max(KS)  # neighbours that a tuned baseline may use, where the memory has them
# Method name to probabilities; "_": held-out and test rows differ in number.
Predictions = dict[str, Float[np.ndarray, "_ C"]]


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


def search_run(run: TrainedRun, k: int) -> Neighbourhoods:
    """Return the k nearest memory rows of the validation and the test rows; k is lowered to N."""
    k = min(k, len(run.bank))
    return Neighbourhoods(
        run.bank.search(run.rows("val"), k), run.labels("val"), run.bank.search(run.rows("test"), k)
    )


def plain_methods(k: int) -> dict[str, Method]:
    """Return the untuned methods as published: 1 / k, and softmax of minus squared distance."""
    return {"uniform": Uniform(k), "distance": Distance(k, temperature=1.0, squared=True)}


def tuned_baselines(
    found: Neighbourhoods, *, label_error: LabelError = 0.0
) -> dict[str, FittedMethod]:
    """Return the baselines with everything chosen on the held-out queries.

    Search deeper than the attention (``TUNED_DEPTH``): a plain vote may need more neighbours.
    """
    held_out, labels = found.held_out, found.held_out_labels
    return {
        f"{name} (tuned)": fit_baseline(name, held_out, labels, label_error=label_error)
        for name in BASELINES
    }


def refit(
    run: TrainedRun,
    bank: MemoryBank,
    found: Neighbourhoods,
    *,
    fitting: FittingConfig | None = None,
    weights: Float[np.ndarray, " B"] | None = None,
) -> FittedAttention:
    """Return the run's kind of attention, fitted anew on the held-out queries of a search.

    How long to fit, and how much too sure of itself a fit is, depends on memory, queries and k, so
    both are found out here: what suits the run's own memory would hold another one's fit back,
    while every baseline beside it is tuned anew.

    Args:
        run: Whose attention and fitting settings, and seed, are taken.
        bank: The memory that votes.
        found: The held-out queries' neighbours there.
        fitting: Other settings of the fit than the run's.
        weights: How much each held-out query counts; None counts all alike.
    """
    return fit_on_neighbours(
        bank,
        found.held_out,
        found.held_out_labels,
        attention=run.config.attention,
        fitting=fitting or run.config.fitting,
        seed=run.config.seed,
        weights=weights,
    )


def attention_at(run: TrainedRun, found: Neighbourhoods, k: int) -> Attention:
    """Return the attention for k neighbours: the run's own where it was fitted for k, else refit.

    An attention fitted for 50 neighbours is valid at 5, but not at its best there. One that was
    kept from joint training is used as it is.
    """
    here = found.nearest(k)
    if _is_own(run, here):
        return run.method(here.test.k)
    return refit(run, run.bank, here).method


def judged_attention_at(run: TrainedRun, found: Neighbourhoods, k: int) -> tuple[Attention, float]:
    """Return `attention_at`, and its NLL on held-out queries that the judged fit has not seen."""
    here = found.nearest(k)
    if run.config.fitting.fit_attention_on == "train":
        method = run.method(here.test.k)
        probs = predict(method, here.held_out)
        return method, negative_log_likelihood(probs, here.held_out_labels)
    if _is_own(run, here):
        return run.method(here.test.k), judged_nll(run.fit_history)
    fitted = refit(run, run.bank, here)
    return fitted.method, fitted.judged_nll


def _is_own(run: TrainedRun, here: Neighbourhoods) -> bool:
    """Whether the attention of the run is the one for this many neighbours."""
    fitting = run.config.fitting
    return fitting.fit_attention_on == "train" or here.test.k == min(fitting.fit_k, len(run.bank))


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


# ---- Chosen settings: what the held-out queries picked for every tuned baseline, as a table.
#
# An optimum at the edge of what was tried may lie beyond it, so the table says where that is so.

# Settings of a method that lie on a grid, and where a grid ends by nature.
NATURAL = {"k": (1,), "strength": (0.0, 1.0), "temperature": (), "scale": ()}
SPOKEN = {"temperature": "τ"}
COLUMNS = ("method", "k", "τ", "squared", "scale", "floor", "temperature", "held-out NLL", "edge")


def chosen_rows(tuned: Mapping[str, FittedMethod], *, k_max: int, n_memory: int, **named: Any):
    """Return one row per tuned baseline: its settings, and which of them lie at an edge.

    Args:
        tuned: Name to fitted baseline, as from ``contest.tuned_baselines``.
        k_max: Neighbours that were searched.
        n_memory: Rows of the memory; all of them cannot be exceeded.
        named: Columns to put in front.
    """
    rows = []
    for name, fitted in tuned.items():
        method = fitted.method
        tried = candidates(name.removesuffix(" (tuned)"), k_max)
        neighbours = {} if hasattr(method, "scale") else {"k": method.k}
        row = named | {"method": name, **neighbours}
        row |= {"τ": getattr(method, "temperature", np.nan)}
        row |= {"squared": getattr(method, "squared", None)}
        row |= {"scale": getattr(method, "scale", np.nan)}
        row |= fitted.calibration._asdict() | {"held-out NLL": fitted.nll}
        edges = [*method_edges(method, tried, n_memory=n_memory), *calibration_edges(fitted)]
        rows.append(row | {"edge": "; ".join(edges)})
    return rows


def chosen_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table; k as whole numbers, empty where a method has none."""
    table = pd.DataFrame(rows)
    table["k"] = table["k"].astype("Int64")
    first = [name for name in table.columns if name not in COLUMNS]
    return table[[*first, *COLUMNS]]


def method_edges(method: Method, tried: Sequence[Method], *, n_memory: int) -> list[str]:
    """Return which settings are the smallest or largest that were tried, in words."""
    alike = [each for each in tried if _kind(each) == _kind(method)]
    found = []
    for name in (each.name for each in fields(method) if each.name in NATURAL):
        values = {getattr(each, name) for each in alike}
        value, natural = getattr(method, name), NATURAL[name]
        at_end = value in (min(values), max(values)) and len(values) > 1
        if at_end and value not in natural and not (name == "k" and value >= n_memory):
            which = "largest" if value == max(values) else "smallest"
            found.append(f"{SPOKEN.get(name, name)} = {value:g} is the {which} tried")
    return found


def calibration_edges(fitted: FittedMethod) -> list[str]:
    """Return whether floor or temperature stand at their limits, in words."""
    limits = {"floor": FLOOR_LIMITS, "temperature": TEMPERATURE_LIMITS}
    return [
        f"{name} = {value:.3g} is at its limit"
        for name, value in fitted.calibration._asdict().items()
        if np.isclose(value, limits[name], rtol=1e-3, atol=0).any()
    ]


def edges_sentence(table: pd.DataFrame) -> str:
    """Say which tuned baselines may be better beyond what was tried."""
    at_edge = table[table["edge"] != ""].drop_duplicates(["method", "edge"])
    if at_edge.empty:
        return "Every tuned baseline has its optimum inside of what was tried."
    named = "; ".join(f"{row['method']}: {row['edge']}" for row in at_edge.to_dict("records"))
    return f"At the edge of what was tried: {named}."


def _kind(method: Method) -> tuple[type, bool]:
    """Squared and plain distances have temperatures of their own."""
    return type(method), getattr(method, "squared", False)


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
