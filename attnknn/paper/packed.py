"""A PDF as Typst writes it → the same PDF in less room.

Typst writes every small object (structure tags above all: thousands a report) as plain text of
its own. Object streams (ISO 32000-1, 7.5.7) hold a few hundred of them each, compressed.
"""

import re
import zlib

_SHARE = 200  # objects a stream; a reader unpacks all of a stream to get at one


def packed(pdf: bytes) -> bytes:
    """Return a PDF with its small objects in object streams.

    A file that is not built as Typst builds it (one table of offsets) comes back as it is.
    """
    start = re.search(rb"startxref\s+(\d+)\s+%%EOF\s*$", pdf)
    if start is None or not pdf[int(start[1]) :].startswith(b"xref"):
        return pdf
    table, trailer = pdf[int(start[1]) : start.start()].split(b"trailer")
    entries = re.findall(rb"(\d{10}) (\d{5}) ([nf])", table)
    offsets = {number: int(at) for number, (at, _, kind) in enumerate(entries) if kind == b"n"}
    small, large = _objects(pdf[: int(start[1])], offsets)
    out, places = bytearray(pdf[: min(offsets.values())]), {0: (0, 0, 65535)}

    def write(number: int, body: bytes) -> None:
        places[number] = (1, len(out), 0)
        out.extend(b"%d 0 obj\n%s\nendobj\n" % (number, body))

    for number, body in large.items():
        write(number, body)
    free, numbers = len(entries), sorted(small)
    for first in range(0, len(numbers), _SHARE):
        chosen = numbers[first : first + _SHARE]
        places |= {number: (2, free, place) for place, number in enumerate(chosen)}
        write(free, _object_stream([(number, small[number]) for number in chosen]))
        free += 1
    at = len(out)
    places[free] = (1, at, 0)
    rows = b"".join(
        kind.to_bytes(1) + where.to_bytes(4) + place.to_bytes(2)
        for kind, where, place in (places.get(number, (0, 0, 0)) for number in range(free + 1))
    )
    kept = re.sub(rb"/Size \d+", b"/Size %d" % (free + 1), trailer).strip().removeprefix(b"<<")
    head = b"/Type/XRef/W[1 4 2]" + kept.removesuffix(b">>")
    out.extend(b"%d 0 obj\n%s\nendobj\nstartxref\n%d\n%%%%EOF" % (free, _stream(rows, head), at))
    return bytes(out)


def _objects(body: bytes, offsets: dict[int, int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the objects without a stream, and those with one, which may not go into another."""
    small, large = {}, {}
    order = sorted(offsets, key=offsets.__getitem__)
    ends = [offsets[number] for number in order[1:]] + [len(body)]
    for number, end in zip(order, ends, strict=True):
        text = body[offsets[number] : end].split(b"obj", 1)[1].rsplit(b"endobj", 1)[0].strip()
        if text.endswith(b"endstream"):
            large[number] = text
        else:
            small[number] = text
    return small, large


def _object_stream(objects: list[tuple[int, bytes]]) -> bytes:
    index, bodies, at = [], [], 0
    for number, body in objects:
        index.append(b"%d %d" % (number, at))
        bodies.append(body)
        at += len(body) + 1
    heads = b" ".join(index) + b"\n"
    kind = b"/Type/ObjStm/N %d/First %d" % (len(objects), len(heads))
    return _stream(heads + b"\n".join(bodies), kind)


def _stream(content: bytes, head: bytes) -> bytes:
    small = zlib.compress(content, 9)
    return b"<<%s/Length %d/Filter/FlateDecode>>\nstream\n%s\nendstream" % (head, len(small), small)
