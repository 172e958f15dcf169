"""Files that are complete or absent: atomic writes, checksums, a folder lock.

A crash between the first and the last byte must never leave something that looks like a result.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout


class FolderBusyError(RuntimeError):
    """Another process is writing into the same folder."""


def write_atomic(path: Path, write: Callable[[IO[bytes]], Any]) -> Path:
    """Write a file through ``write(handle)`` so that it appears whole or not at all.

    Args:
        path: Where the finished file shall be; its folder is made when missing.
        write: Receives a binary handle and fills it.

    Returns:
        The finished path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False
    )
    try:
        with handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        # NamedTemporaryFile makes files private; results should follow the user's umask.
        Path(handle.name).chmod(0o666 & ~_umask())
        Path(handle.name).replace(path)
    except BaseException:
        Path(handle.name).unlink(missing_ok=True)
        raise
    return path


def write_text(path: Path, text: str) -> Path:
    """Write ``text`` as UTF-8, atomically."""
    return write_atomic(path, lambda handle: handle.write(text.encode()))


def write_json(path: Path, value: Any) -> Path:
    """Write ``value`` as indented JSON, atomically; NaN and infinity are refused."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the parsed content of a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def path_stamp(path: Path) -> str:
    """Return a digest of a file's or folder's names, sizes and times: it changes when they do."""
    path = Path(path)
    members = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    facts = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in members]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; a second holder is refused at once.

    The lock belongs to the process, so a killed one leaves nothing to clean up.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderBusyError(
            f"{folder} is being written by another process; "
            "wait for it to end or choose another run name"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
