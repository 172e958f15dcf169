"""Search: rows checked and stored, searched in blocks, in a file, as deep as was measured."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from attnknn.core import index as choose
from attnknn.core import search as module
from attnknn.core.bank import MemoryBank
from attnknn.core.search import mapped_copy, recall_of, tune_index, unit_rows

K = 11
RANKED = ["ivfpq", "disk"]


@pytest.fixture
def many(make_blobs):
    """A set that is large enough for inverted lists."""
    return make_blobs(n_rows=1009, n_queries=97, n_blobs=20)


def mapped(rows, folder):
    """Return rows as a read-only mapped file."""
    np.save(folder / "rows.npy", rows)
    return np.load(folder / "rows.npy", mmap_mode="r")


@pytest.mark.parametrize("index", ["flat_ip", "hnsw", "ivfpq"])
@pytest.mark.parametrize("own", [False, True])
def test_blocks_of_queries_do_not_matter(many, monkeypatch, index, own):
    bank = many.bank(index=index)
    exclude = np.arange(1009) if own else None
    whole = bank.search(many.rows, K, exclude_ids=exclude)
    monkeypatch.setattr(module, "SEARCH_BLOCK", 100)
    blocked = bank.search(many.rows, K, exclude_ids=exclude)
    assert torch.equal(whole.ids, blocked.ids)
    torch.testing.assert_close(whole.scores, blocked.scores)


def test_one_block_is_held_at_a_time(many, monkeypatch):
    monkeypatch.setattr(module, "SEARCH_BLOCK", 10)
    bank, sizes = many.bank(), []
    search = bank.index.search
    monkeypatch.setattr(
        bank.index, "search", lambda rows, k: (sizes.append(len(rows)), search(rows, k))[1]
    )
    bank.search(many.queries, K)
    assert sizes == [10] * 9 + [7]


@pytest.mark.parametrize("index", RANKED)
def test_candidates_are_ranked_by_their_true_cosine(many, index):
    bank = many.bank(index=index, index_settings={"nprobe": 8, "k_factor": 8})
    found, exact = bank.search(many.queries, K), many.bank().search(many.queries, K)
    cosines = (many.queries @ many.rows.T)[np.arange(97)[:, None], found.ids]
    np.testing.assert_allclose(found.scores, cosines, atol=1e-6)
    assert (found.ids == exact.ids).float().mean() > 0.95
    bank.close()


@pytest.mark.parametrize("index", RANKED)
def test_fault_1_a_row_never_retrieves_itself_from_compressed_lists(many, index):
    bank = many.bank(index=index)
    found = bank.search(many.rows, K, exclude_ids=np.arange(1009))
    assert not (found.ids == torch.arange(1009)[:, None]).any()
    bank.close()


@pytest.mark.parametrize("index", ["auto", "disk", "ivfpq", "hnsw"])
def test_a_bank_on_disk_answers_and_changes_like_one_in_memory(many, tmp_path, index):
    options = {"n_classes": 5, "index": index}
    in_memory = MemoryBank(many.rows[:901], many.labels[:901], **options)
    on_disk = MemoryBank(mapped(many.rows[:901], tmp_path), many.labels[:901], **options)
    for bank in (in_memory, on_disk):
        bank.add(many.rows[901:], many.labels[901:])
        bank.remove(np.arange(0, 300, 3))
        bank.relabel(np.array([1, 2]), np.array([0, 0]))
    assert on_disk.on_disk
    assert not in_memory.on_disk
    assert torch.equal(in_memory.rows, on_disk.rows)
    found, expected = on_disk.search(many.queries, K), in_memory.search(many.queries, K)
    assert (found.ids == expected.ids).float().mean() > 0.9
    if index in ("auto", "ivfpq"):
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(on_disk.view.prototypes, in_memory.view.prototypes)
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), many.rows[:901])  # not ours
    on_disk.close()


def test_auto_leaves_rows_on_disk_that_do_not_fit(many, tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "free_memory", lambda: 1000.0)
    bank = MemoryBank(mapped(many.rows, tmp_path), many.labels, n_classes=5)
    assert bank.index.name == "disk"
    assert many.bank().index.name == "flat_ip"
    bank.close()


def test_a_saved_bank_comes_back_on_disk_with_its_settings(many, tmp_path):
    bank = many.bank(index="ivfpq", index_settings={"nprobe": 5, "k_factor": 3})
    path = bank.save(tmp_path / "bank.safetensors")
    again = MemoryBank.load(path, on_disk=True)
    assert again.on_disk
    assert again.index.settings == {"nprobe": 5, "k_factor": 3}
    assert torch.equal(again.search(many.queries, K).ids, bank.search(many.queries, K).ids)
    again.save(path)  # over the file that holds its rows
    assert torch.equal(MemoryBank.load(path).rows, bank.rows)


@pytest.mark.parametrize("index", ["hnsw", "ivfpq", "disk", "IVF16,Flat", "HNSW8"])
def test_autotune_keeps_the_recall_on_queries_it_has_not_seen(many, index):
    bank = many.bank(index=index)
    table = pd.DataFrame(bank.autotune(many.queries[:60], recall=0.9, k=K))
    assert table["chosen"].sum() == 1
    chosen = table[table["chosen"]].iloc[0]
    assert chosen["reached"]
    assert {name: chosen[name] for name in bank.index.knobs} == bank.index.settings
    found = bank.search(many.queries[60:], K).ids
    true = many.bank().search(many.queries[60:], K).ids
    shares = [np.isin(a, b).mean() for a, b in zip(true, found, strict=True)]
    assert np.mean(shares) > 0.85
    bank.close()


def test_autotune_takes_the_fastest_that_is_good_enough(many):
    table = pd.DataFrame(many.bank(index="ivfpq").autotune(many.queries, recall=0.5, k=K))
    good = table[table["reached"]]
    assert good.loc[good["queries_per_second"].idxmax(), "chosen"]


def test_autotune_without_queries_leaves_rows_out_of_their_own_search(many):
    bank = many.bank(index="hnsw")
    table = pd.DataFrame(bank.autotune(recall=0.9, k=K, n_queries=200))
    assert table["recall"].max() > 0.9


def test_autotune_of_an_exact_index_says_that_nothing_is_lost(bank, blobs):
    table = pd.DataFrame(bank.autotune(blobs.queries, recall=1.0, k=K))
    assert table[["recall", "reached", "chosen"]].to_numpy().tolist() == [[1.0, True, True]]


def test_autotune_says_when_the_recall_is_out_of_reach(many):
    bank = many.bank(index="PQ1x4")
    bank.index.knobs = {"k_factor": (1,)}
    with pytest.warns(RuntimeWarning, match=r"recall=0.999 is out of reach of the 'PQ1x4' index"):
        table = pd.DataFrame(bank.autotune(many.queries, recall=0.999, k=K))
    assert not table["reached"].any()


@pytest.mark.parametrize("recall", [0.0, 1.1])
def test_a_recall_that_is_no_share_is_refused(bank, blobs, recall):
    with pytest.raises(ValueError, match="recall must be above 0 and at most 1"):
        bank.autotune(blobs.queries, recall=recall, k=K)


def test_settings_survive_a_rebuilt_index(many):
    bank = many.bank(index="hnsw", index_settings={"efSearch": 77})
    bank.remove(np.array([0]))
    assert bank.index.graph.hnsw.efSearch == 77
    twin = bank.relabelled(bank.labels.numpy())
    twin.add(many.queries, many.query_labels)
    assert twin.index.graph.hnsw.efSearch == 77


def test_settings_go_where_auto_builds_another_index(many, monkeypatch):
    monkeypatch.setattr(choose, "AUTO_EXACT_ROWS", 1000)
    bank = many.bank(index_settings={"efSearch": 77})
    bank.remove(np.arange(50))  # small enough for an exact search now
    assert (bank.index.name, bank.index_settings) == ("flat_ip", {})


def test_settings_that_the_index_does_not_have_are_refused(blobs):
    with pytest.raises(ValueError, match=r"index_settings must be one of 'efSearch', got .*nprobe"):
        blobs.bank(index="hnsw", index_settings={"nprobe": 3})


def test_autotune_climbs_past_searches_that_are_too_shallow(many):
    # A single list of 20 holds about 50 rows: k = 60 is out of reach of the first steps.
    bank = many.bank(index="IVF20,Flat", trust_neighbours=2)
    table = pd.DataFrame(bank.autotune(many.queries, recall=0.95, k=60))
    assert table["recall"].iloc[0] == 0
    assert table[table["chosen"]]["reached"].item()


def test_a_few_stragglers_are_searched_exactly(many, monkeypatch):
    bank, exact = many.bank(index="hnsw"), many.bank().search(many.queries, K)
    search = bank.index.search

    def losing_one(queries, k):
        scores, ids = search(queries, k)
        scores[0, -2:], ids[0, -2:] = -np.inf, -1
        return scores, ids

    monkeypatch.setattr(bank.index, "search", losing_one)
    found = bank.search(many.queries, K)
    assert torch.equal(found.ids[0], exact.ids[0])
    torch.testing.assert_close(found.scores[0], exact.scores[0])


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks smaller than the test sets, so that there are several."""
    monkeypatch.setattr(module, "ROW_BLOCK", 13)


