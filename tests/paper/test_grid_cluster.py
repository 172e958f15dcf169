"""Grids on a real Dask cluster of separate processes, some of which are killed on the way."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attnknn
from attnknn.files import read_json
from tests.toy_project import make_project, study_cells, training_cells, write_notebook

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

# The first seed of the first run tells its process and waits for a file: a test kills it then.
TRAIN = """\
here = run.parent.parent.parent if run.parent.name == "grid" else run.parent.parent
if seed == 0 and run.name == "k_eval=3":
    (here / "pids.txt").open("a").write(f"{os.getpid()}\\n")
    while not (here / "go").exists():
        time.sleep(0.05)
folder = run / f"seed{seed}"
folder.mkdir(parents=True, exist_ok=True)
(folder / "settings.txt").write_text(repr(settings))
(folder / "report.json").write_text(f'{{"seed": {seed}, "metrics": {{"val_accuracy": 0.5}}}}')"""


def wait_until(condition, seconds: float = 400.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Cluster:
    """A scheduler and two workers, each a process of its own, and a project to run on them."""

    def __init__(self, folder: Path):
        self.project = make_project(folder / "project", studies=("02_first",))
        write_notebook(self.project / "notebooks/01_training.ipynb", training_cells(TRAIN))
        write_notebook(self.project / "notebooks/02_first.ipynb", study_cells("02_first"))
        (self.project / "grid.yaml").write_text("k_eval: [3, 5]\n")
        # A copy of the code: workers refuse another version, and an editor may be at work.
        shutil.copytree(Path(attnknn.__file__).parent, folder / "code/attnknn")
        hidden = {"ATTNKNN_RESULTS", "OMP_NUM_THREADS"}
        self.environment = {n: v for n, v in os.environ.items() if n not in hidden} | {
            "PYTHONPATH": str(folder / "code"),
            "OMP_NUM_THREADS": "1",
        }
        self.file, self.log = folder / "scheduler.json", (folder / "log").open("w")
        address = ["--scheduler-file", str(self.file), "--no-dashboard"]
        self.scheduler = self.start("distributed.cli.dask_scheduler", "--port", "0", *address)
        wait_until(self.file.exists)
        one = ["--nthreads", "1", "--no-nanny", "--host", "127.0.0.1"]
        worker = ["distributed.cli.dask_worker", *address, *one]
        self.workers = [self.start(*worker) for _ in range(2)]
        self.commands: list[subprocess.Popen] = []

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=self.project,
            env=self.environment,
            stdout=self.log,
            stderr=self.log,
        )

    def run(self, *words: str) -> subprocess.Popen:
        command = subprocess.Popen(
            [sys.executable, "-m", "attnknn.cli", "run", "--no-pdf", *words],
            cwd=self.project,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.commands.append(command)
        return command

    def run_grid(self) -> subprocess.Popen:
        address = read_json(self.file)["address"]
        words = ["--grid", "grid.yaml", "--name", "grid", "--seeds", "0-1"]
        return self.run(*words, "--scheduler", address)

    def pids(self) -> list[int]:
        path = self.project / "pids.txt"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def stop(self) -> None:
        for process in (*self.commands, *self.workers, self.scheduler):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.log.close()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.stop()


def content(run: Path) -> dict[str, object]:
    """Return all that a run holds, without times and places."""
    found: dict[str, object] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file() and p.name != ".lock"):
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = [[c["source"], c.get("outputs")] for c in cells if "injected" not in str(c)]
        found[str(path.relative_to(run))] = text
    report = json.loads(found.pop("report.json"))
    for entry in report["notebooks"].values():
        for name in ("seconds", "finished", "sums"):
            entry.pop(name)
    for name in ("run", "commands", "started", "finished"):  # the commands name the run
        report.pop(name)
    return found | {"report": report}


def test_a_killed_worker_costs_nothing_but_time(cluster):
    process = cluster.run_grid()
    wait_until(cluster.pids)
    kernel = cluster.pids()[0]
    worker = parent_of(parent_of(kernel))
    assert worker in {process.pid for process in cluster.workers}
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not is_alive(kernel), 20)  # the notebook ends with its worker
    wait_until(lambda: len(cluster.pids()) == 2)  # and is started again on the other one
    (cluster.project / "go").touch()
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert "a worker was lost, k_eval=3/01_training.seed0 starts again" in told
    assert "6 executed" in told

    alone = cluster.run("--set", "k_eval=3", "--name", "alone", "--seeds", "0-1", "--force")
    told, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, told
    results = cluster.project / "results"
    assert content(results / "grid/k_eval=3") == content(results / "alone")
    table = (results / "grid/k_eval=5/02_first/table.txt").read_text()
    assert table.startswith("[0, 1] 5 1 ")

    again = cluster.run_grid()
    told, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and "6 kept" in told and "cluster tcp://" not in told


def test_notebooks_end_when_nobody_waits_for_them(cluster):
    process = cluster.run_grid()
    wait_until(cluster.pids)
    process.kill()
    process.communicate()
    wait_until(lambda: not is_alive(cluster.pids()[0]), 60)
    assert all(worker.poll() is None for worker in cluster.workers)

    again = cluster.run_grid()  # the lock and the notebooks of a killed command are gone
    wait_until(lambda: len(cluster.pids()) == 2)
    cluster.scheduler.kill()
    told, _ = again.communicate(timeout=120)
    assert again.returncode == 2 and "the same command goes on from here" in told, told
    wait_until(lambda: not is_alive(cluster.pids()[1]), 60)
    report = read_json(cluster.project / "results/grid/k_eval=3/report.json")
    assert report["status"] == "interrupted"


def test_a_grid_on_a_cluster_of_its_own(tmp_path):
    project = make_project(tmp_path / "project", studies=("02_first",))
    (project / "grid.yaml").write_text("k_eval: [3, 5]\n")
    hidden = {"ATTNKNN_RESULTS", "OMP_NUM_THREADS"}
    environment = {n: v for n, v in os.environ.items() if n not in hidden}
    environment["PYTHONPATH"] = str(Path(attnknn.__file__).parent.parent)
    command = [sys.executable, "-m", "attnknn.cli", "run", "--no-pdf", "--grid", "grid.yaml"]
    command += ["--name", "grid", "--seeds", "0", "--jobs", "2"]  # the default scheduler: local

    def run() -> str:
        done = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    told = run()
    assert re.search(r"cluster tcp://127\.0\.0\.1:\d+: 2 workers", told), told
    assert "4 executed" in told
    for k in (3, 5):
        table = (project / f"results/grid/k_eval={k}/02_first/table.txt").read_text()
        assert table.startswith(f"[0] {k} ")
    assert "4 kept" in (again := run()) and "cluster tcp://" not in again
