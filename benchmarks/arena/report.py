"""Report: the cells of an arena to Markdown, CSV and figures."""

from collections.abc import Collection
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from attnknn.figures.style import use_style
from attnknn.files import write_text
from benchmarks.arena import figures
from benchmarks.arena.problems import NOISE_NAMES
from benchmarks.arena.ranks import critical_difference, mean_ranks, ratings
from benchmarks.arena.standings import (
    METRICS,
    Standing,
    duels,
    group_table,
    is_ours,
    issue_table,
    name_of,
    noise_table,
    noises_in,
    ordered,
    read_frame,
    seconds_table,
    standing,
    standing_table,
    worst_tables,
)
from benchmarks.arena.tables import facts_of, tables_folder

ANCHOR = "forest"  # has 1 000 points, as in TabArena
TITLES = {"nll": "NLL", "brier": "Brier", "ece": "ECE", "accuracy": "accuracy"}


def write_report(
    arena: Path,
    folder: Path,
    *,
    tables: Collection[str] | None = None,
    labels: Collection[str] | None = None,
) -> str:
    """Write report.md, CSV files and figures; return the summary.

    Args:
        arena: Folder with cells, or a report's folder with ``cells.csv``.
        folder: Where to.
        tables: Tables that count; all by default.
        labels: Versions of ours that count; all by default. The last one is the headline's.
    """
    frame = read_frame(arena, labels)
    if tables is not None:
        frame = frame[frame["table"].isin(tables)].reset_index(drop=True)
    headline = headline_of(frame, labels)
    facts = facts_frame(frame, arena)
    found = {
        noise: each
        for noise in noises_in(frame)
        if (each := standing(frame, noise, headline)) is not None
    }
    use_style()
    write_csv(folder, "cells", rounded(frame))
    write_csv(folder, "tables", facts.reset_index())
    words = summary(frame, found, headline)
    parts = ["# The arena", *words, *conditions(frame, facts, headline)]
    parts += standing_parts(frame, found, folder)
    parts += tempered_parts(frame, headline, folder)
    parts += duel_parts(found, headline, folder)
    parts += rating_parts(found, headline, folder)
    parts += where_parts(frame, facts, found, headline, folder)
    parts += issue_parts(frame, folder)
    parts += second_parts(frame, folder)
    parts += hole_parts(frame, found)
    write_text(folder / "report.md", "\n\n".join(parts) + "\n")
    return "\n".join(words)


def headline_of(frame: pd.DataFrame, labels: Collection[str] | None = None) -> str:
    """Return the version of ours that the words are about: the last of ``labels``, or by name."""
    known = [name for name in frame["method"].unique() if name.partition("@")[0] == "attnknn"]
    if not known:
        raise ValueError("cells must hold answers of attnknn, got none")
    wanted = [f"attnknn@{label}" for label in labels or () if f"attnknn@{label}" in known]
    return wanted[-1] if wanted else max(known)


def facts_frame(frame: pd.DataFrame, arena: Path) -> pd.DataFrame:
    """Return the facts of the tables, saved beside the cells or prepared on this machine."""
    names = frame["table"].unique()
    if (arena / "tables.csv").is_file():
        return pd.read_csv(arena / "tables.csv").set_index("table").loc[names]
    rows = [
        {
            "table": facts.name,
            "rows": facts.rows,
            "numbers": facts.numbers,
            "categories": facts.categories,
            "missing": round(facts.missing, 4),
            "classes": len(facts.classes),
            "source": facts.source,
        }
        for facts in facts_of(names, tables_folder())
    ]
    return pd.DataFrame(rows).set_index("table")


# ---- Words.


def summary(frame: pd.DataFrame, found: dict[str, Standing], headline: str) -> list[str]:
    """Return where ours stands: one plain sentence."""
    places = []
    for noise, each in found.items():
        ranks = mean_ranks(each.means("nll"), "nll")["rank"].sort_values()
        place = ranks.index.get_loc(headline) + 1
        rival = next(name for name in ranks.index if name != headline)
        gap = critical_difference(len(ranks), each.means("nll").shape[0])
        told = "" if abs(ranks[headline] - ranks[rival]) >= gap else ", not told apart"
        places.append(
            f"{ordinal(place)} of {len(ranks)} with {NOISE_NAMES[noise]} (mean rank "
            f"{ranks[headline]:.1f}; {'next' if place == 1 else 'first'} "
            f"{name_of(rival, ranks.index)} {ranks[rival]:.1f}{told})"
        )
    seconds = frame.groupby("method")["fit_seconds"].median()
    rivals = seconds[[name for name in seconds.index if not is_ours(name)]].dropna()
    n_tables = len(set().union(*(each.means("nll").index for each in found.values())))
    pace = f"a fit takes {seconds[headline]:.1f} s in the median"
    if len(rivals):
        pace += f", rivals {rivals.min():.2f} to {rivals.max():.1f} s"
    return [
        f"In log-likelihood on {n_tables} tables {name_of(headline)} is {'; '.join(places)}; "
        f"{pace}."
    ]


