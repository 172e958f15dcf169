"""All notebooks of a run in one PDF: verdicts and contents first, then a chapter each."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from attnknn.files import write_atomic
from attnknn.pdf.document import (
    Chapter,
    call,
    heading_call,
    provenance_lines,
    read_chapters,
    without_headings,
)
from attnknn.pdf.exporter import read_source
from attnknn.pdf.prose import Cleaner, Node, plain_text, raw_block, read_markdown, write_typst
from attnknn.pdf.text import breakable, clean, typst_string
from attnknn.pdf.typeset import Workshop, workshop

NO_VERDICT = "*No verdict was computed.*"
_MOST_WITH_SECTIONS = 6  # chapters; with more, the contents list chapters only and fit page one


def bind_report(
    notebooks: Sequence[Path],
    output: Path,
    *,
    title: str,
    provenance: Mapping[str, object],
    verdicts: Sequence[tuple[str, str]] | None = None,
) -> Path:
    """Bind executed notebooks into one PDF and return where it is.

    Args:
        notebooks: The notebooks in reading order.
        output: The PDF.
        title: Title of the whole, plain text.
        provenance: Where the numbers come from, such as run, seeds and commit.
        verdicts: Pairs (title, Markdown sentence) for page one; by default the Markdown output of
            each notebook's cells tagged ``verdict``.

    Raises:
        ValueError: If there is no notebook, or one of the files is not a notebook.
        PDFError: If Typst refuses the document; the message names the kept source.
    """
    if not notebooks:
        raise ValueError(f"notebooks must name at least one notebook, got {notebooks=}")
    sources = [read_source(path) for path in notebooks]
    with workshop() as place:
        chapters = read_chapters(sources, place, top_level=2)
        if verdicts is None:
            found = (source.verdict for source in sources)
            titles = (chapter.title for chapter in chapters)
            entries = [(t, v or NO_VERDICT) for t, v in zip(titles, found, strict=True)]
        else:
            entries = [(_plain_title(t), v) for t, v in verdicts]
        pdf = _bind(chapters, entries, place, title=title, provenance=provenance)
    return write_atomic(output, lambda file: file.write(pdf))


def _plain_title(text: str) -> list[Node]:
    return [{"t": "Str", "c": breakable(clean(text))}]


def _bind(
    chapters: Sequence[Chapter],
    entries: Sequence[tuple[list[Node], str]],
    place: Workshop,
    *,
    title: str,
    provenance: Mapping[str, object],
) -> bytes:
    date = max((chapter.date for chapter in chapters), default=datetime.now(UTC))
    cover = Chapter(_plain_title(title), [], date, provenance_lines(provenance))
    blocks = [heading_call("title-block", cover), *_summary(entries, place)]
    depth = 2 if len(chapters) <= _MOST_WITH_SECTIONS else 1
    blocks.append(raw_block(f"#contents({depth})"))
    for chapter in chapters:
        blocks += [heading_call("chapter", chapter), *chapter.blocks]
    short = typst_string(plain_text(cover.title))
    head = f'#import "paper.typ": *\n#show: paper.with(short: {short}, bound: true)\n\n'
    return place.compile(head + write_typst(blocks), timestamp=date)


def _summary(entries: Sequence[tuple[list[Node], str]], place: Workshop) -> list[Node]:
    trees = read_markdown({f"v{i}": clean(text) for i, (_, text) in enumerate(entries)})
    cleaner = Cleaner(place)
    blocks = [raw_block("#summary[")]
    for i, (words, _) in enumerate(entries):
        blocks += [raw_block("#summary-entry["), call("summary-title", words)]
        blocks += [*without_headings(cleaner.clean(trees.get(f"v{i}", []))), raw_block("]")]
    return [*blocks, raw_block("]")]
