"""Tests of the splits of known data sets."""

import io
import tarfile

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnknn.data import download as sources
from attnknn.data import known as readers
from attnknn.data.splits import (
    TEST,
    TRAIN,
    RawData,
    Split,
    SplitError,
    UnknownDatasetError,
    draw_rows,
    duplicate_groups,
    load_splits,
    resize_images,
)


def sides_of(splits):
    return [
        {row.tobytes() for row in split.inputs} for split in (splits.train, splits.val, splits.test)
    ]


def shares(labels):
    return np.bincount(labels) / len(labels)


@pytest.fixture
def fake(monkeypatch):
    """Register rows under the name ``fake``."""

    def register(**fields):
        monkeypatch.setitem(readers.READERS, "fake", lambda: RawData(source="test", **fields))

    return register


def test_digits():
    splits = load_splits("digits")
    assert splits.kind == "image"
    assert splits.train.inputs.shape == (1078, 1, 16, 16)
    assert splits.train.inputs.dtype == np.uint8
    assert (len(splits.val), len(splits.test), splits.n_classes) == (360, 359, 10)
    assert splits.train.inputs.max() > 240
    for split in (splits.val, splits.test):
        np.testing.assert_allclose(shares(split.labels), shares(splits.train.labels), atol=0.01)
    pixels = splits.train.inputs / 255
    assert splits.mean == pytest.approx((pixels.mean(),), rel=1e-5)
    assert splits.std == pytest.approx((pixels.std(),), rel=1e-5)


def test_digits_at_their_own_size():
    from sklearn.datasets import load_digits

    splits = load_splits("digits", image_size=8)
    original, labels = load_digits(return_X_y=True)
    together = np.concatenate([s.inputs for s in (splits.train, splits.val, splits.test)])
    assert together.shape == (1797, 1, 8, 8)
    restored = np.round(together.reshape(-1, 64) * (16 / 255))
    order, expected = np.lexsort(restored.T), np.lexsort(original.T)
    np.testing.assert_array_equal(restored[order], original[expected])
    merged = np.concatenate([s.labels for s in (splits.train, splits.val, splits.test)])
    np.testing.assert_array_equal(merged[order], labels[expected])


def test_iris_is_split_80_20_with_validation_from_the_80():
    splits = load_splits("iris")
    assert (len(splits.train), len(splits.val), len(splits.test)) == (96, 24, 30)
    for split in (splits.train, splits.val, splits.test):
        assert len(set(np.bincount(split.labels))) == 1
    assert splits.class_names == ("setosa", "versicolor", "virginica")
    assert splits.n_numeric == len(splits.feature_names) == 4


def test_fault_9_the_scaler_sees_training_rows_only():
    # Regression: the published code scaled all rows before the split.
    splits = load_splits("iris")
    np.testing.assert_allclose(splits.train.inputs.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(splits.train.inputs.std(axis=0), 1, atol=1e-6)
    assert np.abs(splits.test.inputs.mean(axis=0)).max() > 0.01


@pytest.mark.parametrize("numeric", ["standard", "quantile"])
def test_fault_9_test_rows_do_not_move_training_features(fake, numeric):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=30), "c": ["a", "b"] * 15})
    part = np.repeat([TRAIN, TEST], [20, 10])
    fields = {"kind": "table", "labels": np.arange(30) % 2, "class_names": ("n", "y")}
    fake(inputs=table, part=part, **fields)
    before = load_splits("fake", numeric=numeric)
    changed = table.copy()
    changed.loc[part == TEST, "x"] = 1e6
    changed.loc[part == TEST, "c"] = "new"
    fake(inputs=changed, part=part, **fields)
    after = load_splits("fake", numeric=numeric)
    np.testing.assert_array_equal(before.train.inputs, after.train.inputs)
    np.testing.assert_array_equal(before.val.inputs, after.val.inputs)
    assert before.feature_names == after.feature_names
    assert before.fingerprint != after.fingerprint


def test_image_statistics_come_from_training_rows(fake):
    images = (
        np.full((30, 1, 2, 2), 51, dtype=np.uint8)
        + np.arange(30, dtype=np.uint8)[:, None, None, None]
    )
    images[20:] = 255
    part = np.repeat([TRAIN, TEST], [20, 10])
    fake(kind="image", inputs=images, labels=np.arange(30) % 2, class_names=("a", "b"), part=part)
    splits = load_splits("fake")
    assert splits.mean == pytest.approx((splits.train.inputs.mean() / 255,), rel=1e-6)
    assert splits.mean[0] < 0.3


