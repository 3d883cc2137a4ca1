"""All settings of a training run.

Precedence: default < preset < settings file < environment < command line. For example, the setting
`num_experts` has the environment variable NUM_EXPERTS and the flag `--num-experts`. Each section has a file
in config/sections/ with its settings, derived values and rules. This module does not import torch or
megatron, so that `--help`, `--dry-run` and the planner are fast.
"""

from collections.abc import Iterator
from itertools import pairwise

from moe_exp.config.sections.reliability import ReliabilitySettings
from moe_exp.config.traits import traits


class Config(ReliabilitySettings):
    """All settings of a training run. `--help` and docs/settings.md list the fields in the class's order."""

    @property
    def has_static_rows(self) -> bool:
        """Whether every rank knows in advance how many rows its experts get."""
        return not self.use_moe or (self.moe_type == "moe" and self.pad_to_capacity)

    @property
    def graph_problem(self) -> str:
        """A setting that rules out a CUDA graph per micro-batch, and why; empty if a graph is possible."""
        exchanges = self.use_moe and self.ep * self.etp > 1
        by_router = self.router_top_p < 1 or self.null_experts or self.token_rounding
        drops_slots = self.use_moe and (by_router or self.moe_type == "moe")
        random = {
            "DROPOUT": self.dropout, "ATTENTION_DROPOUT": self.attention_dropout,
            "ROUTER_JITTER": self.use_moe and self.router_jitter,
            "FORCE_ROUTING=zipf": self.use_moe and self.force_routing == "zipf",
        }  # fmt: skip
        rules = {
            f"PP={self.pp}: pipeline stages exchange tensors in each micro-batch": self.pp > 1,
            f"TP={self.tp}: tensor-parallel ranks exchange tensors in each layer": self.tp > 1,
            f"CP={self.cp}: context-parallel ranks exchange tensors in each layer": self.cp > 1,
            f"EP={self.ep} without PAD_TO_CAPACITY: the host must know how many rows arrive":
            exchanges and not self.has_static_rows,
            "DOCUMENT_MASK: attention runs once per document": self.document_mask,
            "AUX_LOSS_TYPE=sinkhorn: the host tests for convergence":
            self.use_moe and self.aux_loss_type == "sinkhorn",
            "ROUTER_SCORE=relu: the number of rows varies": self.use_moe and self.router_score == "relu",
            "ROUTER_TOP_P, NULL_EXPERTS, TOKEN_ROUNDING or MOE_TYPE=moe without PAD_TO_CAPACITY: the host "
            "must know how many slots are used":
            drops_slots and not self.has_static_rows,
            "DOCUMENT_PACKING=best_fit: the host must know how many tokens are padding":
            self.document_packing == "best_fit",
            **{f"{name}: the random state is kept on the host": value for name, value in random.items()},
            f"RECOMPUTE={self.recompute}: Megatron's recomputation reads the random state on the host":
            self.recompute == "full" or "moe" in self.recomputed,
            "RECOMPUTE_MODULES with mla_up_proj, shared_expert or core_attn: Megatron's recomputation reads "
            "the random state on the host": self.recomputed & {"mla_up_proj", "shared_expert", "core_attn"},
            "OFFLOAD_MODULES: copies to the host run on another stream": self.offloaded,
            "LOG_TIMERS: the timers run on the host": self.log_timers,
            "DTYPE=fp16: the loss scale changes": self.dtype == "fp16",
            f"FP8={self.fp8}: not supported": self.fp8 != "none",
        }  # fmt: skip
        return next((reason for reason, applies in rules.items() if applies), "")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.cuda_graph == "on" and self.graph_problem:
            fix = "change that setting, or set CUDA_GRAPH=auto"
            yield self.problem("cuda_graph", f"is not possible with {self.graph_problem}", fix)


TRAITS = {name: traits(Config, name) for name in Config.model_fields}
# First setting of each section of `--help` and docs/settings.md, in the order of the fields.
SECTIONS = {
    "Launch": "preset",
    "Model": "num_layers",
    "Mixture of experts": "use_moe",
    "Parallelism": "tp",
    "Optimization": "lr",
    "Data": "train_data",
    "Input and output": "run_dir",
    "Reliability and debugging": "fingerprints",
}


def names_by_section() -> dict[str, list[str]]:
    """Returns the names of the settings in each section, in the order of the fields."""
    names = list(Config.model_fields)
    bounds = pairwise([*map(names.index, SECTIONS.values()), len(names)])
    return {heading: names[first:end] for heading, (first, end) in zip(SECTIONS, bounds, strict=True)}
