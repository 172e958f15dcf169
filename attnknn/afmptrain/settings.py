"""What an AFMP ablation trains, and how."""

from dataclasses import dataclass

from attnknn.afmp import AFMPConfig
from attnknn.checks import check_count, check_one_of, check_range

KINDS = ("afmp", "published", "deit")


@dataclass(frozen=True)
class Setting:
    """One entry of an ablation.

    Attributes:
        name: What it is called in tables and figures.
        model: Sizes and switches; a transformer takes its depth, patch and size from it.
        kind: "afmp", "published" (with the faults) or "deit" (a transformer of about this size).
    """

    name: str
    model: AFMPConfig
    kind: str = "afmp"

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, KINDS)


@dataclass(frozen=True)
class Recipe:
    """How every setting is trained; the defaults are the published ones.

    Attributes:
        epochs: Rounds over the training rows.
        batch_size: Images a step.
        lr: First rate of AdamW.
        weight_decay: Decay of AdamW.
        patience: Epochs without a better validation accuracy before the rate is lowered.
        factor: What the rate is multiplied by then.
        augment: Transforms, out of those that suit the data.
    """

    epochs: int = 100
    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 1e-4
    patience: int = 5
    factor: float = 0.2
    augment: tuple[str, ...] = ("crop", "flip")

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        check_range("lr", self.lr, low=0, low_open=True)
        check_range("weight_decay", self.weight_decay, low=0)
        check_count("patience", self.patience, low=0)
        check_range("factor", self.factor, low=0, high=1, low_open=True, high_open=True)
