"""Figures of one prediction: the neighbours that were asked, and how much each counted.

Axes: K neighbours, C classes.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnknn.figures.style import ALARM, COLUMN_WIDTH, FAINT, FULL_WIDTH, INK, METHOD_STYLES

_ACCENT = METHOD_STYLES["attention"].colour


def explanation(
    table: pd.DataFrame,
    *,
    query: int = 0,
    image: np.ndarray | None = None,
    images: Sequence[np.ndarray] | np.ndarray | None = None,
    predicted: object = None,
    query_note: str = "query",
    n_shown: int = 8,
) -> Figure:
    """Draw the explanation of one query: pictures of its neighbours where there are any, else bars.

    Bars are weights. The line below says what all neighbours (drawn or not) and the class
    prototypes add to the probability of the predicted class, before floor and temperature.

    Args:
        table: From ``attnknn.core.vote.explain``, or the ``explain`` of an estimator.
        query: Which of its queries.
        image: What the query looks like, as for `neighbour_strip`.
        images: What the memory rows look like, by ``id``.
        predicted: The predicted label; neighbours with another one have another colour.
        query_note: Written above the picture of the query.
        n_shown: Neighbours drawn, heaviest first.
    """
    if (image is None) != (images is None):
        raise ValueError("image and images must be given together, got one of them")
    rows = table[table["query"] == query]
    if rows.empty:
        raise ValueError(f"query must be in the table, got {query=}")
    codes, found = pd.factorize(rows["label"])
    names, ids = [str(name) for name in found], rows["id"].tolist()
    weights, trust = (rows[name].to_numpy(float) for name in ("weight", "trust"))
    options = {"trust": trust, "class_names": names, "n_shown": n_shown}
    if predicted is not None:  # no neighbour need carry the predicted label
        options["predicted"] = names.index(str(predicted)) if str(predicted) in names else -1
    if images is None:
        row_names = [f"row {place}" for place in ids]
        ax = neighbour_bars(weights, codes, row_names=row_names, **options)
        ax.set_xlabel(f"{ax.get_xlabel()}\n{_made_of(rows)}", parse_math=False)
        return ax.figure
    if len(images) <= max(ids):
        raise ValueError(
            f"images must hold a picture of every training row, got {len(images)} pictures "
            f"for row {max(ids)}"
        )
    pictures = np.stack([np.asarray(images[place]) for place in ids])
    figure = neighbour_strip(image, pictures, weights, codes, query_note=query_note, **options)
    figure.supxlabel(_made_of(rows), fontsize=8, parse_math=False)
    return figure


def _made_of(rows: pd.DataFrame) -> str:
    """Return what the predicted class's probability is made of, in words."""
    predicted, prototypes = (rows[name].iloc[0] for name in ("predicted", "prototypes"))
    votes = rows["vote"].sum()
    return f"for {predicted}: neighbours {votes:.2f}, class prototypes {prototypes:.2f}"


def neighbour_strip(
    query_image: np.ndarray,
    neighbour_images: np.ndarray,
    weights: Float[np.ndarray, "K"],
    neighbour_labels: Int[np.ndarray, "K"],
    *,
    trust: Float[np.ndarray, "K"] | None = None,
    class_names: Sequence[str] | None = None,
    query_note: str = "query",
    predicted: int | None = None,
    n_shown: int = 8,
) -> Figure:
    """Draw a query image and the neighbours that count most, with weight and trust as bars.

    A neighbour whose label is not the prediction has its name in another colour.

    Args:
        query_image: (height, width) or (height, width, 3), in [0, 1] or bytes.
        neighbour_images: K such images.
        weights: Weight of each neighbour.
        neighbour_labels: Label of each neighbour.
        trust: How much each neighbour's own surroundings agree with its label, in [0, 1].
        class_names: Names of the classes.
        query_note: Written above the query, for instance its prediction.
        predicted: Class that was predicted.
        n_shown: Neighbours drawn, heaviest first.
    """
    weights = weights.astype(float)
    trust = None if trust is None else trust.astype(float)
    order = np.argsort(-weights, kind="stable")[:n_shown]
    columns = len(order) + 1
    figure, axes = plt.subplots(
        2,
        columns,
        figsize=(FULL_WIDTH, FULL_WIDTH / columns + 0.6),
        gridspec_kw={"height_ratios": [FULL_WIDTH / columns, 0.35]},
        squeeze=False,
        layout="constrained",
    )
    _image(axes[0, 0], query_image, query_note, INK)
    axes[0, 0].spines[:].set(visible=True, color=_ACCENT, linewidth=1.5)
    _bar_names(axes[1, 0], with_trust=trust is not None)
    heaviest = float(weights[order[0]])
    for column, place in enumerate(order, start=1):
        label = int(neighbour_labels[place])
        agrees = predicted is None or label == predicted
        name = class_names[label] if class_names else str(label)
        _image(axes[0, column], neighbour_images[place], name, INK if agrees else ALARM)
        _bars(axes[1, column], weights[place], heaviest, None if trust is None else trust[place])
    return figure


