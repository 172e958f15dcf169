"""Explanations: which memory rows a prediction rests on, and how much each of them counts.

A neighbour has a weight, and with it it votes for its label and, where label histograms are mixed
in, for the labels around it; class prototypes add their part. So what the neighbours and the
prototypes contribute to the predicted class sums to its probability before floor and temperature.

    table = explain(method, bank.search(query, k), class_names=names)
    figure = plot.explanation(table)

The first line is the table, the second its figure; with ``image`` and ``images`` the neighbours are
drawn as pictures.

Axes: B queries, K neighbours of each, C classes.
"""

from collections.abc import Sequence
from functools import singledispatch

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from attnknn.attention import Contributions, attention_contributions, label_contributions
from attnknn.classify import AdaptiveK, Attention, KEnsemble, Method, Prototypes, at_k
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
        ``rank`` (1 = nearest), ``id`` (memory row), ``label``, ``similarity``, ``trust``,
        ``weight`` (those of a query sum to 1), ``vote`` (what the row adds to the probability of
        the predicted class), and for the whole query ``prototypes`` (what the class prototypes
        add to it) and ``predicted``. The votes of a query and its ``prototypes`` sum to the
        predicted class's probability before floor and temperature. ``plot.explanation`` draws it.
    """
    seen = neighbours.nearest(method.k)
    weights = method.weights(neighbours)
    predicted = method.votes(neighbours).argmax(dim=1)  # (B,)
    votes, prototypes = contributions(method, neighbours, predicted)
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
            "vote": votes.flatten().numpy(),
            "prototypes": prototypes.repeat_interleave(k).numpy(),
            "predicted": [names[label] for label in predicted.repeat_interleave(k).tolist()],
        }
    )


@singledispatch
def contributions(
    method: Method, neighbours: Neighbours, classes: Int[Tensor, " B"]
) -> Contributions:
    """Return what the probability of one class of each query is made of.

    A method whose neighbours vote for more than their label registers a function of its own.

    Args:
        method: How neighbours are weighed.
        neighbours: The search.
        classes: The class of each query that is asked about.
    """
    return label_contributions(method.weights(neighbours), neighbours.nearest(method.k), classes)


@contributions.register
def _(method: Attention, neighbours: Neighbours, classes: Tensor) -> Contributions:
    return attention_contributions(method.module, neighbours.nearest(method.k), classes)


@contributions.register
def _(method: Prototypes, neighbours: Neighbours, classes: Tensor) -> Contributions:
    told = method.votes(neighbours).gather(1, classes[:, None]).squeeze(1)
    return Contributions(torch.zeros_like(neighbours.nearest(method.k).scores), told)


@contributions.register
def _(method: KEnsemble, neighbours: Neighbours, classes: Tensor) -> Contributions:
    each = [contributions(member, neighbours, classes) for member in method.members]
    votes = torch.zeros_like(neighbours.nearest(method.k).scores)
    for part in each:
        votes[:, : part.votes.shape[1]] += part.votes / len(each)
    return Contributions(votes, torch.stack([part.prototypes for part in each]).mean(dim=0))


@contributions.register
def _(method: AdaptiveK, neighbours: Neighbours, classes: Tensor) -> Contributions:
    chosen = method.chosen_k(neighbours)
    votes = torch.zeros_like(neighbours.nearest(method.k).scores)
    told = votes.new_zeros(len(votes))
    for k in chosen.unique().tolist():
        rows = (chosen == k).nonzero().squeeze(1)
        part = contributions(at_k(method.method, k), neighbours.of_queries(rows), classes[rows])
        votes[rows, :k], told[rows] = part
    return Contributions(votes, told)
