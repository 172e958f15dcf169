"""Golden numbers: a redesign changes no prediction, no measure, no word a user types.

``python tests/golden/collect.py`` writes them anew where the method itself has changed.
"""

import json
import re

import numpy as np
import pytest

from tests.golden import collect


def stored(name: str) -> dict:
    """Return what was collected before."""
    return json.loads((collect.HERE / f"{name}.json").read_text())


def tolerance(kernels: str) -> float:
    """Return by how much numbers may differ: other kernels round otherwise, and fits enlarge it."""
    return 1e-6 if kernels == collect.kernels() else 0.05


def test_no_command_or_option_is_lost():
    now = collect.command_help()
    words = r"(?<![\w-])--?[a-z][a-z-]*|^    \w+(?= )"
    for command, text in stored("help").items():
        before = set(re.findall(words, text, flags=re.MULTILINE))
        assert before
        assert before <= set(re.findall(words, now[command], flags=re.MULTILINE)), command


def test_no_parameter_of_a_notebook_is_lost():
    now = collect.notebook_parameters()
    for notebook, names in stored("parameters").items():
        assert set(names) <= set(now[notebook]), notebook


def test_a_classifier_predicts_as_before_and_after_saving():
    before = stored("classifier")
    now = collect.classifier()
    assert set(now) == set(before["numbers"])
    for name, probs in before["numbers"].items():
        np.testing.assert_allclose(
            now[name], probs, rtol=0, atol=tolerance(before["kernels"]), err_msg=name
        )
    for name in ("clean", "wrong"):
        np.testing.assert_array_equal(now[f"{name}, saved"], now[name])


@pytest.mark.slow
def test_a_quick_run_measures_as_before(tmp_path):
    before = stored("measures")
    now = collect.quick_measures(tmp_path)
    for study, rows in before["numbers"].items():
        values = {key(row): float(row["value"]) for row in rows}
        found = {key(row): float(row["value"]) for row in now[study]}
        assert set(values) <= set(found), f"{study} lost {sorted(set(values) - set(found))[:3]}"
        different = {
            name: (value, found[name])
            for name, value in values.items()
            if not np.isclose(value, found[name], rtol=0, atol=tolerance(before["kernels"]))
        }
        assert not different, f"{study}: {len(different)} of {len(values)}, {different}"


def key(row: dict[str, str]) -> tuple:
    """Return what a measure is of."""
    return tuple((name, row[name]) for name in sorted(row) if name not in ("value", "low", "high"))
