"""Typst source → PDF, inside a temporary folder that is all Typst can see."""

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import typst

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
            source = files("attnknn").joinpath("templates", name)
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
            return typst.compile(
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
