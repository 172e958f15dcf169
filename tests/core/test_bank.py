"""Memory bank: search against brute force, leave-one-out, edits equal to a fresh bank."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attnknn.core import bank as module
from attnknn.core.bank import MemoryBank, load_arrays, save_tensors

INDEXES = ["flat_ip", "flat_l2", "hnsw", "matmul", "Flat", "IVF1,Flat"]
K = 11


def count_searches(bank, monkeypatch) -> list[int]:
    """Return a list that grows by the k of every search of the bank's index."""
    calls, search = [], bank.index.search

    def counted(queries, k):
        calls.append(k)
        return search(queries, k)

    monkeypatch.setattr(bank.index, "search", counted)
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
    assert (bank.index.search(blobs.queries, 200)[1] == -1).any()
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
    view, _ = bank.view, bank.view.trust
    calls = count_searches(bank, monkeypatch)
    twins = [bank.relabelled((blobs.labels + shift) % 5) for shift in (1, 2, 3)]
    assert all(twin.index is bank.index for twin in twins)
    assert [twin.view.mean_trust for twin in twins] == [view.mean_trust] * 3
    assert calls == []
    assert bank.view is view
    assert torch.equal(bank.labels, torch.from_numpy(blobs.labels))


def test_twins_search_for_their_trust_only_once(blobs, monkeypatch):
    bank = blobs.bank()
    calls = count_searches(bank, monkeypatch)
    for shift in (1, 2, 3):
        _ = bank.relabelled((blobs.labels + shift) % 5).view.trust
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


def test_a_search_answers_from_the_bank_it_was_made_on(make_blobs):
    blobs = make_blobs(0)
    bank, fresh = blobs.bank(), blobs.bank().search(blobs.queries, K)
    found = bank.search(blobs.queries, K)
    bank.remove(np.arange(40))
    bank.add(blobs.queries, blobs.query_labels)
    bank.rename_classes(np.array([5, 4, 3, 2, 1]), n_classes=6)
    for name in ("labels", "trust", "histograms", "prototype_cosines", "keys"):
        assert torch.equal(getattr(found, name), getattr(fresh, name)), name


def test_what_is_held_is_replaced_and_never_changed(blobs):
    bank = blobs.bank()
    content, rows = bank.content, bank.rows.clone()
    bank.relabel(np.array([0]), np.array([4]))
    bank.reweigh(np.full(101, 2.0))
    bank.add(blobs.queries, blobs.query_labels)
    bank.remove(np.array([7]))
    assert bank.content is not content
    assert torch.equal(content.bank.rows, rows) and content.weights is None
    assert torch.equal(content.labels, torch.from_numpy(blobs.labels))
    with pytest.raises(AttributeError):
        content.labels = bank.labels
    with pytest.raises(AttributeError):
        bank.labels = content.labels


def test_labels_and_weights_change_without_a_second_search_for_own_neighbours(blobs, monkeypatch):
    bank = blobs.bank()
    before = bank.view.trust
    calls = count_searches(bank, monkeypatch)
    assert bank.view is bank.view
    bank.relabel(np.array([0]), np.array([(blobs.labels[0] + 1) % 5]))
    bank.reweigh(np.linspace(1, 2, 101))
    assert not torch.equal(bank.view.trust, before)
    assert calls == []


@pytest.mark.parametrize("index", ["flat_ip", "matmul", "hnsw"])
def test_threads_that_search_meanwhile_see_a_whole_bank(blobs, index):
    """Rows, labels and classes of a search belong together, however often the bank changes."""
    bank, faults, done = blobs.bank(index=index), [], threading.Event()

    def search():
        while not done.is_set():
            found = bank.search(blobs.queries, K)
            n_rows = len(found.view.labels)
            whole = n_rows in (101, 130) and found.ids.max() < n_rows and found.ids.min() >= 0
            classes = found.view.n_classes == 5 and found.trust.shape == (29, K)
            cosines = torch.einsum("bd,bkd->bk", found.queries, found.keys)
            if not (whole and classes and torch.allclose(cosines, found.scores, atol=1e-5)):
                faults.append(n_rows)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(25):
        bank.add(blobs.queries, blobs.query_labels)
        bank.remove(np.arange(101, 130))
    done.set()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))])
def test_a_bank_in_another_process_is_the_same_and_its_own(blobs, copied):
    bank = blobs.bank(index="hnsw", index_settings={"efSearch": 77}, weights=np.linspace(1, 2, 101))
    _ = bank.view.trust
    again = copied(bank)
    same_bank(again, bank, blobs.queries)
    assert again.index_settings == {"efSearch": 77} and torch.equal(again.weights, bank.weights)
    again.add(blobs.queries, blobs.query_labels)
    assert len(bank) == 101


# ---- Bank files.


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("part", ["rows", "labels", "weights"])
def test_a_changed_byte_is_an_error_by_the_name_of_the_part(blobs, tmp_path, part, on_disk):
    bank = blobs.bank(weights=np.linspace(1, 2, 101))
    path = bank.save(tmp_path / "mine.safetensors")
    held = {"rows": bank.rows, "labels": bank.labels, "weights": bank.weights}[part]
    whole, sought = path.read_bytes(), held[50].numpy().tobytes()
    place = whole.index(held[48:52].numpy().tobytes()) + 2 * len(sought)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ValueError, match=rf"mine.*in which these have changed since: {part}$"):
        MemoryBank.load(path, on_disk=on_disk)


def test_no_byte_of_a_file_can_change_unseen(blobs, tmp_path):
    path = blobs.bank().save(tmp_path / "mine.safetensors")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in (*range(0, header, 5), *rng.integers(header, len(whole), 40)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"path must .*mine"):
            MemoryBank.load(path)


def test_an_older_file_is_refused_by_its_version(blobs, tmp_path):
    tensors = {"rows": torch.from_numpy(blobs.rows), "labels": torch.from_numpy(blobs.labels)}
    save_file(tensors, tmp_path / "old.safetensors", metadata={"memory_bank": '{"n_classes": 5}'})
    with pytest.raises(ValueError, match=r"file version 2, got path='.*old.*version=1: build"):
        MemoryBank.load(tmp_path / "old.safetensors")


def test_the_file_is_what_safetensors_reads(blobs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROW_BLOCK", 13)  # several blocks
    tensors = {"labels": torch.from_numpy(blobs.labels), "rows": torch.from_numpy(blobs.rows)}
    path = save_tensors(tmp_path / "bank.safetensors", tensors, {"n_classes": 5})
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, tensors[name])
    for on_disk in (False, True):
        arrays, settings = load_arrays(path, on_disk=on_disk)
        assert settings == {"n_classes": 5}
        assert isinstance(arrays["rows"], np.memmap) == on_disk
        np.testing.assert_array_equal(arrays["rows"], blobs.rows)
        np.testing.assert_array_equal(arrays["labels"], blobs.labels)


def test_rows_that_are_strided_are_saved_as_they_read(blobs, tmp_path):
    every_second = torch.from_numpy(blobs.rows)[::2]
    path = save_tensors(tmp_path / "bank.safetensors", {"rows": every_second}, {})
    assert torch.equal(load_file(path)["rows"], every_second)
