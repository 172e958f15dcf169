"""Showcase: the tables of committed runs become the results section of the README.

    python -m scripts.readme          # rewrites what stands between the markers

No figure in the README is typed: every cell is read from a saved table, and a test fails when the
section is older than the tables.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from attnknn.evaluate.compare import STANDING, in_families
from attnknn.evaluate.measure import METRIC_NAMES
from attnknn.figures.tables import to_markdown
from attnknn.files import write_text

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# Run -> what it stands for; the run's own report holds its settings.
RUNS = {
    "cifar10": "CIFAR-10, trained embedder",
    "cifar10-short": "CIFAR-10, short trainings",
    "mnist-pca": "MNIST, untrained embedding (pixels, 64 principal axes)",
    "mnist": "MNIST, trained embedder",
    "adult": "Adult (census income)",
    "wine-red": "Wine Quality, red",
    "iris": "Iris",
}
# What has no place in the tables.
FURTHER = {
    "arena/report.md": "the classifier against its peers, clean and with wrong labels",
    "arena-before/report.md": "the classifier against its peers, before the method changed",
    "estimator/speed.json": "its speed and memory",
    "exp5-fast/report.pdf": "the published experiment 5 on a small backbone",
    "cifar10-retrained/report.pdf": "CIFAR-10 trained on 40 % wrong labels",
    "cifar10-tail/report.pdf": "CIFAR-10 trained on a long tail",
    "quick-retrained/report.pdf": "digits trained on wrong labels and long tails",
    "afmp/report.pdf": "AFMP ablations on CIFAR-10",
    "afmp/controls/paired_tests.md": "AFMP without messages, and one pass as large as two",
}
METHODS = (
    "uniform",
    "distance (tuned)",
    "prototypes (tuned)",
    "attention",
    "attention + TTA",
    "cnn + temperature",
)
COLUMNS = ("accuracy (%)", "NLL", "ECE", "n")
NOISE_RATE = 0.4
# A long training, several short ones, and no training at all.
CLAIMS_OF = ("cifar10", "cifar10-short", "mnist-pca")
COMPARED = ("nll", "ece", "accuracy")
UNCLEAR = "no difference at this size"
# Verdicts of `studies.judging` that say something about a claim.
VERDICTS = ("confirmed", "partly", "refuted", "not decided at this size")


def results_section(results: Path = ROOT / "results") -> str:
    """Return the Markdown of all committed runs that have main results."""
    tables = [_main_rows(results / name, title) for name, title in RUNS.items()]
    shown = pd.concat([table for table in tables if table is not None], ignore_index=True)
    noisy = [_noise_rows(results / name, title) for name, title in RUNS.items()]
    noisy = pd.concat([table for table in noisy if table is not None], ignore_index=True)
    parts = [
        to_markdown(shown),
        "*Mean ± half of the 95 % interval: over n trainings, or of one training (n = 1) over its "
        "test rows, where a run has saved it. Tuned methods and the attention are fitted on the "
        "same held-out rows, never on test rows.*",
        _verdict_lines(results),
        f"With {100 * NOISE_RATE:g} % wrong labels in the memory (symmetric; trust, histograms "
        "and prototypes from the wrong labels; the held-out labels that all are fitted on are "
        "clean):",
        to_markdown(noisy),
        _claims_line(results, CLAIMS_OF),
        _reports_line(results),
    ]
    return "\n\n".join(part.strip() for part in parts if part)


def _main_rows(run: Path, title: str) -> pd.DataFrame | None:
    """Return the rows of a run's main table that the README shows; None where it has none."""
    path = run / "02_main_results" / "main_results.csv"
    if not path.is_file():
        return None
    table = pd.read_csv(path, dtype=str).set_index("method")
    table = table.reindex([name for name in METHODS if name in table.index])[list(COLUMNS)]
    first = [title, *[""] * (len(table) - 1)]
    return table.reset_index().assign(run=first)[["run", "method", *COLUMNS]]


