"""Main results: every method on the same embedder, the same memory and the same test rows.

Axes: B test rows, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.special import log_softmax, softmax
from sklearn.metrics import precision_recall_fscore_support

from attnknn.core.calibrate import (
    FLOOR_LIMITS,
    TEMPERATURE_LIMITS,
    apply_temperature,
    fit_temperature,
)
from attnknn.core.vote import Attention, KEnsemble, Method, predict, predict_views
from attnknn.embed.rows import embed_views
from attnknn.embed.run import TrainedRun
from attnknn.embed.runs import run_folder
from attnknn.evaluate.compare import compare_in_families, standing
from attnknn.evaluate.measure import (
    METRIC_NAMES,
    expected_calibration_error,
    reliability_table,
    risk_coverage,
)
from attnknn.evaluate.tune import FittedMethod, fit_adaptive_k
from attnknn.figures.tables import DisplayTable, pivot_mean_interval
from attnknn.files import REPORT_NAME, read_json
from attnknn.studies.common import (
    METRICS,
    TUNED_DEPTH,
    Contest,
    Entry,
    Neighbourhoods,
    Predictions,
    Recipe,
    attention_at,
    collect,
    contest,
    search_run,
    tuned_settings,
)

MEASURED = (*METRICS, "ace", "cwce", "aurc")
CALIBRATION = ("ece", "ace", "cwce", "aurc")
RELIABILITY = ("uniform", "distance (tuned)", "attention", "cnn + temperature")
RISK = ("uniform", "distance (tuned)", "prototypes (tuned)", "attention", "cnn + temperature")
RIVALS = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "cnn + temperature")


class OneLevel(NamedTuple):
    """The level of a study that changes nothing."""


@dataclass(frozen=True)
class MainResults:
    """Probabilities of every method and seed, and what they amount to.

    Attributes:
        probs: Method name to one table of probabilities a seed.
        labels: True classes of the test rows, the same for all seeds.
        table: One row per seed, method and measure; with one seed ``low`` and ``high`` are 95 %
            over test rows.
        settings: One row per seed and tuned baseline: what the held-out queries chose.
        attentions: The attention of each seed that made the probabilities.
        found: What it weighed: the neighbours of held-out and test queries, for each seed.
    """

    probs: Mapping[str, list[Float[np.ndarray, "B C"]]]
    labels: Int[np.ndarray, " B"]
    table: pd.DataFrame
    settings: pd.DataFrame
    attentions: Sequence[Attention]
    found: Sequence[Neighbourhoods]

    @property
    def n_seeds(self) -> int:
        """Number of trainings."""
        return len(self.probs["attention"])

    def comparison(self, *, metrics: Sequence[str] = ("accuracy", "nll", "brier", "ece")):
        """Return every method's paired difference to the attention."""
        return compare_in_families(self.probs, self.labels, "attention", metrics=metrics)


def main_results(
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    k_baseline: int = 16,
    k_ensemble: Sequence[int] = (5, 10, 20),
    k_tuned: int = TUNED_DEPTH,
    tta_views: int = 5,
    tta_kind: str = "v5",
) -> MainResults:
    """Return the main results over the seeds of a run.

    Args:
        runs: One trained run a seed.
        k_eval: Neighbours the attention weighs.
        k_baseline: Neighbours of the two untuned methods.
        k_ensemble: The k of the k-ensembles.
        k_tuned: The most neighbours a tuned baseline may use.
        tta_views: Views of each test image, the original included; 0 or 1 leaves TTA out.
        tta_kind: "v5", "narrative" or "shifts".
    """
    entries, chosen, attentions, kept = [], [], [], []
    for run in runs:
        found = search_run(run, max(k_eval, k_baseline, k_tuned, *k_ensemble))
        tried = tuned_settings(min(k_tuned, found.test.k))
        options = {"k_eval": k_eval, "k_baseline": k_baseline, "tried": tried}
        own = attention_at(run, found, k_eval)
        fitted = contest(run.bank, found, Recipe.of(run), own=own, **options)
        probs = fitted.predict(found.test)
        for name, method in wrapped(run, found, own, k_ensemble).items():
            probs[name] = predict(method, found.test)
        probs |= tta_predictions(run, fitted, found, tta_views, tta_kind) | cnn_predictions(run)
        entries.append(Entry(run, OneLevel(), probs))
        chosen += chosen_rows(fitted.tuned, tried, n_memory=len(run.bank), seed=run.config.seed)
        attentions.append(own)
        kept.append(found.kept(k_eval))
    study = collect(entries, runs[0].labels("test"), metrics=MEASURED)
    probs = study.probs[OneLevel()]
    return MainResults(probs, study.labels, study.table, chosen_table(chosen), attentions, kept)


