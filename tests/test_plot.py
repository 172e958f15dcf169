"""Figures: what is drawn is what the table says; text is readable and does not collide."""

import subprocess
import sys
from itertools import combinations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Annotation, Text

from attnknn import figures as plot
from attnknn.evaluate import measure
from attnknn.figures.forest import forest_limit
from attnknn.figures.style import METHOD_STYLES, VARIANT_STYLES, metric_label, spread

METHODS = ("uniform", "distance*", "attention", "attention + TTA", "cnn")


@pytest.fixture(autouse=True)
def style_and_cleanup():
    with matplotlib.rc_context():
        plot.use_style()
        yield
    plt.close("all")


def interval_rows(**sweep):
    rows = []
    for place, method in enumerate(METHODS):
        for metric in ("accuracy", "nll"):
            for x in sweep.get("k", [None]):
                mean = 0.5 + 0.07 * place + 0.001 * (x or 0)
                row = {"method": method, "metric": metric, "mean": mean}
                row |= {"low": mean - 0.02, "high": mean + 0.02, "n": 3}
                rows.append(row | ({"k": x} if x else {}))
    return pd.DataFrame(rows)


def random_probs(seed=0, n_rows=211, n_classes=5):
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=n_rows)
    probs = rng.dirichlet(np.full(n_classes, 0.5), size=n_rows)
    return probs, labels


def visible_texts(figure):
    figure.draw_without_rendering()
    beyond = {tick_label for ax in figure.axes for tick_label in ticks_beyond(ax)}
    texts = figure.findobj(Text)
    return [t for t in texts if t.get_visible() and t.get_text().strip() and t not in beyond]


def ticks_beyond(ax):
    """Labels of ticks outside the limits, which matplotlib keeps but does not draw."""
    for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)


def assert_readable(figure):
    """No text below 7 points, none outside the page, no two annotations on each other."""
    texts = visible_texts(figure)
    page = figure.bbox.padded(2)
    for text in texts:
        assert text.get_fontsize() >= 7, text
        box = text.get_window_extent()
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert inside, text
    named = [Text.get_window_extent(text) for text in texts if isinstance(text, Annotation)]
    for one, other in combinations(named, 2):
        assert not one.padded(-1).overlaps(other.padded(-1))


def test_every_method_has_one_look_and_variants_share_the_hue():
    looks = {
        (s.colour, s.marker) for s in METHOD_STYLES.values() if s.label not in ("AFMP", "DeiT")
    }
    assert len(looks) == len(METHOD_STYLES) - 2
    attention = plot.method_style("attention")
    for name in ("attention*", "attention + TTA", "attention_tta", "attention, transfer"):
        variant = plot.method_style(name)
        assert variant.colour == attention.colour
        assert variant != attention


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("uniform", "uniform"),
        ("cnn", "CNN"),
        ("distance*", "distance*"),
        ("attention+tta", "attention + TTA"),
        ("attention + k-ensemble", "attention + k-ensemble"),
        ("attention + adaptive k", "attention + adaptive k"),
        ("attention, transfer", "attention, transfer"),
        ("attention + TTA + k-ensemble", "attention + TTA + k-ensemble"),
        ("attention no-trust", "attention no-trust"),
    ],
)
def test_display_names(name, label):
    assert plot.method_style(name).label == label


def test_unknown_methods_get_a_fixed_look_of_their_own():
    first = plot.method_style("gradient boosting")
    assert first == plot.method_style("gradient boosting")
    assert first.label == "gradient boosting"
    assert first.colour not in {style.colour for style in METHOD_STYLES.values()} - {"#D55E00"}


def test_variants_can_be_told_apart():
    looks = {plot.method_style(f"attention {word}").line.__repr__() for word in VARIANT_STYLES}
    assert len(looks) >= len(VARIANT_STYLES) - 2  # "*", "tuned", "temperature" mean nearly the same


def test_metric_labels_have_unit_and_direction():
    assert metric_label("accuracy", arrow=True) == "accuracy (%) ↑"
    assert metric_label("nll", arrow=True) == "NLL ↓"
    assert metric_label("seconds_per_query") == "seconds per query"


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    st.floats(0.01, 1),
)
def test_spread_keeps_order_and_gap(positions, gap):
    moved = np.array(spread(positions, gap))
    order = np.argsort(positions, kind="stable")
    assert (np.diff(moved[order]) >= gap - 1e-9).all()
    if (np.diff(np.sort(positions)) >= gap).all():
        np.testing.assert_allclose(moved, positions, atol=1e-12)  # nothing to move


def test_spread_by_hand():
    assert spread([1.0, 1.0], 0.5) == pytest.approx([0.75, 1.25])
    assert spread([0.0, 3.0, 0.1], 0.3) == pytest.approx([-0.1, 3.0, 0.2])


