"""Settings of parallelism: ranks of each kind, and the layers of pipeline stages.

A rule between settings of several sections stands in the last of them (sections/launch.py).
"""

import math
from collections.abc import Iterator
from typing import Literal

from moe_exp.config.errors import choices, divisors, multiples, problem
from moe_exp.config.sections.backends import BackendSettings
from moe_exp.config.setting_types import (
    NonNegative,
    NumRanks,
    OptionalPositive,
    StageLayers,
    experts,
    layout,
    shown,
    stage_terms,
)

# Sizes of the FP8 matrix products are multiples of this.
SIZE_MULTIPLES = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}


class ParallelSettings(BackendSettings):
    """The section Parallelism."""

    tp: NumRanks = layout(1, "tensor parallel size; above 1 with sequence parallelism")
    pp: NumRanks = layout(1, "pipeline parallel size")
    first_stage_layers: NonNegative = layout(
        0, "number of layers of the first pipeline stage, which has the embedding; 0: as the other stages"
    )
    last_stage_layers: NonNegative = layout(
        0, "number of layers of the last pipeline stage, which has the output layer; 0: as the other stages"
    )
    pipeline_layers: StageLayers = layout(
        "",
        "number of layers of every pipeline stage, such as '8,9*10,8', instead of FIRST_STAGE_LAYERS "
        "and LAST_STAGE_LAYERS; the first and the last may be 0",
    )
    vpp: OptionalPositive = layout(None, "model chunks per pipeline rank (interleaved schedule), or none")
    ep: NumRanks = experts(1, "expert parallel size")
    etp: NumRanks = experts(1, "expert tensor parallel size")
    cp: NumRanks = layout(1, "context parallel size")
    distributed_optimizer: bool = layout(True, "shard the optimizer state over data-parallel ranks")
    overlap: Literal["auto", "true", "false"] = layout(
        "auto", "overlap gradient reduce and parameter gather; auto: with several GPUs per stage"
    )
    recompute: Literal["none", "moe_act", "selective", "full"] = layout(
        "none",
        "activation recompute; moe_act: the experts' activation, selective: the MoE layer (both: attention "
        "scores of a dense model), full: every layer",
    )

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the dense part of the model."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def has_whole_replicas(self) -> bool:
        """Whether the ranks form a whole number of replicas."""
        return self.world_size % (self.tp * self.pp * self.cp) == 0

    @property
    def stage_layers(self) -> list[int]:
        """Layers of every pipeline stage, over all its model chunks."""
        if self.pipeline_layers:
            return [layers for layers, times in stage_terms(self.pipeline_layers) for _ in range(times)]
        first, last = self.first_stage_layers, self.last_stage_layers
        others = self.pp - bool(first) - bool(last)
        each = (self.num_layers - first - last) // others if others > 0 else 0
        return [first or each, *[each] * (self.pp - 2), last or each][: self.pp]

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.use_moe:  # EP and ETP of the MoE run that a dense run is compared with do not concern it
            yield from self._expert_parallel_problems()
        if self.fp8 != "none" and not self.is_fp8_by_kernels:
            yield from self._fp8_size_problems()
        yield from self._rank_problems()
        yield from self._tensor_parallel_problems()
        if self.cp > 1 and self.seq_len % (2 * self.cp):
            rule = f"SEQ_LEN={self.seq_len} is not a multiple of 2*CP, each rank takes two pieces of the"
            fix = f"set SEQ_LEN to {multiples(2 * self.cp, self.seq_len)}"
            yield self.problem("cp", f"{rule} sequence", fix)
        yield from self._pipeline_problems()
        if self.vpp is not None:
            yield from self._chunk_problems(self.vpp)

    def _expert_parallel_problems(self) -> Iterator[str]:
        yield from self.must_divide("ep", "NUM_EXPERTS", self.num_experts)
        yield from self.must_divide("etp", self.expert_ffn_setting.upper(), self.expert_ffn_size)
        ep, etp = self.ep, self.etp
        yield from self.broken(
            (self.dispatcher == "local" and ep * etp > 1, "dispatcher",
             f"needs every expert on every rank, but EP={ep} and ETP={etp}",
             "set DISPATCHER=alltoall, or EP=1 and ETP=1"),
            (self.dispatcher == "deepep" and (ep == 1 or etp > 1), "dispatcher",
             f"sends tokens between whole experts, but EP={ep} and ETP={etp}", "set DISPATCHER=alltoall"),
            (self.add_bias_linear and etp > 1, "add_bias_linear",
             "Megatron has expert biases with ETP=1 only", "set ADD_BIAS_LINEAR=false or ETP=1"),
        )  # fmt: skip

    def _fp8_size_problems(self) -> Iterator[str]:
        """Matrix products of Transformer Engine in FP8."""
        multiple = SIZE_MULTIPLES[self.fp8_recipe]
        has_dense = not all(self.moe_layers) and (self.moe_ffn_hidden_size or not self.use_moe)
        sizes = (  # whether there is such a matrix product, setting, value, ranks that it is split over
            (True, "hidden_size", self.hidden_size, 1),
            (self.use_moe and self.moe_latent_size, "moe_latent_size", self.moe_latent_size, 1),
            (self.use_moe, self.expert_ffn_setting, self.expert_ffn_size, self.etp),
            (has_dense and self.impl != "local", "ffn_hidden_size", self.ffn_hidden_size, self.tp),
        )
        for is_used, name, value, ways in sizes:
            if is_used and value % (multiple * ways):
                rule = f"FP8_RECIPE={self.fp8_recipe} multiplies matrices whose sizes are multiples of"
                rule += f" {multiple} on each of {ways} ranks" if ways > 1 else f" {multiple}"
                fix = f"set {name.upper()} to {multiples(multiple * ways, value)}, or FP8=none"
                yield problem(name, value, rule, fix)

    def _rank_problems(self) -> Iterator[str]:
        """Ranks form whole replicas of the model, and of its experts."""
        products = {"TP*PP*CP": self.tp * self.pp * self.cp}
        if self.use_moe and self.etp * self.ep > 1:
            products["ETP*EP*PP"] = self.etp * self.ep * self.pp
        for product, size in products.items():
            if self.world_size % size:
                rule = f"{self.world_size} ranks (NNODES * GPUS_PER_NODE) are not a multiple of"
                ranks = multiples(size // math.gcd(size, self.nnodes), self.gpus_per_node)
                fix = f"set GPUS_PER_NODE to {ranks}, or change {product.replace('*', ', ')}"
                yield self.problem("gpus_per_node", f"{rule} {product}={size}", fix)

    def _tensor_parallel_problems(self) -> Iterator[str]:
        yield from self.must_divide("tp", "NUM_HEADS", self.num_heads)
        if not self.multi_latent_attention:
            yield from self.must_divide("tp", "NUM_QUERY_GROUPS", self.num_query_groups)
        yield from self.must_divide("tp", "the padded VOCAB_SIZE", self.padded_vocab_size)
        if not all(self.moe_layers):
            yield from self.must_divide("tp", "FFN_HIDDEN_SIZE", self.ffn_hidden_size)
        if self.use_moe:
            yield from self.must_divide("tp", "SHARED_EXPERT_SIZE", self.shared_expert_size)
        if self.tp > 1 and (part := self.seq_len // self.cp) % self.tp:
            rule = f"SEQ_LEN/CP={part} is not a multiple of TP, whose ranks share each sequence"
            fix = f"set SEQ_LEN to {multiples(2 * self.cp * self.tp, self.seq_len)}"
            yield self.problem("tp", f"{rule} (sequence parallel)", fix)

    def _pipeline_problems(self) -> Iterator[str]:
        if self.pipeline_layers:
            yield from self._given_stage_problems()
        elif self.first_stage_layers or self.last_stage_layers:
            yield from self._given_end_problems()
        elif self.num_layers % self.pp:
            fix = f"set PP to {choices(divisors(self.num_layers, self.pp))}"
            fix += ", or give the layers of every stage as PIPELINE_LAYERS"
            yield self.problem("pp", f"does not divide NUM_LAYERS={self.num_layers}", fix)

    def _given_stage_problems(self) -> Iterator[str]:
        """PIPELINE_LAYERS covers all stages and layers, and only end stages may be empty."""
        stages, num_layers = self.stage_layers, self.num_layers
        for name in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, name):
                rule = f"PIPELINE_LAYERS={self.pipeline_layers} says what every stage has"
                yield self.problem(name, rule, f"set {name.upper()}=0, or PIPELINE_LAYERS to nothing")
        if len(stages) != self.pp:
            fix = f"give the layers of {self.pp} stages, or set PP={len(stages)}"
            yield self.problem("pipeline_layers", f"has {len(stages)} stages, but PP={self.pp}", fix)
        if sum(stages) != num_layers:
            rule = f"adds up to {sum(stages)} layers, but NUM_LAYERS={num_layers}"
            yield self.problem("pipeline_layers", rule, f"deal out {num_layers} layers")
        if 0 in stages[1:-1]:
            rule = "only the first stage, with the embedding, and the last, with the output layer, may be"
            fix = f"give stage {stages.index(0, 1) + 1} of {len(stages)} a layer, or leave it out"
            yield self.problem("pipeline_layers", f"{rule} empty", fix)

    def _given_end_problems(self) -> Iterator[str]:
        """FIRST_STAGE_LAYERS and LAST_STAGE_LAYERS leave all other stages the same number of layers, >= 1."""
        given = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(self, name)]
        layers = [getattr(self, name) for name in given]
        whole, left, others = self.num_layers, self.num_layers - sum(layers), self.pp - len(given)
        if self.pp == 1:
            fix = f"set PP to at least 2, or {given[0].upper()}=0"
            yield self.problem(given[0], "there is one stage, PP=1", fix)
        elif others == 0 and left:
            rule = f"FIRST_STAGE_LAYERS + LAST_STAGE_LAYERS = {_plus(layers)} is not NUM_LAYERS={whole}"
            yield self.problem(given[0], rule, "set one of the two to 0: it gets what the other leaves")
        elif others and (left < others or left % others):
            rule = f"leaves {left} of NUM_LAYERS={whole} layers for the other {others} of PP={self.pp} stages"
            fix = f"give {' and '.join(map(str.upper, given))} so that a multiple of {others} is left"
            yield self.problem(given[0], f"{rule}, which get equally many", f"{fix}, or PIPELINE_LAYERS")

    def _chunk_problems(self, vpp: int) -> Iterator[str]:
        """Every model chunk of a stage has the same number of layers, and at least one."""
        if self.pp == 1:
            fix = "set VPP=none or PP to at least 2"
            yield self.problem("vpp", "interleaved stages need a pipeline, but PP=1", fix)
            return
        if vpp == 1:
            rule = "one model chunk per rank leaves nothing to interleave"
            yield self.problem("vpp", rule, "set VPP=none or VPP to at least 2")
        if self.pipeline_layers or self.first_stage_layers or self.last_stage_layers:
            odd = next((layers for layers in self.stage_layers if layers % vpp), None)
            if odd is not None:
                over = f"NUM_LAYERS={self.num_layers} over the stages as {_plus(self.stage_layers)}"
                fix = "set VPP=none, or give every stage a multiple of VPP layers"
                yield self.problem("vpp", f"does not divide the {odd} layers of a stage ({over})", fix)
            if 0 in self.stage_layers:
                rule = "a stage without layers would have model chunks with nothing at all"
                fix = "set VPP=none, or give every stage of PIPELINE_LAYERS some layers"
                yield self.problem("vpp", rule, fix)
        elif self.num_layers % self.pp == 0:
            yield from self.must_divide("vpp", "NUM_LAYERS/PP", self.num_layers // self.pp)


def _plus(numbers: list[int]) -> str:
    return shown("+".join(map(str, numbers)))
