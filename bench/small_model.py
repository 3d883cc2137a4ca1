"""The model of the benchmarks on a CPU: `plain_torch.py` has the same sizes."""

SETTINGS = {
    "preset": "cpu", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 256, "moe_ffn_hidden_size": 0,
    "num_heads": 4, "num_query_groups": 2, "vocab_size": 4096, "num_experts": 8, "topk": 1,
    "router_pre_softmax": True, "router_scaling_factor": 1.0, "aux_loss_coeff": "0.01", "init_std": 0.02,
    "optimizer": "adam", "distributed_optimizer": True, "mbsz": 4, "gbsz": 16, "warmup_iters": 20,
    "lr": 3e-3, "min_lr": 3e-4,
}  # fmt: skip
