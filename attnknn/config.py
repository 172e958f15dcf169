"""Run configuration: a flat mapping becomes frozen, checked dataclasses.

Parameter files and notebooks speak flat names (``dataset``, ``epochs``, ``label_bias``), each used
once; the code reads them by section (``config.training.epochs``). Anything unknown, mistyped or
impossible is refused before a run starts, naming the key, the rule and the closest valid name.
"""

import re
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Gt, Le

from attnknn.checks import check_one_of, nearest_name

# ---- Choices: the names that settings may take, known without loading what they stand for.

# Backbones by name; attnknn.embed.networks builds them, and any timm network is "timm:<name>".
BACKBONE_NAMES = tuple(
    "fast afmp resnet18 resnet50 timm:<name> mlp mlp-periodic identity pca".split()
)
# Training transforms; attnknn.data.change applies them.
Augmentation = Literal["crop", "flip", "jitter", "rotate", "cutout"]
# Indexes by name; anything with a capital letter is taken for a FAISS factory string.
INDEX_NAMES = ("auto", "flat_ip", "flat_l2", "hnsw", "ivfpq", "disk", "matmul")
DEVICES = ("auto", "cpu", "cuda", "mps")

# What the attention may look at, for each neighbour of a query; see attnknn.core.attention.
SITUATION_FEATURES = (
    "gap",  # similarity minus that of the nearest neighbour
    "nearest",  # similarity of the nearest neighbour
    "rank",  # place among the K neighbours, 0 to 1
    "trust",  # share of the neighbour's own neighbours that carry its label
    "label_share",  # share of the neighbour's label among the K labels
    "histogram_share",  # share of the neighbour's label among the K neighbour histograms
    "prototype",  # prototype posterior of the neighbour's label
    "noise",  # mean trust of the whole bank: how wrong the labels are
)

# What tables and figures call a method whose key in saved tables leaves something out.
METHOD_NAMES = {"distance": "distance (squared, τ = 1)"}

# Data sets the quickstart knows by name; benchmarks.peers loads them.
QUICKSTART_DATA = (
    *("digits", "iris", "wine", "breast cancer", "wine quality red", "wine quality white"),
    *("adult", "MNIST, 64 axes", "CIFAR-10 pixels, 64 axes"),
)

# ---- Values: one from YAML becomes the declared type, inside the declared range, or is refused.

Whole, Count = Annotated[int, Ge(0)], Annotated[int, Ge(1)]
Positive, NotNegative = Annotated[float, Gt(0)], Annotated[float, Ge(0)]
Share, SomeShare = Annotated[float, Ge(0), Le(1)], Annotated[float, Gt(0), Le(1)]

_LIMITS = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "finite_number": "finite",
}
_KINDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "literal_error": "{expected}",
}


class ConfigError(ValueError):
    """A parameter that cannot be used, with the reason."""


def checked_value(name: str, hint: Any, value: Any) -> Any:
    """Return ``value`` as ``hint`` asks, or refuse it; only harmless conversions are made."""
    from pydantic import ValidationError  # slow to load, and a classifier does without it

    try:
        return _adapter(hint).validate_python(_as_python(hint, value))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise ConfigError(_in_words(name, hint, value, faults)) from None


@cache
def _adapter(hint: Hashable) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _as_python(hint: Any, value: Any) -> Any:
    """Return a list as the tuple that is meant, and text as the number that YAML did not see."""
    if isinstance(value, list | tuple):
        return tuple(_as_python(hint, item) for item in value)
    if isinstance(value, str) and "float" in str(hint):
        try:  # YAML 1.1 reads 2e-4 as text: it wants a dot in the mantissa
            return float(value)
        except ValueError:
            return value
    return value


def _in_words(name: str, hint: Any, value: Any, faults: list[Any]) -> str:
    """Return pydantic's faults of one value as our one sentence."""
    for fault in faults:
        if fault["type"] in _LIMITS:
            limit = _LIMITS[fault["type"]].format(**fault.get("ctx", {}))
            return f"{name} must be {limit}, got {name}={fault['input']!r}"
    if [fault["type"] for fault in faults] == ["literal_error"]:
        expected, given = faults[0]["ctx"]["expected"], faults[0]["input"]
        hint_at = nearest_name(given, re.findall("'(.*?)'", expected))
        return f"{name} must be one of {expected}, got {name}={given!r}{hint_at}"
    kinds = [_KINDS[fault["type"]].format(**fault.get("ctx", {})) for fault in faults]
    kinds += ["null"] * (type(None) in typing.get_args(hint))
    given = faults[0]["input"] if len(faults) == 1 else value
    spoken = " or ".join(dict.fromkeys(kinds))
    return f"{name} must be {spoken}, got {name}={given!r} ({type(given).__name__})"


