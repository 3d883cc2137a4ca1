"""What has to hold between the settings of a run; what has to hold on this machine is in
launch/machine_checks.py.

Every function returns the lines of all problems it finds (name, value, rule, fix). Values that are wrong by
themselves are refused by `moe_exp.config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe_exp.config.checks.attention import check_attention
from moe_exp.config.checks.divisors import choices as _choices
from moe_exp.config.checks.divisors import divisors as _divisors
from moe_exp.config.checks.divisors import multiples as _multiples
from moe_exp.config.checks.divisors import must_divide as _must_divide
from moe_exp.config.checks.fp8 import check_fp8
from moe_exp.config.checks.pipeline import check_pipeline
from moe_exp.config.checks.pipeline import num_replicas as _replicas
from moe_exp.config.checks.training import check_optimizer, check_profiling, check_rampup
from moe_exp.config.settings import Config, problem

# Size of the tokenizer that is trained on the embedded corpus.
EMBEDDED_VOCAB_SIZE = 4096


def check_config(config: Config) -> list[str]:
    """Problems among the settings themselves, the same on every machine."""
    return [
        *_model(config),
        *check_attention(config),
        *_moe(config),
        *check_fp8(config),
        *_upcycle(config),
        *_parallel(config),
        *check_pipeline(config),
        *_batch(config),
        *_schedule(config),
        *check_optimizer(config),
        *check_profiling(config),
        *_data(config),
        *_retention(config),
        *_dumps(config),
        *_loss_guard(config),
    ]


def _model(c: Config) -> Iterator[str]:
    if not c.multi_latent_attention:
        yield from _must_divide(c, "num_query_groups", "NUM_HEADS", c.num_heads)
    if not c.multi_latent_attention and not c.head_dim:
        yield from _must_divide(c, "num_heads", "HIDDEN_SIZE", c.hidden_size)
    if not c.multi_latent_attention and c.kv_channels % 2:
        rule = "rotary position embedding turns pairs of channels, the head size must be even"
        yield problem("head_dim", c.kv_channels, rule, f"set HEAD_DIM to {_multiples(2, c.kv_channels)}")
    if c.use_moe and c.add_bias_linear and c.shared_expert_size:
        yield problem(
            "add_bias_linear",
            "true",
            "Megatron's shared expert has no bias",
            "set ADD_BIAS_LINEAR=false or SHARED_EXPERT_SIZE=0",
        )
    if c.use_moe and c.add_bias_linear and c.etp > 1:
        yield problem(
            "add_bias_linear",
            "true",
            "Megatron has expert biases with ETP=1 only",
            "set ADD_BIAS_LINEAR=false or ETP=1",
        )
    if c.use_moe and c.add_bias_linear and c.expert_backend == "triton":
        fix = "set ADD_BIAS_LINEAR=false or EXPERT_BACKEND=auto"
        yield problem("expert_backend", "triton", "its kernels have no bias of the experts", fix)
    if c.use_moe:
        yield from _layers(c)


def _layers(c: Config) -> Iterator[str]:
    if len(c.moe_layers) != c.num_layers:
        rule = f"has {len(c.moe_layers)} layers, but NUM_LAYERS={c.num_layers}"
        yield problem(
            "moe_layer_freq",
            c.moe_layer_freq,
            rule,
            f"give a number, or a pattern of {c.num_layers} zeros and ones",
        )
    elif not any(c.moe_layers):
        name = "first_k_dense" if c.first_k_dense else "moe_layer_freq"
        fix = (
            f"set FIRST_K_DENSE to at most {c.num_layers - 1}, or USE_MOE=false"
            if c.first_k_dense
            else "set a 1, or USE_MOE=false"
        )
        yield problem(name, getattr(c, name), f"leaves no MoE layer of NUM_LAYERS={c.num_layers}", fix)


def _moe(c: Config) -> Iterator[str]:
    if not c.use_moe:
        return  # EP and ETP of the MoE run that a dense run is compared with do not concern it
    yield from _must_divide(c, "ep", "NUM_EXPERTS", c.num_experts)
    yield from _must_divide(
        c, "etp", "MOE_FFN_HIDDEN_SIZE" if c.moe_ffn_hidden_size else "FFN_HIDDEN_SIZE", c.expert_ffn_size
    )
    if c.topk > c.num_experts:
        yield problem(
            "topk", c.topk, f"is over NUM_EXPERTS={c.num_experts}", f"set TOPK to at most {c.num_experts}"
        )
    if c.dispatcher == "local" and c.ep * c.etp > 1:
        fix = "set DISPATCHER=alltoall, or EP=1 and ETP=1"
        yield problem(
            "dispatcher", "local", f"needs every expert on every rank, but EP={c.ep} and ETP={c.etp}", fix
        )
    yield from _deepep(c)
    yield from _capacity(c)
    yield from _router(c)
    yield from _router_groups(c)
    yield from _balancing(c)
    yield from _grouped_mm_rows(c)


def _deepep(c: Config) -> Iterator[str]:
    """What the package asks for; whether it is there, and a GPU, is seen when the layer is built."""
    if c.dispatcher != "deepep":
        return
    if c.ep == 1 or c.etp > 1:
        yield problem(
            "dispatcher",
            "deepep",
            f"sends tokens between whole experts, but EP={c.ep} and ETP={c.etp}",
            "set DISPATCHER=alltoall",
        )
    if c.dtype != "bf16":
        yield problem(
            "dispatcher",
            "deepep",
            f"sends bf16 rows, but DTYPE={c.dtype}",
            "set DTYPE=bf16 or DISPATCHER=alltoall",
        )
    if c.deterministic:
        # deepseek-ai/DeepEP issue 589: torch fills new tensors then, on another stream than the one on which
        # DeepEP writes into them.
        rule = "its package may return NaN with the algorithms of DETERMINISTIC=true"
        yield problem("dispatcher", "deepep", rule, "set DISPATCHER=alltoall, or DETERMINISTIC=false")
    if c.hidden_size % 8:
        fix = f"set HIDDEN_SIZE to {_multiples(8, c.hidden_size)}, or DISPATCHER=alltoall"
        yield problem("hidden_size", c.hidden_size, "DISPATCHER=deepep sends rows of a multiple of 8", fix)


def _capacity(c: Config) -> Iterator[str]:
    for name in ("capacity_factor", "min_capacity"):
        if c.moe_type == "dmoe" and getattr(c, name):
            fix = f"set MOE_TYPE=moe, or {name.upper()}=0"
            yield problem(name, getattr(c, name), "MOE_TYPE=dmoe drops nothing, it has no capacity", fix)
    if c.moe_type == "moe" and c.token_rounding:
        fix = "set MOE_TYPE=dmoe, or TOKEN_ROUNDING=0"
        yield problem(
            "token_rounding", c.token_rounding, "MOE_TYPE=moe has its number of rows from the capacity", fix
        )
    if c.use_moe and c.token_rounding > (slots := c.mbsz * c.seq_len * c.topk):
        rule = f"rounds nothing, as a micro-batch has {slots} slots in all (MBSZ * SEQ_LEN * TOPK)"
        yield problem(
            "token_rounding",
            c.token_rounding,
            rule,
            "set a tile of the kernels, 64 or 128, or TOKEN_ROUNDING=0",
        )
    if c.shared_expert_gate and not c.shared_expert_size:
        yield problem(
            "shared_expert_gate",
            "true",
            "there is no shared expert",
            "set SHARED_EXPERT_SIZE, or SHARED_EXPERT_GATE=false",
        )


def _router(c: Config) -> Iterator[str]:
    if c.topk > 1 or c.aux_loss_type == "sinkhorn":
        return
    rule = "the weight of the one chosen expert is always 1, so the router would not learn with TOPK=1"
    if c.router_score == "softmax" and not c.router_pre_softmax:
        yield problem("router_pre_softmax", "false", rule, "set ROUTER_PRE_SOFTMAX=true")
    elif c.router_normalize == "true":
        yield problem("router_normalize", "true", rule, "set ROUTER_NORMALIZE=false")


def _balancing(c: Config) -> Iterator[str]:
    num_losses, num_coeffs = len(c.aux_loss_type.split(",")), len(c.aux_loss_coeff.split(","))
    if num_coeffs not in (1, num_losses):
        rule = f"{num_coeffs} weights for {num_losses} losses in AUX_LOSS_TYPE={c.aux_loss_type}"
        yield problem("aux_loss_coeff", c.aux_loss_coeff, rule, "give one for all, or one for each")
    if c.aux_loss_type == "sinkhorn" and (c.num_router_groups or c.router_bias_update_rate):
        name = "num_router_groups" if c.num_router_groups else "router_bias_update_rate"
        fix = f"set AUX_LOSS_TYPE=aux_loss or none, or {name.upper()}=0"
        yield problem(
            "aux_loss_type", "sinkhorn", f"balances by itself and does not go with {name.upper()}", fix
        )
    if c.aux_loss_type == "sinkhorn" and c.force_routing != "none":
        yield problem(
            "force_routing",
            c.force_routing,
            "chooses the experts, and so does AUX_LOSS_TYPE=sinkhorn",
            "set one of the two to none",
        )


def _router_groups(c: Config) -> Iterator[str]:
    groups, used = c.num_router_groups, c.router_group_topk
    if bool(groups) != bool(used):
        name = "num_router_groups" if groups else "router_group_topk"
        other = "ROUTER_GROUP_TOPK" if groups else "NUM_ROUTER_GROUPS"
        yield problem(
            name, groups or used, f"has no effect while {other}=0", f"set both, or {name.upper()}=0"
        )
    if not groups or not used:
        return
    yield from _must_divide(c, "num_router_groups", "NUM_EXPERTS", c.num_experts)
    if used > groups:
        yield problem(
            "router_group_topk",
            used,
            f"is over NUM_ROUTER_GROUPS={groups}",
            f"set ROUTER_GROUP_TOPK to at most {groups}",
        )
    if used <= groups and c.num_experts % groups == 0 and c.topk > (reach := used * c.num_experts // groups):
        fix = (
            f"set TOPK to at most {reach}, or ROUTER_GROUP_TOPK to at least"
            f" {-(-c.topk * groups // c.num_experts)}"
        )
        yield problem(
            "topk",
            c.topk,
            f"is over the {reach} experts of the ROUTER_GROUP_TOPK={used} groups a token may use",
            fix,
        )


def _grouped_mm_rows(c: Config) -> Iterator[str]:
    """torch's grouped_mm and the CUTLASS kernels read rows in pieces of 16 bytes."""
    if c.expert_backend in ("grouped_gemm", "megablocks") and c.dtype != "bf16":
        yield problem(
            "expert_backend",
            c.expert_backend,
            f"computes in bf16 only, not in {c.dtype}",
            "set DTYPE=bf16, or EXPERT_BACKEND=auto",
        )
    if c.expert_backend not in ("torch", "grouped_gemm", "megablocks"):
        return
    num_bytes = 4 if c.dtype == "fp32" else 2
    ffn_name = "moe_ffn_hidden_size" if c.moe_ffn_hidden_size else "ffn_hidden_size"
    for name, value, ways in (("hidden_size", c.hidden_size, 1), (ffn_name, c.expert_ffn_size, c.etp)):
        if value // ways * num_bytes % 16:
            of = f" / ETP={ways}" if ways > 1 else ""
            rule = (
                f"EXPERT_BACKEND={c.expert_backend} needs rows of a multiple of 16 bytes, {name.upper()}{of}"
                f" in {c.dtype} is no such row"
            )
            fix = f"set {name.upper()} to {_multiples(16 // num_bytes * ways, value)}, or EXPERT_BACKEND=loop"
            yield problem(name, value, rule, fix)


