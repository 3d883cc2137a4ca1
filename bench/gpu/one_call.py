"""Everything to be measured on one GPU, in one call of at most ten minutes.

    export PYTHONPATH=$PWD                                       # in the repository
    python bench/gpu/one_call.py --json lines.jsonl --keep tcache.tar.xz      # on a GPU; 600 s at most
    python bench/gpu/one_call.py --json lines.jsonl --part step micro         # some of the parts
    python bench/gpu/one_call.py --tiny --json lines.jsonl                    # every part on a CPU; 2 min

Each part is a process of its own with its own time. It appends JSON lines as it gets results, so that nothing
is lost if a later part fails or the time is over; a part that could not end before its time is skipped. The
table of all lines comes last. `--keep` packs Triton's cache at the end; unpack it into ~/.triton before the
next call, and only changed kernels are compiled.

Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from bench_gpu_step import MODELS, sizes, write_tokens
from gpu_attempts import free
from gpu_clock import elapsed_ms, make_graph, matmul_ceiling
from gpu_floors import SHAPES
from gpu_machine import origin
from gpu_warm import run_at_once

from moe_exp.config import Config, load_config
from moe_exp.engine import adamw, backends, optimizer_setup
from moe_exp.engine.runtime import start_alone, stop
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.megatron.residual import SumNorm
from moe_exp.layers.router.router import bf16_grads
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.training import step as one_iteration
from moe_exp.training.microbatch import build_graphs

sys.path.append(str(Path(__file__).resolve().parents[1]))
from bench_step import Ours

HERE = Path(__file__).resolve().parent
Emit = Callable[..., None]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(call: Callable[[], object], number: int = 200) -> float:
    """Microseconds of the host per call, without waiting for the device."""
    for _ in range(20):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(number):
        call()
    taken = time.perf_counter() - start
    wait()
    return taken / number * 1e6


def median_ms(call: Callable[[], object], rounds: int = 10) -> float:
    for _ in range(3):
        call()
    return statistics.median(elapsed_ms([call], device()) for _ in range(rounds))


# Parts: each gets the arguments and a function that writes a line


def machine(arguments: argparse.Namespace, emit: Emit) -> None:
    """The card, its ceilings, and how fast its host launches."""
    emit("machine", **origin(device())["machine"])
    size = 2**16 if arguments.tiny else 2**29
    source = torch.zeros(size, dtype=torch.float32, device=device())
    target = torch.empty_like(source)
    seconds = median_ms(lambda: target.copy_(source)) / 1e3
    ceiling = matmul_ceiling(device(), torch.float32 if arguments.tiny else torch.bfloat16)
    emit("ceilings", matmul_tflops=ceiling / 1e12, copy_gb_per_second=8 * size / seconds / 1e9)
    x = torch.zeros(8, device=device())
    factors = torch.ones(4, device=device())
    tokens, weight = torch.zeros(64, 64, device=device()), torch.zeros(4, 64, 64, device=device())
    offsets = torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32, device=device())
    ones = torch.ones(64, device=device())
    calls = {
        "add_": lambda: x.add_(1),
        "adamw_step": lambda: adamw.adamw_step(x, x, x, x, None, factors, betas=(0.9, 0.9), eps=1e-8),
        "up_projection": lambda: up_projection(tokens, weight, offsets, activation="gelu", weights_R=ones),
    }
    for name, call in calls.items():
        emit("host", call=name, us=host_us(call))
    if torch.cuda.is_available():
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(100):
                x.add_(1)
        emit("host", call="graph of 100 kernels", us=host_us(graph.replay))


def compile_ahead(arguments: argparse.Namespace, emit: Emit) -> None:
    """Fills Triton's cache on disk: kernels of the step, which add to main_grad, and of the layers."""
    if not torch.cuda.is_available():
        emit("compile", seconds=0.0, undone={})
        return
    start = time.monotonic()
    layer = [sys.executable, str(HERE / "bench_gpu_layer.py"), "--compile-only", "--warm-seconds", "0"]
    layer += ["--start-seconds", "300", "--budget", "300"]
    commands = {f"shape {name}": [*layer, "--shape", name] for name in ("D", "A", "B", "F")}
    step = [sys.executable, __file__, "--part", "correct", "--json", os.devnull]
    undone = run_at_once({"step": step, **commands}, seconds=arguments.seconds, workers=14)
    emit("compile", seconds=time.monotonic() - start, undone=undone)


class Variant(NamedTuple):
    """How a step runs."""

    name: str
    graph: bool
    kernel: bool  # AdamW in one pass


VARIANTS = (
    Variant("eager, torch AdamW", False, False),
    Variant("eager", False, True),
    Variant("graph", True, True),
)