def test_drawn_sides_share_no_row(fake):
    rng = np.random.default_rng(0)
    base = rng.normal(size=(40, 3)).astype(np.float32)
    inputs = np.concatenate([base, base, base[:20]])
    labels = np.concatenate([np.arange(40) % 2] * 2 + [np.arange(20) % 2])
    fake(kind="embedding", inputs=inputs, labels=labels, class_names=("a", "b"))
    for seed in range(10):
        train, val, test = sides_of(load_splits("fake", seed=seed))
        assert not train & val
        assert not train & test
        assert not val & test


def test_seed_decides_and_repeats():
    first, again, other = (load_splits("iris", seed=seed) for seed in (42, 42, 43))
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_fingerprint_depends_on_labels(fake):
    inputs = np.arange(60, dtype=np.float32).reshape(20, 3)
    fields = {"kind": "embedding", "inputs": inputs, "class_names": ("a", "b")}
    part = np.repeat([TRAIN, TEST], [10, 10])
    labels = np.arange(20) % 2
    fake(labels=labels, part=part, **fields)
    before = load_splits("fake").fingerprint
    labels = labels.copy()
    labels[[12, 13]] = labels[[13, 12]]
    fake(labels=labels, part=part, **fields)
    assert load_splits("fake").fingerprint != before


def test_row_limits():
    splits = load_splits("digits", max_train_rows=103, max_test_rows=53, val_rows=71)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (103, 71, 53)
    assert np.bincount(splits.train.labels).min() >= 9
    full = load_splits("digits", val_rows=71)
    train, _, _ = sides_of(splits)
    assert train < sides_of(full)[0]
    np.testing.assert_array_equal(splits.val.inputs, full.val.inputs)


def test_limits_above_the_size_change_nothing():
    assert load_splits("iris", max_train_rows=10_000).fingerprint == load_splits("iris").fingerprint


def test_a_limit_just_below_the_size_is_kept():
    assert len(load_splits("iris", max_train_rows=95).train) == 95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_rows": 0}, "val_rows must be an integer of at least 3"),
        ({"val_rows": 119}, "rows drawn must be 3 to 117, .* got 119 of 120"),
        ({"max_train_rows": 2}, "max_train_rows must be an integer of at least 3"),
        ({"max_test_rows": 2}, "max_test_rows must be an integer of at least 3"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"image_size": 8}, "image_size must be None for a table"),
        ({"image_size": 0}, "image_size must be an integer of at least 1"),
        ({"numeric": "log"}, "numeric must be one of"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        load_splits("iris", **options)


def test_unknown_names_are_refused():
    with pytest.raises(UnknownDatasetError, match=r"got dataset='cifar_10' \(did you mean 'cif"):
        load_splits("cifar_10")
    with pytest.raises(UnknownDatasetError, match="or an existing path"):
        load_splits("no/such/folder")


def test_split_checks_its_lengths():
    with pytest.raises((ValueError, TypeError), match=r"labels must have one entry|Type-check"):
        Split(np.zeros((3, 2), dtype=np.float32), np.zeros(2, dtype=np.int64))


def test_resize_agrees_with_pillow():
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (3, 1, 28, 28), dtype=np.uint8)
    ours = resize_images(images, 32)
    for image, resized in zip(images, ours, strict=True):
        pillow = Image.fromarray(image[0]).resize((32, 32), Image.Resampling.BILINEAR)
        assert np.abs(resized[0].astype(int) - np.asarray(pillow).astype(int)).max() <= 1
    assert resize_images(images, 28) is images


# --- known formats, from files of our own making


def test_cifar10_format(monkeypatch, tmp_path):
    # Six files of 10 000 rows in miniature: row i of the training part is full of byte i.
    files = {}
    for i, name in enumerate(sources.SOURCES["cifar10"].files):
        rows = np.full((2, 3073), i, dtype=np.uint8)
        rows[:, 0] = [3, 9]
        rows[:, 1:1025] += 100  # red
        rows.tofile(tmp_path / name)
        files[name] = tmp_path / name
    monkeypatch.setattr(sources, "fetch", lambda name: files)
    monkeypatch.setattr(readers, "_train_then_test", lambda *_: np.repeat([TRAIN, TEST], [10, 2]))
    rows = readers.read_cifar10()
    assert rows.inputs.shape == (12, 3, 32, 32)
    assert rows.labels.tolist() == [3, 9] * 6
    assert (rows.inputs[2, 0] == 101).all()
    assert (rows.inputs[2, 1:] == 1).all()
    assert (rows.inputs[11, 2] == 5).all()


