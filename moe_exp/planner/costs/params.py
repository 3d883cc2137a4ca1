"""Exact parameter counts of a model and of each rank, and the bytes of weights and optimizer state.

Buffers such as the expert bias and rotary frequencies are not counted. All functions expect a valid config
(`problems()` yields nothing); sizes that do not divide evenly are rounded down.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from moe_exp.config import Config
from moe_exp.config.parameter_names import layer_sizes, mtp_sizes
from moe_exp.host.files import count_text
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.products import priced
from moe_exp.planner.hardware import Hardware

MEBIBYTE = 2**20


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model."""

    transformer_layers: int  # all layers, also for multi-token prediction, and the final norm
    embedding: int  # input embedding and, unless tied, output layer
    active_per_token: int  # all except the routed experts that a token does not choose

    @property
    def total(self) -> int:
        return self.transformer_layers + self.embedding


@dataclass(frozen=True)
class RankParameters:
    """Dense and expert parameters of a rank; the two are replicated over different process groups."""

    dense: int  # all except routed experts, replicated over the data-parallel and context-parallel ranks
    expert: int  # routed experts, replicated over the expert-data-parallel ranks

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def sharded(self, config: Config) -> float:
        """Returns the number of parameters per rank if each parameter is split evenly over its replicas."""
        dense, expert = num_replicas(config)
        return self.dense / dense + self.expert / expert


