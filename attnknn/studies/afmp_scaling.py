"""The saved measurement of how AFMP and DeiT-Tiny scale becomes a figure's table and words."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from attnknn.files import read_json
from attnknn.runs import project_root, results_root

PLACE = Path("afmp") / "scaling"
COMMAND = "python benchmarks/afmp_scaling.py --out results/afmp/scaling"
RIVAL = "DeiT-Tiny"


@dataclass(frozen=True)
class Scaling:
    """What the benchmark saved.

    Attributes:
        table: One row per model and image size.
        clock: Which column of the table holds the times that count.
        exponents: Slope of log time in log patches, by model.
        command: What was run.
    """

    table: pd.DataFrame
    clock: str
    exponents: dict[str, float]
    command: str


def read_scaling(folder: Path | None = None) -> Scaling | None:
    """Return what the benchmark saved, or None where it has not been run.

    Args:
        folder: Where it saved to; None looks among the results, then in the project.
    """
    roots = (results_root(), (project_root() or Path()) / "results")
    places = [root / PLACE for root in roots] if folder is None else [Path(folder)]
    place = next((each for each in places if (each / "scaling.csv").is_file()), None)
    if place is None:
        return None
    saved = read_json(place / "scaling.json")
    table = pd.read_csv(place / "scaling.csv")
    return Scaling(table, saved["options"]["clock"], saved["exponents"], saved["command"])


def scaling_words(scaling: Scaling | None) -> str:
    """Return, in Markdown, how time grows with the patches, or how to measure it."""
    if scaling is None:
        return f"Not measured here; `{COMMAND}` does."
    grows = "; ".join(f"{name} {value:.2f}" for name, value in scaling.exponents.items())
    lines = [f"Time ~ patches ** exponent: {grows}."]
    lines += _over_rival(scaling)
    failed = scaling.table[scaling.table["outcome"] != "ok"]
    lines += [
        f"{row.model} at {row.side} px: {row.outcome}." for row in failed.itertuples(index=False)
    ]
    return "\n".join(f"- {line}" for line in [*lines, f"Measured by `{scaling.command}`."])


def _over_rival(scaling: Scaling) -> list[str]:
    """Say how the times compare at the largest size that the rival managed."""
    good = scaling.table[scaling.table["outcome"] == "ok"]
    side = good.loc[good["model"] == RIVAL, "side"].max()
    times = good[good["side"] == side].set_index("model")[scaling.clock]
    if RIVAL not in times:
        return []
    shares = (times / times[RIVAL]).drop(RIVAL).items()
    shown = "; ".join(f"{name} {value:.2f}" for name, value in shares)
    return [f"Time over that of {RIVAL} at {side} px: {shown}."]
