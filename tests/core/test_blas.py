"""The BLAS core type: from the CPU's own flags, before faiss loads, never over the user's."""

import os
import subprocess
import sys

import pytest

from attnknn.core import kernels as blas


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (blas.AVX512 | blas.AVX2, "SKYLAKEX"),
        ((blas.AVX512 - {"avx512dq"}) | blas.AVX2, "HASWELL"),
        ({"avx2"}, None),  # without fused multiply-add the Haswell kernels would crash
        (set(), None),
    ],
)
def test_core_type_needs_the_whole_feature_set(flags, expected):
    assert blas.core_type(flags) == expected


def test_flags_are_those_of_the_first_core(tmp_path, monkeypatch):
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: sse2 avx2 fma\n\nprocessor\t: 1\nflags : x\n")
    assert blas.cpu_flags(cpuinfo) == {"sse2", "avx2", "fma"}
    cpuinfo.write_text("processor\t: 0\n")
    assert blas.cpu_flags(cpuinfo) == set()
    assert blas.cpu_flags(tmp_path / "missing") == set()


def test_other_machines_have_no_such_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(blas.platform, "machine", lambda: "arm64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx2 fma\n")
    assert blas.cpu_flags(cpuinfo) == set()


@pytest.fixture
def unset(monkeypatch):
    """An environment without the variable, restored afterwards."""
    monkeypatch.setenv(blas.VARIABLE, "")
    monkeypatch.delenv(blas.VARIABLE)
    monkeypatch.setattr(blas, "cpu_flags", lambda: blas.AVX2)


def test_the_variable_is_set_before_faiss_is_loaded(unset, monkeypatch):
    monkeypatch.delitem(sys.modules, "faiss", raising=False)
    assert blas.choose_core_type() == "HASWELL"
    assert os.environ[blas.VARIABLE] == "HASWELL"


def test_it_is_left_alone_once_faiss_is_loaded(unset, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", object())
    assert blas.choose_core_type() is None


def test_a_setting_of_the_users_own_is_never_changed(unset, monkeypatch):
    monkeypatch.delitem(sys.modules, "faiss", raising=False)
    monkeypatch.setenv(blas.VARIABLE, "PRESCOTT")
    assert blas.choose_core_type() == "PRESCOTT"


def test_the_kernels_are_chosen_before_faiss_loads():
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'faiss':\n"
        "            print(os.environ.get('OPENBLAS_CORETYPE'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import attnknn.core.index"
    )
    clean = {name: value for name, value in os.environ.items() if name != blas.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.stdout == f"{blas.core_type(blas.cpu_flags())}\n", done.stderr


@pytest.mark.parametrize(
    ("flags", "running", "is_fault"),
    [
        (blas.AVX512 | blas.AVX2, "Prescott", True),
        (blas.AVX512 | blas.AVX2, "Haswell", True),
        (blas.AVX512 | blas.AVX2, "SkylakeX", False),
        (blas.AVX2, "Zen", False),
        (blas.AVX2, "Nehalem", True),
        (blas.AVX2, None, False),  # another BLAS: nothing is known, nothing is claimed
        (set(), "Prescott", False),
    ],
)
def test_a_fault_is_a_kernel_older_than_the_cpu(unset, monkeypatch, flags, running, is_fault):
    monkeypatch.setattr(blas, "cpu_flags", lambda: flags)
    monkeypatch.setattr(blas, "running_core_type", lambda: running)
    fault = blas.kernel_fault()
    assert (fault is not None) == is_fault
    if is_fault:
        assert f"runs on {running} kernels" in fault


def test_a_core_type_in_the_environment_is_no_fault(unset, monkeypatch):
    monkeypatch.setattr(blas, "running_core_type", lambda: "Prescott")
    monkeypatch.setenv(blas.VARIABLE, "PRESCOTT")
    assert blas.kernel_fault() is None


def in_a_process(code: str, **environment: str) -> str:
    """Return what a fresh Python prints."""
    clean = {name: value for name, value in os.environ.items() if name != blas.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=clean | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernels_of_a_loaded_faiss_are_read_from_the_library():
    code = "import faiss, attnknn.core.kernels as blas; print(blas.running_core_type())"
    name = in_a_process(code, OPENBLAS_CORETYPE="NEHALEM").strip()
    assert name in ("Nehalem", "None")  # None where faiss comes with another BLAS


def test_a_faiss_imported_first_with_old_kernels_still_searches_right():
    # The variable chooses the kernels while faiss loads; then it goes, as if it had never been.
    code = (
        "import os, faiss; del os.environ['OPENBLAS_CORETYPE']\n"
        "import warnings, numpy as np, attnknn.core.kernels as blas\n"
        "blas.cpu_flags = lambda: blas.AVX2\n"
        "from attnknn.core.index import build_index\n"
        "rows = np.eye(7, dtype=np.float32)\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    found = [build_index('auto', rows).search(rows, 1)[1].ravel() for _ in range(3)]\n"
        "assert all((ids == np.arange(7)).all() for ids in found)\n"
        "print(blas.running_core_type(), sum('before attnknn' in str(w.message) for w in said))"
    )
    assert in_a_process(code, OPENBLAS_CORETYPE="NEHALEM").split() in (
        ["Nehalem", "1"],
        ["None", "0"],
    )
