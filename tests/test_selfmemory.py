"""Training rows as each other's neighbours: never their own, whatever the route."""

import numpy as np
import pytest
import torch

from attnknn.config import RunConfig
from attnknn.embed.objectives import SelfMemory


def unit_rows(n_rows: int, dim: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((n_rows, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make(n_rows: int = 31, **settings) -> tuple[SelfMemory, torch.Tensor]:
    rows = unit_rows(n_rows, 7)
    labels = np.arange(n_rows) % 3
    config = RunConfig.from_flat({"k_train": 5, "trust_neighbours": 3} | settings)
    return SelfMemory(rows, labels, config, n_classes=3), torch.from_numpy(rows)


@pytest.mark.parametrize("route", ["faiss", "matmul"])
def test_fault_1_a_training_row_never_finds_itself(route):
    memory, rows = make(neighbour_search=route)
    ids = torch.arange(13)
    found = memory.neighbours_of(rows[ids], ids)
    assert not (found.ids == ids[:, None]).any()
    assert found.ids.shape == (13, 5)


@pytest.mark.parametrize("route", ["faiss", "matmul"])
def test_published_self_retrieval_is_a_switch(route):
    memory, rows = make(neighbour_search=route, exclude_self=False)
    ids = torch.arange(13)
    assert (memory.neighbours_of(rows[ids], ids).ids[:, 0] == ids).all()


def test_both_search_routes_agree():
    by_list, rows = make(neighbour_search="faiss")
    live, _ = make(neighbour_search="matmul")
    ids = torch.arange(31)
    assert (by_list.neighbours_of(rows, ids).ids == live.neighbours_of(rows, ids).ids).all()


def test_fault_16_a_mixed_row_gets_neighbours_of_its_own():
    memory, rows = make(neighbour_search="faiss")
    ids = torch.arange(7)
    partners = torch.tensor([6, 5, 4, 3, 2, 1, 0])
    mixed = torch.nn.functional.normalize(0.5 * rows[ids] + 0.5 * rows[partners], dim=1)
    found = memory.neighbours_of(mixed, ids, partners)
    # Neither of the two rows it was made of votes for it.
    assert not (found.ids == ids[:, None]).any()
    assert not (found.ids == ids[partners][:, None]).any()
    similarity = mixed @ rows.T
    similarity.scatter_(1, torch.stack([ids, ids[partners]], dim=1), -2.0)
    assert (found.ids == similarity.topk(5).indices).all()


def test_hardness_is_the_share_of_other_labels():
    rows = np.repeat(np.eye(2, dtype=np.float32), 7, axis=0)
    labels = np.array([0] * 7 + [1] * 6 + [0])
    config = RunConfig.from_flat({"k_train": 5, "trust_neighbours": 3})
    memory = SelfMemory(rows, labels, config, n_classes=2)
    # The odd row sits among six rows of the other class; four of its ten lie elsewhere.
    assert memory.hard[13] == pytest.approx(0.6)


def test_k_is_lowered_to_what_is_there():
    memory, rows = make(n_rows=5, k_train=50)
    ids, partners = torch.arange(3), torch.tensor([1, 2, 0])
    found = memory.neighbours_of(rows[ids], ids, partners)
    assert found.k == 3
    assert not ((found.ids == ids[:, None]) | (found.ids == partners[:, None])).any()
