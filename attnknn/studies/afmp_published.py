"""What the published AFMP measures: its sweep of the keep share, its epochs, its top-down pass."""

from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from attnknn.afmp.published import one_way_edges
from attnknn.afmptrain import Setting, build_classifier
from attnknn.compare import compare_methods
from attnknn.embed import to_batch
from attnknn.studies.afmp import Ablation
from attnknn.studies.afmp_settings import PUBLISHED, TOP_DOWN

SHARES = (0.2, 0.3, 0.4, 0.5, 0.6)  # of the published sweep


@torch.no_grad()
def published_sweep(ablation: Ablation) -> pd.DataFrame:
    """Return how many edges the published model keeps at each share, and whether that matters.

    Untrained models of one seed: where their logits are equal to the last bit, so is every step of
    their trainings, but for the penalty's weight.

    Returns:
        One row a share: ``keep share``, ``edges to keep`` (its count), ``edges`` (that there are),
        ``pruned`` and ``same logits`` (as at the first share).
    """
    splits, config = ablation.splits, ablation.runs[PUBLISHED][0].setting.model
    rows, logits = [], []
    for share in SHARES:
        setting = Setting(PUBLISHED, replace(config, keep_share=share), "published")
        model = build_classifier(setting, splits, seed=0).eval()
        pixels = to_batch(splits.test.inputs[: model.network.batch_size])
        scaffold = model.network.trunk.scaffold(pixels)
        n_edges = one_way_edges(scaffold)[0].shape[1]
        n_kept = int(share * scaffold.n_points * model.network.batch_size)
        logits.append(model(pixels))
        rows.append(
            {
                "keep share": share,
                "edges to keep": n_kept,
                "edges": n_edges,
                "pruned": max(0, n_edges - n_kept),
                "same logits": torch.equal(logits[0], logits[-1]),
            }
        )
    return pd.DataFrame(rows)


def sweep_words(sweep: pd.DataFrame) -> str:
    """Say whether the published sweep of the keep share compares models that differ."""
    n_edges, least = sweep["edges"].iloc[0], sweep["edges to keep"].min()
    asked = f"it keeps {least:,} edges or more out of {n_edges}"
    same = sweep["same logits"].all() and not sweep["pruned"].any()
    if same:
        return f"One and the same model at all shares: {asked}; equal logits."
    n_pruned = int((sweep["pruned"] > 0).sum())
    return f"It prunes at {n_pruned} of {len(sweep)} shares: {asked}."


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
        f"{row['difference']:+.4f}, p = {row['p_value']:.3f} (a check of the paired test: there "
        f"is nothing to find). Choosing the epoch on test rows, as it did, adds "
        f"{100 * np.mean(chosen):.2f} points; counting the judging of rows into the time of an "
        f"epoch, as it did, adds {100 * longer:.0f} % of CPU time with our validation rows."
    )
