"""Efficiency study: exponents of known times, recall by hand, contenders that agree."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from attnknn.embed import run as trained_module
from attnknn.embed.run import train_run
from attnknn.figures import sweeps as draw
from attnknn.figures.style import use_style
from attnknn.studies import efficiency
from tests.tiny import SMALL, config, tiny_splits

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)


def unit_rows(n_rows: int, dim: int = 16, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((n_rows, dim), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class TestExponent:
    """The slope of log time against log size."""

    @pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 1.3])
    def test_exact_powers_are_found_exactly(self, power):
        found = efficiency.fit_exponent(SIZES, [2e-6 * n**power for n in SIZES])
        assert found["exponent"] == pytest.approx(power, abs=1e-9)
        assert found["low"] == pytest.approx(power, abs=1e-6) == found["high"]
        assert found["n"] == 5

    def test_the_interval_holds_the_truth_as_often_as_it_says(self):
        rng, hits = np.random.default_rng(0), 0
        for _ in range(400):
            noisy = [n**0.8 * np.exp(rng.normal(0, 0.2)) for n in SIZES]
            found = efficiency.fit_exponent(SIZES, noisy)
            hits += found["low"] <= 0.8 <= found["high"]
        assert 0.92 <= hits / 400 <= 0.98

    def test_two_sizes_have_a_slope_but_no_interval(self):
        found = efficiency.fit_exponent((10, 1000), (1.0, 10.0))
        assert found["exponent"] == pytest.approx(0.5) and np.isnan(found["low"])

    def test_one_size_and_no_time_are_refused(self):
        with pytest.raises(ValueError, match="sizes must hold at least 2 different values"):
            efficiency.fit_exponent((10, 10), (1.0, 2.0))
        with pytest.raises(ValueError, match="seconds must be above 0"):
            efficiency.fit_exponent((10, 20), (1.0, 0.0))


class TestMedian:
    """Medians between order statistics."""

    def test_by_hand(self):
        # Of 6 values the extremes miss the median with chance 2 / 64 = 3 %.
        found = efficiency.median_interval([5.0, 1.0, 3.0, 2.0, 9.0, 4.0])
        assert found == {"value": 3.5, "low": 1.0, "high": 9.0, "n": 6}
        # Of 9 the second ones miss it with chance 2 * 10 / 512 = 3.9 %.
        found = efficiency.median_interval(np.arange(9.0))
        assert found == {"value": 4.0, "low": 1.0, "high": 7.0, "n": 9}

    def test_few_values_have_no_interval(self):
        found = efficiency.median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
        assert found["value"] == 3 and np.isnan([found["low"], found["high"]]).all()


def test_actions_take_turns():
    order = []
    actions = {name: lambda name=name: order.append(name) for name in "abc"}
    times = efficiency.time_in_turns(actions, repeats=2)
    assert order == list("abcabc")
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_an_action_beyond_its_budget_is_not_repeated():
    counts = {"slow": 0, "fast": 0}

    def act(name, seconds):
        counts[name] += 1
        end = efficiency.time.perf_counter() + seconds
        while efficiency.time.perf_counter() < end:
            pass

    actions = {"slow": lambda: act("slow", 0.02), "fast": lambda: act("fast", 0.0)}
    times = efficiency.time_in_turns(actions, repeats=4, budget=0.01)
    assert counts["slow"] == len(times["slow"]) == 1
    assert counts["fast"] == 4


def test_repeats_are_checked():
    with pytest.raises(ValueError, match="repeats must"):
        efficiency.time_in_turns({}, repeats=0)


class TestRecall:
    """The share of the nearest rows that was found."""

    rows = np.array([[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]], dtype=np.float32)
    east = np.array([[1, 0]], dtype=np.float32)

    @pytest.mark.parametrize(
        ("found", "share"), [([0, 1], 1.0), ([1, 0], 1.0), ([0, 3], 0.5), ([2, 3], 0.0)]
    )
    def test_by_hand(self, found, share):
        nearest = np.array([[0, 1]])
        assert efficiency.recall(self.east, self.rows, np.array([found]), nearest) == share

    def test_a_missing_row_is_a_miss(self):
        found = np.array([[0, -1]])
        assert efficiency.recall(self.east, self.rows, found, np.array([[0, 1]])) == 0.5

    def test_of_equal_rows_any_may_be_found(self):
        rows = np.concatenate([self.rows, self.rows[1:2]])
        found = np.array([[0, 4]])
        assert efficiency.recall(self.east, rows, found, np.array([[0, 1]])) == 1.0


@pytest.mark.parametrize("name", [*efficiency.EXACT, *efficiency.PEERS])
def test_exact_contenders_find_the_nearest(name):
    rows, queries = unit_rows(211), unit_rows(13, seed=1)
    found = efficiency.CONTENDERS[name](rows).search(queries, 7)
    expected = np.argsort(-(queries @ rows.T), axis=1)[:, :7]
    assert np.array_equal(found, expected)


def test_every_contender_is_drawn():
    known = (*efficiency.EXACT, *efficiency.APPROXIMATE, *efficiency.PEERS, efficiency.ROOF)
    assert set(draw.INDEX_STYLES) == set(efficiency.CONTENDERS) == set(known)


def test_the_roof_does_the_whole_product(monkeypatch):
    shapes, multiply = [], efficiency.linear

    def counted(a, b):
        shapes.append(multiply(a, b).shape)

    monkeypatch.setattr(efficiency, "linear", counted)
    monkeypatch.setattr(efficiency, "ROOF_BLOCK", 100)
    efficiency.matrix_product(unit_rows(211)).search(unit_rows(13), 7)
    assert sum(n_queries * n_rows for n_queries, n_rows in shapes) == 13 * 211


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny trained run."""
    folder = tmp_path_factory.mktemp("efficiency")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_module, "load_splits", lambda *_, **__: tiny_splits())
        made = train_run(config(SMALL, lr=200.0), folder / "seed0", progress=False)
        assert made.splits.name == "tiny"  # read while the data is at hand
        yield made


