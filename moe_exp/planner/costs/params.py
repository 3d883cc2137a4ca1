"""Exact parameter counts of a Config, for the whole model and for one rank, and the bytes of weights and
optimizer.

Counts are of trained parameters; buffers (the expert bias, rotary frequencies) are left out. Every function
takes a config that passed `moe_exp.config.checks.checks`: sizes that do not divide are rounded down here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from moe_exp.config import Config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.optimizer_bytes import embedding_moment_bytes, num_moments, optimizer_state_bytes

MEBIBYTE = 2**20


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model.

    Attributes:
        transformer_layers: all layers and the final norm.
        embedding: input embedding and, unless tied, output layer.
        active_per_token: parameters that one token meets: everything but the routed experts it does not
            choose.
    """

    transformer_layers: int
    embedding: int
    active_per_token: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.transformer_layers + self.embedding


@dataclass(frozen=True)
class RankParameters:
    """Parameters that one rank holds; the two parts are replicated over different groups of ranks.

    Attributes:
        dense: everything but routed experts, replicated over the data-parallel and context-parallel ranks.
        expert: routed experts, replicated over the expert-data-parallel ranks.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.expert


def count_parameters(config: Config) -> ParameterCount:
    """Counts the parameters of the whole model."""
    num_moe = sum(config.moe_layers)
    experts = num_moe * config.num_experts * _expert(config)
    layers = (config.num_layers - num_moe) * _layer(config, 1, is_moe=False) + num_moe * _layer(
        config, 1, is_moe=True
    )
    layers += experts + _norm(config, config.hidden_size)
    embedding = _embedding(config, tp=1) * (1 if config.tie_embeddings else 2)
    idle = num_moe * (config.num_experts - config.topk) * _expert(config)
    return ParameterCount(
        transformer_layers=layers, embedding=embedding, active_per_token=layers + embedding - idle
    )


def rank_parameters(config: Config, pp_rank: int = 0) -> RankParameters:
    """Counts the parameters of a rank in pipeline stage `pp_rank`; all ranks of a stage hold equally many."""
    return parameters_of_stages(config, config.stage_layers)[pp_rank]


def parameters_of_stages(
    config: Config, stage_layers: Sequence[int], *, learned_positions: bool = False
) -> list[RankParameters]:
    """Counts the parameters of a rank of every pipeline stage, from the first to the last.

    Args:
        config: the settings; their TP, EP, ETP and VPP count, PP is the number of stages.
        stage_layers: layers of every stage, all its model chunks together. A stage may have none.
        learned_positions: whether the embedding has a row for each of SEQ_LEN positions (whole on every
            tensor-parallel rank).
    """
    num_moe_before = list(accumulate(config.moe_layers, initial=0))
    dense_layer, moe_layer = _layer(config, config.tp, is_moe=False), _layer(config, config.tp, is_moe=True)
    experts = config.num_experts // config.ep * _expert(config, config.etp)
    ends = _stage_ends(config, len(stage_layers), learned_positions=learned_positions)
    num_layers, num_moe = [0] * len(stage_layers), [0] * len(stage_layers)
    for chunk, (first, end) in enumerate(_chunk_bounds(config, stage_layers)):
        num_layers[chunk % len(stage_layers)] += end - first
        num_moe[chunk % len(stage_layers)] += num_moe_before[end] - num_moe_before[first]
    return [
        RankParameters(dense=at_ends + (layers - moe) * dense_layer + moe * moe_layer, expert=moe * experts)
        for at_ends, layers, moe in zip(ends, num_layers, num_moe, strict=True)
    ]


def tables_of_stages(config: Config, num_stages: int) -> list[int]:
    """Parameters of embedding and output layer on a rank of every pipeline stage; tied ones are one where
    both are on the same rank.
    """
    tables = [0] * num_stages
    tables[0] += _embedding(config, config.tp)
    if num_stages > 1 or not config.tie_embeddings:
        tables[-1] += _embedding(config, config.tp)
    return tables


def stage_of_layer(config: Config, layer: int) -> int:
    """Pipeline rank of a layer (from 0). With VPP the stages go around the ranks once per model chunk."""
    bounds = _chunk_bounds(config, config.stage_layers)
    return next(chunk for chunk, (_, end) in enumerate(bounds) if layer < end) % config.pp


def most_loaded_rank(config: Config) -> int:
    """Pipeline rank that holds the most parameters; the first one of equals."""
    stages = parameters_of_stages(config, config.stage_layers)
    return max(range(config.pp), key=lambda pp_rank: stages[pp_rank].total)


def gpt_parameters(*, num_layers: int, hidden_size: int, vocab_size: int, seq_len: int) -> int:
    """Parameters of a GPT of 2020, as sizes of models in Megatron-DeepSpeed's tables are meant: l*(12*h^2 +
    13*h) + v*h + s*h + 2*h.

    As many key heads as query heads, MLP of four times the width without a gate, biases, LayerNorm, learned
    positions, output layer tied to the embedding, vocabulary as it is given (not padded).
    """
    per_layer = 12 * hidden_size**2 + 13 * hidden_size
    return num_layers * per_layer + (vocab_size + seq_len + 2) * hidden_size


def weight_and_optimizer_bytes(config: Config, rank: RankParameters) -> float:
    """Bytes of weights, gradients and optimizer state on a rank that holds the parameters `rank`.

    Megatron's `report_theoretical_memory`, which takes every parameter for a dense one. Experts are
    replicated over fewer ranks than the rest (world / (ETP*EP*PP) instead of world / (TP*PP)), so their state
    is split among fewer.
    """
    dense = _bytes_per_parameter(config, config.world_size // (config.tp * config.pp))
    expert = _bytes_per_parameter(config, config.world_size // (config.etp * config.ep * config.pp))
    return dense * rank.dense + expert * rank.expert


def checkpoint_bytes(config: Config) -> int:
    """Bytes of one checkpoint of the whole model: weights, fp32 main weights and the optimizer's moments.

    Main weights are written in fp32 as well, and moments as fp32 whatever they are in memory: a checkpoint
    fits every layout.
    """
    count, weight = count_parameters(config), 4 if config.dtype == "fp32" else 2
    return count.total * (weight + 4 + 4 * num_moments(config)) + count.embedding * embedding_moment_bytes(
        config
    )


def _bytes_per_parameter(config: Config, num_replicas: int) -> float:
    """Bytes: weight, fp32 gradient and, sharded over replicas by the distributed optimizer, the optimizer's
    state.
    """
    kept = 8 if config.dtype == "fp32" else 6
    return kept + optimizer_state_bytes(config) / (
        max(1, num_replicas) if config.distributed_optimizer else 1
    )


def _chunk_bounds(config: Config, stage_layers: Sequence[int]) -> list[tuple[int, int]]:
    """First layer, and the one after the last, of every model chunk in the order of the layers.

    Where VPP does not divide a stage, its first chunks have one layer more; where stages do not add up, the
    last chunk has the rest.
    """
    num_chunks = config.vpp or 1
    layers_of_chunks = (
        (layers + num_chunks - 1 - chunk) // num_chunks
        for chunk in range(num_chunks)
        for layers in stage_layers
    )
    ends = list(accumulate(layers_of_chunks))[:-1]
    return list(pairwise([0, *(min(end, config.num_layers) for end in ends), config.num_layers]))


def _norm(config: Config, size: int) -> int:
    return size if config.normalization == "RMSNorm" else 2 * size


def _mlp(config: Config, ffn: int, tp: int = 1, *, bias: bool = False) -> int:
    """One MLP, dense, shared or expert. The bias of the row-parallel second projection is on every rank."""
    width = (2 if config.gated else 1) * ffn // tp
    return config.hidden_size * (width + ffn // tp) + (width + config.hidden_size if bias else 0)


def _expert(config: Config, etp: int = 1) -> int:
    return _mlp(config, config.expert_ffn_size, etp, bias=config.add_bias_linear)


def _attention(config: Config, tp: int) -> int:
    if config.multi_latent_attention:
        return _latent_attention(config, tp)
    hidden, heads = config.hidden_size, config.num_heads * config.kv_channels // tp
    qkv = heads + 2 * config.num_query_groups * config.kv_channels // tp
    biases = (qkv if config.add_bias_linear or config.qkv_bias else 0) + (
        hidden if config.add_bias_linear else 0
    )
    return hidden * (qkv + heads) + _qk_norms(config, tp) + biases


def _latent_attention(config: Config, tp: int) -> int:
    """DeepSeek-V2, arXiv:2405.04434, section 2.1. The projections down, and their norms, are on every
    tensor-parallel rank.
    """
    hidden, heads = config.hidden_size, config.num_heads // tp
    query, latent = heads * config.kv_channels, config.kv_lora_rank
    count = hidden * (latent + config.qk_pos_emb_head_dim) + latent * heads * (
        config.qk_head_dim + config.v_head_dim
    )
    if config.q_lora_rank:
        count += config.q_lora_rank * (hidden + query)
    else:
        count += hidden * query
    norms = _norm(config, latent) + (_norm(config, config.q_lora_rank) if config.q_lora_rank else 0)
    count += heads * config.v_head_dim * hidden + (hidden if config.add_bias_linear else 0)
    return count + (norms if config.qk_norm else 0)


def _qk_norms(config: Config, tp: int) -> int:
    """Norm weights of one head are on every tensor-parallel rank, those over all heads are split with the
    heads.
    """
    if not config.qk_norm:
        return 0
    if config.qk_norm_scope == "all":
        return (config.num_heads + config.num_query_groups) * config.kv_channels // tp
    return 2 * _norm(config, config.kv_channels)


def _layer(config: Config, tp: int, *, is_moe: bool) -> int:
    """One layer without its routed experts. Norms and router are on every tensor-parallel rank."""
    common = _attention(config, tp) + 2 * _norm(config, config.hidden_size)
    if not is_moe:
        return common + _mlp(config, config.ffn_hidden_size, tp, bias=config.add_bias_linear)
    router, gate = (
        config.num_experts * config.hidden_size,
        config.hidden_size if config.shared_expert_gate else 0,
    )
    return common + router + gate + _mlp(config, config.shared_expert_size, tp)


def _embedding(config: Config, tp: int) -> int:
    return config.padded_vocab_size // tp * config.hidden_size


def _stage_ends(config: Config, num_stages: int, *, learned_positions: bool) -> list[int]:
    """What every stage has besides layers: embedding on the first, final norm and output layer on the last.

    Tied weights are copied only between stages.
    """
    ends = tables_of_stages(config, num_stages)
    ends[0] += config.seq_len * config.hidden_size if learned_positions else 0
    ends[-1] += _norm(config, config.hidden_size)
    return ends


def startup_report(config: Config) -> str:
    """The counts that a run shows before it starts, in Megatron's wording; 1 MB is 2^20 bytes as in
    Megatron's logs.
    """
    count = count_parameters(config)
    pp_rank = most_loaded_rank(config)
    rank = rank_parameters(config, pp_rank)
    num_bytes = (
        weight_and_optimizer_bytes(config, rank)
        + embedding_moment_bytes(config) * tables_of_stages(config, config.pp)[pp_rank]
    )
    megabytes = num_bytes / MEBIBYTE
    flops = flops_per_iteration(config)
    return "\n".join(
        [
            f"Number of parameters in transformer layers in billions: {_billions(count.transformer_layers)}",
            f"Number of parameters in embedding layers in billions: {_billions(count.embedding)}",
            f"Total number of parameters in billions: {_billions(count.total)}",
            f"Number of parameters active per token in billions: {_billions(count.active_per_token)}",
            f"Number of parameters in most loaded shard in billions: {_billions(rank.total, 4)}",
            f" > number of parameters on (tensor, pipeline) model parallel rank (0, {pp_rank}): {rank.total}",
            f"Theoretical memory footprints: weight and optimizer={megabytes:.2f} MB",
            (
                f"Floating-point operations per iteration: {flops} ({config.gbsz} samples of {config.seq_len}"
                " tokens)"
            ),
        ]
    )


def _billions(count: int, digits: int = 2) -> str:
    return f"{count / 1e9:.{digits}f} ({count})"


# How layers are dealt out to pipeline stages.


def split_layers(num_layers: int, num_stages: int, *, count_ends: bool = False) -> list[int]:
    """Layers of every stage, as even as they come; the longer stages are in the middle.

    Args:
        num_layers: of the model.
        num_stages: pipeline parallel size.
        count_ends: count the embedding and the output layer as a layer each, as is right for a large
            vocabulary: 106 layers over 12 stages are 8, ten times 9, and 8.
    """
    if num_stages == 1:
        return [num_layers]
    items = num_layers + (2 if count_ends else 0)
    each, left = divmod(items, num_stages)
    stages = [each] * num_stages
    # A stage with one layer more: from the middle outwards, so that the ends, which have more to do, get
    # theirs last.
    outwards = sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))
    if count_ends and not each:  # The ends have theirs whatever there is.
        outwards = [0, num_stages - 1, *outwards[:-2]]
    for index in outwards[:left]:
        stages[index] += 1
    if count_ends:
        stages[0], stages[-1] = stages[0] - 1, stages[-1] - 1
    return stages


def stages_text(stage_layers: Sequence[int]) -> str:
    """The layers of every stage in the form of PIPELINE_LAYERS: [8, 9, 9, 8] is 8,9*2,8."""
    runs = [(layers, len(list(same))) for layers, same in groupby(stage_layers)]
    return ",".join(f"{layers}*{times}" if times > 1 else str(layers) for layers, times in runs)
