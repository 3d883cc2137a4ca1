"""Fitted constants of the planner's time estimates, each with a prior. No torch.

`memory.py` has the memory constants. `calibration.py` fits both kinds; the package's fitted values are in
`profiles/constants.json`.
"""

from dataclasses import dataclass, field, fields
from typing import Any


def free(prior: float, spread: float, meaning: str) -> Any:
    """Returns a dataclass field for a fitted constant. `prior`: its expected value, above 0; `spread`: the
    standard deviation of its logarithm (0.1 if it is known to within about 10%); `meaning`: a description
    with the unit.
    """
    return field(default=prior, metadata={"prior": prior, "spread": spread, "meaning": meaning})


@dataclass(frozen=True)
class TimeConstants:
    """Constants that cannot be derived from a formula. `calibration.py` fits them to measured runs."""

    matrix_efficiency: float = free(0.85, 0.2, "share of peak FLOP/s at large inner dimension and full waves")
    half_depth: float = free(400.0, 0.7, "inner dimension at which a product reaches half of its top speed")
    memory_efficiency: float = free(0.8, 0.3, "share of memory bandwidth that elementwise operations reach")
    unaligned: float = free(6.0, 0.5, "slowdown of products whose row size is not a multiple of 16 bytes")
    unaligned_v100: float = free(2.0, 0.4, "slowdown of products with unaligned rows on V100")
    v100_share: float = free(0.75, 0.2, "matrix_efficiency of V100, relative to other devices")
    layer_seconds: float = free(5e-4, 0.7, "kernel launch seconds per pass of a layer")
    iteration_seconds: float = free(5e-3, 1.0, "host seconds per iteration: data, logs, optimizer loop")
    tensor_bandwidth: float = free(0.4, 0.4, "share of bandwidth that tensor-parallel ranks reach")
    stage_bandwidth: float = free(1.5, 0.7, "share of bandwidth between stages (messages partly overlap)")
    data_bandwidth: float = free(0.5, 0.6, "share of bandwidth that data-parallel ranks reach")
    exchange_seconds_2024: float = free(1e-3, 0.7, "seconds per peer of a token exchange in October 2024")
    software_a: float = free(1.02, 0.05, "time with software up to 2022-02-24, relative to a few days later")
    software_c: float = free(1.05, 0.05, "time with software of June 2022, relative to late February 2022")
    # Properties of one cluster that no other constant explains; 1 in the package, fitted only by `calibrate`
    # with a prior. Two constants, since the residual of dense models does not transfer to MoE.
    own_dense: float = free(1.0, 0.5, "time of dense models on this cluster, relative to other clusters")
    own_moe: float = free(1.0, 0.5, "time of MoE models on this cluster, relative to other clusters")
    # Devices newer than Ampere and the programs on them. Of the constants above, they only use `unaligned`.
    recent_matrix: float = free(0.85, 0.1, "matrix_efficiency on devices newer than Ampere")
    blackwell_matrix: float = free(1.0, 0.3, "matrix_efficiency of Blackwell, relative to Hopper")
    ultra_matrix: float = free(1.1, 0.1, "matrix_efficiency of Blackwell Ultra, relative to Blackwell")
    blackwell_fp8: float = free(1.0, 0.15, "fp8_matrix and fp4_matrix of Blackwell, relative to Hopper")
    power: float = free(0.7, 0.2, "exponent of the power limit in Blackwell's matrix product speed")
    recent_depth: float = free(400.0, 0.5, "half_depth on devices newer than Ampere")
    recent_memory: float = free(0.8, 0.1, "memory_efficiency on devices newer than Ampere")
    blackwell_memory: float = free(0.8, 0.15, "memory_efficiency of Blackwell, relative to Hopper")
    grouped_matrix: float = free(0.8, 0.2, "matrix_efficiency of expert products, relative to other products")
    fp8_matrix: float = free(1.0, 0.1, "share of peak that FP8 products reach, relative to bf16")
    fp4_matrix: float = free(0.9, 0.15, "share of peak that NVFP4 products reach, relative to bf16")
    elementwise: float = free(1.0, 0.4, "bytes of norms, residuals, activations, relative to fused kernels")
    clamped_swiglu: float = free(2.0, 0.7, "bytes of GPT-OSS's activation, relative to SwiGLU")
    slot_bytes: float = free(1.0, 0.4, "bytes for gathering the experts' rows, relative to fused kernels")
    static_rows: float = free(0.8, 0.3, "relative time of gathering and activating a fixed number of rows")
    cast_bytes: float = free(1.0, 0.3, "bytes of FP8 casts, relative to one fused kernel per cast")
    attention_share: float = free(0.65, 0.15, "share of peak that flash attention reaches")
    fp8_attention: float = free(0.7, 0.15, "time of attention in FP8, relative to bf16")
    exponentials: float = free(0.5, 0.3, "share of softmax exponentials not hidden by matrix products")
    host_dense: float = free(1.5e-3, 0.4, "host seconds for attention, norms and MLP of a layer")
    host_moe: float = free(2e-3, 0.4, "host seconds for router and token exchange of a layer")
    host_overlap: float = free(1.2, 0.2, "host_moe with an overlapped exchange, relative to no overlap")
    host_sharded: float = free(1e-4, 0.5, "host seconds per FSDP-sharded weight of a layer")
    host_expert: float = free(3e-4, 0.5, "host seconds per expert of a rank")
    host_fp8: float = free(1.5, 0.3, "host seconds for products in FP8, relative to bf16")
    host_grace: float = free(1.2, 0.1, "host seconds of a Grace CPU, relative to x86")
    host_graph: float = free(0.1, 0.5, "host seconds in a CUDA graph, relative to single kernel launches")
    host_serial: float = free(0.15, 0.5, "non-overlapped share of the shorter of host and device time")
    link_ring: float = free(0.67, 0.1, "share of NVLink bandwidth that rings reach")
    network_ring: float = free(0.7, 0.2, "share of network bandwidth that rings reach")
    stage_exposed: float = free(0.3, 0.7, "share of messages between stages that computation does not hide")
    tensor_exposed: float = free(0.5, 0.3, "share of tensor-parallel traffic that overlap does not hide")
    context_exposed: float = free(0.3, 0.5, "share of context-parallel traffic that attention does not hide")
    link_all_to_all: float = free(0.68, 0.1, "share of NVLink bandwidth that an NCCL all-to-all reaches")
    link_deduplicated: float = free(0.85, 0.1, "share of NVLink bandwidth that DeepEP and HybridEP reach")
    network_exchange: float = free(0.88, 0.1, "share of network bandwidth that a token exchange reaches")
    exchange_seconds: float = free(5e-5, 0.5, "latency of a token exchange in seconds")
    exchange_exposed: float = free(0.3, 0.4, "share of an overlapped token exchange that is not hidden")
    sharded_exposed: float = free(0.3, 0.5, "share of FSDP communication that computation does not hide")
    skew: float = free(1.15, 0.1, "time of experts and token exchange, relative to a balanced load")


OWN = ("own_dense", "own_moe")
_NAMES = [one.name for one in fields(TimeConstants)]
# Constants of devices newer than Ampere, fitted to published runs. Relies on the order of the fields.
RECENT = tuple(_NAMES[_NAMES.index("recent_matrix") :])
