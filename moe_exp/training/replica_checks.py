"""Checks that replicated weights are bitwise equal, and that the optimizer's parameter groups are right.

These tensors must be equal on these ranks:

    data      all parameters except experts; router biases          data and context parallel ranks
    experts   expert parameters                                     expert data parallel ranks
    tensor    part of `data` that tensor parallelism does not       also tensor parallel ranks
              split: routers, norms, gates, latent projections
    tied      shared embedding and output layer                     first and last pipeline stage

Training itself never compares weights, because only gradients are reduced. After a flipped bit, a wrong load
on one rank or a tied embedding out of sync, training continues with inconsistent weights until the loss
degrades or spikes at a restart.

Each rank computes a 64-bit fingerprint of every tensor (`checkpoint.fingerprints`) and sums the fingerprints
of each kind, weighted by a hash of the name. One all-gather of a few numbers per rank detects problems. Only
if there are problems do the ranks exchange names and hosts.
"""

import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_exp.checkpoint.format.fingerprints import multilinear_sum
from moe_exp.checkpoint.state import Progress, Trained, parameters_in_sync, unwrapped
from moe_exp.config import Config
from moe_exp.config.parameter_groups import are_alike, multiples_of
from moe_exp.config.parameter_names import is_norm_or_bias
from moe_exp.engine.initial_weights import global_name
from moe_exp.engine.optimizer_setup import parameter_names
from moe_exp.engine.runtime import Runtime
from moe_exp.training.metrics import Metrics
from moe_exp.watch.hangs import heartbeat

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

logger = logging.getLogger(__name__)

KINDS = {
    "data": "data parallel replicas",
    "experts": "expert data parallel replicas",
    "tensor": "tensor parallel ranks",
    "tied": "first and last pipeline stage, which share the embedding as output layer,",
}
_EMBEDDING = "embedding.word_embeddings.weight"
_NUM_SHOWN = 5  # problems in the error
_MASK = 2**64 - 1


class ReplicaError(RuntimeError):
    """Differences between replicas, or wrong parameter groups; one line each."""


@heartbeat.during("check")
def check_replicas(
    config: Config, runtime: Runtime, trained: Trained, progress: Progress, metrics: Metrics | None
) -> float:
    """Compares all replicas; returns elapsed seconds. ReplicaError on every rank if there is a problem."""
    start = time.monotonic()
    if problems := replica_problems(config, runtime, trained):
        if metrics is not None:
            metrics.event("replicas_differ", progress.iteration, problems=problems)
        rule = f"the run ends after iteration {progress.iteration} without a save"
        fix = "exclude the named hosts, if any, and repeat the command to resume from the newest checkpoint"
        raise ReplicaError("\n".join([*problems, f"{rule}. Fix: {fix}."]))
    logger.debug("replicas are equal after iteration %d", progress.iteration)
    return time.monotonic() - start


def replica_problems(config: Config, runtime: Runtime, trained: Trained) -> list[str]:
    """Problems, one line each, the same on every rank. If there are none, this takes a single collective."""
    # Sums detect a problem; only then do the ranks exchange fingerprints by name.
    mine = _held(config, runtime, trained)
    if not _problems(_sums_of_all(runtime, mine), distributed=config.distributed_optimizer):
        return []
    found: list[Any] = [None] * runtime.world_size
    torch.distributed.all_gather_object(found, mine)
    lines = _problems(found, distributed=config.distributed_optimizer)
    more = [f"and {len(lines) - _NUM_SHOWN} more"] if len(lines) > _NUM_SHOWN else []
    return lines[:_NUM_SHOWN] + more


class _Held(NamedTuple):
    """Fingerprints of one rank; in the first exchange, only the sum of each kind, under the name ''."""

    host: str
    problems: list[str]  # of the parameter groups
    places: dict[str, int]  # by kind; ranks with the same place must have equal tensors
    # By kind and name: fingerprint, number of values, and number of values that the optimizer steps on, which
    # is a part (maybe 0) with the distributed optimizer. Both are 0 for buffers, `tensor` and `tied`.
    tensors: dict[str, dict[str, tuple[int, int, int]]]


