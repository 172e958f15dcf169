"""Indexes: whatever they measure inside, cosine similarity comes out."""

import numpy as np
import pytest
import torch

from attnknn.core import index as choose
from attnknn.core.index import auto_index, build_index, cosines_of_ids, search_by_matmul
from attnknn.core.search import recall_of

EXACT = ["auto", "exact", "flat_ip", "flat_l2", "matmul", "Flat"]
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
    grown.extend(blobs.rows)
    whole = build_index(name, blobs.rows)
    for got, expected in zip(
        grown.search(blobs.queries, K), whole.search(blobs.queries, K), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_auto_goes_by_the_number_of_rows():
    assert auto_index(choose.AUTO_EXACT_ROWS, 1) == "exact"
    assert auto_index(choose.AUTO_EXACT_ROWS + 1, 1) == "hnsw"
    assert auto_index(choose.AUTO_HNSW_ROWS, 1) == "hnsw"
    assert auto_index(choose.AUTO_HNSW_ROWS + 1, 1) == "ivfpq"


def test_auto_goes_to_disk_where_mapped_rows_would_fill_the_memory(monkeypatch):
    monkeypatch.setattr(choose, "free_memory", lambda: 1000.0)
    assert auto_index(7, 501, on_disk=True) == "disk"
    assert auto_index(7, 500, on_disk=True) == "exact"
    assert auto_index(7, 501) == "exact"  # rows that are in memory already are not moved out


def test_the_free_memory_is_known():
    assert 1e7 < choose.free_memory()


def test_auto_builds_what_it_says(blobs, monkeypatch):
    monkeypatch.setattr(choose, "AUTO_EXACT_ROWS", 50)
    assert build_index("auto", blobs.rows).name == "hnsw"
    assert build_index("auto", blobs.rows[:50]).name == "flat_ip"


def test_hnsw_has_the_published_settings(blobs):
    built = build_index("hnsw", blobs.rows)  # held: the graph is only borrowed from it
    graph = built.index.hnsw
    assert (graph.efConstruction, graph.efSearch, graph.nb_neighbors(0)) == (200, 64, 2 * 32)


@pytest.mark.parametrize("tile", [(1, 1), (4, 7), (29, 13), (1000, 1000)])
def test_the_tiles_of_the_matrix_product_do_not_matter(blobs, monkeypatch, tile):
    queries, rows = torch.from_numpy(blobs.queries), torch.from_numpy(blobs.rows)
    scores, ids = search_by_matmul(queries, rows, K)
    monkeypatch.setattr(choose, "QUERY_TILE", tile[0])
    monkeypatch.setattr(choose, "ROW_TILE", tile[1])
    tiled_scores, tiled_ids = search_by_matmul(queries, rows, K)
    assert torch.equal(ids, tiled_ids)
    torch.testing.assert_close(scores, tiled_scores)


@pytest.mark.parametrize("block", [1, 5, 1000])
def test_cosines_of_found_rows_are_put_in_order_and_cut(blobs, monkeypatch, block):
    monkeypatch.setattr(choose, "RERANK_BLOCK", block)
    queries, rows = torch.from_numpy(blobs.queries), torch.from_numpy(blobs.rows)
    scores, ids = search_by_matmul(queries, rows, K)
    mixed = ids[:, torch.randperm(K, generator=torch.Generator().manual_seed(3))]
    again, sorted_ids = cosines_of_ids(queries, rows, mixed, 5)
    assert torch.equal(sorted_ids, ids[:, :5])
    torch.testing.assert_close(again, scores[:, :5])


def test_a_missing_candidate_comes_last(blobs):
    queries, rows = torch.from_numpy(blobs.queries[:1]), torch.from_numpy(blobs.rows)
    scores, ids = cosines_of_ids(queries, rows, torch.tensor([[-1, 3, 5]]), 3)
    assert ids[0, 2] == -1
    assert scores[0, 2] == -torch.inf
    assert sorted(ids[0, :2].tolist()) == [3, 5]


def test_an_exact_index_holds_no_copy_of_the_rows(blobs):
    for name in ("flat_ip", "flat_l2", "matmul"):
        held = np.asarray(build_index(name, blobs.rows).rows)
        assert np.shares_memory(held, blobs.rows), name


@pytest.mark.parametrize("name", EXACT + CLOSE)
def test_no_queries_give_no_neighbours(blobs, name):
    scores, ids = build_index(name, blobs.rows).search(blobs.queries[:0], K)
    assert scores.shape == ids.shape == (0, K)


@pytest.mark.parametrize("name", ["flatip", "", "IVF999,Flat", "PQ4"])
def test_a_name_that_cannot_be_built_is_refused(blobs, name):
    message = f"index must be auto, .* suits 101 rows of width 6, got index='{name}'"
    with pytest.raises(ValueError, match=message):
        build_index(name, blobs.rows)


@pytest.fixture
def many(make_blobs):
    """A set that is large enough for inverted lists."""
    return make_blobs(n_rows=3001, n_queries=97, n_blobs=40)


@pytest.mark.parametrize("name", ["ivfpq", "disk"])
def test_compressed_lists_find_enough_candidates_to_rank(many, name):
    index = build_index(name, many.rows, settings={"nprobe": 16, "k_factor": 8})
    _, true_ids = brute(many.queries, many.rows, K)
    _, candidates = index.search(many.queries, K * index.k_factor)
    assert not index.exact_scores
    assert recall_of(candidates, true_ids).mean() > 0.98
    index.close()


def test_lists_on_disk_are_a_file_that_goes_away(many, tmp_path):
    index = build_index("disk", many.rows, folder=tmp_path)
    [file] = tmp_path.rglob("lists.ivf")
    assert file.stat().st_size >= 3001 * (index.index.code_size + 8)  # codes and ids
    in_memory = build_index(f"IVF{index.index.nlist},SQ4", many.rows, settings={"nprobe": 64})
    for got, expected in zip(
        index.search(many.queries, K), in_memory.search(many.queries, K), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    index.close()
    assert list(tmp_path.iterdir()) == []


def test_lists_on_disk_grow(many):
    grown = build_index("disk", many.rows[:2000])
    grown.extend(many.rows)
    assert grown.index.ntotal == 3001
    near = grown.search(many.rows[2500:2510], 40)[1]
    assert (near == np.arange(2500, 2510)[:, None]).any(axis=1).mean() > 0.8


def test_the_number_of_lists_is_near_four_roots():
    assert choose.n_cells(1_000_000) == 4096
    assert choose.n_cells(100_000) == 1024
    assert choose.n_cells(101) == 2  # never fewer than 39 rows a list
    assert choose.n_cells(3) == 1


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("flat_ip", []),
        ("matmul", []),
        ("hnsw", ["efSearch"]),
        ("ivfpq", ["nprobe", "k_factor"]),
        ("disk", ["nprobe", "k_factor"]),
        ("HNSW16,Flat", ["efSearch", "k_factor"]),
        ("IVF3,Flat", ["nprobe", "k_factor"]),
        ("PCA4,HNSW16", ["efSearch", "k_factor"]),
    ],
)
def test_every_index_says_what_can_be_set(make_blobs, name, knobs):
    index = build_index(name, make_blobs(n_rows=307).rows)
    assert list(index.knobs) == knobs
    assert list(index.settings) == knobs
    with pytest.raises(ValueError, match=r"index_settings must be one of .*got .*='depth'"):
        index.tune({"depth": 3})


