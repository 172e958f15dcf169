"""Notebooks → the body of one Typst document: titles, provenance, cells, a continuous outline."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from attnknn.pdf.cells import Piece, count_unexecuted, notebook_pieces
from attnknn.pdf.prose import (
    NOT_A_LINE_START,
    Cleaner,
    Node,
    header_ids,
    plain_text,
    raw_block,
    raw_inline,
    read_markdown,
)
from attnknn.pdf.text import breakable, typst_string
from attnknn.pdf.typeset import Workshop

_FIRST = ("run", "dataset", "seeds", "commit", "seconds")


@dataclass(frozen=True)
class Source:
    """A notebook and what is known about its file.

    Attributes:
        notebook: The notebook, hidden cells already removed.
        name: File name without suffix; the title of a notebook without headings.
        folder: Where its relative pictures are; None when it was never a file.
        modified: When the file was written.
        show_code: Whether the source of code cells is shown at all.
        verdict: Markdown that its cells tagged ``verdict`` have put out.
    """

    notebook: NotebookNode
    name: str
    folder: Path | None
    modified: datetime
    show_code: bool = True
    verdict: str | None = None


@dataclass(frozen=True)
class Chapter:
    """A notebook, read.

    Attributes:
        title: Pandoc inlines of its first heading.
        blocks: Pandoc blocks of everything after it.
        date: When it was executed.
        provenance: Lines that say where its numbers come from.
    """

    title: list[Node]
    blocks: list[Node]
    date: datetime
    provenance: list[str]


def read_chapters(
    sources: Sequence[Source], workshop: Workshop, *, top_level: int
) -> list[Chapter]:
    """Read notebooks into chapters, all Markdown in one call of pandoc.

    Args:
        sources: The notebooks in reading order.
        workshop: Receives their pictures.
        top_level: Level that the largest heading after the title gets.
    """
    pieces: list[dict[str, Piece]] = []
    for n, source in enumerate(sources):
        found = notebook_pieces(source.notebook, workshop, show_code=source.show_code)
        pieces.append({f"c{n}p{i}": piece for i, piece in enumerate(found)})
    texts = {
        key: piece.markdown
        for group in pieces
        for key, piece in group.items()
        if piece.markdown is not None
    }
    trees = read_markdown(texts)
    return [
        _chapter(source, group, trees, workshop, prefix=f"c{n}-", top_level=top_level)
        for n, (source, group) in enumerate(zip(sources, pieces, strict=True))
    ]


def call(function: str, words: Sequence[Node], *arguments: str) -> Node:
    """Return a block that calls a template function with words and further Typst arguments."""
    closing = "".join(f", {argument}" for argument in arguments)
    opening = raw_inline(f"#{function}([{NOT_A_LINE_START}")
    return {"t": "Plain", "c": [opening, *words, raw_inline(f"]{closing})")]}


def heading_call(function: str, chapter: Chapter) -> Node:
    """Return the call that sets a chapter's title, date and provenance."""
    lines = "".join(f"{typst_string(breakable(line))}, " for line in chapter.provenance)
    return call(function, chapter.title, typst_string(shown_date(chapter.date)), f"({lines})")


def without_headings(blocks: Sequence[Node]) -> list[Node]:
    """Return blocks with their headings as bold paragraphs, which no outline lists."""
    return [
        {"t": "Para", "c": [{"t": "Strong", "c": block["c"][2]}]}
        if block["t"] == "Header"
        else block
        for block in blocks
    ]


def shown_date(date: datetime) -> str:
    """Return a date as "16 November 2025"."""
    return f"{date.day} {date:%B %Y}"


def provenance_lines(provenance: Mapping[str, Any]) -> list[str]:
    """Return a run's provenance as readable lines: settings first, then versions.

    Args:
        provenance: What the run has recorded about itself, such as ``run``, ``seeds``, ``commit``.
    """
    # A notebook file keeps its metadata in alphabetical order; a reader wants the run first.
    names = sorted(provenance, key=lambda name: _FIRST.index(name) if name in _FIRST else 99)
    hidden = {"versions", "date"}
    parts = [_fact(name, provenance[name]) for name in names if name not in hidden]
    versions = provenance.get("versions") or {}
    packages = [f"{name} {version}" for name, version in dict(versions).items()]
    return [line for line in (" · ".join(filter(None, parts)), ", ".join(packages)) if line]


