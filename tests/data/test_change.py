"""Augmentation: by hand, in the limits, reproducible, and with clear refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnknn.data.change import (
    alternating_flips,
    augment_batch,
    colour_jitter,
    cutout,
    flip_labels,
    flip_where,
    long_tail_rows,
    mixup,
    random_crop,
    random_flip,
    random_rotation,
    rotate,
    shrink,
    tta_views,
)

B, CHANNELS, HEIGHT, WIDTH = 5, 3, 7, 11
LABELS, PIXELS = np.arange(11) % 3, torch.zeros(2, 1, 8, 8)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images():
    return torch.rand(B, CHANNELS, HEIGHT, WIDTH, generator=generator(1))


@pytest.mark.parametrize("mode", ["zero", "reflect"])
def test_each_crop_is_a_window_of_the_padded_image(images, mode):
    pad = 2
    cropped = random_crop(images, generator(), pad=pad, mode=mode)
    torch_mode = {"zero": "constant", "reflect": "reflect"}[mode]
    padded = torch.nn.functional.pad(images, (pad,) * 4, mode=torch_mode)
    corners = set()
    for before, after in zip(padded, cropped, strict=True):
        windows = before.unfold(1, HEIGHT, 1).unfold(2, WIDTH, 1)  # (channels, 5, 5, H, W)
        same = (windows == after[:, None, None]).all(dim=-1).all(dim=-1).all(dim=0)
        assert same.sum() == 1
        corners.add(tuple(same.nonzero()[0].tolist()))
    assert len(corners) > 1  # images move independently of each other


def test_crop_uncovers_black_by_hand():
    image = torch.ones(1, 1, 1, 1)
    values = [random_crop(image, generator(seed), pad=1).item() for seed in range(60)]
    assert set(values) == {0.0, 1.0}  # nine places, one of which keeps the pixel
    assert 1 <= sum(values) <= 20


def test_crop_without_padding_changes_nothing(images):
    assert torch.equal(random_crop(images, generator(), pad=0), images)


def test_crop_reaches_every_shift():
    ramp = torch.arange(49.0).reshape(1, 1, 7, 7).expand(400, 1, 7, 7)
    centres = random_crop(ramp, generator(), pad=2)[:, 0, 3, 3]
    expected = {float(7 * row + column) for row in range(1, 6) for column in range(1, 6)}
    assert set(centres.tolist()) == expected


def test_flip_mirrors_left_to_right_by_hand():
    image = torch.tensor([[[[0.1, 0.2, 0.3]]]])
    flipped = flip_where(image, torch.tensor([True]))
    assert flipped.flatten().tolist() == pytest.approx([0.3, 0.2, 0.1])
    assert torch.equal(flip_where(image, torch.tensor([False])), image)


def test_random_flip_mirrors_about_half():
    images = torch.tensor([0.0, 1.0]).reshape(1, 1, 1, 2).expand(1000, 1, 1, 2)
    share = random_flip(images, generator())[:, 0, 0, 0].mean().item()
    assert 0.45 < share < 0.55


def test_alternating_flips_take_turns_and_start_half_and_half():
    ids = torch.arange(10_000)
    first, second, third = (alternating_flips(ids, epoch=epoch) for epoch in range(3))
    assert torch.equal(first, ~second)
    assert torch.equal(first, third)
    assert 0.48 < first.float().mean() < 0.52
    neighbours_agree = (first[1:] == first[:-1]).float().mean()
    assert 0.47 < neighbours_agree < 0.53  # no pattern along the data set
    other = alternating_flips(ids, epoch=0, seed=1)
    assert 0.45 < (first == other).float().mean() < 0.55


def test_alternating_flips_depend_on_the_id_alone():
    ids = torch.tensor([7, 3, 99_991])
    together = alternating_flips(ids, epoch=4, seed=2)
    alone = torch.cat([alternating_flips(ids[i : i + 1], epoch=4, seed=2) for i in range(3)])
    assert torch.equal(together, alone)


def test_jitter_brightness_by_hand():
    grey = torch.full((200, 1, 3, 3), 0.5)
    jittered = colour_jitter(grey, generator(), strength=0.2)
    levels = jittered.mean(dim=(1, 2, 3))
    assert torch.allclose(jittered, levels[:, None, None, None].expand_as(jittered), atol=1e-6)
    assert 0.4 <= levels.min() < 0.42 and 0.58 < levels.max() <= 0.6 + 1e-6


def test_jitter_of_strength_zero_changes_nothing(images):
    assert torch.allclose(colour_jitter(images, generator(), strength=0.0), images, atol=1e-6)


def test_saturation_leaves_grey_images_grey():
    grey = torch.rand(B, 1, HEIGHT, WIDTH, generator=generator()).expand(B, 3, HEIGHT, WIDTH)
    jittered = colour_jitter(grey, generator(3))
    assert torch.allclose(jittered[:, 0], jittered[:, 1], atol=1e-6)
    assert torch.allclose(jittered[:, 0], jittered[:, 2], atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), channels=st.sampled_from([1, 2, 3, 4]))
def test_every_augmentation_stays_between_0_and_1(seed, channels):
    images = torch.rand(3, channels, 11, 11, generator=generator(seed))
    names = ("crop", "flip", "jitter", "rotate", "cutout")
    changed = augment_batch(images, names, generator(seed), pad=2)
    assert changed.shape == images.shape
    assert changed.min() >= 0 and changed.max() <= 1 + 1e-5


def test_quarter_turn_by_hand():
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    turned = rotate(image, torch.tensor([math.pi / 2]))
    expected = torch.rot90(image, 1, dims=(2, 3))
    assert torch.allclose(turned, expected, atol=1e-4)


def test_rotation_keeps_angles_on_images_that_are_not_square():
    image = torch.zeros(1, 1, 9, 21)
    image[0, 0, 4, 13] = 1  # three pixels to the right of the centre
    turned = rotate(image, torch.tensor([math.pi / 2]))
    assert turned[0, 0, 1, 10] == pytest.approx(1, abs=1e-4)  # three pixels above it


def test_rotation_of_zero_degrees_changes_nothing(images):
    assert torch.allclose(random_rotation(images, generator(), degrees=0.0), images, atol=1e-5)


def test_cutout_erases_one_square(images):
    changed = cutout(images, generator(), size=3)
    erased = (changed != images).any(dim=1)  # (B, H, W)
    for mask, before, after in zip(erased, images, changed, strict=True):
        rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
        assert mask.sum() == 9 and len(rows) == len(columns) == 3
        assert torch.allclose(after[:, mask], before.mean(dim=(1, 2))[:, None].expand(3, 9))


def test_shrink_keeps_means_and_proportions(images):
    small = shrink(images, 3)
    assert small.shape == (B, CHANNELS, 3, 5)
    assert torch.equal(shrink(images, HEIGHT), images)
    flat = torch.full((1, 1, 8, 8), 0.3)
    assert torch.allclose(shrink(flat, 5), torch.full((1, 1, 5, 5), 0.3))
    stripes = torch.tensor([0.0, 1.0]).repeat(8).expand(1, 1, 16, 16)
    inner = shrink(stripes, 4)[..., 1:-1]  # finer than a pixel: grey, not black or white
    assert torch.allclose(inner, torch.full_like(inner, 0.5), atol=0.05)


def test_mixup_blends_with_the_partner(images):
    mixed, partners, share = mixup(images, 0.4, generator())
    assert sorted(partners.tolist()) == list(range(B))
    for i, partner in enumerate(partners.tolist()):
        assert torch.allclose(mixed[i], share * images[i] + (1 - share) * images[partner])


def test_mixup_share_is_at_least_one_half_and_beta():
    images = torch.zeros(2, 1, 1, 1)
    gen = generator()
    shares = torch.tensor([mixup(images, 0.4, gen)[2] for _ in range(2000)])
    assert shares.min() >= 0.5 and shares.max() <= 1
    # E max(x, 1 - x) for x ~ Beta(0.4, 0.4), by numerical integration
    assert shares.mean() == pytest.approx(0.8358, abs=0.01)


@pytest.mark.parametrize("kind", ["v5", "narrative", "shifts"])
def test_views_start_with_the_image_itself(images, kind):
    views = tta_views(images, generator(), kind=kind, n_views=5)
    assert views.shape == (5, *images.shape)
    assert torch.equal(views[0], images)
    assert torch.equal(tta_views(images, generator(), kind=kind, n_views=1)[0], images)


def test_narrative_views_are_one_flip_and_crops(images):
    views = tta_views(images, generator(), kind="narrative", n_views=5, pad=0)
    assert torch.equal(views[1], images.flip(-1))
    assert all(torch.equal(view, images) for view in views[2:])  # crops never mirror


def test_v5_views_flip_at_random(images):
    views = tta_views(images, generator(), kind="v5", n_views=41, pad=0)
    kept = (views == images).flatten(2).all(dim=-1)
    mirrored = (views == images.flip(-1)).flatten(2).all(dim=-1)
    assert (kept ^ mirrored).all()
    assert 0.35 < mirrored[1:].float().mean() < 0.65


def test_shift_views_are_free_of_chance(images):
    first = tta_views(images, generator(0), kind="shifts", n_views=6)
    second = tta_views(images, generator(1), kind="shifts", n_views=6)
    assert torch.equal(first, second)
    assert torch.equal(first[1], images.flip(-1))
    assert torch.equal(first[2][..., 1:, 1:], images[..., :-1, :-1])
    assert torch.equal(first[4][..., :-1, :-1], images[..., 1:, 1:])


@pytest.mark.parametrize("name", ["crop", "flip", "jitter", "rotate", "cutout"])
def test_the_same_generator_state_gives_the_same_images(images, name):
    options = {"pad": 2, "cutout_size": 3}
    first = augment_batch(images, [name], generator(3), **options)
    assert torch.equal(first, augment_batch(images, [name], generator(3), **options))
    assert not torch.equal(first, augment_batch(images, [name], generator(4), **options))


def test_no_names_change_nothing(images):
    assert torch.equal(augment_batch(images, (), generator()), images)


def test_given_flips_are_followed(images):
    flips = torch.tensor([True, False, True, False, False])
    changed = augment_batch(images, ["flip"], generator(), flips=flips)
    assert torch.equal(changed, flip_where(images, flips))


def test_bad_input_is_refused(images):
    with pytest.raises(ValueError, match=r"augmentation must be one of .* \(did you mean 'crop'"):
        augment_batch(images, ["crops"], generator())
    with pytest.raises(ValueError, match="mode must be one of"):
        random_crop(images, generator(), mode="wrap")
    with pytest.raises(ValueError, match="pad must be smaller than the image"):
        random_crop(images, generator(), pad=7, mode="reflect")
    with pytest.raises(ValueError, match="alpha must be above 0"):
        mixup(images, 0.0, generator())
    with pytest.raises(ValueError, match="size must lie between"):
        cutout(images, generator(), size=8)
    with pytest.raises(ValueError, match="kind must be one of"):
        tta_views(images, generator(), kind="v6")


# ---- Tests of label noise and long tails.


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(("rate", "wrong"), [(0.0, 0), (0.1, 10), (0.3, 30), (1.0, 101)])
def test_exactly_the_asked_share_is_wrong(kind, rate, wrong):
    labels = np.arange(101) % 7
    noisy = flip_labels(labels, rate, n_classes=7, kind=kind, seed=3)
    assert (noisy != labels).sum() == wrong
    assert noisy.min() >= 0
    assert noisy.max() < 7


def test_asymmetric_noise_is_the_next_class():
    labels = np.array([0, 1, 2, 2])
    noisy = flip_labels(labels, 1.0, n_classes=3, kind="asymmetric", seed=0)
    assert noisy.tolist() == [1, 2, 0, 0]


def test_two_classes_leave_no_choice():
    labels = np.array([0, 1, 1])
    assert flip_labels(labels, 1.0, n_classes=2, seed=0).tolist() == [1, 0, 0]


def test_symmetric_noise_is_uniform_over_the_other_classes():
    noisy = flip_labels(np.full(9000, 2), 1.0, n_classes=4, seed=5)
    counts = np.bincount(noisy, minlength=4)
    assert counts[2] == 0
    # 3000 expected of each, standard deviation 45
    assert np.abs(counts[[0, 1, 3]] - 3000).max() < 4 * 45


def test_input_is_left_alone_and_seeds_decide():
    labels = np.arange(50) % 5
    before = labels.copy()
    first = flip_labels(labels, 0.4, n_classes=5, seed=1)
    assert np.array_equal(labels, before)
    assert np.array_equal(first, flip_labels(labels, 0.4, n_classes=5, seed=1))
    assert not np.array_equal(first, flip_labels(labels, 0.4, n_classes=5, seed=2))


def test_noise_grows_along_a_sweep():
    labels = np.arange(211) % 5
    low = flip_labels(labels, 0.1, n_classes=5, seed=1)
    high = flip_labels(labels, 0.3, n_classes=5, seed=1)
    flipped = low != labels
    assert np.array_equal(high[flipped], low[flipped])


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 60),
    n_classes=st.integers(2, 9),
    rate=st.floats(0, 1),
    kind=st.sampled_from(["symmetric", "asymmetric"]),
    seed=st.integers(0, 2**31),
)
def test_flip_count_holds_everywhere(n, n_classes, rate, kind, seed):
    labels = np.arange(n) % n_classes
    noisy = flip_labels(labels, rate, n_classes=n_classes, kind=kind, seed=seed)
    assert (noisy != labels).sum() == round(rate * n)
    assert ((noisy >= 0) & (noisy < n_classes)).all()


def test_long_tail_by_hand():
    # three classes of 100: 100 * 0.01 ** (c / 2) = 100, 10, 1
    labels = np.repeat([0, 1, 2], 100)
    kept = long_tail_rows(labels, 0.01, n_classes=3, seed=0)
    assert np.bincount(labels[kept]).tolist() == [100, 10, 1]
    assert (np.diff(kept) > 0).all()


def test_ratio_one_keeps_balanced_rows():
    labels = np.arange(35) % 5
    assert long_tail_rows(labels, 1.0, n_classes=5, seed=0).tolist() == list(range(35))


def test_every_class_keeps_a_row_and_no_more_than_it_has():
    labels = np.array([0] * 11 + [1] * 2 + [2] * 7)
    kept = long_tail_rows(labels, 0.001, n_classes=3, seed=0)
    # 11, 11 * 0.0316 = 0.35 -> 1, 0.011 -> 1
    assert np.bincount(labels[kept]).tolist() == [11, 1, 1]
    kept = long_tail_rows(labels, 1.0, n_classes=3, seed=0)
    assert np.bincount(labels[kept]).tolist() == [11, 2, 7]


def test_shorter_tails_are_nested_and_seeded():
    labels = np.arange(300) % 3
    long = set(long_tail_rows(labels, 0.1, n_classes=3, seed=4).tolist())
    longer = set(long_tail_rows(labels, 0.01, n_classes=3, seed=4).tolist())
    assert longer < long
    assert long != set(long_tail_rows(labels, 0.1, n_classes=3, seed=5).tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: flip_labels(y, 1.1, n_classes=3, seed=0), "rate must be at least 0"),
        (lambda y: flip_labels(y, float("nan"), n_classes=3, seed=0), "got rate=nan"),
        (lambda y: flip_labels(y, 0.1, n_classes=3, kind="odd", seed=0), "kind must be one of"),
        (lambda y: flip_labels(y, 0.1, n_classes=2, seed=0), r"labels must lie in \[0, 1\]"),
        (lambda y: flip_labels(y, 0.1, n_classes=1, seed=0), "n_classes must be an integer"),
        (lambda y: flip_labels(y[:0], 0.1, n_classes=3, seed=0), "labels must not be empty"),
        (lambda y: long_tail_rows(y, 0.0, n_classes=3, seed=0), "ratio must be above 0"),
        (lambda y: long_tail_rows(y, 0.5, n_classes=3, seed=-1), "seed must be an integer"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.array([0, 1, 2]))


@pytest.mark.parametrize(
    ("change", "limit", "beyond"),
    [
        (lambda v: flip_labels(LABELS, v, n_classes=3, seed=0), 1.0, 1.01),
        (lambda v: long_tail_rows(LABELS, v, n_classes=3, seed=0), 1.0, 1.01),
        (lambda v: colour_jitter(PIXELS, torch.Generator(), strength=v), 1.0, 1.01),
        (lambda v: random_rotation(PIXELS, torch.Generator(), degrees=v), 180.0, 180.1),
        (lambda v: cutout(PIXELS, torch.Generator(), size=v), 8, 9),
        (lambda v: random_crop(PIXELS, torch.Generator(), pad=v, mode="reflect"), 7, 8),
        (lambda v: tta_views(PIXELS, torch.Generator(), kind="shifts", n_views=v), 6, 7),
    ],
    ids=["noise", "tail", "jitter", "rotation", "cutout", "crop", "views"],
)
def test_the_upper_limit_is_taken_and_what_lies_beyond_is_not(change, limit, beyond):
    change(limit)
    with pytest.raises(ValueError, match="must"):
        change(beyond)
