"""Constraints on settings of experts, router and upcycling."""

import math
from collections.abc import Iterator

from moe_exp.config.checks.divisors import choices, divisors, multiples, must_divide
from moe_exp.config.checks.router import RouterRules
from moe_exp.config.choices import EXPERT_BACKENDS, ExpertBackend
from moe_exp.config.settings import Config, problem


def check_moe(c: Config) -> Iterator[str]:
    if not c.use_moe:
        return  # EP and ETP of the MoE run that a dense run is compared with do not concern it
    yield from must_divide(c, "ep", "NUM_EXPERTS", c.num_experts)
    yield from must_divide(c, "etp", c.expert_ffn_setting.upper(), c.expert_ffn_size)
    if c.moe_latent_size > c.hidden_size:
        rule = f"is over HIDDEN_SIZE={c.hidden_size}, but tokens are projected down to it"
        fix = f"set MOE_LATENT_SIZE to at most {c.hidden_size}, or 0 for none"
        yield c.problem("moe_latent_size", rule, fix)
    if c.dispatcher == "local" and c.ep * c.etp > 1:
        rule = f"needs every expert on every rank, but EP={c.ep} and ETP={c.etp}"
        yield c.problem("dispatcher", rule, "set DISPATCHER=alltoall, or EP=1 and ETP=1")
    if c.dispatcher == "deepep":
        yield from _deepep(c)
    yield from _capacity(c)
    yield from _router(c)
    yield from _balancing(c)
    yield from _expert_backend(c)


def _deepep(c: Config) -> Iterator[str]:
    """DeepEP's requirements on settings; package and GPU are checked when the layer is built."""
    yield from c.problems(
        (c.ep == 1 or c.etp > 1, "dispatcher",
         f"sends tokens between whole experts, but EP={c.ep} and ETP={c.etp}", "set DISPATCHER=alltoall"),
        (c.dtype != "bf16", "dispatcher",
         f"sends bf16 rows, but DTYPE={c.dtype}", "set DTYPE=bf16 or DISPATCHER=alltoall"),
        # deepseek-ai/DeepEP issue 589: torch then fills new tensors on another stream than DeepEP writes on.
        (c.deterministic, "dispatcher",
         "its package may return NaN with the algorithms of DETERMINISTIC=true",
         "set DISPATCHER=alltoall, or DETERMINISTIC=false"),
    )  # fmt: skip
    if (width := c.expert_hidden_size) % 8:
        name = _row_setting(c)
        fix = f"set {name.upper()} to {multiples(8, width)}, or DISPATCHER=alltoall"
        yield problem(name, width, "DISPATCHER=deepep sends rows of a multiple of 8", fix)


def _capacity(c: Config) -> Iterator[str]:
    for name in ("capacity_factor", "min_capacity"):
        if c.moe_type == "dmoe" and getattr(c, name):
            fix = f"set MOE_TYPE=moe, or {name.upper()}=0"
            yield c.problem(name, "MOE_TYPE=dmoe drops nothing, it has no capacity", fix)
    if c.moe_type == "moe" and c.token_rounding:
        fix = "set MOE_TYPE=dmoe, or TOKEN_ROUNDING=0"
        yield c.problem("token_rounding", "MOE_TYPE=moe has its number of rows from the capacity", fix)
    if c.token_rounding > (slots := c.mbsz * c.seq_len * c.topk):
        rule = f"rounds nothing, as a micro-batch has {slots} slots in all (MBSZ * SEQ_LEN * TOPK)"
        fix = "set a tile of the kernels, 64 or 128, or TOKEN_ROUNDING=0"
        yield c.problem("token_rounding", rule, fix)
    if c.shared_expert_gate and not c.shared_expert_size:
        fix = "set SHARED_EXPERT_SIZE, or SHARED_EXPERT_GATE=false"
        yield c.problem("shared_expert_gate", "there is no shared expert", fix)


