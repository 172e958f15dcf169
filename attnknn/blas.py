"""CPU features -> the matrix kernel that faiss's own OpenBLAS should use.

The faiss-cpu wheel carries an OpenBLAS (0.3.15) that does not know newer CPUs: it takes new Intel
ones for a Prescott and AMD's Zen 5 for a Barcelona, whose kernels are several times slower. The
choice is made when the library loads, so it has to be in the environment before faiss is first
imported. (A name that it does not know, such as COOPERLAKE, means Prescott again: SKYLAKEX is the
newest that it does.) A setting of the user's own is never changed, nor judged.
"""

import os
import platform
import sys
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AVX2 = {"avx2", "fma"}
# Kernels that use what the CPU has, by the core type that we would ask for.
WIDE = {"SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS"}
GOOD_KERNELS = {"SKYLAKEX": WIDE, "HASWELL": WIDE | {"HASWELL", "ZEN", "EXCAVATOR"}}


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


def running_core_type() -> str | None:
    """Return the core type that the loaded faiss's own OpenBLAS runs on; None where unknown."""
    from threadpoolctl import threadpool_info

    for library in threadpool_info():
        if library["internal_api"] == "openblas" and "faiss" in library["filepath"]:
            return library.get("architecture")
    return None


def kernel_fault() -> str | None:
    """Return what is wrong with the kernels of the loaded faiss; None when right or unknown.

    They can only be wrong when faiss was imported before us: afterwards nobody can change them.
    A core type that stands in the environment is ours or the user's own, and never a fault.
    """
    wanted = core_type(cpu_flags())
    if wanted is None or VARIABLE in os.environ:
        return None
    running = running_core_type()
    if running is None or running.upper() in GOOD_KERNELS[wanted]:
        return None
    return f"faiss was imported before attnknn and runs on {running} kernels, not on {wanted}"
