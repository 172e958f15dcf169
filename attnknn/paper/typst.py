"""Markdown and HTML → PDF by pandoc and Typst; a notebook's text is set, never evaluated.

Every word reaches Typst as a string literal and every address as an argument, so that nothing in
them can become markup or a call. Typst sees one temporary folder, no package and no network. What
pandoc or Typst cannot do costs a note in the document, not the document.
"""

import hashlib
import importlib.util
import json
import re
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import typst
from bs4 import BeautifulSoup
from PIL import Image, ImageColor

from attnknn.paper.markup import (
    Node,
    PDFError,
    breakable,
    call,
    code_call,
    literal,
    plain_text,
    raw_block,
    raw_inline,
    run_pandoc,
    word,
)
from attnknn.paper.packed import packed

Unit = list[Node]  # blocks that stand or fall together


# ---- Pandoc's tree → a tree of the same words that holds nothing but literals

_CALLS = {
    "Emph": "emph", "Strong": "strong", "Strikeout": "strike", "Underline": "underline",
    "Superscript": "super", "Subscript": "sub", "SmallCaps": "smallcaps",
}  # fmt: skip
_QUOTES = {"SingleQuote": "‘’", "DoubleQuote": "“”"}  # noqa: RUF001
_MATH = re.compile(
    r"\s*\\begin\{(align|aligned|alignat|equation|eqnarray|gather|gathered|multline|split|cases|"
    r"[bpvBV]?matrix|array)(\*?)\}.*\\end\{\1\2\}\s*",
    re.DOTALL,
)
_FORMATTING = re.compile(
    r"</?(a|abbr|b|big|blockquote|center|cite|code|dd|del|details|dfn|div|dl|dt|em|figcaption|"
    r"figure|font|h[1-6]|hr|i|ins|kbd|li|mark|nobr|ol|p|pre|q|s|samp|section|small|span|strong|"
    r"sub|summary|sup|table|tbody|td|th|thead|tr|tt|u|ul|var|wbr)(\s[^>]*)?/?>|<!--.*?-->",
    re.IGNORECASE | re.DOTALL,
)
_LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_LONGEST_CELL = 40  # characters; a column with a longer text wraps
# One or more numbers, with the signs, units and brackets of "0.91 ± 0.02", "+.043 [.038, .048]".
_NUMERIC = re.compile(r"(?=.*\d)[\s\d.,_eE+\-−–±%×()\[\]/:|]*(ms|s|k|M|MB|GB)?")  # noqa: RUF001
_MISSING = {"", "-", "–", "—", "nan", "NaN", "NaT", "None", "<NA>", "...", "…", "inf", "-inf"}  # noqa: RUF001


