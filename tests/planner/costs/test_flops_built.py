"""The planner's FLOPs against the products that a built model runs, forward and backward, on a CPU.

A dispatch mode counts matrix products by their shapes, and attention by the pairs that its mask leaves.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from helpers.model_on_ranks import RandomTokens
from helpers.ranks import free_port, in_turn, run_on_ranks
from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.planner.costs.flops import flops_per_iteration

SIZES: dict[str, Any] = {
    **SMALL, "num_layers": 3, "hidden_size": 128, "ffn_hidden_size": 320, "num_heads": 4,
    "num_query_groups": 2, "seq_len": 256, "vocab_size": 1024, "num_experts": 8, "topk": 2, "mbsz": 2,
    "gbsz": 4, "num_workers": 0, "expert_backend": "loop", "gpus_per_node": 1,
}  # fmt: skip
DENSE = {"use_moe": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "MoE": {"first_k_dense": 1, "shared_expert_size": 96},
    "window": DENSE | {"sliding_window": 40},
    "window of one token": DENSE | {"sliding_window": 1},
    "window longer than the sequence": DENSE | {"sliding_window": 300},
    "every second layer, sinks, MoE": {
        "sliding_window": 100,
        "window_pattern": "2",
        "attention_sinks": "all",
    },
    "1:2, key/value heads of windows, output gate": DENSE
    | {"sliding_window": 100, "window_pattern": "1:2", "window_query_groups": 4, "attention_gate": True},
    "latent": DENSE
    | {"multi_latent_attention": True, "kv_lora_rank": 40, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8}
    | {"v_head_dim": 32, "q_lora_rank": 48, "qk_norm": True, "sliding_window": 64},
}
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Counter(TorchDispatchMode):
    """FLOPs of all products inside, a multiply-add as two; attention's gradients as twice its forward."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (FLASH, FLASH_BACKWARD):
            query, key, value = args[1:4] if func is FLASH_BACKWARD else args[:3]
            mask = (kwargs or {}).get("attn_mask")
            seen = query.new_ones(query.size(2), key.size(2)).tril() if mask is None else mask == 0
            pairs = int(seen.count_nonzero()) * query.size(0) * query.size(1)
            self.flops += 2 * pairs * (query.size(3) + value.size(3)) * (2 if func is FLASH_BACKWARD else 1)
        elif func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def counted_on_rank(jobs: list[dict[str, Any]], ports: list[int]) -> list[int]:
    return in_turn(_counted, zip(jobs, ports, strict=True))


def _counted(settings: dict[str, Any], port: int) -> int:
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_model
    from moe_exp.training import loop

    config = load_config(SIZES | settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    model = build_model(config, rank)
    loop.optimizer_setup.set_megatron_hooks(model, SimpleNamespace(scale_loss=None))
    trained = SimpleNamespace(model=model)
    job: Any = SimpleNamespace(config=config, runtime=rank, trained=trained, eod_id=None, graphs=None)
    with Counter() as counter:
        loop.forward_backward(
            job, RandomTokens(config.seq_len, config.vocab_size), 0, config.num_microbatches
        )
    runtime.stop()
    return counter.flops


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    ports = [free_port() for _ in MODELS]
    [found] = run_on_ranks(1, counted_on_rank, list(MODELS.values()), ports, join=False, timeout=300)
    return dict(zip(MODELS, found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_built_model(name, counted):
    config = load_config(SIZES | MODELS[name], {})
    tokens = config.gbsz * config.seq_len
    # The formula leaves out the router, and half of each query's pair with itself.
    router = 6 * tokens * sum(config.moe_layers) * config.hidden_size * config.num_experts
    most = [
        min(config.sliding_window, config.seq_len) if has else config.seq_len for has in config.window_layers
    ]
    channels = config.kv_channels + (
        config.v_head_dim if config.multi_latent_attention else config.kv_channels
    )
    halves = 3 * config.gbsz * config.num_heads * channels * sum(most)
    assert flops_per_iteration(config) + router + halves == counted[name]
