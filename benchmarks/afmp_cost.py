"""AFMP against DeiT-Tiny: one training pass each, in turns; ``afmp_scaling`` has all sizes."""

from functools import partial

import torch

from benchmarks.sizes import Sizes
from benchmarks.timing import Missing, Ratio, divided, interleaved

DEIT, AFMP = "DeiT-Tiny", "AFMP-Small keep 0.3"
NAME, TITLE = "afmp_over_deit", "AFMP-Small: time of forward + backward over DeiT-Tiny"
BATCH = 8


def measure(sizes: Sizes) -> list[Ratio | Missing]:
    """Return the ratio, or say why there is none."""
    try:
        import timm  # noqa: F401

        import attnknn.afmp.model  # noqa: F401
        from benchmarks.afmp_scaling import MODELS, build, training_pass
    except ImportError as error:
        return [Missing(NAME, TITLE, f"cannot be imported: {error}")]
    if not {DEIT, AFMP} <= set(MODELS):
        return [Missing(NAME, TITLE, f"afmp_scaling has other models: {', '.join(MODELS)}")]
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, sizes.side, sizes.side), torch.arange(BATCH)
    actions = {
        name: partial(training_pass, build(name, sizes.side).train(), images, labels)
        for name in (AFMP, DEIT)
    }
    times = interleaved(actions, sizes.rounds)
    note = f"batch {BATCH} of {sizes.side} px, three tenths of the edges kept"
    return [Ratio(NAME, TITLE, divided(times[AFMP], times[DEIT]), "lower", note=note)]
