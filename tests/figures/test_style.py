"""One look a method, in every figure; names beside lines do not collide."""

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from attnknn.figures.style import (
    METHOD_STYLES,
    VARIANT_STYLES,
    method_style,
    metric_label,
    metric_scale,
    spread,
)

# How the eye without red, or without green, cones sees linear RGB (Machado, Oliveira and
# Fernandes 2009, severity 1).
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
}  # fmt: skip


def seen_as(colour, kind):
    linear = np.array(to_rgb(colour)) ** 2.2
    return (np.array(BLINDNESS[kind]) @ linear).clip(0, 1) ** (1 / 2.2)


@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_of_methods_are_told_apart_without_red_or_green(kind):
    compared = ("uniform", "distance", "attention", "prototypes", "cnn", "linear")
    for one, other in combinations(compared, 2):
        colours = [seen_as(METHOD_STYLES[name].colour, kind) for name in (one, other)]
        markers = {METHOD_STYLES[name].marker for name in (one, other)}
        # Where two come close, and whatever the eye, the marker is another one.
        assert np.linalg.norm(colours[0] - colours[1]) > 0.12 and len(markers) == 2, (one, other)


def test_variants_share_the_hue_and_look_different():
    for word in VARIANT_STYLES:
        assert method_style(f"attention {word}").colour == METHOD_STYLES["attention"].colour
    looks = {repr(method_style(f"attention {word}").line) for word in VARIANT_STYLES}
    assert len(looks) >= len(VARIANT_STYLES) - 2  # "*", "tuned", "temperature" mean nearly the same


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("cnn", "CNN"),
        ("distance*", "distance*"),
        ("attention+tta", "attention + TTA"),
        ("attention_transfer", "attention, transfer"),
        ("attention + TTA + k-ensemble", "attention + TTA + k-ensemble"),
        ("attention no-trust", "attention no-trust"),
        ("gradient boosting", "gradient boosting"),
    ],
)
def test_display_names(name, label):
    assert method_style(name).label == label


def test_an_unknown_method_has_a_fixed_look_of_its_own():
    first = method_style("gradient boosting")
    assert first == method_style("gradient boosting")
    assert first.colour not in {METHOD_STYLES[name].colour for name in ("attention", "uniform")}


def test_measures_have_unit_direction_and_scale():
    assert metric_label("accuracy", arrow=True) == "accuracy (%) ↑"
    assert metric_label("nll", arrow=True) == "NLL ↓"
    assert metric_label("seconds_per_query") == "seconds per query"
    assert metric_scale("accuracy") == 100 and metric_scale("nll") == 1


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(0.01, 1))
def test_spread_keeps_order_and_gap(positions, gap):
    moved = np.array(spread(positions, gap))
    order = np.argsort(positions, kind="stable")
    assert (np.diff(moved[order]) >= gap - 1e-9).all()
    if (np.diff(np.sort(positions)) >= gap).all():
        np.testing.assert_allclose(moved, positions, atol=1e-12)  # nothing to move


def test_spread_by_hand():
    assert spread([1.0, 1.0], 0.5) == pytest.approx([0.75, 1.25])
    assert spread([0.0, 3.0, 0.1], 0.3) == pytest.approx([-0.1, 3.0, 0.2])


def test_style_does_not_need_or_import_ipython():
    code = (
        "import sys; from attnknn import figures; figures.use_style(); "
        "assert 'matplotlib_inline' not in sys.modules and 'IPython' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
