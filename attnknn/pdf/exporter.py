"""The nbconvert exporter ``attnknn-pdf`` and its one-call form."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import Exporter
from nbformat import NotebookNode
from traitlets import Bool, default
from traitlets.config import Config

from attnknn.files import write_atomic
from attnknn.pdf.cells import notebook_verdict
from attnknn.pdf.document import Source, heading_call, read_chapters
from attnknn.pdf.prose import plain_text, write_typst
from attnknn.pdf.text import typst_string
from attnknn.pdf.typeset import workshop


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
