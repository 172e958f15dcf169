"""Configuration: round trip, YAML's traps, nearest names, impossible combinations."""

import subprocess
import sys
from collections import Counter

import pytest
import yaml

from attnknn.config import (
    SITUATION_FEATURES,
    AttentionConfig,
    ConfigError,
    RunConfig,
    check_study_value,
    field_names,
    parse_setting,
    read_params,
)


def test_the_flat_form_survives_a_round_trip_through_yaml():
    config = RunConfig.from_flat(
        {"dataset": "mnist", "epochs": 3, "situation": ["gap", "trust"], "clip_norm": 1, "seed": 7}
    )
    again = RunConfig.from_flat(yaml.safe_load(yaml.safe_dump(config.flat())))
    assert again == config
    assert again.attention.situation == ("gap", "trust")
    assert set(config.flat()) == set(field_names())


def test_absent_names_keep_their_defaults():
    assert RunConfig.from_flat({}) == RunConfig()


def test_no_name_is_used_by_two_sections():
    # Two sections with one name would silently share one value.
    assert [name for name, count in Counter(field_names()).items() if count > 1] == []


def test_defaults_pass_their_own_checks():
    assert RunConfig.from_flat(RunConfig().flat()) == RunConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, r"epoch must be a known setting, got epoch=3 \(did you mean 'epochs'\?\)"),
        ({"label_bias": "neighbor"}, r"label_bias must be one of .*did you mean 'neighbour'"),
        ({"epochs": "3"}, r"epochs must be an integer, got epochs='3' \(str\)"),
        ({"epochs": 3.0}, r"epochs must be an integer, got epochs=3.0 \(float\)"),
        ({"epochs": True}, r"epochs must be an integer, got epochs=True \(bool\)"),
        ({"epochs": -1}, "epochs must be at least 0, got epochs=-1"),
        ({"lr": 0}, "lr must be above 0, got lr=0"),
        ({"lr": "fast"}, "lr must be a number, got lr='fast'"),
        ({"lr": "nan"}, "lr must be finite, got lr=nan"),
        ({"lookahead": "false"}, r"lookahead must be true or false, got lookahead='false' \(str\)"),
        ({"widths": 64}, "widths must be a list, got widths=64"),
        ({"widths": [64, 0]}, "widths must be at least 1, got widths=0"),
        ({"val_rows": "all"}, "val_rows must be an integer or null, got val_rows='all'"),
        ({"widths": [64, "a"]}, r"widths must be an integer, got widths='a' \(str\)"),
        ({"pretrained": "yes"}, "pretrained must be true or false or 'auto', got pretrained='yes'"),
        ({"augment": ["crop", "flop"]}, "augment must be .*, got augment="),
        ({"train_noise": 1.5}, "train_noise must be at most 1, got train_noise=1.5"),
        ({"seed": -1}, "seed must be at least 0, got seed=-1"),
    ],
)
def test_bad_values_are_refused_by_name_rule_and_value(values, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat(values)


def test_yaml_reads_2e_4_as_text_and_it_still_is_a_number():
    values = yaml.safe_load("lr: 2e-4")
    assert values == {"lr": "2e-4"}
    assert RunConfig.from_flat(values).training.lr == 2e-4


def test_yaml_reads_off_as_false_where_a_word_is_wanted():
    values = yaml.safe_load("qk: off")
    assert values == {"qk": False}
    with pytest.raises(ConfigError, match=r"qk must be one of 'none', .*, got qk=False"):
        RunConfig.from_flat(values)
    assert RunConfig.from_flat(yaml.safe_load("pretrained: off")).embedder.pretrained is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"situation": ["gap", "trsut"]}, "situation must be one of .*did you mean 'trust'"),
        ({"temperature_low": 5.0}, "temperature_low must be below temperature_high"),
        ({"temperature_start": 7.0}, "temperature_start must lie between .*temperature_start=7.0"),
        (
            {"qk": "full", "embed_dim": 10, "heads": 4, "projection": "deep"},
            "embed_dim must be a multiple of heads .*, got embed_dim=10, heads=4",
        ),
        (
            {"value_path": True, "embed_dim": 10, "heads": 4, "backbone": "mlp"},
            "embed_dim must be a multiple of heads",
        ),
        ({"warmup_epochs": 9, "epochs": 8}, "warmup_epochs must not exceed epochs"),
        ({"similarity": False, "situation": []}, "similarity must be on where"),
        ({"self_attention": True}, "self_attention must go with qk"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat(values)


def test_embed_dim_is_not_checked_where_the_backbone_decides_the_width():
    config = RunConfig.from_flat({"qk": "full", "heads": 3, "widths": [8, 8, 66]})
    assert config.embedder.embed_dim % 3 and config.embedder.widths[-1] % 3 == 0


@pytest.mark.parametrize("backbone", ["fast", "afmp", "mlp", "mlp-periodic", "identity", "pca"])
def test_pretrained_weights_that_do_not_exist_are_refused(backbone):
    with pytest.raises(ConfigError, match=f"got pretrained=True, backbone='{backbone}'"):
        RunConfig.from_flat({"backbone": backbone, "pretrained": True})
    assert RunConfig.from_flat({"backbone": backbone}).embedder.pretrained == "auto"


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50", "timm:resnet10t"])
def test_pretrained_weights_that_exist_may_be_asked_for(backbone):
    config = RunConfig.from_flat({"backbone": backbone, "pretrained": True})
    assert config.embedder.pretrained is True


@pytest.mark.parametrize(
    "scoring",
    [
        {"situation": ["gap"]},
        {"qk": "lowrank"},
        {"distance_bias": "deep"},
        {"label_bias": "neighbour"},
        {"prototype_score": True},
    ],
)
def test_any_single_score_part_is_enough(scoring):
    config = RunConfig.from_flat({"similarity": False, "situation": []} | scoring)
    assert config.attention.similarity is False


def test_every_situation_feature_is_on_by_default():
    assert AttentionConfig().situation == SITUATION_FEATURES


def test_params_are_read_from_a_file_or_refused(tmp_path):
    path = tmp_path / "quick.yaml"
    path.write_text("epochs: 2\nlr: 0.1\n")
    assert read_params(path) == {"epochs": 2, "lr": 0.1}
    path.write_text("epochs: 2\nlr: 0.1\nepochs: 3\n")
    with pytest.raises(
        ConfigError, match=r"epochs must be set once, got it 2 times in .*quick.yaml"
    ):
        read_params(path)
    path.write_text("- epochs\n")
    with pytest.raises(ConfigError, match=r"quick.yaml must hold 'name: value' lines, got list"):
        read_params(path)
    path.write_text("epochs: [2")
    with pytest.raises(ConfigError, match=r"quick.yaml must be valid YAML"):
        read_params(path)


def test_command_line_settings_are_read_as_yaml():
    assert parse_setting("lookahead=false") == ("lookahead", False)
    assert parse_setting("widths = [8, 16]") == ("widths", [8, 16])
    assert parse_setting("backbone=timm:vit_tiny") == ("backbone", "timm:vit_tiny")
    with pytest.raises(ConfigError, match="a setting must look like name=value, got 'epochs'"):
        parse_setting("epochs")
    with pytest.raises(ConfigError, match=r"widths must be a YAML value, got 'widths=\[8'"):
        parse_setting("widths=[8")


def test_pydantic_waits_until_a_value_is_checked():
    code = "import sys, attnknn.config as c; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ks", [], r"ks must hold at least one value, got ks=\[\]"),
        ("ks", [3, 3], r"ks must hold different values, got ks=\[3, 3\]"),
        ("rates", [0.0, 1.5], "rates must be at most 1, got rates=1.5"),
        ("kinds", ["symetric"], r"kinds must be one of .* \(did you mean 'symmetric'\?\)"),
        ("coverage", 0, "coverage must be above 0, got coverage=0"),
    ],
)
def test_study_values_are_held_to_their_rule(name, value, message):
    with pytest.raises(ConfigError, match=message):
        check_study_value(name, value)


def test_good_study_values_come_back_as_plain_lists():
    assert check_study_value("rates", [0, 0.5]) == [0.0, 0.5]
    assert check_study_value("unlisted", object) is object
