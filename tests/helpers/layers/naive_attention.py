"""Attention with a mask of all pairs."""

import math
from typing import Any

import torch
from torch import Tensor


def naive(
    query: Tensor, key: Tensor, value: Tensor, rule: Any, sinks: Tensor | None = None, lengths: Any = None
) -> Tensor:
    """One softmax over all pairs, in one tensor; `lengths`: see `document_lengths`."""
    (num_queries, batch, heads, _), num_keys = query.shape, key.size(0)
    key, value = (x.repeat_interleave(heads // x.size(2), 2) for x in (key, value))
    logits = torch.einsum("ibhd,jbhd->bhij", query, key) * rule.scale
    if rule.softcap:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    i, j = torch.arange(num_queries)[:, None] + num_keys - num_queries, torch.arange(num_keys)
    seen = (j <= i) & (j > i - (rule.window or num_keys))
    if lengths is not None:
        ids = [torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in lengths]
        seen = torch.stack([seen & (one[:, None] == one) for one in ids])[:, None]
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(batch, -1, num_queries, 1)], -1)
    weights = logits.softmax(-1)[..., :num_keys]
    return torch.einsum("bhij,jbhv->ibhv", weights, value)
