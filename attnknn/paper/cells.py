"""A notebook's cells → the pieces of a page, in order, with the noise left out."""

import ast
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from nbformat import NotebookNode

from attnknn.paper.markup import Node, breakable, call, clean, code_call, literal, word
from attnknn.paper.typst import Workshop

# "  40%|████      | 2/5 [00:01<00:02, 1.2it/s]" and "17it [00:03, 5.1it/s]", with words before
_PROGRESS = re.compile(
    r".*\d+%\|[^|]*\|\s*[\d.]+\w?/[\d.?]+\w?(?:\s*\[[^\]]*\])?"
    r"|.*\b\d+\w?(?:it|[A-Z]?B)? \[\d+:\d\d[^\]]*(?:it|s|B)/(?:s|it)[^\]]*\]"
)
# What tqdm says, in two lines, where it cannot show its bar as a widget.
_NO_WIDGET = re.compile(r"TqdmWarning: IProgress not found|from \.autonotebook import tqdm")
_REPR = re.compile(r"\[?<[^<>\n]*(?: at 0x[0-9a-f]+|\bobject|[Aa]xes[^<>\n]*)>\]?")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_CONTROLS = re.compile(r"<(input|button|script|form|progress)\b", re.IGNORECASE)
_PICTURES = ("image/svg+xml", "application/pdf", "image/png", "image/jpeg", "image/gif")
_CAPTION = re.compile(r"#\s*caption:\s*(.*)", re.IGNORECASE)
_DISPLAYED = re.compile(r"\$\\displaystyle\s*(.*)\$", re.DOTALL)
_TABULAR = re.compile(r"\\begin\{(?:tabular|longtable|table)")


@dataclass(frozen=True)
class Piece:
    """A part of a page: finished blocks, or text for pandoc.

    Attributes:
        blocks: Blocks that need no pandoc.
        markdown: Markdown to be read.
        html: HTML to be read.
        caption: Markdown of a caption, for a table in ``html`` or the picture ``picture``.
        picture: Arguments of the template's ``figure-output``.
        is_output: Written by code: its headings do not belong to the notebook's outline.
        is_verdict: Set in a box, and shown on page one of a bound report.
        attachments: Pictures pasted into the cell, by name.
    """

    blocks: Sequence[Node] = ()
    markdown: str | None = None
    html: str | None = None
    caption: str | None = None
    picture: str | None = None
    is_output: bool = False
    is_verdict: bool = False
    attachments: Mapping[str, bytes] = field(default_factory=dict)


def printed(text: str) -> str:
    """Return what a terminal would show: overwritten and progress-bar lines removed.

    Args:
        text: A whole stdout or stderr stream, carriage returns included.

    Returns:
        The lines that remain readable, without leading and trailing blank lines.
    """
    kept = []
    for line in text.replace("\r\n", "\n").split("\n"):
        # A carriage return starts the line again; the last writing is the one that stays.
        shown = [part for part in line.split("\r") if part.strip()]
        whole = clean(shown[-1]).rstrip() if shown else ""
        # Words written behind a bar, without a line break of their own, are still words.
        left = _PROGRESS.sub("", whole)
        if not _NO_WIDGET.search(left) and (left.strip() or left == whole):
            kept.append(left)
    return "\n".join(kept).strip("\n")


def is_bare_repr(text: str) -> bool:
    """Tell whether ``text`` only names objects: ``<Axes: >`` or ``[<Line2D at 0x7f>]``."""
    return all(_REPR.fullmatch(line.strip(" ,")) for line in text.strip().splitlines() or [""])


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
        elif cell.cell_type == "raw":
            yield from _plain(cell.source)
        elif cell.cell_type == "code":
            captions, source = _split_captions(cell)
            tags = tags_of(cell)
            if used and "parameters" in tags:
                source, tags = used, {"injected-parameters"}
            elif _is_hidden(cell) or (used and "injected-parameters" in tags):
                source = ""
            if show_code and source.strip():
                yield _shown_code(source, tags, language)
            yield from _outputs(cell, iter(captions), workshop)


def notebook_verdict(notebook: NotebookNode) -> str | None:
    """Return the Markdown that the cells tagged ``verdict`` have put out; None without any."""
    outputs = (o for c in notebook.cells if "verdict" in tags_of(c) for o in c.get("outputs", ()))
    texts = [o.data["text/markdown"] for o in outputs if "text/markdown" in o.get("data", {})]
    return "\n\n".join(map(_joined, texts)) or None


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
    known = {name: ast.get_source_segment(injected, value) for name, value in given.items()}
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


