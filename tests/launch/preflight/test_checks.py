from types import SimpleNamespace

import pytest
import torch

from moe_exp.launch.preflight import checks
from moe_exp.launch.preflight.checks import DTYPES, check_matmul, check_memory, hadamard

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(checks, "_TIMED_SECONDS", 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 256])
def test_products_are_exact_in_every_dtype(dtype, size):
    found = check_matmul(CPU, DTYPES[dtype], seed=3, size=size)
    assert found["wrong"] == 0 and found["teraflops"] > 0


def test_factors_are_dense_and_the_product_is_theirs():
    matrix = hadamard(32, CPU, torch.float64)
    assert set(matrix.flatten().tolist()) == {1.0, -1.0}
    assert torch.equal(matrix @ matrix.T, 32 * torch.eye(32, dtype=torch.float64))


@pytest.mark.parametrize("damage", [1.0, -1.0, float("nan"), float("inf")])
def test_one_wrong_element_of_a_product_is_seen(monkeypatch, damage):
    # What a broken multiplier does: one element of one of the products is another.
    multiply, calls = torch.Tensor.__matmul__, []

    def broken(left, right):
        product = multiply(left, right)
        calls.append(0)
        if len(calls) == 2:
            product[17, 5] += damage
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
    assert check_matmul(CPU, torch.float32, seed=0, size=64)["wrong"] == 1


def test_memory_that_keeps_and_memory_that_does_not(monkeypatch):
    chunk = checks._CPU_CHUNK_BYTES
    assert check_memory(CPU, 2 * chunk)["wrong"] == 0
    assert check_memory(CPU, 2 * chunk)["bytes"] == 2 * chunk
    assert check_memory(CPU, chunk - 1) == {"wrong": 0, "bytes": 0, "gigabytes_per_second": 0.0}
    allocated = torch.empty(chunk // 8, dtype=torch.int64)
    # A stuck address line: the second chunk lies where the first does. And a bit that flips when it is read.
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: allocated)
    assert check_memory(CPU, 2 * chunk)["wrong"] == 2 * chunk // 8
    monkeypatch.undo()
    extremes, calls = torch.aminmax, []

    def flipping(chunk):
        calls.append(0)
        if len(calls) == 3:
            chunk[1000] ^= 1 << 40
        return extremes(chunk)

    monkeypatch.setattr(torch, "aminmax", flipping)
    assert check_memory(CPU, 2 * chunk)["wrong"] == 1


def test_memory_to_fill_is_a_share_with_a_cap():
    assert 0 < checks.bytes_to_fill(CPU, 2) <= 1 << 29
    assert checks.bytes_to_fill(CPU, 4) * 4 <= checks.available_memory_bytes()


@pytest.mark.parametrize("size", [2, 8, 180, 181, 4096, 5000])
def test_the_sums_of_an_all_reduce_are_exact_in_fp32(monkeypatch, size):
    """As integers up to 2^24."""
    seen = []

    def all_reduce(total):
        seen.append(int(total.max()) * size * (size + 1) // 2)
        total *= size * (size + 1) // 2  # of rank 0, which sends the pattern itself

    fake = SimpleNamespace(get_world_size=lambda: size, get_rank=lambda: 0, all_reduce=all_reduce)
    monkeypatch.setattr(checks, "dist", fake)
    checks._check_all_reduce(2**14, CPU, 1)
    assert 0 < seen[0] <= 2**24
