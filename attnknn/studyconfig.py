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


def check_study_value(name: str, value: Any) -> Any:
    """Return ``value`` if it is possible for the study parameter ``name``, or refuse it."""
    entry = next((entry for entry in fields(StudyConfig) if entry.name == name), None)
    if entry is None:
        return value
    checked = checked_value(entry, typing.get_type_hints(StudyConfig)[name], value)
    if checked == ():
        raise ConfigError(f"{name} must hold at least one value, got {name}=[]")
    return list(checked) if isinstance(checked, tuple) else checked
