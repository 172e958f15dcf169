"""Progress: one bar for all of a long task, gone when it is done, silent where nobody watches.

A notebook that papermill executes keeps everything that is shown, so no bar is shown there.
"""

import sys
import warnings
from collections.abc import Iterable
from typing import Any

from tqdm import TqdmWarning
from tqdm.std import tqdm


def progress_bar(
    items: Iterable[Any] | None = None, title: str = "", *, total: int | None = None, **how: Any
) -> tqdm:
    """Return a bar over items, or one to be updated by hand.

    Args:
        items: What is gone through; None for a bar that is updated by hand.
        title: Stands before the bar.
        total: Steps, where they cannot be counted.
        how: Other options of tqdm; ``disable=True`` hides the bar even where somebody watches.
    """
    options = {"desc": title, "total": total, "leave": False} | how
    if options.pop("disable", False) or not is_watched():
        return tqdm(items, disable=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets a bar of text will do
        from tqdm.auto import tqdm as fitting_tqdm
    return fitting_tqdm(items, **options)


def is_watched() -> bool:
    """Return whether a person sees what is shown: at a terminal or in an open notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return sys.stderr.isatty()
    # What executes a notebook without a person, as papermill does, cannot be asked anything.
    return bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin", False))
