"""AFMP ablations in words: every sentence follows from the runs, or from a saved benchmark."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from attnknn.afmp.model import kept_edges
from attnknn.afmp.published import one_way_edges
from attnknn.afmp.train import Setting, build_classifier
from attnknn.embed.rows import to_batch
from attnknn.embed.runs import project_root, results_root
from attnknn.evaluate.compare import compare_methods, verdict_sentence
from attnknn.files import read_json
from attnknn.studies.afmp import (
    DEIT,
    DENSE,
    HIGH,
    LOW,
    PUBLISHED,
    TOP_DOWN,
    Ablation,
    comparison_table,
    scaffold_of,
)

# By the verdict on the dense model against one that keeps no edge.
_AGAINST_NONE = {
    "worse": "Messages cost accuracy on these data.",
    "better": "Messages help on these data.",
}


def verdict(ablation: Ablation, saturated: pd.DataFrame, *more: str) -> str:
    """Return, in Markdown, what each part of the ablation showed.

    Args:
        ablation: The runs.
        saturated: From ``saturation_table``.
        more: What was found beside it, a sentence each.
    """
    table = ablation.comparison(metrics=("accuracy",)).set_index("method")
    spoken = {name: verdict_sentence({**row, "method": name}) for name, row in table.iterrows()}
    pairs = ablation.pairs(metrics=("accuracy",))

    def said(method: str) -> str:
        return " ".join(map(verdict_sentence, pairs[pairs["method"] == method].to_dict("records")))

    sizes = ", ".join(
        f"{name} {100 * ablation.mean(name):.2f} % ({ablation.parameters(name):,})"
        for name in ablation.rivals
    )
    lines = [
        share_words(ablation, spoken),
        message_words(ablation, pairs),
        *(f"**Penalty {name}.** {spoken[name]}" for name in spoken if name.startswith("λ")),
        f"**Top-down pass.** {spoken[TOP_DOWN]} {said(TOP_DOWN)} It needs a second bottom-up pass, "
        "which without feedback would repeat the first.",
        f"**As published.** {spoken[PUBLISHED]} {said(PUBLISHED)} {published_words(ablation)}",
        f"**Published sweep.** {sweep_words(published_sweep(ablation))}",
        f"**Transformer.** {spoken[DEIT]} Accuracy (parameters): {sizes}.",
        f"**Training.** {training_words(ablation.history())}",
        f"**Seeds.** {seed_words(comparison_table(ablation))}",
        saturation_words(saturated),
        *more,
    ]
    return "\n".join(f"- {' '.join(line.split())}" for line in lines if line)


def share_words(ablation: Ablation, spoken: Mapping[str, str]) -> str:
    """Say how accurate every share is, and how the best and all edges stand to the reference."""
    shares = [name for name in ablation.runs if name == DENSE or name.startswith("keep ")]
    # NOTE: leakage guard. Test rows judge the chosen share, so validation rows choose it.
    best = max(shares, key=lambda name: ablation.mean(name, "val"))
    shown = ", ".join(f"{name} {100 * ablation.mean(name):.2f} %" for name in shares)
    told = " ".join(spoken[name] for name in shares if name in spoken and name in (best, DENSE))
    return f"**Keep share.** {shown}; best on validation rows: {best}. {told}"


def message_words(ablation: Ablation, pairs: pd.DataFrame) -> str:
    """Say what all edges do over the fewest; of models alike but for that."""
    rows = pairs[pairs["method"] == DENSE].to_dict("records")
    if not rows:
        return ""
    run = ablation.runs[ablation.sparsest][0]
    n_edges = scaffold_of(ablation, run).n_edges
    n_kept = kept_edges(n_edges, run.setting.model.keep_share)
    silent = "That messages help on these data is not shown."
    # An edge or two may also disturb.
    said = "" if n_kept else _AGAINST_NONE.get(rows[0]["verdict"], silent)
    fewest = f"“{ablation.sparsest}” keeps {n_kept} of the {n_edges} edges of an image."
    return f"**Messages.** {fewest} {verdict_sentence(rows[0])} {said}"


def published_words(ablation: Ablation) -> str:
    """Say what the published top-down ablation, its choice of the epoch and its times measure."""
    pair = [PUBLISHED, f"{PUBLISHED}, {TOP_DOWN}"]
    probs = {name: ablation.probs[name] for name in pair}
    row = compare_methods(probs, ablation.labels, PUBLISHED, metrics=("accuracy",)).iloc[0]
    runs = [run for name in pair for run in ablation.runs[name]]
    chosen = [
        run.history["test_accuracy"].max() - run.report["metrics"]["test_accuracy"] for run in runs
    ]
    times = pd.concat([run.history for run in runs])
    longer = times["cpu_seconds_with_validation"].sum() / times["cpu_seconds"].sum() - 1
    return (
        f"Its top-down pass cannot reach the output; the two differ by what seeds do: "
        f"{row['difference']:+.4f}, p = {row['p_value']:.3f}. Choosing the epoch on test rows, as "
        f"it did, adds {100 * np.mean(chosen):.2f} points; counting the judging of rows into the "
        f"time of an epoch, as it did, adds {100 * longer:.0f} % of CPU time."
    )


SHARES = (0.2, 0.3, 0.4, 0.5, 0.6)  # of the published sweep


@torch.no_grad()
def published_sweep(ablation: Ablation) -> pd.DataFrame:
    """Return how many edges the published model keeps at each share, and whether that matters.

    Untrained models of one seed: where their logits are equal to the last bit (``same logits``, as
    at the first share), so is every step of their trainings, but for the penalty's weight.
    """
    splits, config = ablation.splits, ablation.runs[PUBLISHED][0].setting.model
    rows, first = [], None
    for share in SHARES:
        setting = Setting(PUBLISHED, replace(config, keep_share=share), "published")
        model = build_classifier(setting, splits, seed=0).eval()
        batch = model.network.batch_size
        pixels = to_batch(splits.test.inputs[:batch])
        scaffold, logits = model.network.trunk.scaffold(pixels), model(pixels)
        first = logits if first is None else first
        n_edges = one_way_edges(scaffold)[0].shape[1]
        n_kept = int(share * scaffold.n_points * batch)
        row = {"keep share": share, "edges to keep": n_kept, "edges": n_edges}
        row |= {"pruned": max(0, n_edges - n_kept), "same logits": torch.equal(first, logits)}
        rows.append(row)
    return pd.DataFrame(rows)


def sweep_words(sweep: pd.DataFrame) -> str:
    """Say whether the published sweep of the keep share compares models that differ."""
    least, there = sweep["edges to keep"].min(), sweep["edges"].iloc[0]
    asked = f"it keeps {least:,} edges or more out of {there}"
    if sweep["same logits"].all() and not sweep["pruned"].any():
        return f"One and the same model at all shares: {asked}; equal logits."
    return f"It prunes at {(sweep['pruned'] > 0).sum()} of {len(sweep)} shares: {asked}."


def saturation_words(table: pd.DataFrame) -> str:
    """Say how many gates of a table's first setting are saturated, layer by layer."""
    name = table["setting"].iloc[0]
    shares = table.loc[table["setting"] == name, "saturated"]
    shown = ", ".join(f"{100 * share:.0f} %" for share in shares)
    limits = f"below {LOW:g} or above {HIGH:g}"
    return f"**Gates.** Of “{name}” are saturated ({limits}), from the first layer on: {shown}."