@pytest.fixture(scope="module")
def study(run):
    options = {"k": 5, "k_eval": 7, "n_queries": 11, "repeats": 2, "progress": False}
    return efficiency.efficiency(run, sizes=(40, 60, 150), **options)


def test_rows_beyond_the_run_are_embedded_views(run):
    rows = efficiency.many_rows(run, 150)
    assert rows.shape == (150, 8)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    own = {row.tobytes() for row in run.rows("train")}
    assert {row.tobytes() for row in rows[:60]} == own
    # A random crop leaves about one image of nine where it was.
    assert len(own & {row.tobytes() for row in rows[60:]}) < 30
    np.testing.assert_array_equal(efficiency.many_rows(run, 150), rows)


def test_views_are_embedded_once(run, monkeypatch):
    first = efficiency.augmented_rows(run, 90)
    monkeypatch.setattr(efficiency, "embed", None)  # a second embedding would fail
    np.testing.assert_array_equal(efficiency.augmented_rows(run, 90), first)


def test_data_without_views_ends_with_its_rows(run, monkeypatch):
    monkeypatch.setitem(run.splits.__dict__, "augmentation", ())
    assert len(efficiency.many_rows(run, 150)) == 60
    options = {"k": 5, "k_eval": 7, "n_queries": 5, "repeats": 1, "progress": False}
    found = efficiency.efficiency(run, sizes=(40, 150), **options)
    assert set(found.scaling["rows"]) == {40, 60}
    assert "150 were asked for, more cannot be had" in " ".join(found.facts["value"])


def test_scaling_has_its_schema(study):
    columns = ["index", "settings", "rows", "metric", "value", "low", "high", "n"]
    assert sorted(study.scaling.columns) == sorted(columns)
    assert set(study.scaling["rows"]) == {40, 60, 150}
    measured = study.scaling.groupby("index")["metric"].agg(set).to_dict()
    timed = {"search_ms", "build_seconds", "recall"}
    assert measured["scikit-learn"] == timed
    assert measured[efficiency.ROOF] == {"search_ms"}
    assert measured["HNSW"] == measured["torch"] == timed | {"memory_mb"}
    exact = study.scaling[study.scaling["index"].isin(["Flat L2", "Flat IP", "torch"])]
    assert exact.loc[exact["metric"] == "recall", "value"].eq(1).all()
    assert (study.scaling["value"] >= 0).all()


def test_memory_counts_rows_and_links(study):
    sizes = study.scaling[study.scaling["metric"] == "memory_mb"].set_index(["index", "rows"])
    assert sizes.loc[("Flat IP", 150), "value"] == pytest.approx(150 * 8 * 4 / 1e6)
    assert sizes.loc[("HNSW", 150), "value"] > 2 * sizes.loc[("Flat IP", 150), "value"]


def test_exponents_cover_searches_and_what_is_built(study):
    pairs = set(study.exponents[["index", "metric"]].itertuples(index=False, name=None))
    builds = {(name, "build_seconds") for name in ("HNSW", "IVF-PQ")}
    assert pairs == {(name, "search_ms") for name in efficiency.CONTENDERS} | builds


