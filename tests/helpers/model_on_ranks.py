"""Trains whole models for a few global batches on the ranks of a job: losses, every gradient, gradient norms;
with checkpoints.

What a model computes must not depend on its layout, so the numbers of two jobs can be compared name by name:

    one, two = (run_models(n, [settings | layout]) for n, layout in ((1, {}), (2, {"tp": 2})))
    assert_equal_to(1e-5, two[0].gradients, one[0].gradients)

Norms and biases are drawn like the weights: at 1 and 0, where they start, mistakes in them are not seen.
"""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers.ranks import run_jobs
from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.data.samples.dataset import DataStage

TINY = {
    **SMALL, "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 20,
    "num_heads": 4, "num_query_groups": 2, "seq_len": 16, "vocab_size": 200, "num_experts": 4, "topk": 2,
    "mbsz": 1, "gbsz": 4, "lr": 1e-3, "warmup_iters": 0, "distributed_optimizer": False,
}  # fmt: skip


EOD = 0


class Piece(NamedTuple):
    """A tensor of one rank: a block along `dim` (-1: a copy of all), of `stride` interleaved ones."""

    name: str
    rank: int
    dim: int
    stride: int
    value: Tensor


@dataclass(frozen=True)
class Found:
    """What a job found: losses of all micro-batches in order, gradient norms, and the gradients of the first
    iteration, whole.

    The gradients are left out with the distributed optimizer, where a rank has a part of their sum.
    """

    losses: Tensor
    grad_norms: list[float]
    gradients: dict[str, Tensor]


class RandomTokens:
    """Sample i is a function of i alone."""

    def __init__(self, seq_len: int, vocab_size: int):
        self.seq_len, self.vocab_size = seq_len, vocab_size

    def stage_at(self, index: int) -> DataStage:
        """The only one."""
        return DataStage(0, self.seq_len)

    def batch(self, first: int, count: int) -> Tensor:
        """Tokens [count, S+1]."""
        drawn = [torch.Generator().manual_seed(index) for index in range(first, first + count)]
        size = (self.seq_len + 1,)
        return torch.stack([torch.randint(self.vocab_size, size, generator=one) for one in drawn])


def run_models(num_ranks: int, jobs: list[dict[str, Any]], *, timeout: float = 240.0) -> list[Found]:
    """Every job on `num_ranks` processes, in turn: settings above those of TINY, and beside them `load` and
    `save`, checkpoints folders, `save_after` (0) and `iterations` (2).
    """
    given = [(dict(settings),) for settings in jobs]
    return [assembled_job(ranks) for ranks in run_jobs(num_ranks, _run, given, timeout=timeout)]


