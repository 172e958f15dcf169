"""Typst source → PDF, inside a temporary folder that is all Typst can see."""

import ast
import base64
import binascii
import importlib.util
import json
import re
import shutil
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.resources import files
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pypandoc
import typst
from bs4 import BeautifulSoup, Tag
from nbformat import NotebookNode

from attnknn.paper.packed import packed

# ---- Plain text on its way to paper: terminal noise out, Typst strings safe, long words breakable.

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor moves
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[@-Z\\-_]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
# "  40%|████      | 2/5 [00:01<00:02, 1.2it/s]" and "17it [00:03, 5.1it/s]", with words before
_PROGRESS = re.compile(
    r".*\d+%\|[^|]*\|\s*[\d.]+\w?/[\d.?]+\w?(?:\s*\[[^\]]*\])?"
    r"|.*\b\d+\w?(?:it|[A-Z]?B)? \[\d+:\d\d[^\]]*(?:it|s|B)/(?:s|it)[^\]]*\]"
)
# What tqdm says, in two lines, where it cannot show its bar as a widget.
_NO_WIDGET = re.compile(r"TqdmWarning: IProgress not found|from \.autonotebook import tqdm")
_REPR = re.compile(r"\[?<[^<>\n]*(?: at 0x[0-9a-f]+|\bobject|[Aa]xes[^<>\n]*)>\]?")
_AFTER_PUNCTUATION = re.compile(r"([/\\._\-=,:;&?+|)(\[\]])(?=.)")
_LONG_RUN = re.compile(r"[^\s\u200b]{16}(?=[^\s\u200b]{4})")

ZERO_WIDTH_SPACE = "\u200b"


def clean(text: str) -> str:
    """Return ``text`` without ANSI codes, control characters or lone surrogates."""
    text = _ANSI.sub("", text).expandtabs(8)
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


def printed(text: str) -> str:
    """Return what a terminal would show: overwritten and progress-bar lines removed.

    Args:
        text: A whole stdout or stderr stream, carriage returns included.

    Returns:
        The lines that remain readable, without leading and trailing blank lines.
    """
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        # A carriage return starts the line again; the last writing is the one that stays.
        shown = [part for part in line.split("\r") if part.strip()]
        lines.append(clean(shown[-1]).rstrip() if shown else "")
    left = [_PROGRESS.sub("", line) for line in lines]
    # Words written behind a bar, without a line break of their own, are still words.
    kept = [
        text
        for text, line in zip(left, lines, strict=True)
        if not _NO_WIDGET.search(text) and (text.strip() or text == line)
    ]
    return "\n".join(kept).strip("\n")


def is_bare_repr(text: str) -> bool:
    """Tell whether ``text`` only names objects: ``<Axes: >`` or ``[<Line2D at 0x7f>]``."""
    return all(_REPR.fullmatch(line.strip(" ,")) for line in text.strip().splitlines() or [""])


