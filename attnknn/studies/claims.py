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

CONFIRMED, REFUTED, PARTLY = "confirmed", "refuted", "partly"
NOT_MEASURED = "not measured in this run"
NO_DIFFERENCE = "no difference at this size"
PLAIN = ("uniform", "distance")
PUBLISHED_RETENTION = {0.1: 0.995, 0.2: 0.985, 0.3: 0.975}  # 100, 99 and 98 %, as rounded there
PUBLISHED_TAIL_LOSS = 0.9  # points: 89.70 % at ratio 1, 88.80 % at 0.01 (experiment 4)
TUNED = ("uniform (tuned)", "distance (tuned)")


class Judgement(NamedTuple):
    """A verdict and the figures behind it."""

    verdict: str
    evidence: str


class Claim(NamedTuple):
    """A published claim and how a run's tables decide it.

    Attributes:
        said: What the original study says.
        needs: Notebook whose tables decide it.
        judge: Tables of the run -> judgement.
    """

    said: str
    needs: str
    judge: Callable[["Tables"], Judgement]


class MissingTableError(LookupError):
    """A study has not been run, or did not save what a claim needs."""


class Tables:
    """The saved tables of a run, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def read(self, notebook: str, name: str) -> pd.DataFrame:
        """Return a saved table, or say that it is missing."""
        path = self.folder / notebook / f"{name}.csv"
        if not path.is_file():
            raise MissingTableError(f"{notebook}/{name}.csv")
        return pd.read_csv(path)

    def mean(self, notebook: str, **where: object) -> float:
        """Return the mean over seeds of one measure in a study's ``measures`` table."""
        table = self.read(notebook, "measures")
        for column, value in where.items():
            table = table[table[column] == value]
        if table.empty:
            raise MissingTableError(f"{where} in {notebook}/measures.csv")
        return float(table["value"].mean())


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


def _calibration(tables: Tables) -> Judgement:
    return _against(tables, "ece", (*PLAIN, *TUNED))


def _likelihood(tables: Tables) -> Judgement:
    return _against(tables, "nll", (*PLAIN, *TUNED))


def _accuracy(tables: Tables) -> Judgement:
    return _against(tables, "accuracy", (*PLAIN, *TUNED))


def _against(tables: Tables, metric: str, rivals: tuple[str, ...]) -> Judgement:
    """Judge "attention is better" from the paired comparison of the main results."""
    rows = tables.read("02_main_results", "comparison")
    rows = rows[(rows["metric"] == metric) & rows["method"].isin(rivals)]
    if rows.empty:
        raise MissingTableError(f"{metric} in 02_main_results/comparison.csv")
    # Rows are rival minus attention: a rival that is worse has lost against the attention.
    won = rows["verdict"] == "worse"
    lost = rows["verdict"] == "better"
    shown = [
        f"{row['method']} {row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        for row in rows.to_dict("records")
    ]
    verdict = CONFIRMED if won.all() else REFUTED if lost.any() or not won.any() else PARTLY
    size = f"{rows['n_rows'].iloc[0]} rows, {rows['n_seeds'].iloc[0]} seed(s)"
    return Judgement(verdict, f"rival minus attention in {metric}: {'; '.join(shown)} ({size})")


def _tta(tables: Tables) -> Judgement:
    before, after = (
        {
            metric: tables.mean("02_main_results", method=name, metric=metric)
            for metric in ("nll", "ece", "accuracy")
        }
        for name in ("attention", "attention + TTA")
    )
    change = {name: after[name] / before[name] - 1 for name in ("nll", "ece")}
    better = [name for name, share in change.items() if share < 0]
    verdict = CONFIRMED if len(better) == 2 else PARTLY if better else REFUTED
    return Judgement(
        verdict,
        f"with TTA NLL {100 * change['nll']:+.0f} %, ECE {100 * change['ece']:+.0f} %, accuracy "
        f"{100 * (after['accuracy'] - before['accuracy']):+.2f} points",
    )


def _noise(tables: Tables) -> Judgement:
    table = tables.read("04_label_noise", "measures")
    table = table[(table["metric"] == "accuracy") & (table["held_out"] == "clean")]
    table = table[(table["kind"] == table["kind"].iloc[0]) & (table["method"] == "attention")]
    means = table.groupby("rate")["value"].mean()
    kept = {rate: means[rate] / means[0.0] for rate in PUBLISHED_RETENTION if rate in means}
    if not kept:
        raise MissingTableError("a noise rate up to 30 % in 04_label_noise/measures.csv")
    shown = ", ".join(f"{100 * share:.1f} % at {100 * rate:g} %" for rate, share in kept.items())
    holds = all(share >= PUBLISHED_RETENTION[rate] for rate, share in kept.items())
    return Judgement(CONFIRMED if holds else REFUTED, f"accuracy kept: {shown}")


def _noise_against(tables: Tables) -> Judgement:
    rows = tables.read("04_label_noise", "comparison")
    rows = rows[(rows["rate"] == rows["rate"].max()) & (rows["metric"] == "nll")]
    rows = rows[rows["method"].isin((*PLAIN, *TUNED)) & (rows["held_out"] == "clean")]
    won = rows["verdict"] == "worse"
    verdict = CONFIRMED if won.all() else PARTLY if won.any() else REFUTED
    shown = [
        f"{row['kind']} {row['method']} {row['difference']:+.3f}" for row in rows.to_dict("records")
    ]
    rate = 100 * rows["rate"].iloc[0]
    return Judgement(verdict, f"NLL of rival minus attention at {rate:g} %: {'; '.join(shown)}")


