"""Bytes on every rank: weights, gradients, optimizer, activations, buffers, overhead. No torch."""

import math
from dataclasses import dataclass, field

from moe_exp.config import Config
from moe_exp.planner.costs.activations import Activations, Parts, activations_of, width_of
from moe_exp.planner.costs.constants import free
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.params import embedding_moment_bytes, optimizer_state_bytes, tables_of_stages
from moe_exp.planner.costs.products import fp8_parts
from moe_exp.planner.hardware import Hardware

# Of torch's allocator before the first micro-batch: cuBLAS workspaces of two threads (8.1 MiB each), that of
# Transformer Engine (4 MiB), a batch and its mask; 26 to 29 MiB in three of four runs.
_WORKSPACE_BYTES = 27 * 2**20
_PROCESS_BYTES = 0.57e9  # Python, torch, megatron-core and the embedded corpus: 0.35e9, and what a step loads
_SHARE_HELD_BY_MALLOC = 0.1  # of activations, beside what they need: 0.07 to 0.14 in three processes
_USABLE_SHARE = 0.99  # of a GPU for an allocator: the driver and the context's own pages keep the rest
_BUCKET_ELEMENTS = 5e8  # of DeepSpeed's buckets: for 16-bit gradients, and with ZeRO for parameters


@dataclass(frozen=True)
class MemoryConstants:
    """Constants that no formula gives; fitted to measured runs by `calibration.py`."""

    context_bytes: float = free(
        3e9, 0.4, "CUDA context, libraries and NCCL buffers, where nvidia-smi measures"
    )
    cached_share: float = free(0.3, 0.4, "bytes that the allocator keeps beside, by those of the activations")
    flat_bytes: float = free(0.4, 0.4, "DeepSpeed's flat copies and padding, bytes per parameter of a rank")
    bf16_copy_bytes: float = free(2.0, 0.2, "the same of its bf16 optimizer, beside flat_bytes")
    load_spread: float = free(
        0.5, 0.2, "dropless: how much experts' loads differ, by their mean, to have room for"
    )


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one pipeline stage at the peak of an iteration."""

    weights: float  # parameters in the compute type
    gradients: float  # of all parameters
    optimizer: float  # its state, with the fp32 copy of the weights
    # kept for backward by all micro-batches in flight, and what the widest moment needs beside
    activations: float
    buffers: float  # of communication
    overhead: float  # of libraries: workspaces, and what nvidia-smi counts beside the allocator
    # what the allocator holds and nothing uses; it gives it back before the device is full
    cached: float = 0.0
    # the part of `overhead` that is there between iterations and counted by the allocator
    workspace: float = 0.0
    # the activations by module; `activations` is their sum
    activation_parts: Parts = field(default_factory=dict)

    @property
    def needed(self) -> float:
        """Bytes that have to fit: all but what the allocator can give back."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.buffers + self.overhead

    @property
    def total(self) -> float:
        """Bytes that a measurement shows."""
        return self.needed + self.cached


