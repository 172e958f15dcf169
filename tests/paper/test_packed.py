"""A packed PDF says what it said before, in less room."""

from datetime import UTC, datetime
from io import BytesIO

import typst
from pypdf import PdfReader

from attnknn.paper.packed import packed
from attnknn.paper.typst import workshop

# More objects than one stream holds: headings, links, and a table with a tag for every cell.
SOURCE = "= One\n#link(<two>)[over there]\n#table(columns: 9, ..range(400).map(str))\n= Two <two>\n"


def written(reader: PdfReader, number: int) -> bytes:
    """Return an object as the reader would write it again."""
    stream = BytesIO()
    reader.get_object(number).write_to_stream(stream)
    return stream.getvalue()


def test_nothing_is_lost(tmp_path):
    path = tmp_path / "main.typ"
    path.write_text(SOURCE)
    plain = typst.compile(path)
    small = packed(plain)
    before, after = PdfReader(BytesIO(plain)), PdfReader(BytesIO(small), strict=True)
    assert len(small) < 0.5 * len(plain)
    pages = zip(before.pages, after.pages, strict=True)
    assert all(one.extract_text() == two.extract_text() for one, two in pages)
    assert [item.title for item in after.outline] == ["One", "Two"]
    assert after.metadata == before.metadata
    assert len(after.pages[0].annotations) == len(before.pages[0].annotations) == 1
    numbers = range(1, before.trailer["/Size"])
    assert len(numbers) > 400
    assert all(written(after, number) == written(before, number) for number in numbers)


def test_what_another_program_wrote_stays_as_it_is():
    assert packed(b"no PDF at all") == b"no PDF at all"
    with workshop() as place:
        pdf = place.compile("word", timestamp=datetime(2025, 1, 1, tzinfo=UTC))
    assert b"/Type/ObjStm" in pdf and packed(pdf) == pdf
