from __future__ import annotations

import argparse

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from helpers.whole_runs import SMALL
from moe_exp.config import TRAITS, Config, ConfigError, add_arguments, load_config, problem, to_yaml
from moe_exp.config.checks.checks import check_config
from moe_exp.config.misspelt import unknown_variables
from moe_exp.config.presets import PRESETS
from moe_exp.config.setting_types import traits
from moe_exp.planner.fit.measured import FREE
from moe_exp.studies.child_runs import MEASURED_ONLY
from moe_exp.studies.compare.variants import _said


def test_order_is_default_preset_environment_flag():
    cpu = {"PRESET": "cpu"}
    assert Config(gpus_per_node=1).num_layers == 24
    assert load_config({}, cpu).num_layers == 4
    assert load_config({}, cpu | {"NUM_LAYERS": "6"}).num_layers == 6
    assert load_config({"num_layers": "8"}, cpu | {"NUM_LAYERS": "6"}).num_layers == 8
    assert load_config({"num_layers": None}, cpu | {"NUM_LAYERS": "6"}).num_layers == 6


def test_preset_flag_wins_over_preset_variable():
    config = load_config({"preset": "reference"}, {"PRESET": "cpu"})
    assert (config.preset, config.num_experts, config.num_layers) == ("reference", 64, 24)


@pytest.mark.parametrize(
    ("gpus", "settings", "preset", "ranks"),
    [
        (0, {}, "cpu", 2),
        (0, {"train_data": "text"}, "cpu", 2),
        (8, {}, "cpu", 2),
        (1, {}, "cpu", 1),
        (8, {"preset": "cpu", "train_data": "text", "gpus_per_node": "8"}, "cpu", 8),
        (3, {"train_data": "text"}, "reference", 3),
        (3, {"preset": "reference"}, "reference", 3),
    ],
)
def test_default_preset_and_ranks(gpus, settings, preset, ranks, monkeypatch):
    for module in ("loading", "model_settings", "presets"):
        monkeypatch.setattr(f"moe_exp.config.{module}.count_gpus", lambda: gpus)
    monkeypatch.setattr("moe_exp.config.presets.num_cores", lambda: 64)
    config = load_config(settings, {})
    assert (config.preset, config.gpus_per_node) == (preset, ranks)
    assert settings or not check_config(config)


def test_empty_variables_count_as_not_set():
    assert load_config({}, {"PRESET": "cpu", "NUM_LAYERS": "", "LR": "", "VPP": ""}) == load_config(
        {}, {"PRESET": "cpu"}
    )


@pytest.mark.parametrize(("text", "value"), [("none", None), ("None", None), ("2", 2)])
def test_vpp_is_none_or_a_number(text, value):
    assert load_config({"vpp": text}, {"PRESET": "cpu"}).vpp == value


@pytest.mark.parametrize(
    ("text", "stages"),
    [("8,9*10,8", [8, *[9] * 10, 8]), (" 0, 3*2 ,1", [0, 3, 3, 1]), ("4", [4]), ("1*4", [1, 1, 1, 1])],
)
def test_layers_of_every_stage(text, stages):
    config = load_config({"pipeline_layers": text}, {"PRESET": "cpu"})
    assert (config.stage_layers, config.pipeline_layers) == (stages, text.replace(" ", ""))


@pytest.mark.parametrize("text", ["8,,8", "8,-1", "8*", "8*0", "*8", "8;8", "eight", "1.5,2", "10000"])
def test_layers_of_stages_that_cannot_be_read(text):
    with pytest.raises(
        ConfigError,
        match=r"^PIPELINE_LAYERS=.*: must be whole numbers with commas, .* Fix: give PIPELINE_LAYERS, ",
    ):
        load_config({"pipeline_layers": text}, {"PRESET": "cpu"})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "EXPERT_BACKEND",
            "trition",
            r"^EXPERT_BACKEND=trition: must be 'auto', .*'\. Fix: set EXPERT_BACKEND=triton\.$",
        ),
        (
            "ROUTING_KERNELS",
            "1",
            (
                r"^ROUTING_KERNELS=1: .* Fix: set ROUTING_KERNELS=auto, as is the default, or another of"
                r" these\.$"
            ),
        ),
        (
            "DETERMINISTIC",
            "maybe",
            (
                r"^DETERMINISTIC=maybe: must be true or false\. Fix: set DETERMINISTIC=true or"
                r" DETERMINISTIC=false\.$"
            ),
        ),
        (
            "NUM_LAYERS",
            "-4",
            (
                r"^NUM_LAYERS=-4: must be greater than or equal to 1\. Fix: give NUM_LAYERS, transformer"
                r" layers\.$"
            ),
        ),
        ("NUM_EXPERTS", "many", r"^NUM_EXPERTS=many: must be a valid integer\. Fix: "),
        ("TOPK", "1.5", r"^TOPK=1\.5: must be a valid integer\. Fix: "),
        ("LR", "fast", r"^LR=fast: must be a valid number\. Fix: "),
        ("LR", "nan", r"^LR=nan: must be a finite number\. Fix: "),
        ("LR", "0", r"^LR=0: must be greater than 0\. Fix: "),
        ("MOE_TYPE", "dropless", r"^MOE_TYPE=dropless: must be 'moe' or 'dmoe'\. Fix: "),
        ("USE_MOE", "perhaps", r"^USE_MOE=perhaps: must be true or false\. Fix: "),
        ("VPP", "0", r"^VPP=0: must be greater than or equal to 1\. Fix: "),
        ("DTYPE", "int8", r"^DTYPE=int8: must be 'fp32', 'bf16' or 'fp16'\. Fix: "),
        ("MASTER_PORT", "70000", r"^MASTER_PORT=70000: must be less than or equal to 65535\. Fix: "),
        ("PRESET", "gpt5", r"^PRESET=gpt5: is not a preset\. Fix: use one of reference, cpu, "),
    ],
)
def test_values_that_cannot_be_read(name, value, text):
    with pytest.raises(ConfigError, match=text):
        load_config({}, {"PRESET": "cpu"} | {name: value})


