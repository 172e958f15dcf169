"""Run configuration: a flat mapping becomes frozen, checked dataclasses.

Parameter files and notebooks speak flat names (``dataset``, ``epochs``, ``label_bias``), each used
once; the code reads them by section (``config.training.epochs``). Anything unknown, mistyped or
impossible is refused before a run starts, naming the key, the rule and the closest valid name.
"""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from attnknn.checks import check_one_of, check_range, nearest_name

# ---- Choices: the names that settings may take, known without loading what they stand for.

# Backbones by name; attnknn.embed.networks builds them, and any timm network is "timm:<name>".
BACKBONE_NAMES = (
    "fast",
    "afmp",
    "resnet18",
    "resnet50",
    "timm:<name>",
    "mlp",
    "mlp-periodic",
    "identity",
    "pca",
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
    "digits",
    "iris",
    "wine",
    "breast cancer",
    "wine quality red",
    "wine quality white",
    "adult",
    "MNIST, 64 axes",
    "CIFAR-10 pixels, 64 axes",
)


# ---- Typed settings: a value from YAML becomes the declared type, inside the declared range.
#
# Only harmless conversions are made (an integer for a number, a list for a tuple).


class ConfigError(ValueError):
    """A parameter that cannot be used, with the reason."""


def option(
    default: Any,
    *,
    low: int | float | None = None,
    high: int | float | None = None,
    open_low: bool = False,
):
    """Declare a setting with its default and, for numbers, its closed range."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": open_low})


def checked_value(entry: Any, hint: Any, value: Any) -> Any:
    """Return ``value`` in the declared type, inside the declared range."""
    converted = _converted(entry.name, hint, value)
    low, high = entry.metadata["low"], entry.metadata["high"]
    numbers = converted if isinstance(converted, tuple) else (converted,)
    for number in numbers:
        if isinstance(number, int | float) and not isinstance(number, bool):
            try:
                check_range(
                    entry.name,
                    number,
                    low=-float("inf") if low is None else low,
                    high=float("inf") if high is None else high,
                    low_open=entry.metadata["open_low"],
                )
            except ValueError as error:
                raise ConfigError(str(error)) from None
    return converted


def _converted(name: str, hint: Any, value: Any) -> Any:
    """Return ``value`` as ``hint`` asks, or refuse; only harmless conversions are made."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        try:
            return check_one_of(name, value, typing.get_args(hint))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if origin in (types.UnionType, typing.Union):
        return _converted_to_any(name, typing.get_args(hint), value)
    if origin is tuple:
        return _converted_tuple(name, typing.get_args(hint)[0], value)
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 2e-4 as a string: it wants a dot in the mantissa.
        value = _number_or_same(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(
        f"{name} must be {_spoken(hint)}, got {name}={value!r} ({type(value).__name__})"
    )


def _converted_to_any(name: str, hints: tuple[Any, ...], value: Any) -> Any:
    for hint in hints:
        try:
            return value if hint is type(None) and value is None else _converted(name, hint, value)
        except ConfigError:
            continue
    spoken = " or ".join(_spoken(hint) for hint in hints)
    raise ConfigError(f"{name} must be {spoken}, got {name}={value!r} ({type(value).__name__})")


def _converted_tuple(name: str, inner: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list, got {name}={value!r} ({type(value).__name__})")
    return tuple(_converted(name, inner, item) for item in value)


def _number_or_same(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _spoken(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_spoken(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is tuple:
        return "a list"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, str(hint))


WITH_WEIGHTS = ("resnet18", "resnet50", "timm:")  # backbones that others have trained already
WIDE_AS_ASKED = ("mlp", "mlp-periodic", "pca")  # backbones of width embed_dim, without a projection


@dataclass(frozen=True)
class DataConfig:
    """Which rows are used, and how they are split."""

    dataset: str = option("digits")
    label_column: str = option("label")
    val_rows: int | None = option(None, low=2)
    max_train_rows: int | None = option(None, low=2)
    max_test_rows: int | None = option(None, low=2)
    image_size: int | None = option(None, low=4)
    numeric: Literal["standard", "quantile"] = option("standard")
    split_seed: int = option(42, low=0)
    train_noise: float = option(0.0, low=0, high=1)
    train_noise_kind: Literal["symmetric", "asymmetric"] = option("symmetric")
    train_tail: float = option(1.0, low=0, high=1, open_low=True)


@dataclass(frozen=True)
class EmbedderConfig:
    """What turns an input into a unit-length row."""

    backbone: str = option("fast")
    widths: tuple[int, ...] = option((64, 256, 256), low=1)
    pretrained: bool | Literal["auto"] = option("auto")
    projection: Literal["none", "deep", "batchnorm", "layernorm"] = option("none")
    embed_dim: int = option(256, low=2)


@dataclass(frozen=True)
class AttentionConfig:
    """How the K neighbours of a query are weighed; each part has its own switch."""

    heads: int = option(4, low=1)
    similarity: bool = option(True)
    situation: tuple[str, ...] = option(SITUATION_FEATURES)
    denoise: bool = option(True)
    prototype_gate: bool = option(True)
    prototype_shift: bool = option(False)
    floor: bool = option(True)
    query_temperature: bool = option(True)
    qk: Literal["none", "full", "lowrank"] = option("none")
    qk_rank: int = option(8, low=1)
    temperature_start: float = option(1.0, low=0, open_low=True)
    temperature_low: float = option(0.05, low=0, open_low=True)
    temperature_high: float = option(5.0, low=0, open_low=True)
    distance_bias: Literal["none", "deep", "shallow"] = option("none")
    label_bias: Literal["none", "neighbour", "neighbourhood"] = option("none")
    prototype_score: bool = option(False)
    self_attention: bool = option(False)
    value_path: bool = option(False)


@dataclass(frozen=True)
class TrainingConfig:
    """Stage 1: how the embedder (and, jointly, the attention) is trained."""

    objective: Literal["cross_entropy", "joint"] = option("cross_entropy")
    head: Literal["linear", "mlp"] = option("linear")
    optimiser: Literal["sgd", "adamw", "muon"] = option("sgd")
    epochs: int = option(8, low=0)
    batch_size: int = option(500, low=2)
    lr: float = option(11.5, low=0, open_low=True)
    weight_decay: float = option(0.0153, low=0)
    backbone_lr_scale: float = option(0.1, low=0)
    attention_lr_scale: float = option(2.0, low=0)
    schedule: Literal["triangle", "linear", "cosine", "warm_restarts"] = option("triangle")
    restart_epochs: int = option(5, low=1)
    restart_factor: int = option(2, low=1)
    warmup_epochs: int = option(0, low=0)
    clip_norm: float | None = option(None, low=0, open_low=True)
    label_smoothing: float = option(0.2, low=0, high=0.99)
    augment: Literal["auto"] | tuple[Augmentation, ...] = option("auto")
    crop_pad: int = option(2, low=0)
    crop_mode: Literal["zero", "reflect"] = option("reflect")
    alternating_flip: bool = option(True)
    small_sizes: tuple[int, ...] = option((), low=4)
    small_until: tuple[float, ...] = option((), low=0, high=1)
    mixup_alpha: float = option(0.0, low=0)
    mixup_share: float = option(0.5, low=0, high=1)
    k_train: int = option(16, low=1)
    knn_weight: float = option(1.0, low=0)
    contrastive_weight: float = option(0.5, low=0)
    contrastive_form: Literal["temperature", "margin"] = option("temperature")
    contrastive_temperature: float = option(0.07, low=0, open_low=True)
    contrastive_margin: float = option(0.5, low=0)
    entropy_weight: float = option(0.01, low=0)
    hard_negatives: Literal["none", "keep", "weight"] = option("none")
    hard_share: float = option(0.3, low=0, high=1, open_low=True)
    hard_weight: float = option(2.0, low=1)
    refresh_epochs: int = option(1, low=1)
    exclude_self: bool = option(True)
    neighbour_search: Literal["faiss", "matmul"] = option("faiss")
    lookahead: bool = option(True)
    cnn_baseline: bool = option(False)
    compile: bool = option(False)
    precision: Literal["float32", "bfloat16", "auto"] = option("float32")
    device: str = option("auto")


@dataclass(frozen=True)
class FittingConfig:
    """Stage 2: how the attention is fitted on held-out queries."""

    fit_attention_on: Literal["held_out", "train"] = option("held_out")
    fit_k: int = option(50, low=1)
    fit_epochs: int = option(40, low=1)
    fit_batch_size: int = option(200, low=1)
    fit_lr: float = option(4e-3, low=0, open_low=True)
    fit_weight_decay: float = option(1e-2, low=0)
    fit_stop_share: float = option(0.2, low=0.01, high=0.9)
    fit_folds: int = option(4, low=0)
    fit_noise_max: float = option(0.0, low=0, high=0.9)
    fit_noisy_labels: bool = option(False)
    trust_neighbours: int = option(20, low=1)
    index: str = option("auto")


@dataclass(frozen=True)
class RunConfig:
    """Everything one training run needs."""

    data: DataConfig = DataConfig()
    embedder: EmbedderConfig = EmbedderConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    fitting: FittingConfig = FittingConfig()
    seed: int = option(0, low=0)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Build a configuration from flat ``name: value`` pairs; absent names keep defaults."""
        check_field_names(values)
        sections = {}
        for section in fields(cls):
            if section.name == "seed":
                continue
            names = typing.get_type_hints(section.type)
            checked = {
                entry.name: checked_value(entry, names[entry.name], values[entry.name])
                for entry in fields(section.type)
                if entry.name in values
            }
            sections[section.name] = section.type(**checked)
        seed = checked_value(cls.__dataclass_fields__["seed"], int, values.get("seed", 0))
        config = cls(**sections, seed=seed)
        _check_together(config)
        return config

    def flat(self) -> dict[str, Any]:
        """Return every setting as plain values, ready for YAML or JSON."""
        pairs = {"seed": self.seed}
        for section in (self.data, self.embedder, self.attention, self.training, self.fitting):
            for entry in fields(section):
                value = getattr(section, entry.name)
                pairs[entry.name] = list(value) if isinstance(value, tuple) else value
        return pairs


def field_names() -> tuple[str, ...]:
    """Return the flat names of all settings."""
    sections = [section.type for section in fields(RunConfig) if section.name != "seed"]
    return (*(entry.name for section in sections for entry in fields(section)), "seed")


def check_field_names(values: Mapping[str, Any]) -> None:
    """Refuse names that are no setting."""
    known = field_names()
    for name, value in values.items():
        if name not in known:
            hint = nearest_name(name, known)
            raise ConfigError(f"{name} must be a known setting, got {name}={value!r}{hint}")


def read_params(path: Path) -> dict[str, Any]:
    """Return the flat parameters of a YAML file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} must be valid YAML: {error}") from None
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
    attention, training = config.attention, config.training
    try:
        if not config.embedder.backbone.startswith("timm:"):
            check_one_of("backbone", config.embedder.backbone, BACKBONE_NAMES)
        if not re.search("[A-Z]", config.fitting.index):
            check_one_of("index", config.fitting.index, INDEX_NAMES)
        check_one_of("device", training.device.partition(":")[0], DEVICES)
        for name in attention.situation:
            check_one_of("situation", name, SITUATION_FEATURES)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if attention.temperature_low >= attention.temperature_high:
        raise ConfigError(
            "temperature_low must be below temperature_high, got "
            f"temperature_low={attention.temperature_low}, "
            f"temperature_high={attention.temperature_high}"
        )
    if not attention.temperature_low <= attention.temperature_start <= attention.temperature_high:
        # Outside of its bounds a temperature is clamped, gets no gradient and never moves.
        raise ConfigError(
            f"temperature_start must lie between temperature_low={attention.temperature_low} and "
            f"temperature_high={attention.temperature_high}, "
            f"got temperature_start={attention.temperature_start}"
        )
    _check_parts(attention)
    _check_embedder(config.embedder, attention)
    rising = list(training.small_until) == sorted(set(training.small_until))
    if len(training.small_sizes) != len(training.small_until) or not rising:
        raise ConfigError(
            "small_until must hold one rising share of the training for each of small_sizes, got "
            f"small_sizes={training.small_sizes}, small_until={training.small_until}"
        )
    if training.warmup_epochs > training.epochs:
        raise ConfigError(
            "warmup_epochs must not exceed epochs, got "
            f"warmup_epochs={training.warmup_epochs}, epochs={training.epochs}"
        )


def check_heads(name: str, width: int, attention: AttentionConfig) -> None:
    """Refuse an embedding width that the heads cannot share, where a part deals it out to them."""
    deals_out = attention.qk == "full" or attention.self_attention or attention.value_path
    if deals_out and width % attention.heads:
        raise ConfigError(
            f"{name} must be a multiple of heads with qk='full', self_attention or value_path, "
            f"got {name}={width}, heads={attention.heads}"
        )


def _check_embedder(embedder: EmbedderConfig, attention: AttentionConfig) -> None:
    """Refuse weights that do not exist; the width too, unless the backbone decides it later."""
    if embedder.pretrained is True and not embedder.backbone.startswith(WITH_WEIGHTS):
        raise ConfigError(
            "pretrained must be 'auto' or False with a backbone that has no pretrained weights, "
            f"got pretrained=True, backbone={embedder.backbone!r}"
        )
    if embedder.projection != "none" or embedder.backbone in WIDE_AS_ASKED:
        check_heads("embed_dim", embedder.embed_dim, attention)


def _check_parts(attention: AttentionConfig) -> None:
    """Refuse an attention that scores nothing, or a part that nothing reads."""
    reads_keys = attention.qk != "none" or attention.prototype_score
    scores = reads_keys or attention.similarity or attention.situation
    biases = (attention.distance_bias, attention.label_bias)
    if not scores and biases == ("none", "none"):
        raise ConfigError(
            "similarity must be on where situation, qk, distance_bias, label_bias and "
            "prototype_score are all off, got similarity=False"
        )
    reads_posterior = attention.prototype_gate or "prototype" in attention.situation
    if attention.prototype_shift and not reads_posterior:
        raise ConfigError(
            "prototype_shift must go with prototype_gate or the situation 'prototype', which read "
            "the shifted prototypes, got prototype_shift=True"
        )
    if attention.self_attention and not (reads_keys or attention.value_path):
        raise ConfigError(
            "self_attention must go with qk, prototype_score or value_path, which read what it "
            "writes, got self_attention=True"
        )


# ---- Study settings: the parameters that notebooks share, each with its rule.
#
# A notebook's own parameters cell gives the defaults; these rules refuse what cannot work before
# anything is executed. A parameter that is not listed here is only held to the type of its default.


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
