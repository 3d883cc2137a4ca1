"""Which code each part runs on this host and why; self-test and tuning of the Triton kernels that a run will
use, with its sizes, before training; and whether attention keeps the documents of a sample apart.

All ranks decide the same. If a kernel is wrong on any, EXPERT_BACKEND=auto, ROUTING_KERNELS=auto and
CROSS_ENTROPY=auto continue without Triton's kernels there; kernels requested by name end the start.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moe_exp.config import Config, ConfigError, load_config, problem
from moe_exp.engine.model import DTYPES, build_chunk, moe_options, router_problem, transformer_config, use_te
from moe_exp.engine.optimizer_setup import choose_optimizer
from moe_exp.engine.runtime import Runtime, choose_communication, from_first_rank, share_alone
from moe_exp.layers import native
from moe_exp.layers.experts.grouped_gemm import choose_backend
from moe_exp.layers.kernels.cross_entropy import choose_cross_entropy
from moe_exp.layers.kernels.launch import KernelFailure as KernelFailure
from moe_exp.layers.kernels.launch import (
    and_more,
    choose_routing,
    failure_of,
    in_one_line,
    leave_free,
    missing,
    processors,
)
from moe_exp.layers.kernels.self_test import KernelCheck, Sizes, can_check, check_kernels, timing_cases
from moe_exp.layers.kernels.tuning import TUNED, Key, choices, take_choices
from moe_exp.layers.megatron.attention import choose_attention, choose_norm
from moe_exp.layers.megatron.documents import Documents, Lengths, document_positions
from moe_exp.layers.megatron.moe_parts import router_config

logger = logging.getLogger(__name__)


def _expert_backend(config: Config, device_type: str, failure: str = "") -> tuple[str, str]:
    options: dict[str, Any] = {"device_type": device_type, "dtype": DTYPES[config.dtype]}
    return choose_backend(config.expert_backend, failure=failure, **options)


def backends_of(
    config: Config, device_type: str, kernel_failures: Sequence[KernelFailure] = ()
) -> dict[str, tuple[str, str]]:
    """Backends of a run on `cpu` or `cuda`: part to (what runs, why).

    `kernel_failures`: parts of the model that do not use their kernels, from `check_run`.
    """
    has_te, te = use_te(config), ("Transformer Engine", "IMPL=te, or auto with it installed")
    other_value_size = config.multi_latent_attention and config.v_head_dim != config.kv_channels
    attention = choose_attention(device_type, DTYPES[config.dtype], other_value_size=other_value_size)
    if config.document_mask:  # our code, also with Transformer Engine
        attention = (f"{attention[0]} by document", f"{attention[1]}; DOCUMENT_MASK=true")
    elif has_te:
        attention = te
    found = {
        "communication": choose_communication(),
        "attention": attention,
        "norm": te if has_te else choose_norm(device_type),
        "grouped GEMM": _expert_backend(config, device_type, failure_of("experts", kernel_failures)),
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
        rounded = "in training an expert's rows of a micro-batch are rounded down to a multiple"
        reason = f"{rounded}, the slots of lowest weight are dropped"
        found["token rounding"] = (str(config.token_rounding), reason)
    if config.is_fp8_by_kernels:
        found["FP8"] = ("e4m3", "products of the experts, with scales of blocks of 128; asked for by FP8")
    if config.deterministic:
        found["algorithms"] = ("deterministic", "DETERMINISTIC=true; an operation that has none ends the run")
    return found


PARTS = {"experts": "EXPERT_BACKEND", "routing": "ROUTING_KERNELS", "cross entropy": "CROSS_ENTROPY"}


def check_run(config: Config, runtime: Runtime) -> list[KernelFailure]:
    """Compares the kernels of a run with their twins; called by every rank before the model is built.

    Returns:
        The parts with a wrong kernel, for `build_model` and `backends_of`, which then use none there.

    Raises:
        ConfigError: on every rank, if a kernel requested by name is wrong on any, or MOE_SM_MARGIN leaves no
            multiprocessor.
    """
    device = runtime.device
    parts = parts_with_kernels(config, device)
    if not parts or not can_check(device):
        return []
    margin, available = config.moe_sm_margin, processors(device)
    if margin >= available:
        rule = f"the device has {available} multiprocessors, and the GEMMs need one"
        raise ConfigError([problem("moe_sm_margin", margin, rule, f"set at most {available - 1}")])
    if margin:
        line = "MOE_SM_MARGIN=%d: the expert GEMMs leave %d of %d multiprocessors free"
        logger.info(line, margin, margin, available)
    leave_free(margin)
    sizes = sizes_of(config)
    found = [
        [check.line(device) for check in check_kernels(part, sizes, device) if check.problem]
        for part in parts
    ]
    if dist.is_initialized():
        mine = [[f"{line} (rank {runtime.rank}, {runtime.host})" for line in lines] for lines in found]
        of_ranks: list[list[list[str]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, mine)
        # each part's problems, equal on all ranks: those of the first rank that has any
        found = [next((lines for lines in part if lines), []) for part in zip(*of_ranks, strict=True)]
    failures = []
    for part, lines in zip(parts, found, strict=True):
        if not lines:
            continue
        name = PARTS[part]
        if getattr(config, name.lower()) != "auto":
            rule = f"the self-test of its kernels has failed: {and_more(lines)}"
            raise ConfigError([f"{name}=triton: {rule}. Fix: set {name}=auto."])
        failure = KernelFailure(part, lines, backend="megatron" if part == "cross entropy" else "torch")
        if part == "experts":
            instead = _expert_backend(config, device.type, failure_of(part, [failure]))[0]
            failure = replace(failure, backend=instead)
        for line in lines:
            logger.warning("%s=auto continues with %s: %s", name, failure.backend, line)
        failures.append(failure)
    return failures


def tune_run(config: Config, runtime: Runtime, failures: Sequence[KernelFailure]) -> None:
    """Times the kernels' configs on rank 0, for every class of rows; all ranks take its choices.

    With several ranks nothing is timed later, so that none waits for another. Called by every rank after
    `check_run`, whose result is `failures`.
    """
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
                logger.warning("some kernels are not tuned, as memory is full: %s", in_one_line(error))
                torch.cuda.empty_cache()
            logger.info("kernels tuned in %.1f s", time.monotonic() - start)
        return choices()

    found = from_first_rank(timed)
    if runtime.world_size > 1:
        take_choices(found)
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the peak in the records is that of the training


def parts_with_kernels(config: Config, device: torch.device) -> list[str]:
    """Which of PARTS run on Triton's kernels with these settings."""
    parts = []
    if config.use_moe and _expert_backend(config, device.type)[0] == "triton":
        parts.append("experts")
    # The interpreter does not move rows of a layer, see `choose_routing`.
    routing = choose_routing(config.routing_kernels, device_type=device.type)
    if config.use_moe and routing[0] == "triton":
        parts.append("routing")
    if choose_cross_entropy(config.cross_entropy, device_type=device.type)[0] == "triton":
        parts.append("cross entropy")
    return parts


