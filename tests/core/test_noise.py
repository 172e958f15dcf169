"""Wrong labels: found where they are and nowhere else, allowed for by hand, drawn as asked."""

import numpy as np
import pytest
import torch

from attnknn.core import noise
from attnknn.core.calibrate import transition_matrix
from attnknn.core.noise import (
    corrected_nll,
    find_wrong_labels,
    label_transition,
    noisy_labels,
    noisy_views,
    view_pool,
)
from attnknn.data.change import flip_labels

N, C = 2003, 5
# Class 0 is called 1, class 3 is called 2; nothing else goes wrong.
ONE_WAY = np.eye(C)
ONE_WAY[0, :2], ONE_WAY[3, 2:4] = (0.6, 0.4), (0.3, 0.7)


def told(sharpness: float, *, seed: int = 0, n_rows: int = N):
    """Return log-probabilities, and labels that are drawn from just these."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(n_rows, C))
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    drawn = (np.exp(logs).cumsum(axis=1) < rng.random((n_rows, 1))).sum(axis=1)
    return logs, drawn.clip(max=C - 1)


def misnamed(labels, matrix, *, seed: int = 1):
    """Return labels that went wrong with the chances of a matrix."""
    rng = np.random.default_rng(seed)
    return (matrix[labels].cumsum(axis=1) < rng.random((len(labels), 1))).sum(axis=1)


@pytest.mark.parametrize("share", [0.08, 0.3, 0.5])
@pytest.mark.parametrize("sharpness", [3.0, 9.0])
def test_the_share_of_wrong_labels_is_found(sharpness, share):
    logs, right = told(sharpness)
    given = misnamed(right, transition_matrix(share, C))
    found = find_wrong_labels(logs, given)
    low, high = found.interval
    assert low <= share <= high and high - low < 0.12
    assert found.share == pytest.approx(share, abs=0.04)
    np.testing.assert_allclose(found.transition, transition_matrix(share, C), atol=0.08)


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 9.0])
def test_ambiguous_labels_are_not_called_wrong(sharpness):
    found = find_wrong_labels(*told(sharpness))
    assert found.share == 0 and found.transition is None
    assert found.interval[0] == 0 and found.interval[1] < (0.3 if sharpness < 1 else 0.03)


def test_what_chance_alone_would_show_is_not_called_wrong(monkeypatch):
    drawn = [told(3.0, seed=seed, n_rows=53) for seed in range(97)]
    found = sum(find_wrong_labels(*each).share > 0 for each in drawn)
    monkeypatch.setattr(noise, "SURE", -np.inf)
    blind = sum(find_wrong_labels(*each).share > 0 for each in drawn)
    assert found < 0.7 * blind and blind > 15  # what the likeliest share alone would say


def test_labels_that_go_wrong_one_way_give_their_matrix():
    logs, right = told(5.0)
    found = find_wrong_labels(logs, misnamed(right, ONE_WAY))
    np.testing.assert_allclose(found.transition, ONE_WAY, atol=0.06)
    np.testing.assert_allclose(found.transition.sum(axis=1), 1)
    wrong = (np.bincount(right, minlength=C) / N) @ (1 - ONE_WAY.diagonal())
    assert found.share == pytest.approx(wrong, abs=0.03)


def test_few_rows_say_too_little_for_a_matrix():
    logs, right = told(5.0, n_rows=97)
    found = find_wrong_labels(logs, misnamed(right, transition_matrix(0.3, C)))
    np.testing.assert_allclose(found.transition, transition_matrix(found.share, C))


def test_rows_that_do_not_count_say_nothing_about_wrong_labels():
    logs, right = told(5.0)
    given, counted = misnamed(right, transition_matrix(0.4, C)), np.ones(N)
    given[: N // 2] = right[: N // 2]
    counted[N // 2 :] = 1e-6
    assert find_wrong_labels(logs, given).share == pytest.approx(0.2, abs=0.04)
    assert find_wrong_labels(logs, given, counted).share == 0


def test_wrong_labels_of_some_classes_among_more():
    logs, right = told(5.0)
    wrong = find_wrong_labels(logs, misnamed(right, ONE_WAY))
    more = wrong.renamed(np.array([6, 0, 2, 5, 3]), 7).transition
    assert more[6, 0] == wrong.transition[0, 1] and more[5, 2] == wrong.transition[3, 2]
    assert more[[1, 4], [1, 4]].tolist() == [1, 1]
    np.testing.assert_allclose(more.sum(axis=1), 1)
    assert noise.NO_WRONG_LABELS.renamed(np.arange(5), 7) is noise.NO_WRONG_LABELS


@pytest.mark.parametrize(("kind", "rate"), [("symmetric", 0.3), ("asymmetric", 0.3), (None, 0)])
def test_the_shipped_prior_reads_wrong_labels_from_neighbours(make_blobs, kind, rate):
    """Memory and queries are equally wrong; right ones that overlap are not taken for wrong."""
    spread = 0.35 if kind is None else 0.15
    blobs = make_blobs(seed=1, n_rows=1009, n_queries=2003, spread=spread)
    wrong = [blobs.labels, blobs.query_labels]
    if kind is not None:
        options = {"n_classes": C, "kind": kind}
        wrong = [flip_labels(each, rate, seed=5 + i, **options) for i, each in enumerate(wrong)]
    found = label_transition(blobs.bank().relabelled(wrong[0]).search(blobs.queries, 23), wrong[1])
    actual = np.zeros_like(found)
    np.add.at(actual, (blobs.query_labels, wrong[1]), 1)
    np.testing.assert_allclose(found, actual / actual.sum(axis=1, keepdims=True), atol=0.12)


def test_forward_correction_without_error_is_the_plain_nll():
    log_probs = torch.randn(13, 5, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    labels = torch.arange(13) % 5
    plain = torch.nn.functional.nll_loss(log_probs, labels)
    torch.testing.assert_close(corrected_nll(log_probs, labels, 0.0), plain)
    torch.testing.assert_close(corrected_nll(log_probs, labels, 1e-9), plain)


def test_forward_correction_by_hand():
    # p = 0.5 of 3 classes at e = 0.4: observed with chance 0.6 * 0.5 + 0.4 * 0.5 / 2 = 0.4.
    log_probs = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert corrected_nll(log_probs, torch.tensor([0]), 0.4).item() == pytest.approx(-np.log(0.4))


@pytest.mark.parametrize("error", [-0.1, 0.67, 0.9])
def test_an_error_rate_that_would_turn_labels_round_is_refused(error):
    log_probs = torch.zeros(1, 3).log_softmax(dim=1)
    with pytest.raises(ValueError, match=r"label_error must be at least 0 and below 0.66"):
        corrected_nll(log_probs, torch.tensor([0]), error)


def test_corrected_nll_of_a_matrix_by_hand():
    log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).log()
    chances = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.7, 0.3], [0.2, 0.0, 0.8]])
    losses = corrected_nll(log_probs, torch.tensor([0, 1]), chances, reduce=False)
    expected = -np.log([0.5 * 0.6 + 0.2 * 0.2, 0.1 * 0.4 + 0.6 * 0.7])
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-5)


def test_a_number_is_the_symmetric_matrix():
    log_probs = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    labels = torch.arange(7) % 5
    matrix = torch.from_numpy(transition_matrix(0.3, 5)).float()
    one, other = (corrected_nll(log_probs, labels, error) for error in (0.3, matrix))
    torch.testing.assert_close(one, other)


def test_labels_that_say_nothing_still_give_a_matrix_that_can_be_read(make_blobs):
    blobs = make_blobs(n_rows=307, n_queries=211)
    labels = np.random.default_rng(0).integers(blobs.bank().n_classes, size=211)
    found = label_transition(blobs.bank().search(blobs.queries, 23), labels)
    transition_matrix(found, blobs.bank().n_classes)  # refuses what cannot be read


def test_a_pool_covers_the_noise_rates_evenly_and_is_bounded(make_blobs, monkeypatch):
    bank = make_blobs(n_rows=2003).bank()
    views = view_pool(bank, 0.4, torch.Generator().manual_seed(0))
    rates = [(view.labels != bank.labels).float().mean().item() for view in views]
    assert len(views) == 48
    np.testing.assert_allclose(rates, 0.4 * (np.arange(48) + 0.5) / 48, atol=0.05)
    monkeypatch.setattr("attnknn.core.noise.POOL_CELLS", 10 * len(bank) * bank.n_classes)
    assert len(view_pool(bank, 0.4, torch.Generator().manual_seed(0))) == 10


def test_noisy_labels_by_class_name_one_other_class_each():
    labels = torch.arange(5).repeat(211)
    noisy = noisy_labels(labels, 0.3, 5, torch.Generator().manual_seed(0), by_class=True)
    for name in range(5):
        wrong = noisy[(labels == name) & (noisy != labels)]
        assert len(wrong.unique()) == 1 and 0.2 < len(wrong) / 211 < 0.4


def test_every_second_draw_of_a_memory_is_by_class(make_blobs):
    bank = make_blobs(n_rows=2003).bank()
    n_classes = bank.n_classes
    views = noisy_views(bank, torch.full((4,), 0.5), torch.Generator().manual_seed(0))
    kinds = []
    for view in views:
        pairs = torch.stack([bank.labels, view.labels], dim=1)[view.labels != bank.labels]
        kinds.append(len(pairs.unique(dim=0)))
    assert kinds == [n_classes * (n_classes - 1), n_classes] * 2  # any other class, or one


def test_noisy_labels_change_about_the_asked_share_and_always_to_another_class():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(20_011) % 5
    noisy = noisy_labels(labels, 0.3, 5, generator)
    assert (noisy != labels).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert noisy.min() == 0 and noisy.max() == 4
    shifts = ((noisy - labels) % 5)[noisy != labels].bincount(minlength=5)[1:]
    assert shifts.min() > 0.9 * shifts.float().mean()
    assert torch.equal(noisy_labels(labels, 0.0, 5, generator), labels)
    assert (noisy_labels(labels, 1.0, 5, generator) != labels).all()
