"""A notebook's cells → the pieces of a page, in order, with the noise left out."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from nbformat import NotebookNode

from attnknn.pdf.parameters import merged_parameters
from attnknn.pdf.tables import find_tables, loose_text, read_html, table_call, table_caption
from attnknn.pdf.text import breakable, clean, is_bare_repr, printed, typst_string
from attnknn.pdf.typeset import Workshop

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
