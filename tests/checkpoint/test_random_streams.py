"""Random streams of dropout: which ranks share them, and that a checkpoint has all of them."""

import os
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import MODEL
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.state import rng_state, set_rng_state
from moe_exp.config import load_config
from moe_exp.engine import runtime

from megatron.core import tensor_parallel


def streams(settings: dict[str, Any], port: int) -> tuple[list[float], list[float], bool]:
    """Numbers of this rank's default stream and of its tensor parallel one, and whether both continue."""

    def draw() -> tuple[list[float], list[float]]:
        plain = torch.rand(3).tolist()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return plain, torch.rand(3).tolist()

    config = load_config(MODEL | settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    draw()
    (state,) = rng_state(rank).data
    first, second = draw(), draw()
    set_rng_state(state)
    return *first, (draw(), draw()) == (first, second)


@pytest.mark.parametrize(
    ("layout", "same_plain", "same_parallel"),
    [({}, True, True), ({"pp": 2}, False, False), ({"tp": 2}, True, False)],
)
def test_streams_differ_where_tensors_do_and_continue(layout, same_plain, same_parallel):
    one, other = run_on_ranks(2, streams, {"gpus_per_node": 2} | layout, free_port(), join=False)
    assert (one[0] == other[0], one[1] == other[1]) == (same_plain, same_parallel)
    assert one[0] != one[1]
    assert one[2] and other[2], "not all streams are in the state"
