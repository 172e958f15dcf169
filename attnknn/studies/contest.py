"""The contest: one search of a run, and the methods that all studies compare on it.

Axes: B queries, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from attnknn.baselines import BASELINES, KS, FittedMethod, fit_baseline
from attnknn.classify import Attention, Distance, Method, Uniform, predict
from attnknn.config import FittingConfig
from attnknn.fit import FittedAttention, fit_on_neighbours, judged_nll
from attnknn.measure import negative_log_likelihood, summarise
from attnknn.memory import MemoryBank
from attnknn.neighbours import Neighbours
from attnknn.trained import TrainedRun
from attnknn.transition import LabelError

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
