"""Whether ranks that hold the same weights hold the same bits, and whether the optimizer's groups are right.
Called by every rank.

What must be equal, and over which ranks:

    data      parameters except experts', and the routers' biases         data and context parallel ranks
    experts   parameters of experts                                       expert data parallel ranks
    tensor    of `data`, what tensor parallelism does not split:          and tensor parallel ranks
              routers, norms, gates, latent projections
    tied      embedding and output layer if shared                        first and last pipeline stage

Training never compares them, as only gradients are reduced. A flipped bit, a rank that loaded something else
or a tied embedding out of sync continues as an ill-defined model, until the loss is worse or spikes at a
restart.

A rank takes 64 bits of each tensor (`checkpoint.fingerprints`) and sums those of a kind, weighted by name.
One all-gather of a few numbers per rank detects problems; a second one then adds names and hosts.
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
from moe_exp.config.parameter_groups import Multiples, are_alike, is_norm_or_bias, multiples_of
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
    "tied": "first and last pipeline stage, which tie the embedding and the output layer,",
}
_EMBEDDING = "embedding.word_embeddings.weight"
_NUM_SHOWN = 5
_MASK = 2**64 - 1


class ReplicaError(RuntimeError):
    """Replicas differ, or the optimizer's groups are wrong. `problems`: a line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


@heartbeat.during("check")
def check_replicas(
    config: Config, runtime: Runtime, trained: Trained, progress: Progress, metrics: Metrics | None
) -> float:
    """Compares all replicas; returns the seconds that this took. `metrics` on rank 0 only.

    Raises:
        ReplicaError: on every rank, if any has a problem.
    """
    start = time.monotonic()
    problems = replica_problems(config, runtime, trained)
    if problems:
        if metrics is not None:
            metrics.event("replicas_differ", progress.iteration, problems=problems)
        fix = (
            "leave out the hosts that are named, if any, and start again: the run continues from its newest"
            " checkpoint"
        )
        raise ReplicaError(
            [
                *problems,
                f"the run ends after iteration {progress.iteration}, and saves nothing of it. Fix: {fix}.",
            ]
        )
    logger.debug("replicas are equal after iteration %d", progress.iteration)
    return time.monotonic() - start


def replica_problems(config: Config, runtime: Runtime, trained: Trained) -> list[str]:
    """Problems, in lines that are equal on every rank; one collective if there are none."""
    with parameters_in_sync(trained.model):
        prints = {kind: _prints(tensors) for kind, tensors in _tensors(config, runtime, trained).items()}
    groups, stepped = (
        group_problems(config, trained.model, trained.optimizer),
        stepped_values(trained.model, trained.optimizer),
    )
    sizes = {name: parameter.numel() for name, parameter in named_parameters(trained.model)}
    experts = {name for name, parameter in named_parameters(trained.model) if _is_expert(parameter)}
    rows = _gathered(runtime, _row(runtime, prints, bool(groups), stepped, sizes, experts))
    wrong = set(_unequal(rows)) | set(_not_covered(rows, distributed=config.distributed_optimizer))
    if not wrong and not any(row.has_problems for row in rows):
        return []
    mine = _Details(runtime.host, prints, groups, dict(stepped), sizes, experts)
    details: list[Any] = [None] * runtime.world_size
    torch.distributed.all_gather_object(details, mine)
    return _report_lines(rows, details, distributed=config.distributed_optimizer)


def _is_expert(parameter: Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)


def _tensors(config: Config, runtime: Runtime, trained: Trained) -> dict[str, dict[str, Tensor]]:
    """This rank's tensors by kind and name."""
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for chunk in trained.model:
        inner = unwrapped(chunk)
        for name, buffer in inner.named_buffers():
            if name.endswith(".router.expert_bias"):
                found["data"][global_name(inner, name)] = buffer
    for name, parameter in named_parameters(trained.model):
        found["experts" if _is_expert(parameter) else "data"][name] = parameter
        if config.tie_embeddings and config.pp > 1 and name in (_EMBEDDING, "output_layer.weight"):
            found["tied"][_EMBEDDING] = parameter
    if config.tp > 1:
        found["tensor"] = {
            name: tensor
            for name, tensor in found["data"].items()
            if not getattr(tensor, "tensor_model_parallel", False)
        }
    return found


