"""Bare faiss, as installed: a process that never sees our choice of matrix kernels.

Reads one line a search from stdin and answers with its seconds: ``python -m benchmarks.bare_faiss
rows dim queries k``. ``BareFaiss`` is the other end.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"


class BareFaiss:
    """A faiss index in a process of its own, over the rows of ``random_rows``."""

    def __init__(self, rows: int, dim: int, queries: int, k: int) -> None:
        clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
        numbers = [str(number) for number in (rows, dim, queries, k)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_faiss", *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
            cwd=Path(__file__).parent.parent,  # where the package of the benchmarks is found
        )

    def __call__(self) -> float:
        """Return the seconds of one search, timed over there."""
        self.process.stdin.write("search\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the process with bare faiss has ended: see its message above")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def main() -> None:
    """Search whenever asked."""
    import faiss

    from benchmarks.sizes import random_rows

    n_rows, dim, n_queries, k = map(int, sys.argv[1:])
    index = faiss.IndexFlatIP(dim)
    index.add(random_rows(n_rows, dim, 0))
    queries = random_rows(n_queries, dim, 1)
    for _ in sys.stdin:
        start = time.perf_counter()
        index.search(queries, k)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
