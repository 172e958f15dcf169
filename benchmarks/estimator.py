"""AttnKNNClassifier against scikit-learn's brute-force kNN: time and memory of predict_proba.

10 000 queries against 50 000 x 256 float32 rows of 10 classes, the same number of neighbours.
Both predict in turns in one process, so that a busy machine slows both alike; the memory of each is
taken in a process of its own, that loads what this classifier needs and nothing else.

    python -m benchmarks.estimator --out results/estimator/speed.json
    python -m benchmarks.estimator memory attention
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import Ratio, divided, interleaved

# ---- Memory, in MB (Linux): after everything is imported and used once on a few rows, before
# the prediction (data and fitted model are there), at its peak, and at that of a second one for
# which the caller has let go of the training rows. Libraries count in the peak alone.

N_ROWS, N_QUERIES, WIDTH, N_CLASSES = 50_000, 10_000, 256, 10
METHODS = ("attention", "brute")
FEW = 64  # rows that make every library load what it loads late
LIBRARIES = ("attnknn", "faiss", "pandas", "sklearn", "torch")


def make_data(n_rows: int, n_queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows around ten centres, their classes, and queries drawn in the same way."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((N_CLASSES, WIDTH), dtype=np.float32)
    labels = rng.integers(N_CLASSES, size=n_rows + n_queries)
    rows = 0.3 * centres[labels]
    rows += rng.standard_normal(rows.shape, dtype=np.float32)
    # Copies, not views: each can be let go of on its own.
    return rows[:n_rows].copy(), labels[:n_rows].copy(), rows[n_rows:].copy()


def fitted(method: str, rows: np.ndarray, labels: np.ndarray, k: int) -> Any:
    """Return a fitted classifier; the other one's libraries are not loaded."""
    if method == "brute":
        from sklearn.neighbors import KNeighborsClassifier

        return KNeighborsClassifier(k, algorithm="brute").fit(rows, labels)
    from attnknn import AttnKNNClassifier

    model = AttnKNNClassifier(k, metric="cosine", label_noise=0.0, random_state=0)
    return model.fit(rows, labels)


def status(field: str) -> float:
    """Return a line of this process's status in MB (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 1024


def measure_memory(
    method: str, k: int, *, n_rows: int = N_ROWS, n_queries: int = N_QUERIES
) -> dict[str, Any]:
    """Return the memory in MB after imports, before and at the peak of one prediction."""
    few = make_data(FEW, FEW)
    fitted(method, *few[:2], k=3).predict_proba(few[2])
    imported = status("VmRSS")
    rows, labels, queries = make_data(n_rows, n_queries)
    model = fitted(method, rows, labels, k)
    model.predict_proba(queries[:100])  # what is made once is made now
    before, peak = _prediction(model, queries)
    del rows, labels
    _, peak_without_rows = _prediction(model, queries)
    return {
        "imported_mb": imported,
        "before_mb": before,
        "peak_mb": peak,
        "beyond_imports_mb": peak - imported,
        "of_model_mb": peak_without_rows - imported,
        "of_prediction_mb": peak - before,
        "libraries": [name for name in LIBRARIES if name in sys.modules],
    }


def _prediction(model: Any, queries: np.ndarray) -> tuple[float, float]:
    """Return the memory in MB before and at the peak of one prediction."""
    gc.collect()
    # Room that has been freed goes back: a prediction that fits into it would seem to need none.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = status("VmRSS")
    model.predict_proba(queries)
    return before, status("VmHWM")


def tell_memory(arguments: list[str]) -> None:
    """Measure one method and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--rows", type=int, default=N_ROWS)
    parser.add_argument("--queries", type=int, default=N_QUERIES)
    options = parser.parse_args(arguments)
    found = measure_memory(
        options.method, options.k, n_rows=options.rows, n_queries=options.queries
    )
    print(json.dumps(found))


# ---- Speed, and both kinds of figures side by side.

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


def compare_memory(k: int, n_rows: int, n_queries: int) -> dict[str, Any]:
    """Return the memory of each classifier, in a process of its own, and their ratios."""
    sizes = ["--k", str(k), "--rows", str(n_rows), "--queries", str(n_queries)]
    command = [sys.executable, "-m", "benchmarks.estimator", "memory"]
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


def compare(arguments: list[str]) -> None:
    """Measure both and print one JSON object."""
    from attnknn.files import provenance, write_json

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
        **compare_memory(options.k, *sizes.values()),
        "k": options.k,
        "sizes": sizes | {"width": WIDTH, "classes": N_CLASSES},
        "command": " ".join(["python -m benchmarks.estimator", *arguments]),
        **provenance(),
    }
    write_json(options.out, result)
    shown = ("speed", "memory", "memory_ratios")
    print(json.dumps({name: result[name] for name in shown}, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        tell_memory(sys.argv[2:])
    else:
        compare(sys.argv[1:])
