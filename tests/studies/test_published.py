"""Published figures: marked as such, beside ours, and the sizes of claims that follow from them."""

import pandas as pd
import pytest

from attnknn.studies import published


@pytest.mark.parametrize(
    ("table", "over", "sources"),
    [
        (published.published_sweep("k"), "k", {"published exp4", "published exp5"}),
        (
            published.published_sweep("rate"),
            "rate",
            {"published exp4", "published exp5", "published exp7"},
        ),
        (published.published_sweep("ratio"), "ratio", {"published exp4"}),
    ],
)
def test_every_figure_is_marked_and_stands_once(table, over, sources):
    assert list(table.columns) == ["source", "method", "metric", over, "value"]
    assert set(table["source"]) == sources and table["value"].notna().all()
    assert not table.duplicated(["source", "method", "metric", over]).any()


@pytest.mark.parametrize(
    ("table", "over", "level"),
    [
        (published.published_sweep("rate"), "rate", 0.0),
        (published.published_sweep("ratio"), "ratio", 1.0),
    ],
)
def test_the_undisturbed_level_is_the_main_result(table, over, level):
    main = published.published_main()
    both = table[table[over] == level].merge(main, on=["source", "method", "metric"])
    assert len(both) == (table[over] == level).sum()
    assert (both["value_x"] == both["value_y"]).all()


def measures(**columns):
    return pd.DataFrame({"metric": "accuracy", **columns})


def test_a_sweep_stands_beside_the_published_one():
    own = measures(
        method=["attention", "attention", "attention", "uniform (tuned)"],
        k=[3, 3, 100, 3],
        value=[0.8, 0.9, 0.7, 0.1],
    )
    table = published.sweep_beside_published(own, over="k", ours="we")
    rows = table[table["metric"] == "accuracy"].set_index(["method", "source"])
    assert rows.loc[("attention", "we"), "k = 3"] == pytest.approx(0.85)
    assert rows.loc[("attention", "published exp4"), "k = 3"] == 0.8947
    assert rows.loc[("attention", "we"), ["k = 1", "k = 100"]].isna().tolist() == [True, False]
    assert pd.isna(rows.loc[("attention", "published exp5"), "k = 100"])
    assert list(rows.loc["attention"].index) == ["we", "published exp4", "published exp5"]
    assert set(table["method"]) == set(published.METHODS)


def test_times_stand_beside_the_published_ones_at_the_nearest_size():
    rows = [
        {"index": name, "rows": n, "metric": metric, "value": n * factor}
        for name in (*published.published()["timings"]["indexes"], "torch")
        for n in (1_000, 30_000, 100_000)
        for metric, factor in (("build_seconds", 1e-3), ("search_ms", 1.0), ("recall", 0.0))
    ]
    table = published.timings_beside_published(pd.DataFrame(rows), ours="we")
    ours = table[table["source"] == "we"].set_index("index")
    assert ours.loc["HNSW"].tolist() == ["we", 30_000, 30_000.0, 30_000.0]
    theirs = table[table["source"].str.startswith("published")].set_index("index")
    assert theirs.loc["HNSW"].tolist()[1:] == [50_000, 41_000.0, 0.051]
    assert "torch" not in set(table["index"])


@pytest.mark.parametrize(
    ("dataset", "accuracy"), [("iris", 0.9667), ("cifar10", 0.8854), ("adult", 0.8854)]
)
def test_iris_stands_beside_the_figures_of_iris(dataset, accuracy):
    names = ["accuracy", "nll", "ece", "macro_f1"]
    own = pd.DataFrame({"dataset": dataset, "method": "attention", "metric": names, "value": 0.5})
    table = published.beside_published(own, ours="we", experiments=["exp1-3"])
    theirs = table[(table["method"] == "attention") & (table["source"] != "we")].iloc[0]
    assert theirs["accuracy"] == accuracy and ("(Iris)" in theirs["source"]) == (dataset == "iris")


def test_macro_f1_is_shown_where_it_was_published():
    names = ["accuracy", "nll", "ece", "macro_f1"]
    own = pd.DataFrame({"method": "attention", "metric": names, "value": [0.5, 1.0, 0.1, 0.4]})
    table = published.beside_published(own, ours="we").set_index(["method", "source"])["macro_f1"]
    assert table["attention + TTA", "published exp5"] == 0.8727
    assert table["attention", "we"] == 0.4 and table["uniform", "published exp4"] == 0.8966
    assert pd.isna(table["attention", "published exp7"])  # a summary without