def memory_of(
    job: PlannedJob, hardware: Hardware, constants: MemoryConstants, *, imbalance: float | None = None
) -> list[StageMemory]:
    """Memory of a rank of every pipeline stage, from the first to the last. `imbalance`: rows of a rank's
    experts over their fair share, if none is dropped; by default `expected_imbalance`, at worst EP.
    """
    config, on_cpu = job.config, hardware.is_cpu
    if imbalance is None:
        imbalance = expected_imbalance(config, constants.load_spread)
    kept = activations_of(job, on_cpu=on_cpu, runs_kernels=hardware.runs_kernels, imbalance=imbalance)
    weight, gradient, dense_state, expert_state, table_state = _bytes_per_parameter(job, constants)
    parameters, tables = job.parameters, tables_of_stages(config, len(job.stage_layers))
    of_experts = max(1, sum(part.expert for part in parameters))
    num_moe = [part.expert * sum(config.moe_layers) // of_experts for part in parameters]
    in_flight = micro_batches_in_flight(config, job.num_microbatches)
    # hidden states between stages and gathered sequences; and DeepSpeed's buckets at most
    handed_on = 2 * kept.hidden if config.pp > 1 else 0.0
    handed_on += kept.hidden * config.tp if job.sequence_parallel else 0.0
    bucket_bytes = 2 * job.of_deepspeed * (2 if job.sharding == "zero1" else 1) * _BUCKET_ELEMENTS
    workspace, overhead = 0.0 if on_cpu else _WORKSPACE_BYTES, _PROCESS_BYTES
    if not on_cpu:
        overhead = workspace + (constants.context_bytes if job.measured_by == "nvidia-smi" else 0.0)
    usable = 0.0 if job.measured_by == "allocated" else _USABLE_SHARE * hardware.memory_bytes
    stages, ranks = [], config.world_size // config.pp
    for stage, part in enumerate(parameters):
        parts = _activation_parts(job, kept, stage, num_moe[stage], in_flight[stage], on_cpu=on_cpu)
        activations = sum(parts.values())
        own: float = part.total
        if job.engine.shards_parameters:  # FSDP: a rank's part of all, and two layers of them
            own = part.dense / max(1, ranks // config.tp)
            own += part.expert / max(1, ranks // (config.etp * config.ep))
            own += 2 * part.total / max(2, job.stage_layers[stage])
        weights, gradients = weight * own, gradient * own
        if fp8_parts(config)[1]:  # Transformer Engine keeps them by rows and by columns, too
            weights += 2 * (part.dense - tables[stage])
        optimizer = dense_state * part.dense + expert_state * part.expert + table_state * tables[stage]
        buffers = handed_on + min(bucket_bytes, 2.0 * part.total)
        needed = weights + gradients + optimizer + activations + buffers + overhead
        # The allocator (torch's, or malloc) holds half of what is free beside if it wants as much, nearly all
        # that it wants if much more is free.
        wanted = (_SHARE_HELD_BY_MALLOC if on_cpu else constants.cached_share) * activations
        room = max(0.0, usable - needed)
        cached = wanted * room / (wanted + room) if room else 0.0
        held = (weights, gradients, optimizer, activations, buffers, overhead)
        stages.append(StageMemory(*held, cached, workspace, parts))
    return stages


def _activation_parts(
    job: PlannedJob, kept: Activations, stage: int, num_moe: int, in_flight: float, *, on_cpu: bool
) -> Parts:
    """Bytes of activations of a rank of a stage at its widest moment, by module."""
    config, last = job.config, len(job.stage_layers) - 1
    num_dense, parts = job.stage_layers[stage] - num_moe, dict[str, float]()
    for number, of_layer in ((num_dense, kept.dense_parts), (num_moe, kept.moe_parts)):
        for name, size in of_layer.items() if number else ():
            parts[name] = parts.get(name, 0.0) + number * size
    if stage == 0:
        parts["embedding"] = kept.embedding
    if stage < last and (on_cpu or job.of_deepspeed):  # Megatron frees on GPUs what a stage has sent
        parts["stage outputs"] = kept.hidden
    parts = {name: in_flight * size for name, size in parts.items()}
    # Products add to the fp32 gradients themselves and return an empty gradient of the weight's shape in the
    # compute type (torch and Transformer Engine ask for one): for a layer, and for the output layer on its
    # stage. Seen in the dense runs of `public_runs.csv` on B200: without it their memory is underestimated by
    # up to 6%, with it by 0.4%. In models with experts, the widest moment is in the experts.
    gradients, tables = 0.0, tables_of_stages(config, last + 1)
    if not (on_cpu or job.of_deepspeed or job.sharding != "distributed" or config.use_moe):
        of_one = (job.parameters[stage].dense - tables[stage]) / max(1, job.stage_layers[stage])
        of_output = float(tables[-1]) if stage == last else 0.0
        if last == 0 and not config.tie_embeddings:
            of_output /= 2  # the other half is the embedding
        gradients = width_of(job) * (of_one + of_output)
    # The widest moment is one layer's backward, or on the last stage the loss.
    work = {"recomputed": kept.recomputed, "backward of a layer": kept.layer_work + gradients}
    loss = kept.output_parts | {"logits, loss": kept.output_parts["logits, loss"] + kept.output_work}
    at_loss = stage == last and sum(loss.values()) > sum(work.values())
    for name, size in (loss if at_loss else work).items():
        parts[name] = parts.get(name, 0.0) + size
    return parts


def expected_imbalance(config: Config, spread: float) -> float:
    """Rows over a rank's fair share that a dropless layer needs room for: 1 + spread * sqrt((EP - 1) / E). Of
    n = E/EP loads that differ by `spread` times their mean and have a fixed sum over all, the sum differs by
    spread * sqrt((1 - n/E) / n) times its mean. 0.5 is what rank 0 needed in the first iterations of the
    reference runs, with a balancing loss of 1.44; later it is near 0.
    """
    if not config.use_moe or config.force_routing == "balanced":
        return 1.0
    return 1 + spread * math.sqrt((config.ep - 1) / config.num_experts)


def micro_batches_in_flight(config: Config, num_microbatches: int) -> list[float]:
    """Micro-batches whose activations each stage keeps at once; those of one model chunk count as its part of
    a micro-batch.

    1F1B (Narayanan et al. 2021, arXiv:2104.04473): one for every stage from this to the last. Interleaved,
    with v chunks on each of p ranks, Megatron runs 2 * (p - stage - 1) + (v - 1) * p chunks ahead: on the
    first stage 1 + (p - 1) / (p * v) as much as 1F1B.
    """
    stages, chunks = config.pp, config.vpp or 1
    if chunks == 1:
        return [min(stages - stage, num_microbatches) for stage in range(stages)]
    ahead = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return [min(chunk + 1, num_microbatches * chunks) / chunks for chunk in ahead]


def _bytes_per_parameter(
    job: PlannedJob, constants: MemoryConstants
) -> tuple[float, float, float, float, float]:
    """Bytes per parameter of a rank: weights, gradients, and the optimizer's state by its sharding: of dense
    and expert parameters, and what embedding and output layer have beside.
    """
    config, engine = job.config, job.engine
    if job.of_deepspeed:
        # DeepSpeed of 2022: 16-bit optimizers, by ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054) or not,
        # and BF16_Optimizer, which keeps fp32 gradients of all parameters beside bf16 ones, and reduces them
        # through a flat copy.
        shards = max(1, config.data_parallel_size) if job.sharding == "zero1" else 1
        weights = 2 + constants.flat_bytes
        if job.precision == "bf16_fp32grad":
            return weights, 6 + constants.bf16_copy_bytes, 12 / shards, 12 / shards, 0.0
        # A shard has fp32 weights, moments and gradients, and the averaged 16-bit gradients they were made
        # from: 4 + 8 + 4 + 2. Without ZeRO the step has fp32 gradients twice: 4 + 8 + 4 + 4.
        state = 20.0 if job.sharding == "none" else 18 / shards
        return weights, 2, state, state, 0.0
    dense_shards, expert_shards = 1, 1
    if job.sharding == "distributed":
        dense_shards = max(1, config.world_size // (config.tp * config.pp))
        expert_shards = max(1, config.world_size // (config.etp * config.ep * config.pp))
    state = optimizer_state_bytes(config) if engine.state_bytes is None else engine.state_bytes
    tables = embedding_moment_bytes(config) / dense_shards
    return width_of(job), engine.gradient_bytes, state / dense_shards, state / expert_shards, tables