def _used_parameters(notebook: NotebookNode) -> str | None:
    """Return one parameters cell instead of papermill's two, where both are shown and plain."""
    found = [
        [clean(c.source) for c in notebook.cells if tag in tags_of(c) and not _is_hidden(c)]
        for tag in ("parameters", "injected-parameters")
    ]
    return merged_parameters(*found[0], *found[1]) if [len(f) for f in found] == [1, 1] else None


def _is_hidden(cell: NotebookNode) -> bool:
    """Tell whether a cell's source is left out: by its tag, or as the call that says a verdict."""
    removed = cell.metadata.get("transient", {}).get("remove_source", False)
    return removed or "verdict" in tags_of(cell)


def tags_of(cell: NotebookNode) -> set[str]:
    """Return the tags of a cell."""
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
        return b64decode(_joined(data))
    except ValueError:
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


def _shown_code(source: str, tags: set[str], language: str) -> Piece:
    options = [f"lang: {literal(language)}"]
    if "injected-parameters" in tags:
        source = re.sub(r"\A\s*#\s*Parameters\s*\n", "", source)
        options += ['label: "Parameters"']
    elif "parameters" in tags:
        options += ['label: "Default parameters"']
    return Piece([code_call("code-cell", source, *options)])


def _outputs(cell: NotebookNode, captions: Iterator[str], workshop: Workshop) -> Iterator[Piece]:
    # Streams come in slices; a progress bar can only be recognised in the whole.
    for stream, group in groupby(cell.outputs, key=lambda output: output.get("name")):
        outputs = list(group)
        if stream is not None:
            yield from _plain(printed("".join(_joined(output.text) for output in outputs)))
            continue
        for output in outputs:
            if output.output_type == "error":
                yield _error(output)
            elif _WIDGET not in output.data:
                found = _rich(output, captions, workshop)
                is_verdict = "verdict" in tags_of(cell)
                yield from (replace(p, is_verdict=is_verdict and bool(p.markdown)) for p in found)


def _rich(output: NotebookNode, captions: Iterator[str], workshop: Workshop) -> Iterator[Piece]:
    """Yield the richest form of an output that paper can show; the poorer ones say the same."""
    data = {mime: clean(_joined(value)) for mime, value in output.data.items() if "text/" in mime}
    plain, html = data.get("text/plain", ""), data.get("text/html", "")
    pictures = [mime for mime in _PICTURES if mime in output.data]
    for mime in pictures:
        if name := workshop.add_picture(_bytes(mime, output.data[mime])):
            yield _figure(name, output, mime, captions)
            return
    if pictures:
        yield Piece([call("note", [word(f"A picture ({pictures[0]}) cannot be read.")])])
    elif "text/markdown" in data:
        yield Piece(markdown=data["text/markdown"], is_output=True)
    elif "text/latex" in data and not html:
        yield from _latex(data["text/latex"])
    elif html and (
        ("<table" in html or not plain.strip() or is_bare_repr(plain))
        and not _CONTROLS.search(html)
    ):
        own = _own_caption(output, "text/html")
        caption = own or ("<table" in html and "<caption" not in html and next(captions, None))
        yield Piece(html=html, caption=caption or None, is_output=True)
    else:
        yield from _plain(plain)


def _figure(name: str, output: NotebookNode, mime: str, captions: Iterator[str]) -> Piece:
    width = output.get("metadata", {}).get(mime, {}).get("width")
    # Notebooks give the width of a picture in CSS pixels, 96 to the inch.
    size = f", width: {width * 0.75}pt" if isinstance(width, int | float) and width > 0 else ""
    caption = _own_caption(output, mime) or next(captions, None)
    return Piece(picture=f"{literal(name)}{size}", caption=caption)


def _own_caption(output: NotebookNode, mime: str) -> str | None:
    metadata = output.get("metadata", {})
    caption = metadata.get("caption") or metadata.get(mime, {}).get("caption")
    return str(caption) if caption else None


def _plain(text: str) -> Iterator[Piece]:
    if text.strip() and not is_bare_repr(text):
        yield Piece([code_call("text-output", clean(text))])


def _error(output: NotebookNode) -> Piece:
    parts = [output.get("ename", "Error"), output.get("evalue", "")]
    words = [literal(breakable(clean(part))) for part in parts]
    return Piece([code_call("error-output", clean("\n".join(output.get("traceback", ()))), *words)])


def _latex(text: str) -> Iterator[Piece]:
    if _TABULAR.search(text):  # a LaTeX table is meant for another document
        yield from _plain(text)
        return
    formula = _DISPLAYED.fullmatch(text.strip())
    text = f"$${formula.group(1)}$$" if formula else text
    yield Piece(markdown=re.sub(r"\n\s*\n", "\n", text) if "$$" in text else text, is_output=True)
