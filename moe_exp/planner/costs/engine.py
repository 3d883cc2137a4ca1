"""What a training program does beside the settings of this package, as far as it changes costs. No torch."""

from __future__ import annotations

from dataclasses import dataclass


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
    gathered_bytes: float = 2.0  # per weight, as it is sent
    state_bytes: float | None = None  # per parameter in the optimizer; None: by OPTIMIZER
    num_mtp_layers: int = 0  # last layers of the model that predict tokens ahead, with an output layer each
    window: int = 0  # tokens that every second layer's attention sees; 0: all
    balanced: bool = False  # tokens are sent to all experts alike, whatever the router says
    offloads: bool = False  # activations or optimizer states are in the memory of the host


OURS = Engine()