def test_method_dots_draws_the_means_and_intervals():
    figure = plot.method_dots(interval_rows(), ["accuracy", "nll"])
    accuracy, nll = figure.axes
    dots = [line for line in accuracy.lines if len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in dots] == pytest.approx([50, 57, 64, 71, 78])
    bars = [line.get_xdata() for line in nll.lines if len(line.get_xdata()) == 2]
    np.testing.assert_allclose(bars[0], [0.48, 0.52])
    shown = [label.get_text() for label in accuracy.get_yticklabels()]
    assert shown == [plot.method_style(name).label for name in METHODS]
    assert accuracy.yaxis_inverted()
    assert_readable(figure)


def test_a_single_seed_has_dots_without_bars_and_infinity_is_left_out():
    table = interval_rows().assign(low=np.nan, high=np.nan)
    table.loc[(table["method"] == "uniform") & (table["metric"] == "nll"), "mean"] = np.inf
    accuracy, nll = plot.method_dots(table, ["accuracy", "nll"]).axes
    assert len(accuracy.lines) == len(METHODS)
    assert len(nll.lines) == len(METHODS) - 1


def test_sweep_lines_are_sorted_scaled_and_named():
    table = interval_rows(k=[50, 1, 10])
    ax = plot.sweep_lines(table, x="k", metric="accuracy", log_x=True, x_label="neighbours k")
    assert len(ax.lines) == len(METHODS)
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [1, 10, 50])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [50.1, 51, 55])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "10", "50"]
    names = {text.get_text() for text in ax.texts}
    assert names == {plot.method_style(name).label for name in METHODS}
    assert len(ax.collections) == len(METHODS)  # one band each
    assert_readable(ax.figure)


def test_names_at_line_ends_do_not_collide_when_all_lines_end_together():
    table = interval_rows(k=[1, 5, 20])
    table[["mean", "low", "high"]] = [0.9, 0.89, 0.91]
    ax = plot.sweep_lines(table, x="k", metric="accuracy")
    assert_readable(ax.figure)
    assert_readable(plot.sweep_panels(table, x="k", metrics=["accuracy", "nll"]))


def test_a_sweep_grid_has_a_row_a_sweep_and_one_axis_a_measure():
    names = (
        "symmetric,\nheld-out clean",
        "symmetric,\nheld-out noisy",
        "asymmetric,\nheld-out clean",
    )
    rows = [interval_rows(k=[1, 5, 20]).assign(panel=name) for name in names]
    rows[2] = rows[2][(rows[2]["method"] != "cnn") & (rows[2]["k"] < 20)]
    rows[2] = rows[2].assign(mean=lambda t: t["mean"] + 0.3)
    figure = plot.sweep_grid(pd.concat(rows), x="k", metrics=["accuracy", "nll"])
    axes = np.array(figure.axes).reshape(3, 2)
    assert [ax.get_ylabel() for ax in axes[:, 0]] == list(names)
    assert [ax.get_title() for ax in axes[0]] == ["accuracy (%)", "NLL"]
    assert len({ax.get_ylim() for ax in axes[:, 1]}) == 1
    figure.draw_without_rendering()
    assert all(any(tick.get_visible() for tick in ax.get_yticklabels()) for ax in axes.flat)
    assert [bool(ax.get_xlabel()) for ax in axes[:, 0]] == [False, False, True]
    assert axes[2, 0].get_xticks().tolist() == [1, 5, 20]
    drawn = {tuple(line.get_ydata()) for line in axes[2, 1].lines}
    assert len(drawn) == len(METHODS) - 1
    colours = [{line.get_label(): line.get_color() for line in ax.lines} for ax in axes[:, 0]]
    assert colours[0] == colours[1]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(colours[0])
    assert_readable(figure)


def test_training_curves_draw_one_line_a_seed_and_skip_missing_epochs():
    epochs = np.arange(1, 8)
    runs = [
        pd.DataFrame(
            {
                "seed": s,
                "epoch": epochs,
                "train_loss": 1 / epochs,
                "val_accuracy": 0.5 + epochs / 20,
            }
        )
        for s in range(3)
    ]
    history = pd.concat(runs)
    history.loc[history["epoch"] % 2 == 0, "val_accuracy"] = np.nan  # judged every second epoch
    loss, accuracy = plot.training_curves(history).axes
    assert len(loss.lines) == len(accuracy.lines) == 3
    np.testing.assert_allclose(accuracy.lines[0].get_xdata(), [1, 3, 5, 7])
    np.testing.assert_allclose(accuracy.lines[0].get_ydata(), [55, 65, 75, 85])
    assert_readable(loss.figure)
    chosen = plot.training_curves(history, panels={"rate": ["train_loss"]})
    assert len(chosen.axes) == 1