def sizes_of(config: Config) -> Sizes:
    """Sizes with which a run calls kernels on each of its ranks."""
    router = None
    num_tokens = config.mbsz * config.seq_len // config.cp // config.tp  # of a micro-batch, routed by a rank
    if config.use_moe and not router_problem(config):
        rules = router_config(transformer_config(config), moe_options(config)["router"])
        router = {
            "num_experts": rules.num_experts,
            "score": rules.score,
            "pre_softmax": rules.pre_softmax,
            "normalize": rules.normalizes,
            "scaling_factor": rules.scaling_factor,
            "expert_bias": rules.expert_bias,
        }
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
        and config.router_score != "relu",
        adds=True,
        fp8=config.is_fp8_by_kernels,
        vocab_size=config.padded_vocab_size // config.tp,
        router=router,
    )


# For `moe-exp doctor --kernels`, which has no model.
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
    """Why no kernel can run on the device; empty if they can."""
    return "" if can_check(device) else missing() or "TRITON_INTERPRET=1 is not set, and there is no GPU"


def doctor_checks(device: torch.device) -> Iterator[KernelCheck]:
    """Checks of `moe-exp doctor --kernels`, each as soon as it is done: on a GPU all configs are compiled."""
    for changes in _DOCTOR_CASES:
        for part in PARTS if "router" in changes else ["experts"]:
            yield from check_kernels(part, replace(_DOCTOR_SIZES, **changes), device)


