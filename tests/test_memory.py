"""Memory bank: search against brute force, leave-one-out, edits equal to a fresh bank."""

import numpy as np
import pytest
import torch

from attnknn.core.bank import MemoryBank

INDEXES = ["flat_ip", "flat_l2", "hnsw", "matmul", "Flat", "IVF1,Flat"]
K = 11


def count_searches(bank, monkeypatch) -> list[int]:
    """Return a list that grows by the k of every search of the bank's index."""
    calls, search = [], bank._index.search

    def counted(queries, k):
        calls.append(k)
        return search(queries, k)

    monkeypatch.setattr(bank._index, "search", counted)
    return calls


def same_bank(one: MemoryBank, other: MemoryBank, queries: np.ndarray) -> None:
    """Check that two banks hold, find and derive the same."""
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.labels, other.labels)
    found, expected = one.search(queries, 7), other.search(queries, 7)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.scores, expected.scores)
    assert torch.equal(one.view.histograms, other.view.histograms)
    assert torch.equal(one.view.trust, other.view.trust)
    torch.testing.assert_close(one.view.prototypes, other.view.prototypes)


def test_a_search_by_hand(circle, east):
    found = circle.search(east, 4)
    assert found.ids.tolist() == [[0, 1, 2, 3]]
    assert found.labels.tolist() == [[0, 1, 1, 2]]
    torch.testing.assert_close(found.scores, torch.tensor([[1.0, 0.5, 0.0, -1.0]]))


@pytest.mark.parametrize("index", INDEXES)
def test_fault_18_scores_are_cosines_for_every_index(blobs, index):
    found = blobs.bank(index=index).search(blobs.queries, K)
    cosines = (blobs.queries @ blobs.rows.T)[np.arange(29)[:, None], found.ids]
    np.testing.assert_allclose(found.scores, cosines, atol=1e-6)
    assert (found.scores.diff(dim=1) <= 1e-6).all()


