"""Backends of causal attention: softmax(cap(q k^T * scale)) v over the keys visible to a query.

In every function the last query sees the last key. Sizes in shapes: Q: queries; K: keys; B: batch; H: query
heads; G: key/value heads; d: head size of queries and keys; v: head size of values.
"""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_exp.layers.megatron.documents import Documents


@dataclass(frozen=True)
class AttentionRule:
    """Which keys a query sees, and how its logits are computed.

    Args:
        scale: factor on q k^T.
        window: number of keys that a query sees, including its own; 0: its own and all earlier keys.
        softcap: c in logit = c * tanh(scale * q k^T / c); 0: no cap.
        has_sinks: whether each head's softmax includes an extra learned logit, which has no value vector.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the rule is only the causal mask, without window, soft cap or sinks."""
        return not (self.window or self.softcap or self.has_sinks)


def choose_attention(
    device_type: str, dtype: torch.dtype, rule: AttentionRule, *, requested: str = "auto",
    by_document: bool = False, other_value_size: bool = False, dropout: float = 0.0,
) -> tuple[str, str]:  # fmt: skip
    """Chooses the backend of a layer; returns the backend's name and the reason for the choice.

    Args:
        requested: value of ATTENTION_BACKEND.
        by_document: whether micro-batches may be split into documents.
        other_value_size: whether the head size of values differs from that of queries and keys.

    Raises:
        ValueError: if the `requested` backend cannot compute the layer on this device.
    """
    reason = "flash-attn is not installed"
    if device_type == "cpu":
        reason = "flash-attn and FlexAttention require a GPU"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"flash-attn does not support {str(dtype).removeprefix('torch.')}"
    elif other_value_size:
        reason = "flash-attn requires the same head size for queries, keys and values"
    elif rule.has_sinks or rule.softcap:
        reason = "flash-attn supports neither sinks nor a soft cap here"
    elif importlib.util.find_spec("flash_attn") is not None:
        reason = ""
    if requested != "auto":
        if (requested == "flash-attn" and reason) or (requested == "flex" and device_type == "cpu"):
            raise ValueError(f"attention_backend={requested}: {reason}. Fix: set ATTENTION_BACKEND=auto.")
        return requested, f"ATTENTION_BACKEND={requested}"
    if device_type == "cpu":
        return ("sdpa" if rule.is_plain else "blocks"), reason
    if not reason:
        return "flash-attn", "installed"
    if dropout or (rule.is_plain and not by_document):
        return "sdpa", reason
    return "flex", reason


def attend_by_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Result [Q, B, H, v] of plain causal attention; query [Q, B, H, d], key [K, B, G, d]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if q.size(2) == 1 and dropout == 0.0:
        # A single query sees all keys, so a group's heads can be its rows, without repeating the keys.
        rows = nn.functional.scaled_dot_product_attention(
            q.reshape(q.size(0), k.size(1), -1, q.size(3)), k, v, scale=scale
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
    options["scale"], options["enable_gqa"] = scale, q.size(1) != k.size(1)
    return nn.functional.scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)


def takes_groups(query: Tensor) -> bool:
    """Whether SDPA supports grouped-query attention without storing all scores."""
    # On GPUs only the flash attention of SDPA does, which requires 16-bit values and sm_80.
    has_two_bytes = query.dtype in (torch.bfloat16, torch.float16)
    return not query.is_cuda or (has_two_bytes and torch.cuda.get_device_capability(query.device) >= (8, 0))


def attend_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None
) -> Tensor:
    """Result [Q, B, H, v] of attention, computed block by block.

    A block of queries is computed with only the keys that it sees. Time and memory per query therefore depend
    on the window, not on the sequence length. The backward pass recomputes the logits.

    Args:
        query, key, value: [Q, B, H, d], [K, B, G, d] and [K, B, G, v].
        sinks: [H], if `rule.has_sinks`.
    """
    return _Blocks.apply(query, key, value, sinks, rule)


