"""Run folders: a name or path becomes a finished training run and its seeds.

``results/<run>/seed<N>/`` holds one trained seed; it is complete once its ``report.json`` exists.
Importing this module is cheap: torch is loaded only when a run is trained or read.
"""

import json
import os
import re
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from attnknn.checks import nearest_name
from attnknn.config import ConfigError, RunConfig, field_names, read_params
from attnknn.data.download import own_files_stamp
from attnknn.files import METHOD_VERSION, check_version, locked_folder, read_json, write_json

RESULTS_VARIABLE = "ATTNKNN_RESULTS"
_SEED_FOLDER = re.compile(r"seed(0|[1-9]\d*)")


def project_root(start: Path | None = None) -> Path | None:
    """Return the nearest folder at or above ``start`` with ``notebooks/`` and ``pyproject.toml``.

    Args:
        start: Where to begin; the current folder when None.

    Returns:
        The project's folder, or None outside of any project.
    """
    start = Path(start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return None


def results_root() -> Path:
    """Return the folder of all runs: ``$ATTNKNN_RESULTS``, else the project's ``results``."""
    if given := os.environ.get(RESULTS_VARIABLE):
        return Path(given).expanduser().resolve()
    return (project_root() or Path.cwd().resolve()) / "results"


def run_folder(run_dir: str) -> Path:
    """Return where a run is or shall be; nothing is created.

    Args:
        run_dir: A bare name is a folder of ``results_root()``; anything with a separator is a path,
            looked for from the current folder first, then from the project.

    Returns:
        The absolute path of the run's folder.
    """
    path = Path(run_dir).expanduser()
    if path.is_absolute():
        return path
    if len(path.parts) == 1 and not str(run_dir).startswith("."):
        return results_root() / path
    places = [Path.cwd(), project_root() or Path.cwd()]
    return next((p / path for p in places if (p / path).is_dir()), places[0] / path).resolve()


def training_folder(run_dir: str, config: RunConfig) -> Path:
    """Return the folder of one seed of a run that is to be trained; nothing is created.

    Args:
        run_dir: Name or path of the run. Empty gives each configuration a run of its own, named
            after data set, backbone and a digest of all settings but the seed.
        config: What will be trained.
    """
    if run_dir:
        return seed_folder(run_folder(run_dir), config.seed)
    settings = {name: value for name, value in config.flat().items() if name != "seed"}
    digest = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{Path(config.data.dataset).stem}-{config.embedder.backbone}-{digest}"
    return seed_folder(results_root() / re.sub(r"[^\w.-]+", "-", name), config.seed)


def seed_folder(run: Path, seed: int) -> Path:
    """Return the folder of one seed of a run."""
    return Path(run) / f"seed{seed}"


def seeds_in(run: Path) -> list[int]:
    """Return the seeds of ``run`` whose training is complete, ascending."""
    return [seed for seed in _started_seeds(run) if _seed_report(run, seed).is_file()]


def is_finished(run: Path) -> bool:
    """Tell whether every seed that ``run`` was asked for, and at least one, is trained."""
    wanted = set(_started_seeds(run))
    if (report := Path(run) / "report.json").is_file():
        try:
            wanted |= set(read_json(report).get("seeds", ()))
        except ValueError:  # damaged by hand; one bad folder must not hide the good ones
            return False
    return bool(wanted) and wanted == set(seeds_in(run))


def finished_runs() -> list[Path]:
    """Return the finished runs of ``results_root()``, newest training first."""
    root = results_root()
    runs = [p for p in root.iterdir() if p.is_dir() and is_finished(p)] if root.is_dir() else []
    return sorted(runs, key=_made_at, reverse=True)


def resolve_run(run_dir: str = "") -> Path:
    """Return a finished run, and print which one it is.

    Args:
        run_dir: Name or path of a finished run. Empty takes the newest finished run, and trains
            the quick profile when there is none.

    Returns:
        The run's folder; it has at least one trained seed.

    Raises:
        ConfigError: When the named run does not exist or is not finished.
    """
    if run_dir:
        run, reason = run_folder(run_dir), "as asked"
        if not is_finished(run):
            raise ConfigError(_not_finished(run_dir, run))
    elif finished := finished_runs():
        run, reason = finished[0], "the newest finished run"
    else:
        run, reason = _train_quick(), "trained just now"
    seeds = ", ".join(str(seed) for seed in seeds_in(run))
    made = datetime.fromtimestamp(_made_at(run)).strftime("%Y-%m-%d %H:%M")
    print(f"Run {run.name!r} ({reason}), made {made}, seeds {seeds}")
    return run


def load_seeds(run: Path, seeds: Sequence[int] = ()) -> list["attnknn.embed.run.TrainedRun"]:
    """Return the trained seeds of a run, in the order asked for; all of them when none is named."""
    present = seeds_in(run)
    missing = [seed for seed in seeds if seed not in present]
    if missing or not present:
        raise ConfigError(f"seeds must be trained in {run} ({present=}), got seeds={list(seeds)}")
    from attnknn.embed.run import load_run

    return [load_run(seed_folder(run, seed)) for seed in (seeds or present)]


def profile_seeds(values: dict[str, Any]) -> list[int]:
    """Return the seeds a profile names, taking ``seed`` or ``seeds`` out of ``values``."""
    if "seed" in values and "seeds" in values:
        raise ConfigError("a profile must name seed or seeds, got both")
    seeds = values.pop("seeds", None)
    seeds = [values.pop("seed", 0)] if seeds is None else seeds
    valid = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not valid or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds must be a list of different integers of at least 0, got {seeds=}")
    return sorted(seeds)


def _train_quick() -> Path:
    """Train the quick profile's first seed; outside of the project, the default settings."""
    from attnknn.embed.run import train_run

    project, values = project_root(), {}
    if project is not None:
        values = read_params(project / "notebooks/params/quick.yaml")
    seed = profile_seeds(values)[0]
    settings = {name: value for name, value in values.items() if name in field_names()}
    run = results_root() / "quick"
    source = "the quick profile" if project is not None else "the default settings"
    print(f"No finished run in {results_root()}: training {source}", flush=True)
    with locked_folder(run):
        train_run(RunConfig.from_flat(settings | {"seed": seed}), seed_folder(run, seed))
    return run


def _not_finished(run_dir: str, run: Path) -> str:
    if not run.is_dir():
        hint = nearest_name(run_dir, [path.name for path in finished_runs()])
        return f"run_dir must be a finished run, got {run_dir=}: there is no {run}{hint}"
    unfinished = sorted(set(_started_seeds(run)) - set(seeds_in(run)))
    why = f"seeds {unfinished} are not trained to the end" if unfinished else "seeds are missing"
    return f"run_dir must be a finished run, got {run_dir=}: {why} in {run}"


def _started_seeds(run: Path) -> list[int]:
    if not Path(run).is_dir():
        return []
    found = (_SEED_FOLDER.fullmatch(path.name) for path in Path(run).iterdir() if path.is_dir())
    return sorted(int(match.group(1)) for match in found if match)


def _seed_report(run: Path, seed: int) -> Path:
    return seed_folder(run, seed) / "report.json"


def _made_at(run: Path) -> float:
    return max(_seed_report(run, seed).stat().st_mtime for seed in seeds_in(run))


# ---- Whose a run folder is: one configuration, one set of rows.


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


def check_data(folder: Path, dataset: str, found: dict[str, str] | None = None) -> None:
    """Note which rows and version a folder is made from, or refuse to go on with others.

    Args:
        folder: The run's.
        dataset: A known name, or the path of own files.
        found: Source and fingerprint of the rows; None for a finished folder, whose own files alone
            are looked at.
    """
    path = folder / "data.json"
    if not path.exists() and found is not None:
        facts = {"own_files": own_files_stamp(dataset), "method_version": METHOD_VERSION}
        write_json(path, found | facts)
        return
    facts = read_json(path) if path.exists() else {}
    check_version(facts.get("method_version"), METHOD_VERSION, folder=folder)
    if found is not None and facts["fingerprint"] != found["fingerprint"]:
        raise ConfigError(f"{folder} was begun with other rows of {dataset}; use another folder")
    if found is None and facts["own_files"] != own_files_stamp(dataset):
        raise ConfigError(
            f"{dataset} has changed since {folder} was made from it; use another folder"
        )
