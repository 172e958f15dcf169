"""Main results: every method on the same embedder, the same memory and the same test rows.

Axes: B test rows, C classes, V views.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.special import log_softmax, softmax

from attnknn.core.calibrate import apply_temperature, fit_temperature
from attnknn.core.vote import Attention, KEnsemble, Method, predict, predict_views
from attnknn.embed.rows import embed_views
from attnknn.embed.run import TrainedRun
from attnknn.embed.runs import run_folder
from attnknn.evaluate.compare import compare_in_families, row_intervals, standing
from attnknn.evaluate.measure import (
    METRIC_NAMES,
    confusion_matrix,
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
    Neighbourhoods,
    Predictions,
    attention_at,
    chosen_rows,
    chosen_table,
    plain_methods,
    search_run,
    tidy_measures,
    tuned_baselines,
    with_limits,
)

# ---- One table over data sets: the main results of several finished runs, side by side.

NOTEBOOK = "02_main_results"
MEASURES = f"{NOTEBOOK}/measures.csv"
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
    return [path for path in named if path == own or _is_complete(path)]


def _is_complete(run: Path) -> bool:
    """Whether a run's report says that its main results are complete, and they are there."""
    return (run / MEASURES).is_file() and _entry(run).get("status") == "complete"


def _entry(run: Path) -> dict[str, Any]:
    """Return what a run's report says about its main results; nothing where it says nothing."""
    report = run / REPORT_NAME
    return read_json(report).get("notebooks", {}).get(NOTEBOOK, {}) if report.is_file() else {}


def read_measures(runs: Sequence[Path], own: Path) -> pd.DataFrame:
    """Return the saved measures of several runs, with the run's name and origin as columns.

    Args:
        runs: From ``finished_runs``.
        own: The run that asks, whose report is not written yet.
    """
    tables = []
    for path in runs:
        made = "this run" if path.resolve() == Path(own).resolve() else made_from(path)
        tables.append(pd.read_csv(path / MEASURES).assign(run=path.name, made=made))
    return pd.concat(tables, ignore_index=True)


def made_from(run: Path) -> str:
    """Return the day on which a run's main results were made, and the commit of the code."""
    entry = _entry(run)
    return f"{str(entry.get('finished', ''))[:10]} {str(entry.get('commit', ''))[:7]}".strip()


def datasets_table(
    measures: pd.DataFrame, *, metrics: Sequence[str] = ("accuracy", "nll", "ece")
) -> pd.DataFrame:
    """Return one row per run, method and measure, in the order in which the runs were given.

    ``low`` and ``high`` are the intervals over test rows that a run of one seed has saved.

    Args:
        measures: From ``read_measures``.
        metrics: Measures to keep.
    """
    shown = measures[
        measures["method"].isin([*SHOWN, *HEADS]) & measures["metric"].isin(list(metrics))
    ]
    data = shown["dataset"].map(lambda name: Path(str(name)).stem)
    columns = ["run", "made", "data", "method", "metric", "seed", "value", "low", "high"]
    return shown.assign(data=data).reindex(columns=columns)


def ranks(measures: pd.DataFrame, *, metric: str = "nll") -> pd.DataFrame:
    """Return each method's mean rank over the runs; 1 is best. Only methods that every run has."""
    rows = measures[(measures["metric"] == metric) & measures["method"].isin(SHOWN)]
    wide = rows.pivot_table(index="run", columns="method", values="value", aggfunc="mean")
    wide = wide.dropna(axis=1)[[name for name in SHOWN if name in wide.dropna(axis=1)]]
    ranked = wide.rank(axis=1, ascending=metric != "accuracy")
    return ranked.mean().rename("mean rank").rename_axis("method").reset_index()


MAIN_RESULTS_MEASURES = (*METRICS, "ace", "cwce", "aurc")  # what is saved
CALIBRATION = ("ece", "ace", "cwce", "aurc")
RELIABILITY = ("uniform", "distance (tuned)", "attention", "cnn + temperature")
RISK = ("uniform", "distance (tuned)", "prototypes (tuned)", "attention", "cnn + temperature")
RIVALS = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "cnn + temperature")


@dataclass(frozen=True)
class MainResults:
    """Probabilities of every method and seed, and what they amount to.

    Attributes:
        probs: Method name to one table of probabilities a seed.
        labels: True classes of the test rows, the same for all seeds.
        table: One row per seed, method and measure.
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

    @cached_property
    def over_rows(self) -> pd.DataFrame | None:
        """Intervals over test rows, where a single seed has none over seeds."""
        return row_intervals(self.probs, self.labels) if self.n_seeds == 1 else None

    @property
    def measures(self) -> pd.DataFrame:
        """The table with the intervals over test rows of a single seed, as it is saved."""
        return with_limits(self.table, self.over_rows)

    def comparison(self, *, metrics: Sequence[str] = ("accuracy", "nll", "brier", "ece")):
        """Return every method's paired difference to the attention."""
        return compare_in_families(self.probs, self.labels, "attention", metrics=metrics)


