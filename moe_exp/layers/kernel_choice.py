"""Which code routes and moves rows: Triton kernels or plain torch.

`RouterConfig.use_kernels` says it. The router passes it on in its RoutingDecision to the drops and the
dispatcher, and these pass it on in the RowOrder, which both directions and their gradients follow.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_exp.layers.kernels.launch import missing

ROUTING_KERNELS = ("auto", "off")


@dataclass(frozen=True)
class KernelFailure:
    """A part of the model whose kernels are not used because they failed their self-test."""

    part: str  # `experts`, `routing` or `cross entropy`
    problems: list[str]  # one line per kernel, with the first rank and host that found it
    backend: str  # what runs instead


def failure_of(part: str, failures: Sequence[KernelFailure]) -> str:
    """Why the kernels of `part` are not used, in words; empty if they did not fail."""
    problems = next((failure.problems for failure in failures if failure.part == part), [])
    return f"the self-test has failed: {and_more(problems)}" if problems else ""


def and_more(problems: Sequence[str]) -> str:
    """The first problem, and the number of the others."""
    return problems[0] + (f"; and {len(problems) - 1} more" if len(problems) > 1 else "")


def choose_routing(
    name: str, *, device_type: str, router_problem: str = "", failure: str = ""
) -> tuple[str, str]:
    """Implementation of router, drops and row orders, and the reason in words.

    Args:
        name: `auto`: kernels on a GPU that can run them; `off`: plain torch everywhere.
        router_problem: why the router itself takes no kernel, see `router.kernel_problem`.
        failure: why the kernels must not run, see `failure_of`.
    """
    if name not in ROUTING_KERNELS:
        raise ValueError(f"routing_kernels={name}: is not a choice. Fix: use {' or '.join(ROUTING_KERNELS)}.")
    if name == "off":
        return "torch", "asked for by ROUTING_KERNELS"
    if device_type == "cpu":
        return "torch", "the kernels are for GPUs"
    if rule := failure or missing():
        return "torch", f"not triton: {rule}"
    if router_problem:
        return (
            "triton",
            f"Triton kernels for row order and drops; the router itself in torch: {router_problem}",
        )
    return "triton", "Triton kernels for the router, row order and drops"


def takes_kernels(x: Tensor, use_kernels: bool | None) -> bool:
    """Whether routing and row order of `x` use kernels; `use_kernels`: see RouterConfig."""
    if use_kernels is None:
        return x.is_cuda and not _missing()
    return use_kernels


_missing = functools.cache(missing)
