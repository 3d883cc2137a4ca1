"""Saved-tensor hooks that recompute norms (RECOMPUTE_MODULES=norm) or offload activations (OFFLOAD_MODULES).

The hooks replace the tensors that a model chunk's modules save for backward.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_NORMS = (nn.RMSNorm, nn.LayerNorm)
SMALLEST = 1 << 20  # bytes; smaller storages stay on the device


def _as_is(x: Any) -> Any:
    return x


class ChunkHooks(ABC):
    """Saved-tensor hooks during the forward pass of a model chunk.

    torch calls only the innermost hooks. If `_pack` or `_unpack` does not handle a tensor, it
    therefore calls the outer hook, `_pack_others` or `_unpack_others`.
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
        """Restores the saved tensor from the result of `_pack`."""

    def _forward(self, *args: Any, **options: Any) -> Any:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._pack_others, self._unpack_others = outer or (_as_is, _as_is)
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._chunk_forward(*args, **options)


class _Result:
    """The result of a norm; `x` is a function that returns the norm's input."""

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
    """Replaces a saved view of a norm's result."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class NormRecompute(ChunkHooks):
    """Makes the norms in a model chunk's transformer layers recompute their results in backward.

    A norm saves its input. The layers after the norm save its result, which takes as much memory. A handle
    replaces the saved result; the first layer that needs the result in backward recomputes it, and the other
    layers reuse it. Unlike Megatron's recomputation of norms, this class does not depend on the order of
    the layers in backward. It also reads no random state and therefore works in CUDA graphs.
    """

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


class _Saved:
    """A storage saved by a module, kept as bytes on the device, the host or both."""

    def __init__(self, group: "_Group", storage: UntypedStorage):
        self.group = group
        self.on_device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.on_host: Tensor | None = None


class _View(NamedTuple):
    """View of a saved storage. Autograd holds it in place of a tensor until backward has used it."""

    saved: _Saved
    dtype: torch.dtype
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]


class _Group:
    """The storages that a module saves in a forward pass. Group and storages are freed after backward.

    `copies`: stream for the copies. `previous`: group of the previous module.
    """

    def __init__(self, device: torch.device, copies: Any, previous: "_Group | None"):
        self._device, self._copies = device, copies
        self._streams = torch.get_device_module(device)
        self._previous = weakref.ref(previous) if previous else None
        self.storages: list[weakref.ref[_Saved]] = []
        self._state = "on the device"
        self._copied: Any = None  # event after the last copies

    def add(self, storage: UntypedStorage) -> _Saved:
        saved = _Saved(self, storage)
        self.storages.append(weakref.ref(saved))
        return saved

    def _alive(self) -> Iterator[_Saved]:
        return filter(None, [reference() for reference in self.storages])

    def send(self) -> None:
        """Starts the copies to the host."""

        def copy(saved: _Saved, device: Tensor) -> None:
            # PyTorch caches page-locked memory, and waits for its copies before it uses the memory again.
            saved.on_host = torch.empty_like(device, device="cpu", pin_memory=self._device.type == "cuda")
            saved.on_host.copy_(device, non_blocking=True)

        self._copy(copy)

    def free(self) -> None:
        """Frees the device memory; kernels may reuse it after the copies to the host."""
        self._streams.current_stream().wait_event(self._copied)
        for saved in self._alive():
            saved.on_device = None
        self._state = "on the host"

    def fetch(self) -> None:
        """Starts the copies to the device if the group is on the host."""
        if self._state != "on the host":
            return
        for saved in self._alive():
            assert saved.on_host is not None
            saved.on_device = torch.empty_like(saved.on_host, device=self._device, pin_memory=False)
            if self._device.type == "cuda":  # the memory must outlive the copy, even if backward stops
                saved.on_device.record_stream(self._copies)

        def copy(saved: _Saved, device: Tensor) -> None:
            assert saved.on_host is not None
            device.copy_(saved.on_host, non_blocking=True)

        self._copy(copy)
        self._state = "returning"

    def arrive(self) -> None:
        """Makes the current stream wait until the group is on the device; then fetches the previous group."""
        self.fetch()
        if self._state == "returning":
            self._streams.current_stream().wait_event(self._copied)
            self._state = "on the device"
        previous, self._previous = self._previous and self._previous(), None
        if previous:
            previous.fetch()

    def _copy(self, copy: Callable[[_Saved, Tensor], Any]) -> None:
        self._copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copies):
            for saved in self._alive():
                assert saved.on_device is not None
                copy(saved, saved.on_device)
            self._copied = self._copies.record_event()


class ActivationOffload(ChunkHooks):
    """Offloads some modules' saved tensors to host memory, in the transformer layers of a model chunk.

    The copies run on a separate stream. While a module computes in forward, the previous module's
    tensors are copied to the host. While a module computes in backward, the tensors of the next module (in
    backward order) are copied back:

        forward      attention 1   experts 1     attention 2   experts 2
        to host                    attention 1   experts 1     attention 2
        backward     experts 2     attention 2   experts 1     attention 1
        to device    attention 2   experts 1     attention 1

    The device thus holds the tensors of two modules. The last module's tensors stay on the device until the
    model chunk starts its next forward pass. If backward comes first, these tensors need not be copied back.

    `modules`: names of OFFLOAD_MODULES. A storage is offloaded only if one of these modules is the first to
    save it. If another module saves the storage first, that module keeps it on the device anyway.
    """

    def __init__(self, chunk: Any, modules: Collection[str]):  # of GPTModel
        super().__init__(chunk)
        self._parameters = list(chunk.parameters())
        self._copies: Any = None  # stream
        self._group: _Group | None = None  # of the module that runs now
        self._latest: weakref.ref[_Group] | None = None
        self._seen: dict[int, tuple[StorageWeakRef, _Saved | None]] | None = None  # of one forward pass
        for layer in chunk.decoder.layers:
            experts = getattr(layer.mlp, "experts", None)
            found = {
                "attention": layer.self_attention, "mlp": layer.mlp if experts is None else None,
                "experts": experts, "shared_expert": getattr(layer.mlp, "shared_experts", None),
            }  # fmt: skip
            for module in filter(None, map(found.get, modules)):
                module.register_forward_pre_hook(self._start)
                module.register_forward_hook(self._end)

    def _start(self, *_: Any) -> None:
        if self._seen is not None:  # not computed again in backward
            self._group = _Group(self._parameters[0].device, self._copies, self._latest_group())

    def _end(self, *_: Any) -> None:
        group, self._group = self._group, None
        if group and group.storages:
            group.send()
            if latest := self._latest_group():
                latest.free()
            self._latest = weakref.ref(group)

    def _latest_group(self) -> _Group | None:
        return self._latest() if self._latest else None

    def _forward(self, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._chunk_forward(*args, **options)
        if self._copies is None:
            self._copies = torch.get_device_module(self._parameters[0].device).Stream()
        if latest := self._latest_group():
            latest.free()
        weights = [StorageWeakRef(weight.untyped_storage()) for weight in self._parameters]
        self._seen = {weight.cdata: (weight, None) for weight in weights}
        try:
            return super()._forward(*args, **options)
        finally:
            self._seen = self._group = None

    def _pack(self, x: Tensor) -> Any:
        assert self._seen is not None
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            moves = self._group and storage.nbytes() >= SMALLEST and x.device == self._parameters[0].device
            saved = self._group.add(storage) if self._group and moves else None
            # While the weak reference exists, no other storage has the same `cdata`.
            self._seen[storage._cdata] = StorageWeakRef(storage), saved
        _, saved = self._seen[storage._cdata]
        if saved is None or saved.group is not (self._group or self._latest_group()):
            return self._pack_others(x)  # others hold it, too
        return _View(saved, x.dtype, x.storage_offset(), x.size(), x.stride())

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _View):
            return self._unpack_others(saved)
        saved.saved.group.arrive()
        assert saved.saved.on_device is not None
        storage = saved.saved.on_device.untyped_storage()
        x = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return x.set_(storage, saved.offset, saved.size, saved.stride)
