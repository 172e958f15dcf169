"""The verdict of an AFMP ablation, in words that follow from its runs."""

import numpy as np
import pandas as pd

from attnknn.compare import verdict_sentence
from attnknn.studies.afmp import (
    DEIT,
    DEIT_LARGER,
    DENSE,
    PUBLISHED,
    TOP_DOWN,
    Ablation,
    mean_accuracy,
)
from attnknn.studies.afmp_published import published_sweep, published_words, sweep_words

# By the verdict on the published model against the dense one: what follows for messages.
_MESSAGES = {
    "worse": "is worse than dense: messages of every image add {gain:.2f} points on these data",
    "better": "is better than dense: messages of every image cost {loss:.2f} points on these data",
    "no difference at this size": "cannot be told from dense: that messages add anything on these "
    "data is not shown",
    "undefined": "cannot be compared with dense",
}


def verdict(ablation: Ablation, *more: str) -> str:
    """Return, in Markdown, what each part of the ablation showed.

    Args:
        ablation: The runs.
        more: What was found beside it (gates, kNN head), a sentence each.
    """
    table = ablation.comparison(metrics=("accuracy",)).set_index("method")
    spoken = {name: verdict_sentence({**row, "method": name}) for name, row in table.iterrows()}
    pairs = ablation.pairs(metrics=("accuracy",))
    lines = _share_lines(ablation, spoken)
    lines += [f"**Penalty {name}.** {spoken[name]}" for name in spoken if name.startswith("λ")]
    lines.append(f"**Top-down pass.** {spoken[TOP_DOWN]}")
    published = [spoken[PUBLISHED], *_message_words(pairs), published_words(ablation)]
    lines.append(f"**As published.** {' '.join(published)}")
    lines.append(f"**Published sweep.** {sweep_words(published_sweep(ablation))}")
    rows = pairs[pairs["method"] == TOP_DOWN].to_dict("records")
    transformer = [spoken[DEIT], *map(verdict_sentence, rows), _transformer_words(ablation)]
    lines.append(f"**Transformer.** {' '.join(transformer)}")
    lines.append(f"**Training.** {training_words(ablation.history())}")
    return "\n".join(f"- {line}" for line in [*lines, *(each for each in more if each)])


def _share_lines(ablation: Ablation, spoken: dict[str, str]) -> list[str]:
    shares = [name for name in ablation.runs if name == DENSE or name.startswith("keep ")]
    # NOTE: leakage guard. Test rows judge the chosen share, so validation rows choose it.
    best = max(shares, key=lambda name: mean_accuracy(ablation.runs[name], "val"))
    accuracies = ", ".join(
        f"{name} {100 * mean_accuracy(ablation.runs[name], 'test'):.2f} %" for name in shares
    )
    lines = [f"**Keep share.** {accuracies}; best on validation rows: {best}."]
    # What pruning costs is asked whatever share is best.
    return lines + [spoken[name] for name in shares if name in spoken and name in (best, DENSE)]


def _message_words(pairs: pd.DataFrame) -> list[str]:
    """Say what follows from the published model, which prunes nothing, against the dense one."""
    words = []
    for row in pairs[pairs["method"] == PUBLISHED].to_dict("records"):
        points = 100 * row["difference"]
        said = _MESSAGES[row["verdict"]].format(gain=-points, loss=points)
        words.append(f"{PUBLISHED}, in which one image of a batch exchanges messages, {said}.")
        words.append(verdict_sentence(row))
    return words


def _transformer_words(ablation: Ablation) -> str:
    """Say how large and how accurate the transformers and both forms of AFMP are."""
    names = [DEIT, ablation.reference, DEIT_LARGER, TOP_DOWN]
    runs = {name: ablation.runs[name] for name in names if name in ablation.runs}
    shown = (
        f"{name} {100 * mean_accuracy(own, 'test'):.2f} % ({own[0].report['parameters']:,})"
        for name, own in runs.items()
    )
    return f"Accuracy (parameters): {', '.join(shown)}."


def training_words(history: pd.DataFrame) -> str:
    """Say in which epochs runs were best on validation rows, and whether the rate ever fell.

    Args:
        history: Columns ``setting``, ``seed``, ``epoch``, ``lr`` and ``val_accuracy``.
    """
    runs = [run.sort_values("epoch") for _, run in history.groupby(["setting", "seed"])]
    peaks = np.array([run["epoch"].iloc[run["val_accuracy"].argmax()] for run in runs])
    lowered = sum(run["lr"].min() < run["lr"].max() for run in runs)
    last = int(history["epoch"].max())
    n_last = int((peaks == last).sum())
    words = (
        f"{len(runs)} runs of {last} epochs were best on validation rows in epochs {peaks.min()} "
        f"to {peaks.max()} (median {np.median(peaks):g}), {n_last} of them in the last; the "
        f"learning rate was lowered in {lowered}."
    )
    if not n_last and lowered == len(runs):
        return words
    return f"{words} They have not all converged: the differences are those of this budget."
