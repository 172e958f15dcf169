"""Saved measurements of AFMP's cost, beside DeiT-Tiny's, become a figure's table and words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnknn.files import read_json
from attnknn.studies.afmp_saved import saved_place

NAMES = ("scaling", "scaling-large")  # the usual sizes, and those for which a smaller batch is due
COMMAND = "python benchmarks/afmp_scaling.py --out results/afmp/scaling"
SAME_MEMORY = 0.15  # a judgement: peaks of single processes, which the allocator moves
RIVAL, FAMILY, DENSE, TOP_DOWN = "DeiT-Tiny", "AFMP-Small", "AFMP-Small dense", "top-down"


@dataclass(frozen=True)
class Scaling:
    """What the benchmark saved.

    Attributes:
        table: One row per model and image size.
        clock: Which column of the table holds the times that count.
        exponents: Slope of log time in log patches, by model.
        command: What was run.
        options: What was asked for: batch, image sizes, ...
    """

    table: pd.DataFrame
    clock: str
    exponents: dict[str, float]
    command: str
    options: dict[str, Any]

    @property
    def drawn(self) -> dict[str, Any]:
        """What ``plot.scaling_panels`` draws."""
        return {"table": self.table, "clock": self.clock}

    @property
    def good(self) -> pd.DataFrame:
        """What was measured."""
        return self.table[self.table["outcome"] == "ok"]


def read_scalings() -> dict[str, Scaling]:
    """Return all that the benchmark has saved, by name."""
    found = {name: read_scaling(name) for name in NAMES}
    return {name: scaling for name, scaling in found.items() if scaling is not None}


def read_scaling(name: str = NAMES[0]) -> Scaling | None:
    """Return what the benchmark saved, or None where it has not been run.

    Args:
        name: One of ``NAMES``: a folder among the results, or else in the project.
    """
    place = saved_place(name, "scaling.csv")
    if place is None:
        return None
    saved = read_json(place / "scaling.json")
    table, options = pd.read_csv(place / "scaling.csv"), saved["options"]
    return Scaling(table, options["clock"], saved["exponents"], saved["command"], options)


def all_scaling_words(scalings: Mapping[str, Scaling]) -> str:
    """Return, in Markdown, what was measured, one list a measurement."""
    if not scalings:
        return scaling_words(None)
    return "\n\n".join(
        f"**{name}**, batch {each.options['batch']}\n\n{scaling_words(each)}"
        for name, each in scalings.items()
    )


def scaling_words(scaling: Scaling | None) -> str:
    """Return, in Markdown, how time grows with the patches, or how to measure it."""
    if scaling is None:
        return f"Not measured here; `{COMMAND}` does."
    grows = "; ".join(f"{name} {value:.2f}" for name, value in scaling.exponents.items())
    lines = [f"Exponent of the time in the number of patches: {grows}."]
    lines += _over_rival(scaling) + _share_words(scaling)
    lines += _memory_words(scaling) + _size_words(scaling)
    failed = scaling.table[scaling.table["outcome"] != "ok"]
    lines += [
        f"{row.model} at {row.side} px: {row.outcome}; its exponent is that of the other sizes."
        for row in failed.itertuples(index=False)
    ]
    asked = scaling.options.get("sides", [])
    if missing := sorted(set(asked) - set(scaling.table["side"])):
        lines.append(f"Asked for, but not measured: {', '.join(map(str, missing))} px.")
    return "\n".join(f"- {line}" for line in [*lines, f"Measured by `{scaling.command}`."])


def _over_rival(scaling: Scaling) -> list[str]:
    """Say how the times compare at the largest size that the rival managed."""
    good = scaling.good
    side = good.loc[good["model"] == RIVAL, "side"].max()
    times = good[good["side"] == side].set_index("model")[scaling.clock]
    if RIVAL not in times:
        return []
    shares = (times / times[RIVAL]).drop(RIVAL).items()
    shown = "; ".join(f"{name} {value:.2f}" for name, value in shares)
    return [f"Time over that of {RIVAL} at {side} px: {shown}."]


def _one_pass(scaling: Scaling) -> pd.DataFrame:
    """Return the rows of AFMP without the top-down pass at the largest size that dense managed."""
    good = scaling.good
    side = good.loc[good["model"] == DENSE, "side"].max()
    names = good["model"]
    rows = good[(good["side"] == side) & names.str.startswith(FAMILY)]
    return rows[~rows["model"].str.endswith(TOP_DOWN)].set_index("model")


def _share_words(scaling: Scaling) -> list[str]:
    """Say how long a pass takes at each share of kept edges, and whether fewer are faster."""
    rows = _one_pass(scaling)
    if DENSE not in rows.index or len(rows) < 2:
        return []
    times, side = rows[scaling.clock], int(rows["side"].iloc[0])
    shown = ", ".join(f"{name.removeprefix(FAMILY).strip()} {x:.2f} s" for name, x in times.items())
    falls = times.is_monotonic_decreasing  # rows go from dense to the smallest share
    said = "fewer edges are faster" if falls else "time does not fall at every step"
    return [f"{FAMILY}, one pass at {side} px: {shown}: {said}."]


def _memory_words(scaling: Scaling) -> list[str]:
    """Say what pruning does to the peak memory, over that of the dense model."""
    rows = _one_pass(scaling)
    if DENSE not in rows.index or "peak_mb" not in rows or len(rows) < 2:
        return []
    shares = (rows["peak_mb"] / rows.loc[DENSE, "peak_mb"]).drop(DENSE)
    shown = "; ".join(f"{name} {value:.2f}" for name, value in shares.items())
    if (shares < 1 - SAME_MEMORY).all():
        said = "pruning saves memory"
    elif (shares < 1 - SAME_MEMORY).any():
        said = "pruning saves memory at some shares only"
    else:
        said = "pruning saves no memory"
    side = int(rows["side"].iloc[0])
    return [
        f"Peak memory over that of {DENSE} at {side} px: {shown}: {said} (one process a model: "
        f"differences within {100 * SAME_MEMORY:.0f} % are not told apart)."
    ]


def _size_words(scaling: Scaling) -> list[str]:
    """Say how many parameters the timed models have: one pass needs fewer than two."""
    good = scaling.good
    if "parameters" not in good:
        return []
    counts = good.groupby("model", sort=False)["parameters"].max()
    family = counts[counts.index.str.startswith(FAMILY)]
    two = family[family.index.str.endswith(TOP_DOWN)]
    one = family.drop(two.index)
    if one.empty or two.empty:
        return []
    return [
        f"Parameters: {one.max():,.0f} of {FAMILY} with one pass, {two.max():,.0f} with the "
        f"top-down pass; it is the latter that stands for {FAMILY}'s size."
    ]
