"""Phases of a layer: each begins and ends where it should, in both directions, and the numbers stay the
same.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.layers.tiny_moe import HIDDEN, random, tiny_layer
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.phases import mark


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


PHASES = {
    "one function": ["+experts", "-experts"],
    "rows": ["+all_to_all", "-all_to_all", "+experts", "-experts", "+all_to_all", "-all_to_all"],
}


@pytest.mark.parametrize(
    ("backend", "dispatcher", "kind"),
    [("loop", "local", "one function"), ("torch", "local", "rows"), ("loop", "alltoall", "rows")],
)
@pytest.mark.parametrize("use_reentrant", [None, True])
def test_phases_in_both_directions_and_the_same_numbers(
    backend: str, dispatcher: str, kind: str, use_reentrant: bool | None
) -> None:
    results = []
    for timers in (None, Seen()):
        layer, x_TD = layer_of(backend, dispatcher), random(11, HIDDEN, seed=9).float().requires_grad_()
        layer.timers = timers
        y_TD, _ = (
            layer(x_TD) if use_reentrant is None else checkpoint(layer, x_TD, use_reentrant=use_reentrant)
        )
        if timers is not None:
            assert timers.phases == PHASES[kind]
            timers.phases.clear()
        y_TD.square().sum().backward()
        if timers is not None:
            # A recomputed forward pass comes before what backward does.
            assert timers.phases == PHASES[kind] * (1 if use_reentrant is None else 2)
        results.append([y_TD, x_TD.grad, *(parameter.grad for parameter in layer.parameters())])
    for without, with_timers in zip(*results, strict=True):
        assert torch.equal(without, with_timers)


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
