"""Seconds of an iteration: products, collectives, pipeline bubble, optimizer. No torch.

A micro-batch costs stage i the time t_i. With m micro-batches an iteration of the 1F1B schedule takes sum(t)
+ (m - 1) * max(t); with V model chunks per rank the part that fills and empties the pipeline shrinks to 1/V
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). What data parallel ranks exchange comes after it, but
for what the backward pass of the last micro-batch hides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moe_exp.config import Config
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.layer_time import LayerTimes, layer_times, num_tokens
from moe_exp.planner.costs.params import RankParameters
from moe_exp.planner.costs.products import Device
from moe_exp.planner.costs.traffic import Group
from moe_exp.planner.hardware import Hardware

__all__ = ["IterationTime", "TimeConstants", "time_of"]

# Bytes that the optimizer's step moves: per parameter (norm of the gradients, new weights), and per parameter
# whose state is here.
_STEP_BYTES, _STATE_BYTES = 8, 40
# share of the gradients that nothing hides, even where reduce and gather overlap: the last bucket to be ready
_FIRST_BUCKET = 0.1


@dataclass(frozen=True)
class IterationTime:
    """Seconds of one iteration by where they go; they add up to `total`. Those of stages are means over the
    pipeline.

    Attributes:
        compute: products and what is bound by memory, forward, recompute and backward.
        tensor_parallel: collectives of tensor parallel ranks.
        context_parallel: keys and values that attention does not hide.
        expert_parallel: token dispatch and combine.
        pipeline: messages between stages.
        bubble: waiting for the first and last micro-batches, and for slower stages.
        data_parallel: gradient reduce and parameter gather that nothing hides.
        optimizer: the step itself, and what the host does once an iteration: data, logs.
    """

    compute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds per iteration."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name of a part to its seconds."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def bound(self) -> str:
        """The largest part beside compute where it takes more than a tenth of the time, else compute."""
        name, seconds = max(
            ((name, value) for name, value in self.parts().items() if name != "compute"),
            key=lambda part: part[1],
        )
        return name if seconds > self.total / 10 else "compute"


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer for one micro-batch, forward, recompute and backward, by part."""

    compute: float
    tensor: float
    context: float
    expert: float


