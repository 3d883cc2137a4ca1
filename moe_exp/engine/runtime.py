"""Sets up ranks, devices, process groups, Megatron's parallel state and seeds."""

import atexit
import datetime
import gc
import json
import os
import random
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from moe_exp.config import Config, setting_error
from moe_exp.host.devices import count_gpus, driver_version, num_cores
from moe_exp.host.exit_codes import RENDEZVOUS_KEY, STANDS_BY
from moe_exp.host.megatron_versions import quiet_loggers

from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class Runtime:
    """One rank of a job: its GPU (or the CPU) and Megatron's process groups."""

    rank: int
    world_size: int
    device: torch.device
    host: str
    groups: ProcessGroupCollection

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints for all ranks."""
        return self.rank == 0


def choose_communication() -> tuple[str, str]:
    """Returns (backend of torch.distributed, reason for it)."""
    return ("nccl", "found a CUDA device") if torch.cuda.is_available() else ("gloo", "no CUDA device")


def stand_by() -> None:
    """If this is a standby process (`launch.agent.StandBys`), waits for a rank's environment variables."""
    if STANDS_BY not in os.environ:
        return
    # the first optimizer and the first log would import these
    import torch._dynamo
    import torch.utils.tensorboard  # noqa: F401

    freeze_garbage()
    with os.fdopen(int(os.environ[STANDS_BY]), "rb") as file:
        environ = file.read()
    if not environ:  # the agent has ended
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(environ))


def start(config: Config) -> Runtime:
    """Joins the existing process group, or torchrun's job if there is no group.

    `stop` does not destroy a process group that existed before this call.
    Raises ValueError if the number of ranks is not NNODES * GPUS_PER_NODE, or if environment variables
    contradict DETERMINISTIC.
    """
    global _found
    rank, world_size = _place()
    if world_size != config.world_size:
        ranks = f"{config.world_size} ranks with NNODES={config.nnodes}, but torchrun started {world_size}"
        fix = "start torchrun with NNODES nodes and GPUS_PER_NODE ranks per node"
        raise setting_error("gpus_per_node", config.gpus_per_node, f"requires {ranks}", fix)
    device = _device(config, int(os.environ.get("LOCAL_RANK") or rank % config.gpus_per_node))
    if is_in_group():
        _found = torch.distributed.group.WORLD
    else:
        _init_group(device, rank, world_size)
    return joined(config, rank, device)


