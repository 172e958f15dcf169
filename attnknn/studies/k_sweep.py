"""k-sweep: every method at every k, from one search at the largest k.

The attention is fitted anew at each k: one fitted for 50 neighbours is not the best for 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from tqdm import tqdm

from attnknn.core.vote import Distance, Uniform, predict
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import compare_methods, row_intervals
from attnknn.evaluate.measure import METRIC_NAMES, negative_log_likelihood
from attnknn.evaluate.tune import DISTANCE_TEMPERATURES, calibrate, fit_method
from attnknn.studies.common import (
    Neighbourhoods,
    Predictions,
    judged_attention_at,
    plain_methods,
    search_run,
    tidy_measures,
)


@dataclass(frozen=True)
class KSweep:
    """Measures of every method at every k.

    Attributes:
        table: One row per seed, method, k and measure on test rows.
        held_out: One row per seed, method and k: NLL on held-out queries, which chooses k; for
            the attention, on those that its trial fit has not seen.
        probs: Method name to k to one table of test probabilities a seed.
        labels: True classes of the test rows.
    """

    table: pd.DataFrame
    held_out: pd.DataFrame
    probs: dict[str, dict[int, list[Float[np.ndarray, "B C"]]]]
    labels: Int[np.ndarray, " B"]

    @property
    def n_seeds(self) -> int:
        """Number of trainings."""
        return self.table["seed"].nunique()

    @cached_property
    def over_rows(self) -> pd.DataFrame | None:
        """Intervals over test rows at every k, where a single seed has none over seeds."""
        if self.n_seeds > 1:
            return None
        # One k at a time: the resampled values of all at once would fill the memory.
        tables = [
            row_intervals({name: at[k] for name, at in self.probs.items()}, self.labels).assign(k=k)
            for k in next(iter(self.probs.values()))
        ]
        return pd.concat(tables, ignore_index=True)


def k_sweep(
    runs: Sequence[TrainedRun],
    *,
    ks: Sequence[int] = (1, 3, 5, 10, 20, 50, 100),
    progress: bool = True,
) -> KSweep:
    """Return the sweep over the seeds of a run; a k beyond the memory is left out."""
    rows, chosen, kept = [], [], {}
    for run in runs:
        possible = [k for k in ks if k <= len(run.bank)]
        found = search_run(run, max(possible))
        for k in tqdm(possible, desc="k", disable=not progress, leave=False):
            judged, test = predictions_at(run, found.nearest(k))
            named = {"dataset": run.config.data.dataset, "seed": run.config.seed, "k": k}
            rows += tidy_measures(test, run.labels("test"), **named)
            for name, nll in judged.items():
                chosen.append(named | {"method": name, "nll": nll})
                kept.setdefault(name, {}).setdefault(k, []).append(test[name])
    return KSweep(pd.DataFrame(rows), pd.DataFrame(chosen), kept, runs[0].labels("test"))


def predictions_at(run: TrainedRun, here: Neighbourhoods) -> tuple[dict[str, float], Predictions]:
    """Return held-out NLL and test probabilities of every method at the k of a search."""
    k, labels = here.test.k, here.held_out_labels
    attention, attention_nll = judged_attention_at(run, here, k)
    distances = [Distance(k, temperature) for temperature in DISTANCE_TEMPERATURES]
    plain = plain_methods(k)
    tuned = {
        "uniform (tuned)": calibrate(Uniform(k), here.held_out, labels),
        "distance (tuned)": fit_method(distances, here.held_out, labels),
    }
    judged = {
        name: negative_log_likelihood(predict(method, here.held_out), labels)
        for name, method in plain.items()
    }
    judged |= {name: fitted.nll for name, fitted in tuned.items()} | {"attention": attention_nll}
    test = {name: predict(m, here.test) for name, m in (plain | {"attention": attention}).items()}
    return judged, test | {name: fitted.predict(here.test) for name, fitted in tuned.items()}


def best_k(sweep: KSweep) -> dict[str, int]:
    """Return the k of each method with the smallest mean NLL on the held-out queries."""
    means = sweep.held_out.groupby(["method", "k"])["nll"].mean()
    return {name: int(means[name].idxmin()) for name in sweep.probs}


def verdict(sweep: KSweep) -> str:
    """Return, in Markdown, where each method's best k lies and whether it matters."""
    lines = []
    for name, k in best_k(sweep).items():
        said = "; ".join(_other_ks(sweep, name, k, metric) for metric in ("nll", "accuracy"))
        lines.append(f"- {name}: k = {k} (chosen on held-out queries by NLL); {said}.")
    note = "Other k on test rows, paired tests, Holm-corrected over k."
    return "\n".join([*lines, "", note])


def _other_ks(sweep: KSweep, name: str, chosen: int, metric: str) -> str:
    """Say at which other k a method is better than at its chosen one, and where no worse."""
    at_k = {str(k): probs for k, probs in sweep.probs[name].items()}
    title = METRIC_NAMES[metric]
    if len(at_k) == 1:
        return f"{title}: no other k was tried"
    table = compare_methods(at_k, sweep.labels, str(chosen), metrics=(metric,))
    found = {
        word: ", ".join(table.loc[table["verdict"] == word, "method"])
        for word in ("better", "no difference at this size")
    }
    parts = [f"{word} at k = {ks}" for word, ks in found.items() if ks]
    return f"{title}: {'; '.join(parts) or 'every other k is worse'}"