def _upcycle(c: Config) -> Iterator[str]:
    """What has to hold for a model with copies of a dense MLP as experts to compute what the dense model
    does.
    """
    if not c.upcycle_from:
        if c.upcycle_granularity > 1:
            fix = "set UPCYCLE_FROM, or UPCYCLE_GRANULARITY=1"
            yield problem(
                "upcycle_granularity", c.upcycle_granularity, "has no effect without UPCYCLE_FROM", fix
            )
        return
    if not c.use_moe:
        yield problem(
            "upcycle_from",
            c.upcycle_from,
            "a dense model has no experts to fill",
            "set USE_MOE=true, or leave it empty",
        )
        return
    if c.load_dir:
        yield problem(
            "upcycle_from",
            c.upcycle_from,
            f"LOAD_DIR={c.load_dir} names other weights to start from",
            "give one of the two",
        )
    if c.router_weights_sum is None:
        name, value = ("topk", 1) if c.topk == 1 else ("router_normalize", c.router_normalize)
        fix = (
            "set TOPK to at least 2 and ROUTER_NORMALIZE=true, or with softmax scores"
            " ROUTER_PRE_SOFTMAX=false"
        )
        yield problem(
            name, value, "upcycling needs router weights that add up to the same for every token", fix
        )
    if c.shared_expert_size:
        rule = "a shared expert would add to what the dense model computes"
        yield problem(
            "shared_expert_size", c.shared_expert_size, rule, "set SHARED_EXPERT_SIZE=0 with UPCYCLE_FROM"
        )
    factor = c.expert_capacity_factor
    if factor is not None and factor * c.topk < c.num_experts:
        fix = f"set MOE_TYPE=dmoe, or CAPACITY_FACTOR to at least {math.ceil(c.num_experts / c.topk)}"
        yield problem(
            "capacity_factor", factor, "upcycling needs every token's experts, this drops some", fix
        )
    yield from _granularity(c)


