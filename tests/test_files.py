"""Files: whole or absent, and one writer at a time."""

import hashlib
import os
import subprocess
import sys

import pytest

from attnknn.files import (
    DamagedError,
    FolderBusyError,
    check_sums,
    folder_sums,
    locked_folder,
    path_stamp,
    path_sum,
    read_json,
    sha256_file,
    validity_key,
    write_atomic,
    write_json,
    write_text,
)


def test_written_text_and_json_come_back(tmp_path):
    text = write_text(tmp_path / "deep" / "note.txt", "Grüße √2")
    assert text.read_text(encoding="utf-8") == "Grüße √2"
    assert read_json(write_json(tmp_path / "a.json", {"é": [1, 2.5]})) == {"é": [1, 2.5]}


def test_a_writer_that_raises_leaves_no_file_and_no_part(tmp_path):
    def half(handle):
        handle.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "result.bin", half)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_raises_leaves_the_old_file(tmp_path):
    path = write_text(tmp_path / "result.txt", "old")

    def half(handle):
        handle.write(b"new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_is_invisible_until_it_is_whole(tmp_path):
    path = tmp_path / "result.txt"

    def write(handle):
        handle.write(b"first")
        handle.flush()
        assert not path.exists()
        handle.write(b" second")

    write_atomic(path, write)
    assert path.read_text() == "first second"


def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = write_text(tmp_path / "a.txt", "")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_json_refuses_nan_and_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"nll": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_sha256_is_that_of_the_content(tmp_path):
    path = write_text(tmp_path / "a.txt", "abc")
    assert sha256_file(path) == hashlib.sha256(b"abc").hexdigest()


def test_a_second_holder_is_refused_and_the_folder_is_free_afterwards(tmp_path):
    with locked_folder(tmp_path / "run"):
        with pytest.raises(FolderBusyError, match="run is being written by another process"):
            with locked_folder(tmp_path / "run"):
                pass
    with locked_folder(tmp_path / "run"):
        pass


def test_another_process_is_refused(tmp_path):
    code = (
        "import sys\nfrom attnknn.files import locked_folder\n"
        "with locked_folder(sys.argv[1]): print('got it')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with locked_folder(tmp_path):
        held = subprocess.run(command, capture_output=True, text=True)
    free = subprocess.run(command, capture_output=True, text=True)
    assert "FolderBusyError" in held.stderr and held.stdout == ""
    assert free.stdout == "got it\n"


def test_the_lock_is_released_when_the_work_raises(tmp_path):
    with pytest.raises(RuntimeError, match="work"):
        with locked_folder(tmp_path):
            raise RuntimeError("work")
    with locked_folder(tmp_path):
        pass


def test_a_validity_key_tells_versions_parameters_and_data_apart_and_nothing_else():
    keys = {
        validity_key({"a": 1, "b": [2]}, version=1, data=["x"]),
        validity_key({"a": 1, "b": [2]}, version=2, data=["x"]),
        validity_key({"a": 1, "b": [3]}, version=1, data=["x"]),
        validity_key({"a": 1, "b": [2]}, version=1, data=[None]),
    }
    assert len(keys) == 4
    assert validity_key({"b": [2], "a": 1}, version=1, data=["x"]) in keys  # order is no difference


def test_sums_are_of_contents_and_names_not_of_places_and_times(tmp_path):
    one, two = (tmp_path / "one", tmp_path / "two")
    for folder in (one, two):
        write_text(folder / "deep/a.txt", "a")
        write_text(folder / "report.json", folder.name)  # holds the sums: not summed itself
        write_text(folder / ".lock", folder.name)
    os.utime(two / "deep/a.txt", (1, 1))
    assert folder_sums(one) == folder_sums(two) == {"deep/a.txt": sha256_file(one / "deep/a.txt")}
    assert path_sum(one) == path_sum(two)
    check_sums(one, folder_sums(two))
    write_text(two / "deep/a.txt", "b")
    assert path_sum(one) != path_sum(two)
    with pytest.raises(DamagedError, match=r"a\.txt must be as it was written, got other content"):
        check_sums(two, folder_sums(one))
    write_text(two / "further.txt", "made later")
    check_sums(two, folder_sums(two, without=["further.txt"]))


def test_a_stamp_changes_with_the_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.txt").write_text("1")
    before = path_stamp(tmp_path)
    assert path_stamp(tmp_path) == before
    (tmp_path / "a/two.txt").write_text("2")
    assert path_stamp(tmp_path) != before
    alone = path_stamp(tmp_path / "a/one.txt")
    (tmp_path / "a/one.txt").write_text("11")
    assert path_stamp(tmp_path / "a/one.txt") != alone
