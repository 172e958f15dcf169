"""Stage 2: fit the attention on held-out queries against the memory as it is.

Rows the embedder was trained on have tidier neighbourhoods than new ones, and an attention fitted
on them grows over-confident. So it is fitted on queries the embedder never saw. That takes seconds
and can be repeated whenever the memory changes.

Axes: B queries, K neighbours of each, C classes, N memory rows.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from sklearn.model_selection import train_test_split
from torch import Tensor
from tqdm import tqdm

from attnknn.attention import NeighbourAttention
from attnknn.checks import check_labels, check_range
from attnknn.config import AttentionConfig, FittingConfig
from attnknn.memory import MemoryBank
from attnknn.neighbours import Neighbours

NOISE_CHECKS = (0.0, 0.5, 1.0)  # shares of the largest noise rate at which a transfer fit is judged
PREPARED_CELLS = 50_000_000  # query-neighbour-class histograms that are kept over all epochs
ERROR_VOTERS = 20  # neighbours whose majority label tells a held-out label that looks wrong


@dataclass(frozen=True)
class FittedAttention:
    """An attention with the record of its fit.

    Attributes:
        attention: The attention of the best epoch, in evaluation mode.
        history: One row an epoch: fit and stop loss, mean attention entropy.
        label_error: Estimated share of wrong held-out labels; 0 when they are taken as clean.
        k: Neighbours it was fitted to weigh; at another k it is still valid, but less good.
    """

    attention: NeighbourAttention
    history: pd.DataFrame
    label_error: float
    k: int


def fit_attention(
    bank: MemoryBank,
    queries: Float[np.ndarray, "B D"],
    labels: Int[np.ndarray, " B"],
    *,
    attention: AttentionConfig,
    fitting: FittingConfig,
    seed: int = 0,
    exclude_ids: Int[np.ndarray, " B"] | None = None,
    progress: bool = False,
) -> FittedAttention:
    """Fit an attention so that the queries' true labels become likely.

    Args:
        bank: The memory that votes.
        queries: Unit-length rows that the embedder has not been trained on.
        labels: Their labels.
        attention: Which parts the attention has.
        fitting: Epochs, rates, noise augmentation, forward correction.
        seed: Decides the initial weights, the order and the fit / stop split.
        exclude_ids: The queries' own bank rows, where the queries are memory rows themselves.
        progress: Show a progress bar.
    """
    k = min(fitting.fit_k, len(bank) - (exclude_ids is not None))
    neighbours = bank.search(queries, k, exclude_ids=exclude_ids)
    return fit_on_neighbours(
        bank, neighbours, labels, attention=attention, fitting=fitting, seed=seed, progress=progress
    )


def fit_on_neighbours(
    bank: MemoryBank,
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    *,
    attention: AttentionConfig,
    fitting: FittingConfig,
    seed: int = 0,
    progress: bool = False,
    label_error: float | None = None,
    weights: Float[np.ndarray, " B"] | None = None,
) -> FittedAttention:
    """Fit an attention on a search that is already done; see ``fit_attention``.

    Args:
        bank: The memory that votes.
        neighbours: What the queries found there.
        labels: Labels of the queries.
        attention: Which parts the attention has.
        fitting: Epochs, rates, noise augmentation, forward correction.
        seed: Decides the initial weights, the order and the fit / stop split.
        progress: Show a progress bar.
        label_error: Share of wrong query labels, where it is known better than by the estimate
            that ``fitting`` may ask for.
        weights: How much each query counts in the loss; None counts all alike.
    """
    n_queries = len(neighbours.ids)
    if n_queries < 2:
        raise ValueError(
            f"queries must number at least 2, one to fit and one to stop on, got {n_queries}"
        )
    checked = check_labels("labels", labels, n_rows=n_queries, n_classes=bank.n_classes)
    targets = torch.from_numpy(checked)
    if label_error is None:
        label_error = label_error_rate(neighbours, targets) if fitting.fit_noisy_labels else 0.0
    counts = None if weights is None else torch.tensor(weights).float()
    prepare = attention.denoise and fitting.fit_noise_max == 0
    if prepare and neighbours.ids.numel() * bank.n_classes <= PREPARED_CELLS:
        _ = neighbours.histograms, neighbours.prototype_cosines  # once, not in every batch
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # leaves the generators of a GPU alone
        model = NeighbourAttention(attention, dim=bank.dim, n_classes=bank.n_classes)
        history = _fit(
            model, bank, neighbours, targets, counts, fitting, label_error, seed, progress
        )
    return FittedAttention(model.eval(), history, label_error, neighbours.k)


def label_error_rate(neighbours: Neighbours, labels: Int[Tensor, " B"]) -> float:
    """Return the share of queries whose label differs from their neighbours' majority label.

    It is held just below chance: labels as wrong as that say nothing, and cannot be corrected for.
    """
    voters = neighbours.nearest(min(ERROR_VOTERS, neighbours.k)).labels
    rate = float((voters.mode(dim=1).values != labels).float().mean())
    return min(rate, 0.95 * (1 - 1 / neighbours.n_classes))


def corrected_nll(
    log_probs: Float[Tensor, "B C"],
    labels: Int[Tensor, " B"],
    label_error: float,
    weights: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Return the (weighted) mean NLL of labels that are wrong at a known rate.

    This is the forward correction.

    A wrong label is taken to be any other class with equal chance, so the observed label has
    probability (1 - e) p + e (1 - p) / (C - 1). At e = 0 this is the plain NLL; at e = 1 - 1/C the
    labels say nothing, and beyond they would be read as their opposite, so e must be smaller.
    """
    chance = 1 - 1 / log_probs.shape[1]
    check_range("label_error", label_error, low=0, high=chance, high_open=True)
    losses = -log_probs.gather(1, labels[:, None]).squeeze(1)
    if label_error > 0:
        probs = (-losses).exp()
        others = (1 - probs) / (log_probs.shape[1] - 1)
        losses = -((1 - label_error) * probs + label_error * others).log()
    return losses.mean() if weights is None else (weights * losses).sum() / weights.sum()