def typst_string(text: str) -> str:
    """Return ``text`` as a Typst string literal; nothing in it can end the literal."""
    text = clean(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.replace("\n", "\\n") + '"'


def breakable(text: str, *, longest: int = 28) -> str:
    """Return ``text`` with invisible break points in words of more than ``longest`` characters."""
    return " ".join(word if len(word) <= longest else _break_word(word) for word in text.split(" "))


def _break_word(word: str) -> str:
    word = _AFTER_PUNCTUATION.sub(r"\1" + ZERO_WIDTH_SPACE, word)
    return _LONG_RUN.sub(lambda run: run.group() + ZERO_WIDTH_SPACE, word)


_TEMPLATES = ("paper.typ", "quiet.tmTheme")
# First bytes of the picture formats Typst reads.
_MAGIC = {
    b"\x89PNG\r\n": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"RIFF": ".webp",
    b"%PDF-": ".pdf",
}


class PDFError(RuntimeError):
    """A notebook could not be turned into a PDF."""


class Workshop:
    """The temporary folder of one PDF: template, pictures and source.

    Attributes:
        folder: Root of everything Typst may read.
    """

    def __init__(self, folder: Path):
        """Copy the template into ``folder``."""
        self.folder = folder
        self._n_pictures = 0
        for name in _TEMPLATES:
            source = files("attnknn").joinpath("paper", "templates", name)
            (folder / name).write_bytes(source.read_bytes())

    def add_picture(self, data: bytes) -> str | None:
        """Store a picture and return its file name; None when it cannot be read as one."""
        suffix = _picture_format(data)
        if suffix is None:
            return None
        self._n_pictures += 1
        name = f"picture-{self._n_pictures}{suffix}"
        (self.folder / name).write_bytes(data)
        return name

    def compile(self, source: str, *, timestamp: datetime) -> bytes:
        """Return the PDF of a Typst source.

        Args:
            source: The whole document.
            timestamp: Creation time in the PDF; the same source and time give the same bytes.

        Raises:
            PDFError: With Typst's own message and the path of the source, which is kept.
        """
        path = self.folder / "main.typ"
        path.write_text(source, encoding="utf-8")
        try:
            pdf = typst.compile(
                path,
                root=self.folder,
                font_paths=_fonts(),
                # Nothing imports a package; an empty folder keeps Typst from looking for any.
                package_path=self.folder,
                package_cache_path=self.folder,
                timestamp=int(timestamp.timestamp()),
            )
        except typst.TypstError as error:
            raise PDFError(
                f"typst could not compile the document: {error.message}\n"
                f"{error.diagnostic}\nIts source is kept in {path}"
            ) from error
        return packed(pdf)


@contextmanager
def workshop() -> Iterator[Workshop]:
    """Hold a temporary folder; it stays for inspection when the compilation fails."""
    folder = Path(tempfile.mkdtemp(prefix="attnknn-pdf-"))
    try:
        yield Workshop(folder)
    except PDFError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@cache
def _fonts() -> typst.Fonts:
    """Return Typst's embedded fonts, matplotlib's, and the system's as a last resort.

    Matplotlib ships DejaVu Sans, which draws the symbols (✓ ☒ ⇒) that the serif font lacks and
    the letters of figures saved with ``svg.fonttype = "none"``.
    """
    found = importlib.util.find_spec("matplotlib")  # located, not imported: that takes a second
    folders = [Path(found.origin).parent / "mpl-data/fonts/ttf"] if found and found.origin else []
    return typst.Fonts(font_paths=[str(folder) for folder in folders if folder.is_dir()])


def _picture_format(data: bytes) -> str | None:
    suffix = next((s for magic, s in _MAGIC.items() if data.startswith(magic)), None)
    if suffix is None:
        return ".svg" if b"<svg" in data[:4096] else None
    if suffix == ".pdf":
        return suffix
    from PIL import Image, UnidentifiedImageError

    try:
        Image.open(BytesIO(data)).load()  # a cut file has the right first bytes too
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):
        return None
    return suffix


# ---- The parameters cell and papermill's injected one → one cell with the values that were used.


def merged_parameters(declared: str, injected: str) -> str | None:
    """Return the parameters cell with the injected values in the place of its defaults.

    Args:
        declared: Source of the cell tagged ``parameters``; its comments stay.
        injected: Source of the cell that papermill put after it.

    Returns:
        The merged source, injected names that were not declared at its end; None where one of the
        cells holds anything but ``name = value`` in Python.
    """
    given, places = _values(injected), _values(declared)
    if given is None or places is None:
        return None
    lines = [line.encode() for line in declared.split("\n")]
    known = {name: _segment(injected, value) for name, value in given.items()}
    # From the end: what is replaced must not move what is still to come.
    for name, value in sorted(places.items(), key=lambda pair: pair[1].lineno, reverse=True):
        if name in known:
            first, last = value.lineno - 1, value.end_lineno - 1
            head, tail = lines[first][: value.col_offset], lines[last][value.end_col_offset :]
            lines[first : last + 1] = [head + known[name].encode() + tail]
    extra = [f"{name} = {text}".encode() for name, text in known.items() if name not in places]
    return b"\n".join([*lines, *extra]).decode()


