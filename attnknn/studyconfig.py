"""Study settings: the parameters that notebooks share, each with its rule.

A notebook's own parameters cell gives the defaults; these rules refuse what cannot work before
anything is executed. A parameter that is not listed here is only held to the type of its default.
"""

import typing
from dataclasses import dataclass, fields
from typing import Any, Literal

from attnknn.typed import ConfigError, checked_value, option


@dataclass(frozen=True)
class StudyConfig:
    """What study notebooks may be asked for."""

    k_eval: int = option(50, low=1)
    k_baseline: int = option(16, low=1)
    k_ensemble: tuple[int, ...] = option((5, 10, 20), low=1)
    ks: tuple[int, ...] = option((1, 3, 5, 10, 20, 50, 100), low=1)
    tta_views: int = option(5, low=0)
    tta_kind: Literal["v5", "narrative", "shifts"] = option("v5")
    rates: tuple[float, ...] = option((0.0, 0.2, 0.4), low=0, high=1)
    kinds: tuple[Literal["symmetric", "asymmetric"], ...] = option(("symmetric", "asymmetric"))
    held_out: tuple[Literal["clean", "noisy"], ...] = option(("clean", "noisy"))
    ratios: tuple[float, ...] = option((1.0, 0.1, 0.01), low=0, high=1, open_low=True)
    held_out_rows: tuple[Literal["balanced", "long-tailed", "reweighted"], ...] = option(
        ("balanced", "long-tailed", "reweighted")
    )
    timing_sizes: tuple[int, ...] = option((1_000, 3_000, 10_000, 30_000, 100_000), low=100)
    timing_queries: int = option(1_000, low=1)
    timing_repeats: int = option(7, low=1)
    temperatures: tuple[float, ...] = option((1.0, 0.1, 0.02), low=0, open_low=True)
    truncation_ks: tuple[int, ...] = option((1, 10, 100), low=1)
    truncation_queries: int = option(500, low=2)
    memory_shares: tuple[float, ...] = option((0.1, 1.0), low=0, high=1, open_low=True)
    root_queries: int = option(2000, low=2)
    gumbel_samples: int = option(4000, low=100)
    errata_epochs: int = option(15, low=1)
    errata_queries: int = option(2000, low=20)
    n_halves: int = option(200, low=2)
    ablation_epochs: int = option(10, low=1)
    ablation_repeats: int = option(1, low=1)
    keep_shares: tuple[float, ...] = option((1.0, 0.6, 0.3), low=0, high=1)
    sparse_weights: tuple[float, ...] = option((1e-3, 1e-4, 1e-5), low=0)
    afmp_seeds: tuple[int, ...] = option((0, 1), low=0)
    afmp_rows: int = option(0, low=0)
    afmp_epochs: int = option(3, low=1)
    afmp_batch: int = option(128, low=1)
    afmp_layers: int = option(4, low=1)
    afmp_width: int = option(128, low=1)
    afmp_patch: int = option(8, low=1)
    afmp_workers: int = option(1, low=1)
    noise: float = option(0.1, low=0, high=1)
    coverage: float = option(0.9, low=0, high=0.999, open_low=True)
    max_risk: float = option(0.01, low=0, high=1)


def check_study_value(name: str, value: Any) -> Any:
    """Return ``value`` if it is possible for the study parameter ``name``, or refuse it."""
    entry = next((entry for entry in fields(StudyConfig) if entry.name == name), None)
    if entry is None:
        return value
    checked = checked_value(entry, typing.get_type_hints(StudyConfig)[name], value)
    if checked == ():
        raise ConfigError(f"{name} must hold at least one value, got {name}=[]")
    if isinstance(checked, tuple) and len(set(checked)) < len(checked):
        raise ConfigError(f"{name} must hold different values, got {name}={value!r}")
    return list(checked) if isinstance(checked, tuple) else checked
