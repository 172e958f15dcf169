"""Finding wrong labels: how well the trust of a memory row, and its peer, tell flipped rows.

Axes: N memory rows, U different qualities, R resamples.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats
from sklearn.metrics import roc_auc_score

from attnknn.memory import MemoryBank

DETECTORS = ("trust", "cleanlab")
_N_RESAMPLES = 200


def detection(
    bank: MemoryBank, true_labels: Int[np.ndarray, " N"], named: dict[str, object]
) -> list[dict[str, object]]:
    """Return how well trust and its peer find the flipped rows; nothing without flips.

    ``low`` and ``high`` are 95 % intervals over the memory rows of this one memory.
    """
    wrong = bank.labels.numpy() != true_labels
    if not wrong.any():
        return []
    scores = {"trust": bank.view.trust.numpy(), "cleanlab": cleanlab_scores(bank)}
    halves = half_widths(scores, wrong)
    rows = []
    for method, score in scores.items():
        for metric, measure in DETECTION.items():
            value, half = measure(score, wrong), halves[method, metric]
            limits = {"low": value - half, "high": value + half}
            rows.append(named | {"method": method, "metric": metric, "value": value, **limits})
    return rows


def half_widths(
    scores: Mapping[str, Float[np.ndarray, " N"]],
    wrong: Bool[np.ndarray, " N"],
    *,
    n_resamples: int = _N_RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> dict[tuple[str, str], float]:
    """Return, by detector and measure, half of the bootstrap interval over memory rows.

    A resample is a vector of row counts, tallied by quality: nothing is sorted anew.

    Args:
        scores: Detector to the quality of every row, small where a label looks wrong.
        wrong: Which rows are.
        n_resamples: Bootstrap draws, the same for all detectors.
        level: Confidence of the intervals.
        seed: Seed of the draws.
    """
    rng, n_rows = np.random.default_rng(seed), len(wrong)
    places = {name: np.unique(quality, return_inverse=True)[1] for name, quality in scores.items()}
    drawn: dict[tuple[str, str], list[float]] = {}
    for _ in range(n_resamples):
        counts = np.bincount(rng.integers(n_rows, size=n_rows), minlength=n_rows)
        for name, place in places.items():
            bad, good = (
                np.bincount(place, counts * part, minlength=place.max() + 1)
                for part in (wrong, ~wrong)
            )
            for metric, value in zip(DETECTION, _from_tallies(bad, good), strict=True):
                drawn.setdefault((name, metric), []).append(value)
    z = float(stats.norm.ppf((1 + level) / 2))
    return {key: z * float(np.nanstd(values, ddof=1)) for key, values in drawn.items()}


def _from_tallies(
    bad: Float[np.ndarray, " U"], good: Float[np.ndarray, " U"]
) -> tuple[float, float]:
    """Return the measures of ``DETECTION`` from the wrong and right rows at each quality."""
    n_bad, n_good = bad.sum(), good.sum()
    if not n_bad or not n_good:  # a resample of a small memory may lack one kind
        return float("nan"), float("nan")
    above = n_good - np.cumsum(good)
    auroc = (bad * (above + good / 2)).sum() / (n_bad * n_good)
    rows = bad + good
    taken = np.clip(n_bad - (np.cumsum(rows) - rows), 0, rows)  # of each quality, lowest first
    shares = np.divide(taken, rows, out=np.zeros_like(rows), where=rows > 0)
    return float(auroc), float((bad * shares).sum() / n_bad)


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