def _values(source: str) -> dict[str, ast.expr] | None:
    """Return the value of each assignment; None if there is anything else."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    values = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
            case _:
                return None
    return values


def _segment(source: str, value: ast.expr) -> str:
    return ast.get_source_segment(source, value) or ""


# ---- HTML tables of pandas (DataFrames and Stylers) → tables of the Typst template.
#
# The HTML is only read: every text becomes a Typst string, every style one of four known ones.

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


# ---- Markdown → Typst by pandoc, with everything that could act or escape taken out of the tree.
#
# Pandoc reads each cell alone (its notebook reader), so an unclosed fence cannot swallow the next.
# Between reading and writing, the document tree is rebuilt: raw code becomes text, attributes go,
# pictures are copied into the workshop, links lead to known places only.

Node = dict[str, Any]

# An empty Typst value: text after it is not at the start of a line, so "= x" is no heading.
NOT_A_LINE_START = "#none;"

_READER = "ipynb+raw_tex+footnotes+latex_macros+tex_math_double_backslash"
_API_VERSION = [1, 23, 1]
_NO_ATTRIBUTES: list[Any] = ["", [], []]
_MATH = re.compile(
    r"\s*\\begin\{(align|aligned|alignat|equation|eqnarray|gather|gathered|multline|split|cases|"
    r"[bpvBV]?matrix|array)(\*?)\}.*\\end\{\1\2\}\s*",
    re.DOTALL,
)
_FORMATTING = re.compile(
    r"</?(a|abbr|b|big|center|code|div|em|font|h[1-6]|hr|i|ins|kbd|li|mark|nobr|ol|p|pre|s|samp|"
    r"small|span|strong|sub|sup|table|tbody|td|th|thead|tr|tt|u|ul)(\s[^>]*)?/?>|<!--.*?-->",
    re.IGNORECASE | re.DOTALL,
)
_LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_SILENT = re.compile(r"\s*<(script|style)\b", re.IGNORECASE)
_MARKER = re.compile(r"=+|[-+/]|\d+\.")
_LONGEST_CELL_prose = (
    40  # characters; a Markdown table with a longer cell wraps instead of shrinking
)


def raw_block(source: str) -> Node:
    """Return a block of Typst source that pandoc passes through."""
    return {"t": "RawBlock", "c": ["typst", source]}


def raw_inline(source: str) -> Node:
    """Return an inline of Typst source that pandoc passes through."""
    return {"t": "RawInline", "c": ["typst", source]}


def read_markdown(texts: Mapping[str, str]) -> dict[str, list[Node]]:
    """Return pandoc's blocks for several independent Markdown texts, by their key.

    Args:
        texts: Markdown by key; keys are plain letters and digits.
    """
    cells = [
        {"cell_type": "markdown", "id": key, "metadata": {}, "source": text}
        for key, text in texts.items()
    ]
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    tree = pypandoc.convert_text(json.dumps(notebook), "json", format=_READER, sandbox=True)
    divisions = [block["c"] for block in json.loads(tree)["blocks"]]
    return {attributes[0]: blocks for attributes, blocks in divisions}


def write_typst(blocks: Sequence[Node]) -> str:
    """Return the Typst source of pandoc blocks."""
    tree = {"pandoc-api-version": _API_VERSION, "meta": {}, "blocks": list(blocks)}
    options = ["--wrap=none"]
    return pypandoc.convert_text(
        json.dumps(tree), "typst", format="json", sandbox=True, extra_args=options
    )


def plain_text(node: Any) -> str:
    """Return the words of a node, without any markup."""
    if isinstance(node, list):
        return "".join(plain_text(item) for item in node)
    if not isinstance(node, dict):
        return ""
    match node["t"]:
        case "Str":
            return node["c"]
        case "Space" | "SoftBreak" | "LineBreak":
            return " "
        case "Code" | "Math":
            return node["c"][1]
    return plain_text(node.get("c", []))


def header_ids(blocks: Any) -> Counter[str]:
    """Return how often each heading's identifier occurs."""
    return Counter(block["c"][1][0] for block in blocks if block["t"] == "Header")