def wrapped(
    run: TrainedRun, found: Neighbourhoods, attention: Attention, k_ensemble: Sequence[int]
) -> dict[str, Method]:
    """Return the attention over several k, and with a k of each query's own."""
    ks = sorted({min(k, found.test.k) for k in k_ensemble})
    members = tuple(attention_at(run, found, k) for k in ks)
    here = found.nearest(attention.k)
    return {
        "attention + k-ensemble": KEnsemble(attention, tuple(ks), members),
        "attention + adaptive k": fit_adaptive_k(attention, here.held_out, here.held_out_labels),
    }


def tta_predictions(
    run: TrainedRun, fitted: Contest, found: Neighbourhoods, n_views: int, kind: str
) -> Predictions:
    """Return test probabilities averaged over views; nothing for data without views."""
    if n_views < 2 or run.splits.kind != "image":
        return {}
    uniform, tuned = fitted.plain["uniform"], fitted.tuned["distance (tuned)"]
    k = max(uniform.k, tuned.method.k, fitted.attention.k)
    others = embed_views(run, n_views=n_views, kind=kind)[1:]  # the first view is searched already
    views = [found.test, *(run.bank.search(rows, k) for rows in others)]
    return {
        "uniform + TTA": predict_views(uniform, views),
        "distance (tuned) + TTA": predict_views(tuned.method, views, calibration=tuned.calibration),
        "attention + TTA": predict_views(fitted.attention, views),
    }


def cnn_predictions(run: TrainedRun) -> Predictions:
    """Return the classifier head's test probabilities, plain and temperature-scaled."""
    test, held_out = run.cnn_logits("test"), run.cnn_logits("val")
    if test is None:
        return {}
    log_probs = log_softmax(held_out.astype(np.float64), axis=1)
    temperature = fit_temperature(log_probs, run.labels("val"))
    probs = softmax(test.astype(np.float64), axis=1)
    return {"cnn": probs, "cnn + temperature": apply_temperature(probs, temperature)}


# ---- Chosen settings: what the held-out queries picked for every tuned baseline, as a table.
#
# An optimum at the edge of what was tried may lie beyond it, so the table says where that is so.

# Settings of a method that lie on a grid, and where a grid ends by nature.
NATURAL = {"k": (1,), "strength": (0.0, 1.0), "temperature": (), "scale": ()}
COLUMNS = ("method", "k", "τ", "squared", "scale", "floor", "temperature", "held-out NLL", "edge")


def chosen_rows(
    tuned: Mapping[str, FittedMethod],
    tried: Mapping[str, Sequence[Method]],
    *,
    n_memory: int,
    **named: Any,
) -> list[dict[str, Any]]:
    """Return one row per tuned baseline: its settings, and which of them lie at an edge.

    Args:
        tuned: Name to fitted baseline, as from ``common.contest``.
        tried: Name without "(tuned)" to the settings that were tried.
        n_memory: Rows of the memory; all of them cannot be exceeded.
        named: Columns to put in front.
    """
    rows = []
    for name, fitted in tuned.items():
        method = fitted.method
        row = {each.name: getattr(method, each.name) for each in fields(method)}
        row["τ"] = row.pop("temperature", np.nan)
        if "scale" in row:  # prototypes, which have no neighbours
            row.pop("k")
        methods = tried[name.removesuffix(" (tuned)")]
        edges = [*method_edges(method, methods, n_memory=n_memory), *calibration_edges(fitted)]
        row |= fitted.calibration._asdict() | {"held-out NLL": fitted.nll}
        rows.append(named | {"method": name} | row | {"edge": "; ".join(edges)})
    return rows


