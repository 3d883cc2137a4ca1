"""Step time of moe_exp against the same tiny GPT in plain torch (`plain_torch.py`), in one process, turn by turn.

    python bench/bench_step.py                  # median ratio of 40 alternating pairs, dense and MoE; 1 min on 2 cores
    python bench/bench_step.py --profile        # then where the time goes, part by part and operator by operator
    python bench/bench_step.py --check          # only: the same weights give the same losses for 3 steps

A step is `moe_exp.train.train_step` on one rank: batches from the SampleStream, Megatron's schedule, DDP, clipping and
distributed optimizer. Plain torch gets its batches ready-made. Both start from the same weights at PRESET=cpu.
"""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
import argparse
import gc
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing

import torch
from step_profile import operator_table, parts_table
from torch import Tensor

import plain_torch
from moe_exp import train
from moe_exp.checkpoint import Progress, Trained
from moe_exp.config import Config, load_config
from moe_exp.interval import Interval
from moe_exp.model import build_model
from moe_exp.optim import BatchSchedule, build_optimizer, build_scheduler
from moe_exp.run_folder import RunFolder
from moe_exp.runtime import Runtime, start, stop

MODELS = {"dense": {"use_moe": "false"}, "MoE": {"use_moe": "true", "moe_type": "dmoe"}}
TOLERANCE = 1e-5


class Ours:
    """moe_exp's model and training state, built as `moe_exp.train.build` does, without a run folder."""

    def __init__(self, config: Config, rank: Runtime):
        train_stream, _ = train.build_data(config)
        model = build_model(config, rank)
        optimizer = build_optimizer(config, model, rank)
        trained = Trained(model, optimizer, build_scheduler(config, optimizer))
        train.connect(model, trained)
        self.job = train.Job(config, rank, RunFolder.of(config), trained, train_stream, None, BatchSchedule(config))
        self.progress = Progress()
        self.interval = Interval(config, rank, model)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.job.trained.optimizer.param_groups[0]["lr"]

    def step(self) -> None:
        count_zeros = (self.progress.iteration + 1) % self.job.config.log_interval == 0
        train.train_step(self.job, self.progress, self.interval, count_zeros=count_zeros)

    def loss_sum(self) -> float:
        """Sum of the losses of all micro-batches so far."""
        return self.interval.sums[0].item()


class Plain:
    """The model in plain torch with the weights and settings of `ours`."""

    def __init__(self, ours: Ours):
        config = self.config = ours.job.config
        fields = plain_torch.GPTConfig.__dataclass_fields__
        values = {name: getattr(config, name) for name in fields} | {"num_experts": config.num_experts if config.use_moe else 0}
        self.model = plain_torch.GPT(plain_torch.GPTConfig(**values))
        copy_weights(self.model, dict(ours.job.trained.model[0].module.named_parameters()))
        betas = (config.adam_beta1, config.adam_beta2)
        self.optimizer = plain_torch.build_adamw(self.model, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay)

    def step(self, microbatches: list[Tensor], lr: float) -> float:
        return plain_torch.train_step(self.model, self.optimizer, microbatches, lr=lr, clip_grad=self.config.clip_grad)


@torch.no_grad()
def copy_weights(plain: plain_torch.GPT, ours: dict[str, Tensor]) -> None:
    """Copies moe_exp's weights; Megatron keeps queries, keys and values group by group, plain torch all queries first."""
    plain.embedding.copy_(ours["embedding.word_embeddings.weight"])
    plain.output.copy_(ours["output_layer.weight"])
    plain.norm.weight.copy_(ours["decoder.final_layernorm.weight"])
    for index, block in enumerate(plain.blocks):
        get = {name.partition(f"layers.{index}.")[2]: weight for name, weight in ours.items()}.__getitem__
        attention, mlp = block.attention, block.mlp
        by_group = get("self_attention.linear_qkv.weight").unflatten(0, (attention.num_groups, -1, attention.head_dim))
        parts = by_group.split([attention.num_heads // attention.num_groups, 1, 1], dim=1)
        attention.qkv.copy_(torch.cat([part.flatten(0, 2) for part in parts]))
        attention.out.copy_(get("self_attention.linear_proj.weight"))
        block.attention_norm.weight.copy_(get("input_layernorm.weight"))
        block.mlp_norm.weight.copy_(get("pre_mlp_layernorm.weight"))
        if isinstance(mlp, plain_torch.MoE):
            mlp.router.copy_(get("mlp.router.weight"))
        mlp.up.copy_(get("mlp.experts.weight1" if isinstance(mlp, plain_torch.MoE) else "mlp.linear_fc1.weight"))
        mlp.down.copy_(get("mlp.experts.weight2" if isinstance(mlp, plain_torch.MoE) else "mlp.linear_fc2.weight"))


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
        worst, num_microbatches = 0.0, self.ours.job.config.num_microbatches
        for step in range(num_steps):
            plain, before = self.prepare()(), self.ours.loss_sum()
            self.ours.step()
            ours = (self.ours.loss_sum() - before) / num_microbatches
            worst = max(worst, abs(ours - plain) / plain)
            print(f"  step {step + 1}: plain torch {plain:.7f}  moe_exp {ours:.7f}  relative difference {abs(ours - plain) / plain:.1e}")
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


def free_port() -> int:
    with closing(socket.socket()) as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def config_of(name: str, arguments: argparse.Namespace) -> Config:
    """PRESET=cpu on one rank; for --check without warm-up, whose first step would have a learning rate of 0."""
    settings = {"preset": "cpu", "gpus_per_node": "1", "threads_per_rank": str(arguments.threads)} | MODELS[name]
    settings |= {"train_data": arguments.data, "data_dir": arguments.data_dir} | ({"warmup_iters": "0"} if arguments.check else {})
    return load_config(settings, environ={})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps to time (default 40)")
    parser.add_argument("--warmup", type=int, default=5, help="pairs before the first that counts (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both (default 1)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: both")
    parser.add_argument("--data", default="", help=".bin/.idx prefix; default: the embedded corpus")
    parser.add_argument("--data-dir", default="data", help="where the embedded corpus is or will be (default data)")
    parser.add_argument("--check", action="store_true", help="compare the losses of 3 steps and end; exit code 1 if they differ")
    parser.add_argument("--profile", action="store_true", help="print the parts of a step")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
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
            tables += [f"### {name}", parts_table(lambda config=config: Pair(config, rank)), operator_table(pair)]
    stop()
    if rows:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        machine = f"{cores} cores {platform.machine()}, torch {torch.__version__}, {arguments.threads} thread(s)"
        print(f"\nMedian of {arguments.pairs} alternating pairs; {machine}.\n")
        print("| model | plain torch, ms | moe_exp, ms | ratio, median | ratio, quartiles |\n|---|---|---|---|---|", *rows, sep="\n")
    print(*(f"\n{table}" for table in tables), sep="\n")
    sys.exit("losses differ by more than 1e-5" if differ else 0)


if __name__ == "__main__":
    main()
