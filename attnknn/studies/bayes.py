"""Bayes error: the bracket that the 1-NN error puts around it (Cover and Hart 1967).

With unlimited rows the 1-NN error R of C classes and the Bayes error R* satisfy

    R* <= R <= R* (2 - C / (C - 1) R*),    so    (C - 1)/C (1 - sqrt(1 - C/(C - 1) R)) <= R* <= R.

It is the error of the best classifier *of this representation*. It holds for queries and memory
rows drawn alike; an embedder that was trained on the memory rows breaks that, so the bracket is
also taken among held-out rows alone, each left out in turn.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int

from attnknn.checks import check_count, check_range
from attnknn.config import EmbedderConfig
from attnknn.core.bank import MemoryBank
from attnknn.data.splits import load_splits
from attnknn.embed.networks import build_embedder
from attnknn.embed.rows import embed
from attnknn.embed.run import TrainedRun

N_RESAMPLES = 2000
RAW_DIM = 64  # principal axes of raw images


def bayes_lower_limit(
    error: Float[np.ndarray, "*S"] | float, n_classes: int
) -> Float[np.ndarray, "*S"]:
    """Return the smallest Bayes error that a 1-NN error allows.

    Args:
        error: 1-NN error; beyond (C - 1)/C, the error of guessing, it counts as guessing.
        n_classes: Number of classes C.
    """
    chance = 1 - 1 / check_count("n_classes", n_classes, low=2)
    share = np.clip(np.asarray(error, dtype=np.float64) / chance, 0, 1)
    return np.asarray(chance * (1 - np.sqrt(1 - share)))


def bracket(
    wrong: Bool[np.ndarray, " B"], n_classes: int, *, level: float = 0.95, seed: int = 0
) -> dict[str, float | int]:
    """Return the bracket of the Bayes error, with the interval that the queries leave.

    Args:
        wrong: Whether the nearest neighbour of each query has another label.
        n_classes: Number of classes.
        level: Confidence of the interval around both limits.
        seed: Of the resamples.

    Returns:
        ``error_1nn``, the bracket ``lower`` to ``upper``, and ``low`` to ``high``: the bracket
        widened by what resampled queries do to its limits.
    """
    check_range("level", level, low=0, high=1, low_open=True, high_open=True)
    error, n_queries = float(wrong.mean()), len(wrong)
    # Resampling rows of 0 and 1 is drawing their number of ones from a binomial.
    drawn = np.random.default_rng(seed).binomial(n_queries, error, N_RESAMPLES) / n_queries
    return {
        "error_1nn": error,
        "lower": float(bayes_lower_limit(error, n_classes)),
        "upper": error,
        "low": float(np.quantile(bayes_lower_limit(drawn, n_classes), (1 - level) / 2)),
        "high": float(np.quantile(drawn, (1 + level) / 2)),
        "n_queries": n_queries,
    }


def run_brackets(run: TrainedRun) -> pd.DataFrame:
    """Return the brackets of a run: test rows against the memory, and held-out rows alone."""
    rows = np.concatenate([run.rows("val"), run.rows("test")])
    labels = np.concatenate([run.labels("val"), run.labels("test")])
    n_classes, dataset = len(run.class_names), run.config.data.dataset
    wrong = {
        "memory → test": _nearest_wrong(run.bank, run.rows("test"), run.labels("test")),
        "held-out rows, leave-one-out": _leave_one_out_wrong(rows, labels, n_classes),
    }
    return pd.DataFrame(
        [
            {"dataset": dataset, "representation": run.config.embedder.backbone, "rows": name}
            | {"seed": run.config.seed, "n_classes": n_classes}
            | bracket(each, n_classes)
            for name, each in wrong.items()
        ]
    )


def raw_brackets(datasets: Sequence[str]) -> pd.DataFrame:
    """Return brackets of other data sets, nothing trained: all their rows, leave-one-out.

    Images are taken on their 64 leading principal axes, table rows as they are; both are brought
    to unit length.
    """
    tables = []
    for name in datasets:
        splits = load_splits(name)
        backbone = "pca" if splits.kind == "image" else "identity"
        config = EmbedderConfig(backbone=backbone, embed_dim=RAW_DIM)
        parts = (splits.train, splits.val, splits.test)
        inputs = np.concatenate([part.inputs for part in parts])
        labels = np.concatenate([part.labels for part in parts])
        rows = embed(
            build_embedder(config, splits.spec, rows=splits.train.inputs), inputs, progress=False
        )
        wrong = _leave_one_out_wrong(rows, labels, splits.n_classes)
        described = {"dataset": name, "representation": f"{backbone}, untrained"}
        described |= {"rows": "all rows, leave-one-out", "seed": 0, "n_classes": splits.n_classes}
        tables.append(described | bracket(wrong, splits.n_classes))
    return pd.DataFrame(tables)


def bracket_table(brackets: pd.DataFrame) -> pd.DataFrame:
    """Return brackets in per cent, ready to print."""
    limits = [
        f"{100 * row['lower']:.2f} to {100 * row['upper']:.2f}"
        for row in brackets.to_dict("records")
    ]
    widened = [
        f"{100 * row['low']:.2f} to {100 * row['high']:.2f}" for row in brackets.to_dict("records")
    ]
    return pd.DataFrame(
        {
            "data": brackets["dataset"],
            "representation": brackets["representation"],
            "rows": brackets["rows"],
            "seed": brackets["seed"],
            "queries": brackets["n_queries"],
            "Bayes error (%)": limits,
            "with 95 % interval": widened,
        }
    )


def _nearest_wrong(
    bank: MemoryBank, queries: Float[np.ndarray, "B D"], labels: Int[np.ndarray, " B"]
) -> Bool[np.ndarray, " B"]:
    return bank.search(queries, 1).labels[:, 0].numpy() != labels


def _leave_one_out_wrong(
    rows: Float[np.ndarray, "N D"], labels: Int[np.ndarray, " N"], n_classes: int
) -> Bool[np.ndarray, " N"]:
    bank = MemoryBank(rows, labels, n_classes=n_classes, index="flat_ip")
    found = bank.search(rows, 1, exclude_ids=np.arange(len(rows)))
    return (found.labels[:, 0] != torch.from_numpy(labels)).numpy()
