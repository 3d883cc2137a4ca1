"""Causal attention core and norms of the local spec.

Shapes: S sequence length on this rank, C context parallel size, B batch, H query heads and G key/value heads
on this rank, d head size of queries and keys, v head size of values (d except in multi-latent attention).
"""

# Why not Megatron's: its wrapper of PyTorch's norms does not support sequence parallelism.

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp.layers.dispatcher.collectives import gather_rows
from moe_exp.layers.megatron import attention_backends as backends
from moe_exp.layers.megatron.documents import Documents
from moe_exp.layers.megatron.moe_parts import device_of_model
from moe_exp.layers.microbatch import in_sequence_order, sequence_blocks

from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)


class KeyValueCache:
    """Cache of one layer's keys and values for generation. Keys are stored after the rotary embedding.

    Args:
        num_positions: capacity in tokens per sequence; the first call of `extend` allocates the memory.
    """

    # Megatron's inference context caches keys before the rotary embedding and rotates all of them for every
    # new token.

    def __init__(self, num_positions: int):
        self.num_positions, self.length = num_positions, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [S, B, G, d] from position `length` on; only `advance` changes `length`.

        Returns:
            Views [length + S, B, G, d] of the cached keys and values. Keys and values may differ in d.
        """
        if not self._keys.numel():
            # Heads before positions, the layout that attention reads.
            self._keys, self._values = (
                new.new_empty(*new.shape[1:3], self.num_positions, new.size(3)) for new in (key, value)
            )
        end = self.length + key.size(0)
        self._keys[:, :, self.length : end] = key.permute(1, 2, 0, 3)
        self._values[:, :, self.length : end] = value.permute(1, 2, 0, 3)
        return self._keys[:, :, :end].permute(2, 0, 1, 3), self._values[:, :, :end].permute(2, 0, 1, 3)

    def advance(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens written by the last `extend`; the rest are padding."""
        self.length += num_tokens


