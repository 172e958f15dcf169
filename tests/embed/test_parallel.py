"""Several processes train what one would have trained."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from attnknn.config import ConfigError
from attnknn.embed.parallel import ALONE, Group, joined, running_statistics
from attnknn.embed.run import load_run, stage_of
from attnknn.train import main
from tests.embed.parallel_cases import CASES, PLAIN, train
from tests.tiny import SMALL, config, tiny_splits

ROOT = Path(__file__).parents[2]


# ---- shares


@pytest.mark.parametrize(
    ("size", "n_rows", "shares"),
    [
        (1, 7, [(0, 7)]),
        (2, 7, [(0, 3), (3, 7)]),
        (3, 7, [(0, 2), (2, 4), (4, 7)]),
        (3, 2, [(0, 0), (0, 1), (1, 2)]),
    ],
)
def test_shares_cover_all_rows_once(size, n_rows, shares):
    found = [Group(rank, size).share(n_rows) for rank in range(size)]
    assert [(share.start, share.stop) for share in found] == shares


class Second(Group):
    """The second of two processes; the first one always sends the same rows."""

    def _gathered(self, own, n_rows):
        return torch.cat([torch.full((n_rows - len(own), *own.shape[1:]), 7.0), own])


def test_a_gradient_reaches_the_own_rows_of_a_batch_alone():
    own = torch.arange(6.0).reshape(3, 2).requires_grad_()
    batch = Second(1, 2).whole(own, 5)
    assert batch.tolist() == [[7, 7], [7, 7], [0, 1], [2, 3], [4, 5]]
    (batch**2).sum().backward()
    assert torch.equal(own.grad, 2 * own.detach())


def test_fewer_rows_than_processes_are_computed_by_everyone():
    assert Second(1, 3).compute(2, lambda part: torch.arange(2.0)[part]).tolist() == [0, 1]
    assert Second(1, 2).compute(5, lambda part: torch.arange(5.0)[part]).tolist() == [7, 7, 2, 3, 4]


def test_alone_nothing_is_exchanged():
    rows = torch.ones(3, 2, requires_grad=True)
    assert ALONE.whole(rows, 3) is rows and ALONE.from_first("value") == "value"
    gradient = torch.ones(2)
    ALONE.combine([gradient], [gradient])
    assert gradient.tolist() == [1, 1]
    assert ALONE.device(torch.device("cpu")) == torch.device("cpu")
    assert Group(1, 2, 1).device(torch.device("cuda")) == torch.device("cuda", 1)


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined() as group:
        assert group == ALONE and group.is_first


def test_only_running_statistics_are_averaged():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    network.register_buffer("constant", torch.ones(5))
    plain = nn.BatchNorm1d(3, track_running_stats=False)
    assert [len(found) for found in running_statistics([network, plain])] == [3, 3]


def test_a_batch_must_be_large_enough_to_share():
    with pytest.raises(ConfigError, match=r"batch_size must be .*got batch_size=3, processes=2"):
        stage_of(
            config(SMALL, batch_size=3),
            tiny_splits(),
            device=torch.device("cpu"),
            group=Group(0, 2),
        )


# ---- the command


def test_a_wrong_request_gets_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["--set", "epochss=2", "--results", str(tmp_path)]) == 2
    assert "did you mean 'epochs'?" in capsys.readouterr().err
    assert main(["--set", "epochs=-1", "--results", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


# ---- real processes


def torchrun(*words: str, cwd: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "ATTNKNN_RESULTS"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> list[dict]:
    """What each of two processes has after all cases."""
    folder = tmp_path_factory.mktemp("together")
    torchrun(str(ROOT / "tests/embed/parallel_cases.py"), str(folder))
    return [torch.load(folder / f"results{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "resumed"])
def test_all_processes_end_with_the_same_weights(together, case):
    first, second = (results[case] for results in together)
    assert torch.equal(first["weights"], second["weights"])
    assert first["history"] == second["history"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_loss_curve_of_one(together, tmp_path, case):
    alone, found = train(case, tmp_path / "alone.pt", ALONE), together[0][case]
    close = {"rtol": 1e-4, "atol": 1e-5} if case in PLAIN else {"rtol": 0.15}
    assert np.ptp(alone["history"]["loss"]) > 0.02  # there is a curve to follow
    np.testing.assert_allclose(found["history"]["loss"], alone["history"]["loss"], **close)
    if case == "joint":
        # The memory is embedded anew before it is validated, by weights that differ in their last
        # digits: two neighbours at nearly the same distance may change places, and one row's vote.
        close = {"rtol": 1e-3}
    np.testing.assert_allclose(found["history"]["val_nll"], alone["history"]["val_nll"], **close)
    if case in PLAIN:
        # Sums over shares round differently, and single weights show it; their distance hardly.
        apart = (found["weights"] - alone["weights"]).norm() / alone["weights"].norm()
        assert apart < 1e-4


@pytest.mark.slow
def test_a_killed_training_of_two_processes_ends_with_the_same_numbers(together):
    whole, resumed = together[0]["dropout"], together[0]["resumed"]
    assert torch.equal(whole["weights"], resumed["weights"])
    assert whole["history"] == resumed["history"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are named by Linux alone")
def test_no_thread_of_the_group_outlives_it(together):
    # One that does may be aborted while Python closes, and the finished training with it.
    for results in together:
        assert results["threads"]
        assert not [name for name in results["threads"] if "gloo" in name]


@pytest.mark.slow
def test_the_command_under_torchrun_leaves_an_ordinary_run(tmp_path, monkeypatch, capsys):
    settings = ["widths=[4,6,8]", "epochs=1", "fit_epochs=2", "max_train_rows=299", "fit_k=7"]
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--seeds", "3", "--name", "mine", "--results", str(tmp_path)]
    told = torchrun("-m", "attnknn.train", *words)
    assert told.count("on 2 processes") == 1
    run = load_run(tmp_path / "mine/seed3")
    assert run.report["processes"] == 2 and run.report["seed"] == 3
    assert len(run.rows("train")) == 299 and len(run.history) == 1 and len(run.fit_history) == 2
    with torch.no_grad():
        inputs = torch.from_numpy(run.splits.test.inputs).float() / 255
        np.testing.assert_allclose(run.embedder(inputs), run.rows("test"), atol=1e-5)
    made = (run.folder / "report.json").stat().st_mtime_ns
    monkeypatch.chdir(ROOT)
    assert main(words) == 0  # complete: one process finds it, too
    assert (run.folder / "report.json").stat().st_mtime_ns == made
    assert not (run.folder / "checkpoint.pt").exists()
