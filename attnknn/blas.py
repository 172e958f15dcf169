"""CPU features -> the matrix kernel that faiss's own OpenBLAS should use.

The faiss-cpu wheel carries an OpenBLAS that does not know new Intel CPUs and then falls back to
kernels of 2004, three times slower. The choice is made when the library loads, so it has to be in
the environment before faiss is first imported. A setting of the user's own is never changed.
"""

import os
import platform
import sys
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AVX2 = {"avx2", "fma"}


def core_type(flags: set[str]) -> str | None:
    """Return the OpenBLAS core name for a set of CPU flags, or None to leave the choice to it."""
    if flags >= AVX512:
        return "SKYLAKEX"
    return "HASWELL" if flags >= AVX2 else None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the feature flags of the first core; empty where the system does not tell."""
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def choose_core_type() -> str | None:
    """Set the core type for a faiss that is not loaded yet; return what is in force."""
    if VARIABLE not in os.environ and "faiss" not in sys.modules:
        chosen = core_type(cpu_flags())
        if chosen:
            os.environ[VARIABLE] = chosen
    return os.environ.get(VARIABLE)
