"""Seconds of an iteration: products, collectives, pipeline bubble, optimizer. No torch.

A micro-batch costs stage i the time t_i. With m micro-batches an iteration of the 1F1B schedule takes sum(t)
+ (m - 1) * max(t); with V model chunks per rank the part that fills and empties the pipeline shrinks to 1/V
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). What data parallel ranks exchange comes after it, but
for what the backward pass of the last micro-batch hides.
"""

from dataclasses import dataclass, fields

from moe_exp.config import Config
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.device import Device, Group, exchange_seconds, skew_of
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.layer_time import LayerTimes, layer_times
from moe_exp.planner.costs.params import RankParameters
from moe_exp.planner.costs.products import hidden_bytes, num_tokens, priced, projections
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
    job: PlannedJob, hardware: Hardware, constants: TimeConstants, *, batch_size: int | None = None
) -> IterationTime:
    """Time of an iteration of `batch_size` samples (batch ramp-up); GBSZ by default."""
    config, counts = job.config, _counts(job)
    num_microbatches = max(1, (batch_size or config.gbsz) // (config.mbsz * config.data_parallel_size))
    device = Device(hardware, config.dtype, constants, num_processes=config.gpus_per_node)
    parts = _parts_of_stages(job, device, layer_times(job, device), counts)
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    bubble = bubble_seconds(totals, num_microbatches, config.vpp or 1)
    factor = {"a": constants.software_a, "c": constants.software_c}.get(job.software, 1.0)
    seconds = {name: num_microbatches * sum(values) / config.pp * factor for name, values in parts.items()}
    rank = max(job.parameters, key=lambda stage: stage.total)
    # What the last micro-batch hides of the gradients' reduce and the weights' gather: all that its slowest
    # stage takes, half of it on devices up to Ampere.
    overlaps = priced(config, "overlap", {"true": True, "false": False, "auto": not hardware.is_cpu})
    hidden = 0.0
    if job.sharding == "distributed" and overlaps:
        hidden = max(totals) * (1.0 if hardware.is_recent else 0.5)
    # the step: norm of the gradients, the update of what this rank owns, and the new weights
    owned = float(rank.total)
    if job.sharding != "none":
        ranks = config.world_size // config.pp
        owned = rank.dense / max(1, ranks // config.tp)
        owned += rank.expert / max(1, ranks // (config.etp * config.ep))
    step = (rank.total * _STEP_BYTES + owned * _STATE_BYTES) / device.bandwidth
    step += _muon_seconds(config, hardware, constants, counts)
    # newer than Ampere: an estimate, which published runs do not determine
    once = 0.01 if hardware.is_recent else constants.iteration_seconds
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


def stage_passes(job: PlannedJob, hardware: Hardware, constants: TimeConstants) -> list[StagePass]:
    """The passes over every stage. Of collectives, forward has one of two, or of three with a recompute."""
    device = Device(hardware, job.config.dtype, constants, num_processes=job.config.gpus_per_node)
    times, counts = layer_times(job, device), _counts(job)
    parts = _parts_of_stages(job, device, times, counts)
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
    job: PlannedJob, device: Device, times: LayerTimes, counts: list[tuple[int, int]]
) -> dict[str, list[float]]:
    """Seconds of a micro-batch on every stage, by part."""
    config, hardware, constants = job.config, device.hardware, device.constants
    dense, moe = (_layer(job, device, times, is_moe) for is_moe in (False, True))
    parts = {part: [n * dense[part] + n_moe * moe[part] for n, n_moe in counts] for part in dense}
    parts["compute"][-1] += (1 + job.engine.num_mtp_layers) * sum(times.parts["output"])
    # activations to the next stage and their gradient back, once per model chunk
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
    """Seconds by which an iteration is longer than its stages are busy on average.
    Filling and emptying are spread over `num_chunks` model chunks per rank (VPP).
    """
    slowest = max(stages)
    return num_microbatches * (slowest - sum(stages) / len(stages)) + (sum(stages) - slowest) / num_chunks


def _counts(job: PlannedJob) -> list[tuple[int, int]]:
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


def _layer(job: PlannedJob, device: Device, times: LayerTimes, is_moe: bool) -> dict[str, float]:
    """Seconds of one layer for one micro-batch, forward, recompute and backward, by part."""
    config, hardware, constants = job.config, device.hardware, device.constants
    one, repeated = times.layer(is_moe), times.repeated(is_moe)
    forwards = 2 if config.recompute == "full" else 1
    of_experts = 2 if config.recompute in ("full", "selective") else 1
    again = priced(config, "recompute", repeated)
    if not config.use_moe and config.recompute in ("selective", "moe_act"):  # then of attention's scores
        again = repeated["core_attn"]
    if config.recompute != "full":
        again += sum(repeated[name] for name in job.engine.recompute)
    compute = one.forward + one.backward + again

    # An all-reduce of the activations, or sequence parallelism's gather and scatter. Routed experts take the
    # tokens of a tensor parallel rank as they are; attention, an MLP and a shared expert gather them.
    group = Group(config.tp, 1, hardware, config.gpus_per_node)
    share = group.ring_share(constants, constants.tensor_bandwidth)
    mlp_gathers = (1 + of_experts) * bool(config.shared_expert_size) if is_moe else 1 + forwards
    tensor = group.all_reduce(hidden_bytes(config), share) * ((1 + forwards) + mlp_gathers)

    # keys and values of the other context parallel ranks
    group = Group(config.cp, config.tp, hardware, config.gpus_per_node)
    share = group.ring_share(constants, constants.tensor_bandwidth)
    keys = 2 * config.num_query_groups * config.kv_channels / config.tp
    if config.multi_latent_attention:  # of every head, with values of another size
        keys = config.num_heads * (config.kv_channels + config.v_head_dim) / config.tp
    num_bytes = num_tokens(config) * config.cp * keys * device.num_bytes
    context = group.reduce_scatter(num_bytes, share) * (1 + forwards)

    exchange = 0.0
    if is_moe:  # there and back
        exchange = 2 * (1 + of_experts) * exchange_seconds(job, hardware, constants)
        exchange *= skew_of(job, hardware, constants)
    if hardware.is_recent:
        context *= constants.context_exposed
        tensor *= constants.tensor_exposed if job.engine.overlaps_tensor_parallel else 1.0
        if job.engine.overlaps_exchange:
            exchange = max(constants.exchange_exposed * exchange, exchange - compute)

    # Host and device run beside each other, but for a share of the shorter one.
    busy, host = compute + tensor + context + exchange, times.host_moe if is_moe else times.host_dense
    waiting = max(busy, host) + constants.host_serial * min(busy, host) - busy if host else 0.0
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
        share = group.ring_share(constants, constants.data_bandwidth)
        if parameters and group.size > 1:
            total += group.reduce_scatter(parameters * per_parameter, share)
    if engine.shards_parameters:  # layer by layer for every micro-batch, forward and backward
        per_microbatch = (2 * per_parameter - engine.reduced_bytes) / per_parameter
        return total * per_microbatch * job.num_microbatches * constants.sharded_exposed
    # even where reduce and gather overlap nothing hides the last bucket to be ready
    return max(total - hidden, 0.1 * total) if hidden else total


def _muon_seconds(
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
    hidden, latent, ranks = config.hidden_size, config.moe_latent_size, config.world_size // config.pp

    def seconds(rows: float, columns: float, count: int) -> float:
        short, long = min(rows, columns), max(rows, columns)
        gram, square = device.product(short, short, long, count), device.product(short, short, short, count)
        return 5 * (gram + square + device.product(short, long, short, count))

    def mlp(ffn: int, width: int, count: int) -> list[tuple[float, float, int]]:
        # gate and up projection are one matrix
        return [((2 if config.gated else 1) * ffn, width, count), (width, ffn, count)] if ffn else []

    # Queries, keys and values are one matrix; in latent attention one each (arXiv:2405.04434).
    query = config.num_heads * config.kv_channels
    value = config.num_heads * config.v_head_dim if config.multi_latent_attention else query
    attention = [*projections(config, query, config.num_heads, tp=1), (hidden, value)]
    slowest = 0.0
    for dense, moe in layers:
        others = [(*shape, dense + moe) for shape in attention]
        others += mlp(config.ffn_hidden_size, hidden, dense) + mlp(config.shared_expert_size, hidden, moe)
        others += [(latent, hidden, 2 * moe)] if latent else []  # both projections take the same time
        local = moe * config.num_experts // config.ep
        experts = mlp(config.expert_ffn_size, config.expert_hidden_size, local)
        stage = 0.0
        for shapes, sharing in ((others, ranks // config.tp), (experts, ranks // (config.etp * config.ep))):
            there = [shape for shape in shapes if shape[2]]
            # the busiest of the ranks that share the matrices has one at least
            longest = max((seconds(rows, columns, 1) for rows, columns, _ in there), default=0.0)
            stage += max(longest, sum(seconds(*shape) for shape in there) / max(1, sharing))
        slowest = max(slowest, stage)
    return slowest
