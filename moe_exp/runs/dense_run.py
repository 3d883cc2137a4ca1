"""The dense run that an MoE run starts from (UPCYCLE_FROM): its checkpoint, and whether settings fit it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.config import Config, problem
from moe_exp.runs.run_folder import LATEST

# Settings shared with the dense model whose weights are used.
_DENSE_FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_query_groups", "vocab_size",
    "activation", "normalization", "norm_epsilon", "qk_norm", "qk_norm_scope", "add_bias_linear", "qkv_bias",
    "rotary_base", "rotary_fraction", "rope_scaling", "rope_scaling_factor", "rope_original_seq_len",
    "tie_embeddings", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim",
)  # fmt: skip


def dense_checkpoint(c: Config) -> Path | None:
    """The iteration folder that UPCYCLE_FROM names, or the newest in the checkpoints folder that it names."""
    folder = Path(c.upcycle_from).expanduser()
    if (folder / LATEST).is_file():
        latest = (folder / LATEST).read_text(errors="replace").strip()
        if not re.fullmatch("[0-9]{1,12}", latest):
            return None
        folder /= f"iter_{int(latest):07d}"
    return folder if (folder / "metadata.json").is_file() else None


def dense_problems(c: Config, dense: Mapping[str, Any]) -> list[str]:
    """Why this run cannot start from the dense run with settings `dense`."""
    if dense.get("use_moe"):
        return [
            problem(
                "upcycle_from",
                c.upcycle_from,
                "is the checkpoint of an MoE run",
                "name a run with USE_MOE=false",
            )
        ]
    pairs = [(name, getattr(c, name), dense[name]) for name in _DENSE_FIELDS if name in dense]
    if "head_dim" in dense and not c.multi_latent_attention:
        pairs.append(
            ("head_dim", c.kv_channels, dense["head_dim"] or dense["hidden_size"] // dense["num_heads"])
        )
    return [
        problem(
            name,
            ours,
            f"the dense run UPCYCLE_FROM={c.upcycle_from} has {theirs}",
            f"set {name.upper()}={theirs}",
        )
        for name, ours, theirs in pairs
        if ours != theirs
    ]