@dataclass(frozen=True)
class Fitted:
    """Everything that is fitted on the held-out queries of one run, once.

    Attributes:
        plain: The untuned methods.
        tuned: The tuned baselines.
        attention: The attention.
        wrapped: The attention over several k, and with a k of each query's own.
    """

    plain: Mapping[str, Method]
    tuned: Mapping[str, FittedMethod]
    attention: Attention
    wrapped: Mapping[str, Method]


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
    seeds, rows, chosen, attentions, kept = [], [], [], [], []
    for run in runs:
        found = search_run(run, max(k_eval, k_baseline, k_tuned, *k_ensemble))
        fitted = fit_methods(run, found, k_eval, k_baseline, k_ensemble, k_tuned)
        probs = knn_predictions(fitted, found)
        probs |= tta_predictions(run, fitted, found, tta_views, tta_kind)
        seeds.append(probs | cnn_predictions(run))
        named = {"dataset": run.config.data.dataset, "seed": run.config.seed}
        rows += tidy_measures(seeds[-1], run.labels("test"), metrics=MAIN_RESULTS_MEASURES, **named)
        searched = {"k_max": min(k_tuned, found.test.k), "n_memory": len(run.bank)}
        chosen += chosen_rows(fitted.tuned, **searched, seed=run.config.seed)
        attentions.append(fitted.attention)
        kept.append(found.kept(k_eval))
    by_method = {name: [probs[name] for probs in seeds] for name in seeds[0]}
    labels, tables = runs[0].labels("test"), (pd.DataFrame(rows), chosen_table(chosen))
    return MainResults(by_method, labels, *tables, attentions, kept)


def fit_methods(
    run: TrainedRun,
    found: Neighbourhoods,
    k_eval: int,
    k_baseline: int,
    k_ensemble: Sequence[int],
    k_tuned: int,
) -> Fitted:
    """Return every neighbour method, fitted on the held-out queries of one search."""
    here = found.nearest(k_eval)
    attention = attention_at(run, found, k_eval)
    ks = sorted({min(k, found.test.k) for k in k_ensemble})
    members = tuple(attention_at(run, found, k) for k in ks)
    return Fitted(
        plain=plain_methods(min(k_baseline, found.test.k)),
        tuned=tuned_baselines(found.nearest(k_tuned)),
        attention=attention,
        wrapped={
            "attention + k-ensemble": KEnsemble(attention, tuple(ks), members),
            "attention + adaptive k": fit_adaptive_k(
                attention, here.held_out, found.held_out_labels
            ),
        },
    )


def knn_predictions(fitted: Fitted, found: Neighbourhoods) -> Predictions:
    """Return test probabilities of the neighbour methods, all from one search."""
    probs = {name: predict(method, found.test) for name, method in fitted.plain.items()}
    probs |= {name: each.predict(found.test) for name, each in fitted.tuned.items()}
    attentions = {"attention": fitted.attention, **fitted.wrapped}
    return probs | {name: predict(method, found.test) for name, method in attentions.items()}


def tta_predictions(
    run: TrainedRun, fitted: Fitted, found: Neighbourhoods, n_views: int, kind: str
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
    temperature = fit_temperature(
        log_softmax(held_out.astype(np.float64), axis=1), run.labels("val")
    )
    probs = softmax(test.astype(np.float64), axis=1)
    return {"cnn": probs, "cnn + temperature": apply_temperature(probs, temperature)}


def main_table(results: MainResults) -> DisplayTable:
    """Return methods against measures; bold where the best beats tuned distance weights."""
    rival = compare_in_families(results.probs, results.labels, "distance (tuned)", metrics=METRICS)
    shown = results.table[results.table["metric"].isin(METRICS)]
    return pivot_mean_interval(shown, comparison=rival, over_rows=results.over_rows)


def calibration_table(results: MainResults) -> DisplayTable:
    """Return methods against what tells the worth of their confidences."""
    shown = results.table[results.table["metric"].isin(CALIBRATION)]
    return pivot_mean_interval(shown, over_rows=results.over_rows)


def risk_curves(results: MainResults, names: Sequence[str] = RISK) -> dict[str, pd.DataFrame]:
    """Return risk against coverage in the first seed, for those of the methods that are there."""
    present = (name for name in names if name in results.probs)
    return {name: risk_coverage(results.probs[name][0], results.labels) for name in present}


def per_class(
    results: MainResults, class_names: Sequence[str], methods: Sequence[str] = RELIABILITY
) -> pd.DataFrame:
    """Return recall, precision and F1 of every class, averaged over the seeds, method by method."""
    rows = []
    for method in (name for name in methods if name in results.probs):
        counts = [confusion_matrix(probs, results.labels) for probs in results.probs[method]]
        shares = np.mean([_class_shares(each) for each in counts], axis=0)  # (3, C)
        for name, recall, precision, f1 in zip(class_names, *shares, strict=True):
            rows.append(
                {
                    "class": name,
                    "method": method,
                    "recall": recall,
                    "precision": precision,
                    "f1": f1,
                }
            )
    return pd.DataFrame(rows)


def per_class_table(table: pd.DataFrame, *, value: str = "f1") -> pd.DataFrame:
    """Return classes against methods, one value each, for print."""
    wide = table.pivot(index="class", columns="method", values=value)
    order = list(dict.fromkeys(table["class"])), list(dict.fromkeys(table["method"]))
    return wide.reindex(index=order[0], columns=order[1]).reset_index().rename_axis(None, axis=1)


def _class_shares(counts: Int[np.ndarray, "C C"]) -> Float[np.ndarray, "3 C"]:
    """Return recall, precision and F1 of each class; 0 where nothing was there or predicted."""
    right, true, said = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    return np.stack(
        [
            right / np.maximum(true, 1),
            right / np.maximum(said, 1),
            2 * right / np.maximum(true + said, 1),
        ]
    )


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
    first = table.iloc[0]
    n_rows = f"{first['n_rows']:,}".replace(",", " ")
    size = f"{n_rows} test rows, {first['n_seeds']} seed(s)"
    note = f"Paired tests at 95 %, Holm-corrected over rivals of a kind; {size}."
    return "\n".join([*lines, "", note])