WITH_WEIGHTS = ("resnet18", "resnet50", "timm:")  # backbones that others have trained already
WIDE_AS_ASKED = ("mlp", "mlp-periodic", "pca")  # backbones of width embed_dim, without a projection


@dataclass(frozen=True)
class DataConfig:
    """Which rows are used, and how they are split."""

    dataset: str = "digits"
    label_column: str = "label"
    val_rows: Annotated[int, Ge(2)] | None = None
    max_train_rows: Annotated[int, Ge(2)] | None = None
    max_test_rows: Annotated[int, Ge(2)] | None = None
    image_size: Annotated[int, Ge(4)] | None = None
    numeric: Literal["standard", "quantile"] = "standard"
    split_seed: Whole = 42
    train_noise: Share = 0.0
    train_noise_kind: Literal["symmetric", "asymmetric"] = "symmetric"
    train_tail: SomeShare = 1.0


@dataclass(frozen=True)
class EmbedderConfig:
    """What turns an input into a unit-length row."""

    backbone: str = "fast"
    widths: tuple[Count, ...] = (64, 256, 256)
    pretrained: bool | Literal["auto"] = "auto"
    projection: Literal["none", "deep", "batchnorm", "layernorm"] = "none"
    embed_dim: Annotated[int, Ge(2)] = 256


@dataclass(frozen=True)
class AttentionConfig:
    """How the K neighbours of a query are weighed; each part has its own switch."""

    heads: Count = 4
    similarity: bool = True
    situation: tuple[Literal[*SITUATION_FEATURES], ...] = SITUATION_FEATURES
    denoise: bool = True
    prototype_gate: bool = True
    prototype_shift: bool = False
    floor: bool = True
    query_temperature: bool = True
    qk: Literal["none", "full", "lowrank"] = "none"
    qk_rank: Count = 8
    temperature_start: Positive = 1.0
    temperature_low: Positive = 0.05
    temperature_high: Positive = 5.0
    distance_bias: Literal["none", "deep", "shallow"] = "none"
    label_bias: Literal["none", "neighbour", "neighbourhood"] = "none"
    prototype_score: bool = False
    self_attention: bool = False
    value_path: bool = False


@dataclass(frozen=True)
class TrainingConfig:
    """Stage 1: how the embedder (and, jointly, the attention) is trained."""

    objective: Literal["cross_entropy", "joint"] = "cross_entropy"
    head: Literal["linear", "mlp"] = "linear"
    optimiser: Literal["sgd", "adamw", "muon"] = "sgd"
    epochs: Whole = 8
    batch_size: Annotated[int, Ge(2)] = 500
    lr: Positive = 11.5
    weight_decay: NotNegative = 0.0153
    backbone_lr_scale: NotNegative = 0.1
    attention_lr_scale: NotNegative = 2.0
    schedule: Literal["triangle", "linear", "cosine", "warm_restarts"] = "triangle"
    restart_epochs: Count = 5
    restart_factor: Count = 2
    warmup_epochs: Whole = 0
    clip_norm: Positive | None = None
    label_smoothing: Annotated[float, Ge(0), Le(0.99)] = 0.2
    augment: Literal["auto"] | tuple[Augmentation, ...] = "auto"
    crop_pad: Whole = 2
    crop_mode: Literal["zero", "reflect"] = "reflect"
    alternating_flip: bool = True
    small_sizes: tuple[Annotated[int, Ge(4)], ...] = ()
    small_until: tuple[Share, ...] = ()
    mixup_alpha: NotNegative = 0.0
    mixup_share: Share = 0.5
    k_train: Count = 16
    knn_weight: NotNegative = 1.0
    contrastive_weight: NotNegative = 0.5
    contrastive_form: Literal["temperature", "margin"] = "temperature"
    contrastive_temperature: Positive = 0.07
    contrastive_margin: NotNegative = 0.5
    entropy_weight: NotNegative = 0.01
    hard_negatives: Literal["none", "keep", "weight"] = "none"
    hard_share: SomeShare = 0.3
    hard_weight: Annotated[float, Ge(1)] = 2.0
    refresh_epochs: Count = 1
    exclude_self: bool = True
    neighbour_search: Literal["faiss", "matmul"] = "faiss"
    lookahead: bool = True
    cnn_baseline: bool = False
    compile: bool = False
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    device: str = "auto"


