"""Compare AttnKNNClassifier with scikit-learn's brute-force kNN: time and memory of predict_proba.

10 000 queries against 50 000 x 256 float32 rows of 10 classes, the same number of neighbours.
Both predict in turns in one process, so that a busy machine slows both alike; the peak memory of
each is taken in a process of its own.

    python -m benchmarks.estimator_speed --out results/estimator/speed.json
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from attnknn import AttnKNNClassifier
from attnknn.files import write_json
from attnknn.provenance import provenance
from benchmarks.timing import Ratio, divided, interleaved

N_ROWS, N_QUERIES, WIDTH, N_CLASSES = 50_000, 10_000, 256, 10
METHODS = ("attention", "brute")


def make_data(n_rows: int, n_queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows around ten centres, their classes, and queries drawn in the same way."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((N_CLASSES, WIDTH), dtype=np.float32)
    labels = rng.integers(N_CLASSES, size=n_rows + n_queries)
    rows = 0.3 * centres[labels]
    rows += rng.standard_normal(rows.shape, dtype=np.float32)
    return rows[:n_rows], labels[:n_rows], rows[n_rows:]


def fitted(method: str, rows: np.ndarray, labels: np.ndarray, k: int):
    """Return a fitted classifier."""
    if method == "brute":
        return KNeighborsClassifier(k, algorithm="brute").fit(rows, labels)
    model = AttnKNNClassifier(k, metric="cosine", label_noise=0.0, random_state=0)
    return model.fit(rows, labels)


def status(field: str) -> int:
    """Return a line of this process's status in kB (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field)))


def measure_memory(method: str, k: int) -> dict[str, float]:
    """Return the memory in MB before and at the peak of one prediction."""
    rows, labels, queries = make_data(N_ROWS, N_QUERIES)
    model = fitted(method, rows, labels, k)
    model.predict_proba(queries[:100])  # what is made once is made now
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = status("VmRSS")
    model.predict_proba(queries)
    peak = status("VmHWM")
    return {"before_mb": before / 1024, "peak_mb": peak / 1024}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("results/estimator/speed.json"))
    parser.add_argument("--memory-of", choices=METHODS, help="used by the script itself")
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(measure_memory(options.memory_of, options.k)))
        return
    rows, labels, queries = make_data(N_ROWS, N_QUERIES)
    models = {name: fitted(name, rows, labels, options.k) for name in METHODS}
    for model in models.values():
        model.predict_proba(queries[:100])
    actions = {
        name: lambda model=model: model.predict_proba(queries) for name, model in models.items()
    }
    seconds = interleaved(actions, options.rounds)
    command = [sys.executable, "-m", "benchmarks.estimator_speed", "--k", str(options.k)]
    memory = {
        name: json.loads(subprocess.check_output([*command, "--memory-of", name]))
        for name in METHODS
    }
    title = "predict_proba: times the speed of scikit-learn's brute-force kNN"
    ratios = divided(seconds["brute"], seconds["attention"])
    result = {
        "speed": Ratio("times_as_fast", title, ratios, "higher", target=1.5).as_row(),
        "seconds": seconds,
        "memory": memory,
        "peak_ratio": memory["attention"]["peak_mb"] / memory["brute"]["peak_mb"],
        "k": options.k,
        "sizes": {"rows": N_ROWS, "queries": N_QUERIES, "width": WIDTH, "classes": N_CLASSES},
        "command": " ".join(["python -m benchmarks.estimator_speed", *sys.argv[1:]]),
        **provenance(),
    }
    write_json(options.out, result)
    print(json.dumps({name: result[name] for name in ("speed", "memory", "peak_ratio")}, indent=2))


if __name__ == "__main__":
    main()
