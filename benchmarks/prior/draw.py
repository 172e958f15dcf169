"""Drawn tables: made-up classification problems from which the prior learns what to expect.

Every table is drawn from one seed: how many rows, columns and classes, how labels depend on the
rows, what is done to the columns, and which labels of the memory are wrong. Labels are *drawn* from
class probabilities, so that ambiguity is common, and a query's target is always the right label:
that is how the prior learns when disagreement means ambiguity and when it means error.

No real table is used. Axes: N rows, F columns, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import softmax

ROWS, MANY_ROWS, MANY_SHARE = (40, 2500), (2500, 8000), 0.06  # log-uniform
N_QUERIES = 160
CLEAN_SHARE, WRONG = 0.4, (0.02, 0.48)
LEAST_PER_CLASS = 2  # memory rows that a class must have to stay


@dataclass(frozen=True)
class DrawnTable:
    """A memory with labels of which some may be wrong, and queries with right ones.

    Attributes:
        memory: Rows; a data frame where some columns are categories, unit rows of an embedding.
        labels: Their labels as given.
        right: Their right labels.
        queries: Other rows of the same kind.
        targets: Their right labels.
        n_classes: C.
        kind: How labels depend on rows.
        noise: How labels went wrong; "clean" where none did.
    """

    memory: np.ndarray | pd.DataFrame
    labels: np.ndarray
    right: np.ndarray
    queries: np.ndarray | pd.DataFrame
    targets: np.ndarray
    n_classes: int
    kind: str
    noise: str


def draw_table(seed: int, *, noise: bool = True) -> DrawnTable:
    """Return the table of a seed.

    Args:
        seed: Decides everything.
        noise: Whether labels may be wrong; the rows are the same without.
    """
    rng = np.random.default_rng([20261119, seed])
    while True:
        drawn = _try_table(rng, noise)
        if drawn is not None:
            return drawn


def _try_table(rng: np.random.Generator, noise: bool) -> DrawnTable | None:
    limits = MANY_ROWS if rng.random() < MANY_SHARE else ROWS
    n_memory = int(np.exp(rng.uniform(*np.log(limits))))
    kind = rng.choice(list(KINDS), p=[share for _, share in KINDS.values()])
    rows, probs = KINDS[kind][0](rng, n_memory + N_QUERIES)
    right = (probs.cumsum(axis=1) > rng.random((len(probs), 1))).argmax(axis=1)
    is_memory = np.arange(len(right)) < n_memory
    if rng.random() < 0.25:  # a tail: classes lose more and more of their memory rows
        kept_share = rng.uniform(0.02, 0.6) ** (np.arange(probs.shape[1]) / (probs.shape[1] - 1))
        lost = rng.random(len(right)) > rng.permutation(kept_share)[right]
        right, probs = right[~lost], probs[~lost]
        rows, is_memory = rows[~lost], is_memory[~lost]
    counts = np.bincount(right[is_memory], minlength=probs.shape[1])
    codes = np.flatnonzero(counts >= LEAST_PER_CLASS)
    known = np.isin(right, codes)
    if len(codes) < 2 or (known & is_memory).sum() < ROWS[0] // 2 or (known & ~is_memory).sum() < 8:
        return None
    right, rows, is_memory = np.searchsorted(codes, right[known]), rows[known], is_memory[known]
    probs = probs[known][:, codes]
    how = str(rng.choice(list(NOISE)))
    labels, rate = right[is_memory], rng.uniform(*WRONG)
    if not noise or rng.random() < CLEAN_SHARE:
        how = "clean"
    else:
        labels = NOISE[how](rng, labels, probs[is_memory], rate, len(codes))
    if kind != "embedding":
        rows = _columns(rng, rows)
    return DrawnTable(
        memory=rows[is_memory].reset_index(drop=True) if _is_frame(rows) else rows[is_memory],
        labels=labels,
        right=right[is_memory],
        queries=rows[~is_memory].reset_index(drop=True) if _is_frame(rows) else rows[~is_memory],
        targets=right[~is_memory],
        n_classes=len(codes),
        kind=kind,
        noise=how,
    )


def _is_frame(rows: np.ndarray | pd.DataFrame) -> bool:
    return isinstance(rows, pd.DataFrame)


# ---- How labels depend on rows: each returns N rows and their class probabilities.


def _n_classes(rng: np.random.Generator) -> int:
    return int(rng.choice([2, 3, 4, 5, 6, 8, 10], p=[0.4, 0.2, 0.12, 0.1, 0.06, 0.06, 0.06]))


def _latent(rng: np.random.Generator, n_rows: int) -> np.ndarray:
    """Return rows of 2 to 12 meaningful numbers: normal, uniform, or in clumps."""
    width = int(rng.integers(2, 13))
    if rng.random() < 0.35:
        return rng.uniform(-1.7, 1.7, (n_rows, width))
    rows = rng.normal(size=(n_rows, width))
    if rng.random() < 0.4:
        centres = rng.normal(size=(int(rng.integers(2, 9)), width)) * rng.uniform(0.5, 3)
        rows = rows * rng.uniform(0.3, 1) + centres[rng.integers(len(centres), size=n_rows)]
    return rows


def _sharpness(rng: np.random.Generator) -> float:
    """Return how clear labels are: from nearly chance to nearly certain."""
    return float(np.exp(rng.uniform(np.log(0.7), np.log(18))))


def _probs(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """Return probabilities of scaled logits; some classes are commoner than others."""
    logits = (logits - logits.mean(axis=0)) / (logits.std() + 1e-9)
    bias = rng.normal(size=logits.shape[1]) * rng.choice([0.0, 0.5, 1.5], p=[0.4, 0.4, 0.2])
    sharpness = _sharpness(rng)
    return softmax(sharpness * (logits + bias), axis=1)


def _clusters(rng: np.random.Generator, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Every class is a few Gaussian clusters; probabilities by Bayes' rule."""
    n_classes, width = _n_classes(rng), int(rng.integers(2, 13))
    n_each = int(rng.integers(1, 5))
    spread = np.exp(rng.uniform(np.log(0.5), np.log(4))) * np.sqrt(2 / width)
    centres = rng.normal(size=(n_classes * n_each, width)) * spread
    scales = np.exp(rng.normal(size=(len(centres), width)) * rng.uniform(0, 0.6))
    shares = rng.dirichlet(np.full(len(centres), rng.choice([1.0, 3.0, 30.0])))
    which = rng.choice(len(centres), size=n_rows, p=shares)
    rows = centres[which] + rng.normal(size=(n_rows, width)) * scales[which]
    gaps = (rows[:, None] - centres) / scales
    logs = np.log(shares) - 0.5 * (gaps**2).sum(axis=2) - np.log(scales).sum(axis=1)
    each = softmax(logs, axis=1).reshape(n_rows, n_classes, n_each)
    return rows, each.sum(axis=2)