def _run(settings: dict[str, Any], port: int) -> dict[str, Any]:
    from helpers.checkpoint.saving import save
    from moe_exp.checkpoint.load import load
    from moe_exp.checkpoint.state import Progress, Trained
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_model
    from moe_exp.engine.optimizer_setup import LearningRateScheduler, build_optimizer
    from moe_exp.training import loop

    load_from, iterations = settings.pop("load", None), settings.pop("iterations", 2)
    save_to, save_after = settings.pop("save", None), settings.pop("save_after", 0)
    world_size = int(os.environ["WORLD_SIZE"])
    config = load_config(TINY | {"gpus_per_node": world_size} | settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    model = build_model(config, rank)
    for chunk in model:
        draw_vectors(chunk.module)
    optimizer = build_optimizer(config, model)
    trained = Trained(model, optimizer, LearningRateScheduler(config, optimizer))
    loop.optimizer_setup.set_megatron_hooks(model, trained.optimizer)
    progress = Progress() if load_from is None else load(config, rank, Path(load_from), trained)
    job: Any = SimpleNamespace(config=config, runtime=rank, trained=trained, eod_id=EOD, graphs=None)
    found: dict[str, Any] = {"losses": {}, "norms": [], "pieces": []}
    for index in range(iterations):
        if save_to is not None and index == save_after:
            save(config, rank, Path(save_to), trained, progress)
        _iterate(job, progress, found)
    runtime.stop()
    return found


def _iterate(job: Any, progress: Any, found: dict[str, Any]) -> None:
    from moe_exp.data.samples.prefetch import microbatch_start
    from moe_exp.training import loop

    config, model, groups = job.config, job.trained.model, job.runtime.groups
    num_microbatches = config.gbsz // (config.mbsz * config.data_parallel_size)
    for chunk in model:
        chunk.zero_grad_buffer()
    job.trained.optimizer.zero_grad()
    stream, first_sample = RandomTokens(config.seq_len, 200), progress.consumed_samples
    losses = loop.forward_backward(job, stream, first_sample, num_microbatches)
    for index, loss in enumerate(losses if groups.tp.rank() == 0 else []):  # on the last pipeline stage
        place = {"mbsz": config.mbsz, "dp_rank": groups.dp.rank(), "dp_size": groups.dp.size()}
        found["losses"][microbatch_start(first_sample, index, **place)] = loss.double()
    if not found["norms"] and not config.distributed_optimizer:
        found["pieces"] = [piece for chunk in model for piece in parameter_pieces(chunk.module, groups)]
    found["norms"].append(float(job.trained.optimizer.step()[1]))
    job.trained.scheduler.step(increment=config.gbsz)
    progress.iteration += 1
    progress.consumed_samples += config.gbsz


@torch.no_grad()
def draw_vectors(chunk: Any) -> None:
    """Norm weights near 1 and biases near 0, from a generator per global name; a rank keeps its part."""
    for piece, parameter in _parameters(chunk, chunk.pg_collection):
        if parameter.dim() > 1:
            continue
        world = chunk.pg_collection.tp.size() if piece.dim == 0 else 1
        generator = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
        blocks = torch.randn(parameter.numel() * world, generator=generator).chunk(piece.stride * world)
        drawn = torch.cat(blocks[piece.rank :: world] if world > 1 else blocks)
        parameter.copy_((1.0 if "norm" in piece.name and "bias" not in piece.name else 0.0) + 0.2 * drawn)


def _parameters(chunk: Any, groups: Any) -> list[tuple[Piece, Tensor]]:
    from moe_exp.engine.initial_weights import global_name

    found = []
    for name, parameter in chunk.named_parameters():
        stride = 2 if chunk.config.gated_linear_unit and "linear_fc1" in name else 1
        dim, whole_name = getattr(parameter, "partition_dim", -1), global_name(chunk, name)
        found.append((Piece(whole_name, groups.tp.rank(), dim, stride, parameter), parameter))
    return found


def parameter_pieces(chunk: Any, groups: Any, *, of: str = "main_grad") -> list[Piece]:
    """What this rank has of every gradient, or of every weight (`of="data"`); experts one by one."""
    pieces = []
    for piece, parameter in _parameters(chunk, groups):
        value = getattr(parameter, of).detach().clone()
        if ".mlp.experts." in piece.name:
            first, dim = groups.ep.rank() * len(value), 0 if piece.name.endswith("1") else 1
            stride = 2 if chunk.config.gated_linear_unit and dim == 0 else 1
            for number, expert in enumerate(value, start=first):
                pieces.append(Piece(f"{piece.name}.{number}", groups.expt_tp.rank(), dim, stride, expert))
        else:
            pieces.append(piece._replace(value=value))
    return pieces


def assembled_job(ranks: list[dict[str, Any]]) -> Found:
    losses: dict[int, Tensor] = {}
    for rank in ranks:
        for first, share_of_rank in rank["losses"].items():  # context parallel ranks hold parts of a sum
            losses[first] = losses[first] + share_of_rank if first in losses else share_of_rank
    ordered = torch.stack([losses[first] for first in sorted(losses)])  # sums and numbers of tokens
    means = (ordered[:, ::2] / ordered[:, 1::2]).squeeze(1)  # [M], or [M, 1+K] with MTP_NUM_LAYERS=K
    return Found(means, ranks[0]["norms"], assembled(ranks))


def assembled(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The whole tensors of the `pieces` of all ranks, whose copies have to be the same to the bit."""
    by_name: dict[str, dict[int, Piece]] = {}
    for piece in (piece for rank in ranks for piece in rank["pieces"]):
        held = by_name.setdefault(piece.name, {}).setdefault(piece.rank, piece)
        assert torch.equal(held.value, piece.value), f"{piece.name}: copies differ"
    return {name: _whole([parts[rank] for rank in sorted(parts)]) for name, parts in by_name.items()}


def _whole(parts: list[Piece]) -> Tensor:
    first = parts[0]
    if first.dim < 0 or len(parts) == 1:
        assert all(torch.equal(part.value, first.value) for part in parts), f"{first.name}: copies differ"
        return first.value
    blocks = [part.value.chunk(first.stride, dim=first.dim) for part in parts]
    of_strides = zip(*blocks, strict=True)
    return torch.cat([block for blocks in of_strides for block in blocks], dim=first.dim)
