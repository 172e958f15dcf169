"""Costs of the published faults: paired differences, one figure, one table, one sentence each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from attnknn.compare import Interval, compare_methods, mean_interval
from attnknn.measure import HIGHER_IS_BETTER, METRIC_NAMES
from attnknn.studies.errata import FAULTS, Fault
from attnknn.studies.errata_case import Case, Pair
from attnknn.studies.selection import CRITERIA, candidate_probs, selection_optimism
from attnknn.trained import TrainedRun

METRICS = ("accuracy", "nll", "ece")
UNCLEAR = "no difference at this size"
# A faulty vote may give a true class no probability at all: no interval, but no small matter.
INFINITE, UNDEFINED = "infinite", "undefined"
# What a better or a worse measure means for a fault that misleads, and for one that does harm.
EFFECTS = {
    (True, "better"): "looks better than it is",
    (True, "worse"): "looks worse than it is",
    (False, "better"): "better",
    (False, "worse"): "worse",
}
SELECTION_WRONG = "Settings were chosen on the rows that were then reported (here by {criterion})."
SELECTION_ROWS = "halves of the held-out rows (interval: of the mean over halves)"
CAPTION = (
    "What each published fault costs: faulty minus corrected with its interval, 95 % for all "
    "faults together. Of a selection: the mean over random halves with its own 95 % interval, "
    "which allows for halves that share rows."
)


@dataclass(frozen=True)
class Costs:
    """What each fault costs.

    Attributes:
        table: One row per fault and measure: ``fault``, ``wrong``, ``rows``, ``misleads``,
            ``metric``, ``difference`` (faulty minus corrected), ``low``, ``high``, ``effect``
            (``INFINITE`` or ``UNDEFINED`` where a loss is not finite), ``n_rows`` and ``n_seeds``.
        details: Fault to what else was measured, first seed.
        accuracy_noise: Half of the 95 % interval of one accuracy on these test rows.
    """

    table: pd.DataFrame
    details: dict[str, str]
    accuracy_noise: float


def fault_costs(
    runs: Sequence[TrainedRun],
    *,
    k_eval: int = 50,
    k_baseline: int = 16,
    errata_epochs: int = 15,
    errata_queries: int = 2000,
    n_halves: int = 200,
    progress: bool = True,
) -> Costs:
    """Return the cost of every fault.

    Args:
        runs: One trained run a seed.
        k_eval: Neighbours that an attention weighs.
        k_baseline: Neighbours of plain votes.
        errata_epochs: Epochs of every fit, faulty or corrected.
        errata_queries: The most queries that a fit gets.
        n_halves: Random halves for the selection on reported rows.
        progress: Show a progress bar.
    """
    options = {"epochs": errata_epochs, "max_queries": errata_queries}
    cases = [Case(run, k_eval, k_baseline, **options) for run in runs]
    level = 1 - 0.05 / len(FAULTS)  # one look per fault (Bonferroni), intervals included
    tables, details = [], {}
    for fault in tqdm(FAULTS, desc="faults", disable=not progress, leave=False):
        pairs = [fault.make(case) for case in cases]
        tables.append(paired_cost(fault, pairs, level=level))
        details[fault.name] = pairs[0].detail
    tables += [selection_cost(cases, criterion, n_halves) for criterion in CRITERIA]
    right = np.mean([case.held_out_probs.argmax(axis=1) == case.labels for case in cases])
    noise = 1.96 * np.sqrt(right * (1 - right) / len(cases[0].labels))
    return Costs(pd.concat(tables, ignore_index=True), details, float(noise))


def paired_cost(fault: Fault, pairs: Sequence[Pair], *, level: float = 0.95) -> pd.DataFrame:
    """Return faulty minus corrected in every measure, over the seeds."""
    results = {
        "faulty": [pair.faulty for pair in pairs],
        "corrected": [pair.corrected for pair in pairs],
    }
    table = compare_methods(results, pairs[0].labels, "corrected", metrics=METRICS, level=level)
    effects = [_effect(fault.misleads, row) for row in table.to_dict("records")]
    described = {"fault": fault.name, "wrong": fault.wrong, "rows": fault.rows}
    table = table.assign(**described, misleads=fault.misleads, effect=effects)
    return table[_COLUMNS]


def _effect(misleads: bool, row: dict) -> str:
    """Name what a paired difference shows; one that is not finite has a name of its own."""
    if row["verdict"] == "undefined":
        return INFINITE if row["difference"] == np.inf else UNDEFINED
    return EFFECTS.get((misleads, row["verdict"]), UNCLEAR)


def selection_cost(cases: Sequence[Case], criterion: str, n_halves: int) -> pd.DataFrame:
    """Return what choosing on the reported rows adds, with the interval of its mean."""
    gaps = pd.concat(
        [
            selection_optimism(
                candidate_probs(case.found.held_out),
                case.found.held_out_labels,
                criterion=criterion,
                n_halves=n_halves,
                seed=case.run.config.seed,
            )
            for case in cases
        ]
    )
    name, found = METRIC_NAMES[criterion], {each: halves_interval(gaps[each]) for each in METRICS}
    rows = [
        {
            "fault": f"selection by reported {name}",
            "wrong": SELECTION_WRONG.format(criterion=name),
            "rows": SELECTION_ROWS,
            "misleads": True,
            "metric": metric,
            "difference": found[metric].mean,
            "low": found[metric].low,
            "high": found[metric].high,
            "effect": _selection_effect(found[metric], metric),
            "n_rows": len(cases[0].found.held_out_labels) // 2,
            "n_seeds": len(cases),
        }
        for metric in METRICS
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


_COLUMNS = "fault wrong rows misleads metric difference low high effect n_rows n_seeds".split()


def halves_interval(gaps: pd.Series, *, level: float = 0.95) -> Interval:
    """Return the mean over random splits with an interval that more splits cannot shrink to none.

    The splits share their rows, so their spread over the root of their number would be far too
    small. For halves, Nadeau and Bengio (2003) add 1 to 1 / n under the root; the two halves of a
    split are averaged first.

    Args:
        gaps: One number a half, the two of a split next to each other.
        level: Confidence of the interval.
    """
    values = gaps.to_numpy(dtype=np.float64).reshape(-1, 2)
    with np.errstate(invalid="ignore"):  # infinite losses
        splits = values.mean(axis=1)
        found = mean_interval(splits, level=level)
    half = (found.high - found.mean) * np.sqrt(1 + found.n)
    return found._replace(low=float(found.mean - half), high=float(found.mean + half))


def _selection_effect(found: Interval, metric: str) -> str:
    """Call an effect clear where the interval of its mean excludes 0.

    The own choice is the best on its own half by construction: that no half contradicts it says
    nothing.
    """
    if not np.isfinite(found.mean):
        return INFINITE if found.mean == np.inf else UNDEFINED
    low, high = (found.low, found.high) if metric in HIGHER_IS_BETTER else (-found.high, -found.low)
    if low > 0:
        return EFFECTS[True, "better"]
    return EFFECTS[True, "worse"] if high < 0 else UNCLEAR


def cost_table(costs: Costs) -> pd.DataFrame:
    """Return one row a fault: its cost in every measure with the interval, ready to print."""
    rows = []
    for name, mine in costs.table.groupby("fault", sort=False):
        first = mine.iloc[0]
        shown = {_title(row["metric"]): _cell(row) for row in mine.to_dict("records")}
        rows.append({"fault": name, "measured on": first["rows"], **shown})
    return pd.DataFrame(rows)


def verdict(costs: Costs) -> str:
    """Return, in Markdown, what each fault was and what it makes better or worse."""
    lines = []
    for name, mine in costs.table.groupby("fault", sort=False):
        parts = [mine["wrong"].iloc[0], effect_sentence(mine), costs.details.get(name, "")]
        lines.append(f"- **{name}**: {' '.join(part for part in parts if part)}")
    first = costs.table.iloc[0]
    note = (
        f"Faulty minus corrected, paired, intervals of 95 % over all faults together; "
        f"{first['n_seeds']} seed(s). For selection: the 95 % interval of the mean over halves. "
        f"One accuracy on these test rows is uncertain by ±{100 * costs.accuracy_noise:.2f} "
        "points: smaller differences between separate measurements, without a paired test, mean "
        "nothing."
    )
    return "\n".join([*lines, "", note])


def effect_sentence(rows: pd.DataFrame) -> str:
    """Return what one fault does to the measures, in words."""
    clear = [row for row in rows.to_dict("records") if row["effect"] != UNCLEAR]
    if not clear:
        return "It makes no difference at this size."
    phrases = [
        f"{METRIC_NAMES[row['metric']]} {row['effect'].replace('looks', 'look')}"
        + ("" if _cell(row) == row["effect"] else f" ({_cell(row)})")
        for row in clear
    ]
    return f"It makes {', '.join(phrases)}."


def _title(metric: str) -> str:
    unit = " (points)" if metric in HIGHER_IS_BETTER else ""
    return f"{METRIC_NAMES[metric]}{unit}"


def _cell(row: dict) -> str:
    if not np.isfinite(row["difference"]):
        return {np.inf: INFINITE, -np.inf: f"minus {INFINITE}"}.get(row["difference"], UNDEFINED)
    scale, digits = (100, 2) if row["metric"] in HIGHER_IS_BETTER else (1, 4)
    shown = [f"{scale * row[name]:+.{digits}f}" for name in ("difference", "low", "high")]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"
