"""The ranks that use a model: this process alone, or those of a torchrun job; how a checkpoint's model is
spread over them, and the settings that follow.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.config import Config, ConfigError
from moe_exp.engine import faults, runtime
from moe_exp.engine.runtime import Runtime
from moe_exp.host.devices import count_gpus, num_cores
from moe_exp.host.progress import progress

T = TypeVar("T")
# Settings that only training uses, but that would be checked against the new sizes.
_NO_TRAINING: dict[str, Any] = {
    "mbsz": 1, "rampup_batch_size": "", "upcycle_from": "", "upcycle_granularity": 1, "load_dir": "",
    "train_data": "unused", "valid_data": "", "split": "", "data_stages": "", "eval_interval": 0,
    "keep_best": 0, "dump_iters": "", "dump_ranks": "", "profile_ranks": "0", "recompute": "none",
    "token_rounding": 0, "distributed_optimizer": False, "overlap": "false", "wandb_project": "",
    "optimizer": "adam", "optimizer_state_dtype": "fp32",
}  # fmt: skip
# The key/value cache is in our attention; kernels depend on this machine, not the training's. FP8 trainings
# save their weights in DTYPE.
_OUR_PARTS: dict[str, Any] = {
    "impl": "local", "expert_backend": "auto", "dispatcher": "auto", "fp8": "none",
    "cross_entropy": "megatron",
}  # fmt: skip
_DROPLESS: dict[str, Any] = {"moe_type": "dmoe", "capacity_factor": 0.0, "min_capacity": 0}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and nodes, as the settings of the same names."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    gpus_per_node: int = 0  # 0: as many as the sizes need
    threads_per_rank: int = 0  # 0: on a CPU its cores divided by the ranks
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int = 23456

    def settings(self, *, use_moe: bool) -> dict[str, Any]:
        """The equivalent fields of Config."""
        expert = self.pp * (self.ep * self.etp if use_moe else 1)
        num_ranks = math.lcm(self.tp * self.pp, expert)
        per_node = self.gpus_per_node or -(-num_ranks // self.nnodes)
        threads = self.threads_per_rank or (0 if count_gpus() else max(1, num_cores() // per_node))
        return {**vars(self), "gpus_per_node": per_node, "vpp": None, "cp": 1, "threads_per_rank": threads}


def config_for_use(
    folder: Path,
    layout: Layout,
    *,
    dtype: str | None = None,
    capacity: bool = False,
    document_mask: bool | None = False,
    seq_len: int = 0,
) -> Config:
    """Settings for inference with the model of an iteration's folder, by default in the training's dtype.
    With `capacity`, MOE_TYPE=moe drops tokens as in training; without, none is dropped, and its result does
    not depend on others in the batch. `document_mask`: as DOCUMENT_MASK; None: as in training. `seq_len`: of
    the sequences; 0: as in training. ValueError for an unusable checkpoint, ConfigError for a wrong layout.
    """
    saved = saved_config(folder)
    changes = layout.settings(use_moe=saved.use_moe) | _NO_TRAINING | _OUR_PARTS
    changes |= {} if capacity else _DROPLESS
    changes |= {} if document_mask is None else {"document_mask": document_mask}
    changes["gbsz"] = changes["nnodes"] * changes["gpus_per_node"]  # a row for each replica
    # which the ranks of TP can share
    changes["seq_len"] = -(-(seq_len or saved.seq_len) // layout.tp) * layout.tp
    config = saved_config(folder, **changes, **({"dtype": dtype} if dtype else {}))
    if problems := list(config.problems()):
        raise ConfigError(problems)
    return config


class Request:
    """Base of the dataclasses that describe a job; its ranks read them from a JSON file."""

    @classmethod
    def read(cls: type[T], file: str) -> T:
        """Reads a file with the text of `to_json`."""
        return TypeAdapter(cls).validate_json(Path(file).read_text(encoding="utf-8"))

    def to_json(self: Any) -> str:
        return json.dumps(asdict(self))


def batch_size_of(saved: Config, seq_len: int, most: int, *, capacity: bool) -> int:
    """Default batch size: with `capacity` the training's, else 256 MB of logits, at most `most`."""
    return saved.mbsz if capacity else max(1, min(most, (256 << 20) // (4 * seq_len * saved.vocab_size)))


def shared_batches(
    batches: Sequence[T], rank: Runtime, what: str, unit: str, size_of: Callable[[T], int]
) -> Iterator[tuple[T, bool]]:
    """This rank's batches, and whether they count, with a progress bar on the first rank. Batch i goes to
    replica i modulo their number; all run every step, as EP may span them: a replica without a batch gets one
    that does not count.
    """
    replicas, total = rank.groups.dp, sum(map(size_of, batches))
    with progress(what, total, unit=unit) if rank.is_first else nullcontext() as advance:
        for begin in range(0, len(batches), replicas.size()):
            step = batches[begin : begin + replicas.size()]
            counts = replicas.rank() < len(step)
            yield step[replicas.rank() if counts else 0], counts
            if advance is not None:
                advance(sum(map(size_of, step)))


def run_alone(config: Config, work: Callable[[Runtime], None]) -> None:
    """Runs `work` in this process, as the only rank."""
    rank = runtime.start_alone(config)
    try:
        work(rank)
    finally:
        runtime.stop()


def run_rank(config: Config, work: Callable[[Runtime], None]) -> None:
    """Runs `work` as a rank of a torchrun job; a ValueError prints one line and exits with 1."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO if os.environ.get("RANK") == "0" else logging.WARNING)
    with faults.stop_signal() as stop, faults.named_by_rank(stop):
        try:
            work(runtime.start(config))
        except ValueError as error:
            print(f"moe-exp: {error}", file=sys.stderr, flush=True)
            # skips the clean-up of process groups, which would wait for other ranks
            os._exit(1)
        runtime.stop()


def planned_quietly(plan: Callable[[], T]) -> T:
    """Result of `plan`, without logging: the launcher, which planned the same, has logged already."""
    logging.getLogger("moe_exp").setLevel(logging.ERROR)
    return plan()
