"""Markdown → Typst by pandoc, with everything that could act or escape taken out of the tree.

Pandoc reads each cell alone (its notebook reader), so an unclosed fence cannot swallow the next.
Between reading and writing, the document tree is rebuilt: raw code becomes text, attributes go,
pictures are copied into the workshop, links lead to known places only.
"""

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pypandoc

from attnknn.pdf.tables import find_tables, read_html, table_call
from attnknn.pdf.text import breakable, typst_string
from attnknn.pdf.typeset import Workshop

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
_LONGEST_CELL = 40  # characters; a Markdown table with a longer cell wraps instead of shrinking


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
        wraps = "true" if _longest_cell(sections) > _LONGEST_CELL else "false"
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
