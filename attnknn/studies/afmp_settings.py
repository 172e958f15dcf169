"""What the AFMP ablation compares: a model becomes the settings that are trained."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnknn.afmp import AFMPConfig, AFMPTrunk
from attnknn.afmptrain import Setting

DENSE, TOP_DOWN, PUBLISHED = "dense", "top-down", "published"
WIDER, DEIT, DEIT_LARGER = "one pass, wider", "DeiT", "DeiT, larger"


def keep_name(share: float) -> str:
    """Return what a setting is called by the share of edges it keeps."""
    return DENSE if share == 1 else f"keep {share:g}"


def ablation_settings(
    model: AFMPConfig, *, keep_shares: Sequence[float], sparse_weights: Sequence[float]
) -> list[Setting]:
    """Return the settings of the study.

    Shares kept and penalty weights are tried without the top-down pass; then the pass is added to
    the reference (the model's own share and weight). Beside them stand one pass that is as large
    as both, the published model, with and without its top-down pass, and two transformers: one of
    about the reference's size, and one of about the size of the model with the top-down pass.

    Args:
        model: The full model: its sizes, share and weight are the reference's.
        keep_shares: Shares of edges to keep; 1 is the dense model, 0 one without messages.
        sparse_weights: Weights of the mean gate in the loss, at the reference's share.
    """
    plain = replace(model, top_down=False)
    shares = sorted({*keep_shares, model.keep_share}, reverse=True)
    settings = [Setting(keep_name(share), replace(plain, keep_share=share)) for share in shares]
    settings += [
        Setting(f"λ {weight:g}", replace(plain, sparse_weight=weight))
        for weight in sorted(sparse_weights, reverse=True)
        if weight != model.sparse_weight
    ]
    return [
        *settings,
        Setting(TOP_DOWN, replace(model, top_down=True)),
        Setting(WIDER, widened(plain)),
        Setting(PUBLISHED, plain, "published"),
        Setting(f"{PUBLISHED}, {TOP_DOWN}", replace(model, top_down=True), "published"),
        # NOTE: as large as what it is compared with; the top-down pass has half as much again.
        Setting(DEIT, plain, "deit"),
        Setting(DEIT_LARGER, replace(model, top_down=True), "deit"),
    ]


def widened(plain: AFMPConfig) -> AFMPConfig:
    """Return one pass that is wide enough to have about the parameters of the top-down model.

    What the second pass gains could have come from its parameters alone.
    """
    wanted = _n_parameters(replace(plain, top_down=True))
    wider = (replace(plain, width=width) for width in range(plain.width, 2 * plain.width, 2))
    return min(wider, key=lambda config: abs(_n_parameters(config) - wanted))


def _n_parameters(config: AFMPConfig) -> int:
    with torch.device("meta"):  # counted, not made
        return sum(p.numel() for p in AFMPTrunk(config).parameters())
