"""Bare faiss, as installed: a process that never sees our choice of matrix kernels.

Reads one k a line from stdin and answers with the seconds of a search: ``python -m
benchmarks.bare_faiss rows dim queries``. The first line it writes is the name of the kernels that
faiss's OpenBLAS has chosen. ``BareFaiss`` is the other end.
"""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks import plain_environment


class BareFaiss:
    """A faiss index in a process of its own, over the rows of ``random_rows``."""

    def __init__(self, rows: int, dim: int, queries: int) -> None:
        numbers = [str(number) for number in (rows, dim, queries)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_faiss", *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=plain_environment(),
            cwd=Path(__file__).parent.parent,  # where the package of the benchmarks is found
        )

        self.kernels = self._answer()

    def search(self, k: int) -> float:
        """Return the seconds of one search, timed over there."""
        self.process.stdin.write(f"{k}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise RuntimeError("the process with bare faiss has ended: see its message above")
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def main() -> None:
    """Search whenever asked."""
    import faiss

    from attnknn.core.kernels import running_core_type
    from benchmarks.timing import random_rows

    n_rows, dim, n_queries = map(int, sys.argv[1:])
    index = faiss.IndexFlatIP(dim)
    index.add(random_rows(n_rows, dim, 0))
    queries = random_rows(n_queries, dim, 1)
    print(running_core_type(), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        index.search(queries, int(line))
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