def _granularity(c: Config) -> Iterator[str]:
    shards = c.upcycle_granularity
    if c.expert_ffn_size * shards != c.ffn_hidden_size:
        rule = f"is not FFN_HIDDEN_SIZE / UPCYCLE_GRANULARITY = {c.ffn_hidden_size} / {shards}"
        fix = f"set MOE_FFN_HIDDEN_SIZE={c.ffn_hidden_size // shards}"
        if c.ffn_hidden_size % shards:
            fix = f"set UPCYCLE_GRANULARITY to {_choices(_divisors(c.ffn_hidden_size, shards))}"
        yield problem("moe_ffn_hidden_size", c.expert_ffn_size, rule, fix)
    for name in ("num_experts", "topk"):
        value = getattr(c, name)
        if value % shards:
            rule = (
                f"is not a multiple of UPCYCLE_GRANULARITY={shards}, each token needs every shard equally"
                " often"
            )
            yield problem(name, value, rule, f"set {name.upper()} to {_multiples(shards, value)}")
    if shards > 1 and c.num_router_groups and c.num_experts // c.num_router_groups % shards:
        rule = (
            "leaves NUM_EXPERTS/NUM_ROUTER_GROUPS experts per group, not a multiple of"
            f" UPCYCLE_GRANULARITY={shards}"
        )
        yield problem("num_router_groups", c.num_router_groups, rule, "set NUM_ROUTER_GROUPS=0")
    for name, value in (("force_routing", c.force_routing), ("aux_loss_type", c.aux_loss_type)):
        if shards > 1 and value in ("balanced", "zipf", "sinkhorn"):
            rule = f"does not choose all of the UPCYCLE_GRANULARITY={shards} shards of a dense MLP"
            yield problem(name, value, rule, f"set {name.upper()}=none")