class Cleaner:
    """Rebuild pandoc's tree so that it holds nothing but words, formulas, tables and pictures.

    Attributes:
        prefix: Put before every identifier, so that chapters do not share any.
        identifiers: The headings that links may lead to.
        folder: Where relative pictures are looked for; None when there is no such place.
        attachments: Pictures pasted into cells, by pandoc's name for them.
    """

    def __init__(
        self,
        workshop: Workshop,
        *,
        prefix: str = "",
        identifiers: set[str] | None = None,
        folder: Path | None = None,
        attachments: Mapping[str, bytes] | None = None,
    ):
        """Prepare for one notebook."""
        self.prefix = prefix
        self.identifiers = identifiers or set()
        self.folder = folder
        self.attachments = attachments or {}
        self._workshop = workshop
        self._rebuild: dict[str, Callable[[Any], list[Node]]] = {
            "Header": self._header,
            "Link": self._link,
            "Image": self._image,
            "RawBlock": self._raw_block,
            "RawInline": self._raw_inline,
            "CodeBlock": lambda c: [_code_block(c[0][1], c[1])],
            "Code": lambda c: [{"t": "Code", "c": [_NO_ATTRIBUTES, breakable(c[1])]}],
            "Str": lambda c: _word(c),
            "Math": lambda c: [{"t": "Math", "c": c}],
            "Table": self._table,
            "Div": lambda c: self.clean(c[1]),
            "Span": lambda c: self.clean(c[1]),
        }

    def clean(self, node: Any) -> Any:
        """Return the rebuilt form of a list of nodes, or of anything inside of one."""
        if isinstance(node, dict):
            return {"t": node["t"], "c": self.clean(node["c"])} if "c" in node else node
        if not isinstance(node, list):
            return node
        if _is_attributes(node):
            return _NO_ATTRIBUTES
        rebuilt: list[Any] = []
        for item in node:
            rebuild = self._rebuild.get(item.get("t")) if isinstance(item, dict) else None
            rebuilt += rebuild(item["c"]) if rebuild else [self.clean(item)]
        return rebuilt

    def _header(self, content: Any) -> list[Node]:
        level, (identifier, _, _), words = content
        name = self.prefix + identifier if identifier in self.identifiers else ""
        return [{"t": "Header", "c": [level, [name, [], []], self.clean(words)]}]

    def _link(self, content: Any) -> list[Node]:
        _, words, (target, _) = content
        if target.startswith("#") and target[1:] in self.identifiers:
            target = f"#{self.prefix}{target[1:]}"
        elif not target.startswith(("https://", "http://", "mailto:")):
            return self.clean(words)
        return [{"t": "Link", "c": [_NO_ATTRIBUTES, self.clean(words), [target, ""]]}]

    def _image(self, content: Any) -> list[Node]:
        _, words, (target, _) = content
        alt = plain_text(words)
        data = self._picture(target)
        name = self._workshop.add_picture(data) if data else None
        if name is None:
            return self.clean(words) or [{"t": "Str", "c": "[picture]"}]
        return [raw_inline(f"#picture({typst_string(name)}, alt: {typst_string(alt)})")]

    def _picture(self, target: str) -> bytes | None:
        """Return a picture from an attachment, a data address or a file beside the notebook."""
        name = unquote(target)
        if name in self.attachments:
            return self.attachments[name]
        if found := re.match(r"data:image/[\w.+-]+;base64,(.*)", target, re.DOTALL):
            try:
                return base64.b64decode(unquote(found.group(1)))
            except (binascii.Error, ValueError):
                return None
        if self.folder is None or "://" in name or "\0" in name:
            return None
        root = self.folder.resolve()
        path = (root / name).resolve()
        # NOTE: resolved first, so that neither ".." nor a symbolic link leads out of the folder.
        return path.read_bytes() if path.is_relative_to(root) and path.is_file() else None

    def _raw_inline(self, content: Any) -> list[Node]:
        kind, text = content
        if kind in {"tex", "latex"} and _MATH.fullmatch(text):
            return [{"t": "Math", "c": [{"t": "DisplayMath"}, text.strip()]}]
        if kind == "html" and _LINE_BREAK.fullmatch(text):
            return [{"t": "LineBreak"}]
        if kind == "html" and text.lower().startswith("<img"):
            return self._html_image(text)
        if kind == "html" and _FORMATTING.fullmatch(text):
            return []
        return _words(text)

    def _html_image(self, text: str) -> list[Node]:
        tag = read_html(text).find("img")
        source, alt = (str(tag.get(name, "")) if tag else "" for name in ("src", "alt"))
        return self._image([_NO_ATTRIBUTES, _words(alt), [source, ""]])

    def _raw_block(self, content: Any) -> list[Node]:
        kind, text = content
        if kind in {"tex", "latex"}:
            if text.lstrip().startswith(("\\newcommand", "\\def", "\\renewcommand")):
                return []
            return [{"t": "Para", "c": self._raw_inline(content)}]
        if _SILENT.match(text):
            return []
        if tables := find_tables(text):
            return [raw_block(f"#{table_call(table)})") for table in tables]
        soup = read_html(text)
        pictures = [self._html_image(str(tag)) for tag in soup.find_all("img")]
        words = _words(soup.get_text(" ", strip=True) if _FORMATTING.search(text) else text)
        parts = [
            part
            for part in [*pictures, [] if pictures and not soup.text.strip() else words]
            if part
        ]
        return [{"t": "Para", "c": part} for part in parts]

    def _table(self, content: Any) -> list[Node]:
        attributes, caption, columns, *sections = self.clean(content)
        wraps = "true" if _longest_cell(sections) > _LONGEST_CELL_prose else "false"
        widths = _shared_widths(sections, len(columns)) if wraps == "true" else []
        spans = [{"t": "ColWidth", "c": width} for width in widths]
        spans = spans or [{"t": "ColWidthDefault"}] * len(columns)
        columns = [[side, span] for (side, _), span in zip(columns, spans, strict=True)]
        table = {"t": "Table", "c": [attributes, caption, columns, *sections]}
        return [raw_block(f"#prose-table(wraps: {wraps})["), table, raw_block("]")]


