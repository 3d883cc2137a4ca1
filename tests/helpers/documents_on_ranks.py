"""Whole models in float64 over samples of several documents: packed, in any layout, or each document alone.

packed = packed_models(2, [settings | {"tp": 2}])
alone = documents_alone([settings])
assert_equal_to(1e-10, packed[0].gradients, alone[0].gradients)
"""

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from helpers.layers.naive_attention import naive
from helpers.model_on_ranks import (
    EOD,
    TINY,
    Found,
    RandomTokens,
    assembled_job,
    draw_vectors,
    parameter_pieces,
)
from helpers.ranks import run_jobs
from moe_exp.config import load_config

DOUBLE = {
    "document_mask": True, "router_dtype": "fp64", "expert_backend": "loop", "mbsz": 2, "gbsz": 8,
    "seq_len": 24, "aux_loss_type": "none", "z_loss_coeff": 0,
}  # fmt: skip


class DocumentTokens(RandomTokens):
    """Documents of about five tokens, each of which ends with EOD. Every fifth sample is one document."""

    def batch(self, first: int, count: int) -> Tensor:
        rows = []
        for index in range(first, first + count):
            generator = torch.Generator().manual_seed(index)
            row = torch.randint(1, self.vocab_size, (self.seq_len + 1,), generator=generator)
            ends = torch.rand(self.seq_len + 1, generator=generator) < 0.2
            rows.append(row.where(~ends if index % 5 else torch.ones_like(ends), torch.tensor(EOD)))
        return torch.stack(rows)


def packed_models(
    num_ranks: int, jobs: list[dict[str, Any]], *, without_mask: bool = False, timeout: float = 240.0
) -> list[Found]:
    """One global batch of each job on `num_ranks` processes; `without_mask`: attention crosses documents."""
    given = [(settings, without_mask) for settings in jobs]
    return [assembled_job(ranks) for ranks in run_jobs(num_ranks, _packed, given, timeout=timeout)]


def documents_alone(jobs: list[dict[str, Any]], *, timeout: float = 240.0) -> list[Found]:
    """The same batches on one process, by a model without DOCUMENT_MASK that gets one document at a time. Its
    attention has a mask of all pairs.
    """
    given = [(settings,) for settings in jobs]
    return [assembled_job(ranks) for ranks in run_jobs(1, _alone, given, timeout=timeout)]


def _in_float64() -> None:
    """What casts to fp32 leaves float64 as it is, and gradients have the dtype of their parameters."""
    from moe_exp.engine import model

    to_float, ddp_config = Tensor.float, model._ddp_config

    def wide(self: Tensor, *args: Any, **options: Any) -> Tensor:
        return self if self.dtype == torch.float64 else to_float(self, *args, **options)

    def with_wide_gradients(config: Any, **options: Any) -> Any:
        found = ddp_config(config, **options)
        found.grad_reduce_in_fp32 = False
        return found

    model.DTYPES["fp32"] = torch.float64
    Tensor.float = wide  # type: ignore[method-assign]
    model._ddp_config = with_wide_gradients


def built(settings: dict[str, Any], port: int) -> Any:
    """A job as training/loop.py has it, with the settings of DOUBLE and no optimizer."""
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_model
    from moe_exp.engine.optimizer_setup import build_optimizer

    if not hasattr(torch, "is_wide"):
        _in_float64()
        torch.is_wide = True  # type: ignore[attr-defined]
    given = {"gpus_per_node": int(os.environ["WORLD_SIZE"])}
    config = load_config(TINY | DOUBLE | given | settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    model = build_model(config, rank)
    for chunk in model:
        draw_vectors(chunk.module)
    trained = SimpleNamespace(model=model, optimizer=build_optimizer(config, model))
    return SimpleNamespace(config=config, runtime=rank, trained=trained, eod_id=EOD, graphs=None)


def _packed(settings: dict[str, Any], without_mask: bool, port: int) -> dict[str, Any]:
    from moe_exp.engine import runtime
    from moe_exp.layers.megatron.documents import Documents
    from moe_exp.training import loop

    if without_mask:
        Documents.are_whole_samples = property(lambda self: True)  # type: ignore[assignment,method-assign]
    job = built(settings, port)
    config, model, groups = job.config, job.trained.model, job.runtime.groups
    loop.optimizer_setup.set_megatron_hooks(model, job.trained.optimizer)
    num_microbatches = config.gbsz // (config.mbsz * config.data_parallel_size)
    losses = loop.forward_backward(job, DocumentTokens(config.seq_len, 200), 0, num_microbatches)
    found = _found(job)
    for index, loss in enumerate(losses if groups.tp.rank() == 0 else []):
        found["losses"][index * groups.dp.size() + groups.dp.rank()] = loss.double()
    runtime.stop()
    return found


def _alone(settings: dict[str, Any], port: int) -> dict[str, Any]:
    from moe_exp.engine import runtime
    from moe_exp.engine.qk_clip import attention_cores
    from moe_exp.layers.megatron.documents import document_lengths

    from megatron.core.distributed import finalize_model_grads

    job = built(settings | {"document_mask": False}, port)
    config, (model,) = job.config, job.trained.model
    for core in attention_cores([model]):
        core._attend = partial(_naive, core)
    stream, losses = DocumentTokens(config.seq_len, 200), {}
    for number in range(config.gbsz // config.mbsz):
        tokens = stream.batch(number * config.mbsz, config.mbsz)
        labels, total = tokens[:, 1:], torch.zeros((), dtype=torch.float64)
        counted = tokens[:, :-1] != EOD if config.eod_mask_loss else torch.ones_like(labels, dtype=torch.bool)
        for row, lengths in enumerate(document_lengths(tokens[:, :-1], EOD)):
            begin = 0
            for length in lengths:
                part = slice(begin, begin + length)
                positions = torch.arange(length)[None]
                one = model(tokens[row : row + 1, part], positions, None, labels=labels[row : row + 1, part])
                loss = one[0, counted[row, part]].sum() / counted.sum()
                (loss * config.mbsz / config.gbsz).backward()
                total, begin = total + loss.detach(), begin + length
        losses[number] = torch.stack([total, torch.ones_like(total)])
    finalize_model_grads([model], None)
    found = _found(job) | {"losses": losses}
    runtime.stop()
    return found


def _naive(core: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return naive(query, key, value, core.rule, core.softmax_offset)


def _found(job: Any) -> dict[str, Any]:
    groups = job.runtime.groups
    pieces = [piece for chunk in job.trained.model for piece in parameter_pieces(chunk.module, groups)]
    return {"losses": {}, "norms": [], "pieces": pieces}