def seed_words(tests: pd.DataFrame) -> str:
    """Say how many verdicts of ``comparison_table`` the seeds alone would carry."""
    told = tests[tests["verdict"].isin(["better", "worse"])]
    n_kept = int((told["p_seeds"] <= 0.05).sum())
    return (
        f"Of {len(told)} differences in the table of paired tests, {n_kept} also hold in a paired "
        "t test over the seeds alone (5 %, not corrected); the others rest on few trainings."
    )


def training_words(history: pd.DataFrame) -> str:
    """Say in which epochs runs were best on validation rows, and whether the rate ever fell."""
    runs = [run.sort_values("epoch") for _, run in history.groupby(["setting", "seed"])]
    peaks = np.array([run["epoch"].iloc[run["val_accuracy"].argmax()] for run in runs])
    lowered = sum(run["lr"].min() < run["lr"].max() for run in runs)
    last = int(history["epoch"].max())
    n_last = int((peaks == last).sum())
    words = (
        f"{len(runs)} runs of {last} epochs were best on validation rows in epochs {peaks.min()} "
        f"to {peaks.max()} (median {np.median(peaks):g}), {n_last} of them in the last; the "
        f"learning rate was lowered in {lowered}."
    )
    if not n_last and lowered == len(runs):
        return words
    return f"{words} They have not all converged: the differences are those of this budget."


