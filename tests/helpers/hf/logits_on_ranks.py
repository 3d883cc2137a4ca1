"""Logits of our model from a checkpoints folder, on the ranks of a layout."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.checkpoint.load import load_weights
from moe_exp.checkpoint.state import Trained
from moe_exp.config import Config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model
from moe_exp.engine.optimizer_setup import build_optimizer, build_scheduler


def our_logits(
    folders: list[Path], tokens: Tensor, *, num_ranks: int = 1, timeout: float = 240.0, **layout: int
) -> list[Tensor]:
    """fp32 logits [B, S, V] of every checkpoints folder; `layout` are settings such as `ep`."""
    args = ([str(folder) for folder in folders], tokens, layout, free_port())
    return run_on_ranks(num_ranks, _all_logits, *args, join=False, timeout=timeout)[0]


def _all_logits(folders: list[str], tokens: Tensor, layout: dict[str, int], port: int) -> list[Tensor]:
    os.environ["MASTER_PORT"] = str(port)
    found = []
    alone = {"tp": 1, "ep": 1, "pp": 1, "vpp": None, "mbsz": 1, "gbsz": 4, "seq_len": tokens.size(1)}
    alone["gpus_per_node"] = int(os.environ["WORLD_SIZE"])
    for index, folder in enumerate(folders):
        saved = read_common(one_checkpoint(Path(folder)))["config"]
        layout_of_it = layout if saved["use_moe"] else {**layout, "ep": 1}
        config = Config(**{**saved, **alone, **layout_of_it})
        if index == 0:
            rank = runtime.start(config)
        found.append(_logits(config, rank, folder, tokens))
    return found


def _logits(config: Any, rank: Any, folder: str, tokens: Tensor) -> Tensor:
    model = build_model(config, rank)
    optimizer = build_optimizer(config, model)
    trained = Trained(model, optimizer, build_scheduler(config, optimizer))
    load_weights(rank, one_checkpoint(Path(folder)), trained)
    (chunk,) = model
    chunk.eval()
    with torch.no_grad():
        logits = chunk(tokens, torch.arange(tokens.size(1)).expand_as(tokens), None).float()
    parts = [torch.empty_like(logits) for _ in range(rank.groups.tp.size())]
    torch.distributed.all_gather(parts, logits, group=rank.groups.tp)
    return torch.cat(parts, dim=-1)[..., : config.vocab_size]
