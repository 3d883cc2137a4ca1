"""Constraints on ranks, parallelism, pipeline stages and batch sizes."""

import math
from collections.abc import Iterator

from moe_exp.config.checks.divisors import choices, divisors, multiples, must_divide
from moe_exp.config.ramp import ramp_sizes
from moe_exp.config.setting_types import shown
from moe_exp.config.settings import Config


def check_node_rank(c: Config) -> Iterator[str]:
    """NODE_RANK, for commands that start a process per node."""
    if c.node_rank >= c.nnodes:
        ranks = f"0 to {c.nnodes - 1}" if c.nnodes > 1 else "0"
        fix = f"set NODE_RANK to {ranks}, or NNODES to at least {c.node_rank + 1}"
        yield c.problem("node_rank", f"is not below NNODES={c.nnodes}", fix)


def check_parallel(c: Config) -> Iterator[str]:
    yield from check_node_rank(c)
    yield from _ranks(c, "TP*PP*CP", c.tp * c.pp * c.cp)
    if c.use_moe and c.etp * c.ep > 1:
        yield from _ranks(c, "ETP*EP*PP", c.etp * c.ep * c.pp)
    yield from must_divide(c, "tp", "NUM_HEADS", c.num_heads)
    if not c.multi_latent_attention:
        yield from must_divide(c, "tp", "NUM_QUERY_GROUPS", c.num_query_groups)
    yield from must_divide(c, "tp", "the padded VOCAB_SIZE", c.padded_vocab_size)
    if not all(c.moe_layers):
        yield from must_divide(c, "tp", "FFN_HIDDEN_SIZE", c.ffn_hidden_size)
    if c.use_moe:
        yield from must_divide(c, "tp", "SHARED_EXPERT_SIZE", c.shared_expert_size)
    if c.tp > 1 and c.seq_len // c.cp % c.tp:
        rule = f"SEQ_LEN/CP={c.seq_len // c.cp} is not a multiple of TP, whose ranks share each sequence"
        fix = f"set SEQ_LEN to {multiples(2 * c.cp * c.tp, c.seq_len)}"
        yield c.problem("tp", f"{rule} (sequence parallel)", fix)
    if c.cp > 1 and c.seq_len % (2 * c.cp):
        rule = f"SEQ_LEN={c.seq_len} is not a multiple of 2*CP, each rank takes two pieces of the sequence"
        yield c.problem("cp", rule, f"set SEQ_LEN to {multiples(2 * c.cp, c.seq_len)}")


def _ranks(c: Config, product: str, size: int) -> Iterator[str]:
    if c.world_size % size:
        rule = f"{c.world_size} ranks (NNODES * GPUS_PER_NODE) are not a multiple of {product}={size}"
        fix = f"set GPUS_PER_NODE to {multiples(size // math.gcd(size, c.nnodes), c.gpus_per_node)}"
        yield c.problem("gpus_per_node", rule, f"{fix}, or change {product.replace('*', ', ')}")


def check_pipeline(c: Config) -> Iterator[str]:
    if c.pipeline_layers:
        yield from _stages_given(c)
    elif c.first_stage_layers or c.last_stage_layers:
        yield from _ends_given(c)
    elif c.num_layers % c.pp:
        fix = f"set PP to {choices(divisors(c.num_layers, c.pp))}"
        fix += ", or give the layers of every stage as PIPELINE_LAYERS"
        yield c.problem("pp", f"does not divide NUM_LAYERS={c.num_layers}", fix)
    if c.vpp is None:
        return
    yield from c.problems(
        (c.pp == 1, "vpp",
         "interleaved stages need a pipeline, but PP=1", "set VPP=none or PP to at least 2"),
        (c.pp > 1 and c.vpp == 1, "vpp",
         "one model chunk per rank leaves nothing to interleave", "set VPP=none or VPP to at least 2"),
    )  # fmt: skip
    if c.pp == 1:
        return
    yield from _chunks(c, c.vpp)
    # Megatron requires (micro-batches mod group size) to be 0 or at least PP; the group size is PP, so 0.
    step = c.mbsz * num_replicas(c)
    if step and c.gbsz % step == 0 and c.num_microbatches % c.pp:
        rule = f"the interleaved schedule needs micro-batches in multiples of PP={c.pp}"
        rule += f", but GBSZ / (MBSZ*DP) is {c.num_microbatches}"
        yield c.problem("vpp", rule, f"set GBSZ to {multiples(step * c.pp, c.gbsz)}, or VPP=none")


