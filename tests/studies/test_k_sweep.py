"""k-sweep: one search for every k, and k chosen on held-out queries."""

from attnknn.figures import tables as report
from attnknn.studies import k_sweep


def test_k_sweep_covers_every_k_from_one_search(runs, searches):
    sweep = k_sweep.k_sweep(runs[:1], ks=(1, 5, 11, 1000), progress=False)
    assert searches == [11, 11]  # held-out and test queries, once each; 1000 rows are not there
    assert set(sweep.table["k"]) == {1, 5, 11}
    assert set(k_sweep.best_k(sweep)) == set(sweep.table["method"]) == set(sweep.probs[(5,)])
    best = sweep.held_out.query("method == 'uniform (tuned)'").set_index("k")["nll"].idxmin()
    assert k_sweep.best_k(sweep)["uniform (tuned)"] == best
    assert "chosen on held-out queries" in k_sweep.verdict(sweep)
    assert "NLL: " in k_sweep.verdict(sweep) and "accuracy: " in k_sweep.verdict(sweep)
    assert sweep.table[["low", "high"]].notna().all(axis=None)
    table = report.sweep_table(sweep.table, over="k", metrics=["nll", "ece"]).text
    assert table.drop(columns="n").map(lambda cell: "±" in cell).all(axis=None)


def test_a_single_k_has_a_verdict(runs):
    sweep = k_sweep.k_sweep(runs, ks=(5,), progress=False)
    assert "no other k was tried" in k_sweep.verdict(sweep)
    assert sweep.table[["low", "high"]].isna().all(axis=None)  # intervals are over seeds
