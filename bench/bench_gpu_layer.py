"""One layer of SwiGLU experts, forward and backward: EXPERT_BACKEND=triton against other people's layers on one GPU.

    python bench/bench_gpu_layer.py --json layer.json                 # all shapes, both routings: under 8 min on one GPU
    python bench/bench_gpu_layer.py --shape B D --routing balanced --peers liger sonic-moe
    python bench/bench_gpu_layer.py --shape D --peers --profile       # ours alone, then where its time goes
    python bench/bench_gpu_layer.py --floors                          # the least time and memory of every shape; no GPU
    python bench/bench_gpu_layer.py                                   # on a CPU: tiny shapes, plain torch in place of the kernels; 10 s

All get the same tokens, weights, routing and output gradient. Before anything is timed, outputs and all gradients (tokens, weights,
router weights) are compared with float64 by relative norm; who is further off than the dtype explains is not timed. Then they take
turns in random order, on input sets that have left the L2 when they come again; medians. The forward is one of training, which keeps
what the backward needs. Routing itself is in no time, the order of rows by expert is: the layers get expert numbers and weights.

Who is not installed or cannot run here is left out by name, with the reason. Times are CUDA events, on a CPU the wall clock. Columns:
TFLOP/s of the three projections; share of what a large matrix product reaches in the same process; bytes allocated at the peak of
forward and backward, and kept between them; `theirs / ours` over 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_clock import TooSlow, at_most, elapsed_ms, matmul_ceiling, num_input_sets, peak_bytes, poison, saved_bytes
from gpu_floors import MIB, SHAPES, TINY, Shape, floor_of, floors_table, forward_flops, minimal_kept_bytes
from gpu_inputs import ROUTINGS, TOLERANCE, Inputs, Weights, draw_inputs, draw_weights, errors, reference
from gpu_peers import OURS, PROVIDERS, Layer, parameters
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = (
    "torch", "triton", "transformers", "liger-kernel", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "scattermoe", "grouped-gemm",
    "nv-grouped-gemm", "transformer-engine", "megatron-core",
)  # fmt: skip
ROUND_SECONDS = 6.0  # of turns for one shape and routing, after MIN_ROUNDS
MIN_ROUNDS, WARMUP = 5, 2
Row = dict[str, Any]


class Turn:
    """A provider on the input sets of one shape and routing."""

    def __init__(self, name: str, layer: Layer, weights: Weights, sets: list[Inputs]):
        self.name, self.layer, self.weights, self.sets = name, layer, weights, sets
        self.forward_ms: list[float] = []
        self.both_ms: list[float] = []

    def forward(self, inputs: Inputs) -> Tensor:
        return self.layer(inputs.x_TD, inputs.routing)

    def both(self, inputs: Inputs) -> list[Tensor]:
        """Output and the gradients of tokens, weights and router weights."""
        y_TD = self.forward(inputs)
        leaves = [inputs.x_TD, *parameters(self.weights), inputs.routing.weights_TK]
        return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, inputs.dy_TD)]

    def take(self, device: torch.device) -> None:
        self.forward_ms.append(elapsed_ms([partial(self.forward, inputs) for inputs in self.sets], device))
        self.both_ms.append(elapsed_ms([partial(self.both, inputs) for inputs in self.sets], device))


class Suite:
    """All shapes and routings on one device, within `budget_seconds`."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.device, self.dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
        self.deadline = time.monotonic() + arguments.budget
        self.rows: list[Row] = []
        self.skipped: dict[str, str] = {}
        self.profiles: list[str] = []
        self.is_wrong = False  # ours; a peer that is gets no time, and that is all
        self.names = [OURS, *(name for name in arguments.peers if name != OURS)]
        for name in list(self.names):
            if reason := PROVIDERS[name].why_not(self.device, self.dtype):
                self.skipped[name] = reason
                self.names.remove(name)
        self.ceiling = matmul_ceiling(self.device, self.dtype)

    def run(self) -> None:
        for shape_name in self.arguments.shape:
            shape = (SHAPES | TINY)[shape_name]
            weights = draw_weights(shape, dtype=self.dtype, device=self.device)
            for routing in self.arguments.routing:
                if time.monotonic() > self.deadline:
                    self.skipped[f"shape {shape_name}, {routing}"] = f"over {self.arguments.budget:.0f} s"
                    continue
                self.compare(shape_name, shape, routing, weights)
                self.save()
            del weights
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def compare(self, shape_name: str, shape: Shape, routing: str, weights: Weights) -> None:
        draw = partial(draw_inputs, shape, routing, dtype=self.dtype, device=self.device)
        sets = [draw(seed=2)]
        sets += [draw(seed=3 + index) for index in range(num_input_sets(sets[0].num_bytes, self.device) - 1)]
        turns, worst = self.checked_turns(f"shape {shape_name}, {routing}", shape, weights, sets)
        start, rounds = time.monotonic(), 0
        while turns and (
            rounds < min(MIN_ROUNDS, self.arguments.rounds) or (rounds < self.arguments.rounds and time.monotonic() - start < ROUND_SECONDS)
        ):
            for turn in random.sample(turns, len(turns)):
                turn.take(self.device)
            rounds += 1
        rows = [self.row(shape_name, shape, routing, turn, worst[turn.name], rounds) for turn in turns]
        ours = next((row for row in rows if row["provider"] == OURS), None)
        for row in rows:
            row["theirs_over_ours"] = None if ours is None else row["both_ms"] / ours["both_ms"]
            print(table_row(row), flush=True)
        self.rows += rows
        if self.arguments.profile:
            self.profiles += [f"\n{shape_name}, {routing}, {turn.name}\n{profile_of(turn, self.device)}" for turn in turns]

    def checked_turns(self, label: str, shape: Shape, weights: Weights, sets: list[Inputs]) -> tuple[list[Turn], dict[str, float]]:
        """The providers that are ready and right, warmed up, with their largest error; the others go to `skipped`."""
        expected, turns, worst = reference(sets[0], weights), [], {}
        for name in self.names:
            try:
                with at_most(min(self.arguments.start_seconds, self.deadline + 60 - time.monotonic())):
                    turn = Turn(name, PROVIDERS[name].build(shape, weights), weights, sets)
                    poison(self.device)
                    found = errors(turn.both(sets[0]), expected)
                    for inputs in sets * WARMUP:
                        turn.both(inputs)
            except (TooSlow, RuntimeError, ValueError, TypeError, AssertionError, ImportError, AttributeError) as error:
                # Another package may fail in its own way; ours may not.
                if name == OURS:
                    raise
                self.skipped[f"{name}, {label}"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            where, worst[name] = max(found.items(), key=lambda item: item[1])
            if worst[name] > TOLERANCE[self.dtype]:
                self.skipped[f"{name}, {label}"] = f"wrong: {where} is {worst[name]:.1e} off, over {TOLERANCE[self.dtype]:.0e}"
                self.is_wrong |= name == OURS
                continue
            turns.append(turn)
        return turns, worst

    def row(self, shape_name: str, shape: Shape, routing: str, turn: Turn, error: float, rounds: int) -> Row:
        forward_ms, both_ms = statistics.median(turn.forward_ms), statistics.median(turn.both_ms)
        saved = saved_bytes(partial(turn.forward, turn.sets[0]), parameters(turn.weights), turn.sets[0].x_TD)
        tflops = forward_flops(shape) / 1e9
        return {
            "shape": shape_name, "routing": routing, "provider": turn.name, "rounds": rounds, "largest_error": error,
            "forward_ms": forward_ms, "both_ms": both_ms,
            "both_range_ms": [min(turn.both_ms), max(turn.both_ms)],
            "forward_tflops": tflops / forward_ms, "both_tflops": 3 * tflops / both_ms,
            "share_of_ceiling": 3 * tflops / both_ms * 1e12 / self.ceiling,
            "peak_bytes": peak_bytes(partial(turn.both, turn.sets[0]), self.device),
            "saved_bytes": saved, "saved_over_minimal": saved / minimal_kept_bytes(shape, self.dtype.itemsize),
            "floor_ms": sum(floor_of(shape)[:2]),
        }  # fmt: skip

    def notes(self) -> list[str]:
        notes = {name: PROVIDERS[name].note() for name in self.names}
        return [f"{name}: {note}" for name, note in notes.items() if note]

    def save(self) -> None:
        if self.arguments.json:
            result = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "machine": machine(self.device),
                "dtype": self.arguments.dtype, "matmul_ceiling_flops": self.ceiling, "rows": self.rows, "skipped": self.skipped,
                "notes": self.notes(),
            }  # fmt: skip
            self.arguments.json.write_text(json.dumps(result, indent=1))


