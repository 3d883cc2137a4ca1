"""The `loop` backend on a CPU computes one expert after another, so that an expert's data stays in the cache.

A tensor with all rows is allocated only if backward or the next step needs it: on a CPU, writing to newly
allocated memory costs as much as the computation. Shape suffixes: see `moe_exp.layers`.
"""

import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.dispatcher.row_order import RowOrder, sum_slots
from moe_exp.layers.kernels.launch import compilable
from moe_exp.layers.native import weighted_activation, weighted_activation_backward

# Up to this many rows (as in token-by-token generation), starting threads takes longer than the computation.
_FEW_ROWS = 8
_GROUP_BYTES = 2**19  # size of x W1^T per group of adjacent experts; several groups fit in the cache
_GROUPS_PER_THREAD = 4  # minimum
# Threads work on whole groups if the busiest thread gets at most this multiple of the mean.
_MAX_IMBALANCE = 1.15


def expert_loop(
    x: Tensor, weights_R: Tensor, weight1_LFD: Tensor, weight2_LDF: Tensor, bias1_LF: Tensor | None = None,
    bias2_LD: Tensor | None = None, bias2_start: int = 0, *, rows_per_expert_L: Tensor, activation: str,
    order: RowOrder | None = None,
) -> Tensor:  # fmt: skip
    """y = (act(x W1^T + b1) * w) W2^T + w * b2 per row, expert by expert.

    Saves the arguments and h = x W1^T + b1 for backward, which recomputes the activation while h is in cache.

    Args:
        x: rows sorted by expert [R, D]; with `order`, tokens [T, D].
        weight1_LFD: [L, 2F or F, D]; `bias1_LF` is [L, 2F or F].
        bias2_LD: with expert tensor parallelism, this rank's columns, starting at column `bias2_start`.
        rows_per_expert_L: number of rows per expert, int64.
        order: mapping from tokens to rows.

    Returns:
        [R, D]; with `order`, the sum of each token's rows, [T, D].
    """
    inputs = weights_R, weight1_LFD, weight2_LDF, bias1_LF, bias2_LD
    return _ExpertLoop.apply(order, activation, bias2_start, rows_per_expert_L, x, *inputs)