@pytest.mark.parametrize("index", ["SQ8", "PCA4,Flat"])
def test_fault_18_an_index_that_compresses_its_rows_still_gives_their_cosines(make_blobs, index):
    blobs = make_blobs(n_rows=307)
    found = blobs.bank(index=index).search(blobs.queries, K)
    cosines = (blobs.queries @ blobs.rows.T)[np.arange(29)[:, None], found.ids]
    np.testing.assert_allclose(found.scores, cosines, atol=1e-6)
    assert (found.scores.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("index", INDEXES)
def test_fault_1_a_row_never_retrieves_itself(blobs, index):
    own = np.arange(101)
    found = blobs.bank(index=index).search(blobs.rows, K, exclude_ids=own)
    assert found.ids.shape == (101, K)
    assert not (found.ids == torch.from_numpy(own)[:, None]).any()


def test_leave_one_out_equals_brute_force(bank, blobs):
    cosines = blobs.rows @ blobs.rows.T
    np.fill_diagonal(cosines, -np.inf)
    expected = np.argsort(-cosines, axis=1, kind="stable")[:, :K]
    found = bank.search(blobs.rows, K, exclude_ids=np.arange(101))
    np.testing.assert_array_equal(found.ids, expected)


@pytest.mark.parametrize("index", ["flat_ip", "flat_l2", "matmul"])
def test_fault_1_nor_among_duplicates_that_push_it_out_of_the_list(blobs, index):
    # 13 equal rows and k = 3: most rows are not among their own first k + 1.
    rows = np.concatenate([np.repeat(blobs.rows[:1], 13, axis=0), blobs.rows[1:7]])
    bank = MemoryBank(rows, np.arange(19) % 5, n_classes=5, index=index)
    plain = bank.search(rows, 4)
    own = torch.arange(19)[:, None]
    assert (plain.ids == own).any(dim=1).sum() < 19
    found = bank.search(rows, 3, exclude_ids=np.arange(19))
    assert not (found.ids == own).any()
    assert found.scores[:13].min() == pytest.approx(1, abs=1e-6)


def test_fault_1_the_trust_of_a_row_does_not_count_the_row_itself():
    # Two tight pairs; in each, the partner carries the other label: nobody agrees with anybody.
    angles = np.deg2rad([0.0, 1.0, 120.0, 121.0])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    bank = MemoryBank(rows, np.array([0, 1, 0, 1]), n_classes=2, trust_neighbours=1)
    assert bank.own_neighbours.tolist() == [[1], [0], [3], [2]]
    assert bank.view.trust.tolist() == [0, 0, 0, 0]


def test_only_the_own_row_is_dropped(bank, blobs):
    own = np.full(29, 3)
    plain, without = bank.search(blobs.queries, K), bank.search(blobs.queries, K, exclude_ids=own)
    for row in range(29):
        kept = [found for found in plain.ids[row].tolist() if found != 3]
        assert without.ids[row].tolist()[: len(kept)] == kept


@pytest.mark.parametrize("index", ["flat_ip", "flat_l2", "matmul"])
def test_k_may_be_all_rows(blobs, index):
    bank = blobs.bank(index=index)
    assert (bank.search(blobs.queries, 101).ids.sort().values == torch.arange(101)).all()
    found = bank.search(blobs.rows, 100, exclude_ids=np.arange(101))
    assert found.ids.shape == (101, 100)


def test_fault_11_k_beyond_the_bank_is_refused(bank, blobs):
    with pytest.raises(ValueError, match="k must be at most the 101 memory rows, got k=102"):
        bank.search(blobs.queries, 102)
    message = "k must be at most the 100 memory rows that are left, got k=101"
    with pytest.raises(ValueError, match=message):
        bank.search(blobs.rows, 101, exclude_ids=np.arange(101))
    with pytest.raises(ValueError, match="k must be an integer of at least 1, got k=0"):
        bank.search(blobs.queries, 0)


def test_fault_11_an_id_of_minus_one_never_reads_the_last_label(make_blobs):
    # With one of 7 cells probed, an inverted file cannot find 200 of 307 rows, and says -1.
    blobs = make_blobs(n_rows=307)
    bank = blobs.bank(index="IVF7,Flat", trust_neighbours=2)
    assert (bank._index.search(blobs.queries, 200)[1] == -1).any()
    message = r"k must be within reach of the 'IVF7,Flat' index, .* fewer than 200 rows for"
    with pytest.raises(ValueError, match=message):
        bank.search(blobs.queries, 200)


def test_queries_are_independent_of_each_other(bank, blobs):
    whole = bank.search(blobs.queries, K)
    order = np.random.default_rng(1).permutation(29)
    mixed = bank.search(blobs.queries[order], K)
    assert torch.equal(mixed.ids, whole.ids[order])
    alone = bank.search(blobs.queries[13:14], K)
    assert torch.equal(alone.ids, whole.ids[13:14])


def test_no_queries_give_no_neighbours(bank, blobs):
    none = bank.search(blobs.queries[:0], K, exclude_ids=np.empty(0, dtype=np.int64))
    assert none.ids.shape == (0, K)


def test_a_bank_of_one_row_answers(east):
    bank = MemoryBank(east, np.array([1]), n_classes=3)
    found = bank.search(-east, 1)
    assert (found.ids.tolist(), found.labels.tolist()) == ([[0]], [[1]])
    assert bank.view.trust.tolist() == [1.0]
    with pytest.raises(ValueError, match="k must be at most the 0 memory rows that are left"):
        bank.search(east, 1, exclude_ids=np.array([0]))


def test_read_only_rows_are_taken(blobs):
    rows, queries = blobs.rows.copy(), blobs.queries.copy()
    rows.flags.writeable = queries.flags.writeable = False
    found = MemoryBank(rows, blobs.labels, n_classes=5).search(queries, K)
    assert torch.equal(found.ids, blobs.bank().search(blobs.queries, K).ids)


def test_double_precision_rows_are_taken(blobs):
    bank = MemoryBank(blobs.rows.astype(np.float64), blobs.labels, n_classes=5)
    assert bank.rows.dtype == torch.float32


def test_added_rows_equal_a_fresh_bank(blobs):
    grown = MemoryBank(blobs.rows[:53], blobs.labels[:53], n_classes=5)
    _ = grown.view  # what was derived from the smaller bank must be forgotten
    grown.add(blobs.rows[53:], blobs.labels[53:])
    assert len(grown) == 101
    same_bank(grown, blobs.bank(), blobs.queries)


def test_a_bank_without_the_removed_rows_equals_a_fresh_one(blobs):
    cut = blobs.bank()
    _ = cut.view
    cut.remove(np.array([0, 41, 100, 41]))
    keep = np.setdiff1d(np.arange(101), [0, 41, 100])
    fresh = MemoryBank(blobs.rows[keep], blobs.labels[keep], n_classes=5)
    same_bank(cut, fresh, blobs.queries)


def test_relabelled_rows_equal_a_fresh_bank(blobs):
    changed = blobs.labels.copy()
    changed[[3, 5]] = [4, 0]
    fresh = MemoryBank(blobs.rows, changed, n_classes=5)
    in_place = blobs.bank()
    _ = in_place.view
    in_place.relabel(np.array([3, 5]), np.array([4, 0]))
    same_bank(in_place, fresh, blobs.queries)
    same_bank(blobs.bank().relabelled(changed), fresh, blobs.queries)


def test_a_relabelled_twin_shares_the_index_and_leaves_the_original(blobs, monkeypatch):
    bank = blobs.bank()
    view, _ = bank.view, bank.own_neighbours
    calls = count_searches(bank, monkeypatch)
    twins = [bank.relabelled((blobs.labels + shift) % 5) for shift in (1, 2, 3)]
    assert all(twin._index is bank._index for twin in twins)
    assert [twin.view.mean_trust for twin in twins] == [view.mean_trust] * 3
    assert calls == []
    assert bank.view is view
    assert torch.equal(bank.labels, torch.from_numpy(blobs.labels))


def test_twins_search_for_their_trust_only_once(blobs, monkeypatch):
    bank = blobs.bank()
    calls = count_searches(bank, monkeypatch)
    for shift in (1, 2, 3):
        _ = bank.relabelled((blobs.labels + shift) % 5).view
    assert len(calls) == 1


@pytest.mark.parametrize("index", ["flat_ip", "matmul", "hnsw"])
@pytest.mark.parametrize("grows", ["twin", "original"])
def test_rows_added_to_one_twin_are_not_found_by_the_other(blobs, index, grows):
    original = MemoryBank(blobs.rows[:53], blobs.labels[:53], n_classes=5, index=index)
    twin = original.relabelled(blobs.labels[:53])
    growing, staying = (twin, original) if grows == "twin" else (original, twin)
    growing.add(blobs.rows[53:], blobs.labels[53:])
    assert staying.search(blobs.queries, 53).ids.max() == 52
    same_bank(growing, blobs.bank(index=index), blobs.queries)
    growing.add(blobs.queries, blobs.query_labels)  # a second time: the index is its own now
    assert growing.search(blobs.queries, 1).ids.min() >= 101


def test_a_saved_bank_comes_back(blobs, tmp_path):
    bank = blobs.bank(index="flat_l2", trust_neighbours=7)
    again = MemoryBank.load(bank.save(tmp_path / "bank.safetensors"))
    assert (again.index_name, again.trust_neighbours, again.n_classes) == ("flat_l2", 7, 5)
    same_bank(again, bank, blobs.queries)
    again.add(blobs.queries, blobs.query_labels)
    again.save(tmp_path / "bank.safetensors")  # over the file it was read from
    assert len(MemoryBank.load(tmp_path / "bank.safetensors")) == 130


def test_a_file_that_is_no_bank_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"rows": torch.ones(2, 3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"path must be a saved memory bank, got path='.*other"):
        MemoryBank.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("damage", [lambda whole: whole[:-40], lambda whole: whole[:20]])
def test_a_cut_file_is_refused_by_its_name(blobs, tmp_path, damage, on_disk):
    path = blobs.bank().save(tmp_path / "mine.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"path must be a whole file .*, got path='.*mine\.safe"):
        MemoryBank.load(path, on_disk=on_disk)


@pytest.mark.parametrize("junk", [b"", b"junk", b"junk" * 100])
def test_a_junk_file_is_refused_by_its_name(tmp_path, junk):
    path = tmp_path / "junk.safetensors"
    path.write_bytes(junk)
    with pytest.raises(ValueError, match=r"path must be a whole file .*, got path='.*junk\.safe"):
        MemoryBank.load(path)


def test_a_bank_without_rows_is_refused(blobs):
    with pytest.raises(ValueError, match="rows must hold at least one memory row"):
        MemoryBank(blobs.rows[:0], blobs.labels[:0], n_classes=5)
    with pytest.raises(ValueError, match="n_classes must be an integer of at least 2"):
        MemoryBank(blobs.rows, np.zeros(101, dtype=np.int64), n_classes=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows * 2, "rows must have unit length, got a row of length 2"),
        (lambda rows: rows * np.nan, "rows must be finite, got 606 NaN or infinite values"),
    ],
)
def test_bad_rows_are_refused(blobs, change, message):
    with pytest.raises(ValueError, match=message):
        MemoryBank(change(blobs.rows), blobs.labels, n_classes=5)


