"""AFMP features through the kNN head: does attention over neighbours help this model too?

Axes: N memory rows, B queries, C classes.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.special import log_softmax, softmax

from attnknn.afmp.train import AblationRun, embed_features
from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import apply_temperature, fit_temperature
from attnknn.core.fit import fit_on_neighbours
from attnknn.core.vote import Attention, Uniform, predict
from attnknn.data.splits import Splits
from attnknn.evaluate.compare import compare_in_families, standing
from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.figures.tables import DisplayTable, pivot_mean_interval
from attnknn.studies.afmp import Ablation
from attnknn.studies.common import (
    METRICS,
    TUNED_DEPTH,
    Neighbourhoods,
    Predictions,
    tidy_measures,
    tuned_baselines,
)

RIVALS = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "readout + temperature")


@dataclass(frozen=True)
class KNNHead:
    """Probabilities of the kNN methods and of the model's own readout.

    Attributes:
        probs: Method name to one table of probabilities a seed.
        labels: True classes of the test rows.
        table: One row per seed, method and measure.
        setting: The ablation setting whose features were used.
    """

    probs: dict[str, list[Float[np.ndarray, "B C"]]]
    labels: Int[np.ndarray, " B"]
    table: pd.DataFrame
    setting: str


def knn_head(ablation: Ablation, name: str, *, k: int = 50) -> KNNHead:
    """Return what the kNN head makes of the features of a trained setting, seed by seed.

    Args:
        ablation: The runs.
        name: Setting whose features are used.
        k: Neighbours that the attention weighs; tuned votes may ask for more.
    """
    labels, rows, seeds = ablation.labels, [], []
    for run in ablation.runs[name]:
        probs = _predictions(run, ablation.splits, k)
        rows += tidy_measures(probs, labels, seed=run.seed)
        seeds.append(probs)
    by_method = {method: [probs[method] for probs in seeds] for method in seeds[0]}
    return KNNHead(by_method, labels, pd.DataFrame(rows), name)


def _predictions(run: AblationRun, splits: Splits, k: int) -> Predictions:
    """Return the test probabilities of all methods, from one search."""
    model = run.load_model(splits)
    rows = {
        part: embed_features(model, getattr(splits, part).inputs)
        for part in ("train", "val", "test")
    }
    bank = MemoryBank(rows["train"], splits.train.labels, n_classes=splits.n_classes)
    # Plain votes may need more neighbours than the attention: they must not be held to its k.
    k, depth = min(k, len(bank)), min(max(k, TUNED_DEPTH), len(bank))
    searched = Neighbourhoods(
        bank.search(rows["val"], depth), splits.val.labels, bank.search(rows["test"], depth)
    )
    found = searched.nearest(k)
    # NOTE: leakage guard. Validation rows chose the epoch, but no weight was trained on them.
    fitted = fit_on_neighbours(
        bank,
        found.held_out,
        found.held_out_labels,
        attention=AttentionConfig(),
        fitting=FittingConfig(fit_k=k),
        seed=run.seed,
    )
    probs = {"uniform": predict(Uniform(min(16, k)), found.test)}
    probs |= {name: fit.predict(searched.test) for name, fit in tuned_baselines(searched).items()}
    probs["attention"] = predict(Attention(k, fitted.attention), found.test)
    return probs | _readout(run, splits)


def _readout(run: AblationRun, splits: Splits) -> Predictions:
    """Return the model's own probabilities, plain and temperature-scaled."""
    held_out, test = (run.logits[part].astype(np.float64) for part in ("val", "test"))
    temperature = fit_temperature(log_softmax(held_out, axis=1), splits.val.labels)
    probs = softmax(test, axis=1)
    return {"readout": probs, "readout + temperature": apply_temperature(probs, temperature)}


def knn_table(head: KNNHead) -> DisplayTable:
    """Return methods against measures; bold where the best beats tuned distance weights."""
    rival = compare_in_families(head.probs, head.labels, "distance (tuned)", metrics=METRICS)
    return pivot_mean_interval(head.table, comparison=rival)


def knn_sentence(head: KNNHead) -> str:
    """Return, in Markdown, how attention fares on AFMP features against its rivals."""
    table = compare_in_families(head.probs, head.labels, "attention", metrics=("nll", "accuracy"))
    table = table[table["method"].isin(RIVALS)]
    parts = [
        f"{METRIC_NAMES[metric]}: {standing(table[table['metric'] == metric])}"
        for metric in ("nll", "accuracy")
    ]
    return f"**kNN head.** Attention on the features of “{head.setting}”: {'; '.join(parts)}."
