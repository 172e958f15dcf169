"""Report: the cells of an arena to Markdown, CSV and figures."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from attnknn.figures.style import use_style
from attnknn.figures.tables import save_figure
from attnknn.files import write_text
from benchmarks.arena import figures
from benchmarks.arena.cells import METHODS as CONTESTANTS
from benchmarks.arena.problems import NOISE_NAMES
from benchmarks.arena.standings import (
    METRICS,
    NAMES,
    WORSE,
    WORSE_ROWS,
    Standing,
    against_before,
    critical_difference,
    duels,
    gap_table,
    group_table,
    is_ours,
    issue_table,
    mean_ranks,
    name_of,
    noise_table,
    ordered,
    ratings,
    read_frame,
    seconds_table,
    standing_table,
    standings,
)
from benchmarks.arena.tables import TABLES, facts_of

ANCHOR = "forest"  # has 1 000 points, as in TabArena
TITLES = {"nll": "NLL", "brier": "Brier", "ece": "ECE", "accuracy": "accuracy"}
FORMATS = {"nll": "{:.3f}", "brier": "{:.3f}", "ece": "{:.3f}", "accuracy": "{:.1%}"}
CAPTIONS = {
    "ranks": "Mean ranks in NLL with 95 % intervals; bar: critical difference.",
    "noise": "Mean ranks in NLL against the share of wrong labels.",
    "speed": "Mean rank in NLL against seconds of a fit.",
    "gaps": "NLL of ours minus that of the best rival, table by table.",
}
UNSAVED = ["data", "version"]  # checked when cells are read; they would double the file


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
        labels: Versions of ours that count; all by default. The last one is the headline's, the
            first one what it is compared with.
    """
    frame = read_frame(arena, labels)
    if tables is not None:
        frame = frame[frame["table"].isin(tables)].reset_index(drop=True)
    headline, *others = versions_in(frame, labels)
    facts = facts_frame(frame, arena)
    found = standings(frame, headline)
    use_style()
    write_csv(folder, "cells", frame.drop(columns=UNSAVED, errors="ignore"))
    write_csv(folder, "tables", facts.reset_index())
    words = summary(frame, found, headline)
    parts = ["# The arena", words, *conditions(frame, facts)]
    for name, caption in CAPTIONS.items():
        figure = picture(name, frame, found, headline)
        save_figure(figure, folder, name)
        plt.close(figure)
        parts.append(f"![{caption}]({name}.svg)")
    parts += standing_parts(frame, found, folder)
    parts += tempered_parts(frame, headline, folder)
    parts += duel_parts(found, headline, folder)
    parts += rating_parts(found, headline, folder)
    parts += where_parts(frame, facts, found, headline, folder)
    as_given = headline.replace("attnknn", "attnknn-as-given")
    for file, other in {"before": (others or [None])[-1], "as_given": as_given}.items():
        if (frame["method"] == other).any():
            parts += before_parts(frame, headline, other, folder, file)
    parts += issue_parts(frame, folder)
    parts += second_parts(frame, folder)
    parts += hole_parts(frame, found)
    write_text(folder / "report.md", "\n\n".join(parts) + "\n")
    return words


def versions_in(frame: pd.DataFrame, labels: Collection[str] | None = None) -> list[str]:
    """Return versions of ours, the headline's first: in the order of ``labels``, or by name."""
    known = {name for name in frame["method"].unique() if name.partition("@")[0] == "attnknn"}
    found = [f"attnknn@{label}" for label in labels or () if f"attnknn@{label}" in known]
    found = found or sorted(known)
    if not found:
        raise ValueError("cells must hold answers of attnknn, got none")
    return found[::-1]


def facts_frame(frame: pd.DataFrame, arena: Path) -> pd.DataFrame:
    """Return the facts of the tables, saved beside the cells or prepared on this machine."""
    names = frame["table"].unique()
    if (arena / "tables.csv").is_file():
        return pd.read_csv(arena / "tables.csv").set_index("table").loc[names]
    shown = ("rows", "numbers", "categories", "missing", "source", "data")
    rows = [
        {"table": each.name, **{name: getattr(each, name) for name in shown}}
        | {"classes": len(each.classes)}
        for each in facts_of(names)
    ]
    return pd.DataFrame(rows).set_index("table")


# ---- Words.