def chosen_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table; k as whole numbers, empty where a method has none."""
    table = pd.DataFrame(rows)
    first = [name for name in table.columns if name not in COLUMNS]
    table = table.reindex(columns=[*first, *COLUMNS])
    return table.assign(k=table["k"].astype("Int64"))


def method_edges(method: Method, tried: Sequence[Method], *, n_memory: int) -> list[str]:
    """Return which settings are the smallest or largest that were tried, in words."""
    # Squared and plain distances have temperatures of their own.
    squared = getattr(method, "squared", False)
    alike = [each for each in tried if getattr(each, "squared", False) == squared]
    found = []
    for name in (each.name for each in fields(method) if each.name in NATURAL):
        values = {getattr(each, name) for each in alike}
        value = getattr(method, name)
        at_end = value in (min(values), max(values)) and len(values) > 1
        if at_end and value not in NATURAL[name] and not (name == "k" and value >= n_memory):
            which = "largest" if value == max(values) else "smallest"
            spoken = "τ" if name == "temperature" else name
            found.append(f"{spoken} = {value:g} is the {which} tried")
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


# ---- What a page shows of the results.


def main_table(results: MainResults) -> DisplayTable:
    """Return methods against measures; bold where the best beats tuned distance weights."""
    rival = compare_in_families(results.probs, results.labels, "distance (tuned)", metrics=METRICS)
    shown = results.table[results.table["metric"].isin(METRICS)]
    return pivot_mean_interval(shown, comparison=rival)


def calibration_table(results: MainResults) -> DisplayTable:
    """Return methods against what tells the worth of their confidences."""
    return pivot_mean_interval(results.table[results.table["metric"].isin(CALIBRATION)])


def risk_curves(results: MainResults, names: Sequence[str] = RISK) -> dict[str, pd.DataFrame]:
    """Return risk against coverage in the first seed, for those of the methods that are there."""
    present = (name for name in names if name in results.probs)
    return {name: risk_coverage(results.probs[name][0], results.labels) for name in present}


def per_class(
    results: MainResults, class_names: Sequence[str], methods: Sequence[str] = RELIABILITY
) -> pd.DataFrame:
    """Return recall, precision and F1 of every class, averaged over the seeds, method by method."""
    options = {"labels": np.arange(len(class_names)), "zero_division": 0}
    tables = []
    for method in (name for name in methods if name in results.probs):
        shares = [
            precision_recall_fscore_support(results.labels, probs.argmax(axis=1), **options)[:3]
            for probs in results.probs[method]
        ]
        named = dict(zip(("precision", "recall", "f1"), np.mean(shares, axis=0), strict=True))
        tables.append(pd.DataFrame({"class": class_names, "method": method, **named}))
    return pd.concat(tables, ignore_index=True)


def per_class_table(table: pd.DataFrame, *, value: str = "f1") -> pd.DataFrame:
    """Return classes against methods, one value each, for print."""
    wide = table.pivot(index="class", columns="method", values=value)
    order = list(dict.fromkeys(table["class"])), list(dict.fromkeys(table["method"]))
    return wide.reindex(index=order[0], columns=order[1]).reset_index().rename_axis(None, axis=1)


def reliability(
    results: MainResults, names: Sequence[str]
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """Return ten-bin reliability tables of the first seed, and a line with the ECE of each."""
    first = {name: results.probs[name][0] for name in names}
    tables = {
        name: reliability_table(probs, results.labels, n_bins=10) for name, probs in first.items()
    }
    errors = {
        name: expected_calibration_error(probs, results.labels) for name, probs in first.items()
    }
    return tables, {name: f"ECE {error:.4f}" for name, error in errors.items()}


def worst_mistake(results: MainResults, method: str = "attention") -> int:
    """Return the test row that a method gets wrong with the most confidence, in the first seed."""
    probs = results.probs[method][0]
    wrong = probs.argmax(axis=1) != results.labels
    return int(np.where(wrong, probs.max(axis=1), -1.0).argmax())


def verdict(results: MainResults, *, metrics: Sequence[str] = ("nll", "ece", "accuracy")) -> str:
    """Return, in Markdown, how the attention fares against the tuned rivals, measure by measure."""
    table = results.comparison(metrics=metrics)
    table = table[table["method"].isin(RIVALS)]
    means = results.table[results.table["method"] == "attention"].groupby("metric")["value"].mean()
    lines = [
        f"- **{METRIC_NAMES[metric]}** (attention: {means[metric]:.4f}): "
        f"{standing(table[table['metric'] == metric])}."
        for metric in metrics
    ]
    n_rows = f"{len(results.labels):,}".replace(",", " ")
    size = f"{n_rows} test rows, {results.n_seeds} seed(s)"
    note = f"Paired tests at 95 %, Holm-corrected over rivals of a kind; {size}."
    return "\n".join([*lines, "", note])


# ---- One table over data sets: the main results of several finished runs, side by side.

NOTEBOOK = "02_main_results"
SHOWN = ("uniform", "uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "attention")
HEADS = ("cnn + temperature",)


def finished_runs(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the runs of a table over data sets: those named, in their order, that are finished.

    What else lies in the results folder does not count, nor the order in which runs were made.

    Args:
        folder: The run that asks; in its place among the names, or first.
        names: Runs by name (beside ``folder``) or path. One whose report is missing, not complete
            or without main results is left out.
    """
    own = Path(folder).resolve()
    places = [own.parent / name if Path(name).name == name else run_folder(name) for name in names]
    named = list(dict.fromkeys(path.resolve() for path in places))
    if own not in named:
        named.insert(0, own)
    return [path for path in named if path == own or _entry(path).get("status") == "complete"]


