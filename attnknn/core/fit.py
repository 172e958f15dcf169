"""Stage 2: fit the attention on held-out queries against the memory as it is.

Rows the embedder was trained on have tidier neighbourhoods than new ones, and an attention fitted
on them grows over-confident. So it is fitted on queries the embedder never saw. That takes seconds
and can be repeated whenever the memory changes.

Axes: B queries, K neighbours of each, C classes, N memory rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from sklearn.model_selection import train_test_split
from torch import Tensor
from tqdm import tqdm

from attnknn.checks import check_labels
from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core.attention import NeighbourAttention, attention_probs
from attnknn.core.bank import MemoryBank
from attnknn.core.calibrate import LabelError, is_identity, transition_matrix, wrong_share
from attnknn.core.neighbours import LabelView, Neighbours
from attnknn.core.noise import corrected_nll, label_transition, noisy_views, view_pool
from attnknn.core.vote import Attention

# ---- What an attention is fitted on: queries, their labels, and draws of wrong memory labels.
#
# Axes: B queries, C classes.

NOISE_CHECKS = (0.0, 0.5, 1.0)  # shares of the largest noise rate at which a transfer fit is judged


@dataclass(frozen=True)
class Queries:
    """Queries with their labels and how much each counts.

    Attributes:
        neighbours: What the queries found.
        labels: Their labels.
        label_error: How classes turn into labels; 0 where the labels are right.
        weights: How much each query counts; None counts all alike.
        views: Draws of wrong memory labels, of which every batch meets one; none leaves them be.
    """

    neighbours: Neighbours
    labels: Int[Tensor, " B"]
    label_error: float | Float[Tensor, "C C"]
    weights: Float[Tensor, " B"] | None
    views: list[LabelView]

    def batch(self, rows: Int[Tensor, " R"], generator: torch.Generator) -> Neighbours:
        """Return the neighbours of some queries, under one of the draws where there are any."""
        batch = self.neighbours.of_queries(rows)
        if not self.views:
            return batch
        place = torch.randint(len(self.views), (), generator=generator)
        return batch.with_view(self.views[int(place)])

    def loss(
        self, log_probs: Float[Tensor, "R C"], rows: Int[Tensor, " R"], *, reduce: bool = True
    ) -> Tensor:
        """Return the loss of the given rows, as a mean or one by one."""
        weights = None if self.weights is None else self.weights[rows]
        return corrected_nll(log_probs, self.labels[rows], self.label_error, weights, reduce=reduce)


def make_queries(
    bank: MemoryBank,
    neighbours: Neighbours,
    labels: Int[np.ndarray, " B"],
    label_error: LabelError,
    weights: Float[np.ndarray, " B"] | None,
    fitting: FittingConfig,
    seed: int,
) -> Queries:
    """Return the queries as tensors, with the draws that trial and final fit share."""
    matrix = transition_matrix(label_error, bank.n_classes)
    generator = torch.Generator().manual_seed(seed + 2)
    return Queries(
        neighbours,
        torch.from_numpy(labels),
        0.0 if is_identity(matrix) else torch.from_numpy(matrix).float(),
        None if weights is None else torch.tensor(weights).float(),
        view_pool(bank, fitting.fit_noise_max, generator) if fitting.fit_noise_max else [],
    )


def judging_sets(
    bank: MemoryBank, held: Neighbours, fitting: FittingConfig, seed: int
) -> list[Neighbours]:
    """Return the neighbourhoods that judge an epoch: as they are, or at fixed noise draws."""
    if fitting.fit_noise_max == 0:
        return [held]
    # Draws of their own: the fit has not seen them.
    generator = torch.Generator().manual_seed(seed)
    rates = fitting.fit_noise_max * torch.tensor(NOISE_CHECKS)
    return [held.with_view(view) for view in noisy_views(bank, rates, generator)]


# ---- Held-out queries: some to fit on, the others to judge the fit.
#
# Axes: B queries.


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


# ---- Unseen queries: by how much a fit is too sure of itself, in one number.
#
# An attention knows the queries it is fitted on better than new ones, the more so the more
# parameters
# it has and the fewer queries there are. What it says of them is honest; of new ones it says too
# much. So every query is once left out and predicted by a fit on the others, and one temperature is
# fitted to those predictions.
#
# Axes: B queries, M of them in a fold.

# Unseen queries may hold an attention back, never embolden it: a few rows that all happen to be
# right would ask for certainty.
LAST_TEMPERATURES = (1.0, 10.0)


def unseen_temperature(
    fit_part: Callable[[Int[Tensor, " F"]], NeighbourAttention],
    bank: MemoryBank,
    queries: Queries,
    fitting: FittingConfig,
    seed: int,
) -> float:
    """Return the temperature, at least 1, that suits queries which a fit has not seen.

    Args:
        fit_part: Fits an attention on some of the queries.
        bank: The memory that votes.
        queries: All of them.
        fitting: Number of folds; fewer than 2, or than there are queries, leaves the temperature 1.
        seed: Decides the folds.
    """
    if not 2 <= fitting.fit_folds <= len(queries.labels):
        return 1.0
    folds = torch.from_numpy(query_folds(queries.labels.numpy(), fitting.fit_folds, seed=seed))
    judges = judging_sets(bank, queries.neighbours, fitting, seed)
    rows, log_probs = [], []
    for fold in range(fitting.fit_folds):
        left_out = (folds == fold).nonzero().squeeze(1)
        # NOTE: leakage guard. The fit that predicts these queries has not seen them.
        attention = fit_part((folds != fold).nonzero().squeeze(1))
        for held in judges:
            rows.append(left_out)
            log_probs.append(attention_probs(attention, held.of_queries(left_out))[0].log())
    return _best_temperature(torch.cat(log_probs), torch.cat(rows), queries)


def _best_temperature(
    log_probs: Float[Tensor, "R C"], rows: Int[Tensor, " R"], queries: Queries
) -> float:
    """Return the temperature with the smallest loss of the given rows."""

    def loss(log_temperature: float) -> float:
        tempered = (log_probs / np.exp(log_temperature)).log_softmax(dim=1)
        return float(queries.loss(tempered, rows))

    found = minimize_scalar(loss, bounds=np.log(LAST_TEMPERATURES), method="bounded")
    return float(np.exp(found.x)) if found.fun < loss(0.0) else 1.0


HISTORY = ["epoch", "fit_nll", "stop_nll", "entropy", "kept"]
PREPARED_CELLS = 50_000_000  # query-neighbour-class histograms that are kept over all epochs


@dataclass(frozen=True)
class FittedAttention:
    """An attention with the record of its fit.

    Attributes:
        attention: The attention, fitted on all queries, in evaluation mode.
        history: One row an epoch of the trial fit that chose the length: fit and stop loss, mean
            attention entropy, and whether the final fit has this epoch (``kept``).
        label_error: Estimated share of wrong held-out labels; 0 when they are taken as clean.
        k: Neighbours it was fitted to weigh; at another k it is still valid, but less good.
        n_epochs: Epochs of the fit.
        temperature: By how much its probabilities were flattened at last, as queries that a fit
            has not seen ask for; 1 leaves them.
    """

    attention: NeighbourAttention
    history: pd.DataFrame
    label_error: float
    k: int
    n_epochs: int
    temperature: float

    @property
    def method(self) -> Attention:
        """The attention as a way to weigh the k neighbours it was fitted for."""
        return Attention(self.k, self.attention)

    @property
    def judged_nll(self) -> float:
        """NLL of the judging queries under the trial fit, which has not seen them."""
        return judged_nll(self.history)


def judged_nll(history: pd.DataFrame) -> float:
    """Return the stop loss of the last epoch that was kept."""
    return float(history.loc[history["kept"], "stop_nll"].iloc[-1])


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
        fitting: Epochs, rates, noise augmentation, forward correction. A memory of fewer rows than
            ``fit_k`` is asked for all of them; the result's ``k`` says how many.
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
    label_error: LabelError | None = None,
    weights: Float[np.ndarray, " B"] | None = None,
    n_epochs: int | None = None,
    temperature: float | None = None,
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
        label_error: Share of wrong query labels, or how classes turn into labels (see
            ``attnknn.core.calibrate``), where it is known better than by the estimate that
            ``fitting`` may ask for.
        weights: How much each query counts in the loss; None counts all alike.
        n_epochs: Epochs to fit, where an earlier fit has found out how many are good; None makes a
            trial.
        temperature: Last temperature, where an earlier fit has found it out; None leaves every
            fold of the queries out once to find it.
    """
    _check_numbers(len(neighbours.ids), n_epochs, fitting)
    checked = check_labels("labels", labels, n_rows=len(neighbours.ids), n_classes=bank.n_classes)
    if label_error is None:
        label_error = label_transition(neighbours, checked) if fitting.fit_noisy_labels else 0.0
    if attention.denoise and fitting.fit_noise_max == 0:
        _prepare(neighbours)
    queries = make_queries(bank, neighbours, checked, label_error, weights, fitting, seed)
    history = pd.DataFrame(columns=HISTORY)
    n_fits = 1 + (n_epochs is None) + (fitting.fit_folds if temperature is None else 0)
    bar = tqdm(
        total=fitting.fit_epochs * n_fits, desc="fit attention", disable=not progress, leave=False
    )
    if n_epochs is None:
        history = _try(attention, bank, queries, fitting, seed, bar)
        n_epochs = int(history["kept"].sum())
    # The rate falls to zero within the epochs there are: a fit that is cut off is left unsettled.
    fit_part = partial(
        _fit, attention, bank, queries, replace(fitting, fit_epochs=n_epochs), seed, bar
    )
    if temperature is None:
        temperature = unseen_temperature(fit_part, bank, queries, fitting, seed)
    model = fit_part(None)
    model.last_temperature.fill_(temperature)
    bar.close()
    error = wrong_share(label_error)
    return FittedAttention(model, history, error, neighbours.k, n_epochs, temperature)


