"""CUDA graph of forward and backward of one micro-batch (CUDA_GRAPH): the host launches it as one operation.

Megatron's schedule stays as it is. Its forward step replays the graph, which has also done the backward pass,
and returns a loss without gradient, for which the schedule computes no backward pass:

    schedule: for each micro-batch   copy it into the graph's inputs -> replay -> loss for the log
              after the last one     exchange of the gradients, as always

The exchange of gradients, optimizer and log are outside of the graph. Everything that the graph reads or
writes keeps its address: parameters, their gradients, the state of routers, the sums of statistics.

A key (shapes of the inputs, number of micro-batches) runs without a graph for its first WARMUP micro-batches,
which are micro-batches of training like the others. Capturing it executes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_exp.config import Config
from moe_exp.engine.model import use_te
from moe_exp.layers.experts.grouped_gemm import BY_SPLITS
from moe_exp.layers.statistics import MoEStatistics, recorded, update

logger = logging.getLogger(__name__)

WARMUP = 2  # micro-batches of a key before it is captured: kernels are compiled, workspaces allocated
Batch = dict[str, Any]


class Graph(Protocol):
    """What `MicrobatchGraphs` needs of a graph; a test may pass another one than CudaGraph."""

    def capture(self, region: Callable[[], Tensor]) -> Tensor:
        """Records what `region` does without doing it; the result will be valid after each replay."""

    def replay(self) -> None: ...


class CudaGraph:
    """A region captured by torch. All graphs of a process share a memory pool, as they run in turn."""

    _pool: Any = None

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, region: Callable[[], Tensor]) -> Tensor:
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        # thread_local: the watchdog of NCCL and the loader of the data may call CUDA in the meantime
        with torch.cuda.graph(
            self._graph, pool=CudaGraph._pool, stream=side_stream(), capture_error_mode="thread_local"
        ):
            return region()

    def replay(self) -> None:
        self._graph.replay()


_side_stream: torch.cuda.Stream | None = None


def side_stream() -> torch.cuda.Stream | None:
    """The stream that captures and warms up; None without CUDA.

    Autograd adds gradients on the stream on which DDP has made its nodes. A capture must not wait for another
    stream, so DDP has to be built on this one.
    """
    global _side_stream
    if _side_stream is None and torch.cuda.is_available():
        _side_stream = torch.cuda.Stream()
    return _side_stream


def choose_graph(config: Config, *, device_type: str) -> tuple[str, str]:
    """`on` or `off`, and the reason in words."""
    if config.cuda_graph == "off":
        return "off", "asked for by CUDA_GRAPH"
    if reason := graph_problem(config, device_type=device_type):
        return "off", reason
    return "on", "forward and backward of a micro-batch are one launch"


def graph_problem(config: Config, *, device_type: str) -> str:
    """Why a micro-batch cannot be one graph, in words; empty if it can."""
    has_static_rows = config.moe_type == "moe" and config.pad_to_capacity
    backend = "" if not config.use_moe else config.expert_backend
    reasons = {
        "graphs are for GPUs": device_type != "cuda",
        f"PP={config.pp}: stages exchange tensors in each micro-batch": config.pp > 1,
        f"TP={config.tp}: not with tensor parallelism": config.tp > 1,
        f"CP={config.cp}: not with context parallelism": config.cp > 1,
        "EP > 1 without PAD_TO_CAPACITY: the host reads how many rows arrive": config.use_moe
        and config.ep * config.etp > 1
        and not has_static_rows,
        f"EXPERT_BACKEND={backend} needs the rows per expert on the host": backend in BY_SPLITS
        and not (has_static_rows and backend == "torch"),
        "DOCUMENT_MASK: attention is called once per document": config.document_mask,
        "AUX_LOSS_TYPE=sinkhorn: the host reads whether it has converged": config.use_moe
        and config.aux_loss_type == "sinkhorn",
        "ROUTER_SCORE=relu: the number of rows changes": config.use_moe and config.router_score == "relu",
        "DROPOUT draws random numbers": config.dropout > 0 or config.attention_dropout > 0,
        "ROUTER_JITTER draws random numbers": config.use_moe and config.router_jitter > 0,
        "FORCE_ROUTING=zipf draws random numbers": config.use_moe and config.force_routing == "zipf",
        f"RECOMPUTE={config.recompute}: Megatron's recompute reads the random state": config.recompute
        != "none",
        "LOG_TIMERS: events of the host": config.log_timers,
        "DTYPE=fp16: the loss scale changes": config.dtype == "fp16",
        f"FP8={config.fp8}: not tried": config.fp8 != "none",
        f"IMPL={config.impl}: layers of Transformer Engine are not captured": use_te(config),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


class MicrobatchGraphs:
    """Graphs of the micro-batches of one rank's model.

    Args:
        region: forward and backward pass of a micro-batch; returns what the log gets of it.
        parameters: trained by it, in a fixed order; the graphs are captured again if one or its gradient
            moves.
        statistics: of the MoE layers.
        state: other tensors that a micro-batch changes, such as counters of routers.
        graph: makes a Graph.
    """

    def __init__(
        self,
        region: Callable[[Batch, int], Tensor],
        parameters: Iterable[torch.nn.Parameter],
        statistics: Iterable[MoEStatistics] = (),
        state: Iterable[Tensor] = (),
        *,
        graph: Callable[[], Graph] = CudaGraph,
    ):
        self._region, self._parameters, self._make = region, list(parameters), graph
        self._statistics, self._state = list(statistics), list(state)
        self._captured: dict[Any, _Captured] = {}
        self._num_run: dict[Any, int] = {}
        self._addresses: tuple[int, ...] = ()

    def run(self, batch: Batch, num_microbatches: int) -> Tensor:
        """Forward and backward pass of one of `num_microbatches`; what the region returns, a copy."""
        key = num_microbatches, tuple((name, _shape(value)) for name, value in sorted(batch.items()))
        addresses = self._find_addresses()
        if addresses != self._addresses:
            self._captured.clear()
            self._addresses = addresses
        if key not in self._captured:
            number = self._num_run[key] = self._num_run.get(key, 0) + 1
            if number <= WARMUP:
                return self._eager(batch, num_microbatches)
            self._captured[key] = self._capture(batch, num_microbatches)
        return self._captured[key].run(batch)

    @torch.no_grad()
    def check(self, batch: Batch, num_microbatches: int) -> str:
        """Compares a captured micro-batch with one that is not, before training: loss and gradients, to the
        bit. The gradients are zero afterwards, and nothing has been counted.

        Returns:
            What differs, in words; empty if nothing does.
        """
        before = [(x, x.clone()) for x in self._state]
        found = []
        try:
            for _ in range(WARMUP + 1):
                self._zero()
                with torch.enable_grad():
                    logged = self.run(batch, num_microbatches)
                # Sums of the bits: copies would take as much memory as the gradients.
                sums = [p.main_grad.view(torch.int32).sum(dtype=torch.int64) for p in self._parameters]
                found.append([logged.view(torch.int32).sum(dtype=torch.int64), *sums])
        finally:
            self._zero()
            torch._foreach_copy_([x for x, _ in before], [value for _, value in before])
            for one in self._statistics:
                one.reset()
        eager, replayed = (torch.stack(sums) for sums in found[-2:])
        num_different = int((eager != replayed).sum())
        return f"{num_different} of {len(eager)} losses and gradients differ" if num_different else ""

    def _zero(self) -> None:
        for p in self._parameters:
            p.main_grad.zero_()
            p.grad_added_to_main_grad = False

    def _find_addresses(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for p in self._parameters for x in (p, p.main_grad))

    def _eager(self, batch: Batch, num_microbatches: int) -> Tensor:
        stream = side_stream()
        if stream is None:
            return self._region(batch, num_microbatches)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self._region(batch, num_microbatches)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _capture(self, batch: Batch, num_microbatches: int) -> _Captured:
        inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()}
        update(self._statistics)  # what earlier micro-batches left to add is not of the graph

        def region() -> Tensor:
            result = self._region(inputs, num_microbatches)
            update(self._statistics)
            return result

        graph = self._make()
        with recorded(self._statistics):
            logged = graph.capture(region)
        return _Captured(graph, inputs, logged, self._statistics)


class _Captured:
    def __init__(self, graph: Graph, inputs: Batch, logged: Tensor, statistics: Sequence[MoEStatistics]):
        self._graph, self._inputs, self._logged, self._statistics = graph, inputs, logged, statistics

    def run(self, batch: Batch) -> Tensor:
        for name, value in batch.items():
            if isinstance(value, Tensor):
                self._inputs[name].copy_(value, non_blocking=True)
        numbers = [one.num_microbatches + 1 for one in self._statistics]
        self._graph.replay()
        for one, number in zip(self._statistics, numbers, strict=True):
            one.num_microbatches = number
        return self._logged.clone()


def _shape(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value
