"""A finished training elsewhere → the same training here.

Runs that differ in study parameters alone ask for one and the same training. Its key (cells,
settings, seed, own files) and the code tell that it would come out again, so it is taken over.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attnknn.config import ConfigError
from attnknn.files import write_json
from attnknn.pipeline.state import GRID_NAME, ORIGIN_NAME, RunFolder, Task, code_digest
from attnknn.runs import seed_folder


def adopt_training(run: RunFolder, task: Task) -> str | None:
    """Give a run the trained seed of another run that asked for exactly the same training.

    Args:
        run: The run that needs it; a seed it has begun or trained itself is left alone.
        task: The training.

    Returns:
        Name of the run it was taken from, also written beside the trained seed; None without one.
    """
    target = seed_folder(run.path, task.seeds[0])
    if target.is_dir() and any(not path.name.startswith(".") for path in target.iterdir()):
        return None
    root = run.path.parent
    root = root.parent if (root / GRID_NAME).is_file() else root
    for folder in _runs_below(root):
        if folder != run.path and _has_training(folder, task):
            name = str(folder.relative_to(root))
            if _take_over(seed_folder(folder, task.seeds[0]), target, name):
                return name
    return None


def _runs_below(root: Path) -> Iterator[Path]:
    """Return the runs of a results folder, those inside of grids included."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if (folder / GRID_NAME).is_file():
            yield from sorted(path for path in folder.iterdir() if path.is_dir())
        else:
            yield folder


def _has_training(folder: Path, task: Task) -> bool:
    try:
        donor = RunFolder(folder)
    except ConfigError:  # a damaged report is the business of its own run
        return False
    return donor.is_complete(task) and donor.entries[task.name]["code"] == code_digest()


def _take_over(source: Path, target: Path, name: str) -> bool:
    """Make ``target`` a whole copy of ``source``, or leave nothing."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        ignored = shutil.ignore_patterns(".*")
        shutil.copytree(source, work / "seed", copy_function=_link_or_copy, ignore=ignored)
        write_json(work / "seed" / ORIGIN_NAME, {"run": name})
        if target.exists():  # a folder with nothing but a lock
            shutil.rmtree(target)
        (work / "seed").rename(target)
    except (OSError, shutil.Error):  # replaced meanwhile, or no room: then it is trained here
        return False
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _link_or_copy(source: str, target: str) -> None:
    # Weights and embeddings are large, and only ever replaced as a whole: both runs may share them.
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copy2(source, target)
