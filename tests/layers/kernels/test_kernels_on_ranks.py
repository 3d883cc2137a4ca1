"""The kernels that move rows where these travel between ranks; interpreted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from helpers.ranks import run_on_ranks
from moe_exp.layers.kernels.choice import interpreted_kernels
from moe_exp.layers.kernels.launch import INTERPRETED, missing

EXCHANGED = ({}, {"capacity_factor": 1.5, "pad_to_capacity": True}, {"token_rounding": 4})


def outputs_of_rank() -> list[torch.Tensor]:
    group = dist.group.WORLD
    x_TD = random(24, HIDDEN, seed=4).chunk(group.size())[group.rank()]
    with interpreted_kernels():
        layers = [tiny_layer(ep_group=group, microbatch_group=group, **settings) for settings in EXCHANGED]
        return [layer(x_TD)[0].detach() for layer in layers]


@pytest.mark.skipif(not INTERPRETED or bool(missing()), reason="Triton does not interpret here")
def test_rows_of_the_all_to_all_path_are_moved_by_kernels():
    by_rank = run_on_ranks(2, outputs_of_rank)
    for settings, parts in zip(EXCHANGED, zip(*by_rank, strict=True), strict=True):
        whole = tiny_layer(**settings)(random(24, HIDDEN, seed=4))[0]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0)