def test_cifar100_format(monkeypatch, tmp_path):
    def member(tar, name, content):
        info = tarfile.TarInfo(f"cifar-100-binary/{name}")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))

    rows = np.zeros((3, 3074), dtype=np.uint8)
    rows[:, 0] = 1  # coarse
    rows[:, 1] = [99, 5, 0]  # fine
    rows[1, 2 + 2048 :] = 7  # blue
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as tar:
        member(tar, "train.bin", rows[:2].tobytes())
        member(tar, "test.bin", rows[2:].tobytes())
        member(tar, "fine_label_names.txt", b"apple\naquarium_fish\n")
    monkeypatch.setattr(sources, "fetch", lambda name: {"c": tmp_path / "c.tar.gz"})
    monkeypatch.setattr(readers, "_train_then_test", lambda *_: np.array([TRAIN, TRAIN, TEST]))
    read = readers.read_cifar100()
    assert read.labels.tolist() == [99, 5, 0]
    assert (read.inputs[1, 2] == 7).all()
    assert read.inputs[1, :2].max() == 0
    assert read.class_names == ("apple", "aquarium_fish")


ADULT_ROW = (
    "{age}, {work}, 7, Bachelors, 13, Never-married, Sales, Not-in-family, White, Male, 0, 0, 40,"
    " United-States, {income}\n"
)
INCOMES, WORKS = (">50K", "<=50K"), ("Private", "?", "State-gov", "Never-worked")


@pytest.fixture
def small_adult(monkeypatch, tmp_path):
    """Adult in miniature: 40 persons to learn from, 8 very old ones to test on."""

    def persons(n_rows: int, age: int, ending: str) -> str:
        return "".join(
            ADULT_ROW.format(age=age + i, work=WORKS[i % 3], income=INCOMES[i % 2] + ending)
            for i in range(n_rows)
        )

    unseen = ADULT_ROW.format(age=900, work=WORKS[3], income=">50K.")
    texts = {
        "adult.data": persons(40, 20, "") + "\n",
        "adult.test": "|1x3 Cross validator\n" + persons(7, 800, ".") + unseen + "\n",
    }
    files = {name: tmp_path / name for name in texts}
    for name, path in files.items():
        path.write_text(texts[name])
    monkeypatch.setattr(sources, "fetch", lambda name: files if name == "adult" else {})
    monkeypatch.setattr(readers, "_train_then_test", lambda *_: np.repeat([TRAIN, TEST], [40, 8]))
    return load_splits("adult")


def test_fault_9_the_scaler_of_adult_sees_training_rows_only(small_adult):
    ages = small_adult.train.inputs[:, small_adult.feature_names.index("age")]
    assert ages.mean() == pytest.approx(0, abs=1e-6) and ages.std() == pytest.approx(1, abs=1e-6)
    # Scaled together with the others, nobody would be more than three deviations away.
    assert small_adult.test.inputs[:, 0].min() > 20


