"""Constraints on pipeline settings: layers per stage, model chunks, micro-batches; a part of checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config.checks.divisors import choices, divisors, multiples, must_divide
from moe_exp.config.setting_types import shown
from moe_exp.config.settings import Config, problem


def check_pipeline(c: Config) -> Iterator[str]:
    """Lines of all problems (name, value, rule, fix)."""
    if c.pipeline_layers:
        yield from _stages_given(c)
    elif c.first_stage_layers or c.last_stage_layers:
        yield from _ends_given(c)
    elif c.num_layers % c.pp:
        fix = (
            f"set PP to {choices(divisors(c.num_layers, c.pp))}, or give the layers of every stage as"
            " PIPELINE_LAYERS"
        )
        yield problem("pp", c.pp, f"does not divide NUM_LAYERS={c.num_layers}", fix)
    if c.vpp is None:
        return
    if c.pp == 1:
        yield problem(
            "vpp", c.vpp, "interleaved stages need a pipeline, but PP=1", "set VPP=none or PP to at least 2"
        )
        return
    if c.vpp == 1:
        yield problem(
            "vpp",
            1,
            "one model chunk per rank leaves nothing to interleave",
            "set VPP=none or VPP to at least 2",
        )
    yield from _chunks(c)
    # Megatron requires (micro-batches mod group size) to be 0 or at least PP; the group size is PP, so 0.
    if (
        num_replicas(c)
        and (step := c.mbsz * num_replicas(c))
        and c.gbsz % step == 0
        and c.num_microbatches % c.pp
    ):
        rule = (
            f"the interleaved schedule needs micro-batches in multiples of PP={c.pp}, but GBSZ / (MBSZ*DP) is"
            f" {c.num_microbatches}"
        )
        yield problem("vpp", c.vpp, rule, f"set GBSZ to {multiples(step * c.pp, c.gbsz)}, or VPP=none")


def _chunks(c: Config) -> Iterator[str]:
    """Every model chunk of a stage has the same number of layers, and at least one."""
    if c.pipeline_layers or c.first_stage_layers or c.last_stage_layers:
        odd = next((layers for layers in c.stage_layers if layers % c.vpp), None)  # type: ignore[operator]
        if odd is not None:
            rule = (
                f"does not divide the {odd} layers of a stage (NUM_LAYERS={c.num_layers} over the stages as"
                f" {_plus(c.stage_layers)})"
            )
            yield problem("vpp", c.vpp, rule, "set VPP=none, or give every stage a multiple of VPP layers")
        if 0 in c.stage_layers:
            rule = "a stage without layers would have model chunks with nothing at all"
            yield problem(
                "vpp", c.vpp, rule, "set VPP=none, or give every stage of PIPELINE_LAYERS some layers"
            )
    elif c.num_layers % c.pp == 0 and c.num_layers // c.pp % (c.vpp or 1):
        yield from must_divide(c, "vpp", "NUM_LAYERS/PP", c.num_layers // c.pp)


def _stages_given(c: Config) -> Iterator[str]:
    """PIPELINE_LAYERS covers all stages and layers, and only end stages may be empty."""
    stages = c.stage_layers
    for name in ("first_stage_layers", "last_stage_layers"):
        if value := getattr(c, name):
            rule = f"PIPELINE_LAYERS={c.pipeline_layers} says what every stage has"
            yield problem(name, value, rule, f"set {name.upper()}=0, or PIPELINE_LAYERS to nothing")
    if len(stages) != c.pp:
        fix = f"give the layers of {c.pp} stages, or set PP={len(stages)}"
        yield problem("pipeline_layers", c.pipeline_layers, f"has {len(stages)} stages, but PP={c.pp}", fix)
    if sum(stages) != c.num_layers:
        rule = f"adds up to {sum(stages)} layers, but NUM_LAYERS={c.num_layers}"
        yield problem("pipeline_layers", c.pipeline_layers, rule, f"deal out {c.num_layers} layers")
    if 0 in stages[1:-1]:
        rule = (
            "only the first stage, which has the embedding, and the last, which has the output layer, may be"
            " without layers"
        )
        yield problem(
            "pipeline_layers",
            c.pipeline_layers,
            rule,
            f"give stage {stages.index(0, 1) + 1} of {len(stages)} a layer, or leave it out",
        )


def _ends_given(c: Config) -> Iterator[str]:
    """FIRST_STAGE_LAYERS and LAST_STAGE_LAYERS leave every other stage the same number of layers, >= 1."""
    given = {
        name: getattr(c, name) for name in ("first_stage_layers", "last_stage_layers") if getattr(c, name)
    }
    (name, value), left = next(iter(given.items())), c.num_layers - sum(given.values())
    others = c.pp - len(given)
    if c.pp == 1:
        yield problem(name, value, "there is one stage, PP=1", f"set PP to at least 2, or {name.upper()}=0")
    elif others == 0 and left:
        rule = (
            f"FIRST_STAGE_LAYERS + LAST_STAGE_LAYERS = {_plus(list(given.values()))} is not"
            f" NUM_LAYERS={c.num_layers}"
        )
        yield problem(name, value, rule, "set one of the two to 0: it gets what the other leaves")
    elif others and (left < others or left % others):
        rule = (
            f"leaves {left} of NUM_LAYERS={c.num_layers} layers for the other {others} of PP={c.pp} stages,"
            " which get equally many"
        )
        fix = (
            f"give {' and '.join(map(str.upper, given))} so that a multiple of {others} is left, or"
            " PIPELINE_LAYERS"
        )
        yield problem(name, value, rule, fix)


def num_replicas(c: Config) -> int:
    """Data-parallel size, or 0 if the ranks do not form a whole number of replicas."""
    return 0 if c.world_size % (c.tp * c.pp * c.cp) else c.data_parallel_size


def _plus(numbers: list[int]) -> str:
    return shown("+".join(map(str, numbers)))
