"""CUDA graphs of micro-batches, proved without a GPU: a stand-in for the graph runs the region again on the
static inputs. What a capture would break shows: losses, counts, addresses, and waits of the host.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.checkpoint.legs import Step, _step, start_job, write_data
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.state import Progress
from moe_exp.engine import runtime
from moe_exp.training import loop
from moe_exp.training.interval import Interval
from moe_exp.training.microbatch import build_graphs


class StandIn:
    """Runs the region at each replay, and records which tensors from outside it uses."""

    made: ClassVar[list["StandIn"]] = []

    def __init__(self) -> None:
        self.addresses: list[list[int]] = []
        StandIn.made.append(self)

    def capture(self, region: Callable[[], Tensor]) -> Tensor:
        self.region, self.result = region, torch.full((2,), torch.nan)
        return self.result

    def replay(self) -> None:
        with Outside() as outside:
            result = self.region()
        self.addresses.append(outside.found)
        self.result.copy_(result)


class Outside(TorchDispatchMode):
    """Finds the addresses of tensors that are used inside and have not been made there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []
        self._inside: set[int] = set()
        self._kept: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        for x in given:
            address = x.untyped_storage().data_ptr()
            if address not in self._inside and address not in self.found:
                self.found.append(address)
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() not in self.found:
                self._inside.add(x.untyped_storage().data_ptr())
                self._kept.append(x)
        return result


def trained(settings: dict[str, Any], port: int, num_steps: int, with_graphs: bool) -> list[Step]:
    job = start_job(settings, port)
    if with_graphs:
        job = replace(job, graphs=build_graphs(job.trained.model, graph=StandIn))
    interval, progress, steps = Interval(job.config, job.runtime, job.trained.model), Progress(), []
    for _ in range(num_steps):
        grad_norm = loop.train_step(job, progress, interval, count_zeros=False).done.grad_norm
        steps.append(_step(job, progress, interval, grad_norm))
    for one in StandIn.made:
        assert one.addresses and all(found == one.addresses[0] for found in one.addresses)
    assert bool(StandIn.made) == with_graphs
    StandIn.made.clear()
    runtime.stop()
    return steps


def on_rank(jobs):
    return in_turn(trained, jobs)


MODELS = {
    "dense": {"use_moe": False},
    "moe": {"moe_type": "moe", "expert_backend": "triton"},
    "dmoe": {"moe_type": "dmoe", "expert_backend": "triton"},
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_twenty_steps_with_graphs_are_those_without(num_ranks, tmp_path):
    sizes = {"gpus_per_node": num_ranks, "overlap": "false", "cross_entropy": "triton"}
    data = sizes | {"train_data": str(write_data(tmp_path))}
    jobs = [
        (data | model | {"run_dir": str(tmp_path / "run")}, free_port(), 20, with_graphs)
        for model in MODELS.values()
        for with_graphs in (False, True)
    ]
    for found in run_on_ranks(num_ranks, on_rank, jobs, join=False, timeout=300):
        for eager, graphed in zip(found[::2], found[1::2], strict=True):
            assert graphed == eager
