"""Parallelism settings: parallel sizes and the layers of each pipeline stage."""

import math
from collections.abc import Iterator
from typing import Literal

from moe_exp.config.choices import OFFLOADED, RECOMPUTED, RECOMPUTED_IN_MOE
from moe_exp.config.errors import choices, divisors, multiples, problem
from moe_exp.config.sections.moe import ExpertSettings
from moe_exp.config.setting_types import (
    NonNegative,
    NumRanks,
    OffloadedModules,
    OptionalPositive,
    RecomputedModules,
    StageLayers,
    as_given,
    shown,
    stage_terms,
)
from moe_exp.config.traits import experts, layout

# Matrix sizes in FP8 products must be multiples of these.
SIZE_MULTIPLES = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}


class ParallelSettings(ExpertSettings):
    """Settings of the section Parallelism."""

    tp: NumRanks = layout(1, "tensor-parallel size; sizes above 1 turn on sequence parallelism")
    pp: NumRanks = layout(1, "pipeline-parallel size")
    first_stage_layers: NonNegative = layout(
        0, "number of layers in the first pipeline stage (with the embedding); 0: as in the other stages"
    )
    last_stage_layers: NonNegative = layout(
        0, "number of layers in the last pipeline stage (with the output layer); 0: as in the other stages"
    )
    pipeline_layers: StageLayers = layout(
        "",
        "number of layers in every pipeline stage, such as '8,9*10,8' (9*10: ten stages of 9 layers); "
        "replaces FIRST_STAGE_LAYERS and LAST_STAGE_LAYERS; only the first and last stage may have 0 layers",
    )
    vpp: OptionalPositive = layout(
        None, "number of model chunks per pipeline rank (interleaved schedule); none: no interleaving"
    )
    ep: NumRanks = experts(1, "expert-parallel size")
    etp: NumRanks = experts(1, "expert-tensor-parallel size")
    cp: NumRanks = layout(1, "context-parallel size")
    distributed_optimizer: bool = layout(True, "shard the optimizer state across data-parallel ranks")
    overlap: Literal["auto", "true", "false"] = layout(
        "auto",
        "overlap gradient reduction and parameter gathering with compute; auto: true if each pipeline "
        "stage has several GPUs, else false",
    )
    recompute: Literal["none", "moe_act", "selective", "full"] = layout(
        "none",
        "activation recomputation in backward; moe_act: only the experts' activation function; selective: "
        "MoE layers; full: every layer. In a dense model, moe_act and selective recompute attention scores",
    )
    recompute_modules: RecomputedModules = layout(
        "",
        "modules whose results are recomputed in the backward pass instead of kept, comma-separated "
        f"({', '.join(RECOMPUTED)}); experts: only their first projection and activation function",
    )
    offload_modules: OffloadedModules = layout(
        "",
        f"comma-separated modules ({', '.join(OFFLOADED)}) whose saved tensors are moved to host memory "
        "until backward; mlp: the MLPs of dense layers",
    )
    cuda_graph: Literal["auto", "on", "off"] = layout(
        "auto",
        "run forward and backward of each micro-batch as one CUDA graph; auto: on a GPU if all settings "
        "allow it; on: always (an error if impossible), even with OVERLAP, which is then ignored (gradients "
        "are exchanged only after the backward pass)",
        compared=False,
    )

    @property
    def recomputed(self) -> frozenset[str]:
        """Modules that are recomputed (RECOMPUTE_MODULES or RECOMPUTE); `moe` stands for whole MoE layers."""
        if self.recompute in ("none", "full"):
            # a dense run in a comparison ignores the modules of MoE layers
            ignored = {""} if self.use_moe else {"", *RECOMPUTED_IN_MOE}
            return frozenset(self.recompute_modules.split(",")) - ignored
        moe = "moe" if self.recompute == "selective" else self.recompute
        return frozenset({moe if self.use_moe else "core_attn"})

    @property
    def offloaded(self) -> frozenset[str]:
        """Modules of OFFLOAD_MODULES that the model has; their saved tensors are moved to host memory."""
        ignored = {""} if self.use_moe else {"", "experts", "shared_expert"}
        return frozenset(self.offload_modules.split(",")) - ignored

    @property
    def needs_own_layers(self) -> bool:
        """Whether norm settings rule out Transformer Engine's layers, which fuse norms with projections."""
        return (
            "norm" in self.recomputed
            or (self.norm_placement, self.norm_bias, self.qk_norm_epsilon) != ("pre", True, 0)
            or self.qk_norm_scope == "rotated"
        )

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel size for all parameters except those of the experts."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def stage_layers(self) -> list[int]:
        """Number of layers in each pipeline stage, summed over the stage's model chunks."""
        if self.pipeline_layers:
            return [layers for layers, times in stage_terms(self.pipeline_layers) for _ in range(times)]
        first, last = self.first_stage_layers, self.last_stage_layers
        others = self.pp - bool(first) - bool(last)
        each = (self.num_layers - first - last) // others if others > 0 else 0
        return [first or each, *[each] * (self.pp - 2), last or each][: self.pp]

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        is_te_fp8 = self.fp8 != "none" and not self.is_fp8_by_kernels
        if self.use_moe:  # a dense run in a comparison ignores EP and ETP of its MoE counterpart
            yield from self._expert_parallel_problems()
        if is_te_fp8:
            yield from self._fp8_size_problems()
        yield from self._rank_problems()
        yield from self._tensor_parallel_problems()
        if self.cp > 1 and self.seq_len % (2 * self.cp):
            # each rank computes two pieces of the sequence, which balances causal attention
            rule = f"SEQ_LEN={self.seq_len} must be a multiple of 2*CP"
            yield self.problem("cp", rule, f"set SEQ_LEN to {multiples(2 * self.cp, self.seq_len)}")
        if self.pipeline_layers:
            yield from self._given_stage_problems()
        elif self.first_stage_layers or self.last_stage_layers:
            yield from self._given_end_problems()
        elif self.num_layers % self.pp:
            fix = f"set PP to {choices(divisors(self.num_layers, self.pp))}"
            fix += ", or set PIPELINE_LAYERS to the number of layers in every stage"
            yield self.problem("pp", f"must divide NUM_LAYERS={self.num_layers}", fix)
        if self.vpp is not None:
            yield from self._chunk_problems(self.vpp)
        if self.recompute_modules:
            yield from self._recompute_problems()
        by_te = self.impl == "te" or is_te_fp8
        usual = {"norm_placement": "pre", "norm_bias": True, "qk_norm_epsilon": 0, "qk_norm_scope": "head"}
        for name, value in usual.items():
            if by_te and getattr(self, name) not in (value, "all"):
                fix = f"set {name.upper()}={as_given(value)}, or IMPL=local FP8=none"
                yield self.problem(name, "is not possible with Transformer Engine's layers", fix)
        yield from self.offload_problems()
        has_mtp = self.mtp_num_layers > 0
        yield from self.broken(
            (has_mtp and self.tie_embeddings and self.pp > 1, "mtp_num_layers",
             f"cannot be combined with TIE_EMBEDDINGS=true and PP={self.pp}: Megatron would give the last "
             "stage a separate output layer", "set PP=1, TIE_EMBEDDINGS=false, or MTP_NUM_LAYERS=0"),
            (has_mtp and self.stage_layers[-1:] == [0], "mtp_num_layers",
             "requires a layer in the last pipeline stage",
             "change PIPELINE_LAYERS, or set MTP_NUM_LAYERS=0"),
            (has_mtp and is_te_fp8, "mtp_num_layers",
             f"cannot be combined with FP8={self.fp8} in Transformer Engine",
             "set FP8=none, or MTP_NUM_LAYERS=0"),
        )  # fmt: skip

    def _recompute_problems(self) -> Iterator[str]:
        chosen = self.recomputed
        needs = (
            ("mla_up_proj", self.multi_latent_attention, "MULTI_LATENT_ATTENTION=true"),
            ("shared_expert", self.shared_expert_size, "SHARED_EXPERT_SIZE"),
        )
        return self.broken(
            *((name in chosen and not has, "recompute_modules", f"the model has no {name} without {setting}",
               f"remove {name}, or set {setting}") for name, has, setting in needs),
            (self.recompute != "none", "recompute_modules",
             f"cannot be combined with RECOMPUTE={self.recompute}",
             "set RECOMPUTE=none (to recompute moe_act, list it in RECOMPUTE_MODULES)"),
            ("norm" in chosen and self.impl == "te", "recompute_modules",
             "cannot recompute norm with IMPL=te: Transformer Engine fuses a norm with the next projection "
             "and keeps the norm's output",
             "remove norm, or set IMPL=local"),
            ("norm" in chosen and self.norm_placement == "post", "recompute_modules",
             "recomputing norms saves no memory with NORM_PLACEMENT=post", "remove norm from the list"),
            (bool(chosen & {"experts", "router"}) and self.fp8 != "none" and not self.is_fp8_by_kernels,
             "recompute_modules",
             f"with FP8={self.fp8}, Transformer Engine cannot recompute experts or router",
             "remove them from the list, or set RECOMPUTE=selective"),
        )  # fmt: skip

    def offload_problems(self) -> Iterator[str]:
        """Yields a line for each OFFLOAD_MODULES error."""
        chosen, again = self.offloaded, self.recomputed
        if not chosen:
            return
        recomputed = sorted(chosen & {"experts" if name == "moe_act" else name for name in again})
        yield from self.broken(
            ("shared_expert" in chosen and not self.shared_expert_size, "offload_modules",
             "the model has no shared_expert without SHARED_EXPERT_SIZE",
             "remove shared_expert, or set SHARED_EXPERT_SIZE"),
            (bool(recomputed), "offload_modules",
             f"backward recomputes {','.join(recomputed)}, so nothing is left to offload",
             "remove these modules from OFFLOAD_MODULES or RECOMPUTE_MODULES"),
            ("attention" in chosen and "mla_up_proj" in again, "offload_modules",
             "attention cannot be offloaded while its submodule mla_up_proj is freed and recomputed",
             "remove attention from OFFLOAD_MODULES, or mla_up_proj from RECOMPUTE_MODULES"),
            (self.recompute in ("selective", "full"), "offload_modules",
             f"cannot be combined with RECOMPUTE={self.recompute}, which keeps only layer inputs",
             "set RECOMPUTE=none"),
            (self.fp8 != "none", "offload_modules", f"cannot be combined with FP8={self.fp8}",
             "set FP8=none"),
        )  # fmt: skip

    def _expert_parallel_problems(self) -> Iterator[str]:
        yield from self.must_divide("ep", "NUM_EXPERTS", self.num_experts)
        yield from self.must_divide("etp", self.expert_ffn_setting.upper(), self.expert_ffn_size)
        ep, etp = self.ep, self.etp
        yield from self.broken(
            (self.dispatcher == "local" and ep * etp > 1, "dispatcher",
             f"requires every expert on every rank, but EP={ep} and ETP={etp}",
             "set DISPATCHER=alltoall, or EP=1 and ETP=1"),
            (self.dispatcher == "deepep" and (ep == 1 or etp > 1), "dispatcher",
             f"requires EP of at least 2 and ETP=1, but EP={ep} and ETP={etp}", "set DISPATCHER=alltoall"),
            (self.add_bias_linear and etp > 1, "add_bias_linear",
             "Megatron supports expert biases only with ETP=1", "set ADD_BIAS_LINEAR=false or ETP=1"),
        )  # fmt: skip

    def _fp8_size_problems(self) -> Iterator[str]:
        """Checks the matrix sizes in Transformer Engine's FP8 GEMMs."""
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
                rule = f"must be a multiple of {multiple} with FP8_RECIPE={self.fp8_recipe}"
                rule += f" on each of {ways} ranks" if ways > 1 else ""
                fix = f"set {name.upper()} to {multiples(multiple * ways, value)}, or FP8=none"
                yield problem(name, value, rule, fix)

    def _rank_problems(self) -> Iterator[str]:
        """Checks that the ranks form whole replicas of the model and of its experts."""
        products = {"TP*PP*CP": self.tp * self.pp * self.cp}
        if self.use_moe and self.etp * self.ep > 1:
            products["ETP*EP*PP"] = self.etp * self.ep * self.pp
        for product, size in products.items():
            if self.world_size % size:
                rule = f"{self.world_size} ranks (NNODES * GPUS_PER_NODE) must be a multiple of"
                ranks = multiples(size // math.gcd(size, self.nnodes), self.gpus_per_node)
                fix = f"set GPUS_PER_NODE to {ranks}, or change {product.replace('*', ', ')}"
                yield self.problem("gpus_per_node", f"{rule} {product}={size}", fix)

    def _tensor_parallel_problems(self) -> Iterator[str]:
        has_groups, has_dense = not self.multi_latent_attention, not all(self.moe_layers)
        wholes = {  # 0: not in this model
            "NUM_HEADS": self.num_heads,
            "NUM_QUERY_GROUPS": self.num_query_groups if has_groups else 0,
            "WINDOW_QUERY_GROUPS": self.window_query_groups if has_groups else 0,
            "the padded VOCAB_SIZE": self.padded_vocab_size,
            "FFN_HIDDEN_SIZE": self.ffn_hidden_size if has_dense else 0,
            "SHARED_EXPERT_SIZE": self.shared_expert_size if self.use_moe else 0,
        }
        for name, whole in wholes.items():
            yield from self.must_divide("tp", name, whole)
        if self.tp > 1 and (part := self.seq_len // self.cp) % self.tp:
            rule = f"SEQ_LEN/CP={part} must be a multiple of TP (sequence parallelism)"
            fix = f"set SEQ_LEN to {multiples(2 * self.cp * self.tp, self.seq_len)}"
            yield self.problem("tp", rule, fix)

    def _given_stage_problems(self) -> Iterator[str]:
        """Checks that PIPELINE_LAYERS covers all stages and layers, and that no middle stage is empty."""
        stages, num_layers = self.stage_layers, self.num_layers
        empty = next((number for number, layers in enumerate(stages[1:-1], 2) if not layers), None)
        return self.broken(
            *((getattr(self, name), name, f"cannot be combined with PIPELINE_LAYERS={self.pipeline_layers}",
               f"set {name.upper()}=0, or omit PIPELINE_LAYERS")
              for name in ("first_stage_layers", "last_stage_layers")),
            (len(stages) != self.pp, "pipeline_layers", f"has {len(stages)} stages, but PP={self.pp}",
             f"list {self.pp} stages, or set PP={len(stages)}"),
            (sum(stages) != num_layers, "pipeline_layers",
             f"adds up to {sum(stages)} layers, but NUM_LAYERS={num_layers}",
             f"distribute {num_layers} layers"),
            (empty, "pipeline_layers",
             "every stage except the first (embedding) and the last (output layer) must have a layer",
             f"assign a layer to stage {empty} of {len(stages)}, or remove the stage"),
        )  # fmt: skip

    def _given_end_problems(self) -> Iterator[str]:
        """Checks FIRST_STAGE_LAYERS and LAST_STAGE_LAYERS.

        The remaining layers must divide equally among the other stages, and no stage may be empty.
        """
        given = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(self, name)]
        layers = [getattr(self, name) for name in given]
        whole, left, others = self.num_layers, self.num_layers - sum(layers), self.pp - len(given)
        if self.pp == 1:
            fix = f"set PP to at least 2, or {given[0].upper()}=0"
            yield self.problem(given[0], "requires several pipeline stages, but PP=1", fix)
        elif others == 0 and left:
            rule = f"FIRST_STAGE_LAYERS + LAST_STAGE_LAYERS = {_plus(layers)} is not NUM_LAYERS={whole}"
            yield self.problem(given[0], rule, "set one of the two to 0; its stage gets the remaining layers")
        elif others and (left < others or left % others):
            rule = f"leaves {left} of NUM_LAYERS={whole} layers, which cannot be divided equally among the"
            rule += f" other {others} of PP={self.pp} stages"
            fix = f"set {' and '.join(map(str.upper, given))} to leave a multiple of {others}"
            yield self.problem(given[0], rule, f"{fix}, or set PIPELINE_LAYERS")

    def _chunk_problems(self, vpp: int) -> Iterator[str]:
        """Checks that all model chunks of a stage have equally many layers and that no chunk is empty."""
        if self.pp == 1:
            fix = "set VPP=none, or set PP to at least 2"
            yield self.problem("vpp", "requires several pipeline stages, but PP=1", fix)
            return
        if vpp == 1:
            rule = "must be at least 2, as one model chunk per rank cannot be interleaved"
            yield self.problem("vpp", rule, "set VPP to none or to at least 2")
        if self.pipeline_layers or self.first_stage_layers or self.last_stage_layers:
            odd = next((layers for layers in self.stage_layers if layers % vpp), None)
            if odd is not None:
                over = f"NUM_LAYERS={self.num_layers} is split into {_plus(self.stage_layers)}"
                fix = "set VPP=none, or assign a multiple of VPP layers to every stage"
                yield self.problem("vpp", f"must divide the {odd} layers of a stage ({over})", fix)
            if 0 in self.stage_layers:
                fix = "set VPP=none, or assign layers to every stage of PIPELINE_LAYERS"
                yield self.problem("vpp", "requires that no pipeline stage is empty", fix)
        elif self.num_layers % self.pp == 0:
            yield from self.must_divide("vpp", "NUM_LAYERS/PP", self.num_layers // self.pp)


def _plus(numbers: list[int]) -> str:
    return shown("+".join(map(str, numbers)))
