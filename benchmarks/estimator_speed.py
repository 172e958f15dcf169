"""Compare AttnKNNClassifier with scikit-learn's brute-force kNN: time and memory of predict_proba.

10 000 queries against 50 000 x 256 float32 rows of 10 classes, the same number of neighbours.
Both predict in turns in one process, so that a busy machine slows both alike; the memory of each is
taken in a process of its own, by ``estimator_memory``.

    python -m benchmarks.estimator_speed --out results/estimator/speed.json
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from attnknn.files import provenance, write_json
from benchmarks.estimator_memory import (
    METHODS,
    N_CLASSES,
    N_QUERIES,
    N_ROWS,
    WIDTH,
    fitted,
    make_data,
)
from benchmarks.timing import Ratio, divided, interleaved

MEMORY_TARGET = 1.5
MEMORY_NOTES = {
    "peak_mb": "the whole process at its peak; the attention's libraries (torch, faiss) count",
    "beyond_imports_mb": "data, model and prediction: the peak less what the process holds once "
    "everything is imported and used on a few rows",
    "of_model_mb": "model, queries and prediction, once the caller has let go of the training rows",
    "of_prediction_mb": "the prediction alone: the peak less what data and model hold before it",
}


def measure_speed(k: int, rounds: int, n_rows: int, n_queries: int) -> dict[str, Any]:
    """Return the seconds of each classifier and how many times as fast the attention is."""
    rows, labels, queries = make_data(n_rows, n_queries)
    models = {name: fitted(name, rows, labels, k) for name in METHODS}
    for model in models.values():
        model.predict_proba(queries[:100])
    actions = {
        name: lambda model=model: model.predict_proba(queries) for name, model in models.items()
    }
    seconds = interleaved(actions, rounds)
    title = "predict_proba: times the speed of scikit-learn's brute-force kNN"
    ratios = divided(seconds["brute"], seconds["attention"])
    row = Ratio("times_as_fast", title, ratios, "higher", target=1.5).as_row()
    return {"speed": row, "seconds": seconds}


def measure_memory(k: int, n_rows: int, n_queries: int) -> dict[str, Any]:
    """Return the memory of each classifier, in a process of its own, and their ratios."""
    sizes = ["--k", str(k), "--rows", str(n_rows), "--queries", str(n_queries)]
    command = [sys.executable, "-m", "benchmarks.estimator_memory"]
    memory = {
        name: json.loads(subprocess.check_output([*command, name, *sizes])) for name in METHODS
    }
    return {"memory": memory, "memory_ratios": memory_ratios(memory)}


def memory_ratios(memory: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each kind of memory of the attention over that of the brute force.

    None where the brute force takes less than a megabyte: such a ratio means nothing.
    """
    found = {}
    for kind, note in MEMORY_NOTES.items():
        ours, theirs = (memory[name][kind] for name in METHODS)
        ratio = ours / theirs if theirs >= 1 else None
        reached = None if ratio is None else ratio <= MEMORY_TARGET
        found[kind] = {"ratio": ratio, "target": MEMORY_TARGET, "reached": reached, "note": note}
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--rows", type=int, default=N_ROWS)
    parser.add_argument("--queries", type=int, default=N_QUERIES)
    parser.add_argument("--out", type=Path, default=Path("results/estimator/speed.json"))
    options = parser.parse_args(arguments)
    sizes = {"rows": options.rows, "queries": options.queries}
    result = {
        **measure_speed(options.k, options.rounds, *sizes.values()),
        **measure_memory(options.k, *sizes.values()),
        "k": options.k,
        "sizes": sizes | {"width": WIDTH, "classes": N_CLASSES},
        "command": " ".join(["python -m benchmarks.estimator_speed", *(arguments or sys.argv[1:])]),
        **provenance(),
    }
    write_json(options.out, result)
    shown = ("speed", "memory", "memory_ratios")
    print(json.dumps({name: result[name] for name in shown}, indent=2))


if __name__ == "__main__":
    main()
