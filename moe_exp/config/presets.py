"""Named sets of defaults: a model and its training settings. Every value can be overridden.

A preset's WARMUP_ITERS and DECAY_ITERS apply only if its TRAIN_ITERS is kept; see `loading.load_config`.
"""

from typing import Any

from moe_exp.host.devices import Nodes, count_gpus, num_cores

PRESETS: dict[str, dict[str, Any]] = {
    # 24 layers of width 512 on fineweb-edu with the Llama 3.1 tokenizer: the model of Config's defaults.
    "reference": {"num_experts": 64, "train_iters": 40_000, "decay_iters": 38_000},

    # About four minutes on two cores; docs/recipes.md explains how these values were chosen.
    "cpu": {
        "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 128, "num_heads": 2, "num_query_groups": 2,
        "seq_len": 256, "vocab_size": 2048, "num_experts": 64, "topk": 4, "moe_ffn_hidden_size": 32,
        "router_pre_softmax": False, "router_scaling_factor": 2.5, "aux_loss_coeff": 3e-2,
        "z_loss_coeff": 1e-3, "rotary_base": 10000.0, "init_std": 0.05, "mbsz": 16, "gbsz": 32,
        "train_iters": 1000, "warmup_iters": 100, "lr": 2e-2, "min_lr": 2e-3, "optimizer": "muon",
        "distributed_optimizer": False, "log_interval": 25, "eval_interval": 250, "eval_iters": 16,
        "save_interval": 500, "dtype": "fp32",
    },

    # 0.91 billion parameters, of which a token uses 0.25. Among seven shapes of that size, this one has the
    # highest planned MFU on an H100 with 80 GB, 38% (docs/one_gpu.md). It has not been trained yet.
    "gpu": {
        "num_layers": 8, "hidden_size": 1536, "ffn_hidden_size": 2560, "num_heads": 12, "num_query_groups": 4,
        "seq_len": 2048, "vocab_size": 32768, "num_experts": 16, "topk": 2, "moe_ffn_hidden_size": 1280,
        "router_pre_softmax": False, "rotary_base": 10000.0, "z_loss_coeff": 1e-3, "lr": 1e-3, "min_lr": 1e-4,
        "mbsz": 32, "gbsz": 128, "train_iters": 300, "warmup_iters": 30, "log_interval": 10,
        "eval_interval": 100, "eval_iters": 4, "save_interval": 100,
    },

    # Muennighoff et al. 2024, arXiv:2409.02060: no normalization of the top-k weights, dropless, z-loss.
    "olmoe-1b-7b": {
        "num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 1024, "num_heads": 16,
        "num_query_groups": 16, "seq_len": 4096, "vocab_size": 50304, "num_experts": 64, "topk": 8,
        "qk_norm": True, "qk_norm_scope": "all", "rotary_base": 10000.0, "z_loss_coeff": 1e-3, "lr": 4e-4,
        "min_lr": 4e-5, "mbsz": 1, "gbsz": 1024, "warmup_iters": 2500, "train_iters": 1_200_000,
    },

    # Jiang et al. 2024, arXiv:2401.04088: softmax over the top two. Training settings are unpublished.
    "mixtral-8x7b": {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_heads": 32,
        "num_query_groups": 8, "seq_len": 4096, "vocab_size": 32000, "num_experts": 8, "topk": 2,
        "router_pre_softmax": False, "rotary_base": 1e6, "lr": 3e-4, "min_lr": 3e-5, "mbsz": 1, "gbsz": 1024,
    },

    # Qwen3 technical report, arXiv:2505.09388, and its config.json: head size 128, top-8 weights normalized.
    "qwen3-30b-a3b": {
        "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "moe_ffn_hidden_size": 768,
        "num_heads": 32, "num_query_groups": 4, "head_dim": 128, "seq_len": 4096, "vocab_size": 151936,
        "num_experts": 128, "topk": 8, "router_pre_softmax": False, "qk_norm": True, "norm_epsilon": 1e-6,
        "rotary_base": 1e6, "aux_loss_coeff": 1e-3, "lr": 3e-4, "min_lr": 3e-5, "mbsz": 1, "gbsz": 1024,
    },

    # gpt-oss model card, arXiv:2508.10925, and its config.json: softmax over the top four, biases, sinks, a
    # window in every second layer. Training settings are unpublished.
    "gpt-oss-20b": {
        "num_layers": 24, "hidden_size": 2880, "ffn_hidden_size": 2880, "num_heads": 64,
        "num_query_groups": 8, "head_dim": 64, "seq_len": 4096, "vocab_size": 201088, "num_experts": 32,
        "topk": 4, "router_pre_softmax": False, "add_bias_linear": True, "activation": "clamped_swiglu",
        "sliding_window": 128, "window_pattern": "2", "attention_sinks": "all", "rotary_base": 150000.0,
        "rope_scaling": "yarn", "rope_scaling_factor": 32.0, "yarn_truncate": False, "lr": 3e-4,
        "min_lr": 3e-5, "mbsz": 1, "gbsz": 1024,
    },

    # DeepSeek-V3 technical report, arXiv:2412.19437, pretraining at 4096 tokens.
    "deepseek-v3-like": {
        "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "moe_ffn_hidden_size": 2048,
        "first_k_dense": 3, "num_heads": 128, "multi_latent_attention": True, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
        "qk_norm": True, "seq_len": 4096, "vocab_size": 129280, "num_experts": 256, "topk": 8,
        "shared_expert_size": 2048, "router_score": "sigmoid", "router_scaling_factor": 2.5,
        "router_bias_update_rate": 1e-3, "num_router_groups": 8, "router_group_topk": 4,
        "aux_loss_coeff": 1e-4, "norm_epsilon": 1e-6, "rotary_base": 10000.0, "lr": 2.2e-4, "min_lr": 2.2e-5,
        "mbsz": 1, "gbsz": 15360, "rampup_batch_size": "3072 3072 114000000", "train_iters": 240_000,
        "init_std": 0.006, "mtp_num_layers": 1,
        "warmup_iters": 400,  # counts full batches: 2000 of 3072
    },
}  # fmt: skip


def preset_values(name: str, nodes: Nodes | None = None) -> dict[str, Any]:
    """Maps field names to the values of preset `name` for `nodes` (default: this machine)."""
    if nodes is None:
        ranks = {"cpu": min(2, count_gpus() or num_cores()), "gpu": 1}  # for GBSZ
        return PRESETS[name] | ({"gpus_per_node": ranks[name]} if name in ranks else {})
    ranks = {"gpus_per_node": nodes.gpus if nodes.gpus and name != "cpu" else min(2, nodes.gpus or 2)}
    return PRESETS[name] | ranks | {"num_workers": 0 if nodes.gpus == 0 else 2}
