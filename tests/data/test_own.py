"""Tests of the user's own files, good and bad."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from attnknn.data.own import (
    LabelError,
    UnreadableFileError,
    UnsupportedFileError,
    encode_labels,
    read_own,
)
from attnknn.data.splits import SplitError, load_splits


def save_images(root, classes, *, n=7, size=(11, 5), mode="RGB"):
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(n):
            shape = (size[1], size[0], 3)[: 3 if mode == "RGB" else 2]
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")


def table_of(n=40):
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "x": rng.normal(size=n),
            "colour": np.where(rng.random(n) < 0.5, "red", "blue"),
            "label": np.array(["yes", "no"])[np.arange(n) % 2],
        }
    )


# --- images


def test_image_folder(tmp_path):
    save_images(tmp_path, ["cat", "dog"])
    splits = load_splits(str(tmp_path))
    assert splits.kind == "image"
    assert splits.class_names == ("cat", "dog")
    assert splits.train.inputs.shape[1:] == (3, 5, 11)
    assert len(splits.train) + len(splits.val) + len(splits.test) == 14
    assert splits.source == str(tmp_path)
    pixels = splits.train.inputs / 255
    np.testing.assert_allclose(splits.mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(splits.std, pixels.std(axis=(0, 2, 3)), rtol=1e-5)


def test_pixels_come_back_exactly(tmp_path):
    save_images(tmp_path, ["a", "b"], n=3)
    rows = read_own(tmp_path)
    expected = np.asarray(Image.open(tmp_path / "b" / "1.png")).transpose(2, 0, 1)
    np.testing.assert_array_equal(rows.inputs[4], expected)
    assert rows.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_grey_images_get_three_channels(tmp_path):
    save_images(tmp_path, ["a", "b"], n=3, mode="L")
    images = read_own(tmp_path).inputs
    assert images.shape == (6, 3, 5, 11)
    assert (images[:, 0] == images[:, 2]).all()


def test_folder_with_its_own_test_rows(tmp_path):
    save_images(tmp_path / "train", ["a", "b"], n=5)
    save_images(tmp_path / "test", ["a", "b"], n=3)
    splits = load_splits(tmp_path)
    assert len(splits.test) == 6
    assert len(splits.train) + len(splits.val) == 10
    assert splits.class_names == ("a", "b")


def test_folder_with_its_own_validation_rows(tmp_path):
    for part, n in (("train", 5), ("val", 2), ("test", 3)):
        save_images(tmp_path / part, ["a", "b"], n=n)
    splits = load_splits(tmp_path)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (10, 4, 6)
    with pytest.raises(ValueError, match="val_rows must be None"):
        load_splits(tmp_path, val_rows=3)


def test_different_sizes_are_resized_and_said_once(tmp_path):
    save_images(tmp_path, ["a", "b"], n=3, size=(12, 9))
    Image.new("RGB", (30, 20)).save(tmp_path / "a" / "large.png")
    with pytest.warns(UserWarning, match="7 images of 2 sizes are resized to 9 x 9") as said:
        rows = read_own(tmp_path)
    assert len(said) == 1
    assert rows.inputs.shape == (7, 3, 9, 9)
    assert load_splits(tmp_path, image_size=8).train.inputs.shape[1:] == (3, 8, 8)


def test_sideways_photographs_stand_up(tmp_path):
    save_images(tmp_path, ["a", "b"], n=2, size=(6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    for file in tmp_path.rglob("*.png"):
        Image.open(file).transpose(Image.Transpose.ROTATE_90).save(file, exif=exif)
    assert read_own(tmp_path).inputs.shape == (4, 3, 4, 6)


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_unreadable_image_is_named(tmp_path, content):
    save_images(tmp_path, ["a", "b"], n=3, size=(40, 40))
    bad = tmp_path / "b" / "1.png"
    bad.write_bytes(bad.read_bytes()[:300] if content is None else content)
    with pytest.raises(UnreadableFileError, match=r"b/1\.png must be a readable image"):
        read_own(tmp_path)


def test_hidden_and_foreign_files_are_passed_over(tmp_path):
    save_images(tmp_path, ["a", "b"], n=3)
    (tmp_path / "a" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / ".git").mkdir()
    assert len(read_own(tmp_path).labels) == 6


def test_empty_folders(tmp_path):
    with pytest.raises(LabelError, match="one sub-folder of images a class"):
        read_own(tmp_path)
    save_images(tmp_path, ["a"], n=3)
    with pytest.raises(LabelError, match="at least 2 classes"):
        read_own(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabelError, match=r"empty must hold images, got 0 other files"):
        read_own(tmp_path)


def test_too_many_large_images(tmp_path, monkeypatch):
    save_images(tmp_path, ["a", "b"], n=3)
    monkeypatch.setattr("attnknn.data.own.MAX_BYTES", 500)
    with pytest.raises(ValueError, match="choose a smaller image_size"):
        read_own(tmp_path)


# --- tables


@pytest.mark.parametrize("ending", ["csv", "tsv", "semicolon.csv", "parquet"])
def test_tables(tmp_path, ending):
    path = tmp_path / f"table.{ending}"
    separator = {"csv": ",", "tsv": "\t", "semicolon.csv": ";"}.get(ending)
    if separator is None:
        table_of().to_parquet(path)
    else:
        table_of().to_csv(path, index=False, sep=separator)
    splits = load_splits(path)
    assert splits.kind == "table"
    assert splits.class_names == ("no", "yes")
    assert splits.feature_names == ("x", "colour=blue", "colour=red")
    assert splits.n_numeric == 1
    assert (len(splits.train), len(splits.val), len(splits.test)) == (26, 6, 8)
    assert splits.train.inputs[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert splits.train.inputs[:, 0].std() == pytest.approx(1, abs=1e-6)


def test_other_label_column(tmp_path):
    path = tmp_path / "t.csv"
    table_of().rename(columns={"label": "answer"}).to_csv(path, index=False)
    assert load_splits(path, label_column="answer").class_names == ("no", "yes")
    with pytest.raises(LabelError, match=r"label_column must be one of the columns x, colour"):
        load_splits(path)
    with pytest.raises(LabelError, match=r"did you mean 'answer'"):
        load_splits(path, label_column="anwser")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.assign(label="yes"), LabelError, "at least 2 classes"),
        (lambda t: t.assign(label=t["label"].where(t.index > 2)), LabelError, "3 missing labels"),
        (lambda t: t.assign(x=t["x"].where(t.index > 2)), ValueError, "column 'x' must be finite"),
        (lambda t: t.assign(label=t["x"]), LabelError, "names or whole numbers"),
        (lambda t: t[["label"]], ValueError, "at least one feature column"),
        (lambda t: t.iloc[[0, 1, 2]], SplitError, "at least 3 rows .* got 1 of class 'no'"),
    ],
)
def test_bad_tables(tmp_path, change, error, message):
    path = tmp_path / "t.csv"
    change(table_of()).to_csv(path, index=False)
    with pytest.raises(error, match=message):
        load_splits(path)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\x81"])
def test_unreadable_tables(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableFileError, match="must be a readable table"):
        load_splits(tmp_path / name)


def test_duplicates_of_an_own_table_stay_on_one_side(tmp_path):
    table = pd.concat([table_of(), table_of()], ignore_index=True)
    table.to_csv(tmp_path / "t.csv", index=False)
    splits = load_splits(tmp_path / "t.csv")
    sides = [
        {row.tobytes() for row in split.inputs} for split in (splits.train, splits.val, splits.test)
    ]
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]


# --- embeddings


def arrays(n=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 7)), np.arange(n) % 2 * 5


@pytest.mark.parametrize("names", [("embeddings", "labels"), ("X", "y")])
def test_npz(tmp_path, names):
    embeddings, labels = arrays()
    np.savez(tmp_path / "e.npz", **dict(zip(names, (embeddings, labels), strict=True)))
    splits = load_splits(tmp_path / "e.npz")
    assert splits.kind == "embedding"
    assert splits.class_names == ("0", "5")
    assert splits.train.inputs.dtype == np.float32
    assert splits.train.inputs.shape == (26, 7)
    known = {row.tobytes() for row in embeddings.astype(np.float32)}
    assert all(row.tobytes() in known for row in splits.test.inputs)


def test_npy_with_labels_beside(tmp_path):
    embeddings, labels = arrays()
    np.save(tmp_path / "e.npy", embeddings)
    with pytest.raises(LabelError, match=r"got no file .*e_labels\.npy"):
        load_splits(tmp_path / "e.npy")
    np.save(tmp_path / "e_labels.npy", np.array(["b", "a"])[labels // 5])
    assert load_splits(tmp_path / "e.npy").class_names == ("a", "b")


@pytest.mark.parametrize(
    ("embeddings", "labels", "error", "message"),
    [
        (np.full((6, 2), np.nan), [0, 1] * 3, ValueError, "embeddings must be finite"),
        (np.full((6, 2), 1e300), [0, 1] * 3, ValueError, "embeddings must be finite"),
        (np.zeros((6, 2, 2)), [0, 1] * 3, ValueError, r"shape \(N, D\), got float64"),
        (np.array([["a"]] * 6), [0, 1] * 3, ValueError, "must be numbers"),
        (np.zeros((6, 2)), [0, 1], LabelError, r"labels must have shape \(6,\), got \(2,\)"),
        (np.zeros((6, 2)), [0.0, np.nan] * 3, LabelError, "3 missing labels"),
        (np.zeros((6, 2)), [0] * 6, LabelError, "at least 2 classes"),
        (np.zeros((6, 2)), [0, 1] * 3, SplitError, "must hold different rows"),
    ],
)
def test_bad_embeddings(tmp_path, embeddings, labels, error, message):
    np.savez(tmp_path / "e.npz", X=embeddings, y=np.array(labels))
    with pytest.raises(error, match=message):
        load_splits(tmp_path / "e.npz")


def test_pickles_are_refused(tmp_path):
    pickled = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "e.npz", X=pickled, y=np.array([0]))
    with pytest.raises(UnreadableFileError, match="must hold plain arrays"):
        read_own(tmp_path / "e.npz")


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_cut_npz(tmp_path, share):
    embeddings, labels = arrays()
    path = tmp_path / "e.npz"
    np.savez(path, X=embeddings, y=labels)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UnreadableFileError, match="must hold plain arrays"):
        read_own(path)


def test_npz_with_other_names(tmp_path):
    np.savez(tmp_path / "e.npz", a=np.zeros(3), b=np.zeros(3))
    with pytest.raises(LabelError, match="got a, b"):
        read_own(tmp_path / "e.npz")


# --- all


def test_unknown_ending(tmp_path):
    (tmp_path / "data.xlsx").write_bytes(b"x")
    with pytest.raises(UnsupportedFileError, match=r"must be a folder or end in \.csv"):
        load_splits(tmp_path / "data.xlsx")


@pytest.mark.parametrize(
    ("values", "ids", "names"),
    [
        ([3, 1, 3], [1, 0, 1], ("1", "3")),
        ([10, 9], [1, 0], ("9", "10")),
        ([1.0, 0.0], [1, 0], ("0", "1")),
        (["b", "a"], [1, 0], ("a", "b")),
        ([True, False], [1, 0], ("False", "True")),
    ],
)
def test_labels_are_numbered_in_their_own_order(values, ids, names):
    encoded, class_names = encode_labels(np.array(values))
    assert encoded.tolist() == ids
    assert class_names == names


def test_mixed_labels_are_names():
    encoded, class_names = encode_labels(np.array([1, "a", 1], dtype=object))
    assert class_names == ("1", "a")
    assert encoded.tolist() == [0, 1, 0]
