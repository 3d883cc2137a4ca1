"""AdamW on the host, with main weights and moments in host memory (OFFLOAD_OPTIMIZER).

As in ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840), the device keeps only bf16 weights and gradients. A
step processes the parameters in buckets. While the host updates a bucket, the device sends the gradients of
the next bucket and receives the weights of the previous bucket. In the diagram, g1, u1 and w1 are the
gradients, the update and the weights of bucket 1:

    device to host    g1   g2   g3   ...
    host                   u1   u2   u3   ...
    host to device              w1   w2   w3   ...

The copies (4 bytes of gradients and 2 bytes of weights per parameter) pass through page-locked buffers: two
for gradients, two for weights. Main weights and moments stay on the host and are not page-locked, because
page-locking could double their memory: PyTorch rounds the size of page-locked memory up to a power of two.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from moe_exp.engine.optimizer_classes import Adam

BUCKET = 1 << 26  # values; 256 MiB of gradients take a link of 25 GB/s about 10 ms

# values of a bucket: parameter, their places in the parameter, and in the buffers
_Piece = tuple[Tensor, slice, slice]


class _Staging:
    """Host buffers for the gradients and weights of a bucket, and events that mark the end of copies."""

    def __init__(self, size: int, device: torch.device):
        module, is_pinned = torch.get_device_module(device), device.type == "cuda"
        self.grads = torch.empty(size, pin_memory=is_pinned)
        self.weights = torch.empty(size, dtype=torch.bfloat16, pin_memory=is_pinned)
        self.fetched, self.sent = module.Event(), module.Event()


class OffloadedAdam(Adam):
    """Adam for bf16 weights; keeps their fp32 main weights and moments in host memory.

    After `join`, a parameter holds its main weights on the host, so that saving takes no device memory.
    """

    _staging: tuple[_Staging, ...] = ()

    def allocate(self, p: Tensor, group: Mapping[str, Any]) -> None:
        if not self.state[p] and p in self.weights:
            # as Megatron would, but `_megatron_builds` keeps it from allocating main weights
            p.data = self.weights[p].to("cpu", torch.float32)
        super().allocate(p, group)

    def join(self, p: Tensor) -> None:
        if p in self.stored:
            p.data = self.stored.pop(p)

    def split(self, p: Tensor) -> None:
        if p not in self.stored:
            self.stored[p], weight = p.data, self.weights[p]
            weight.copy_(p.bfloat16())
            p.data = weight.new_full((), math.nan, dtype=p.dtype).expand_as(p)

    def update_stored(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        if not params:
            return
        device, size = params[0].device, min(BUCKET, sum(p.numel() for p in self.weights))
        module = torch.get_device_module(device)
        if not self._staging:
            self._staging, self._copies = (_Staging(size, device), _Staging(size, device)), module.Stream()

        def fetch(bucket: Iterable[_Piece], staging: _Staging) -> None:
            with module.stream(self._copies):
                for p, values, place in bucket:
                    assert p.grad is not None
                    staging.grads[place].copy_(p.grad.view(-1)[values], non_blocking=True)
                staging.fetched.record()

        self._copies.wait_stream(module.current_stream())  # gradients may still be clipped
        buckets = list(_buckets(params, size))
        ours, theirs = self._staging
        fetch(buckets[0], ours)
        for bucket, following in zip_longest(buckets, buckets[1:], fillvalue=()):
            fetch(following, theirs)  # into a buffer that the host has read
            ours.fetched.synchronize()
            self._update_bucket(group, bucket, ours)
            ours, theirs = theirs, ours

    def _update_bucket(self, group: dict[str, Any], bucket: Iterable[_Piece], staging: _Staging) -> None:
        pieces = []
        for p, values, place in bucket:
            piece = self.stored[p].view(-1)[values]
            piece.grad = staging.grads[place]
            self.state[piece] = {name: value.view(-1)[values] for name, value in self.state[p].items()}
            pieces.append(piece)
        self._update(group, pieces)
        staging.sent.synchronize()  # the weights that were in the buffer
        for piece, (p, values, place) in zip(pieces, bucket, strict=True):
            del self.state[piece]
            staging.weights[place].copy_(piece)
            self.weights[p].view(-1)[values].copy_(staging.weights[place], non_blocking=True)
        staging.sent.record()


def _buckets(params: Iterable[Tensor], size: int) -> Iterator[list[_Piece]]:
    """Splits the values of `params`, in order, into buckets of at most `size` values."""
    bucket: list[_Piece] = []
    filled = 0
    for p in params:
        start = 0
        while start < p.numel():
            count = min(p.numel() - start, size - filled)
            if start + count < p.numel():
                # AdamW rounds values that do not fill a vector register differently.
                count -= count % 64
            bucket.append((p, slice(start, start + count), slice(filled, filled + count)))
            start, filled = start + count, filled + count
            if start < p.numel():
                yield bucket
                bucket, filled = [], 0
    if bucket:
        yield bucket