def check_node_rank(c: Config) -> Iterator[str]:
    """NODE_RANK, of all that starts a process per node."""
    if c.node_rank >= c.nnodes:
        fix = (
            f"set NODE_RANK to 0{f' to {c.nnodes - 1}' if c.nnodes > 1 else ''}, or NNODES to at least"
            f" {c.node_rank + 1}"
        )
        yield problem("node_rank", c.node_rank, f"is not below NNODES={c.nnodes}", fix)


def _parallel(c: Config) -> Iterator[str]:
    yield from check_node_rank(c)
    yield from _ranks(c, "TP*PP*CP", c.tp * c.pp * c.cp)
    if c.use_moe and c.etp * c.ep > 1:
        yield from _ranks(c, "ETP*EP*PP", c.etp * c.ep * c.pp)
    yield from _tensor_parallel(c)
    if c.cp > 1 and c.seq_len % (2 * c.cp):
        rule = f"SEQ_LEN={c.seq_len} is not a multiple of 2*CP, each rank takes two pieces of the sequence"
        yield problem("cp", c.cp, rule, f"set SEQ_LEN to {_multiples(2 * c.cp, c.seq_len)}")


def _ranks(c: Config, product: str, size: int) -> Iterator[str]:
    if c.world_size % size:
        per_node = size // math.gcd(size, c.nnodes)
        rule = f"{c.world_size} ranks (NNODES * GPUS_PER_NODE) are not a multiple of {product}={size}"
        fix = (
            f"set GPUS_PER_NODE to {_multiples(per_node, c.gpus_per_node)}, or change"
            f" {product.replace('*', ', ')}"
        )
        yield problem("gpus_per_node", c.gpus_per_node, rule, fix)


