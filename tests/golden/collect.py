"""Golden numbers: what the package says today, collected through its public doors alone.

``python tests/golden/collect.py`` writes them anew; do that only with a reason, and name it in the
commit. The redesigns they watch over may move every module: so nothing here imports one of them.
"""

import contextlib
import csv
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STUDIES = ("02_main_results", "04_label_noise", "05_long_tail")
COMMANDS = ((), ("run",), ("data",), ("data", "list"), ("data", "fetch"), ("pdf",))
QUICK = ["--set", "epochs=2", "--set", "ablation_epochs=2", "--set", "held_out_rows=['balanced']"]


def kernels() -> str:
    """Return the kind of processor: another one rounds otherwise, and two epochs enlarge that."""
    import torch

    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    return f"{torch.backends.cpu.get_cpu_capability()}, {model}"


def command_help() -> dict[str, str]:
    """Return the help of every command, by its words."""
    from attnknn.cli import main

    texts = {}
    for words in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
        texts[" ".join(words)] = printed.getvalue()
    return texts


def notebook_parameters() -> dict[str, list[str]]:
    """Return the names of each notebook's parameters, in their order."""
    import papermill

    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return {path.stem: list(papermill.inspect_notebook(str(path))) for path in notebooks}


def classifier() -> dict[str, list]:
    """Return predictions of classifiers fitted on clean and wrong labels, also after saving."""
    import numpy as np
    from sklearn.datasets import load_wine

    from attnknn import AttnKNNClassifier

    inputs, labels = load_wine(return_X_y=True)
    rng = np.random.default_rng(7)
    order = rng.permutation(len(labels))
    inputs, labels = inputs[order], labels[order]
    flipped = np.where(rng.random(len(labels)) < 0.3, (labels + 1) % 3, labels)
    found = {}
    for name, given in (("clean", labels), ("wrong", flipped)):
        model = AttnKNNClassifier(random_state=0).fit(inputs[:120], given[:120])
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.safetensors")
            again = AttnKNNClassifier.load(Path(folder) / "model.safetensors")
        found[name] = model.predict_proba(inputs[120:]).tolist()
        found[f"{name}, saved"] = again.predict_proba(inputs[120:]).tolist()
    return found


def quick_measures(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the measures of a two-epoch quick run, study by study; about a minute."""
    words = ["run", "--results", str(folder), "--name", "golden", "--no-pdf", *QUICK]
    words += ["--notebooks", "01,02,04,05", "--jobs", "2"]
    subprocess.run([sys.executable, "-m", "attnknn.cli", *words], check=True, cwd=ROOT)
    found = {}
    for study in STUDIES:
        with (folder / "golden" / study / "measures.csv").open() as handle:
            found[study] = list(csv.DictReader(handle))
    return found


def write() -> None:
    """Write all golden numbers."""
    with tempfile.TemporaryDirectory() as folder:
        measures = quick_measures(Path(folder))
    kinds = {"help": command_help(), "parameters": notebook_parameters()}
    numbers = {"classifier": classifier(), "measures": measures}
    for name, content in kinds.items():
        (HERE / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    for name, content in numbers.items():
        text = json.dumps({"kernels": kernels(), "numbers": content})
        (HERE / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    write()
