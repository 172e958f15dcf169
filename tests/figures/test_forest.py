"""Rows of dots: what stands at which height, what is filled, what lies beyond the edge."""

import numpy as np
import pandas as pd
import pytest

from attnknn import figures as plot
from attnknn.figures.forest import forest_limit
from tests.figures.conftest import METHODS, assert_readable, interval_rows


def dots_of(ax):
    return [line for line in ax.lines if len(line.get_xdata()) == 1]


def names_of(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def test_method_dots_draw_means_and_intervals_in_the_order_of_the_table():
    figure = plot.method_dots(interval_rows(), ["accuracy", "nll"])
    accuracy, nll = figure.axes
    assert [dot.get_xdata()[0] for dot in dots_of(accuracy)] == pytest.approx([50, 57, 64, 71, 78])
    assert [dot.get_ydata()[0] for dot in dots_of(accuracy)] == [0, 1, 2, 3, 4]
    bars = [line.get_xdata() for line in nll.lines if len(line.get_xdata()) == 2]
    np.testing.assert_allclose(bars[0], [0.48, 0.52])
    assert names_of(accuracy) == [plot.method_style(name).label for name in METHODS]
    assert accuracy.yaxis_inverted()  # the first one on top
    assert [ax.get_xlabel() for ax in figure.axes] == ["accuracy (%) ↑", "NLL ↓"]
    assert_readable(figure)


def test_a_single_seed_has_dots_without_bars_and_infinity_is_left_out():
    table = interval_rows().assign(low=np.nan, high=np.nan)
    table.loc[(table["method"] == "uniform") & (table["metric"] == "nll"), "mean"] = np.inf
    accuracy, nll = plot.method_dots(table, ["accuracy", "nll"]).axes
    assert len(accuracy.lines) == len(METHODS)
    assert len(nll.lines) == len(METHODS) - 1


def test_intervals_end_where_the_measure_does():
    table = interval_rows().assign(low=-2.0, high=2.0)
    (ax,) = plot.method_dots(table, ["accuracy"]).axes
    assert ax.lines[0].get_xdata().tolist() == [0, 100]


def differences(values, **columns):
    rows = {"method": METHODS[: len(values)], "baseline": "distance*", "metric": "nll"}
    table = pd.DataFrame({**rows, "difference": values, "verdict": "worse"})
    table = table.assign(low=table["difference"] - 0.01, high=table["difference"] + 0.01)
    return table.assign(**columns)


def test_a_forest_fills_only_what_holds_after_correction():
    verdicts = ["better", "no difference at this size"]
    figure = plot.forest(differences([-0.2, 0.1], verdict=verdicts))
    (ax,) = figure.axes
    first, second = dots_of(ax)
    assert first.get_markerfacecolor() == plot.method_style("uniform").colour
    assert second.get_markerfacecolor() == "white"
    assert [dot.get_xdata()[0] for dot in (first, second)] == [-0.2, 0.1]
    assert [dot.get_ydata()[0] for dot in (first, second)] == [0, 1]
    assert names_of(ax) == ["uniform", "distance*"]
    left, right = ax.get_xlim()
    assert left == -right and right > 0.21
    assert_readable(figure)


@pytest.mark.parametrize(("metric", "side"), [("nll", -1), ("accuracy", 1)])
def test_the_better_side_is_shaded(metric, side):
    (ax,) = plot.forest(differences([-0.2, 0.05], metric=metric)).axes
    shade = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    assert np.sign(round(shade.x0 + shade.x1, 6)) == side


def test_what_lies_far_beyond_is_an_arrow_with_its_value():
    figure = plot.forest(differences([0.02, -0.03, 0.01, 2.0]))
    (ax,) = figure.axes
    # 80 % of four rows are the inner three, the furthest of which reaches to 0.04.
    assert ax.get_xlim() == pytest.approx((-0.06, 0.06))
    assert [dot.get_marker() for dot in dots_of(ax)] == ["o", "o", "o", ">"]
    assert 0.05 < dots_of(ax)[-1].get_xdata()[0] < 0.06
    assert [text.get_text() for text in ax.texts] == ["+2.0"]
    assert_readable(figure)


def test_nothing_is_cut_that_fits():
    (ax,) = plot.forest(differences([0.02, -0.03, 0.01, 0.1])).axes
    assert ax.get_xlim() == pytest.approx((-1.15 * 0.11, 1.15 * 0.11)) and not ax.texts


def test_the_range_of_a_forest_shows_the_intervals_of_its_dots():
    # The furthest dot that is shown, 0.05, reaches to 0.08, and the inner rows to 0.04.
    values = np.array([[0.03, 0.02, 0.04]] * 5 + [[0.05, 0.02, 0.08], [1.0, 0.9, 1.1]])
    assert forest_limit(values) == pytest.approx(1.05 * 0.08)
    assert forest_limit(np.zeros((2, 3))) == 1


def test_ablations_stand_below_the_title_of_their_group():
    rows = [("on", "trust", 0.3), ("off", "trust", -0.1), ("off", "prior", 0.2)]
    table = pd.DataFrame(rows, columns=["group", "part", "difference"])
    table = table.assign(metric="nll", verdict="worse", low=-0.2, high=0.4)
    figure = plot.ablation_forest(table, metrics=["nll"])
    (ax,) = figure.axes
    names = names_of(ax)
    assert names[1:3] == ["trust", "prior"] and names[4] == "trust" and len(names) == 5
    bold = [label.get_fontweight() == "bold" for label in ax.get_yticklabels()]
    assert bold == [True, False, False, True, False]
    found = {(dot.get_ydata()[0], dot.get_xdata()[0]) for dot in dots_of(ax)}
    assert found == {(4, 0.3), (1, -0.1), (2, 0.2)}
    assert_readable(figure)


def test_costs_of_faults_say_what_is_infinite_or_undefined():
    values = [0.1, np.inf, -np.inf, np.nan]
    table = pd.DataFrame({"fault": list("abcd"), "metric": "nll", "difference": values})
    table = table.assign(low=table["difference"], high=table["difference"], effect="worse")
    table = table.assign(misleads=[False, False, True, True])
    table.loc[0, "effect"] = "no difference at this size"
    figure = plot.cost_forest(table)
    (ax,) = figure.axes
    assert [dot.get_marker() for dot in dots_of(ax)] == ["o", ">", "<", "x"]
    assert [dot.get_ydata()[0] for dot in dots_of(ax)] == [0, 1, 2, 3]
    assert [text.get_text() for text in ax.texts] == ["+∞", "\N{MINUS SIGN}∞", "undefined"]
    assert dots_of(ax)[0].get_markerfacecolor() == "white"
    harm, mislead = (line.get_color() for line in figure.legends[0].get_lines())
    assert [dot.get_color() for dot in dots_of(ax)] == [harm, harm, mislead, mislead]
    assert names_of(ax) == list("abcd")
    assert_readable(figure)