def test_stages_are_stacked_from_what_was_timed():
    rounds = {"embedding": [4.0] * 7, "search": [1.0] * 7, "uniform": [0.5] * 7}
    rounds["attention"] = [2.0, 2.0, 2.5, 2.5, 2.5, 3.0, 3.0]
    table = efficiency.stage_table({"all at once": rounds})
    values = table.set_index(["method", "stage"])["value"]
    assert values["uniform"].to_dict() == {"embedding": 4.0, "search": 1.0, "vote": 0.5}
    assert values["attention", "attention"] == 2.0  # 2.5 beyond the vote's 0.5
    over = efficiency.overheads({"all at once": rounds}).set_index("scope")
    assert over.loc["search and vote", "ratio"] == pytest.approx(3.5 / 1.5)
    assert over.loc["embedding, search and vote", "ratio"] == pytest.approx(7.5 / 5.5)
    assert over["extra_ms"].eq(2.0).all()
    assert over.loc["search and vote", ["low", "high"]].tolist() == pytest.approx([2.0, 4 / 1.5])


def test_stages_of_a_run(study):
    assert set(study.stages["batch"]) == {"all at once", "one by one"}
    counted = study.stages.groupby(["batch", "method"]).size()
    assert set(counted.xs("uniform", level="method")) == {3}
    assert set(counted.xs("attention", level="method")) == {4}
    assert study.overhead["n"].eq(2).all()


def test_figures_are_drawn(study):
    use_style()
    panels = ["build_seconds", "recall", "memory_mb", "search_ms"]
    figure = draw.scaling_panels(efficiency.drawn(study), metrics=panels, real_rows=study.n_real)
    assert len(figure.axes) == 4
    names = {text.get_text() for text in figure.axes[3].texts}
    assert names == set(efficiency.CONTENDERS)
    assert {text.get_text() for text in figure.axes[1].texts} == {"HNSW", "IVF-PQ"}
    bars = draw.stage_bars(study.stages)
    assert len(bars.axes) == 2 and len(bars.axes[0].patches) == 7


def known_study(study, flat, graph, recalls):
    """Return a study with known figures at 1 000 and 10 000 rows."""
    rows = []
    for name in efficiency.CONTENDERS:
        for place, n in enumerate((1_000, 10_000)):
            search = {"HNSW": graph, efficiency.ROOF: [f / 2 for f in flat]}.get(name, flat)
            recall = recalls[place] if name == "HNSW" else 1.0
            built = {"HNSW": 40.0, "IVF-PQ": 9.0}.get(name, 0.0)
            values = {"search_ms": search[place], "recall": recall, "build_seconds": built}
            rows += [
                {"index": name, "settings": "", "rows": n, "metric": metric, "value": value}
                for metric, value in values.items()
            ]
    table = pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=1)
    return replace(study, scaling=table, exponents=efficiency.scaling_exponents(table))


def test_the_verdict_is_computed(study):
    made = known_study(study, flat=[0.1, 1.0], graph=[0.2, 0.5], recalls=[1.0, 0.99])
    text = efficiency.verdict(made)
    assert "HNSW: faster than Flat IP at a recall of 0.95 from 10,000 rows on." in text
    assert "takes 0.50 of the time at a recall of 0.990, and its build pays after 80,000" in text
    assert "2.0 times the bare matrix product" in text
    assert "Flat IP 1.00" in text and "HNSW 0.40" in text  # log10 of 10 and of 2.5


def test_a_fast_index_that_misses_is_not_called_good(study):
    made = known_study(study, flat=[0.1, 1.0], graph=[0.05, 0.5], recalls=[1.0, 0.7])
    assert "faster than Flat IP at a recall of 0.95 not at the largest size" in efficiency.verdict(
        made
    )


@pytest.mark.parametrize(("extra", "word"), [(0.2, "(under the"), (0.7, "(not under the")])
def test_the_published_bound_is_decided(study, extra, word):
    made = replace(study, overhead=study.overhead.assign(extra_ms=extra))
    assert efficiency.verdict(made).count(f"{word} published 0.5 ms)") == 2


@pytest.mark.parametrize(("load", "is_busy"), [(0.1, False), (1e6, True)])
def test_a_busy_machine_is_named(study, load, is_busy):
    assert ("It was busy" in efficiency.verdict(replace(study, load=load))) == is_busy


def test_the_printed_table_has_one_row_an_index_and_size(study):
    table = efficiency.scaling_table(study)
    assert len(table) == 3 * len(efficiency.CONTENDERS)
    assert table["index"].tolist()[:7] == list(efficiency.CONTENDERS)