# Fields of the router's rules, and the settings that they are.
_ROUTER = {
    "hidden_size": "hidden_size", "num_experts": "num_experts", "topk": "topk", "score": "router_score",
    "top_p": "router_top_p", "num_null_experts": "null_experts", "pre_softmax": "router_pre_softmax",
    "num_groups": "num_router_groups", "group_topk": "router_group_topk", "bias_rule": "router_bias_rule",
}  # fmt: skip


def _router(c: Config) -> Iterator[str]:
    is_sinkhorn, is_quantile = c.aux_loss_type == "sinkhorn", c.router_bias_rule == "quantile"
    assignment = c.force_routing if c.force_routing != "none" else "sinkhorn" if is_sinkhorn else "topk"
    rules = RouterRules(
        **{field: getattr(c, name) for field, name in _ROUTER.items()},
        normalize={"auto": None, "true": True, "false": False}[c.router_normalize],
        expert_bias=c.has_expert_bias,
        assignment=assignment,
    )
    others = {
        "normalize": "router_normalize",
        "expert_bias": "router_bias_rule" if is_quantile else "router_bias_update_rate",
        "assignment": "aux_loss_type" if assignment == "sinkhorn" else "force_routing",
    }
    yield from rules.problems({field: name.upper() for field, name in (_ROUTER | others).items()})


def _balancing(c: Config) -> Iterator[str]:
    """Rules of settings that the router does not have itself."""
    num_losses, num_coeffs = len(c.aux_loss_type.split(",")), len(c.aux_loss_coeff.split(","))
    if num_coeffs not in (1, num_losses):
        rule = f"{num_coeffs} weights for {num_losses} losses in AUX_LOSS_TYPE={c.aux_loss_type}"
        yield c.problem("aux_loss_coeff", rule, "give one for all, or one for each")
    if c.router_bias_rule == "quantile" and c.router_bias_update_rate:
        rule = "ROUTER_BIAS_RULE=quantile has no step size"
        yield c.problem("router_bias_update_rate", rule, "set it to 0")
    if c.aux_loss_type == "sinkhorn" and c.force_routing != "none":
        rule = "chooses the experts, and so does AUX_LOSS_TYPE=sinkhorn"
        yield c.problem("force_routing", rule, "set one of the two to none")
    coeff = c.balancing_losses.get("l1")
    yield from c.problems(
        (c.router_score == "relu" and not coeff, "router_score",
         "without the loss l1 nothing limits the experts per token",
         "set AUX_LOSS_TYPE=l1 and AUX_LOSS_COEFF=1e-8, its weight at the start"),
        (coeff is not None and c.router_score != "relu", "aux_loss_type",
         "l1 needs ROUTER_SCORE=relu", "set ROUTER_SCORE=relu, or another AUX_LOSS_TYPE"),
    )  # fmt: skip


def _row_setting(c: Config) -> str:
    """The setting with the width of the rows that routed experts take."""
    return "moe_latent_size" if c.moe_latent_size else "hidden_size"


