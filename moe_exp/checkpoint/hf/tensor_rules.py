"""Rules between the tensors of a Hugging Face folder and those of a checkpoint, and how tensors are joined
and taken apart.

Sizes are letters: D hidden, V vocabulary, Q all query heads, K all key (or value) heads, H one head, F dense
MLP, f one expert, S the shared expert, E experts. With multi-head latent attention: A and B the ranks of the
compressed queries and keys, R = B and the rotary part of a key, N all queries, M keys without rotary part and
values of all heads, O all values.

Ways to join, of which each can be undone:

- plain   one tensor on either side.
- padded  the vocabulary is a multiple of 128 rows here; the rows that are added are zeros.
- rows    tensors above each other: gate and up projection are one here, gate first.
- heads queries, keys and values as Megatron has them: for every group of queries its heads, then its key,
  then its value.
- zeros   theirs alone: a tensor that has no effect, which other software asks for all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_exp.config import Config


@dataclass(frozen=True)
class TensorRule:
    """One tensor of ours per model, per layer or per expert, and those of theirs that it is made of.

    Args:
        ours: key; of a layer's tensor what comes after `decoder.layers.<layer>.`.
        theirs: names to sizes, `{expert}` for the index of an expert; of a layer's tensor what comes after
            `model.layers.<layer>.`.
        join: see above.
        layers: `model` (once), or in which layers it is: `all`, `moe`, `dense`.
        when: a condition of CONDITIONS, empty for always.
        alias: name of theirs in folders that transformers 5 writes with `save_original_format=False`; of an
            expert's tensor that of one tensor for all experts, whose first axis they are.
    """

    ours: str
    theirs: Mapping[str, str]
    join: str = "plain"
    layers: str = "all"
    when: str = ""
    alias: str = ""
    per_expert: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_expert", any("{expert}" in name for name in self.theirs))


CONDITIONS: Mapping[str, Callable[[Config], bool]] = {
    "": lambda c: True,
    "untied": lambda c: not c.tie_embeddings,
    "qk_norm": lambda c: c.qk_norm,
    "qkv_bias": lambda c: c.qkv_bias,
    "no_qkv_bias": lambda c: not c.qkv_bias,
    "expert_bias": lambda c: c.router_bias_update_rate > 0,
    "no_expert_bias": lambda c: not c.router_bias_update_rate,
    "shared": lambda c: c.shared_expert_size > 0,
    "no_shared": lambda c: not c.shared_expert_size,
    "shared_gate": lambda c: c.shared_expert_size > 0 and c.shared_expert_gate,
    "q_lora": lambda c: c.q_lora_rank > 0,
    "no_q_lora": lambda c: not c.q_lora_rank,
}


def sizes_of(config: Config) -> dict[str, int]:
    """The letters of the rules."""
    heads, nope, rope = config.num_heads, config.qk_head_dim, config.qk_pos_emb_head_dim
    return {
        "1": 1,
        "D": config.hidden_size,
        "V": config.vocab_size,
        "H": config.kv_channels,
        "Q": heads * config.kv_channels,
        "K": config.num_query_groups * config.kv_channels,
        "F": config.ffn_hidden_size,
        "f": config.expert_ffn_size,
        "S": config.shared_expert_size,
        "E": config.num_experts,
        "A": config.q_lora_rank,
        "B": config.kv_lora_rank,
        "R": config.kv_lora_rank + rope,
        "N": heads * (nope + rope),
        "M": heads * (nope + config.v_head_dim),
        "O": heads * config.v_head_dim,
    }


def joined_shape(join: str, parts: list[tuple[int, ...]], config: Config) -> tuple[int, ...]:
    """Shape of ours, from the shapes of theirs."""
    if join == "padded":
        return (config.padded_vocab_size, *parts[0][1:])
    return (sum(shape[0] for shape in parts), *parts[0][1:])


def joined(join: str, parts: list[Tensor], config: Config) -> Tensor:
    """Ours, from theirs."""
    if join == "plain":
        return parts[0]
    if join == "padded":
        (table,) = parts
        missing = config.padded_vocab_size - table.size(0)
        return torch.cat([table, table.new_zeros(missing, *table.shape[1:])]) if missing else table
    if join == "heads":
        grouped = [part.view(config.num_query_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return torch.cat(parts)


def taken_apart(join: str, ours: Tensor, shapes: list[tuple[int, ...]], config: Config) -> list[Tensor]:
    """Theirs, from ours: views where that is possible. The rows beyond the vocabulary are left out."""
    if join == "padded":
        return [ours[: shapes[0][0]]]
    if join == "heads":
        groups = config.num_query_groups
        grouped = ours.view(groups, -1, *ours.shape[1:]).split(
            [shape[0] // groups for shape in shapes], dim=1
        )
        return [part.flatten(0, 1) for part in grouped]
    return list(ours.split([shape[0] for shape in shapes]))
