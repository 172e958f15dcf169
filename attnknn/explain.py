"""Explanations: which memory rows a prediction rests on, and how much each of them counts.

    table = explain(method, bank.search(query, k), class_names=names)
    figure = plot.explanation(table)

The first line is the table, the second its figure; with ``image`` and ``images`` the neighbours are
drawn as pictures.
"""

from collections.abc import Sequence

import pandas as pd

from attnknn.classify import Method
from attnknn.neighbours import Neighbours


def explain(
    method: Method, neighbours: Neighbours, *, class_names: Sequence[str] | None = None
) -> pd.DataFrame:
    """Return the neighbours of every query with what is known about them.

    Args:
        method: How neighbours are weighed.
        neighbours: The search to explain; a few queries, not thousands.
        class_names: Name of each class; class numbers when None.

    Returns:
        One row per query and neighbour, nearest first: ``query`` (its place in the search),
        ``rank`` (1 = nearest), ``id`` (memory row), ``label``, ``similarity``, ``trust`` and
        ``weight``; the weights of a query sum to 1. ``plot.explanation`` draws it.
    """
    seen = neighbours.nearest(method.k)
    weights = method.weights(neighbours)
    n_queries, k = seen.ids.shape
    names = list(range(seen.n_classes)) if class_names is None else list(class_names)
    return pd.DataFrame(
        {
            "query": [query for query in range(n_queries) for _ in range(k)],
            "rank": list(range(1, k + 1)) * n_queries,
            "id": seen.ids.flatten().numpy(),
            "label": [names[label] for label in seen.labels.flatten().tolist()],
            "similarity": seen.scores.flatten().numpy(),
            "trust": seen.trust.flatten().numpy(),
            "weight": weights.flatten().numpy(),
        }
    )