def _chunks(c: Config, vpp: int) -> Iterator[str]:
    """Every model chunk of a stage has the same number of layers, and at least one."""
    if c.pipeline_layers or c.first_stage_layers or c.last_stage_layers:
        odd = next((layers for layers in c.stage_layers if layers % vpp), None)
        if odd is not None:
            over = f"NUM_LAYERS={c.num_layers} over the stages as {_plus(c.stage_layers)}"
            fix = "set VPP=none, or give every stage a multiple of VPP layers"
            yield c.problem("vpp", f"does not divide the {odd} layers of a stage ({over})", fix)
        if 0 in c.stage_layers:
            fix = "set VPP=none, or give every stage of PIPELINE_LAYERS some layers"
            yield c.problem("vpp", "a stage without layers would have model chunks with nothing at all", fix)
    elif c.num_layers % c.pp == 0:
        yield from must_divide(c, "vpp", "NUM_LAYERS/PP", c.num_layers // c.pp)


def _stages_given(c: Config) -> Iterator[str]:
    """PIPELINE_LAYERS covers all stages and layers, and only end stages may be empty."""
    stages = c.stage_layers
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(c, name):
            rule = f"PIPELINE_LAYERS={c.pipeline_layers} says what every stage has"
            yield c.problem(name, rule, f"set {name.upper()}=0, or PIPELINE_LAYERS to nothing")
    if len(stages) != c.pp:
        fix = f"give the layers of {c.pp} stages, or set PP={len(stages)}"
        yield c.problem("pipeline_layers", f"has {len(stages)} stages, but PP={c.pp}", fix)
    if sum(stages) != c.num_layers:
        rule = f"adds up to {sum(stages)} layers, but NUM_LAYERS={c.num_layers}"
        yield c.problem("pipeline_layers", rule, f"deal out {c.num_layers} layers")
    if 0 in stages[1:-1]:
        rule = "only the first stage, with the embedding, and the last, with the output layer, may be empty"
        fix = f"give stage {stages.index(0, 1) + 1} of {len(stages)} a layer, or leave it out"
        yield c.problem("pipeline_layers", rule, fix)


def _ends_given(c: Config) -> Iterator[str]:
    """FIRST_STAGE_LAYERS and LAST_STAGE_LAYERS leave every other stage the same number of layers, >= 1."""
    given = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(c, name)]
    layers = [getattr(c, name) for name in given]
    left, others = c.num_layers - sum(layers), c.pp - len(given)
    if c.pp == 1:
        fix = f"set PP to at least 2, or {given[0].upper()}=0"
        yield c.problem(given[0], "there is one stage, PP=1", fix)
    elif others == 0 and left:
        rule = f"FIRST_STAGE_LAYERS + LAST_STAGE_LAYERS = {_plus(layers)} is not NUM_LAYERS={c.num_layers}"
        yield c.problem(given[0], rule, "set one of the two to 0: it gets what the other leaves")
    elif others and (left < others or left % others):
        rule = f"leaves {left} of NUM_LAYERS={c.num_layers} layers for the other {others} of PP={c.pp} stages"
        fix = f"give {' and '.join(map(str.upper, given))} so that a multiple of {others} is left"
        yield c.problem(given[0], f"{rule}, which get equally many", f"{fix}, or PIPELINE_LAYERS")


def _plus(numbers: list[int]) -> str:
    return shown("+".join(map(str, numbers)))


def num_replicas(c: Config) -> int:
    """Data-parallel size, or 0 if the ranks do not form a whole number of replicas."""
    return 0 if c.world_size % (c.tp * c.pp * c.cp) else c.data_parallel_size


def check_batch(c: Config) -> Iterator[str]:
    """GBSZ and RAMPUP_BATCH_SIZE: every batch is a number of micro-batches on all data-parallel replicas."""
    replicas = num_replicas(c)
    if not replicas:
        return
    step = c.mbsz * replicas
    if c.gbsz % step:
        fix = f"set GBSZ to {multiples(step, c.gbsz)}"
        if c.gbsz % replicas == 0:
            fix += f", or MBSZ to {math.gcd(c.mbsz, c.gbsz // replicas)}"
        yield c.problem("gbsz", f"is not a multiple of MBSZ*DP={c.mbsz}*{replicas}={step}", fix)
    if c.rampup_batch_size and (rule := _ramp_rule(c, replicas)):
        size = step * c.pp if c.vpp else step
        fix = f"give START INCREMENT SAMPLES, for instance '{size} {size} 1000'"
        yield c.problem("rampup_batch_size", rule, "first correct GBSZ" if c.gbsz % size else fix)


_MOST_RAMP_STEPS, _MOST_RAMP_SAMPLES = 10_000, 10**15


def _ramp_rule(c: Config, replicas: int) -> str:
    """The rule that RAMPUP_BATCH_SIZE breaks, or ''."""
    try:
        start, increment, samples = c.rampup or (0, 0, 0)
    except ValueError:
        start = increment = samples = 0
    if min(start, increment, samples) < 1:
        return "must be three positive whole numbers"
    if start > c.gbsz or (c.gbsz - start) % increment:
        return f"START must reach GBSZ={c.gbsz} in whole steps of INCREMENT"
    if (c.gbsz - start) // increment > _MOST_RAMP_STEPS or samples > _MOST_RAMP_SAMPLES:
        return f"must have at most {_MOST_RAMP_STEPS} steps and {_MOST_RAMP_SAMPLES} samples"
    step, sizes = c.mbsz * replicas, ramp_sizes(c)
    for number, size in enumerate(sizes[:-1], start=1):
        has = f"step {number} of {len(sizes)} has a batch of {size}"
        if size % step:
            return f"{has}, no multiple of MBSZ*DP={c.mbsz}*{replicas}={step}"
        if c.vpp and size % (step * c.pp):
            product = f"PP*MBSZ*DP={c.pp}*{c.mbsz}*{replicas}={step * c.pp}"
            return f"{has}, with VPP={c.vpp} no multiple of {product}"
    return ""
