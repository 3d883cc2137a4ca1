"""Chooses the backend of each part of a run; tests and tunes the run's Triton kernels.

All ranks choose the same backends. If a kernel gives wrong results on any rank, the setting of its part
(EXPERT_BACKEND, ROUTING_KERNELS or CROSS_ENTROPY) decides: with `auto`, the part uses no Triton kernels; if
the setting requests the kernel by name, the run fails to start.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.choices import SCORES
from moe_exp.engine.adamw import check_step
from moe_exp.engine.fused_step import choose_step
from moe_exp.engine.graphs import choose_graph
from moe_exp.engine.model import (
    DTYPES,
    moe_options,
    overlaps,
    router_problem,
    sum_problem,
    transformer_config,
    use_te,
)
from moe_exp.engine.optimizer_setup import choose_optimizer
from moe_exp.engine.runtime import Runtime, choose_communication, from_all_ranks, from_first_rank
from moe_exp.layers import native
from moe_exp.layers.experts.grouped_gemm import choose_backend
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.cross_entropy import choose_cross_entropy
from moe_exp.layers.kernels.launch import KernelFailure, choose_routing, failure_of, missing
from moe_exp.layers.kernels.self_test import KernelCheck, Sizes, can_check, check_kernels, timing_cases
from moe_exp.layers.kernels.tuning import TUNED, Key, choices, take_choices
from moe_exp.layers.megatron.attention_backends import AttentionRule, choose_attention
from moe_exp.layers.megatron.moe_parts import router_config
from moe_exp.layers.megatron.residual import check_sum_norm, choose_norm
from moe_exp.layers.megatron.rotary import check_rotated, choose_rotary

logger = logging.getLogger(__name__)


def _expert_backend(config: Config, device_type: str, failure: str = "") -> tuple[str, str]:
    options: dict[str, Any] = {"device_type": device_type, "dtype": DTYPES[config.dtype]}
    return choose_backend(config.expert_backend, failure=failure, **options)


def backends_of(
    config: Config, device_type: str, kernel_failures: Sequence[KernelFailure] = (), graph_failure: str = ""
) -> dict[str, tuple[str, str]]:
    """(backend, reason) of each part of a run on `cpu` or `cuda`.

    `kernel_failures` is the result of `check_run`, and `graph_failure` is the result of
    `training.microbatch.start_graphs`.
    """

    def options(part: str) -> dict[str, Any]:
        return {"device_type": device_type, "failure": failure_of(part, kernel_failures)}

    has_te, te = use_te(config), ("Transformer Engine", "IMPL=te, or IMPL=auto and it is installed")
    found = {
        "communication": choose_communication(),
        **_attention_backends(config, device_type, te if has_te else None),
        "norm": te if has_te else choose_norm(problem=sum_problem(config), **options("norm")),
        "grouped GEMM": _expert_backend(config, **options("experts")),
        "routing": choose_routing(
            config.routing_kernels, router_problem=router_problem(config), **options("routing")
        ),
        "cross entropy": choose_cross_entropy(config.cross_entropy, **options("cross entropy")),
        "optimizer": choose_optimizer(config, **options("optimizer")),
    }
    if device_type == "cuda" and not has_te:
        is_fused = transformer_config(config).apply_rope_fusion
        found["rotary embedding"] = choose_rotary(is_fused, **options("rotary embedding"))
    found["graph"] = choose_graph(
        config, device_type=device_type, expert_backend=found["grouped GEMM"][0] if config.use_moe else "",
        has_te=has_te, overlaps=overlaps(config), failure=graph_failure,
    )  # fmt: skip
    if device_type == "cpu":
        loaded, reason = native.library()
        found["CPU functions"] = ("torch" if loaded is None else "C++", reason)
    if config.use_moe and config.token_rounding:
        rounded = "in training, tokens per expert and micro-batch are rounded down to multiples of this value"
        found["token rounding"] = (str(config.token_rounding), f"{rounded}; the lowest weights are dropped")
    if config.is_fp8_by_kernels:
        found["FP8"] = ("e4m3", "expert GEMMs with scales per block of 128; requested by FP8")
    if config.deterministic:
        reason = "DETERMINISTIC=true; an operation without a deterministic algorithm ends the run"
        found["algorithms"] = ("deterministic", reason)
    return found


def _attention_backends(
    config: Config, device_type: str, te: tuple[str, str] | None
) -> dict[str, tuple[str, str]]:
    """(backend, reason) of attention with and without a window.

    `te`: (backend, reason) if Transformer Engine is used, else None.
    """
    if te and not (config.document_mask or config.needs_own_attention):
        return {"attention": te}
    found = {}
    for has_window, has_sinks in sorted(set(zip(config.window_layers, config.sink_layers, strict=True))):
        window = config.sliding_window if has_window else 0
        rule = AttentionRule(1.0, window, config.attention_softcap, has_sinks)
        chosen, reason = choose_attention(
            device_type, DTYPES[config.dtype], rule, requested=config.attention_backend,
            by_document=config.document_mask, dropout=config.attention_dropout,
            other_value_size=config.multi_latent_attention and config.v_head_dim != config.kv_channels,
        )  # fmt: skip
        if config.document_mask:  # our attention core, even with Transformer Engine
            chosen, reason = f"{chosen} by document", f"{reason}; DOCUMENT_MASK=true"
        found["attention in windows" if has_window else "attention"] = chosen, reason
    return found


# setting of each part with kernels; optimizer, rotary embedding and norm have none
PARTS = {
    "experts": "EXPERT_BACKEND", "routing": "ROUTING_KERNELS", "cross entropy": "CROSS_ENTROPY",
    "optimizer": "", "rotary embedding": "", "norm": "",
}  # fmt: skip


def check_run(config: Config, runtime: Runtime) -> list[KernelFailure]:
    """Compares a run's kernels with plain PyTorch and returns the failures. Called by every rank.

    Raises:
        ConfigError: on every rank, if a kernel requested by name gives wrong results on any rank, or if
            MOE_SM_MARGIN is not less than the number of multiprocessors.
    """
    device = runtime.device
    parts = parts_with_kernels(config, device)
    if not parts or not can_check(device):
        return []
    margin, available = config.moe_sm_margin, launch.processors(device)
    if margin >= available:
        rule = f"must be less than the device's {available} multiprocessors"
        raise ConfigError([problem("moe_sm_margin", margin, rule, f"set at most {available - 1}")])
    if margin:
        # the expert GEMMs then run on fewer multiprocessors, and communication kernels overlap with them
        line = "MOE_SM_MARGIN=%d: expert GEMMs use %d of %d multiprocessors"
        logger.info(line, margin, available - margin, available)
    launch.leave_free(margin)
    sizes = sizes_of(config)
    found = [
        [check.line(device) for check in _checks(part, sizes, device) if check.problem] for part in parts
    ]
    if dist.is_initialized():
        mine = [[f"{line} (rank {runtime.rank}, {runtime.host})" for line in lines] for lines in found]
        of_ranks = from_all_ranks(mine)
        # each part's problems on the first rank that has any, the same on all ranks
        found = [next((lines for lines in part if lines), []) for part in zip(*of_ranks, strict=True)]
    failures = []
    for part, lines in zip(parts, found, strict=True):
        if not lines:
            continue
        name = PARTS[part]
        if name and getattr(config, name.lower()) != "auto":
            rule = f"the self-test of its kernels failed: {launch.and_more(lines)}"
            raise ConfigError([config.problem(name.lower(), rule, f"set {name}=auto")])
        of_megatron = part in ("cross entropy", "rotary embedding")
        failure = KernelFailure(part, lines, backend="megatron" if of_megatron else "torch")
        if part == "experts":
            instead = _expert_backend(config, device.type, failure_of(part, [failure]))[0]
            failure = replace(failure, backend=instead)
        for line in lines:
            source = f"{name}=auto" if name else f"the {part}"
            logger.warning("%s falls back to %s: %s", source, failure.backend, line)
        failures.append(failure)
    return failures


def tune_run(config: Config, runtime: Runtime, failures: Sequence[KernelFailure]) -> None:
    """Times kernel configs on rank 0; all ranks use the fastest. `failures`: result of `check_run`."""
    failed = {failure.part for failure in failures}
    parts = [part for part in parts_with_kernels(config, runtime.device) if part not in failed]
    if not parts or not can_check(runtime.device):
        return

    def timed() -> dict[str, dict[Key, int]]:
        start = time.monotonic()
        for kernel in TUNED.values():
            kernel.is_decided = False
        if any(len(kernel.candidates()) > 1 for kernel in TUNED.values()):
            try:
                for case in timing_cases(parts, sizes_of(config), runtime.device):
                    case.run()
            except torch.OutOfMemoryError as error:
                line = "some kernels are not tuned because GPU memory is full: %s"
                logger.warning(line, launch.in_one_line(error))
                torch.cuda.empty_cache()
            logger.info("tuned kernels in %.1f s", time.monotonic() - start)
        return choices()

    found = from_first_rank(timed)
    # With several ranks nothing is tuned during training, so that no rank waits for another.
    if runtime.world_size > 1:
        take_choices(found)
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # records report the peak of training without tuning


def parts_with_kernels(config: Config, device: torch.device) -> list[str]:
    """Parts of the run (keys of PARTS) that use Triton kernels with the settings in `config`."""
    kind, is_fused = device.type, transformer_config(config).apply_rope_fusion and not use_te(config)
    # routing: not with Triton's interpreter, see `choose_routing`
    runs = {
        "experts": config.use_moe and _expert_backend(config, kind)[0] == "triton",
        "routing": config.use_moe and choose_routing(config.routing_kernels, device_type=kind)[0] == "triton",
        "cross entropy": choose_cross_entropy(config.cross_entropy, device_type=kind)[0] != "megatron",
        "optimizer": choose_step(config, device_type=kind) != "torch",
        "rotary embedding": choose_rotary(is_fused, device_type=kind)[0] == "triton",
        "norm": choose_norm(kind, problem=sum_problem(config))[0] == "triton",
    }
    return [part for part, is_run in runs.items() if is_run]


def sizes_of(config: Config) -> Sizes:
    """Tensor sizes of the kernel calls on each rank of a run."""
    router = None
    num_tokens = config.mbsz * config.seq_len // config.cp // config.tp  # routed by one rank per micro-batch
    if config.use_moe and not router_problem(config):
        rules = router_config(transformer_config(config), moe_options(config)["router"])
        names = ("num_experts", "score", "pre_softmax", "scaling_factor", "expert_bias")
        router = {name: getattr(rules, name) for name in names} | {"normalize": rules.normalizes}
    return Sizes(
        dtype=DTYPES[config.dtype],
        hidden_size=config.expert_hidden_size,
        ffn_size=config.expert_ffn_size // config.etp,
        num_experts=config.num_experts // config.ep,
        topk=config.topk,
        num_rows=num_tokens * config.topk * config.etp,
        activation=config.activation,
        bias=config.add_bias_linear,
        gathers=config.ep == config.etp == 1
        and config.dispatcher in ("auto", "local")
        and not SCORES[config.router_score].uses_positive,
        adds=True,
        fp8=config.is_fp8_by_kernels,
        vocab_size=config.padded_vocab_size // config.tp,
        router=router,
    )


# Typical sizes for `moe-exp doctor --kernels`, which has no model.
_DOCTOR_SIZES = Sizes(torch.bfloat16, hidden_size=1024, ffn_size=512, num_experts=8, topk=4, vocab_size=32000)
_BIASED_ROUTER = {"num_experts": 256, "score": "sigmoid", "normalize": True, "expert_bias": True}
_DOCTOR_CASES: tuple[dict[str, Any], ...] = (
    {"router": {"num_experts": 64, "score": "softmax"}},
    {"dtype": torch.float32, "router": _BIASED_ROUTER},
    {"activation": "gelu", "gathers": False, "adds": True},
    {"dtype": torch.float16, "activation": "squared_relu", "gathers": False, "adds": True},
    {"activation": "clamped_swiglu", "bias": True},
)


def why_unchecked(device: torch.device) -> str:
    """Why kernels cannot run on the device; empty if they can."""
    return "" if can_check(device) else missing() or "no GPU, and TRITON_INTERPRET=1 is not set"


def doctor_checks(device: torch.device) -> Iterator[KernelCheck]:
    """Yields the checks of `moe-exp doctor --kernels` one by one, because GPU compilation is slow."""
    for changes in _DOCTOR_CASES:
        for part in PARTS if "router" in changes else ["experts"]:
            yield from _checks(part, replace(_DOCTOR_SIZES, **changes), device)


def _checks(part: str, sizes: Sizes, device: torch.device) -> Iterator[KernelCheck]:
    checks = {"optimizer": check_step, "rotary embedding": check_rotated, "norm": check_sum_norm}
    check = checks.get(part)
    return check_kernels(part, sizes, device) if check is None else check(sizes.dtype, device)
