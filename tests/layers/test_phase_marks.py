"""Phases of a layer: each begins and ends where it should, in both directions, and the numbers stay the
same.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from moe_exp.layers.experts import SharedExpert
from moe_exp.layers.moe_layer import MoELayer, mark


class Seen:
    """Timers that write down what they are told."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def start(self, phase: str) -> None:
        self.phases.append(f"+{phase}")

    def stop(self, phase: str) -> None:
        self.phases.append(f"-{phase}")


def layer_of(backend: str, dispatcher: str) -> MoELayer:
    # grouped_mm wants widths of a multiple of 16 bytes.
    return tiny_layer(backend=backend, alltoall=dispatcher == "alltoall", latent=4, dtype=torch.float32)


EXPERTS = ["+experts", "-experts"]
EXCHANGE = ["+all_to_all", "-all_to_all"]


@pytest.mark.parametrize(
    ("backend", "dispatcher", "phases"),
    [
        ("loop", "local", EXPERTS),  # one function
        ("torch", "local", [*EXCHANGE, *EXPERTS, *EXCHANGE]),
        ("loop", "alltoall", [*EXCHANGE, *EXPERTS, *EXCHANGE]),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_phases_in_both_directions_and_the_same_numbers(backend, dispatcher, phases, recompute) -> None:
    results, seen = [], Seen()
    for timers in (None, seen):
        layer, x_TD = layer_of(backend, dispatcher), random(11, HIDDEN, seed=9).float().requires_grad_()
        layer.timers = timers
        y_TD, _ = checkpoint(layer, x_TD, use_reentrant=True) if recompute else layer(x_TD)
        forward = list(seen.phases)
        y_TD.square().sum().backward()
        results.append([y_TD, x_TD.grad, *(parameter.grad for parameter in layer.parameters())])
    assert forward == phases
    assert seen.phases == phases * (3 if recompute else 2)  # recomputed before what backward does
    for without, with_timers in zip(*results, strict=True):
        assert torch.equal(without, with_timers)


def test_a_shared_expert_has_the_same_gradients_with_and_without_timers() -> None:
    """The order in which backward adds the gradients of experts and shared expert does not depend on them."""
    found = []
    for timers in (None, Seen()):
        torch.manual_seed(1)
        shared = SharedExpert(hidden_size=HIDDEN, ffn_size=12, gate=True)
        layer = tiny_layer(dtype=torch.float32, shared=shared)
        layer.timers, x_TD = timers, random(64, HIDDEN, seed=9).float().requires_grad_()
        layer(x_TD)[0].square().sum().backward()
        found.append(x_TD.grad)
    assert torch.equal(*found)


def test_evaluation_is_no_phase() -> None:
    layer, timers = layer_of("loop", "local"), Seen()
    layer.timers = timers
    layer.eval()(random(5, HIDDEN, seed=1).float())
    assert timers.phases == []


def test_a_mark_between_two_phases() -> None:
    timers, x = Seen(), torch.ones(3, requires_grad=True)
    y = mark(x * 2, timers, ends="a", begins="b")
    assert timers.phases == ["-a", "+b"]
    y.sum().backward()
    assert timers.phases[2:] == ["-b", "+a"]
    assert x.grad.tolist() == [2, 2, 2]
