"""Theory study: bounds worked out by hand, choices of k, claims that follow from tables."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from attnknn.embed import run as trained_module
from attnknn.embed.run import train_run
from attnknn.figures import sweeps as figures
from attnknn.studies import theory
from tests.conftest import C
from tests.tiny import SMALL, config, tiny_splits


class TestTruncation:
    """Discarded mass, and what it bounds."""

    WEIGHTS = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)

    @pytest.mark.parametrize(
        ("labels", "vote_error"),
        [
            ([0, 1, 1, 0], 2 / 3 - 0.6),  # votes: full [.6, .4], truncated [2/3, 1/3]
            ([0, 0, 1, 1], 0.25),  # lost rows of another class: the bound is reached
            ([0, 0, 0, 0], 0.0),
        ],
    )
    def test_by_hand(self, labels, vote_error):
        # Keeping two of [.5 .25 | .15 .1]: a quarter is lost, the rest grows to [2/3, 1/3].
        mass, vote = theory.truncation_errors(self.WEIGHTS, torch.tensor([labels]), [2], 2)[:, 0, 0]
        assert mass.item() == pytest.approx(0.25)
        assert vote.item() == pytest.approx(vote_error, abs=1e-12)

    def test_tiny_masses_keep_their_digits(self):
        weights = torch.tensor([[1.0, 1e-9, 1e-18]], dtype=torch.float64)
        mass = theory.truncation_errors(weights, torch.tensor([[0, 0, 1]]), [1, 2], 2)[0, :, 0]
        np.testing.assert_allclose(mass, [1e-9 + 1e-18, 1e-18], rtol=1e-6)

    def test_a_memory_against_numpy(self, bank, blobs):
        made = theory.truncation_tables(bank, blobs.queries, temperatures=(1.0, 0.1), ks=(3, 7, 50))
        weights = np.exp(blobs.queries.astype(np.float64) @ blobs.rows.T.astype(np.float64) / 0.1)
        weights /= weights.sum(axis=1, keepdims=True)
        top = np.sort(weights, axis=1)[:, ::-1]
        row = made["masses"].set_index(["temperature", "k"]).loc[(0.1, 7)]
        assert row["discarded mass"] == pytest.approx(1 - top[:, :7].sum(axis=1).mean(), rel=1e-4)
        cut = np.where(weights >= top[:, 6:7], weights, 0)
        cut /= cut.sum(axis=1, keepdims=True)
        expected = np.abs((cut - weights) @ np.eye(C)[blobs.labels]).sum(axis=1) / 2
        assert row["vote error"] == pytest.approx(expected.mean(), abs=1e-5)
        assert (made["masses"]["above"] == 0).all()

    def test_bad_input(self, bank, blobs):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            theory.truncation_tables(bank, blobs.queries, temperatures=(0.0,), ks=(3,))
        with pytest.raises(ValueError, match="ks and temperatures must not be empty"):
            theory.truncation_tables(bank, blobs.queries, temperatures=(1.0,), ks=(101,))


class TestRates:
    """Fitted exponents of series whose exponent is known."""

    KS = (3, 10, 30, 100)

    @pytest.mark.parametrize(
        ("exponent", "words"),
        [(0.0, "slower than 1/k"), (1.0, "as 1/k"), (2.0, "faster than 1/k")],
    )
    def test_the_exponent_of_a_power_is_found(self, exponent, words):
        mass = 0.3 / np.array(self.KS, dtype=np.float64) ** exponent
        found = theory.fitted_rate(self.KS, np.repeat(mass[:, None], 5, axis=1), 10_000)
        assert found["exponent"] == pytest.approx(exponent, abs=1e-12)
        assert found["falls"] == words

    def test_an_interval_around_one_decides_nothing(self):
        assert theory.against_claim(0.9, 1.1) == "not decided"

    def test_too_few_points_have_no_rate(self):
        assert theory.fitted_rate((3, 10), np.ones((2, 5)), 100)["falls"] == "undefined"


class TestRootN:
    """The grid, the choice and the fitted growth."""

    @pytest.mark.parametrize("n_rows", [2, 7, 101, 5000])
    def test_the_grid_holds_the_root_and_stays_within_the_memory(self, n_rows):
        grid = theory.k_grid(n_rows)
        assert round(np.sqrt(n_rows)) in grid and grid[0] == 1
        assert max(grid) <= min(n_rows, 16 * np.sqrt(n_rows))

    def test_the_best_k_is_chosen_by_its_criterion(self):
        sharp = np.array([[0.9, 0.1], [0.6, 0.4]])  # one right, NLL 0.51
        soft = np.array([[0.51, 0.49], [0.49, 0.51]])  # both right, NLL 0.67
        probs, labels = {1: sharp, 5: soft}, np.array([0, 1])
        assert theory.choose_k(probs, labels, "accuracy") == 5
        assert theory.choose_k(probs, labels, "nll") == 1

    def test_growth_is_not_fitted_to_the_end_of_the_grid(self):
        sizes = np.array([100, 400, 1600])
        choice = pd.DataFrame({"n": sizes, "criterion": "nll", "chosen": sizes // 10})
        free = theory.chosen_exponent(choice.assign(capped=False), "nll")
        assert free == pytest.approx(1.0)
        assert np.isnan(theory.chosen_exponent(choice.assign(capped=[False, False, True]), "nll"))

    def test_queries_are_drawn_once_for_all(self):
        assert theory.some_rows(5, 9).tolist() == [0, 1, 2, 3, 4]
        few = theory.some_rows(100, 7)
        assert len(set(few.tolist())) == 7 and few.tolist() == theory.some_rows(100, 7).tolist()


SAME = "no difference at this size"


@pytest.mark.parametrize(
    ("nll", "accuracy", "expected"),
    [
        ((SAME, -0.1, 0.009), (SAME, -0.004, 0.1), theory.HOLDS),
        (("worse", 0.001, 0.009), ("better", 0.01, 0.1), theory.HOLDS),  # hardly worse
        ((SAME, -0.1, 0.02), (SAME, -0.004, 0.1), theory.UNDECIDED),
        ((SAME, -0.1, 0.009), (SAME, -0.006, 0.1), theory.UNDECIDED),
        (("worse", 0.02, 0.03), (SAME, -0.004, 0.1), theory.PARTLY),
        (("worse", 0.02, 0.03), (SAME, -0.1, 0.1), theory.FAILS),
    ],
)
def test_root_n_is_as_good_only_inside_the_margin(nll, accuracy, expected):
    """The chosen k has an NLL of 1: 0.01 may be lost."""
    comparison = pd.DataFrame(
        [
            {"metric": metric, "share": share, "n": round(100 * share), "verdict": said}
            | {"low": low, "high": high}
            for metric, share, (said, low, high) in (("nll", 1.0, nll), ("accuracy", 0.5, accuracy))
        ]
    )
    level = pd.DataFrame({"seed": 0, "share": [0.5, 1.0]})
    choice = level.assign(criterion="nll", root=9, chosen=5)
    measured = pd.concat([level.assign(k=k, metric="nll", value=v) for k, v in ((5, 1.0), (9, 7))])
    _, _, shown, found = theory.root_is_best(measured, choice, comparison)
    assert found == expected
    is_worse = nll[0] == "worse" and expected != theory.HOLDS
    assert ("worse in NLL at n = 100" in shown) == is_worse


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Two seeds of a tiny training, checked."""
    folder = tmp_path_factory.mktemp("theory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_module, "load_splits", lambda *_, **__: tiny_splits())
        settings = [config(SMALL, seed=seed, epochs=2, lr=200.0) for seed in (0, 1)]
        runs = [train_run(s, folder / f"seed{s.seed}", progress=False) for s in settings]
        return theory.theory(
            runs,
            temperatures=(1.0, 0.1),
            truncation_ks=(1, 3, 4, 5, 6, 100),
            truncation_queries=11,
            memory_shares=(0.5, 1.0),
            root_queries=13,
            k_eval=7,
        )


def test_every_table_covers_both_seeds(found):
    for name in ("norms", "indexes", "masses", "rates", "heads", "root_n", "choice"):
        assert set(found[name]["seed"]) == {0, 1}, name
    assert set(found["choice"]["n"]) == set(found["comparison"]["n"]) == {30, 60}
    assert len(found["masses"]) == 2 * 2 * 5


def test_the_claims_have_their_schema_and_the_identities_hold(found):
    table = theory.claims_table(found)
    assert list(table.columns) == ["claim", "bound", "measured", "verdict"]
    assert set(table["verdict"]) <= {theory.HOLDS, theory.FAILS, theory.PARTLY, theory.UNDECIDED}
    assert (table["verdict"][:3] == "holds").all()
    # What the published claims read by name.
    read = ("Truncation error falls as O(1/k)", "The best k is far below √n")
    assert {*read, "Inner product and L2 find the same neighbours"} <= set(table["claim"])
    assert all(f"- {claim}: **" in theory.verdict(found) for claim in table["claim"])


def test_a_broken_bound_is_seen(found):
    for name, column in (("norms", "largest deviation"), ("indexes", "largest cosine gap")):
        table = found[name].assign(**{column: 0.1})
        assert theory.FAILS in set(theory.claims_table(found | {name: table})["verdict"][:2])
    masses = found["masses"].assign(above=[1, *[0] * (len(found["masses"]) - 1)])
    assert theory.claims_table(found | {"masses": masses})["verdict"][2] == theory.FAILS


def test_a_best_k_at_the_end_of_the_grid_is_said_to_be_at_least_that(found):
    said = [theory.k_far_below_root(found["choice"].assign(capped=c))[2] for c in (True, False)]
    assert "at least" in said[0] and "growth: not fitted" in said[0]
    assert "at least" not in said[1] and "growth: n^" in said[1]


def test_heads_start_where_the_attention_starts(found):
    heads = found["heads"][found["heads"]["seed"] == 0]
    np.testing.assert_allclose(heads["start"], 1 / np.logspace(np.log10(5), np.log10(40), 4), 1e-5)
    same = heads.assign(temperature=heads["start"] * [1.0, 1.0, 1.0, 1.2])
    assert theory.temperatures_move(same)[3] == theory.PARTLY


def test_the_figures_are_drawn(found):
    figure = figures.truncation_figure(found["masses"])
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["τ = 1", "τ = 0.1", "1/k"]
    assert figures.root_n_figure(found["root_n"], found["choice"], metrics=["nll", "accuracy"])
    plt.close("all")
