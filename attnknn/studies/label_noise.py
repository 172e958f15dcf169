"""Label noise in the memory: what wrong labels among the neighbours do to each method.

The embedder stays as it is; only the labels of the memory rows are flipped. Everything a method
derives from labels (trust, histograms, prototypes) comes from the flipped ones. Held-out queries
have clean labels here; at each noise level they tune the baselines and refit the attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

from attnknn.attention import NeighbourAttention
from attnknn.classify import Attention, predict
from attnknn.compare import compare_methods, verdict_sentence
from attnknn.corrupt import flip_labels
from attnknn.fit import fit_on_neighbours
from attnknn.measure import summarise
from attnknn.memory import MemoryBank
from attnknn.studies.main_results import (
    Neighbourhoods,
    Predictions,
    plain_methods,
    search_run,
    tuned_baselines,
)
from attnknn.train import TrainedRun

METRICS = ("accuracy", "nll", "brier", "ece")
TRANSFER_NOISE, TRANSFER_EPOCHS = 0.4, 60
RIVALS = ("uniform (tuned)", "distance (tuned)", "prototypes (tuned)", "attention, transfer")


@dataclass(frozen=True)
class NoiseStudy:
    """Measures of every method at every noise level.

    Attributes:
        table: One row per seed, kind, rate, method and measure; ``method="trust"`` carries the
            AUROC with which trust tells flipped rows from the others.
        probs: (kind, rate) to method name to one table of test probabilities a seed.
        labels: True classes of the test rows.
    """

    table: pd.DataFrame
    probs: dict[tuple[str, float], dict[str, list[Float[np.ndarray, "B C"]]]]
    labels: Int[np.ndarray, " B"]


def memory_noise(
    runs: Sequence[TrainedRun],
    *,
    rates: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4),
    kinds: Sequence[str] = ("symmetric", "asymmetric"),
    k_eval: int = 50,
    k_baseline: int = 16,
    progress: bool = True,
) -> NoiseStudy:
    """Return every method's measures at every noise level.

    Args:
        runs: One trained run a seed.
        rates: Shares of memory labels that are flipped.
        kinds: "symmetric" (to any other class) and "asymmetric" (to the next class).
        k_eval: Neighbours the attention weighs, and the most a tuned baseline may use.
        k_baseline: Neighbours of the untuned methods.
        progress: Show a progress bar.
    """
    tables, kept = [], {}
    for run in runs:
        found = search_run(run, max(k_eval, k_baseline))
        transfer = fit_transfer(run, found)
        levels = [(kind, rate) for kind in kinds for rate in rates if rate > 0 or kind == kinds[0]]
        bar = tqdm(levels, desc="noise levels", disable=not progress, leave=False)
        for kind, rate in bar:
            probs, bank = noisy_predictions(run, found, transfer, kind, rate, k_baseline)
            tables.append(_tidy(run, kind, rate, probs, bank))
            for name, each in probs.items():
                kept.setdefault((kind, rate), {}).setdefault(name, []).append(each)
    table = _with_clean_level(pd.concat(tables, ignore_index=True), kinds)
    return NoiseStudy(table, kept, runs[0].labels("test"))


def fit_transfer(run: TrainedRun, found: Neighbourhoods) -> NeighbourAttention:
    """Return an attention fitted once, on the clean memory under drawn noise, for every level."""
    fitting = replace(run.config.fitting, fit_noise_max=TRANSFER_NOISE, fit_epochs=TRANSFER_EPOCHS)
    return _fit(run, run.bank, found.held_out, found.held_out_labels, fitting)


def noisy_predictions(
    run: TrainedRun,
    found: Neighbourhoods,
    transfer: NeighbourAttention,
    kind: str,
    rate: float,
    k_baseline: int,
) -> tuple[Predictions, MemoryBank]:
    """Return test probabilities of every method over a memory with flipped labels."""
    labels = flip_labels(
        run.labels("train"),
        rate,
        n_classes=len(run.class_names),
        kind=kind,
        seed=run.config.seed,
    )
    bank = run.bank.relabelled(labels)
    here = Neighbourhoods(
        found.held_out.with_view(bank.view), found.held_out_labels, found.test.with_view(bank.view)
    )
    k = here.test.k
    refitted = _fit(run, bank, here.held_out, here.held_out_labels, run.config.fitting)
    plain = plain_methods(min(k_baseline, k))
    probs = {name: predict(method, here.test) for name, method in plain.items()}
    probs |= {name: fitted.predict(here.test) for name, fitted in tuned_baselines(here).items()}
    probs["attention"] = predict(Attention(k, refitted), here.test)
    probs["attention, transfer"] = predict(Attention(k, transfer), here.test)
    return probs, bank


def verdict(study: NoiseStudy, *, metrics: Sequence[str] = ("nll", "accuracy")) -> str:
    """Return, in Markdown, how the refitted attention compares at the highest noise level."""
    kind, rate = max(study.probs, key=lambda level: (level[1], level[0] == "symmetric"))
    table = compare_methods(study.probs[kind, rate], study.labels, "attention", metrics=metrics)
    rows = table[table["method"].isin(RIVALS)].to_dict("records")
    lines = [f"- {verdict_sentence(row)}" for row in rows]
    return "\n".join([f"With {100 * rate:g} % of the memory labels wrong ({kind}):", "", *lines])


def _fit(run, bank, neighbours, labels, fitting) -> NeighbourAttention:
    return fit_on_neighbours(
        bank,
        neighbours,
        labels,
        attention=run.config.attention,
        fitting=fitting,
        seed=run.config.seed,
    ).attention


def _tidy(
    run: TrainedRun, kind: str, rate: float, probs: Predictions, bank: MemoryBank
) -> pd.DataFrame:
    labels = run.labels("test")
    level = {"dataset": run.config.data.dataset, "seed": run.config.seed}
    level |= {"kind": kind, "rate": rate}
    rows = [
        level | {"method": name, "metric": metric, "value": value}
        for name, table in probs.items()
        for metric, value in summarise(table, labels).items()
        if metric in METRICS
    ]
    wrong = bank.labels.numpy() != run.labels("train")
    if wrong.any():
        auroc = label_error_auroc(bank.view.trust.numpy(), wrong)
        rows.append(level | {"method": "trust", "metric": "auroc", "value": auroc})
    return pd.DataFrame(rows)


def label_error_auroc(trust: Float[np.ndarray, " N"], wrong: Bool[np.ndarray, " N"]) -> float:
    """Return how well low trust tells wrong labels from right ones; 0.5 is chance."""
    return float(roc_auc_score(wrong, -trust))


def _with_clean_level(table: pd.DataFrame, kinds: Sequence[str]) -> pd.DataFrame:
    """Repeat the noise-free level under every kind: it is the start of each curve."""
    clean = table[table["rate"] == 0]
    copies = [clean.assign(kind=kind) for kind in kinds[1:]]
    return pd.concat([table, *copies], ignore_index=True)
