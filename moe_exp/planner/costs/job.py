"""A job to plan: the settings of a run, and what else costs depend on: its program (`Engine`). No torch.

It is made from settings of this package (`PlannedJob.of`), or from a row of measured runs of other programs
(`measured.py`): with tied weights, biases, and the ZeRO-1 optimizer of Megatron-DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from moe_exp.config import Config
from moe_exp.planner.costs.params import RankParameters, parameters_of_stages
from moe_exp.planner.costs.products import Shape, products

Sharding = Literal["none", "zero1", "distributed"]
MeasuredBy = Literal["nvidia-smi", "allocated", "rss"]
Precision = Literal["fp32", "fp16", "bf16", "bf16_fp32grad"]


@dataclass(frozen=True)
class Engine:
    """The program of a run. The defaults are this package's."""

    dispatcher: str = ""  # token dispatcher that DISPATCHER does not have: hybridep. Empty: DISPATCHER
    # tokens of one micro-batch are exchanged while another one is computed
    overlaps_exchange: bool = False
    # collectives of tensor parallel ranks run beside the products before or after them
    overlaps_tensor_parallel: bool = False
    # parts of a layer that run as CUDA graphs: attn, mlp, moe_router, moe_preprocess; all: the iteration
    graphs: frozenset[str] = frozenset()
    # a fixed number of rows per rank for its experts, with kernels that wait for no count of them
    static_rows: bool = False
    # modules that are computed again in the backward pass, beside RECOMPUTE: layernorm, mla_up_proj,
    # core_attn, mlp (of layers without experts)
    recompute: frozenset[str] = frozenset()
    is_nvfp4: bool = False  # products that FP8 names are in NVFP4
    fp8_attention: bool = False  # attention scores and weighted values are in FP8
    shards_parameters: bool = False  # FSDP: parameters are gathered and gradients reduced layer by layer
    gradient_bytes: float = 4.0  # per parameter, between micro-batches
    reduced_bytes: float = 4.0  # per gradient, as it is sent
    gathered_bytes: float | None = None  # per weight, as it is sent; None: in the compute type
    state_bytes: float | None = None  # per parameter in the optimizer; None: by OPTIMIZER
    num_mtp_layers: int = 0  # last layers of the model that predict tokens ahead, with an output layer each
    clamped_swiglu: bool = False  # the activation of GPT-OSS, by unfused kernels
    window: int = 0  # tokens that every second layer's attention sees; 0: all
    balanced: bool = False  # tokens are sent to all experts alike, whatever the router says


OURS = Engine()


@dataclass(frozen=True)
class PlannedJob:
    """A run whose costs are asked for."""

    config: Config  # the settings
    stage_layers: tuple[int, ...]  # layers of every pipeline stage; a stage may have none
    # compute type; bf16_fp32grad is bf16 with gradients in fp32, as this package has them
    precision: Precision
    # where the optimizer's state is: on every rank, by DeepSpeed's ZeRO-1, or by Megatron's distributed
    # optimizer
    sharding: Sharding
    sequence_parallel: bool  # whether tensor parallel ranks share what lies between the products of a layer
    fused_attention: bool  # whether scores are never written to memory (flash attention)
    learned_positions: bool = False  # whether the embedding has a row for every position
    # what a measured run ran on, if its row says so: constants may depend on it. Empty: this package.
    software: str = ""
    # what a memory figure means: `nvidia-smi` includes context, NCCL buffers and fragmentation, `allocated`
    # is the peak of torch's allocator, `rss` that of the resident size of a CPU process
    measured_by: MeasuredBy = "nvidia-smi"
    engine: Engine = OURS  # the program, as far as settings do not say it

    @classmethod
    def of(cls, config: Config) -> PlannedJob:
        """The job that `moe-exp train` would run with these settings."""
        precision: Precision = "bf16_fp32grad" if config.dtype == "bf16" else config.dtype
        return cls(
            config=config,
            stage_layers=tuple(config.stage_layers),
            precision=precision,
            sharding="distributed" if config.distributed_optimizer else "none",
            sequence_parallel=config.tp > 1,
            fused_attention=True,
        )

    @property
    def of_deepspeed(self) -> bool:
        """Whether Megatron-DeepSpeed ran it, which alone of the engines here learns positions."""
        return self.learned_positions

    @cached_property
    def parameters(self) -> list[RankParameters]:
        return parameters_of_stages(self.config, self.stage_layers, learned_positions=self.learned_positions)

    @cached_property
    def products(self) -> dict[str, list[Shape]]:
        """Products of its layers, see `products.products`."""
        return products(self.config, sequence_parallel=self.sequence_parallel)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of an iteration per data parallel rank, at least 1."""
        return max(1, self.config.num_microbatches)