def num_replicas(config: Config) -> tuple[int, int]:
    """Returns the number of replicas of a rank's dense parameters and of its expert parameters."""
    ranks = config.world_size // config.pp
    return max(1, ranks // config.tp), max(1, ranks // (config.etp * config.ep))


def count_parameters(config: Config) -> ParameterCount:
    num_moe, (dense, moe, mtp, windowed) = sum(config.moe_layers), _layers(config)
    layers = (config.num_layers - num_moe) * dense.total + num_moe * moe.total + _final_norm(config)
    layers += sum(config.window_layers) * (windowed.total - dense.total)
    layers += config.mtp_num_layers * mtp.total
    embedding = config.padded_vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    one = moe.expert // config.num_experts
    idle = round(sum(config.all_moe_layers) * (config.num_experts - config.experts_per_token) * one)
    return ParameterCount(layers, embedding, layers + embedding - idle)


def rank_parameters(config: Config, pp_rank: int = 0) -> RankParameters:
    """Counts the parameters of one rank in a pipeline stage; all ranks of a stage have the same counts."""
    return parameters_of_stages(config, config.stage_layers)[pp_rank]


def parameters_of_stages(
    config: Config, stage_layers: Sequence[int], *, learned_positions: bool = False
) -> list[RankParameters]:
    """Counts the parameters per rank for each pipeline stage.

    PP is the length of `stage_layers` (a stage may have no layers); TP, EP, ETP and VPP come from the
    config. `learned_positions`: adds an embedding row per position, replicated over tensor-parallel ranks.
    """
    dense_layer, moe_layer, mtp, windowed = _layers(config, config.tp, config.etp)
    is_moe, has_window = config.moe_layers, config.window_layers
    # Outside the layers: embedding on the first stage, final norm and output layer on the last.
    dense, expert = tables_of_stages(config, len(stage_layers)), [0] * len(stage_layers)
    dense[0] += config.seq_len * config.hidden_size if learned_positions else 0
    dense[-1] += _final_norm(config) + config.mtp_num_layers * mtp.dense
    expert[-1] += config.mtp_num_layers * (mtp.expert // config.ep)
    # Model chunks are assigned to the stages in turn. If VPP does not divide a stage, its first chunks get an
    # extra layer; if the stages do not add up to NUM_LAYERS, the last chunk gets the rest.
    num_chunks = config.vpp or 1
    parts = range(num_chunks - 1, -1, -1)
    chunk_ends = [*accumulate((layers + left) // num_chunks for left in parts for layers in stage_layers)]
    chunk_ends[-1] = config.num_layers
    bounds = [0, *(min(end, config.num_layers) for end in chunk_ends)]
    for chunk, (first, end) in enumerate(pairwise(bounds)):
        stage, num_moe = chunk % len(stage_layers), sum(is_moe[first:end])
        dense[stage] += (end - first - num_moe) * dense_layer.dense + num_moe * moe_layer.dense
        dense[stage] += sum(has_window[first:end]) * (windowed.dense - dense_layer.dense)
        expert[stage] += num_moe * (moe_layer.expert // config.ep)
    return [RankParameters(*sizes) for sizes in zip(dense, expert, strict=True)]


def tables_of_stages(config: Config, num_stages: int) -> list[int]:
    """Counts a rank's embedding and output parameters per stage; tied weights on the same stage count once.

    Multi-token prediction needs a copy of the embedding on the last stage.
    """
    tables, embedding = [0] * num_stages, config.padded_vocab_size // config.tp * config.hidden_size
    tables[0] += embedding
    if num_stages > 1 or not config.tie_embeddings:
        tables[-1] += embedding
    if num_stages > 1 and config.mtp_num_layers:
        tables[-1] += embedding
    return tables


def most_loaded_rank(config: Config) -> int:
    """Returns the pipeline rank with the most parameters; if ranks tie, the first of them."""
    stages = parameters_of_stages(config, config.stage_layers)
    return max(range(config.pp), key=lambda pp_rank: stages[pp_rank].total)


def optimizer_state_bytes(config: Config, hardware: Hardware | None = None) -> float:
    """Returns the bytes per parameter for main weight, moments and weight average, before sharding. With
    OFFLOAD_OPTIMIZER the bytes are 0, except on a CPU. `hardware` defaults to a GPU without the AdamW kernel.

        OPTIMIZER                            main weight   moments               sum, 16-bit / fp32 weights
        adam                                 4             4 + 4                 12      / 8
        adam, OPTIMIZER_STATE_DTYPE=bf16     4             2 + 2                 8       / 4
        adam8bit                             4             1 + 1 + 2 * 4 / 256   6.03125 / 2.03125
        sgd, SGD_MOMENTUM over 0             4             4                     8       / 4
        sgd, SGD_MOMENTUM=0                  4             0                     4       / 0
        muon, DISTRIBUTED_OPTIMIZER=false    4             4                     8       / 4

    fp32 weights need no main weight. With MAIN_PARAMS=remainder, a main weight takes 2 bytes; auto selects
    remainder if the AdamW kernel runs. 8-bit moments have an fp32 scale per block of 256 values, the block
    size of bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861, section 2). Muon keeps one moment for
    matrices; the embedding and output layer use Adam, with more bytes per parameter
    (`embedding_moment_bytes`). Norms and routers are small, so they are counted as matrices. EMA_DECAY adds
    4 bytes for the average of the weights.
    """
    if config.offload_optimizer and not (hardware and hardware.is_cpu):
        return 0.0
    runs_kernels = hardware is not None and hardware.runs_kernels
    by_kernel = runs_kernels and config.optimizer == "adam" and config.dtype == "bf16" and not config.qk_clip
    main_weight = priced(config, "main_params", {"auto": 2 if by_kernel else 4, "fp32": 4, "remainder": 2})
    main_weight = 0 if config.dtype == "fp32" else main_weight
    of_adam = priced(config, "optimizer_state_dtype", {"fp32": 4.0, "bf16": 2.0})
    each = {"adam": of_adam, "adam8bit": 1 + 4 / 256, "muon": 4.0, "sgd": 4.0}
    moments = num_moments(config) * priced(config, "optimizer", each)
    return main_weight + moments + average_bytes(config)


def average_bytes(config: Config) -> int:
    """Returns the bytes per parameter of the fp32 average of the weights, in memory and in checkpoints."""
    return 4 if config.ema_decay else 0


def num_moments(config: Config) -> int:
    """Returns the number of moments per parameter that the optimizer keeps."""
    by_sgd = int(config.sgd_momentum > 0)
    return priced(config, "optimizer", {"adam": 2, "adam8bit": 2, "muon": 1, "sgd": by_sgd})


def embedding_moment_bytes(config: Config) -> int:
    """Returns extra bytes per embedding and output parameter: with Muon, these parameters use Adam."""
    return 4 if config.optimizer == "muon" else 0


def weight_and_optimizer_bytes(config: Config, rank: RankParameters) -> float:
    """Returns the bytes of a rank's weights, gradients and optimizer state. The formula is that of Megatron's
    `report_theoretical_memory`, but expert state is divided by world / (ETP*EP*PP), the
    number of expert replicas.
    """
    state = optimizer_state_bytes(config)
    kept = (4 if config.dtype == "fp32" else 2) + (4 if config.grad_dtype == "fp32" else 2)
    dense, expert = num_replicas(config) if config.distributed_optimizer else (1, 1)
    return (kept + state / dense) * rank.dense + (kept + state / expert) * rank.expert


def checkpoint_bytes(config: Config) -> int:
    """Returns the size of a checkpoint in bytes. Its main weights and moments are always in fp32."""
    count, weight = count_parameters(config), 4 if config.dtype == "fp32" else 2
    tables = count.embedding * embedding_moment_bytes(config)
    return count.total * (weight + 4 + 4 * num_moments(config) + average_bytes(config)) + tables


def _final_norm(config: Config) -> int:
    with_bias = 2 if config.norm_bias else 1
    return config.hidden_size * priced(config, "normalization", {"RMSNorm": 1, "LayerNorm": with_bias})


# Parameters that tensor-parallel ranks split. They share norms, router, gates, down projections of latent
# attention, and biases of products that sum over the ranks.
_SPLIT = (
    r"(linear_((qkv|q_proj|q_up_proj|kv_up_proj|fc1)\.(weight|bias)|(proj|fc2)\.weight)|eh_proj\.weight"
    r"|softmax_offset)$"
)


def _layers(config: Config, tp: int = 1, etp: int = 1) -> list[RankParameters]:
    """Returns the parameters per rank of four kinds of layers: dense, MoE, multi-token prediction, and dense
    with SLIDING_WINDOW. All routed experts are counted, as with EP=1.
    """
    # norms over all heads are split like the heads
    scopes = {"head": _SPLIT, "rotated": _SPLIT, "all": rf"{_SPLIT}|[qk]_layernorm\.weight$"}
    split, found = re.compile(priced(config, "qk_norm_scope", scopes)), []
    for sizes in (*layer_sizes(config), mtp_sizes(config), layer_sizes(config, has_window=True)[0]):
        counts = {"dense": 0, "expert": 0}
        for name, size in sizes.items():
            kind, ways = ("expert", etp) if ".experts." in name else ("dense", tp)
            counts[kind] += size // (ways if split.search(name) else 1)
        found.append(RankParameters(**counts))
    return found


def startup_report(config: Config) -> str:
    """Returns the parameter counts that a run prints at startup, partly in Megatron's wording."""
    count, pp_rank = count_parameters(config), most_loaded_rank(config)
    rank = rank_parameters(config, pp_rank)
    num_bytes = weight_and_optimizer_bytes(config, rank)
    num_bytes += embedding_moment_bytes(config) * tables_of_stages(config, config.pp)[pp_rank]
    flops, batch = flops_per_iteration(config), f"{config.gbsz} samples of {config.seq_len} tokens"
    return f"""Parameters: {counted(count.total)}, {counted(count.active_per_token)} active per token
Parameters in layers: {counted(count.transformer_layers)}, in embeddings: {counted(count.embedding)}
 > number of parameters on (tensor, pipeline) model parallel rank (0, {pp_rank}): {rank.total}
Theoretical memory footprints: weight and optimizer={num_bytes / MEBIBYTE:.2f} MB
Floating-point operations per iteration: {flops} ({batch})"""


def counted(count: int) -> str:
    """Formats a count as in `30.5B (30,532,122,624)`."""
    return f"{count_text(count)} ({count:,})"


def split_layers(num_layers: int, num_stages: int, *, count_ends: bool = False) -> list[int]:
    """Splits layers over the stages as evenly as possible, with the longer stages in the middle. `count_ends`
    counts embedding and output layer as one layer each: 106 layers on 12 stages become 8,9*10,8.
    """
    if num_stages == 1:
        return [num_layers]
    items = num_layers + (2 if count_ends else 0)
    each, left = divmod(items, num_stages)
    stages = [each] * num_stages
    # Extra layers go to the middle first, as the end stages have more other work.
    outwards = sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))
    if count_ends and not each:  # the ends always exist
        outwards = [0, num_stages - 1, *outwards[:-2]]
    for index in outwards[:left]:
        stages[index] += 1
    if count_ends:
        stages[0], stages[-1] = stages[0] - 1, stages[-1] - 1
    return stages


def stages_text(stage_layers: Sequence[int]) -> str:
    """Formats the layers per stage as in PIPELINE_LAYERS: [8, 9, 9, 8] becomes 8,9*2,8."""
    runs = [(layers, len(list(same))) for layers, same in groupby(stage_layers)]
    return ",".join(f"{layers}*{times}" if times > 1 else str(layers) for layers, times in runs)
