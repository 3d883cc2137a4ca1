"""Step time of moe_exp against the same tiny GPT in plain torch (`plain_torch.py`), in one process, turn by
turn.

    # median ratio of 40 alternating pairs, dense and MoE; 2 min on 2 cores
    python bench/bench_step.py
    # then where the time goes, part by part and operator by operator; 4 min
    python bench/bench_step.py --profile
    # only: the same weights give the same losses for 3 steps; 15 s
    python bench/bench_step.py --check

A step is `loop.train_step` on one rank: batches from the SampleStream, Megatron's schedule, DDP,
clipping and distributed optimizer. Plain torch gets its batches ready-made. Both start from the same weights
of the small model.
"""

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import plain_torch
import torch
import torch.nn.functional as F
from small_model import SETTINGS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import Config, load_config
from moe_exp.engine import optimizer_setup
from moe_exp.engine.model import build_model
from moe_exp.engine.optimizer_classes import Adam
from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
from moe_exp.engine.runtime import Runtime, start, stop
from moe_exp.host.processes import free_port
from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.megatron.attention import CausalAttention
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.statistics import MoEStatistics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training import loop, samples
from moe_exp.training import step as one_iteration
from moe_exp.training.interval import Interval

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

MODELS = {"dense": {"use_moe": "false"}, "MoE": {"use_moe": "true", "moe_type": "dmoe"}}
TOLERANCE = 1e-5
PROFILED_STEPS = 20


class Ours:
    """moe_exp's model and training state, built as `training/loop.py` does, without a run folder."""

    def __init__(self, config: Config, rank: Runtime, *, graph: bool = False):
        train_stream, _ = samples.build_data(config)
        model = build_model(config, rank, has_graph=graph)
        optimizer = build_optimizer(config, model)
        trained = Trained(model, optimizer, LearningRateScheduler(config, optimizer))
        loop.optimizer_setup.set_megatron_hooks(model, trained.optimizer)
        self.job = loop.Job(config, rank, RunFolder.of(config), trained, train_stream, None)
        self.progress = Progress()
        self.interval = Interval(config, rank, model)
        self.last: loop.Step | None = None

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.job.trained.optimizer.param_groups[0]["lr"]

    def step(self) -> None:
        count_zeros = (self.progress.iteration + 1) % self.job.config.log_interval == 0
        state = self.job, self.progress, self.interval
        self.last = loop.train_step(*state, count_zeros=count_zeros, last=self.last)

    def loss_sum(self) -> float:
        """Sum of the losses of all tokens so far."""
        return self.interval.losses[0].item()


class Plain:
    """The model in plain torch with the weights and settings of `ours`."""

    def __init__(self, ours: Ours):
        config = self.config = ours.job.config
        fields = plain_torch.GPTConfig.__dataclass_fields__
        values = {name: getattr(config, name) for name in fields} | {
            "num_experts": config.num_experts if config.use_moe else 0
        }
        values["aux_loss_coeff"] = config.balancing_losses.get("aux_loss", 0.0)
        self.model = plain_torch.GPT(plain_torch.GPTConfig(**values))
        copy_weights(self.model, dict(ours.job.trained.model[0].module.named_parameters()))
        betas = (config.adam_beta1, config.adam_beta2)
        self.optimizer = plain_torch.build_adamw(
            self.model, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay
        )

    def step(self, microbatches: list[Tensor], lr: float) -> float:
        return plain_torch.train_step(
            self.model, self.optimizer, microbatches, lr=lr, clip_grad=self.config.clip_grad
        )