def _check_numbers(n_queries: int, n_epochs: int | None, fitting: FittingConfig) -> None:
    if n_queries < 2:
        raise ValueError(
            f"queries must number at least 2, one to fit and one to stop on, got {n_queries}"
        )
    if n_epochs is not None and not 1 <= n_epochs <= fitting.fit_epochs:
        raise ValueError(
            f"n_epochs must lie between 1 and fit_epochs={fitting.fit_epochs}, got {n_epochs=}"
        )


def _prepare(neighbours: Neighbours) -> None:
    """Look up once, not in every batch, what all batches read; too much to hold is left."""
    if neighbours.ids.numel() * neighbours.n_classes <= PREPARED_CELLS:
        _ = neighbours.labels, neighbours.trust
        _ = neighbours.histograms, neighbours.prototype_cosines


def _fit(
    attention: AttentionConfig,
    bank: MemoryBank,
    queries: Queries,
    fitting: FittingConfig,
    seed: int,
    bar: tqdm,
    rows: Int[Tensor, " F"] | None,
) -> NeighbourAttention:
    """Fit on some of the queries; None: on all."""
    model = _start(attention, bank, seed)
    for _ in _descend(model, queries, rows, fitting, seed):
        bar.update()
    return model


def _try(
    attention: AttentionConfig,
    bank: MemoryBank,
    queries: Queries,
    fitting: FittingConfig,
    seed: int,
    bar: tqdm,
) -> pd.DataFrame:
    """Fit on some of the queries, judged by the others, to find out how long to fit.

    The rows that judge are a fifth of what there is to learn from: an attention that never sees
    them is clearly worse than one that does. So this one is thrown away, and the length kept.
    """
    fit_rows, stop_rows = fit_and_stop_rows(queries.labels, fitting.fit_stop_share, seed)
    judges = judging_sets(bank, queries.neighbours.of_queries(stop_rows), fitting, seed)
    trial = _start(attention, bank, seed)
    history, stop_losses = [], []
    for epoch, fit_loss in enumerate(_descend(trial, queries, fit_rows, fitting, seed)):
        losses, entropy = _judge(trial, judges, queries, stop_rows)
        stop_losses.append(losses)
        history.append((epoch, fit_loss, float(losses.mean()), entropy))
        bar.set_postfix(nll=f"{history[-1][2]:.4f}", refresh=False)
        bar.update()
    # The length of the fit is chosen on rows that were not fitted on; the test split plays no part.
    last = latest_good_epoch(torch.stack(stop_losses))
    return pd.DataFrame([(*row, row[0] <= last) for row in history], columns=HISTORY)


