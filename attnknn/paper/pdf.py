"""The nbconvert exporter ``attnknn-pdf`` and its one-call form."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import Exporter
from nbformat import NotebookNode
from traitlets import Bool, default
from traitlets.config import Config

from attnknn.files import write_atomic
from attnknn.paper.typst import (
    NOT_A_LINE_START,
    Cleaner,
    Node,
    Piece,
    Workshop,
    breakable,
    count_unexecuted,
    header_ids,
    notebook_pieces,
    notebook_verdict,
    plain_text,
    raw_block,
    raw_inline,
    read_markdown,
    typst_string,
    workshop,
    write_typst,
)

# ---- Notebooks → the body of one Typst document: titles, provenance, cells, a continuous outline.

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


class AttnKNNPDFExporter(Exporter):
    """A notebook as a paper, without LaTeX or a browser.

    Cell tags: ``hide-input``, ``hide-output``, ``hide-cell`` (and ``remove-*``) leave parts out.
    """

    export_from_notebook = "PDF (paper)"
    output_mimetype = "application/pdf"

    exclude_input = Bool(False, help="Leave the source of all code cells out.").tag(config=True)

    @default("file_extension")
    def _file_extension_default(self) -> str:
        return ".pdf"

    @default("exclude_input")
    def _exclude_input_default(self) -> bool:
        # `jupyter nbconvert --no-input` speaks to nbconvert's own template exporters.
        return bool(self.config.get("TemplateExporter", {}).get("exclude_input", False))

    @property
    def default_config(self) -> Config:
        """Hide cells by tag; everything can be set anew on nbconvert's command line."""
        ours = Config(
            {
                "TagRemovePreprocessor": {
                    "enabled": True,
                    "remove_cell_tags": ["hide-cell", "remove-cell"],
                    "remove_input_tags": ["hide-input", "remove-input"],
                    "remove_all_outputs_tags": ["hide-output", "remove-output"],
                }
            }
        )
        ours.merge(super().default_config)
        return ours

    def from_notebook_node(
        self, nb: NotebookNode, resources: Any | None = None, **kw: Any
    ) -> tuple[bytes, Any]:
        """Return the PDF of a notebook, and nbconvert's resources.

        Args:
            nb: The notebook.
            resources: nbconvert's record of the file: ``metadata.name`` and ``metadata.path``.
            **kw: Passed on to nbconvert.
        """
        source, resources = self.prepare(nb, resources, **kw)
        return notebook_pdf(source), resources

    def prepare(
        self, nb: NotebookNode, resources: Any | None = None, **kw: Any
    ) -> tuple[Source, Any]:
        """Run nbconvert's preprocessors and return the notebook with its file's particulars."""
        verdict = notebook_verdict(nb)  # before its cell may be hidden
        nb, resources = super().from_notebook_node(nb, resources, **kw)
        metadata = resources.get("metadata", {})
        name = metadata.get("name") or "Notebook"
        folder = Path(metadata["path"] or ".") if "path" in metadata else None
        path = folder / f"{name}.ipynb" if folder is not None else None
        modified = (
            path.stat().st_mtime if path and path.is_file() else datetime.now(UTC).timestamp()
        )
        return Source(
            notebook=nb,
            name=name,
            folder=folder,
            modified=datetime.fromtimestamp(modified, UTC),
            show_code=not self.exclude_input,
            verdict=verdict,
        ), resources


def notebook_to_pdf(path: Path, output: Path | None = None) -> Path:
    """Write the PDF of an executed notebook and return where it is.

    Args:
        path: The notebook.
        output: The PDF; by default the notebook's path with the suffix ``.pdf``.

    Raises:
        ValueError: If ``path`` is not a notebook.
        PDFError: If Typst refuses the document; the message names the kept source.
    """
    pdf = notebook_pdf(read_source(path))
    return write_atomic(output or Path(path).with_suffix(".pdf"), lambda file: file.write(pdf))


def read_source(path: Path) -> Source:
    """Return a notebook file after nbconvert's preprocessors."""
    path = Path(path)
    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise
    except Exception as error:  # nbformat raises a dozen kinds, down to AttributeError
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"path must be a Jupyter notebook, got path={str(path)!r}: {reason}"
        ) from error
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    return AttnKNNPDFExporter().prepare(notebook, resources)[0]


def notebook_pdf(source: Source) -> bytes:
    """Return the PDF of one notebook."""
    with workshop() as place:
        (chapter,) = read_chapters([source], place, top_level=1)
        body = write_typst([heading_call("title-block", chapter), *chapter.blocks])
        short = typst_string(plain_text(chapter.title))
        head = f'#import "paper.typ": *\n#show: paper.with(short: {short})\n\n'
        return place.compile(head + body, timestamp=chapter.date)
