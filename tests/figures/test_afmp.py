"""Figures of AFMP: a line a setting, edges where they lie, crosses where nothing was measured."""

import numpy as np
import pandas as pd

from attnknn import figures as plot
from attnknn.afmp.graph import grid_scaffold


def test_panels_draw_one_line_a_setting():
    rows = [
        {"setting": name, "seed": seed, "epoch": epoch, "val_accuracy": 0.1 * epoch + 0.01 * seed}
        | {"loss": 1.0, "sparsity_loss": 1e-5, "cpu_seconds": 2.0}
        for name in ("dense", "keep 0.3")
        for seed in (0, 1)
        for epoch in (1, 2, 3)
    ]
    figure = plot.afmp_panels(pd.DataFrame(rows), ["keep 0.3", "dense"])
    first = figure.axes[0]
    assert [line.get_label() for line in first.lines] == ["keep 0.3", "dense"]
    np.testing.assert_allclose(first.lines[0].get_ydata(), [10.5, 20.5, 30.5])  # mean, per cent


def test_a_panel_may_call_a_setting_by_what_varies():
    rows = {"setting": "keep 0.3", "seed": 0, "epoch": [1, 2], "val_accuracy": 0.5, "loss": 1.0}
    history = pd.DataFrame(rows | {"sparsity_loss": 0.0, "cpu_seconds": 1.0})
    figure = plot.afmp_panels(history, {"keep 0.3": "λ 0.0001"})
    assert [line.get_label() for line in figure.axes[0].lines] == ["λ 0.0001"]


def test_gate_maps_leave_pruned_edges_out():
    scaffold = grid_scaffold(12, 12, 4)
    gates = np.zeros((2, scaffold.n_edges))
    gates[0, :5], gates[1, 3:6] = 0.4, 0.7
    figure = plot.gate_maps(
        np.zeros((2, 1, 12, 12), dtype=np.uint8),
        scaffold.points,
        np.stack([scaffold.sources, scaffold.targets]),
        {10: gates, 12: gates[::-1]},
        4,
    )
    drawn = [len(ax.collections[0].get_segments()) for ax in figure.axes[:4]]
    assert drawn == [5, 3, 3, 5]
    assert [ax.get_ylabel() for ax in figure.axes[:4]] == ["epoch 10", "", "epoch 12", ""]
    assert len({ax.collections[0].get_clim() for ax in figure.axes[:4]}) == 1
    centre = figure.axes[0].lines[0].get_xydata()[4]
    assert centre.tolist() == [5.5, 5.5]  # the middle of 12 pixels, numbered 0 to 11


def test_the_two_directions_of_a_gate_do_not_cover_each_other():
    points, pairs = np.array([[0.5, 0.5], [1.5, 0.5]]), np.array([[0, 1], [1, 0]])
    image = np.zeros((1, 1, 4, 8), dtype=np.uint8)
    figure = plot.gate_maps(image, points, pairs, {1: np.array([[0.4, 0.7]])}, 4)
    to_right, to_left = figure.axes[0].collections[0].get_segments()
    assert to_right[0][0] < to_right[1][0] and to_left[0][0] > to_left[1][0]
    assert (to_right[:, 1] < 1.5).all() and (to_left[:, 1] > 1.5).all()  # y runs downwards


def test_layers_show_the_last_epoch():
    rows = [
        {"setting": "keep 0.3", "seed": 0, "epoch": epoch, "layer": layer, "kept": 0.3}
        | {"closed": 0.1 * epoch}
        for epoch in (10, 12)
        for layer in (1, 2)
    ]
    figure = plot.gate_layers(pd.DataFrame(rows), ["keep 0.3"])
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), [120, 120])


def test_equal_layers_lie_side_by_side():
    rows = [
        {"setting": name, "seed": 0, "epoch": 1, "layer": 1, "kept": 0.3, "closed": 0.5}
        for name in ("keep 0.3", "top-down")
    ]
    one, two = plot.gate_layers(pd.DataFrame(rows), ["keep 0.3", "top-down"]).axes[0].lines
    assert one.get_xdata()[0] < 1 < two.get_xdata()[0] and one.get_marker() != two.get_marker()


def test_histograms_have_fifty_bins():
    gates = pd.DataFrame({"layer": [1, 1, 2], "gate": [0.1, 0.9, 0.5]})
    ax = plot.gate_histogram(gates)
    assert len(ax.patches) == 2 and ax.get_yscale() == "log"
    assert len(ax.patches[0].get_xy()) == 2 * 50 + 2


def measured(**columns):
    """Return two models at three sizes; the first ran out of memory at the largest."""
    rows = [
        {"model": model, "n_patches": n, "seconds": factor * n, "peak_mb": 1.0, "outcome": "ok"}
        for model, factor in (("AFMP-Small dense", 3.0), ("DeiT-Tiny", 1.5))
        for n in (16, 49, 196)
    ]
    table = pd.DataFrame(rows)
    table.loc[2, ["seconds", "peak_mb", "outcome"]] = [np.nan, np.nan, "out of memory"]
    return table.assign(**columns)


def test_scaling_is_drawn_against_patches_beside_its_ratio():
    times, memory, ratio = plot.scaling_panels(measured()).axes
    assert {ax.get_xlabel() for ax in (times, memory, ratio)} == {"patches"}
    lines = {line.get_label(): line for line in times.lines}
    np.testing.assert_allclose(lines["DeiT-Tiny"].get_xdata(), [16, 49, 196])
    np.testing.assert_allclose(lines["DeiT-Tiny"].get_ydata(), [24, 73.5, 294])
    [cross] = [line for line in times.lines if line.get_marker() == "x"]
    assert cross.get_xdata().tolist() == [196]
    ratios = {line.get_label(): line.get_ydata() for line in ratio.lines}
    assert set(ratios["DeiT-Tiny"]) == {1.0} and set(ratios["AFMP-Small dense"]) == {2.0}
    assert ratio.get_ylim()[0] == 0


def test_scaling_without_the_rival_and_by_another_clock():
    assert len(plot.scaling_panels(measured(), rival="none").axes) == 2
    busy = plot.scaling_panels(measured(cpu_seconds=7.0), clock="cpu_seconds").axes[0]
    assert set(busy.lines[-1].get_ydata()) == {7.0} and busy.get_ylabel().startswith("CPU seconds")
