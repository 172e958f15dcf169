"""Published figures of the original study, to be shown beside our own and never mixed with them.

They stand in ``published.yaml``, with where they come from.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd
import yaml

METRICS = ("accuracy", "nll", "ece", "macro_f1")
METHODS = ("uniform", "distance", "attention")


@cache
def published() -> dict[str, Any]:
    """Return figures and claims of the original study."""
    text = files("attnknn.studies").joinpath("published.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


SOURCE = published()["source"]
TIMING_SOURCE = published()["timings"]["source"]


def published_main(dataset: str = "cifar10") -> pd.DataFrame:
    """Return the published main results: ``source``, ``method``, ``metric``, ``value``.

    Args:
        dataset: On "iris" only an accuracy was published; others stand beside CIFAR-10.
    """
    name, note = ("iris", " (Iris)") if dataset == "iris" else ("main", "")
    rows = [
        (f"published {experiment}{note}", method, metric, value)
        for method, experiments in published()["figures"][name].items()
        for experiment, values in experiments.items()
        for metric, value in zip(METRICS, values, strict=True)
        if value is not None
    ]
    return pd.DataFrame(rows, columns=["source", "method", "metric", "value"])


def published_sweep(over: str) -> pd.DataFrame:
    """Return a published sweep: ``source``, ``method``, ``metric``, the swept setting, ``value``.

    Args:
        over: "k", "rate" (wrong memory labels) or "ratio" (smallest over largest class).
    """
    rows = [
        (f"published {experiment}", method, metric, level, value)
        for experiment, metrics in published()["figures"][over].items()
        for metric, levels in metrics.items()
        for level, values in levels.items()
        for method, value in zip(METHODS, values, strict=True)
        if value is not None
    ]
    return pd.DataFrame(rows, columns=["source", "method", "metric", over, "value"])


def beside_published(
    measures: pd.DataFrame, *, ours: str = "this run", experiments: Sequence[str] = ()
) -> pd.DataFrame:
    """Return our means and the published figures side by side, one row per method and source.

    Args:
        measures: Our own rows with ``method``, ``metric`` and ``value``, one a seed; on Iris, as
            told by ``dataset``, they stand beside the figures of Iris.
        ours: What to call them.
        experiments: Published experiments to show; all by default.
    """
    methods = list(published()["figures"]["main"])
    own = measures[measures["metric"].isin(METRICS) & measures["method"].isin(methods)]
    on_iris = "dataset" in measures and set(measures["dataset"]) == {"iris"}
    theirs = published_main("iris" if on_iris else "cifar10")
    if experiments:
        sources = theirs["source"].str.removesuffix(" (Iris)")
        theirs = theirs[sources.isin([f"published {name}" for name in experiments])]
    own = own.groupby(["method", "metric"], sort=False, as_index=False)["value"].mean()
    both = pd.concat([own.assign(source=ours), theirs], ignore_index=True)
    wide = both.pivot(index=["method", "source"], columns="metric", values="value")
    order = itertools.product(methods, [ours, *theirs["source"].unique()])
    wide = wide.reindex([key for key in order if key in wide.index], columns=[*METRICS])
    return wide.reset_index().rename_axis(columns=None)


def sweep_beside_published(
    measures: pd.DataFrame, *, over: str, ours: str = "this run"
) -> pd.DataFrame:
    """Return a sweep of ours beside the published one: a row a source, a column a level.

    Args:
        measures: Our own rows with ``method``, ``metric``, ``value`` and ``over``, one a seed.
        over: The swept setting, as for ``published_sweep``; a level that one side lacks stays
            empty there.
        ours: What to call our rows.
    """
    theirs = published_sweep(over)
    own = measures[measures["metric"].isin(theirs["metric"]) & measures["method"].isin(METHODS)]
    keys = ["metric", "method", "source"]
    own = own.assign(source=ours).groupby([*keys, over], as_index=False)["value"].mean()
    both = pd.concat([own, theirs], ignore_index=True)
    wide = both.pivot(index=keys, columns=over, values="value")
    named = [theirs["metric"].unique(), METHODS, [ours, *theirs["source"].unique()]]
    wide = wide.reindex([key for key in itertools.product(*named) if key in wide.index])
    wide.columns = [f"{over} = {level:g}" for level in wide.columns]
    return wide.reset_index()


def timings_beside_published(scaling: pd.DataFrame, *, ours: str = "this run") -> pd.DataFrame:
    """Return build and search times beside the published ones, ours at the nearest memory size.

    Args:
        scaling: Our own rows with ``index``, ``rows``, ``metric`` and ``value``.
        ours: What to call them.
    """
    timings = published()["timings"]
    near = min(scaling["rows"].unique(), key=lambda n: abs(math.log(n / timings["rows"])))
    own = scaling[(scaling["rows"] == near) & scaling["index"].isin(timings["indexes"])]
    wide = own.pivot(index="index", columns="metric", values="value")
    rows = []
    for name, measured in timings["indexes"].items():
        mine = (1000 * wide["build_seconds"][name], wide["search_ms"][name])
        rows.append((name, ours, near, *mine))
        rows.append((name, "published (their laptop)", timings["rows"], *measured))
    columns = ["index", "source", "rows", "build (ms)", "search (ms a query)"]
    return pd.DataFrame(rows, columns=columns)
