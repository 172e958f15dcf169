"""Claims of the theory: each with what is claimed, what was measured, and a verdict."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from attnknn.evaluate.measure import HIGHER_IS_BETTER, METRIC_NAMES
from attnknn.studies.claims import SAME_ACCURACY, SAME_NLL_SHARE
from attnknn.studies.gumbel import MISMATCH_LEVEL, smallest_p
from attnknn.studies.theory import RootN, Theory, chosen_exponent, error_exponent

HOLDS, FAILS, PARTLY, UNDECIDED = "holds", "does not hold", "holds in part", "not decided"
NORM_LIMIT = 1e-5  # float32 rows of a few hundred entries
COSINE_LIMIT = 1e-6  # two neighbours this close are equally near in float32
MASS_LIMIT = 1e-10  # double precision, sums of some ten thousand weights
CHANCE_ERRORS = 4  # standard errors that a mean of draws may lie above its bound by chance
EVEN_WEIGHTS = 0.95  # share of the largest entropy above which weights are as good as equal


class Claim(NamedTuple):
    """One line of the table."""

    claim: str
    bound: str
    measured: str
    verdict: str


def claims_table(theory: Theory) -> pd.DataFrame:
    """Return every claim with its bound, what was measured over all seeds, and a verdict."""
    made = [
        unit_norms(theory),
        same_neighbours(theory),
        row_error_is_mass(theory),
        vote_error_below_mass(theory),
        error_falls_as_claimed(theory),
        test_error_falls(theory),
        root_n_is_best(theory),
        k_far_below_root(theory),
        gumbel_follows_softmax(theory),
        gumbel_cost(theory),
        bayes_bracket(theory),
        temperatures_differ(theory),
        attention_selects(theory),
    ]
    return pd.DataFrame(made, columns=Claim._fields)


def verdict(theory: Theory) -> str:
    """Return, in Markdown, one line a claim."""
    rows = claims_table(theory).to_dict("records")
    lines = [f"- {row['claim']}: **{row['verdict']}** ({row['measured']})." for row in rows]
    n_seeds = theory.norms["seed"].nunique()
    return "\n".join([*lines, "", f"Worst case over {n_seeds} seed(s) where a bound is checked."])


def unit_norms(theory: Theory) -> Claim:
    """Every embedding has length 1."""
    worst = theory.norms["largest deviation"].max()
    return Claim(
        "Embeddings have unit length",
        f"deviation ≤ {NORM_LIMIT:g}",
        f"largest deviation {worst:.1e}",
        HOLDS if worst <= NORM_LIMIT else FAILS,
    )


def same_neighbours(theory: Theory) -> Claim:
    """Inner product and L2 distance order unit vectors alike."""
    same, gap = theory.indexes["same sets"].min(), theory.indexes["largest cosine gap"].max()
    return Claim(
        "Inner product and L2 find the same neighbours",
        f"similarities equal within {COSINE_LIMIT:g}",
        f"same set for {100 * same:.2f} % of queries, largest gap {gap:.1e}",
        HOLDS if gap <= COSINE_LIMIT else FAILS,
    )


def row_error_is_mass(theory: Theory) -> Claim:
    """Total variation over rows is the discarded mass."""
    gap = max(np.abs(each.row_error - each.mass).max() for each in theory.truncations)
    return Claim(
        "Truncation error over rows is the discarded mass",
        "total variation = mass",
        f"largest difference {gap:.1e}",
        HOLDS if gap <= MASS_LIMIT else FAILS,
    )


def vote_error_below_mass(theory: Theory) -> Claim:
    """Total variation over classes is at most the discarded mass, query by query."""
    above = [(each.vote_error > each.mass + MASS_LIMIT).sum() for each in theory.truncations]
    cases = sum(each.mass.size for each in theory.truncations)
    used = np.mean([each.vote_error.mean() / each.mass.mean() for each in theory.truncations])
    return Claim(
        "Truncation error of the vote is at most the discarded mass",
        "total variation ≤ mass, for every query",
        f"{sum(above)} of {cases} cases above; on average {100 * used:.0f} % of the bound",
        HOLDS if sum(above) == 0 else FAILS,
    )


def error_falls_as_claimed(theory: Theory) -> Claim:
    """The published rate, temperature by temperature."""
    real = theory.rates[~theory.rates["synthetic"]]
    by_weights = real.groupby("weights", sort=False)
    slow = {name for name, rows in by_weights if (rows["against_claim"] == "slower than 1/k").any()}
    kept = {
        name
        for name, rows in by_weights
        if rows["against_claim"].isin(["as 1/k", "faster than 1/k"]).all()
    }
    exponents = ", ".join(f"{rows['exponent'].mean():.2f} at {name}" for name, rows in by_weights)
    found = PARTLY if slow and kept else FAILS if slow else HOLDS if kept else UNDECIDED
    return Claim("Truncation error falls as O(1/k)", "exponent ≥ 1", exponents, found)


def test_error_falls(theory: Theory) -> Claim:
    """The same rate, read as a claim on the classification error."""
    exponent = error_exponent(theory.root_n.table)
    found = UNDECIDED if np.isnan(exponent) else HOLDS if exponent >= 1 else FAILS
    return Claim(
        "Test error falls as O(1/k)",
        "exponent ≥ 1",
        f"exponent {exponent:.2f} (uniform vote)",
        found,
    )


def root_n_is_best(theory: Theory) -> Claim:
    """k = √n is as good as a k chosen on held-out queries."""
    return compare_with_root(theory.root_n)


def compare_with_root(root_n: RootN) -> Claim:
    """Judge √n by what it may lose: inside the margin it holds; a test that finds nothing is none.

    The margins are those of the published claims (`judging`).
    """
    table = root_n.comparison
    margins = table["share"].map(_chosen_nll(root_n)) * SAME_NLL_SHARE
    margins = margins.where(table["metric"] == "nll", SAME_ACCURACY)
    is_gain = table["metric"].isin(HIGHER_IS_BETTER)
    holds = table["high"].where(~is_gain, -table["low"]) <= margins  # the most that √n may lose
    worse = table[(table["verdict"] == "worse") & ~holds]
    at = {metric: sorted(set(rows["n"])) for metric, rows in worse.groupby("metric", sort=False)}
    where = [f"worse in {METRIC_NAMES[name]} at n = {_listed(sizes)}" for name, sizes in at.items()]
    found = FAILS if len(worse) and not holds.any() else PARTLY if len(worse) else UNDECIDED
    return Claim(
        "k = √n is as good as a chosen k",
        f"at most {100 * SAME_NLL_SHARE:g} % of the NLL and {100 * SAME_ACCURACY:g} points lost",
        "; ".join([*where, f"within the margin in {holds.sum()} of {len(table)} comparisons"]),
        HOLDS if holds.all() else found,
    )


def _chosen_nll(root_n: RootN) -> pd.Series:
    """Return the mean test NLL at the chosen k, by memory share."""
    chosen = root_n.choice[root_n.choice["criterion"] == "nll"].rename(columns={"chosen": "k"})
    table = root_n.table
    measured = table[(table["queries"] == "test") & (table["metric"] == "nll")]
    both = chosen[["seed", "share", "k"]].merge(measured, on=["seed", "share", "k"])
    return both.groupby("share")["value"].mean()


def k_far_below_root(theory: Theory) -> Claim:
    """The published "practical k is far below √n"; a tenth counts as far."""
    choice = theory.root_n.choice
    full = choice[choice["share"] == choice["share"].max()]
    ratios = (full["chosen"] / full["root"]).groupby(full["criterion"], sort=False).median()
    capped = full.groupby("criterion", sort=False)["capped"].any()
    shown = ", ".join(
        f"{'at least ' if capped[name] else ''}{ratio:.2f} √n by {METRIC_NAMES[name]}"
        for name, ratio in ratios.items()
    )
    grows = ", ".join(_growth(choice, name) for name in ratios.index)
    below = ratios <= 0.1
    return Claim(
        "The best k is far below √n",
        "chosen k ≤ 0.1 √n at the full memory",
        f"{shown}; grows {grows}",
        HOLDS if below.all() else PARTLY if below.any() else FAILS,
    )


def _growth(choice: pd.DataFrame, criterion: str) -> str:
    """Say how the chosen k grows with the memory, or why that cannot be said."""
    exponent, name = chosen_exponent(choice, criterion), METRIC_NAMES[criterion]
    if not np.isnan(exponent):
        return f"as n^{exponent:.2f} by {name}"
    capped = choice[(choice["criterion"] == criterion) & choice["capped"]]
    why = "the largest k tried was best" if len(capped) else "one memory size"
    return f"at a rate by {name} that was not fitted ({why})"


def gumbel_follows_softmax(theory: Theory) -> Claim:
    """Chi-square tests of all draws."""
    table = theory.gumbel
    p_value, within = smallest_p(table), (table["distance"] <= table["by_chance"]).mean()
    return Claim(
        "Lazy Gumbel sampling follows the full softmax",
        f"chi-square, smallest p (Holm) ≥ {MISMATCH_LEVEL:g}",
        f"p = {p_value:.2f} over {len(table)} tests; {100 * within:.0f} % as close as 95 % of "
        f"exact samples; the top k alone are off by up to {table['discarded'].max():.2f}",
        HOLDS if p_value >= MISMATCH_LEVEL else FAILS,
    )


def gumbel_cost(theory: Theory) -> Claim:
    """Mean extra rows against their bound; a mean of draws may exceed it by its own error."""
    table = theory.gumbel
    above = table["extra"] > table["bound"] + CHANCE_ERRORS * table["error"]
    used = table["extra"] / table["bound"]
    return Claim(
        "Lazy Gumbel sampling looks at about n/k extra rows",
        "mean ≤ (n - k)/(k + 1)",
        f"{used.min():.2f} to {used.max():.2f} of the bound, {int(above.sum())} of {len(table)} "
        "above it by more than chance",
        HOLDS if not above.any() else FAILS,
    )


def bayes_bracket(theory: Theory) -> Claim:
    """No method may be better than the bracket's lower limit."""
    own = theory.brackets[theory.brackets["seed"].isin(theory.errors["seed"])]
    own = own[own["rows"] == own["rows"].iloc[0]]
    best = theory.errors.groupby("seed")["error"].min()
    limits = own.set_index("seed")[["lower", "upper", "low"]].groupby(level=0).first()
    shown = limits[["lower", "upper"]].mean() * 100
    return Claim(
        "The 1-NN error brackets the Bayes error (Cover and Hart)",
        "no method below the lower limit",
        f"Bayes error between {shown['lower']:.2f} and {shown['upper']:.2f} %; best method "
        f"{100 * best.mean():.2f} %",
        HOLDS if (best >= limits["low"].reindex(best.index)).all() else FAILS,
    )