def config_of(model: str, data: str, *, gbsz: int = 0, num_layers: int = 0) -> Config:
    settings = sizes() | MODELS[model] | {"gpus_per_node": "1", "train_data": data, "num_workers": "0"}
    settings |= {"warmup_iters": "0", "cross_entropy": "triton", "expert_backend": "triton"}
    settings |= {"gbsz": str(gbsz)} if gbsz else {}
    settings |= {"num_layers": str(num_layers)} if num_layers else {}
    return load_config(settings, environ={})


def build(config: Config, variant: Variant, rank: Any) -> Ours:
    """The training state of a variant; with a graph, on the stream that captures it."""
    kind = "whole" if variant.kernel else "torch"
    with patch.object(optimizer_setup, "choose_step", lambda *_, **__: kind):
        ours = Ours(config, rank, graph=variant.graph)
    if variant.graph:
        ours.job = replace(ours.job, graphs=build_graphs(ours.job.trained.model, make_graph))
    return ours


def with_data(work: Callable[[str], None]) -> None:
    """Calls `work` with a file of tokens."""
    base = load_config(sizes(), environ={})
    with tempfile.TemporaryDirectory() as folder:
        work(write_tokens(Path(folder), base.vocab_size, 1 + 64 * base.seq_len * 8))


def correct(arguments: argparse.Namespace, emit: Emit) -> None:
    """Kernels against plain torch; ten steps of each variant; waits of the host in a step."""

    def work(data: str) -> None:
        config = config_of("dmoe", data, num_layers=2)
        rank = start_alone(config)
        failures = backends.check_run(config, rank)
        emit("kernels", failed=[line for failure in failures for line in failure.problems])
        losses = {}
        for variant in VARIANTS:
            ours = build(config, variant, rank)
            for _ in range(10):
                ours.step()
            losses[variant.name] = ours.loss_sum()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn") if torch.cuda.is_available() else None
                ours.step()
                torch.cuda.set_sync_debug_mode("default") if torch.cuda.is_available() else None
            waits = sum("synchroniz" in str(one.message) for one in caught)
            emit("ten steps", variant=variant.name, loss_sum=losses[variant.name], waits=waits)
            del ours
            free(device())
        eager, graph = losses["eager"], losses["graph"]
        emit("graph is eager", equal=eager == graph, relative=abs(eager - graph) / abs(eager))
        stop()

    with_data(work)


def step(arguments: argparse.Namespace, emit: Emit) -> None:
    """The step of the reference models: variants, one and eight micro-batches, host and device."""

    def work(data: str) -> None:
        base = load_config(sizes(), environ={})
        rank = start_alone(config_of("dmoe", data))
        for model, times in itertools.product(("dmoe", "dense"), (1, 8)):
            config = config_of(model, data, gbsz=times * base.mbsz)
            for variant in VARIANTS:
                emit("step", model=model, microbatches=times, variant=variant.name,
                     **timed_step(build(config, variant, rank), config))  # fmt: skip
                free(device())
        stop()

    with_data(work)


def timed_step(ours: Ours, config: Config, rounds: int = 5) -> dict[str, Any]:
    """Milliseconds of a step; of the host until forward and backward are launched; of the optimizer."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        ours.step()
    host: list[float] = []
    run_schedule = one_iteration.run_schedule

    def timed(*args: Any, **options: Any) -> Any:
        wait()
        start = time.perf_counter()
        found = run_schedule(*args, **options)
        host.append((time.perf_counter() - start) * 1e3)
        return found

    whole = [elapsed_ms([ours.step], device()) for _ in range(rounds)]
    queued = elapsed_ms([ours.step] * 2 * rounds, device())  # as between two log lines
    with patch.object(one_iteration, "run_schedule", timed):
        for _ in range(rounds):
            ours.step()
    ms = statistics.median(whole)
    optimizer = statistics.median(elapsed_ms([ours.job.trained.optimizer.step], device()) for _ in range(3))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "ms": ms, "range_ms": [min(whole), max(whole)], "queued_ms": queued,
        "host_ms": statistics.median(host), "optimizer_ms": optimizer,
        "tflops": flops_per_iteration(config, config.gbsz) / ms / 1e9,
        "peak_gib": peak,
    }  # fmt: skip


def script(name: str, *options: str, emit: Emit, part: str) -> None:
    """Runs another bench in a process and emits its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        done = subprocess.run([sys.executable, str(HERE / name), *options, "--json", str(path)])
        result = json.loads(path.read_text()) if path.exists() else {"rows": []}
        for row in result["rows"]:
            emit(part, **row)
        emit(f"{part}, left out", exit_code=done.returncode, **result.get("left_out", {}))


def peers(arguments: argparse.Namespace, emit: Emit) -> None:
    contenders = ("ours", "transformers", "megatron")
    options = ("--model", "dmoe", "--contenders", *contenders, "--steps", "1" if arguments.tiny else "5")
    script("bench_gpu_step.py", *options, emit=emit, part="peers")