def _prints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    sums = [multilinear_sum(tensor, (0,) * tensor.dim()) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


class _Row(NamedTuple):
    """Sent to all ranks: sums over names of fingerprints, of values stepped on, and of sizes."""

    has_problems: int
    pp: int
    tp: int
    ep: int
    etp: int
    num_tied: int
    data: int
    experts: int
    tensor: int
    tied: int
    stepped_data: int
    size_data: int
    stepped_experts: int
    size_experts: int

    def place(self, kind: str) -> tuple[int, ...]:
        """Ranks of one place hold the same of a kind."""
        return {
            "data": (self.pp, self.tp),
            "experts": (self.pp, self.ep, self.etp),
            "tensor": (self.pp,),
            "tied": (self.tp,),
        }[kind]


def _row(
    runtime: Runtime,
    prints: Mapping[str, Mapping[str, int]],
    has_problems: bool,
    stepped: Mapping[str, int],
    sizes: Mapping[str, int],
    experts: set[str],
) -> _Row:
    groups = runtime.groups
    dense = [name for name in sizes if name not in experts]
    counts = [
        _digest({name: of[name] for name in names})
        for names in (dense, sorted(experts))
        for of in (stepped, sizes)
    ]
    sums = [_digest(prints[kind]) for kind in ("data", "experts", "tensor", "tied")]
    place = (groups.pp.rank(), groups.tp.rank(), groups.ep.rank(), groups.expt_tp.rank())
    return _Row(int(has_problems), *place, len(prints["tied"]), *sums, *counts)


def _digest(values: Mapping[str, int]) -> int:
    """Sum of the values, each times an odd factor of its name, as a signed 64-bit number."""
    total = sum(value * _factor(name) for name, value in values.items()) & _MASK
    return total - 2**64 if total >= 2**63 else total


def _factor(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1


def _gathered(runtime: Runtime, row: _Row) -> list[_Row]:
    mine = torch.tensor(row, dtype=torch.int64, device=runtime.device)
    table = [torch.empty_like(mine) for _ in range(runtime.world_size)]
    torch.distributed.all_gather(table, mine)
    return [_Row(*values) for values in torch.stack(table).tolist()]


Class = tuple[str, tuple[int, ...]]  # kind, place


def _classes(rows: list[_Row]) -> Iterator[tuple[Class, list[int]]]:
    """The ranks that must hold the same."""
    for kind in KINDS:
        ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, row in enumerate(rows):
            if kind != "tied" or row.num_tied:
                ranks[row.place(kind)].append(rank)
        yield from (((kind, place), members) for place, members in ranks.items())


def _unequal(rows: list[_Row]) -> Iterator[Class]:
    for of_class, ranks in _classes(rows):
        if len({getattr(rows[rank], of_class[0]) for rank in ranks}) > 1:
            yield of_class


def _not_covered(rows: list[_Row], *, distributed: bool) -> Iterator[Class]:
    """Ranks sharing optimizer state that do not step on each value once: the sum differs from the size."""
    for (kind, place), ranks in _classes(rows):
        if kind in ("data", "experts"):
            times = 1 if distributed else len(ranks)
            stepped = sum(getattr(rows[rank], f"stepped_{kind}") for rank in ranks)
            if (stepped - times * getattr(rows[ranks[0]], f"size_{kind}")) & _MASK:
                yield kind, place


class _Details(NamedTuple):
    """Sent by a rank if something is wrong."""

    host: str
    prints: dict[str, dict[str, int]]
    groups: list[str]
    stepped: dict[str, int]
    sizes: dict[str, int]
    experts: set[str]


def _report_lines(rows: list[_Row], details: list[_Details], *, distributed: bool) -> list[str]:
    members = dict(_classes(rows))
    lines = [
        f"replicas: {line}"
        for of_class in _unequal(rows)
        for line in _difference_lines(of_class, members[of_class], details)
    ]
    by_problem: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(details):
        for problem in one.groups:
            by_problem[problem].append(rank)
    for (kind, _), ranks in (
        (of_class, members[of_class]) for of_class in _not_covered(rows, distributed=distributed)
    ):
        names = (
            name
            for name in details[ranks[0]].sizes
            if (name in details[ranks[0]].experts) == (kind == "experts")
        )
        for name in names:
            stepped, size = (
                sum(details[rank].stepped.get(name, 0) for rank in ranks),
                details[ranks[0]].sizes[name],
            )
            if stepped != size * (1 if distributed else len(ranks)):
                by_problem[f"{name}: the optimizer steps on {stepped} values, it has {size}"] += ranks
    lines += [f"optimizer: {problem}, on {_ranks(ranks, details)}" for problem, ranks in by_problem.items()]
    return lines[:_NUM_SHOWN] + (
        [f"and {len(lines) - _NUM_SHOWN} more such lines"] if len(lines) > _NUM_SHOWN else []
    )


def _difference_lines(of_class: Class, ranks: list[int], details: list[_Details]) -> Iterator[str]:
    kind = of_class[0]
    for name in sorted({name for rank in ranks for name in details[rank].prints[kind]}):
        found = {rank: details[rank].prints[kind].get(name) for rank in ranks}
        (most, count), *_ = Counter(found.values()).most_common()
        others = [rank for rank, value in found.items() if value != most]
        if others:
            equal = [rank for rank in ranks if rank not in others]
            doubt = "" if count > len(others) else "; which of them is right is unknown"
            yield (
                f"{name} on {_ranks(others, details)} is not that on {_ranks(equal, details)}: {KINDS[kind]}"
                f" have to be equal{doubt}"
            )


def _ranks(ranks: list[int], details: list[_Details]) -> str:
    """`rank 3 (node-b)`, `ranks 0, 1, 2, ... 7 (node-a, node-b)`."""
    ranks = sorted(set(ranks))
    hosts = ", ".join(dict.fromkeys(details[rank].host for rank in ranks))
    shown = list(map(str, ranks)) if len(ranks) <= 8 else [*map(str, ranks[:4]), "...", str(ranks[-1])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)} ({hosts})"


# Checks the optimizer's parameter groups: every trained parameter in one group, no decay of norms or biases.
#
# A norm in the decayed group makes the loss jump at a restart, and nothing else shows it. So this checks the
# tensors that the optimizer steps on, by name, and not the rule that builds the groups by dimensions
# (`engine/optimizer_setup.py`).


def named_parameters(model: list[DistributedDataParallel]) -> Iterator[tuple[str, Tensor]]:
    """This rank's trainable parameters, by name in the whole model (layers counted over all stages)."""
    for chunk in model:
        inner = unwrapped(chunk)
        yield from (
            (global_name(inner, name), parameter)
            for name, parameter in inner.named_parameters()
            if parameter.requires_grad
        )


def group_problems(
    config: Config, model: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> list[str]:
    """A line for each parameter that wrongly decays, has the learning rate or weight decay of another group,
    or has values stepped on more than once or never.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    in_checkpoints = names if are_alike(config) else parameter_names(model)
    problems = []
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for group in part.optimizer.param_groups:
            for stepped in group["params"]:
                groups.setdefault(id(stepped), []).append(group)
        for parameter, stepped in _pairs(part):
            name = names.get(id(parameter), "a tensor that is no parameter")
            found = groups.get(id(stepped), [])
            if len(found) != 1:
                problems.append(f"{name} is in {len(found)} parameter groups of the optimizer instead of one")
            else:
                own = multiples_of(config, in_checkpoints.get(id(parameter), name))
                problems += _problems_in_group(config, name, found[0], own)
    return sorted(set(problems))


def _problems_in_group(config: Config, name: str, group: Mapping[str, Any], own: Multiples) -> Iterator[str]:
    """Problems of a parameter with the group that it is in; `own` by the settings."""
    if is_norm_or_bias(name) and group.get("weight_decay"):
        yield f"{name} is a norm or bias and decays (weight_decay {group['weight_decay']:g})"
    elif group["wd_mult"] != own.wd:
        yield f"{name} has {group['wd_mult']:g} times WEIGHT_DECAY instead of {own.wd:g} times"
    if group["max_lr"] != config.lr * own.lr or group["min_lr"] != config.min_lr * own.lr:
        yield f"{name} has a schedule from {group['max_lr']:g} instead of {config.lr * own.lr:g}"


def stepped_values(model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> Counter[str]:
    """Values per parameter that this rank's optimizer steps on: a part with the distributed one, maybe 0."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    found: Counter[str] = Counter(dict.fromkeys(names.values(), 0))
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            for parameter, stepped in _pairs(part):
                if id(parameter) in names:
                    found[names[id(parameter)]] += stepped.numel()
    return found


def _pairs(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(model parameter, tensor that is stepped on: itself, main weights, or a range)."""
    of_groups: tuple[tuple[Any, Any], ...]
    if isinstance(part, DistributedOptimizer):
        of_groups = (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        of_groups = (
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        )
    else:
        own = [group["params"] for group in part.optimizer.param_groups]
        of_groups = ((own, own),)
    for parameters, stepped in of_groups:
        for pair in zip(parameters, stepped, strict=True):
            yield from zip(*pair, strict=True)
