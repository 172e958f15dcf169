"""Whose a run folder is: one configuration, one set of rows."""

from pathlib import Path

from attnknn.config import ConfigError, RunConfig
from attnknn.data import Splits
from attnknn.files import read_json, write_json
from attnknn.sources import own_files_stamp


def claim(folder: Path, config: RunConfig) -> None:
    """Write the configuration first thing, or refuse a folder that has another one."""
    path, wanted = folder / "config.json", config.flat()
    if not path.exists():
        write_json(path, wanted)
        return
    # A setting that did not exist when the folder was made had its default value.
    found = RunConfig().flat() | read_json(path)
    other = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    if other:
        changes = ", ".join(f"{n}: {found.get(n)!r} -> {wanted.get(n)!r}" for n in other)
        raise ConfigError(
            f"{folder} was made with another configuration ({changes}); use another folder"
        )


def check_data(folder: Path, splits: Splits, dataset: str) -> None:
    """Note which rows a folder is made from, or refuse to go on with others."""
    path = folder / "data.json"
    if not path.exists():
        stamp = own_files_stamp(dataset)
        facts = {"source": splits.source, "fingerprint": splits.fingerprint, "own_files": stamp}
        write_json(path, facts)
    elif read_json(path)["fingerprint"] != splits.fingerprint:
        raise ConfigError(f"{folder} was begun with other rows of {dataset}; use another folder")


def check_own_files(folder: Path, dataset: str) -> None:
    """Refuse a finished folder whose own data files have changed since."""
    path = folder / "data.json"
    stamp = read_json(path).get("own_files") if path.exists() else None
    if stamp is not None and stamp != own_files_stamp(dataset):
        raise ConfigError(
            f"{dataset} has changed since {folder} was made from it; use another folder"
        )
