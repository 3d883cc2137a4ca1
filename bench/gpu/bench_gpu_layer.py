"""One layer of SwiGLU experts, forward and backward: EXPERT_BACKEND=triton against other people's layers on
one GPU.

    export PYTHONPATH=$PWD    # in the repository; not where the package is installed
    python bench/gpu/bench_gpu_layer.py --json layer.json            # all shapes, both routings
    python bench/gpu/bench_gpu_layer.py --shape B D --routing balanced --peers liger sonic-moe
    # ours alone, then where its time goes
    python bench/gpu/bench_gpu_layer.py --shape D --peers --profile
    # the least time and memory of every shape; no GPU
    python bench/gpu/bench_gpu_layer.py --floors
    # on a CPU: tiny shapes, plain torch in place of the kernels; 10 s
    python bench/gpu/bench_gpu_layer.py

The first is meant to take under 8 minutes on one GPU, not measured. Before these 8 minutes processes of their
own, one per shape, compile (--warm-seconds), which fills Triton's cache on disk. What that leaves undone
counts as time of measuring: shapes for which it does not suffice are left out by name, from the end of the
order B D F G C A E. A table to be quoted is one of a run without such.

All get the same tokens, weights, routing and output gradient. Before anything is timed, outputs and all
gradients (tokens, weights, router weights) are compared with float64 by relative norm; who is further off
than the dtype explains is not timed. Then they take turns in random order, on input sets that have left the
L2 when they come again; medians. The forward is one of training, which keeps what the backward needs. Routing
itself is in no time, the order of rows by expert is: the layers get expert numbers and weights. Where rows
arrive sorted from other ranks (E), layers that sort them again are compared with `ours, sorting`, which does
so, too.

Who is not installed, fails or cannot run here is left out by name, with the reason; the exit code is 1 where
that is one of ours. Results are saved after every shape and routing. Times are CUDA events, on a CPU the wall
clock. Columns: `graph, ms` is the forward as a CUDA graph, without the host's launches (on a CPU the forward
again; `-` where a layer cannot be captured, with the reason below the table); TFLOP/s of the three
projections; share of what a large matrix product reaches in the same process; bytes allocated at the peak of
forward and backward, and kept between them; `theirs / ours` over 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import bench_arguments
import torch
from gpu_attempts import Attempts, DeviceLost, LeftOut, free
from gpu_clock import (
    Again,
    at_most,
    backward_in_this_thread,
    elapsed_ms,
    make_graph,
    matmul_ceiling,
    num_input_sets,
    peak_bytes,
    poison,
    saved_bytes,
)
from gpu_floors import (
    MIB,
    SHAPES,
    TINY,
    Shape,
    floor_of,
    floors_table,
    forward_flops,
    minimal_kept_bytes,
    roofline_table,
)
from gpu_inputs import ROUTINGS, Inputs, Weights, bounds, draw_inputs, draw_weights, errors, reference
from gpu_machine import origin
from gpu_peers import OUR_KERNELS, OURS, OURS_SORTING, PEERS, PROVIDERS
from gpu_warm import run_at_once
from torch import Tensor

from moe_exp.engine.graphs import CudaGraph
from moe_exp.layers.kernels import tuning

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUND_SECONDS = 6.0  # of turns for one shape and routing, after MIN_ROUNDS
MIN_ROUNDS, WARMUP = 5, 2
LAST_SECONDS = 60  # that the last shape may continue after the budget
Row = dict[str, Any]


class Problem(NamedTuple):
    """What all providers get at a shape and routing."""

    shape_name: str
    routing: str
    shape: Shape
    weights: Weights
    sets: list[Inputs]

    @property
    def label(self) -> str:
        return f"shape {self.shape_name}, {self.routing}"


class Turn:
    """A provider on a problem, and what was measured of it."""

    def __init__(self, name: str, problem: Problem):
        self.name, self.sets = name, problem.sets
        self.leaves = PROVIDERS[name].leaves(problem.weights)
        self.layer = PROVIDERS[name].build(problem.shape, self.leaves.parameters)
        self.forward_ms: list[float] = []
        self.both_ms: list[float] = []
        self.graph_ms: list[float] = []
        self.graph: CudaGraph | Again | None = None  # forward of all sets
        self.errors: dict[str, float] = {}
        self.saved_bytes, self.peak_bytes = 0, None

    def forward(self, inputs: Inputs) -> Tensor:
        return self.layer(inputs.x_TD, inputs.routing)

    def both(self, inputs: Inputs) -> list[Tensor]:
        """Output and the gradients of tokens, router weights and parameters."""
        y_TD = self.forward(inputs)
        leaves = [inputs.x_TD, inputs.routing.weights_TK, *self.leaves.parameters]
        return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, inputs.dy_TD)]

    def check(self, expected: list[Tensor], bound: dict[str, float]) -> None:
        """Raises LeftOut where a result on the first set is wrong."""
        y_TD, dx_TD, dweights_TK, *rest = self.both(self.sets[0])
        self.errors = errors([y_TD, dx_TD, *self.leaves.join(rest), dweights_TK], expected)
        where, error = max(self.errors.items(), key=lambda item: item[1] / bound[item[0]])
        if error > bound[where]:
            raise LeftOut(f"wrong: {where} is {error:.1e} off, over {bound[where]:.0e}")

    def count_bytes(self, device: torch.device) -> None:
        self.saved_bytes = saved_bytes(
            partial(self.forward, self.sets[0]), self.leaves.parameters, self.sets[0].x_TD
        )
        self.peak_bytes = peak_bytes(partial(self.both, self.sets[0]), device)

    def capture(self) -> None:
        """Captures the forward of all sets. Raises LeftOut if a replay computes something else."""

        def region() -> Tensor:
            return [self.forward(inputs).detach() for inputs in self.sets][-1]

        graph, expected = make_graph(), region()
        found = graph.capture(region)
        graph.replay()
        if not torch.allclose(
            found.float(), expected.float(), rtol=1e-2, atol=1e-3 * float(expected.abs().max())
        ):
            raise LeftOut("wrong: a replay differs from the forward")
        self.graph = graph

    def take(self, device: torch.device) -> Turn:
        self.forward_ms.append(elapsed_ms([partial(self.forward, inputs) for inputs in self.sets], device))
        self.both_ms.append(elapsed_ms([partial(self.both, inputs) for inputs in self.sets], device))
        if self.graph is not None:
            self.graph_ms.append(elapsed_ms([self.graph.replay], device) / len(self.sets))
        return self


class Suite:
    """All shapes and routings on one device, within the budget."""

    def __init__(self, arguments: argparse.Namespace, compiled_ahead: dict[str, Any]):
        self.arguments, self.compiled_ahead = arguments, compiled_ahead
        self.device, self.dtype = arguments.device, DTYPES[arguments.dtype]
        self.origin = origin(self.device)
        self.rows: list[Row] = []
        self.profiles: list[str] = []
        self.attempts = Attempts(self.device)
        self.names = [name for name in (OURS, *arguments.peers) if self.can_run(name)]
        if OURS in self.names and any(PROVIDERS[name].sorts for name in self.names):
            self.names.insert(1, OURS_SORTING)
        self.ceiling = matmul_ceiling(self.device, self.dtype)
        self.deadline = time.monotonic() + arguments.budget

    def can_run(self, name: str) -> bool:
        if reason := PROVIDERS[name].why_not(self.device, self.dtype):
            self.attempts.leave_out(name, reason, may_fail=name not in OUR_KERNELS)
        return not reason

    def names_at(self, shape: Shape) -> list[str]:
        """Tokens that are to be sorted are so by every provider."""
        return [name for name in self.names if name != OURS_SORTING or shape.arrives]

    def seconds_for(self, name: str) -> float:
        """That a provider has to compile, tune and warm up: ours the whole budget, others not so long that
        nobody else has any.
        """
        left = self.deadline + LAST_SECONDS - time.monotonic()
        return left if name in OUR_KERNELS else min(left, self.arguments.start_seconds)

    def run(self) -> None:
        """Compares the providers at every shape and routing, as long as the budget lasts."""
        with backward_in_this_thread():
            for shape_name in self.arguments.shape:
                weights = None
                for routing in self.arguments.routing:
                    label = f"shape {shape_name}, {routing}"
                    if time.monotonic() >= self.deadline:
                        self.attempts.leave_out(
                            label, f"not begun within {self.arguments.budget:.0f} s", may_fail=False
                        )
                    else:
                        weights = weights or draw_weights(
                            (SHAPES | TINY)[shape_name], dtype=self.dtype, device=self.device
                        )
                        self.attempts.run(
                            label, partial(self.compare, shape_name, routing, weights), may_fail=False
                        )
                    self.save()
                del weights
                free(self.device)

    def problem(self, shape_name: str, routing: str, weights: Weights) -> Problem:
        shape = (SHAPES | TINY)[shape_name]
        draw = partial(draw_inputs, shape, routing, dtype=self.dtype, device=self.device)
        sets = [draw(seed=2)]
        sets += [draw(seed=3 + index) for index in range(num_input_sets(sets[0].num_bytes, self.device) - 1)]
        return Problem(shape_name, routing, shape, weights, sets)

    def compare(self, shape_name: str, routing: str, weights: Weights) -> None:
        problem = self.problem(shape_name, routing, weights)
        turns = self.checked_turns(problem)
        try:
            self.time_turns(problem, turns)
        finally:  # where one takes the device with it, too
            self.add_rows(
                problem,
                [
                    turn
                    for turn in turns
                    if turn.both_ms and f"{turn.name}, {problem.label}" not in self.attempts.left_out
                ],
            )
        for turn in turns if self.arguments.profile else ():
            if table := self.attempt(
                f"profile of {turn.name}", problem, turn.name, partial(profile_of, turn, self.device)
            ):
                self.profiles.append(f"\n{problem.label}, {turn.name}\n{table}")

    def attempt(self, what: str, problem: Problem, name: str, work: Any) -> Any:
        return self.attempts.run(f"{what}, {problem.label}", work, may_fail=name not in OUR_KERNELS)

    def checked_turns(self, problem: Problem) -> list[Turn]:
        """The providers that are ready and right."""
        expected = reference(problem.sets[0], problem.weights)
        turns = [
            self.attempt(name, problem, name, partial(self.prepare, name, problem, expected))
            for name in self.names_at(problem.shape)
        ]
        ready = [turn for turn in turns if turn is not None]
        for turn in ready:
            self.attempts.run(f"graph of {turn.name}, {problem.label}", turn.capture, may_fail=True)
        return ready

    def prepare(self, name: str, problem: Problem, expected: list[Tensor]) -> Turn:
        """Builds, checks and warms up."""
        with at_most(self.seconds_for(name)):
            turn = Turn(name, problem)
            poison(self.device)
            turn.check(expected, bounds(self.dtype, of_peer=name not in OUR_KERNELS))
            for inputs in problem.sets * WARMUP:
                turn.both(inputs)
            turn.count_bytes(self.device)
        return turn

    def time_turns(self, problem: Problem, turns: list[Turn]) -> None:
        """Takes turns; who fails is no longer in `turns`."""
        start = time.monotonic()
        for done in range(self.arguments.rounds):
            if done >= MIN_ROUNDS and time.monotonic() - start > ROUND_SECONDS:
                return
            for turn in random.sample(turns, len(turns)):
                if self.attempt(turn.name, problem, turn.name, partial(turn.take, self.device)) is None:
                    turns.remove(turn)

    def add_rows(self, problem: Problem, turns: list[Turn]) -> None:
        rows = {turn.name: self.row(problem, turn) for turn in turns}
        for name, row in rows.items():
            base = OURS_SORTING if problem.shape.arrives and PROVIDERS[name].sorts else OURS
            row |= {
                "compared_with": base,
                "theirs_over_ours": row["both_ms"] / rows[base]["both_ms"] if base in rows else None,
            }
            print(table_row(row), flush=True)
        self.rows += rows.values()

    def row(self, problem: Problem, turn: Turn) -> Row:
        forward_ms, both_ms = statistics.median(turn.forward_ms), statistics.median(turn.both_ms)
        tflops = forward_flops(problem.shape) / 1e9
        return {
            "shape": problem.shape_name, "routing": problem.routing, "provider": turn.name,
            "rounds": len(turn.both_ms), "errors": turn.errors, "largest_error": max(turn.errors.values()),
            "forward_ms": forward_ms, "both_ms": both_ms,
            "graph_ms": statistics.median(turn.graph_ms) if turn.graph_ms else None,
            "both_range_ms": [min(turn.both_ms), max(turn.both_ms)], "forward_tflops": tflops / forward_ms,
            "both_tflops": 3 * tflops / both_ms,
            "share_of_ceiling": 3 * tflops / both_ms * 1e12 / self.ceiling, "peak_bytes": turn.peak_bytes,
            "saved_bytes": turn.saved_bytes,
            "saved_over_minimal": turn.saved_bytes / minimal_kept_bytes(problem.shape, self.dtype.itemsize),
            "floor_ms": sum(floor_of(problem.shape)[:2]),
        }  # fmt: skip

    def compile(self) -> None:
        """Runs every provider once per shape: what they compile stays in their caches on disk. Ours launches
        each config once and keeps no choice, as other processes use the device at the same time.
        """

        def launch(run: Callable[[], Any]) -> float:
            run()
            return 0.0

        with (
            backward_in_this_thread(),
            patch.object(tuning, "milliseconds", launch),
            patch.object(tuning, "device_facts", tuple),
        ):
            for shape_name in self.arguments.shape:
                problem = self.problem(
                    shape_name,
                    ROUTINGS[0],
                    draw_weights((SHAPES | TINY)[shape_name], dtype=self.dtype, device=self.device),
                )
                for name in self.names_at(problem.shape):
                    self.attempt(name, problem, name, partial(self.compile_one, name, problem))

    def compile_one(self, name: str, problem: Problem) -> None:
        with at_most(self.seconds_for(name)):
            # waits: an error is of the one who made it
            elapsed_ms([partial(Turn(name, problem).both, problem.sets[0])], self.device)

    def notes(self) -> list[str]:
        notes = {name: PROVIDERS[name].note() for name in self.names}
        if self.arguments.device.type == "cpu":
            notes[OURS] = "without a GPU the twins of the kernels in plain torch"
        if sorting := [name for name in self.names if PROVIDERS[name].sorts and name != OURS_SORTING]:
            notes[", ".join(sorting)] = (
                f"rows that arrive sorted are sorted again; compared with `{OURS_SORTING}` there"
            )
        return [f"{name}: {note}" for name, note in notes.items() if note]

    def save(self) -> None:
        if self.arguments.json:
            result = self.origin | {
                "dtype": self.arguments.dtype, "matmul_ceiling_flops": self.ceiling,
                "compiled_ahead": self.compiled_ahead, "rows": self.rows, "left_out": self.attempts.left_out,
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
            sort_by="self_device_time_total" if device.type == "cuda" else "self_cpu_time_total",
            row_limit=num_rows,
        )
    )


HEADINGS = [
    "shape", "routing", "layer", "forward, ms", "graph, ms", "forward + backward, ms",
    "TFLOP/s forward", "TFLOP/s both", "of the ceiling", "peak, MiB", "saved, MiB", "saved / formula",
    "theirs / ours", "largest error",
]  # fmt: skip


def table_row(row: Row) -> str:
    ratio = "-" if row["theirs_over_ours"] is None else f"{row['theirs_over_ours']:.2f}"
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}"
    graph = "-" if row["graph_ms"] is None else f"{row['graph_ms']:.3f}"
    where = max(row["errors"], key=row["errors"].get)
    cells = [
        row["shape"], row["routing"], row["provider"], f"{row['forward_ms']:.3f}", graph,
        f"{row['both_ms']:.3f}", f"{row['forward_tflops']:.3g}", f"{row['both_tflops']:.3g}",
        f"{row['share_of_ceiling']:.0%}", peak,
        f"{row['saved_bytes'] / MIB:.1f}", f"{row['saved_over_minimal']:.2f}", ratio,
        f"{row['largest_error']:.1e}, {where}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def compile_ahead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts this command once per shape with --compile-only, as many at a time as there are cores.

    Returns:
        What it took, and what it left undone, with the reasons.
    """
    start = time.monotonic()
    command = [
        sys.executable,
        __file__,
        "--compile-only",
        "--dtype",
        arguments.dtype,
        "--device",
        str(arguments.device),
    ]
    command += [
        "--start-seconds",
        str(arguments.warm_seconds),
        "--budget",
        str(arguments.warm_seconds),
        "--warm-seconds",
        "0",
    ]
    commands = {
        f"shape {name}": [*command, "--shape", name, "--peers", *arguments.peers] for name in arguments.shape
    }
    undone = run_at_once(
        commands, seconds=arguments.warm_seconds, workers=min(len(commands), os.cpu_count() or 1)
    )
    print(
        f"Compiled ahead in {time.monotonic() - start:.0f} s",
        *(f"; {name}: {reason}" for name, reason in undone.items()),
        sep="",
    )
    return {"seconds": time.monotonic() - start, "undone": undone}


