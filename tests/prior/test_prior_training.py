"""The prior's training: drawn from seeds, stopped and gone on with the same digits, reported."""

import numpy as np
import pandas as pd
import pytest
import torch

from attnknn.core.prior import read_prior
from benchmarks.prior import samples as samples_module
from benchmarks.prior import train as train_module
from benchmarks.prior.__main__ import main
from benchmarks.prior.draw import KINDS, draw_table
from benchmarks.prior.samples import Sample, kept_samples, make_sample
from benchmarks.prior.train import Settings, compared, summed_up, train

TINY = ["--tables", "5", "--validation", "3", "--steps", "17", "--width", "5"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("benchmarks.prior.draw.ROWS", (40, 97))
    monkeypatch.setattr("benchmarks.prior.draw.MANY_SHARE", 0.0)
    monkeypatch.setattr(samples_module, "CHUNK", 2)
    monkeypatch.setattr(train_module, "JUDGE_EVERY", 5)
    monkeypatch.setattr(train_module, "KEEP_EVERY", 5)
    monkeypatch.setattr(train_module, "TABLES_PER_STEP", 2)
    monkeypatch.setattr(train_module, "QUERIES_PER_TABLE", 13)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)


def same(one: Sample, two: Sample) -> bool:
    parts = [
        (getattr(one.evidence, name), getattr(two.evidence, name))
        for name in one.evidence.__dataclass_fields__
    ]
    equal = [a is b is None or torch.equal(a, b) for a, b in parts]
    facts = [getattr(one, n) == getattr(two, n) for n in ("kind", "noise", "metric")]
    return all(equal) and all(facts) and torch.equal(one.targets, two.targets)


def test_a_table_is_its_seed_and_targets_are_right_labels():
    kinds, noises = set(), set()
    for seed in range(31):
        table, again, clean = draw_table(seed), draw_table(seed), draw_table(seed, noise=False)
        np.testing.assert_array_equal(np.asarray(table.memory), np.asarray(again.memory))
        np.testing.assert_array_equal(table.labels, again.labels)
        np.testing.assert_array_equal(clean.labels, clean.right)
        wrong = (table.labels != table.right).mean()
        assert (wrong == 0) if table.noise == "clean" else wrong < 0.65
        assert max(table.labels.max(), table.targets.max()) < table.n_classes
        assert set(table.targets) <= set(table.right)
        kinds.add(table.kind)
        noises.add(table.noise)
    assert kinds == set(KINDS) and len(noises) > 3


def test_samples_are_drawn_once_and_read_again(tmp_path, monkeypatch):
    first = kept_samples(tmp_path, 3, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tables-3-2.pt", "tables-5-2.pt", "tables-7-1.pt",
    ]  # fmt: skip
    assert same(first[4], make_sample(7))
    (tmp_path / "tables-5-2.pt").unlink()
    drawn = []
    monkeypatch.setattr(
        samples_module, "make_sample", lambda seed, noise: drawn.append(seed) or make_sample(seed)
    )
    again = kept_samples(tmp_path, 3, 5)
    assert drawn == [5, 6]
    assert all(same(one, two) for one, two in zip(first, again, strict=True))
    monkeypatch.setattr(samples_module, "SAMPLES_VERSION", 1000)
    with pytest.raises(ValueError, match=r"must hold samples as they are made now"):
        kept_samples(tmp_path, 3, 5)


def test_a_killed_training_ends_with_the_same_digits(tmp_path, monkeypatch, capsys):
    whole, killed = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    assert main(["train", *TINY, "--work", str(tmp_path / "a"), "--to", str(whole)]) == 0
    arguments = ["train", *TINY, "--work", str(tmp_path / "b"), "--to", str(killed)]
    advance = train_module.Training.advance

    def dies(self, rows):
        if self.step == 13:
            raise KeyboardInterrupt
        advance(self, rows)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_module.Training, "advance", dies)
        main(arguments)
    assert not killed.exists()
    steps = []
    monkeypatch.setattr(
        train_module.Training, "advance", lambda self, rows: steps.append(1) or advance(self, rows)
    )
    assert main(arguments) == 0
    assert len(steps) == 7  # from the tenth step on
    assert killed.read_bytes() == whole.read_bytes()
    logs = [
        pd.read_csv(path.with_suffix(".csv")).drop(columns="seconds") for path in (whole, killed)
    ]
    pd.testing.assert_frame_equal(*logs)
    assert logs[0]["step"].tolist() == [5, 10, 15, 17]
    assert str(killed) in capsys.readouterr().out
    with pytest.raises(ValueError, match="work must hold a training of these settings"):
        main([*arguments, "--seed", "1"])


def test_the_training_learns(tmp_path):
    rows = [make_sample(seed) for seed in range(3)]
    train(Settings(n_tables=3, n_steps=40, width=7), tmp_path, rows, rows)
    curve = pd.read_csv(tmp_path / "log.csv")["nll"]
    assert curve.iloc[-1] < curve.iloc[0] - 0.005


def test_the_report_by_hand(tmp_path, capsys):
    judges = kept_samples(tmp_path, samples_module.VALIDATION_SEEDS, 3)
    losses = compared(read_prior(), judges)
    seen, targets = judges[0].evidence, judges[0].targets
    share = (seen.labels == targets[:, None]).sum(dim=1) + seen.shares[targets]
    if seen.log_weights is None:
        expected = -(share / (seen.labels.shape[1] + 1)).log().mean()
        assert losses["votes"][0] == pytest.approx(float(expected), abs=1e-5)
    table = summed_up(losses)
    assert table.query("kind == 'all'")["tables"].sum() == 3
    means = losses.groupby("labels")["prior"].mean()
    assert table.query("kind == 'all'").set_index("labels")["prior"].to_dict() == pytest.approx(
        means.to_dict()
    )
    main(["report", "--work", str(tmp_path), "--validation", "3"])
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head == ["kind", "labels", "tables", "prior", "votes", "prototypes", "expert"]
