"""Logits and losses of our model from a checkpoints folder, on the ranks of a layout."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.model_on_ranks import RandomTokens
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.checkpoint.load import load_weights
from moe_exp.checkpoint.state import Trained
from moe_exp.config import Config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model
from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
from moe_exp.training.microbatch import forward_step, read_microbatch


def our_logits(
    folders: list[Path], tokens: Tensor, *, num_ranks: int = 1, timeout: float = 240.0, **layout: int
) -> list[Tensor]:
    """fp32 logits [B, S, V] of every checkpoints folder; `layout` are settings such as `ep`."""
    args = ([str(folder) for folder in folders], tokens, layout, free_port())
    return run_on_ranks(num_ranks, _all_logits, *args, join=False, timeout=timeout)[0]


def our_losses(
    folders: list[Path], tokens: Tensor, *, num_ranks: int = 1, timeout: float = 240.0, **layout: int
) -> list[Tensor]:
    """Loss per token of every checkpoints folder and of its layers for multi-token prediction, [1+K], on
    `tokens` [B, S+1], which are the first samples of RandomTokens.
    """
    args = ([str(folder) for folder in folders], tokens, layout, free_port())
    return run_on_ranks(num_ranks, _all_losses, *args, join=False, timeout=timeout)[-1]


def our_gradients(
    folders: list[tuple[Path, Path]], tokens: Tensor
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients of the cross entropy for the first of two folders, and the parameters of the second."""
    args = ([tuple(map(str, pair)) for pair in folders], tokens, free_port())
    return run_on_ranks(1, _all_gradients, *args, join=False, timeout=240.0)[0]


def _all_gradients(folders: list[tuple[str, str]], tokens: Tensor, port: int) -> list[Any]:
    loaded = _loaded([folder for pair in folders for folder in pair], tokens, {}, port)
    found = []
    for (config, _, model), (_, _, expected) in zip(loaded, loaded, strict=True):
        named = {name: value for name, value in model[0].named_parameters() if value.requires_grad}
        logits = _forward(model, tokens)[:, :-1, : config.vocab_size].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(named.values()))
        of_other = dict(expected[0].named_parameters())
        found.append(
            (dict(zip(named, gradients, strict=True)), {name: of_other[name].detach() for name in named})
        )
    return found


def _all_losses(folders: list[str], tokens: Tensor, layout: dict[str, int], port: int) -> list[Tensor]:
    stream, losses = RandomTokens(tokens.size(1) - 1, 250), []
    for config, rank, model in _loaded(folders, tokens[:, 1:], layout, port):
        sums = []
        for row in range(len(tokens)):
            output, loss_of = forward_step(iter([read_microbatch(config, rank, stream, row, 0)]), model[0])
            sums.append(loss_of(output)[1]["lm_loss"].view(-1, 2))
        total, number = sum(sums).detach().unbind(dim=1)
        losses.append(total / number)
    return losses


def _all_logits(folders: list[str], tokens: Tensor, layout: dict[str, int], port: int) -> list[Tensor]:
    return [_logits(*one, tokens) for one in _loaded(folders, tokens, layout, port)]


def _loaded(
    folders: list[str], tokens: Tensor, layout: dict[str, int], port: int
) -> Iterator[tuple[Config, Any, Any]]:
    """Yields config, rank and model of each checkpoints folder."""
    os.environ["MASTER_PORT"] = str(port)
    alone = {"tp": 1, "ep": 1, "pp": 1, "vpp": None, "mbsz": 1, "gbsz": 4, "seq_len": tokens.size(1)}
    alone["gpus_per_node"] = int(os.environ["WORLD_SIZE"])
    for index, folder in enumerate(folders):
        saved = read_common(one_checkpoint(Path(folder)))["config"]
        layout_of_it = layout if saved["use_moe"] else {**layout, "ep": 1}
        config = Config(**{**saved, **alone, **layout_of_it})
        if index == 0:
            rank = runtime.start(config)
        model = build_model(config, rank)
        optimizer = build_optimizer(config, model)
        trained = Trained(model, optimizer, LearningRateScheduler(config, optimizer))
        load_weights(rank, one_checkpoint(Path(folder)), trained)
        model[0].eval()
        yield config, rank, model


def _forward(model: Any, tokens: Tensor) -> Tensor:
    return model[0](tokens, torch.arange(tokens.size(1)).expand_as(tokens), None).float()


@torch.no_grad()
def _logits(config: Any, rank: Any, model: Any, tokens: Tensor) -> Tensor:
    logits = _forward(model, tokens)
    parts = [torch.empty_like(logits) for _ in range(rank.groups.tp.size())]
    torch.distributed.all_gather(parts, logits, group=rank.groups.tp)
    return torch.cat(parts, dim=-1)[..., : config.vocab_size]