def _k_hardly_matters(tables: Tables) -> Judgement:
    table = tables.read("03_k_sweep", "measures")
    table = table[(table["metric"] == "accuracy") & (table["k"] >= 3)]
    means = table.groupby(["method", "k"])["value"].mean().unstack()
    spread = (means.max(axis=1) - means.min(axis=1)) * 100
    shown = ", ".join(
        f"{name} {points:.2f} (best k = {means.loc[name].idxmax()})"
        for name, points in spread.items()
    )
    verdict = CONFIRMED if spread.max() < 0.5 else PARTLY if spread.min() < 0.5 else REFUTED
    return Judgement(verdict, f"spread of accuracy over k ≥ 3 in points: {shown}")


def _k_ensemble(tables: Tables) -> Judgement:
    rows = tables.read("02_main_results", "comparison")
    rows = rows[(rows["method"] == "attention + k-ensemble") & rows["metric"].isin(["nll", "ece"])]
    if rows.empty:
        raise MissingTableError("attention + k-ensemble in 02_main_results/comparison.csv")
    helps = (rows["verdict"] == "better").any()
    shown = ", ".join(
        f"{row['metric']} {row['difference']:+.4f} ({row['verdict']})"
        for row in rows.to_dict("records")
    )
    return Judgement(REFUTED if helps else CONFIRMED, f"k-ensemble minus attention: {shown}")


def _heads(tables: Tables) -> Judgement:
    rows = tables.read("02_main_results", "ablation")
    rows = rows[(rows["part"] == "more than one head") & (rows["metric"] == "nll")]
    if rows.empty:
        raise MissingTableError("more than one head in 02_main_results/ablation.csv")
    row = rows.iloc[0]
    return Judgement(
        CONFIRMED if row["verdict"] == NO_DIFFERENCE else REFUTED,
        f"one head minus four, NLL {row['difference']:+.4f} "
        f"[{row['low']:+.4f}, {row['high']:+.4f}]",
    )


def _gap_to_cnn(tables: Tables) -> Judgement:
    own, cnn = (
        tables.mean("02_main_results", method=name, metric="accuracy")
        for name in ("attention", "cnn")
    )
    gap = 100 * (cnn - own)
    return Judgement(
        CONFIRMED if gap >= 5 else REFUTED,
        f"CNN head minus attention on the same embedder: {gap:+.2f} points",
    )


def _long_tail(tables: Tables) -> Judgement:
    rows = tables.read("05_long_tail", "measures")
    rows = rows[(rows["metric"] == "accuracy") & (rows["classes"] == "all")]
    rows = rows[(rows["method"] == "attention") & (rows["held_out"] == "balanced")]
    means = rows[rows["corrupted"] == "memory only"].groupby("ratio")["value"].mean()
    if len(means) < 2:
        raise MissingTableError("two ratios in 05_long_tail/measures.csv")
    lost = 100 * (means[means.index.max()] - means[means.index.min()])
    return Judgement(
        CONFIRMED if lost <= PUBLISHED_TAIL_LOSS else REFUTED,
        f"attention loses {lost:.2f} points at ratio {means.index.min():g} "
        f"(published: {PUBLISHED_TAIL_LOSS:g} at 0.01)",
    )


def _theory(words: str) -> Callable[[Tables], Judgement]:
    """Take over a line of the theory study's own table."""
    verdicts = {"holds": CONFIRMED, "does not hold": REFUTED, "holds in part": PARTLY}

    def judge(tables: Tables) -> Judgement:
        rows = tables.read("07_theory", "claims")
        rows = rows[rows["claim"] == words]
        if rows.empty:
            raise MissingTableError(f"{words!r} in 07_theory/claims.csv")
        row = rows.iloc[0]
        return Judgement(verdicts.get(row["verdict"], str(row["verdict"])), str(row["measured"]))

    return judge


def _never(reason: str) -> Callable[[Tables], Judgement]:
    return lambda _: Judgement(NOT_MEASURED, reason)


CLAIMS = [
    Claim("Attention improves calibration", "02", _calibration),
    Claim("Attention improves the likelihood", "02", _likelihood),
    Claim("Attention improves accuracy (+0.01 to +0.03 points)", "02", _accuracy),
    Claim("TTA makes attention better calibrated (ECE -78 %, NLL -53 %)", "02", _tta),
    Claim("k-ensembles do not help", "02", _k_ensemble),
    Claim("Four heads are as good as one", "02", _heads),
    Claim("The gap of 5 to 9 points to the CNN is fundamental", "02", _gap_to_cnn),
    Claim("k hardly matters", "03", _k_hardly_matters),
    Claim("Under 10, 20, 30 % label noise 100, 99, 98 % of the accuracy is kept", "04", _noise),
    Claim("Under label noise attention is better than plain weights", "04", _noise_against),
    Claim("A long tail of 1:100 costs about one point", "05", _long_tail),
    Claim("The error falls as O(1/k)", "07", _theory("Truncation error falls as O(1/k)")),
    Claim("Practical k is far below √n", "07", _theory("The best k is far below √n")),
    Claim(
        "Inner product and L2 agree on unit vectors",
        "07",
        _theory("Inner product and L2 find the same neighbours"),
    ),
    Claim("ResNet-50 does not help", "01", _never("needs a GPU: presets exp4 and exp5")),
    Claim(
        "Contrastive loss and hard negatives: unclear",
        "01",
        _never("needs trainings that differ in these alone: exp4 with contrastive_weight=0"),
    ),
]
