"""With a CUDA graph (CUDA_GRAPH), the host starts a micro-batch's forward and backward pass in one launch.

Megatron's schedule is unchanged. The forward step replays a graph that also contains the backward pass.
The returned loss requires no gradient, so the schedule runs no backward pass:

    schedule: for each micro-batch   copy it to the graph's inputs -> replay -> loss for the log
              after the last one     gradient exchange, as without graphs

Gradient exchange, optimizer and log stay outside the graph. The tensors shared with the graph (parameters,
gradients, router state, sums of the statistics) keep their addresses.

There is one graph per key, which consists of the shapes of the inputs, the number of micro-batches, and
whether kernels overwrite gradients or add to them. The first WARMUP micro-batches of a key run eagerly. After
that, a graph is captured (capturing executes nothing) and replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_exp.config import Config
from moe_exp.layers.experts.grouped_gemm import BY_SPLITS
from moe_exp.layers.kernels.launch import in_one_line
from moe_exp.layers.statistics import MoEStatistics, recorded, update

logger = logging.getLogger(__name__)

WARMUP = 2  # eager micro-batches of each key, which compile kernels and allocate workspaces
Batch = dict[str, Any]


class CudaGraph:
    """A CUDA graph captured by PyTorch. A process runs its graphs one at a time; they share a memory pool."""

    _pool: Any = None

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, region: Callable[[], Tensor]) -> Tensor:
        """Records the operations of `region` without executing them; `replay` fills the returned tensor."""
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream()
        # thread_local: NCCL's watchdog and the data loader may call CUDA during the capture
        options: dict[str, Any] = {"pool": CudaGraph._pool, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(self._graph, stream=side_stream(), **options):
                return region()
        except BaseException:
            # torch leaves its stream current and its pool in use
            torch.cuda.set_stream(before)
            CudaGraph._pool = None
            raise

    def replay(self) -> None:
        self._graph.replay()


@cache
def side_stream() -> torch.cuda.Stream:
    """Stream used for captures and warm-up."""
    return torch.cuda.Stream()


@contextmanager
def on_side_stream() -> Iterator[None]:
    """Runs the block on `side_stream`, after all earlier and before all later work; no effect without CUDA.

    Autograd accumulates gradients on the stream on which DDP was created. A capture must not wait for another
    stream. So DDP, warm-up and captures all use `side_stream`.
    """
    if not torch.cuda.is_available():
        yield
        return
    side_stream().wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side_stream()):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(side_stream())


def choose_graph(
    config: Config, *, device_type: str, expert_backend: str = "", has_te: bool = False,
    overlaps: bool = False, failure: str = "",
) -> tuple[str, str]:  # fmt: skip
    """Decides whether micro-batches run as CUDA graphs; returns `on` or `off`, and the reason.

    Args:
        expert_backend: the expert backend in use; "" in a dense model.
        has_te: whether Transformer Engine's layers are used.
        overlaps: whether gradients would be exchanged during the backward pass if no graphs were used.
        failure: the error that `training.microbatch.start_graphs` returned, or "".
    """
    if config.cuda_graph == "off":
        return "off", "requested by CUDA_GRAPH"
    has_splits = expert_backend in BY_SPLITS and not config.has_static_rows
    reasons = {
        "requires a GPU": device_type != "cuda",
        config.graph_problem: bool(config.graph_problem),
        f"EXPERT_BACKEND={expert_backend} needs the rows per expert on the host": has_splits,
        "not supported by Transformer Engine's layers; IMPL=local allows it": has_te,
        "the gradient exchange overlaps with the backward pass; OVERLAP=false or CUDA_GRAPH=on allows graphs":
        overlaps and config.cuda_graph == "auto",
        failure: bool(failure),
    }  # fmt: skip
    found = next((reason for reason, applies in reasons.items() if applies), "")
    return ("off", found) if found else ("on", "forward and backward of a micro-batch are one launch")


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of each tensor's bit patterns, to compare tensors without copies. int64 [number of tensors]."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.stack([x.view(bits[x.element_size()]).sum(dtype=torch.int64) for x in tensors])


class MicrobatchGraphs:
    """CUDA graphs of this rank's micro-batches.

    Args:
        region: takes a micro-batch and the number of micro-batches, runs the forward and backward pass, and
            returns the tensor to log.
        parameters: trained parameters. If a parameter or gradient changes address, all graphs are recaptured.
        statistics: statistics of the MoE layers.
        state: other tensors that a micro-batch changes, such as the routers' counters.
        graph: creates a CudaGraph; in tests, an object with the same methods.
    """

    def __init__(
        self, region: Callable[[Batch, int], Tensor], parameters: Iterable[torch.nn.Parameter],
        statistics: Iterable[MoEStatistics], state: Iterable[Tensor], graph: Callable[[], CudaGraph],
    ):  # fmt: skip
        self._region, self._make = region, graph
        self._parameters: list[Any] = list(parameters)  # with Megatron's main_grad
        self._statistics, self._state = list(statistics), list(state)
        self._captured: dict[Any, _Captured] = {}
        self._num_run: dict[Any, int] = {}
        self._flags_after: dict[Any, tuple[bool, ...]] = {}  # a micro-batch
        self._failures: dict[Any, str] = {}  # reason by key; these micro-batches run eagerly
        self._addresses: tuple[int, ...] = ()

    def run(self, batch: Batch, num_microbatches: int) -> Tensor:
        """Runs `region` on one of `num_microbatches` micro-batches; returns a copy of the tensor to log."""
        tensors = {name: x for name, x in sorted(batch.items()) if isinstance(x, Tensor)}
        shapes = tuple((name, x.shape, x.dtype) for name, x in tensors.items())
        key = num_microbatches, shapes, self._flags()
        addresses = tuple(x.data_ptr() for p in self._parameters for x in (p, p.main_grad))
        if addresses != self._addresses:
            self._captured.clear()
            self._addresses = addresses
        if key not in self._captured:
            number = self._num_run[key] = self._num_run.get(key, 0) + 1
            # A rank whose capture fails makes the same exchanges eagerly as other ranks in their graphs.
            if number <= WARMUP or key in self._failures or not self._capture(key, batch, num_microbatches):
                with on_side_stream():
                    result = self._region(batch, num_microbatches)
                    update(self._statistics)
                self._flags_after[key] = self._flags()
                return result
        result = self._captured[key].run(batch)
        self._set_flags(self._flags_after[key])
        return result

    @torch.no_grad()
    def check(self, batch: Batch, num_microbatches: int) -> str:
        """Compares a replayed micro-batch with an eager one before training; returns an error or "".

        Loss and gradients must be equal bit for bit. For a tensor that differs between two eager runs (on
        some GPUs, attention has no fixed summation order), it is enough that the norms agree within 0.1%.
        The check resets the gradients and the statistics, and restores `state`.
        """
        before, found = [(x, x.clone()) for x in self._state], []
        try:
            for _ in range(WARMUP + 1):
                self._zero()
                with torch.enable_grad():
                    for _ in range(min(2, num_microbatches)):  # the second one adds to the gradients
                        logged = self.run(batch, num_microbatches)
                results = [logged, *(p.main_grad for p in self._parameters)]
                found.append((bit_sums(results), torch.stack(torch._foreach_norm(results))))
        finally:
            self._zero()
            for x, value in before:
                x.copy_(value)
            for one in self._statistics:
                one.reset()
        if self._failures:
            return next(iter(self._failures.values()))
        (first, _), (eager, norms), (replayed, replayed_norms) = found
        is_close = torch.isclose(norms, replayed_norms, rtol=1e-3)
        is_equal = torch.where(first == eager, eager == replayed, is_close)
        if not (number := int((~is_equal).sum())):
            return ""
        return f"{number} of {len(eager)} losses and gradients differ from those without a graph"

    def _flags(self) -> tuple[bool, ...]:
        """One flag per parameter: whether a kernel has added to its `main_grad` in this iteration."""
        return tuple(getattr(p, "grad_added_to_main_grad", False) for p in self._parameters)

    def _set_flags(self, flags: Iterable[bool]) -> None:
        for p, flag in zip(self._parameters, flags, strict=True):
            p.grad_added_to_main_grad = flag

    def _zero(self) -> None:
        self._set_flags([False] * len(self._parameters))
        for p in self._parameters:
            p.main_grad.zero_()

    def _capture(self, key: Any, batch: Batch, num_microbatches: int) -> bool:
        inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()}
        update(self._statistics)  # so that the graph does not add pending micro-batches, too

        def region() -> Tensor:
            result = self._region(inputs, num_microbatches)
            update(self._statistics)
            return result

        graph, flags = self._make(), self._flags()
        try:
            with recorded(self._statistics):
                logged = graph.capture(region)
        except RuntimeError as error:  # out of memory, too
            reason = self._failures[key] = in_one_line(error)
            logger.warning("a micro-batch cannot be a CUDA graph and runs eagerly: %s", reason)
            self._set_flags(flags)
            return False
        self._captured[key] = _Captured(graph, inputs, logged, self._statistics)
        return True


class _Captured:
    def __init__(self, graph: CudaGraph, inputs: Batch, logged: Tensor, statistics: Sequence[MoEStatistics]):
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
