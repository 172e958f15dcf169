"""All notebooks of a run in one PDF: verdicts and contents on page one, then a chapter each."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnknn.files import sha256_file, validity_key, write_atomic
from attnknn.paper.folder import RunFolder
from attnknn.paper.markup import Node, call, plain_text, raw_block, read_markdown, word
from attnknn.paper.pdf import (
    Chapter,
    document_head,
    notebook_to_pdf,
    provenance_lines,
    read_chapters,
    read_source,
    without_headings,
)
from attnknn.paper.typst import Setter, Unit, Workshop, workshop

# ---- A notebook's verdict → what page one says of it: the first points, or a count of them.

MOST_LETTERS = 300  # of an excerpt: three lines of page one
_LEAST_COUNTED = 5  # points; fewer are shown as they are


@dataclass(frozen=True)
class Excerpt:
    """The beginning of a verdict.

    Attributes:
        blocks: Pandoc blocks: paragraphs, and lists of whole points.
        n_left: Points and paragraphs left out.
    """

    blocks: list[Node]
    n_left: int


def excerpt(blocks: Sequence[Node]) -> Excerpt:
    """Return whole points from the beginning of a verdict, at least one.

    A long list whose points all end in one of a few bold words ("holds", "does not hold") is
    counted instead: its first points would say nothing of the rest.

    Args:
        blocks: The verdict's pandoc blocks.
    """
    if (tally := _tally(blocks)) is not None:
        return Excerpt([tally], 0)
    points = list(_points(blocks))
    kept: list[tuple[bool, list[Node]]] = []
    room = MOST_LETTERS
    for listed, point in points:
        room -= len(plain_text(point))
        # A paragraph that introduces a list says nothing without the first point of it.
        introduces = bool(kept) and not kept[-1][0] and listed
        if kept and room < 0 and not introduces:
            break
        kept.append((listed, point))
    return Excerpt(_joined(kept), len(points) - len(kept))


def _points(blocks: Sequence[Node]) -> Iterator[tuple[bool, list[Node]]]:
    """Yield each paragraph and each point of a list, and whether it is such a point."""
    for block in blocks:
        if block["t"] == "BulletList":
            yield from ((True, item) for item in block["c"])
        else:
            yield False, [block]


def _joined(points: Sequence[tuple[bool, list[Node]]]) -> list[Node]:
    blocks: list[Node] = []
    for listed, point in points:
        if listed and blocks and blocks[-1]["t"] == "BulletList":
            blocks[-1]["c"].append(point)
        elif listed:
            blocks.append({"t": "BulletList", "c": [point]})
        else:
            blocks += point
    return blocks


def _tally(blocks: Sequence[Node]) -> Node | None:
    """Return "holds 7, does not hold 4" for a list of which every point has one such word."""
    if not blocks or blocks[0]["t"] != "BulletList":
        return None
    points = blocks[0]["c"]
    bold = [list(_bold_words(point)) for point in points]
    if len(points) < _LEAST_COUNTED or any(len(words) != 1 for words in bold):
        return None
    counts = Counter(words[0] for words in bold)
    if len(counts) > len(points) // 2:
        return None
    parts: list[Node] = [{"t": "Str", "c": f"Of {len(points)} points:"}]
    for i, (words, count) in enumerate(counts.most_common()):
        strong = {"t": "Strong", "c": [{"t": "Str", "c": words}]}
        end = "." if i == len(counts) - 1 else ","
        parts += [{"t": "Space"}, strong, {"t": "Space"}, {"t": "Str", "c": f"{count}{end}"}]
    return {"t": "Para", "c": parts}


def _bold_words(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _bold_words(item)
    elif isinstance(node, dict):
        if node["t"] == "Strong":
            yield plain_text(node)
        else:
            yield from _bold_words(node.get("c", []))


NO_VERDICT = "*No verdict was computed.*"
_MOST_WITH_SECTIONS = 6  # chapters; with more, the contents list chapters only and fit page one


def bind_report(
    notebooks: Sequence[Path],
    output: Path,
    *,
    title: str,
    provenance: Mapping[str, object],
    verdicts: Sequence[tuple[str, str]] | None = None,
    preface: str = "",
) -> Path:
    """Bind executed notebooks into one PDF and return where it is.

    Args:
        notebooks: The notebooks in reading order.
        output: The PDF.
        title: Title of the whole, plain text.
        provenance: Where the numbers come from, such as run, seeds and commit.
        verdicts: Pairs (title, Markdown sentence) for page one; by default the beginning of what
            each notebook's cells tagged ``verdict`` have put out.
        preface: Markdown of a chapter before the notebooks, with a heading; none when empty.

    Raises:
        ValueError: If there is no notebook, or one of the files is not a notebook.
        PDFError: If Typst refuses the document.
    """
    if not notebooks:
        raise ValueError(f"notebooks must name at least one notebook, got {notebooks=}")
    sources = [read_source(path) for path in notebooks]
    with workshop() as place:
        chapters = _told_apart(read_chapters(sources, place, top_level=2), notebooks)
        entries = list(verdicts or ())
        if verdicts is None:
            entries = [
                (c.name, s.verdict or NO_VERDICT) for c, s in zip(chapters, sources, strict=True)
            ]
        date = max(chapter.date for chapter in chapters)
        cover = Chapter(title, [word(title)], [], date, provenance_lines(provenance))
        depth = 2 if len(chapters) <= _MOST_WITH_SECTIONS else 1
        units = [[cover.heading("title-block")], _front(entries, place, linked=verdicts is None)]
        units += [[raw_block(f"#contents({depth})")], *_preface(preface, place)]
        for i, chapter in enumerate(chapters):
            own = [line for line in chapter.provenance if line not in cover.provenance]
            start = replace(chapter, provenance=own).heading("chapter")
            units += [[raw_block(f'#chapter-start("{_mark(i)}")'), start], *chapter.units]
        pdf = place.set(document_head(title, "bound: true"), units, timestamp=date)
    return write_atomic(output, lambda file: file.write(pdf))


def _told_apart(chapters: Sequence[Chapter], notebooks: Sequence[Path]) -> list[Chapter]:
    """Return the chapters; those of one title get what their files add to it, such as a seed."""
    counts = Counter(chapter.name for chapter in chapters)
    endings = [Path(notebook).stem.partition(".")[2] for notebook in notebooks]
    return [
        replace(chapter, title=[*chapter.title, {"t": "Space"}, word(f"({ending})")])
        if ending and counts[chapter.name] > 1
        else chapter
        for chapter, ending in zip(chapters, endings, strict=True)
    ]


def _mark(place: int) -> str:
    """Return the label of a chapter; those of headings begin with another letter."""
    return f"chapter-{place}"


def _front(entries: Sequence[tuple[str, str]], place: Workshop, *, linked: bool) -> Unit:
    trees = read_markdown({f"v{i}": text for i, (_, text) in enumerate(entries)})
    setter = Setter(place)
    blocks = [raw_block("#summary[")]
    for i, (title, _) in enumerate(entries):
        found = excerpt(without_headings(trees[f"v{i}"]))
        blocks += [raw_block("#summary-entry["), call("summary-title", [word(title)])]
        blocks += setter.blocks(found.blocks)
        if found.n_left and linked:
            blocks.append(raw_block(f'#summary-rest({found.n_left}, "{_mark(i)}")'))
        blocks.append(raw_block("]"))
    return [*blocks, raw_block("]")]


def _preface(markdown: str, place: Workshop) -> list[Unit]:
    """Return a chapter of Markdown alone; its first heading is the chapter's."""
    if not markdown:
        return []
    blocks = read_markdown({"p": markdown})["p"]
    heading = next((block for block in blocks if block["t"] == "Header"), None)
    if heading is None:
        raise ValueError(f"preface must hold a heading, got {markdown[:80]!r}")
    setter = Setter(place, prefix="preface")
    rest = [block for block in blocks if block is not heading]
    opening = call("preface-start", setter.words(heading["c"][2]))
    return [[opening], *([block] for block in setter.blocks(without_headings(rest)))]