def _tensor_parallel(c: Config) -> Iterator[str]:
    yield from _must_divide(c, "tp", "NUM_HEADS", c.num_heads)
    if not c.multi_latent_attention:
        yield from _must_divide(c, "tp", "NUM_QUERY_GROUPS", c.num_query_groups)
    yield from _must_divide(c, "tp", "the padded VOCAB_SIZE", c.padded_vocab_size)
    if not all(c.moe_layers):
        yield from _must_divide(c, "tp", "FFN_HIDDEN_SIZE", c.ffn_hidden_size)
    if c.use_moe:
        yield from _must_divide(c, "tp", "SHARED_EXPERT_SIZE", c.shared_expert_size)
    if c.tp > 1 and c.seq_len // c.cp % c.tp:
        rule = (
            f"SEQ_LEN/CP={c.seq_len // c.cp} is not a multiple of TP, whose ranks share each sequence"
            " (sequence parallel)"
        )
        yield problem("tp", c.tp, rule, f"set SEQ_LEN to {_multiples(2 * c.cp * c.tp, c.seq_len)}")


def _batch(c: Config) -> Iterator[str]:
    replicas = _replicas(c)
    if not replicas:
        return
    step = c.mbsz * replicas
    of = f"MBSZ*DP={c.mbsz}*{replicas}={step}"
    if c.gbsz % step:
        yield problem("gbsz", c.gbsz, f"is not a multiple of {of}", f"set GBSZ to {_multiples(step, c.gbsz)}")
    yield from check_rampup(c, replicas)


def _schedule(c: Config) -> Iterator[str]:
    decay_name, decay = ("DECAY_ITERS", c.decay_iters) if c.decay_iters else ("TRAIN_ITERS", c.train_iters)
    if c.warmup_iters >= decay:
        fix = f"set WARMUP_ITERS below {decay}, or raise {decay_name}"
        yield problem(
            "warmup_iters", c.warmup_iters, f"is not below {decay_name}={decay}, where the decay ends", fix
        )
    if c.min_lr > c.lr:
        yield problem(
            "min_lr",
            c.min_lr,
            f"is over LR={c.lr}",
            f"set MIN_LR to at most {c.lr}, for instance {c.lr / 10:g}",
        )
    if c.lr_decay_style == "WSD" and not 1 <= c.wsd_decay_iters <= decay:
        fix = f"set WSD_DECAY_ITERS to 1 to {decay}, or another LR_DECAY_STYLE"
        yield problem(
            "wsd_decay_iters",
            c.wsd_decay_iters,
            f"LR_DECAY_STYLE=WSD decays over 1 to {decay_name}={decay} iterations",
            fix,
        )


