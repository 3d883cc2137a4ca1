"""Shapes of `bench_gpu_layer.py`, and the least time and memory that they can take on a card. No GPU needed.

    python bench/gpu/bench_gpu_layer.py --floors            # the tables

Shape suffixes as in `moe_exp.layers`: T tokens, D hidden, F expert hidden, E experts, K experts per token, R
= T*K rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moe_exp.planner.hardware import load_hardware

MIB = 2**20


class Shape(NamedTuple):
    """One layer of SwiGLU experts."""

    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int
    model: str
    # the tokens are rows that come from other ranks, sorted by expert; nothing is permuted
    arrives: bool = False

    @property
    def rows(self) -> int:
        return self.tokens * self.topk


SHAPES = {
    "A": Shape(512, 1792, 64, 1, 16384, "the reference runs"),
    "B": Shape(2048, 1024, 64, 8, 32768, "OLMoE"),
    "C": Shape(4096, 14336, 8, 2, 8192, "Mixtral"),
    "D": Shape(2048, 768, 128, 8, 16384, "Qwen3-30B-A3B"),
    "E": Shape(7168, 2048, 8, 1, 16384, "DeepSeek-V3, 8 of 256 experts", arrives=True),
    "F": Shape(1536, 256, 128, 8, 24576, "SonicMoE's 7B"),
    "G": Shape(4096, 512, 128, 8, 32768, "SonicMoE's 30B"),
}
TINY = {
    "tiny": Shape(64, 48, 8, 2, 96, "for a CPU"),
    "tiny-rows": Shape(64, 48, 4, 1, 96, "for a CPU, rows that arrive", arrives=True),
}


class Card(NamedTuple):
    """What a card was measured to do: a large bf16 matrix product, and a copy counting bytes read and
    written.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float


H200 = Card("H200", 790e12, 4.3e12)
DEVICES = ("H200", "A100", "B200")  # of the planner's profiles


class Floor(NamedTuple):
    """The least that a forward and a backward take, in milliseconds, and the activations that a layer keeps
    in between, in bytes.
    """

    forward_ms: float
    backward_ms: float
    forward_by: str
    backward_by: str
    naive_bytes: int
    minimal_bytes: int


def forward_flops(shape: Shape) -> int:
    """Of gate, up and down projection over all rows; a backward has twice as many."""
    return 2 * shape.rows * shape.hidden * 3 * shape.ffn


def weight_bytes(shape: Shape, itemsize: int = 2) -> int:
    """Of all experts."""
    return shape.experts * 3 * shape.ffn * shape.hidden * itemsize


def forward_bytes(shape: Shape, itemsize: int = 2) -> int:
    """Weights and tokens read once, output and pre-activation written once: what a backward cannot do
    without.
    """
    tokens, hidden = shape.tokens * shape.hidden, shape.rows * 2 * shape.ffn
    return weight_bytes(shape, itemsize) + itemsize * (2 * tokens + hidden)


def backward_bytes(shape: Shape, itemsize: int = 2) -> int:
    """Weights, tokens, pre-activation and the output's gradient read once, the gradients of weights and
    tokens written once.
    """
    tokens, hidden = shape.tokens * shape.hidden, shape.rows * 2 * shape.ffn
    return 2 * weight_bytes(shape, itemsize) + itemsize * (3 * tokens + hidden)


def naive_kept_bytes(shape: Shape, itemsize: int = 2) -> int:
    """What autograd keeps of the layer written down in plain torch: the tokens, the gathered rows, both
    halves of the pre-activation, the activated gate and its product with the other half, and the rows that
    the router weights multiply.
    """
    return itemsize * (
        shape.tokens * shape.hidden + 2 * shape.rows * shape.hidden + 4 * shape.rows * shape.ffn
    )


def minimal_kept_bytes(shape: Shape, itemsize: int = 2) -> int:
    """The tokens and the pre-activation: everything else can be computed from them inside the backward's own
    kernels.
    """
    return itemsize * (shape.tokens * shape.hidden + 2 * shape.rows * shape.ffn)


