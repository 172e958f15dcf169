"""Held-out queries: some to fit on, the others to judge the fit.

Axes: B queries.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.model_selection import train_test_split
from torch import Tensor


def fit_and_stop_rows(
    labels: Int[Tensor, " B"], stop_share: float, seed: int
) -> tuple[Int[Tensor, " F"], Int[Tensor, " S"]]:
    """Split the queries by class; classes with a single query go to the fit side."""
    counts, n_stop = labels.bincount(), round(stop_share * len(labels))
    single = (counts[labels] == 1).numpy()
    rows, stratify, n_groups = (
        np.flatnonzero(~single),
        labels.numpy()[~single],
        int((counts > 1).sum()),
    )
    if single.all():  # no class twice: any row may judge
        rows, stratify, n_groups, single = np.arange(len(labels)), None, 1, ~single
    n_stop = int(np.clip(n_stop, n_groups, len(rows) - n_groups))  # what stratifying asks for
    fit, stop = train_test_split(rows, test_size=n_stop, random_state=seed, stratify=stratify)
    fit = np.concatenate([fit, np.flatnonzero(single)])
    return torch.from_numpy(np.sort(fit)), torch.from_numpy(np.sort(stop))


def query_folds(labels: Int[np.ndarray, " B"], n_folds: int, *, seed: int) -> Int[np.ndarray, " B"]:
    """Return a fold for each query; a class is spread over the folds as evenly as it can be."""
    order = np.lexsort((np.random.default_rng(seed).random(len(labels)), labels))
    folds = np.empty(len(labels), dtype=np.int64)
    folds[order] = np.arange(len(labels)) % n_folds
    return folds


def latest_good_epoch(losses: Float[Tensor, "epochs S"]) -> int:
    """Return the last epoch whose mean loss is within one standard error of the best epoch's.

    The rate falls to zero, so later is better unless the fit has begun to learn its rows by heart.
    The plain minimum over a few hundred rows is mostly luck, and tends to come far too early.

    Args:
        losses: Loss of every judging row after every epoch.
    """
    means = losses.mean(dim=1)
    gaps = losses - losses[means.argmin()]  # row by row: what is hard for all cancels out
    allowed = gaps.std(dim=1) / losses.shape[1] ** 0.5 if losses.shape[1] > 1 else 0.0
    return int((gaps.mean(dim=1) <= allowed).nonzero().max())
