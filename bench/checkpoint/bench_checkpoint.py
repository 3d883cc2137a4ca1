"""Saving and loading a checkpoint against torch.save and torch.load of the same state, in one job, turn by
turn.

    # 207 million parameters, 3.3 GB; about 5 min on 2 cores
    torchrun --nproc-per-node 2 bench/checkpoint/bench_checkpoint.py
    torchrun --nproc-per-node 2 bench/checkpoint/bench_checkpoint.py --experts 8 --repeats 1  # a try; 30 s

The model is an MoE with many experts, spread over the ranks (EP), so that it is built quickly. The peer saves
what a rank holds, its weights, main weights and both moments, each rank into a file of its own, which nothing
but the same layout could read again; then syncs it, as we do. A time is that of the slowest rank, the median
of the repeats. Files come from the page cache when they are read.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_exp.checkpoint.format.folders import Manifest, iteration_folder
from moe_exp.checkpoint.integrity import find_source
from moe_exp.checkpoint.load import load
from moe_exp.checkpoint.save import CheckpointWriter
from moe_exp.checkpoint.state import Progress
from moe_exp.config import Config, load_config
from moe_exp.data.tokens.tokens import write_token_files
from moe_exp.engine import runtime
from moe_exp.planner.costs.params import checkpoint_bytes, count_parameters
from moe_exp.training import loop
from moe_exp.training.interval import Interval

sys.path.append(str(Path(__file__).resolve().parents[1]))
from small_model import SETTINGS

SEQ_LEN, VOCAB = 64, 1024


def settings(folder: Path, num_ranks: int, num_experts: int) -> Config:
    """A model of 2 layers, whose parameters are nearly all in the experts."""
    values = {
        **SETTINGS, "gpus_per_node": num_ranks, "ep": num_ranks, "num_layers": 2, "hidden_size": 256,
        "ffn_hidden_size": 1024, "num_heads": 4, "num_query_groups": 4, "seq_len": SEQ_LEN,
        "vocab_size": VOCAB, "num_experts": num_experts, "topk": 2, "mbsz": 1, "gbsz": num_ranks,
        "dtype": "fp32", "train_data": str(folder / "tokens"), "eval_interval": 0, "run_dir": str(folder),
        "run_name": "bench", "data_dir": str(folder), "train_iters": 1000,
    }  # fmt: skip
    return load_config(values, {})


def write_tokens(folder: Path) -> None:
    documents = ([(start + 3 * i) % VOCAB for i in range(500)] for start in range(200))
    write_token_files(folder / "tokens", documents, vocab_size=VOCAB)


def state_of_rank(job: loop.Job) -> dict[str, torch.Tensor]:
    """What this rank holds: the same numbers, as plain tensors of their own."""
    state = {
        f"model.{name}": value.detach().clone() for name, value in job.trained.model[0].named_parameters()
    }
    for number, optimizer in enumerate(
        getattr(job.trained.optimizer, "chained_optimizers", [job.trained.optimizer])
    ):
        for index, (parameter, moments) in enumerate(optimizer.optimizer.state.items()):
            tensors = {"main": parameter, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
            state |= {f"{number}.{index}.{name}": value.detach().clone() for name, value in tensors.items()}
    return state


class Bench:
    """One job, and the seconds of everything that was done."""

    def __init__(self, job: loop.Job, progress: Progress, folder: Path):
        self.job, self.progress, self.folder = job, progress, folder
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.interval = Interval(job.config, job.runtime, job.trained.model)

    def timed(self, name: str, act: Callable[[], Any]) -> Any:
        """Calls `act` on all ranks at once and keeps the time of the slowest."""
        dist.barrier()
        start = time.monotonic()
        result = act()
        self.add(name, time.monotonic() - start)
        return result

    def add(self, name: str, seconds: float) -> None:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.seconds[name].append(slowest.item())

    def step(self) -> None:
        loop.train_step(self.job, self.progress, self.interval, count_zeros=False)

    def peer(self, state: dict[str, torch.Tensor]) -> int:
        """torch.save, torch.load and the copy into the tensors; returns the bytes of all ranks."""
        path = self.folder / f"rank{dist.get_rank()}.pt"

        def save() -> None:
            with path.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        def read() -> None:
            for name, value in torch.load(path, weights_only=True).items():
                state[name].copy_(value)

        self.timed("torch save", save)
        self.timed("torch load", read)
        num_bytes = torch.tensor(path.stat().st_size)
        dist.all_reduce(num_bytes)
        path.unlink()
        return int(num_bytes)

    def ours(self, *, asynchronous: bool) -> None:
        """A save and, where it is not asynchronous, a load."""
        config = self.job.config.model_copy(update={"async_save": asynchronous})
        saver = CheckpointWriter(config, self.job.runtime, self.job.folder.checkpoints)
        if not asynchronous:
            saved = self.timed(
                "save", lambda: (saver.begin(self.job.trained, self.progress), saver.finish())[1]
            )
            assert not saved.error, saved.error
            source = self.timed("verify", lambda: find_source(self.job.folder.checkpoints, checksums=True))
            self.timed("load", lambda: load(config, self.job.runtime, source.folder, self.job.trained))
            return
        self.timed("wait of training", lambda: saver.begin(self.job.trained, self.progress))
        start = time.monotonic()
        while saver.is_writing:
            time.sleep(0.01)
        self.add("written meanwhile", time.monotonic() - start)
        self.seconds["wait of training"][-1] += (
            self.timed("publish", lambda: saver.finish()) and self.seconds["publish"][-1]
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=130, help="per layer; 1.6 million parameters each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="a disk with room for three checkpoints",
    )
    arguments = parser.parse_args()
    folder = arguments.folder / f"bench_checkpoint_{os.environ['MASTER_PORT']}"
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0":
        write_tokens(folder)
    try:
        measure(settings(folder, int(os.environ["WORLD_SIZE"]), arguments.experts), folder, arguments.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(config: Config, folder: Path, repeats: int) -> None:
    """Everything, and the table."""
    job, progress = loop.build(config, runtime.start(config))
    bench = Bench(job, progress, folder)
    bench.step()  # makes the moments
    state = state_of_rank(job)
    for _ in range(repeats):
        peer_bytes = bench.peer(state)
        bench.ours(asynchronous=False)
        manifest = Manifest.read(iteration_folder(job.folder.checkpoints, progress.iteration))
        bench.ours(asynchronous=True)
        bench.timed("step", bench.step)
    assert manifest is not None
    if job.runtime.is_first:
        print_table(
            config,
            {name: statistics.median(values) for name, values in bench.seconds.items()},
            manifest.num_bytes,
            peer_bytes,
        )
    dist.barrier()
    runtime.stop()


def print_table(config: Config, seconds: dict[str, float], num_bytes: int, peer_bytes: int) -> None:
    """Markdown; a ratio below 1 is better than torch."""
    rows = [
        ("save, s", seconds["save"], seconds["torch save"]),
        ("wait of training with ASYNC_SAVE, s", seconds["wait of training"], seconds["torch save"]),
        ("load, checksums compared, s", seconds["verify"] + seconds["load"], seconds["torch load"]),
        ("load, sizes compared, s", seconds["load"], seconds["torch load"]),
        ("GB on disk", num_bytes / 1e9, peer_bytes / 1e9),
    ]
    print(
        f"{count_parameters(config).total / 1e6:.1f} million parameters, {config.dtype}, {config.world_size}"
        f" ranks, EP {config.ep}"
    )
    print(f"bytes computed {checkpoint_bytes(config) / 1e9:.3f} GB, a step takes {seconds['step']:.2f} s\n")
    print("| | moe_exp | torch.save, torch.load | ratio |\n|---|---|---|---|")
    for name, ours, theirs in rows:
        print(f"| {name} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
