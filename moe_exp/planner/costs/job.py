"""A job to plan: the settings of a run, and the training program (`Engine`). This module needs no torch.

Jobs are built from this package's settings (`PlannedJob.of`) or from measured runs of other programs
(`measured.py`), such as Megatron-DeepSpeed with its ZeRO-1 optimizer.
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
    """Properties of the training program. The defaults describe this package."""

    dispatcher: str = ""  # token dispatcher that DISPATCHER does not offer: hybridep; empty: DISPATCHER
    overlaps_exchange: bool = False  # exchanges tokens of one micro-batch while computing another
    overlaps_tensor_parallel: bool = False  # overlaps tensor-parallel collectives with adjacent products
    # parts of a layer in CUDA graphs: attn, mlp, moe_router, moe_preprocess; all: the whole iteration
    graphs: frozenset[str] = frozenset()
    static_rows: bool = False  # fixed number of rows per rank for its experts, without waiting for counts
    # modules recomputed in the backward pass in addition to RECOMPUTE: of RECOMPUTE_MODULES, or layernorm and
    # mlp (in layers without experts)
    recompute: frozenset[str] = frozenset()
    is_nvfp4: bool = False  # products selected by FP8 use NVFP4
    fp8_attention: bool = False  # attention scores and weighted values in FP8
    shards_parameters: bool = False  # FSDP: gathers parameters and reduces gradients layer by layer
    gradient_bytes: float = 4.0  # per parameter, between micro-batches
    reduced_bytes: float = 4.0  # per gradient in the reduce
    gathered_bytes: float | None = None  # per weight in the gather; None: by the compute type
    state_bytes: float | None = None  # per parameter in the optimizer; None: by OPTIMIZER
    num_mtp_layers: int = 0  # final multi-token prediction layers, each with an output layer
    clamped_swiglu: bool = False  # GPT-OSS's activation in unfused kernels
    balanced: bool = False  # distributes tokens evenly over the experts, ignoring the router


OURS = Engine()


@dataclass(frozen=True)
class PlannedJob:
    """A run to plan."""

    config: Config
    stage_layers: tuple[int, ...]  # layers of each pipeline stage, possibly 0
    precision: Precision  # compute type; bf16_fp32grad accumulates gradients in fp32
    sharding: Sharding  # of the optimizer state: none, DeepSpeed's ZeRO-1, Megatron's distributed optimizer
    sequence_parallel: bool  # whether tensor-parallel ranks split the activations between the products
    fused_attention: bool  # whether scores are never written to memory (flash attention)
    of_deepspeed: bool = False  # whether Megatron-DeepSpeed ran the job, with a row per position to embed
    # software period of a measured run, on which constants may depend; empty: this package
    software: str = ""
    # how memory is measured: `nvidia-smi` includes context, NCCL buffers and fragmentation; `allocated` is
    # the peak of PyTorch's allocator; `rss` is the peak resident size of a CPU process
    measured_by: MeasuredBy = "nvidia-smi"
    engine: Engine = OURS  # properties of the program beyond the settings

    @classmethod
    def of(cls, config: Config) -> PlannedJob:
        """Returns the job that `moe-exp train` would run with these settings."""
        precision: Precision = config.dtype
        if config.dtype == "bf16" and config.grad_dtype == "fp32":
            precision = "bf16_fp32grad"
        gradient = 2.0 if config.grad_dtype == "bf16" else 4.0
        return cls(
            config=config,
            stage_layers=tuple(config.stage_layers),
            precision=precision,
            sharding="distributed" if config.distributed_optimizer else "none",
            sequence_parallel=config.tp > 1,
            fused_attention=True,
            engine=Engine(
                gradient_bytes=gradient,
                reduced_bytes=gradient,
                recompute=config.recomputed if config.recompute_modules else frozenset(),
            ),
        )

    @property
    def num_outputs(self) -> int:
        """Output layers on the last stage: one, plus one per multi-token prediction layer."""
        return 1 + self.engine.num_mtp_layers + self.config.mtp_num_layers

    @property
    def all_stage_layers(self) -> list[int]:
        """Layers per pipeline stage; the last stage has MTP_NUM_LAYERS more, for multi-token prediction."""
        return [*self.stage_layers[:-1], self.stage_layers[-1] + self.config.mtp_num_layers]

    @cached_property
    def parameters(self) -> list[RankParameters]:
        return parameters_of_stages(self.config, self.stage_layers, learned_positions=self.of_deepspeed)

    @cached_property
    def products(self) -> dict[str, list[Shape]]:
        """Matrix products of the job's layers (see `products.products`)."""
        return products(self.config, sequence_parallel=self.sequence_parallel)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches per iteration and data-parallel rank, at least 1."""
        return max(1, self.config.num_microbatches)
