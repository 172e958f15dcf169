"""Benchmarks: what is fast and small, as ratios measured in turns; `arena` compares with peers.

Settings that change matrix kernels are set aside before a measurement.
"As installed" and "by our own choice" both mean a process in which nobody has chosen kernels.
(attnknn itself respects such a setting, wherever it comes from.)
"""

import os

SETTINGS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
set_aside: dict[str, str] = {}


def plain_environment() -> dict[str, str]:
    """Return this process's environment without the settings."""
    return {name: value for name, value in os.environ.items() if name not in SETTINGS}


def set_settings_aside() -> None:
    """Take the settings out of this process; only of use before numpy and faiss are loaded."""
    set_aside.update({name: os.environ.pop(name) for name in SETTINGS if name in os.environ})
