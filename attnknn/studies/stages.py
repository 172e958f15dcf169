"""Stages of a prediction: what embedding, search, vote and attention take per query."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd

from attnknn.classify import Attention, Uniform, predict
from attnknn.embed import embed
from attnknn.neighbours import Neighbours
from attnknn.studies.timing import median_interval, time_in_turns
from attnknn.trained import TrainedRun, choose_device

SINGLE_QUERIES = 20  # queries that are asked one by one
STAGES = ("embedding", "search", "vote", "attention")
TIMED = ("embedding", "search", "uniform", "attention")

# Batch to what was timed to ms a query in every round.
StageTimes = dict[str, dict[str, list[float]]]


def stage_times(
    run: TrainedRun, k: int, *, n_queries: int = 1_000, repeats: int = 7, progress: bool = True
) -> StageTimes:
    """Return ms a query of embedding, search and both votes: batch to stage to rounds."""
    k, n = min(k, len(run.bank)), min(n_queries, len(run.rows("test")))
    _ = run.bank.view.histograms, run.bank.view.prototypes  # made once per memory, not per query
    batches = {"all at once": [slice(0, n)]}
    batches["one by one"] = [slice(place, place + 1) for place in range(min(SINGLE_QUERIES, n))]
    times = {}
    for batch, parts in batches.items():
        asked = sum(part.stop - part.start for part in parts)
        actions = {name: partial(_each, act, parts) for name, act in _stages(run, k, n).items()}
        options = {"repeats": repeats, "desc": f"stages, {batch}", "progress": progress}
        found = time_in_turns(actions, **options)
        times[batch] = {name: [1000 * t / asked for t in each] for name, each in found.items()}
    return times


def _each(action: Callable[[slice], object], parts: Sequence[slice]) -> None:
    for part in parts:
        action(part)


def _stages(run: TrainedRun, k: int, n_queries: int) -> dict[str, Callable[[slice], object]]:
    """Return what is done with some of the queries, stage by stage."""
    device = choose_device(run.config.training.device)
    inputs, rows = run.splits.test.inputs[:n_queries], run.rows("test")[:n_queries]
    found, attention, uniform = run.bank.search(rows, k), run.method(k), Uniform(k)

    def vote(method: Uniform | Attention, part: slice) -> np.ndarray:
        fresh: Neighbours = found.of_queries(part)  # labels and trust are looked up anew
        return predict(method, fresh)

    return {
        "embedding": lambda part: embed(run.embedder, inputs[part], device=device, progress=False),
        "search": lambda part: run.bank.search(rows[part], k),
        "uniform": partial(vote, uniform),
        "attention": partial(vote, attention),
    }


def stage_table(times: StageTimes) -> pd.DataFrame:
    """Return ms a query of every stage; "attention" is what it takes beyond a uniform vote."""
    table = []
    for batch, stages in times.items():
        extra = np.subtract(stages["attention"], stages["uniform"])  # round by round
        each = stages | {"vote": stages["uniform"], "attention": extra}
        for method in ("uniform", "attention"):
            for stage in STAGES if method == "attention" else STAGES[:-1]:
                value, low, high, n = median_interval(each[stage])
                row = {"batch": batch, "method": method, "stage": stage, "value": value}
                table.append(row | {"low": low, "high": high, "n": n})
    return pd.DataFrame(table)


def overheads(times: StageTimes) -> pd.DataFrame:
    """Return the attention's cost over the uniform vote's, round by round: difference and ratio."""
    table = []
    for batch, stages in times.items():
        embedding, search, uniform, attention = (np.array(stages[name]) for name in TIMED)
        before = {"search and vote": search, "embedding, search and vote": embedding + search}
        for scope, shared in before.items():
            ratio, low, high, n = median_interval((shared + attention) / (shared + uniform))
            extra = float(np.median(attention - uniform))
            row = {"batch": batch, "scope": scope, "extra_ms": extra, "ratio": ratio}
            table.append(row | {"low": low, "high": high, "n": n})
    return pd.DataFrame(table)
