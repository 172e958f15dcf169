"""Peers: ranks by hand, the published table of critical differences, problems, code digests."""

import math

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import log_loss

from attnknn.calibrate import smooth
from attnknn.peers import (
    ATTENTION,
    CLEANLAB,
    KNN_FAMILY,
    METHODS,
    code,
    critical_difference,
    load_parts,
    load_problem,
    make_problem,
    measure_cleanlab,
    measure_method,
    rank_table,
    standing,
)
from attnknn.peers.methods import FLOOR, floored_nll

# Demsar 2006, table 5: critical values of the Nemenyi test at 5 %, for 2 to 10 methods.
NEMENYI = (1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164)


def tidy(values, metric="nll"):
    """Return tidy rows from {data set: {method: value, or one value a seed}}."""
    return pd.DataFrame(
        [
            {"dataset": name, "seed": seed, "method": method, "metric": metric, "value": value}
            for name, methods in values.items()
            for method, each in methods.items()
            for seed, value in enumerate(np.atleast_1d(each))
        ]
    )


def test_ranks_by_hand():
    values = {
        "one": {"a": [0.0, 2.0], "b": [1.0, 3.0], "c": [9.0, 1.0]},  # means 1, 2, 5
        "two": {"a": 5.0, "b": 5.0, "c": 1.0},  # a and b share the places 2 and 3
    }
    means = rank_table(tidy(values)).set_index("method")
    assert means["mean"].to_dict() == {"a": 1.75, "b": 2.25, "c": 2.0}
    assert (means["n"] == 2).all()
    # c: ranks 3 and 1, standard error 1, t = 12.706 with one degree of freedom
    assert means.loc["c", "high"] == pytest.approx(2 + 12.706, abs=1e-3)


def test_a_high_accuracy_ranks_first():
    values = {"one": {"a": 0.9, "b": 0.8}, "two": {"a": 0.7, "b": 0.6}}
    means = rank_table(tidy(values, "accuracy")).set_index("method")["mean"]
    assert means.to_dict() == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(("n_methods", "quantile"), list(enumerate(NEMENYI, start=2)))
def test_critical_differences_are_the_published_ones(n_methods, quantile):
    expected = quantile * math.sqrt(n_methods * (n_methods + 1) / (6 * 10))
    assert critical_difference(n_methods, 10) == pytest.approx(expected, abs=1e-3)


def test_a_family_is_ranked_among_itself():
    values = {
        "one": {"a": 1, "k": 2, "x": 3, "y": 4},
        "two": {"a": 1, "k": 2, "x": 3, "y": 4},
        "three": {"k": 1, "x": 2, "y": 3, "a": 4},
    }
    everyone = standing(tidy(values), "nll", method="a", among=["a", "k", "x", "y"])
    assert (everyone.rank, everyone.rival, everyone.rival_rank) == (2.0, "k", 5 / 3)
    assert not everyone.is_first
    family = standing(tidy(values), "nll", method="a", among=["a", "k"])
    assert (family.rank, family.rival_rank) == (4 / 3, 5 / 3)
    assert family.is_first
    assert family.difference == critical_difference(2, 3)
    assert "a (1.33) is first, before k (1.67): 0.33 apart, less than the" in family.sentence()


def test_a_shared_place_is_no_first_place():
    found = standing(tidy({"one": {"a": 1, "k": 1}}), "nll", method="a", among=["a", "k"])
    assert not found.is_first
    assert found.sentence() == "a (1.50) shares the first place with k"


def test_a_method_alone_has_no_standing():
    assert standing(tidy({"one": {"a": 1, "x": 2}}), "nll", method="a", among=["a", "k"]) is None


def test_the_knn_family_holds_neighbours_alone():
    assert KNN_FAMILY[0] == METHODS[0] == ATTENTION
    assert all("kNN" in name for name in KNN_FAMILY)
    assert not any("kNN" in name for name in set(METHODS) - set(KNN_FAMILY))


