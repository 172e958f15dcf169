"""Tables and figures to files."""

import re
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from attnknn.files import write_atomic, write_text
from attnknn.report.display import is_numbering
from attnknn.report.markup import to_latex, to_markdown


def safe_name(name: str) -> str:
    """Return ``name`` as a file name for every system: letters, digits, dot, dash, underscore."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")
    if not safe:
        raise ValueError(f"name must hold a letter or a digit, got {name=}")
    return safe


def save_table(
    frame: pd.DataFrame,
    folder: Path,
    name: str,
    *,
    caption: str = "",
    bold: pd.DataFrame | None = None,
) -> dict[str, Path]:
    """Write a table as CSV, LaTeX (booktabs) and Markdown.

    Args:
        frame: The table; an unnamed numbering of its rows is left out.
        folder: Where to; made when missing.
        name: File name without suffix, also the LaTeX label ``tab:name``.
        caption: Title of the table, as plain text.
        bold: Cells to set bold, of the same shape as ``frame``.

    Returns:
        The written paths by suffix: ``csv``, ``tex``, ``md``.
    """
    name = safe_name(name)
    texts = {
        "csv": frame.to_csv(index=not is_numbering(frame), lineterminator="\n"),
        "tex": to_latex(frame, caption=caption, label=f"tab:{name}", bold=bold),
        "md": to_markdown(frame, caption=caption, bold=bold),
    }
    return {kind: write_text(Path(folder) / f"{name}.{kind}", text) for kind, text in texts.items()}


def save_figure(figure: Figure, folder: Path, name: str, *, dpi: int = 300) -> dict[str, Path]:
    """Write a figure as SVG and PNG; the same figure gives the same bytes on any day.

    Args:
        figure: The figure.
        folder: Where to; made when missing.
        name: File name without suffix.
        dpi: Resolution of the PNG.

    Returns:
        The written paths by suffix: ``svg``, ``png``.
    """
    place = Path(folder) / safe_name(name)
    # Without a fixed salt the ids inside an SVG are random; without a date of None it is today's.
    undated = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    with rc_context({"svg.hashsalt": "attnknn", "svg.fonttype": "path"}):
        return {
            kind: write_atomic(
                place.with_name(f"{place.name}.{kind}"),
                lambda handle, kind=kind, metadata=metadata: figure.savefig(
                    handle, format=kind, dpi=dpi, metadata=metadata
                ),
            )
            for kind, metadata in undated.items()
        }