def _network(rng: np.random.Generator, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels by a random network of the rows."""
    rows = _latent(rng, n_rows)
    bend = [np.tanh, np.sin, np.abs, lambda x: np.maximum(x, 0)][rng.integers(4)]
    hidden = rows
    for _ in range(int(rng.integers(1, 4))):
        weights = rng.normal(size=(hidden.shape[1], int(rng.integers(4, 33))))
        weights *= rng.uniform(0.5, 2.0) / np.sqrt(hidden.shape[1])
        hidden = bend(hidden @ weights + rng.normal(size=weights.shape[1]) * 0.5)
    return rows, _probs(rng, hidden @ rng.normal(size=(hidden.shape[1], _n_classes(rng))))


def _linear(rng: np.random.Generator, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels by linear scores, some columns squared."""
    rows, n_classes = _latent(rng, n_rows), _n_classes(rng)
    weights = rng.normal(size=(rows.shape[1], n_classes)) * rng.exponential(size=(rows.shape[1], 1))
    logits = rows @ weights
    if rng.random() < 0.3:
        logits = logits + rng.uniform(0, 1) * rows**2 @ rng.normal(size=weights.shape)
    return rows, _probs(rng, logits)


def _trees(rng: np.random.Generator, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels by the leaves of one or a few random trees."""
    rows, n_classes = _latent(rng, n_rows), _n_classes(rng)
    total = np.zeros((n_rows, n_classes))
    for _ in range(int(rng.integers(1, 6))):
        leaf = np.zeros(n_rows, np.int64)
        for _ in range(int(rng.integers(2, 7))):  # one column and threshold a node of each level
            columns = rng.integers(rows.shape[1], size=leaf.max() + 1)
            values = rows[np.arange(n_rows), columns[leaf]]
            cuts = rng.choice(values, size=leaf.max() + 1)
            leaf = 2 * leaf + (values > cuts[leaf])
        total += rng.normal(size=(leaf.max() + 1, n_classes))[leaf]
    return rows, _probs(rng, total)


def _categories(rng: np.random.Generator, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Few values in each column: many rows are alike, and their labels still differ."""
    n_classes, width = _n_classes(rng), int(rng.choice([1, 2, 3, 4, 6, 8, 10]))
    levels = rng.integers(2, 7, size=width)
    codes = [rng.choice(n, size=n_rows, p=rng.dirichlet(np.full(n, 2.0))) for n in levels]
    rows = np.stack(codes, axis=1)
    logits = sum(rng.normal(size=(n, n_classes))[codes[i]] for i, n in enumerate(levels))
    for _ in range(int(rng.integers(0, 4))):  # pairs that count together
        i, j = rng.integers(width, size=2)
        logits = logits + rng.normal(size=(levels[i], levels[j], n_classes))[codes[i], codes[j]]
    return rows.astype(np.float64), _probs(rng, logits)


def _embedding(rng: np.random.Generator, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows of a wide embedding: a direction a class, some near to each other, few axes."""
    n_classes = int(np.exp(rng.uniform(np.log(2), np.log(100))))
    n_classes = max(2, min(n_classes, n_rows // 8))
    width = int(rng.choice([32, 64, 128, 256, 512]))
    n_axes = int(rng.integers(4, min(width, 64)))
    n_groups = int(rng.integers(1, n_classes + 1))
    groups = rng.normal(size=(n_groups, n_axes)) * rng.uniform(0, 1.5)
    centres = rng.normal(size=(n_classes, n_axes)) + groups[rng.integers(n_groups, size=n_classes)]
    centres *= np.exp(rng.uniform(np.log(0.5), np.log(6))) / np.sqrt(n_axes) * 2
    scales = np.exp(rng.normal(size=n_axes) * rng.uniform(0, 0.8))
    shares = rng.dirichlet(np.full(n_classes, rng.choice([2.0, 50.0])))
    which = rng.choice(n_classes, size=n_rows, p=shares)
    rows = centres[which] + rng.normal(size=(n_rows, n_axes)) * scales
    squares = (((rows[:, None] - centres) / scales) ** 2).sum(axis=2)
    probs = softmax(np.log(shares) - 0.5 * squares, axis=1)
    if rng.random() < 0.3:  # a share of rows that looks like another class: errors that stay
        stray = rng.random(n_rows) < rng.uniform(0.01, 0.15)
        flat = np.full(n_classes, 1 / n_classes)
        probs[stray] = rng.uniform(0.1, 0.8) * flat + 0.2 * probs[stray]
        probs /= probs.sum(axis=1, keepdims=True)
    basis = np.linalg.qr(rng.normal(size=(width, n_axes)))[0]
    rest = rng.normal(size=(n_rows, width)) * rng.uniform(0, 0.3) * np.sqrt(n_axes / width)
    offset = rng.normal(size=width) / np.sqrt(width) * rng.choice([0.0, 3.0])
    wide = rows @ basis.T + rest + offset
    return wide / np.linalg.norm(wide, axis=1, keepdims=True), probs


KINDS: dict[str, tuple[Callable, float]] = {
    "clusters": (_clusters, 0.17),
    "network": (_network, 0.2),
    "linear": (_linear, 0.13),
    "trees": (_trees, 0.2),
    "categories": (_categories, 0.14),
    "embedding": (_embedding, 0.16),
}


# ---- What is done to columns: what matters is mixed, bent, rounded, and hidden among others.


def _columns(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray | pd.DataFrame:
    n_rows, width = rows.shape
    levels = [len(np.unique(rows[:, i])) for i in range(width)]
    as_categories = max(levels) <= 10  # drawn as categories
    if not as_categories and rng.random() < 0.35:  # every column says a little of everything
        wide = max(width, int(rng.integers(width, 3 * width + 1)))
        rows = rows @ rng.normal(size=(width, wide)) / np.sqrt(width)
        rows = rows + rng.normal(size=rows.shape) * rng.uniform(0, 0.5) * rows.std(axis=0)
    n_idle = int(rng.integers(0, 25)) if rng.random() < 0.5 else int(rng.integers(0, 4))
    idle = rng.normal(size=(n_rows, n_idle))
    if n_idle and rng.random() < 0.4:  # idle columns that hang together
        idle = idle @ rng.normal(size=(n_idle, n_idle)) / np.sqrt(n_idle)
    columns = []
    for place, column in enumerate([*rows.T, *idle.T]):
        idle_categories = place >= rows.shape[1] and as_categories and rng.random() < 0.7
        if (as_categories and place < rows.shape[1]) or idle_categories:
            values = column if place < rows.shape[1] else np.round(column)
            columns.append(pd.Series(values.astype(np.int64).astype(str)))
        else:
            columns.append(pd.Series(_bent(rng, column)))
    order = rng.permutation(len(columns))
    frame = pd.DataFrame({f"x{i}": columns[place] for i, place in enumerate(order)})
    numbers = all(pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes)
    return frame.to_numpy(np.float64) if numbers else frame


def _bent(rng: np.random.Generator, column: np.ndarray) -> np.ndarray:
    """Return a column as a table might have it: skewed, rounded, with copies, in other units."""
    column = (column - column.mean()) / (column.std() + 1e-9)
    way = rng.random()
    if way < 0.12:
        column = np.exp(column * rng.uniform(0.3, 1.5))
    elif way < 0.18:
        column = column**3
    elif way < 0.24:
        column = np.maximum(column, np.quantile(column, rng.uniform(0.1, 0.7)))
    if rng.random() < 0.3:
        step = column.std() * rng.choice([0.1, 0.3, 1.0])
        column = np.round(column / (step + 1e-12)) * step
    return column * np.exp(rng.normal() * 2) + rng.normal()


# ---- Wrong labels: towards any class, one other class, or where classes are hard to tell apart.


def _any_class(rng, labels, probs, rate, n_classes):
    rate = min(rate, 0.85 * (1 - 1 / n_classes))
    flipped = rng.random(len(labels)) < rate
    return np.where(flipped, (labels + rng.integers(1, n_classes, len(labels))) % n_classes, labels)


def _one_other(rng, labels, probs, rate, n_classes):
    ring = rng.permutation(n_classes)
    other = np.empty(n_classes, np.int64)
    other[ring] = np.roll(ring, -1)
    rates = np.clip(rate * rng.uniform(0, 2, n_classes), 0, 0.45)
    flipped = rng.random(len(labels)) < rates[labels]
    return np.where(flipped, other[labels], labels)


def _near_the_border(rng, labels, probs, rate, n_classes):
    """The second likeliest class is named, the rather the nearer it comes."""
    others = probs.copy()
    others[np.arange(len(labels)), labels] = 0
    closeness = others.max(axis=1) ** 0.5 + 0.02
    chances = np.clip(0.6 * rate * closeness / closeness.mean(), 0, 0.6)
    return np.where(rng.random(len(labels)) < chances, others.argmax(axis=1), labels)


NOISE: dict[str, Callable] = {
    "any": _any_class,
    "any too": _any_class,  # the commonest kind
    "one other": _one_other,
    "border": _near_the_border,
}
