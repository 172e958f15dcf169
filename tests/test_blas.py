"""The BLAS core type: from the CPU's own flags, before faiss loads, never over the user's."""

import os
import subprocess
import sys

import pytest

from attnknn import blas


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


def test_the_index_module_sets_it_first():
    code = (
        "import os, sys, attnknn.blas as blas\n"
        "blas.cpu_flags = lambda: blas.AVX2\n"
        "assert 'faiss' not in sys.modules\n"
        "import attnknn.index\n"
        "print(os.environ[blas.VARIABLE])"
    )
    clean = {name: value for name, value in os.environ.items() if name != blas.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.stdout == "HASWELL\n", done.stderr
