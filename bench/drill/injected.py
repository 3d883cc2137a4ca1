"""Faults of bench/drill/fault_drill.py inside a rank: bad samples, and slow or wrong arithmetic of a process
that a control file names. sitecustomize loads this; the package knows nothing of it.
"""

import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

import torch

# Samples that have a NaN, whoever trains on them: a fault of the data, which is there in the undisturbed run,
# too.
BAD_SAMPLES = (997, 2205)
CONTROL = "fault.json"  # {"kind": ..., "pid": of the process}, in the drill's folder while the fault lasts
_BIT = 1 << 21  # of a mantissa of 23


class Injected:
    """Hooks of this process, which are there in every run, so that all pay for them."""

    def __init__(self, folder: Path):
        self._control = folder / CONTROL
        self._spoilt: list[int] = []
        self._usual: deque[float] = deque(maxlen=40)  # own seconds from one forward pass to the next
        self._last, self._num_passes, self._cell = 0.0, 0, 0

    def install(self) -> None:
        """Wraps the reading of samples, and hooks modules of the model as it is built."""
        from moe_exp.data.samples import dataset

        read, split = dataset.SampleStream.batch, dataset.split_batch

        def noted(stream: Any, first: int, num_samples: int) -> Any:
            self._spoilt = [sample for sample in BAD_SAMPLES if first <= sample < first + num_samples]
            if self._kind() == "slow disk":
                time.sleep(self._quarter())
            return read(stream, first, num_samples)

        def spoilt(*given: Any) -> Any:
            parts = split(*given)
            if self._spoilt:
                parts["loss_mask"][0, 0] = float("nan")
            return parts

        dataset.SampleStream.batch, dataset.split_batch = noted, spoilt  # type: ignore
        hooks = {"self_attention": self._flip, "module": self._slow}  # a layer's, DistributedDataParallel's

        def add_hook(parent: object, name: str, module: Any) -> None:
            if hook := hooks.pop(name, None):  # of the first
                module.register_forward_hook(hook)

        torch.nn.modules.module.register_module_module_registration_hook(add_hook)

    def _kind(self) -> str:
        """Of this process's fault; empty without one."""
        if not self._control.exists():
            return ""
        fault = json.loads(self._control.read_text())
        return str(fault["kind"]) if fault["pid"] == os.getpid() else ""

    def _now(self) -> float:
        """Seconds without waits for other ranks, as the package counts them."""
        return time.perf_counter() - float(sys.modules["moe_exp.training.interval"]._seconds_waited)

    def _quarter(self) -> float:
        return median(self._usual) / 4 if self._usual else 0.0

    def _slow(self, *_: object) -> None:
        kind, now = self._kind(), self._now()
        if not kind:
            self._usual.append(now - self._last)
        while kind == "slow" and self._now() < now + self._quarter():
            pass
        self._last = self._now()

    def _flip(self, module: Any, given: object, output: Any) -> None:
        weight, values = module.linear_proj.weight.data, output[0]
        self._num_passes += 1
        kind = self._kind()
        if kind == "activation":
            self._flip_one(values.data)
        elif kind == "gradient":
            values.register_hook(lambda grad: self._flip_one(grad.clone()))
        elif kind == "weight":
            # the same memory is wrong again when the gather after a step has written to it
            cell = weight.view(-1)[:1].view(torch.int32)
            if int(cell) != self._cell:
                cell ^= _BIT
            self._cell = int(cell)

    def _flip_one(self, values: Any) -> Any:
        # Another place each time, so that a repetition finds it; a wrong weight is the same in a repetition.
        place = 997 * self._num_passes % values.numel()
        values.view(-1).view(torch.int32)[place] ^= _BIT
        return values
