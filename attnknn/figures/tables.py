"""Tables and figures to files."""

import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool
from matplotlib import rc_context
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from attnknn.config import METHOD_NAMES
from attnknn.evaluate.compare import interval_table
from attnknn.evaluate.measure import HIGHER_IS_BETTER, METRIC_NAMES
from attnknn.files import write_atomic, write_text

# ---- Tidy results to tables for the eye: "92.55 ± 0.12", bold where a paired test supports it.

MISSING = "\N{EN DASH}"
# Measures in HIGHER_IS_BETTER are shares and shown in per cent.
_PERCENT_DECIMALS, _OTHER_DECIMALS = 2, 4
_DECIMALS = {"nll": 3, "brier": 3}


class DisplayTable(NamedTuple):
    """A table ready to print: its cells as text, and which of them are bold."""

    text: pd.DataFrame
    bold: pd.DataFrame


def pivot_mean_interval(
    tidy: pd.DataFrame,
    *,
    index: str | Sequence[str] = "method",
    columns: str = "metric",
    metric: str | None = None,
    comparison: pd.DataFrame | None = None,
    over_rows: pd.DataFrame | None = None,
) -> DisplayTable:
    """Return "mean ± half of the 95 % interval" over seeds, and the number of seeds as ``n``.

    Methods are called as ``choices.METHOD_NAMES`` says.

    Args:
        tidy: One row per seed, with the columns ``index``, ``columns`` and ``value``.
        index: Column or columns that make up the rows of the table.
        columns: Column that is spread over the columns of the table: the measures, or a swept
            setting such as k.
        metric: The measure all values belong to, where ``columns`` is not the measure.
        comparison: From ``compare.compare_methods``. The best mean of a measure is bold only
            where this finds it better than the baseline; without it nothing is bold.
        over_rows: Intervals over test rows that a single seed gets, as for
            ``compare.interval_table``; say so in the caption (``compare.covered_by``).
    """
    index = [index] if isinstance(index, str) else list(index)
    means = interval_table(tidy, [*index, columns], over_rows=over_rows)
    means["text"] = [
        _mean_text(metric or row[columns], row["mean"], (row["high"] - row["low"]) / 2)
        for row in means.to_dict("records")
    ]
    text = _spread(means, index, columns, "text").fillna(MISSING)
    bold = _supported_best(_spread(means, index, columns, "mean"), comparison)
    bold.columns = text.columns = [_column_title(name) for name in text.columns]
    seeds = means.groupby(index, sort=False)["n"].agg(["min", "max"]).to_numpy()
    text["n"] = [str(low) if low == high else f"{low}{MISSING}{high}" for low, high in seeds]
    named = {"level": "method"} if text.index.nlevels > 1 else {}
    if "method" in index:
        text, bold = (table.rename(index=METHOD_NAMES, **named) for table in (text, bold))
    return DisplayTable(text, bold.assign(n=False))


def sweep_table(
    tidy: pd.DataFrame,
    *,
    over: str,
    metrics: Sequence[str],
    index: Sequence[str] = ("method",),
    over_rows: pd.DataFrame | None = None,
) -> DisplayTable:
    """Return a compact table of a sweep: a block of rows a measure, a column a level.

    Args:
        tidy: One row per seed and measure, with the columns ``over``, ``index`` and ``value``.
        over: The swept setting, such as k; its levels become the columns.
        metrics: The measures, in the order of the blocks.
        index: Columns that make up the rows of each block.
        over_rows: As for ``pivot_mean_interval``, with the columns ``over`` and ``metric``.
    """
    blocks = []
    for metric in metrics:
        rows = tidy[tidy["metric"] == metric]
        limits = None if over_rows is None else over_rows[over_rows["metric"] == metric]
        block = pivot_mean_interval(
            rows, index=index, columns=over, metric=metric, over_rows=limits
        )
        title = _column_title(metric)
        blocks.append([pd.concat({title: table}, names=["measure"]) for table in block])
    texts, bolds = zip(*blocks, strict=True)
    text = pd.concat(texts)
    levels = {name: f"{over} = {name}" for name in text.columns if name != "n"}
    return DisplayTable(text.rename(columns=levels), pd.concat(bolds).rename(columns=levels))


def main_table_style(frame: pd.DataFrame, *, bold: pd.DataFrame | None = None) -> Styler:
    """Return a table for a notebook: rules above and below, numbers to the right, text escaped.

    Args:
        frame: Any table, for instance ``DisplayTable.text``.
        bold: Cells to set bold, of the same shape.
    """
    rule, thin = "1.2px solid #222", "0.6px solid #222"
    style = styled(frame, bold, escape="html")
    sides = [
        {
            "selector": f".col{place}",
            "props": f"text-align: {'right' if is_number else 'left'}",
        }
        for place, is_number in enumerate(number_columns(style.data))
    ]
    # The name of a table's style sheet follows from its content: notebooks stay reproducible.
    return style.set_uuid(f"{zlib.crc32(style.data.to_csv().encode()):08x}").set_table_styles(
        [
            {"selector": "", "props": f"border-top: {rule}; border-bottom: {rule}"},
            {"selector": "", "props": "border-collapse: collapse"},
            {"selector": "thead th", "props": f"border-bottom: {thin}; font-weight: normal"},
            {"selector": "th, td", "props": "padding: 0.2em 0.9em; background: none"},
            *sides,
        ]
    )


