"""The verdict of an AFMP ablation, in words that follow from its runs."""

import numpy as np
import pandas as pd

from attnknn.afmp import grid_scaffold
from attnknn.afmp.router import kept_edges
from attnknn.compare import verdict_sentence
from attnknn.studies.afmp import Ablation, comparison_table, mean_accuracy
from attnknn.studies.afmp_published import published_sweep, published_words, sweep_words
from attnknn.studies.afmp_settings import DEIT, DEIT_LARGER, DENSE, PUBLISHED, TOP_DOWN, WIDER

# By the verdict on the published model against the dense one, which prunes nothing either.
_AGAINST_DENSE = {
    "worse": "is {loss:.2f} points worse than dense",
    "better": "is {gain:.2f} points better than dense",
    "no difference at this size": "cannot be told from dense",
    "undefined": "cannot be compared with dense",
}
# By the verdict on the dense model against one that keeps no edge.
_AGAINST_NONE = {
    "worse": "Messages cost accuracy on these data.",
    "better": "Messages help on these data.",
    "no difference at this size": "That messages help on these data is not shown.",
    "undefined": "Whether messages help on these data is not told.",
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
    lines += _edge_lines(ablation, pairs)
    lines += [f"**Penalty {name}.** {spoken[name]}" for name in spoken if name.startswith("λ")]
    second = [spoken[TOP_DOWN], _second_pass_words(ablation), *_spoken_pair(pairs, TOP_DOWN, WIDER)]
    lines.append(f"**Top-down pass.** {' '.join(second)}")
    published = [spoken[PUBLISHED], *_message_words(ablation, pairs), published_words(ablation)]
    lines.append(f"**As published.** {' '.join(published)}")
    lines.append(f"**Published sweep.** {sweep_words(published_sweep(ablation))}")
    larger = _spoken_pair(pairs, TOP_DOWN, DEIT_LARGER)
    lines.append(
        f"**Transformer.** {' '.join([spoken[DEIT], *larger, _transformer_words(ablation)])}"
    )
    lines.append(f"**Training.** {training_words(ablation.history())}")
    lines.append(f"**Seeds.** {seed_words(comparison_table(ablation))}")
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


def _spoken_pair(pairs: pd.DataFrame, method: str, baseline: str) -> list[str]:
    rows = pairs[(pairs["method"] == method) & (pairs["baseline"] == baseline)]
    return [verdict_sentence(row) for row in rows.to_dict("records")]


def _edge_lines(ablation: Ablation, pairs: pd.DataFrame) -> list[str]:
    """Say what all edges do over the fewest; of models alike but for that."""
    rows = pairs[pairs["method"] == DENSE].to_dict("records")
    if not rows:
        return []
    model = ablation.runs[ablation.sparsest][0].setting.model
    shape = ablation.splits.train.inputs.shape[2:]
    scaffold = grid_scaffold(*shape, model.patch, kind=model.scaffold, window=model.window)
    n_kept = kept_edges(scaffold.n_edges, model.keep_share)
    fewest = f"“{ablation.sparsest}” keeps {n_kept} of the {scaffold.n_edges} edges of an image."
    lines = []
    for row in rows:
        # An edge or two may also disturb.
        said = "A few edges are not none." if n_kept else _AGAINST_NONE[row["verdict"]]
        lines.append(f"**Messages.** {fewest} {verdict_sentence(row)} {said}")
    return lines


def _second_pass_words(ablation: Ablation) -> str:
    """Say what else the top-down pass brings along: time and parameters."""
    own, other = (_parameters(ablation, name) for name in (TOP_DOWN, ablation.reference))
    return (
        "It needs a second bottom-up pass, which without feedback would repeat the first, and has "
        f"{own:,} instead of {other:,} parameters; “{WIDER}” has "
        f"{_parameters(ablation, WIDER):,}."
    )


def _message_words(ablation: Ablation, pairs: pd.DataFrame) -> list[str]:
    """Say how the published model stands beside the dense one; neither prunes."""
    words = []
    for row in pairs[pairs["method"] == PUBLISHED].to_dict("records"):
        points = 100 * row["difference"]
        said = _AGAINST_DENSE[row["verdict"]].format(gain=points, loss=-points)
        own, other = (_parameters(ablation, name) for name in (PUBLISHED, DENSE))
        words.append(
            f"{PUBLISHED}, in which one image of a batch exchanges messages, {said}. They also "
            f"differ in one-way edges, in the error term, in a small penalty and in parameters "
            f"({own:,} against {other:,})."
        )
        words.append(verdict_sentence(row))
    return words


def _parameters(ablation: Ablation, name: str) -> int:
    return ablation.runs[name][0].report["parameters"]


def seed_words(tests: pd.DataFrame) -> str:
    """Say how many verdicts the seeds alone would carry: few of them understate their spread.

    Args:
        tests: What ``comparison_table`` returned.
    """
    told = tests[tests["verdict"].isin(["better", "worse"])]
    n_kept = int((told["p_seeds"] <= 0.05).sum())
    return (
        f"Of {len(told)} differences in the table of paired tests, {n_kept} also hold in a paired "
        "t test over the seeds alone (5 %, not corrected); the others rest on few trainings."
    )


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