def test_bad_queries_are_refused(bank, blobs):
    with pytest.raises(ValueError, match=r"queries must have shape \(rows, 6\), got .* \(29, 5\)"):
        bank.search(blobs.queries[:, :5], K)
    with pytest.raises(ValueError, match="queries must have unit length"):
        bank.search(3 * blobs.queries, K)


def test_bad_labels_are_refused_and_nothing_is_changed(bank, blobs):
    with pytest.raises(ValueError, match=r"labels must lie in 0..4, got 5..5"):
        bank.add(blobs.queries, np.full(29, 5))
    with pytest.raises(ValueError, match=r"labels must have shape \(101,\)"):
        bank.relabelled(blobs.labels[:3])
    same_bank(bank, blobs.bank(), blobs.queries)


def test_lists_are_taken_for_ids_and_labels(blobs):
    def changed(as_given):
        bank = MemoryBank(blobs.rows, as_given(blobs.labels), n_classes=5)
        bank.add(blobs.queries, as_given(blobs.query_labels))
        bank.remove(as_given(np.array([1, 2])))
        bank.relabel(as_given(np.array([1])), as_given(np.array([0])))
        bank.remove(as_given(np.array([], dtype=np.int64)))
        return bank

    same_bank(changed(np.ndarray.tolist), changed(np.asarray), blobs.queries)
    assert len(changed(np.ndarray.tolist)) == 101 + 29 - 2
    own = [[4, 9], np.array([4, 9])]
    found = [blobs.bank().search(blobs.rows[[4, 9]], K, exclude_ids=ids).ids for ids in own]
    assert torch.equal(*found)


def test_bad_ids_are_refused(bank, blobs):
    with pytest.raises(ValueError, match=r"ids must lie in 0..100, got 101..101"):
        bank.remove(np.array([101]))
    with pytest.raises(ValueError, match=r"ids must lie in 0..100, got -1..0"):
        bank.relabel(np.array([-1, 0]), np.array([0, 0]))
    with pytest.raises(ValueError, match="ids must leave at least one memory row"):
        bank.remove(np.arange(101))
    with pytest.raises(ValueError, match=r"exclude_ids must lie in 0..100, got 0..101"):
        bank.search(blobs.queries[:2], K, exclude_ids=np.array([0, 101]))
