"""The attention core of the local spec: causal, grouped queries, context parallel. No megatron import here.

Shapes: S sequence on this rank, C context parallel size, B batch, H query heads and G key/value heads on this
rank, d head size of queries and keys, v of values (differs from d only with multi-latent attention).
"""

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp.layers.dispatcher.collectives import gather_rows
from moe_exp.layers.megatron.documents import Documents
from moe_exp.layers.microbatch import in_sequence_order, sequence_blocks


class KeyValueCache:
    """Keys (after the rotary embedding) and values of one layer, kept for generating the next token.

    Megatron's own inference context keeps keys without positions and rotates all of them at every token, at a
    cost that grows with the text.

    Args:
        num_positions: capacity in tokens per sequence, allocated at the first call of `extend`.
    """

    def __init__(self, num_positions: int):
        self.num_positions, self.length = num_positions, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [S, B, G, d] after the first `length` tokens; only `advance` changes `length`.

        Returns:
            Views [length + S, B, G, d] of the cached keys and values; their head sizes may differ.
        """
        if not self._keys.numel():
            # Head by head, as attention reads them.
            self._keys, self._values = (
                new.new_empty(*new.shape[1:3], self.num_positions, new.size(3)) for new in (key, value)
            )
        end = self.length + key.size(0)
        self._keys[:, :, self.length : end] = key.permute(1, 2, 0, 3)
        self._values[:, :, self.length : end] = value.permute(1, 2, 0, 3)
        return self._keys[:, :, :end].permute(2, 0, 1, 3), self._values[:, :, :end].permute(2, 0, 1, 3)

    def advance(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` of what `extend` wrote last; the rest was padding."""
        self.length += num_tokens


def choose_attention(
    device_type: str, dtype: torch.dtype, *, other_value_size: bool = False
) -> tuple[str, str]:
    """The attention kernel and the reason in words; `other_value_size`: v is not d."""
    if device_type == "cpu":
        return "sdpa", "flash-attn needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "sdpa", f"flash-attn has no {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("flash_attn") is None:
        return "sdpa", "flash-attn is not installed"
    if other_value_size:
        return "sdpa", "flash-attn has no value heads of another size than those of queries and keys"
    return "flash-attn", "installed"


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over the past, with the signature of Megatron's core attention.

    With context parallelism each rank holds blocks i and 2C-1-i of 2C of the sequence; keys and values are
    gathered over the ranks, and each of the two query blocks attends to the keys up to its own end.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        pg_collection: Any,
        **kwargs: Any,
    ):
        super().__init__()
        scale = kwargs.get("softmax_scale")
        self.scale = 1.0 / math.sqrt(config.kv_channels) if scale is None else scale
        self.dropout: float = config.attention_dropout
        self.cp_group: ProcessGroup = pg_collection.cp
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        other_value_size = kwargs.get("k_channels") != kwargs.get("v_channels")
        self.use_flash = (
            choose_attention(device_type, config.params_dtype, other_value_size=other_value_size)[0]
            == "flash-attn"
        )
        # Keys and values of earlier tokens, set while generating text.
        self.cache: KeyValueCache | None = None
        # Largest logit of each head so far, [H]; None: not measured (QK_CLIP).
        self.max_logits_H: Tensor | None = None
        # Largest of all heads since the last record, [].
        self.max_logit: Tensor | None = None
        self.layer_number = layer_number

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Attends causally, inside each of the `Documents` that are given as `packed_seq_params`: query
        [S, B, H, d], key [S, B, G, d] and value [S, B, G, v] to [S, B, H*v].
        """
        documents = kwargs.get("packed_seq_params")
        if attention_mask is not None or not isinstance(documents, Documents | None):
            rule = "is not None. CausalAttention is causal only"
            raise ValueError(f"attention_mask: {rule}. Fix: pass attention_mask=None.")
        if self.cache is not None:
            key, value = self.cache.extend(key, value)
        if documents is not None and not (documents.are_whole_samples and len(documents.ranges) <= 2):
            return self._attend_by_document(query, key, value, documents).flatten(2)
        if (size := self.cp_group.size()) == 1:
            return self._attend(query, key, value).flatten(2)
        rank = self.cp_group.rank()
        key, value = self._gather_sequence(key), self._gather_sequence(value)
        block = key.size(0) // (2 * size)
        outs = []
        for query_block, index in zip(query.chunk(2), (rank, 2 * size - 1 - rank), strict=True):
            end = (index + 1) * block
            outs.append(self._attend(query_block, key[:end], value[:end]))
        return torch.cat(outs).flatten(2)

    def _attend_by_document(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
        if self.cp_group.size() > 1:
            num_stripes = len(documents.ranges) // 2
            key, value = (self._gather_sequence(x, num_stripes) for x in (key, value))
        elif self.use_flash and self.max_logits_H is None:  # all documents, as they lie in the samples
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            return documents.joined([self._attend_by_flash(q, k, v, documents)], query.size(1))
        queries, keys, values = documents.queries_of(query), documents.keys_of(key), documents.keys_of(value)
        if self.use_flash:
            for q, k in zip(queries, keys, strict=True):
                self._measure(q.unsqueeze(1), k.unsqueeze(1))
            parts = [self._attend_by_flash(torch.cat(queries), torch.cat(keys), torch.cat(values), documents)]
        else:
            parts = [
                self._attend(*(part.unsqueeze(1) for part in segment)).squeeze(1)
                for segment in zip(queries, keys, values, strict=True)
            ]
        return documents.joined(parts, query.size(1))

    def _attend_by_flash(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
        """All segments after one another: [queries, H, d] and [keys, G, d] to [queries, H, d]."""
        from flash_attn import flash_attn_varlen_func

        query_bounds, key_bounds = documents.bounds
        return flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=query_bounds,
            cu_seqlens_k=key_bounds,
            max_seqlen_q=max(one.num_queries for one in documents.segments),
            max_seqlen_k=max(one.num_keys for one in documents.segments),
            dropout_p=self.dropout if self.training else 0.0,
            softmax_scale=self.scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def _gather_sequence(self, x: Tensor, num_stripes: int = 1) -> Tensor:
        size = self.cp_group.size()
        rows = gather_rows(x, sizes=[x.size(0)] * size, group=self.cp_group)
        return in_sequence_order(rows, sequence_blocks(size, num_stripes))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[Sq, B, H, d] against [Sk, B, G, d], to [Sq, B, H, v]; the last query sees the last key."""
        self._measure(query, key)
        dropout = self.dropout if self.training else 0.0
        if self.use_flash:
            from flash_attn import flash_attn_func

            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            # Its faster backward accumulates the gradient of the queries atomically.
            same_bits = torch.are_deterministic_algorithms_enabled()
            out = flash_attn_func(
                q, k, v, dropout_p=dropout, softmax_scale=self.scale, causal=True, deterministic=same_bits
            )
            return out.transpose(0, 1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if q.size(2) == 1 and dropout == 0.0:
            # One query sees every key: treat a group's heads as its rows, so that no key has to be repeated.
            rows = nn.functional.scaled_dot_product_attention(
                q.reshape(q.size(0), k.size(1), -1, q.size(3)), k, v, scale=self.scale
            )
            return rows.reshape(q.size(0), 1, q.size(1), v.size(3)).transpose(0, 1)
        if q.size(1) != k.size(1) and not _takes_groups(q):
            k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        square = q.size(2) == k.size(2)
        mask = None
        if not square:
            # here: it loads torch.compile's half of torch, which takes longer than Megatron's modules
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(q.size(2), k.size(2))
        out = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=square,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3)

    def _measure(self, query: Tensor, key: Tensor) -> None:
        if self.max_logits_H is not None and self.training:
            found = largest_logits(query, key, self.scale)
            torch.maximum(self.max_logits_H, found, out=self.max_logits_H)

    def take_max_logits(self) -> Tensor:
        """Largest logit of each head since the last call, [H]; the next counts from here."""
        assert self.max_logits_H is not None
        taken = self.max_logits_H.clone()
        self.max_logits_H.fill_(-math.inf)
        largest = taken.max()
        self.max_logit = largest if self.max_logit is None else torch.maximum(self.max_logit, largest)
        return taken