@dataclass(frozen=True)
class FittingConfig:
    """Stage 2: how the attention is fitted on held-out queries."""

    fit_attention_on: Literal["held_out", "train"] = "held_out"
    fit_k: Count = 50
    fit_epochs: Count = 40
    fit_batch_size: Count = 200
    fit_lr: Positive = 4e-3
    fit_weight_decay: NotNegative = 1e-2
    fit_stop_share: Annotated[float, Ge(0.01), Le(0.9)] = 0.2
    fit_folds: Whole = 4
    fit_noise_max: Annotated[float, Ge(0), Le(0.9)] = 0.0
    fit_noisy_labels: bool = False
    trust_neighbours: Count = 20
    index: str = "auto"


@dataclass(frozen=True)
class RunConfig:
    """Everything one training run needs."""

    data: DataConfig = DataConfig()
    embedder: EmbedderConfig = EmbedderConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    fitting: FittingConfig = FittingConfig()
    seed: Whole = 0

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Build a configuration from flat ``name: value`` pairs; absent names keep defaults."""
        check_field_names(values)
        made = {
            section: kind(
                **{n: checked_value(n, h, values[n]) for n, h in hints.items() if n in values}
            )
            for section, (kind, hints) in _sections().items()
        }
        config = cls(**made, seed=checked_value("seed", Whole, values.get("seed", 0)))
        _check_together(config)
        return config

    def flat(self) -> dict[str, Any]:
        """Return every setting as plain values, ready for YAML or JSON."""
        pairs = {"seed": self.seed}
        for section, (_, hints) in _sections().items():
            values = {name: getattr(getattr(self, section), name) for name in hints}
            pairs |= {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
        return pairs


@cache
def _sections() -> dict[str, tuple[type, dict[str, Any]]]:
    """Return the class of each section, and the hints of its settings."""
    kinds = {each.name: each.type for each in fields(RunConfig) if each.name != "seed"}
    return {name: (kind, _hints(kind)) for name, kind in kinds.items()}


def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def field_names() -> tuple[str, ...]:
    """Return the flat names of all settings."""
    return (*(name for _, hints in _sections().values() for name in hints), "seed")


def check_field_names(values: Mapping[str, Any]) -> None:
    """Refuse names that are no setting."""
    known = field_names()
    for name, value in values.items():
        if name not in known:
            hint = nearest_name(name, known)
            raise ConfigError(f"{name} must be a known setting, got {name}={value!r}{hint}")


class _Loader(yaml.SafeLoader):
    """YAML in which no name stands twice: plain YAML would take the last and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping."""
        names = [key.value for key, _ in node.value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{twice[0]} must be set once, got it {names.count(twice[0])} times")
        return super().construct_mapping(node, deep=deep)


def read_params(path: Path) -> dict[str, Any]:
    """Return the flat parameters of a YAML file."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} must be valid YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{error} in {path}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{path} must hold 'name: value' lines, got {type(values).__name__}")
    return values


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the name and value of a ``name=value`` string; the value is read as YAML."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"a setting must look like name=value, got {text!r}")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{name.strip()} must be a YAML value, got {text!r}") from None


def _check_together(config: RunConfig) -> None:
    """Refuse settings that are each fine alone but impossible together."""
    given = SimpleNamespace(**config.flat())
    try:
        if not given.backbone.startswith("timm:"):
            check_one_of("backbone", given.backbone, BACKBONE_NAMES)
        if not re.search("[A-Z]", given.index):
            check_one_of("index", given.index, INDEX_NAMES)
        check_one_of("device", given.device.partition(":")[0], DEVICES)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if given.projection != "none" or given.backbone in WIDE_AS_ASKED:
        check_heads("embed_dim", given.embed_dim, config.attention)
    for holds, rule, names in _RULES:
        if not holds(given):
            about = {name: getattr(given, name) for name in names.split()}
            raise ConfigError(f"{rule}, got {_named(about)}")


def _reads_keys(given: Any) -> bool:
    return given.qk != "none" or given.prototype_score


# What must hold of all settings together, how that is said, and the settings that it is about.
_RULES: tuple[tuple[Callable[[Any], Any], str, str], ...] = (
    (
        lambda g: g.pretrained is not True or g.backbone.startswith(WITH_WEIGHTS),
        "pretrained must be 'auto' or False with a backbone that has no pretrained weights",
        "pretrained backbone",
    ),
    (
        lambda g: g.temperature_low < g.temperature_high,
        "temperature_low must be below temperature_high",
        "temperature_low temperature_high",
    ),
    (  # outside of its bounds a temperature is clamped, gets no gradient and never moves
        lambda g: g.temperature_low <= g.temperature_start <= g.temperature_high,
        "temperature_start must lie between temperature_low and temperature_high",
        "temperature_start temperature_low temperature_high",
    ),
    (
        lambda g: (
            _reads_keys(g)
            or g.similarity
            or g.situation
            or (g.distance_bias, g.label_bias) != ("none", "none")
        ),
        "similarity must be on where situation, qk, distance_bias, label_bias and "
        "prototype_score are all off",
        "similarity",
    ),
    (
        lambda g: not g.prototype_shift or g.prototype_gate or "prototype" in g.situation,
        "prototype_shift must go with prototype_gate or the situation 'prototype', which read "
        "the shifted prototypes",
        "prototype_shift",
    ),
    (
        lambda g: not g.self_attention or _reads_keys(g) or g.value_path,
        "self_attention must go with qk, prototype_score or value_path, which read what it writes",
        "self_attention",
    ),
    (
        lambda g: (
            len(g.small_sizes) == len(g.small_until) and g.small_until == sorted(set(g.small_until))
        ),
        "small_until must hold one rising share of the training for each of small_sizes",
        "small_sizes small_until",
    ),
    (
        lambda g: g.warmup_epochs <= g.epochs,
        "warmup_epochs must not exceed epochs",
        "warmup_epochs epochs",
    ),
)