def _expert_backend(c: Config) -> Iterator[str]:
    backend = EXPERT_BACKENDS.get(c.expert_backend, ExpertBackend())  # auto takes one that can
    if backend.dtypes and c.dtype not in backend.dtypes:
        rule = f"computes in {' and '.join(backend.dtypes)} only, not in {c.dtype}"
        fix = f"set DTYPE={backend.dtypes[0]}, or EXPERT_BACKEND=auto"
        yield c.problem("expert_backend", rule, fix)
    num_bytes = 4 if c.dtype == "fp32" else 2
    widths = (_row_setting(c), c.expert_hidden_size, 1), (c.expert_ffn_setting, c.expert_ffn_size, c.etp)
    for name, value, ways in widths:
        if value // ways * num_bytes % backend.row_bytes:
            row = f"{name.upper()} / ETP={ways}" if ways > 1 else name.upper()
            rule = f"EXPERT_BACKEND={c.expert_backend} needs rows of a multiple of {backend.row_bytes} bytes"
            sizes = multiples(backend.row_bytes // num_bytes * ways, value)
            fix = f"set {name.upper()} to {sizes}, or EXPERT_BACKEND=loop"
            yield problem(name, value, f"{rule}, {row} in {c.dtype} is no such row", fix)


def check_upcycle(c: Config) -> Iterator[str]:
    """Conditions for a model with copies of a dense MLP as experts to compute what the dense model does."""
    if not c.upcycle_from:
        if c.upcycle_granularity > 1:
            fix = "set UPCYCLE_FROM, or UPCYCLE_GRANULARITY=1"
            yield c.problem("upcycle_granularity", "has no effect without UPCYCLE_FROM", fix)
        return
    if not c.use_moe:
        rule = "a dense model has no experts to fill"
        yield c.problem("upcycle_from", rule, "set USE_MOE=true, or leave it empty")
        return
    yield from c.problems(
        (c.load_dir, "upcycle_from",
         f"LOAD_DIR={c.load_dir} names other weights to start from", "give one of the two"),
        (c.router_weights_sum is None, "topk" if c.topk == 1 else "router_normalize",
         "upcycling needs router weights that add up to the same for every token",
         "set TOPK to at least 2 and ROUTER_NORMALIZE=true, or with softmax scores ROUTER_PRE_SOFTMAX=false"),
        (c.shared_expert_size, "shared_expert_size",
         "a shared expert would add to what the dense model computes",
         "set SHARED_EXPERT_SIZE=0 with UPCYCLE_FROM"),
        (c.moe_latent_size, "moe_latent_size",
         "copies of a dense MLP take whole hidden states", "set MOE_LATENT_SIZE=0 with UPCYCLE_FROM"),
    )  # fmt: skip
    factor = c.expert_capacity_factor
    if factor is not None and factor * c.topk < c.num_experts:
        fix = f"set MOE_TYPE=dmoe, or CAPACITY_FACTOR to at least {math.ceil(c.num_experts / c.topk)}"
        rule = "upcycling needs every token's experts, this drops some"
        yield problem("capacity_factor", factor, rule, fix)
    yield from _granularity(c, c.upcycle_granularity)


def _granularity(c: Config, shards: int) -> Iterator[str]:
    if c.expert_ffn_size * shards != c.ffn_hidden_size:
        rule = f"is not FFN_HIDDEN_SIZE / UPCYCLE_GRANULARITY = {c.ffn_hidden_size} / {shards}"
        fix = f"set MOE_FFN_HIDDEN_SIZE={c.ffn_hidden_size // shards}"
        if c.ffn_hidden_size % shards:
            fix = f"set UPCYCLE_GRANULARITY to {choices(divisors(c.ffn_hidden_size, shards))}"
        yield problem("moe_ffn_hidden_size", c.expert_ffn_size, rule, fix)
    for name in ("num_experts", "topk"):
        if getattr(c, name) % shards:
            rule = f"is not a multiple of UPCYCLE_GRANULARITY={shards}, each token needs every shard equally"
            fix = f"set {name.upper()} to {multiples(shards, getattr(c, name))}"
            yield c.problem(name, f"{rule} often", fix)
    if shards > 1 and c.num_router_groups and c.num_experts // c.num_router_groups % shards:
        rule = "leaves NUM_EXPERTS/NUM_ROUTER_GROUPS experts per group, not a multiple of"
        fix = "set NUM_ROUTER_GROUPS=0"
        yield c.problem("num_router_groups", f"{rule} UPCYCLE_GRANULARITY={shards}", fix)
    for name in ("force_routing", "aux_loss_type"):
        if shards > 1 and getattr(c, name) in ("balanced", "zipf", "sinkhorn"):
            rule = f"does not choose all of the UPCYCLE_GRANULARITY={shards} shards of a dense MLP"
            yield c.problem(name, rule, f"set {name.upper()}=none")
