"""The classifier: what it promises about rows, weights, ids, noise, sets, files and small data."""

import json
import os
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn.datasets import load_iris, make_blobs
from sklearn.neighbors import NearestNeighbors

from attnknn import AttnKNNClassifier, progress
from attnknn.core import kernels as blas
from attnknn.core import refine
from attnknn.estimator import base, fitting
from attnknn.estimator.base import NEW_CLASSES

NAMES = np.array(["setosa", "versicolor", "virginica"])


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """Most promises do not depend on how well the attention is fitted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(refine.REFINE, "auto", (0, 2))
        yield


@pytest.fixture(scope="module")
def flowers():
    """75 rows to fit on and 75 others, with names for labels."""
    rows, labels = load_iris(return_X_y=True)
    return rows[::2], NAMES[labels[::2]], rows[1::2], NAMES[labels[1::2]]


def fitted_on(flowers, **params) -> AttnKNNClassifier:
    return AttnKNNClassifier(random_state=0, **params).fit(*flowers[:2])


@pytest.fixture(scope="module")
def model(flowers):
    """A classifier that no test may change."""
    return fitted_on(flowers)


def blobs(n_rows=301, *, n_classes=3, noise=0.0, seed=0, n_features=5):
    """Well separated groups, a share of whose labels is wrong."""
    rows, labels = make_blobs(n_rows, n_features, centers=n_classes, random_state=seed)
    rng = np.random.default_rng(seed)
    wrong = rng.random(n_rows) < noise
    other = (labels + rng.integers(1, n_classes, n_rows)) % n_classes
    return rows, np.where(wrong, other, labels), wrong


class TestPredictions:
    def test_blocks_of_queries_change_nothing(self, model, flowers, monkeypatch):
        whole, issues = model.predict_proba(flowers[2]), model.label_issues(all_rows=True)
        monkeypatch.setattr(base, "QUERY_BLOCK", 7)
        assert np.allclose(model.predict_proba(flowers[2]), whole, atol=1e-6)
        pd.testing.assert_frame_equal(model.label_issues(all_rows=True), issues, atol=1e-6)

    def test_a_prediction_holds_one_block_of_unit_rows_at_a_time(self, model, flowers, monkeypatch):
        monkeypatch.setattr(base, "QUERY_BLOCK", 7)
        searched = []
        search = model.memory_.search
        monkeypatch.setattr(
            model.memory_,
            "search",
            lambda q, *a, **o: searched.append(len(q)) or search(q, *a, **o),
        )
        model.predict_proba(flowers[2])
        assert max(searched) == 7
        assert sum(searched) == len(flowers[2])

    """Probabilities, and what must not change them."""

    def test_probabilities_are_whole_and_finite_and_lead_to_the_prediction(self, model, flowers):
        probs = model.predict_proba(flowers[2])
        assert probs.shape == (75, 3) and (probs > 0).all()
        np.testing.assert_allclose(probs.sum(axis=1), 1)
        np.testing.assert_array_equal(model.predict(flowers[2]), NAMES[probs.argmax(axis=1)])
        np.testing.assert_allclose(np.exp(model.predict_log_proba(flowers[2])), probs)
        assert model.score(flowers[2], flowers[3]) > 0.9

    def test_the_order_of_the_training_rows_does_not_matter(self, model, flowers):
        order = np.random.default_rng(1).permutation(75)
        shuffled = AttnKNNClassifier(random_state=0).fit(flowers[0][order], flowers[1][order])
        np.testing.assert_array_equal(
            shuffled.predict_proba(flowers[2]), model.predict_proba(flowers[2])
        )

    def test_a_weight_of_two_is_a_second_copy_and_a_weight_of_zero_none(self, flowers):
        rows, labels = flowers[0], flowers[1]
        counts = np.random.default_rng(2).integers(0, 4, len(rows))
        weighted = AttnKNNClassifier(random_state=0).fit(rows, labels, sample_weight=counts)
        repeated = AttnKNNClassifier(random_state=0).fit(
            rows.repeat(counts, axis=0), labels.repeat(counts)
        )
        np.testing.assert_array_equal(
            weighted.predict_proba(flowers[2]), repeated.predict_proba(flowers[2])
        )

    def test_names_of_the_classes_do_not_matter(self, model, flowers):
        codes = np.searchsorted(NAMES, flowers[1])
        for labels in (codes, codes * 10 - 5, codes.astype(np.uint8)):
            other = AttnKNNClassifier(random_state=0).fit(flowers[0], labels)
            assert other.classes_.dtype == labels.dtype
            np.testing.assert_array_equal(
                other.predict_proba(flowers[2]), model.predict_proba(flowers[2])
            )

    def test_class_weights_multiply_sample_weights(self, flowers):
        rows, labels = flowers[0], flowers[1]
        by_class = fitted_on(flowers, class_weight={"setosa": 1, "versicolor": 3, "virginica": 1})
        by_row = AttnKNNClassifier(random_state=0).fit(
            rows, labels, sample_weight=np.where(labels == "versicolor", 3.0, 1.0)
        )
        np.testing.assert_array_equal(
            by_class.predict_proba(flowers[2]), by_row.predict_proba(flowers[2])
        )

    def test_fitting_leaves_global_generators_and_threads_alone(self, flowers):
        threads = torch.get_num_threads()
        torch.manual_seed(5)
        expected = torch.rand(2)
        torch.manual_seed(5)
        fitted_on(flowers, n_jobs=1).predict(flowers[2])
        assert torch.equal(torch.rand(2), expected) and torch.get_num_threads() == threads

    def test_seeds_repeat_and_differ(self, flowers):
        probs = [
            AttnKNNClassifier(random_state=seed, metric="cosine").fit(*flowers[:2])
            for seed in (3, 3, 4)
        ]
        first, same, other = (each.predict_proba(flowers[2]) for each in probs)
        np.testing.assert_array_equal(first, same)
        assert (first != other).any()

    def test_a_progress_bar_appears_when_asked_for(self, flowers, capsys, monkeypatch):
        monkeypatch.setattr(progress, "is_watched", lambda: True)
        fitted_on(flowers, verbose=1)
        assert "refine" in capsys.readouterr().err


class TestNeighbours:
    """kneighbors, and that Euclidean metrics keep Euclidean neighbours."""

    def test_neighbours_are_those_of_scikit_learn(self, flowers):
        scaled = (flowers[0] - flowers[0].mean(axis=0)) / flowers[0].std(axis=0)
        other = (flowers[2] - flowers[0].mean(axis=0)) / flowers[0].std(axis=0)
        expected = NearestNeighbors(n_neighbors=5).fit(scaled).kneighbors(other)[1]
        distances, found = fitted_on(flowers, metric="standardised").kneighbors(flowers[2], 5)
        shared = [len(set(a) & set(b)) for a, b in zip(found, expected, strict=True)]
        assert np.mean(shared) > 0.95 * 5
        assert (np.diff(distances, axis=1) >= 0).all()

    def test_training_rows_do_not_find_themselves(self, model):
        ids = model.kneighbors(return_distance=False)
        entries = model._ledger.entries[ids]
        assert not (entries == np.arange(len(ids))[:, None]).any()

    def test_k_larger_than_the_memory_is_lowered_and_said_once(self, flowers):
        with pytest.warns(UserWarning, match="n_neighbors=500 is lowered") as caught:
            model = fitted_on(flowers, n_neighbors=500)
        assert len(caught) == 1 and model.n_neighbors_ <= 75

    def test_more_neighbours_than_rows_are_lowered_and_said_once(self, model, flowers):
        n_rows = len(model.memory_)
        with pytest.warns(
            UserWarning, match=f"n_neighbors=500 is lowered to the {n_rows} "
        ) as said:
            found = model.kneighbors(flowers[2][:7], 500, return_distance=False)
        assert found.shape == (7, n_rows) and len(said) == 1
        with pytest.warns(UserWarning, match=f"is lowered to the {n_rows - 1} distinct rows"):
            distances, found = model.kneighbors(n_neighbors=n_rows)
        assert found.shape == distances.shape == (n_rows, n_rows - 1)

    def test_forgotten_rows_are_not_asked_for(self, flowers):
        model = fitted_on(flowers).forget(np.arange(3, 75))
        assert model.kneighbors(flowers[2], return_distance=False).shape == (75, 3)
        assert model.kneighbors(return_distance=False).shape == (3, 2)

    def test_the_last_row_has_no_neighbours_and_is_taken_at_its_word(self, flowers):
        model = fitted_on(flowers).forget(np.arange(74))  # a virginica is left, the last class
        assert (model.kneighbors(flowers[2][:2], return_distance=False) == 74).all()
        with pytest.raises(ValueError, match="X must be given where the memory holds one row"):
            model.kneighbors()
        issues = model.label_issues(all_rows=True)
        assert issues["suggested"].tolist() == ["virginica"] and not issues["is_issue"].any()


class TestMemory:
    """Rows come and go by id."""

    def test_rows_can_be_added_and_forgotten_without_a_trace(self, flowers):
        model = fitted_on(flowers)
        before = model.predict_proba(flowers[2])
        model.partial_fit(flowers[2], flowers[3])
        assert len(model.memory_) > 75 and (model.predict_proba(flowers[2]) != before).any()
        model.forget(np.arange(75, 150))
        np.testing.assert_allclose(model.predict_proba(flowers[2]), before, rtol=1e-5)

    def test_ids_stay_what_they_are(self, flowers):
        model = fitted_on(flowers).forget([0, 3])
        found = model.explain(flowers[2][:5])
        assert not {0, 3} & set(found["id"])
        np.testing.assert_array_equal(flowers[1][found["id"]], found["label"])
        with pytest.raises(ValueError, match=r"ids must be in the memory, got \[3\]"):
            model.forget(3)
        with pytest.raises(ValueError, match="ids must lie in"):
            model.forget(75)
        assert len(model.forget([]).memory_) == 73

    def test_forgetting_one_of_two_copies_halves_its_weight(self):
        rows, labels, _ = blobs(60)
        model = AttnKNNClassifier(random_state=0).fit(
            np.concatenate([rows, rows[:1]]), np.concatenate([labels, labels[:1]])
        )
        weights = model.memory_.weights.sort().values
        assert len(model.memory_) == 60 and weights[-1] == 1 and weights[-2] == 0.5
        model.forget(60)
        assert len(model.memory_) == 60 and model.memory_.weights is None

    def test_all_rows_but_one_can_be_forgotten(self, flowers):
        model = fitted_on(flowers).forget(np.arange(1, 75))
        assert np.isfinite(model.predict_proba(flowers[2])).all()
        with pytest.raises(ValueError, match="ids must leave at least one row"):
            model.forget(0)

    @pytest.mark.parametrize("rule", NEW_CLASSES)
    def test_new_classes_are_refused_or_added(self, flowers, rule):
        model = fitted_on(flowers, new_classes=rule)
        rows = np.array([[40.0, 1.0, 0.1, 30.0]]) + np.arange(30)[:, None] / 100
        if rule == "error":
            with pytest.raises(ValueError, match=r"y must hold known classes, got \['cactus'\]"):
                model.partial_fit(rows, ["cactus"] * 30)
            return
        model.partial_fit(rows, ["cactus"] * 30)
        assert model.classes_.tolist() == ["cactus", *NAMES]
        assert (model.predict(rows) == "cactus").all()
        assert model.predict_set(rows[:1])[0, 0] and model.score(flowers[2], flowers[3]) > 0.8

    def test_a_refused_partial_fit_changes_nothing(self, flowers):
        model = fitted_on(flowers, new_classes="add")
        before = model.predict_proba(flowers[2])
        with pytest.raises(ValueError, match="Negative values"):
            model.partial_fit(flowers[2][:3], ["cactus"] * 3, sample_weight=[-1, 1, 1])
        with pytest.raises(ValueError, match="labels of the kind seen in fit, str_, got int64"):
            model.partial_fit(flowers[2][:3], [0, 1, 2])
        assert model.classes_.tolist() == NAMES.tolist()
        np.testing.assert_array_equal(model.predict_proba(flowers[2]), before)

    def test_balanced_weights_need_all_rows(self, flowers):
        model = AttnKNNClassifier(class_weight="balanced")
        with pytest.raises(ValueError, match="class_weight must be weights by class for partial"):
            model.partial_fit(*flowers[:2])

    def test_rows_that_come_again_count_again_and_do_not_vouch_for_themselves(self):
        rows, labels, wrong = blobs(noise=0.1)
        model = AttnKNNClassifier(random_state=0).fit(rows, labels).partial_fit(rows, labels)
        assert len(model.memory_) == len(rows)
        np.testing.assert_array_equal(
            model._ledger.entries[: len(rows)], model._ledger.entries[301:]
        )
        found = set(model.label_issues()["id"])
        assert len(found & set(np.flatnonzero(wrong))) > 0.9 * wrong.sum()
        assert model.forget(np.arange(301)).memory_.weights is None
        assert len(model.memory_) == len(rows)

    def test_weights_that_single_precision_cannot_hold_are_refused(self, flowers):
        rows, labels, weights = flowers[0], flowers[1], np.ones(75)
        bank = fitted_on(flowers).memory_
        for far in (1e-50, 1e50):
            weights[4] = far
            with pytest.raises(ValueError, match=r"sample_weight .* must be 0 or lie between"):
                AttnKNNClassifier().fit(rows, labels, sample_weight=weights)
            with pytest.raises(ValueError, match=r"weights must be .* above 0 in single precision"):
                bank.reweigh(weights[: len(bank)])

    def test_weights_that_lie_far_apart_still_give_probabilities(self, flowers):
        weights = np.where(np.arange(75) % 2, 1e-20, 1e12)
        model = AttnKNNClassifier(random_state=0).fit(*flowers[:2], sample_weight=weights)
        probs = model.predict_proba(flowers[2])
        assert np.isfinite(probs).all() and np.allclose(probs.sum(axis=1), 1)

    def test_partial_fit_may_come_first_and_name_classes_to_come(self, flowers):
        model = AttnKNNClassifier(random_state=0)
        model.partial_fit(*flowers[:2], classes=[*NAMES, "orchid"])
        assert "orchid" in model.classes_ and model.predict_proba(flowers[2]).shape == (75, 4)


class TestInsight:
    """Explanations, label issues, sets and abstention."""

    def test_an_explanation_names_training_rows_and_their_weights(self, model, flowers):
        table = model.explain(flowers[2][:4])
        np.testing.assert_allclose(table.groupby("query")["weight"].sum(), 1, rtol=1e-5)
        np.testing.assert_array_equal(flowers[1][table["id"]], table["label"])
        assert table["similarity"].between(-1, 1 + 1e-6).all()
        assert table["trust"].between(0, 1).all()
        np.testing.assert_array_equal(
            table.groupby("query")["predicted"].first(), model.predict(flowers[2][:4])
        )

    def test_an_explanation_tells_what_refinement_changed(self, flowers):
        plain = fitted_on(flowers, refine="none").explain(flowers[2][:3])
        np.testing.assert_allclose(plain["weight"], plain["prior_weight"], rtol=1e-5)
        refined = fitted_on(flowers)
        network = refined._fitted.learned.attention.network
        with torch.no_grad():
            network.slope[:, 0] -= 1.0  # near rows count more
        table = refined.explain(flowers[2][:3])
        assert (table["weight"] - table["prior_weight"]).abs().max() > 1e-3
        np.testing.assert_allclose(table.groupby("query")["prior_weight"].sum(), 1, rtol=1e-5)

    def test_an_explanation_sums_to_the_prediction(self, flowers):
        """Before floor and temperature, which are switched off here, and whatever the members."""
        model = fitted_on(flowers)
        attention = model._fitted.learned.attention
        settings = attention.network
        with torch.no_grad():
            for place, start in ((3, -40.0), (4, -40.0), (5, 0.0), (6, -40.0)):
                # floor, class shares, power, trust of the expert
                settings.settings_out[..., place], settings.settings_start[..., place] = 0.0, start
            attention.last_temperature.fill_(1.0)
        by_query = model.explain(flowers[2]).groupby("query")
        total = by_query["vote"].sum() + by_query["prototypes"].first()
        assert (by_query["prototypes"].first() > 0.01).any()
        np.testing.assert_allclose(total, model.predict_proba(flowers[2]).max(axis=1), rtol=1e-4)

    def test_an_explanation_can_be_drawn_with_and_without_pictures(self, model, flowers):
        from matplotlib import pyplot

        bars = model.explain_figure(flowers[2][:1])
        assert "row " in bars.axes[0].get_yticklabels()[0].get_text()
        pictures = np.random.default_rng(0).random((75, 4, 4))
        strip = model.explain_figure(flowers[2][:1], image=pictures[0], images=pictures)
        assert len(strip.axes) > 4
        pyplot.close("all")
        with pytest.raises(ValueError, match="X must be one row, got 2 rows"):
            model.explain_figure(flowers[2][:2])
        with pytest.raises(ValueError, match="image and images must be given together"):
            model.explain_figure(flowers[2][:1], images=pictures)
        with pytest.raises(ValueError, match="images must hold a picture of every training row"):
            model.explain_figure(flowers[2][:1], image=pictures[0], images=pictures[:1])

    def test_wrong_labels_are_found_and_corrected(self):
        rows, labels, wrong = blobs(noise=0.2)
        model = AttnKNNClassifier(random_state=0).fit(rows, labels)
        issues = model.label_issues()
        found = set(issues["id"])
        assert len(found & set(np.flatnonzero(wrong))) > 0.9 * wrong.sum()
        assert len(found - set(np.flatnonzero(wrong))) < 0.1 * wrong.sum()
        np.testing.assert_array_equal(labels[issues["id"]], issues["label"])
        assert (np.diff(issues["quality"]) >= 0).all()
        assert model.label_noise_ == pytest.approx(0.2, abs=0.07)
        assert len(model.label_issues(all_rows=True)) == len(rows)

    @pytest.mark.parametrize("embedder", ["auto", np.negative])
    def test_a_wrong_label_is_found_in_spite_of_its_copies(self, embedder):
        rows, labels, wrong = blobs(noise=0.1)
        model = AttnKNNClassifier(random_state=0, embedder=embedder)
        model.fit(rows.repeat(3, axis=0), labels.repeat(3))
        assert len(model.memory_) == len(rows)
        found = set(model.label_issues()["id"])
        assert len(found & set(np.flatnonzero(wrong.repeat(3)))) > 0.9 * 3 * wrong.sum()

    def test_clean_labels_are_not_corrected(self):
        rows, labels, _ = blobs()
        assert AttnKNNClassifier(random_state=0).fit(rows, labels).label_noise_ == 0

    def test_a_known_noise_rate_is_taken_at_its_word(self, flowers):
        assert fitted_on(flowers, label_noise=0.25).label_noise_ == 0.25

    @pytest.mark.parametrize("score", ["aps", "lac"])
    def test_sets_cover_flowers(self, model, flowers, score):
        sets = model.predict_set(flowers[2], coverage=0.9, score=score)
        truth = np.searchsorted(NAMES, flowers[3])
        assert sets[np.arange(75), truth].mean() > 0.85 and sets.any(axis=1).all()
        assert model.predict_set(flowers[2], coverage=0.5, score=score).sum() <= sets.sum()

    def test_it_abstains_below_a_threshold(self, flowers):
        threshold = fitted_on(flowers).reject_threshold(coverage=0.6)
        model = fitted_on(flowers, reject_below=threshold, reject_label="ask")
        answers, probs = model.predict(flowers[2]), model.predict_proba(flowers[2])
        np.testing.assert_array_equal(answers == "ask", probs.max(axis=1) < threshold)
        assert (answers == "ask").any()

    def test_abstaining_does_not_change_the_score(self, flowers):
        model = fitted_on(flowers)
        expected = model.score(flowers[2], flowers[3])
        model.set_params(reject_below=0.99)
        assert None in model.predict(flowers[2])
        assert model.score(flowers[2], flowers[3]) == expected

    def test_the_coverage_curve_ends_at_the_error_of_all_rows(self, model, flowers):
        curve = model.coverage_curve(flowers[2], flowers[3])
        assert curve["risk"].iloc[-1] == pytest.approx(1 - model.score(flowers[2], flowers[3]))
        assert len(model.coverage_curve()) == 75
        with pytest.raises(ValueError, match=r"y must hold known classes, got \['tulip'\]"):
            model.coverage_curve(flowers[2][:1], ["tulip"])


class TestFiles:
    """save and load."""

    @pytest.mark.parametrize(
        "params",
        [
            {},
            {
                "metric": "quantile",
                "class_weight": {"setosa": 2.0, "versicolor": 1, "virginica": 1},
            },
            {"embedder": "mlp", "training": {"epochs": 1}},
        ],
    )
    def test_a_saved_classifier_predicts_the_same_numbers(self, flowers, tmp_path, params):
        model = fitted_on(flowers, **params).forget([3])
        path = model.save(tmp_path / "model.safetensors")
        loaded = AttnKNNClassifier.load(path)
        assert loaded.get_params() == model.get_params()
        np.testing.assert_array_equal(
            loaded.predict_proba(flowers[2]), model.predict_proba(flowers[2])
        )
        np.testing.assert_array_equal(loaded.predict_set(flowers[2]), model.predict_set(flowers[2]))
        pd.testing.assert_frame_equal(
            loaded.forget([5]).label_issues(), model.forget([5]).label_issues()
        )

    def test_the_depth_of_a_tuned_search_is_kept(self, flowers, tmp_path):
        model = fitted_on(flowers, index="hnsw")
        model.memory_.autotune(recall=0.9, k=5)
        loaded = AttnKNNClassifier.load(model.save(tmp_path / "model.safetensors"))
        assert loaded.memory_.index_settings == model.memory_.index_settings != {}

    def test_a_function_is_given_again(self, flowers, tmp_path):
        path = fitted_on(flowers, embedder=np.log).save(tmp_path / "model.safetensors")
        loaded = AttnKNNClassifier.load(path, embedder=np.log)
        assert loaded.score(flowers[2], flowers[3]) > 0.9
        with pytest.raises(ValueError, match="embedder must be given"):
            AttnKNNClassifier.load(path)

    def test_cut_and_foreign_files_are_refused(self, model, tmp_path):
        path = model.save(tmp_path / "model.safetensors")
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(ValueError, match="path must be a whole saved file"):
            AttnKNNClassifier.load(cut)
        bank = model.memory_.save(tmp_path / "bank.safetensors")
        with pytest.raises(ValueError, match="path must be a saved AttnKNNClassifier"):
            AttnKNNClassifier.load(bank)

    def test_a_changed_byte_and_an_older_file_are_refused(self, model, tmp_path):
        path = model.save(tmp_path / "model.safetensors")
        whole, places = path.read_bytes(), np.random.default_rng(0).integers(8, 2**31, 41)
        for place in (len(whole) - 1, *(places % len(whole))):
            damaged = bytearray(whole)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="path must"):
                AttnKNNClassifier.load(path)
        path.write_bytes(whole.replace(b"attnknn-classifier-3", b"attnknn-classifier-2"))
        with pytest.raises(ValueError, match="got 'attnknn-classifier-2': fit and save anew"):
            AttnKNNClassifier.load(path)

    def test_the_file_holds_no_code(self, model, tmp_path):
        content = model.save(tmp_path / "model.safetensors").read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert json.loads(header["__metadata__"]["facts"])["classes"]["values"] == NAMES.tolist()


class TestInputs:
    """Tables, missing numbers, own embedders and networks."""

    def table(self, flowers) -> pd.DataFrame:
        rows = flowers[0]
        colour = np.where(rows[:, 3] > 1, "red", "blue")
        return pd.DataFrame({"width": rows[:, 1], "colour": colour, "length": rows[:, 2]})

    def test_pandas_and_polars_tables_with_categories_are_the_same(self, flowers):
        table = self.table(flowers)
        one = AttnKNNClassifier(random_state=0).fit(table, flowers[1])
        other = AttnKNNClassifier(random_state=0).fit(pl.from_pandas(table), pl.Series(flowers[1]))
        np.testing.assert_array_equal(
            one.predict_proba(table), other.predict_proba(pl.from_pandas(table))
        )
        assert one.feature_names_in_.tolist() == ["width", "colour", "length"]
        unseen = table.assign(colour="green")
        assert np.isfinite(one.predict_proba(unseen)).all()

    def test_a_table_with_other_columns_is_refused(self, flowers):
        table = self.table(flowers)
        model = AttnKNNClassifier(random_state=0).fit(table, flowers[1])
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(table.rename(columns={"width": "girth"}))

    def test_missing_numbers_are_refused_or_imputed(self, flowers):
        rows = flowers[0].copy()
        rows[0, 1] = rows[7, 2] = np.nan
        with pytest.raises(ValueError, match="X must have no missing number, got 2 times NaN"):
            AttnKNNClassifier().fit(rows, flowers[1])
        table = self.table(flowers)
        table.loc[4, "length"] = np.nan
        with pytest.raises(
            ValueError, match="column 'length' must have no missing number, got 1 times"
        ):
            AttnKNNClassifier().fit(table, flowers[1])
        for given in (rows, table):
            model = AttnKNNClassifier(missing="impute", random_state=0).fit(given, flowers[1])
            assert np.isfinite(model.predict_proba(given)).all()
        filled = table.fillna({"length": table["length"].median()})
        np.testing.assert_array_equal(model.predict_proba(table), model.predict_proba(filled))

    def test_missing_integers_are_imputed_by_a_median_between_two(self, flowers):
        whole = pd.array([*range(74), None], dtype="Int64")
        table = self.table(flowers).assign(whole=whole)
        model = AttnKNNClassifier(missing="impute", random_state=0).fit(table, flowers[1])
        assert model._fitted.embedding.features.medians["whole"] == 36.5
        assert np.isfinite(model.predict_proba(table)).all()

    def test_complex_numbers_are_refused_beside_categories_too(self, flowers):
        table = self.table(flowers)
        with pytest.raises(ValueError, match="column 'width' must hold real numbers, got complex"):
            AttnKNNClassifier().fit(table.assign(width=table["width"] + 1j), flowers[1])

    def test_a_function_of_ones_own_embeds_anything(self, flowers):
        texts = [" ".join(map(str, row)) for row in flowers[0]]

        def parse(given):
            return np.array([[float(word) for word in text.split()] for text in given])

        model = AttnKNNClassifier(embedder=parse, random_state=0).fit(texts, flowers[1])
        assert model.score(texts, flowers[1]) > 0.9
        with pytest.raises(ValueError, match="embedder must return one row of numbers for each"):
            AttnKNNClassifier(embedder=lambda given: np.zeros(3)).fit(texts, flowers[1])

    def test_a_function_is_asked_once_and_decides_what_copies_are(self, flowers):
        asked = []

        def rounded(table):
            asked.append(len(table))
            return np.where(np.abs(table) < 1, -0.0, np.round(table))

        model = AttnKNNClassifier(embedder=rounded, random_state=0).fit(*flowers[:2])
        distinct = np.unique(np.c_[rounded(flowers[0]), np.searchsorted(NAMES, flowers[1])], axis=0)
        assert len(model.memory_) == len(distinct) < 75 and asked[:-1] == [75]
        assert len(model.partial_fit(*flowers[:2]).memory_) == len(distinct)

    def test_what_a_function_makes_of_a_table_is_compared_by_direction_too(self):
        rng = np.random.default_rng(0)
        angle, length = rng.uniform(0, 2 * np.pi, 200), np.exp(2 * rng.normal(size=200))
        table = pd.DataFrame({"a": length * np.cos(angle), "b": length * np.sin(angle)})
        model = AttnKNNClassifier(embedder=lambda given: given.to_numpy(), random_state=0)
        assert model.fit(table, (angle // (np.pi / 4)).astype(int)).embedder_ == "cosine"

    def test_a_function_that_returns_no_numbers_is_refused(self, flowers):
        with pytest.raises(ValueError, match=r"embedder must return one row of numbers .* of <U"):
            fitted_on(flowers, embedder=lambda given: given.astype(str))
        with pytest.raises(ValueError, match=r"embedder\(X\) must be finite"):
            fitted_on(flowers, embedder=lambda given: given * 1e300)

    @pytest.mark.parametrize("backbone", ["mlp-periodic", "pca"])
    def test_networks_are_trained_inside(self, flowers, backbone):
        model = fitted_on(flowers, embedder=backbone, training={"epochs": 8})
        assert model.embedder_ == backbone and len(model.memory_) == len(
            np.unique(np.c_[flowers[0], np.searchsorted(NAMES, flowers[1])], axis=0)
        )
        np.testing.assert_array_equal(
            flowers[1][model._ledger.first_ids()], NAMES[model.memory_.labels.numpy()]
        )
        assert model.score(flowers[2], flowers[3]) > 0.6

    def test_an_image_backbone_takes_images(self):
        from tests.tiny import tiny_splits

        split = tiny_splits().train
        settings = {"widths": [4, 6, 8], "epochs": 2, "batch_size": 20}
        model = AttnKNNClassifier(embedder="fast", training=settings, random_state=0)
        assert model.fit(split.inputs, split.labels).predict(split.inputs).shape == (60,)
        with pytest.raises(ValueError, match="X must be uint8 images"):
            model.fit(split.inputs.reshape(60, -1), split.labels)

    @pytest.mark.slow
    def test_a_large_table_may_get_a_network(self, monkeypatch):
        monkeypatch.setattr(fitting, "NETWORK_ROWS", 200)
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(400, 8))
        labels = (rows[:, 0] * rows[:, 1] > 0).astype(int)  # no metric on eight columns sees this
        model = AttnKNNClassifier(random_state=0, training={"epochs": 30}).fit(rows, labels)
        assert model.embedder_ == "mlp-periodic"
        plain = AttnKNNClassifier(random_state=0, embedder="identity").fit(rows, labels)
        assert plain.embedder_ in fitting.METRICS


class TestSmallData:
    """What is left when there is hardly anything."""

    def test_thirty_rows_with_two_of_each_class(self):
        rows, labels, _ = blobs(30, n_classes=15)
        labels = np.arange(30) // 2
        model = AttnKNNClassifier(random_state=0).fit(rows, labels)
        assert model.predict_proba(rows).shape == (30, 15)

    @pytest.mark.parametrize("n_rows", [2, 3, 5, 8, 9])
    def test_a_handful_of_rows(self, n_rows):
        rows, labels = np.arange(2.0 * n_rows).reshape(-1, 2), np.arange(n_rows) % 2
        model = AttnKNNClassifier(random_state=0).fit(rows, labels)
        assert np.isfinite(model.predict_proba(rows)).all()

    def test_rows_that_are_all_alike_make_it_unsure(self):
        rows, labels = np.ones((40, 3)), np.array([0] * 30 + [1] * 10)
        model = AttnKNNClassifier(random_state=0).fit(rows, labels)
        assert len(model.memory_) == 2 and model.predict_proba(rows[:1]).max() < 0.8

    def test_constant_columns_and_zero_rows_do_no_harm(self, flowers):
        rows = np.c_[flowers[0], np.full(75, 7.0), np.zeros(75)]
        rows[0] = 0
        for metric in fitting.METRICS:
            model = AttnKNNClassifier(random_state=0, metric=metric).fit(rows, flowers[1])
            assert np.isfinite(model.predict_proba(rows)).all()
            assert model.score(rows[1:], flowers[1][1:]) > 0.85


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n_neighbors": 0}, "n_neighbors must be an integer of at least 1"),
        ({"n_neighbors": 2.5}, "n_neighbors must be an integer"),
        ({"embedder": "mlpp"}, "embedder must be one of .*did you mean 'mlp'"),
        ({"metric": "manhattan"}, "metric must be one of"),
        ({"missing": "drop"}, "missing must be one of"),
        ({"new_classes": "ignore"}, "new_classes must be one of"),
        ({"label_noise": 0.7}, "label_noise must be at least 0 and below 0.666667, got label_nois"),
        ({"metric": "quantile", "embedder": np.log}, "metric must be 'auto' or one of .* scaled"),
        ({"label_noise": "much"}, "label_noise must be a number, got label_noise='much'"),
        ({"reject_below": 3}, "reject_below must be at least 0 and at most 1"),
        ({"reject_below": -np.inf}, "reject_below must be finite"),
        ({"training": 3}, "training must be settings by name"),
        ({"verbose": None}, "verbose must be a number"),
        ({"trust_neighbours": 0}, "trust_neighbours must be an integer"),
        ({"index": "tree"}, "index must be"),
        (
            {"class_weight": {"setosa": -1, "versicolor": 1, "virginica": 1}},
            "class_weight must not",
        ),
        ({"embedder": "mlp", "training": {"epoch": 1}}, "epoch must be a known setting"),
    ],
)
def test_impossible_parameters_are_refused_in_fit(flowers, params, message):
    with pytest.raises(ValueError, match=message):
        fitted_on(flowers, **params)


def test_labels_of_two_kinds_are_refused(flowers):
    labels = np.array(["a", 1] * 37 + ["a"], dtype=object)
    with pytest.raises(ValueError, match="y must hold labels of one kind, got int and str"):
        AttnKNNClassifier().fit(flowers[0], labels)


def test_the_package_offers_the_classifier_and_loads_it_late():
    code = (
        "import sys, attnknn; assert 'sklearn' not in sys.modules and 'torch' not in sys.modules;"
        "print(attnknn.AttnKNNClassifier.__name__, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["AttnKNNClassifier", "False"]
    import attnknn

    assert "AttnKNNClassifier" in dir(attnknn)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = attnknn.Nothing


def test_the_classifier_chooses_the_kernels_before_faiss_loads_and_blames_nobody():
    code = (
        "import os, sys, warnings, numpy as np\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'faiss':\n"
        "            print(os.environ.get('OPENBLAS_CORETYPE'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "warnings.filterwarnings('error', message='.*before attnknn')\n"
        "from attnknn import AttnKNNClassifier\n"
        "from attnknn.core.index import build_index\n"
        "from attnknn.core.kernels import kernel_fault\n"
        "rows = np.eye(7, dtype=np.float32)\n"
        "print(build_index('auto', rows).search(rows, 1)[1].ravel().tolist(), kernel_fault())"
    )
    clean = {name: value for name, value in os.environ.items() if name != blas.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    chosen = blas.core_type(blas.cpu_flags())
    assert done.stdout == f"{chosen}\n[0, 1, 2, 3, 4, 5, 6] None\n", done.stdout + done.stderr


@pytest.mark.parametrize("one_thread", [False, True])
def test_faiss_keeps_to_one_thread_where_two_pools_would_crash(monkeypatch, one_thread):
    class Faiss:
        """Stands in for faiss, which on some systems shares its threads with torch."""

        asked: ClassVar[list[int]] = []
        omp_set_num_threads = asked.append

        @staticmethod
        def omp_get_max_threads() -> int:
            return 1

    monkeypatch.setattr(base, "faiss", Faiss)
    monkeypatch.setattr(base, "ONE_FAISS_THREAD", one_thread)
    monkeypatch.setattr(base, "effective_n_jobs", lambda n_jobs: n_jobs)
    with AttnKNNClassifier(n_jobs=2)._threads():
        assert Faiss.asked == ([] if one_thread else [2])
    assert Faiss.asked[-1] == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nearly_collinear_rows_can_be_fitted(seed):
    labels = np.array(["a", "b"])[np.arange(12) % 2]
    rows = np.arange(24.0).reshape(12, 2) + 50 * (labels == "b")[:, None]
    model = AttnKNNClassifier(metric="cosine", random_state=seed).fit(rows, labels)
    probs = model.predict_proba(rows)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1)
