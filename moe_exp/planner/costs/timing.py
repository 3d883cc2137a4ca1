"""Time of an iteration: matrix products, collectives, pipeline bubble, optimizer. No torch.

With the 1F1B schedule, an iteration of m micro-batches takes sum(t) + (m - 1) * max(t), where t_i is the
time of one micro-batch on stage i. V model chunks per rank reduce the pipeline's fill and drain time to 1/V
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Data-parallel communication adds time unless it
overlaps with the backward pass of the last micro-batch.
"""

from dataclasses import dataclass, fields

from moe_exp.planner.costs.activations import activations_of
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.device import Device, Group, Pass, exchange_seconds, skew_of
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.layer_time import LayerTimes, layer_times
from moe_exp.planner.costs.params import RankParameters, num_replicas
from moe_exp.planner.costs.products import hidden_bytes, num_tokens, priced, projections
from moe_exp.planner.hardware import Hardware

# Bytes that the optimizer step moves per parameter of a rank (gradient norm, new weights), and per parameter
# whose optimizer state is on the rank.
_STEP_BYTES, _STATE_BYTES = 8, 40
# With OFFLOAD_OPTIMIZER: bytes per parameter over the link to the host, in the direction with more (fp32
# gradients; bf16 weights go the other way), and bytes of host memory: AdamW 28, rounding 6, both copies 6.
_LINK_BYTES, _HOST_BYTES = 4, 40
# Bytes per second. A link of 16 lanes of PCIe Gen 4 has 31.5 GB/s, Gen 5 63 GB/s, of which copies reach 80%.
# A DGX H100 has 16 channels of DDR5-4800, 614 GB/s, for 8 GPUs; STREAM reaches about 80% of such a peak.
_LINK_SPEED, _RECENT_LINK_SPEED, _HOST_SPEED = 25e9, 50e9, 60e9


@dataclass(frozen=True)
class IterationTime:
    """Seconds of an iteration by component, averaged over the pipeline stages."""

    compute: float  # products and memory-bound operations, forward, recompute and backward
    # waiting for kernel launches, part of `compute` on devices older than Hopper, and for moved activations
    host: float
    tensor_parallel: float  # tensor-parallel collectives
    context_parallel: float  # exchange of keys and values, unless hidden by attention
    expert_parallel: float  # token dispatch and combine
    pipeline: float  # messages between stages
    bubble: float  # waiting for the first and last micro-batches, and for slower stages
    data_parallel: float  # gradient reduce and parameter gather, unless hidden
    optimizer: float  # optimizer step, and host work once per iteration: data, logs

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def bound(self) -> str:
        """The largest component except `compute`; `compute` if no other exceeds a tenth of the total time."""
        others = {name: seconds for name, seconds in self.parts().items() if name != "compute"}
        name = max(others, key=others.__getitem__)
        return name if others[name] > self.total / 10 else "compute"