def ordinal(place: int) -> str:
    """Return first, second, ... in words up to ten."""
    names = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
    return names[place - 1] if place <= len(names) else f"{place}th"


def conditions(frame: pd.DataFrame, facts: pd.DataFrame, headline: str) -> list[str]:
    """Return what was measured on what."""
    splits = frame.groupby(["table", "noise"])["split"].nunique()
    rows = frame.groupby("table")["rows"].median()
    capped = rows[rows < 0.65 * facts["rows"].reindex(rows.index)]
    words = f"{len(rows)} tables, {splits.min()} to {splits.max()} stratified 70/30 splits each"
    if len(capped):
        words += (
            f"; training rows drawn down to about {capped.median():.0f} on {len(capped)} tables"
        )
    ours = frame[frame["method"].map(is_ours)].dropna(subset=["code"])
    codes = ours.groupby("method")["code"].unique()
    versions = "; ".join(
        f"{name_of(name, codes.index)}: commit {', '.join(each)}" for name, each in codes.items()
    )
    return [
        f"{words}. Wrong labels are in training rows alone, test labels are right. Every method's "
        "probabilities get the same floor of 0.001 / C. Missing numbers are imputed by medians for "
        "whoever cannot take them, ours too; a missing category is a category of its own. Classes "
        "of fewer than 6 rows are left out. One thread each.",
        f"{versions}.",
    ]


# ---- Parts.


def standing_parts(
    frame: pd.DataFrame, found: dict[str, Standing], folder: Path, *, title: str = "standings"
) -> list[str]:
    """Return a table a noise, and draw the ranks."""
    parts, ranks, gaps, saved = [], {}, {}, []
    for noise, each in found.items():
        table = standing_table(frame, each)
        n_tables = each.means("nll").shape[0]
        gaps[noise] = critical_difference(len(table), n_tables)
        ranks[noise] = mean_ranks(each.means("nll"), "nll")
        saved.append(table.reset_index().assign(noise=noise, tables=n_tables))
        shown = pd.DataFrame(
            {
                **{f"rank {TITLES[m]}": table[f"rank_{m}"].map("{:.2f}".format) for m in METRICS},
                **{
                    TITLES[m]: table[f"mean_{m}"].map(
                        "{:.1%}".format if m == "accuracy" else "{:.3f}".format
                    )
                    for m in METRICS
                },
                "median NLL": table["median_nll"].map("{:.3f}".format),
                "fit (s)": table["fit_seconds"].map("{:.2f}".format),
                "predict (s)": table["predict_seconds"].map("{:.3f}".format),
            }
        )
        parts += [
            f"## {NOISE_NAMES[noise].capitalize()}",
            f"{n_tables} tables, {len(each.values['nll'])} problems that all have answered. Means "
            f"over tables; mean ranks that differ by {gaps[noise]:.2f} can be told apart (Nemenyi, "
            "5 %).",
            markdown(named(shown)),
        ]
    write_csv(folder, title, rounded(pd.concat(saved)))
    if title == "standings":
        save(figures.rank_dots(ranks, gaps), folder, "ranks")
        if len(ranks) > 1:
            save(figures.noise_lines(ranks), folder, "noise")
        noise = next(iter(found))
        save(figures.speed_dots(standing_table(frame, found[noise]), noise=noise), folder, "speed")
        parts += [image("ranks", "Mean ranks in NLL; bar: critical difference.")]
        parts += [image("noise", "Mean ranks against wrong labels.")] if len(ranks) > 1 else []
        parts += [image("speed", "Mean rank against seconds.")]
    return parts


