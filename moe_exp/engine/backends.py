"""Which code each part runs on this host and why: decided by the parts, collected here for display."""

from collections.abc import Sequence

from moe_exp.config import Config
from moe_exp.engine.model import DTYPES, router_problem, use_te
from moe_exp.engine.optimizer_setup import choose_optimizer
from moe_exp.engine.runtime import choose_communication
from moe_exp.layers import native
from moe_exp.layers.experts.grouped_gemm import choose_backend
from moe_exp.layers.kernel_choice import KernelFailure, choose_routing, failure_of
from moe_exp.layers.megatron.attention import choose_attention
from moe_exp.layers.megatron.norm import choose_norm
from moe_exp.layers.megatron.token_loss import choose_cross_entropy


def backends_of(
    config: Config, device_type: str, kernel_failures: Sequence[KernelFailure] = ()
) -> dict[str, tuple[str, str]]:
    """Backends of a run on `cpu` or `cuda`: part to (what runs, why).

    `kernel_failures`: parts of the model that do not use their kernels, from `kernel_checks.check_run`.
    """
    dtype, has_te = DTYPES[config.dtype], use_te(config)
    te = ("Transformer Engine", "IMPL=te, or auto with it installed")
    other_value_size = config.multi_latent_attention and config.v_head_dim != config.kv_channels
    attention = choose_attention(device_type, dtype, other_value_size=other_value_size)
    if config.document_mask:  # our code, also with Transformer Engine
        attention = (f"{attention[0]} by document", f"{attention[1]}; DOCUMENT_MASK=true")
    elif has_te:
        attention = te
    found = {
        "communication": choose_communication(),
        "attention": attention,
        "norm": te if has_te else choose_norm(device_type),
        "grouped GEMM": choose_backend(
            config.expert_backend,
            device_type=device_type,
            dtype=dtype,
            failure=failure_of("experts", kernel_failures),
        ),
        "routing": choose_routing(
            config.routing_kernels,
            device_type=device_type,
            router_problem=router_problem(config),
            failure=failure_of("routing", kernel_failures),
        ),
        "cross entropy": choose_cross_entropy(
            config.cross_entropy,
            device_type=device_type,
            failure=failure_of("cross entropy", kernel_failures),
        ),
        "optimizer": choose_optimizer(config),
    }
    if device_type == "cpu":
        loaded, reason = native.library()
        found["CPU functions"] = ("torch" if loaded is None else "C++", reason)
    if config.use_moe and config.token_rounding:
        rounded = (
            "in training an expert's rows of a micro-batch are rounded down to a multiple, the slots of"
            " lowest weight are dropped"
        )
        found["token rounding"] = (str(config.token_rounding), rounded)
    if config.is_fp8_by_kernels:
        found["FP8"] = ("e4m3", "products of the experts, with scales of blocks of 128; asked for by FP8")
    if config.deterministic:
        found["algorithms"] = ("deterministic", "DETERMINISTIC=true; an operation that has none ends the run")
    return found