@torch.no_grad()
def copy_weights(plain: plain_torch.GPT, ours: dict[str, Tensor]) -> None:
    """Copies moe_exp's weights; Megatron keeps queries, keys and values group by group, plain torch all
    queries first.
    """
    plain.embedding.copy_(ours["embedding.word_embeddings.weight"])
    plain.output.copy_(ours["output_layer.weight"])
    plain.norm.weight.copy_(ours["decoder.final_layernorm.weight"])
    for index, block in enumerate(cast(list[plain_torch.Block], plain.blocks)):
        get = {name.partition(f"layers.{index}.")[2]: weight for name, weight in ours.items()}.__getitem__
        attention, mlp = block.attention, block.mlp
        by_group = get("self_attention.linear_qkv.weight").unflatten(
            0, (attention.num_groups, -1, attention.head_dim)
        )
        parts = by_group.split([attention.num_heads // attention.num_groups, 1, 1], dim=1)
        attention.qkv.copy_(torch.cat([part.flatten(0, 2) for part in parts]))
        attention.out.copy_(get("self_attention.linear_proj.weight"))
        block.attention_norm.weight.copy_(get("input_layernorm.weight"))
        block.mlp_norm.weight.copy_(get("pre_mlp_layernorm.weight"))
        if isinstance(mlp, plain_torch.MoE):
            mlp.router.copy_(get("mlp.router.weight"))
        mlp.up.copy_(
            get("mlp.experts.weight1" if isinstance(mlp, plain_torch.MoE) else "mlp.linear_fc1.weight")
        )
        mlp.down.copy_(
            get("mlp.experts.weight2" if isinstance(mlp, plain_torch.MoE) else "mlp.linear_fc2.weight")
        )


class Pair:
    """Both models side by side: one turn each on the same batch at the same learning rate."""

    def __init__(self, config: Config, rank: Runtime):
        self.ours = Ours(config, rank)
        self.plain = Plain(self.ours)

    def prepare(self) -> Callable[[], float]:
        """Plain torch's next step, with its batch ready."""
        config, first = self.ours.job.config, self.ours.progress.consumed_samples
        microbatches = list(self.ours.job.train_stream.batch(first, config.gbsz).split(config.mbsz))
        lr = self.ours.lr
        return lambda: self.plain.step(microbatches, lr)

    def check(self, num_steps: int = 3) -> float:
        """Prints the losses of the next steps; the largest relative difference."""
        worst, config = 0.0, self.ours.job.config
        for step in range(num_steps):
            plain, before = self.prepare()(), self.ours.loss_sum()
            self.ours.step()
            ours = (self.ours.loss_sum() - before) / (config.gbsz * config.seq_len)
            worst = max(worst, abs(ours - plain) / plain)
            print(
                f"  step {step + 1}: plain torch {plain:.7f}  moe_exp {ours:.7f}  relative difference"
                f" {abs(ours - plain) / plain:.1e}"
            )
        return worst

    def times_ms(self) -> tuple[float, float]:
        """One step of plain torch, then one of moe_exp."""
        return timed_ms(self.prepare()), timed_ms(self.ours.step)


def timed_ms(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e3


def measure(pair: Pair, name: str, *, num_pairs: int, warmup: int) -> str:
    """A row of the table: medians, and median and quartiles of the ratio within each pair."""
    for _ in range(warmup):
        pair.times_ms()
    gc.collect()
    times = [pair.times_ms() for _ in range(num_pairs)]
    plain, ours = (statistics.median(column) for column in zip(*times, strict=True))
    low, middle, high = statistics.quantiles([b / a for a, b in times], n=4)
    return f"| {name} | {plain:.1f} | {ours:.1f} | {middle:.2f} | {low:.2f} to {high:.2f} |"


# Where the time goes

# What is timed: (part of the step, where the function is, its name). A part's time is without that of the
# parts it calls.
OURS: list[tuple[str, Any, str]] = [
    ("data", one_iteration, "read_microbatch"),
    ("zero gradients", DistributedDataParallel, "zero_grad_buffer"),
    ("zero gradients", optimizer.ChainedOptimizer, "zero_grad"),
    ("forward: rest", schedules, "forward_step"),
    ("forward: norms", torch.nn.RMSNorm, "forward"),
    ("forward: attention, qkv, rotary, projection", SelfAttention, "forward"),
    ("forward: attention, kernel", CausalAttention, "forward"),
    ("forward: MLP or experts", MLP, "forward"),
    ("forward: MoE, router and losses", MoELayer, "route"),
    ("forward: MoE, router and losses", MoELayer, "auxiliary_loss"),
    ("forward: MoE, statistics for the log", MoEStatistics, "add"),
    ("forward: MoE, order of rows", LocalDispatcher, "row_order"),
    ("forward: MLP or experts", Experts, "forward"),
    ("forward: cross entropy", GPTModel, "compute_language_model_loss"),
    ("backward", schedules, "backward_step"),
    ("DDP: finish gradients", optimizer_setup, "finalize_model_grads"),
    ("optimizer: gradient norm", optimizer, "get_grad_norm_fp32"),
    ("optimizer: clipping", optimizer, "clip_grad_by_total_norm_fp32"),
    ("optimizer: count zeros", optimizer, "count_zeros_fp32"),
    ("optimizer: AdamW", Adam, "step"),
    (
        "optimizer: copies between model and shards",
        distrib_optimizer.DistributedOptimizer,
        "_copy_model_grads_to_main_grads",
    ),
    (
        "optimizer: copies between model and shards",
        distrib_optimizer.DistributedOptimizer,
        "_copy_main_params_to_model_params",
    ),
    ("optimizer: parameter gather", DistributedDataParallel, "start_param_sync"),
    ("optimizer: rest", optimizer.ChainedOptimizer, "step"),
    ("sums for the log", Interval, "add"),
]
PLAIN: list[tuple[str, Any, str]] = [
    ("zero gradients", torch.optim.AdamW, "zero_grad"),
    ("forward: rest", plain_torch.GPT, "forward"),
    ("forward: norms", plain_torch.Norm, "forward"),
    ("forward: attention, qkv, rotary, projection", plain_torch.Attention, "forward"),
    ("forward: attention, kernel", F, "scaled_dot_product_attention"),
    ("forward: MoE, router and losses", plain_torch.MoE, "route"),
    ("forward: MoE, router and losses", plain_torch.MoE, "auxiliary_loss"),
    ("forward: MoE, dispatch and combine", plain_torch.MoE, "forward"),
    ("forward: MLP or experts", plain_torch, "swiglu"),
    ("forward: cross entropy", F, "cross_entropy"),
    ("backward", torch.Tensor, "backward"),
    ("optimizer: gradient norm", torch.nn.utils, "clip_grad_norm_"),
    ("optimizer: AdamW", torch.optim.AdamW, "step"),
]


class Stopwatch:
    """Seconds by part; while a part runs that another one called, the other's watch stands still."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return timed


@contextmanager
def watched(parts: list[tuple[str, Any, str]], watch: Stopwatch) -> Iterator[None]:
    """Has `watch` time the functions in `parts`, and DDP's additions to its gradient buffer, in what is built
    and run inside.
    """
    make_hook = DistributedDataParallel._make_backward_post_hook

    def make_timed_hook(self: Any, parameter: Any) -> Any:
        return watch.wrap("DDP: add to gradient buffer", make_hook(self, parameter))

    with ExitStack() as stack:
        for part, owner, name in parts:
            stack.enter_context(patch.object(owner, name, watch.wrap(part, getattr(owner, name))))
        stack.enter_context(
            patch.object(DistributedDataParallel, "_make_backward_post_hook", make_timed_hook)
        )
        yield


def parts_table(build: Callable[[], Pair]) -> str:
    """Median ms of each part in a step of plain torch and of moe_exp. `build` makes the pair of models."""
    plain, ours = Stopwatch(), Stopwatch()
    with watched(OURS, ours):
        pair = build()

    def run() -> tuple[dict[str, float], dict[str, float]]:
        plain.seconds.clear()
        ours.seconds.clear()
        step = pair.prepare()
        with watched(PLAIN, plain):
            plain.wrap("everything else", step)()
        with watched(OURS, ours):
            ours.wrap("everything else", pair.ours.step)()
        return dict(plain.seconds), dict(ours.seconds)

    order = list(
        dict.fromkeys([part for part, _, _ in OURS] + ["DDP: add to gradient buffer", "everything else"])
    )
    rows = _median_rows(order, [run() for _ in range(PROFILED_STEPS + 2)][2:])
    return _table("part", [*rows, ("sum", sum(row[1] for row in rows), sum(row[2] for row in rows))])


def operator_table(pair: Pair, num_rows: int = 16) -> str:
    """Median ms that a step spends inside each operator of torch, the largest differences first."""
    steps = [
        (_operator_seconds(pair.prepare()), _operator_seconds(pair.ours.step))
        for _ in range(PROFILED_STEPS // 2)
    ]
    rows = _median_rows(sorted({name for step in steps for side in step for name in side}), steps)
    total = ("all operators", sum(row[1] for row in rows), sum(row[2] for row in rows))
    return _table(
        "operator, forward and backward",
        [*sorted(rows, key=lambda row: -abs(row[2] - row[1]))[:num_rows], total],
    )


def _operator_seconds(step: Callable[[], object]) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return {
        event.key: event.self_cpu_time_total / 1e6
        for event in profiler.key_averages()
        if event.key.startswith("aten::")
    }


def _median_rows(
    names: list[str], steps: list[tuple[dict[str, float], dict[str, float]]]
) -> list[tuple[str, float, float]]:
    rows = []
    for name in names:
        plain, ours = (
            statistics.median(side.get(name, 0.0) for side in sides) * 1e3
            for sides in zip(*steps, strict=True)
        )
        rows.append((name, plain, ours))
    return [row for row in rows if row[1] or row[2]]


def _table(heading: str, rows: list[tuple[str, float, float]]) -> str:
    lines = [f"| {heading} | plain torch, ms | moe_exp, ms | difference, ms |", "|---|---|---|---|"]
    return "\n".join(
        lines
        + [
            f"| {name.replace('aten::', '')} | {plain:.2f} | {ours:.2f} | {ours - plain:+.2f} |"
            for name, plain, ours in rows
        ]
    )


# The command


def config_of(name: str, arguments: argparse.Namespace) -> Config:
    """The small model on one rank; with --check without warm-up, which begins with a learning rate of 0."""
    settings = SETTINGS | {"gpus_per_node": "1", "threads_per_rank": arguments.threads} | MODELS[name]
    settings |= {"train_data": arguments.data, "data_dir": arguments.data_dir} | (
        {"warmup_iters": "0"} if arguments.check else {}
    )
    return load_config(settings, environ={})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps to time (default 40)")
    parser.add_argument(
        "--warmup", type=int, default=5, help="pairs before the first that counts (default 5)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both (default 1)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: both")
    parser.add_argument("--data", default="", help=".bin/.idx prefix; default: the embedded corpus")
    parser.add_argument(
        "--data-dir", default="data", help="where the embedded corpus is or will be (default data)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the losses of 3 steps and end; exit code 1 if they differ",
    )
    parser.add_argument("--profile", action="store_true", help="print the parts of a step")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    rows, tables, differ = [], [], False
    rank = start(config_of("dense", arguments))
    for name in arguments.models:
        config = config_of(name, arguments)
        print(f"{name}:", flush=True)
        pair = Pair(config, rank)
        differ |= pair.check() > TOLERANCE
        if not arguments.check:
            rows.append(measure(pair, name, num_pairs=arguments.pairs, warmup=arguments.warmup))
        if arguments.profile:
            tables += [f"### {name}", parts_table(partial(Pair, config, rank)), operator_table(pair)]
    stop()
    if rows:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        machine = (
            f"{cores} cores {platform.machine()}, torch {torch.__version__}, {arguments.threads} thread(s)"
        )
        print(f"\nMedian of {arguments.pairs} alternating pairs; {machine}.\n")
        print(
            "| model | plain torch, ms | moe_exp, ms | ratio, median | ratio, quartiles"
            " |\n|---|---|---|---|---|",
            *rows,
            sep="\n",
        )
    print(*(f"\n{table}" for table in tables), sep="\n")
    sys.exit("losses differ by more than 1e-5" if differ else 0)


if __name__ == "__main__":
    main()
