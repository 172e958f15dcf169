"""Executed notebooks → PDF pages that look like a paper, from PyPI packages alone.

``jupyter nbconvert --to attnknn-pdf notebook.ipynb`` runs: nbconvert preprocessors → pieces
(``cells``) → pandoc's document tree (``prose``) → Typst (``typeset``) → PDF.
"""

from attnknn.pdf.book import bind_report
from attnknn.pdf.exporter import AttnKNNPDFExporter, notebook_to_pdf
from attnknn.pdf.typeset import PDFError

__all__ = ["AttnKNNPDFExporter", "PDFError", "bind_report", "notebook_to_pdf"]
