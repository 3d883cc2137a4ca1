"""Tables of named choices, one table per kind of choice, with the properties of each choice.

The tables are the source for settings, help texts, docs/settings.md, checks, the planner and the layers. The
layers implement the choices. This module does not import torch.
"""

import importlib.util
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

RECOMPUTED_IN_MOE = ("moe_act", "router", "shared_expert", "experts")
RECOMPUTED = ("norm", "mla_up_proj", "core_attn", *RECOMPUTED_IN_MOE)  # choices of RECOMPUTE_MODULES
OFFLOADED = ("attention", "mlp", "experts", "shared_expert")  # choices of OFFLOAD_MODULES


@dataclass(frozen=True)
class Score:
    """A score function of the router."""

    normalizes: bool = False  # with ROUTER_NORMALIZE=auto and TOPK > 1, weights are divided by their sum
    per_expert: bool = True  # an expert's score depends on its own logit only, not on all logits
    # A token uses every expert with a positive score. TOPK is then a target for their mean number, which the
    # loss `l1` maintains, and routing has a slot for every expert.
    uses_positive: bool = False


SCORES = {
    "softmax": Score(per_expert=False),
    "sigmoid": Score(normalizes=True),
    "sqrtsoftplus": Score(normalizes=True),
    "relu": Score(uses_positive=True),
}


@dataclass(frozen=True)
class Loss:
    """A balancing loss."""

    text: str = ""  # for the help
    needs_scores: bool = False  # uses the scores of all experts, not only their sums
    state: str = ""  # router buffer with statistics of earlier global batches
    state_field: str = ""  # the RouterConfig value that creates this buffer
    scales_coeff: bool = False  # the buffer is a factor on the loss's coefficient


LOSSES = {
    "aux_loss": Loss("over a micro-batch, across all ranks that share it"),
    "seq_aux_loss": Loss("over each sequence", needs_scores=True),
    "global_aux_loss": Loss(
        "over the global batch", state="global_tokens_per_expert", state_field="global_fractions=True"
    ),
    "l1": Loss(
        "for ROUTER_SCORE=relu; the loss weight adapts until tokens use TOPK experts on average",
        needs_scores=True,
        state="l1_factor",
        state_field="score=relu",
        scales_coeff=True,
    ),
    "entropy": Loss("of the scores, for ROUTER_TOP_P", needs_scores=True),
}
# Suffixes of these buffers' names. A checkpoint may lack them: other losses and inference do not need them.
LOSS_STATE = tuple(f".router.{loss.state}" for loss in LOSSES.values() if loss.state)
NO_LOSS = ("none", "sinkhorn")


@dataclass(frozen=True)
class ExpertBackend:
    """Implementation of the expert computation."""

    modules: tuple[str, ...] = ()  # modules that it imports
    install: str = ""  # how to install them
    dtypes: tuple[str, ...] = ()  # supported values of DTYPE; empty: all
    row_bytes: int = 1  # the size of an input row must be a multiple of this

    def missing(self) -> list[str]:
        """Returns the modules in `modules` that are not installed."""
        return [module for module in self.modules if importlib.util.find_spec(module) is None]


_PIP = "pip install --no-build-isolation"
EXPERT_BACKENDS = {
    "triton": ExpertBackend(),
    "loop": ExpertBackend(),
    # grouped_mm and the CUTLASS kernels load rows in units of 16 bytes.
    "torch": ExpertBackend(row_bytes=16),
    "grouped_gemm": ExpertBackend(("grouped_gemm",), f"{_PIP} nv-grouped-gemm", ("bf16",), 16),
    "te": ExpertBackend(
        ("transformer_engine",), f"{_PIP} transformer-engine[pytorch]", ("bf16", "fp16", "fp32")
    ),
    "megablocks": ExpertBackend(("megablocks", "grouped_gemm"), f"{_PIP} megablocks[gg]", ("bf16",), 16),
}