def layers(arguments: argparse.Namespace, emit: Emit) -> None:
    options = ("--shape", "tiny") if arguments.tiny else ("--shape", "D", "A", "B", "F")
    options += ("--routing", "balanced", "--warm-seconds", "0", "--rounds", "5")
    script("bench_gpu_layer.py", *options, emit=emit, part="layers")


def micro(arguments: argparse.Namespace, emit: Emit) -> None:
    """Single operations whose choice is open."""
    scale = 64 if arguments.tiny else 1
    time_adamw(2**28 // scale**2, emit)
    free(device())
    for name, shape in SHAPES.items():
        time_products(name, shape.rows // scale // shape.experts, shape.experts,
                      shape.hidden // scale // 8 * 8, max(8, shape.ffn // scale // 8 * 8), emit)  # fmt: skip
        free(device())
    for tokens, hidden, experts in ((16384, 512, 64), (16384, 2048, 128), (8192, 7168, 256)):
        time_router(tokens // scale, hidden // scale, experts, emit)
        time_norm(tokens // scale, hidden // scale, emit)
    for has_cudnn in (True, False):
        lengths = range(40, 60) if arguments.tiny else range(1500 + has_cudnn, 1540, 2)
        time_lengths(lengths, has_cudnn, emit)


def time_adamw(number: int, emit: Emit) -> None:
    tensors = [torch.zeros(number, device=device()) for _ in range(4)]
    weight, factors = tensors[0].bfloat16(), torch.ones(4, device=device())
    ms = median_ms(lambda: adamw.adamw_step(*tensors, weight, factors, betas=(0.9, 0.95), eps=1e-8))
    emit("AdamW", values=number, ms=ms, gb_per_second=30 * number / ms / 1e6)
    emit("zero", values=number, ms=median_ms(tensors[1].zero_))


def time_products(name: str, per_expert: int, experts: int, hidden: int, ffn: int, emit: Emit) -> None:
    """Our grouped GEMM against PyTorch's: down-projection, and the up-projection's gradient of the rows."""
    offsets = (torch.arange(experts + 1, device=device()) * per_expert).int()
    for what, inner in (("down", ffn), ("dx", 2 * ffn)):
        x = torch.randn(per_expert * experts, inner, device=device()).bfloat16()
        w = torch.randn(experts, inner, hidden, device=device()).bfloat16()
        ours = median_ms(partial(grouped_matmul, x, w, offsets))
        theirs = median_ms(partial(torch.nn.functional.grouped_mm, x, w, offs=offsets[1:]))
        emit("grouped GEMM", shape=name, product=what, ours_ms=ours, grouped_mm_ms=theirs)


def time_router(tokens: int, hidden: int, experts: int, emit: Emit) -> None:
    """Backward of the router's product by fp32 copies, and by bf16 products."""
    on = device()
    x, w = (
        torch.randn(tokens, hidden, device=on).bfloat16(),
        torch.randn(experts, hidden, device=on).bfloat16(),
    )
    dlogits = torch.randn(tokens, experts, device=on)
    copies = median_ms(lambda: (dlogits @ w.float(), dlogits.t() @ x.float()))
    mm: Any = torch.mm if on.type == "cuda" else lambda a, b, out_dtype=x.dtype: (a @ b).to(out_dtype)
    split = median_ms(partial(bf16_grads, dlogits, x, w, mm=mm))
    emit("router backward", tokens=tokens, hidden=hidden, experts=experts, fp32_ms=copies, bf16_ms=split)


def time_norm(tokens: int, hidden: int, emit: Emit) -> None:
    """Sum after attention and its norm, both directions: two operations, and one kernel in each."""
    x, residual, *grads = (torch.randn(tokens, hidden, device=device()).bfloat16() for _ in range(4))
    weight = torch.ones_like(x[0])
    leaves = [leaf.requires_grad_() for leaf in (x, residual, weight)]

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return total, torch.nn.functional.rms_norm(total, weight.shape, weight, 1e-5)

    def one() -> tuple[torch.Tensor, torch.Tensor]:
        return SumNorm.apply(x, residual, weight, 1e-5)

    ms = [median_ms(lambda run=run: torch.autograd.grad(run(), leaves, grads)) for run in (two, one)]
    emit("sum and norm", tokens=tokens, hidden=hidden, two_ms=ms[0], one_ms=ms[1])


def time_lengths(lengths: Iterable[int], has_cudnn: bool, emit: Emit) -> None:
    """Attention with a new length in each call, as in generation and with documents."""
    torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
    taken = []
    for length in lengths:
        q, k, v = (torch.randn(1, 8, length, 64, device=device()).bfloat16().requires_grad_() for _ in "qkv")
        wait()
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        wait()
        taken.append((time.perf_counter() - start) * 1e3)
    emit("attention of new lengths", cudnn=has_cudnn, median_ms=statistics.median(taken))


GROUPS = {
    "experts": ("up_projection", "grouped_matmul", "activation_grad", "weight_grad", "combine"),
    "router": ("topk", "slot_sort", "gather_rows", "cumsum", "index_select"),
    "attention": ("flash", "fmha", "cudnn", "rotary", "scaled_dot"),
    "loss": ("cross_entropy", "logsumexp"),
    "optimizer": ("adamw", "multi_tensor", "foreach"),
    "norms": ("norm", "residual"),
    "products": ("gemm", "nvjet", "cutlass", "mm"),
}  # parts of kernel names, the first that fits


def profile(arguments: argparse.Namespace, emit: Emit) -> None:
    """Device time of one step by group of kernels."""
    kind = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()

    def work(data: str) -> None:
        config = config_of("dmoe", data)
        ours = build(config, VARIANTS[-1], start_alone(config))
        for _ in range(4):
            ours.step()
        with torch.profiler.profile(activities=[kind.CUDA if on_gpu else kind.CPU]) as profiler:
            ours.step()
            wait()
        found: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            name, us = (
                event.key.lower(),
                event.self_device_time_total if on_gpu else event.self_cpu_time_total,
            )
            group = next(
                (group for group, words in GROUPS.items() if any(word in name for word in words)), "other"
            )
            found[group] += us / 1e3
        emit("profile", **found)
        stop()

    with_data(work)


def keep(arguments: argparse.Namespace, emit: Emit) -> None:
    """Packs Triton's cache."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    if arguments.keep and cache.is_dir():
        with tarfile.open(arguments.keep, "w:xz") as archive:
            archive.add(cache, "cache")
        emit("keep", file=str(arguments.keep), mib=arguments.keep.stat().st_size / 2**20)
    else:
        emit("keep", file=None, mib=0.0)


# in order of worth if time is short; second of the call at which each part must have ended
PARTS: dict[str, tuple[int, Callable[[argparse.Namespace, Emit], None]]] = {
    "machine": (20, machine), "compile": (110, compile_ahead), "correct": (160, correct), "step": (270, step),
    "peers": (340, peers), "layers": (450, layers), "micro": (520, micro), "profile": (570, profile),
    "keep": (600, keep),
}  # fmt: skip


def table(lines: list[dict[str, Any]]) -> str:
    """All lines, a row each."""

    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    rows = ["| part | what | values |", "|---|---|---|"]
    for line in lines:
        values = "; ".join(
            f"{name} {shown(value)}" for name, value in line.items() if name not in ("part", "what")
        )
        rows.append(f"| {line['part']} | {line['what']} | {values} |")
    return "\n".join(rows)


def run_part(name: str, arguments: argparse.Namespace) -> None:
    def emit(what: str, **values: Any) -> None:
        with arguments.json.open("a") as file:
            file.write(json.dumps({"part": name, "what": what, **values}, default=str) + "\n")

    PARTS[name][1](arguments, emit)


def run_all(arguments: argparse.Namespace) -> int:
    """Runs each part in a process; returns the number of parts that failed."""
    start, failed = time.monotonic(), 0
    for name in arguments.parts:
        left = (arguments.total if arguments.tiny else PARTS[name][0]) - (time.monotonic() - start)
        command = [sys.executable, __file__, "--part", name, "--json", str(arguments.json), "--child"]
        command += ["--seconds", str(left)] + (["--tiny"] if arguments.tiny else [])
        command += ["--keep", str(arguments.keep)] if arguments.keep else []
        begun, end = time.monotonic(), "ok"
        try:
            done = (
                subprocess.run(command, timeout=max(left, 1.0), stdout=subprocess.DEVNULL)
                if left > 5
                else None
            )
            if done is None or done.returncode:
                end = "skipped: no time left" if done is None else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            end = "stopped: time is over"
        failed += end != "ok"
        with arguments.json.open("a") as file:
            line = {"part": name, "what": "end", "end": end, "seconds": time.monotonic() - begun}
            file.write(json.dumps(line) + "\n")
        print(f"{name}: {end}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(table([json.loads(line) for line in arguments.json.read_text().splitlines()]))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to which JSON lines are appended")
    parser.add_argument("--keep", type=Path, help="archive for Triton's cache")
    parser.add_argument(
        "--part", dest="parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--total", type=float, default=600.0, help="seconds for all parts (default 600)")
    parser.add_argument("--seconds", type=float, default=300.0, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("without a GPU only --tiny runs")
    if arguments.child:
        run_part(arguments.parts[0], arguments)
    else:
        sys.exit(1 if run_all(arguments) else 0)


if __name__ == "__main__":
    main()