def floor_of(shape: Shape, card: Card = H200) -> Floor:
    """FLOPs over the card's rate or bytes over its bandwidth, whichever takes longer."""
    flops = forward_flops(shape)
    forward, forward_by = _longer(flops, forward_bytes(shape), card)
    backward, backward_by = _longer(2 * flops, backward_bytes(shape), card)
    return Floor(
        forward, backward, forward_by, backward_by, naive_kept_bytes(shape), minimal_kept_bytes(shape)
    )


def _longer(flops: float, num_bytes: float, card: Card) -> tuple[float, str]:
    compute, memory = flops / card.flops_per_second * 1e3, num_bytes / card.bytes_per_second * 1e3
    return (compute, "FLOPs") if compute >= memory else (memory, "bytes")


def floors_table(names: Sequence[str] = tuple(SHAPES), card: Card = H200) -> str:
    """The floors as a table in Markdown."""
    lines = [
        (
            "| shape | model | D | F | E | K | T | TFLOP forward | floor forward, ms | bound by | floor"
            " backward, ms | bound by | kept, naive MiB | kept, minimal MiB |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        shape, floor = SHAPES[name], floor_of(SHAPES[name], card)
        sizes = " | ".join(str(size) for size in shape[:5])
        times = f"{floor.forward_ms:.3f} | {floor.forward_by} | {floor.backward_ms:.3f} | {floor.backward_by}"
        kept = f"{floor.naive_bytes / MIB:.0f} | {floor.minimal_bytes / MIB:.0f}"
        lines.append(
            f"| {name} | {shape.model} | {sizes} | {forward_flops(shape) / 1e12:.3f} | {times} | {kept} |"
        )
    return "\n".join(lines)


def kernels_of(shape: Shape, itemsize: int = 2) -> dict[str, tuple[int, int]]:
    """FLOPs and bytes of each kernel of the triton backend; every operand is read once, also one that is
    gathered, and every result is written once.
    """
    product = 2 * shape.rows * shape.hidden * shape.ffn
    tokens, rows = shape.tokens * shape.hidden, shape.rows * shape.hidden
    inner, matrix = shape.rows * shape.ffn, shape.experts * shape.hidden * shape.ffn
    combine = 0 if shape.arrives else rows + tokens
    kernels = {
        "up": (2 * product, tokens + 2 * matrix + 3 * inner),
        "down": (product, inner + matrix + rows),
        "combine, twice": (0, 2 * combine),
        # fp32 sums over 32 columns, written and read
        "activation_grad": (product, tokens + matrix + 5 * inner + inner // 8),
        "weight_grad W2": (product, tokens + inner + matrix),
        "weight_grad W1": (2 * product, tokens + 2 * inner + 2 * matrix),
        "gradient of the rows": (2 * product, 2 * inner + 2 * matrix + rows),
    }
    return {name: (flops, values * itemsize) for name, (flops, values) in kernels.items()}


def roofline_table(names: Sequence[str] = tuple(SHAPES), devices: Sequence[str] = DEVICES) -> str:
    """A model, not a measurement: milliseconds of each kernel on the first device, at the peaks of the
    planner's profile in bf16, "b" if bytes take longer than FLOPs, and sums for all devices. In Markdown.
    """
    cards = [
        Card(name, profile.dense_flops["bf16"], profile.memory_bytes_per_second)
        for name, profile in ((name, load_hardware(name)) for name in devices)
    ]
    headings = ["shape", *kernels_of(SHAPES["A"]), *(f"sum {name}" for name in devices)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for name in names:
        kernels = kernels_of(SHAPES[name]).values()
        longest = [[_longer(*kernel, card) for kernel in kernels] for card in cards]
        cells = [f"{ms:.3f}{' b' if by == 'bytes' else ''}" for ms, by in longest[0]]
        sums = [f"{sum(ms for ms, _ in times):.2f}" for times in longest]
        lines.append(f"| {' | '.join([name, *cells, *sums])} |")
    return "\n".join(lines)