def tempered_parts(frame: pd.DataFrame, headline: str, folder: Path) -> list[str]:
    """Return mean ranks where rivals have a temperature from cross-validation."""
    rows, saved = {}, []
    for noise in noises_in(frame):
        each = standing(frame, noise, headline, tempered=True)
        if each is None:
            continue
        table = standing_table(frame, each)
        saved.append(table.reset_index().assign(noise=noise))
        for metric in ("nll", "ece"):
            rows[f"{TITLES[metric]}, {NOISE_NAMES[noise]}"] = table[f"rank_{metric}"]
    write_csv(folder, "tempered", rounded(pd.concat(saved)))
    shown = pd.DataFrame(rows)
    shown = shown.loc[ordered(shown.index)].map("{:.2f}".format)
    return [
        "## Rivals with a temperature",
        "Mean ranks where each rival has a temperature from probabilities of held-out training "
        "rows, whose labels are as noisy as all. Ours is calibrated inside its fit and stays as it "
        "comes.",
        markdown(named(shown)),
    ]


def duel_parts(found: dict[str, Standing], headline: str, folder: Path) -> list[str]:
    """Return wins, ties and losses against each other contestant."""
    tables = {noise: duels(each, headline) for noise, each in found.items()}
    saved = pd.concat(tables, names=["noise"]).reset_index()
    write_csv(folder, "duels", saved)
    shown = pd.DataFrame(
        {
            NOISE_NAMES[noise]: [
                f"{row.better} : {row.worse} ({row.wins} / {row.ties} / {row.losses})"
                for row in table.itertuples()
            ]
            for noise, table in tables.items()
            for table in [table.reindex(ordered(set(saved["method"]))).fillna(0).astype(int)]
        },
        index=pd.Index(ordered(set(saved["method"])), name="method"),
    )
    return [
        f"## {name_of(headline)} against each",
        "Tables with the lower NLL : with the higher one (wins / ties / losses by a paired test "
        "over splits at 5 %, with the variance of overlapping training parts; with three splits it "
        "rarely tells).",
        markdown(named(shown)),
    ]


def rating_parts(found: dict[str, Standing], headline: str, folder: Path) -> list[str]:
    """Return ratings over all noise together, on contestants that all of it has."""
    everyone = set.intersection(*(set(each.contestants) for each in found.values()))
    columns = ordered(everyone)
    means = pd.concat({n: each.means("nll")[columns] for n, each in found.items()}, names=["noise"])
    anchor = ANCHOR if ANCHOR in columns else headline
    table = ratings(means, "nll", anchor=anchor).sort_values("rating", ascending=False)
    write_csv(folder, "ratings", table.round(1).rename_axis("method").reset_index())
    shown = pd.DataFrame(
        {
            "rating": table["rating"].map("{:.0f}".format),
            "95 %": [f"{row.low:.0f} to {row.high:.0f}" for row in table.itertuples()],
        },
        index=table.index,
    )
    return [
        "## Rating",
        "Elo-like, from all pairs on all tables and noise together "
        f"({name_of(anchor, columns)} has 1 000; 400 points are odds of ten to one of the lower "
        "NLL); interval by a bootstrap over tables.",
        markdown(named(shown)),
    ]


def where_parts(
    frame: pd.DataFrame,
    facts: pd.DataFrame,
    found: dict[str, Standing],
    headline: str,
    folder: Path,
) -> list[str]:
    """Return where ours is worst, and how ranks depend on the kind of table."""
    gaps = {noise: worst_tables(each, headline, n_shown=10**6) for noise, each in found.items()}
    write_csv(folder, "gaps", rounded(pd.concat(gaps, names=["noise"]).reset_index()))
    save(figures.gap_dots(gaps, headline), folder, "gaps")
    parts = [f"## Where {name_of(headline)} is worst", "Furthest above the best rival in NLL."]
    for noise, table in gaps.items():
        worst = table[table["behind"] > 0].head(6)
        words = "; ".join(
            f"{name} {row['nll']:.3f} ({name_of(row['best'])} {row['best_nll']:.3f})"
            for name, row in worst.iterrows()
        )
        first = int((table["behind"] <= 0).sum())
        parts.append(
            f"- {NOISE_NAMES[noise].capitalize()}: {words or 'nowhere'}. First on {first} of "
            f"{len(table)} tables."
        )
    parts.append(image("gaps", "NLL of ours minus that of the best rival."))
    groups = {noise: group_table(frame, facts, each) for noise, each in found.items()}
    write_csv(folder, "groups", rounded(pd.concat(groups, names=["noise"]).reset_index()))
    parts += ["## What the rank depends on", "Mean rank in NLL by kind of table."]
    for noise, table in groups.items():
        shown = table.map("{:.1f}".format).reset_index().set_index("by")
        shown = shown.rename(columns=lambda name, all_=table.columns: column_name(name, all_))
        parts += [f"{NOISE_NAMES[noise].capitalize()}:", markdown(shown)]
    return parts


