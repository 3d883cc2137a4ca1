"""The free constants of the planner, each with its expected value before anything was measured. No torch.

Memory and time have a dataclass of them each. `calibration.py` fits them; the fitted values of the package
are in `profiles/constants.json`, from `profiles/measured_runs.csv`.
"""

from dataclasses import dataclass, field, fields
from typing import Any


def free(prior: float, spread: float, meaning: str) -> Any:
    """A field of a dataclass of constants: the value expected, more than 0, the standard deviation of its
    logarithm (0.1 for one that is known within about 10%), and what it is, with its unit.
    """
    return field(default=prior, metadata={"prior": prior, "spread": spread, "meaning": meaning})


@dataclass(frozen=True)
class TimeConstants:
    """Constants that no formula gives; fitted to measured runs by `calibration.py`."""

    matrix_efficiency: float = free(
        0.85, 0.2, "share of the peak that a long product with full waves reaches"
    )
    half_depth: float = free(400.0, 0.7, "inner dimension at which a product reaches half of that")
    memory_efficiency: float = free(0.8, 0.3, "bandwidth of elementwise operations, by the memory's")
    unaligned: float = free(6.0, 0.5, "times that a product with rows of no multiple of 16 bytes takes")
    unaligned_v100: float = free(2.0, 0.4, "the same on V100")
    v100_share: float = free(0.75, 0.2, "matrix_efficiency of a V100, as a share of that of others")
    layer_seconds: float = free(
        5e-4, 0.7, "seconds of a layer's pass beside products and traffic: kernel starts"
    )
    iteration_seconds: float = free(
        5e-3, 1.0, "seconds of an iteration on the host: data, logs, optimizer loop"
    )
    tensor_bandwidth: float = free(0.4, 0.4, "share of the bandwidth that tensor parallel ranks reach")
    stage_bandwidth: float = free(1.5, 0.7, "the same between pipeline stages, which also overlap in part")
    data_bandwidth: float = free(0.5, 0.6, "the same between data parallel ranks")
    exchange_seconds_2024: float = free(
        1e-3, 0.7, "seconds per peer of a token exchange by software of 2024-10"
    )
    software_a: float = free(1.02, 0.05, "time of the software up to 2022-02-24, in that of a few days later")
    software_c: float = free(1.05, 0.05, "the same of June 2022")
    # Of one cluster, 1 in the package: only `calibrate` with a prior fits them. What all runs of a kind share
    # on it and no other constant explains; that of dense models says nothing about MoE.
    own_dense: float = free(1.0, 0.5, "time of dense models on this cluster, by that on others")
    own_moe: float = free(1.0, 0.5, "time of MoE models on this cluster, by that on others")
    # Of devices newer than Ampere, and of the programs that run on them, which use none of the above but
    # `unaligned`.
    recent_matrix: float = free(0.85, 0.1, "matrix_efficiency there")
    blackwell_matrix: float = free(1.0, 0.3, "the same of Blackwell, by that of Hopper")
    ultra_matrix: float = free(1.1, 0.1, "the same of Blackwell Ultra, by that of Blackwell")
    blackwell_fp8: float = free(1.0, 0.15, "fp8_matrix and fp4_matrix of Blackwell, by those of Hopper")
    power: float = free(0.7, 0.2, "exponent of the power limit in the speed of Blackwell's products")
    recent_depth: float = free(400.0, 0.5, "half_depth there")
    recent_memory: float = free(0.8, 0.1, "memory_efficiency there")
    blackwell_memory: float = free(0.8, 0.15, "the same of Blackwell, by that of Hopper")
    grouped_matrix: float = free(0.8, 0.2, "matrix_efficiency of the experts' products, by that of others")
    fp8_matrix: float = free(1.0, 0.1, "share of its peak that FP8 reaches, by that of bf16")
    fp4_matrix: float = free(0.9, 0.15, "the same of NVFP4")
    elementwise: float = free(1.0, 0.4, "bytes of norms, residuals and activations, by those of fused ones")
    clamped_swiglu: float = free(2.0, 0.7, "bytes of the activation of GPT-OSS, by those of SwiGLU")
    slot_bytes: float = free(1.0, 0.4, "bytes of gathering rows for experts, by those of fused kernels")
    static_rows: float = free(0.8, 0.3, "time of rows and activations with a fixed number of rows")
    cast_bytes: float = free(1.0, 0.3, "bytes of FP8 casts, by those of a fused kernel for each")
    attention_share: float = free(0.65, 0.15, "share of the peak that flash attention reaches")
    fp8_attention: float = free(0.7, 0.15, "the same in FP8, by that in bf16")
    exponentials: float = free(0.5, 0.3, "share of softmax's exponentials that products do not hide")
    host_dense: float = free(1.5e-3, 0.4, "seconds of the host for attention, norms and MLP of a layer")
    host_moe: float = free(2e-3, 0.4, "seconds of the host for router and exchange of a layer")
    host_overlap: float = free(
        1.2, 0.2, "seconds of the host for an MoE layer whose exchange overlaps, by others"
    )
    host_sharded: float = free(1e-4, 0.5, "seconds of the host for each weight of a layer that FSDP shards")
    host_expert: float = free(3e-4, 0.5, "seconds of the host for each expert of a rank")
    host_fp8: float = free(1.5, 0.3, "seconds of the host for products in FP8, by those in bf16")
    host_grace: float = free(1.2, 0.1, "seconds of a Grace processor as host, by those of an x86")
    host_graph: float = free(0.1, 0.5, "seconds of the host for what is in a CUDA graph, by those without")
    host_serial: float = free(0.15, 0.5, "share of the shorter of host and device that does not overlap")
    link_ring: float = free(0.67, 0.1, "share of NVLink that rings of ranks reach")
    network_ring: float = free(0.7, 0.2, "share of the network that rings of ranks reach")
    stage_exposed: float = free(0.3, 0.7, "share of messages between stages that nothing hides")
    tensor_exposed: float = free(0.5, 0.3, "share of tensor parallel traffic that overlap does not hide")
    context_exposed: float = free(0.3, 0.5, "share of context parallel traffic that attention does not hide")
    link_all_to_all: float = free(0.68, 0.1, "share of NVLink that an all-to-all of NCCL reaches")
    link_deduplicated: float = free(0.85, 0.1, "share of NVLink that DeepEP and HybridEP reach")
    network_exchange: float = free(0.88, 0.1, "share of the network that a token exchange reaches")
    exchange_seconds: float = free(5e-5, 0.5, "seconds of a token exchange of no bytes")
    exchange_exposed: float = free(0.3, 0.4, "share of an overlapped exchange that stays visible")
    sharded_exposed: float = free(0.3, 0.5, "share of FSDP's traffic that products do not hide")
    skew: float = free(1.15, 0.1, "time of experts and exchange with the router's load, by a balanced one")


OWN = ("own_dense", "own_moe")
_NAMES = [one.name for one in fields(TimeConstants)]
# Constants of devices newer than Ampere, which are fitted to published runs.
RECENT = tuple(_NAMES[_NAMES.index("recent_matrix") :])
