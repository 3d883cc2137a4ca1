import argparse

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from helpers.whole_runs import SMALL
from moe_exp.config import (
    TRAITS,
    Config,
    ConfigError,
    add_arguments,
    load_config,
    loading,
    presets,
    problem,
    to_yaml,
)
from moe_exp.config.presets import PRESETS
from moe_exp.config.sections import launch
from moe_exp.config.settings_file import unknown_variables
from moe_exp.config.traits import traits
from moe_exp.planner.measured import FREE
from moe_exp.studies.child_runs import MEASURED_ONLY
from moe_exp.studies.compare.variants import Variant, differences


def test_empty_variables_and_another_preset():
    cpu = {"PRESET": "cpu"}
    assert load_config({}, cpu | {"NUM_LAYERS": "", "LR": "", "VPP": ""}) == load_config({}, cpu)
    config = load_config({"preset": "reference"}, cpu)
    assert (config.preset, config.num_experts, config.num_layers) == ("reference", 64, 24)


@pytest.mark.parametrize(
    ("gpus", "settings", "preset", "ranks"),
    [
        (0, {}, "cpu", 2),
        (0, {"train_data": "text"}, "cpu", 2),
        (8, {}, "gpu", 1),
        (1, {}, "gpu", 1),
        (8, {"preset": "cpu"}, "cpu", 2),
        (8, {"preset": "cpu", "train_data": "text", "gpus_per_node": "8"}, "cpu", 8),
        (3, {"train_data": "text"}, "reference", 3),
        (3, {"preset": "reference"}, "reference", 3),
    ],
)
def test_default_preset_and_ranks(gpus, settings, preset, ranks, monkeypatch):
    for module in (loading, launch, presets):
        monkeypatch.setattr(module, "count_gpus", lambda: gpus)
    monkeypatch.setattr(presets, "num_cores", lambda: 64)
    config = load_config(settings, {})
    assert (config.preset, config.gpus_per_node) == (preset, ranks)
    assert settings or not any(config.problems())


def test_vpp_is_none_or_a_number():
    for text, value in (("none", None), ("None", None), ("2", 2)):
        assert load_config({"vpp": text}, {"PRESET": "cpu"}).vpp == value


@pytest.mark.parametrize(
    ("text", "stages"),
    [("8,9*10,8", [8, *[9] * 10, 8]), (" 0, 3*2 ,1", [0, 3, 3, 1]), ("4", [4]), ("1*4", [1, 1, 1, 1])],
)
def test_layers_of_every_stage(text, stages):
    config = load_config({"pipeline_layers": text}, {"PRESET": "cpu"})
    assert (config.stage_layers, config.pipeline_layers) == (stages, text.replace(" ", ""))


@pytest.mark.parametrize("text", ["8,,8", "8,-1", "8*", "8*0", "*8", "8;8", "1.5,2", "10000"])
def test_layers_of_stages_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match=r"^PIPELINE_LAYERS=.*: must be a comma-separated list of layers "):
        load_config({"pipeline_layers": text}, {"PRESET": "cpu"})


# The last four: next line, line and paragraph separator, a byte that is not UTF-8.
@pytest.mark.parametrize("character", "\x00\t\n\r\x1b\x7f\x85\u2028\u2029\udcff")
def test_no_setting_takes_a_control_character(character):
    value = f"1{character}2"
    with pytest.raises(ConfigError) as refused:
        load_config(dict.fromkeys(set(Config.model_fields) - {"preset"}, value), {"PRESET": "cpu"})
    rule = "has a line break or an unprintable character. Fix: use one line of text."
    lines = [f"{name.upper()}={value!r}: {rule}" for name in Config.model_fields if name != "preset"]
    assert refused.value.problems == lines


@pytest.mark.parametrize(
    ("value", "text"),
    [("runs/läufe 1", "runs/läufe 1"), ("a\nb", r"'a\nb'"), ("x" * 101, "x" * 48 + "..." + "x" * 48)],
)
def test_errors_echo_a_value_in_one_short_line(value, text):
    assert problem("run_name", value, "is wrong", "do it") == f"RUN_NAME={text}: is wrong. Fix: do it."


LISTS = ["GPUS", "TPS", "PPS", "EPS", "ETPS", "MBSZS"]


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("NUM_EXPRTS", "1", "NUM_EXPERTS"), ("NUM_EXPERT", "1", "NUM_EXPERTS"),
        ("TRAIN_ITER", "1", "TRAIN_ITERS"), ("SEQLEN", "1", "SEQ_LEN"),
        # A list of sizes needs less likeness.
        ("TPZ", "1 2", "TPS"), ("MBS", "1,2, 4", "MBSZS"), ("PPZ", "none 2", "PPS"),
    ],
)  # fmt: skip
def test_near_names_are_found(name, value, near):
    assert unknown_variables({name: value}, LISTS) == [(name, near)]
    is_list = value != "1"
    assert bool(unknown_variables({name: "2"}, LISTS)) != is_list
    assert bool(unknown_variables({name: value})) != is_list


