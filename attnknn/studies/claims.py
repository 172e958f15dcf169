"""Claims: each published claim, our verdict on it in one run, and the evidence.

Verdicts are computed from the tables that the studies save; a claim whose study has not been run
says so. Nothing is typed in but the claims themselves.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from attnknn.files import write_text
from attnknn.report.markup import to_markdown
from attnknn.studies import judges
from attnknn.studies.judges import NOT_MEASURED, Judgement, MissingTableError, Tables


class Claim(NamedTuple):
    """A published claim and how a run's tables decide it.

    Attributes:
        said: What the original study says.
        needs: Notebook whose tables decide it.
        judge: Tables of the run -> judgement.
    """

    said: str
    needs: str
    judge: Callable[[Tables], Judgement]


def judge_claims(folder: Path) -> pd.DataFrame:
    """Return one row per claim: ``claim``, ``verdict``, ``evidence``, ``notebook``."""
    tables, rows = Tables(folder), []
    for claim in CLAIMS:
        try:
            found = claim.judge(tables)
        except MissingTableError as missing:
            found = Judgement(NOT_MEASURED, f"needs {missing}")
        rows.append((claim.said, found.verdict, found.evidence, claim.needs))
    return pd.DataFrame(rows, columns=["claim", "verdict", "evidence", "notebook"])


def write_claims(folder: Path) -> Path:
    """Write ``claims.md`` into a run's folder and return its path."""
    table = judge_claims(folder)
    intro = (
        f"# Published claims, judged by the run `{Path(folder).name}`\n\n"
        "Computed from the tables in this folder. Paired tests at 95 %, Holm-corrected; intervals "
        "cover the test rows, and the seeds where there are several. One run judges one data set "
        "and one embedder.\n\n"
    )
    return write_text(Path(folder) / "claims.md", intro + to_markdown(table))


CLAIMS = [
    Claim("Attention improves calibration", "02", judges.judge_calibration),
    Claim("Attention improves the likelihood", "02", judges.judge_likelihood),
    Claim("Attention improves accuracy (+0.01 to +0.03 points)", "02", judges.judge_accuracy),
    Claim("TTA makes attention better calibrated (ECE -78 %, NLL -53 %)", "02", judges.judge_tta),
    Claim("k-ensembles do not help", "02", judges.judge_k_ensemble),
    Claim("Four heads are as good as one", "02", judges.judge_heads),
    Claim("The gap of 5 to 9 points to the CNN is fundamental", "02", judges.judge_gap_to_cnn),
    Claim("k hardly matters", "03", judges.judge_k_hardly_matters),
    Claim(
        "Under 10, 20, 30 % label noise 100, 99, 98 % of the accuracy is kept",
        "04",
        judges.judge_noise,
    ),
    Claim(
        "Under label noise attention is better than plain weights", "04", judges.judge_noise_against
    ),
    Claim("A long tail of 1:100 costs about one point", "05", judges.judge_long_tail),
    Claim(
        "The error falls as O(1/k)",
        "07",
        judges.taken_from_theory("Truncation error falls as O(1/k)"),
    ),
    Claim(
        "Practical k is far below √n", "07", judges.taken_from_theory("The best k is far below √n")
    ),
    Claim(
        "Inner product and L2 agree on unit vectors",
        "07",
        judges.taken_from_theory("Inner product and L2 find the same neighbours"),
    ),
    Claim("Attention adds less than 0.5 ms a query", "06", judges.judge_overhead),
    Claim("HNSW is needed only past 100 000 rows", "06", judges.judge_hnsw),
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