# Token dispatchers, which send tokens to the ranks of their experts.
DISPATCHERS = ["alltoall", "allgather", "deepep", "local"]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer."""

    text: str  # for the help
    moments: str  # optimizers with the same value can load each other's moments
    is_sharded: bool = True  # can update arbitrary ranges of a tensor, so DISTRIBUTED_OPTIMIZER can split it
    has_bf16: bool = False  # supports moments in bf16


OPTIMIZERS = {
    "adam": Optimizer("AdamW", "adam", has_bf16=True),
    "adam8bit": Optimizer("AdamW with 8-bit moments (bitsandbytes)", "adam"),
    "sgd": Optimizer("", "sgd"),
    "muon": Optimizer("Muon for matrices, AdamW for other weights", "muon", is_sharded=False),
}


# The shape of each decay: maps the elapsed fraction of its length to the remaining fraction of the drop.
# Same formulas as Megatron's lr_wsd_decay_style; `exponential` is 2 * 0.5^x - 1 so that it ends at 0.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (math.cos(math.pi * share) + 1),
    "exponential": lambda share: 2 * 0.5**share - 1,
    "minus_sqrt": lambda share: 1 - math.sqrt(share),
}
# Parts of a composed schedule: decays, and shapes without a target value.
PIECES = (*DECAYS, "constant", "inverse-square-root", "power")


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule; config/sections/learning.py splits it into pieces."""

    has_final_decay: bool  # its last WSD_DECAY_ITERS iterations follow WSD_DECAY_STYLE
    needs_it: bool = True  # WSD_DECAY_ITERS must not be 0
    ends_at_lr: bool = False  # never decays


SCHEDULES = {
    "cosine": Schedule(has_final_decay=False),
    "linear": Schedule(has_final_decay=False),
    "constant": Schedule(has_final_decay=False, ends_at_lr=True),
    "inverse-square-root": Schedule(has_final_decay=False),
    "WSD": Schedule(has_final_decay=True),
    "WSD-S": Schedule(has_final_decay=True),
    "power": Schedule(has_final_decay=True, needs_it=False),
}


LOSS_CHUNK_TOKENS = 1024  # tokens whose logits exist at a time with CROSS_ENTROPY=linear


@dataclass(frozen=True)
class MupRule:
    """A published muP rule for MoE layers (see parameter_groups.py)."""

    text: str  # for the help
    # Factor on the initial weights of the experts' second projection. Arguments: hidden size, expert width
    # and top-k, each relative to the base model.
    expert_down: Callable[[float, float, float], float]


MUP_RULES = {
    "fan_in": MupRule("arXiv:2508.09752", lambda n, m, k: m**-0.5),
    "mean_field": MupRule("arXiv:2601.20205", lambda n, m, k: n**0.5 / m),
    "active_width": MupRule("arXiv:2605.23893", lambda n, m, k: (k / m) ** 0.5),
}


@dataclass(frozen=True)
class OneOf:
    """Validates that a value is in `others` or in `table`, including keys added to the table later.

    If a value is in neither, `read` returns the canonical text of the value, or None if the value is invalid.
    """

    table: Collection[str]
    others: tuple[str, ...] = ()
    read: Callable[[str], str | None] = lambda value: None

    @property
    def names(self) -> list[str]:
        return [*self.others, *self.table]

    def __call__(self, value: Any) -> Any:
        if value not in self.names:
            if (text := self.read(str(value))) is not None:
                return text
            *most, last = map(repr, self.names)
            expected = f"{', '.join(most)} or {last}" if most else last
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value


def one_of(
    table: Collection[str], *others: str, read: Callable[[str], str | None] = lambda value: None
) -> BeforeValidator:
    """Validator for `Annotated[str, one_of(TABLE, "auto")]`; see `OneOf`."""
    return BeforeValidator(OneOf(table, others, read))


def choices_of(field: Any) -> list[str]:
    """Names that a pydantic field accepts; empty if the field has no named choices."""
    for one in field.metadata:
        if isinstance(one, BeforeValidator) and isinstance(one.func, OneOf):
            return one.func.names
    return []