def _held(config: Config, runtime: Runtime, trained: Trained) -> _Held:
    # this rank's tensors by kind and name
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for inner in map(unwrapped, trained.model):
        for name, buffer in inner.named_buffers():
            if name.endswith(".router.expert_bias"):
                found["data"][global_name(inner, name)] = buffer
    for name, parameter in named_parameters(trained.model):
        found["data" if getattr(parameter, "allreduce", True) else "experts"][name] = parameter
        if config.tie_embeddings and config.pp > 1 and name in (_EMBEDDING, "output_layer.weight"):
            found["tied"][_EMBEDDING] = parameter  # under one name on both stages
    if config.tp > 1:
        is_split = {name: getattr(x, "tensor_model_parallel", False) for name, x in found["data"].items()}
        found["tensor"] = {name: x for name, x in found["data"].items() if not is_split[name]}

    num_stepped = Counter[int]()
    for parameter, stepped, _ in _stepped(trained.optimizer):
        num_stepped[id(parameter)] += stepped.numel()
    held: dict[str, dict[str, tuple[int, int, int]]] = {kind: {} for kind in KINDS}
    with parameters_in_sync(trained.model):
        for kind, tensors in found.items():
            sums = [multilinear_sum(tensor, (0,) * tensor.dim()) for tensor in tensors.values()]
            prints = torch.stack(sums).tolist() if sums else []  # waits for the device once per kind
            for (name, tensor), fingerprint in zip(tensors.items(), prints, strict=True):
                is_counted = kind in ("data", "experts") and tensor.requires_grad
                counts = (tensor.numel(), num_stepped[id(tensor)]) if is_counted else (0, 0)
                held[kind][name] = (fingerprint, *counts)
    pp, tp, ep, etp = runtime.groups.pp, runtime.groups.tp, runtime.groups.ep, runtime.groups.expt_tp
    places = {
        "data": pp.rank() * tp.size() + tp.rank(),
        "experts": (pp.rank() * ep.size() + ep.rank()) * etp.size() + etp.rank(),
        "tensor": pp.rank(),
        "tied": tp.rank() if held["tied"] else -1,
    }
    problems = group_problems(config, trained.model, trained.optimizer)
    return _Held(runtime.host, problems, places, held)


def _sums_of_all(runtime: Runtime, mine: _Held) -> list[_Held]:
    """Fingerprints of every rank, summed over names; uses one all-gather of a few numbers per rank."""
    sums = []
    for named in mine.tensors.values():
        # An odd factor per name: tensors swapped between two names change the sum.
        digests = {name: hashlib.sha256(name.encode()).digest() for name in named}
        factors = {name: int.from_bytes(digest[:8], "little") | 1 for name, digest in digests.items()}
        for column in range(3):
            total = sum(values[column] * factors[name] for name, values in named.items())
            sums.append((total + 2**63 & _MASK) - 2**63)  # as a signed 64-bit number
    row = torch.tensor([len(mine.problems), *mine.places.values(), *sums], device=runtime.device)
    table = [torch.empty_like(row) for _ in range(runtime.world_size)]
    torch.distributed.all_gather(table, row)
    # A row: number of problems, a place per kind, three sums per kind.
    rows, begin, held = torch.stack(table), 1 + len(KINDS), []
    sums_of_ranks = rows[:, begin:].view(-1, len(KINDS), 3).tolist()
    for (num_problems, *places), of_kinds in zip(rows[:, :begin].tolist(), sums_of_ranks, strict=True):
        tensors: Any = {kind: {"": tuple(of)} for kind, of in zip(KINDS, of_kinds, strict=True)}
        held.append(_Held("", [""] * num_problems, dict(zip(KINDS, places, strict=True)), tensors))
    return held