def _verdict_lines(results: Path) -> str:
    """Say, run by run, where the attention wins and loses against the methods of the table."""
    paths = {
        title: results / name / "02_main_results" / "comparison.csv" for name, title in RUNS.items()
    }
    lines = [
        f"- {title}: {_standing_line(in_families(pd.read_csv(path)))}."
        for title, path in paths.items()
        if path.is_file()
    ]
    asked = ", ".join(METRIC_NAMES[metric] for metric in COMPARED)
    title = (
        f"The attention (one view) against the others of the table in {asked}: paired tests at "
        "95 %, Holm-corrected. What is not named makes no difference at this size."
    )
    return "\n".join([title, "", *lines]) if lines else ""


def _standing_line(table: pd.DataFrame) -> str:
    """Say where the attention is better, worse, or cannot be compared; rivals of a run."""
    is_rival = table["method"].isin(METHODS) & ~table["method"].str.startswith("attention")
    groups = table[is_rival].groupby(["verdict", "metric"])["method"].agg(", ".join)
    said = [
        f"{words} {groups[verdict, metric]} in {METRIC_NAMES[metric]}"
        for verdict, words in STANDING.items()
        for metric in COMPARED
        if verdict != UNCLEAR and (verdict, metric) in groups
    ]
    return "; ".join(said) or f"{UNCLEAR} in any of them"


def _noise_rows(run: Path, title: str) -> pd.DataFrame | None:
    """Return accuracy, NLL and ECE of each shown method at the noise rate of the README."""
    path = run / "04_label_noise" / "measures.csv"
    if not path.is_file():
        return None
    table = pd.read_csv(path)
    at = (table["rate"] == NOISE_RATE) & (table["kind"] == "symmetric")
    table = table[at & (table["held_out"] == "clean") & table["method"].isin(METHODS)]
    if table.empty:
        return None
    wide = table.pivot_table(index="method", columns="metric", values="value", aggfunc="mean")
    wide = wide.reindex([name for name in METHODS if name in wide.index])
    return pd.DataFrame(
        {
            "run": [title, *[""] * (len(wide) - 1)],
            "method": wide.index,
            "accuracy (%)": [f"{100 * value:.2f}" for value in wide["accuracy"]],
            "NLL": [f"{value:.3f}" for value in wide["nll"]],
            "ECE": [f"{value:.4f}" for value in wide["ece"]],
        }
    )


def _claims_line(results: Path, runs: Sequence[str]) -> str:
    """Count the verdicts on the published claims, run by run."""
    paths = {name: results / name / "claims.md" for name in runs}
    said = [
        f"{RUNS[name]}: {_verdict_counts(path)} ([claims](results/{name}/claims.md))"
        for name, path in paths.items()
        if path.is_file()
    ]
    return f"Published claims, judged with their evidence. {'; '.join(said)}." if said else ""


def _verdict_counts(path: Path) -> str:
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \|", path.read_text(encoding="utf-8"), re.M)
    verdicts = pd.Series(cells).str.strip()
    counts = verdicts[verdicts.isin(VERDICTS)].value_counts()
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _reports_line(results: Path) -> str:
    names = [name for name in RUNS if (results / name / "report.pdf").is_file()]
    links = ", ".join(f"[{name}](results/{name}/report.pdf)" for name in names)
    further = ", ".join(
        f"[{title}](results/{name})"
        for name, title in FURTHER.items()
        if (results / name).is_file()
    )
    said = f"Whole reports, one run each (`attnknn run --profile NAME`): {links}."
    return f"{said} Further: {further}." if further else said


def with_results(readme: str, section: str) -> str:
    """Return the README with the section between its markers."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{section}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Rewrite the results section of the README."""
    path = ROOT / "README.md"
    write_text(path, with_results(path.read_text(encoding="utf-8"), results_section()))


if __name__ == "__main__":
    main()
