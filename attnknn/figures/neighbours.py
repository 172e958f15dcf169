"""Figure of one prediction: the neighbours that were asked, and how much each counted."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnknn.figures.style import (
    ALARM,
    COLUMN_WIDTH,
    FAINT,
    FULL_WIDTH,
    INK,
    METHOD_STYLES,
    page_axes,
)

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
        image: What the query looks like: (height, width) or (height, width, 3), in [0, 1] or bytes.
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
    heaviest = rows.sort_values("weight", ascending=False, kind="stable").head(n_shown)
    # Another label than the predicted one has another colour; nothing predicted, all agree.
    agrees = np.full(len(heaviest), True)
    if predicted is not None:
        agrees = (heaviest["label"].astype(str) == str(predicted)).to_numpy()
    if images is None:
        return _bars(heaviest, agrees, _made_of(rows))
    if len(images) <= rows["id"].max():
        raise ValueError(
            f"images must hold a picture of every training row, got {len(images)} pictures "
            f"for row {rows['id'].max()}"
        )
    pictures = [np.asarray(images[place]) for place in heaviest["id"]]
    figure = _strip(heaviest, agrees, [np.asarray(image), *pictures], query_note)
    figure.supxlabel(_made_of(rows), fontsize=8, parse_math=False)
    return figure


def _made_of(rows: pd.DataFrame) -> str:
    """Return what the predicted class's probability is made of, in words."""
    predicted, prototypes = (rows[name].iloc[0] for name in ("predicted", "prototypes"))
    votes = rows["vote"].sum()
    return f"for {predicted}: neighbours {votes:.2f}, class prototypes {prototypes:.2f}"


def _strip(
    rows: pd.DataFrame, agrees: np.ndarray, pictures: Sequence[np.ndarray], query_note: str
) -> Figure:
    """Draw the query and its neighbours, heaviest first, weight and trust of each below it.

    Pictures are (height, width) or (height, width, 3), in [0, 1] or bytes, the query's first.
    """
    columns = len(pictures)
    ratios = {"height_ratios": [FULL_WIDTH / columns, 0.35]}
    height = FULL_WIDTH / columns + 0.6
    figure, (upper, lower) = page_axes(2, columns, height, gridspec_kw=ratios)
    names = [query_note, *rows["label"].astype(str)]
    colours = [INK, *np.where(agrees, INK, ALARM)]
    for ax, picture, name, colour in zip(upper, pictures, names, colours, strict=True):
        ax.imshow(picture, cmap="gray" if picture.ndim == 2 else None)
        ax.set_title(name, fontsize=8, color=colour, pad=3, parse_math=False)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    upper[0].spines[:].set(visible=True, color=_ACCENT, linewidth=1.5)
    heaviest = max(rows["weight"].iloc[0], 1e-12)
    for level, name in enumerate(("weight", "trust")):
        lower[0].text(1.0, level, name, ha="right", va="center", fontsize=8)
        colour, whole = ((_ACCENT, heaviest), (FAINT, 1.0))[level]
        for ax, value in zip(lower[1:], rows[name], strict=True):
            length = 0.55 * value / whole
            ax.barh(level, length, height=0.6, color=colour)
            ax.text(length + 0.05, level, f"{value:.2f}", va="center", fontsize=7)
    for ax in lower:
        ax.set(xlim=(0, 1), ylim=(1.5, -0.5))
        ax.axis("off")
    return figure


def _bars(rows: pd.DataFrame, agrees: np.ndarray, words: str) -> Figure:
    """Draw the weight of each neighbour, heaviest on top; fainter bars are trusted less."""
    figure, ax = plt.subplots(figsize=(COLUMN_WIDTH, 0.7 + 0.17 * len(rows)))
    for level, (row, fits) in enumerate(zip(rows.to_dict("records"), agrees, strict=True)):
        weight, trust, colour = row["weight"], row["trust"], _ACCENT if fits else ALARM
        ax.barh(level, weight, height=0.7, color=colour, alpha=0.25 + 0.75 * trust)
        ax.text(weight, level, f" {weight:.2f}, trust {trust:.2f}", va="center", fontsize=7)
    names = [f"row {place}: {label}" for place, label in rows[["id", "label"]].to_numpy()]
    ax.set_yticks(range(len(rows)), names, parse_math=False)
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.45 * rows["weight"].iloc[0] or 1.0))
    ax.set_xlabel(f"weight\n{words}", parse_math=False)
    ax.tick_params(axis="y", length=0)
    return figure
