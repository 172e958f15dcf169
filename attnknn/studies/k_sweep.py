"""k-sweep: every method at every k, from one search at the largest k.

The attention is fitted anew at each k: one fitted for 50 neighbours is not the best for 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from tqdm import tqdm

from attnknn.baselines import DISTANCE_TEMPERATURES, calibrate, fit_method
from attnknn.classify import Distance, Uniform, predict
from attnknn.compare import compare_methods
from attnknn.measure import negative_log_likelihood
from attnknn.studies.contest import (
    Neighbourhoods,
    Predictions,
    attention_at,
    plain_methods,
    search_run,
    stop_rows,
    tidy_measures,
)
from attnknn.trained import TrainedRun


@dataclass(frozen=True)
class KSweep:
    """Measures of every method at every k.

    Attributes:
        table: One row per seed, method, k and measure on test rows.
        held_out: One row per seed, method and k: NLL on held-out queries that no attention was
            fitted on, which chooses k.
        probs: Method name to k to one table of test probabilities a seed.
        labels: True classes of the test rows.
    """

    table: pd.DataFrame
    held_out: pd.DataFrame
    probs: dict[str, dict[int, list[Float[np.ndarray, "B C"]]]]
    labels: Int[np.ndarray, " B"]


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
        judges = stop_rows(run, found.held_out_labels).numpy()
        for k in tqdm(possible, desc="k", disable=not progress, leave=False):
            held_out, test = predictions_at(run, found.nearest(k))
            named = {"dataset": run.config.data.dataset, "seed": run.config.seed, "k": k}
            rows += tidy_measures(test, run.labels("test"), **named)
            for name, probs in held_out.items():
                nll = negative_log_likelihood(probs[judges], found.held_out_labels[judges])
                chosen.append(named | {"method": name, "nll": nll})
                kept.setdefault(name, {}).setdefault(k, []).append(test[name])
    return KSweep(pd.DataFrame(rows), pd.DataFrame(chosen), kept, runs[0].labels("test"))


def predictions_at(run: TrainedRun, here: Neighbourhoods) -> tuple[Predictions, Predictions]:
    """Return held-out and test probabilities of every method at the k of the neighbourhoods."""
    k, labels = here.test.k, here.held_out_labels
    methods = plain_methods(k) | {"attention": attention_at(run, here, k)}
    distances = [Distance(k, temperature) for temperature in DISTANCE_TEMPERATURES]
    tuned = {
        "uniform (tuned)": calibrate(Uniform(k), here.held_out, labels),
        "distance (tuned)": fit_method(distances, here.held_out, labels),
    }
    held_out, test = (
        {name: predict(method, part) for name, method in methods.items()}
        | {name: fitted.predict(part) for name, fitted in tuned.items()}
        for part in (here.held_out, here.test)
    )
    return held_out, test


def best_k(sweep: KSweep) -> dict[str, int]:
    """Return the k of each method with the smallest mean NLL on the held-out queries."""
    means = sweep.held_out.groupby(["method", "k"])["nll"].mean()
    return {name: int(means[name].idxmin()) for name in sweep.probs}


def verdict(sweep: KSweep) -> str:
    """Return, in Markdown, where each method's best k lies and whether it matters."""
    lines = []
    for name, k in best_k(sweep).items():
        at_k = {str(each): probs for each, probs in sweep.probs[name].items()}
        table = compare_methods(at_k, sweep.labels, str(k), metrics=("nll",))
        alike = [row["method"] for row in table.to_dict("records") if row["verdict"] != "worse"]
        others = f"no worse at k = {', '.join(alike)}" if alike else "every other k is worse"
        lines.append(f"- {name}: k = {k} (chosen on held-out queries); {others}.")
    note = "NLL on test rows, paired tests, Holm-corrected."
    return "\n".join([*lines, "", note])
