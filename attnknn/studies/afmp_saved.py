"""What the programs in ``benchmarks`` saved about AFMP: where it lies, and two of them in words."""

from pathlib import Path
from typing import Any

from attnknn.files import read_json
from attnknn.runs import project_root, results_root

PLACE = Path("afmp")
EPOCH_COMMAND = "python benchmarks/afmp_epoch.py --out results/afmp/epoch"
CONTROLS_COMMAND = "python benchmarks/afmp_controls.py --out results/afmp/controls"


def saved_place(name: str, file: str) -> Path | None:
    """Return the folder in which a benchmark left a file: among the results, or in the project."""
    roots = (results_root(), (project_root() or Path()) / "results")
    places = [root / PLACE / name for root in roots]
    return next((place for place in places if (place / file).is_file()), None)


def _summary(name: str) -> dict[str, Any] | None:
    place = saved_place(name, f"{name}.json")
    return None if place is None else read_json(place / f"{name}.json")


def epoch_words() -> str:
    """Return, in Markdown, how long training epochs take, or how to measure it."""
    saved = _summary("epoch")
    if saved is None:
        return f"Time of an epoch: not measured here; `{EPOCH_COMMAND}` does."
    times = "; ".join(f"{name} {value:.1f}" for name, value in saved["seconds"].items())
    return (
        f"Seconds of a training epoch of AFMP-Tiny on {saved['images']:,} images, median of "
        f"{saved['rounds']}, {saved['threads']} threads of {saved['hardware']['cpu']}: {times}. "
        f"Measured by `{saved['command']}`."
    )


def controls_words() -> str:
    """Return, in Markdown, what AFMP owes to messages and to size, or how to find out."""
    saved = _summary("controls")
    if saved is None:
        return f"Controls: not trained here; `{CONTROLS_COMMAND}` does."
    sizes = "; ".join(f"{name} {value:,}" for name, value in saved["parameters"].items())
    told = [verdict for verdict in saved["verdicts"] if " in accuracy (" in verdict]
    return "\n".join(
        [
            f"Trained on {saved['images']:,} images by `{saved['command']}`; parameters: {sizes}.",
            "",
            *(f"- {sentence}" for sentence in [*told, saved["training"]]),
        ]
    )