def summary(frame: pd.DataFrame, found: Mapping[str, Standing], headline: str) -> str:
    """Return where ours stands: one plain sentence."""
    places = []
    for noise, each in found.items():
        ranks = mean_ranks(each.means("nll"), "nll")["rank"].sort_values()
        place = ranks.index.get_loc(headline) + 1
        rival = next(name for name in ranks.index if name != headline)
        gap = critical_difference(len(ranks), len(each.means("nll")))
        told = "" if abs(ranks[headline] - ranks[rival]) >= gap else ", not told apart"
        places.append(
            f"{ordinal(place)} of {len(ranks)} with {NOISE_NAMES[noise]} (mean rank "
            f"{ranks[headline]:.1f}; {'next' if place == 1 else 'first'} "
            f"{name_of(rival, ranks.index)} {ranks[rival]:.1f}{told})"
        )
    seconds = frame.groupby("method")["fit_cpu"].median().dropna()
    rivals = seconds[[name for name in seconds.index if not is_ours(name)]]
    n_tables = len(set().union(*(each.means("nll").index for each in found.values())))
    pace = f"a fit takes {seconds[headline]:.1f} s of one core in the median"
    if len(rivals):
        pace += f", rivals {rivals.min():.2f} to {rivals.max():.1f} s"
    who = name_of(headline, frame["method"].unique())
    return f"In log-likelihood on {n_tables} tables {who} is {'; '.join(places)}; {pace}."


def ordinal(place: int) -> str:
    """Return first, second, ... in words up to ten."""
    names = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
    return names[place - 1] if place <= len(names) else f"{place}th"


def conditions(frame: pd.DataFrame, facts: pd.DataFrame) -> list[str]:
    """Return what was measured on what."""
    splits = frame.groupby(["table", "noise"])["split"].nunique()
    rows = frame.groupby("table")["rows"].median()
    capped = rows[rows < 0.65 * facts["rows"].reindex(rows.index)]
    words = f"{len(rows)} tables, {splits.min()} to {splits.max()} stratified 70/30 splits each"
    if len(capped):
        words += f"; about {capped.median():.0f} training rows drawn on {len(capped)} larger tables"
    ours = frame[frame["method"].map(is_ours)].dropna(subset=["code"])
    codes = ours.groupby("method")["code"].unique()
    commits = "; ".join(
        f"{name_of(name, codes.index)}: {', '.join(each)}" for name, each in codes.items()
    )
    return [
        f"{words}. Wrong labels are in training rows alone, test labels are right. Every method's "
        "probabilities get the same floor of 0.001 / C. Missing numbers are imputed by medians for "
        "whoever cannot take them, ours too; a missing category is a category of its own. Classes "
        "of fewer than 6 rows are left out. One thread each; seconds are those of the processor.",
        f"Commits: {commits}.",
    ]


# ---- Parts of the report: each saves its table and returns it in words.


def picture(
    name: str, frame: pd.DataFrame, found: Mapping[str, Standing], headline: str
) -> plt.Figure:
    """Return a figure: one of ``CAPTIONS``."""
    if name == "gaps":
        gaps = {noise: gap_table(each, headline) for noise, each in found.items()}
        return figures.gap_dots(gaps, headline)
    if name == "speed":
        noise = next(iter(found))
        return figures.speed_dots(standing_table(frame, found[noise]), noise=noise)
    ranks = {noise: mean_ranks(each.means("nll"), "nll") for noise, each in found.items()}
    if name == "noise":
        return figures.noise_lines(ranks)
    n_tables = {noise: len(each.means("nll")) for noise, each in found.items()}
    differences = {n: critical_difference(len(ranks[n]), n_tables[n]) for n in ranks}
    return figures.rank_dots(ranks, differences)


def standing_parts(frame: pd.DataFrame, found: Mapping[str, Standing], folder: Path) -> list[str]:
    """Return a table a noise."""
    parts, saved = [], []
    formats = {f"rank_{m}": (f"rank {TITLES[m]}", "{:.2f}") for m in METRICS}
    formats |= {f"mean_{m}": (TITLES[m], FORMATS[m]) for m in METRICS}
    formats |= {f"median_{m}": (f"median {TITLES[m]}", FORMATS[m]) for m in METRICS}
    formats |= {"fit_cpu": ("fit (s)", "{:.2f}"), "predict_cpu": ("predict (s)", "{:.3f}")}
    for noise, each in found.items():
        table, n_tables = standing_table(frame, each), len(each.means("nll"))
        saved.append(table.reset_index().assign(noise=noise, tables=n_tables))
        parts += [
            f"## {NOISE_NAMES[noise].capitalize()}",
            f"{n_tables} tables, {len(each.values['nll'])} problems that all have answered. Means "
            "and medians over tables; mean ranks that differ by "
            f"{critical_difference(len(table), n_tables):.2f} can be told apart (Nemenyi, 5 %).",
            markdown(named(formatted(table, formats))),
        ]
    write_csv(folder, "standings", pd.concat(saved))
    return parts


