"""faiss, loaded with the matrix kernels of this CPU; the one place that imports it."""

import sys

from attnknn.blas import choose_core_type

choose_core_type()
import faiss  # noqa: E402  (the BLAS core type must be set first)

if sys.platform == "darwin":
    # torch and faiss bring an OpenMP runtime each; on macOS two thread pools are known to crash.
    faiss.omp_set_num_threads(1)

__all__ = ["faiss"]
