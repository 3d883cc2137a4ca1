"""Checks that replicated weights are bitwise equal, that the optimizer's parameter groups are correct, and
that gradients match when they are computed again.

The following tensors must be equal on the ranks listed next to them:

    data      all parameters except experts; router biases          data and context parallel ranks
    experts   expert parameters                                     expert data parallel ranks
    tensor    parameters in `data` that tensor parallelism does     also tensor parallel ranks
              not split: routers, norms, gates, latent projections
    tied      shared embedding and output layer                     first and last pipeline stage

Training itself would not notice that weights differ, because only gradients are reduced. It would continue
until the loss degrades, or until the loss spikes at a restart. Weights can differ after a bit flip, a wrong
load on one rank or a desynchronization of the tied embedding.

Each rank computes a 64-bit fingerprint of every tensor (`checkpoint.fingerprints`). For each kind (row
above), the rank sums the fingerprints, each weighted by a hash of the tensor's name. One all-gather of these
sums detects problems. Ranks exchange names and hosts only if there are problems.
"""

import hashlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_exp.checkpoint import state
from moe_exp.checkpoint.format.fingerprints import multilinear_sum
from moe_exp.checkpoint.state import Progress, Trained, parameters_in_sync, unwrapped
from moe_exp.config import Config
from moe_exp.config.parameter_groups import are_alike, multiples_of
from moe_exp.config.parameter_names import is_norm_or_bias
from moe_exp.engine.graphs import bit_sums
from moe_exp.engine.initial_weights import global_name
from moe_exp.engine.model import moe_layers
from moe_exp.engine.optimizer_classes import stepped
from moe_exp.engine.optimizer_setup import parameter_names
from moe_exp.engine.qk_clip import attention_cores
from moe_exp.engine.runtime import Runtime, from_all_ranks
from moe_exp.training.metrics import Metrics
from moe_exp.watch.hangs import heartbeat

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

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
    """Replicas or repeated computations differ, or parameter groups are wrong; one message line per problem.

    `hosts`: host of each rank known to have computed or stored wrong values.
    """

    def __init__(self, text: str, hosts: Mapping[int, str]):
        super().__init__(text)
        self.hosts = hosts


@heartbeat.during("check")
def check_replicas(
    config: Config, runtime: Runtime, trained: Trained, progress: Progress, metrics: Metrics | None
) -> float:
    """Compares replicas; returns elapsed seconds. Raises ReplicaError on all ranks if there is a problem."""
    start = time.monotonic()
    if problems := replica_problems(config, runtime, trained):
        if metrics is not None:
            metrics.event("replicas_differ", progress.iteration, problems=list(problems))
        rule = f"the run ends after iteration {progress.iteration} without a save"
        fix = "exclude the named hosts, if any, and repeat the command to resume from the newest checkpoint"
        hosts = {rank: host for found in problems.values() for rank, host in found.items()}
        raise ReplicaError("\n".join([*problems, f"{rule}. Fix: {fix}."]), hosts)
    logger.debug("replicas are equal after iteration %d", progress.iteration)
    return time.monotonic() - start


def replica_problems(config: Config, runtime: Runtime, trained: Trained) -> dict[str, dict[int, str]]:
    """Maps each problem (a line of text) to {rank: host} of the copies that are known to be wrong. All
    ranks get the same result. If there are no problems, this takes a single collective.
    """
    # Sums detect a problem; only then do the ranks exchange fingerprints by name.
    mine = _held(config, runtime, trained)
    if not _problems(_sums_of_all(runtime, mine), distributed=config.distributed_optimizer):
        return {}
    problems = list(_problems(from_all_ranks(mine), distributed=config.distributed_optimizer).items())
    if len(problems) > _NUM_SHOWN:
        problems[_NUM_SHOWN:] = [(f"and {len(problems) - _NUM_SHOWN} more", {})]
    return dict(problems)


class _Held(NamedTuple):
    """One rank's fingerprints by kind and name. `_sums_of_all` stores one sum per kind under the name ''."""

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
    for parameter, tensor, _ in _in_groups(trained.optimizer):
        num_stepped[id(parameter)] += tensor.numel()
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
    return _Held(runtime.host, group_problems(config, trained.model, trained.optimizer), places, held)


