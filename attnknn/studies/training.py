"""Training study: what a trained run is, in tables and words."""

import pandas as pd

from attnknn.core.fit import judged_nll
from attnknn.core.neighbours import Neighbours
from attnknn.embed.run import PARTS, TrainedRun


def run_facts(run: TrainedRun) -> pd.DataFrame:
    """Return what a run was made of and what it cost, one fact a row."""
    report, bank = run.report, run.bank
    rows = ", ".join(f"{report['rows'][part]:,} {part}" for part in PARTS)
    facts = {
        "data": f"{run.config.data.dataset} ({rows})",
        "source": report["data_source"],
        "embedder": f"{run.config.embedder.backbone}, {report['parameters']:,} parameters",
        "pretrained weights": "yes" if report["pretrained"] else "no",
        "memory": f"{len(bank):,} rows of width {bank.dim}, index {bank.index_name}",
        "mean trust of the memory": f"{bank.view.mean_trust:.3f}",
        "seconds, stage 1 / stage 2": "{stage1:.1f} / {stage2:.1f}".format(**report["seconds"]),
    }
    return pd.DataFrame({"fact": facts.keys(), "value": facts.values()})


def class_facts(run: TrainedRun) -> pd.DataFrame:
    """Return size and mean trust of each class in the memory."""
    view = run.bank.view
    table = pd.DataFrame({"class": view.labels.numpy(), "trust": view.trust.numpy()})
    grouped = table.groupby("class")["trust"].agg(rows="size", mean_trust="mean").reset_index()
    grouped["class"] = [run.class_names[label] for label in grouped["class"]]
    return grouped


def hardest_query(neighbours: Neighbours) -> int:
    """Return the query whose neighbours disagree most about the label."""
    shares = (neighbours.labels == neighbours.labels.mode(dim=1).values[:, None]).float()
    return int(shares.mean(dim=1).argmin())


def verdict(run: TrainedRun) -> str:
    """Return, in one Markdown paragraph, how the training went."""
    sentences = []
    if len(run.history):
        best = run.history.iloc[run.history["val_accuracy"].to_numpy()[::-1].argmax() * -1 - 1]
        sentences.append(
            f"The embedder reached {100 * best['val_accuracy']:.1f} % on the validation rows "
            f"(epoch {best['epoch']:.0f} of {len(run.history)}, chosen there)."
        )
    if len(run.fit_history):
        seconds, kept = run.report["seconds"]["stage2"], run.fit_history["kept"]
        sentences.append(
            f"The attention was fitted on held-out queries in {seconds:.1f} s: NLL "
            f"{run.fit_history['stop_nll'].iloc[0]:.3f} after the first epoch, "
            f"{judged_nll(run.fit_history):.3f} after the chosen {kept.sum()} of {len(kept)}, on "
            "queries that this trial did not see; then fitted on all of them."
        )
    return " ".join(sentences) or "Nothing was trained: the embeddings were taken as they are."
