"""Lines: which values stand where, and axes on which no single value hides the rest."""

import numpy as np
import pandas as pd
import pytest

from attnknn import figures as plot
from attnknn.figures import sweeps
from tests.figures.conftest import METHODS, assert_readable, interval_rows


def test_sweep_lines_are_sorted_scaled_and_named():
    table = interval_rows([50, 1, 10])
    ax = plot.sweep_lines(table, x="k", metric="accuracy", log_x=True, x_label="neighbours k")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("neighbours k", "accuracy (%)")
    assert [line.get_color() for line in ax.lines] == [plot.method_style(m).colour for m in METHODS]
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [1, 10, 50])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [50.1, 51, 55])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "10", "50"]
    assert {text.get_text() for text in ax.texts} == {plot.method_style(m).label for m in METHODS}
    edges = ax.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([edges.min(), edges.max()], [48.1, 57])
    assert_readable(ax.figure)


def test_names_at_line_ends_do_not_collide_when_all_lines_end_together():
    table = interval_rows([1, 5, 20])
    table[["mean", "low", "high"]] = [0.9, 0.89, 0.91]
    assert_readable(plot.sweep_panels(table, x="k", metrics=["accuracy", "nll"]))


def test_a_sweep_grid_has_a_row_a_sweep_and_one_axis_a_measure():
    names = ("symmetric,\nclean", "symmetric,\nnoisy", "asymmetric,\nclean")
    rows = [interval_rows([1, 5, 20]).assign(panel=name) for name in names]
    rows[2] = rows[2][(rows[2]["method"] != "cnn") & (rows[2]["k"] < 20)]
    rows[2] = rows[2].assign(mean=lambda t: t["mean"] + 0.3)
    figure = plot.sweep_grid(pd.concat(rows), x="k", metrics=["accuracy", "nll"])
    axes = np.array(figure.axes).reshape(3, 2)
    assert [ax.get_ylabel() for ax in axes[:, 0]] == list(names)
    assert [ax.get_title() for ax in axes[0]] == ["accuracy (%)", "NLL"]
    assert len({ax.get_ylim() for ax in axes[:, 1]}) == 1
    assert [ax.get_xlabel() for ax in axes[:, 0]] == ["", "", "k"]
    assert axes[2, 0].get_xticks().tolist() == [1, 5, 20]
    assert [len(ax.lines) for ax in axes[:, 1]] == [5, 5, 4]
    np.testing.assert_allclose(axes[2, 0].lines[0].get_ydata(), [80.1, 80.5])
    (legend,) = figure.legends
    named = {line.get_label() for line in axes[0, 0].lines}
    assert {text.get_text() for text in legend.get_texts()} == named
    assert_readable(figure)


def test_panels_of_very_different_ranges_have_axes_of_their_own():
    flat = interval_rows([1, 5]).assign(panel="flat")
    flat = flat.assign(mean=0.93 + flat["mean"] / 1000, low=0.92, high=0.94)
    steep = interval_rows([1, 5]).assign(panel="steep")
    figure = plot.sweep_grid(pd.concat([flat, steep]), x="k", metrics=["accuracy"])
    (low, high), wide = (ax.get_ylim() for ax in figure.axes)
    assert high - low < 3 and wide[1] - wide[0] > 20


def test_bands_and_axes_end_where_a_measure_does():
    table = interval_rows([1, 5, 20])
    table = table.assign(low=table["mean"] - 2, high=table["mean"] + 2)
    accuracy, nll = plot.sweep_panels(table, x="k", metrics=["accuracy", "nll"]).axes
    edges = accuracy.collections[0].get_paths()[0].vertices[:, 1]
    assert edges.min() == 0 and edges.max() == 100
    low, high = accuracy.get_ylim()
    assert -5 < low <= 0 and 100 <= high < 105
    assert nll.collections[0].get_paths()[0].vertices[:, 1].min() == 0 and nll.get_ylim()[0] > -0.5


def test_one_large_loss_does_not_flatten_the_others():
    table = interval_rows([1, 5, 20])
    table.loc[(table["method"] == "uniform") & (table["k"] == 20), ["mean", "high"]] = 9.0
    accuracy, nll = plot.sweep_panels(table, x="k", metrics=["accuracy", "nll"]).axes
    assert nll.get_yscale() == "log" and accuracy.get_yscale() == "linear"
    nll.figure.draw_without_rendering()
    shown = [label.get_text() for label in nll.get_yticklabels()]
    assert {"1", "5"} <= set(shown) and not any("10^" in text for text in shown)


def test_training_curves_draw_one_line_a_seed_and_skip_missing_epochs():
    epochs = np.arange(1, 8)
    columns = {"epoch": epochs, "train_loss": 1 / epochs, "val_accuracy": 0.5 + epochs / 20}
    history = pd.concat([pd.DataFrame(columns | {"seed": seed}) for seed in range(3)])
    history.loc[history["epoch"] % 2 == 0, "val_accuracy"] = np.nan  # judged every second epoch
    loss, accuracy = plot.training_curves(history).axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy (%)")
    assert len(loss.lines) == len(accuracy.lines) == 3
    np.testing.assert_allclose(accuracy.lines[0].get_xdata(), [1, 3, 5, 7])
    np.testing.assert_allclose(accuracy.lines[0].get_ydata(), [55, 65, 75, 85])
    assert_readable(loss.figure)
    assert len(plot.training_curves(history, panels={"rate": ["train_loss"]}).axes) == 1


