"""The all-to-all that carries tokens, as the job's ranks run it: correct for even, uneven and empty splits,
and how fast.

    # seconds; NCCL where every rank has a GPU, else gloo
    torchrun --nproc_per_node=2 tests/test_all_to_all.py
    torchrun --nproc_per_node=8 tests/test_all_to_all.py --max-mb 256 # larger messages

Ends with 1 if a result or a gradient differs from the reference, in which every rank gathers everything.
"""

import argparse
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.ranks import run_script_on_ranks

# before moe_exp: it may have to put it on the path
from helpers.under_torchrun import on_first_rank, torchrun, torchrun_job
from moe_exp.layers.dispatcher.collectives import AllToAll, exchange_rows

WIDTH = 256
Route = list[list[int]]  # rows from rank i (outer) to rank j


def routes(ranks: int) -> dict[str, Route]:
    """Rows from every rank to every rank."""
    pairs = [[(source, target) for target in range(ranks)] for source in range(ranks)]
    return {
        "even": [[5 for _ in row] for row in pairs],
        "uneven": [[(3 * source + 5 * target) % 7 for source, target in row] for row in pairs],
        "all to rank 0": [[4 if target == 0 else 0 for _, target in row] for row in pairs],
        "rank 0 silent": [[0 if source == 0 else 2 + target for source, target in row] for row in pairs],
        "empty": [[0 for _ in row] for row in pairs],
    }


def rows_of(rank: int, route: Route, device: torch.device, *, seed: int) -> Tensor:
    """What `rank` sends: every rank can make it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(sum(route[rank]), WIDTH, generator=generator).to(device)


def mismatches(route: Route, device: torch.device) -> list[str]:
    """What is wrong with the exchange of this route on this rank. Never returns early: the other ranks would
    wait for ever.
    """
    rank, back = dist.get_rank(), [list(column) for column in zip(*route, strict=True)]

    def received(route: Route, seed: int) -> Tensor:
        whole = [rows_of(source, route, device, seed=seed) for source in range(len(route))]
        return torch.cat([x.split(sizes)[rank] for x, sizes in zip(whole, route, strict=True)])

    x = rows_of(rank, route, device, seed=1).requires_grad_()
    y = exchange_rows(AllToAll(group=dist.group.WORLD, send=route[rank], receive=back[rank]), x)
    y.backward(rows_of(rank, back, device, seed=2))
    pairs = {"rows": (y, received(route, 1)), "gradient": (x.grad, received(back, 2))}
    return [name for name, (value, expected) in pairs.items() if not torch.equal(value, expected)]


def check(route: Route, device: torch.device) -> list[str]:
    """Mismatches of all ranks, on every rank."""
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, mismatches(route, device))
    return [f"{' and '.join(names)} of rank {rank} differ" for rank, names in enumerate(found) if names]


def seconds(rows: int, device: torch.device, repeats: int = 10) -> float:
    """Median time of one exchange of `rows` rows from every rank to every rank, of the slowest rank."""
    ranks = dist.get_world_size()
    exchange = AllToAll(group=dist.group.WORLD, send=[rows] * ranks, receive=[rows] * ranks)
    x = torch.zeros(rows * ranks, WIDTH, device=device)
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        exchange_rows(exchange, x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[2:], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.median().item()


def speed_table(device: torch.device, max_bytes: int) -> list[str]:
    """Lines with the bytes that a rank sends to all others, and GB/s of that."""
    others = dist.get_world_size() - 1
    lines = [f"{'bytes sent':>14} {'time ms':>9} {'GB/s':>7}"]
    rows = 4
    while others and rows * WIDTH * 4 * others <= max_bytes:
        sent, taken = rows * WIDTH * 4 * others, seconds(rows, device)
        lines.append(f"{sent:>14,} {taken * 1e3:>9.3f} {sent / taken / 1e9:>7.3f}")
        rows *= 8
    return lines


def run(max_bytes: int) -> int:
    """Checks every route, then prints the table; the exit code."""
    with torchrun_job() as device:
        ranks, failed = dist.get_world_size(), False
        on_first_rank(f"all-to-all over {ranks} ranks, {dist.get_backend()}, torch {torch.__version__}")
        for name, route in routes(ranks).items():
            problems = check(route, device)
            failed = failed or bool(problems)
            on_first_rank(f"  {name:<14} {'; '.join(problems) or 'forward and gradient equal'}")
        for line in speed_table(device, max_bytes):
            on_first_rank(line)
        dist.barrier()
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    text = "largest message that the table measures, in MB sent per rank"
    parser.add_argument("--max-mb", type=float, default=16, help=text)
    return run(int(parser.parse_args().max_mb * 2**20))


@pytest.mark.slow
def test_under_torchrun():
    """In an environment where another job has left its variables."""
    stray = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "23458"}
    result = torchrun(2, __file__, **stray)
    assert result.returncode == 0, result.stderr
    _is_whole(result.stdout, ranks=2, sizes=5)


def test_on_four_forked_ranks():
    codes, out = run_script_on_ranks(4, run, 2**20)
    assert codes == [0] * 4
    _is_whole(out, ranks=4, sizes=3)


def _is_whole(out: str, *, ranks: int, sizes: int) -> None:
    lines = out.splitlines()
    assert lines[0].startswith(f"all-to-all over {ranks} ranks, ")
    equal = [line[2:16].strip() for line in lines if line.endswith("forward and gradient equal")]
    assert equal == list(routes(ranks))
    table = [line.replace(",", "").split() for line in lines[len(equal) + 2 :]]
    assert [int(row[0]) for row in table] == [4096 * 8**i * (ranks - 1) for i in range(sizes)]


if __name__ == "__main__":
    sys.exit(main())
