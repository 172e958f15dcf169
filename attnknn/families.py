"""Families of tests: which comparisons with the attention are corrected together, in every study.

The same two methods must get the same verdict wherever they meet, so a family is a fixed list and
not whatever a study happens to compare:

- **single view**: the attention's rivals, which weigh the neighbours of one view (plain and tuned
  votes, prototypes). Every study of a run has all of them;
- **others**: what is built around a method (TTA, ensembles over k, transfer, prior correction) and
  what does not vote (the CNN head). Studies differ in these.

Holm corrects over a family, measure by measure and level by level (a noise rate, a tail).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Int

from attnknn.compare import compare_methods, with_verdicts
from attnknn.resample import SeedProbs

# The attention is one of them where another method is the baseline.
SINGLE_VIEW = (
    "uniform",
    "distance",
    "uniform (tuned)",
    "distance (tuned)",
    "prototypes (tuned)",
    "attention",
)
# Columns that name the level of a study; each level is looked at by itself.
LEVELS = ("corrupted", "kind", "rate", "ratio", "held_out", "classes")
# Verdict on a rival -> how the attention stands. Rows are rivals minus attention: where a rival is
# worse, the attention is better.
STANDING = {
    "worse": "better than",
    "better": "worse than",
    "no difference at this size": "no difference at this size from",
    "undefined": "cannot be compared with",
}


def compare_in_families(
    results: Mapping[str, SeedProbs],
    labels: Int[np.ndarray, "N"],
    baseline: str,
    *,
    metrics: Sequence[str] = ("accuracy", "nll", "brier", "ece"),
) -> pd.DataFrame:
    """Return ``compare.compare_methods`` with Holm's correction over each family.

    Args:
        results: Method name to probabilities, (N, C), or a list of them, one a seed.
        labels: The true classes of the rows.
        baseline: The method that the others are compared with.
        metrics: Measures to compare.
    """
    return in_families(compare_methods(results, labels, baseline, metrics=metrics))


def in_families(table: pd.DataFrame) -> pd.DataFrame:
    """Return paired comparisons, fresh or saved, with verdicts corrected over each family.

    Args:
        table: Rows of ``compare.compare_methods``, with the columns of their level.
    """
    levels = [name for name in LEVELS if name in table]
    single = table.assign(is_single_view=table["method"].isin(SINGLE_VIEW))
    judged = with_verdicts(single, family=["is_single_view", "metric", *levels])
    return judged.drop(columns="is_single_view")


def standing(table: pd.DataFrame) -> str:
    """Say which rivals the attention beats, loses to, or cannot be told from.

    Args:
        table: Rows of ``compare_methods`` with the attention as the baseline, one measure.
    """
    groups = [
        f"{phrase} {', '.join(table.loc[table['verdict'] == found, 'method'])}"
        for found, phrase in STANDING.items()
        if (table["verdict"] == found).any()
    ]
    return "; ".join(groups)