def test_fault_9_categories_of_adult_are_neither_ordered_nor_dropped(small_adult):
    names, width = small_adult.feature_names, small_adult.n_numeric
    assert width == 6
    works = [place for place, name in enumerate(names) if name.startswith("workclass=")]
    assert [names[place] for place in works] == [
        "workclass=Private",
        "workclass=State-gov",
        "workclass=missing",
    ]
    flags = small_adult.train.inputs[:, works]
    assert set(np.unique(flags)) == {0, 1} and (flags.sum(axis=1) == 1).all()
    # Any two kinds of work are equally far apart; integer codes would put one between the others.
    kinds = np.unique(flags, axis=0)
    squared = ((kinds[:, None] - kinds[None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(squared, 2 * (1 - np.eye(3)))
    assert not small_adult.test.inputs[-1, works].any()  # work that nobody of the others has


WINE_COLUMNS = ("fixed acidity", "alcohol", "quality")


@pytest.fixture
def small_wines(monkeypatch, tmp_path):
    """Wine Quality in miniature: red wines of 9 to 11 %, white ones of 12 to 14 %."""

    def fetch(name):
        alcohol = {"wine_red": 9, "wine_white": 12}[name]
        lines = [f"{7 + i / 100};{alcohol + i / 20};{3 + i % 6}" for i in range(36)]
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join([";".join(f'"{name}"' for name in WINE_COLUMNS), *lines]))
        return {path.name: path}

    monkeypatch.setattr(sources, "fetch", fetch)


def test_fault_9_wine_is_wine_quality_of_the_colour_asked_for(small_wines):
    red, white = readers.READERS["wine_red"](), readers.READERS["wine_white"]()
    assert red.inputs["alcohol"].max() < 11 < 12 <= white.inputs["alcohol"].min()
    for name, rows in {"wine_red": red, "wine_white": white}.items():
        assert tuple(rows.inputs.columns) == WINE_COLUMNS[:-1]  # the label is not a feature
        assert rows.labels.tolist() == [0, 0, 0, 1, 1, 1] * 6  # quality 3, 4, 5, 6, 7, 8
        assert rows.class_names == ("quality below 6", "quality 6 or more")
        assert name in rows.source


def test_fault_9_the_published_names_of_another_wine_set_are_refused():
    # Scikit-learn's load_wine holds 178 wines of three growers: not Wine Quality.
    with pytest.raises(UnknownDatasetError, match=r"got dataset='wine' \(did you mean 'wine_"):
        load_splits("wine")


def cached(name):
    folder = sources.data_root() / name
    return all((folder / file).is_file() for file in sources.SOURCES[name].files)


def needs(name):
    return pytest.mark.skipif(not cached(name), reason=f"{name} is not in the cache")


@needs("cifar10")
@pytest.mark.slow
def test_cifar10():
    splits = load_splits("cifar10")
    assert splits.train.inputs.shape == (45_000, 3, 32, 32)
    assert (len(splits.val), len(splits.test)) == (5_000, 10_000)
    for split in (splits.train, splits.val, splits.test):
        assert len(set(np.bincount(split.labels))) == 1
    assert splits.class_names[splits.test.labels[0]] == "cat"  # the first test image
    measured = splits.train.inputs.mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(splits.mean, measured, atol=0.002)
    train, val, _ = sides_of(splits)
    assert not train & val


@needs("mnist")
@pytest.mark.slow
def test_mnist():
    splits = load_splits("mnist")
    assert splits.train.inputs.shape == (55_000, 3, 32, 32)
    assert (len(splits.val), len(splits.test)) == (5_000, 10_000)
    assert splits.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert splits.mean == (0.1307,) * 3
    assert splits.train.inputs[:, 0].mean() / 255 == pytest.approx(0.1307, abs=0.002)


@needs("wine_red")
@pytest.mark.parametrize("seed", [42, 43])
def test_wine_keeps_duplicates_on_one_side(seed):
    splits = load_splits("wine_red", seed=seed)
    assert len(splits.train) + len(splits.val) + len(splits.test) == 1599
    assert abs(len(splits.test) - 320) <= 2
    assert abs(len(splits.val) - 256) <= 2
    train, val, test = sides_of(splits)
    assert len(train) < len(splits.train)  # there are duplicates
    assert not (train & val or train & test or val & test)
    for split in (splits.train, splits.val, splits.test):
        assert shares(split.labels)[1] == pytest.approx(855 / 1599, abs=0.01)


@needs("wine_white")
def test_wine_white_is_another_table():
    splits = load_splits("wine_white")
    assert len(splits.train) + len(splits.val) + len(splits.test) == 4898
    labels = np.concatenate([s.labels for s in (splits.train, splits.val, splits.test)])
    assert labels.sum() == 3258


@needs("adult")
def test_adult_uses_the_official_test_rows_and_one_hot_categories():
    # Regression: the published code coded categories as ordered integers or dropped them.
    splits = load_splits("adult")
    assert (len(splits.train) + len(splits.val), len(splits.test)) == (32_561, 16_281)
    assert abs(len(splits.val) - 6512) <= 2
    assert splits.test.labels.sum() == 3846
    assert splits.feature_names[: splits.n_numeric] == (
        "age",
        "fnlwgt",
        "education-num",
        "capital-gain",
        "capital-loss",
        "hours-per-week",
    )
    flags = splits.train.inputs[:, splits.n_numeric :]
    assert set(np.unique(flags)) == {0, 1}
    assert (flags.sum(axis=1) == 8).all()
    assert "workclass=missing" in splits.feature_names


# ---- Tests of stratified drawing with whole groups.


def test_classes_keep_their_shares_by_hand():
    # 10, 20 and 70 rows; 10 drawn: 1, 2 and 7
    labels = np.repeat([0, 1, 2], [10, 20, 70])
    ids = draw_rows(labels, 10, seed=(1,))
    assert np.bincount(labels[ids]).tolist() == [1, 2, 7]
    assert (np.diff(ids) > 0).all()


def test_largest_remainder_gets_the_odd_row():
    # 5 of 3 + 7 rows: 1.5 and 3.5; of 4 + 7 rows: 1.82 and 3.18
    labels = np.repeat([0, 1], [4, 7])
    assert np.bincount(labels[draw_rows(labels, 5, seed=(1,))]).tolist() == [2, 3]


def test_small_classes_are_neither_missed_nor_used_up():
    labels = np.repeat([0, 1], [2, 100])
    assert np.bincount(labels[draw_rows(labels, 5, seed=(0,))]).tolist() == [1, 4]
    assert np.bincount(labels[draw_rows(labels, 97, seed=(0,))]).tolist() == [1, 96]


def test_seed_decides():
    labels = np.arange(101) % 3
    first = draw_rows(labels, 20, seed=(7, 1))
    assert np.array_equal(first, draw_rows(labels, 20, seed=(7, 1)))
    assert not np.array_equal(first, draw_rows(labels, 20, seed=(7, 2)))


def test_groups_stay_whole():
    labels = np.zeros(12, dtype=np.int64)
    labels[6:] = 1
    groups = np.array([0, 0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 7])
    for seed in range(20):
        drawn = set(draw_rows(labels, 4, seed=(seed,), groups=groups).tolist())
        for group in range(8):
            rows = set(np.flatnonzero(groups == group).tolist())
            assert rows <= drawn or not rows & drawn


@settings(max_examples=50, deadline=None)
@given(data=st.data(), n=st.integers(20, 80), n_classes=st.integers(2, 4), seed=st.integers(0, 99))
def test_draw_is_exact_without_groups(data, n, n_classes, seed):
    labels = np.arange(n) % n_classes
    n_rows = data.draw(st.integers(n_classes, n - n_classes))
    counts = np.bincount(labels[draw_rows(labels, n_rows, seed=(seed,))], minlength=n_classes)
    assert counts.sum() == n_rows
    assert np.abs(counts - n_rows * np.bincount(labels) / n).max() < 1 + 1e-9


def test_identical_rows_share_a_group():
    images = np.zeros((4, 1, 3, 3), dtype=np.uint8)
    images[1, 0, 2, 2] = 1
    groups = duplicate_groups(images)
    assert groups[0] == groups[2] == groups[3] != groups[1]
    table = pd.DataFrame({"x": [1.0, 2.0, 1.0], "c": ["a", "a", "a"]})
    groups = duplicate_groups(table)
    assert groups[0] == groups[2] != groups[1]


def test_transposed_memory_order_does_not_change_groups():
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    assert np.array_equal(duplicate_groups(rows), duplicate_groups(np.asfortranarray(rows)))


@pytest.mark.parametrize(
    ("labels", "n_rows", "message"),
    [
        ([0, 0, 1], 1, "every class must have 2 rows to be split, got 1 of 1"),
        ([0, 0, 1, 1], 1, "got 1 of 4"),
        ([0, 0, 1, 1], 3, "got 3 of 4"),
    ],
)
def test_too_few_rows(labels, n_rows, message):
    with pytest.raises(SplitError, match=message):
        draw_rows(np.array(labels), n_rows, seed=(0,))


def test_a_class_of_copies_cannot_be_split():
    labels = np.array([0, 0, 0, 1, 1, 1])
    groups = np.array([0, 0, 0, 1, 2, 3])
    with pytest.raises(SplitError, match="class 0 must hold different rows"):
        draw_rows(labels, 2, seed=(0,), groups=groups)


def test_a_class_of_large_groups_still_gets_a_row():
    labels = np.repeat([0, 1], [10, 90])
    groups = np.concatenate([np.repeat([0, 1], 5), np.arange(2, 92)])
    drawn = draw_rows(labels, 10, seed=(0,), groups=groups)  # one row of class 0 is its share
    assert np.bincount(labels[drawn]).tolist() == [5, 9]


def test_thinning_may_use_a_class_up():
    labels = np.repeat([0, 1], [1, 8])
    assert np.bincount(labels[draw_rows(labels, 8, seed=(0,), leave=0)]).tolist() == [1, 7]


def test_zero_has_one_sign():
    rows = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, -1.0]])
    first, second, third = duplicate_groups(rows)
    assert first == second != third