def test_settings_reach_the_index(make_blobs):
    rows = make_blobs(n_rows=307).rows
    hnsw = build_index("hnsw", rows, settings={"efSearch": 99})
    assert hnsw.index.hnsw.efSearch == 99
    lists = build_index("PCA4,IVF3,Flat", rows, settings={"nprobe": 3, "k_factor": 2})
    assert choose.inverted_lists(lists.index).nprobe == 3
    assert lists.k_factor == 2
    with pytest.raises(ValueError, match="nprobe must be an integer of at least 1"):
        lists.tune({"nprobe": 0})


def test_with_wrong_kernels_torch_searches_and_it_is_said_once(monkeypatch, blobs):
    choose._say_once.cache_clear()
    monkeypatch.setattr(choose, "kernel_fault", lambda: "faiss runs on old kernels")
    with pytest.warns(RuntimeWarning, match="old kernels: exact searches use torch"):
        assert build_index("auto", blobs.rows).name == "matmul"
    assert build_index("auto", blobs.rows).name == "matmul"  # not said again
    choose._say_once.cache_clear()


@pytest.mark.parametrize(
    "name", ["flat_ip", "matmul", "hnsw", "ivfpq", "disk", "SQ8", "PCA4,IVF3,Flat", "HNSW8,PQ3x4"]
)
def test_a_grown_index_leaves_the_one_it_grew_from(make_blobs, name):
    rows, queries = make_blobs(n_rows=1009).rows, make_blobs().queries
    index = build_index(name, rows[:901])
    index.tune({knob: values[1] for knob, values in index.knobs.items()})
    before, grown = index.search(queries, K), index.grown(rows)
    assert grown.settings == index.settings
    for got, expected in zip(index.search(queries, K), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (grown.search(rows[950:960], 40)[1] > 900).any()
    for each in (index, grown):
        each.close()