def _data(c: Config) -> Iterator[str]:
    if c.eval_interval and not c.eval_iters:
        yield problem(
            "eval_iters",
            0,
            f"evaluates nothing every EVAL_INTERVAL={c.eval_interval}",
            "set EVAL_ITERS=10 or EVAL_INTERVAL=0",
        )
    if c.train_data and not c.valid_data and not c.split and c.eval_interval:
        rule = f"TRAIN_DATA is given, but nothing to evaluate on every EVAL_INTERVAL={c.eval_interval}"
        yield problem("valid_data", "", rule, "set VALID_DATA, SPLIT=99,1 or EVAL_INTERVAL=0")
    yield from _split(c)
    if c.valid_data and not c.train_data:
        yield problem(
            "valid_data",
            c.valid_data,
            "the embedded corpus brings its own validation set",
            "set TRAIN_DATA or drop VALID_DATA",
        )
    if not c.train_data and c.vocab_size < EMBEDDED_VOCAB_SIZE:
        rule = f"the embedded corpus (TRAIN_DATA is empty) has {EMBEDDED_VOCAB_SIZE} tokens"
        yield problem(
            "vocab_size",
            c.vocab_size,
            rule,
            f"set VOCAB_SIZE to at least {EMBEDDED_VOCAB_SIZE}, or TRAIN_DATA",
        )


def _split(c: Config) -> Iterator[str]:
    if not c.split:
        return
    if c.valid_data:
        yield problem(
            "split", c.split, f"VALID_DATA={c.valid_data} names the validation files", "set one of the two"
        )
    if not c.train_data:
        yield problem(
            "split",
            c.split,
            "the embedded corpus brings its own validation set",
            "set TRAIN_DATA or drop SPLIT",
        )
    shares = [float(share) for share in c.split.split(",")]
    if len(shares) > 3 or not shares[0]:
        rule = "must be up to three numbers, for training, validation and test, and the first more than 0"
        yield problem("split", c.split, rule, "set for instance SPLIT=99,1")
    elif c.eval_interval and not sum(shares[1:2]):
        rule = f"leaves nothing to evaluate on every EVAL_INTERVAL={c.eval_interval}"
        yield problem("split", c.split, rule, "set for instance SPLIT=99,1, or EVAL_INTERVAL=0")


def _retention(c: Config) -> Iterator[str]:
    for name in ("keep_every", "keep_best"):
        if getattr(c, name) and not c.keep_last:
            yield problem(
                name,
                getattr(c, name),
                "has no effect with KEEP_LAST=0, which keeps all checkpoints",
                "set KEEP_LAST",
            )
    if c.keep_every and c.save_interval and c.keep_every % c.save_interval:
        yield problem(
            "keep_every",
            c.keep_every,
            f"is no multiple of SAVE_INTERVAL={c.save_interval}",
            f"set it to {c.save_interval}",
        )
    if c.keep_best and (not c.eval_interval or not c.save_interval or c.save_interval % c.eval_interval):
        rule = (
            f"needs a validation at every save, SAVE_INTERVAL={c.save_interval} is no multiple of"
            f" EVAL_INTERVAL={c.eval_interval}"
        )
        yield problem("keep_best", c.keep_best, rule, "set both to the same number")


def _dumps(c: Config) -> Iterator[str]:
    ranks = [int(rank) for rank in c.dump_ranks.split(",") if rank]
    if missing := [rank for rank in ranks if rank >= c.world_size]:
        yield problem(
            "dump_ranks",
            c.dump_ranks,
            f"there is no rank {missing[0]} of {c.world_size}",
            f"name ranks from 0 to {c.world_size - 1}",
        )
    if ranks and not c.dump_iters:
        yield problem(
            "dump_ranks", c.dump_ranks, "has no effect without DUMP_ITERS", "set DUMP_ITERS to the iterations"
        )


def _loss_guard(c: Config) -> Iterator[str]:
    if c.spike_action == "rollback" and not c.save_interval:
        rule = "goes back to a checkpoint, but SAVE_INTERVAL=0 saves none before the end"
        yield problem("spike_action", "rollback", rule, "set SAVE_INTERVAL, or SPIKE_ACTION=log")
    if c.spike_action == "rollback" and c.keep_last == 1:
        rule = (
            "keeps no checkpoint from before a spike that comes right after a save, and SPIKE_ACTION=rollback"
            " goes back to one"
        )
        yield problem("keep_last", 1, rule, "set KEEP_LAST=2 or more, or 0 for all")