def noisy_labels(
    labels: Int[Tensor, " N"], rate: float, n_classes: int, generator: torch.Generator
) -> Int[Tensor, " N"]:
    """Return labels of which each is replaced, with chance ``rate``, by any other class."""
    flipped = torch.rand(len(labels), generator=generator) < rate
    shift = torch.randint(1, n_classes, labels.shape, generator=generator)
    return torch.where(flipped, (labels + shift) % n_classes, labels)


def _fit(
    model: NeighbourAttention,
    bank: MemoryBank,
    neighbours: Neighbours,
    labels: Int[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
    fitting: FittingConfig,
    error: float,
    seed: int,
    progress: bool,
) -> pd.DataFrame:
    """Train ``model`` in place, leave it at its best epoch, return the history."""
    generator = torch.Generator().manual_seed(seed)
    fit_rows, stop_rows = fit_and_stop_rows(labels, fitting.fit_stop_share, seed)
    stop_sets = _stop_sets(bank, neighbours, stop_rows, fitting.fit_noise_max, generator)
    steps = -(-len(fit_rows) // fitting.fit_batch_size) * fitting.fit_epochs
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=fitting.fit_lr, weight_decay=fitting.fit_weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    best_loss, best_state, history = float("inf"), None, []
    bar = tqdm(range(fitting.fit_epochs), desc="fit attention", disable=not progress, leave=False)
    for epoch in bar:
        losses = []
        order = fit_rows[torch.randperm(len(fit_rows), generator=generator)]
        for rows in order.split(fitting.fit_batch_size):
            batch = neighbours.of_queries(rows)
            if fitting.fit_noise_max > 0:
                rate = fitting.fit_noise_max * torch.rand((), generator=generator).item()
                drawn = noisy_labels(bank.labels, rate, bank.n_classes, generator)
                batch = batch.with_view(bank.view_of(drawn))
            counts = None if weights is None else weights[rows]
            loss = corrected_nll(model(batch).log_probs, labels[rows], error, counts)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        counts = None if weights is None else weights[stop_rows]
        stop_loss, entropy = _judge(model, stop_sets, labels[stop_rows], error, counts)
        history.append((epoch, float(np.mean(losses)), stop_loss, entropy))
        bar.set_postfix(nll=f"{stop_loss:.4f}")
        # The epoch is chosen on rows that were not fitted on; the test split plays no part.
        if stop_loss < best_loss:
            best_state = {name: value.clone() for name, value in model.state_dict().items()}
            best_loss = stop_loss
    if best_state is None:
        raise RuntimeError("the attention's loss was never finite: check the embeddings")
    model.load_state_dict(best_state)
    return pd.DataFrame(history, columns=["epoch", "fit_nll", "stop_nll", "entropy"])


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


def _stop_sets(
    bank: MemoryBank,
    neighbours: Neighbours,
    stop_rows: Int[Tensor, " S"],
    noise_max: float,
    generator: torch.Generator,
) -> list[Neighbours]:
    """Return the neighbourhoods that judge an epoch: as they are, or at fixed noise draws."""
    held = neighbours.of_queries(stop_rows)
    if noise_max == 0:
        return [held]
    rates = [share * noise_max for share in NOISE_CHECKS]
    draws = [noisy_labels(bank.labels, rate, bank.n_classes, generator) for rate in rates]
    return [held.with_view(bank.view_of(labels)) for labels in draws]


@torch.no_grad()
def _judge(
    model: NeighbourAttention,
    stop_sets: list[Neighbours],
    labels: Int[Tensor, " S"],
    error: float,
    weights: Float[Tensor, " S"] | None,
) -> tuple[float, float]:
    """Return the mean loss and the mean attention entropy over the stop rows."""
    model.eval()
    attended = [model(held) for held in stop_sets]
    model.train()
    losses = [corrected_nll(each.log_probs, labels, error, weights) for each in attended]
    entropies = [each.entropy().mean() for each in attended]
    return float(torch.stack(losses).mean()), float(torch.stack(entropies).mean())