def _init_group(device: torch.device, rank: int, world_size: int) -> None:
    timeout = datetime.timedelta(minutes=30)
    # With device_id NCCL connects at once, so that a missing GPU is an error now instead of in training.
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    torch.distributed.init_process_group(
        choose_communication()[0], timeout=timeout, rank=rank, world_size=world_size,
        store=PrefixStore(os.environ.get(RENDEZVOUS_KEY, ""), store),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip


def join_job(config: Config) -> None:
    """Creates torchrun's process group and keeps it for later runs. Does nothing if a group exists."""
    # the ranks could not connect a second time
    if not is_in_group():
        atexit.register(_leave)
        rank, world_size = _place()
        _init_group(_device(config, int(os.environ["LOCAL_RANK"])), rank, world_size)


# Default process groups: the one that `start` found, and the one created by `share_alone`.
_found: Any = None
_alone: Any = None


def is_rank() -> bool:
    """Whether this process is already a rank: torchrun has started it, or it is in a process group."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys() or is_in_group()


def is_in_group() -> bool:
    """Whether this process is in a process group other than the one that `share_alone` creates."""
    return torch.distributed.is_initialized() and torch.distributed.group.WORLD is not _alone


def _place() -> tuple[int, int]:
    """Rank and world size from the process group, or from torchrun's environment if there is no group."""
    if is_in_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def world_settings() -> dict[str, int]:
    """GPUS_PER_NODE, NNODES and NODE_RANK. Raises ValueError if Megatron's parallel state exists."""
    if parallel_state.model_parallel_is_initialized():
        fix = "call parallel_state.destroy_model_parallel() first, or train in another process"
        raise ValueError(f"parallel_state: must not be initialized before training. Fix: {fix}.")
    rank, world_size = _place()
    found = os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or world_size
    per_node = min(int(found), world_size)
    return {"gpus_per_node": per_node, "nnodes": world_size // per_node, "node_rank": rank // per_node}


def start_alone(config: Config) -> Runtime:
    """Like `start`, but for a program with a single rank; requires no launcher and no port."""
    device = _device(config, 0)
    torch.distributed.init_process_group(choose_communication()[0], store=HashStore(), rank=0, world_size=1)
    return joined(config, 0, device)


def share_alone(config: Config) -> Runtime:
    """Runtime of a single rank. All calls share a process group. ValueError if the group has more ranks."""
    global _alone
    if not torch.distributed.is_initialized():
        atexit.register(_leave)
        rank = start_alone(config)
        _alone = torch.distributed.group.WORLD
        return rank
    if (world_size := torch.distributed.get_world_size()) > 1:
        fix = "load the model in a separate process, or use moe-exp generate, score or eval with --tp or --ep"
        raise setting_error("world_size", world_size, "must be 1 to load a model", fix)
    device = _device(config, 0)
    if not parallel_state.model_parallel_is_initialized():
        return joined(config, 0, device)
    return Runtime(0, 1, device, socket.gethostname(), ProcessGroupCollection.use_mpu_process_groups())


def joined(config: Config, rank: int, device: torch.device) -> Runtime:
    """Sets up parallel state and seeds of a rank whose default process group exists."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep if config.use_moe else 1,
        expert_tensor_parallel_size=config.etp if config.use_moe else 1,
        create_gloo_process_groups=False,
    )
    seed_everything(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Runtime(rank, config.world_size, device, socket.gethostname(), groups)


def make_deterministic(config: Config) -> None:
    """Enables deterministic algorithms; operations that have none raise errors. Call this before GPU work."""
    if torch.cuda.is_available():
        for line in config.environment_problems(os.environ):
            raise ValueError(line)
        # our launcher has already set these variables, bare torchrun has not
        os.environ.update(config.deterministic_environment(os.environ))
    # Not warn_only: PyTorch's attention would keep its non-deterministic backward.
    torch.use_deterministic_algorithms(True)
    # Our code never reads uninitialized memory, so filling new tensors would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _device(config: Config, local_rank: int) -> torch.device:
    """Applies DETERMINISTIC and THREADS_PER_RANK, filters warnings and returns this rank's device."""
    quiet_third_parties()
    if config.deterministic:
        make_deterministic(config)
    if count_gpus() and not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "unknown reason"
        except (AssertionError, RuntimeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
        rule = f"torch {torch.__version__} cannot use this host's {count_gpus()} GPUs: {reason}"
        fix = f"install a PyTorch build for this driver (CUDA {driver_version()})"
        raise ValueError(f"CUDA: {rule}. Fix: {fix}, or set CUDA_VISIBLE_DEVICES= to run on the CPU.")
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        # OFFLOAD_OPTIMIZER updates the weights with these threads.
        of_rank = max(1, num_cores() // config.gpus_per_node) if config.offload_optimizer else 0
        if threads := config.threads_per_rank or of_rank:
            torch.set_num_threads(threads)
        return torch.device("cuda", local_rank)
    torch.set_num_threads(config.threads_per_rank or 1)
    return torch.device("cpu")


def seed_everything(config: Config) -> None:
    """Seeds Python, numpy, PyTorch and Megatron; `initial_weights.py` seeds its own random generators."""
    # Megatron adds the tensor parallel rank, so that dropout differs between ranks.
    seed = config.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def quiet_third_parties() -> None:
    """Silences Megatron's messages about missing optional packages; `moe-exp doctor` reports them."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
    # Megatron calls collectives by names that torch 2.13 deprecates.
    for module in (r"torch\.distributed.*", r"megatron\..*"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    quiet_loggers()


def freeze_garbage() -> None:
    """Excludes existing objects from garbage collection, because Megatron collects garbage at every save."""
    gc.collect()
    gc.freeze()
    # otherwise libraries print long reports of leaked objects at exit
    atexit.register(gc.unfreeze)


def stop() -> None:
    """Destroys Megatron's parallel state. Keeps the process group only if it existed before `start`."""
    if torch.distributed.is_initialized():
        groups = parallel_state._global_process_group_list or ()  # which Megatron does not destroy
        parallel_state.destroy_model_parallel()
        if torch.distributed.group.WORLD is not _found:
            torch.distributed.destroy_process_group()
        else:
            for group in groups:
                if isinstance(group, torch.distributed.ProcessGroup):
                    torch.distributed.destroy_process_group(group)


def _leave() -> None:
    """Destroys the process group that was kept for later runs. NCCL requires this at exit."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


T = TypeVar("T")


def on_first_rank(make: Callable[[], T]) -> T | None:
    """Like `from_first_rank`, but returns None on the other ranks. All ranks must call this."""
    made: list[T] = []
    from_first_rank(lambda: made.append(make()))
    return made[0] if made else None


def from_first_rank(make: Callable[[], T]) -> T:
    """Calls `make` on rank 0, and returns its result or raises its ValueError on every rank."""
    box: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            box = [(make(), None)]
        except ValueError as caught:  # sent to all ranks, so that none waits for one that has failed
            box = [(None, caught)]
    torch.distributed.broadcast_object_list(box)
    value, error = box[0]
    if error is not None:
        raise error
    return cast(T, value)


def on_every_rank(make: Callable[[], T]) -> T:
    """Calls `make` and returns this rank's result. A ValueError on any rank is raised on every rank."""
    value, error = None, None
    try:
        value = make()
    except ValueError as caught:
        error = caught
    for found in from_all_ranks(error):
        if found is not None:
            raise found
    return cast(T, value)


def from_all_ranks(value: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """Each rank's `value`, in rank order. All ranks of `group` (None: all ranks) must call this."""
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, value, group=group)
    return found