def _image(ax: Axes, image: np.ndarray, title: str, colour: str) -> None:
    ax.imshow(image, cmap="gray" if np.ndim(image) == 2 else None)
    ax.set_title(title, fontsize=8, color=colour, pad=3, parse_math=False)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _bar_names(ax: Axes, *, with_trust: bool) -> None:
    for level, name in enumerate(["weight", "trust"][: 1 + with_trust]):
        ax.text(1.0, level, name, ha="right", va="center", fontsize=8)
    ax.set(xlim=(0, 1), ylim=(1.5, -0.5))
    ax.axis("off")


def _bars(ax: Axes, weight: float, heaviest: float, trust: float | None) -> None:
    shown = [(weight / heaviest if heaviest > 0 else 0.0, f"{weight:.2f}", _ACCENT)]
    if trust is not None:
        shown.append((trust, f"{trust:.2f}", FAINT))
    for level, (length, text, colour) in enumerate(shown):
        ax.barh(level, 0.55 * length, height=0.6, color=colour)
        ax.text(0.55 * length + 0.05, level, text, va="center", fontsize=7)
    ax.set(xlim=(0, 1), ylim=(1.5, -0.5))
    ax.axis("off")


def neighbour_bars(
    weights: Float[np.ndarray, "K"],
    neighbour_labels: Int[np.ndarray, "K"],
    *,
    trust: Float[np.ndarray, "K"] | None = None,
    row_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    predicted: int | None = None,
    n_shown: int = 10,
    ax: Axes | None = None,
) -> Axes:
    """Draw the weight of each neighbour, heaviest on top, for data without images.

    Args:
        weights: Weight of each neighbour.
        neighbour_labels: Label of each neighbour.
        trust: How much each neighbour's surroundings agree with its label: fainter bars are
            trusted less.
        row_names: Name of each neighbour, for instance its row in the table.
        class_names: Names of the classes.
        predicted: Class that was predicted; other labels are drawn in another colour.
        n_shown: Neighbours drawn.
        ax: Where to draw; a new one-column figure by default.
    """
    order = np.argsort(-weights, kind="stable")[:n_shown]
    if ax is None:
        ax = plt.subplots(figsize=(COLUMN_WIDTH, 0.5 + 0.17 * len(order)))[1]
    names = []
    for level, place in enumerate(order):
        label = int(neighbour_labels[place])
        colour = _ACCENT if predicted is None or label == predicted else ALARM
        alpha = 1.0 if trust is None else 0.25 + 0.75 * float(trust[place])
        ax.barh(level, weights[place], height=0.7, color=colour, alpha=alpha)
        note = f" {weights[place]:.2f}" + ("" if trust is None else f", trust {trust[place]:.2f}")
        ax.text(weights[place], level, note, va="center", fontsize=7)
        name = class_names[label] if class_names else str(label)
        names.append(f"{row_names[place]}: {name}" if row_names is not None else name)
    ax.set_yticks(range(len(order)), names, parse_math=False)
    ax.set_ylim(len(order) - 0.4, -0.6)
    ax.set_xlim(0, 1.45 * float(weights[order[0]]) or 1.0)
    ax.set_xlabel("weight")
    ax.tick_params(axis="y", length=0)
    return ax
