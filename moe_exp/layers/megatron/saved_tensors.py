"""Recomputes the results of norms in backward instead of keeping them (RECOMPUTE_MODULES=norm).

The layers after a norm save its result, which is as large as the hidden state that the norm itself saves.
Saved-tensor hooks replace the result by a handle; the first layer that needs it in backward computes it again
for all of them. Unlike Megatron's recomputation of norms, this reads no random state, so it works in CUDA
graphs, and it does not depend on which layer runs first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_NORMS = (nn.RMSNorm, nn.LayerNorm)


class _Result:
    """The result of a norm. `x` returns the input of the norm."""

    def __init__(self, norm: nn.Module, x: Callable[[], Tensor], result: Tensor):
        self._norm, self._x = norm, x
        self._again: Tensor | None = None
        # While this reference exists, no other storage has the same `cdata`.
        self.storage = StorageWeakRef(result.untyped_storage())

    def again(self) -> Tensor:
        if self._again is None:
            with torch.no_grad():
                self._again = self._norm.forward(self._x())  # without hooks
        return self._again


class _Handle(NamedTuple):
    """A saved view of a result."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _as_is(x: Any) -> Any:
    return x


class ChunkHooks(ABC):
    """Saved-tensor hooks during the forward pass of a model chunk.

    torch calls only the innermost hooks, so `_pack` and `_unpack` pass the tensors of others on to the hooks
    around them, with `_pack_others` and `_unpack_others`.
    """

    def __init__(self, chunk: Any):  # of GPTModel
        self._pack_others: Callable[[Tensor], Any] = _as_is
        self._unpack_others: Callable[[Any], Tensor] = _as_is
        self._chunk_forward, chunk.forward = chunk.forward, self._forward

    @abstractmethod
    def _pack(self, x: Tensor) -> Any:
        """Object that autograd stores in place of a saved tensor."""

    @abstractmethod
    def _unpack(self, saved: Any) -> Tensor:
        """The saved tensor from the result of `_pack`."""

    def _forward(self, *args: Any, **options: Any) -> Any:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._pack_others, self._unpack_others = outer or (_as_is, _as_is)
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._chunk_forward(*args, **options)


class NormRecompute(ChunkHooks):
    """Makes the norms in the transformer layers of a model chunk recompute their results in backward."""

    def __init__(self, chunk: Any):  # of GPTModel
        super().__init__(chunk)
        self._results: dict[int, _Result] | None = None  # of one forward pass, by storage
        for module in chunk.decoder.layers.modules():
            if isinstance(module, _NORMS):
                module.register_forward_hook(self._remember)

    def _remember(self, norm: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        if self._results is not None and torch.is_grad_enabled():  # not computed again in backward
            packed, unpack = self._pack_others(args[0].detach()), self._unpack_others
            found = _Result(norm, lambda: unpack(packed), result)
            self._results[found.storage.cdata] = found

    def _forward(self, *args: Any, **options: Any) -> Any:
        self._results = {}
        try:
            return super()._forward(*args, **options)
        finally:
            self._results = None

    def _pack(self, x: Tensor) -> Any:
        assert self._results is not None
        found = self._results.get(x.untyped_storage()._cdata)
        if found is None:
            return self._pack_others(x)
        return _Handle(found, x.size(), x.stride(), x.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Handle):
            return self._unpack_others(saved)
        return saved.result.again().as_strided(saved.size, saved.stride, saved.offset)
