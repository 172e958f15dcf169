"""A notebook's verdict → what page one says of it: the first points, or a count of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attnknn.pdf.prose import Node, plain_text

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
