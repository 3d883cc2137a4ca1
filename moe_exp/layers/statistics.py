"""Statistics of one MoE layer for the log, summed over micro-batches on the device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_exp.layers.losses import entropy_sum
from moe_exp.layers.router import RoutingDecision, tokens_in_group

# Sums kept by every layer. Over tokens: dropped slots, entropy and largest router weight. Over micro-batches:
# slots of the busiest expert relative to the mean, and load-balancing loss and z-loss without coefficients.
STATISTICS = ("dropped", "entropy", "top1_weight", "max_over_mean", "load_balancing_loss", "z_loss", "tokens")


def statistics_names(losses: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a layer's statistics, in order. `losses`: names of its balancing losses."""
    return *STATISTICS, *(f"aux_losses.{name}" for name in losses)


class MoEStatistics:
    """Statistics of one layer on this rank: sums over tokens, and this rank's share of each loss.

    The sums are read and reset once per log interval. `losses`: names of the balancing losses.
    """

    def __init__(self, num_experts: int, losses: Sequence[str], device: torch.device):
        self.names = statistics_names(losses)
        self._tokens_per_expert_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        # Micro-batches not yet added to the sums: slots per expert, and values by name.
        self._pending: list[tuple[Tensor, dict[str, Tensor | int]]] = []
        self.num_microbatches = 0

    @property
    def tokens_per_expert_E(self) -> Tensor:
        """Number of slots (token-expert pairs) of each expert, int64."""
        update([self])
        return self._tokens_per_expert_E

    @property
    def sums(self) -> Tensor:
        """Sums in the order of `names`, fp64."""
        update([self])
        return self._sums

    @torch.no_grad()
    def add(
        self, decision: RoutingDecision, scores: Tensor, *, load_balancing_loss: Tensor, z_loss: Tensor,
        aux_losses: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Records a micro-batch. `scores`: see `RoutingDecision.for_losses`. The losses exclude coefficients.

        Raises:
            RuntimeError: if a CUDA graph is captured outside `recorded`: its replays would not be counted.
        """
        if not _is_recorded and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            rule = "the replays of a CUDA graph that contains the MoE layer are not counted"
            fix = "capture it with moe_exp.engine.graphs, or set CUDA_GRAPH=off"
            raise RuntimeError(f"MoEStatistics.add: {rule}. Fix: {fix}.")
        counts_E = decision.tokens_per_expert_E[: self._tokens_per_expert_E.numel()]  # no null experts
        kept_TK = decision.kept_TK
        if decision.sums is not None:
            entropy, top1 = decision.sums.entropy, decision.sums.largest
        else:
            top1_T = decision.weights_TK.amax(dim=1)
            top1 = (top1_T if decision.valid_T is None else top1_T * decision.valid_T).sum()
            entropy = entropy_sum(scores)
        values = {
            "tokens": tokens_in_group(decision, None),
            "dropped": 0 if kept_TK is None else counts_E.sum() - kept_TK.sum(),
            "entropy": entropy,
            "top1_weight": top1,
            "load_balancing_loss": load_balancing_loss.detach(),
            "z_loss": z_loss.detach(),
            **{f"aux_losses.{name}": share.detach() for name, share in aux_losses.items()},
        }
        self._pending.append((counts_E, values))
        self.num_microbatches += 1
        if torch.compiler.is_compiling() or len(self._pending) == _MOST_PENDING:
            update([self])

    def to(self, device: torch.device) -> None:
        """Moves the sums to a device. Sums on the meta device have no values and become zero."""
        if self._sums.device != device:
            update([self])
            for name in ("_tokens_per_expert_E", "_sums"):
                old = getattr(self, name)
                setattr(self, name, torch.zeros_like(old, device=device) if old.is_meta else old.to(device))

    def reset(self) -> None:
        self._pending.clear()
        self._tokens_per_expert_E.zero_()
        self._sums.zero_()
        self.num_microbatches = 0


_MOST_PENDING = 64  # micro-batches; bounds the memory if nobody reads the sums
_is_recorded = False


@contextmanager
def recorded(layers: Sequence[MoEStatistics]) -> Iterator[None]:
    """Context for capturing a CUDA graph whose last call is `update`; the capture records no statistics."""
    global _is_recorded
    numbers, _is_recorded = [layer.num_microbatches for layer in layers], True
    try:
        yield
    finally:
        _is_recorded = False
        for layer, number in zip(layers, numbers, strict=True):
            layer.num_microbatches = number
            layer._pending.clear()  # of a capture that failed


@torch.no_grad()
def update(layers: Sequence[MoEStatistics]) -> None:
    """Adds each layer's pending micro-batches to its sums."""
    # About twenty operations for all layers together: on a GPU, launching such small operations dominates.
    numbers = {len(layer._pending) for layer in layers}
    if len(numbers) > 1:
        for layer in layers:
            update([layer])
        return
    if not any(numbers):
        return
    pending = [microbatch for layer in layers for microbatch in layer._pending]
    counts_ME = torch.stack([counts_E for counts_E, _ in pending])
    busiest_M = counts_ME.amax(dim=1) * counts_ME.size(1) / counts_ME.sum(dim=1).clamp(min=1)
    columns = {"max_over_mean": busiest_M}
    for name in pending[0][1]:
        found = [values[name] for _, values in pending]
        first = found[0]
        if not isinstance(first, Tensor) and set(found) == {first}:
            # Copying an int to a GPU would wait for all queued work.
            columns[name] = torch.full_like(busiest_M, first)
        else:
            tensors = (x if isinstance(x, Tensor) else busiest_M.new_full((), x) for x in found)
            columns[name] = torch.stack(list(tensors))
    rows_MN = torch.stack([columns[name].double() for name in layers[0].names], dim=1)
    for sums, added in (
        ([layer._tokens_per_expert_E for layer in layers], counts_ME),
        ([layer._sums for layer in layers], rows_MN),
    ):
        torch._foreach_add_(sums, list(added.unflatten(0, (len(layers), -1)).sum(dim=1).unbind()))
    for layer in layers:
        layer._pending.clear()