# For `moe-exp doctor --leak-test`: a small model of each kind of attention gets two samples of several
# documents, packed and one by one.
HEADER = ["attention", "heads", "dtype", "error of logits", "of gradients", "changed logits", "result"]
# Documents are cut at other places in each sample, and one has a single token.
_LENGTHS: Lengths = ((16, 1, 47), (20, 44))
# Every token uses every expert, so that the products have the same shapes whatever is in a document.
_MODEL = {
    "preset": "cpu", "gpus_per_node": 1, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64,
    "num_heads": 4, "num_query_groups": 2, "seq_len": 64, "vocab_size": 128, "num_experts": 4, "topk": 4,
    "document_mask": True, "aux_loss_type": "none", "z_loss_coeff": 0, "init_std": 0.1, "mbsz": 1, "gbsz": 1,
}  # fmt: skip
_HEADS = {
    "grouped": {},
    "latent": {
        "multi_latent_attention": True, "num_query_groups": 4, "kv_lora_rank": 32, "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
_LIMITS = {"fp32": 1e-4, "bf16": 0.05}


@dataclass(frozen=True)
class Leak:
    """Result of a kind of attention; errors are relative to the documents alone."""

    kernel: str  # as `backends_of` names it
    heads: str  # `grouped` or `latent`
    dtype: str
    logits_error: float
    gradients_error: float  # of all parameters, together
    num_changed: int  # logits of other documents that are not the same bits when one document changes

    @property
    def is_tight(self) -> bool:
        """Whether no document saw another."""
        limit = _LIMITS[self.dtype]
        return self.logits_error < limit and self.gradients_error < limit and not self.num_changed

    @property
    def row(self) -> list[str]:
        """Cells under HEADER."""
        errors = [f"{self.logits_error:.1e}", f"{self.gradients_error:.1e}", str(self.num_changed)]
        return [self.kernel, self.heads, self.dtype, *errors, "ok" if self.is_tight else "leaks"]


def find_leaks() -> Iterator[Leak]:
    """Runs every kind of attention that a training could use here."""
    for heads, settings in _HEADS.items():
        for dtype in _LIMITS:
            config = load_config(_MODEL | settings | {"dtype": dtype}, {})
            rank = share_alone(config)
            model = build_chunk(config, transformer_config(config), rank, 0).to(rank.device).eval()
            kernel = backends_of(config, rank.device.type)["attention"][0]
            yield Leak(kernel, heads, dtype, *_leak(config, rank.device, model))


def _leak(config: Config, device: torch.device, model: Any) -> tuple[float, float, int]:
    """The errors of a Leak, and its number of changed logits."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, config.vocab_size, (2, config.seq_len), generator=drawn).to(device)
    weights = torch.randn(2, config.seq_len, config.padded_vocab_size, generator=drawn).to(device)
    positions = document_positions(_LENGTHS).to(device)
    packed = model(tokens, positions, None, packed_seq_params=Documents(_LENGTHS, positions))
    alone = []
    for row, lengths in zip(tokens, _LENGTHS, strict=True):
        documents = row[None].split(lengths, dim=1)
        each = [model(one, torch.arange(one.size(1), device=device)[None], None) for one in documents]
        alone.append(torch.cat(each, dim=1))
    found = []
    for logits in (packed, torch.cat(alone)):
        trained = [one for one in model.parameters() if one.requires_grad]
        gradients = torch.autograd.grad((logits.float() * weights).sum(), trained, allow_unused=True)
        joined = torch.cat([one.flatten().float() for one in gradients if one is not None])
        found.append((logits.detach().double(), joined.double()))
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True)]
    # Other tokens in the first document must not change a bit of the logits of the others.
    changed, first = tokens.clone(), _LENGTHS[0][0]
    changed[0, :first] = (tokens[0, :first] + 1) % config.vocab_size
    with torch.no_grad():
        again = model(changed, positions, None, packed_seq_params=Documents(_LENGTHS, positions))
    differ = again != packed
    differ[0, :first] = False
    return errors[0], errors[1], int(differ.sum())
