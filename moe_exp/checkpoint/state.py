"""The state in a checkpoint: sharded model, optimizer, schedule, random streams and progress."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_exp.checkpoint.format.keys import model_state
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.optimizer_state import optimizer_groups, owned_state, shards_of
from moe_exp.config import Config
from moe_exp.engine.optimizer_setup import LearningRateScheduler
from moe_exp.engine.runtime import Runtime

from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_attr_wrapped_model

# fully_reshardable: one layout-independent tensor per parameter and optimizer moment.
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


@dataclass
class Progress:
    """Progress of training: completed iterations, consumed samples, and other counts."""

    iteration: int = 0  # completed iterations
    consumed_samples: int = 0  # index of the next sample in `sample_order`, not counting `skipped_samples`
    skipped_iterations: int = 0  # iterations without an optimizer step
    sample_order: dict[str, Any] | None = None  # `SampleOrder.facts`; None in older versions' checkpoints
    consumed_tokens: int = 0  # counted with the settings at the time of each iteration
    consumed_flops: int = 0  # model FLOPs, counted likewise
    # [first, end) of samples that are skipped in the order, see `data.skipping`
    skipped_samples: list[list[int]] = field(default_factory=list)
    num_averaged: int = 0  # updates of the moving average of the weights (EMA_DECAY); 0: no average yet
    # `SpikeDetector.state`, to detect a spike right after a resume; None: unknown
    spike_windows: dict[str, Any] | None = None
    # last iteration whose gradients SDC_CHECK_EVERY has checked, or after which it was switched on
    checked: int | None = None

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps so far."""
        return self.iteration - self.skipped_iterations

    def add(self, config: Config, batch_size: int, *, flops: int) -> None:
        """Adds one iteration with `batch_size` samples and `flops` model FLOPs to the counts."""
        self.iteration += 1
        self.consumed_samples += batch_size
        self.consumed_tokens += batch_size * config.seq_len
        self.consumed_flops += flops


@dataclass(frozen=True)
class Trained:
    """Model, optimizer and schedule, which a checkpoint restores in addition to `Progress`."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: LearningRateScheduler


@contextlib.contextmanager
def parameters_in_sync(model: list[DistributedDataParallel]) -> Iterator[None]:
    """Context in which all parameters are up to date, even if the parameter gather is overlapped."""
    # With overlapped gather, updated parameters arrive only during the next forward pass.
    overlapped = model if model[0].ddp_config.overlap_param_gather else []
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in overlapped:
        chunk.enable_forward_pre_hook()


def whole_state(config: Config, runtime: Runtime, trained: Trained, progress: Progress) -> dict[str, Any]:
    """State dict to save. All ranks must call this function."""
    weights = weights_state(runtime, trained.model, None)
    return {
        **weights,
        "optimizer": optimizer_groups(trained.optimizer),
        "optimizer_shards": list(shards_of(owned_state(trained.optimizer), weights)),
        "scheduler": trained.scheduler.state_dict(),
        "rng_state": rng_state(runtime),
        "progress": vars(progress).copy(),
        "config": config.model_dump(),
        "layout": layout(config, runtime),
    }


def sharding_metadata(runtime: Runtime) -> dict[str, Any]:
    """Metadata for Megatron's `sharded_state_dict`."""
    return {**CONTENT, "dp_cp_group": runtime.groups.dp_cp}


def weights_state(
    runtime: Runtime, model: list[DistributedDataParallel], reader: CheckpointReader | None
) -> dict[str, Any]:
    """Weights of this rank's chunks `model0`, `model1`..., under the keys of `reader` (None: of Megatron)."""
    metadata = sharding_metadata(runtime)
    # Unwrapped, because the data-parallel wrapper would prefix Megatron's keys with `module.`.
    return {f"model{i}": model_state(unwrapped(chunk), metadata, reader) for i, chunk in enumerate(model)}


def unwrapped(chunk: DistributedDataParallel) -> Any:
    """The GPTModel inside its data-parallel and half-precision wrappers."""
    return get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)


def layout(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Parallel sizes and device type, on which the random streams depend."""
    return {"tp": config.tp, "pp": config.pp, "device": runtime.device.type}


def rng_state(runtime: Runtime) -> ShardedObject:
    """The random streams of this rank's tensor- and pipeline-parallel position."""
    state = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if runtime.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    groups = runtime.groups
    shape, place = (groups.pp.size(), groups.tp.size()), (groups.pp.rank(), groups.tp.rank())
    # the same on all data-parallel ranks; the first of them writes it
    return ShardedObject("rng_state", [state], shape, place, replica_id=groups.dp_cp.rank())


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    # a copy, because Megatron changes the given dict with each use
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(state["tracker"]))
