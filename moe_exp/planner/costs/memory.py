"""Memory of each rank: weights, gradients, optimizer, activations, buffers, overhead. No torch."""

import math
from dataclasses import dataclass, field

from moe_exp.config import Config
from moe_exp.planner.costs import params
from moe_exp.planner.costs.activations import Activations, Parts, activations_of, width_of
from moe_exp.planner.costs.constants import free
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.products import fp8_parts
from moe_exp.planner.hardware import Hardware

# Allocated before the first micro-batch: two threads' cuBLAS workspaces (8.1 MiB each), Transformer Engine's
# (4 MiB), a batch and its mask; 26 to 29 MiB in three of four runs.
_WORKSPACE_BYTES = 27 * 2**20
_PROCESS_BYTES = 0.57e9  # Python, torch, megatron-core, corpus: 0.35e9; the first iteration loads the rest
_SHARE_HELD_BY_MALLOC = 0.1  # malloc's cache, relative to activations: 0.07 to 0.14 in three processes
_USABLE_SHARE = 0.99  # of GPU memory for the allocator; the driver and the context's pages take the rest
_BUCKET_ELEMENTS = 5e8  # of DeepSpeed's buckets for 16-bit gradients and, with ZeRO, for parameters


@dataclass(frozen=True)
class MemoryConstants:
    """Constants of the memory model, fitted to measured runs by `calibration.py`."""

    context_bytes: float = free(3e9, 0.4, "bytes of CUDA context and NCCL buffers (only nvidia-smi counts)")
    cached_share: float = free(0.3, 0.4, "bytes that the allocator caches, relative to activations")
    flat_bytes: float = free(0.4, 0.4, "bytes per parameter of DeepSpeed's flat copies and padding")
    bf16_copy_bytes: float = free(2.0, 0.2, "bytes that DeepSpeed's bf16 optimizer adds per parameter")
    load_spread: float = free(0.5, 0.2, "spread of dropless experts' loads, relative to their mean")


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of a rank in a pipeline stage, in bytes."""

    weights: float  # parameters in the compute type
    gradients: float
    optimizer: float  # optimizer state, including the fp32 copy of the weights
    activations: float  # kept by all micro-batches in flight, plus temporaries at the peak
    buffers: float  # communication buffers
    overhead: float  # library workspaces, and memory that nvidia-smi counts outside the allocator
    cached: float = 0.0  # unused memory in the allocator's cache, freed before the device runs out
    workspace: float = 0.0  # part of `overhead` that the allocator counts between iterations
    activation_parts: Parts = field(default_factory=dict)  # `activations` by module

    @property
    def needed(self) -> float:
        """Bytes that must fit on the device: everything except the allocator's cache."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.buffers + self.overhead

    @property
    def total(self) -> float:
        """Bytes that a memory measurement would report."""
        return self.needed + self.cached