def test_training_curves_of_one_epoch_and_of_nothing():
    one = pd.DataFrame({"epoch": [1], "train_loss": [0.5], "val_loss": [np.nan]})
    assert len(plot.training_curves(one).axes[0].lines) == 1
    with pytest.raises(ValueError, match="history must hold losses or accuracies"):
        plot.training_curves(pd.DataFrame({"epoch": [1], "rate": [0.1]}))


def test_costs_are_drawn_against_the_rows_of_the_memory():
    rows = [
        {"index": name, "rows": n, "metric": metric, "value": n * factor}
        for metric in ("build_seconds", "search_ms")
        for name, factor in (("HNSW", 0.001), ("Flat IP", 0.01))
        for n in (10_000, 1_000)
    ]
    table = pd.DataFrame(rows).assign(low=lambda t: t["value"], high=lambda t: t["value"])
    figure = sweeps.scaling_panels(table, metrics=["build_seconds", "search_ms"], real_rows=3_000)
    left, right = figure.axes
    assert left.get_xlabel() == "memory rows"
    assert [ax.get_ylabel() for ax in figure.axes] == ["build (s)", "search (ms a query)"]
    np.testing.assert_allclose(left.lines[0].get_xdata(), [1_000, 10_000])
    np.testing.assert_allclose(left.lines[0].get_ydata(), [1, 10])
    assert left.lines[0].get_color() == sweeps.INDEX_STYLES["HNSW"].colour
    assert left.lines[2].get_xdata() == [3_000, 3_000] and not left.texts
    assert {text.get_text() for text in right.texts} == {"HNSW", "Flat IP"}
    assert_readable(figure)


def test_stages_are_stacked_and_noise_below_zero_is_nothing():
    times = {"embedding": 1.0, "search": 0.5, "vote": 0.25, "attention": -0.1}
    rows = [
        {"batch": "one by one", "method": "attention", "stage": s, "value": v}
        for s, v in times.items()
    ]
    (ax,) = sweeps.stage_bars(pd.DataFrame(rows)).axes
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [
        (0, 1.0), (1.0, 0.5), (1.5, 0.25), (1.75, 0)
    ]  # fmt: skip
    assert ax.texts[0].get_text() == "1.75 ms" and ax.get_xlabel() == "ms a query"


def test_truncation_is_drawn_against_the_rows_kept_beside_one_over_k():
    masses = pd.DataFrame(
        {"temperature": [1.0, 1.0, 0.1, 0.1], "k": [1, 10, 1, 10], "seed": 0}
        | {"discarded mass": [0.9, 0.5, 0.4, 1e-9], "vote error": [0.8, 0.3, 0.2, 0.1]}
    )
    figure = sweeps.truncation_figure(masses)
    mass, error = figure.axes
    assert mass.get_ylabel() == "total variation" and mass.get_xlabel() == "rows kept, k"
    assert [ax.get_title().partition(",")[0] for ax in figure.axes] == [
        "discarded mass",
        "vote error",
    ]
    assert [line.get_label() for line in mass.lines] == ["τ = 1", "τ = 0.1", "1/k"]
    np.testing.assert_allclose(mass.lines[0].get_ydata(), [0.9, 0.5])
    np.testing.assert_allclose(mass.lines[1].get_ydata(), [0.4])  # nothing depends on 1e-9
    np.testing.assert_allclose(error.lines[1].get_ydata(), [0.2, 0.1])
    np.testing.assert_allclose(mass.lines[2].get_ydata(), [1, 0.1])
    assert_readable(figure)


def test_root_n_and_the_chosen_k_are_marked_on_their_line():
    rows = [
        {"queries": queries, "n": n, "k": k, "metric": "accuracy", "value": n / 1000 + k / 100}
        for queries in ("test", "held-out")
        for n in (100, 400)
        for k in (5, 10, 20)
    ]
    choice = pd.DataFrame({"n": [100, 400], "criterion": "accuracy", "root": [10, 20]})
    choice = choice.assign(chosen=[5, 10])
    figure = sweeps.root_n_figure(pd.DataFrame(rows), choice, metrics=["accuracy"])
    (ax,) = figure.axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("neighbours k", "accuracy (%) ↑")
    line, root, chosen = ax.lines[:3]
    np.testing.assert_allclose(line.get_ydata(), [15, 20, 30])
    assert (root.get_marker(), chosen.get_marker()) == ("D", "o")
    np.testing.assert_allclose(root.get_xydata(), [[10, 20]])
    np.testing.assert_allclose(chosen.get_xydata(), [[5, 15]])
    assert [text.get_text() for text in ax.texts] == ["n = 100", "n = 400"]
