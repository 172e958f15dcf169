"""Variants of an attention: what is taken away or added, and the form each is compared with.

Every variant differs from its reference in one part, so that a difference has one cause.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnknn.config import AttentionConfig

FULL, BARE = "full attention", "similarity alone"
_NOTHING = AttentionConfig(
    situation=(),
    label_bias="none",
    denoise=False,
    prototype_gate=False,
    floor=False,
    query_temperature=False,
)
# The same number for all neighbours of a query: alone, the softmax cancels it.
CANCELLED = ("nearest", "noise")
VOTE_PARTS = {
    "denoise": "denoised labels",
    "prototype_gate": "prototype gate",
    "prototype_shift": "shifted prototypes",
    "floor": "fitted floor",
    "query_temperature": "temperature per query",
}
# The parts of the published model that the default leaves out. Its value path is not among them:
# it makes an embedding of the weighted neighbours, which the vote does not read.
PUBLISHED_PARTS = {
    "low-rank query-key": ("qk", "lowrank"),
    "full query-key": ("qk", "full"),
    "distance bias": ("distance_bias", "deep"),
    "label bias": ("label_bias", "neighbour"),
    "label bias as published": ("label_bias", "neighbourhood"),
    "prototype score": ("prototype_score", True),
    "self-attention": ("self_attention", True),
}
# Left out alone: the published label bias, which the softmax cancels, and self-attention, the
# slowest part, which is tried on the whole.
PUBLISHED_ALONE = ("low-rank query-key", "full query-key", "distance bias", "prototype score")
# Parts that nothing reads without another one: they are added to the form that has it.
NEEDS = {"prototype_shift": "prototype gate", "self_attention": "prototype score"}
SIGNS = {"off": "without", "on": "only", "extra": "with"}


@dataclass(frozen=True)
class Variant:
    """One form of the attention.

    Attributes:
        group: "off" (a part taken from the whole), "on" (a part added to similarity alone) or
            "extra" (a published part added to the whole).
        part: The part.
        reference: Name of the form it is compared with, from which it differs in this part alone.
        config: Its settings.
    """

    group: str
    part: str
    reference: str
    config: AttentionConfig

    @property
    def name(self) -> str:
        """Group and part in one word."""
        return f"{SIGNS[self.group]} {self.part}"


def forms(whole: AttentionConfig, *, extras: bool = True) -> dict[str, AttentionConfig]:
    """Return every form that is fitted, by name: the two references and all variants."""
    found = {FULL: whole, BARE: bare(whole)}
    return found | {each.name: each.config for each in variants(whole, extras=extras)}


def bare(whole: AttentionConfig) -> AttentionConfig:
    """Return similarity alone, with as many heads as the whole."""
    return replace(_NOTHING, heads=whole.heads)


def variants(whole: AttentionConfig, *, extras: bool = True) -> list[Variant]:
    """Return all one-part variants of an attention.

    Args:
        whole: The attention with every part it is used with.
        extras: Also add the published parts that ``whole`` leaves out, to it and alone.
    """
    made = _taken_away(whole) + _added_alone(whole, extras)
    if extras:
        made += _added("extra", _absent_parts(whole), FULL, whole)
    return [each for each in made if _scores_something(each.config)]


def _taken_away(whole: AttentionConfig) -> list[Variant]:
    """Return the whole without each of its parts."""
    without: dict[str, dict[str, Any]] = {}
    if whole.similarity:
        without["similarity"] = {"similarity": False}
    without |= {
        _spoken(name): {"situation": tuple(each for each in whole.situation if each != name)}
        for name in whole.situation
    }
    if whole.situation:
        without["all of these"] = {"situation": ()}
    if whole.label_bias == "neighbour":
        without["label bias"] = {"label_bias": "none"}
    without |= {
        spoken: {name: False} for name, spoken in VOTE_PARTS.items() if getattr(whole, name)
    }
    if whole.heads > 1:
        without["more than one head"] = {"heads": 1}
    return [
        Variant("off", part, FULL, replace(whole, **changed)) for part, changed in without.items()
    ]


def _added_alone(whole: AttentionConfig, extras: bool) -> list[Variant]:
    """Return similarity alone with each part of the whole, and each published one."""
    alone = {
        _spoken(name): ("situation", (name,)) for name in whole.situation if name not in CANCELLED
    }
    if whole.situation:
        alone["all of these"] = ("situation", whole.situation)
    if whole.label_bias == "neighbour":
        alone["label bias"] = ("label_bias", "neighbour")
    alone |= {
        spoken: (name, True)
        for name, spoken in VOTE_PARTS.items()
        if getattr(whole, name) and (name != "prototype_shift" or whole.prototype_gate)
    }
    if extras:
        alone |= {name: PUBLISHED_PARTS[name] for name in PUBLISHED_ALONE if name not in alone}
    return _added("on", alone, BARE, bare(whole))


def _absent_parts(whole: AttentionConfig) -> dict[str, tuple[str, Any]]:
    """Return the published parts that the whole leaves out."""
    return {
        name: (setting, value)
        for name, (setting, value) in PUBLISHED_PARTS.items()
        if getattr(whole, setting) in (False, "none")
    }


def _added(
    group: str, parts: Mapping[str, tuple[str, Any]], start: str, config: AttentionConfig
) -> list[Variant]:
    """Return a form with each part added: to the start, or to the form with what it needs."""
    made: dict[str, Variant] = {}
    for part, (setting, value) in parts.items():
        needed = made.get(NEEDS.get(setting, ""))
        name, base = (start, config) if needed is None else (needed.name, needed.config)
        made[part] = Variant(group, part, name, replace(base, **{setting: value}))
    return list(made.values())


def _spoken(feature: str) -> str:
    return feature.replace("_", " ")


def _scores_something(config: AttentionConfig) -> bool:
    others = (config.situation, config.qk != "none", config.prototype_score)
    return config.similarity or any(others)
