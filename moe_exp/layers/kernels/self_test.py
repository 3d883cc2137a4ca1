"""Compares kernels with plain-torch references before training. Shape suffixes: see `moe_exp.layers`.

Each kernel runs in every config that may be chosen, with the model's widths but few rows. To choose configs,
the same calls are timed with as many rows as in training. PyTorch's global random state is unchanged.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moe_exp.host.devices import driver_version
from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.kernels import combine, cross_entropy, drops, launch, rows, scores, slot_sort, topk
from moe_exp.layers.kernels.activation_grad import activation_grad
from moe_exp.layers.kernels.fp8 import products
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul
from moe_exp.layers.kernels.launch import cdiv, in_one_line
from moe_exp.layers.kernels.tuning import Tuned, UnsuitedError, rows_class
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import weight_grad

# Limits on the error of a result row relative to its norm; in bf16 and fp16, a few rounding errors.
LIMITS = {torch.bfloat16: 3e-2, torch.float16: 8e-3, torch.float32: 1e-4}
_LIMIT_TF32 = 5e-3

# Rows of the experts, repeated: no row, one row, more than a tile, and numbers that do not divide a tile.
_ROWS = (37, 0, 3, 130, 1, 64)
ROWS_OF_CLASSES = (32, 256, 1024)  # rows per expert for timing, one for each class
_INTERPRETED_WIDTH = 48  # with a model's width, an interpreted kernel takes about a second


@dataclass(frozen=True)
class Sizes:
    """Sizes and types of the kernel calls on one rank."""

    dtype: torch.dtype  # of rows and weights
    hidden_size: int
    ffn_size: int
    num_experts: int
    topk: int = 2
    num_rows: int = 0  # rows of a micro-batch with balanced experts
    activation: str = "swiglu"
    bias: bool = False  # experts have biases
    gathers: bool = True  # kernels gather rows from the tokens, because all experts are on the rank
    adds: bool = False  # gradients are written and added to main_grad
    fp8: bool = False  # products are in e4m3
    vocab_size: int = 1000
    router: dict[str, Any] | None = None  # options of `router_topk` and total `num_experts`; None: no kernel


@dataclass(frozen=True)
class KernelCheck:
    """Result of comparing a kernel with its plain-torch reference."""

    kernel: str
    dtype: str  # of the operands, such as `bf16`
    shape: str  # description of the sizes
    num_configs: int  # number of compared configs
    error: float  # largest relative error of all results
    problem: str = ""  # the failure, with the config; empty if the kernel passed

    def line(self, device: torch.device) -> str:
        """Describes the failure completely, for a bug report."""
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreted on a CPU"
        where = f"{self.dtype}, {self.shape}; {on}; {versions()}"
        return f"kernel {self.kernel} ({where}): {self.problem}"


Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Case:
    """A public function on given operands: `run` uses the kernel, `twin` the plain-torch reference."""

    kernel: str
    dtype: torch.dtype
    shape: str
    run: Callable[[], Outputs]
    twin: Callable[[], Outputs]
    tuned: Tuned | None


def can_check(device: torch.device) -> bool:
    """Whether kernels run on the device, so that they can be compared with plain-torch references."""
    return launch.runs_kernel(torch.empty(0, device=device)) and not launch.missing()


def versions() -> str:
    """Versions of the software that compiles and runs kernels."""
    triton = "missing" if launch.triton is None else launch.triton.__version__
    found = [f"torch {torch.__version__}", f"triton {triton}"]
    if torch.cuda.is_available():
        found += [f"CUDA {torch.version.cuda}", f"driver for CUDA {driver_version()}"]
    return ", ".join(found)


def check_kernels(part: str, sizes: Sizes, device: torch.device) -> Iterator[KernelCheck]:
    """Compares each kernel of a part with its plain-torch reference.

    Args:
        part: `experts`, `routing` or `cross entropy`.
        sizes: sizes of the model; kernels interpreted on a CPU use small widths instead.

    Raises:
        RuntimeError: if the device is out of memory or unusable; the message names the kernel.
    """
    cases = {"experts": _expert_cases, "routing": _routing_cases, "cross entropy": _cross_entropy_cases}
    if launch.INTERPRETED and device.type == "cpu":
        hidden, ffn = (min(width, _INTERPRETED_WIDTH) for width in (sizes.hidden_size, sizes.ffn_size))
        sizes = replace(sizes, hidden_size=hidden, ffn_size=ffn, num_experts=min(sizes.num_experts, 3))
    else:  # as many experts as fit in 1 GiB, but at least two
        bytes_per_expert = 3 * sizes.hidden_size * sizes.ffn_size * sizes.dtype.itemsize
        sizes = replace(sizes, num_experts=min(sizes.num_experts, max(2, 2**30 // bytes_per_expert)))
    for case in cases[part](sizes, device):
        yield compare(case, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare(case: Case, device: torch.device) -> KernelCheck:
    """Runs a case's kernel in every candidate config and compares the results with the reference."""
    tuned, limit = case.tuned, LIMITS[case.dtype]
    if case.dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        limit = _LIMIT_TF32
    expected, problem = case.twin(), ""
    errors: list[float] = []
    failed: list[tuple[Any, Exception]] = []

    def found(error: float, problem: str) -> KernelCheck:
        name = str(case.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        return KernelCheck(case.kernel, name, case.shape, len(errors), error, problem)

    for config in [None] if tuned is None else tuned.candidates():
        at = "" if config is None else f"config {config}: "
        try:
            with nullcontext() if tuned is None or config is None else tuned.only(config):
                errors.append(error_of(case.run(), expected))
        except UnsuitedError:
            continue
        except Exception as error:
            if launch.is_of_device(error):
                raise RuntimeError(found(math.inf, at + in_one_line(error)).line(device)) from error
            # A failing config is dropped below, as during training; only wrong numbers fail the kernel.
            failed.append((config, error))
            continue
        if not errors[-1] <= limit and not problem:  # also true for NaN
            problem = f"{at}relative error {errors[-1]:.2g} (limit {limit:g})"
    if not errors:
        config, first = failed[0]
        return found(math.inf, ("" if config is None else f"config {config}: ") + in_one_line(first))
    for config, caught in failed:
        assert tuned is not None
        tuned.drop(config, caught)
    return found(_largest(errors), problem)


def error_of(results: Outputs, expected: Outputs) -> float:
    """Largest error of a row, relative to max(row's norm, mean norm of all rows); inf if integers differ."""
    errors = []
    for one, other in zip(results, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            errors.append(math.inf)
        elif not other.is_floating_point():
            errors.append(0.0 if torch.equal(one, other) else math.inf)
        elif other.numel():
            one, other = (
                x.float().reshape(-1, x.size(-1) if x.dim() > 1 else x.numel()) for x in (one, other)
            )
            wanted = other.norm(dim=-1)
            # The error of a row close to zero is relative to the mean norm.
            least = wanted.mean().clamp(min=1e-30)
            errors.append(float(((one - other).norm(dim=-1) / wanted.clamp(min=least)).max()))
    return _largest([0.0, *errors])


def _largest(errors: Sequence[float]) -> float:
    """The largest error; NaN is larger than any number."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


class _Draw:
    """Random tensors from a separate generator."""

    def __init__(self, device: torch.device):
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return x.mul_(scale).to(dtype)

    def weights(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) + 0.5

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)


def timing_cases(parts: Sequence[str], sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yields calls to time kernels with several configs, at the run's sizes, for each class of row counts."""
    expected = max(1, cdiv(sizes.num_rows, sizes.num_experts))
    for rows_of_expert in {rows_class(number): number for number in (*ROWS_OF_CLASSES, expected)}.values():
        tokens_L = [rows_of_expert] * sizes.num_experts
        cases = _expert_cases(sizes, device, tokens_L) if "experts" in parts else iter(())
        if "routing" in parts and not (sizes.gathers and "experts" in parts):
            cases = chain(cases, _combine_cases(sizes, device, sum(tokens_L)))
        yield from (case for case in cases if case.tuned and len(case.tuned.candidates()) > 1)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _combine_cases(sizes: Sizes, device: torch.device, num_rows: int) -> Iterator[Case]:
    draw, num_tokens = _Draw(device), cdiv(num_rows, sizes.topk)
    y_RD = draw.normal(num_rows, sizes.hidden_size, dtype=sizes.dtype)
    row_TK = draw.integers(num_rows + 1, num_tokens, sizes.topk).int()
    yield case_of(combine.combine, sizes.dtype, f"{num_rows} rows of {sizes.hidden_size}", y_RD, row_TK)


def _expert_cases(
    sizes: Sizes, device: torch.device, tokens_L: Sequence[int] | None = None
) -> Iterator[Case]:
    """Kernel calls of `experts.fused`, forward and backward; `tokens_L`: rows of each expert."""
    draw, dtype, hidden, ffn = _Draw(device), sizes.dtype, sizes.hidden_size, sizes.ffn_size
    num_experts, activation = sizes.num_experts, sizes.activation
    tokens_L = tokens_L or [_ROWS[expert % len(_ROWS)] for expert in range(num_experts)]
    num_rows = sum(tokens_L)
    num_tokens = cdiv(num_rows, sizes.topk)
    width = ffn * (2 if ACTIVATIONS[activation].gated else 1)
    shape = f"{num_rows} rows, {num_experts} experts, {hidden} x {ffn}, {activation}"
    shape += ", biases" if sizes.bias else ""
    offsets_L1 = torch.tensor([0, *tokens_L], device=device).cumsum(0).int()
    weight1_LWD = draw.normal(num_experts, width, hidden, dtype=dtype, scale=hidden**-0.5)
    weight2_LDF = draw.normal(num_experts, hidden, ffn, dtype=dtype, scale=ffn**-0.5)
    weights_R, token_R = draw.weights(num_rows), None
    x, dy = (draw.normal(num_rows, hidden, dtype=dtype) for _ in range(2))
    if sizes.gathers:
        x, dy = x[:num_tokens], dy[:num_tokens]
        token_R = draw.integers(num_tokens + 1, num_rows).int()  # including padding rows
    hidden_RW, active_RF = (draw.normal(num_rows, wide, dtype=dtype) for wide in (width, ffn))
    gathering: dict[str, Any] = {"activation": activation, "token_R": token_R, "weights_R": weights_R}

    def case(run: Any, *args: Any, what: str = "", **options: Any) -> Case:
        if sizes.fp8:  # the whole function of kernels/fp8/products.py, as called by `experts.fused`
            run, what = getattr(products, run.__name__), f"{what}, FP8"
        return case_of(run, dtype, shape + what, *args, **options)

    # Without padding, which weight gradients never get if tokens are gathered.
    row_R = None if token_R is None else token_R.clamp(max=num_tokens - 1)
    of_up, of_down = dict(gathering), []
    if sizes.bias:
        of_up["bias1_LW"] = draw.normal(num_experts, width, dtype=dtype)
        of_down = [draw.normal(num_experts, hidden, dtype=dtype), weights_R]
        ones_R1, weights_R1 = hidden_RW.new_ones(num_rows, 1), weights_R.to(dtype).unsqueeze(1)
        yield case_of(weight_grad, dtype, shape, ones_R1, hidden_RW, offsets_L1)
        yield case_of(weight_grad, dtype, shape, weights_R1, dy, offsets_L1, b_index_R=row_R)
    yield case(up_projection, x, weight1_LWD, offsets_L1, **of_up)
    options: dict[str, Any] = {"keeps_hidden": False, "what": ", forward only"}
    yield case(up_projection, x, weight1_LWD, offsets_L1, **of_up, **options)
    yield case(grouped_matmul, active_RF, weight2_LDF.transpose(1, 2), offsets_L1, *of_down)
    yield case(activation_grad, dy, weight2_LDF, hidden_RW, offsets_L1, **gathering)
    for a, b, index in ((dy, active_RF, "a_index_R"), (hidden_RW, x, "b_index_R")):
        options = {index: row_R, "what": ""}
        if sizes.adds:
            options["out"] = draw.normal(num_experts, a.size(1), b.size(1), dtype=torch.float32)
            # the first micro-batch of an iteration
            yield case(weight_grad, a, b, offsets_L1, **options | {"what": ", to main_grad"}, adds=False)
            options["what"] = ", added to main_grad"
        yield case(weight_grad, a, b, offsets_L1, **options)
    yield case(grouped_matmul, hidden_RW, weight1_LWD, offsets_L1, what=", gradient of the rows")
    if sizes.gathers:
        expert_TK = draw.integers(num_experts, num_tokens, sizes.topk)
        kept_TK = draw.integers(4, num_tokens, sizes.topk) > 0
        yield case_of(slot_sort.slot_sort, dtype, shape, expert_TK, num_experts, kept_TK)
        row_N = draw.integers(num_rows + 1, expert_TK.numel()).int()
        yield case_of(rows.gather_rows, torch.float32, shape, weights_R, row_N)
        yield from _combine_cases(sizes, device, num_rows)


def case_of(run: Any, dtype: torch.dtype, shape: str, *args: Any, **options: Any) -> Case:
    """Test case for a public function and its plain-torch reference in the same module."""
    module = sys.modules[run.__module__]
    twin, kernel = getattr(module, f"{run.__name__}_torch"), getattr(module, "_kernel", None)
    if run is topk.router_topk:
        run, twin = _with_gradient(run), _with_gradient(twin)

    def outputs(function: Any) -> Outputs:
        given = dict(options)
        if given.get("out") is not None:
            given["out"] = given["out"].clone()
        result = function(*args, **given)
        return [result] if isinstance(result, Tensor) else result

    tuned = kernel if isinstance(kernel, Tuned) else None
    return Case(run.__name__, dtype, shape, lambda: outputs(run), lambda: outputs(twin), tuned)


def _routing_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Calls of the kernels for routing, token dropping, row order and combining."""
    draw, num_tokens, num_experts, dtype = _Draw(device), 65, max(sizes.num_experts, 2), sizes.dtype
    topk_size, hidden = min(sizes.topk, num_experts), sizes.hidden_size
    slots = num_tokens * topk_size
    if sizes.router is not None:
        options = dict(sizes.router)
        num_routed = options.pop("num_experts")
        logits_TE = draw.normal(num_tokens, num_routed, dtype=torch.float32)
        has_bias, score = options.pop("expert_bias", False), options.get("score", "softmax")
        bias_E = draw.normal(num_routed, dtype=torch.float32, scale=0.1) if has_bias else None
        shape = f"{num_tokens} tokens, {num_routed} experts, top-{sizes.topk}, {score}"
        yield case_of(topk.router_topk, torch.float32, shape, logits_TE, sizes.topk, bias_E=bias_E, **options)
        sums_E, counts_E = logits_TE.softmax(1).sum(0), draw.integers(num_tokens, num_routed)
        sums = sums_E, sums_E.sum(), counts_E, None, num_tokens, sizes.topk, 0.01, 0.001
        yield case_of(scores.router_losses, torch.float32, shape, *sums)
    shape = f"{num_tokens} tokens, {num_experts} experts, top-{topk_size}"
    expert_TK = draw.integers(num_experts - 1, num_tokens, topk_size)  # never the last expert
    kept_TK = draw.integers(4, num_tokens, topk_size) > 0
    weights_TK = draw.weights(num_tokens, topk_size)
    limits_E = draw.integers(slots // num_experts + 2, num_experts).int()
    rows_SL = draw.integers(5, 2, num_experts)
    x_TD, y_RD = (draw.normal(number, hidden, dtype=dtype) for number in (num_tokens, slots))
    index_R = draw.integers(slots + 1, slots).int()
    row_TK = draw.integers(slots + 1, num_tokens, topk_size).int()
    moved = f"{slots} rows of {hidden}"
    yield case_of(slot_sort.slot_sort, dtype, shape, expert_TK, num_experts, kept_TK)
    yield case_of(drops.keep_within, dtype, shape, expert_TK, weights_TK, limits_E)
    yield case_of(drops.padded_order, dtype, shape, expert_TK, num_experts, slots // num_experts, kept_TK)
    yield case_of(rows.gather_rows, dtype, moved, x_TD, index_R, topk_size)
    yield case_of(rows.chunk_order, dtype, f"{rows_SL.numel()} chunks", rows_SL, int(rows_SL.sum()))
    yield case_of(combine.combine, dtype, moved, y_RD, row_TK)


def _with_gradient(function: Any) -> Any:
    """Wraps a router function to also return the logits' gradient, computed from random output gradients."""

    @functools.wraps(function)
    def run(logits_TE: Tensor, *args: Any, **options: Any) -> Outputs:
        logits_TE, draw = logits_TE.detach().requires_grad_(), _Draw(logits_TE.device)
        with torch.enable_grad():
            found = function(logits_TE, *args, **options)
            losses = found.weights_TK, found.lse_squares, found.score_sums_E
        seeds = [draw.weights(*loss.shape).to(loss.dtype) for loss in losses]
        (dlogits_TE,) = torch.autograd.grad(losses, logits_TE, seeds)
        return [*(x.detach() for x in found), dlogits_TE]

    return run


def _cross_entropy_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    draw, num_tokens, dtype = _Draw(device), 7, sizes.dtype
    logits_NV = draw.normal(num_tokens, sizes.vocab_size, dtype=dtype)
    target_N = draw.integers(sizes.vocab_size, num_tokens)
    log_sum_N, grad_N = logits_NV.float().logsumexp(dim=1), draw.weights(num_tokens)
    shape = f"{num_tokens} tokens, {sizes.vocab_size} words"
    statistics, gradient = cross_entropy.cross_entropy_statistics, cross_entropy.cross_entropy_gradient
    yield case_of(statistics, dtype, shape, logits_NV, target_N, 0)
    yield case_of(gradient, dtype, shape, logits_NV, target_N, log_sum_N, grad_N, 0)
