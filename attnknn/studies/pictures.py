"""Pictures of single predictions: a query, its neighbours, and how much each of them counts."""

import numpy as np
from matplotlib.figure import Figure

from attnknn import plot
from attnknn.classify import Method, predict
from attnknn.explain import explain
from attnknn.neighbours import Neighbours
from attnknn.trained import TrainedRun


def neighbours_figure(
    run: TrainedRun, found: Neighbours, query: int, *, method: Method, part: str = "test"
) -> Figure:
    """Return a figure of one query's neighbours: images where there are images, else bars.

    Args:
        run: Where names, labels and images come from.
        found: A search with the rows of ``part`` as queries.
        query: Which of the queries.
        method: What weighs the neighbours: the one whose prediction is explained.
        part: "val" or "test".
    """
    one = found.of_queries(slice(query, query + 1))
    names = run.class_names
    probs = predict(method, one)[0]
    predicted, actual = int(probs.argmax()), int(run.labels(part)[query])
    note = f"{names[actual]}?\n{names[predicted]} {100 * probs[predicted]:.0f} %"
    seen = {"predicted": names[predicted], "query_note": note}
    if run.splits.kind == "image":
        seen["image"] = drawable(getattr(run.splits, part).inputs[query][None])[0]
        seen["images"] = drawable(run.splits.train.inputs)
    return plot.explanation(explain(method, one, class_names=names), **seen)


def drawable(images: np.ndarray) -> np.ndarray:
    """Return (N, height, width[, 3]) bytes from (N, channels, height, width)."""
    moved = np.moveaxis(images, 1, -1)
    return moved[..., 0] if moved.shape[-1] == 1 else moved