def time_of(
    job: PlannedJob, hardware: Hardware, constants: TimeConstants, *, batch_size: int | None = None
) -> IterationTime:
    """Predicts the time of an iteration of `batch_size` samples (default: GBSZ)."""
    config = job.config
    num_microbatches = max(1, (batch_size or config.gbsz) // (config.mbsz * config.data_parallel_size))
    device = Device(hardware, config.dtype, constants, num_processes=config.gpus_per_node)
    parts = _parts_of_stages(job, device)
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    bubble = bubble_seconds(totals, num_microbatches, config.vpp or 1)
    factor = {"a": constants.software_a, "c": constants.software_c}.get(job.software, 1.0)
    seconds = {name: num_microbatches * sum(values) / config.pp * factor for name, values in parts.items()}
    rank = max(job.parameters, key=lambda stage: stage.total)
    # The last micro-batch can hide gradient reduce and weight gather for as long as its slowest stage takes,
    # or half as long on devices up to Ampere.
    overlaps = priced(config, "overlap", {"true": True, "false": False, "auto": not hardware.is_cpu})
    hidden = 0.0
    if job.sharding == "distributed" and overlaps:
        hidden = max(totals) * (1.0 if hardware.is_recent else 0.5)
    # optimizer step: gradient norm, update of the parameters that this rank owns, and new weights
    owned = rank.total if job.sharding == "none" else rank.sharded(config)
    by_host = config.offload_optimizer and not hardware.is_cpu
    step = (rank.total * _STEP_BYTES + owned * _STATE_BYTES * (not by_host)) / device.bandwidth
    if by_host:
        step += owned * max(_LINK_BYTES / _link_speed(hardware), _HOST_BYTES / _HOST_SPEED)
    step += _muon_seconds(job, hardware, constants)
    # On devices newer than Ampere this is an estimate; published runs do not determine it.
    once = 0.01 if hardware.is_recent else constants.iteration_seconds
    return IterationTime(
        **seconds,
        bubble=bubble * factor,
        data_parallel=_data_parallel(job, hardware, constants, rank, hidden) * factor,
        optimizer=step * factor + once,
    )


def stage_passes(job: PlannedJob, hardware: Hardware, constants: TimeConstants) -> list[tuple[Pass, Pass]]:
    """For each pipeline stage, returns the time of a micro-batch in all model chunks of the stage, and the
    part of this time for token dispatch and combine. Half of the time of collectives counts as forward and
    half as backward; with recompute, a third and two thirds.
    """
    device = Device(hardware, job.config.dtype, constants, num_processes=job.config.gpus_per_node)
    times, parts = layer_times(job, device), _parts_of_stages(job, device)
    found = []
    for stage, (dense, moe) in enumerate(counts := _counts(job)):
        computed = sum(parts[name][stage] for name in ("compute", "host"))
        sent = sum(of[stage] for name, of in parts.items() if name not in ("compute", "host"))
        ahead = dense * times.layer(False).forward + moe * times.layer(True).forward
        outputs = job.num_outputs if stage == len(counts) - 1 else 0
        ahead += outputs * times.parts["output"].forward
        forward = ahead / parts["compute"][stage] * computed if computed else 0.0
        share = 1 / 3 if job.config.recompute in ("full", "selective") else 1 / 2
        exchange = parts["expert_parallel"][stage]
        seconds = Pass(forward + share * sent, computed - forward + (1 - share) * sent)
        found.append((seconds, Pass(share * exchange, (1 - share) * exchange)))
    return found


def _parts_of_stages(job: PlannedJob, device: Device) -> dict[str, list[float]]:
    """Returns the seconds of a micro-batch on each stage, by component."""
    config, hardware, constants = job.config, device.hardware, device.constants
    times, counts = layer_times(job, device), _counts(job)
    moved = [0.0, 0.0]
    if config.offloaded and not hardware.is_cpu:
        kept = activations_of(job, hardware)
        moved = [sum(sizes.values()) for sizes in (kept.moved_dense, kept.moved_moe)]
    dense, moe = (_layer(job, device, times, is_moe, moved[is_moe]) for is_moe in (False, True))
    parts = {part: [n * dense[part] + n_moe * moe[part] for n, n_moe in counts] for part in dense}
    parts["compute"][-1] += job.num_outputs * sum(times.parts["output"])
    # activations to the next stage and their gradients back, once per model chunk
    message = 0.0
    if config.pp > 1:
        group = Group(config.pp, config.world_size // config.pp, hardware, config.gpus_per_node)
        num_bytes = hidden_bytes(config) / (config.tp if job.sequence_parallel else 1)
        speed = hardware.node_bytes_per_second if group.in_node else hardware.network_bytes_per_second
        if hardware.is_recent:
            of_ring = constants.link_ring if group.in_node else constants.network_ring
            message = 2 * (config.vpp or 1) * constants.stage_exposed * num_bytes / (speed * of_ring)
        else:
            once = num_bytes / (speed * constants.stage_bandwidth) + group.latency_seconds
            message = 2 * (config.vpp or 1) * once
    parts["pipeline"] = [message] * config.pp
    own = constants.own_moe if config.use_moe else constants.own_dense
    return {part: [own * seconds for seconds in of_stages] for part, of_stages in parts.items()}


def bubble_seconds(stages: list[float], num_microbatches: int, num_chunks: int = 1) -> float:
    """Returns the pipeline bubble in seconds per iteration (mean over stages); see the top of this file."""
    slowest = max(stages)
    return num_microbatches * (slowest - sum(stages) / len(stages)) + (sum(stages) - slowest) / num_chunks


def _counts(job: PlannedJob) -> list[tuple[int, int]]:
    """Returns (number of dense layers, number of MoE layers) for each stage."""
    is_moe, counts, first = job.config.all_moe_layers, [], 0
    # Model chunks alternate between stages, so the average share of MoE layers is close enough.
    if (job.config.vpp or 1) > 1 and len(set(is_moe)) > 1:
        share = sum(is_moe) / len(is_moe)
        return [(layers - round(layers * share), round(layers * share)) for layers in job.all_stage_layers]
    for layers in job.all_stage_layers:
        moe = sum(is_moe[first : first + layers])
        counts.append((layers - moe, moe))
        first += layers
    return counts


def _link_speed(hardware: Hardware) -> float:
    return _RECENT_LINK_SPEED if hardware.is_recent else _LINK_SPEED


def _layer(
    job: PlannedJob, device: Device, times: LayerTimes, is_moe: bool, moved: float
) -> dict[str, float]:
    """Returns a layer's seconds per micro-batch (forward, recompute and backward), by component. `moved`:
    bytes offloaded to host memory in the forward pass and reloaded in the backward pass.
    """
    config, hardware, constants = job.config, device.hardware, device.constants
    one, repeated = times.layer(is_moe), times.repeated(is_moe)
    forwards = 2 if config.recompute == "full" else 1
    of_experts = 2 if config.recompute in ("full", "selective") else 1
    again = priced(config, "recompute", repeated)
    # In dense models, these only recompute attention scores.
    if not config.use_moe and config.recompute in ("selective", "moe_act"):
        again = repeated["core_attn"]
    if config.recompute != "full":
        again += sum(repeated[name] for name in job.engine.recompute)
    compute = one.forward + one.backward + again

    # All-reduce of the activations, or gather and scatter with sequence parallelism: both take two
    # reduce-scatters. Attention, MLP and shared expert gather the tokens of all tensor-parallel ranks; routed
    # experts do not.
    group = Group(config.tp, 1, hardware, config.gpus_per_node)
    share = group.ring_share(constants, constants.tensor_bandwidth)
    mlp_gathers = (1 + of_experts) * bool(config.shared_expert_size) if is_moe else 1 + forwards
    tensor = 2 * group.reduce_scatter(hidden_bytes(config), share) * ((1 + forwards) + mlp_gathers)

    # keys and values of the other context-parallel ranks
    group = Group(config.cp, config.tp, hardware, config.gpus_per_node)
    share = group.ring_share(constants, constants.tensor_bandwidth)
    keys = 2 * config.num_query_groups * config.kv_channels / config.tp
    if config.multi_latent_attention:  # per head, with values of another size
        keys = config.num_heads * (config.kv_channels + config.v_head_dim) / config.tp
    num_bytes = num_tokens(config) * config.cp * keys * device.num_bytes
    context = group.reduce_scatter(num_bytes, share) * (1 + forwards)

    exchange = 0.0
    if is_moe:  # dispatch and combine, forward and backward
        exchange = 2 * (1 + of_experts) * exchange_seconds(job, hardware, constants)
        exchange *= skew_of(job, hardware, constants)
    if hardware.is_recent:
        context *= constants.context_exposed
        tensor *= constants.tensor_exposed if job.engine.overlaps_tensor_parallel else 1.0
        if job.engine.overlaps_exchange:
            exchange = max(constants.exchange_exposed * exchange, exchange - compute)

    # Host and device run concurrently, except for a share of the shorter one.
    busy, host = compute + tensor + context + exchange, times.host[is_moe]
    waiting = max(busy, host) + constants.host_serial * min(busy, host) - busy if host else 0.0
    if moved:
        seconds = moved / _link_speed(hardware)
        waiting += max(0.0, seconds - one.forward) + max(0.0, seconds - one.backward - again)
    return {
        "compute": compute,
        "host": waiting,
        "tensor_parallel": tensor,
        "context_parallel": context,
        "expert_parallel": exchange,
    }


def _data_parallel(
    job: PlannedJob, hardware: Hardware, constants: TimeConstants, rank: RankParameters, hidden: float
) -> float:
    """Returns the seconds to reduce gradients and gather parameters, minus `hidden` seconds of overlap."""
    config, engine = job.config, job.engine
    gradient = 4 if job.precision in ("bf16_fp32grad", "fp32") else 2
    weight = 4 if job.precision == "fp32" else 2
    # The distributed optimizer uses reduce-scatter; ZeRO-1 of 2022 and unsharded optimizers use all-reduce.
    num_bytes = {"distributed": gradient + weight, "zero1": 2 * gradient + weight, "none": 2 * gradient}
    per_parameter: float = num_bytes[job.sharding]
    if hardware.is_recent and job.sharding == "distributed":
        gathered = weight if engine.gathered_bytes is None else engine.gathered_bytes
        per_parameter = engine.reduced_bytes + gathered
    total = 0.0
    kinds = (rank.dense, rank.expert), num_replicas(config), (config.tp, config.etp * config.ep)
    for parameters, size, stride in zip(*kinds, strict=True):
        group = Group(size, stride, hardware, config.gpus_per_node)
        share = group.ring_share(constants, constants.data_bandwidth)
        if parameters and group.size > 1:
            total += group.reduce_scatter(parameters * per_parameter, share)
    if engine.shards_parameters:  # layer by layer for every micro-batch, forward and backward
        per_microbatch = (2 * per_parameter - engine.reduced_bytes) / per_parameter
        return total * per_microbatch * job.num_microbatches * constants.sharded_exposed
    # Even with overlap, the last bucket is ready too late to be hidden.
    return max(total - hidden, 0.1 * total) if hidden else total


def _muon_seconds(job: PlannedJob, hardware: Hardware, constants: TimeConstants) -> float:
    """Returns the seconds of Muon's matrix products on the slowest stage; 0 for other optimizers.

    Muon orthogonalizes each [r, c] matrix x, r <= c, by five Newton-Schulz steps (`moe_exp.engine.muon`).
    Each step computes s = x x^T, s^2, and (k s + m s^2) x, where k and m are fixed coefficients. The steps
    take 5 * (4*r^2*c + 2*r^3) FLOPs in fp32. Even with TP, each step uses the whole matrix. Ranks that hold
    the same matrices divide the work.
    """
    config = job.config
    if config.optimizer != "muon":
        return 0.0
    device = Device(hardware, "fp32", constants, num_processes=config.gpus_per_node)
    hidden, latent = config.hidden_size, config.moe_latent_size

    def seconds(rows: float, columns: float, count: int) -> float:
        short, long = min(rows, columns), max(rows, columns)
        gram, square = device.product(short, short, long, count), device.product(short, short, short, count)
        return 5 * (gram + square + device.product(short, long, short, count))

    def mlp(ffn: int, width: int, count: int) -> list[tuple[float, float, int]]:
        # gate and up projection are one matrix
        return [((2 if config.gated else 1) * ffn, width, count), (width, ffn, count)] if ffn else []

    # Queries, keys and values are one matrix; latent attention has separate ones (arXiv:2405.04434).
    query = config.num_heads * config.kv_channels
    value = config.num_heads * config.v_head_dim if config.multi_latent_attention else query
    attention = [*projections(config, query, config.num_heads, tp=1), (hidden, value)]
    slowest = 0.0
    for dense, moe in _counts(job):
        others = [(*shape, dense + moe) for shape in attention]
        others += mlp(config.ffn_hidden_size, hidden, dense) + mlp(config.shared_expert_size, hidden, moe)
        others += [(latent, hidden, 2 * moe)] if latent else []  # both projections take the same time
        local = moe * config.num_experts // config.ep
        experts = mlp(config.expert_ffn_size, config.expert_hidden_size, local)
        stage = 0.0
        for shapes, sharing in zip((others, experts), num_replicas(config), strict=True):
            there = [shape for shape in shapes if shape[2]]
            # At least one of the ranks that share the work has to process the largest matrix.
            longest = max((seconds(rows, columns, 1) for rows, columns, _ in there), default=0.0)
            stage += max(longest, sum(seconds(*shape) for shape in there) / sharing)
        slowest = max(slowest, stage)
    return slowest