def column_name(name: str, contestants: Collection[str]) -> str:
    """Return a contestant's name; other columns keep theirs."""
    return name_of(name, contestants) if name in contestants else name


def issue_parts(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Return how well wrong labels are found, estimated, and what sets are worth."""
    parts = []
    issues = issue_table(frame)
    if not issues.empty:
        write_csv(folder, "issues", rounded(issues))
        wide = issues.pivot(index="method", columns="noise", values=["issue_auroc", "issue_ap"])
        wide = wide.loc[wide["issue_auroc"].mean(axis=1).sort_values(ascending=False).index]
        titles = {"issue_auroc": "AUROC", "issue_ap": "AP"}
        shown = wide.map("{:.3f}".format)
        shown.columns = [f"{titles[what]}, {NOISE_NAMES[noise]}" for what, noise in shown.columns]
        parts += [
            "## Which labels are wrong",
            "Means over tables; ours by `label_issues`, others by cleanlab on held-out "
            "probabilities of the same method.",
            markdown(named(shown)),
        ]
    table = noise_table(frame)
    if not table.empty:
        write_csv(folder, "noise", rounded(table))
        contestants = table["method"].unique()
        shown = pd.DataFrame(
            {
                "noise": table["noise"].map(NOISE_NAMES),
                "true share": table["true"].map("{:.1%}".format),
                "estimated": table["estimate"].map("{:.1%}".format),
                "5 points too high on": [
                    f"{row.above} of {row.tables}" for row in table.itertuples()
                ],
                "90 % sets cover": table["coverage"].map("{:.1%}".format),
                "classes in a set": [
                    f"{row.size:.2f} of {row.classes:.1f}" for row in table.itertuples(index=False)
                ],
            }
        ).set_index(table["method"].map(lambda name: name_of(name, contestants)))
        parts += ["## Share of wrong labels, and prediction sets", markdown(shown)]
    return parts


def second_parts(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Return how long everything takes."""
    table = seconds_table(frame)
    write_csv(folder, "seconds", rounded(table.reset_index()))
    shown = table.rename(columns=lambda name: name.replace("_seconds", " (s)"))
    counts = ("cells", "holes")
    shown = shown.apply(
        lambda column: column.map(
            lambda value: (
                "-"
                if pd.isna(value)
                else f"{value:.0f}"
                if column.name in counts
                else f"{value:.2f}"
            )
        )
    )
    return [
        "## Seconds",
        f"Medians by stage and of a whole cell; {table['hours'].sum():.1f} hours of one core for "
        f"{table['cells'].sum():.0f} cells.",
        markdown(named(shown)),
    ]


def hole_parts(frame: pd.DataFrame, found: dict[str, Standing]) -> list[str]:
    """Return what failed and who is not ranked."""
    holes = frame[frame["error"].notna()]
    lines = [
        f"- {name_of(method, frame['method'].unique())} on {table}, "
        f"{', '.join(NOISE_NAMES[noise] for noise in dict.fromkeys(here['noise']))}: "
        f"{here['error'].iloc[0]}"
        for (method, table), here in holes.groupby(["method", "table"])
    ]
    for noise, each in found.items():
        for name, count in each.left_out.items():
            lines.append(
                f"- Not ranked with {NOISE_NAMES[noise]}: {name_of(name, frame['method'].unique())}"
                f", {count} of {each.n_problems} problems."
            )
    return ["## Left out", "\n".join(lines) or "Nothing."]


# ---- Files.


def named(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose index is contestants, by their names."""
    names = [name_of(name, table.index) for name in table.index]
    return table.set_axis(pd.Index(names, name="method"))


def markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as Markdown, its index first, numbers to the right."""
    head = [table.index.name or "", *map(str, table.columns)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * table.shape[1]]
    for name, row in zip(table.index, table.itertuples(index=False), strict=True):
        cells = (str(cell).replace("|", "\\|") for cell in (name, *row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Return numbers to five significant digits: enough for every figure, half the bytes."""
    floats = table.select_dtypes("float").columns
    return table.assign(
        **{name: table[name].map(lambda value: float(f"{value:.5g}")) for name in floats}
    )


def write_csv(folder: Path, name: str, table: pd.DataFrame) -> None:
    """Write a table as CSV."""
    write_text(folder / f"{name}.csv", table.to_csv(index=False, lineterminator="\n"))


def image(name: str, caption: str) -> str:
    """Return a figure in Markdown."""
    return f"![{caption}]({name}.png)"


def save(figure: plt.Figure, folder: Path, name: str) -> None:
    """Save a figure for the report."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=160, metadata={"Software": None})
    plt.close(figure)
