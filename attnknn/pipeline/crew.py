"""Tasks → executed copies: worker processes, a few at a time, that all end with the pipeline."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from attnknn.pipeline.progress import Progress
from attnknn.pipeline.state import Task
from attnknn.runs import RESULTS_VARIABLE

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PATIENCE = 10.0  # seconds a worker may take to end its kernel


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    Attributes:
        task: The task.
        status: ``complete`` or ``failed``.
        seconds: Wall time.
        output: The executed copy, whole or partial, under its working name.
        details: Of a failure: ``error``, ``traceback`` and, if a cell failed, ``cell``, ``prompt``
            and ``source``.
    """

    task: Task
    status: str
    seconds: float
    output: Path
    details: dict[str, Any] = field(default_factory=dict)


def n_cores() -> int:
    """Return the number of cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def threads_each(n_jobs: int) -> int:
    """Return how many threads each of ``n_jobs`` processes gets."""
    return max(1, n_cores() // n_jobs)


def threads_used(n_threads: int) -> int:
    """Return how many threads a kernel offered ``n_threads`` has: the user's setting wins."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else n_threads


class Crew:
    """Worker processes that end together."""

    def __init__(self, results: Path, work: Path, progress: Progress):
        """Prepare a crew without workers.

        Args:
            results: Folder of all runs, told to the kernels as ``$ATTNKNN_RESULTS``.
            work: Folder of unfinished copies.
            progress: Where cell counts are shown.
        """
        self._results, self._work, self._progress = results, work, progress
        self._lock = threading.Lock()
        self._workers: set[subprocess.Popen] = set()
        self._stopped = False

    def run(
        self,
        tasks: Sequence[Task],
        on_outcome: Callable[[Outcome], None],
        *,
        n_jobs: int,
        n_threads: int,
    ) -> None:
        """Execute tasks, ``n_jobs`` at a time, and hand over each outcome as it comes.

        An exception here, Ctrl-C above all, ends every worker and its kernel.
        """
        environment = self._environment(n_threads)
        pool = ThreadPoolExecutor(n_jobs)
        try:
            left = {pool.submit(self._execute, task, environment) for task in tasks}
            while left:
                done, left = wait(left, timeout=1.0, return_when=FIRST_COMPLETED)
                self._progress.tick()
                for future in done:
                    on_outcome(future.result())
        finally:
            self._stop()
            pool.shutdown(cancel_futures=True)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            workers = list(self._workers)
        for worker in workers:
            _close(worker.stdin)  # tells a worker to end its kernel and itself
        for worker in workers:
            try:
                worker.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                worker.kill()

    def _environment(self, n_threads: int) -> dict[str, str]:
        # One number for all libraries, also where the user set it for OpenMP alone: two threads of
        # one library on the single thread of another make a training several times slower.
        threads = dict.fromkeys(THREAD_VARIABLES, str(threads_used(n_threads)))
        # Idle threads sleep: spinning ones slow everybody down as soon as the cores are shared.
        threads["OMP_WAIT_POLICY"] = "PASSIVE"
        # The user's own thread settings win.
        return threads | dict(os.environ) | {RESULTS_VARIABLE: str(self._results)}

    def _execute(self, task: Task, environment: Mapping[str, str]) -> Outcome:
        self._work.mkdir(parents=True, exist_ok=True)
        output, log = self._work / f"{task.copy}.ipynb", self._work / f"{task.copy}.log"
        paths = {"notebook": str(task.notebook.path), "output": str(output)}
        start = time.monotonic()
        self._progress.start(task.name)
        with log.open("w", encoding="utf-8") as errors, self._start(environment, errors) as worker:
            details = self._follow(worker, task.name, paths | {"parameters": task.parameters})
            _close(worker.stdin)
        with self._lock:
            self._workers.discard(worker)
        status = details.pop("outcome", "failed")
        if status == "failed" and not details:
            details = _unexplained(worker.returncode, log)
        return Outcome(task, status, time.monotonic() - start, output, details)

    def _start(self, environment: Mapping[str, str], errors: IO[str]) -> subprocess.Popen:
        with self._lock:
            if self._stopped:
                raise CancelledError
            worker = subprocess.Popen(
                [sys.executable, "-m", "attnknn.pipeline.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches the pipeline alone, which ends the workers
            )
            self._workers.add(worker)
            return worker

    def _follow(self, worker: subprocess.Popen, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """Give a worker its job, read its messages, and return the last one, its outcome."""
        try:
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
        except BrokenPipeError:  # it died before it could read; its log says why
            return {}
        for line in worker.stdout:
            message = json.loads(line)
            if "outcome" in message:
                return message
            self._progress.update(name, **message)
        return {}


def _close(stream: Any) -> None:
    try:
        stream.close()
    except OSError:  # a worker that is gone already has broken the pipe
        pass


def _unexplained(code: int | None, log: Path) -> dict[str, Any]:
    """Describe a worker that ended without a word."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    why = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
    return {"error": f"its process {why} (too little memory?)", "traceback": lines[-12:]}
