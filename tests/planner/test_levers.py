"""What one change of a setting saves: the difference of two predictions, for every lever that can run."""

import random

import pytest

from moe_exp.config import load_config
from moe_exp.planner.estimate import levers
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.prediction import Constants, load_constants
from moe_exp.planner.tables import RunPlan, plan_run

H100 = load_hardware("H100-80GB")
QWEN = {"preset": "qwen3-30b-a3b", "nnodes": 8, "gpus_per_node": 8, "gbsz": 512, "pp": 4, "ep": 8, "mbsz": 2}


def planned(settings: dict[str, object], constants: Constants | None = None) -> RunPlan:
    return plan_run(load_config(settings, {}), H100, constants or load_constants())


def of_settings(settings: dict[str, object]) -> dict[str, object]:
    return {lever.setting: lever for lever in planned(settings).levers}


def test_each_lever_is_the_difference_of_two_plans():
    before = planned(QWEN)
    peak = before.prediction.stages[before.prediction.peak_stage]
    possible = [lever for lever in before.levers if not lever.problem]
    assert possible
    for lever in possible:
        name, _, value = lever.setting.partition("=")
        after = planned(QWEN | {name.lower(): value})
        of_after = after.prediction.stages[after.prediction.peak_stage]
        kept = peak.activations - of_after.activations
        assert lever.activation_bytes == pytest.approx(kept, rel=1e-9, abs=1)
        assert lever.needed_bytes == pytest.approx(before.memory_bytes - after.memory_bytes, rel=1e-9, abs=1)
        assert 1 + lever.slower == pytest.approx(after.seconds_per_iteration / before.seconds_per_iteration)
        assert lever.fits == after.fits
    saved = [lever.needed_bytes for lever in possible]
    assert saved == sorted(saved, reverse=True)


@pytest.mark.parametrize(
    ("changes", "there", "missing"),
    [
        ({}, {"RECOMPUTE=full", "RECOMPUTE=selective", "TP=2", "CP=2", "EP=16", "PP=8", "MBSZ=1"}, set()),
        ({"recompute": "full"}, {"TP=2"}, {"RECOMPUTE=selective", "RECOMPUTE=full", "RECOMPUTE=none"}),
        ({"use_moe": False, "ep": 1}, {"RECOMPUTE=selective"}, {"EP=2", "ETP=2", "RECOMPUTE=moe_act"}),
        ({"mbsz": 1}, set(), {"MBSZ=0", "MBSZ=1"}),
        ({"cross_entropy": "megatron"}, {"CROSS_ENTROPY=triton", "CROSS_ENTROPY=linear"}, set()),
        ({"cross_entropy": "triton"}, {"CROSS_ENTROPY=linear"}, {"CROSS_ENTROPY=triton"}),
        ({"cross_entropy": "linear"}, set(), {"CROSS_ENTROPY=triton", "CROSS_ENTROPY=linear"}),
        ({"pp": 2, "pipeline_layers": "23,25"}, {"PP=4"}, set()),
        ({"optimizer": "adam"}, {"OFFLOAD_OPTIMIZER=true"}, set()),
        ({"optimizer": "adam", "offload_optimizer": True}, set(), {"OFFLOAD_OPTIMIZER=true"}),
    ],
)
def test_which_changes_are_tried(changes, there, missing):
    found = of_settings(QWEN | changes)
    assert there <= found.keys()
    assert not missing & found.keys()
    assert not [name for name in there if found[name].problem]


def test_a_change_that_the_rules_refuse_says_why():
    found = of_settings(QWEN | {"tp": 4, "pp": 1, "ep": 16})
    assert found["TP=8"].problem.startswith("TP=8: ")
    assert (found["TP=8"].needed_bytes, found["TP=8"].fits) == (0.0, False)
    assert list(found.values())[-1].problem  # they come last


def test_sequence_parallelism_comes_with_tensor_parallelism():
    """TP=2 halves the activations of the layers, also the norms that the ranks of TP alone would repeat."""
    before, after = (planned(QWEN | {"tp": tp}).prediction.stages[0].activation_parts for tp in (1, 2))
    for name in ("norms, dropout", "attention", "dispatch"):
        assert after[name] == pytest.approx(before[name] / 2, rel=1e-6)


def random_settings(draw: random.Random) -> dict[str, object]:
    choices = dict.fromkeys(("tp", "pp", "ep", "cp", "etp", "mbsz"), (1, 2, 4)) | {
        "preset": ("mixtral-8x7b", "qwen3-30b-a3b", "reference", "deepseek-v3-like"), "nnodes": (1, 2, 8),
        "use_moe": (True, True, True, False), "recompute": ("none", "moe_act", "selective", "full"),
        "dtype": ("bf16", "fp32"), "cross_entropy": ("megatron", "triton", "linear"), "vpp": (None, None, 2),
        "shared_expert_size": (0, 512), "gpus_per_node": (8,), "gbsz": (512,),
    }  # fmt: skip
    return {name: draw.choice(values) for name, values in choices.items()}


@pytest.mark.parametrize("gpu", ["H100-80GB", "A100-80GB", "cpu"])
def test_activations_by_module_sum_to_the_estimate(gpu):
    """Exactly, for every stage of random layouts."""
    draw, hardware, constants, checked = random.Random(7), load_hardware(gpu), load_constants(), 0
    while checked < 60:
        try:
            config = load_config(random_settings(draw), {})
        except ValueError:
            continue
        if any(config.problems()):
            continue
        checked += 1
        plan = plan_run(config, hardware, constants)
        assert len(plan.prediction.stages) == config.pp
        for stage in plan.prediction.stages:
            parts = stage.activation_parts
            assert sum(parts.values()) == stage.activations
            assert min(parts.values()) >= 0
            assert ("experts" in parts) <= config.use_moe
        assert levers(config, hardware, constants, plan.prediction) == list(plan.levers)


def test_activations_of_the_experts_by_hand():
    """48 layers of 128 experts of 2048 by 768, top-8, on one stage: bytes of a row and of a token."""
    settings = QWEN | {"pp": 1, "force_routing": "balanced", "router_score": "softmax", "z_loss_coeff": 0.0}
    (stage,) = planned(settings | {"nnodes": 1, "expert_backend": "torch"}).prediction.stages
    tokens = 2 * 4096
    rows = tokens * 8
    parts = stage.activation_parts
    # input, weight, two pairs of 8-byte indices, three more where ranks exchange rows
    assert parts["dispatch"] == 48 * rows * (2 * 2048 + 4 + 16 + 24)
    # gate and up, and the result of the activation
    assert parts["experts"] == 48 * rows * (2 * 2 * 768 + 2 * 768)
    # input; scores of all experts in fp32, and choice and weight of eight
    assert parts["router"] == 48 * tokens * (2 * 2048 + 4 * 128 + (8 + 4) * 8)