def profile_of(turn: Turn, device: torch.device, *, num_rows: int = 15) -> str:
    """Where the time of forward and backward goes, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=activities) as profiler:
        for inputs in turn.sets:
            turn.both(inputs)
    return str(
        profiler.key_averages().table(
            sort_by="self_device_time_total" if device.type == "cuda" else "self_cpu_time_total", row_limit=num_rows
        )
    )


HEADINGS = [
    "shape", "routing", "layer", "forward, ms", "forward + backward, ms", "TFLOP/s forward", "TFLOP/s both", "of the ceiling", "peak, MiB",
    "saved, MiB", "saved / formula", "theirs / ours", "largest error",
]  # fmt: skip


def table_row(row: Row) -> str:
    ratio = "-" if row["theirs_over_ours"] is None else f"{row['theirs_over_ours']:.2f}"
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}"
    cells = [
        row["shape"], row["routing"], row["provider"], f"{row['forward_ms']:.3f}", f"{row['both_ms']:.3f}", f"{row['forward_tflops']:.3g}",
        f"{row['both_tflops']:.3g}", f"{row['share_of_ceiling']:.0%}", peak, f"{row['saved_bytes'] / MIB:.1f}",
        f"{row['saved_over_minimal']:.2f}", ratio, f"{row['largest_error']:.1e}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def machine(device: torch.device) -> dict[str, Any]:
    """Card, driver and versions."""
    facts: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda, "cores": os.cpu_count()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"card": properties.name, "capability": f"{properties.major}.{properties.minor}", "memory_bytes": properties.total_memory}
        facts["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    else:
        facts["card"] = f"none, {platform.machine()} CPU"
    return facts | {"versions": {name: found for name in PACKAGES if (found := _installed(name))}}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def parse_arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    peers = [name for name in PROVIDERS if name != OURS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # The order is that of importance, should the time not suffice.
    default = ["B", "D", "F", "G", "C", "A", "E"] if on_gpu else list(TINY)
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, *TINY], default=default, help=f"default: {' '.join(default)}")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="default: both")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, metavar="NAME", help=f"of: {'; '.join(peers)}; default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32", help="default: bf16, on a CPU fp32")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="default: cuda where there is one")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each at most (default 20)")
    parser.add_argument("--budget", type=float, default=440, help="seconds after which no other shape is begun (default 440)")
    parser.add_argument("--start-seconds", type=float, default=75, help="for a provider to compile, tune and warm up (default 75)")
    parser.add_argument("--json", type=Path, help="write the results there, after every shape")
    parser.add_argument("--profile", action="store_true", help="also the operators of forward and backward, by torch's profiler")
    parser.add_argument("--floors", action="store_true", help="print the floors of all shapes on an H200, and end")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.floors:
        print(floors_table())
        return
    suite = Suite(arguments)
    facts = machine(suite.device)
    print(f"{facts['card']}, {', '.join(f'{name} {found}' for name, found in facts['versions'].items())}, {arguments.dtype}")
    print(f"A large matrix product: {suite.ceiling / 1e12:.3g} TFLOP/s\n\n| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
    suite.run()
    print(*suite.notes(), *(f"Left out: {name}: {reason}" for name, reason in suite.skipped.items()), *suite.profiles, sep="\n")
    sys.exit("wrong results of ours, see above" if suite.is_wrong else 0)


if __name__ == "__main__":
    main()