def temperatures_differ(theory: Theory) -> Claim:
    """Whether the fit moved the heads' temperatures."""
    heads = theory.heads
    if heads.empty:
        return Claim("Heads learn their temperatures", "moved by 10 % or more", "none", UNDECIDED)
    by_head = heads.groupby(["part", "head"], sort=False)[["start", "temperature"]].mean()
    moved = np.abs(np.log(by_head["temperature"] / by_head["start"])) >= np.log(1.1)
    pairs = zip(by_head["start"], by_head["temperature"], strict=True)
    shown = ", ".join(f"{start:.3g} → {now:.3g}" for start, now in pairs)
    found = HOLDS if moved.all() else PARTLY if moved.any() else FAILS
    return Claim("Heads learn their temperatures", "moved by 10 % or more", shown, found)


def attention_selects(theory: Theory) -> Claim:
    """Whether the learned weights are more than 1 / k in disguise."""
    means = theory.entropies.groupby("method", sort=False)["entropy"].mean()
    return Claim(
        "Attention weights are not uniform",
        f"mean entropy ≤ {EVEN_WEIGHTS:g} log k",
        ", ".join(f"{name} {value:.3f} log k" for name, value in means.items()),
        HOLDS if means["attention"] <= EVEN_WEIGHTS else FAILS,
    )


def _listed(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}".replace(",", " ") for size in sizes)