def _sums_of_all(runtime: Runtime, mine: _Held) -> list[_Held]:
    """For each rank, the fingerprints summed over tensors; uses one all-gather of a few numbers per rank."""
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


def _problems(held: list[_Held], *, distributed: bool) -> dict[str, dict[int, str]]:
    """Problems in `held`, such as tensors that differ between replicas or aren't updated exactly once."""
    lines: dict[str, dict[int, str]] = {}
    hosts = [one.host for one in held]
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
                    is_known = count > len(others)
                    doubt = "" if is_known else "; it is unknown which copy is right"
                    names = f"{name} on {_ranks(others, hosts)} differs from {_ranks(equal, hosts)}"
                    line = f"replicas: {names}: {KINDS[kind]} must be equal{doubt}"
                    lines[line] = {rank: hosts[rank] for rank in others if is_known}
            # The distributed optimizer splits the values over the replicas, otherwise each steps on all.
            times = 1 if distributed else len(ranks)
            for name, (_, size, _) in held[ranks[0]].tensors[kind].items():
                stepped = sum(held[rank].tensors[kind].get(name, (0, 0, 0))[2] for rank in ranks)
                if (stepped - size * times) & _MASK:
                    problem = f"{name}: the optimizer updates {stepped} values instead of {size * times}"
                    of_optimizer[problem] += ranks
    for problem, ranks in of_optimizer.items():
        lines[f"optimizer: {problem}, on {_ranks(ranks, hosts)}"] = {}
    return lines


def _ranks(ranks: list[int], host_of_rank: Sequence[str]) -> str:
    """Ranks and their hosts, such as `rank 3 (node-b)` or `ranks 0, 1, 2, 3, ..., 9 (node-a, node-b)`."""
    ranks = sorted(set(ranks))
    hosts = ", ".join(dict.fromkeys(host_of_rank[rank] for rank in ranks))
    shown = list(map(str, ranks)) if len(ranks) <= 8 else [*map(str, ranks[:4]), "...", str(ranks[-1])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)} ({hosts})"


# Check of the optimizer's parameter groups: each trained parameter in one group, no decay of norms or biases.
#
# A norm in the decayed group makes the loss jump at a restart, without any other symptom. The check looks at
# the names of the tensors that the optimizer actually steps on, independently of the rule by dimensions that
# built the groups (`engine/optimizer_setup.py`).


def named_parameters(model: list[DistributedDataParallel]) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of this rank's trainable parameters; layers are numbered across stages."""
    for chunk in model:
        inner = unwrapped(chunk)
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                yield global_name(inner, name), parameter