def tempered_parts(frame: pd.DataFrame, headline: str, folder: Path) -> list[str]:
    """Return mean ranks where rivals have a temperature from cross-validation."""
    found = standings(frame, headline, tempered=True)
    tables = {noise: standing_table(frame, each) for noise, each in found.items()}
    write_csv(folder, "tempered", pd.concat(tables, names=["noise"]).reset_index())
    shown = pd.DataFrame(
        {
            f"{what} {TITLES[m]}, {NOISE_NAMES[noise]}": table[f"{what}_{m}"]
            for noise, table in tables.items()
            for m in ("nll", "ece")
            for what in ("rank", "mean")
        }
    )
    return [
        "## Rivals with a temperature",
        "Each rival has a temperature from probabilities of held-out training rows, whose labels "
        "are as noisy as all. Ours is calibrated inside its fit and stays as it comes.",
        markdown(named(shown.loc[ordered(shown.index)].map("{:.2f}".format))),
    ]


def duel_parts(found: Mapping[str, Standing], headline: str, folder: Path) -> list[str]:
    """Return wins, ties and losses against each other contestant."""
    tables = {noise: duels(each, headline) for noise, each in found.items()}
    saved = pd.concat(tables, names=["noise"]).reset_index()
    write_csv(folder, "duels", saved)
    saved["told"] = [
        f"{row.better} : {row.worse} ({row.wins} / {row.ties} / {row.losses})"
        for row in saved.itertuples()
    ]
    shown = saved.pivot(index="method", columns="noise", values="told")[list(tables)].fillna("-")
    return [
        f"## {name_of(headline)} against each",
        "Tables with the lower NLL : with the higher one (wins / ties / losses by a paired test "
        "over splits at 5 %, with the variance of overlapping training parts; three splits rarely "
        "tell, fewer never).",
        markdown(named(shown.loc[ordered(shown.index)].rename(columns=NOISE_NAMES))),
    ]


def rating_parts(found: Mapping[str, Standing], headline: str, folder: Path) -> list[str]:
    """Return ratings over all noise together, on contestants that all of it has."""
    columns = ordered(set.intersection(*(set(each.contestants) for each in found.values())))
    means = pd.concat({n: each.means("nll")[columns] for n, each in found.items()}, names=["noise"])
    anchor = ANCHOR if ANCHOR in columns else headline
    table = ratings(means, anchor=anchor).sort_values("rating", ascending=False)
    write_csv(folder, "ratings", table.rename_axis("method").reset_index())
    formats = {name: (name, "{:.0f}") for name in ("rating", "low", "high")}
    return [
        "## Rating",
        "Elo-like, from all pairs on all tables and noise together "
        f"({name_of(anchor, columns)} has 1 000; 400 points are odds of ten to one of the lower "
        "NLL); 95 % interval by a bootstrap over tables.",
        markdown(named(formatted(table, formats))),
    ]


def where_parts(
    frame: pd.DataFrame,
    facts: pd.DataFrame,
    found: Mapping[str, Standing],
    headline: str,
    folder: Path,
) -> list[str]:
    """Return where ours is worst, and how ranks depend on the kind of table."""
    gaps = {noise: gap_table(each, headline) for noise, each in found.items()}
    write_csv(folder, "gaps", pd.concat(gaps, names=["noise"]).reset_index())
    lines = []
    for noise, table in gaps.items():
        words = "; ".join(
            f"{name} {row['nll']:.3f} ({name_of(row['best'])} {row['best_nll']:.3f})"
            for name, row in table[table["behind"] > 0].head(8).iterrows()
        )
        first = int((table["behind"] <= 0).sum())
        lines.append(
            f"- {NOISE_NAMES[noise].capitalize()}: {words or 'nowhere'}. First on {first} of "
            f"{len(table)} tables."
        )
    parts = [
        f"## Where {name_of(headline)} is worst",
        "Furthest above the best rival in NLL.",
        "\n".join(lines),
        "## What the rank depends on",
        "Mean rank in NLL by kind of table.",
    ]
    groups = {noise: group_table(frame, facts, each) for noise, each in found.items()}
    write_csv(folder, "groups", pd.concat(groups, names=["noise"]).reset_index())
    for noise, table in groups.items():
        names = {name: name_of(name, table.columns) for name in table.columns}
        shown = table.map("{:.1f}".format).rename(columns=names).reset_index().set_index("by")
        parts += [f"{NOISE_NAMES[noise].capitalize()}:", markdown(shown)]
    return parts


