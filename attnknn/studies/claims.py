"""Claims: each published claim, our verdict on it in one run, and the evidence.

Verdicts are computed from the tables that the studies save; a claim whose study has not been run
says so. Nothing is typed in but the claims themselves.

    python -m attnknn.studies.claims results/cifar10 ...    # judges anew; runs no study
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from attnknn.files import write_text
from attnknn.report.markup import to_markdown
from attnknn.studies import judges, judges_cost, judges_stress, published
from attnknn.studies.judging import (
    CONFIRMED,
    INTERVAL,
    MEANS,
    NOT_DECIDED,
    NOT_MEASURED,
    NOTHING,
    PAIRED,
    PARTLY,
    REFUTED,
    THEORY,
    TIMES,
    Judgement,
    MissingTableError,
    Tables,
)

BASES = {
    PAIRED: "of differences on the same test rows, at 95 %, Holm-corrected over the "
    "rivals of a kind (votes of one view; all others); a claimed size is excluded by the 95 % "
    "interval, which is not corrected",
    INTERVAL: "the 95 % interval of such a difference, not corrected, against the bound or margin "
    "that the evidence names",
    MEANS: "means over seeds against the threshold that the evidence names, without a test",
    TIMES: "medians of timed rounds against the published bound, with their 95 % interval where "
    "one is given",
    THEORY: "the bounds of notebook 07",
}
# Three summaries, of which the original study published two.
VALIDATED, PARTIALLY, UNSUPPORTED = "validated", "partially validated", "not supported"
# A hypothesis is the sum of its claims: all of them but a few must be decided to judge it.
MAY_BE_OPEN = 2


class Claim(NamedTuple):
    """A published claim and how a run's tables decide it.

    Attributes:
        said: What the original study says.
        needs: Notebook whose tables decide it.
        judge: Tables of the run -> judgement.
        is_core: Part of the hypothesis that the study sums up: better calibrated, more accurate,
            robust, cheap.
    """

    said: str
    needs: str
    judge: Callable[[Tables], Judgement]
    is_core: bool = False


def judge_claims(folder: Path) -> pd.DataFrame:
    """Return one row per claim: ``claim``, ``verdict``, ``rests on``, ``evidence``, ``notebook``.

    Args:
        folder: A run's folder, with a folder of tables a study.
    """
    tables, rows = Tables(folder), []
    for claim in CLAIMS:
        try:
            found = claim.judge(tables)
        except MissingTableError as missing:
            found = Judgement(NOT_MEASURED, f"needs {missing}", NOTHING)
        rows.append((claim.said, found.verdict, found.basis, found.evidence, claim.needs))
    return pd.DataFrame(rows, columns=["claim", "verdict", "rests on", "evidence", "notebook"])


def summary(table: pd.DataFrame) -> str:
    """Return which of the published summaries the core claims' verdicts bear out, in one line.

    Args:
        table: From ``judge_claims``.
    """
    is_core = table["claim"].isin([claim.said for claim in CLAIMS if claim.is_core])
    verdicts = list(table.loc[is_core, "verdict"])
    order = (CONFIRMED, PARTLY, REFUTED, NOT_DECIDED, NOT_MEASURED)
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in order if name in verdicts)
    decided = [name for name in verdicts if name in (CONFIRMED, PARTLY, REFUTED)]
    start = f"**Summary.** Of the {len(verdicts)} claims that make up the hypothesis: {counts}."
    if not decided:
        return f"{start} Nothing is decided, nor are the published summaries."
    needed = len(verdicts) - MAY_BE_OPEN
    if len(decided) < needed:
        return (
            f"{start} Too few are measured and decided to judge the hypothesis or the published "
            f"summaries of it ({len(decided)}, at least {needed} are needed)."
        )
    found = {frozenset([CONFIRMED]): VALIDATED, frozenset([REFUTED]): UNSUPPORTED}
    ours = found.get(frozenset(decided), PARTIALLY)
    said = "; ".join(
        f'"{words}" ({who}) is {CONFIRMED if words == ours else REFUTED}'
        for words, who in ((PARTIALLY, "the narrative"), (UNSUPPORTED, "experiment 7"))
    )
    return f"{start} By those that are decided the hypothesis is {ours}: {said}."


def write_claims(folder: Path) -> Path:
    """Write ``claims.md`` into a run's folder and return its path."""
    table = judge_claims(folder)
    used = [f"- *{name}*: {words}." for name, words in BASES.items()]
    intro = [
        f"# Published claims, judged by the run `{Path(folder).name}`\n",
        "Computed from the tables in this folder. One run judges one data set and one embedder; "
        "intervals cover the test rows, and the seeds where there are several. What is neither "
        f"shown nor excluded is *{NOT_DECIDED}*. A verdict rests on one of these:\n",
        *used,
    ]
    text = "\n".join([*intro, "", to_markdown(table), summary(table), ""])
    return write_text(Path(folder) / "claims.md", text)


