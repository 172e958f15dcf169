"""Executed notebooks → papers: the nbconvert exporter ``attnknn-pdf`` and its one-call form."""

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
from attnknn.paper.cells import Piece, notebook_pieces, notebook_verdict, tags_of
from attnknn.paper.markup import (
    Node,
    breakable,
    call,
    literal,
    nodes,
    plain_text,
    raw_block,
    raw_inline,
    read_html,
    read_markdown,
    word,
)
from attnknn.paper.typst import Setter, Unit, Workshop, workshop

# ---- Notebooks → chapters: title, date, where the numbers come from, and the units of the body

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
        name: Its first heading as plain text.
        title: The words of this heading, ready to be set.
        units: Everything after it.
        date: When it was executed.
        provenance: Lines that say where its numbers come from.
    """

    name: str
    title: list[Node]
    units: list[Unit]
    date: datetime
    provenance: list[str]

    def heading(self, function: str) -> Node:
        """Return the call of a template function that sets title, date and provenance."""
        lines = "".join(f"{literal(breakable(line))}, " for line in self.provenance)
        shown = f"{self.date.day} {self.date:%B %Y}"
        return call(function, self.title, literal(shown), f"({lines})")


def read_chapters(
    sources: Sequence[Source], workshop: Workshop, *, top_level: int
) -> list[Chapter]:
    """Read notebooks into chapters, all Markdown in one call of pandoc.

    Args:
        sources: The notebooks in reading order.
        workshop: Receives their pictures.
        top_level: Level that the largest heading after the title gets.
    """
    pieces = {
        f"c{n}p{i}": piece
        for n, source in enumerate(sources)
        for i, piece in enumerate(
            notebook_pieces(source.notebook, workshop, show_code=source.show_code)
        )
    }
    texts = {key: p.markdown for key, p in pieces.items() if p.markdown is not None}
    captions = {f"{key}c": p.caption for key, p in pieces.items() if p.caption}
    trees = read_markdown(texts | captions)
    trees |= read_html({key: p.html for key, p in pieces.items() if p.html is not None})
    chapters = []
    for n, source in enumerate(sources):
        own = {key: piece for key, piece in pieces.items() if key.startswith(f"c{n}p")}
        chapters.append(_chapter(source, own, trees, workshop, prefix=f"c{n}", level=top_level))
    return chapters


def without_headings(blocks: Sequence[Node]) -> list[Node]:
    """Return blocks with their headings as bold paragraphs, which no outline lists."""
    return [
        {"t": "Para", "c": [{"t": "Strong", "c": block["c"][2]}]}
        if block["t"] == "Header"
        else block
        for block in blocks
    ]


def provenance_lines(provenance: Mapping[str, Any]) -> list[str]:
    """Return a run's provenance as readable lines: settings first, then versions.

    Args:
        provenance: What the run has recorded about itself, such as ``run``, ``seeds``, ``commit``.
    """
    # A notebook file keeps its metadata in alphabetical order; a reader wants the run first.
    names = sorted(provenance, key=lambda name: _FIRST.index(name) if name in _FIRST else 99)
    parts = [_fact(n, provenance[n]) for n in names if n not in {"versions", "date"}]
    versions = provenance.get("versions")
    packages = [f"{n} {v}" for n, v in versions.items()] if isinstance(versions, Mapping) else []
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
    return f"{name} {value}"


def _chapter(
    source: Source,
    pieces: Mapping[str, Piece],
    trees: dict[str, list[Node]],
    workshop: Workshop,
    *,
    prefix: str,
    level: int,
) -> Chapter:
    texts = [trees[key] for key, p in pieces.items() if p.markdown is not None and not p.is_output]
    headers = [block for blocks in texts for block in blocks if block["t"] == "Header"]
    title = headers.pop(0) if headers else None
    for blocks in texts:
        blocks[:] = [block for block in blocks if block is not title]
    shift = level - min((header["c"][0] for header in headers), default=1)
    for header in headers:
        header["c"][0] += shift
    attached = {f"{k}-{name}": d for k, p in pieces.items() for name, d in p.attachments.items()}
    setter = Setter(workshop, prefix=prefix, folder=source.folder, attachments=attached)
    units = _execution_note(source)
    for key, piece in pieces.items():
        units += _units(piece, trees.get(key, []), trees.get(f"{key}c", []), setter)
    words = title["c"][2] if title else [{"t": "Str", "c": source.name}]
    return Chapter(plain_text(words), setter.words(words), units, *_executed(source))


def _units(piece: Piece, tree: list[Node], caption: list[Node], setter: Setter) -> list[Unit]:
    if piece.blocks:
        return [list(piece.blocks)]
    words = setter.paragraph(caption)
    if piece.picture:
        about = [raw_inline(", caption: ["), *words, raw_inline("]")] if words else []
        start = raw_inline(f"#figure-output({piece.picture}")
        return [[{"t": "Plain", "c": [start, *about, raw_inline(")")]}]]
    tables = (node for node in nodes(tree) if node.get("t") == "Table")
    if caption and (table := next(tables, None)):
        table["c"][1] = [None, caption]
    if piece.is_output:  # code may print headings, but does not structure the notebook
        tree = without_headings(tree)
    if piece.is_verdict:
        return [[raw_block("#verdict["), *setter.blocks(tree), raw_block("]")]]
    return [[block] for block in setter.blocks(tree)]


def _execution_note(source: Source) -> list[Unit]:
    # nbconvert strips the execution count along with a hidden output: nothing is known of those.
    unknown = {"hide-output", "remove-output"}
    code = [c for c in source.notebook.cells if c.cell_type == "code" and c.source.strip()]
    cells = [c for c in code if not tags_of(c) & unknown]
    waiting = [c for c in cells if c.get("execution_count") is None and not c.get("outputs")]
    if not waiting:
        return []
    text = f"{len(waiting)} of {len(cells)} code cells have not been executed."
    if len(waiting) == len(cells):
        text = "This notebook has not been executed."
    warnings.warn(f"{source.name}: {text}", stacklevel=2)
    return [[call("note", [word(text)])]]


def _executed(source: Source) -> tuple[datetime, list[str]]:
    """Return when and by what a notebook was run: its own record, papermill's, or the file's."""
    metadata = source.notebook.metadata
    papermill = metadata.get("papermill") or {}
    recorded = (metadata.get("attnknn") or {}).get("provenance") or {}
    date = source.modified
    for text in (papermill.get("end_time"), recorded.get("date")):
        try:
            date = datetime.fromisoformat(str(text))
        except ValueError:
            continue
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    if recorded:
        return date, provenance_lines(recorded)
    kernel = (metadata.get("kernelspec") or {}).get("display_name") or "unknown kernel"
    version = (metadata.get("language_info") or {}).get("version")
    known = {"kernel": kernel, "version": version, "seconds": papermill.get("duration")}
    return date, [line.removeprefix("kernel ") for line in provenance_lines(known)]


# ---- nbconvert's exporter, and the same for a file


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
        hidden = {
            "enabled": True,
            "remove_cell_tags": ["hide-cell", "remove-cell"],
            "remove_input_tags": ["hide-input", "remove-input"],
            "remove_all_outputs_tags": ["hide-output", "remove-output"],
        }
        ours = Config({"TagRemovePreprocessor": hidden})
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
        modified = datetime.now(UTC)
        if path and path.is_file():
            modified = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        shown = not self.exclude_input
        return Source(nb, name, folder, modified, show_code=shown, verdict=verdict), resources


def notebook_to_pdf(path: Path, output: Path | None = None) -> Path:
    """Write the PDF of an executed notebook and return where it is.

    Args:
        path: The notebook.
        output: The PDF; by default the notebook's path with the suffix ``.pdf``.

    Raises:
        ValueError: If ``path`` is not a notebook.
        PDFError: If Typst refuses the document.
    """
    pdf = notebook_pdf(read_source(path))
    return write_atomic(output or Path(path).with_suffix(".pdf"), lambda file: file.write(pdf))


def read_source(path: Path) -> Source:
    """Return a notebook file after nbconvert's preprocessors."""
    path = Path(path)
    try:
        notebook = nbformat.read(path, as_version=4)
        problems = nbformat.validator.iter_validate(notebook)
        wrong = next((p for p in problems if p.validator != "additionalProperties"), None)
        if wrong is not None:
            raise ValueError(f"{'.'.join(map(str, wrong.path))}: {wrong.message}")
    except FileNotFoundError:
        raise
    except Exception as error:  # nbformat raises a dozen kinds, down to AttributeError
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(
            f"path must be a Jupyter notebook, got path={str(path)!r}: {reason}"
        ) from error
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    return AttnKNNPDFExporter().prepare(notebook, resources)[0]


def notebook_pdf(source: Source) -> bytes:
    """Return the PDF of one notebook."""
    with workshop() as place:
        (chapter,) = read_chapters([source], place, top_level=1)
        units = [[chapter.heading("title-block")], *chapter.units]
        return place.set(document_head(chapter.name), units, timestamp=chapter.date)


def document_head(name: str, *options: str) -> str:
    """Return the first lines of a Typst document."""
    arguments = ", ".join([f"short: {literal(name)}", *options])
    return f'#import "paper.typ": *\n#show: paper.with({arguments})\n\n'
