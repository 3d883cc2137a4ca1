"""Attention inside documents (DOCUMENT_MASK), windows and sinks against causal attention over whole samples,
forward and backward, turn by turn: ours, torch's with a mask of all pairs, and on a GPU each backend
(FlexAttention has no backward pass on a CPU). Gradients are compared with the mask's first.

    # four documents a sample on average, by sequence length; 3 min on 2 cores
    python bench/bench_documents.py
    python bench/bench_documents.py --documents 16 --lengths 4096
    python bench/bench_documents.py --documents 1.1 --lengths 256    # a border in some samples
    python bench/bench_documents.py --lengths 4096 --window 128      # 512 is the default

Documents are drawn: their ends are uniform, so that some are long. Ratios are medians over alternating pairs.
"""

import argparse
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from moe_exp.layers.megatron.attention import CausalAttention
from moe_exp.layers.megatron.documents import Documents, Lengths, document_positions

HEADS, GROUPS, HEAD_SIZE, TOKENS = 8, 4, 64, 4096
ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def drawn_lengths(batch: int, seq_len: int, mean: float, generator: torch.Generator) -> Lengths:
    """Samples of `mean` documents on average, as evenly as possible, with ends at random places."""
    found = []
    for sample in range(batch):
        num_ends = int((sample + 1) * (mean - 1)) - int(sample * (mean - 1))
        ends = torch.randperm(seq_len - 1, generator=generator)[:num_ends].sort().values + 1
        edges = torch.tensor([0, *ends.tolist(), seq_len])
        found.append(tuple(edges.diff().tolist()))
    return tuple(found)


def core(
    dtype: torch.dtype, *, window: int = 0, sinks: bool = False, backend: str = "auto"
) -> CausalAttention:
    """One layer's attention."""
    config = SimpleNamespace(
        kv_channels=HEAD_SIZE, attention_dropout=0.0, params_dtype=dtype, num_attention_heads=HEADS,
        window_size=(window - 1, 0) if window else None, window_attn_skip_freq=None,
        softmax_type="learnable" if sinks else "vanilla",
    )  # fmt: skip
    groups = SimpleNamespace(cp=ONE_RANK, tp=ONE_RANK)
    return CausalAttention(config, 1, None, "self", pg_collection=groups, backend=backend)


def steps(
    lengths: Lengths, seq_len: int, window: int, device: torch.device
) -> dict[str, Callable[[], Tensor]]:
    """Name to one forward and backward pass, which returns the result."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = len(lengths)
    query, key, value = (
        torch.randn(seq_len, batch, heads, HEAD_SIZE, device=device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    grad = torch.randn(seq_len, batch, HEADS * HEAD_SIZE, device=device, dtype=dtype)
    positions = document_positions(lengths).to(device)
    documents = {"packed_seq_params": Documents(lengths, positions)}
    ids = Documents(lengths, positions).ids.to(device)
    places = torch.arange(seq_len, device=device)
    causal = places[:, None] >= places
    in_window = causal & (places[:, None] - places < window)
    in_document = ids[:, None, :, None] == ids[:, None, None, :]

    def ours(module: CausalAttention, **options: object) -> Callable[[], Tensor]:
        def step() -> Tensor:
            query.grad = key.grad = value.grad = None
            out = module(query, key, value, None, **options)
            out.backward(grad)
            return out.detach()

        return step

    def masked(mask: Tensor) -> Callable[[], Tensor]:
        def step() -> Tensor:
            query.grad = key.grad = value.grad = None
            attend = torch.nn.functional.scaled_dot_product_attention
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = attend(q, k, v, attn_mask=mask, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)
            out.backward(grad)
            return out.detach()

        return step

    named = {
        "whole samples": ours(core(dtype)),
        "by document": ours(core(dtype), **documents),
        "documents, mask of all pairs": masked(in_document & causal),
        f"window {window}": ours(core(dtype, window=window)),
        f"window {window}, mask of all pairs": masked(in_window),
        f"window {window} by document": ours(core(dtype, window=window), **documents),
        f"window {window}, sinks": ours(core(dtype, window=window, sinks=True)),
        "sinks": ours(core(dtype, sinks=True)),
    }
    if device.type == "cuda":
        for name in ("flash-attn", "flex", "sdpa"):
            if name != "flash-attn" or importlib.util.find_spec("flash_attn"):
                named[f"{name}, whole samples"] = ours(core(dtype, backend=name))
                named[f"{name} by document"] = ours(core(dtype, backend=name), **documents)
            if name == "flex" or (name == "flash-attn" and importlib.util.find_spec("flash_attn")):
                named[f"{name}, window {window}"] = ours(core(dtype, window=window, backend=name))
    pairs = (("by document", "documents, mask of all pairs"),)
    pairs += ((f"window {window}", f"window {window}, mask of all pairs"),)
    for one, other in pairs:
        found = []
        for name in (one, other):
            out = named[name]()
            found.append([out, *(x.grad for x in (query, key, value))])
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
        print(f"  {one}: relative error of result and gradients {max(errors):.1e}")
    return named


def seconds_of(step: Callable[[], Tensor], device: torch.device) -> float:
    """One call."""
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Prints a table row for each sequence length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=float, default=4, help="in a sample, on average (default: 4)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="SEQ_LENs")
    parser.add_argument("--window", type=int, default=512, help="SLIDING_WINDOW (default: 512)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of all (default: 15)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, {device.type}"
    )
    print(f"{arguments.documents} documents a sample, {HEADS} heads of {HEAD_SIZE} in {GROUPS} groups")
    for seq_len in arguments.lengths:
        generator = torch.Generator().manual_seed(1)
        lengths = drawn_lengths(max(1, TOKENS // seq_len), seq_len, arguments.documents, generator)
        share = sum(length**2 for one in lengths for length in one) / (len(lengths) * seq_len**2)
        named = steps(lengths, seq_len, min(arguments.window, seq_len), device)
        for step in named.values():
            for _ in range(2):
                seconds_of(step, device)
        times: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(arguments.rounds):
            for name, step in named.items():
                times[name].append(seconds_of(step, device))
        base = times.pop("whole samples")
        ratios = {
            name: statistics.median(one / whole for one, whole in zip(found, base, strict=True))
            for name, found in times.items()
        }
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        milliseconds = 1e3 * statistics.median(base)
        print(
            f"SEQ_LEN={seq_len}: {share:.0%} of the pairs, whole samples {milliseconds:.1f} ms; {shown}",
            flush=True,
        )


if __name__ == "__main__":
    main()