class _Block(NamedTuple):
    """A set of query blocks that are computed together. Different blocks have no keys in common."""

    queries: slice  # from the first block's first query to the last block's last
    keys: slice
    size: int  # queries of a block
    step: int  # queries from the start of a block to the start of the next
    mask: Tensor  # additive, [rows, keys] of a block; a row: a query of one of a group's heads

    def rows_of(self, x: Tensor) -> Tensor:
        """Views x [Q, B * G, H/G, ...] as blocks [number of blocks, B * G, queries, H/G, ...]."""
        return x[self.queries].unfold(0, self.size, self.step).movedim(-1, 2)

    def stacked(self, x: Tensor) -> Tensor:
        """Reshapes x [Q, B * G, H/G, ...] to [number of blocks, B * G, rows, ...]; rows: queries x H/G."""
        return self.rows_of(x).flatten(2, 3)

    def keys_of(self, x: Tensor) -> Tensor:
        """Views x [K, B * G, channels] as blocks [number of blocks, B * G, keys, channels]."""
        return x[self.keys].unfold(0, self.mask.size(1), self.step).movedim(-1, 2)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rule: AttentionRule
    ) -> Tensor:
        k, v = (x.flatten(1, 2) for x in (key, value))
        result = value.new_empty(*query.shape[:3], value.size(3))
        q, out = (_by_group(x, key.size(2)) for x in (query, result))
        log_sum = torch.empty(out.shape[:-1], dtype=_wide(query), device=query.device)
        for block in _blocks_of(q, k, rule):
            found = _attended(block.stacked(q), block.keys_of(k), block.keys_of(v), block.mask, rule)
            for whole, part in zip((out, log_sum), found, strict=True):
                rows = block.rows_of(whole)
                rows.copy_(part.view(rows.shape))
        if sinks is not None:
            with_sink = torch.logaddexp(log_sum, _of_groups(sinks, key))
            out.mul_((log_sum - with_sink).exp_().unsqueeze(-1))
            log_sum = with_sink
        ctx.save_for_backward(query, key, value, sinks, result, log_sum)
        ctx.rule = rule
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, log_sum = ctx.saved_tensors
        of_queries, of_keys, of_values = (x.new_zeros(x.shape) for x in (query, key, value))
        grad, q, out, grad_q = (_by_group(x, key.size(2)) for x in (grads[0], query, result, of_queries))
        k, v, grad_k, grad_v = (x.flatten(1, 2) for x in (key, value, of_keys, of_values))
        for block in _blocks_of(q, k, ctx.rule):
            of_rows = [block.stacked(x) for x in (grad, q, out, log_sum)]
            found = _gradients(of_rows, block.keys_of(k), block.keys_of(v), block.mask, ctx.rule)
            rows = block.rows_of(grad_q)
            rows.copy_(found[0].reshape(rows.shape))
            block.keys_of(grad_k).add_(found[1])
            block.keys_of(grad_v).add_(found[2])
        of_sinks = None
        if sinks is not None:  # p of a sink times (0 - sum of p * its gradient)
            weights = (_of_groups(sinks, key) - log_sum).exp()
            of_sinks = -(weights * (grad * out).sum(-1)).view(*grads[0].shape[:3]).sum((0, 1)).to(sinks.dtype)
        return of_queries, of_keys, of_values, of_sinks, None


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """Reshapes x [Q, B, H, channels] to [Q, B * G, H/G, channels]."""
    return x.unflatten(2, (num_groups, -1)).flatten(1, 2)