def _fact(name: str, value: Any) -> str:
    if value is None or value == []:
        return ""
    if name == "seconds" and isinstance(value, int | float):
        return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s"
    if name == "commit":
        digest, _, state = str(value).partition("-")
        return "-".join(filter(None, [f"commit {digest[:12]}", state]))
    if isinstance(value, list | tuple):
        plural = name if len(value) != 1 else name.removesuffix("s")
        return f"{plural} {', '.join(str(item) for item in value)}"
    if isinstance(value, Mapping):
        return f"{name} " + ", ".join(f"{key} {item}" for key, item in value.items())
    return f"{name} {value}"


def _chapter(
    source: Source,
    pieces: Mapping[str, Piece],
    trees: dict[str, list[Node]],
    workshop: Workshop,
    *,
    prefix: str,
    top_level: int,
) -> Chapter:
    prose = [trees[key] for key, piece in pieces.items() if _is_prose(piece)]
    title = _take_title(prose)
    counts = header_ids([block for blocks in prose for block in blocks])
    cleaner = Cleaner(
        workshop,
        prefix=prefix,
        # Typst refuses a link to a label that occurs twice.
        identifiers={name for name, count in counts.items() if count == 1},
        folder=source.folder,
        attachments={
            f"{key}-{name}": data
            for key, piece in pieces.items()
            for name, data in piece.attachments.items()
        },
    )
    shift = top_level - min((b["c"][0] for blocks in prose for b in _headers(blocks)), default=1)
    blocks = _execution_note(source)
    for key, piece in pieces.items():
        blocks += _piece_blocks(piece, trees.get(key, []), cleaner, shift=shift)
    words = cleaner.clean(title) or [{"t": "Str", "c": breakable(source.name)}]
    return Chapter(words, blocks, _executed(source), _provenance(source.notebook))


def _is_prose(piece: Piece) -> bool:
    return piece.markdown is not None and not piece.is_output


def _headers(blocks: Sequence[Node]) -> list[Node]:
    return [block for block in blocks if block["t"] == "Header"]


def _take_title(prose: Sequence[list[Node]]) -> list[Node]:
    """Remove the first heading from the text and return its words."""
    for blocks in prose:
        for header in _headers(blocks)[:1]:
            blocks.remove(header)
            return header["c"][2]
    return []


def _piece_blocks(piece: Piece, tree: list[Node], cleaner: Cleaner, *, shift: int) -> list[Node]:
    if piece.markdown is None:
        return [raw_block(piece.opening)]
    blocks = cleaner.clean(tree)
    if piece.inline:
        words = _one_paragraph(blocks)
        opening = raw_inline(piece.opening + NOT_A_LINE_START)
        return [{"t": "Plain", "c": [opening, *words, raw_inline(piece.closing)]}]
    if piece.is_output:  # code may print headings, but does not structure the notebook
        blocks = without_headings(blocks)
    for block in _headers(blocks):
        block["c"][0] += shift
    ends = [[raw_block(text)] if text else [] for text in (piece.opening, piece.closing)]
    return [*ends[0], *blocks, *ends[1]]


def _one_paragraph(blocks: Sequence[Node]) -> list[Node]:
    words: list[Node] = []
    for block in blocks:
        inlines = block["c"] if block["t"] in {"Para", "Plain"} else []
        words += [{"t": "Space"}, *(inlines or [{"t": "Str", "c": plain_text(block)}])]
    return words[1:]


def _execution_note(source: Source) -> list[Node]:
    waiting, total = count_unexecuted(source.notebook)
    if not waiting:
        return []
    text = (
        "This notebook has not been executed."
        if waiting == total
        else f"{waiting} of {total} code cells have not been executed."
    )
    warnings.warn(f"{source.name}: {text}", stacklevel=2)
    return [raw_block(f"#note[{text}]")]


def _executed(source: Source) -> datetime:
    """Return when a notebook was run: its own record, papermill's, or the file's time."""
    metadata = source.notebook.metadata
    recorded = [
        metadata.get("attnknn", {}).get("provenance", {}).get("date"),
        metadata.get("papermill", {}).get("end_time"),
    ]
    for text in recorded:
        try:
            date = datetime.fromisoformat(str(text))
        except ValueError:
            continue
        return date if date.tzinfo else date.replace(tzinfo=UTC)
    return source.modified


def _provenance(notebook: NotebookNode) -> list[str]:
    metadata = notebook.metadata
    if recorded := metadata.get("attnknn", {}).get("provenance"):
        return provenance_lines(recorded)
    kernel = metadata.get("kernelspec", {}).get("display_name") or "unknown kernel"
    version = metadata.get("language_info", {}).get("version")
    seconds = metadata.get("papermill", {}).get("duration")
    known = {"kernel": kernel, "version": version, "seconds": seconds}
    return [re.sub(r"^kernel ", "", line) for line in provenance_lines(known)]
