"""Stage 2: deterministic, better than its start, honest about whose queries it is fitted on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core import fit
from attnknn.core.attention import NeighbourAttention
from attnknn.core.bank import MemoryBank
from attnknn.core.fit import fit_attention, fit_on_neighbours
from attnknn.core.noise import corrected_nll
from attnknn.core.vote import Attention, predict
from attnknn.evaluate.measure import negative_log_likelihood

DEFAULT = AttentionConfig()
QUICK = FittingConfig(fit_k=13, fit_epochs=7, fit_batch_size=53)


@pytest.fixture
def held_out(make_blobs):
    """307 rows in 47 small blobs and 211 queries."""
    return make_blobs(seed=1, n_rows=307, n_queries=211, spread=0.15, n_blobs=47)


def fitted(blobs, *, seed=0, fitting=QUICK, attention=DEFAULT):
    """Fit on the queries of a set."""
    return fit_attention(
        blobs.bank(), blobs.queries, blobs.query_labels, attention=attention, fitting=fitting,
        seed=seed,
    )  # fmt: skip


def loss_on(result, bank, queries, labels, k=13):
    """Return the held-out NLL of a fit."""
    return negative_log_likelihood(
        predict(Attention(k, result.attention), bank.search(queries, k)), labels
    )


def same_state(one, other) -> bool:
    states = (one.attention.state_dict(), other.attention.state_dict())
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_same_seed_gives_the_same_attention(held_out):
    first, second = fitted(held_out), fitted(held_out)
    assert same_state(first, second)
    assert first.history.equals(second.history)
    assert not same_state(first, fitted(held_out, seed=1))


def test_the_global_random_state_is_neither_used_nor_changed(held_out):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = fitted(held_out)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    assert same_state(first, fitted(held_out))


def test_fitting_improves_on_the_start(held_out):
    result = fitted(held_out)
    history = result.history
    assert list(history.columns) == ["epoch", "fit_nll", "stop_nll", "entropy", "kept"]
    assert len(history) == 7 and np.isfinite(history.to_numpy(dtype=float)).all()
    targets = torch.from_numpy(held_out.query_labels)
    _, stop = fit.fit_and_stop_rows(targets, QUICK.fit_stop_share, 0)
    start = NeighbourAttention(DEFAULT, dim=6, n_classes=5)
    stop_set = held_out.bank().search(held_out.queries[stop], 13)
    start_nll = corrected_nll(start(stop_set).log_probs, targets[stop], 0.0)
    assert history["stop_nll"].min() < 0.9 * start_nll.item()


def test_the_latest_epoch_within_one_standard_error_of_the_best_is_taken():
    best, hardly_worse, worse = [1.0, 2.0, 3.0, 4.0], [0.0, 3.1, 3.0, 4.0], [1.3, 2.3, 3.3, 4.3]
    losses = torch.tensor([worse, best, hardly_worse, worse])  # means 2.8, 2.5, 2.525, 2.8
    # Differences to the best: -1, 1.1, 0, 0 have a standard error of 0.43; 0.3 four times has 0.
    assert fit.latest_good_epoch(losses) == 2
    assert fit.latest_good_epoch(losses[:2]) == 1
    assert fit.latest_good_epoch(torch.tensor([[2.0], [1.0], [1.5]])) == 1  # one row: the minimum


def test_all_queries_are_fitted_on_for_as_long_as_the_trial_says(held_out, monkeypatch):
    fitting = replace(QUICK, fit_epochs=5)
    monkeypatch.setattr(fit, "latest_good_epoch", lambda losses: 2)
    result = fitted(held_out, fitting=fitting)
    assert result.history["kept"].tolist() == [True, True, True, False, False]
    assert result.judged_nll == result.history["stop_nll"][2]
    seen = []
    original = fit.Queries.loss

    def recorded(self, log_probs, rows, **options):
        seen.append(rows.tolist())
        return original(self, log_probs, rows, **options)

    monkeypatch.setattr(fit.Queries, "loss", recorded)
    again = fitted(held_out, fitting=fitting)
    assert same_state(again, result) and not again.attention.training
    n_queries = len(held_out.query_labels)
    final = [row for rows in seen[-3 * -(-n_queries // fitting.fit_batch_size) :] for row in rows]
    assert sorted(final) == sorted(3 * list(range(n_queries)))


def test_a_known_length_needs_no_trial(held_out, monkeypatch):
    monkeypatch.setattr(fit, "latest_good_epoch", lambda losses: 2)
    neighbours = held_out.bank().search(held_out.queries, 13)
    options = {"attention": DEFAULT, "fitting": replace(QUICK, fit_epochs=5)}
    known = fit_on_neighbours(
        held_out.bank(), neighbours, held_out.query_labels, n_epochs=3, **options
    )
    tried = fitted(held_out, fitting=options["fitting"])
    assert known.history.empty and same_state(known, tried)
    with pytest.raises(ValueError, match="n_epochs must lie between 1 and fit_epochs=5"):
        fit_on_neighbours(held_out.bank(), neighbours, held_out.query_labels, n_epochs=6, **options)


def test_the_trial_never_fits_on_the_rows_that_judge_it(held_out, monkeypatch):
    targets = torch.from_numpy(held_out.query_labels)
    _, stop = fit.fit_and_stop_rows(targets, QUICK.fit_stop_share, 0)
    seen = []
    original = fit.Queries.loss

    def recorded(self, log_probs, rows, *, reduce=True):
        if reduce:  # a loss to descend, not one to judge by
            seen.append(set(rows.tolist()))
        return original(self, log_probs, rows, reduce=reduce)

    monkeypatch.setattr(fit.Queries, "loss", recorded)
    fitted(held_out)
    n_fit = len(targets) - len(stop)
    n_trial = QUICK.fit_epochs * -(-n_fit // QUICK.fit_batch_size)
    assert not set().union(*seen[:n_trial]) & set(stop.tolist())
    assert set().union(*seen[n_trial:]) >= set(stop.tolist())


def test_a_fitted_attention_beats_the_unfitted_one_on_new_queries(held_out, make_blobs):
    fresh = make_blobs(seed=1, n_rows=307, n_queries=421, spread=0.15, n_blobs=47)
    bank = held_out.bank()
    torch.manual_seed(0)
    start = NeighbourAttention(DEFAULT, dim=6, n_classes=5)
    neighbours = bank.search(fresh.queries, 13)
    before = negative_log_likelihood(predict(Attention(13, start), neighbours), fresh.query_labels)
    after = loss_on(fitted(held_out), bank, fresh.queries, fresh.query_labels)
    assert after < before


def test_a_search_that_is_done_is_not_done_again(held_out, monkeypatch):
    bank = held_out.bank()
    neighbours, _ = bank.search(held_out.queries, 13), bank.own_neighbours
    whole = fitted(held_out)
    monkeypatch.setattr(bank.index, "search", None)
    again = fit_on_neighbours(
        bank, neighbours, held_out.query_labels, attention=DEFAULT, fitting=QUICK
    )
    assert same_state(whole, again)


def test_fault_4_only_the_given_queries_are_fitted_on(held_out, monkeypatch):
    assert FittingConfig().fit_attention_on == "held_out"
    bank, seen = held_out.bank(), []
    search = MemoryBank.search

    def spy(self, queries, k, **options):
        seen.append((queries, options))
        return search(self, queries, k, **options)

    monkeypatch.setattr(MemoryBank, "search", spy)
    own = np.arange(307)
    options = {"attention": DEFAULT, "fitting": replace(QUICK, fit_epochs=1)}
    fit_attention(bank, held_out.queries, held_out.query_labels, **options)
    fit_attention(bank, held_out.rows, held_out.labels, exclude_ids=own, **options)
    assert seen[0][0] is held_out.queries and seen[0][1] == {"exclude_ids": None}
    # Fitting on memory rows has to be asked for, and then leaves each row out of its own vote.
    assert seen[1][0] is held_out.rows and seen[1][1]["exclude_ids"] is own
    assert len(seen) == 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fault_4_seen_queries_make_the_attention_over_confident(make_blobs, seed):
    # A memorised embedding: memory rows sit tight on their class, a third of the new rows land
    # on another class. Leave-one-out neighbours of memory rows are all right, so they teach trust.
    memorised = make_blobs(seed=seed, n_rows=211, n_queries=613, spread=0.05)
    memorised = replace(memorised, query_labels=memorised.with_noise(1 / 3, seed).query_labels)
    bank, held, new = memorised.bank(), slice(0, 307), slice(307, None)
    options = {"attention": DEFAULT, "fitting": replace(QUICK, fit_epochs=12)}
    unseen = fit_attention(bank, memorised.queries[held], memorised.query_labels[held], **options)
    seen = fit_attention(
        bank, memorised.rows, memorised.labels, exclude_ids=np.arange(211), **options
    )
    queries, labels = memorised.queries[new], memorised.query_labels[new]
    held_out_loss = loss_on(unseen, bank, queries, labels)
    assert loss_on(seen, bank, queries, labels) > 1.5 * held_out_loss


def test_fault_1_memory_rows_with_themselves_in_the_vote_teach_blind_trust(held_out):
    # Labels drawn at random: nothing can be learned, unless a row finds its own label.
    rng = np.random.default_rng(0)
    bank = held_out.bank().relabelled(rng.integers(5, size=307))
    options = {"attention": DEFAULT, "fitting": replace(QUICK, fit_epochs=12)}
    labels = bank.labels.numpy()
    leaked = fit_attention(bank, held_out.rows, labels, **options)
    clean = fit_attention(bank, held_out.rows, labels, exclude_ids=np.arange(307), **options)
    assert leaked.history["stop_nll"].min() < 0.5 * np.log(5)
    assert clean.history["stop_nll"].min() > 0.95 * np.log(5)


def test_a_noise_augmented_fit_makes_each_view_once(make_blobs, monkeypatch):
    blobs = make_blobs(seed=2, n_rows=401, n_queries=809, spread=0.25)
    made = []
    whole = MemoryBank.view_of
    monkeypatch.setattr(
        MemoryBank, "view_of", lambda bank, labels: made.append(1) or whole(bank, labels)
    )
    fitted(blobs, fitting=replace(QUICK, fit_noise_max=0.3))
    # The pool, the judges of the trial and of the folds, and the memory's own.
    assert len(made) <= 48 + 3 + 3 + 1


def test_forward_correction_recovers_calibrated_probabilities(make_blobs):
    # Nothing clean anywhere: memory and held-out labels are both wrong at 30 %.
    clean = make_blobs(seed=2, n_rows=401, n_queries=809, spread=0.25)
    noisy = clean.with_noise(0.3, seed=3)
    bank, held, new = noisy.bank(), slice(0, 401), slice(401, None)
    losses = {}
    for corrected in (False, True):
        result = fit_attention(
            bank,
            noisy.queries[held],
            noisy.query_labels[held],
            attention=DEFAULT,
            fitting=replace(QUICK, fit_epochs=12, fit_noisy_labels=corrected),
        )
        losses[corrected] = loss_on(result, bank, clean.queries[new], clean.query_labels[new])
        assert (result.label_error > 0.2) == corrected
    assert losses[True] < 0.6 * losses[False]


def test_a_noise_augmented_fit_holds_up_under_noise_it_was_not_refitted_for(make_blobs):
    clean = make_blobs(seed=2, n_rows=401, n_queries=809, spread=0.25)
    bank, held, new = clean.bank(), slice(0, 401), slice(401, None)
    worse = bank.relabelled(clean.with_noise(0.4, seed=3).labels)
    losses = {}
    for noise in (0.0, 0.5):
        result = fit_attention(
            bank,
            clean.queries[held],
            clean.query_labels[held],
            attention=DEFAULT,
            fitting=replace(QUICK, fit_epochs=12, fit_noise_max=noise),
        )
        losses[noise] = loss_on(result, worse, clean.queries[new], clean.query_labels[new])
    assert losses[0.5] < losses[0.0]
    assert torch.equal(bank.labels, torch.from_numpy(clean.labels))


@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig(heads=3, qk="full", self_attention=True, value_path=True),
        AttentionConfig(heads=1, qk="lowrank", label_bias="neighbour", distance_bias="shallow"),
        AttentionConfig(heads=2, situation=("trust",), prototype_score=True, denoise=False),
    ],
)
def test_other_configurations_can_be_fitted(held_out, config):
    result = fitted(held_out, attention=config, fitting=replace(QUICK, fit_epochs=2))
    assert np.isfinite(result.history["stop_nll"]).all()


def test_k_is_cut_to_a_small_bank():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(17, 6))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    labels = np.arange(17) % 2
    bank = MemoryBank(rows, labels, n_classes=2)
    options = {"attention": DEFAULT, "fitting": replace(QUICK, fit_k=50, fit_epochs=1)}
    result = fit_attention(bank, rows, labels, exclude_ids=np.arange(17), **options)
    assert len(result.history) == 1


def testfit_and_stop_rows_are_stratified_and_never_meet():
    labels = torch.tensor([0] * 23 + [1] * 5 + [2] * 4 + [3])
    fit_rows, stop_rows = fit.fit_and_stop_rows(labels, 0.2, seed=0)
    assert sorted([*fit_rows.tolist(), *stop_rows.tolist()]) == list(range(33))
    assert set(labels[fit_rows].tolist()) == {0, 1, 2, 3}
    assert set(labels[stop_rows].tolist()) == {0, 1, 2}  # the single row is fitted on
    assert labels[stop_rows].bincount().tolist() == [5, 1, 1]


@pytest.mark.parametrize(("share", "n_stop"), [(0.01, 2), (0.9, 11)])
def test_extreme_shares_leave_every_class_on_both_sides(share, n_stop):
    labels = torch.tensor([0, 1] * 6 + [0])
    fit_rows, stop_rows = fit.fit_and_stop_rows(labels, share, seed=0)
    assert len(stop_rows) == n_stop
    assert set(labels[fit_rows].tolist()) == set(labels[stop_rows].tolist()) == {0, 1}


def test_queries_of_all_different_classes_are_split_anyhow():
    fit_rows, stop_rows = fit.fit_and_stop_rows(torch.arange(5), 0.2, seed=0)
    assert len(fit_rows) == 4 and len(stop_rows) == 1


@pytest.mark.parametrize(
    ("n_queries", "change", "message"),
    [
        (1, 0, "queries must number at least 2, .* got 1"),
        (7, 5, r"labels must lie in 0..4, got"),
        (7, -9, r"labels must lie in 0..4, got -9"),
    ],
)
def test_bad_queries_and_labels_are_refused(held_out, n_queries, change, message):
    queries, labels = held_out.queries[:n_queries], held_out.query_labels[:n_queries] + change
    if change < 0:
        labels[0] = change
    with pytest.raises(ValueError, match=message):
        fit_attention(held_out.bank(), queries, labels, attention=DEFAULT, fitting=QUICK)


def test_labels_that_do_not_match_the_queries_are_refused(held_out):
    bank = held_out.bank()
    neighbours = bank.search(held_out.queries, 13)
    with pytest.raises(ValueError, match=r"labels must have shape \(211,\), got shape \(199,\)"):
        fit_on_neighbours(
            bank,
            neighbours,
            held_out.query_labels[:199],
            attention=DEFAULT,
            fitting=QUICK,
        )


def test_the_shift_of_prototypes_is_learned_and_held_down(held_out, monkeypatch):
    shifted = replace(DEFAULT, prototype_shift=True)
    free = fitted(held_out, attention=shifted).attention.posterior.shift.weight
    monkeypatch.setattr("attnknn.core.parts.SHIFT_PENALTY", 1.0)
    held_down = fitted(held_out, attention=shifted).attention.posterior.shift.weight
    assert 0 < held_down.norm() < 0.3 * free.norm()