def _entry(run: Path) -> dict[str, Any]:
    """Return what a run's report says about its main results; nothing where there are none."""
    report = run / REPORT_NAME
    if not report.is_file() or not (run / NOTEBOOK / "measures.csv").is_file():
        return {}
    return read_json(report).get("notebooks", {}).get(NOTEBOOK, {})


def read_measures(runs: Sequence[Path], own: Path) -> pd.DataFrame:
    """Return the saved measures of several runs, with the run's name and origin as columns.

    Args:
        runs: From ``finished_runs``.
        own: The run that asks, whose report is not written yet.
    """
    tables = []
    for path in runs:
        entry = _entry(path)
        made = f"{str(entry.get('finished', ''))[:10]} {str(entry.get('commit', ''))[:7]}".strip()
        if path.resolve() == Path(own).resolve():
            made = "this run"
        table = pd.read_csv(path / NOTEBOOK / "measures.csv")
        tables.append(table.assign(run=path.name, made=made))
    return pd.concat(tables, ignore_index=True)


def datasets_table(
    measures: pd.DataFrame, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")
) -> pd.DataFrame:
    """Return one row per run, method and measure, in the order in which the runs were given.

    ``low`` and ``high`` are the intervals over test rows that a run of one seed has saved.

    Args:
        measures: From ``read_measures``.
        metrics: Measures to keep.
    """
    shown = measures["method"].isin([*SHOWN, *HEADS]) & measures["metric"].isin(list(metrics))
    data = measures["dataset"].map(lambda name: Path(str(name)).stem)
    columns = ["run", "made", "data", "method", "metric", "seed", "value", "low", "high"]
    return measures[shown].assign(data=data).reindex(columns=columns)
