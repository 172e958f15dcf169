"""Finding wrong labels: how well the trust of a memory row, and its peer, tell flipped rows.

Axes: N memory rows.
"""

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.metrics import roc_auc_score

from attnknn.memory import MemoryBank

DETECTORS = ("trust", "cleanlab")


def detection(
    bank: MemoryBank, true_labels: Int[np.ndarray, " N"], named: dict[str, object]
) -> list[dict[str, object]]:
    """Return how well trust and its peer find the flipped rows; nothing without flips."""
    wrong = bank.labels.numpy() != true_labels
    if not wrong.any():
        return []
    scores = {"trust": bank.view.trust.numpy(), "cleanlab": cleanlab_scores(bank)}
    return [
        named | {"method": method, "metric": metric, "value": measure(score, wrong)}
        for method, score in scores.items()
        for metric, measure in DETECTION.items()
    ]


def cleanlab_scores(bank: MemoryBank) -> Float[np.ndarray, " N"]:
    """Return cleanlab's label quality of every memory row, from the same probabilities as trust.

    The probabilities are the leave-one-out label shares around each row. With the self-confidence
    score cleanlab would return trust itself; its margin, adjusted for class thresholds (confident
    learning), is the peer.
    """
    from cleanlab.rank import get_label_quality_scores

    return get_label_quality_scores(
        bank.labels.numpy(),
        bank.view.histograms.double().numpy(),
        method="normalized_margin",
        adjust_pred_probs=True,
    )


def label_error_auroc(quality: Float[np.ndarray, " N"], wrong: Bool[np.ndarray, " N"]) -> float:
    """Return how well a low quality tells wrong labels from right ones; 0.5 is chance."""
    return float(roc_auc_score(wrong, -quality))


def precision_at_rate(quality: Float[np.ndarray, " N"], wrong: Bool[np.ndarray, " N"]) -> float:
    """Return the share of wrong labels among the lowest qualities, as many as there are wrong.

    Rows of equal quality count by their chance of being among them.
    """
    n_wrong = int(wrong.sum())
    limit = np.partition(quality, n_wrong - 1)[n_wrong - 1]
    below, level = quality < limit, quality == limit
    drawn = (n_wrong - below.sum()) / level.sum()  # share of the level rows that is taken
    return float((wrong[below].sum() + drawn * wrong[level].sum()) / n_wrong)


DETECTION = {"auroc": label_error_auroc, "precision at the noise rate": precision_at_rate}
