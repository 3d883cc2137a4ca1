"""QK-clip: scales down query and key projections of attention heads with large logits (QK_CLIP).

From Kimi K2 (arXiv:2507.20534, section 2.1). S is a head's largest logit (q k * scale) in the iteration,
over all samples and ranks. After the optimizer step, the head's logits are multiplied by
f = min(1, QK_CLIP / S):

    W_q <- sqrt(f) W_q        W_k <- sqrt(f) W_k

Unlike in Megatron-Core, biases are scaled like weights. The optimizer's moments do not change.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_exp.layers.megatron.attention import CausalAttention

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.attention import Attention


def clip_attention_logits(
    optimizer: MegatronOptimizer,
    model: list[DistributedDataParallel],
    threshold: float,
    replicas: dist.ProcessGroup,
) -> None:
    """Makes `optimizer.step` apply QK-clip after every update of the weights.

    Requires unsharded main weights and attention cores of type `CausalAttention`. `replicas` is the group of
    data and context parallel ranks.
    """
    attentions = [module for chunk in model for module in chunk.modules() if isinstance(module, Attention)]
    cores = attention_cores(model)
    for attention, core in zip(attentions, cores, strict=True):
        heads, device = attention.num_attention_heads_per_partition, attention.linear_proj.weight.device
        core.max_logits_H = torch.full((heads,), -math.inf, device=device)
    make_step = optimizer.step

    def step() -> tuple[bool | None, Any, float | None]:
        updated: bool | None = False
        try:
            updated, norm, num_zeros = make_step()
        finally:  # also after a skipped step, whose logits must not count for the next one
            logits = [core.take_max_logits() for core in cores]
        if updated is not False and logits:
            logits_LH = torch.stack(logits)
            dist.all_reduce(logits_LH, op=dist.ReduceOp.MAX, group=replicas)
            for attention, logits_H in zip(attentions, logits_LH, strict=True):
                # a non-finite logit would erase the head, although loss and gradient were finite
                known_H = torch.where(logits_H.isfinite(), logits_H, threshold)
                if updated is None:  # `FusedStep` skips the step if the norm is not finite
                    known_H = torch.where(norm.isfinite(), known_H, threshold)
                _scale(attention, (threshold / known_H.clamp(min=threshold)).float())
        return updated, norm, num_zeros

    # replaces the method on this instance only
    optimizer.step = step


def attention_cores(model: list[DistributedDataParallel]) -> list[CausalAttention]:
    """This rank's attention cores, in layer order."""
    return [module for chunk in model for module in chunk.modules() if isinstance(module, CausalAttention)]


@torch.no_grad()
def _scale(attention: Attention, factors_H: Tensor) -> None:
    """Scales queries and keys so that the logits of this rank's heads are multiplied by `factors_H`."""
    c, ones = attention.config, torch.ones_like(factors_H)
    if c.multi_latent_attention:
        query = attention.linear_q_proj if c.q_lora_rank is None else attention.linear_q_up_proj
        roots = factors_H.sqrt()
        # All heads share the rotary part of the key, so it stays, and the query's rotary part is scaled by f.
        _scale_rows(query, [(roots, c.qk_head_dim), (factors_H, c.qk_pos_emb_head_dim)])
        _scale_rows(attention.linear_kv_up_proj, [(roots, c.qk_head_dim), (ones, c.v_head_dim)])
        return
    # The paper does not cover heads that share a key. As in Megatron-Core's `clip_qk`, the largest logit of
    # the group scales all of them. Megatron-Core stores rows per group: queries of its heads, key, value.
    per_group = factors_H.view(attention.num_query_groups_per_partition, -1)
    roots, size = per_group.amin(1).sqrt(), c.kv_channels
    rows = [(roots, (per_group.size(1) + 1) * size), (torch.ones_like(roots), size)]
    _scale_rows(attention.linear_qkv, rows)


def _scale_rows(linear: nn.Module, parts: list[tuple[Tensor, int]]) -> None:
    """Scales weight rows. Each head or group has a row block per item of `parts`: (factor per head, rows)."""
    rows = torch.cat([factors[:, None].expand(-1, count) for factors, count in parts], dim=1).flatten()
    for name, x in linear.named_parameters(recurse=False):
        if name.startswith("layer_norm"):
            continue  # Transformer Engine fuses the norm into the module
        main: Tensor = getattr(x, "main_param", x)
        main.mul_(rows.view(-1, *[1] * (x.dim() - 1)))
        if main is not x:  # rounded from the main weights, as after a resume
            x.copy_(main)