def before_parts(frame: pd.DataFrame, now: str, before: str, folder: Path, file: str) -> list[str]:
    """Return ours against another of ours: changes by noise, and the tables that lost."""
    table = against_before(frame, now, before)
    write_csv(folder, file, table)
    if table.empty:
        return []
    means = table.groupby("noise", sort=False)[["nll", "ece", "accuracy"]].mean()
    counts = table.groupby("noise", sort=False)["nll"]
    means = means.assign(better=counts.agg(lambda x: (x < 0).sum()), tables=counts.size())
    formats = {"nll": ("NLL", "{:+.3f}"), "ece": ("ECE", "{:+.3f}")}
    formats |= {"accuracy": ("accuracy", "{:+.1%}"), "better": ("lower NLL on", "{:.0f}")}
    formats |= {"tables": ("of tables", "{:.0f}")}
    lost = [
        f"- {row.table}, {NOISE_NAMES[row.noise]}: {row.nll:+.3f} NLL, {row.ece:+.3f} ECE, "
        f"{row.rows} rows, {row.splits} splits."
        for row in table[table["worse"]].itertuples()
    ]
    return [
        f"## {name_of(now, [now, before])} against {name_of(before, [now, before])}",
        "Mean changes over tables, on the same problems.",
        markdown(formatted(means, formats).rename(index=NOISE_NAMES).rename_axis("noise")),
        f"Worse by more than {WORSE} NLL on tables of {WORSE_ROWS} rows or more: {len(lost)}.",
        *(["\n".join(lost)] if lost else []),
    ]


def issue_parts(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Return how well wrong labels are found, estimated, and what sets are worth."""
    parts = []
    issues = issue_table(frame)
    if not issues.empty:
        write_csv(folder, "issues", issues)
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
    if table.empty:
        return parts
    write_csv(folder, "noise", table)
    contestants = table["method"].unique()
    table["noise"] = table["noise"].map(NOISE_NAMES)
    table.index = pd.Index([name_of(each, contestants) for each in table["method"]], name="method")
    formats = {
        "noise": ("noise", "{}"),
        "true": ("true share", "{:.1%}"),
        "estimate": ("estimated", "{:.1%}"),
        "above": ("5 points too high on", "{}"),
        "tables": ("of tables", "{}"),
        "coverage": ("90 % sets cover", "{:.1%}"),
        "size": ("classes in a set", "{:.2f}"),
        "classes": ("of classes", "{:.1f}"),
    }
    return [
        *parts,
        "## Share of wrong labels, and prediction sets",
        "Sets are judged by right labels of test rows.",
        markdown(formatted(table, formats)),
    ]


def second_parts(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Return how long everything takes."""
    table = seconds_table(frame)
    write_csv(folder, "seconds", table.reset_index())
    formats: dict[str, tuple[str, str]] = {}
    for name in table:
        words = name.replace("_cpu", " (s)").replace("cpu_", "").replace("_", " ")
        formats[name] = (words, "{:.0f}" if name in ("cells", "holes") else "{:.2f}")
    return [
        "## Seconds",
        f"Medians of the processor by stage and of a whole cell; {table['cpu_hours'].sum():.1f} "
        f"hours of one core for {table['cells'].sum():.0f} cells ({table['clock_hours'].sum():.1f} "
        "by the clock).",
        markdown(named(formatted(table, formats))),
    ]


def hole_parts(frame: pd.DataFrame, found: Mapping[str, Standing]) -> list[str]:
    """Return what failed, who is not ranked, and what has not been measured at all."""
    everyone = frame["method"].unique()
    measured = {name.partition("@")[0] for name in everyone} | set(frame["table"])
    absent = [NAMES.get(name, name) for name in (*CONTESTANTS, *TABLES) if name not in measured]
    lines = [
        f"- {name_of(method, everyone)} on {table}, "
        f"{', '.join(NOISE_NAMES[noise] for noise in dict.fromkeys(here['noise']))}: "
        f"{here['error'].iloc[0]}"
        for (method, table), here in frame[frame["error"].notna()].groupby(["method", "table"])
    ]
    lines += [
        f"- Not ranked with {NOISE_NAMES[noise]}: {name_of(name, everyone)}, {count} of "
        f"{each.n_problems} problems."
        for noise, each in found.items()
        for name, count in each.left_out.items()
    ]
    lines += [f"- Not measured: {', '.join(absent)}."] if absent else []
    return ["## Left out", "\n".join(lines) or "Nothing."]


# ---- Files.


def formatted(table: pd.DataFrame, formats: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """Return texts: of each named column its title and its values, "-" where there is none."""

    def text(form: str) -> Callable[[object], str]:
        return lambda value: "-" if pd.isna(value) else form.format(value)

    return pd.DataFrame({title: table[name].map(text(f)) for name, (title, f) in formats.items()})


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


def write_csv(folder: Path, name: str, table: pd.DataFrame) -> None:
    """Write a table as CSV, numbers with five significant digits: half the bytes."""
    text = table.to_csv(index=False, lineterminator="\n", float_format="%.5g")
    write_text(folder / f"{name}.csv", text)
