"""Answers of several classes or of none: probabilities to prediction sets and abstentions.

Axes: N rows, C classes. Thresholds come from rows that neither trained the model nor test it.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from attnknn.checks import check_one_of, check_probs, check_range

CONFORMAL_SCORES = ("aps", "lac")


def fit_conformal(
    probs: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    coverage: float,
    *,
    score: str = "aps",
    rng: np.random.Generator | None = None,
    transition: Float[np.ndarray, "C C"] | None = None,
) -> float:
    """Return the split-conformal threshold for sets that hold the label with ``coverage``.

    The guarantee (exchangeable rows, averaged over them) is at least ``coverage`` in finite
    samples: the threshold is the ceil((N + 1) · coverage)-th smallest score, and infinite, so that
    every class enters, where N is too small for that rank.

    Args:
        probs: Probabilities of held-out rows.
        labels: Their true classes.
        coverage: Wanted share of sets that hold the label, in (0, 1).
        score: ``"lac"`` (1 - probability of the class; smallest sets) or ``"aps"`` (mass of the
            classes at least as probable; adapts to hard rows).
        rng: Randomises APS by a uniform share of the class's own mass, which makes its coverage
            tight. Without it APS is deterministic and covers more than asked.
        transition: T[i, j], the chance that class i is labelled j, where sets shall hold the right
            labels and ``labels`` are as given. Wrong labels have large scores, and the plain
            threshold would cover more than asked.
    """
    check_range("coverage", coverage, low=0.0, high=1.0, low_open=True, high_open=True)
    scores = _class_scores(check_probs(probs, labels), score, rng)
    if transition is not None:
        return _right_threshold(scores, labels, coverage, transition)
    of_label = np.sort(scores[np.arange(len(labels)), labels])
    # The small term keeps an exact product such as 10 · 0.9 from being rounded up to the next rank.
    rank = int(np.ceil((len(labels) + 1) * coverage - 1e-9))
    return float(of_label[rank - 1]) if rank <= len(labels) else float("inf")


def _right_threshold(
    scores: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    coverage: float,
    transition: Float[np.ndarray, "C C"],
) -> float:
    """Return the threshold below which the share ``coverage`` of right labels' scores lies.

    The labels as given have probabilities p T, so p = (p T) inverse(T): a row labelled j stands for
    inverse(T)[j, c] rows of class c, some of them fewer than none, and on average that is right.
    """
    shares = np.linalg.inv(transition)[labels].ravel() / len(labels)  # (N C,)
    order = np.argsort(scores, axis=None, kind="stable")
    reached = shares[order].cumsum()
    # From here on never below: chance may carry the sum over the mark and back.
    safe = np.minimum.accumulate(reached[::-1])[::-1]
    wanted = coverage * (len(labels) + 1) / len(labels)
    above = np.flatnonzero(safe >= wanted - 1e-12)
    return float(scores.ravel()[order[above[0]]]) if len(above) else float("inf")


def predict_sets(
    probs: Float[np.ndarray, "N C"],
    threshold: float,
    *,
    score: str = "aps",
    never_empty: bool = True,
    rng: np.random.Generator | None = None,
) -> Bool[np.ndarray, "N C"]:
    """Return which classes are in the prediction set of each row.

    Args:
        probs: Probabilities of new rows.
        threshold: From ``fit_conformal`` with the same ``score``.
        score: ``"aps"`` or ``"lac"``.
        never_empty: Put the most probable class in every set. This can only raise the coverage;
            without it an empty set says "unlike anything held out".
        rng: Randomises APS; pass one exactly when the threshold was fitted with one.
    """
    probs = check_probs(probs)
    sets = _class_scores(probs, score, rng) <= threshold  # (N, C)
    if never_empty:
        sets[np.arange(len(probs)), probs.argmax(axis=1)] = True
    return sets


def _class_scores(
    probs: Float[np.ndarray, "N C"], score: str, rng: np.random.Generator | None
) -> Float[np.ndarray, "N C"]:
    """Return the nonconformity of every class of every row; smaller fits better."""
    check_one_of("score", score, CONFORMAL_SCORES)
    if score == "lac":
        return 1 - probs
    order = np.argsort(-probs, axis=1, kind="stable")
    sorted_probs = np.take_along_axis(probs, order, axis=1)
    share = 1.0 if rng is None else rng.uniform(size=(len(probs), 1))
    mass = np.cumsum(sorted_probs, axis=1) - (1 - share) * sorted_probs
    scores = np.empty_like(mass)
    np.put_along_axis(scores, order, mass, axis=1)
    return scores


def describe_sets(sets: Bool[np.ndarray, "N C"], labels: Int[np.ndarray, "N"]) -> dict[str, float]:
    """Return the sets' coverage, mean size, and shares of single-class and empty sets."""
    sizes = sets.sum(axis=1)
    return {
        "coverage": float(sets[np.arange(len(labels)), labels].mean()),
        "mean_size": float(sizes.mean()),
        "single_share": float((sizes == 1).mean()),
        "empty_share": float((sizes == 0).mean()),
    }


def rejection_threshold(
    probs: Float[np.ndarray, "N C"],
    labels: Int[np.ndarray, "N"],
    *,
    coverage: float | None = None,
    target_risk: float | None = None,
    label_error: float = 0.0,
) -> float:
    """Return the confidence below which to abstain; rows at the threshold are answered.

    Args:
        probs: Probabilities of held-out rows.
        labels: Their classes.
        coverage: Answer at least this share of rows, as few more as ties allow.
        target_risk: Answer as many rows as possible with at most this share of errors on the
            held-out rows (no finite-sample guarantee). Infinite, so that nothing is answered,
            where even the most confident rows err more.
        label_error: e, the share of ``labels`` that is wrong whatever the row, each in favour of
            any other class alike. Answers of risk r then differ from a label with probability
            e + r (1 - e C / (C - 1)), which is solved for r, within [0, 1].
    """
    if (coverage is None) == (target_risk is None):
        raise ValueError(
            f"coverage or target_risk must be given, and not both, got {coverage=}, {target_risk=}"
        )
    probs = check_probs(probs, labels)
    confidence = np.sort(probs.max(axis=1))[::-1]
    if coverage is not None:
        check_range("coverage", coverage, low=0.0, high=1.0, low_open=True)
        return float(confidence[int(np.ceil(coverage * len(probs) - 1e-9)) - 1])
    check_range("target_risk", target_risk, low=0.0, high=1.0)
    values, group = np.unique(-probs.max(axis=1), return_inverse=True)  # most confident first
    errors = np.bincount(group, weights=probs.argmax(axis=1) != labels)
    chance = 1 - 1 / probs.shape[1]
    check_range("label_error", label_error, low=0, high=chance, high_open=True)
    differs = np.cumsum(errors) / np.cumsum(np.bincount(group))
    risk = np.clip((differs - label_error) / (1 - label_error / chance), 0, 1)
    allowed = np.flatnonzero(risk <= target_risk)
    return float(-values[allowed[-1]]) if len(allowed) else float("inf")