def parse_arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # The order is that of importance, should the time not suffice.
    default = ["B", "D", "F", "G", "C", "A", "E"] if on_gpu else list(TINY)
    count, seconds = bench_arguments.at_least(1), bench_arguments.at_least(0.0)
    parser.add_argument(
        "--shape", nargs="+", choices=[*SHAPES, *TINY], default=default, help=f"default: {' '.join(default)}"
    )
    parser.add_argument(
        "--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="default: both"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=PEERS,
        metavar="NAME",
        help=f"of: {'; '.join(PEERS)}; default: all",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32", help="default: bf16, on a CPU fp32"
    )
    parser.add_argument(
        "--device",
        type=bench_arguments.device,
        default="cuda" if on_gpu else "cpu",
        help="default: cuda where there is one",
    )
    parser.add_argument("--rounds", type=count, default=20, help="turns of each at most (default 20)")
    parser.add_argument(
        "--budget",
        type=seconds,
        default=440,
        help="seconds after which no other shape is begun (default 440)",
    )
    parser.add_argument(
        "--start-seconds",
        type=seconds,
        default=75,
        help="for a peer to compile, tune and warm up, after --warm-seconds (default 75)",
    )
    warm = 300 if on_gpu else 0
    parser.add_argument(
        "--warm-seconds", type=seconds, default=warm, help=f"to compile ahead; 0: as it goes (default {warm})"
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="run everybody once per shape, for their caches, and time nothing",
    )
    parser.add_argument(
        "--json",
        type=bench_arguments.result_file,
        help="write the results there, after every shape and routing",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also the operators of forward and backward, by torch's profiler",
    )
    parser.add_argument(
        "--floors", action="store_true", help="print the floors of all shapes on an H200, and end"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.floors:
        print(floors_table(), "Of the kernels, a model:", roofline_table(), sep="\n\n")
        return
    if arguments.device.index is not None:
        torch.cuda.set_device(arguments.device)
    ahead = compile_ahead(arguments) if arguments.warm_seconds and not arguments.compile_only else {}
    suite = Suite(arguments, ahead)
    facts = suite.origin["machine"]
    print(
        f"{facts['card']}, {', '.join(f'{name} {found}' for name, found in facts['versions'].items())},"
        f" {arguments.dtype}"
    )
    print(
        f"A large matrix product: {suite.ceiling / 1e12:.3g} TFLOP/s\n\n| {' | '.join(HEADINGS)}"
        f" |\n{'|---' * len(HEADINGS)}|"
    )
    try:
        suite.compile() if arguments.compile_only else suite.run()
    except DeviceLost as error:
        suite.attempts.end(error)
        suite.save()
    print(*suite.notes(), *suite.attempts.report(), *suite.profiles, sep="\n")
    suite.attempts.exit()


if __name__ == "__main__":
    main()