def group_problems(
    config: Config, model: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> list[str]:
    """Lists parameters with a wrong weight decay or learning rate, and those not in exactly one group."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    in_checkpoints = names if are_alike(config) else parameter_names(model)
    problems = set()
    for parameter, _, groups in _in_groups(optimizer):
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


def _in_groups(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, list[Mapping[str, Any]]]]:
    """Yields (model parameter, its tensor in the optimizer, parameter groups with this tensor)."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue  # this rank has no parameters of this kind
        groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for group in part.optimizer.param_groups:
            for tensor in group["params"]:
                groups[id(tensor)].append(group)
        for parameter, tensor in stepped(part):
            yield parameter, tensor, groups[id(tensor)]


# Check of gradients (SDC_CHECK_EVERY). A chip that computes wrong leaves no difference between replicas: its
# gradients are added to those of all others.
#
# Before a checked iteration each rank computes the iteration's gradients twice without using them, for the
# batch of its neighbour in data parallelism and for its own, and keeps one number per parameter. They must
# equal those of the iteration itself, before gradients are summed. A difference from the repetition is a
# fault of this rank, or of one that exchanges activations with it. If only neighbours differ, a rank computes
# the same wrong values each time: of three replicas or more, the one that differs from both others.


class GradientCheck:
    """Recomputes gradients on this rank and a neighbor; raises ReplicaError on all ranks if they differ."""

    def __init__(self, config: Config, runtime: Runtime, trained: Trained, progress: Progress):
        self._config, self._runtime, self._trained, self._progress = config, runtime, trained, progress
        layers = [layer for _, layer in moe_layers(trained.model)]
        self._statistics = [layer.statistics for layer in layers]
        self._buffers = [buffer for layer in layers for buffer in layer.router.buffers()]
        # Expert parallel groups share a batch: the neighbour is the same place in the next group.
        groups, size = runtime.groups, config.tp * config.cp
        self._shift = math.lcm(size, groups.ep.size() * groups.expt_tp.size()) // size
        self._parameters: dict[str, Any] = dict(named_parameters(trained.model))
        is_exact = config.deterministic or runtime.device.type == "cpu"
        self._bound = 0.0 if is_exact else math.nan  # relative; measured in the first iteration
        self._expected: list[Tensor] = []
        progress.checked = self._begin = progress.checked or progress.iteration
        self.is_requested = True  # in the first iteration, and after a suspicious one

    def is_due(self, iteration: int) -> bool:
        """Whether `iteration` is to be checked."""
        every, last = self._config.sdc_check_every, self._config.train_iters
        return self.is_requested or iteration % every == 0 or iteration == last

    def expect(self, compute: Callable[..., object]) -> float:
        """Compares replicas' weights and computes expected gradients for `compared`; returns elapsed seconds.

        `compute(dp_rank=...)` runs the iteration's forward and backward passes on that DP rank's batch.
        """
        dp, wait = self._runtime.groups.dp, torch.cuda.synchronize if torch.cuda.is_initialized() else float
        wait()  # for queued work of the iteration before
        start = time.monotonic()
        is_first = self._progress.checked == self._begin
        if not is_first:  # else the start has just compared them
            check_replicas(self._config, self._runtime, self._trained, self._progress, None)
        neighbour = (dp.rank() + self._shift) % dp.size()
        # dropout of documents may have drawn other numbers there
        streams = from_all_ranks(state.rng_state(self._runtime).data[0], dp)
        before, self._expected = [x.clone() for x in self._state()], []
        for rank in dict.fromkeys((neighbour, dp.rank())):
            self._zero()
            state.set_rng_state(streams[rank])
            with parameters_in_sync(self._trained.model), self._before_sum(self._keep):
                compute(dp_rank=rank)
            for tensor, value in zip(self._state(), before, strict=True):
                tensor.copy_(value)
        self._zero()
        state.set_rng_state(streams[dp.rank()])
        wait()
        seconds, every, number = time.monotonic() - start, self._config.sdc_check_every, len(self._expected)
        if is_first:
            text = "SDC_CHECK_EVERY=%d: %d more forward and backward passes (%.1f s), %.1f%% of the time"
            logger.info(text, every, number, seconds, 100 * number / every)
        return seconds

    def compared(self) -> AbstractContextManager[None]:
        """Context manager that compares the iteration's unsummed gradients with those from `expect`."""
        finalize = get_model_config(self._trained.model[0]).finalize_model_grads_func

        def compare_and_sum(*args: Any, **kwargs: Any) -> None:
            self._compare()
            if self._trained.model[0].ddp_config.overlap_grad_reduce:
                for chunk in self._trained.model:
                    chunk.start_grad_sync()
            finalize(*args, **kwargs)

        return self._before_sum(compare_and_sum)

    @contextmanager
    def _before_sum(self, finalize: Callable[..., None]) -> Iterator[None]:
        """Makes Megatron call `finalize` in the `with` block, before gradients are summed over ranks."""
        settings = get_model_config(self._trained.model[0])
        kept = settings.finalize_model_grads_func, settings.no_sync_func
        settings.finalize_model_grads_func, settings.no_sync_func = finalize, None
        try:
            with ExitStack() as stack:
                for chunk in self._trained.model:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            settings.finalize_model_grads_func, settings.no_sync_func = kept

    def _state(self) -> list[Tensor]:
        """Tensors that a forward pass changes: sums for the log, router state, largest logits of QK-clip."""
        sums = [x for one in self._statistics for x in (one.tokens_per_expert_E, one.sums)]
        cores = attention_cores(self._trained.model)
        return [*sums, *self._buffers, *(c.max_logits_H for c in cores if c.max_logits_H is not None)]

    def _zero(self) -> None:
        for chunk in self._trained.model:
            chunk.zero_grad_buffer()
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                buffer.grad_data.zero_()  # also what kernels overwrite, see `leave_to_kernels`
        self._trained.optimizer.zero_grad()

    def _keep(self, *args: Any, **kwargs: Any) -> None:
        # a number per parameter: a sum of bits, or where additions have no fixed order, a norm
        grads = [parameter.main_grad for parameter in self._parameters.values()]
        if self._bound == 0:
            self._expected.append(bit_sums(grads))
        else:
            self._expected.append(torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).double())

    def _compare(self) -> None:
        self._keep()
        *others, repeated, own = self._expected
        runtime, dp = self._runtime, self._runtime.groups.dp
        gaps_P = _gaps(own, repeated)
        # one slot per rank, so that the sum gathers them
        found = torch.zeros(runtime.world_size, 3, dtype=torch.float64, device=runtime.device)
        found[runtime.rank, :2] = torch.stack([gaps_P.new_tensor(dp.rank() // self._shift), gaps_P.max()])
        if others:
            table = [torch.empty_like(own) for _ in range(dp.size())]
            torch.distributed.all_gather(table, others[0], group=dp)
            by_neighbour_P = _gaps(own, table[(dp.rank() - self._shift) % dp.size()])
            found[runtime.rank, 2], gaps_P = by_neighbour_P.max(), torch.maximum(gaps_P, by_neighbour_P)
        torch.distributed.all_reduce(found)
        replicas, *columns = found.T.tolist()
        if math.isnan(self._bound):  # a first iteration that differs by more is wrong, too
            self._bound = min(max(10 * max(map(max, columns)), _LEAST_BOUND), _MOST_BOUND)
        wrong, how = suspects([*map(int, replicas)], *columns, bound=self._bound)
        self.is_requested = False
        if not wrong:
            self._progress.checked = self._progress.iteration + 1
            return
        named = zip(self._parameters, (gaps_P > self._bound).tolist(), strict=True)
        gathered = from_all_ranks((runtime.host, [name for name, is_wrong in named if is_wrong]))
        hosts, (first, *more) = [host for host, _ in gathered], next(names for _, names in gathered if names)
        what = f"{first} and of {len(more)} more parameters" if more else first
        problem = f"the gradient of {what} differs from {how}: {_ranks(wrong, hosts)}"
        raise ReplicaError(problem, {rank: hosts[rank] for rank in wrong})


# Relative difference of a gradient's norm between equal computations that is never taken for a fault, and one
# that always is, if additions have no fixed order.
_LEAST_BOUND, _MOST_BOUND = 1e-3, 0.1


def _gaps(own: Tensor, other: Tensor) -> Tensor:
    """Per parameter: relative difference of two gradient norms, or whether two bit sums differ (0 or 1)."""
    if own.dtype == torch.int64:
        return (own != other).double()
    # small norms against the root mean square of all
    scale = torch.maximum(own, other).clamp(min=0.01 * float(own.square().mean().sqrt().nan_to_num()))
    is_same = (own == other) | ~(own.isfinite() | other.isfinite())
    return torch.where(is_same, 0.0, ((own - other).abs() / scale).nan_to_num(nan=math.inf))


def suspects(
    replicas: Sequence[int], repeated: Sequence[float], by_neighbour: Sequence[float], *, bound: float
) -> tuple[list[int], str]:
    """Ranks suspected of wrong results, and a text that names the gradients used for comparison.

    Each list has one value per rank. `replicas`: index of the rank's model replica. `repeated`: difference
    between the rank's gradient and its gradient in a repeated computation. `by_neighbour`: difference
    between the rank's gradient and the same gradient computed by its neighbor in the preceding replica.
    """
    if found := [rank for rank, gap in enumerate(repeated) if gap > bound]:
        return found, "that of the same computation, repeated"
    accused = Counter[int]()
    for replica in {replicas[rank] for rank, gap in enumerate(by_neighbour) if gap > bound}:
        accused.update((replica, (replica - 1) % (max(replicas) + 1)))
    most = max(accused.values(), default=0)
    found = [rank for rank, replica in enumerate(replicas) if most and accused[replica] == most]
    return found, "that of the same computation on other ranks"