# NUL, tab, line feed, carriage return, escape, DEL, next line, line and paragraph
# separator, a byte that is not UTF-8
@pytest.mark.parametrize("character", "\x00\t\n\r\x1b\x7f\x85\u2028\u2029\udcff")
def test_no_setting_takes_a_control_character(character):
    value = f"1{character}2"
    with pytest.raises(ConfigError) as refused:
        load_config(dict.fromkeys(set(Config.model_fields) - {"preset"}, value), {"PRESET": "cpu"})
    rule = "has a line break, or a character that cannot be printed. Fix: give one line of text."
    names = [name for name in Config.model_fields if name != "preset"]
    assert refused.value.problems == [f"{name.upper()}={value!r}: {rule}" for name in names]


@pytest.mark.parametrize(
    ("value", "text"),
    [("runs/läufe 1", "runs/läufe 1"), ("a\nb", r"'a\nb'"), ("x" * 101, "x" * 48 + "..." + "x" * 48)],
)
def test_errors_echo_a_value_in_one_short_line(value, text):
    assert (
        problem("run_name", value, "is wrong", "change it") == f"RUN_NAME={text}: is wrong. Fix: change it."
    )


def test_all_unreadable_values_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        load_config({"moe_type": "x"}, {"PRESET": "cpu", "NUM_LAYERS": "-1", "LR": "fast"})
    assert [line.partition("=")[0] for line in error.value.problems] == ["NUM_LAYERS", "MOE_TYPE", "LR"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("NUM_EXPRTS", "NUM_EXPERTS"),
        ("NUM_EXPERT", "NUM_EXPERTS"),
        ("TRAIN_ITER", "TRAIN_ITERS"),
        ("SEQLEN", "SEQ_LEN"),
    ],
)
def test_near_names_are_found(name, near):
    assert unknown_variables({name: "1"}) == [(name, near)]


@pytest.mark.parametrize(
    "name",
    [
        "NUM_EXPERTS",
        "PATH",
        "HOME",
        "WORLD_SIZE",
        "RANK",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "LS_COLORS",
    ],
)
def test_other_names_are_left_alone(name):
    assert unknown_variables({name: "1"}) == []


LISTS = ["GPUS", "TPS", "PPS", "EPS", "ETPS", "MBSZS"]


@pytest.mark.parametrize(
    ("name", "value", "near"), [("TPZ", "1 2", "TPS"), ("MBS", "1,2, 4", "MBSZS"), ("PPZ", "none 2", "PPS")]
)
def test_lists_are_told_by_their_values(name, value, near):
    assert unknown_variables({name: value}, LISTS) == [(name, near)]
    assert unknown_variables({name: "2"}, LISTS) == unknown_variables({name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("TPS", "1 2"), ("EPOCHS", "5"), ("PS1", "$ "), ("LINES", "24"), ("VISIBLE_ONES", "0,1")],
)
def test_other_variables_are_no_lists(name, value):
    assert unknown_variables({name: value}, LISTS) == []


def test_every_setting_is_a_flag():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--num-experts", "16", "--vpp=none"])
    given = {"num_experts": "16", "vpp": "none"}
    assert vars(args) == dict.fromkeys(["config", *Config.model_fields]) | given
    assert "--gbsz GBSZ" in parser.format_help()


@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_gives_the_same_config_back(preset):
    config = load_config({"preset": preset, "gpus_per_node": 2}, {})
    assert Config(**yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (
            {"ep": 4, "gpus_per_node": 8, "num_experts": 64},
            "moe_true_num_experts_64_topk_1_type_dmoe_num_nodes_1_gpus_per_node_8_TP_1_PP_1_VPP_none_EP_4",
        ),
        (
            {"use_moe": False, "pp": 2, "vpp": 2, "cp": 2, "gpus_per_node": 4},
            "moe_false_num_nodes_1_gpus_per_node_4_TP_1_PP_2_VPP_2_EP_1_CP_2",
        ),
        ({"run_name": "mine"}, "mine"),
    ],
)
def test_run_name_is_built_from_the_settings(settings, name):
    assert load_config(SMALL | settings, {}).name == name


