"""Causal attention core and norms of the local spec.

Shapes: S sequence length on this rank, C context parallel size, B batch, H query heads and G key/value heads
on this rank, d head size of queries and keys, v head size of values (d except in multi-latent attention).
"""

# Why not Megatron's: its wrapper of PyTorch's norms does not support sequence parallelism.

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
    """Keys (after the rotary embedding) and values of one layer, cached for generation.

    Args:
        num_positions: capacity in tokens per sequence; the first call of `extend` allocates the memory.
    """

    # Megatron's inference context caches keys before the rotary embedding and rotates all of them for every
    # new token.

    def __init__(self, num_positions: int):
        self.num_positions, self.length = num_positions, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [S, B, G, d] after the first `length` tokens; only `advance` changes `length`.

        Returns:
            Views [length + S, B, G, d] of the cached keys and values; their head sizes may differ.
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
        """Keeps the first `num_tokens` tokens of the last `extend`; later tokens were padding."""
        self.length += num_tokens


def choose_attention(
    device_type: str, dtype: torch.dtype, *, other_value_size: bool = False
) -> tuple[str, str]:
    """Chooses the attention kernel; returns its name and the reason. `other_value_size`: v differs from d."""
    if device_type == "cpu":
        return "sdpa", "flash-attn requires a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "sdpa", f"flash-attn does not support {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("flash_attn") is None:
        return "sdpa", "flash-attn is not installed"
    if other_value_size:
        return "sdpa", "flash-attn requires the same head size for queries, keys and values"
    return "flash-attn", "installed"


class CausalAttention(nn.Module):
    """Causal softmax(q k^T / sqrt(d)) v, with the signature of Megatron's core attention.

    With context parallelism, rank i holds blocks i and 2C-1-i of the 2C blocks of the sequence. Keys and
    values are gathered over the ranks, and each query block attends to the keys up to its own end.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, *, pg_collection: Any,
        normalizes: bool = False, **kwargs: Any,
    ):  # fmt: skip
        super().__init__()
        # norms of queries and keys after the rotary embedding; Megatron's own are before
        self.normalizes = normalizes
        if normalizes:
            size, epsilon = config.kv_channels, config.layernorm_epsilon
            self.q_layernorm, self.k_layernorm = (Norm(config, size, epsilon) for _ in range(2))
        scale = kwargs.get("softmax_scale")
        self.scale = 1.0 / math.sqrt(config.kv_channels) if scale is None else scale
        self.dropout: float = config.attention_dropout
        self.cp_group: ProcessGroup = pg_collection.cp
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        other_value_size = kwargs.get("k_channels") != kwargs.get("v_channels")
        kernel, _ = choose_attention(device_type, config.params_dtype, other_value_size=other_value_size)
        self.use_flash = kernel == "flash-attn"
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

        Attention is restricted to each document if `packed_seq_params` is a `Documents`.
        """
        documents = kwargs.get("packed_seq_params")
        if attention_mask is not None or not isinstance(documents, Documents | None):
            rule = "must be None because CausalAttention is always causal"
            raise ValueError(f"attention_mask: {rule}. Fix: pass attention_mask=None.")
        if self.normalizes:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.cache is not None or documents is not None:
            # With each new length, cuDNN's attention would spend tens of milliseconds on building a plan.
            torch.backends.cuda.enable_cudnn_sdp(False)
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
        elif self.use_flash and self.max_logits_H is None:  # the documents are contiguous in the samples
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
        """Attends in all segments, concatenated: [queries, H, d] and [keys, G, d] to [queries, H, d]."""
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
        dropout = self.dropout if self.training else 0.0
        return {"dropout_p": dropout, "softmax_scale": self.scale, "causal": True, "deterministic": same_bits}

    def _gather_sequence(self, x: Tensor, num_stripes: int = 1) -> Tensor:
        size = self.cp_group.size()
        rows = gather_rows(x, sizes=[x.size(0)] * size, group=self.cp_group)
        return in_sequence_order(rows, sequence_blocks(size, num_stripes))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Result [Sq, B, H, v] for queries [Sq, B, H, d] and keys [Sk, B, G, d]. The last query sees all."""
        self._measure(query, key)
        if self.use_flash:
            from flash_attn import flash_attn_func

            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            return flash_attn_func(q, k, v, **self._flash_options()).transpose(0, 1)
        dropout = self.dropout if self.training else 0.0
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if q.size(2) == 1 and dropout == 0.0:
            # A single query sees all keys, so a group's heads can be its rows, without repeating the keys.
            rows = nn.functional.scaled_dot_product_attention(
                q.reshape(q.size(0), k.size(1), -1, q.size(3)), k, v, scale=self.scale
            )
            return rows.reshape(q.size(0), 1, q.size(1), v.size(3)).transpose(0, 1)
        if q.size(1) != k.size(1) and not takes_groups(q):
            k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        square = q.size(2) == k.size(2)
        mask = None
        if not square:
            # Imported here because it loads torch.compile, which takes longer than importing Megatron.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(q.size(2), k.size(2))
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": square, "dropout_p": dropout}
        options["scale"], options["enable_gqa"] = self.scale, q.size(1) != k.size(1)
        return nn.functional.scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)

    def _measure(self, query: Tensor, key: Tensor) -> None:
        if self.max_logits_H is not None and self.training:
            found = largest_logits(query, key, self.scale)
            torch.maximum(self.max_logits_H, found, out=self.max_logits_H)

    def take_max_logits(self) -> Tensor:
        """Returns the largest logit of each head since the last call, [H], and resets the maximum."""
        assert self.max_logits_H is not None
        taken = self.max_logits_H.clone()
        self.max_logits_H.fill_(-math.inf)
        largest = taken.max()
        self.max_logit = largest if self.max_logit is None else torch.maximum(self.max_logit, largest)
        return taken


def takes_groups(query: Tensor) -> bool:
    """Whether SDPA supports fewer key heads than query heads without storing all scores."""
    # On GPUs only the flash attention of SDPA does, which requires 16-bit values and sm_80.
    has_two_bytes = query.dtype in (torch.bfloat16, torch.float16)
    return not query.is_cuda or (has_two_bytes and torch.cuda.get_device_capability(query.device) >= (8, 0))


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, scale: float, *, max_values: int = 1 << 24) -> Tensor:
    """Largest logit (q k * scale) of each head over all causal query-key pairs, fp32 [H].

    Args:
        query: [Sq, B, H, d].
        key: [Sk, B, G, d]; the last query sees all keys.
        scale: factor on the logits.
        max_values: limit on the number of logits in memory, but at least the logits of one query.
    """
    (num_queries, batch, heads, size), groups = query.shape, key.size(2)
    keys, before = key.permute(1, 2, 3, 0), key.size(0) - num_queries
    num_rows = max(1, max_values // (batch * heads * key.size(0)))
    found = query.new_full((groups, heads // groups), -math.inf, dtype=torch.float32)
    for start in range(0, num_queries, num_rows):
        # Scaled before the product, which could overflow in fp16.
        rows = query[start : start + num_rows] * scale
        end = before + start + len(rows)
        grouped = rows.reshape(len(rows), batch, groups, -1, size).permute(1, 2, 3, 0, 4)
        products = grouped.reshape(batch, groups, -1, size) @ keys[..., :end]
        products = products.view(batch, groups, -1, len(rows), end)
        later = products.new_ones(len(rows), end, dtype=torch.bool).triu(before + start + 1)
        largest = products.masked_fill_(later, -math.inf).amax((0, 3, 4))
        found = torch.maximum(found, largest.float())
    return found.flatten()


def choose_norm(device_type: str) -> tuple[str, str]:
    """Chooses the norm; returns its name and the reason."""
    reason = f"torch.nn.RMSNorm and LayerNorm, with sequence parallelism, on {device_type}"
    if device_type == "cuda":
        has_kernel = hasattr(torch.ops.aten, "_fused_rms_norm")
        without = f"torch {torch.__version__} has no fused RMSNorm kernel"
        reason += f"; {'RMSNorm is one kernel in each direction' if has_kernel else without}"
    return "torch", reason


class Norm:
    """torch.nn.RMSNorm or LayerNorm (by `config.normalization`), marked for sequence parallelism.

    With sequence parallelism a rank sees a part of the tokens, so Megatron sums the gradients of marked
    parameters over ranks.
    """

    # A class with the signature of Megatron's norms, because specs are built from classes.
    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> nn.Module:
        norm_class = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ProjectionNorm(nn.Module):
    """RMSNorm of a query or key projection over all heads: OLMo 2 (arXiv:2501.00656, sec. 3.1), OLMoE.

    y = weight * x / sqrt(mean(x^2) + eps), with the mean over all H*d channels, in at least fp32. Heads and
    weights are split over tensor parallel ranks, which exchange sums of squares (S*B numbers per rank) and
    the gradients of the sums.

    Args:
        num_channels: H*d, where H counts the heads of all ranks.
        group: ranks that hold the other heads of the same tokens.
    """

    def __init__(self, config: Any, num_channels: int, *, eps: float, group: ProcessGroup):
        super().__init__()
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.weight = nn.Parameter(
            torch.ones(num_channels // group.size(), dtype=config.params_dtype, device=device)
        )
        self.num_channels, self.eps, self.group = num_channels, eps, group

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [S, B, h, d], keeping its dtype."""
        flat = x.flatten(-2)
        if self.group.size() == 1:
            return nn.functional.rms_norm(flat, self.weight.shape, self.weight, self.eps).view_as(x)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        squares = wide.square().sum(-1)
        # Gathered, then summed in rank order, so that every rank gets the same bits.
        total = gather_rows(squares.unsqueeze(0), sizes=[1] * self.group.size(), group=self.group).sum(0)
        normalized = wide * torch.rsqrt(total / self.num_channels + self.eps).unsqueeze(-1)
        return (normalized * self.weight).to(x.dtype).view_as(x)
