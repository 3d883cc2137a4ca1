"""Streams of a device, simulated: copies happen as late as a device may do them, or at once."""

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Stream:
    """Copies in their order. `is_late`: a copy runs when the host waits for it, as late as a device may."""

    def __init__(self, is_late: bool = False):
        self.is_late, self.queue, self.num_done = is_late, [], 0

    def add(self, work: Callable[[], Any]) -> None:
        self.queue.append(work)
        if not self.is_late:
            self.finish(len(self.queue))

    def finish(self, count: int) -> None:
        while self.num_done < count:
            self.num_done += 1
            self.queue[self.num_done - 1]()

    def wait_stream(self, other: "Stream") -> None:
        self.add(partial(other.finish, len(other.queue)))

    def wait_event(self, event: Any) -> None:
        self.add(partial(event.stream.finish, event.count))

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(stream=self, count=len(self.queue))


class Device:
    """In place of torch.cuda: two streams, of which either may be late, and a log of what the host does.

    Copies with `non_blocking` go through the current stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: tuple[bool, bool]):
        copy = torch.Tensor.copy_

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return copy(target, source)
            self.now.add(lambda: copy(target, source))
            return target

        monkeypatch.setattr(torch, "get_device_module", lambda _: self)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        self.log: list[str] = []
        self.now, self._late, self._events = Stream(late[0]), late[1], itertools.count()
        device = self

        class Event:
            def __init__(self):
                # two buffers, each with an event on gradients and one on weights
                buffer, is_sent = divmod(next(device._events), 2)
                self.name, self.stream, self.count = f"{('fetch', 'send')[is_sent]} {buffer}", device.now, 0

            def record(self) -> None:
                self.stream, self.count = device.now, len(device.now.queue)
                device.log.append(self.name)

            def synchronize(self) -> None:
                device.log.append(f"wait for {self.name}")
                self.stream.finish(self.count)

        self.Event = Event

    def Stream(self) -> Stream:
        return Stream(self._late)

    def current_stream(self) -> Stream:
        return self.now

    def stream(self, stream: Stream) -> Any:
        before = self.now
        device = self

        class Block:
            def __enter__(self):
                device.now = stream

            def __exit__(self, *_):
                device.now = before

        return Block()
