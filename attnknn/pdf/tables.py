"""HTML tables of pandas (DataFrames and Stylers) → tables of the Typst template.

The HTML is only read: every text becomes a Typst string, every style one of four known ones.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bs4 import BeautifulSoup, Tag

from attnknn.pdf.text import breakable, clean, typst_string

# One or more numbers, with the signs, units and brackets of "0.91 ± 0.02", "+.043 [.038, .048]".
_NUMERIC = re.compile(r"(?=.*\d)[\s\d.,_eE+\-−–±%×()\[\]/:|]*(ms|s|k|M|MB|GB)?")  # noqa: RUF001
_MISSING = {"", "-", "–", "—", "nan", "NaN", "NaT", "None", "<NA>", "...", "…", "inf", "-inf"}  # noqa: RUF001
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_HEX = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})")
_NAMED = {
    "red": "#ff0000", "green": "#008000", "blue": "#0000ff", "yellow": "#ffff00",
    "orange": "#ffa500", "lightgreen": "#90ee90", "lightblue": "#add8e6", "pink": "#ffc0cb",
    "white": "#ffffff", "black": "#000000", "gray": "#808080", "grey": "#808080",
    "lightgray": "#d3d3d3", "lightgrey": "#d3d3d3", "darkorange": "#ff8c00", "gold": "#ffd700",
}  # fmt: skip
_LONGEST_CELL = 40  # characters; a column with a longer text wraps
_WIDGETS = ["input", "details", "button", "script", "form", "progress"]


@dataclass
class Cell:
    """One cell of a table: what it says, its place, and its look."""

    text: str = ""
    column: int = 0
    colspan: int = 1
    rowspan: int = 1
    is_header: bool = False
    style: dict[str, str] = field(default_factory=dict)


def read_html(html: str) -> BeautifulSoup:
    """Return parsed HTML; a fragment that looks like a file name is still a fragment."""
    return BeautifulSoup(f"<div>{clean(html)}</div>", "html.parser")


def find_tables(html: str) -> list[Tag]:
    """Return the tables of an HTML output; none when it is a widget that merely uses tables."""
    soup = read_html(html)
    if soup.find(_WIDGETS) is not None:
        return []
    return [table for table in soup.find_all("table") if table.find_parent("table") is None]


def loose_text(html: str) -> str:
    """Return the words of an HTML output that stand outside of its tables."""
    soup = read_html(html)
    for tag in soup.find_all(["style", "script"]):
        tag.decompose()
    for table in soup.find_all("table"):
        if paragraph := table.find_next_sibling("p"):
            paragraph.decompose()
        table.decompose()
    return _text(soup)


def table_caption(table: Tag) -> str | None:
    """Return the text of a table's own ``<caption>``, if it has one."""
    caption = table.find("caption")
    return _text(caption) or None if caption else None


def table_note(table: Tag) -> str:
    """Return the count of rows and columns that pandas writes under a shortened table."""
    paragraph = table.find_next_sibling("p")
    return _text(paragraph) if paragraph else ""


def table_call(table: Tag) -> str:
    """Return the call of the template's ``data-table``, left open for a caption and the bracket.

    Args:
        table: The ``<table>`` element.

    Returns:
        Typst source, ``data-table(aligns, long, head, body, note: ..``.
    """
    styles = _style_rules(table)
    sections = [[_read_row(row, styles) for row in rows] for rows in _sections(table)]
    for rows in sections:
        _place(rows)
    n_columns = _close_up([cell for rows in sections for row in rows for cell in row])
    head, body = (_filled(rows, n_columns) for rows in sections)
    columns = [[c for row in body for c in row if c.column == i] for i in range(n_columns)]
    aligns = ["right" if _is_numeric(column) else "left" for column in columns]
    long = [any(len(cell.text) > _LONGEST_CELL for cell in column) for column in columns]
    arguments = [_array(aligns), _array("true" if wraps else "false" for wraps in long)]
    arguments += [
        _array(_array(_cell(c, aligns) for c in row) for row in rows) for rows in (head, body)
    ]
    if note := table_note(table):
        arguments.append(f"note: {typst_string(note)}")
    return f"data-table({', '.join(arguments)}"


def _text(tag: Tag) -> str:
    return " ".join(clean(tag.get_text(" ")).split())


def _sections(table: Tag) -> tuple[list[Tag], list[Tag]]:
    """Split a table's rows into header and body."""
    rows = [row for row in table.find_all("tr") if row.find_parent("table") is table]
    head = [row for row in rows if row.find_parent("thead") is not None]
    if not head:
        n_head = next((i for i, row in enumerate(rows) if row.find("td") is not None), 0)
        head = rows[:n_head]
    return head, [row for row in rows if not any(row is one for one in head)]