def time_of(
    job: Job, hardware: Hardware, constants: TimeConstants, *, batch_size: int | None = None
) -> IterationTime:
    """Time of an iteration.

    Args:
        job: what runs.
        hardware: on what.
        constants: what was fitted.
        batch_size: samples of the iteration (batch ramp-up); GBSZ by default.
    """
    config = job.config
    samples = batch_size or config.gbsz
    num_microbatches = max(1, samples // (config.mbsz * config.data_parallel_size))
    device = Device(hardware, config.dtype, constants, num_processes=config.gpus_per_node)
    times = layer_times(job, device, constants)
    dense, moe = (_layer(job, times, hardware, constants, is_moe) for is_moe in (False, True))
    counts = _counts(job)
    output = times.output.forward + times.output.backward
    message = _message(job, hardware, constants)

    def stage(name: str) -> list[float]:
        return [n_dense * getattr(dense, name) + n_moe * getattr(moe, name) for n_dense, n_moe in counts]

    compute = stage("compute")
    compute[-1] += output
    parts = {
        "compute": compute,
        "tensor_parallel": stage("tensor"),
        "context_parallel": stage("context"),
        "expert_parallel": stage("expert"),
    }
    parts["pipeline"] = [message] * config.pp
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    bubble = bubble_seconds(totals, num_microbatches, config.vpp or 1)
    factor = {"a": constants.software_a, "c": constants.software_c}.get(job.software, 1.0)
    seconds = {name: num_microbatches * sum(values) / config.pp * factor for name, values in parts.items()}
    rank = max(job.parameters, key=lambda stage: stage.total)
    hidden = max(totals) * 0.5 if _overlaps(job, hardware) else 0.0
    step = _optimizer(job, device, rank) + muon_seconds(config, hardware, constants, counts)
    return IterationTime(
        **seconds,
        bubble=bubble * factor,
        data_parallel=_data_parallel(job, hardware, constants, rank, hidden) * factor,
        optimizer=step * factor + constants.iteration_seconds,
    )


def bubble_seconds(stages: list[float], num_microbatches: int, num_chunks: int = 1) -> float:
    """What an iteration of a pipeline takes longer than its stages are busy on average.

    Args:
        stages: seconds of a micro-batch on every stage, forward and backward.
        num_microbatches: of an iteration.
        num_chunks: model chunks per rank (VPP), over which filling and emptying are spread.
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


def _layer(job: Job, times: LayerTimes, hardware: Hardware, constants: TimeConstants, is_moe: bool) -> _Layer:
    config = job.config
    one = times.moe if is_moe else times.dense
    again = {"full": one.forward}
    if is_moe:  # selective recompute leaves the dense layers of an MoE model alone
        again |= {"selective": times.moe_part.forward, "moe_act": times.activation.forward}
    compute = one.forward + one.backward + again.get(config.recompute, 0.0)
    forwards = 2 if config.recompute == "full" else 1
    of_experts = 2 if config.recompute in ("full", "selective") else 1
    # Routed experts take the tokens of a tensor parallel rank as they are; attention, an MLP and a shared
    # expert gather them.
    gathers = (1 + forwards) + (
        (1 + of_experts) * bool(config.shared_expert_size) if is_moe else 1 + forwards
    )
    exchanges = 2 * (1 + of_experts) if is_moe else 0
    return _Layer(
        compute=compute,
        tensor=_gathered(job, hardware, constants) * gathers,
        context=_context(job, hardware, constants) * (1 + forwards),
        expert=exchanges * _exchange(job, hardware, constants),
    )


def _rows_bytes(config: Config) -> float:
    return num_tokens(config) * config.hidden_size * (4 if config.dtype == "fp32" else 2)


def _gathered(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """An all-reduce of a micro-batch's activations, or the all-gather and reduce-scatter that stand for it
    with sequence parallelism.
    """
    group = Group(job.config.tp, 1, hardware, job.config.gpus_per_node)
    return group.all_reduce(_rows_bytes(job.config), constants.tensor_bandwidth)


def _context(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """Keys and values of the other ranks, for one pass over a layer."""
    config = job.config
    group = Group(config.cp, config.tp, hardware, config.gpus_per_node)
    keys = 2 * config.num_query_groups * config.kv_channels / config.tp
    num_bytes = num_tokens(config) * config.cp * keys * (4 if config.dtype == "fp32" else 2)
    return group.reduce_scatter(num_bytes, constants.tensor_bandwidth)


def _exchange(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """A micro-batch's tokens on their way to the experts, or back, with the gather over expert tensor
    parallel ranks.

    An all-to-all sends a token once for each of its experts, DeepEP once to each node (and there over NVLink
    to each rank), the all-gather to every rank.
    """
    config = job.config
    if config.ep * config.etp == 1:
        return 0.0
    tokens = _rows_bytes(config) / (config.tp if job.sequence_parallel else 1)
    slots = tokens * config.topk
    experts = Group(config.ep, config.etp, hardware, config.gpus_per_node)
    share = constants.tensor_bandwidth if experts.in_node else constants.data_bandwidth
    if config.dispatcher == "allgather":
        among_slices = Group(config.etp, 1, hardware, config.gpus_per_node).reduce_scatter
        gathered = tokens * config.ep
        return experts.reduce_scatter(gathered, share) + among_slices(
            gathered * config.etp, constants.tensor_bandwidth
        )
    to_nodes = tokens * _nodes_of_token(config, experts.num_nodes) if config.dispatcher == "deepep" else None
    seconds = experts.all_to_all(slots, share, to_nodes=to_nodes)
    if job.software == "2024-10":
        seconds += constants.exchange_seconds_2024 * (config.ep - 1)
    return seconds + Group(config.etp, 1, hardware, config.gpus_per_node).reduce_scatter(
        slots * config.etp, constants.tensor_bandwidth
    )


def _nodes_of_token(config: Config, num_nodes: float) -> float:
    """Nodes that hold a token's experts: N * (1 - (1 - 1/N)^TOPK) when all are chosen alike, fewer where the
    router limits groups.
    """
    nodes = num_nodes * (1 - (1 - 1 / num_nodes) ** config.topk)
    if config.num_router_groups:
        nodes = min(nodes, config.router_group_topk * max(1.0, num_nodes / config.num_router_groups))
    return nodes


def _message(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """A micro-batch's activations to the next stage and their gradient back, once per model chunk."""
    config = job.config
    if config.pp == 1:
        return 0.0
    group = Group(config.pp, config.world_size // config.pp, hardware, config.gpus_per_node)
    num_bytes = _rows_bytes(config) / (config.tp if job.sequence_parallel else 1)
    speed = hardware.node_bytes_per_second if group.in_node else hardware.network_bytes_per_second
    return 2 * (config.vpp or 1) * (num_bytes / (speed * constants.stage_bandwidth) + group.latency_seconds)


def _overlaps(job: Job, hardware: Hardware) -> bool:
    """Whether gradients are reduced, and weights gathered, while the device computes."""
    overlap = job.config.overlap
    return job.sharding == "distributed" and (
        overlap == "true" or (overlap == "auto" and not hardware.is_cpu)
    )


def _data_parallel(
    job: Job, hardware: Hardware, constants: TimeConstants, rank: RankParameters, hidden: float
) -> float:
    """Reduce and gather of dense and expert parameters, less `hidden` seconds that the passes of a
    micro-batch hide.
    """
    config = job.config
    ranks_of_stage = config.world_size // config.pp
    gradient = 4 if job.precision in ("bf16_fp32grad", "fp32") else 2
    weight = 4 if job.precision == "fp32" else 2
    # The distributed optimizer reduces to the rank that owns a part; ZeRO-1 of 2022 and a plain optimizer
    # reduce to all.
    num_bytes = (
        gradient + weight
        if job.sharding == "distributed"
        else 2 * gradient + (weight if job.sharding == "zero1" else 0)
    )
    total = 0.0
    for parameters, model_ranks in ((rank.dense, config.tp), (rank.expert, config.etp * config.ep)):
        size = ranks_of_stage // model_ranks
        if parameters and size > 1:
            total += Group(size, model_ranks, hardware, config.gpus_per_node).reduce_scatter(
                parameters * num_bytes, constants.data_bandwidth
            )
    return max(total - hidden, _FIRST_BUCKET * total) if hidden else total


def _optimizer(job: Job, device: Device, rank: RankParameters) -> float:
    """Norm of the gradients, the step on what this rank owns, and the new weights."""
    config = job.config
    ranks_of_stage = config.world_size // config.pp
    owned: float = rank.total
    if job.sharding != "none":
        owned = rank.dense / max(1, ranks_of_stage // config.tp) + rank.expert / max(
            1, ranks_of_stage // (config.etp * config.ep)
        )
    return (rank.total * _STEP_BYTES + owned * _STATE_BYTES) / device.bandwidth


# Seconds of Muon's step: the products that orthogonalize every matrix (`moe_exp.engine.muon`).
#
# Five steps of Newton and Schulz on an [r, c] matrix, r <= c: x x^T, its square, their sum times x; or 5 *
# (4*r^2*c + 2*r^3) operations in fp32. A rank does them for whole matrices, though tensor parallel ranks have
# a part each, and data parallel ranks all do the same.


_NUM_STEPS = 5


def muon_seconds(
    config: Config, hardware: Hardware, constants: TimeConstants, layers: list[tuple[int, int]]
) -> float:
    """Seconds of the slowest stage's products; 0 with another optimizer.

    Args:
        config: the settings.
        hardware: the devices.
        constants: what was fitted.
        layers: (without experts, with experts) of every stage.
    """
    if config.optimizer != "muon":
        return 0.0
    device = Device(hardware, "fp32", constants, num_processes=config.gpus_per_node)
    dense, moe = (
        _seconds(device, _attention(config) + mlp)
        for mlp in (_mlp(config, config.ffn_hidden_size), _experts(config))
    )
    return max(num_dense * dense + num_moe * moe for num_dense, num_moe in layers)


def _seconds(device: Device, shapes: list[tuple[int, int, int]]) -> float:
    """Of matrices [rows, columns], so many of each shape."""
    total = 0.0
    for rows, columns, count in shapes:
        short, long = min(rows, columns), max(rows, columns)
        gram = device.product(short, short, long, count)
        total += _NUM_STEPS * (
            gram + device.product(short, short, short, count) + device.product(short, long, short, count)
        )
    return total


def _mlp(config: Config, ffn: int, count: int = 1) -> list[tuple[int, int, int]]:
    """Gate and up projection are one matrix."""
    hidden = config.hidden_size
    return [((2 if config.gated else 1) * ffn, hidden, count), (hidden, ffn, count)] if ffn else []


def _experts(config: Config) -> list[tuple[int, int, int]]:
    if not config.use_moe:
        return []
    return _mlp(config, config.expert_ffn_size, config.num_experts // config.ep) + _mlp(
        config, config.shared_expert_size
    )


def _attention(config: Config) -> list[tuple[int, int, int]]:
    """Queries, keys and values are one matrix, those of multi-latent attention one for each projection
    (arXiv:2405.04434).
    """
    hidden, query = config.hidden_size, config.num_heads * config.kv_channels
    if not config.multi_latent_attention:
        return [(query + 2 * config.num_query_groups * config.kv_channels, hidden, 1), (hidden, query, 1)]
    latent, value = config.kv_lora_rank, config.num_heads * config.v_head_dim
    down_up = [
        (latent + config.qk_pos_emb_head_dim, hidden, 1),
        (config.num_heads * config.qk_head_dim + value, latent, 1),
    ]
    queries = (
        [(config.q_lora_rank, hidden, 1), (query, config.q_lora_rank, 1)]
        if config.q_lora_rank
        else [(query, hidden, 1)]
    )
    return [*down_up, *queries, (hidden, value, 1)]
