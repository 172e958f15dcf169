"""What probabilities are worth: every bar, line and number where its name says it is."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from attnknn import figures as plot
from attnknn.evaluate import measure
from attnknn.figures.style import ALARM
from tests.figures.conftest import assert_readable


def bins(confidence=0.9, accuracy=0.7):
    """Return two filled bins and an empty one; the first holds few rows, and is overconfident."""
    return pd.DataFrame(
        {
            "low": [0.0, 0.4, 0.8],
            "high": [0.4, 0.8, 1.0],
            "count": [3, 0, 50],
            "confidence": [0.3, np.nan, confidence],
            "accuracy": [0.1, np.nan, accuracy],
        }
    )


def test_a_reliability_diagram_draws_accuracy_gaps_and_rows():
    figure = plot.reliability_diagram(
        {"attention": bins(), "uniform": bins(0.85, 0.95)}, notes={"uniform": "ECE 0.1"}
    )
    first, second, rows, _ = figure.axes
    titles = [ax.get_title() for ax in (first, second)]
    assert titles == ["attention", "uniform\nECE 0.1"]
    assert first.get_ylabel() == "accuracy"
    assert rows.get_ylabel() == "rows" and rows.get_xlabel() == "confidence"
    bars, gaps = first.containers
    assert [bar.get_height() for bar in bars] == [0.1, 0.7]
    places = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
    np.testing.assert_allclose(places, [(0.0, 0.4), (0.8, 1.0)], atol=1e-12)
    assert bars[0].get_alpha() < bars[1].get_alpha()  # few rows are pale
    # Overconfident: the gap stands on the bar and ends at the confidence.
    edges = [(gap.get_y(), gap.get_y() + gap.get_height()) for gap in gaps]
    np.testing.assert_allclose(edges, [(0.1, 0.3), (0.7, 0.9)])
    assert gaps[0].get_edgecolor() == to_rgba(ALARM)
    under = second.containers[1][1]  # underconfident: it hangs from the top of the bar
    np.testing.assert_allclose([under.get_y(), under.get_height()], [0.95, -0.1])
    assert [bar.get_height() for bar in rows.containers[0]] == [3, 0, 50]
    assert_readable(figure)


def test_each_reliability_panel_has_the_colour_of_its_method():
    figure = plot.reliability_diagram({"attention": bins(), "uniform": bins()})
    for ax, name in zip(figure.axes[:2], ("attention", "uniform"), strict=True):
        face = ax.containers[0][1].get_facecolor()[:3]
        assert face == to_rgba(plot.method_style(name).colour)[:3]


def test_risk_is_drawn_against_coverage_thinned_to_its_ends():
    labels = np.arange(500) % 3
    probs = np.random.default_rng(0).dirichlet(np.ones(3), size=500)
    curve = measure.risk_coverage(probs, labels)
    ax = plot.risk_coverage_curves({"attention": curve, "uniform": curve}, max_points=50)
    (line, _), ends = ax.lines, curve.iloc[[0, -1]]
    assert len(line.get_xdata()) == 50 and line.get_label() == "attention"
    np.testing.assert_allclose(line.get_xdata()[[0, -1]], ends["coverage"])
    np.testing.assert_allclose(line.get_ydata()[[0, -1]], 100 * ends["risk"])
    assert "answered" in ax.get_xlabel() and "errors" in ax.get_ylabel()
    assert ax.get_xlim() == (0, 1) and ax.get_ylim()[0] == 0
    assert_readable(ax.figure)


def test_a_confusion_matrix_has_labels_down_and_predictions_across():
    counts = np.array([[50, 1, 0], [2, 30, 7], [0, 0, 0]])  # the last class has no rows
    ax = plot.confusion(counts, ["a_b", "c%d", "$e$"])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("predicted", "label")
    written = {text.get_position(): text.get_text() for text in ax.texts}  # (column, row)
    assert written == {(0, 0): "50", (1, 0): "1", (0, 1): "2", (1, 1): "30", (2, 1): "7"}
    shares = np.asarray(ax.images[0].get_array()) ** 2  # of a label's rows
    np.testing.assert_allclose(shares, [[50 / 51, 1 / 51, 0], [2 / 39, 30 / 39, 7 / 39], [0] * 3])
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [label.get_text() for label in labels] == ["a_b", "c%d", "$e$"]
        assert not any(label.get_parse_math() for label in labels)
    assert ax.images[0].origin == "upper"
    assert_readable(ax.figure)


@pytest.mark.parametrize("n_classes", [13, 43])
def test_many_classes_have_no_numbers(n_classes):
    assert not plot.confusion(np.ones((n_classes, n_classes), dtype=int)).texts
