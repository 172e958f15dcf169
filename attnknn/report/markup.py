"""Tables to LaTeX and Markdown, with all text escaped."""

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from attnknn.report.display import MISSING, flattened, number_columns, styled

_LATEX_SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    }
)
# Signs our own tables use that pdfLaTeX does not know.
_LATEX_SIGNS = {
    "±": r"$\pm$",
    "∞": r"$\infty$",
    MISSING: "--",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "→": r"$\to$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "\N{MINUS SIGN}": "$-$",
    "√": r"$\surd$",
    "τ": r"$\tau$",
    "λ": r"$\lambda$",
    "\N{GREEK SMALL LETTER ALPHA}": r"$\alpha$",
}


def escape_latex(text: str) -> str:
    """Return ``text`` so that LaTeX prints it as it is."""
    return _latex_signs(text.translate(_LATEX_SPECIAL))


def escape_markdown(text: str) -> str:
    """Return ``text`` so that it stays one literal line of Markdown, also inside a table."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|$~])", r"\\\1", text)


def to_latex(
    frame: pd.DataFrame, *, caption: str = "", label: str = "", bold: pd.DataFrame | None = None
) -> str:
    """Return a LaTeX table for the package booktabs.

    Args:
        frame: The table; an unnamed numbering of its rows is left out.
        caption: Title, as plain text.
        label: Name for references.
        bold: Cells to set bold, of the same shape as ``frame``.
    """
    style = styled(frame, bold, escape="latex")
    text = style.to_latex(
        hrules=True,
        convert_css=True,
        caption=escape_latex(caption) or None,
        label=label or None,
        position="tb",
        position_float="centering",
        column_format="".join("r" if right else "l" for right in number_columns(style.data)),
    )
    return _latex_signs(text)


def to_markdown(frame: pd.DataFrame, *, caption: str = "", bold: pd.DataFrame | None = None) -> str:
    """Return a Markdown table (pipes), with the caption as a line above it.

    Args:
        frame: The table; an unnamed numbering of its rows is left out.
        caption: Title, as plain text.
        bold: Cells to set bold, of the same shape as ``frame``.
    """
    shown, marked = flattened(frame, bold)
    lines = [
        _row(escape_markdown(str(name)) for name in shown.columns),
        _row("--:" if right else ":--" for right in number_columns(shown)),
    ]
    for cells, marks in zip(shown.itertuples(index=False, name=None), marked, strict=True):
        texts = [escape_markdown(_cell_text(cell)) for cell in cells]
        pairs = zip(texts, marks, strict=True)
        lines.append(_row(f"**{text}**" if mark else text for text, mark in pairs))
    heading = f"{escape_markdown(caption)}\n\n" if caption else ""
    return heading + "\n".join(lines) + "\n"


def _latex_signs(text: str) -> str:
    for sign, command in _LATEX_SIGNS.items():
        text = text.replace(sign, command)
    return text


def _cell_text(cell: object) -> str:
    if isinstance(cell, float):
        return MISSING if np.isnan(cell) else f"{cell:.4f}"
    return MISSING if cell is None or cell is pd.NA else str(cell)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
