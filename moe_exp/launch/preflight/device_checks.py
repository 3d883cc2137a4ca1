"""Tests a device: matrix products with known results, and memory that is written and read back."""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.host.devices import available_memory_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_PATTERNS = 4
_CPU_SIZE, _CUDA_SIZE = 512, 8192
_TIMED_SECONDS = 0.5

# Together they write each bit as 0 and as 1.
_WORDS = (0x5555555555555555, -0x5555555555555556)
# changes the word per chunk: with a stuck address line, a chunk contains its neighbor's word
_ODD = 0x1E3779B97F4A7C15
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 32 << 20, 256 << 20


def check_matmul(device: torch.device, dtype: torch.dtype, *, seed: int, size: int = 0) -> dict[str, Any]:
    """Multiplies matrices whose product is known, and compares every element bit by bit.

    The factors are Sylvester's Hadamard matrices H (H H' = n I, all elements 1 or -1, n a power of two;
    Sylvester 1867), with rows of the left and columns of the right one in random order and with random signs.
    So the product is n times a signed permutation, and 0 elsewhere. Each partial sum is an integer of at most
    n, and over an aligned power-of-two range it is 0 or the range's length, so any tiling of the sum is exact
    with fp32 accumulation, and every result is exact in fp32, tf32, bf16 and fp16.

    Returns `wrong`, elements that differ over all patterns, `teraflops` of the fastest product, and `size`,
    n, by default 512 on a CPU and 8192 on a GPU.
    """
    size = size or (_CUDA_SIZE if device.type == "cuda" else _CPU_SIZE)
    hadamard = _hadamard(size, device, dtype)
    generator = torch.Generator().manual_seed(seed)
    wrong = 0
    with _full_precision(device):
        for _ in range(_PATTERNS):
            rows, columns = (torch.randperm(size, generator=generator).to(device) for _ in range(2))
            bits = (torch.randint(0, 2, (size,), generator=generator) for _ in range(2))
            signs_left, signs_right = ((2 * bit - 1).to(device, dtype) for bit in bits)
            left, right = hadamard[rows] * signs_left[:, None], hadamard[:, columns] * signs_right
            product = left @ right
            wrong += _num_wrong(product, rows, columns, signs_left, signs_right)
        # the minimum of many ignores short disturbances, but not a throttled device
        best, end = math.inf, time.perf_counter() + _TIMED_SECONDS
        while (start := time.perf_counter()) < end or best == math.inf:
            left @ right
            synchronize(device)
            best = min(best, time.perf_counter() - start)
    return {"wrong": wrong, "teraflops": 2 * size**3 / best / 1e12, "size": size}


def _hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, n], built from four copies of half its size."""
    matrix = torch.ones(1, 1, device=device, dtype=dtype)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _num_wrong(
    product: Tensor, rows: Tensor, columns: Tensor, signs_left: Tensor, signs_right: Tensor
) -> int:
    """Row i of the product has +-n where the right factor's column number is the left factor's row number."""
    size = len(product)
    place = torch.empty_like(columns)
    place[columns] = torch.arange(size, device=columns.device)
    at = place[rows]
    expected = signs_left * signs_right[at] * size
    found = product.gather(1, at[:, None])[:, 0]
    product.scatter_(1, at[:, None], 0)
    # also counts NaN
    return int((found != expected).sum() + (product != 0).sum())


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Accumulates products in fp32, whatever this process otherwise allows."""
    if device.type != "cuda":
        yield
        return
    settings = torch.backends.cuda.matmul
    types = ("bf16", "fp16")
    before = {name: getattr(settings, f"allow_{name}_reduced_precision_reduction") for name in types}
    try:
        for name in types:
            setattr(settings, f"allow_{name}_reduced_precision_reduction", False)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, f"allow_{name}_reduced_precision_reduction", value)


def check_memory(device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Fills memory with patterns, all of it before any is read back, and compares word by word.

    Allocates less than `num_bytes` if necessary. Returns `wrong`, words of 8 bytes that differ; `bytes`,
    filled; `gigabytes_per_second`, of the fastest pass, written and read.
    """
    chunks = _allocated(device, num_bytes)
    wrong, best = 0, math.inf
    for word in _WORDS:
        synchronize(device)
        start = time.perf_counter()
        for number, chunk in enumerate(chunks):
            chunk.fill_(_word(word, number))
        for number, chunk in enumerate(chunks):
            wrong += _num_other(chunk, _word(word, number))
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    filled = sum(chunk.nbytes for chunk in chunks)
    rate = 2 * filled / best / 1e9 if filled else 0.0
    return {"wrong": wrong, "bytes": filled, "gigabytes_per_second": rate}


def _num_other(chunk: Tensor, word: int) -> int:
    # One pass without a large temporary; words are counted only if something differs.
    smallest, largest = torch.aminmax(chunk)
    return 0 if smallest.item() == largest.item() == word else int((chunk != word).sum())


def _word(word: int, number: int) -> int:
    return word ^ (number * _ODD & 0x7FFFFFFFFFFFFFFF)


def _allocated(device: torch.device, num_bytes: int) -> list[Tensor]:
    chunk_bytes = _CUDA_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
    chunks: list[Tensor] = []
    with suppress(torch.OutOfMemoryError, MemoryError, RuntimeError):  # taken by another process meanwhile
        for _ in range(num_bytes // chunk_bytes):
            chunks.append(torch.empty(chunk_bytes // 8, dtype=torch.int64, device=device))
    return chunks


_DEVICE_SHARE = 0.9  # of free GPU memory
_HOST_SHARE, _HOST_CAP_BYTES = 0.2, 1 << 30  # of free host memory, for all ranks


def bytes_to_fill(device: torch.device, num_ranks: int) -> int:
    """Per rank 90% of its GPU's free memory; of a host 20%, at most 1 GiB, split among its ranks."""
    if device.type == "cuda":
        return int(_DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(min(_HOST_CAP_BYTES, _HOST_SHARE * free_host_bytes()) / num_ranks)


def free_host_bytes() -> int:
    """Memory still available on this host, or in the container of this process."""
    # /dev/shm is memory as well, and may be in use.
    in_use = shutil.disk_usage("/dev/shm").used if Path("/dev/shm").is_dir() else 0
    return max(0, available_memory_bytes() - in_use)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