@given(vocab_size=st.integers(1, 300_000))
def test_vocabulary_is_padded_to_the_next_multiple_of_128(vocab_size):
    padded = Config(gpus_per_node=1, vocab_size=vocab_size).padded_vocab_size
    assert padded % 128 == 0
    assert 0 <= padded - vocab_size < 128


def test_derived_sizes():
    config = load_config(
        {"tp": 2, "gpus_per_node": 4, "nnodes": 2, "gbsz": 64, "mbsz": 4, "rampup_batch_size": "16 16 300"},
        {"PRESET": "cpu"},
    )
    assert (config.world_size, config.data_parallel_size, config.num_microbatches) == (8, 4, 4)
    assert (config.kv_channels, config.expert_ffn_size, config.rampup) == (16, 32, (16, 16, 300))


@pytest.mark.parametrize(
    ("freq", "first_k_dense", "expected"),
    [
        ("1", 0, "1111"),
        ("2", 0, "1010"),
        ("3", 1, "0001"),
        ("0,1,1,0", 0, "0110"),
        ("[0]*1+[1]*3", 0, "0111"),
        (" [0]*1 + [1,0]*1 + 1", 0, "0101"),
        ("[0,1]*2", 2, "0001"),
    ],
)
def test_layer_pattern(freq, first_k_dense, expected):
    config = load_config({"moe_layer_freq": freq, "first_k_dense": first_k_dense, "num_layers": 4}, {})
    assert "".join(str(int(is_moe)) for is_moe in config.moe_layers) == expected


def test_a_dense_model_has_no_moe_layers():
    assert load_config({"use_moe": False, "num_layers": 3}, {}).moe_layers == [False] * 3


def test_losses_and_their_weights():
    both = {"aux_loss_type": "aux_loss, seq_aux_loss"}
    assert load_config(both | {"aux_loss_coeff": "0.01"}, {}).balancing_losses == {
        "aux_loss": 0.01,
        "seq_aux_loss": 0.01,
    }
    assert load_config(both | {"aux_loss_coeff": "1e-2, 1e-4"}, {}).balancing_losses == {
        "aux_loss": 0.01,
        "seq_aux_loss": 1e-4,
    }
    assert load_config({"aux_loss_type": "none"}, {}).balancing_losses == {}
    assert load_config({"aux_loss_type": "sinkhorn"}, {}).balancing_losses == {}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"moe_layer_freq": "[0]*x"},
            (
                r"MOE_LAYER_FREQ=\[0\]\*x: must be a positive number, or a pattern .*Fix: give"
                r" MOE_LAYER_FREQ, .*"
            ),
        ),
        ({"moe_layer_freq": "0"}, r"MOE_LAYER_FREQ=0: must be a positive number.*"),
        ({"moe_layer_freq": "__import__('os')"}, r"MOE_LAYER_FREQ=.*must be a positive number"),
        (
            {"aux_loss_type": "aux_los"},
            r"AUX_LOSS_TYPE=aux_los: aux_los is not a loss\. Fix: give AUX_LOSS_TYPE, balancing losses.*",
        ),
        ({"aux_loss_type": "aux_loss,none"}, r"AUX_LOSS_TYPE=aux_loss,none: none and sinkhorn stand alone.*"),
        (
            {"aux_loss_type": "aux_loss,aux_loss"},
            r"AUX_LOSS_TYPE=aux_loss,aux_loss: .* no loss is named twice.*",
        ),
        ({"aux_loss_coeff": "much"}, r"AUX_LOSS_COEFF=much: must be a number of at least 0.*"),
        ({"aux_loss_coeff": "0.1,-1"}, r"AUX_LOSS_COEFF=0\.1,-1: must be a number of at least 0.*"),
    ],
)
def test_patterns_and_losses_that_cannot_be_read(values, text):
    with pytest.raises(ConfigError, match=text):
        load_config(values, {})


def test_a_setting_without_traits_is_refused():
    class Forgotten(Config):
        new_one: int = Field(0, description="a setting that says nothing of itself")

    with pytest.raises(LookupError, match="new_one has no traits"):
        traits(Forgotten, "new_one")
    assert set(TRAITS) == set(Config.model_fields)


def test_what_settings_say_of_themselves_reaches_who_asks():
    """One setting of each kind, by those that go by it: planner, comparison, sweep, report."""
    assert {"lr", "run_dir", "hang_timeout"} <= FREE and not {"topk", "mbsz", "tp"} & FREE
    assert MEASURED_ONLY["save_interval"] == 0 and "topk" not in MEASURED_ONLY
    dense, moe = (load_config({"use_moe": use_moe, "run_name": "x"}, {}) for use_moe in ("false", "true"))
    said = [_said(config) for config in (dense, moe)]
    assert said[0]["router_score"] is None and said[1]["router_score"] == "softmax"