# ---- What the programs in ``benchmarks`` saved about AFMP, in words

RIVAL = "DeiT-Tiny"
MEASURED_BY = "python benchmarks/afmp_{name}.py --out results/afmp/{name}"


def saved(name: str) -> dict[str, Any] | None:
    """Return what a benchmark left among the results or in the project, with its ``folder``."""
    for root in (results_root(), (project_root() or Path()) / "results"):
        folder = root / "afmp" / name
        path = folder / f"{name.split('-')[0]}.json"
        if path.is_file():
            return read_json(path) | {"folder": folder}
    return None


def read_scalings() -> dict[str, dict[str, Any]]:
    """Return the measured scalings by name, each with its ``table`` and ``clock``."""
    found = {name: saved(name) for name in ("scaling", "scaling-large")}
    return {
        name: each
        | {"table": pd.read_csv(each["folder"] / "scaling.csv"), "clock": each["options"]["clock"]}
        for name, each in found.items()
        if each is not None
    }


def cost_words(scalings: Mapping[str, dict[str, Any]]) -> str:
    """Return, in Markdown, how cost grows with the patches, and how long an epoch takes."""
    if not scalings:
        lines = [f"Scaling: not measured here; `{MEASURED_BY.format(name='scaling')}` does."]
    else:
        lines = [line for each in scalings.values() for line in scaling_lines(each)]
    epoch = saved("epoch")
    if epoch is None:
        lines.append(f"Epochs: not measured here; `{MEASURED_BY.format(name='epoch')}` does.")
    else:
        times = "; ".join(f"{name} {value:.1f}" for name, value in epoch["seconds"].items())
        lines.append(
            f"Seconds of a training epoch of AFMP-Tiny on {epoch['images']:,} images, median of "
            f"{epoch['rounds']}, {epoch['threads']} threads of {epoch['hardware']['cpu']}: {times} "
            f"(`{epoch['command']}`)."
        )
    return "\n".join(f"- {line}" for line in lines)


def scaling_lines(scaling: Mapping[str, Any]) -> list[str]:
    """Say how time grows, and how time and memory compare at the largest size of the rival."""
    table = scaling["table"]
    good = table[table["outcome"] == "ok"]
    grows = "; ".join(f"{name} {value:.2f}" for name, value in scaling["exponents"].items())
    lines = [
        f"Batch {scaling['options']['batch']}: time grows with the number of patches to the power "
        f"of {grows} (`{scaling['command']}`)."
    ]
    side = good.loc[good["model"] == RIVAL, "side"].max()
    here = good[good["side"] == side].set_index("model")
    for column, said in ((scaling["clock"], "Time"), ("peak_mb", "Peak memory")):
        if RIVAL in here.index and column in here:
            shares = (here[column] / here.loc[RIVAL, column]).drop(RIVAL).items()
            shown = "; ".join(f"{name} {value:.2f}" for name, value in shares)
            lines.append(f"{said} over that of {RIVAL} at {side} px: {shown}.")
    failed = table[table["outcome"] != "ok"].itertuples(index=False)
    return lines + [f"{row.model} at {row.side} px: {row.outcome}." for row in failed]


def controls_words() -> str:
    """Return, in Markdown, what AFMP owes to messages and to size, or how to find out."""
    found = saved("controls")
    if found is None:
        return f"Controls: not trained here; `{MEASURED_BY.format(name='controls')}` does."
    sizes = "; ".join(f"{name} {value:,}" for name, value in found["parameters"].items())
    told = [verdict for verdict in found["verdicts"] if " in accuracy (" in verdict]
    head = f"Trained on {found['images']:,} images by `{found['command']}`; parameters: {sizes}."
    return "\n".join([head, "", *(f"- {sentence}" for sentence in [*told, found["training"]])])
