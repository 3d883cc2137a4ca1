"""One MoE layer (router, dispatch, experts, combine; SwiGLU), forward and backward on a CPU, against other
people's layers and a floor.

    python bench/bench_layer.py                                  # all shapes and dtypes: 20 min on 2 cores
    python bench/bench_layer.py --shape 2 --dtype fp32 --pairs 20 --peers floor olmoe-grouped_mm

Needs `pip install transformers` for its OLMoE block (Mixtral's experts are the same code). megatron-core's
MoELayer runs with SequentialMLP. All have the same weights and input, run in one process, turn by turn; every
gradient is None before each turn. Before anything is timed the outputs and input gradients are compared.

The floor is the matrix products alone: for each expert the two of the forward and the four of the backward at
the average group size, with the expert's own weights, into fresh tensors where a layer needs fresh tensors.
Nothing else is in it, no activation either. `linears` are the same products as linear layers under autograd,
one per expert and projection. `plain` is ours without the functions of layers/native.cpp.

glibc keeps freed memory for all of them, as the launcher has it for ranks on a CPU.

Memory (glibc): the growth of the resident set in the second forward and backward, gradients included, in a
process of its own; and the bytes that autograd keeps between forward and backward besides the parameters,
every storage counted once.
"""

import argparse
import ctypes
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from moe_exp.host.devices import KEEP_FREED_MEMORY
from moe_exp.layers import native
from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig


class Shape(NamedTuple):
    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int