def _start(attention: AttentionConfig, bank: MemoryBank, seed: int) -> NeighbourAttention:
    """Return an attention with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # leaves the generators of a GPU alone
        return NeighbourAttention(attention, dim=bank.dim, n_classes=bank.n_classes)


def _descend(
    model: NeighbourAttention,
    queries: Queries,
    rows: Int[Tensor, " F"] | None,
    fitting: FittingConfig,
    seed: int,
) -> Iterator[float]:
    """Fit ``model`` in place on the given rows (None: all), epoch by epoch; yield mean losses."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = torch.arange(len(queries.labels)) if rows is None else rows
    steps = -(-len(rows) // fitting.fit_batch_size) * fitting.fit_epochs
    options = {"lr": fitting.fit_lr, "weight_decay": fitting.fit_weight_decay}
    optimiser = torch.optim.AdamW(model.parameters(), fused=True, **options)  # many tiny tensors
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(fitting.fit_epochs):
        model.train()
        losses = []
        order = rows[torch.randperm(len(rows), generator=generator)]
        for chosen in order.split(fitting.fit_batch_size):
            attended = model(queries.batch(chosen, generator))
            loss = queries.loss(attended.log_probs, chosen) + model.penalty()
            if not torch.isfinite(loss):
                raise RuntimeError(f"the attention's loss became {loss.item()}: lower fit_lr")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        model.eval()
        yield float(np.mean(losses))


@torch.no_grad()
def _judge(
    model: NeighbourAttention,
    judges: list[Neighbours],
    queries: Queries,
    rows: Int[Tensor, " S"],
) -> tuple[Float[Tensor, " S"], float]:
    """Return the loss of each judging row and the mean attention entropy."""
    attended = [model(held) for held in judges]
    losses = [queries.loss(each.log_probs, rows, reduce=False) for each in attended]
    entropies = [each.entropy().mean() for each in attended]
    return torch.stack(losses).mean(dim=0), float(torch.stack(entropies).mean())