def check_heads(name: str, width: int, attention: AttentionConfig) -> None:
    """Refuse an embedding width that the heads cannot share, where a part deals it out to them."""
    deals_out = attention.qk == "full" or attention.self_attention or attention.value_path
    if deals_out and width % attention.heads:
        raise ConfigError(
            f"{name} must be a multiple of heads with qk='full', self_attention or value_path, "
            f"got {_named({name: width, 'heads': attention.heads})}"
        )


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


# ---- Study settings: the parameters that notebooks share, each with its rule.
#
# A notebook's own parameters cell gives the defaults; these rules refuse what cannot work before
# anything is executed. A parameter that is not listed here is only held to the type of its default.


@dataclass(frozen=True)
class StudyConfig:
    """What study notebooks may be asked for."""

    k_eval: Count = 50
    k_baseline: Count = 16
    k_ensemble: tuple[Count, ...] = (5, 10, 20)
    ks: tuple[Count, ...] = (1, 3, 5, 10, 20, 50, 100)
    tta_views: Whole = 5
    tta_kind: Literal["v5", "narrative", "shifts"] = "v5"
    rates: tuple[Share, ...] = (0.0, 0.2, 0.4)
    kinds: tuple[Literal["symmetric", "asymmetric"], ...] = ("symmetric", "asymmetric")
    held_out: tuple[Literal["clean", "noisy"], ...] = ("clean", "noisy")
    ratios: tuple[SomeShare, ...] = (1.0, 0.1, 0.01)
    held_out_rows: tuple[Literal["balanced", "long-tailed", "reweighted"], ...] = (
        "balanced",
        "long-tailed",
        "reweighted",
    )
    timing_sizes: tuple[Annotated[int, Ge(100)], ...] = (1_000, 3_000, 10_000, 30_000, 100_000)
    timing_queries: Count = 1_000
    timing_repeats: Count = 7
    temperatures: tuple[Positive, ...] = (1.0, 0.1, 0.02)
    truncation_ks: tuple[Count, ...] = (1, 10, 100)
    truncation_queries: Annotated[int, Ge(2)] = 500
    memory_shares: tuple[SomeShare, ...] = (0.1, 1.0)
    root_queries: Annotated[int, Ge(2)] = 2000
    gumbel_samples: Annotated[int, Ge(100)] = 4000
    errata_epochs: Count = 15
    errata_queries: Annotated[int, Ge(20)] = 2000
    n_halves: Annotated[int, Ge(2)] = 200
    ablation_epochs: Count = 10
    ablation_repeats: Count = 1
    keep_shares: tuple[Share, ...] = (1.0, 0.6, 0.3)
    sparse_weights: tuple[NotNegative, ...] = (1e-3, 1e-4, 1e-5)
    afmp_seeds: tuple[Whole, ...] = (0, 1)
    afmp_rows: Whole = 0
    afmp_epochs: Count = 3
    afmp_batch: Count = 128
    afmp_layers: Count = 4
    afmp_width: Count = 128
    afmp_patch: Count = 8
    afmp_workers: Count = 1
    noise: Share = 0.1
    coverage: Annotated[float, Gt(0), Le(0.999)] = 0.9
    max_risk: Share = 0.01


def check_study_value(name: str, value: Any) -> Any:
    """Return ``value`` if it is possible for the study parameter ``name``, or refuse it."""
    hints = _hints(StudyConfig)
    if name not in hints:
        return value
    checked = checked_value(name, hints[name], value)
    if checked == ():
        raise ConfigError(f"{name} must hold at least one value, got {name}=[]")
    if isinstance(checked, tuple) and len(set(checked)) < len(checked):
        raise ConfigError(f"{name} must hold different values, got {name}={value!r}")
    return list(checked) if isinstance(checked, tuple) else checked
