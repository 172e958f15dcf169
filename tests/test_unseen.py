"""The last temperature: from queries that a fit has not seen, never below 1, and applied."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnknn.config import AttentionConfig, FittingConfig
from attnknn.core.attention import NeighbourAttention
from attnknn.core.fit import fit_on_neighbours, make_queries, unseen_temperature
from attnknn.core.vote import predict
from attnknn.evaluate.measure import negative_log_likelihood

FITTING = FittingConfig(fit_k=13, fit_epochs=12, fit_batch_size=53, fit_folds=5)
# Hundreds of parameters a query: such a fit learns its queries by heart.
GREEDY = AttentionConfig(heads=3, qk="full")


class Sure(NeighbourAttention):
    """An attention that says what it is told of every query: class 0 with the given chance."""

    def __init__(self, chance: float) -> None:
        super().__init__(AttentionConfig(), dim=6, n_classes=5)
        self.chance = chance

    def forward(self, neighbours, *, query=None):
        attended = super().forward(neighbours, query=query)
        probs = torch.full((len(neighbours.ids), 5), (1 - self.chance) / 4)
        probs[:, 0] = self.chance
        return replace(attended, log_probs=probs.log())


@pytest.fixture
def blobs(make_blobs):
    """307 rows and 613 queries, of which a fifth carries a wrong label."""
    clean = make_blobs(seed=1, n_rows=307, n_queries=613, spread=0.25)
    return replace(clean, query_labels=clean.with_noise(0.2, 1).query_labels)


def queries_of(blobs, labels, fitting=FITTING):
    """Return bank and queries, with the given labels."""
    bank = blobs.bank()
    found = bank.search(blobs.queries[: len(labels)], 13)
    return bank, make_queries(bank, found, labels, 0.0, None, fitting, 0)


def test_a_fold_is_predicted_by_a_fit_that_has_not_seen_it(blobs):
    bank, queries = queries_of(blobs, blobs.query_labels)
    fitted_on = []

    def fit_part(rows):
        fitted_on.append(set(rows.tolist()))
        return Sure(0.5)

    unseen_temperature(fit_part, bank, queries, FITTING, seed=0)
    everyone = set(range(len(blobs.query_labels)))
    left_out = [everyone - rows for rows in fitted_on]
    assert len(left_out) == 5
    assert sorted(row for rows in left_out for row in rows) == sorted(everyone)


def test_the_temperature_by_hand(blobs):
    # Said with chance 0.9, right in 50 of 100 cases. At temperature t the chance of class 0 is
    # 0.9^(1/t) / (0.9^(1/t) + 4 * 0.025^(1/t)); it is 0.5 at t = log(36) / log(4).
    labels = np.array([0] * 50 + [1] * 50)
    bank, queries = queries_of(blobs, labels)
    found = unseen_temperature(lambda rows: Sure(0.9), bank, queries, FITTING, seed=0)
    assert found == pytest.approx(np.log(36) / np.log(4), rel=1e-3)


def test_unseen_queries_never_embolden(blobs):
    labels = np.zeros(100, dtype=np.int64)  # all as said: certainty would be rewarded
    bank, queries = queries_of(blobs, labels)
    assert unseen_temperature(lambda rows: Sure(0.6), bank, queries, FITTING, seed=0) == 1.0


@pytest.mark.parametrize("n_folds", [0, 1, 101])
def test_without_folds_nothing_is_fitted(blobs, n_folds):
    fitting = replace(FITTING, fit_folds=n_folds)
    bank, queries = queries_of(blobs, np.arange(100) % 5, fitting)

    def fit_part(rows):
        raise AssertionError("nothing is to be fitted")

    assert unseen_temperature(fit_part, bank, queries, fitting, seed=0) == 1.0


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_a_greedy_fit_is_held_back_and_predicts_new_queries_better(make_blobs, seed):
    blobs = make_blobs(seed=seed, n_rows=307, n_queries=1201, spread=0.25)
    bank, held, new = blobs.bank(), slice(0, 211), slice(211, None)
    found, fresh = (bank.search(blobs.queries[part], 13) for part in (held, new))
    losses, temperatures = {}, {}
    for n_folds in (0, 5):
        fitted = fit_on_neighbours(
            bank,
            found,
            blobs.query_labels[held],
            attention=GREEDY,
            fitting=replace(FITTING, fit_folds=n_folds, fit_epochs=40, fit_lr=0.02),
            seed=seed,
            n_epochs=40,
        )
        probs = predict(fitted.method, fresh)
        losses[n_folds] = negative_log_likelihood(probs, blobs.query_labels[new])
        temperatures[n_folds] = fitted.temperature
        assert fitted.attention.last_temperature.item() == pytest.approx(fitted.temperature)
    assert temperatures[0] == 1.0 and temperatures[5] > 1.5
    assert losses[5] < 0.9 * losses[0]


def test_a_known_temperature_needs_no_folds(blobs, monkeypatch):
    monkeypatch.setattr("attnknn.core.fit.unseen_temperature", None)
    found = blobs.bank().search(blobs.queries, 13)
    fitted = fit_on_neighbours(
        blobs.bank(), found, blobs.query_labels, attention=AttentionConfig(),
        fitting=FITTING, n_epochs=2, temperature=1.5,
    )  # fmt: skip
    assert fitted.temperature == 1.5


@pytest.mark.parametrize("adapts", [True, False])
def test_the_last_temperature_is_applied_to_every_kind_of_vote(blobs, adapts):
    off = {} if adapts else dict.fromkeys(("denoise", "prototype_gate", "floor"), False)
    if not adapts:
        off["query_temperature"] = False
    torch.manual_seed(0)
    attention = NeighbourAttention(AttentionConfig(**off), dim=6, n_classes=5).eval()
    found = blobs.bank().search(blobs.queries, 13)
    before = attention(found).log_probs
    attention.last_temperature.fill_(2.0)
    torch.testing.assert_close(
        attention(found).log_probs, (before / 2).log_softmax(dim=1), rtol=1e-4, atol=1e-4
    )


def test_no_class_falls_to_zero_however_sharp_the_vote(blobs):
    attention = NeighbourAttention(AttentionConfig(), dim=6, n_classes=5).eval()
    found = blobs.bank().search(blobs.queries, 13)
    last = attention.vote_settings.mlp[-1]
    last.bias.data[1], last.bias.data[3] = -40.0, -20.0  # floor and temperature almost 0
    probs = attention(found).log_probs.exp()
    assert probs.min().item() == pytest.approx(1e-6 / 5, rel=1e-3)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(len(probs)))


def test_an_attention_saved_without_a_last_temperature_can_be_loaded(blobs):
    attention = NeighbourAttention(AttentionConfig(), dim=6, n_classes=5).eval()
    state = {n: t for n, t in attention.state_dict().items() if n != "last_temperature"}
    other = NeighbourAttention(AttentionConfig(), dim=6, n_classes=5).eval()
    other.last_temperature.fill_(3.0)
    other.load_state_dict(state)
    assert other.last_temperature.item() == 1.0
