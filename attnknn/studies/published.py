"""Published figures of the original study, to be shown beside our own and never mixed with them.

Source: the Attn-KNN notebooks of November 2025 (experiments 4 and 5), their method page and
research narrative, and the summary of experiment 7 in the public repository
``7kylor/attn-knn-release``. CIFAR-10, one seed (42), no intervals. The faults found in that code
are listed, and their cost measured, in notebook 09.
"""

from collections.abc import Sequence

import pandas as pd

SOURCE = "7kylor/attn-knn-release, November 2025; CIFAR-10, one seed"
# Method name in our tables -> experiment -> accuracy, NLL, ECE.
MAIN: dict[str, dict[str, tuple[float, float, float]]] = {
    "uniform": {
        "exp1-3": (0.8861, 1.021, 0.0165),
        "exp4": (0.8969, 0.964, 0.0243),
        "exp5": (0.8682, 2.053, 0.1297),
        "exp6": (0.8557, 2.028, 0.1336),
        "exp7": (0.9153, 1.225, 0.0796),
    },
    "distance": {
        "exp1-3": (0.8862, 1.018, 0.0347),
        "exp4": (0.8970, 0.964, 0.0566),
        "exp5": (0.8685, 2.054, 0.1099),
        "exp6": (0.8555, 2.028, 0.1169),
        "exp7": (0.9152, 1.225, 0.0783),
    },
    "attention": {
        "exp1-3": (0.8854, 1.025, 0.0329),
        "exp4": (0.8970, 0.964, 0.0578),
        "exp5": (0.8685, 2.054, 0.1300),
        "exp6": (0.8548, 2.058, 0.1359),
        "exp7": (0.9155, 1.236, 0.0811),
    },
    "attention + TTA": {
        "exp5": (0.8720, 0.967, 0.0283),
        "exp6": (0.8554, 0.931, 0.0379),
        "exp7": (0.9099, 0.513, 0.0267),
    },
    "attention + k-ensemble": {"exp5": (0.8683, 2.047, 0.1299)},
    "cnn": {
        "exp4": (0.9494, 0.258, 0.0718),
        "exp5": (0.9512, 0.242, 0.0685),
        "exp6": (0.9497, 0.247, 0.0726),
        "exp7": (0.9651, 0.184, 0.0253),
    },
}
METRICS = ("accuracy", "nll", "ece")
# Experiment -> share of wrong memory labels -> accuracy of uniform, distance and attention.
NOISE: dict[str, dict[float, tuple[float | None, ...]]] = {
    "exp4": {
        0.0: (0.8969, 0.8970, 0.8970),
        0.1: (0.8973, 0.8973, 0.8973),
        0.2: (0.8948, 0.8957, 0.8957),
        0.3: (0.8921, 0.8918, 0.8918),
    },
    "exp5": {
        0.1: (0.8684, 0.8685, 0.8682),
        0.2: (0.8683, 0.8685, 0.8685),
        0.3: (0.8682, 0.8685, 0.8680),
    },
    "exp7": {0.3: (0.9149, None, 0.9050)},
}


def published_main() -> pd.DataFrame:
    """Return the published main results, one row per experiment, method and measure."""
    rows = [
        {"source": f"published {experiment}", "method": method, "metric": metric, "value": value}
        for method, experiments in MAIN.items()
        for experiment, values in experiments.items()
        for metric, value in zip(METRICS, values, strict=True)
    ]
    return pd.DataFrame(rows)


def published_noise() -> pd.DataFrame:
    """Return the published accuracies under label noise, one row per experiment, method, noise."""
    rows = [
        {"experiment": experiment, "method": method, "noise": noise, "accuracy": accuracy}
        for experiment, levels in NOISE.items()
        for noise, accuracies in levels.items()
        for method, accuracy in zip(("uniform", "distance", "attention"), accuracies, strict=True)
        if accuracy is not None
    ]
    return pd.DataFrame(rows)


def beside_published(
    measures: pd.DataFrame, *, ours: str = "this run", experiments: Sequence[str] = ()
) -> pd.DataFrame:
    """Return our means and the published figures side by side, one row per method and source.

    Args:
        measures: Our own rows with ``method``, ``metric`` and ``value``, one a seed.
        ours: What to call them.
        experiments: Published experiments to show; all by default.
    """
    own = measures[measures["metric"].isin(METRICS) & measures["method"].isin(MAIN)]
    own = own.groupby(["method", "metric"], sort=False, as_index=False)["value"].mean()
    theirs = published_main()
    if experiments:
        theirs = theirs[theirs["source"].isin([f"published {name}" for name in experiments])]
    both = pd.concat([own.assign(source=ours), theirs], ignore_index=True)
    wide = both.pivot(index=["method", "source"], columns="metric", values="value")
    order = [(method, source) for method in MAIN for source in [ours, *theirs["source"].unique()]]
    wide = wide.reindex([key for key in order if key in wide.index])[list(METRICS)]
    return wide.reset_index()
