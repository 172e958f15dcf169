"""Memory of one prediction, by a process that loads what the classifier needs and nothing else.

    python -m benchmarks.estimator_memory attention

Figures of the same process, in MB: after everything is imported and used once on a few rows,
before the prediction (data and fitted model are there), at its peak, and at the peak of a second
prediction for which the caller has let go of the training rows, so that only the model holds them.
What a classifier's own libraries take counts in its peak, and not in what it takes beyond them.
Linux only.
"""

import argparse
import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

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


def main() -> None:
    """Measure one method and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--rows", type=int, default=N_ROWS)
    parser.add_argument("--queries", type=int, default=N_QUERIES)
    options = parser.parse_args()
    found = measure_memory(
        options.method, options.k, n_rows=options.rows, n_queries=options.queries
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