def _problems(held: list[_Held], *, distributed: bool) -> list[str]:
    """One line for each tensor that differs between replicas or is not updated exactly once."""
    lines: list[str] = []
    of_optimizer: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(held):
        for problem in one.problems:
            of_optimizer[problem].append(rank)
    for kind in KINDS:
        replicas: dict[int, list[int]] = defaultdict(list)
        for rank, one in enumerate(held):
            replicas[one.places[kind]].append(rank)
        for ranks in replicas.values():
            for name in sorted({name for rank in ranks for name in held[rank].tensors[kind]}):
                found = {rank: held[rank].tensors[kind].get(name, (None,))[0] for rank in ranks}
                # The majority is assumed to be right; of two, either may be wrong.
                (most, count), *_ = Counter(found.values()).most_common()
                if others := [rank for rank, value in found.items() if value != most]:
                    equal = [rank for rank in ranks if rank not in others]
                    doubt = "" if count > len(others) else "; it is unknown which copy is right"
                    lines.append(
                        f"replicas: {name} on {_ranks(others, held)} differs from {_ranks(equal, held)}:"
                        f" {KINDS[kind]} must be equal{doubt}"
                    )
            # The distributed optimizer splits the values over the replicas, otherwise each steps on all.
            times = 1 if distributed else len(ranks)
            for name, (_, size, _) in held[ranks[0]].tensors[kind].items():
                stepped = sum(held[rank].tensors[kind].get(name, (0, 0, 0))[2] for rank in ranks)
                if (stepped - size * times) & _MASK:
                    problem = f"{name}: the optimizer updates {stepped} values instead of {size * times}"
                    of_optimizer[problem] += ranks
    optimizer = (f"optimizer: {problem}, on {_ranks(ranks, held)}" for problem, ranks in of_optimizer.items())
    return [*lines, *optimizer]


def _ranks(ranks: list[int], held: list[_Held]) -> str:
    """Ranks and their hosts, such as `rank 3 (node-b)` or `ranks 0, 1, 2, 3, ..., 9 (node-a, node-b)`."""
    ranks = sorted(set(ranks))
    hosts = ", ".join(dict.fromkeys(held[rank].host for rank in ranks))
    shown = list(map(str, ranks)) if len(ranks) <= 8 else [*map(str, ranks[:4]), "...", str(ranks[-1])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)} ({hosts})"


# Check of the optimizer's parameter groups: each trained parameter in one group, no decay of norms or biases.
#
# A norm in the decayed group makes the loss jump at a restart, without any other symptom. The check looks at
# the names of the tensors that the optimizer actually steps on, independently of the rule by dimensions that
# built the groups (`engine/optimizer_setup.py`).


def named_parameters(model: list[DistributedDataParallel]) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) of this rank's trainable parameters; layer numbers count over all stages."""
    for chunk in model:
        inner = unwrapped(chunk)
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                yield global_name(inner, name), parameter


def group_problems(
    config: Config, model: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> list[str]:
    """One line for each parameter with wrong weight decay or learning rate, or not in exactly one group."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    in_checkpoints = names if are_alike(config) else parameter_names(model)
    problems = set()
    for parameter, _, groups in _stepped(optimizer):
        name = names.get(id(parameter), "a tensor that is not a parameter")
        if len(groups) != 1:
            problems.add(f"{name} is in {len(groups)} parameter groups of the optimizer instead of one")
            continue
        own, group = multiples_of(config, in_checkpoints.get(id(parameter), name)), groups[0]
        if is_norm_or_bias(name) and group.get("weight_decay"):
            problems.add(f"{name} is a norm or bias but has weight decay ({group['weight_decay']:g})")
        elif group["wd_mult"] != own.wd:
            problems.add(f"{name} has {group['wd_mult']:g} times WEIGHT_DECAY instead of {own.wd:g} times")
        if (group["max_lr"], group["min_lr"]) != (config.lr * own.lr, config.min_lr * own.lr):
            problems.add(f"{name} has LR {group['max_lr']:g} instead of {config.lr * own.lr:g}")
    return sorted(problems)


def _stepped(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, list[Mapping[str, Any]]]]:
    """(model parameter, tensor that the optimizer updates for it, parameter groups of that tensor)."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue  # this rank has no parameters of this kind
        groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for group in part.optimizer.param_groups:
            for tensor in group["params"]:
                groups[id(tensor)].append(group)
        # Megatron has three kinds of optimizer. They step on this rank's fp32 ranges, on fp32 copies of
        # 16-bit parameters, or on the parameters themselves.
        if isinstance(part, DistributedOptimizer):
            parameters = [*part.model_float16_groups, *part.model_fp32_groups]
            tensors = [*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups]
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            parameters = [*part.float16_groups, *part.fp32_from_fp32_groups]
            tensors = [*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups]
        else:
            parameters = tensors = [group["params"] for group in part.optimizer.param_groups]
        for pair in zip(parameters, tensors, strict=True):
            for parameter, tensor in zip(*pair, strict=True):
                yield parameter, tensor, groups[id(tensor)]