def test_other_names_are_left_alone():
    others = dict.fromkeys(["NUM_EXPERTS", "PATH", "HOME", "WORLD_SIZE", "RANK", "OMP_NUM_THREADS"], "1")
    others |= {"CUDA_VISIBLE_DEVICES": "0,1", "LS_COLORS": "1", "TPS": "1 2", "EPOCHS": "5", "PS1": "$ "}
    assert unknown_variables(others | {"LINES": "24", "VISIBLE_ONES": "0,1"}, LISTS) == []


def test_every_setting_is_a_flag():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--num-experts", "16", "--vpp=none"])
    given = {"num_experts": "16", "vpp": "none"}
    assert vars(args) == dict.fromkeys(["config", *Config.model_fields]) | given
    assert "--gbsz GBSZ" in parser.format_help()


@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_and_json_give_the_same_config_back(preset):
    """config.yaml, and what the ranks get."""
    config = load_config({"preset": preset, "gpus_per_node": 2}, {})
    assert Config(**yaml.safe_load(to_yaml(config))) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"ep": 4, "gpus_per_node": 8, "num_experts": 64},
         "moe_true_num_experts_64_topk_1_type_dmoe_num_nodes_1_gpus_per_node_8_TP_1_PP_1_VPP_none_EP_4"),
        ({"use_moe": False, "pp": 2, "vpp": 2, "cp": 2, "gpus_per_node": 4},
         "moe_false_num_nodes_1_gpus_per_node_4_TP_1_PP_2_VPP_2_EP_1_CP_2"),
        ({"run_name": "mine"}, "mine"),
    ],
)  # fmt: skip
def test_run_name_is_built_from_the_settings(settings, name):
    assert load_config(SMALL | settings, {}).name == name


@given(vocab_size=st.integers(1, 300_000))
def test_vocabulary_is_padded_to_the_next_multiple_of_128(vocab_size):
    padded = Config(gpus_per_node=1, vocab_size=vocab_size).padded_vocab_size
    assert padded % 128 == 0
    assert 0 <= padded - vocab_size < 128


def test_derived_sizes():
    given = {"tp": 2, "gpus_per_node": 4, "nnodes": 2, "gbsz": 64, "mbsz": 4}
    config = load_config(given | {"rampup_batch_size": "16 16 300"}, {"PRESET": "cpu"})
    assert (config.world_size, config.data_parallel_size, config.num_microbatches) == (8, 4, 4)
    assert (config.kv_channels, config.expert_ffn_size, config.rampup) == (16, 32, (16, 16, 300))


@pytest.mark.parametrize(
    ("freq", "first_k_dense", "expected"),
    [
        ("1", 0, "1111"), ("2", 0, "1010"), ("3", 1, "0001"), ("0,1,1,0", 0, "0110"),
        ("[0]*1+[1]*3", 0, "0111"), (" [0]*1 + [1,0]*1 + 1", 0, "0101"), ("[0,1]*2", 2, "0001"),
    ],
)  # fmt: skip
def test_layer_pattern(freq, first_k_dense, expected):
    config = load_config({"moe_layer_freq": freq, "first_k_dense": first_k_dense, "num_layers": 4}, {})
    assert "".join(str(int(is_moe)) for is_moe in config.moe_layers) == expected


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        ("aux_loss, seq_aux_loss", "0.01", {"aux_loss": 0.01, "seq_aux_loss": 0.01}),
        ("aux_loss, seq_aux_loss", "1e-2, 1e-4", {"aux_loss": 0.01, "seq_aux_loss": 1e-4}),
        ("none", "0.01", {}),
        ("sinkhorn", "0.01", {}),
    ],
)
def test_losses_and_their_weights(losses, weights, expected):
    config = load_config({"aux_loss_type": losses, "aux_loss_coeff": weights, "use_moe": False}, {})
    assert config.balancing_losses == expected
    assert config.moe_layers == [False] * config.num_layers


def test_a_setting_without_traits_is_refused():
    class Forgotten(Config):
        new_one: int = Field(0, description="a setting that says nothing of itself")

    with pytest.raises(LookupError, match="new_one has no traits"):
        traits(Forgotten, "new_one")
    assert set(TRAITS) == set(Config.model_fields)


def test_what_settings_say_of_themselves_reaches_who_asks():
    """One setting of each kind, by those that go by it: planner, comparison, sweep, report."""
    assert {"lr", "run_dir", "hang_timeout"} <= FREE and not {"topk", "mbsz", "tp"} & FREE
    assert MEASURED_ONLY.keys() <= Config.model_fields.keys()
    flags = {"dense": {"use_moe": "false", "lr": "0.1"}, "relu": {"router_score": "relu"}, "moe": {}}
    variants = [Variant.of(name, own, {"run_name": name}) for name, own in flags.items()]
    found, moe = differences(variants), variants[2].config
    assert found["lr"] == [0.1, moe.lr, moe.lr] and "topk" not in found  # only experts have it
    assert found["router_score"] == [None, "relu", "softmax"]