def _takes_groups(query: Tensor) -> bool:
    """Whether torch takes fewer heads of keys than of queries without keeping all scores: on GPUs only its
    flash attention does, which needs two bytes per value and sm_80.
    """
    has_two_bytes = query.dtype in (torch.bfloat16, torch.float16)
    return not query.is_cuda or (has_two_bytes and torch.cuda.get_device_capability(query.device) >= (8, 0))


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, scale: float, *, max_values: int = 1 << 24) -> Tensor:
    """Largest q k * scale of each head over all pairs that a causal mask leaves, fp32 [H].

    Args:
        query: [Sq, B, H, d].
        scale: of the logits; queries are scaled before the product, which fp16 may not hold otherwise.
        key: [Sk, B, G, d]; the last query sees the last key.
        max_values: products that are in memory at once, if there are more than those of one query.
    """
    (num_queries, batch, heads, size), groups = query.shape, key.size(2)
    keys, before = key.permute(1, 2, 3, 0), key.size(0) - num_queries
    num_rows = max(1, max_values // (batch * heads * key.size(0)))
    found = query.new_full((groups, heads // groups), -math.inf, dtype=torch.float32)
    for start in range(0, num_queries, num_rows):
        rows = query[start : start + num_rows] * scale
        end = before + start + len(rows)
        grouped = rows.reshape(len(rows), batch, groups, -1, size).permute(1, 2, 3, 0, 4)
        products = grouped.reshape(batch, groups, -1, size) @ keys[..., :end]
        products = products.view(batch, groups, -1, len(rows), end)
        later = products.new_ones(len(rows), end, dtype=torch.bool).triu(before + start + 1)
        largest = products.masked_fill_(later, -math.inf).amax((0, 3, 4))
        found = torch.maximum(found, largest.float())
    return found.flatten()