class _SplitModule(nn.Module):
    """Module whose own parameters (not those of its submodules) are split over the ranks of `tp_group`."""

    tp_group: ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Parameters as sharded tensors."""
        dp_cp = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        axes = {name: 0 for name, _ in self.named_parameters(recurse=False)}
        arguments = self.state_dict(prefix="", keep_vars=True), prefix, axes, sharded_offsets
        return dict(
            make_sharded_tensors_for_checkpoint(*arguments, tp_group=self.tp_group, dp_cp_group=dp_cp)
        )


class CausalAttention(_SplitModule):
    """Causal softmax(q k^T / sqrt(d)) v, with the signature of Megatron's core attention.

    Supports `window_size`, `window_attn_skip_freq` and `softmax_type=learnable` of TransformerConfig. With
    context parallelism, rank i holds blocks i and 2C-1-i of the 2C blocks of the sequence. Keys and values
    are gathered over the ranks; if there is a window, only the ends of the blocks are gathered. Each query
    block attends to all keys up to its end.

    Args:
        normalizes: normalize queries and keys after the rotary embedding (Megatron does so before it).
        softcap: see AttentionRule.
        value_scale: factor on values.
        sinks_in_windows: whether `softmax_type=learnable` adds sinks only to layers with a window.
        backend: see `choose_attention`.
        by_document: whether micro-batches may be split into documents.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, *, pg_collection: Any,
        normalizes: bool = False, softcap: float = 0.0, sinks_in_windows: bool = False, backend: str = "auto",
        by_document: bool = False, value_scale: float = 1.0, **kwargs: Any,
    ):  # fmt: skip
        super().__init__()
        self.normalizes, self.value_scale = normalizes, value_scale
        if normalizes:
            size, epsilon = config.kv_channels, config.layernorm_epsilon
            self.q_layernorm, self.k_layernorm = (Norm(config, size, epsilon) for _ in range(2))
        scale, size = kwargs.get("softmax_scale"), getattr(config, "window_size", None)
        is_windowed = size and is_layer_window_attention(size, config.window_attn_skip_freq, layer_number)
        has_sinks = getattr(config, "softmax_type", "vanilla") == "learnable"
        self.rule = backends.AttentionRule(
            1.0 / math.sqrt(config.kv_channels) if scale is None else scale,
            size[0] + 1 if size and is_windowed else 0,
            softcap,
            bool(has_sinks and (is_windowed or not sinks_in_windows)),
        )
        self.tp_group = pg_collection.tp
        self.softmax_offset: nn.Parameter | None = None
        if self.rule.has_sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=device_of_model())
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        self.dropout: float = config.attention_dropout
        self.cp_group: ProcessGroup = pg_collection.cp
        self.backend, _ = backends.choose_attention(
            "cuda" if torch.cuda.is_available() else "cpu", config.params_dtype, self.rule, requested=backend,
            by_document=by_document, dropout=self.dropout,
            other_value_size=kwargs.get("k_channels") != kwargs.get("v_channels"),
        )  # fmt: skip
        self.cache: KeyValueCache | None = None  # set during generation
        # Largest logit of each head so far [H], for QK_CLIP; None: not measured.
        self.max_logits_H: Tensor | None = None
        # Largest logit of all heads since the last logged record (scalar).
        self.max_logit: Tensor | None = None
        self.layer_number = layer_number

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Computes [S, B, H*v] from query [S, B, H, d], key [S, B, G, d] and value [S, B, G, v].

        If `packed_seq_params` is a `Documents`, each token attends only within its document.
        """
        documents = kwargs.get("packed_seq_params")
        if attention_mask is not None or not isinstance(documents, Documents | None):
            rule = "must be None because CausalAttention is always causal"
            raise ValueError(f"attention_mask: {rule}. Fix: pass attention_mask=None.")
        if self.normalizes:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.value_scale != 1:
            value = value * self.value_scale
        if self.cache is not None or documents is not None:
            # With each new length, cuDNN's attention would spend tens of milliseconds on building a plan.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self.cache is not None:
            key, value = self.cache.extend(key, value)
        if documents is not None and not (documents.are_whole_samples and len(documents.ranges) <= 2):
            return self._attend_by_document(query, key, value, documents).flatten(2)
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size == 1:
            return self._attend(query, key, value).flatten(2)
        own, window = query.size(0) // 2, self.rule.window
        if window and window - 1 <= own:
            keys, values = (self._with_neighbors(x, window - 1) for x in (key, value))
        else:
            ends = [(index + 1) * own for index in (rank, 2 * size - 1 - rank)]
            keys, values = (
                [whole[:end] for end in ends] for whole in map(self._gather_sequence, (key, value))
            )
        return torch.cat(list(map(self._attend, query.chunk(2), keys, values))).flatten(2)

    def _attend_by_document(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
        in_place = self.cp_group.size() == 1  # then the documents are contiguous in the samples
        if not in_place:
            key, value = (self._gather_sequence(x, len(documents.ranges) // 2) for x in (key, value))
        if self.backend not in ("flash-attn", "flex"):
            segments = zip(
                documents.queries_of(query), documents.keys_of(key), documents.keys_of(value), strict=True
            )
            parts = [self._attend(*(part.unsqueeze(1) for part in one)).squeeze(1) for one in segments]
            return documents.joined(parts, query.size(1))
        if self.max_logits_H is not None:
            for q, k in zip(documents.queries_of(query), documents.keys_of(key), strict=True):
                self._measure(q.unsqueeze(1), k.unsqueeze(1))
        if self.backend == "flex":
            return backends.attend_by_flex(query, key, value, self.rule, self.softmax_offset, documents)
        if in_place:
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        else:
            q = torch.cat(documents.queries_of(query))
            k, v = (torch.cat(documents.keys_of(x)) for x in (key, value))
        return documents.joined([self._attend_by_flash(q, k, v, documents)], query.size(1))

    def _attend_by_flash(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
        """Attends within each document. Joined queries and result: [queries, H, d]; keys: [keys, G, d]."""
        from flash_attn import flash_attn_varlen_func

        query_bounds, key_bounds = documents.bounds
        most = {
            "max_seqlen_q": max(one.num_queries for one in documents.segments),
            "max_seqlen_k": max(one.num_keys for one in documents.segments),
        }
        bounds = {"cu_seqlens_q": query_bounds, "cu_seqlens_k": key_bounds}
        return flash_attn_varlen_func(query, key, value, **bounds, **most, **self._flash_options())

    def _flash_options(self) -> dict[str, Any]:
        # The default backward is faster, but accumulates the queries' gradient with atomics.
        same_bits = torch.are_deterministic_algorithms_enabled()
        dropout, scale = self.dropout if self.training else 0.0, self.rule.scale
        options = {"dropout_p": dropout, "softmax_scale": scale, "causal": True, "deterministic": same_bits}
        return options | ({"window_size": (self.rule.window - 1, 0)} if self.rule.window else {})

    def _gather_sequence(self, x: Tensor, num_stripes: int = 1) -> Tensor:
        rows = gather_rows(x, self.cp_group)
        return in_sequence_order(rows, sequence_blocks(self.cp_group.size(), num_stripes))

    def _with_neighbors(self, x: Tensor, num_before: int) -> list[Tensor]:
        """Prepends the preceding `num_before` rows to each of this rank's two blocks of keys or values."""
        if not num_before:
            return list(x.chunk(2))
        size, rank = self.cp_group.size(), self.cp_group.rank()
        ends = self._gather_sequence(torch.cat([block[-num_before:] for block in x.chunk(2)]))
        places = [num_before * index for index in (rank, 2 * size - 1 - rank)]
        before = [ends[max(0, end - num_before) : end] for end in places]
        # The first block of the sequence is copied: a view would keep the whole projection in memory.
        pairs = zip(before, x.chunk(2), strict=True)
        return [torch.cat(pair) if len(pair[0]) else pair[1].clone() for pair in pairs]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns [Q, B, H, v] for query [Q, B, H, d] and key [K, B, G, d], which end at the same token."""
        rule = self.rule
        if rule.window and (unseen := key.size(0) - query.size(0) - rule.window + 1) > 0:
            key, value = key[unseen:], value[unseen:]
        if rule.window >= key.size(0):
            rule = replace(rule, window=0)
        self._measure(query, key)
        if self.backend == "flash-attn":
            from flash_attn import flash_attn_func

            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            return flash_attn_func(q, k, v, **self._flash_options()).transpose(0, 1)
        if self.backend == "flex" and self.cache is None:
            return backends.attend_by_flex(query, key, value, rule, self.softmax_offset)
        if rule.is_plain and self.backend != "blocks":
            return backends.attend_by_sdpa(
                query, key, value, rule.scale, self.dropout if self.training else 0.0
            )
        return backends.attend_by_blocks(query, key, value, rule, self.softmax_offset)

    def _measure(self, query: Tensor, key: Tensor) -> None:
        if self.max_logits_H is not None and self.training:
            found = backends.largest_logits(query, key, self.rule.scale, window=self.rule.window)
            torch.maximum(self.max_logits_H, found, out=self.max_logits_H)

    def take_max_logits(self) -> Tensor:
        """Returns each head's largest logit since the last call, [H]. Resets the maxima."""
        assert self.max_logits_H is not None
        taken = self.max_logits_H.clone()
        self.max_logits_H.fill_(-math.inf)
        largest = taken.max()
        self.max_logit = largest if self.max_logit is None else torch.maximum(self.max_logit, largest)
        return taken


