"""Figures: tidy tables to Axes and Figures, all in one style.

Functions draw and compute nothing. Call ``use_style`` once; every method keeps one colour and
marker in all figures (``METHOD_STYLES``).
"""

from attnknn.figures.afmp import (
    afmp_panels,
    gate_histogram,
    gate_layers,
    gate_maps,
    scaling_panels,
)
from attnknn.figures.calibration import confusion, reliability_diagram, risk_coverage_curves
from attnknn.figures.forest import ablation_forest, cost_forest, forest, method_dots
from attnknn.figures.neighbours import explanation
from attnknn.figures.style import (
    COLUMN_WIDTH,
    FULL_WIDTH,
    METHOD_STYLES,
    method_style,
    metric_label,
    use_style,
)
from attnknn.figures.sweeps import sweep_grid, sweep_lines, sweep_panels, training_curves

__all__ = [
    "COLUMN_WIDTH",
    "FULL_WIDTH",
    "METHOD_STYLES",
    "ablation_forest",
    "afmp_panels",
    "confusion",
    "cost_forest",
    "explanation",
    "forest",
    "gate_histogram",
    "gate_layers",
    "gate_maps",
    "method_dots",
    "method_style",
    "metric_label",
    "reliability_diagram",
    "risk_coverage_curves",
    "scaling_panels",
    "sweep_grid",
    "sweep_lines",
    "sweep_panels",
    "training_curves",
    "use_style",
]
