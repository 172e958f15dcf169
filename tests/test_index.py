"""Indexes: whatever they measure inside, cosine similarity comes out."""

import numpy as np
import pytest
import torch

from attnknn import index
from attnknn.index import build_index, cosines_of_ids, search_by_matmul

EXACT = ["auto", "flat_ip", "flat_l2", "matmul", "Flat"]
CLOSE = ["hnsw", "HNSW16,Flat", "IVF1,Flat"]
K = 7


def brute(queries, rows, k):
    """Return scores and ids by a full sort in double precision."""
    cosines = queries.astype(np.float64) @ rows.astype(np.float64).T
    ids = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(cosines, ids, axis=1), ids


@pytest.mark.parametrize("name", EXACT + CLOSE)
def test_search_equals_brute_force(blobs, name):
    scores, ids = build_index(name, blobs.rows).search(blobs.queries, K)
    expected_scores, expected_ids = brute(blobs.queries, blobs.rows, K)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    np.testing.assert_array_equal(ids, expected_ids)


@pytest.mark.parametrize("name", EXACT + CLOSE)
def test_fault_18_every_index_returns_similarities(name):
    # By hand: cosines 1, 0.6 and -1 with the query (1, 0); as squared distances 0, 0.8 and 4.
    rows = np.array([[-1.0, 0.0], [1.0, 0.0], [0.6, 0.8]], dtype=np.float32)
    scores, ids = build_index(name, rows).search(np.array([[1.0, 0.0]], dtype=np.float32), 3)
    assert ids.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(scores, [[1.0, 0.6, -1.0]], atol=1e-6)


@pytest.mark.parametrize("name", ["flat_ip", "flat_l2", "hnsw", "matmul", "IVF1,Flat"])
def test_added_rows_continue_the_ids(blobs, name):
    grown = build_index(name, blobs.rows[:53])
    grown.add(blobs.rows[53:])
    whole = build_index(name, blobs.rows)
    for got, expected in zip(
        grown.search(blobs.queries, K), whole.search(blobs.queries, K), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_auto_changes_from_exact_to_hnsw_past_the_limit(blobs, monkeypatch):
    monkeypatch.setattr(index, "AUTO_HNSW_ROWS", 50)
    assert hasattr(build_index("auto", blobs.rows).index, "hnsw")
    assert not hasattr(build_index("auto", blobs.rows[:50]).index, "hnsw")


def test_hnsw_has_the_published_settings(blobs):
    built = build_index("hnsw", blobs.rows)  # held: the graph is only borrowed from it
    graph = built.index.hnsw
    assert (graph.efConstruction, graph.efSearch, graph.nb_neighbors(0)) == (200, 64, 2 * 32)


@pytest.mark.parametrize("block", [1, 4, 29, 1000])
def test_the_block_size_of_the_matrix_product_does_not_matter(blobs, monkeypatch, block):
    queries, rows = torch.from_numpy(blobs.queries), torch.from_numpy(blobs.rows)
    scores, ids = search_by_matmul(queries, rows, K)
    monkeypatch.setattr(index, "MATMUL_BLOCK", block)
    blocked_scores, blocked_ids = search_by_matmul(queries, rows, K)
    assert torch.equal(ids, blocked_ids)
    torch.testing.assert_close(scores, blocked_scores)
    again, _ = cosines_of_ids(queries, rows, ids)
    torch.testing.assert_close(scores, again)


def test_cosines_of_found_rows_are_put_in_order(blobs):
    queries, rows = torch.from_numpy(blobs.queries), torch.from_numpy(blobs.rows)
    scores, ids = search_by_matmul(queries, rows, K)
    mixed = ids[:, torch.randperm(K, generator=torch.Generator().manual_seed(3))]
    again, sorted_ids = cosines_of_ids(queries, rows, mixed)
    assert torch.equal(sorted_ids, ids)
    torch.testing.assert_close(again, scores)


@pytest.mark.parametrize("name", EXACT + CLOSE)
def test_no_queries_give_no_neighbours(blobs, name):
    scores, ids = build_index(name, blobs.rows).search(blobs.queries[:0], K)
    assert scores.shape == ids.shape == (0, K)


@pytest.mark.parametrize("name", ["flatip", "", "IVF999,Flat", "PQ4"])
def test_a_name_that_cannot_be_built_is_refused(blobs, name):
    message = f"index must be auto, .* suits 101 rows of width 6, got index='{name}'"
    with pytest.raises(ValueError, match=message):
        build_index(name, blobs.rows)
