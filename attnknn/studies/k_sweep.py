"""k-sweep: every method at every k, from one search at the largest k.

The attention is fitted anew at each k: one fitted for 50 neighbours is not the best for 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from attnknn.core.vote import Distance, Uniform, predict
from attnknn.embed.run import TrainedRun
from attnknn.evaluate.compare import compare_methods
from attnknn.evaluate.measure import METRIC_NAMES, negative_log_likelihood
from attnknn.evaluate.tune import DISTANCE_TEMPERATURES
from attnknn.progress import progress_bar
from attnknn.studies.common import (
    Entry,
    Neighbourhoods,
    Predictions,
    Recipe,
    Study,
    collect,
    contest,
    judged_attention_at,
    search_run,
)


class Level(NamedTuple):
    """One number of neighbours."""

    k: int


@dataclass(frozen=True)
class KSweep(Study):
    """Measures of every method at every k.

    Attributes:
        held_out: One row per seed, method and k: NLL on held-out queries, which chooses k; for
            the attention, on those that its trial fit has not seen.
    """

    held_out: pd.DataFrame = None

    @property
    def n_seeds(self) -> int:
        """Number of trainings."""
        return self.table["seed"].nunique()


def k_sweep(
    runs: Sequence[TrainedRun],
    *,
    ks: Sequence[int] = (1, 3, 5, 10, 20, 50, 100),
    progress: bool = True,
) -> KSweep:
    """Return the sweep over the seeds of a run; a k beyond the memory is left out."""
    entries, chosen = [], []
    for run in runs:
        possible = [k for k in ks if k <= len(run.bank)]
        found = search_run(run, max(possible))
        for k in progress_bar(possible, "k", disable=not progress):
            judged, test = predictions_at(run, found.nearest(k))
            entries.append(Entry(run, Level(k), test))
            named = {"dataset": run.config.data.dataset, "seed": run.config.seed, "k": k}
            chosen += [named | {"method": name, "nll": nll} for name, nll in judged.items()]
    study = collect(entries, runs[0].labels("test"))
    return KSweep(**vars(study), held_out=pd.DataFrame(chosen))


def predictions_at(run: TrainedRun, here: Neighbourhoods) -> tuple[dict[str, float], Predictions]:
    """Return held-out NLL and test probabilities of every method at the k of a search."""
    k, labels = here.test.k, here.held_out_labels
    own, nll = judged_attention_at(run, here, k)
    distances = [Distance(k, temperature) for temperature in DISTANCE_TEMPERATURES]
    tried = {"uniform": [Uniform(k)], "distance": distances}
    options = {"k_eval": k, "k_baseline": k, "tried": tried}
    fitted = contest(run.bank, here, Recipe.of(run), own=own, **options)
    judged = {
        name: negative_log_likelihood(predict(method, here.held_out), labels)
        for name, method in fitted.plain.items()
    }
    judged |= {name: each.nll for name, each in fitted.tuned.items()} | {"attention": nll}
    return judged, fitted.predict(here.test)


def best_k(sweep: KSweep) -> dict[str, int]:
    """Return the k of each method with the smallest mean NLL on the held-out queries."""
    means = sweep.held_out.groupby(["method", "k"], sort=False)["nll"].mean()
    names = dict.fromkeys(sweep.held_out["method"])
    return {name: int(means[name].idxmin()) for name in names}


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
    at_k = {str(level.k): methods[name] for level, methods in sweep.probs.items()}
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
