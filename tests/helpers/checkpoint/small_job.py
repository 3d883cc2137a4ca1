"""A small training job, built inside ranks that `run_on_ranks` starts, or started whole."""

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoint.file_limit import no_file_over
from helpers.jsonl import BinIdxWriter
from helpers.ranks import free_port, rank_variables, start_process
from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.runs.records import read_metrics

VOCAB = 256


def write_tokens(folder: Path) -> Path:
    """Training data of a few thousand tokens."""
    with BinIdxWriter(folder / "tokens", vocab_size=VOCAB) as writer:
        for number in range(200):
            writer.add_document([(number * 7 + i * i) % VOCAB for i in range(30)])
    return folder / "tokens"


def small_settings(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Settings of a job whose run folder is `folder`/`name`; its data have to be in `folder`."""
    return {
        **SMALL, "gpus_per_node": 1, "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48,
        "num_heads": 4, "num_query_groups": 2, "seq_len": 16, "vocab_size": VOCAB, "num_experts": 4,
        "topk": 2, "mbsz": 2, "gbsz": 4, "dtype": "fp32", "train_iters": 8, "warmup_iters": 4,
        "decay_iters": 8, "lr": 0.001, "z_loss_coeff": 0.001, "log_interval": 1, "eval_interval": 0,
        "save_interval": 0, "train_data": str(folder / "tokens"), "run_dir": str(folder), "run_name": name,
        "data_dir": str(folder),
    } | changes  # fmt: skip


def build_small(settings: dict[str, Any], port: int) -> Any:
    """On a rank: the job and its progress, as a run builds them."""
    from moe_exp.engine import runtime
    from moe_exp.training import loop

    os.environ["MASTER_PORT"] = str(port)
    config = load_config(settings, {})
    return loop.build(config, runtime.start(config))


def train_whole(settings: dict[str, Any], port: int) -> None:
    """On a rank: a run to its end."""
    from moe_exp.training import loop

    os.environ["MASTER_PORT"] = str(port)
    assert loop.main([f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]) == 0


def files_of(folder: Path) -> dict[str, bytes]:
    """The tensors of a checkpoint, file by file."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.distcp"))}


def start_run(
    settings: dict[str, Any], printed: Path, file_limit: int | None = None, before: tuple[Any, ...] = ()
) -> list[Any]:
    """Starts a whole run, a process per rank, which prints into the file `printed`. `before`: a function and
    its arguments, which each rank calls first.
    """
    port, num_ranks = free_port(), settings["gpus_per_node"]
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    variables = [rank_variables(rank, num_ranks, port) for rank in range(num_ranks)]
    return [
        start_process(_run_rank, one, flags, printed, file_limit, before, daemon=True) for one in variables
    ]


def _run_rank(
    variables: dict[str, str],
    flags: list[str],
    printed: Path,
    file_limit: int | None,
    before: tuple[Any, ...],
) -> None:
    stream = printed.open("a")
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    from moe_exp.training import loop

    if before:
        function, *given = before
        function(*given)
    sys.argv = ["train", *flags]
    with no_file_over(file_limit) if file_limit else nullcontext():
        sys.exit(loop.main(flags))


def end_run(processes: list[Any], printed: Path, *, timeout: float = 120.0) -> list[int]:
    """Waits for the end of a run; exit codes by rank."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    ended = [process.exitcode is not None for process in processes]
    kill_run(processes)
    assert all(ended), f"did not end in {timeout} s:\n{printed.read_text()}"
    return [process.exitcode for process in processes]


def run_to_end(settings: dict[str, Any], *, timeout: float = 120.0) -> tuple[int, str]:
    """A whole run: the exit code of all of its ranks, and what they printed."""
    printed = Path(settings["run_dir"]) / f"{settings['run_name']}.printed"
    printed.write_text("")
    (code,) = set(end_run(start_run(settings, printed), printed, timeout=timeout))
    return code, printed.read_text()


def kill_run(processes: list[Any]) -> None:
    """SIGKILL to all ranks."""
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Records of a run folder's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return [record for record in read_metrics(path) if record["kind"] == kind] if path.exists() else []
