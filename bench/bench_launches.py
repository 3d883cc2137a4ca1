"""Host time of calls of tuned kernels, without a GPU: Triton's own launch against a launcher that is kept.

    python bench/bench_launches.py        # a minute, most of it to compile for a Hopper GPU

The driver does nothing, so this is what the host computes before it. Both launches in turn in one process,
by the processor time of the thread; median of the rounds.
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.activation_grad import activation_grad
from moe_exp.layers.kernels.combine import combine
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul
from moe_exp.layers.kernels.tuning import TUNED
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import weight_grad

ROUNDS, CALLS = 25, 200
TOKENS, WIDTH, FFN, EXPERTS, TOPK = 16, 64, 32, 8, 2


class Driver:
    """As much of a Hopper GPU's driver as a launch needs."""

    def __init__(self) -> None:
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *args: None

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Forgetful(dict[Any, Any]):
    """Keeps no launcher, so that every launch is Triton's own."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def calls() -> dict[str, Callable[[], Any]]:
    """Calls of a layer with few small experts: their sizes do not matter to the host."""
    rows = TOKENS * TOPK
    number = partial(torch.randint, dtype=torch.int32)
    value = partial(torch.randn, dtype=torch.bfloat16)
    x, dy, y = value(TOKENS, WIDTH), value(TOKENS, WIDTH), value(rows, WIDTH)
    w1, w2 = value(EXPERTS, 2 * FFN, WIDTH), value(EXPERTS, WIDTH, FFN)
    hidden, active, main_grad = value(rows, 2 * FFN), value(rows, FFN), torch.zeros(EXPERTS, 2 * FFN, WIDTH)
    offsets, token = torch.arange(0, rows + 1, rows // EXPERTS, dtype=torch.int32), number(TOKENS, (rows,))
    options: dict[str, Any] = {"activation": "swiglu", "token_R": token, "weights_R": torch.rand(rows)}
    row = number(rows, (TOKENS, TOPK))
    return {
        "up_projection": partial(up_projection, x, w1, offsets, **options),
        "grouped_matmul": partial(grouped_matmul, active, w2.transpose(1, 2), offsets),
        "combine": partial(combine, y, row),
        "activation_grad": partial(activation_grad, dy, w2, hidden, offsets, **options),
        "weight_grad": partial(weight_grad, hidden, x, offsets, b_index_R=token, out=main_grad, adds=True),
    }


def microseconds(call: Callable[[], Any]) -> float:
    """Processor time of one call."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - start) / CALLS / 1000


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    driver.set_active(Driver())
    launch.processors, launch.has_grouped_mm = lambda device: 132, lambda x: False
    launch.runs_kernel, launch.has_tma = lambda x: True, lambda x: True
    for kernel in TUNED.values():
        kernel._choose = lambda *_, kernel=kernel: kernel.suited({"HAS_TMA": True})[-1]
    print("| function | Triton's launch, us | launcher that is kept, us | ratio |\n|---|---|---|---|")
    for name, call in calls().items():
        kept: list[float] = []
        own: list[float] = []
        for _ in range(ROUNDS):
            for times, launchers in ((own, Forgetful), (kept, dict)):
                for kernel in TUNED.values():
                    kernel._launchers = launchers()
                call()
                times.append(microseconds(call))
        a, b = statistics.median(own), statistics.median(kept)
        print(f"| {name} | {a:.0f} | {b:.0f} | {b / a:.2f} |", flush=True)


if __name__ == "__main__":
    main()