# ---- A run's executed copies → their PDFs: one for each notebook, and one that binds them all

_PAGE_VERSION = 2  # raise it when PDFs of the same notebooks look different


def publish(run: RunFolder) -> list[str]:
    """Write the PDFs of a run that are missing, damaged or older than their notebooks.

    Args:
        run: A run; only its complete notebooks are printed.

    Returns:
        One line for each PDF that could not be made.
    """
    entries = {n: e for n, e in sorted(run.entries.items()) if e["status"] == "complete"}
    copies = {name: run.path / entry["copy"] for name, entry in entries.items()}
    problems = []
    for name, copy in copies.items():
        key = validity_key(sha256_file(copy), version=_PAGE_VERSION)
        problems += _print(
            entries[name], key, copy.with_suffix(".pdf"), lambda copy=copy: notebook_to_pdf(copy)
        )
        run.save()
    claims = run.path / "claims.md"
    preface = claims.read_text(encoding="utf-8") if claims.is_file() else ""
    keys = [[name, entry.get("pdf_key")] for name, entry in entries.items()]
    if entries:
        key = validity_key([preface, keys], version=_PAGE_VERSION)
        output = run.path / "report.pdf"
        problems += _print(
            run.report, key, output, lambda: _bind(run, list(copies.values()), output, preface)
        )
        run.save()
    return problems


def _print(record: dict[str, Any], key: str, output: Path, make: Callable[[], Any]) -> list[str]:
    """Make a PDF unless it is there as it was made from the same; note it in ``record``."""
    if (
        record.get("pdf_key") == key
        and output.is_file()
        and sha256_file(output) == record.get("pdf_sum")
    ):
        return []
    record.pop("pdf_key", None)
    try:
        make()
    except (RuntimeError, ValueError) as error:
        return [f"no {output}: {error}"]
    record |= {"pdf_key": key, "pdf_sum": sha256_file(output)}
    return []


def _bind(run: RunFolder, copies: Sequence[Path], output: Path, preface: str) -> None:
    facts = {name: run.report.get(name) for name in ("run", "dataset", "seeds", "commit")}
    facts["versions"] = run.report.get("versions", {})
    title = f"Attn-KNN: {run.report['run']}"
    bind_report(copies, output, title=title, provenance=facts, preface=preface)
