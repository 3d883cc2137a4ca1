"""Seconds of an iteration: products, collectives, pipeline bubble, optimizer. No torch.

A micro-batch costs stage i the time t_i. With m micro-batches an iteration of the 1F1B schedule takes sum(t)
+ (m - 1) * max(t); with V model chunks per rank the part that fills and empties the pipeline shrinks to 1/V
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). What data parallel ranks exchange comes after it, but
for what the backward pass of the last micro-batch hides.
"""

from dataclasses import dataclass, fields

from moe_exp.config import Config
from moe_exp.planner.costs.code_paths import priced
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.layer_time import LayerTimes, layer_times
from moe_exp.planner.costs.params import RankParameters
from moe_exp.planner.costs.products import Device, hidden_bytes, num_tokens, projections
from moe_exp.planner.costs.traffic import Group, exchange_seconds, skew_of
from moe_exp.planner.hardware import Hardware

# Bytes that the optimizer's step moves: per parameter (norm of the gradients, new weights), and per parameter
# whose state is here.
_STEP_BYTES, _STATE_BYTES = 8, 40


@dataclass(frozen=True)
class IterationTime:
    """Seconds of an iteration by part, which add up to `total`; of stages, means over the pipeline."""

    compute: float  # products and what is bound by memory, forward, recompute and backward
    host: float  # waiting for the host to start kernels; older devices than Hopper: in compute
    tensor_parallel: float  # collectives of tensor parallel ranks
    context_parallel: float  # keys and values that attention does not hide
    expert_parallel: float  # token dispatch and combine
    pipeline: float  # messages between stages
    bubble: float  # waiting for the first and last micro-batches, and for slower stages
    data_parallel: float  # gradient reduce and parameter gather that nothing hides
    optimizer: float  # the step itself, and what the host does once an iteration: data, logs

    @property
    def total(self) -> float:
        """Seconds per iteration."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def bound(self) -> str:
        """The largest part beside compute if it takes more than a tenth of the time, else compute."""
        others = {name: seconds for name, seconds in self.parts().items() if name != "compute"}
        name = max(others, key=others.__getitem__)
        return name if others[name] > self.total / 10 else "compute"


def time_of(
    job: Job, hardware: Hardware, constants: TimeConstants, *, batch_size: int | None = None
) -> IterationTime:
    """Time of an iteration of `batch_size` samples (batch ramp-up); GBSZ by default."""
    config, counts = job.config, _counts(job)
    num_microbatches = max(1, (batch_size or config.gbsz) // (config.mbsz * config.data_parallel_size))
    device = Device(hardware, config.dtype, constants, num_processes=config.gpus_per_node)
    parts = _parts_of_stages(job, layer_times(job, device, constants), hardware, constants, counts)
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    bubble = bubble_seconds(totals, num_microbatches, config.vpp or 1)
    factor = {"a": constants.software_a, "c": constants.software_c}.get(job.software, 1.0)
    seconds = {name: num_microbatches * sum(values) / config.pp * factor for name, values in parts.items()}
    rank = max(job.parameters, key=lambda stage: stage.total)
    hidden = max(totals) * (1.0 if hardware.is_recent else 0.5) if _overlaps(job, hardware) else 0.0
    # newer than Ampere: an estimate, which published runs do not determine
    once = 0.01 if hardware.is_recent else constants.iteration_seconds
    step = _optimizer(job, device, rank) + muon_seconds(config, hardware, constants, counts)
    return IterationTime(
        **seconds,
        bubble=bubble * factor,
        data_parallel=_data_parallel(job, hardware, constants, rank, hidden) * factor,
        optimizer=step * factor + once,
    )


@dataclass(frozen=True)
class StagePass:
    """Seconds of a micro-batch on one pipeline stage, over all its model chunks."""

    forward: float
    backward: float
    forward_exchange: float  # of these, exchange of tokens with their experts
    backward_exchange: float


def stage_passes(job: Job, hardware: Hardware, constants: TimeConstants) -> list[StagePass]:
    """The passes over every stage. Of collectives, forward has one of two, or of three with a recompute."""
    device = Device(hardware, job.config.dtype, constants, num_processes=job.config.gpus_per_node)
    times, counts = layer_times(job, device, constants), _counts(job)
    parts = _parts_of_stages(job, times, hardware, constants, counts)
    found = []
    for stage, (dense, moe) in enumerate(counts):
        computed = sum(parts[name][stage] for name in ("compute", "host"))
        sent = sum(of[stage] for name, of in parts.items() if name not in ("compute", "host"))
        ahead = dense * times.layer(False).forward + moe * times.layer(True).forward
        outputs = 1 + job.engine.num_mtp_layers if stage == len(counts) - 1 else 0
        ahead += outputs * times.parts["output"].forward
        forward = ahead / parts["compute"][stage] * computed if computed else 0.0
        share = 1 / 3 if job.config.recompute in ("full", "selective") else 1 / 2
        exchange = parts["expert_parallel"][stage]
        passes = forward + share * sent, computed - forward + (1 - share) * sent
        found.append(StagePass(*passes, share * exchange, (1 - share) * exchange))
    return found


def _parts_of_stages(
    job: Job, times: LayerTimes, hardware: Hardware, constants: TimeConstants, counts: list[tuple[int, int]]
) -> dict[str, list[float]]:
    """Seconds of a micro-batch on every stage, by part."""
    dense, moe = (_layer(job, times, hardware, constants, is_moe) for is_moe in (False, True))
    parts = {part: [n * dense[part] + n_moe * moe[part] for n, n_moe in counts] for part in dense}
    parts["compute"][-1] += (1 + job.engine.num_mtp_layers) * sum(times.parts["output"])
    parts["pipeline"] = [_message(job, hardware, constants)] * job.config.pp
    own = constants.own_moe if job.config.use_moe else constants.own_dense
    return {part: [own * seconds for seconds in of_stages] for part, of_stages in parts.items()}


def bubble_seconds(stages: list[float], num_microbatches: int, num_chunks: int = 1) -> float:
    """Seconds by which an iteration is longer than its stages are busy on average.
    Filling and emptying are spread over `num_chunks` model chunks per rank (VPP).
    """
    slowest = max(stages)
    return num_microbatches * (slowest - sum(stages) / len(stages)) + (sum(stages) - slowest) / num_chunks


def _counts(job: Job) -> list[tuple[int, int]]:
    """(layers without, layers with experts) of every stage."""
    is_moe, counts, first = job.config.moe_layers, [], 0
    vpp = job.config.vpp or 1
    if vpp > 1 and len(set(is_moe)) > 1:  # chunks go around the ranks: near enough for the time
        share = sum(is_moe) / len(is_moe)
        return [(layers - round(layers * share), round(layers * share)) for layers in job.stage_layers]
    for layers in job.stage_layers:
        moe = sum(is_moe[first : first + layers])
        counts.append((layers - moe, moe))
        first += layers
    return counts


def _layer(
    job: Job, times: LayerTimes, hardware: Hardware, constants: TimeConstants, is_moe: bool
) -> dict[str, float]:
    """Seconds of one layer for one micro-batch, forward, recompute and backward, by part."""
    config, engine = job.config, job.engine
    one, repeated = times.layer(is_moe), times.repeated(is_moe)
    forwards = 2 if config.recompute == "full" else 1
    of_experts = 2 if config.recompute in ("full", "selective") else 1
    # Routed experts take the tokens of a tensor parallel rank as they are; attention, an MLP and a shared
    # expert gather them.
    mlp_gathers = (1 + of_experts) * bool(config.shared_expert_size) if is_moe else 1 + forwards
    exchanges = 2 * (1 + of_experts) if is_moe else 0
    again = priced(config, "recompute", repeated)
    if not config.use_moe and config.recompute in ("selective", "moe_act"):  # then of attention's scores
        again = repeated["core_attn"]
    if config.recompute != "full":
        again += sum(repeated[name] for name in engine.recompute)
    compute = one.forward + one.backward + again
    exchange = 0.0
    if exchanges:
        exchange = exchanges * exchange_seconds(job, hardware, constants)
        exchange *= skew_of(job, hardware, constants)
    tensor = _gathered(job, hardware, constants) * ((1 + forwards) + mlp_gathers)
    context = _context(job, hardware, constants) * (1 + forwards)
    if hardware.is_recent:
        context *= constants.context_exposed
        tensor *= constants.tensor_exposed if engine.overlaps_tensor_parallel else 1.0
        if engine.overlaps_exchange:
            exchange = max(constants.exchange_exposed * exchange, exchange - compute)
    busy = compute + tensor + context + exchange
    return {
        "compute": compute,
        "host": _waiting(busy, times.host_moe if is_moe else times.host_dense, constants),
        "tensor_parallel": tensor,
        "context_parallel": context,
        "expert_parallel": exchange,
    }


def _waiting(busy: float, host: float, constants: TimeConstants) -> float:
    """Seconds by which host and device need longer than the device is busy: they run beside each other, but
    for a share of the shorter one.
    """
    return max(busy, host) + constants.host_serial * min(busy, host) - busy if host else 0.0


def _gathered(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """An all-reduce of a micro-batch's activations, or sequence parallelism's gather and scatter."""
    group = Group(job.config.tp, 1, hardware, job.config.gpus_per_node)
    return group.all_reduce(hidden_bytes(job.config), _ring_share(group, constants))


def _ring_share(group: Group, constants: TimeConstants) -> float:
    return group.recent_share(constants) if group.hardware.is_recent else constants.tensor_bandwidth


def _context(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """Keys and values of the other ranks, for one pass over a layer."""
    config = job.config
    group = Group(config.cp, config.tp, hardware, config.gpus_per_node)
    keys = 2 * config.num_query_groups * config.kv_channels / config.tp
    if config.multi_latent_attention:  # of every head, with values of another size
        keys = config.num_heads * (config.kv_channels + config.v_head_dim) / config.tp
    num_bytes = num_tokens(config) * config.cp * keys * (4 if config.dtype == "fp32" else 2)
    return group.reduce_scatter(num_bytes, _ring_share(group, constants))


def _message(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """A micro-batch's activations to the next stage and their gradient back, once per model chunk."""
    config = job.config
    if config.pp == 1:
        return 0.0
    group = Group(config.pp, config.world_size // config.pp, hardware, config.gpus_per_node)
    num_bytes = hidden_bytes(config) / (config.tp if job.sequence_parallel else 1)
    speed = hardware.node_bytes_per_second if group.in_node else hardware.network_bytes_per_second
    if hardware.is_recent:
        of_ring = constants.link_ring if group.in_node else constants.network_ring
        return 2 * (config.vpp or 1) * constants.stage_exposed * num_bytes / (speed * of_ring)
    return 2 * (config.vpp or 1) * (num_bytes / (speed * constants.stage_bandwidth) + group.latency_seconds)


def _overlaps(job: Job, hardware: Hardware) -> bool:
    """Whether gradients are reduced, and weights gathered, while the device computes."""
    by_setting = {"true": True, "false": False, "auto": not hardware.is_cpu}
    return job.sharding == "distributed" and priced(job.config, "overlap", by_setting)


def _data_parallel(
    job: Job, hardware: Hardware, constants: TimeConstants, rank: RankParameters, hidden: float
) -> float:
    """Reduce and gather of dense and expert parameters, less the `hidden` seconds."""
    config, engine = job.config, job.engine
    gradient = 4 if job.precision in ("bf16_fp32grad", "fp32") else 2
    weight = 4 if job.precision == "fp32" else 2
    # The distributed optimizer reduces to the rank that owns a part; ZeRO-1 of 2022 and a plain one to all.
    num_bytes = {"distributed": gradient + weight, "zero1": 2 * gradient + weight, "none": 2 * gradient}
    per_parameter: float = num_bytes[job.sharding]
    if hardware.is_recent and job.sharding == "distributed":
        gathered = weight if engine.gathered_bytes is None else engine.gathered_bytes
        per_parameter = engine.reduced_bytes + gathered
    total = 0.0
    for parameters, model_ranks in ((rank.dense, config.tp), (rank.expert, config.etp * config.ep)):
        size = config.world_size // config.pp // model_ranks
        group = Group(size, model_ranks, hardware, config.gpus_per_node)
        share = group.recent_share(constants) if hardware.is_recent else constants.data_bandwidth
        if parameters and group.size > 1:
            total += group.reduce_scatter(parameters * per_parameter, share)
    if engine.shards_parameters:  # layer by layer for every micro-batch, forward and backward
        per_microbatch = (2 * per_parameter - engine.reduced_bytes) / per_parameter
        return total * per_microbatch * job.num_microbatches * constants.sharded_exposed
    # even where reduce and gather overlap nothing hides the last bucket to be ready
    return max(total - hidden, 0.1 * total) if hidden else total


def _optimizer(job: Job, device: Device, rank: RankParameters) -> float:
    """Norm of the gradients, the step on what this rank owns, and the new weights."""
    config, owned = job.config, float(rank.total)
    if job.sharding != "none":
        ranks = config.world_size // config.pp
        owned = rank.dense / max(1, ranks // config.tp)
        owned += rank.expert / max(1, ranks // (config.etp * config.ep))
    return (rank.total * _STEP_BYTES + owned * _STATE_BYTES) / device.bandwidth


def muon_seconds(
    config: Config, hardware: Hardware, constants: TimeConstants, layers: list[tuple[int, int]]
) -> float:
    """Seconds of the slowest stage's products, of layers (without, with experts); 0 for other optimizers.

    Muon orthogonalizes every matrix (`moe_exp.engine.muon`) by five steps of Newton and Schulz on an [r, c]
    matrix, r <= c: x x^T, its square, their sum times x; or 5 * (4*r^2*c + 2*r^3) operations in fp32, for
    whole matrices, though TP ranks have a part each. Ranks that hold the same matrices share them.
    """
    if config.optimizer != "muon":
        return 0.0
    device = Device(hardware, "fp32", constants, num_processes=config.gpus_per_node)
    ranks, slowest = config.world_size // config.pp, 0.0
    for dense, moe in layers:
        number = moe * config.num_experts // config.ep
        experts = _mlp(config, config.expert_ffn_size, number, config.expert_hidden_size)
        seconds = _shared_seconds(device, _dense_matrices(config, dense, moe), ranks // config.tp)
        seconds += _shared_seconds(device, experts, ranks // (config.etp * config.ep))
        slowest = max(slowest, seconds)
    return slowest


def _shared_seconds(device: Device, shapes: list[tuple[float, float, int]], num_ranks: int) -> float:
    """Seconds of the busiest of the ranks that share the matrices: it has one at least."""
    longest = max((_seconds(device, [(rows, columns, 1)]) for rows, columns, _ in shapes), default=0.0)
    return max(longest, _seconds(device, shapes) / max(1, num_ranks))


def _seconds(device: Device, shapes: list[tuple[float, float, int]]) -> float:
    """Seconds for matrices of (rows, columns, number)."""
    total = 0.0
    for rows, columns, count in shapes:
        short, long = min(rows, columns), max(rows, columns)
        gram, square = device.product(short, short, long, count), device.product(short, short, short, count)
        total += 5 * (gram + square + device.product(short, long, short, count))
    return total


def _mlp(config: Config, ffn: int, count: int, hidden: int | None = None) -> list[tuple[float, float, int]]:
    """Gate and up projection are one matrix."""
    hidden = hidden or config.hidden_size
    return [((2 if config.gated else 1) * ffn, hidden, count), (hidden, ffn, count)] if ffn and count else []


def _dense_matrices(config: Config, num_dense: int, num_moe: int) -> list[tuple[float, float, int]]:
    """All others of a stage."""
    # Queries, keys and values are one matrix; in latent attention one each (arXiv:2405.04434).
    query = value = config.num_heads * config.kv_channels
    if config.multi_latent_attention:
        value = config.num_heads * config.v_head_dim
    shapes = [*projections(config, query, config.num_heads, tp=1), (config.hidden_size, value)]
    attention = [(*shape, num_dense + num_moe) for shape in shapes]
    of_moe = _mlp(config, config.shared_expert_size, num_moe)
    if config.moe_latent_size and num_moe:
        of_moe.append((config.moe_latent_size, config.hidden_size, 2 * num_moe))  # the same either way
    return attention + _mlp(config, config.ffn_hidden_size, num_dense) + of_moe
