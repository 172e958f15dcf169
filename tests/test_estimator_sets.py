"""Sets that cover, and answers that are withheld, with right and with wrong training labels."""

import numpy as np
import pytest
from sklearn.datasets import make_blobs

from attnknn import AttnKNNClassifier
from attnknn.core import refine
from attnknn.evaluate.abstain import rejection_threshold

SEEDS = range(5)


@pytest.fixture(autouse=True, scope="module")
def few_epochs():
    """How long the attention is fitted must not matter to what is promised here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(refine.REFINE, "auto", (0, 2))
        yield


def overlapping(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Four groups that run into each other."""
    return make_blobs(900, 3, centers=4, cluster_std=4.0, random_state=seed)


def twisted(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two classes, one inside of the other, on columns of very different size."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(900, 2))
    inside = np.linalg.norm(rows, axis=1) + 0.3 * rng.normal(size=900) < 1.2
    return rows * [1, 100], inside.astype(int)


@pytest.fixture(scope="module", params=[overlapping, twisted], ids=lambda make: make.__name__)
def fits(request):
    """Classifiers of 120 rows each, 150 more rows and 630 to be judged on."""
    found = []
    for seed in SEEDS:
        rows, labels = request.param(seed)
        model = AttnKNNClassifier(random_state=seed).fit(rows[:120], labels[:120])
        found.append((model, (rows[120:270], labels[120:270]), rows[270:], labels[270:]))
    return found


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_sets_cover_what_they_were_asked_to(fits, coverage, own_rows):
    covered, sizes = [], []
    for model, held_out, rows, labels in fits:
        sets = model.predict_set(
            rows, coverage, score="lac", held_out=held_out if own_rows else None
        )
        covered.append(sets[np.arange(len(labels)), labels].mean())
        sizes.append(sets.mean())
    # The share that one fit covers varies by about the square root of 0.9 * 0.1 / 120.
    tolerance = 2 * np.sqrt(coverage * (1 - coverage) / 120 / len(SEEDS))
    assert coverage - tolerance < np.mean(covered) < coverage + tolerance + 0.02
    assert np.mean(sizes) < 0.9


def test_wrong_held_out_rows_are_refused(fits):
    model, _, rows, labels = fits[0]
    with pytest.raises(ValueError, match="y must have one label a row, got 3 for 4 rows"):
        model.predict_set(rows, held_out=(rows[:4], labels[:3]))
    with pytest.raises(ValueError, match=r"y must hold known classes, got \[9\]"):
        model.predict_set(rows, held_out=(rows[:1], [9]))


@pytest.mark.parametrize("coverage", ["0.9", None])
def test_what_is_no_share_is_refused(fits, coverage):
    with pytest.raises(ValueError, match="coverage must be a number"):
        fits[0][0].predict_set(fits[0][2], coverage)
    with pytest.raises(ValueError, match="target_risk must be a number, got target_risk='1 %'"):
        fits[0][0].reject_threshold(target_risk="1 %")


def test_sets_of_very_few_training_rows_hold_everything():
    rows, labels = np.arange(16.0).reshape(8, 2), np.repeat([0, 1], 4)
    model = AttnKNNClassifier(random_state=0).fit(rows, labels)
    assert model.predict_set(rows, 0.5).all()


CONFIDENCE = np.linspace(0.9, 0.5, 10)
PROBS = np.stack([CONFIDENCE, (1 - CONFIDENCE) / 2, (1 - CONFIDENCE) / 2], axis=1)


def test_wrong_labels_are_taken_off_the_risk():
    labels = np.zeros(10, dtype=int)
    labels[[0, 5]] = 1  # all answers are right; two labels of ten are not
    assert rejection_threshold(PROBS, labels, target_risk=0.1) == np.inf
    found = rejection_threshold(PROBS, labels, target_risk=0.0, label_error=0.2)
    assert found == pytest.approx(0.5)


@pytest.mark.parametrize(("target", "answered"), [(0.28, 3), (0.29, 10)])
def test_the_risk_behind_an_observed_one_by_hand(target, answered):
    # With three classes and 0.2 wrong labels 0.2 + r (1 - 0.2 * 3 / 2) of the answers differ. Of
    # all ten rows 0.4 do, so r = 2 / 7; of the first three 1 / 3, so r = 4 / 21.
    labels = np.array([0, 0, 1, 1, 1, 1, 0, 0, 0, 0])
    threshold = rejection_threshold(PROBS, labels, target_risk=target, label_error=0.2)
    assert (CONFIDENCE >= threshold - 1e-9).sum() == answered


def test_labels_that_are_wrong_by_chance_tell_nothing_about_risk():
    with pytest.raises(ValueError, match=r"label_error must be at least 0 and below 0.666667"):
        labels = np.zeros(10, dtype=int)
        rejection_threshold(PROBS, labels, target_risk=0.1, label_error=0.7)


@pytest.fixture(scope="module")
def noisy():
    """Clear groups, a fifth of whose labels is wrong: model, new rows and their true labels."""
    rows, labels = make_blobs(600, 5, centers=3, random_state=0)
    rng = np.random.default_rng(0)
    other = (labels + rng.integers(1, 3, 600)) % 3
    given = np.where(rng.random(600) < 0.2, other, labels)
    model = AttnKNNClassifier(random_state=0, label_noise=0.2)
    return model.fit(rows[:300], given[:300]), rows[300:], labels[300:]


def test_wrong_labels_do_not_silence_a_classifier_that_is_right(noisy):
    model, rows, labels = noisy
    threshold = model.reject_threshold(target_risk=0.05)
    confidence = model.predict_proba(rows).max(axis=1)
    assert (confidence >= threshold).mean() > 0.9
    assert model.score(rows[confidence >= threshold], labels[confidence >= threshold]) > 0.95


def test_a_threshold_that_nothing_reaches_is_a_threshold(noisy, tmp_path):
    rows = noisy[1]
    labels = np.random.default_rng(1).integers(3, size=len(rows))
    model = AttnKNNClassifier(random_state=0, label_noise=0.0).fit(rows, labels)
    threshold = model.reject_threshold(target_risk=0.0)
    assert threshold == np.inf
    answers = model.set_params(reject_below=threshold).fit(rows, labels).predict(rows)
    assert all(answer is None for answer in answers)
    loaded = AttnKNNClassifier.load(model.save(tmp_path / "model.safetensors"))
    assert loaded.reject_below == np.inf