def _is_attributes(node: list[Any]) -> bool:
    return (
        len(node) == 3 and isinstance(node[0], str) and all(isinstance(n, list) for n in node[1:])
    )


def _word(text: str) -> list[Node]:
    # A lone "=" or "-" at the start of a table cell would open a heading or a list there.
    guard = [raw_inline(NOT_A_LINE_START)] if _MARKER.fullmatch(text) else []
    return [*guard, {"t": "Str", "c": breakable(text)}]


def _words(text: str) -> list[Node]:
    """Return literal text as pandoc inlines."""
    nodes: list[Node] = []
    for word in text.split():
        nodes += [{"t": "Space"}, *_word(word)]
    return nodes[1:]


def _code_block(classes: list[str], text: str) -> Node:
    lines = "\n".join(breakable(line, longest=60) for line in text.split("\n"))
    language = typst_string(classes[0]) if classes else "none"
    return raw_block(f"#code-cell({typst_string(lines)}, lang: {language})")


def _longest_cell(node: Any) -> int:
    if isinstance(node, dict):
        return len(plain_text(node)) if node["t"] in {"Plain", "Para"} else 0
    return max((_longest_cell(item) for item in node), default=0) if isinstance(node, list) else 0


def _shared_widths(sections: Sequence[Any], n_columns: int) -> list[float]:
    """Return the share of the page for each column: more for longer entries, by their root."""
    head, bodies, foot = sections
    rows = [*head[1], *(row for body in bodies for row in (*body[2], *body[3])), *foot[1]]
    longest = [1] * n_columns
    for _, cells in rows:
        for place, cell in enumerate(cells[:n_columns]):
            longest[place] = max(longest[place], _longest_cell(cell[4]))
    roots = [max(length, 8) ** 0.5 for length in longest]  # a heading needs some room, too
    return [root / sum(roots) for root in roots]


# ---- A notebook's cells → the pieces of a page, in order, with the noise left out.

WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURES = ("image/svg+xml", "application/pdf", "image/png", "image/jpeg", "image/gif")
_CAPTION = re.compile(r"#\s*caption:\s*(.*)", re.IGNORECASE)
_DISPLAYED = re.compile(r"\$\\displaystyle\s*(.*)\$", re.DOTALL)
_TABULAR = re.compile(r"\\begin\{(?:tabular|longtable|table)")


@dataclass(frozen=True)
class Piece:
    """Typst source around some Markdown, either of which may be missing.

    Attributes:
        opening: Typst source before the Markdown, or the whole piece.
        markdown: Text for pandoc; None for a piece of Typst alone.
        closing: Typst source after the Markdown.
        inline: The Markdown is one paragraph, set inside the surrounding Typst call.
        is_output: Written by code: its headings do not belong to the notebook's outline.
        attachments: Pictures pasted into the cell, by name.
    """

    opening: str = ""
    markdown: str | None = None
    closing: str = ""
    inline: bool = False
    is_output: bool = False
    attachments: Mapping[str, bytes] = field(default_factory=dict)