def test_a_problem_with_fewer_rows_says_how_many_there_are():
    parts = load_parts("iris", seed=0)
    n_train, n_test = len(parts.labels), len(parts.test_labels)
    assert n_train + n_test == 150
    problem = make_problem(parts, seed=0, noise=0.3, max_rows=60, max_test_rows=15)
    assert (len(problem.labels), len(problem.test_labels)) == (60, 15)
    assert (problem.all_rows, problem.all_test_rows) == (n_train, n_test)
    assert len(problem.features) == len(problem.inputs) == 60
    assert len(problem.test_features) == len(problem.test_inputs) == 15
    assert np.bincount(problem.test_labels).tolist() == [5, 5, 5]
    assert problem.flipped.sum() == 18
    others = make_problem(parts, seed=1, max_rows=60, max_test_rows=15)
    assert not np.array_equal(others.features, problem.features)
    assert not np.array_equal(others.test_features, problem.test_features)


def test_a_problem_with_few_rows_keeps_all_of_them():
    parts = load_parts("iris", seed=0)
    problem = make_problem(parts, seed=0, max_rows=10_000, max_test_rows=10_000)
    whole = load_problem("iris", seed=0)
    np.testing.assert_array_equal(problem.features, whole.features)
    np.testing.assert_array_equal(problem.test_features, whole.test_features)
    assert (whole.all_rows, whole.all_test_rows) == (len(whole.labels), len(whole.test_labels))


def test_the_floor_is_the_same_for_two_classes_and_more():
    probs, labels = np.array([[1.0, 0.0], [0.3, 0.7]]), np.array([1, 1])
    expected = log_loss(labels, smooth(probs, FLOOR), labels=[0, 1])
    assert floored_nll(labels, probs) == pytest.approx(expected)
    assert floored_nll(labels, probs[:, 1]) == pytest.approx(expected)
    assert expected == pytest.approx((-math.log(FLOOR / 2) - math.log(0.7)) / 2, abs=1e-3)


@pytest.mark.parametrize("method", ["kNN, default", "kNN distance, tuned", "logistic regression"])
def test_a_peer_is_measured_on_the_test_rows(method):
    problem = load_problem("iris", seed=0)
    found = measure_method(method, problem, seed=0)
    assert found["metrics"]["accuracy"] > 0.85
    assert set(found["seconds"]) == {"fit", "predict"}
    assert "issue_auroc" not in found


@pytest.mark.parametrize("method", ["cleanlab, kNN", "cleanlab, logistic regression"])
def test_cleanlab_finds_flipped_labels(method):
    found = measure_cleanlab(method, load_problem("iris", seed=0, noise=0.3), seed=0)
    assert method in CLEANLAB and found["issue_auroc"] > 0.8


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return a package: a imports b, b imports a sub-package's module late; c stands alone."""
    folder = tmp_path / "toy"
    (folder / "sub").mkdir(parents=True)
    files = {
        "__init__": "",
        "a": "import numpy\nfrom toy import b",
        "b": "def late():\n    from toy.sub.deep import f\n    import toy.drawn",
        "c": "import toy.a",
        "drawn": "",
        "sub/__init__": "from toy.sub import other",
        "sub/deep": "",
        "sub/other": "",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(code, "PACKAGE", folder)
    code.digest_of.cache_clear()
    yield folder
    code.digest_of.cache_clear()


def test_all_that_a_module_imports_is_reached(toy):
    def names(*modules, **options):
        return {path.stem for path in code.reached(modules, **options)}

    assert names("toy.a") == {"a", "b", "deep", "drawn"}
    assert names("toy.a", beyond=["toy.sub", "toy.drawn"]) == {"a", "b"}
    assert names("toy.sub") == {"__init__", "other"}
    assert names("toy.sub.other") == {"other"}


def test_a_digest_follows_the_code_that_counts(toy):
    def digest():
        code.digest_of.cache_clear()
        return code.digest_of("toy.a", beyond=frozenset({"toy.drawn"}))

    before = digest()
    (toy / "c.py").write_text("import toy.b")
    (toy / "drawn.py").write_text("colour = 1")
    assert digest() == before
    (toy / "sub/deep.py").write_text("f = 1")
    assert digest() != before