CLAIMS = [
    Claim("Attention improves calibration", "02", judges.judge_calibration, is_core=True),
    Claim("Attention improves the likelihood", "02", judges.judge_likelihood),
    Claim(
        "Attention improves accuracy (+0.01 to +0.03 points)",
        "02",
        judges.judge_accuracy,
        is_core=True,
    ),
    Claim(
        "TTA makes attention better calibrated (ECE -78 %, NLL -53 %)",
        "02",
        judges.judge_tta,
        is_core=True,
    ),
    Claim("k-ensembles do not help", "02", judges.judge_k_ensemble),
    Claim("Four heads are as good as one", "02", judges.judge_heads),
    Claim("The gap of 5 to 9 points to the CNN is fundamental", "02", judges.judge_gap_to_cnn),
    Claim("k hardly matters", "03", judges.judge_k_hardly_matters),
    Claim("The best k is 10 to 20", "03", judges.judge_best_k),
    Claim(
        "Under 10, 20, 30 % label noise 100, 99, 98 % of the accuracy is kept",
        "04",
        judges_stress.judge_noise,
        is_core=True,
    ),
    Claim(
        "Under label noise attention is better than plain weights (NLL)",
        "04",
        judges_stress.judge_noise_against,
        is_core=True,
    ),
    Claim(
        "At 30 % label noise attention is less accurate than uniform weights (experiment 7)",
        "04",
        judges_stress.judge_noise_accuracy,
    ),
    Claim(
        f"A long tail of 1:100 costs no more than {100 * published.tail_loss():.1f} points",
        "05",
        judges_stress.judge_long_tail,
        is_core=True,
    ),
    Claim(
        "The error falls as O(1/k)",
        "07",
        judges_cost.taken_from_theory("Truncation error falls as O(1/k)"),
    ),
    Claim(
        "Practical k is far below √n",
        "07",
        judges_cost.taken_from_theory("The best k is far below √n"),
    ),
    Claim(
        "Inner product and L2 agree on unit vectors",
        "07",
        judges_cost.taken_from_theory("Inner product and L2 find the same neighbours"),
    ),
    Claim(
        "Attention adds less than 0.5 ms a query", "06", judges_cost.judge_overhead, is_core=True
    ),
    Claim(
        "The whole prediction after the embedding takes less than 1 ms a query",
        "06",
        judges_cost.judge_whole_overhead,
        is_core=True,
    ),
    Claim("HNSW is needed only past 100 000 rows", "06", judges_cost.judge_hnsw),
    Claim(
        "ResNet-50 does not help",
        "01",
        judges.cannot_be_measured("needs a GPU: presets exp4 and exp5"),
    ),
    Claim(
        "Contrastive loss and hard negatives: unclear",
        "01",
        judges.cannot_be_measured(
            "needs trainings that differ in these alone: exp4 with contrastive_weight=0"
        ),
    ),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``claims.md`` anew into the folders of runs, from the tables that are saved there."""
    parser = argparse.ArgumentParser(description="Judge the published claims by saved tables.")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, as results/cifar10")
    folders = parser.parse_args(arguments).folders
    for folder in folders:
        if not any(folder.glob("*/*.csv")):
            parser.error(f"folders must hold the tables of studies, got {folder}")
    for folder in folders:
        write_claims(folder)


if __name__ == "__main__":
    main()