def notebook_pieces(
    notebook: NotebookNode, workshop: Workshop, *, show_code: bool = True
) -> Iterator[Piece]:
    """Yield a notebook's pieces from top to bottom.

    Args:
        notebook: An executed notebook, hidden cells already removed.
        workshop: Receives the pictures.
        show_code: Whether the source of code cells is shown at all.
    """
    language = notebook.metadata.get("language_info", {}).get("name", "python")
    used = _used_parameters(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield Piece(markdown=clean(cell.source), attachments=_attachments(cell))
        elif cell.cell_type == "code":
            captions, source = _split_captions(cell)
            if used and "parameters" in _tags(cell):
                yield from _shown_code(used, {"injected-parameters"}, language) if show_code else ()
            elif show_code and not _is_hidden(cell) and not (used and _is_injected(cell)):
                yield from _shown_code(source, _tags(cell), language)
            yield from _outputs(cell, iter(captions), workshop)


def notebook_verdict(notebook: NotebookNode) -> str | None:
    """Return the Markdown that the cells tagged ``verdict`` have put out; None without any."""
    outputs = (o for c in notebook.cells if "verdict" in _tags(c) for o in c.get("outputs", ()))
    texts = [
        _joined(o.data["text/markdown"]) for o in outputs if "text/markdown" in o.get("data", {})
    ]
    return "\n\n".join(texts) or None


def count_unexecuted(notebook: NotebookNode) -> tuple[int, int]:
    """Return how many code cells have not been run, and how many there are to be judged."""
    # nbconvert strips the execution count along with a hidden output: nothing is known of those.
    unknown = {"hide-output", "remove-output"}
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    cells = [c for c in code if not _tags(c) & unknown]
    waiting = [c for c in cells if c.get("execution_count") is None and not c.get("outputs")]
    return len(waiting), len(cells)


def _used_parameters(notebook: NotebookNode) -> str | None:
    """Return one parameters cell instead of papermill's two, where both are shown and plain."""
    declared = [c for c in notebook.cells if "parameters" in _tags(c) and not _is_hidden(c)]
    injected = [c for c in notebook.cells if _is_injected(c) and not _is_hidden(c)]
    if len(declared) != 1 or len(injected) != 1:
        return None
    return merged_parameters(clean(declared[0].source), clean(injected[0].source))


def _is_injected(cell: NotebookNode) -> bool:
    return "injected-parameters" in _tags(cell)


def _is_hidden(cell: NotebookNode) -> bool:
    """Tell whether a cell's source is left out: by its tag, or as the call that says a verdict."""
    removed = cell.metadata.get("transient", {}).get("remove_source", False)
    return removed or "verdict" in _tags(cell)


def _tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", ()))


def _joined(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def _attachments(cell: NotebookNode) -> dict[str, bytes]:
    return {
        name: _bytes(mime, data)
        for name, bundle in cell.get("attachments", {}).items()
        for mime, data in bundle.items()
    }


def _bytes(mime: str, data: Any) -> bytes:
    """Return a picture's content; empty when it is not the base64 it should be."""
    if mime == "image/svg+xml" and "<svg" in _joined(data):
        return _joined(data).encode("utf-8", "replace")
    try:
        return base64.b64decode(_joined(data))
    except (binascii.Error, ValueError):
        return b""


def _split_captions(cell: NotebookNode) -> tuple[list[str], str]:
    """Return the captions of a cell's outputs, and its source without caption lines."""
    lines = clean(cell.source).split("\n")
    captions = []
    while lines and (found := _CAPTION.match(lines[0].strip())):
        captions.append(found.group(1).strip())
        lines.pop(0)
    stored = cell.metadata.get("attnknn", {}).get("caption", [])
    return ([stored] if isinstance(stored, str) else list(stored)) or captions, "\n".join(lines)


def _shown_code(source: str, tags: set[str], language: str) -> Iterator[Piece]:
    if not source.strip():
        return
    label = None
    if "injected-parameters" in tags:
        label, source = "Parameters", re.sub(r"\A\s*#\s*Parameters\s*\n", "", source)
    elif "parameters" in tags:
        label = "Default parameters"
    options = f", label: {typst_string(label)}" if label else ""
    name = typst_string(language)
    yield Piece(f"#code-cell({_lines(source)}, lang: {name}{options})")


def _lines(text: str) -> str:
    """Return verbatim text as a Typst string whose longest words can still be broken."""
    lines = (breakable(line.rstrip(), longest=60) for line in text.strip("\n").split("\n"))
    return typst_string("\n".join(lines))


def _outputs(cell: NotebookNode, captions: Iterator[str], workshop: Workshop) -> Iterator[Piece]:
    is_verdict = "verdict" in _tags(cell)
    # Streams come in slices; a progress bar can only be recognised in the whole.
    for stream, group in groupby(cell.outputs, key=lambda output: output.get("name")):
        outputs = list(group)
        if stream is not None:
            yield from _plain(printed("".join(_joined(output.text) for output in outputs)))
            continue
        for output in outputs:
            if output.output_type == "error":
                yield _error(output)
            else:
                yield from _rich(output, captions, workshop, is_verdict=is_verdict)


def _rich(
    output: NotebookNode, captions: Iterator[str], workshop: Workshop, *, is_verdict: bool
) -> Iterator[Piece]:
    """Yield the richest form of an output that paper can show; the poorer ones say the same."""
    data = output.data
    if WIDGET in data:
        return
    if picture := next((mime for mime in PICTURES if mime in data), None):
        yield _picture(output, picture, captions, workshop)
    elif "text/markdown" in data:
        opening, closing = ("#verdict[", "]") if is_verdict else ("", "")
        yield Piece(opening, clean(_joined(data["text/markdown"])), closing, is_output=True)
    elif "text/latex" in data and "text/html" not in data:
        yield from _latex(clean(_joined(data["text/latex"])))
    elif "text/html" in data:
        yield from _html(output, captions)
    else:
        yield from _plain(clean(_joined(data.get("text/plain", ""))))


def _plain(text: str) -> Iterator[Piece]:
    if text.strip() and not is_bare_repr(text):
        yield Piece(f"#text-output({_lines(text)})")


def _error(output: NotebookNode) -> Piece:
    parts = [output.get("ename", "Error"), output.get("evalue", "")]
    trace = clean("\n".join(output.get("traceback", ())))
    words = (typst_string(breakable(clean(part))) for part in parts)
    return Piece(f"#error-output({', '.join(words)}, {_lines(trace)})")


def _latex(text: str) -> Iterator[Piece]:
    if _TABULAR.search(text):  # a LaTeX table is meant for another document
        yield from _plain(text)
        return
    formula = _DISPLAYED.fullmatch(text.strip())
    text = f"$${formula.group(1)}$$" if formula else text
    yield Piece(markdown=re.sub(r"\n\s*\n", "\n", text) if "$$" in text else text, is_output=True)


def _html(output: NotebookNode, captions: Iterator[str]) -> Iterator[Piece]:
    html = _joined(output.data["text/html"])
    tables = find_tables(html)
    plain = _joined(output.data.get("text/plain", ""))
    if not tables:
        readable = plain if plain and not is_bare_repr(plain) else _html_text(html)
        yield from _plain(clean(readable))
        return
    if words := loose_text(html):
        yield Piece(f"#par({typst_string(breakable(words))})")
    for table in tables:
        caption = _own_caption(output, "text/html") or table_caption(table) or next(captions, None)
        yield _captioned(f"#{table_call(table)}", caption)


def _html_text(html: str) -> str:
    soup = read_html(html)
    for tag in soup.find_all(["style", "script"]):
        tag.decompose()
    return soup.get_text(" ", strip=True)


def _picture(output: NotebookNode, mime: str, captions: Iterator[str], workshop: Workshop) -> Piece:
    name = workshop.add_picture(_bytes(mime, output.data[mime]))
    caption = _own_caption(output, mime) or next(captions, None)
    if name is None:
        return Piece(f"#note[A picture ({mime}) cannot be read.]")
    width = output.get("metadata", {}).get(mime, {}).get("width")
    # Notebooks give the width of a picture in CSS pixels, 96 to the inch.
    size = f", width: {width * 0.75}pt" if isinstance(width, int | float) and width > 0 else ""
    return _captioned(f"#figure-output({typst_string(name)}{size}", caption)


def _own_caption(output: NotebookNode, mime: str) -> str | None:
    metadata = output.get("metadata", {})
    caption = metadata.get("caption") or metadata.get(mime, {}).get("caption")
    return str(caption) if caption else None


def _captioned(call: str, caption: str | None) -> Piece:
    if not caption:
        return Piece(f"{call})")
    return Piece(f"{call}, caption: [", clean(caption), "])", inline=True, is_output=True)
