"""Provenance: reports that survive JSON, are not overwritten, and name the code they came from."""

import dataclasses
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from attnknn import files as provenance


@dataclasses.dataclass
class Settings:
    k: int
    folder: Path


def test_report_round_trip_with_infinities(tmp_path):
    metrics = {"nll": np.inf, "accuracy": np.float32(0.5), "by/k": [1.0, float("nan")]}
    path = provenance.save_report(
        tmp_path,
        config=Settings(k=np.int64(5), folder=Path("a/b")),
        seed=3,
        metrics=metrics,
        seconds=1.5,
        dataset="digits",
    )
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw["metrics"]["nll"] is None
    assert raw["not_finite"] == {"metrics/nll": "inf", "metrics/by~1k/1": "nan"}
    assert raw["config"] == {"k": 5, "folder": "a/b"}
    assert set(raw) >= {"config", "seed", "metrics", "seconds", "hardware", "versions", "commit"}
    back = provenance.read_report(tmp_path)
    assert back["metrics"]["nll"] == np.inf and back["metrics"]["accuracy"] == 0.5
    assert np.isnan(back["metrics"]["by/k"][1])
    assert back["dataset"] == "digits" and "not_finite" not in back


def test_a_finished_report_is_not_overwritten_by_accident(tmp_path):
    def save(seed, **more):
        return provenance.save_report(
            tmp_path, config={}, seed=seed, metrics={}, seconds=0.0, **more
        )

    save(1)
    with pytest.raises(FileExistsError, match="not overwritten"):
        save(2)
    assert provenance.read_report(tmp_path)["seed"] == 1
    save(2, overwrite=True)
    assert provenance.read_report(tmp_path)["seed"] == 2


def test_what_json_cannot_hold_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="metrics/odd must be storable as JSON, got BytesIO"):
        provenance.save_report(
            tmp_path, config={}, seed=1, metrics={"odd": io.BytesIO()}, seconds=0.0
        )
    assert list(tmp_path.iterdir()) == []


def test_provenance_names_what_decides_the_numbers():
    found = provenance.provenance()
    assert set(found) == {"hardware", "versions", "commit"}
    assert found["versions"]["numpy"] == np.__version__
    assert {"python", "torch", "faiss-cpu", "scikit-learn", "attnknn"} <= set(found["versions"])
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["cpu"]


def run_git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, "-C", folder, *arguments], check=True, capture_output=True)


def test_commit_says_clean_dirty_and_unknown(tmp_path):
    assert provenance.commit(tmp_path) == "unknown"
    run_git(tmp_path, "init", "-q")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n", encoding="utf-8")
    assert provenance.commit(package) == "unknown"  # inside another project, not part of it
    run_git(tmp_path, "add", ".")
    assert provenance.commit(package) == "unknown"  # no commit yet
    run_git(tmp_path, "commit", "-q", "-m", "first")
    clean = provenance.commit(package)
    assert len(clean) == 40 and int(clean, 16)
    (package / "__init__.py").write_text("a = 2\n", encoding="utf-8")
    assert provenance.commit(package) == f"{clean}-dirty"


def test_commit_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"
