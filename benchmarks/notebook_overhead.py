"""Pipeline: what papermill and the PDF add to a notebook, over a bare kernel running it."""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.sizes import Sizes
from benchmarks.timing import Ratio, divided, interleaved

CELLS = ("n = 3", "import numpy as np\nvalues = np.arange(n)", "print(values.sum())")


def small_notebook(path: Path) -> Path:
    """Write a notebook that does nearly nothing."""
    notebook = nbformat.v4.new_notebook()
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# A small notebook"),
        *(nbformat.v4.new_code_cell(source) for source in CELLS),
    ]
    notebook.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    return path


def measure(sizes: Sizes) -> list[Ratio]:
    """Return the time of papermill + PDF over that of the bare kernel."""
    import papermill

    from attnknn.paper.pdf import notebook_to_pdf

    with tempfile.TemporaryDirectory(prefix="attnknn-bench-") as folder:
        source, done = small_notebook(Path(folder) / "source.ipynb"), Path(folder) / "done.ipynb"

        def piped() -> None:
            papermill.execute_notebook(source, done, {"n": 5}, progress_bar=False)
            notebook_to_pdf(done)

        def bare() -> None:
            NotebookClient(nbformat.read(source, as_version=4), kernel_name="python3").execute()

        times = interleaved({"piped": piped, "bare": bare}, max(2, sizes.rounds // 2))
    extra = sum(times["piped"]) / len(times["piped"]) - sum(times["bare"]) / len(times["bare"])
    return [
        Ratio(
            "notebook_over_bare_kernel",
            "papermill + PDF of a small notebook: time over a bare kernel",
            divided(times["piped"], times["bare"]),
            "lower",
            note=f"{extra:.1f} s more a notebook",
        )
    ]