SHAPES = {
    "1": Shape(512, 1792, 64, 1, 4096),
    "2": Shape(512, 256, 64, 8, 2048),
    "3": Shape(1024, 2816, 8, 2, 1024),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = ["floor", "linears", "plain", "olmoe-eager", "olmoe-batched_mm", "olmoe-grouped_mm", "megatron"]
# In bf16 the peers round the router's logits, ours does not: a few tokens near a tie go to another expert.
TOLERANCE = {"fp32": 1e-5, "bf16": 0.1}
Weights = dict[str, Tensor]


def draw_weights(shape: Shape, dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(1)
    sizes = {
        "router": (shape.experts, shape.hidden),
        "weight1": (shape.experts, 2 * shape.ffn, shape.hidden),
        "weight2": (shape.experts, shape.hidden, shape.ffn),
    }
    return {
        name: torch.empty(size).normal_(std=size[-1] ** -0.5, generator=generator).to(dtype)
        for name, size in sizes.items()
    }


# What is compared: each function takes shape, weights and dtype, and returns a module that maps [T, D] to [T,
# D].


class Ours(nn.Module):
    def __init__(self, shape: Shape, weights: Weights, dtype: torch.dtype):
        super().__init__()
        router = Router(RouterConfig(shape.hidden, shape.experts, shape.topk), dtype=dtype)
        experts = Experts(
            num_local_experts=shape.experts,
            hidden_size=shape.hidden,
            ffn_size=shape.ffn,
            activation="swiglu",
            backend="loop",
            dtype=dtype,
        )
        router.weight.data, experts.weight1.data, experts.weight2.data = (
            weights["router"],
            weights["weight1"],
            weights["weight2"],
        )
        self.layer = MoELayer(
            router=router, dispatcher=LocalDispatcher(shape.experts), experts=experts, settings=MoESettings()
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.layer(x_TD)[0]


class Olmoe(nn.Module):
    def __init__(self, shape: Shape, weights: Weights, dtype: torch.dtype, implementation: str):
        super().__init__()
        from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

        config = OlmoeConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_experts=shape.experts,
            num_experts_per_tok=shape.topk,
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.block = OlmoeSparseMoeBlock(config)
        self.block.gate.weight = nn.Parameter(weights["router"])
        self.block.experts.gate_up_proj, self.block.experts.down_proj = (
            nn.Parameter(weights["weight1"]),
            nn.Parameter(weights["weight2"]),
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.block(x_TD.unsqueeze(0)).squeeze(0)


class Megatron(nn.Module):
    def __init__(self, shape: Shape, weights: Weights, dtype: torch.dtype):
        super().__init__()
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig

        start_megatron()
        config = TransformerConfig(
            num_layers=1, hidden_size=shape.hidden, num_attention_heads=8, num_moe_experts=shape.experts,
            moe_router_topk=shape.topk, moe_ffn_hidden_size=shape.ffn, gated_linear_unit=True,
            activation_func=nn.functional.silu, add_bias_linear=False, moe_router_pre_softmax=True,
            moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", params_dtype=dtype,
            bf16=dtype == torch.bfloat16, use_cpu_initialization=True, perform_initialization=False,
        )  # fmt: skip
        spec = get_moe_module_spec(use_te=False, num_experts=shape.experts, moe_grouped_gemm=False)
        # a ModuleSpec, from Megatron 0.18 on a partial function
        is_partial = isinstance(spec, functools.partial)
        self.block = spec(config=config) if is_partial else build_module(spec, config=config)
        self.block.set_layer_number(1)
        self.block.router.weight.data = weights["router"]
        for expert, weight1, weight2 in zip(
            self.block.experts.local_experts, weights["weight1"], weights["weight2"], strict=True
        ):
            expert.linear_fc1.weight.data, expert.linear_fc2.weight.data = weight1, weight2

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.block(x_TD.unsqueeze(1))[0].squeeze(1)


def _ints(x: Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Tensor | list[int] | None:
    return x.tolist() if as_numpy and x is not None else x


def start_megatron() -> None:
    """A job of one rank, and two mends for megatron-core 0.16 where Transformer Engine and CUDA are
    missing.
    """
    from moe_exp.engine import runtime

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    runtime.quiet_third_parties()
    moe_utils.te_general_gemm = None
    # On a GPU it copies the counts to the host as numpy; on a CPU it leaves tensors, which the all-to-all
    # does not take.
    token_dispatcher.maybe_move_tensor_to_cpu = _ints
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)


class Floor:
    """The matrix products of `shape` at the average group size; `__call__` is one forward and backward."""

    def __init__(self, shape: Shape, weights: Weights, dtype: torch.dtype):
        self.weights, self.rows = weights, shape.tokens * shape.topk // shape.experts
        num_rows = self.rows * shape.experts
        self.x_RD, self.dy_RD = (
            torch.randn(num_rows, shape.hidden).to(dtype),
            torch.randn(num_rows, shape.hidden).to(dtype),
        )
        self.active = torch.randn(self.rows, shape.ffn).to(dtype)

    def __call__(self) -> None:
        weight1_LFD, weight2_LDF, rows = self.weights["weight1"], self.weights["weight2"], self.rows
        hidden_RF, y_RD = (
            self.x_RD.new_empty(self.x_RD.size(0), weight1_LFD.size(1)),
            torch.empty_like(self.x_RD),
        )
        forward = (
            self.x_RD.split(rows),
            hidden_RF.split(rows),
            y_RD.split(rows),
            weight1_LFD.unbind(0),
            weight2_LDF.unbind(0),
        )
        for x, hidden, y, weight1, weight2 in zip(*forward, strict=True):
            torch.mm(x, weight1.t(), out=hidden)
            torch.mm(self.active, weight2.t(), out=y)
        dx_RD, dweight1_LFD, dweight2_LDF = (
            torch.empty_like(self.x_RD),
            torch.empty_like(weight1_LFD),
            torch.empty_like(weight2_LDF),
        )
        backward = (self.dy_RD.split(rows), dx_RD.split(rows), dweight1_LFD.unbind(0), dweight2_LDF.unbind(0))
        for x, hidden, _, weight1, weight2, dy, dx, dweight1, dweight2 in zip(
            *forward, *backward, strict=True
        ):
            torch.mm(dy, weight2)
            torch.mm(dy.t(), self.active, out=dweight2)
            torch.mm(hidden.t(), x, out=dweight1)
            torch.mm(hidden, weight1, out=dx)

    def clear(self) -> None:
        """Keeps nothing."""


class Linears:
    """The products of `Floor` as one writes them in torch: a linear layer per expert and projection, and
    autograd. No activation.
    """

    def __init__(self, shape: Shape, weights: Weights, dtype: torch.dtype):
        rows = shape.tokens * shape.topk // shape.experts
        sizes = [(rows, shape.hidden)] * shape.experts + [(rows, shape.ffn)] * shape.experts
        self.inputs = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
        self.weights = [
            w.detach().clone().requires_grad_()
            for name in ("weight1", "weight2")
            for w in weights[name].unbind(0)
        ]
        self.gradients = [
            torch.randn(x.size(0), w.size(0)).to(dtype)
            for x, w in zip(self.inputs, self.weights, strict=True)
        ]

    def __call__(self) -> None:
        outputs = [nn.functional.linear(x, w) for x, w in zip(self.inputs, self.weights, strict=True)]
        torch.autograd.backward(outputs, self.gradients)

    def clear(self) -> None:
        for leaf in (*self.inputs, *self.weights):
            leaf.grad = None


def build(name: str, shape: Shape, weights: Weights, dtype: torch.dtype) -> nn.Module:
    if name in ("ours", "plain"):
        return Ours(shape, weights, dtype)
    return (
        Megatron(shape, weights, dtype)
        if name == "megatron"
        else Olmoe(shape, weights, dtype, name.partition("-")[2])
    )


def reason_to_skip(name: str, shape: Shape, dtype: torch.dtype) -> str:
    """batched_mm copies the weights of an expert for every slot."""
    copied = shape.tokens * shape.topk * 3 * shape.ffn * shape.hidden * dtype.itemsize
    if name == "olmoe-batched_mm" and 3 * copied > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
        return f"copies {copied / 2**30:.0f} GiB of weights"
    return ""


# no layers: nothing of theirs is compared or measured but the time
PRODUCTS = {"floor": Floor, "linears": Linears}

# Time


class Turn:
    """A layer's forward and backward on the same input every time."""

    def __init__(self, module: nn.Module, shape: Shape, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(2)
        self.module = module
        self.x_TD = torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype).requires_grad_()
        self.dy_TD = torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype)

    def __call__(self) -> Tensor:
        y_TD = self.module(self.x_TD)
        y_TD.backward(self.dy_TD)
        return y_TD.detach()

    def clear(self) -> None:
        self.x_TD.grad = None
        self.module.zero_grad(set_to_none=True)

    def results(self) -> list[Tensor]:
        results = [self(), self.x_TD.grad]
        self.clear()
        return results


class PlainTurn(Turn):
    """Our layer without its C++, as where no compiler is found."""

    def __call__(self) -> Tensor:
        with patch.object(native, "library", return_value=(None, "")):
            return super().__call__()


TURNS = {"plain": PlainTurn}


def compare(shape_name: str, dtype_name: str, peers: list[str], num_pairs: int) -> list[str]:
    """Rows of the table of times."""
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    weights = draw_weights(shape, dtype)
    layers = ["ours", *(name for name in peers if name not in PRODUCTS)]
    turns = {name: TURNS.get(name, Turn)(build(name, shape, weights, dtype), shape, dtype) for name in layers}
    check_results(turns, TOLERANCE[dtype_name])
    products = {name: PRODUCTS[name](shape, weights, dtype) for name in peers if name in PRODUCTS}
    calls: dict[str, Any] = {**turns, **products}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for pair in range(num_pairs + 2):
        for name in sorted(calls, reverse=pair % 2 == 1):
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
            for call in calls.values():
                call.clear()
    label = f"{shape_name}: {', '.join(map(str, shape))} | {dtype_name}"
    return [time_row(label, name, times[name][2:], times["ours"][2:]) for name in peers]


def time_row(label: str, name: str, theirs: list[float], ours: list[float]) -> str:
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    milliseconds = [f"{statistics.median(times) * 1e3:.1f}" for times in (theirs, ours)]
    return f"| {label} | {name} | {' | '.join(milliseconds)} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def check_results(turns: dict[str, Turn], tolerance: float) -> None:
    expected = turns["ours"].results()
    for name, turn in turns.items():
        for one, other in zip(turn.results(), expected, strict=True):
            error = float((one.double() - other.double()).norm() / other.double().norm())
            if error > tolerance:
                raise SystemExit(f"{name}: result or gradient differs from ours by {error:.1e}")


# Memory


def memory_of(name: str, shape_name: str, dtype_name: str) -> dict[str, float]:
    """MiB that one forward and backward adds to this process at its highest, and MiB that autograd keeps in
    between.
    """
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    weights = draw_weights(shape, dtype)
    module = build(name, shape, weights, dtype)
    turn, kept = TURNS.get(name, Turn)(module, shape, dtype), {}
    turn()  # libraries, threads and compiled kernels are there afterwards, as in every later step
    turn.clear()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system, or it would hide growth
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the highest back to now
    turn()
    peak = resident_bytes("VmHWM")
    turn.clear()

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y_TD = turn.module(turn.x_TD)
    del y_TD
    return {"peak": (peak - before) / 2**20, "saved": sum(kept.values()) / 2**20}


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_rows(shape_name: str, dtype_name: str, peers: list[str], threads: int) -> list[str]:
    """Rows of the table of memory, each measured in a process of its own."""
    rows = []
    for name in ["ours", *(peer for peer in peers if peer not in PRODUCTS)]:
        command = [
            sys.executable,
            __file__,
            "--memory-of",
            name,
            "--shape",
            shape_name,
            "--dtype",
            dtype_name,
            "--threads",
            str(threads),
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        memory = json.loads(output.splitlines()[-1])
        rows.append(
            f"| {shape_name} | {dtype_name} | {name} | {memory['peak']:.0f} | {memory['saved']:.0f} |"
        )
    return rows


# The command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=SHAPES,
        default=list(SHAPES),
        help="1: D 512 F 1792 E 64 K 1 T 4096; default: all",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="default: all")
    parser.add_argument("--pairs", type=int, default=12, help="turns that count (default 12)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--no-memory", action="store_true", help="leave the table of memory out")
    parser.add_argument("--memory-of", choices=["ours", *PEERS], help=argparse.SUPPRESS)
    return parser.parse_args()


def machine(threads: int) -> str:
    names = ["torch", "transformers", "megatron-core"]
    return (
        f"{os.cpu_count()} cores {platform.machine()}, {threads} threads, Python"
        f" {platform.python_version()}, " + ", ".join(f"{name} {installed(name)}" for name in names)
    )


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def main() -> None:
    arguments = parse_arguments()
    if not KEEP_FREED_MEMORY.items() <= os.environ.items():  # glibc reads them at the start of a process
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | KEEP_FREED_MEMORY)
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(json.dumps(memory_of(arguments.memory_of, arguments.shape[0], arguments.dtype[0])))
        return
    times, memory, skipped = [], [], []
    for shape in arguments.shape:
        for dtype in arguments.dtype:
            reasons = {name: reason_to_skip(name, SHAPES[shape], DTYPES[dtype]) for name in arguments.peers}
            skipped += [
                f"Left out: {name} at shape {shape} in {dtype}, {reason}."
                for name, reason in reasons.items()
                if reason
            ]
            peers = [name for name, reason in reasons.items() if not reason]
            times += compare(shape, dtype, peers, arguments.pairs)
            print(*times[-len(peers) :], sep="\n", file=sys.stderr, flush=True)
            memory += [] if arguments.no_memory else memory_rows(shape, dtype, peers, arguments.threads)
    print(
        f"{machine(arguments.threads)}. Medians of {arguments.pairs} turns; a ratio over 1 means that ours is"
        " faster.\n"
    )
    print(
        "| D, F, E, K, T | dtype | against | theirs, ms | ours, ms | theirs / ours, median | quartiles"
        " |\n|---|---|---|---|---|---|---|"
    )
    print(*times, sep="\n")
    if memory:
        print(
            "\n| shape | dtype | layer | peak growth, MiB | saved for backward, MiB |\n|---|---|---|---|---|",
            *memory,
            sep="\n",
        )
    print(*skipped, sep="\n")


if __name__ == "__main__":
    main()
