"""Bank files: what is mapped stays on disk, what is saved comes back, bad rows are refused."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attnknn.core import bank as bankfile
from attnknn.core.bank import load_arrays, mapped_copy, save_tensors, unit_rows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks smaller than the test sets, so that there are several."""
    monkeypatch.setattr(bankfile, "ROW_BLOCK", 13)


@pytest.fixture
def mapped(blobs, tmp_path):
    """The blobs' rows as a read-only mapped file."""
    np.save(tmp_path / "rows.npy", blobs.rows)
    return np.load(tmp_path / "rows.npy", mmap_mode="r")


def test_mapped_rows_are_not_copied(mapped, blobs):
    rows = unit_rows("rows", mapped, 6)
    assert np.shares_memory(rows.numpy(), mapped)
    np.testing.assert_array_equal(rows, blobs.rows)


def test_rows_in_memory_are_copied_only_where_they_must_be(blobs):
    assert np.shares_memory(unit_rows("rows", blobs.rows, 6).numpy(), blobs.rows)
    assert unit_rows("rows", blobs.rows.astype(np.float64), 6).dtype == torch.float32
    frozen = blobs.rows.copy()
    frozen.flags.writeable = False
    assert not np.shares_memory(unit_rows("rows", frozen, 6).numpy(), frozen)


def test_mapped_rows_of_another_type_are_read(blobs, tmp_path):
    np.save(tmp_path / "rows.npy", blobs.rows.astype(np.float64))
    rows = unit_rows("rows", np.load(tmp_path / "rows.npy", mmap_mode="r"), 6)
    np.testing.assert_allclose(rows, blobs.rows, atol=1e-7)


@pytest.mark.parametrize("row", [0, 57, 100])
@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "rows must be finite"), (np.inf, "rows must be finite"), (9, "unit length")],
)
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


def test_the_file_is_what_safetensors_reads(blobs, tmp_path):
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