class _ExpertLoop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: RowOrder | None, activation: str, bias2_start: int, rows_per_expert_L: Tensor,
        x: Tensor, *inputs: Any,
    ) -> Tensor:  # fmt: skip
        settings: tuple[Any, ...] = bias2_start, rows_per_expert_L, activation, _tokens(order)
        hidden_RF, output_RD = _forward(_with_padding(x, order), *inputs, *settings)
        ctx.save_for_backward(x, *inputs, hidden_RF, rows_per_expert_L)
        ctx.bias2_start, ctx.activation, ctx.order = bias2_start, activation, order
        return output_RD if order is None else sum_slots(output_RD, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        order, needs = ctx.order, list(ctx.needs_input_grad[4:])
        # Read once: with torch.utils.checkpoint, accessing saved tensors twice is an error.
        x, *saved = ctx.saved_tensors
        tokens = _with_padding(grads[0].contiguous(), order), _with_padding(x, order)
        arguments: tuple[Any, ...] = *tokens, *saved, ctx.bias2_start, ctx.activation, _tokens(order), needs
        computed = _backward(*arguments)
        dx, *others = (grad if is_needed else None for grad, is_needed in zip(computed, needs, strict=True))
        if dx is not None and order is not None:
            dx = sum_slots(dx, order)
        return None, None, None, None, dx, *others


def _tokens(order: RowOrder | None) -> Tensor | None:
    """Token index of each row (the number of tokens for padding). None if `x` already contains the rows."""
    return None if order is None else order.slot_R // order.topk


def _with_padding(x: Tensor, order: RowOrder | None) -> Tensor:
    """Returns `x`, followed by a zero row if `order` has padding."""
    return x if order is None or not order.has_padding else torch.cat([x, x.new_zeros(1, x.size(1))])


@compilable(
    "expert_loop",
    lambda x, weights_R, weight1_LFD, *_: tuple(
        x.new_empty(weights_R.size(0), width) for width in (weight1_LFD.size(1), x.size(1))
    ),
)
def _forward(
    x: Tensor, weights_R: Tensor, weight1_LFD: Tensor, weight2_LDF: Tensor, bias1_LF: Tensor | None,
    bias2_LD: Tensor | None, bias2_start: int, rows_per_expert_L: Tensor, activation: str,
    token_R: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pre-activations [R, 2F or F] and weighted outputs [R, D]."""
    splits = rows_per_expert_L.tolist()
    hidden_RF = x.new_empty(weights_R.size(0), weight1_LFD.size(1))
    output_RD = x.new_empty(weights_R.size(0), x.size(1))
    groups, group_rows = _groups(splits, hidden_RF)
    rows_of = _rows_of(x, group_rows, token_R)
    hiddens, outputs = hidden_RF.split(splits), output_RD.split(splits)
    group_hiddens, group_weights = hidden_RF.split(group_rows), weights_R.split(group_rows)
    weight1, weight2 = weight1_LFD.unbind(0), weight2_LDF.unbind(0)

    def one_group(g: int) -> None:
        # Both projections and the activation in between, while the group's rows are in the cache.
        experts = [e for e in groups[g] if splits[e]]
        sizes = [splits[e] for e in experts]
        for e, rows in zip(experts, rows_of(g).split(sizes), strict=True):
            torch.mm(rows, weight1[e].t(), out=hiddens[e])
            if bias1_LF is not None:
                hiddens[e].add_(bias1_LF[e])
        active = weighted_activation(group_hiddens[g], group_weights[g], activation)
        for e, rows, weight in zip(experts, active.split(sizes), group_weights[g].split(sizes), strict=True):
            torch.mm(rows, weight2[e].t(), out=outputs[e])
            if bias2_LD is not None:
                part = outputs[e].narrow(1, bias2_start, bias2_LD.size(1))
                part.addcmul_(weight.to(x.dtype).unsqueeze(1), bias2_LD[e])

    if weights_R.size(0) <= _FEW_ROWS:
        for group in range(len(groups)):
            one_group(group)
    else:
        for_each_group(one_group, group_rows)
    return hidden_RF, output_RD


def _groups(splits: Sequence[int], hidden_RF: Tensor) -> tuple[list[range], list[int]]:
    """Groups of adjacent experts that are computed together, and the number of rows per group."""
    # Experts with few rows share all calls except the matrix products, because call overhead would dominate.
    num_threads = torch.get_num_threads()
    most_rows = _GROUP_BYTES // max(1, hidden_RF.size(1) * hidden_RF.element_size())
    if num_threads > 1:
        most_rows = min(most_rows, hidden_RF.size(0) // (num_threads * _GROUPS_PER_THREAD))
    groups, rows = [range(1)], [splits[0]]
    for expert, size in enumerate(splits[1:], start=1):
        if rows[-1] + size > most_rows:
            groups.append(range(expert, expert))
            rows.append(0)
        groups[-1] = range(groups[-1].start, expert + 1)
        rows[-1] += size
    return groups, rows


def _empty_gradients(*args: Any) -> list[Tensor]:
    """Uninitialized tensors for `_backward`'s results. `args`: its first seven arguments, and `needs`."""
    (x, *others), needs = args[1:7], args[-1]
    return [
        x.new_empty(others[0].size(0), x.size(1)) if needs[0] else x.new_empty(0),
        *(
            torch.empty_like(other) if other is not None and is_needed else x.new_empty(0)
            for other, is_needed in zip(others, needs[1:], strict=True)
        ),
    ]


@compilable("expert_loop_backward", _empty_gradients)
def _backward(
    grad: Tensor, x: Tensor, weights_R: Tensor, weight1_LFD: Tensor, weight2_LDF: Tensor,
    bias1_LF: Tensor | None, bias2_LD: Tensor | None, hidden_RF: Tensor, rows_per_expert_L: Tensor,
    bias2_start: int, activation: str, token_R: Tensor | None, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of `_forward`'s first six arguments (empty if not needed); the gradient of `x` has R rows."""
    splits = rows_per_expert_L.tolist()
    inputs = x, weights_R, weight1_LFD, weight2_LDF, bias1_LF, bias2_LD
    results = _empty_gradients(grad, *inputs, needs)
    dx_RD, dweights_R, dweight1_LFD, dweight2_LDF, dbias1_LF, dbias2_LD = results
    needs_x, needs_weights, needs_weight1, needs_weight2, needs_bias1, needs_bias2 = needs
    groups, group_rows = _groups(splits, hidden_RF)
    rows_of, grads_of = _rows_of(x, group_rows, token_R), _rows_of(grad, group_rows, token_R)
    weights, hiddens = weights_R.split(group_rows), hidden_RF.split(group_rows)
    weight1, weight2 = weight1_LFD.unbind(0), weight2_LDF.unbind(0)
    dx = dx_RD.split(splits) if needs_x else ()
    dweights = dweights_R.split(group_rows) if needs_weights else ()

    def one_group(g: int) -> None:
        experts, sizes = groups[g], [splits[e] for e in groups[g]]
        grads = grads_of(g).split(sizes)
        dactive = hiddens[g].new_empty(group_rows[g], weight2_LDF.size(2))
        for e, grad, rows in zip(experts, grads, dactive.split(sizes), strict=True):
            torch.mm(grad, weight2[e], out=rows)
        dhidden, dweight, active = weighted_activation_backward(dactive, hiddens[g], weights[g], activation)
        dhiddens = dhidden.split(sizes)
        if needs_weight2:
            for e, grad, rows in zip(experts, grads, active.split(sizes), strict=True):
                torch.mm(grad.t(), rows, out=dweight2_LDF[e])
        if needs_weight1:
            for e, dhidden, rows in zip(experts, dhiddens, rows_of(g).split(sizes), strict=True):
                torch.mm(dhidden.t(), rows, out=dweight1_LFD[e])
        for e, dhidden in zip(experts, dhiddens, strict=True):
            if needs_x:
                torch.mm(dhidden, weight1[e], out=dx[e])
            if needs_bias1:
                torch.sum(dhidden, dim=0, out=dbias1_LF[e])
        if bias2_LD is not None:
            for e, grad, rows, weight in zip(
                experts, grads, dweight.split(sizes), weights[g].split(sizes), strict=True
            ):
                grad = grad.narrow(1, bias2_start, bias2_LD.size(1))
                rows.add_(torch.mv(grad, bias2_LD[e]))
                if needs_bias2:
                    torch.mv(grad.t(), weight.to(grad.dtype), out=dbias2_LD[e])
        if needs_weights:
            dweights[g].copy_(dweight)

    for_each_group(one_group, group_rows)
    return results


def _rows_of(x: Tensor, splits: list[int], token_R: Tensor | None) -> Callable[[int], Tensor]:
    """Returns a function from a group's index to its rows: a slice of `x`, or tokens gathered from `x`."""
    if token_R is None:
        return x.split(splits).__getitem__
    tokens = token_R.split(splits)
    return lambda group: x.index_select(0, tokens[group])


def for_each_group(task: Callable[[int], None], rows: Sequence[int]) -> None:
    """Calls `task(group)` for every group, without autograd; tasks must not write to the same memory.

    While several threads run tasks, torch's thread count is 1; with MKL, this affects the whole process.

    Args:
        rows: number of rows of each group.
    """
    # Each thread processes whole groups, fullest first, so no thread waits for another inside a matrix
    # product. If a few groups have most of the rows, threads would be idle; then all threads work on each
    # group together. The choice depends only on `rows` and torch.get_num_threads(), so results are bitwise
    # reproducible.
    num_threads = min(torch.get_num_threads(), len(rows))
    if num_threads <= 1 or not is_balanced(rows, num_threads):
        _drain(task, deque(range(len(rows))))
        return
    groups = deque(sorted(range(len(rows)), key=lambda group: -rows[group]))
    most = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        others = [_pool(num_threads - 1).submit(_drain, task, groups) for _ in range(num_threads - 1)]
        try:
            _drain(task, groups)
        finally:
            wait(others)
    finally:
        torch.set_num_threads(most)
    for other in others:
        other.result()


def _drain(task: Callable[[int], None], groups: deque[int]) -> None:
    """Runs the task for groups from the queue until the queue is empty."""
    with torch.no_grad():  # this setting is per thread
        while groups:
            try:
                group = groups.popleft()
            except IndexError:  # another thread took the last one
                return
            task(group)


def is_balanced(rows: Sequence[int], num_threads: int) -> bool:
    """Whether threads get nearly equal numbers of rows if the largest groups are assigned first."""
    loads = [0] * num_threads
    for size in sorted(rows, reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads) * num_threads <= _MAX_IMBALANCE * sum(loads)


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    # OpenMP's number of threads is a setting of each thread.
    return ThreadPoolExecutor(num_threads, "experts", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child process does not inherit threads
