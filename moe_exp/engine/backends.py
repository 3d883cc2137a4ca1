"""Which code each part runs on this host and why: decided by the parts, collected here for display."""

from collections.abc import Sequence

import torch

from moe_exp.config import Config
from moe_exp.config.choices import OPTIMIZERS
from moe_exp.engine.model import DTYPES, moe_options, transformer_config, use_te
from moe_exp.engine.optimizer_setup import choose_optimizer
from moe_exp.engine.runtime import choose_communication
from moe_exp.layers import native
from moe_exp.layers.experts.grouped_gemm import choose_backend
from moe_exp.layers.kernel_choice import KernelFailure, choose_routing, failure_of
from moe_exp.layers.megatron.attention import choose_attention
from moe_exp.layers.megatron.moe_parts import balancing_losses, router_config
from moe_exp.layers.megatron.norm import choose_norm
from moe_exp.layers.megatron.token_loss import choose_cross_entropy
from moe_exp.layers.moe_layer import needs_scores
from moe_exp.layers.router import kernel_problem


def backends_of(
    config: Config, device_type: str, kernel_failures: Sequence[KernelFailure] = ()
) -> dict[str, tuple[str, str]]:
    """Backends of a run on `cpu` or `cuda`: part to (what runs, why).

    `kernel_failures`: parts of the model that do not use their kernels, from `kernel_checks.check_run`.
    """
    found = chosen_backends(
        device_type=device_type,
        dtype=DTYPES[config.dtype],
        expert_backend=config.expert_backend,
        routing_kernels=config.routing_kernels,
        router_problem=_router_problem(config),
        cross_entropy=config.cross_entropy,
        use_te=use_te(config),
        other_value_size=config.multi_latent_attention and config.v_head_dim != config.kv_channels,
        documents=config.document_mask,
        optimizer=(
            config.optimizer,
            config.optimizer_state_dtype,
            getattr(config, OPTIMIZERS[config.optimizer].momentum or "sgd_momentum"),
        ),
        kernel_failures=kernel_failures,
    )
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


def _router_problem(config: Config) -> str:
    if not config.use_moe:
        return ""
    settings = transformer_config(config)
    router = router_config(settings, moe_options(config)["router"])
    return kernel_problem(router, needs_scores=needs_scores(balancing_losses(settings)))


def chosen_backends(
    *,
    device_type: str,
    dtype: torch.dtype,
    expert_backend: str = "auto",
    routing_kernels: str = "auto",
    router_problem: str = "",
    cross_entropy: str = "auto",
    use_te: bool = False,
    other_value_size: bool = False,
    documents: bool = False,
    optimizer: tuple[str, str, float] = ("adam", "fp32", 0.9),
    kernel_failures: Sequence[KernelFailure] = (),
) -> dict[str, tuple[str, str]]:
    """Part to (what runs, why).

    Args:
        dtype: of weights and activations.
        router_problem: why the router takes no kernel, see `layers.router.kernel_problem`.
        use_te: the parts around the MoE layer are Transformer Engine's.
        other_value_size: value heads differ in size from query heads (MULTI_LATENT_ATTENTION).
        documents: attention stays inside documents (DOCUMENT_MASK), which is our code also with `use_te`.
        optimizer: OPTIMIZER, OPTIMIZER_STATE_DTYPE and its momentum.
        kernel_failures: parts that do not use their kernels.
    """
    te = ("Transformer Engine", "IMPL=te, or auto with it installed")
    attention = choose_attention(device_type, dtype, other_value_size=other_value_size)
    if documents:
        attention = (f"{attention[0]} by document", f"{attention[1]}; DOCUMENT_MASK=true")
    found = {
        "communication": choose_communication(),
        "attention": te if use_te and not documents else attention,
        "norm": te if use_te else choose_norm(device_type),
        "grouped GEMM": choose_backend(
            expert_backend,
            device_type=device_type,
            dtype=dtype,
            failure=failure_of("experts", kernel_failures),
        ),
        "routing": choose_routing(
            routing_kernels,
            device_type=device_type,
            router_problem=router_problem,
            failure=failure_of("routing", kernel_failures),
        ),
        "cross entropy": choose_cross_entropy(
            cross_entropy,
            device_type=device_type,
            failure=failure_of("cross entropy", kernel_failures),
        ),
        "optimizer": choose_optimizer(*optimizer),
    }
    if device_type == "cpu":
        loaded, reason = native.library()
        found["CPU functions"] = ("torch" if loaded is None else "C++", reason)
    return found