def memory_of(job: PlannedJob, hardware: Hardware, constants: MemoryConstants) -> list[StageMemory]:
    """Returns the memory of one rank of each pipeline stage."""
    config, on_cpu = job.config, hardware.is_cpu
    imbalance = expected_imbalance(config, constants.load_spread)
    kept = activations_of(job, hardware, imbalance)
    weight, gradient, dense_state, expert_state, table_state = _bytes_per_parameter(job, constants, hardware)
    parameters, tables = job.parameters, params.tables_of_stages(config, len(job.stage_layers))
    # MoE layers per stage in proportion to expert parameters, which already follow the layout with VPP
    of_experts = max(1, sum(part.expert for part in parameters))
    num_moe = [part.expert * sum(config.all_moe_layers) // of_experts for part in parameters]
    in_flight = micro_batches_in_flight(config, job.num_microbatches)
    # hidden states between stages, gathered sequences, and DeepSpeed's buckets
    handed_on = 2 * kept.hidden if config.pp > 1 else 0.0
    handed_on += kept.hidden * config.tp if job.sequence_parallel else 0.0
    bucket_bytes = 2 * job.of_deepspeed * (2 if job.sharding == "zero1" else 1) * _BUCKET_ELEMENTS
    workspace, overhead = 0.0 if on_cpu else _WORKSPACE_BYTES, _PROCESS_BYTES
    if not on_cpu:
        overhead = workspace + (constants.context_bytes if job.measured_by == "nvidia-smi" else 0.0)
    usable = 0.0 if job.measured_by == "allocated" else _USABLE_SHARE * hardware.memory_bytes
    stages = []
    for stage, part in enumerate(parameters):
        parts = _activation_parts(job, kept, stage, num_moe[stage], in_flight[stage], on_cpu=on_cpu)
        activations = sum(parts.values())
        own: float = part.total
        if job.engine.shards_parameters:  # FSDP: the rank's shard, and two layers that are gathered
            own = part.sharded(config) + 2 * part.total / max(2, job.all_stage_layers[stage])
        weights, gradients = weight * own, gradient * own
        if fp8_parts(config)[1]:  # Transformer Engine also keeps FP8 copies by rows and by columns
            weights += 2 * (part.dense - tables[stage])
        optimizer = dense_state * part.dense + expert_state * part.expert + table_state * tables[stage]
        buffers = handed_on + min(bucket_bytes, 2.0 * part.total)
        needed = weights + gradients + optimizer + activations + buffers + overhead
        # The allocator (PyTorch's or malloc) would cache `wanted`. It gets nearly all of it with plenty of
        # room, and half of the room if that equals `wanted`.
        wanted = (_SHARE_HELD_BY_MALLOC if on_cpu else constants.cached_share) * activations
        room = max(0.0, usable - needed)
        cached = wanted * room / (wanted + room) if room else 0.0
        held = (weights, gradients, optimizer, activations, buffers, overhead, cached)
        stages.append(StageMemory(*held, workspace, parts))
    return stages


def _activation_parts(
    job: PlannedJob, kept: Activations, stage: int, num_moe: int, in_flight: float, *, on_cpu: bool
) -> Parts:
    """Returns the bytes of activations per module, at the memory peak of a rank in `stage`."""
    config, last = job.config, len(job.stage_layers) - 1
    num_dense, parts = job.all_stage_layers[stage] - num_moe, dict[str, float]()
    kinds = (
        (num_dense, kept.dense_parts, kept.moved_dense), (num_moe, kept.moe_parts, kept.moved_moe)
    )  # fmt: skip
    for number, of_layer, of_host in kinds:
        if on_cpu and of_host:
            of_layer = of_layer | {"moved": sum(of_host.values())}
        for name, size in of_layer.items() if number else ():
            parts[name] = parts.get(name, 0.0) + number * size
    if stage == 0:
        parts["embedding"] = kept.embedding
    if stage < last and (on_cpu or job.of_deepspeed):  # on GPUs, Megatron frees sent outputs
        parts["stage outputs"] = kept.hidden
    parts = {name: in_flight * size for name, size in parts.items()}
    # Fused products add to the fp32 gradients, but autograd also requires a gradient of the weight's shape in
    # the compute type, which stays empty: for a layer, and for the output layer on its stage. Without it, the
    # memory of the dense B200 runs in `public_runs.csv` is underestimated by up to 6%, with it by 0.4%. In
    # models with experts, the peak is in the experts.
    gradients, tables = 0.0, params.tables_of_stages(config, last + 1)
    if not (on_cpu or job.of_deepspeed or job.sharding != "distributed" or config.use_moe):
        of_one = (job.parameters[stage].dense - tables[stage]) / max(1, job.all_stage_layers[stage])
        of_output = float(tables[-1]) if stage == last else 0.0
        if last == 0 and not config.tie_embeddings:
            of_output /= 2  # the other half is the embedding's
        gradients = width_of(job) * (of_one + of_output)
    # A model chunk that has run forward keeps the moved tensors of its last module until it runs again.
    moved, last_moved = kept.in_transit(num_dense, num_moe)
    waiting = last_moved * ((config.vpp or 1) - (stage == last))
    # The peak is in a layer's backward pass or, on the last stage, in the loss.
    work = {"recomputed": kept.recomputed, "backward of a layer": kept.layer_work + gradients}
    loss = {name: (1 + config.mtp_num_layers) * size for name, size in kept.output_parts.items()}
    loss["logits, loss"] += kept.output_work
    if config.offloaded:
        work["moving"], loss["moving"] = moved + waiting, last_moved + waiting
    at_loss = stage == last and sum(loss.values()) > sum(work.values())
    for name, size in (loss if at_loss else work).items():
        parts[name] = parts.get(name, 0.0) + size
    return parts


def expected_imbalance(config: Config, spread: float) -> float:
    """Returns the number of rows that a dropless layer must hold, as a multiple of a rank's fair share:
    1 + spread * sqrt((EP - 1) / E).

    The experts' loads have a fixed sum, and their standard deviation is `spread` times their mean. For the
    summed load of a rank's n = E/EP experts, the standard deviation divided by the mean is then
    spread * sqrt((1 - n/E) / n). In the first iterations of the reference runs (balancing loss 1.44), rank
    0's peak memory implied a spread of 0.5. In later iterations, the spread is near 0.
    """
    if not config.use_moe or config.force_routing == "balanced":
        return 1.0
    return 1 + spread * math.sqrt((config.ep - 1) / config.num_experts)


def micro_batches_in_flight(config: Config, num_microbatches: int) -> list[float]:
    """Returns, for each stage, the number of micro-batches whose activations it keeps at once. If a rank has
    v model chunks, a micro-batch in one chunk counts as 1/v.

    With 1F1B (Narayanan et al. 2021, arXiv:2104.04473), a stage keeps one micro-batch for itself and one for
    each later stage. If each of p ranks has v chunks, Megatron's interleaved schedule runs
    2 * (p - stage - 1) + (v - 1) * p chunks forward in the warm-up. Stage 0 then keeps more micro-batches
    than with 1F1B, by a factor of 1 + (p - 1) / (p * v).
    """
    stages, chunks = config.pp, config.vpp or 1
    if chunks == 1:
        return [min(stages - stage, num_microbatches) for stage in range(stages)]
    ahead = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return [min(chunk + 1, num_microbatches * chunks) / chunks for chunk in ahead]


def _bytes_per_parameter(
    job: PlannedJob, constants: MemoryConstants, hardware: Hardware
) -> tuple[float, float, float, float, float]:
    """Returns five values, in bytes per parameter of a rank: weights, gradients, sharded optimizer state of
    dense and of expert parameters, and extra optimizer state of the embedding and output layer.
    """
    config, engine = job.config, job.engine
    if job.of_deepspeed:
        # DeepSpeed of 2022: 16-bit optimizers with or without ZeRO-1 (Rajbhandari et al. 2020,
        # arXiv:1910.02054), and BF16_Optimizer, which keeps fp32 and bf16 gradients of all parameters and
        # reduces them through a flat copy.
        shards = max(1, config.data_parallel_size) if job.sharding == "zero1" else 1
        weights = 2 + constants.flat_bytes
        if job.precision == "bf16_fp32grad":
            return weights, 6 + constants.bf16_copy_bytes, 12 / shards, 12 / shards, 0.0
        # A shard has fp32 weights, moments and gradients, and averaged 16-bit gradients: 4 + 8 + 4 + 2.
        # Without ZeRO, the step has two copies of the fp32 gradients: 4 + 8 + 4 + 4.
        state = 20.0 if job.sharding == "none" else 18 / shards
        return weights, 2, state, state, 0.0
    dense_shards, expert_shards = params.num_replicas(config) if job.sharding == "distributed" else (1, 1)
    own = engine.state_bytes
    state = params.optimizer_state_bytes(config, hardware) if own is None else own
    tables = params.embedding_moment_bytes(config) / dense_shards
    return width_of(job), engine.gradient_bytes, state / dense_shards, state / expert_shards, tables