@pytest.mark.usefixtures("small_blocks")
def test_mapped_rows_are_not_copied(blobs, tmp_path):
    kept = mapped(blobs.rows, tmp_path)
    rows = unit_rows("rows", kept, 6)
    assert np.shares_memory(rows.numpy(), kept)
    np.testing.assert_array_equal(rows, blobs.rows)


def test_rows_in_memory_are_copied_only_where_they_must_be(blobs):
    assert np.shares_memory(unit_rows("rows", blobs.rows, 6).numpy(), blobs.rows)
    assert unit_rows("rows", blobs.rows.astype(np.float64), 6).dtype == torch.float32
    frozen = blobs.rows.copy()
    frozen.flags.writeable = False
    assert not np.shares_memory(unit_rows("rows", frozen, 6).numpy(), frozen)


@pytest.mark.usefixtures("small_blocks")
def test_mapped_rows_of_another_type_are_read(blobs, tmp_path):
    np.save(tmp_path / "rows.npy", blobs.rows.astype(np.float64))
    rows = unit_rows("rows", np.load(tmp_path / "rows.npy", mmap_mode="r"), 6)
    np.testing.assert_allclose(rows, blobs.rows, atol=1e-7)


@pytest.mark.parametrize("row", [0, 57, 100])
@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "rows must be finite"), (np.inf, "rows must be finite"), (9, "unit length")],
)
@pytest.mark.usefixtures("small_blocks")
def test_a_bad_row_of_any_block_is_refused(blobs, row, value, message):
    rows = blobs.rows.copy()
    rows[row, 3] = value
    with pytest.raises(ValueError, match=message):
        unit_rows("rows", rows, 6)


