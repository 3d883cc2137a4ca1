"""Bytes of optimizer state by hand."""

from typing import Any

import pytest

from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.memory import StageMemory, memory_of
from moe_exp.planner.costs.params import (
    checkpoint_bytes,
    count_parameters,
    embedding_moment_bytes,
    optimizer_state_bytes,
    rank_parameters,
    weight_and_optimizer_bytes,
)
from moe_exp.planner.hardware import Hardware, load_hardware
from moe_exp.planner.prediction import load_constants


def planned_memory(config: Config, hardware: Hardware) -> list[StageMemory]:
    return memory_of(PlannedJob.of(config), hardware, load_constants().memory)


def settings(**values: Any) -> Config:
    return load_config({**SMALL, "gpus_per_node": 2, "dtype": "bf16"} | values, {})


@pytest.mark.parametrize(
    ("values", "moments", "saved"),
    [
        ({}, 8, 8),
        ({"optimizer_state_dtype": "bf16"}, 4, 8),
        ({"optimizer": "adam8bit"}, 2.03125, 8),
        ({"optimizer": "sgd"}, 4, 4),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, 0, 0),
    ],
)
def test_bytes_per_parameter(values, moments, saved):
    half, full = settings(**values), settings(**values, dtype="fp32")
    assert (optimizer_state_bytes(half), optimizer_state_bytes(full)) == (4 + moments, moments)
    num_parameters = count_parameters(half).total
    assert checkpoint_bytes(half) == (2 + 4 + saved) * num_parameters
    assert checkpoint_bytes(full) == (4 + 4 + saved) * num_parameters
    rank = rank_parameters(half)
    assert weight_and_optimizer_bytes(half, rank) == (2 + 4 + (4 + moments) / 2) * rank.total
    assert weight_and_optimizer_bytes(full, rank) == (4 + 4 + moments / 2) * rank.total
    alone = settings(**values, distributed_optimizer=False)
    assert weight_and_optimizer_bytes(alone, rank) == (2 + 4 + 4 + moments) * rank.total


def test_remainders_are_half_of_main_weights():
    plain, remainder = settings(main_params="fp32"), settings(main_params="remainder")
    assert optimizer_state_bytes(remainder) == optimizer_state_bytes(plain) - 2 == 10
    assert checkpoint_bytes(remainder) == checkpoint_bytes(plain)


def test_offloading_leaves_no_state_on_the_device():
    plain, offloaded = settings(optimizer="adam"), settings(optimizer="adam", offload_optimizer=True)
    rank = rank_parameters(plain)
    assert weight_and_optimizer_bytes(offloaded, rank) == (2 + 4) * rank.total
    assert optimizer_state_bytes(settings(optimizer="adam", offload_optimizer=True, ema_decay=0.9)) == 0
    assert checkpoint_bytes(offloaded) == checkpoint_bytes(plain)
    gpu, cpu = load_hardware("H100-80GB"), load_hardware("cpu")
    for device, num_bytes in ((gpu, 10 / 2), (cpu, 0)):
        (before,), (after,) = (planned_memory(one, device) for one in (plain, offloaded))
        assert before.optimizer - after.optimizer == num_bytes * rank.total
        assert (before.weights, before.gradients) == (after.weights, after.gradients)


def test_the_average_of_the_weights_adds_four():
    plain, averaged = settings(), settings(ema_decay=0.999)
    assert optimizer_state_bytes(averaged) == optimizer_state_bytes(plain) + 4
    rank, num_parameters = rank_parameters(plain), count_parameters(plain).total
    # divided like the moments
    added = weight_and_optimizer_bytes(averaged, rank) - weight_and_optimizer_bytes(plain, rank)
    assert added == 4 / 2 * rank.total
    assert checkpoint_bytes(averaged) == checkpoint_bytes(plain) + 4 * num_parameters


def test_muon_leaves_the_embedding_to_adam():
    config = settings(optimizer="muon", distributed_optimizer=False)
    count = count_parameters(config)
    assert (optimizer_state_bytes(config), embedding_moment_bytes(config)) == (8, 4)
    assert embedding_moment_bytes(settings()) == 0
    assert checkpoint_bytes(config) == 10 * count.total + 4 * count.embedding
