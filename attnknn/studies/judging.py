"""Rules of judging: verdicts, what they rest on, and the saved tables that they are taken from.

A claim is confirmed or refuted only by what was shown. A difference that a test does not find is
no equality: "as good as" needs an interval inside a margin, and what is neither shown nor excluded
is not decided at this size.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from attnknn.families import in_families

CONFIRMED, PARTLY, REFUTED = "confirmed", "partly", "refuted"
NOT_DECIDED = "not decided at this size"
NOT_MEASURED = "not measured in this run"
# What a verdict rests on.
PAIRED, INTERVAL, MEANS, TIMES = "paired test", "interval", "means", "times"
THEORY, NOTHING = "theory", "nothing"

# Margins of "the same". Published k-ensembles moved the NLL by 0.3 % and the ECE by 0.0001, which
# was called no help; published views by 53 % and 0.1, which was. The margins lie between.
SAME_NLL_SHARE = 0.01  # of the attention's own NLL
SAME_ECE = 0.005  # half a percentage point of confidence
# Accuracy varied by up to 0.33 points over k ≥ 3 (experiment 4), which was called hardly any.
SAME_ACCURACY = 0.005


class Judgement(NamedTuple):
    """A verdict, the figures behind it, and what kind of evidence they are."""

    verdict: str
    evidence: str
    basis: str


class MissingTableError(LookupError):
    """A study has not been run, or did not save what a claim needs."""


class Tables:
    """The saved tables of a run, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def rows(self, notebook: str, name: str, **where: object) -> pd.DataFrame:
        """Return rows of a saved table, or say what is missing.

        Args:
            notebook: Folder of the study.
            name: Table.
            where: Column to the value, or the tuple of values, that it must have.
        """
        path = self.folder / notebook / f"{name}.csv"
        if not path.is_file():
            raise MissingTableError(f"{notebook}/{name}.csv")
        table = pd.read_csv(path)
        if "p_value" in table and name == "comparison":
            table = in_families(table)  # a table may be older than the families
        allowed = {key: each if isinstance(each, tuple) else (each,) for key, each in where.items()}
        for column, values in allowed.items():
            table = table[table[column].isin(values)]
        if table.empty:
            wanted = ", ".join(
                f"{column} {' or '.join(map(str, values))}" for column, values in allowed.items()
            )
            raise MissingTableError(f"{wanted} in {notebook}/{name}.csv")
        return table

    def mean(self, notebook: str, **where: object) -> float:
        """Return the mean over seeds of one measure in a study's ``measures`` table."""
        return float(self.rows(notebook, "measures", **where)["value"].mean())


def decide(supports: Iterable[bool], opposes: Iterable[bool]) -> str:
    """Judge a claim that must hold against every rival: where it was shown, where its opposite.

    Shown against some rivals and not against others, it holds in part, even where its opposite was
    shown against those others.
    """
    supports = list(supports)
    if all(supports):
        return CONFIRMED
    if any(supports):
        return PARTLY
    return REFUTED if any(opposes) else NOT_DECIDED


def tempered(published: str, others: Iterable[str]) -> str:
    """Temper what the published setting confirms by other settings: it must hold there too.

    A claim that fails where it was published is not saved by settings that were not.
    """
    others = list(others)
    holds = all(verdict == CONFIRMED for verdict in others)
    return PARTLY if published == CONFIRMED and not holds else published


def with_width(rows: pd.DataFrame) -> pd.DataFrame:
    """Return paired differences with unknown limits (NaN) where the interval has no width.

    Such an interval comes from predictions that agree on every row; resampling those says nothing
    about rows on which they would not, so it excludes no claimed size.
    """
    limits = rows[["low", "high"]].where(rows["low"] < rows["high"])
    return rows.assign(low=limits["low"], high=limits["high"])


def at_least(low: float, high: float, bound: float) -> str:
    """Judge "it is ``bound`` or more" by an interval; unknown limits (NaN) decide nothing."""
    return CONFIRMED if low >= bound else REFUTED if high < bound else NOT_DECIDED


def below(low: float, high: float, bound: float) -> str:
    """Judge "it is less than ``bound``" by an interval."""
    return CONFIRMED if high < bound else REFUTED if low >= bound else NOT_DECIDED


def the_same(low: float, high: float, margin: float) -> str:
    """Judge "there is no difference" by the interval of one: inside the margin, or outside."""
    if low >= -margin and high <= margin:
        return CONFIRMED
    return REFUTED if low > margin or high < -margin else NOT_DECIDED


def joined(verdicts: Iterable[str]) -> str:
    """Judge a claim of several parts that must all hold."""
    verdicts = list(verdicts)
    if all(verdict == CONFIRMED for verdict in verdicts):
        return CONFIRMED
    return REFUTED if REFUTED in verdicts else NOT_DECIDED
