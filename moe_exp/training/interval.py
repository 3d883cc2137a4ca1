"""Statistics of a log interval. At the interval's end, a few reductions combine all ranks' statistics."""

import gc
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.state import Progress, parameters_in_sync
from moe_exp.config import Config
from moe_exp.engine.model import moe_layers
from moe_exp.engine.qk_clip import attention_cores
from moe_exp.engine.runtime import Runtime, from_all_ranks
from moe_exp.host.devices import device_name, peak_resident_bytes
from moe_exp.layers.groups import start_copy
from moe_exp.layers.statistics import statistics_names, update
from moe_exp.planner.estimate import memory_advice, predicted_on
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.slow_ranks import PHASES as RANK_PHASES
from moe_exp.watch.slow_ranks import PROCESSORS, SlowRanks, processor_seconds

from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config

_MOST_BATCHES = 32  # global batches per interval whose expert loads are kept separately


class Interval:
    """Sums statistics on the device between log lines. Each MoE layer of `model` keeps its own sums."""

    def __init__(self, config: Config, runtime: Runtime, model: list[DistributedDataParallel]):
        self.config, self.runtime, self.model = config, runtime, model
        self.layers = dict(moe_layers(list(model)))
        # cross entropy and number of counted tokens, over micro-batches with a finite loss; with
        # MTP_NUM_LAYERS, then the same of each layer
        self.losses = torch.zeros(2 + 2 * config.mtp_num_layers, dtype=torch.float64, device=runtime.device)
        # per iteration, whether any loss on this rank is not finite, [] each
        self.not_finite: list[Tensor] = []
        # layout of a layer's row: token counts per expert, then the sums of MoEStatistics
        self.row_width = config.num_experts + len(statistics_names(config.balancing_losses))
        # cumulative slots per expert after each of the last iterations, [layers of this rank, E] each
        self.loads: deque[Tensor] = deque(maxlen=_MOST_BATCHES + 1)
        self.timers = PhaseTimers(runtime.device) if config.log_timers else None
        is_watched = config.slow_rank_every > 0 and config.world_size > 1
        self.rank_times = RankTimes(config, runtime, model) if is_watched else None
        self.own_timers = self.rank_times.timers if self.rank_times else None
        if self.timers is not None:
            for layer in self.layers.values():
                layer.set_timers(self.timers)
        self._restart()

    def _restart(self) -> None:
        self.losses.zero_()
        self.not_finite = []
        for layer in self.layers.values():
            layer.statistics.reset()
        self.loads.clear()
        self.loads.append(self._load())
        self.num_iterations = self.num_samples = self.num_microbatches = self.num_skipped = self.flops = 0
        self.start = time.monotonic()

    def add(self, losses: Sequence[Tensor], *, num_microbatches: int, batch_size: int, flops: int) -> None:
        """Adds one iteration; `step.Step` describes `losses`."""
        bad = self.losses.new_zeros((), dtype=torch.bool)
        if losses and self.runtime.groups.tp.rank() == 0:
            sums = torch.stack(list(losses)).double()
            # One bad micro-batch must not hide the loss of the others; `nan_iterations` counts it.
            finite = sums.isfinite().all(dim=1, keepdim=True)
            self.losses += torch.where(finite, sums, 0.0).sum(dim=0)
            bad = (~finite).any()
        self.not_finite.append(bad)
        self.loads.append(self._load())
        self.num_iterations += 1
        self.num_samples += batch_size
        self.num_microbatches += num_microbatches
        self.flops += flops

    def _load(self) -> Tensor:
        update([layer.statistics for layer in self.layers.values()])
        counts = [layer.statistics.tokens_per_expert_E for layer in self.layers.values()]
        return torch.stack(counts) if counts else self.losses.new_empty(0, 0)

    def pause(self, seconds: float, *, phase: str | None = None) -> None:
        """Excludes `seconds` from the time per iteration; with timers, adds the seconds to `phase`."""
        self.start += seconds
        if self.timers is not None and phase is not None:
            self.timers.add(phase, seconds)

    def record(
        self, progress: Progress, *, learning_rate: float, grad_norm: float | None, num_zeros: float | None,
        loss_scale: float,
    ) -> Any:  # fmt: skip
        """Returns the train record, which is the same on every rank. Starts the next interval."""
        config = self.config
        (lm_loss_sum, num_counted, *mtp), (norm_squared,), not_finite, peaks, phases, sums = self._reduced()
        seconds = (time.monotonic() - self.start) / self.num_iterations
        losses, experts = self._expert_records(sums, self.num_microbatches * config.data_parallel_size)
        pairs = zip(mtp[::2], mtp[1::2], strict=True)
        mtp_losses = [total / num if num else math.nan for total, num in pairs]
        on_gpu = self.runtime.device.type == "cuda"
        # ETA per sample, not per iteration: with a batch ramp-up, later iterations take longer.
        iterations = config.train_iters - progress.iteration
        num_left = config.batches.samples_of(iterations, progress.consumed_samples)
        # from seconds summed over ranks to milliseconds per iteration, mean over ranks
        per_iteration = self.num_iterations * config.world_size / 1e3
        timers = {phase: value / per_iteration for phase, value in zip(PHASES, phases, strict=False)}
        record = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            "consumed_flops": progress.consumed_flops,
            "global_batch_size": self.num_samples // self.num_iterations,
            "lm_loss": lm_loss_sum / num_counted if num_counted else math.nan,
            "mtp_loss": fmean(mtp_losses) if mtp_losses else None,
            "mtp_losses": mtp_losses,
            **losses,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "num_zeros": num_zeros,
            "params_norm": math.sqrt(norm_squared),
            "max_attention_logits": self._max_attention_logits() if config.qk_clip else None,
            "loss_scale": loss_scale,
            "elapsed_time_per_iteration_ms": seconds * 1e3,
            "tokens_per_second": self.num_samples * config.seq_len / self.num_iterations / seconds,
            "tflops_per_gpu": self.flops / self.num_iterations / seconds / config.world_size / 1e12,
            "eta_seconds": seconds * self.num_iterations / self.num_samples * num_left,
            "skipped_iterations": self.num_skipped,
            "nan_iterations": sum(count > 0 for count in not_finite),  # by any rank
            "memory_allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "peak_memory_bytes": round(max(peaks)),
            "experts": experts,
            "timers": timers or None,
        }
        self._restart()
        return record

    def _reduced(self) -> list[list[float]]:
        """Reduces over all ranks: losses, squared norm, bad iterations, memory, phases, layer statistics."""
        sizes = len(self.config.all_moe_layers), self.row_width if self.config.use_moe else 0
        table = torch.zeros(sizes, dtype=torch.float64, device=self.runtime.device)
        for index, layer in self.layers.items():
            table[index] = torch.cat([layer.statistics.tokens_per_expert_E.double(), layer.statistics.sums])
        with parameters_in_sync(self.model):
            norm_squared = self._squared_norm()
        # One slot per rank, zero elsewhere, so that the sum gathers them without a second collective.
        peaks = torch.zeros(self.config.world_size, dtype=torch.float64, device=self.runtime.device)
        on_gpu = self.runtime.device.type == "cuda"
        peaks[self.runtime.rank] = torch.cuda.max_memory_allocated() if on_gpu else peak_resident_bytes()
        phases = self.losses.new_tensor([] if self.timers is None else list(self.timers.take().values()))
        not_finite = torch.stack(self.not_finite).double()
        parts = [self.losses, norm_squared.view(1), not_finite, peaks, phases, table.flatten()]
        vector = torch.cat(parts)
        torch.distributed.all_reduce(vector)
        return [part.tolist() for part in vector.cpu().split([len(part) for part in parts])]

    def _max_vio(self) -> list[float]:
        """Mean MaxVio of each layer over the interval's last batches (up to _MOST_BATCHES); 0 if dense."""
        # The counters only grow, so differences are the loads of single batches. MaxVio needs the load summed
        # over all ranks before the maximum; layers of other pipeline stages contribute zeros.
        sizes = len(self.loads) - 1, len(self.config.all_moe_layers), self.config.num_experts
        counts_NLE = torch.zeros(sizes, dtype=torch.float64, device=self.runtime.device)
        if self.layers:
            counts_NLE[:, list(self.layers)] = torch.stack(list(self.loads)).diff(dim=0).double()
        torch.distributed.all_reduce(counts_NLE)
        fair_NL = counts_NLE.mean(dim=2).clamp(min=1e-9)
        return list((counts_NLE.amax(dim=2) / fair_NL - 1).mean(dim=0).tolist())

    def _max_attention_logits(self) -> list[float]:
        """Largest attention logit of each layer over the interval and all ranks."""
        # Each pipeline stage fills in its own layers; the maximum over all ranks joins them.
        largest = self.losses.new_full((len(self.config.all_moe_layers),), -math.inf)
        for core in attention_cores(self.model):
            if core.max_logit is not None:
                largest[core.layer_number - 1], core.max_logit = core.max_logit, None
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return list(largest.tolist())

    @torch.no_grad()
    def _squared_norm(self) -> Tensor:
        """This rank's share of the squared parameter norm; each parameter counts once in the whole job."""
        groups, device = self.runtime.groups, self.runtime.device
        # On a GPU, fp64 would copy every bf16 tensor; on a CPU, PyTorch's fp32 norm is off by 1e-5.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        total = torch.zeros((), dtype=torch.float64, device=device)
        for chunk in self.model:
            for parameter in chunk.parameters():
                if getattr(parameter, "shared", False):
                    continue  # the output layer's copy of a tied embedding
                is_expert = not getattr(parameter, "allreduce", True)
                replica = groups.expt_dp.rank() if is_expert else groups.dp_cp.rank()
                is_split = is_expert or getattr(parameter, "tensor_model_parallel", False)
                if replica == 0 and (is_split or groups.tp.rank() == 0):
                    total += torch.linalg.vector_norm(parameter.detach(), dtype=dtype).double().square()
        return total

    def _expert_records(
        self, sums: list[float], num_shares: int
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns the mean of each router loss over the MoE layers, and a record per MoE layer."""
        config = self.config
        if not config.use_moe:
            return {"load_balancing_loss": None, "z_loss": None, "aux_losses": {}}, []
        max_vio, width = self._max_vio(), self.row_width
        experts = [
            expert_record(layer, sums[layer * width : (layer + 1) * width], config, num_shares)
            | {"max_vio": max_vio[layer]}
            for layer, is_moe in enumerate(config.all_moe_layers)
            if is_moe
        ]
        kinds = config.balancing_losses
        aux_losses = {kind: fmean(layer["aux_losses"][kind] for layer in experts) for kind in kinds}
        means = {key: fmean(layer[key] for layer in experts) for key in ("load_balancing_loss", "z_loss")}
        return {**means, "aux_losses": aux_losses}, experts


def expert_record(layer: int, row: list[float], config: Config, num_shares: int) -> dict[str, Any]:
    """A layer's entry in a record's `experts`; `row` has the layer's sums over `num_shares` micro-batches."""
    counts = row[: config.num_experts]
    sums = dict(zip(statistics_names(config.balancing_losses), row[config.num_experts :], strict=True))
    slots, tokens = max(1, sum(counts)), sums["tokens"]  # ReLU scores may select no expert at all
    fair_share = slots / len(counts)
    return {
        "layer": layer + 1,
        "tokens_per_expert": [round(count) for count in counts],
        "max_over_mean": max(counts) / fair_share,
        # TP and CP ranks of a micro-batch each add the value of their own tokens.
        "microbatch_max_over_mean": sums["max_over_mean"] / (num_shares * config.tp * config.cp),
        "dead_fraction": sum(count < 0.01 * fair_share for count in counts) / len(counts),
        "dropped_fraction": sums["dropped"] / slots,
        "experts_per_token": slots / tokens,
        "router_entropy": sums["entropy"] / tokens,
        "top1_weight": sums["top1_weight"] / tokens,
        "load_balancing_loss": sums["load_balancing_loss"] / num_shares,
        "z_loss": sums["z_loss"] / num_shares,
        "aux_losses": {name: sums[f"aux_losses.{name}"] / num_shares for name in config.balancing_losses},
    }


# In the order of the log line. all_to_all and experts are parts of forward_backward; checkpoint is not part
# of the iteration's time.
PHASES = ("data", "forward_backward", "all_to_all", "experts", "optimizer", "checkpoint")


class PhaseTimers:
    """Times each phase on this rank from `start` to `stop`: with CUDA events or, on CPUs, `clock`."""

    is_on = True  # for all instances

    # On a GPU both record events in the current stream and synchronize only in `take`. The time of a phase
    # then includes waits for other ranks and for the host.
    def __init__(self, device: torch.device, phases: Sequence[str] = PHASES, clock: Any = time.perf_counter):
        self._on_gpu, self._phases, self._clock = device.type == "cuda", phases, clock
        self._seconds = dict.fromkeys(phases, 0.0)
        self._begun: dict[str, Any] = {}  # an event or, on a CPU, seconds
        self._pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._unused: list[torch.cuda.Event] = []
        self._num_old = 0  # pairs that the last `take` left

    def start(self, phase: str) -> None:
        """Starts `phase`, or restarts it if it was not stopped."""
        if self.is_on:
            self._begun[phase] = self._event() if self._on_gpu else self._clock()

    def stop(self, phase: str) -> None:
        """Stops `phase` if it was started."""
        if (begun := self._begun.pop(phase, None)) is None:
            return
        if self._on_gpu:
            self._pairs.append((phase, begun, self._event()))
        else:
            self._seconds[phase] += self._clock() - begun

    def add(self, phase: str, seconds: float) -> None:
        """Adds a time measured elsewhere."""
        self._seconds[phase] += seconds

    def take(self, *, is_late: bool = False) -> dict[str, float]:
        """Waits for the device, then returns the seconds per phase since the last call. With `is_late`, does
        not wait: the next call returns the GPU times measured since the last call.
        """
        number = self._num_old if is_late else len(self._pairs)
        for phase, begun, ended in self._pairs[:number]:
            ended.synchronize()
            self._seconds[phase] += begun.elapsed_time(ended) / 1e3
            self._unused += [begun, ended]
        self._pairs = self._pairs[number:]
        self._num_old = len(self._pairs)
        taken, self._seconds = self._seconds, dict.fromkeys(self._phases, 0.0)
        return taken

    def _event(self) -> torch.cuda.Event:
        # Reused: a large model needs tens of thousands per interval, and creating one is a driver call.
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_seconds_waited = 0.0  # by this process for other ranks, from the first call of `measure_waits` on


@cache
def measure_waits() -> None:
    """Makes `Work.wait` add its duration to `_seconds_waited`. All gloo calls wait in `Work.wait`."""
    wait: Any = torch.distributed.Work.wait

    def measured(*args: Any, **kwargs: Any) -> Any:
        global _seconds_waited
        begun = time.perf_counter()
        result = wait(*args, **kwargs)
        _seconds_waited += time.perf_counter() - begun
        return result

    torch.distributed.Work.wait = measured  # type: ignore[method-assign]


class RankTimes:
    """This rank's own seconds in each of RANK_PHASES, exchanged every SLOW_RANK_EVERY iterations.

    Own time excludes waits for other ranks. On a GPU, own time includes the collectives of tensor and expert
    parallelism and of the optimizer; the time of a CUDA graph counts as `forward`. The host reads the GPU
    events of a phase one iteration later, so that the host does not wait (not measured on a GPU yet).
    """

    def __init__(self, config: Config, runtime: Runtime, model: Sequence[Any]):
        self._runtime, self._every, groups = runtime, config.slow_rank_every, runtime.groups
        measure_waits()
        work = f"stage {groups.pp.rank()}, experts {groups.ep.rank()}"
        place = {"host": runtime.host, "device": str(runtime.device), "work": work}
        self.slow = SlowRanks(from_all_ranks(place), RunFolder.of(config).ranks)  # for rank 0
        self.timers = PhaseTimers(runtime.device, RANK_PHASES, lambda: time.perf_counter() - _seconds_waited)
        start, stop, names = self.timers.start, self.timers.stop, ("forward", "backward")
        spans = {
            f"{x}-compute": SimpleNamespace(start=partial(start, x), stop=partial(stop, x)) for x in names
        }
        other = SimpleNamespace(start=lambda **_: None, stop=lambda: None)
        # Megatron's schedules call `timers(name).start()`. Evaluations, without gradients, do not count.
        get_model_config(model[0]).timers = lambda name, **_: (
            spans.get(name, other) if torch.is_grad_enabled() else other
        )
        self._rows: list[list[float]] = []  # one per iteration since the last exchange
        self._waited, self._processors = _seconds_waited, processor_seconds()
        self._exchanged: Callable[[], list[list[float]]] | None = None

    def end(self, iteration: int) -> list[list[float]] | None:
        """Ends an iteration. If due, starts exchanging times and CPU loads; the next call returns both."""
        read, self._exchanged = self._exchanged, None
        waited, self._waited = _seconds_waited - self._waited, _seconds_waited
        self._rows.append([*self.timers.take(is_late=True).values(), waited])
        if iteration % self._every == 0:
            rows = torch.tensor(self._rows, dtype=torch.float64)
            own = rows[:, :-1].sum(dim=1)
            variance = own.var(correction=0) / own.mean().clamp(min=1e-9) ** 2 / max(1, len(own) - 1)
            # one slot per rank, so that the sum gathers them
            processors, self._processors = self._processors, processor_seconds()
            load = torch.from_numpy(self._processors - processors)
            host = rows.new_zeros(self._runtime.world_size, rows.size(1) + 1 + len(PROCESSORS))
            host[self._runtime.rank] = torch.cat([rows.mean(dim=0), variance.view(1), load])
            self._rows, table = [], host.to(self._runtime.device)
            # On a GPU the host waits in neither case, and gloo's exchange runs in a thread.
            work = torch.distributed.all_reduce(table, async_op=not table.is_cuda)
            self._exchanged = start_copy(table) if work is None else lambda: (work.wait(), table.tolist())[1]
        return read() if read else None


@contextmanager
def timed(timers: PhaseTimers | None, phase: str) -> Iterator[None]:
    """Times the block as `phase`; does nothing if timers are off."""
    if timers is None:
        yield
        return
    timers.start(phase)
    try:
        yield
    finally:
        timers.stop(phase)


def out_of_memory_text(config: Config, error: Exception) -> str:
    """Error text: failed allocation, measured and planned peak memory, largest tensors, and advice."""
    tried = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    parts = [f"no room for {tried[1]}" if tried else str(error).partition("\n")[0].strip().rstrip(".")]
    if torch.cuda.is_initialized():
        parts.append(f"measured peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    # views share a storage; without the tensors that only autograd's graph holds
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    tensors.sort(key=torch.Tensor.numel)  # so that the largest view comes last
    largest = sorted({x.untyped_storage()._cdata: x for x in tensors}.values(), key=_bytes_of)[-4:]
    sizes = (f"{_bytes_of(x) / 2**30:.2f} GiB ({x.dtype}, {[*x.shape]})" for x in reversed(largest))
    parts.append("largest tensors: " + ", ".join(sizes).replace("torch.", ""))
    if planned := predicted_on(device_name(), config):
        hardware, expected = planned
        needed, has = expected.needed_bytes / 2**30, expected.memory_bytes / 2**30
        parts.insert(1, f"planned peak {needed:.1f} of {has:.1f} GiB")
        parts.append(f"to save memory: {memory_advice(config, hardware, expected) or 'use more GPUs'}")
    return "; ".join(parts)


def _bytes_of(x: Any) -> int:
    return int(x.untyped_storage().nbytes())
