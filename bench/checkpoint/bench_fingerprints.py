"""What fingerprints cost: seconds per GB, their share of a save, and of a comparison of replicas.

    # 23 M parameters, bf16, one rank; 1 min on 2 cores
    python bench/checkpoint/bench_fingerprints.py
    python bench/checkpoint/bench_fingerprints.py --device cuda  # seconds per GB on a GPU alone

Sums of random values for the types that checkpoints have, processor time on a CPU and the device's time on a
GPU. Saves of one model with and without FINGERPRINTS, turn by turn, wall time until the checkpoint is
published; the files go to --folder, whose disk counts.
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_exp.checkpoint.format.fingerprints import multilinear_sum
from moe_exp.checkpoint.save import CheckpointWriter
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model
from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
from moe_exp.host.processes import free_port
from moe_exp.training.replica_checks import check_replicas

sys.path.append(str(Path(__file__).resolve().parents[1]))
from small_model import SETTINGS

_SETTINGS = {
    **SETTINGS, "gpus_per_node": "1", "num_layers": "2", "hidden_size": "512", "ffn_hidden_size": "512",
    "num_heads": "8", "vocab_size": "8192", "dtype": "bf16", "num_workers": "0", "threads_per_rank": "1",
}  # fmt: skip


def seconds_per_gb(dtype: torch.dtype, device: str) -> float:
    """Best of five sums over 128 MB."""
    values = torch.randn(4096, (128 << 20) // 4096 // dtype.itemsize).to(device, dtype)
    if device == "cpu":
        return min(_timed(lambda: multilinear_sum(values, (0, 0)), time.process_time) for _ in range(5)) / (
            values.nbytes / 1e9
        )
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        multilinear_sum(values, (0, 0))
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times) / (values.nbytes / 1e9)


def _timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    work()
    return clock() - begin


def saves(folder: Path, num_pairs: int) -> None:
    """Prints medians of saves without and with fingerprints, and of a comparison of replicas."""
    config = load_config(_SETTINGS, {})
    rank = runtime.start(config)
    model = build_model(config, rank)
    optimizer = build_optimizer(config, model)
    trained = Trained(model, optimizer, LearningRateScheduler(config, optimizer))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_bytes = 0
    for pair in range(num_pairs + 1):
        for on in (False, True) if pair % 2 else (True, False):
            saver = CheckpointWriter(config.model_copy(update={"fingerprints": on}), rank, folder)
            saver.begin(trained, Progress(1))
            saved = saver.finish()
            assert saved is not None and not saved.error, saved
            if pair:  # the first one warms up
                seconds[on].append(saved.seconds)
            num_bytes = saved.num_bytes
    off, on_ = (statistics.median(seconds[on]) for on in (False, True))
    print(
        f"\na checkpoint of {num_bytes / 1e9:.3g} GB: {off:.2f} s without, {on_:.2f} s with fingerprints,"
        f" ratio {on_ / off:.2f}"
    )
    weights = sum(p.nbytes for chunk in model for p in chunk.parameters())
    spent = min(check_replicas(config, rank, trained, Progress(1), None) for _ in range(3))
    print(f"comparison of replicas, {weights / 1e6:.0f} MB of parameters on the rank: {spent:.3f} s")
    runtime.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=5, help="saves with and without")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where checkpoints are written (default: the system's for temporary files)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {options.device}, one thread\n\n| type | seconds"
        " per GB |\n|---|---|"
    )
    for dtype in (torch.float32, torch.bfloat16):
        print(
            f"| {str(dtype).removeprefix('torch.')} | {seconds_per_gb(dtype, options.device):.3g} |",
            flush=True,
        )
    if options.device == "cpu":
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
        }
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            saves(folder, options.pairs)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
