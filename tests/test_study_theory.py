"""Theory study: bounds worked out by hand, samplers against the exact softmax, table schemas."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

from tests.conftest import C, unit
from tests.tiny import SMALL, config, tiny_splits

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from attnknn.embed import run as trained_module
from attnknn.embed.train import train_run
from attnknn.figures import sweeps as figures
from attnknn.figures.style import use_style
from attnknn.studies import bayes, gumbel, theory, theory_claims
from attnknn.studies import theory as root_n
from attnknn.studies import theory as truncation


class TestTruncation:
    """Discarded mass, and what it bounds."""

    WEIGHTS = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)

    def test_by_hand(self):
        # Keeping two of [.5 .25 | .15 .1]: a quarter is lost, the rest grows to [2/3, 1/3].
        labels = torch.tensor([[0, 1, 1, 0]])
        mass, row, vote = truncation.truncation_errors(self.WEIGHTS, labels, [2], 2)[:, 0, 0]
        assert mass.item() == pytest.approx(0.25)
        # |2/3 - .5| + |1/3 - .25| + .15 + .1, halved
        assert row.item() == pytest.approx(0.25)
        # Votes: full [.6, .4], truncated [2/3, 1/3].
        assert vote.item() == pytest.approx(2 / 3 - 0.6)

    def test_the_vote_error_reaches_the_bound_where_the_lost_rows_are_of_another_class(self):
        labels = torch.tensor([[0, 0, 1, 1]])
        mass, _, vote = truncation.truncation_errors(self.WEIGHTS, labels, [2], 2)[:, 0, 0]
        assert vote.item() == pytest.approx(mass.item())

    def test_a_tiny_mass_is_not_lost_beside_large_weights(self):
        small = 1e-17
        weights = torch.tensor([[1 - 3 * small, small, small, small]], dtype=torch.float64)
        labels = torch.zeros(1, 4, dtype=torch.int64)
        mass = truncation.truncation_errors(weights, labels, [1], 2)[0]
        assert mass.item() == pytest.approx(3e-17)

    def test_against_the_full_softmax(self, bank, blobs):
        found = truncation.truncation(
            bank, blobs.queries, temperatures=(0.5, 0.05), ks=(3, 7, 500), progress=False
        )
        assert found.ks == (3, 7)  # 500 rows are not there
        assert found.mass.shape == (2, 2, 29)
        cosines = blobs.queries.astype(np.float64) @ blobs.rows.T.astype(np.float64)
        weights = np.exp(cosines / 0.05)
        weights /= weights.sum(axis=1, keepdims=True)
        top = -np.sort(-weights, axis=1)[:, :7].sum(axis=1)
        np.testing.assert_allclose(found.mass[1, 1], 1 - top, rtol=1e-4)  # float32 cosines
        cut = np.where(weights >= -np.sort(-weights, axis=1)[:, 6:7], weights, 0)
        cut /= cut.sum(axis=1, keepdims=True)
        one_hot = np.eye(C)[blobs.labels]
        expected = np.abs((cut - weights) @ one_hot).sum(axis=1) / 2
        np.testing.assert_allclose(found.vote_error[1, 1], expected, atol=1e-5)
        np.testing.assert_allclose(found.row_error, found.mass, atol=1e-12)
        assert (found.vote_error <= found.mass + 1e-12).all()

    def test_bad_input(self, bank, blobs):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            truncation.truncation(bank, blobs.queries, temperatures=(0.0,), ks=(3,))
        with pytest.raises(ValueError, match="ks and temperatures must not be empty"):
            truncation.truncation(bank, blobs.queries, temperatures=(1.0,), ks=(101,))


class TestRates:
    """Fitted exponents of series whose exponent is known."""

    KS = (3, 10, 30, 100)

    @pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
    def test_the_exponent_of_a_power_is_found(self, exponent):
        errors = 0.3 / np.array(self.KS, dtype=np.float64) ** exponent
        assert truncation.power_exponent(self.KS, errors) == pytest.approx(exponent, abs=1e-12)

    def test_each_made_up_weighting_falls_as_it_should(self):
        masses = truncation.synthetic_masses(10_000, self.KS)
        found = {
            name: truncation.fitted_rate(self.KS, mass, 10_000) for name, mass in masses.items()
        }
        as_claimed, exponential, flat = found.values()
        assert (as_claimed["form"], as_claimed["against_claim"]) == ("power", "as 1/k")
        assert (exponential["form"], exponential["against_claim"]) == (
            "exponential",
            "faster than 1/k",
        )
        assert (flat["form"], flat["against_claim"]) == ("flat", "slower than 1/k")

    def test_made_up_masses_by_hand(self):
        masses = truncation.synthetic_masses(4, (1, 2))
        whole = 1 + 1 / 4 + 1 / 9 + 1 / 16
        assert masses["weights 1/rank²"][0, 0] == pytest.approx(1 - 1 / whole)
        np.testing.assert_allclose(masses["equal weights"][:, 0], [3 / 4, 2 / 4])

    @pytest.mark.parametrize(
        ("low", "high", "words"),
        [
            (0.2, 0.4, "slower than 1/k"),
            (0.9, 1.1, "not decided"),
            (0.98, 1.02, "as 1/k"),
            (1.2, 1.3, "faster than 1/k"),
        ],
    )
    def test_intervals_are_put_into_words(self, low, high, words):
        assert truncation.against_claim(low, high) == words

    def test_too_few_points_have_no_rate(self):
        assert truncation.fitted_rate((3, 10), np.ones((2, 5)), 100)["form"] == "undefined"


class TestLazyGumbel:
    """The sampler against the exact softmax."""

    SCORES = np.log([0.4, 0.2, 0.1, 0.08, 0.07, 0.06, 0.05, 0.04])

    def draw(self, k, n_samples=5000, seed=3):
        rng = np.random.default_rng(seed)
        top, tail = self.SCORES[:k], self.SCORES[k:]
        return gumbel.lazy_gumbel(top, tail.__getitem__, len(tail), n_samples=n_samples, rng=rng)

    @pytest.mark.parametrize("k", [1, 2, 5, 8])
    def test_it_follows_the_softmax(self, k):
        drawn = self.draw(k)
        shares = np.bincount(drawn.places, minlength=8) / 5000
        np.testing.assert_allclose(shares, np.exp(self.SCORES), atol=4 * np.sqrt(0.24 / 5000))

    def test_the_top_rows_alone_would_not(self):
        rng, probs = np.random.default_rng(0), np.exp(self.SCORES)
        top_only = rng.choice(3, size=20_000, p=probs[:3] / probs[:3].sum())
        assert gumbel.goodness_of_fit(top_only, probs, rng).p_value < 1e-6
        assert gumbel.goodness_of_fit(self.draw(3).places, probs, rng).p_value > 0.01

    @pytest.mark.parametrize("k", [1, 3, 5])
    def test_the_number_of_extra_rows_is_as_expected(self, k):
        drawn = self.draw(k)
        mean, deviation = gumbel.expected_extra(self.SCORES[:k], 8 - k)
        error = deviation / np.sqrt(5000)
        assert drawn.extra.mean() == pytest.approx(mean, abs=4 * error)
        assert drawn.extra.std() == pytest.approx(deviation, rel=0.1)
        assert mean <= gumbel.extra_bound(k, 8 - k) + 1e-12

    def test_equal_scores_reach_the_bound(self):
        # r = k: (N - k) / (1 + r) with 97 others and k = 3 is 97 / 4.
        mean, _ = gumbel.expected_extra(np.zeros(3), 97)
        assert mean == pytest.approx(97 / 4) == gumbel.extra_bound(3, 97)

    def test_only_rows_that_can_win_are_looked_at(self):
        asked = []

        def tail(rows):
            asked.append(len(rows))
            return np.full(len(rows), -20.0)

        rng = np.random.default_rng(0)
        drawn = gumbel.lazy_gumbel(np.zeros(50), tail, 5000, n_samples=200, rng=rng)
        assert sum(asked) == drawn.extra.sum() < 200 * 5000 / 20
        assert (drawn.places < 50).all()

    def test_noise_above_a_threshold_is_gumbel_noise_above_it(self):
        rng, threshold = np.random.default_rng(5), 1.3
        chance = -np.expm1(-np.exp(-threshold))
        ours = gumbel.gumbel_above(chance, rng.random(50_000))
        reference = rng.gumbel(size=500_000)
        reference = reference[reference > threshold]
        assert ours.min() >= threshold - 1e-9
        quantiles = np.linspace(0.05, 0.95, 7)
        expected = np.quantile(reference, quantiles)
        np.testing.assert_allclose(np.quantile(ours, quantiles), expected, atol=0.05)

    def test_noise_far_out_keeps_its_digits(self):
        noise = gumbel.gumbel_above(np.exp(-60.0), np.array([0.0, 0.5]))
        np.testing.assert_allclose(noise, [60.0, 60.0 + np.log(2)], rtol=1e-12)

    def test_bins_expect_ten_draws_or_more(self):
        probs = np.sort(np.random.default_rng(0).dirichlet(np.full(211, 0.3)))[::-1]
        bins = gumbel.equal_bins(probs, 1000)
        expected = 1000 * np.bincount(bins, weights=probs)
        assert expected.min() >= gumbel.EXPECTED_IN_BIN - 1e-9 and len(expected) > 10
        assert (np.diff(bins) >= 0).all()

    def test_bad_input(self):
        rng = np.random.default_rng(0)
        with pytest.raises(ValueError, match="n_samples must be an integer of at least 1"):
            gumbel.lazy_gumbel(np.zeros(2), np.zeros(3).__getitem__, 3, n_samples=0, rng=rng)


class TestCoverHart:
    """The bracket by hand: two classes, error 0.18 -> 0.1, because 2 · 0.1 · 0.9 = 0.18."""

    @pytest.mark.parametrize(
        ("error", "n_classes", "lower"),
        [(0.18, 2, 0.1), (0.0, 7, 0.0), (0.5, 2, 0.5), (0.9, 10, 0.9)],
    )
    def test_the_lower_limit(self, error, n_classes, lower):
        assert bayes.bayes_lower_limit(error, n_classes) == pytest.approx(lower)

    @pytest.mark.parametrize("n_classes", [2, 3, 10])
    def test_it_inverts_the_inequality(self, n_classes):
        best = np.linspace(0, 1 - 1 / n_classes, 7)
        worst_1nn = best * (2 - n_classes / (n_classes - 1) * best)
        np.testing.assert_allclose(bayes.bayes_lower_limit(worst_1nn, n_classes), best, atol=1e-7)

    def test_worse_than_guessing_counts_as_guessing(self):
        assert bayes.bayes_lower_limit(0.8, 2) == pytest.approx(0.5)

    def test_the_interval_contains_the_bracket(self):
        found = bayes.bracket(np.arange(1000) < 180, 2)
        assert found["lower"] == pytest.approx(0.1) and found["upper"] == pytest.approx(0.18)
        half = 1.96 * np.sqrt(0.18 * 0.82 / 1000)
        assert found["high"] == pytest.approx(0.18 + half, abs=0.004)
        assert found["low"] < found["lower"]

    def test_a_row_is_not_its_own_nearest(self):
        # Two points of each class on top of the other class's: everyone is wrong but for itself.
        rows = unit(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]))
        wrong = bayes._leave_one_out_wrong(rows, np.array([0, 1, 0, 1]), 2)
        assert wrong.all()

    def test_other_data_sets(self):
        table = bayes.raw_brackets(["iris"])
        assert table.loc[0, "n_queries"] == 150 and 0 < table.loc[0, "error_1nn"] < 0.3


class TestRootN:
    """The grid, the choice and the fitted growth."""

    def test_the_grid_holds_the_root_and_stays_within_the_memory(self):
        for n_rows in (2, 7, 101, 5000):
            grid = root_n.k_grid(n_rows)
            assert round(np.sqrt(n_rows)) in grid and grid[0] == 1
            assert max(grid) <= min(n_rows, 4 * np.sqrt(n_rows))

    def test_the_best_k_is_chosen_by_its_criterion(self):
        labels = np.array([0, 1])
        sharp = np.array([[0.9, 0.1], [0.6, 0.4]])  # one right, NLL 0.51
        soft = np.array([[0.51, 0.49], [0.49, 0.51]])  # both right, NLL 0.67
        probs = {1: sharp, 5: soft}
        assert root_n.choose_k(probs, labels, "accuracy") == 5
        assert root_n.choose_k(probs, labels, "nll") == 1

    def test_the_search_goes_deeper_until_the_best_k_is_inside(self, monkeypatch):
        # Best at k = 40 of 400 rows; a grid of reach 1 ends at √400 = 20.
        asked = []

        def votes(ks):
            asked.append(max(ks))
            right = {k: 0.9 - 0.4 * abs(np.log(k / 40)) / np.log(400) for k in ks}
            return {k: np.array([[p, 1 - p]]) for k, p in right.items()}

        monkeypatch.setattr(root_n, "K_REACH", 1.0)
        labels = np.array([0])
        found = root_n.deep_votes(votes, labels, 400)
        assert len(asked) > 1 and asked == sorted(asked)
        assert root_n.choose_k(found, labels, "nll") < max(found) < 400
        monkeypatch.setattr(root_n, "K_REACH_MOST", 1.0)
        capped = root_n.deep_votes(votes, labels, 400)
        assert root_n.choose_k(capped, labels, "nll") == max(capped) == 20

    def test_growth_is_not_fitted_to_the_end_of_the_grid(self):
        sizes = np.array([100, 400, 1600])
        choice = pd.DataFrame({"n": sizes, "criterion": "nll", "chosen": sizes // 10})
        free = root_n.chosen_exponent(choice.assign(capped=False), "nll")
        assert free == pytest.approx(1.0)
        assert np.isnan(root_n.chosen_exponent(choice.assign(capped=[False, False, True]), "nll"))

    def test_queries_are_drawn_once_for_all(self):
        assert root_n.some_rows(5, 9).tolist() == [0, 1, 2, 3, 4]
        few = root_n.some_rows(100, 7)
        assert len(set(few.tolist())) == 7 and few.tolist() == root_n.some_rows(100, 7).tolist()


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Two seeds of a tiny training, checked."""
    folder = tmp_path_factory.mktemp("theory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_module, "load_splits", lambda *_, **__: tiny_splits())
        settings = [config(SMALL, seed=seed, epochs=4, lr=200.0) for seed in (0, 1)]
        runs = [train_run(s, folder / f"seed{s.seed}", progress=False) for s in settings]
        return theory.theory(
            runs,
            temperatures=(1.0, 0.1),
            truncation_ks=(1, 3, 4, 5, 6, 100),
            truncation_queries=11,
            memory_shares=(0.5, 1.0),
            root_queries=13,
            gumbel_samples=300,
            k_eval=7,
            progress=False,
        )


def test_every_table_covers_both_seeds(checked):
    for name in ("norms", "indexes", "masses", "rates", "gumbel", "brackets", "heads", "errors"):
        assert set(getattr(checked, name)["seed"]) == {0, 1}, name
    assert set(checked.root_n.choice["n"]) == {30, 60}
    assert checked.entropies.groupby(["seed", "method"]).size().eq(24).all()
    assert checked.entropies["entropy"].between(0, 1 + 1e-6).all()


def test_entropies_are_summed_up_by_seed_method_and_outcome(checked):
    table = theory.entropy_table(checked.entropies)
    assert table.groupby(["seed", "method"])["n"].sum().eq(24).all()
    for row in table.to_dict("records"):
        same = (checked.entropies[name] == row[name] for name in ("seed", "method", "correct"))
        entropy = checked.entropies.loc[np.logical_and.reduce(list(same)), "entropy"]
        assert row["n"] == len(entropy)
        assert row["mean"] == pytest.approx(entropy.mean())
        assert row["median"] == pytest.approx(entropy.median())
        quartiles = [row["lower quartile"], row["upper quartile"]]
        assert quartiles == pytest.approx(np.quantile(entropy, [0.25, 0.75]).tolist())


def test_tiny_deviations_are_written_with_exponents(checked):
    norms = theory.with_exponents(checked.norms)
    for text, value in zip(
        norms["largest deviation"], checked.norms["largest deviation"], strict=True
    ):
        assert "e-" in text and float(text) == pytest.approx(value, rel=0.01)
    assert norms["mean"].equals(checked.norms["mean"])


def test_the_claims_have_their_schema_and_the_identities_hold(checked):
    table = theory_claims.claims_table(checked)
    assert list(table.columns) == ["claim", "bound", "measured", "verdict"]
    words = {"holds", "does not hold", "holds in part", "not decided"}
    assert set(table["verdict"]) <= words and table["claim"].is_unique
    assert (table["verdict"][:4] == "holds").all()
    assert "Bayes error between" in theory_claims.verdict(checked)


def test_a_best_k_at_the_end_of_the_grid_is_said_to_be_at_least_that(checked):
    import dataclasses

    def claim(capped):
        choice = checked.root_n.choice.assign(capped=capped)
        rooted = dataclasses.replace(checked.root_n, choice=choice)
        return theory_claims.k_far_below_root(dataclasses.replace(checked, root_n=rooted)).measured

    assert "at least" in claim(True) and "the largest k tried was best" in claim(True)
    assert "at least" not in claim(False) and "as n^" in claim(False)
    assert set(checked.root_n.choice.columns) >= {"root", "chosen", "largest", "capped"}


def test_a_broken_bound_is_seen(checked):
    import dataclasses

    cut = checked.truncations[0]
    broken = dataclasses.replace(cut, vote_error=cut.mass + 0.1)
    found = theory_claims.vote_error_below_mass(dataclasses.replace(checked, truncations=[broken]))
    assert found.verdict == "does not hold"
    doctored = checked.gumbel.assign(extra=2 * checked.gumbel["bound"] + 1)
    found = theory_claims.gumbel_cost(dataclasses.replace(checked, gumbel=doctored))
    assert found.verdict == "does not hold"


def test_heads_start_where_the_attention_starts(checked):
    heads = checked.heads[checked.heads["seed"] == 0]
    np.testing.assert_allclose(heads["start"], 1 / np.logspace(np.log10(5), np.log10(40), 4), 1e-5)
    assert heads["beyond k"].between(0, 1).all()


def test_the_figures_are_drawn(checked):
    use_style()
    cut = checked.truncations[0]
    made = [
        figures.truncation_figure(checked.masses, truncation.synthetic_table(cut.n_rows, cut.ks)),
        figures.gumbel_figure(checked.gumbel),
        figures.root_n_figure(
            checked.root_n.table, checked.root_n.choice, metrics=["nll", "accuracy"]
        ),
        figures.entropy_figure(checked.entropies),
    ]
    assert [len(figure.axes) for figure in made] == [3, 2, 2, 1]
    plt.close("all")
