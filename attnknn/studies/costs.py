"""Costs of the published faults: paired differences, one figure, one table, one sentence each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from attnknn.compare import compare_methods
from attnknn.measure import HIGHER_IS_BETTER, METRIC_NAMES
from attnknn.studies.errata import FAULTS, Fault
from attnknn.studies.errata_case import Case, Pair
from attnknn.studies.selection import CRITERIA, candidate_probs, selection_optimism
from attnknn.trained import TrainedRun

METRICS = ("accuracy", "nll", "ece")
UNCLEAR = "no difference at this size"
# What a better or a worse measure means for a fault that misleads, and for one that does harm.
EFFECTS = {
    (True, "better"): "looks better than it is",
    (True, "worse"): "looks worse than it is",
    (False, "better"): "better",
    (False, "worse"): "worse",
}
SELECTION_WRONG = "Settings were chosen on the rows that were then reported (here by {criterion})."
SELECTION_ROWS = "halves of the held-out rows"


@dataclass(frozen=True)
class Costs:
    """What each fault costs.

    Attributes:
        table: One row per fault and measure: ``fault``, ``wrong``, ``rows``, ``misleads``,
            ``metric``, ``difference`` (faulty minus corrected), ``low``, ``high``, ``effect``,
            ``n_rows`` and ``n_seeds``.
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
    effects = [EFFECTS.get((fault.misleads, verdict), UNCLEAR) for verdict in table["verdict"]]
    described = {"fault": fault.name, "wrong": fault.wrong, "rows": fault.rows}
    table = table.assign(**described, misleads=fault.misleads, effect=effects)
    return table[_COLUMNS]


def selection_cost(cases: Sequence[Case], criterion: str, n_halves: int) -> pd.DataFrame:
    """Return what choosing on the reported rows adds; the interval holds 95 % of the halves."""
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
    name = METRIC_NAMES[criterion]
    rows = [
        {
            "fault": f"selection by reported {name}",
            "wrong": SELECTION_WRONG.format(criterion=name),
            "rows": SELECTION_ROWS,
            "misleads": True,
            "metric": metric,
            "difference": float(gaps[metric].mean()),
            "low": float(gaps[metric].quantile(0.025)),
            "high": float(gaps[metric].quantile(0.975)),
            "effect": _selection_effect(gaps[metric], metric),
            "n_rows": len(cases[0].found.held_out_labels) // 2,
            "n_seeds": len(cases),
        }
        for metric in METRICS
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


_COLUMNS = "fault wrong rows misleads metric difference low high effect n_rows n_seeds".split()


def _selection_effect(gaps: pd.Series, metric: str) -> str:
    """Call an effect clear where 95 % of the halves do not contradict it, and some show it."""
    gained = gaps if metric in HIGHER_IS_BETTER else -gaps
    if gained.mean() > 0 and gained.quantile(0.025) >= 0:
        return EFFECTS[True, "better"]
    if gained.mean() < 0 and gained.quantile(0.975) <= 0:
        return EFFECTS[True, "worse"]
    return UNCLEAR


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
        f"{first['n_seeds']} seed(s). For selection: the range of 95 % of the halves. One accuracy "
        f"on these test rows is uncertain by ±{100 * costs.accuracy_noise:.2f} points: smaller "
        "differences between separate measurements, without a paired test, mean nothing."
    )
    return "\n".join([*lines, "", note])


def effect_sentence(rows: pd.DataFrame) -> str:
    """Return what one fault does to the measures, in words."""
    clear = [row for row in rows.to_dict("records") if row["effect"] != UNCLEAR]
    if not clear:
        return "It makes no difference at this size."
    phrases = [
        f"{METRIC_NAMES[row['metric']]} {row['effect'].replace('looks', 'look')} ({_cell(row)})"
        for row in clear
    ]
    return f"It makes {', '.join(phrases)}."


def _title(metric: str) -> str:
    unit = " (points)" if metric in HIGHER_IS_BETTER else ""
    return f"{METRIC_NAMES[metric]}{unit}"


def _cell(row: dict) -> str:
    scale, digits = (100, 2) if row["metric"] in HIGHER_IS_BETTER else (1, 4)
    shown = [f"{scale * row[name]:+.{digits}f}" for name in ("difference", "low", "high")]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"
