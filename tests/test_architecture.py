"""The map shows the house: the folders that docs/architecture.md names are those that there are."""

import re

from tests.test_layers import ORDER, PACKAGE

PAGE = PACKAGE.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| `(\w+)/` \| [^|]+ \| ([^|]+) \|$", re.M)


def test_the_folders_stand_in_the_order_of_the_layers():
    folders = [name for name in ORDER if (PACKAGE / name).is_dir()]
    assert [name for name, _ in ROW.findall(PAGE.read_text())] == folders


def test_every_file_named_is_there():
    for folder, files in ROW.findall(PAGE.read_text()):
        for name in re.findall(r"`([\w.]+)`", files):
            assert (PACKAGE / folder / name).is_file(), f"{folder}/{name}"
    beside = PAGE.read_text().split("Beside them")[1].split("```")[0]
    assert all((PACKAGE / name).is_file() for name in re.findall(r"`(\w+\.py)`", beside))