def test_training_curves_of_one_epoch_and_of_nothing():
    one = pd.DataFrame({"epoch": [1], "train_loss": [0.5], "val_loss": [np.nan]})
    assert len(plot.training_curves(one).axes[0].lines) == 1
    with pytest.raises(ValueError, match="history must hold losses or accuracies"):
        plot.training_curves(pd.DataFrame({"epoch": [1], "rate": [0.1]}))


def test_reliability_diagram_shows_table_and_histogram():
    probs, labels = random_probs()
    table = measure.reliability_table(probs, labels, n_bins=10)
    figure = plot.reliability_diagram(
        {"attention": table, "uniform": table}, notes={"uniform": "ECE 0.1"}
    )
    assert len(figure.axes) == 4
    heights = [bar.get_height() for bar in figure.axes[0].containers[0]]
    np.testing.assert_allclose(heights, table["accuracy"].dropna())
    counts = [bar.get_height() for bar in figure.axes[2].containers[0]]
    np.testing.assert_allclose(counts, table["count"])
    assert figure.axes[1].get_title() == "uniform\nECE 0.1"
    assert_readable(figure)


def test_risk_coverage_is_thinned_but_keeps_its_ends():
    probs, labels = random_probs(n_rows=5003)
    curve = measure.risk_coverage(probs, labels)
    ax = plot.risk_coverage_curves({"attention": curve, "uniform": curve}, max_points=50)
    drawn = ax.lines[0]
    assert len(drawn.get_xdata()) == 50
    assert drawn.get_xdata()[-1] == 1
    assert drawn.get_ydata()[-1] == pytest.approx(100 * curve["risk"].iloc[-1])
    assert_readable(ax.figure)


