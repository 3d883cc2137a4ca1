"""Experts whose width is spread over ranks with the same tokens, against one rank. As part of a model:
tests/test_mesh.py.
"""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from helpers.layers.tiny_moe import EXPERTS, FFN, HIDDEN, MODES, pushed_tokens, random, tiny_layer
from helpers.ranks import run_on_ranks
from helpers.relative_error import assert_equal_to
from moe_exp.layers.experts import Experts
from moe_exp.layers.mesh import TensorParallelDispatcher, expert_width_part
from moe_exp.layers.moe_layer import MoELayer

TOKENS = [[0, 1]] * 5 + [[3, 0]] * 3 + [[2, 1], [0, 3]]
CASES = MODES | {"not gated": {"activation": "squared_relu"}}


def run(layer: MoELayer) -> dict[str, torch.Tensor]:
    x_TD = pushed_tokens(TOKENS).requires_grad_()
    y_TD, loss = layer(x_TD)
    ((y_TD * random(len(TOKENS), HIDDEN, seed=9)).sum() + loss).backward()
    grads = {name: weight.grad for name, weight in layer.experts.named_parameters()}
    grads |= {"router": layer.router.weight.grad, "x": x_TD.grad}
    return {"y": y_TD.detach(), "loss": loss.detach(), **grads}


def run_on_rank(ranks: int) -> dict[str, tuple[dict, dict]]:
    """What this rank found, and its part of what one rank alone finds."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))["tp"]
    found = {}
    for name, settings in CASES.items():
        whole, part = (tiny_layer(aux_loss_coeff=0.3, z_loss_coeff=0.2, **settings) for _ in range(2))
        halves = {"weight1": 2 if whole.experts.gated else 1, "weight2": 1}
        sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "ffn_size": FFN // ranks}
        activation = settings.get("activation", "swiglu")
        part.experts = Experts(**sizes, activation=activation, backend="loop", dtype=torch.float64)
        part.dispatcher = TensorParallelDispatcher(EXPERTS, tp_mesh=mesh)
        expected = run(whole)
        for axis, (weight, num_halves) in enumerate(halves.items(), 1):
            cut = functools.partial(expert_width_part, axis=axis, num_halves=num_halves, tp_mesh=mesh)
            part.experts.get_parameter(weight).data.copy_(cut(whole.experts.get_parameter(weight)))
            expected[weight] = cut(expected[weight])
        found[name] = run(part), expected
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layer_on_ranks_equals_one_rank(ranks):
    for rank in run_on_ranks(ranks, run_on_rank, ranks):
        assert rank.keys() == CASES.keys()
        for found, expected in rank.values():
            assert_equal_to(1e-12, found, expected)


def cut_into_three() -> None:
    expert_width_part(torch.zeros(2, 8, 4), axis=1, num_halves=2, tp_mesh=init_device_mesh("cpu", (3,)))


def take_two_dimensions() -> None:
    TensorParallelDispatcher(4, tp_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp")))


@pytest.mark.parametrize(
    ("function", "ranks", "text"),
    [
        (cut_into_three, 3, "ffn_size=4: .* tensor parallel ranks, 3. Fix:"),
        (take_two_dimensions, 2, "one dimension, not 2"),
    ],
)
def test_what_does_not_fit(function, ranks, text):
    with pytest.raises(RuntimeError, match=text):
        run_on_ranks(ranks, function)