class Norm:
    """torch.nn.RMSNorm or LayerNorm, depending on `config.normalization`.

    With sequence parallelism, each rank sees only part of the tokens. The norm's parameters are then marked,
    so that Megatron sums their gradients over ranks.
    """

    # A class with the signature of Megatron's norms, because specs are built from classes.
    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> nn.Module:
        norm_class = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype, device=device_of_model())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ProjectionNorm(_SplitModule):
    """RMSNorm over all heads of a query or key, as in OLMo 2 (arXiv:2501.00656, sec. 3.1) and OLMoE.

    y = weight * x / sqrt(mean(x^2) + eps), with the mean over all H*d channels, in at least fp32. Heads and
    weights are split over tensor parallel ranks. The ranks exchange sums of squares (S*B numbers per rank)
    and their gradients.

    Args:
        num_channels: H*d, where H counts the heads of all ranks.
        group: ranks that together hold all heads of the same tokens.
    """

    def __init__(self, config: Any, num_channels: int, *, group: ProcessGroup):
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(num_channels // group.size(), dtype=config.params_dtype, device=device_of_model())
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.num_channels, self.eps, self.tp_group = num_channels, config.layernorm_epsilon, group

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [S, B, h, d], where h counts this rank's heads; keeps the dtype."""
        flat = x.flatten(-2)
        if self.tp_group.size() == 1:
            return nn.functional.rms_norm(flat, self.weight.shape, self.weight, self.eps).view_as(x)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        squares = wide.square().sum(-1)
        # Gathered, then summed in rank order, so that every rank gets the same bits.
        total = gather_rows(squares.unsqueeze(0), self.tp_group).sum(0)
        normalized = wide * torch.rsqrt(total / self.num_channels + self.eps).unsqueeze(-1)
        return (normalized * self.weight).to(x.dtype).view_as(x)