def test_finite_rows_whose_length_overflows_are_refused(blobs):
    rows = blobs.rows.copy()
    rows[5] = 1e30
    with pytest.raises(ValueError, match="rows must have unit length, got a row of length inf"):
        unit_rows("rows", rows, 6)


def test_a_mapped_copy_leaves_no_file(blobs, tmp_path):
    rows = torch.from_numpy(blobs.rows)
    copy = mapped_copy(rows.split(13), 101, 6, tmp_path / "new")
    assert torch.equal(copy, rows)
    assert list((tmp_path / "new").iterdir()) == []


def test_recall_by_hand():
    found = np.array([[1, 2, 3], [7, 8, -1]])
    assert recall_of(found, np.array([[3, 2, 9], [8, 7, 5]])).tolist() == [2 / 3, 2 / 3]


class Ladder(choose.FlatIndex):
    """An index whose recall is known: a knob of 1, 2, 4, 8 finds as many eighths of the rows."""

    def __init__(self):
        super().__init__()
        self.knobs, self.settings = {"depth": (1, 2, 4, 8)}, {"depth": 1}

    def found(self):
        """Return 64 queries with depth of 8 true ids each."""
        return np.tile(np.where(np.arange(8) < self.settings["depth"], np.arange(8), -1), (64, 1))


def tuned(index, found, recall):
    """Return what was measured when 64 queries have the true ids 0 to 7."""
    return pd.DataFrame(tune_index(index, found, np.tile(np.arange(8), (64, 1)), recall=recall))


@pytest.mark.parametrize(("recall", "depth", "tried"), [(0.1, 1, 1), (0.5, 4, 3), (0.51, 8, 4)])
def test_tuning_stops_at_the_first_depth_that_is_enough(recall, depth, tried):
    index = Ladder()
    table = pd.DataFrame(
        tune_index(index, index.found, np.tile(np.arange(8), (64, 1)), recall=recall)
    )
    assert index.settings == {"depth": depth}
    assert len(table) == tried
    assert table.loc[table["chosen"], ["depth", "reached"]].to_numpy().tolist() == [[depth, True]]
    assert table["recall"].tolist() == [1 / 8, 1 / 4, 1 / 2, 1.0][:tried]


def test_tuning_out_of_reach_takes_the_closest():
    index = Ladder()
    index.knobs = {"depth": (1, 2, 4)}
    table = tuned(index, index.found, 0.9)
    assert not table["reached"].any()
    assert index.settings == {"depth": 4}


def test_the_lower_bound_of_the_recall_decides():
    # Half of the queries find all, half find 7 of 8: a mean of .9375 that may be chance.
    found = np.tile(np.arange(8), (64, 1))
    found[::2, 0] = -1
    index = Ladder()
    index.knobs = {"depth": (8,)}
    table = pd.DataFrame(
        tune_index(index, lambda: found, np.tile(np.arange(8), (64, 1)), recall=0.93)
    )
    assert table["recall"].item() == 0.9375
    assert table["recall_low"].item() == pytest.approx(0.9375 - 1.645 * 0.0625 / 8)
    assert not table["reached"].item()


PEAK = """
import sys, resource, numpy as np
from attnknn.core.search import RowBank
import torch
def rows(n):
    drawn = np.random.default_rng(0).standard_normal((n, 16), dtype=np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
bank = RowBank.over(rows(1009), index=sys.argv[1])
queries = torch.from_numpy(rows(49_152))
bank.nearest_rows(queries[:16_384], 5)  # one block: what is held at any time
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bank.nearest_rows(queries, 5)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("index", ["exact", "matmul", "ivfpq"])
def test_the_memory_of_a_search_does_not_grow_with_the_queries(index):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, index], capture_output=True, text=True, check=True
    )
    # All similarities at once would take 200 MB; the answers themselves, held twice, take 6.
    assert int(done.stdout) < 60
