import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_on_ranks
from moe_exp.host import gloo


def numbers(*shape: int, dtype=torch.float64) -> torch.Tensor:
    """Different on every rank; whole, so that their sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randint(-30, 30, shape, generator=generator).to(dtype)


def compare(function, expected, x: torch.Tensor, shape, group, *, async_op: bool) -> None:
    out, other = x.new_empty(shape), x.new_empty(shape)
    before = x.clone()
    work = function(out, x, group=group, async_op=async_op)
    assert (work is not None) == async_op
    if async_op:
        work.wait()
    expected(other, x.contiguous(), group=group)
    assert torch.equal(out, other)
    assert torch.equal(x, before)


def compare_all(dtype, async_op: bool) -> None:
    world = dist.get_world_size()
    halves = [dist.new_group(list(range(start, world, 2))) for start in (0, 1)]
    for group in (None, dist.group.WORLD, halves[dist.get_rank() % 2]):
        size = dist.get_world_size(group)
        for rows, columns in ((3, 5), (1, 1), (64, 33)):
            gathered, scattered = (size * rows, columns), (rows, columns)
            turned = numbers(columns, size * rows, dtype=dtype).t()
            plain = numbers(*scattered, dtype=dtype)
            for x, shape in ((plain, gathered), (turned, (size * size * rows, columns))):
                compare(gloo.all_gather, dist.all_gather_into_tensor, x, shape, group, async_op=async_op)
            reduce = gloo.reduce_scatter, dist.reduce_scatter_tensor
            for x in (numbers(*gathered, dtype=dtype), turned):
                compare(*reduce, x, scattered, group, async_op=async_op)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_same_as_torch_distributed(num_ranks, async_op, dtype):
    run_on_ranks(num_ranks, compare_all, dtype, async_op)


def compare_large() -> None:
    # Beyond the size at which all_gather is left to gloo's ring.
    rows, columns = 1000, gloo._LARGE_BYTES // 8000 + 1
    for x in (numbers(rows, columns), numbers(columns, rows).t()):
        shape = (rows * dist.get_world_size(), columns)
        for async_op in (False, True):
            compare(gloo.all_gather, dist.all_gather_into_tensor, x, shape, None, async_op=async_op)


def test_large_all_gather():
    run_on_ranks(2, compare_large)


def sum_before_wait() -> list[float]:
    x = torch.arange(4.0) * (dist.get_rank() + 1)
    out = torch.empty(2)
    work = gloo.reduce_scatter(out, x, async_op=True)
    # As Megatron does it: the caller may continue, and wait only when it needs the sum.
    dist.barrier()
    work.wait()
    return out.tolist()


def test_sum_by_hand():
    assert run_on_ranks(2, sum_before_wait) == [[0, 3], [6, 9]]