def _of_groups(sinks: Tensor, key: Tensor) -> Tensor:
    """Sinks of all heads, repeated for each sample, [B * G, H/G]."""
    return sinks.to(_wide(key)).view(key.size(2), -1).repeat(key.size(1), 1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks_of(query: Tensor, key: Tensor, rule: AttentionRule) -> Iterator[_Block]:
    """Blocks into which query [Q, B * G, H/G, d] and key [K, B * G, d] are divided."""
    num_queries, num_keys, num_heads = query.size(0), key.size(0), query.size(2)
    # 192 rows, which torch's flash attention on CPUs computes in whole tiles
    size = max(64, 192 // num_heads)
    before, window = num_keys - num_queries, rule.window or num_keys
    # Row i, from the end, does not see the last i keys, nor those before its window. A multiple of 16 keys,
    # one vector, takes the kernel 14% less time than one less.
    most = min(num_keys, -(-(window + size - 1) // 16) * 16)
    ages = torch.arange(size - 1, -1, -1, device=query.device).repeat_interleave(num_heads)[:, None]
    places = torch.arange(most - 1, -1, -1, device=query.device)
    hidden = (places < ages) | (places >= ages + window)
    mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    # Blocks with fewer keys or queries are computed one by one.
    num_blocks, num_full = -(-num_queries // size), num_queries // size
    alone = min(num_full, max(0, -(-(most - size - before) // size)))
    for index in [*range(alone), *range(num_full, num_blocks)]:
        start, end = index * size, min(num_queries, (index + 1) * size)
        first = max(0, before + start - window + 1)
        part = mask[(start - end) * num_heads :, first - before - end :]
        yield _Block(slice(start, end), slice(first, before + end), end - start, size, part)
    step = -(-most // size)
    for index in range(alone, min(num_full, alone + step)):
        number = -(-(num_full - index) // step)
        start, end = index * size, (index + (number - 1) * step + 1) * size
        keys = slice(before + start + size - most, before + end)
        yield _Block(slice(start, end), keys, size, step * size, mask)


def _has_fused(q: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    """Whether PyTorch's CPU flash attention supports a block."""
    return q.device.type == "cpu" and q.size(-1) == v.size(-1) and not rule.softcap


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Returns the result [B, G, rows, v], and log(sum(exp(logit))) [B, G, rows] in at least fp32."""
    if _has_fused(q, v, rule):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, attn_mask=mask, scale=rule.scale)
    logits, _ = _logits(q, k, mask, rule)
    log_sum = logits.logsumexp(-1)
    weights = logits.sub_(log_sum.unsqueeze(-1)).exp_()
    return (weights @ v.to(weights.dtype)).to(v.dtype), log_sum


def _gradients(
    of_rows: list[Tensor], k: Tensor, v: Tensor, mask: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. `of_rows` holds four tensors: gradient of the result, q, result, log sum."""
    grad, q, out, log_sum = of_rows
    if _has_fused(q, v, rule):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, q, k, v, out, log_sum, 0.0, False, attn_mask=mask, scale=rule.scale)
    logits, slope = _logits(q, k, mask, rule)
    weights = logits.sub_(log_sum.unsqueeze(-1)).exp_()
    grad, q, k, v, out = (x.to(weights.dtype) for x in (grad, q, k, v, out))
    of_logits = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * rule.scale
    if slope is not None:
        of_logits *= slope
    return of_logits @ k, of_logits.mT @ q, weights.mT @ grad


def _logits(q: Tensor, k: Tensor, mask: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor | None]:
    """Masked logits, and the slope of the soft cap."""
    wide = _wide(q)
    logits, slope = (q.to(wide) * rule.scale) @ k.to(wide).mT, None
    if rule.softcap:
        capped = (logits / rule.softcap).tanh()
        logits, slope = capped * rule.softcap, 1 - capped.square()
    return logits.add_(mask), slope


def attend_by_flex(
    query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:  # fmt: skip
    """Result [Q, B, H, v] of torch's FlexAttention, which is compiled if the tensors are on a GPU.
    Arguments: see `attend_by_blocks`.

    If `documents` is given, `key` and `value` cover whole samples, but `query` covers only this rank's part.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    attend: Any = _compiled(flex_attention) if query.is_cuda else flex_attention
    cap = rule.softcap
    mask = _block_mask(rule.window, query.size(0), key.size(0), query.device, documents)
    options: dict[str, Any] = {"scale": rule.scale, "block_mask": mask}
    capped = (lambda score, b, h, i, j: cap * torch.tanh(score / cap)) if cap else None
    options |= {"enable_gqa": query.size(2) != key.size(2), "score_mod": capped}
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if sinks is None:
        return attend(q, k, v, **options).permute(2, 0, 1, 3)
    out, aux = attend(q, k, v, return_aux=AuxRequest(lse=True), **options)
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype).view(1, -1, 1))
    return (out * share.unsqueeze(-1)).to(out.dtype).permute(2, 0, 1, 3)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


@lru_cache(maxsize=8)  # all layers of a micro-batch use the same; without documents, all micro-batches
def _block_mask(
    window: int, num_queries: int, num_keys: int, device: torch.device, documents: Documents | None
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    places = torch.arange(num_keys, device=device)
    batch, ids = None, places.new_zeros(1, num_keys)
    own = places[num_keys - num_queries :]  # place of each query among the keys
    if documents is not None:
        batch, ids = len(documents.lengths), documents.ids.to(device)
        if documents.ranges:
            own = torch.cat([places[first:end] for first, end in documents.ranges])

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = own[i]
        seen = (j <= place) & (ids[b if batch else 0, j] == ids[b if batch else 0, place])
        return seen & (j > place - window) if window else seen

    create: Any = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return create(sees, batch, None, num_queries, num_keys, device=device)


@torch.no_grad()
def largest_logits(
    query: Tensor, key: Tensor, scale: float, *, window: int = 0, max_values: int = 1 << 24
) -> Tensor:
    """Largest logit (q k * scale) of each head, fp32 [H], over all queries and the keys that each query sees.

    Args:
        query: [Q, B, H, d].
        key: [K, B, G, d].
        scale: factor on the logits.
        window: see AttentionRule.
        max_values: largest number of logits in memory at a time; exceeded only if a single query has more.
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
        seen = products.new_ones(len(rows), end, dtype=torch.bool).tril(before + start)
        hidden = ~(seen.triu(before + start - window + 1) if window else seen)
        found = torch.maximum(found, products.masked_fill_(hidden, -math.inf).amax((0, 3, 4)).float())
    return found.flatten()