def _read_row(row: Tag, styles: dict[str, dict[str, str]]) -> list[Cell]:
    return [
        Cell(
            text=_text(tag),
            colspan=_span(tag, "colspan"),
            rowspan=_span(tag, "rowspan"),
            is_header=tag.name == "th",
            style=styles.get(str(tag.get("id")), {}) | _declarations(str(tag.get("style", ""))),
        )
        for tag in row.find_all(["th", "td"], recursive=False)
    ]


def _span(tag: Tag, name: str) -> int:
    value = str(tag.get(name, "1"))
    return min(max(int(value), 1), 1000) if value.isdecimal() else 1


def _place(rows: list[list[Cell]]) -> None:
    """Give every cell its column, and clip spans to what is free."""
    taken: set[tuple[int, int]] = set()
    for y, row in enumerate(rows):
        x = 0
        for cell in row:
            while (y, x) in taken:
                x += 1
            cell.column = x
            cell.rowspan = min(cell.rowspan, len(rows) - y)
            free = next((i for i in range(cell.colspan) if (y, x + i) in taken), cell.colspan)
            cell.colspan = free
            taken |= {(y + j, x + i) for j in range(cell.rowspan) for i in range(cell.colspan)}
            x += cell.colspan


def _close_up(cells: Sequence[Cell]) -> int:
    """Drop columns in which no cell begins, and return how many columns remain."""
    starts = sorted({cell.column for cell in cells})
    for cell in cells:
        end = bisect_left(starts, cell.column + cell.colspan)
        cell.column = bisect_left(starts, cell.column)
        cell.colspan = end - cell.column
    return max(1, len(starts))


def _filled(rows: list[list[Cell]], n_columns: int) -> list[list[Cell]]:
    """Return the rows with empty cells where a short row leaves a hole."""
    taken: set[tuple[int, int]] = set()
    for y, row in enumerate(rows):
        for cell in row:
            across = range(cell.column, cell.column + cell.colspan)
            taken |= {(y + j, x) for j in range(cell.rowspan) for x in across}
    return [
        sorted(
            row + [Cell(column=x) for x in range(n_columns) if (y, x) not in taken],
            key=lambda cell: cell.column,
        )
        for y, row in enumerate(rows)
    ]


def _is_numeric(column: Sequence[Cell]) -> bool:
    texts = [cell.text for cell in column if cell.text not in _MISSING]
    return bool(texts) and all(_NUMERIC.fullmatch(text) for text in texts)


def _style_rules(table: Tag) -> dict[str, dict[str, str]]:
    """Return the declarations per cell id that a Styler writes into its ``<style>``."""
    rules: dict[str, dict[str, str]] = {}
    root = list(table.parents)[-1]
    sheet = "\n".join(style.get_text() for style in root.find_all("style"))
    for selectors, body in _RULE.findall(sheet):
        for selector in selectors.split(","):
            if selector.strip().startswith("#"):
                rules.setdefault(selector.strip()[1:], {}).update(_declarations(body))
    return rules


def _declarations(body: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in body.split(";"))
    return {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


def _colour(style: dict[str, str], *names: str) -> str | None:
    for name in names:
        value = _NAMED.get(style.get(name, ""), style.get(name, ""))
        if _HEX.fullmatch(value):
            return f'rgb("{value}")'
    return None


def _cell(cell: Cell, aligns: Sequence[str]) -> str:
    """Return one cell as a Typst dictionary."""
    parts = [f"text: {typst_string(breakable(cell.text))}", f"x: {cell.column}"]
    parts += [f"{n}: {v}" for n in ("colspan", "rowspan") if (v := getattr(cell, n)) > 1]
    parts.append(f"align: {'center' if cell.colspan > 1 else aligns[cell.column]}")
    if fill := _colour(cell.style, "background-color", "background"):
        parts.append(f"fill: {fill}")
    look = []
    if cell.style.get("font-weight") in {"bold", "bolder", "600", "700", "800", "900"}:
        look.append('weight: "bold"')
    if cell.style.get("font-style") == "italic":
        look.append('style: "italic"')
    if colour := _colour(cell.style, "color"):
        look.append(f"fill: {colour}")
    if look:
        parts.append(f"look: ({', '.join(look)})")
    return f"({', '.join(parts)})"


def _array(items: Iterable[str]) -> str:
    items = list(items)
    return f"({', '.join(items)},)" if items else "()"