def styled(frame: pd.DataFrame, bold: pd.DataFrame | None, *, escape: str) -> Styler:
    """Return ``frame`` with escaped text, four decimals and the given cells bold."""
    shown, marked = flattened(frame, bold)
    style = shown.style.format(escape=escape, precision=_OTHER_DECIMALS, na_rep=MISSING)
    style = style.format_index(escape=escape, axis=1).hide(axis="index")
    return style.apply(lambda _: np.where(marked, "font-weight: bold", ""), axis=None)


def flattened(
    frame: pd.DataFrame, bold: pd.DataFrame | None
) -> tuple[pd.DataFrame, Bool[np.ndarray, "rows columns"]]:
    """Return the table with its index as columns, and which cells are bold.

    An index that only numbers the rows is left out.
    """
    shown = frame.reset_index(drop=is_numbering(frame))
    marked = np.zeros(shown.shape, dtype=bool)
    if bold is not None:
        if bold.shape != frame.shape:
            raise ValueError(f"bold must match the table {frame.shape}, got {bold.shape=}")
        marked[:, shown.shape[1] - frame.shape[1] :] = bold.to_numpy(dtype=bool)
    return shown, marked


def is_numbering(frame: pd.DataFrame) -> bool:
    """Return whether the index is only an unnamed numbering of the rows."""
    return isinstance(frame.index, pd.RangeIndex) and frame.index.name is None


def number_columns(frame: pd.DataFrame) -> list[bool]:
    """Return which columns hold numbers, also as text such as "0.91 ± 0.02"."""
    numeric = "0123456789-+∞" + MISSING
    return [
        bool(column.map(lambda cell: str(cell)[:1] in numeric or cell != cell).all())
        for _, column in frame.items()
    ]


def _spread(means: pd.DataFrame, index: list[str], columns: str, value: str) -> pd.DataFrame:
    """Return ``value`` as a wide table, rows and columns in order of first appearance."""
    rows = means[index].drop_duplicates()
    order = pd.MultiIndex.from_frame(rows) if len(index) > 1 else pd.Index(rows[index[0]])
    wide = means.pivot(index=index, columns=columns, values=value)
    return wide.reindex(index=order, columns=means[columns].unique())


def _mean_text(metric: str, mean: float, half: float) -> str:
    is_share = metric in HIGHER_IS_BETTER
    scale, decimals = (100, _PERCENT_DECIMALS) if is_share else (1, _DECIMALS.get(metric, 4))
    if not np.isfinite(mean):
        return "∞" if mean > 0 else MISSING
    text = f"{scale * mean:.{decimals}f}"
    return f"{text} ± {scale * half:.{decimals}f}" if np.isfinite(half) else text


def _column_title(name: object) -> str:
    title = METRIC_NAMES.get(name, str(name))
    return f"{title} (%)" if name in HIGHER_IS_BETTER else title


def _supported_best(means: pd.DataFrame, comparison: pd.DataFrame | None) -> pd.DataFrame:
    bold = pd.DataFrame(False, index=means.index, columns=means.columns)
    if comparison is None:
        return bold
    won = comparison[comparison["verdict"] == "better"]
    supported = set(zip(won["method"], won["metric"], strict=True))
    for metric in means.columns[means.notna().any()]:
        best = means[metric].idxmax() if metric in HIGHER_IS_BETTER else means[metric].idxmin()
        bold.loc[best, metric] = (best, metric) in supported
    return bold


# ---- Tables to LaTeX and Markdown, with all text escaped.

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
    also: Collection[str] = (),
) -> dict[str, Path]:
    """Write a table as CSV, and in the forms that something else reads.

    Args:
        frame: The table; an unnamed numbering of its rows is left out.
        folder: Where to; made when missing.
        name: File name without suffix, also the LaTeX label ``tab:name``.
        caption: Title of the table, as plain text; a CSV has none.
        bold: Cells to set bold, of the same shape as ``frame``; a CSV has none.
        also: "tex" (booktabs), "md" or both.

    Returns:
        The written paths by suffix.
    """
    name = safe_name(name)
    texts = {"csv": frame.to_csv(index=not is_numbering(frame), lineterminator="\n")}
    if "tex" in also:
        texts["tex"] = to_latex(frame, caption=caption, label=f"tab:{name}", bold=bold)
    if "md" in also:
        texts["md"] = to_markdown(frame, caption=caption, bold=bold)
    return {kind: write_text(Path(folder) / f"{name}.{kind}", text) for kind, text in texts.items()}


def save_figure(
    figure: Figure, folder: Path, name: str, *, also: Collection[str] = (), dpi: int = 300
) -> dict[str, Path]:
    """Write a figure as SVG, and as PNG where asked; the same figure gives the same bytes.

    Args:
        figure: The figure.
        folder: Where to; made when missing.
        name: File name without suffix.
        also: "png" for readers that cannot show vectors.
        dpi: Resolution of the PNG.

    Returns:
        The written paths by suffix.
    """
    place = Path(folder) / safe_name(name)
    # Without a fixed salt the ids inside an SVG are random; without a date of None it is today's.
    undated = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    with rc_context({"svg.hashsalt": "attnknn", "svg.fonttype": "path"}):
        return {
            kind: write_atomic(
                place.with_name(f"{place.name}.{kind}"),
                lambda handle, kind=kind: figure.savefig(
                    handle, format=kind, dpi=dpi, metadata=undated[kind]
                ),
            )
            for kind in ("svg", *also)
        }
