"""Reports: tidy results to printed tables, figures and ``report.json``.

Every file appears whole or not at all, and the same input gives the same bytes. Names of classes
and methods are text, never markup: they are escaped in LaTeX, Markdown, HTML and file names.
"""

from attnknn.provenance import provenance, read_report, save_report
from attnknn.report.display import (
    DisplayTable,
    main_table_style,
    pivot_mean_interval,
    sweep_table,
)
from attnknn.report.markup import to_latex, to_markdown
from attnknn.report.save import safe_name, save_figure, save_table

__all__ = [
    "DisplayTable",
    "main_table_style",
    "pivot_mean_interval",
    "provenance",
    "read_report",
    "safe_name",
    "save_figure",
    "save_report",
    "save_table",
    "sweep_table",
    "to_latex",
    "to_markdown",
]