class Setter:
    """Rebuild pandoc's tree so that it holds nothing but literals, formulas and known calls."""

    def __init__(
        self,
        workshop: "Workshop",
        *,
        prefix: str = "",
        folder: Path | None = None,
        attachments: Mapping[str, bytes] | None = None,
    ):
        """Prepare for one notebook.

        Args:
            workshop: Receives its pictures.
            prefix: Told apart by it are the headings of several notebooks.
            folder: Where relative pictures are looked for; None when there is no such place.
            attachments: Pictures pasted into cells, by pandoc's name for them.
        """
        self._workshop, self._prefix, self._folder = workshop, prefix, folder
        self._attachments = attachments or {}

    def blocks(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the rebuilt form of blocks."""
        return [block for node in nodes for block in self._block(node)]

    def words(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the rebuilt form of inlines."""
        return [inline for node in nodes for inline in self._inline(node)]

    def paragraph(self, blocks: Sequence[Node]) -> list[Node]:
        """Return the words of blocks as those of one paragraph."""
        words: list[Node] = []
        for block in blocks:
            plain = block["t"] in {"Para", "Plain"}
            inlines = self.words(block["c"]) if plain else [word(plain_text(block))]
            words += [{"t": "Space"}, *inlines]
        return words[1:]

    def _block(self, node: Node) -> list[Node]:
        inner, content = self.blocks, node.get("c")
        match node["t"]:
            case "Para" | "Plain" as kind:
                return [{"t": kind, "c": self.words(content)}]
            case "Header":
                level, (name, _, _), words = content
                label = [self._label(name), [], []]
                return [{"t": "Header", "c": [level, label, self.words(words)]}]
            case "CodeBlock":
                return [_code_block((content[0][1] or [""])[0], content[1])]
            case "RawBlock":
                return self._raw_block(*content)
            case "BlockQuote":
                return [{"t": "BlockQuote", "c": inner(content)}]
            case "BulletList":
                return [{"t": "BulletList", "c": [inner(item) for item in content]}]
            case "OrderedList":
                return [{"t": "OrderedList", "c": [content[0], [inner(i) for i in content[1]]]}]
            case "DefinitionList":
                terms = [[self.words(t), [inner(d) for d in ds]] for t, ds in content]
                return [{"t": "DefinitionList", "c": terms}]
            case "Table":
                return [self._table(content)]
            case "Figure":
                return inner([*content[2], *content[1][1]])
            case "Div":
                return inner(content[1])
            case "HorizontalRule":
                return [node]
        return []

    def _inline(self, node: Node) -> list[Node]:
        kind, content = node["t"], node.get("c")
        match kind:
            case "Str":
                return [word(content)]
            case "Space" | "SoftBreak" | "LineBreak" | "Math":
                return [node]
            case "Code":
                return [raw_inline(f"#raw({literal(breakable(content[1]))});")]
            case "Quoted":
                first, last = _QUOTES[content[0]["t"]]
                return [word(first), *self.words(content[1]), word(last)]
            case "Link":
                return self._link(content)
            case "Image":
                return self._image(content[2][0], plain_text(content[1]))
            case "RawInline":
                return self._raw_inline(*content)
            case "Note":
                words = self.paragraph(content)
                return [raw_inline("#footnote["), *words, raw_inline("];")]
            case "Span" | "Cite":
                return self.words(content[1])
        words = self.words(content)
        return [raw_inline(f"#{_CALLS[kind]}["), *words, raw_inline("];")]

    def _label(self, name: str) -> str:
        # A name in HTML may hold anything; a label of ours holds letters and digits.
        return "h" + hashlib.sha256(f"{self._prefix} {name}".encode()).hexdigest()[:16]

    def _link(self, content: Any) -> list[Node]:
        words, target = self.words(content[1]), content[2][0]
        if target.startswith("#"):
            return [raw_inline(f'#goto("{self._label(target[1:])}")['), *words, raw_inline("];")]
        if not target.startswith(("https://", "http://", "mailto:")):
            return words
        return [raw_inline(f"#link({literal(target)})["), *words, raw_inline("];")]

    def _image(self, target: str, alt: str) -> list[Node]:
        data = self._picture(target)
        name = self._workshop.add_picture(data) if data else None
        if name is None:
            return [word(alt or "[picture]")]
        return [raw_inline(f"#picture({literal(name)}, alt: {literal(alt)});")]

    def _picture(self, target: str) -> bytes | None:
        """Return a picture from an attachment, a data address or a file beside the notebook."""
        name = unquote(target)
        if name in self._attachments:
            return self._attachments[name]
        if found := re.match(r"data:image/[\w.+-]+;base64,(.*)", target, re.DOTALL):
            try:
                return b64decode(unquote(found.group(1)))
            except ValueError:
                return None
        if self._folder is None or "://" in name or "\0" in name or len(name) > 1000:
            return None
        root = self._folder.resolve()
        path = (root / name).resolve()
        # NOTE: resolved first, so that neither ".." nor a symbolic link leads out of the folder.
        return path.read_bytes() if path.is_relative_to(root) and path.is_file() else None

    def _raw_block(self, kind: str, text: str) -> list[Node]:
        if kind in {"tex", "latex"}:
            defines = text.lstrip().startswith((r"\newcommand", r"\def", r"\renewcommand"))
            return [] if defines else [{"t": "Para", "c": self._raw_inline(kind, text)}]
        return [_code_block("", text)]

    def _raw_inline(self, kind: str, text: str) -> list[Node]:
        if kind in {"tex", "latex"} and _MATH.fullmatch(text):
            return [{"t": "Math", "c": [{"t": "DisplayMath"}, text.strip()]}]
        if kind == "html" and _LINE_BREAK.fullmatch(text):
            return [{"t": "LineBreak"}]
        if kind == "html" and text.lower().startswith("<img"):
            tag = BeautifulSoup(text, "html.parser").find("img")
            source, alt = (str(tag.get(name, "")) if tag else "" for name in ("src", "alt"))
            return self._image(source, alt)
        return [] if kind == "html" and _FORMATTING.fullmatch(text) else [word(text)]

    def _table(self, content: Any) -> Node:
        """Return the call of the template's ``data-table``: its columns, then its cells."""
        _, (_, caption), columns, head, bodies, foot = content
        top = list(head[1])
        rows = [row for body in bodies for row in (*body[2], *body[3])] + list(foot[1])
        placed = [*_placed([r[1] for r in top]), *_placed([r[1] for r in rows])]
        facts = [
            _column(side["t"], [row.get(x) for row in placed[: len(top)]],
                    [row.get(x) for row in placed[len(top) :]])
            for x, (side, _) in enumerate(columns)
        ]  # fmt: skip
        parts = [raw_inline(f"#data-table(({', '.join(facts)},), (")]
        for y, row in enumerate([*placed, {}]):
            parts += [raw_inline("), (")] if y == len(top) else []
            for x, cell in row.items():
                is_head = y < len(top)
                line = y if is_head else y - len(top)  # header and body count apart
                parts += self._cell(cell, x, line, is_head=is_head)
        words = self.paragraph(caption)
        about = [raw_inline("), caption: ["), *words, raw_inline("])")]
        return {"t": "Plain", "c": [*parts, *(about if words else [raw_inline("))")])]}

    def _cell(self, cell: Any, x: int, y: int, *, is_head: bool) -> list[Node]:
        (_, _, pairs), _, rowspan, colspan, blocks = cell
        options = f"x: {x}, y: {y}, rowspan: {rowspan}, colspan: {colspan}"
        for name, value in pairs:
            if name in {"fill", "ink"} and (colour := _colour(value)):
                options += f", {name}: {colour}"
        words = self.paragraph(blocks)
        if is_head and "Math" not in json.dumps(blocks):  # a heading may break at its signs
            words = [word(_split_words(plain_text(blocks)))]
        return [raw_inline(f"({options}, body: ["), *words, raw_inline("]), ")]


def _code_block(language: str, text: str) -> Node:
    return code_call("code-cell", text, f"lang: {literal(language) if language else 'none'}")


def _placed(rows: Sequence[Sequence[Any]]) -> list[dict[int, Any]]:
    """Return each row's cells by their column, spans from above taken into account."""
    taken: set[tuple[int, int]] = set()
    placed: list[dict[int, Any]] = []
    for y, cells in enumerate(rows):
        placed.append({})
        x = 0
        for cell in cells:
            while (y, x) in taken:
                x += 1
            cell[2] = min(cell[2], len(rows) - y)
            placed[y][x] = cell
            taken |= {(y + j, x + i) for j in range(cell[2]) for i in range(cell[3])}
    return placed


def _column(side: str, head: Sequence[Any], body: Sequence[Any]) -> str:
    """Return what the template must know of a column: its side, running text or not, headings."""
    texts = [plain_text(cell[4]).strip() for cell in body if cell and cell[3] == 1]
    numbers = [text for text in texts if text not in _MISSING]
    is_number = bool(numbers) and all(_NUMERIC.fullmatch(text) for text in numbers)
    given = {"AlignRight": "right", "AlignCenter": "center", "AlignLeft": "left"}.get(side)
    titles = [_split_words(plain_text(c[4])) for c in head if c and c[3] == 1]
    longest = max(
        (part for t in titles for part in re.split(r"[\s\u200b]", t)), key=len, default=""
    )
    length = max(map(len, texts), default=0)
    wraps = "true" if length > _LONGEST_CELL else "false"
    place = "right" if is_number else given or "left"
    return f"(align: {place}, long: {wraps}, share: {length**0.5:.1f}fr, word: {literal(longest)})"


def _split_words(text: str) -> str:
    return re.sub(r"([_/.\-])(?=\w)", "\\1\u200b", text)


def _colour(text: str) -> str | None:
    try:
        return f'rgb("#{bytes(ImageColor.getrgb(text)[:3]).hex()}")'
    except ValueError:
        return None


# ---- The tree → a PDF, inside a temporary folder that is all Typst can see

_TEMPLATES = ("paper.typ", "quiet.tmTheme")
# First bytes of the picture formats Typst reads.
_MAGIC = {
    b"\x89PNG\r\n": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"RIFF": ".webp",
    b"%PDF-": ".pdf",
}
_API_VERSION = [1, 23, 1]
_CUT = "//-- cut --//"
_LITERAL = re.compile(r'#("(?:[^"\\]|\\.)*");')
# Quoted text first, so that no word of a reader is taken for a symbol.
_NAMES = re.compile(r'\\.|"(?:[^"\\]|\\.)*"|\bsect\b|\b(?:times|dot|minus|dash|plus)\.circle\b')
_REFUSED = call("note", [word("What follows could not be set as it was written.")])


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
            source = files("attnknn").joinpath("paper", "templates", name)
            (folder / name).write_bytes(source.read_bytes())

    def add_picture(self, data: bytes) -> str | None:
        """Store a picture and return its file name; None when it cannot be read as one."""
        suffix = _picture_format(data)
        if suffix is None:
            return None
        self._n_pictures += 1
        name = f"picture-{self._n_pictures}{suffix}"
        (self.folder / name).write_bytes(data)
        try:
            self.compile(f"#image({literal(name)})")
        except PDFError:
            return None
        return name

    def compile(self, source: str, *, timestamp: datetime | None = None) -> bytes:
        """Return the PDF of a Typst source; the same source and time give the same bytes.

        Raises:
            PDFError: With Typst's own message.
        """
        path = self.folder / "main.typ"
        path.write_text(source, encoding="utf-8")
        try:
            pdf = typst.compile(
                path,
                root=self.folder,
                font_paths=_fonts(),
                # NOTE: with `_without_packages`, no import can make Typst look for the network.
                package_path=self.folder / "none",
                package_cache_path=self.folder / "none",
                timestamp=int(timestamp.timestamp()) if timestamp else None,
            )
        except typst.TypstError as error:
            place = str(error.diagnostic).strip()
            raise PDFError(f"typst could not set the document: {error.message}\n{place}") from error
        return packed(pdf)

    def set(self, head: str, units: Sequence[Unit], *, timestamp: datetime) -> bytes:
        """Return the PDF of a document; a unit that Typst refuses becomes a note.

        Args:
            head: Typst source before all units: imports and settings.
            units: The document in parts that can be compiled alone.
            timestamp: Creation time in the PDF.
        """
        sources = _written(units)
        try:
            return self.compile(head + "\n\n".join(sources), timestamp=timestamp)
        except PDFError:
            bad = list(self._refused(head, sources, range(len(sources))))
            if not bad:
                raise
            for i in bad:
                sources[i] = self._simpler(head, units[i], sources[i])
        return self.compile(head + "\n\n".join(sources), timestamp=timestamp)

    def _refused(self, head: str, sources: Sequence[str], places: range) -> Iterator[int]:
        """Yield the places of the units that do not compile, by halving."""
        try:
            self.compile(head + "\n\n".join(sources[i] for i in places))
        except PDFError:
            if len(places) == 1:
                yield places[0]
                return
            middle = len(places) // 2
            yield from self._refused(head, sources, places[:middle])
            yield from self._refused(head, sources, places[middle:])

    def _simpler(self, head: str, unit: Unit, source: str) -> str:
        """Return a unit with its formulas as they were written, or else its words alone."""
        spoken = " ".join(json.loads(text) for text in _LITERAL.findall(source))
        for simpler in (_without_math(unit), [{"t": "Plain", "c": [word(spoken)]}]):
            (found,) = _written([[_REFUSED, *simpler]])
            try:
                self.compile(head + found)
            except PDFError:
                continue
            return found
        return _written([[_REFUSED]])[0]


@contextmanager
def workshop() -> Iterator[Workshop]:
    """Hold a temporary folder; nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="attnknn-pdf-", ignore_cleanup_errors=True) as folder:
        yield Workshop(Path(folder))


def _written(units: Sequence[Unit]) -> list[str]:
    """Return the Typst source of each unit, by one call of pandoc where that is possible."""
    blocks = [block for unit in units for block in (*unit, raw_block(_CUT))]
    tree = {"pandoc-api-version": _API_VERSION, "meta": {}, "blocks": blocks}
    try:
        sources = run_pandoc(json.dumps(tree), "json", "typst").split(_CUT)[:-1]
    except PDFError as error:
        if len(units) <= 1:
            return [f"#note({literal(str(error))})" for _ in units]
        return [source for unit in units for source in _written([unit])]
    return [_NAMES.sub(_renamed, source.strip("\n")) for source in sources]


def _renamed(found: re.Match[str]) -> str:
    """Return the present name of a symbol that pandoc calls by one that Typst has dropped."""
    name = found.group()
    return (
        "inter" if name == "sect" else name.replace(".circle", ".o") if name[0].isalpha() else name
    )


def _without_math(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_math(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("t") == "Math":
        return raw_inline(f"#raw({literal(value['c'][1])});")
    return {key: _without_math(item) for key, item in value.items()}


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
        return ".svg" if b"<svg" in data[:4096] and _is_shallow(data) else None
    if suffix == ".pdf":
        return suffix
    try:
        Image.open(BytesIO(data)).load()  # a cut file has the right first bytes too
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return suffix


def _is_shallow(svg: bytes) -> bool:
    """Tell whether a drawing is whole and not nested so deep that Typst's reader would crash."""
    depth = 0
    try:
        for event, _ in ElementTree.iterparse(BytesIO(svg), events=("start", "end")):
            depth += 1 if event == "start" else -1
            if depth > 500:
                return False
    except ElementTree.ParseError:
        return False
    return True
