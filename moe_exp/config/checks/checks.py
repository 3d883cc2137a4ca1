"""Constraints between the settings of a run; those of this machine are in launch/machine_checks.py.

Every function returns a line per problem (name, value, rule, fix). Values that are invalid on their own are
rejected by `moe_exp.config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe_exp.config.checks.attention import check_attention
from moe_exp.config.checks.data import check_packing, check_stages
from moe_exp.config.checks.divisors import multiples as _multiples
from moe_exp.config.checks.divisors import must_divide as _must_divide
from moe_exp.config.checks.fp8 import check_fp8
from moe_exp.config.checks.learning import check_groups, check_schedule
from moe_exp.config.checks.moe import check_moe, check_upcycle
from moe_exp.config.checks.pipeline import check_pipeline
from moe_exp.config.checks.pipeline import num_replicas as _replicas
from moe_exp.config.checks.training import (
    check_optimizer,
    check_parametrization,
    check_profiling,
    check_rampup,
)
from moe_exp.config.setting_types import blend_members, names_text, shown
from moe_exp.config.settings import Config, problem
from moe_exp.host.files import is_url

# Of the tokenizer trained on the embedded corpus.
EMBEDDED_VOCAB_SIZE = 2048


def check_config(config: Config) -> list[str]:
    """Problems among the settings themselves, the same on every machine."""
    return [
        *_model(config),
        *check_attention(config),
        *check_moe(config),
        *check_parametrization(config),
        *check_fp8(config),
        *check_upcycle(config),
        *_parallel(config),
        *check_pipeline(config),
        *_batch(config),
        *check_schedule(config),
        *check_groups(config),
        *check_optimizer(config),
        *check_profiling(config),
        *_data(config),
        *check_packing(config),
        *check_stages(config),
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


def check_node_rank(c: Config) -> Iterator[str]:
    """NODE_RANK, for commands that start a process per node."""
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
        fix = f"set GBSZ to {_multiples(step, c.gbsz)}"
        if c.gbsz % replicas == 0:
            fix += f", or MBSZ to {math.gcd(c.mbsz, c.gbsz // replicas)}"
        yield problem("gbsz", c.gbsz, f"is not a multiple of {of}", fix)
    yield from check_rampup(c, replicas)


def _data(c: Config) -> Iterator[str]:
    if c.eval_interval and not c.eval_iters:
        yield problem(
            "eval_iters",
            0,
            f"evaluates nothing every EVAL_INTERVAL={c.eval_interval}",
            "set EVAL_ITERS=10 or EVAL_INTERVAL=0",
        )
    if c.train_data and not (c.valid_data or c.split or names_text(c.train_data)) and c.eval_interval:
        rule = f"TRAIN_DATA={shown(c.train_data)} is no folder or file of text here, and for token files"
        rule += f" there is nothing to evaluate on every EVAL_INTERVAL={c.eval_interval}"
        fix = "correct TRAIN_DATA if it should name text, else set VALID_DATA, SPLIT=99,1 or EVAL_INTERVAL=0"
        yield problem("valid_data", "", rule, fix)
    remote = [name for _, name in blend_members(f"{c.train_data} {c.valid_data}") if is_url(name)]
    if remote and c.data_order == "megatron":
        rule = "reads files of this machine only"
        fix = f"fetch {remote[0]} with moe-exp data pull, or set DATA_ORDER=stream"
        yield problem("data_order", c.data_order, rule, fix)
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
