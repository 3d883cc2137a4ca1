"""The kernels of routing and row order as compiled for GPUs that are not there."""

from functools import partial
from importlib.metadata import version

import pytest

pytest.importorskip("triton")

from helpers.layers.compiled import SHARED_LIMIT, compiled
from helpers.layers.kernel_launches import Sizes, chunks, kept, padded, routed, routed_back, rows_in_order

LAUNCHES = {
    "topk": routed,
    "topk, 512 experts": partial(routed, at=Sizes(routed=512)),
    "topk, bias and padding": partial(routed, score="sigmoid", extras=True),
    "topk backward": routed_back,
    "topk backward, padding": partial(routed_back, score="sqrtsoftplus", extras=True),
    "rows": rows_in_order,
    "chunks": chunks,
    "kept": kept,
    "kept, the first": partial(kept, by_weight=False),
    "padded": padded,
}


SLOW = [pytest.param(capability, marks=pytest.mark.slow) for capability in (90, 100)]


@pytest.mark.parametrize("capability", [80, *SLOW])
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_fit_and_spill_nothing(name, capability):
    kernels = compiled(LAUNCHES[name], capability)
    assert kernels
    for kernel in kernels:
        # Triton 3.8, of torch 2.14, spills one value of this kernel.
        spilled = 8 if version("triton").startswith("3.8.") and name == "topk" and capability == 80 else 0
        assert kernel.stack_bytes == spilled, kernel.name
        assert kernel.shared_bytes <= SHARED_LIMIT[86]
        # those of a histogram stay in shared memory
        assert "red.global" not in kernel.ptx and "atom.global" not in kernel.ptx


def test_rows_move_16_bytes_at_a_time():
    (kernel,) = compiled(rows_in_order, 80)
    assert "ld.global.v4.b32" in kernel.ptx and "st.global.v4.b32" in kernel.ptx


@pytest.mark.parametrize("capability", [80, 90, SLOW[1]])
@pytest.mark.parametrize("experts", [64, 256, 512, 1024])
@pytest.mark.parametrize("sources", [1, 8])
def test_registers_of_the_chunk_order_do_not_grow_with_experts(sources, experts, capability):
    (kernel,) = compiled(partial(chunks, sources, at=Sizes(routed=experts)), capability)
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 32


@pytest.mark.parametrize("launch", [routed, partial(routed, score="sigmoid", extras=True)])
def test_four_programs_of_the_router_fit_on_a_processor(launch):
    (kernel,) = compiled(launch, 80)
    assert kernel.registers * 32 * 4 * 4 <= 65536