def test_confusion_writes_counts_and_names():
    counts = np.array([[50, 1, 0], [2, 30, 0], [0, 0, 0]])  # the last class has no rows
    ax = plot.confusion(counts, ["a_b", "c%d", "$e$"])
    assert sorted(text.get_text() for text in ax.texts) == ["1", "2", "30", "50"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a_b", "c%d", "$e$"]
    assert_readable(ax.figure)
    assert not any(label.get_parse_math() for label in ax.get_yticklabels())
    many = plot.confusion(np.ones((43, 43), dtype=int))
    assert not many.texts


def test_forest_fills_only_what_holds_after_correction():
    table = pd.DataFrame(
        {
            "method": ["attention", "uniform"],
            "baseline": "distance*",
            "metric": "nll",
            "difference": [-0.2, 0.05],
            "low": [-0.3, -0.1],
            "high": [-0.1, 0.2],
            "verdict": ["better", "no difference at this size"],
        }
    )
    figure = plot.forest(table)
    dots = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert [dot.get_markerfacecolor() for dot in dots] == ["#0072B2", "white"]
    assert [dot.get_xdata()[0] for dot in dots] == [-0.2, 0.05]
    left, right = figure.axes[0].get_xlim()
    assert left == -right and right > 0.3
    assert_readable(figure)


def differences(values):
    rows = {"method": METHODS[: len(values)], "baseline": "distance*", "metric": "nll"}
    table = pd.DataFrame({**rows, "difference": values, "verdict": "worse"})
    return table.assign(low=table["difference"] - 0.01, high=table["difference"] + 0.01)


def test_forest_marks_what_lies_far_beyond_by_an_arrow_with_its_value():
    figure = plot.forest(differences([0.02, -0.03, 0.01, 2.0]))
    (ax,) = figure.axes
    # 80 % of four rows are the inner three, the furthest of which reaches to 0.04.
    assert ax.get_xlim() == pytest.approx((-0.06, 0.06))
    dots = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert [dot.get_marker() for dot in dots] == ["o", "o", "o", ">"]
    assert 0.05 < dots[-1].get_xdata()[0] < 0.06
    assert [text.get_text() for text in ax.texts] == ["+2.0"]
    assert_readable(figure)


def test_forest_cuts_nothing_that_fits():
    (ax,) = plot.forest(differences([0.02, -0.03, 0.01, 0.1])).axes
    assert ax.get_xlim() == pytest.approx((-1.15 * 0.11, 1.15 * 0.11)) and not ax.texts


def test_the_range_of_a_forest_shows_the_intervals_of_its_dots():
    # The furthest dot that is shown, 0.05, reaches to 0.08, and the inner rows to 0.04.
    values = np.array([[0.03, 0.02, 0.04]] * 5 + [[0.05, 0.02, 0.08], [1.0, 0.9, 1.1]])
    assert forest_limit(values) == pytest.approx(1.05 * 0.08)
    assert forest_limit(np.zeros((2, 3))) == 1


def test_bands_and_axes_end_where_a_measure_does():
    table = interval_rows(k=[1, 5, 20])
    table = table.assign(low=table["mean"] - 2, high=table["mean"] + 2)
    accuracy, nll = plot.sweep_panels(table, x="k", metrics=["accuracy", "nll"]).axes
    edges = accuracy.collections[0].get_paths()[0].vertices[:, 1]
    assert edges.min() == 0 and edges.max() == 100
    low, high = accuracy.get_ylim()
    assert -5 < low <= 0 and 100 <= high < 105
    assert nll.collections[0].get_paths()[0].vertices[:, 1].min() == 0 and nll.get_ylim()[0] > -0.5
    dots = plot.method_dots(table[table["k"] == 1], ["accuracy"]).axes[0]
    assert dots.lines[0].get_xdata().tolist() == [0, 100]


def test_groups_in_per_cent_end_at_a_hundred():
    title = "few-shot accuracy (%)"
    table = interval_rows(k=[1, 5]).query("metric == 'nll'").assign(metric=title, mean=99.0)
    table = table.assign(low=97.0, high=101.0)
    ax = plot.sweep_lines(table, x="k", metric=title)
    assert ax.collections[0].get_paths()[0].vertices[:, 1].max() == 100
    assert ax.get_ylim()[1] < 100.2


def test_one_large_loss_does_not_flatten_the_others():
    table = interval_rows(k=[1, 5, 20])
    table.loc[(table["method"] == "uniform") & (table["k"] == 20), ["mean", "high"]] = 9.0
    accuracy, nll = plot.sweep_panels(table, x="k", metrics=["accuracy", "nll"]).axes
    assert nll.get_yscale() == "log" and accuracy.get_yscale() == "linear"
    nll.figure.draw_without_rendering()
    shown = [label.get_text() for label in nll.get_yticklabels()]
    assert {"1", "5"} <= set(shown) and not any("10^" in text for text in shown)


def test_panels_of_very_different_ranges_have_axes_of_their_own():
    flat = interval_rows(k=[1, 5]).assign(panel="flat")
    flat = flat.assign(mean=0.93 + flat["mean"] / 1000, low=0.92, high=0.94)
    steep = interval_rows(k=[1, 5]).assign(panel="steep")
    figure = plot.sweep_grid(pd.concat([flat, steep]), x="k", metrics=["accuracy"])
    (low, high), wide = (ax.get_ylim() for ax in figure.axes)
    assert high - low < 3 and wide[1] - wide[0] > 20


def test_neighbour_strip_shows_the_heaviest_first():
    rng = np.random.default_rng(0)
    weights = np.array([0.1, 0.6, 0.05, 0.25])
    figure = plot.neighbour_strip(
        rng.uniform(size=(8, 8)),
        rng.uniform(size=(4, 8, 8)),
        weights,
        np.array([0, 1, 0, 1]),
        trust=np.array([0.9, 0.2, 1.0, 0.5]),
        class_names=["cat", "dog"],
        predicted=1,
        n_shown=3,
    )
    titles = [ax.get_title() for ax in figure.axes[:4]]
    assert titles == ["query", "dog", "dog", "cat"]
    colours = [ax.title.get_color() for ax in figure.axes[1:4]]
    assert colours[0] == colours[1] != colours[2]
    assert [text.get_text() for text in figure.axes[5].texts] == ["0.60", "0.20"]
    assert_readable(figure)


def test_neighbour_strip_takes_colour_bytes_without_trust():
    images = np.random.default_rng(0).integers(256, size=(3, 32, 32, 3)).astype(np.uint8)
    figure = plot.neighbour_strip(images[0], images[1:], np.array([0.5, 0.5]), np.array([0, 1]))
    assert_readable(figure)


def test_neighbour_bars():
    ax = plot.neighbour_bars(
        np.array([0.2, 0.7, 0.1]),
        np.array([0, 1, 1]),
        trust=np.array([1.0, 0.5, 0.0]),
        row_names=["r0", "r1", "r2"],
        class_names=["no", "yes"],
        predicted=1,
    )
    assert [bar.get_width() for bar in ax.patches] == [0.7, 0.2, 0.1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["r1: yes", "r0: no", "r2: yes"]
    assert_readable(ax.figure)


def test_style_does_not_need_or_import_ipython():
    code = (
        "import sys; from attnknn import figures; figures.use_style(); "
        "import matplotlib; assert matplotlib.rcParams['svg.fonttype'] == 'path'; "
        "assert 'matplotlib_inline' not in sys.modules and 'IPython' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
