"""Files that are complete or absent: atomic writes, checksums, a folder lock.

A crash between the first and the last byte must never leave something that looks like a result.
"""

import dataclasses
import hashlib
import json
import math
import os
import pickle
import platform
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock, Timeout

REPORT_NAME = "report.json"


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


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> Path:
    """Write tensors by name as safetensors, atomically."""
    from safetensors.torch import save  # slow to import, and few who come here need it

    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return write_atomic(path, lambda handle: handle.write(save(plain)))


def write_table(path: Path, table: "pandas.DataFrame") -> Path:
    """Write a table as CSV, atomically."""
    return write_text(path, table.to_csv(index=False))


def read_table(path: Path) -> "pandas.DataFrame":
    """Return what ``write_table`` wrote; a table without columns is empty."""
    import pandas as pd

    try:
        return pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return pd.DataFrame()


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


# ---- Validity: whether a result is still the result of what it was made from. There is one way to
# ask: a version that a person raises, parameters, and sums of the data. Code is not summed: a moved
# or reworded file makes no number wrong.

METHOD_VERSION = 1  # raise it when training, search, vote or calibration give other numbers
AFMP_VERSION = 1  # the same for AFMP's models and their training


class ResultError(RuntimeError):
    """A finished result that may not be used again."""


class OutdatedError(ResultError):
    """A result of another version of this program."""


class DamagedError(ResultError):
    """A finished folder whose files are not those that were written."""


def validity_key(parameters: Any, *, version: int, data: Iterable[str | None] = ()) -> str:
    """Return a digest that two results share exactly when one may stand for the other.

    Args:
        parameters: Plain values: all that was asked for.
        version: ``METHOD_VERSION`` or ``AFMP_VERSION``.
        data: Sums of the rows and files that were read.
    """
    content = json.dumps([version, parameters, list(data)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def check_version(found: int | None, current: int, *, folder: Path) -> None:
    """Refuse a folder that another version has made."""
    if found != current:
        raise OutdatedError(
            f"{folder} must be made by version {current} of the method, got version {found}; "
            "make it anew or use another folder"
        )


def path_sum(path: Path) -> str:
    """Return a digest of a file's content, or of a folder's names and contents."""
    # The stamp only says when to read again: a copy has the same sum.
    return _path_sum(Path(path), path_stamp(path))


@lru_cache(maxsize=64)
def _path_sum(path: Path, stamp: str) -> str:
    sums = {"": sha256_file(path)} if path.is_file() else folder_sums(path)
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def folder_sums(folder: Path, *, without: Collection[str] = (REPORT_NAME,)) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder by its relative name; dotted ones are left out.

    Args:
        folder: Where the files are.
        without: Names to leave out, such as the report that shall hold these sums.
    """
    folder = Path(folder)
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    kept = [n for n in names if n not in without and not Path(n).name.startswith(".")]
    return {name: sha256_file(folder / name) for name in kept}


def check_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Refuse a folder whose files are not those that were summed; further files are no matter."""
    for name, wanted in sums.items():
        path = Path(folder) / name
        if not path.is_file() or sha256_file(path) != wanted:
            state = "other content" if path.is_file() else "no such file"
            raise DamagedError(
                f"{path} must be as it was written, got {state}; delete its folder to make it anew"
            )


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


# ---- Provenance: what a number came from, kept beside it in ``report.json``.
#
# A report holds config, seed, metrics, seconds, hardware, versions and commit.

PACKAGES = (
    "attnknn",
    "torch",
    "torchvision",
    "timm",
    "faiss-cpu",
    "numpy",
    "scipy",
    "scikit-learn",
    "pandas",
    "matplotlib",
)


def save_report(
    folder: Path,
    *,
    config: Any,
    seed: int | None,
    metrics: Mapping[str, Any],
    seconds: float | Mapping[str, float],
    overwrite: bool = False,
    origin: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write ``report.json``, atomically, and return its path.

    JSON knows no infinity and no NaN: such numbers are stored as null and named, with their value,
    under ``not_finite``; ``read_report`` puts them back.

    Args:
        folder: Folder of the run.
        config: Mapping or dataclass.
        seed: Seed of the run.
        metrics: Measures by name, also nested.
        seconds: Time taken, in all or by stage.
        overwrite: Replace a report that is already there instead of refusing.
        origin: What ``provenance`` returned when the work began; taken now when None. Code on disk
            may change while a long process runs.
        more: Further entries.
    """
    path = Path(folder) / REPORT_NAME
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already: a finished run is not overwritten")
    report = {"config": config, "seed": seed, "metrics": metrics, "seconds": seconds}
    lost: dict[str, str] = {}
    content = _json_ready(
        {**report, **more, **(provenance() if origin is None else origin)}, "", lost
    )
    return write_json(path, {**content, "not_finite": lost} if lost else content)


def read_report(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's ``report.json``, infinities and NaN restored."""
    report = read_json(Path(folder) / REPORT_NAME)
    for place, value in report.pop("not_finite", {}).items():
        *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in place.split("/"))
        holder = report
        for key in parents:
            holder = holder[int(key) if isinstance(holder, list) else key]
        holder[int(last) if isinstance(holder, list) else last] = float(value)
    return report


def provenance() -> dict[str, Any]:
    """Return hardware, versions and commit of this process."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def hardware() -> dict[str, Any]:
    """Return CPU model, cores usable by this process, memory in GB, and GPU (None without)."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": usable,
        "memory_gb": _memory_gb(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(folder: Path | None = None) -> str:
    """Return the commit of the code: its hash, with ``-dirty`` after local changes.

    ``unknown`` where the code is not in a git checkout of its own, for instance when installed
    into the environment of another project.

    Args:
        folder: Folder whose code is meant; this package by default.
    """
    folder = Path(folder or Path(__file__).parent)
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    found = _git(folder, "rev-parse", "HEAD")
    if not found:
        return "unknown"
    return f"{found}-dirty" if _git(folder, "status", "--porcelain", "--", ".") else found


def _git(folder: Path, *arguments: str) -> str | None:
    # Optional locks off: asking must never disturb a git command of the user.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)


def _json_ready(value: Any, place: str, lost: dict[str, str]) -> Any:
    """Return ``value`` in types JSON knows; non-finite numbers go to ``lost`` by their place."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        inside = {str(key): part for key, part in value.items()}
        return {key: _json_ready(part, _join(place, key), lost) for key, part in inside.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(part, _join(place, i), lost) for i, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        lost[place] = str(value)
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{place} must be storable as JSON, got {type(value).__name__}")


def _join(place: str, key: object) -> str:
    """Return a place as a JSON pointer: a slash inside a key is written ``~1``."""
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"{place}/{escaped}" if place else escaped


# ---- Checkpoints: the full state of a training in one file that cannot run code when it is read.


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> Path:
    """Write tensors, numbers, text and containers of them, atomically."""
    import torch  # slow to import, and few who come here need it

    return write_atomic(path, lambda handle: torch.save(state, handle))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return what ``save_checkpoint`` wrote; anything but plain data is refused."""
    try:
        import torch

        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} must be a checkpoint of this program; delete it to train from the start "
            f"({error})"
        ) from error
